"""Normalization without statistics: point-wise counterparts of LayerNorm and RMSNorm for PyTorch.

Where things are: a norm is recognised in ``find/probe.py``, by the formula in ``find/recover.py``,
and replaced in ``replace/convert.py``; calibration is ``fit/calibrate.py``; a reason not to fold is
raised where it is found, in ``fold/`` or ``stream/``; a new function begins as a row of
``family.py``.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from dynorm import errors, functional, layers, report, theory, version
from dynorm.errors import DynormError
from dynorm.find import find_norms
from dynorm.fit.calibrate import calibrate_
from dynorm.fit.initialize import init_from_batch_
from dynorm.fit.refine import refine_
from dynorm.fold import fold_
from dynorm.hub import load, save
from dynorm.jobs.convert_model import convert_model
from dynorm.layers import Derf, DyISRU, DyT, LinearControl, param_groups
from dynorm.recipe import Recipe
from dynorm.replace import convert_, restore_
from dynorm.report import inspect_norms, measure
from dynorm.train import AnnealSchedule, AnnealStart, finalize_, set_anneal_
from dynorm.train.distill import distill_
from dynorm.train.monitor import Monitor

__version__ = version.__version__

__all__ = [
    "AnnealSchedule",
    "AnnealStart",
    "Derf",
    "DyISRU",
    "DyT",
    "DynormError",
    "LinearControl",
    "Monitor",
    "Recipe",
    "calibrate_",
    "convert_",
    "convert_model",
    "distill_",
    "errors",
    "finalize_",
    "find_norms",
    "fold_",
    "functional",
    "init_from_batch_",
    "inspect_norms",
    "layers",
    "load",
    "measure",
    "param_groups",
    "refine_",
    "report",
    "restore_",
    "save",
    "set_anneal_",
    "theory",
]


class _FoldRoom(ModuleType):
    """The module ``dynorm.fold``, which says what to call if it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("dynorm.fold is a module: call dynorm.fold_, which changes the model")


sys.modules["dynorm.fold"].__class__ = _FoldRoom


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> NoReturn:
    """Name the verb that changes its model, or the module that has the name."""
    message = f"module {__name__!r} has no attribute {name!r}"
    if f"{name}_" in __all__:
        message += f": call dynorm.{name}_, which changes the model"
    for module in (errors, layers, report):
        if isinstance(getattr(module, name, None), type):
            message += f": it is {module.__name__}.{name}"
    raise AttributeError(message)
