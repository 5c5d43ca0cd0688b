"""Normalization without statistics: point-wise counterparts of LayerNorm and RMSNorm for PyTorch.

Where things are: a norm is recognised in ``find/probe.py`` and replaced in ``replace/convert.py``;
calibration is ``fit/calibrate.py``; a fold is refused in ``fold/refusals.py``; a new function
begins as a row of ``family.py``.
"""

from typing import TYPE_CHECKING

from dynorm import functional, theory
from dynorm.errors import (
    ArgumentError,
    CalibrationWarning,
    DataError,
    DynormError,
    ModelError,
    StorageError,
)
from dynorm.find import find_norms
from dynorm.fit.calibrate import CalibrationReport, calibrate_
from dynorm.fit.initialize import InitializationReport, init_from_batch_
from dynorm.fit.refine import RefinementReport, refine_
from dynorm.fold import FoldedSite, FoldReport, fold_
from dynorm.hub import as_stock, load, save
from dynorm.jobs.convert_model import convert_model
from dynorm.kernels import backend
from dynorm.layers import ELN, Derf, DyISRU, DyT, LinearControl, PointwiseNorm, param_groups
from dynorm.layers.annealed import (
    AnnealedDerf,
    AnnealedDyISRU,
    AnnealedDyT,
    AnnealedLinear,
    AnnealedNorm,
)
from dynorm.replace import ConversionReport, convert_, restore_
from dynorm.report import (
    InspectedSite,
    InspectionReport,
    ModelReport,
    OutputReport,
    SiteReport,
    inspect_norms,
    measure,
)
from dynorm.site import NormSite
from dynorm.train import AnnealSchedule, AnnealStart, finalize_, set_anneal_
from dynorm.train.distill import distill_
from dynorm.train.monitor import Monitor
from dynorm.version import __version__ as __version__

if TYPE_CHECKING:
    from dynorm.train.callbacks import AnnealCallback as AnnealCallback
    from dynorm.train.callbacks import MonitorCallback as MonitorCallback

__all__ = [
    "ELN",
    "AnnealSchedule",
    "AnnealStart",
    "AnnealedDerf",
    "AnnealedDyISRU",
    "AnnealedDyT",
    "AnnealedLinear",
    "AnnealedNorm",
    "ArgumentError",
    "CalibrationReport",
    "CalibrationWarning",
    "ConversionReport",
    "DataError",
    "Derf",
    "DyISRU",
    "DyT",
    "DynormError",
    "FoldReport",
    "FoldedSite",
    "InitializationReport",
    "InspectedSite",
    "InspectionReport",
    "LinearControl",
    "ModelError",
    "ModelReport",
    "Monitor",
    "NormSite",
    "OutputReport",
    "PointwiseNorm",
    "RefinementReport",
    "SiteReport",
    "StorageError",
    "as_stock",
    "backend",
    "calibrate_",
    "convert_",
    "convert_model",
    "distill_",
    "finalize_",
    "find_norms",
    "fold_",
    "functional",
    "init_from_batch_",
    "inspect_norms",
    "load",
    "measure",
    "param_groups",
    "refine_",
    "restore_",
    "save",
    "set_anneal_",
    "theory",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import transformers only when one of its callbacks is used."""
        if name not in ("AnnealCallback", "MonitorCallback"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dynorm.train import callbacks

        return getattr(callbacks, name)
