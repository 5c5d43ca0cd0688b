"""Normalization without statistics: point-wise counterparts of LayerNorm and RMSNorm for PyTorch.

Where things are: a norm is recognised in ``find/probe.py``, by the formula in ``find/recover.py``,
and replaced in ``replace/convert.py``; calibration is ``fit/calibrate.py``; a reason not to fold is
raised where it is found, in ``fold/``; a new function begins as a row of
``family.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynorm import errors, functional, layers, theory, version
from dynorm.after_import import call_after_import
from dynorm.errors import DynormError
from dynorm.layers import Derf, DyISRU, DyT, LinearControl, param_groups

if TYPE_CHECKING:
    from dynorm import report
    from dynorm.find import find_norms
    from dynorm.fit import calibrate_, init_as_published_, init_from_batch_, refine_
    from dynorm.fold import fold_
    from dynorm.hub import load, save
    from dynorm.jobs.convert_model import convert_model
    from dynorm.kernels.fused import compile_options
    from dynorm.recipe import Recipe
    from dynorm.replace import convert_, restore_
    from dynorm.report import inspect_norms, measure
    from dynorm.train import (
        AnnealSchedule,
        AnnealStart,
        Monitor,
        distill_,
        finalize_,
        set_anneal_,
    )

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
    "compile_options",
    "convert_",
    "convert_model",
    "distill_",
    "errors",
    "finalize_",
    "find_norms",
    "fold_",
    "functional",
    "init_as_published_",
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

# A program that only trains with the layers uses none of these: imported at their first use.
_PLACES = {
    "AnnealSchedule": "train",
    "AnnealStart": "train",
    "Monitor": "train",
    "Recipe": "recipe",
    "calibrate_": "fit",
    "compile_options": "kernels.fused",
    "convert_": "replace",
    "convert_model": "jobs.convert_model",
    "distill_": "train",
    "finalize_": "train",
    "find_norms": "find",
    "fold_": "fold",
    "init_as_published_": "fit",
    "init_from_batch_": "fit",
    "inspect_norms": "report",
    "load": "hub",
    "measure": "report",
    "refine_": "fit",
    "restore_": "replace",
    "save": "hub",
    "set_anneal_": "train",
}
_ROOMS = {place.split(".")[0] for place in _PLACES.values()}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a room, or the place of a name, at its first use."""
    if name in _ROOMS:
        return import_module(f"dynorm.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"dynorm.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


# `import dynorm` must not import transformers, but its from_pretrained must know converted models
# in either order of the two imports, and transformers looks for no plugins. A program may read the
# quantization_config of a folder before it imports any model.
_HOOKS = {
    "transformers.quantizers.auto": "dynorm.hub.api:register_quantizer",
    "transformers.modeling_utils": "dynorm.hub.api:register_with_transformers",
}
for _module, _function in _HOOKS.items():
    call_after_import(_module, _function)
