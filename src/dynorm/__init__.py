"""Normalization without statistics: point-wise counterparts of LayerNorm and RMSNorm for PyTorch."""

from dynorm import functional, theory
from dynorm.errors import ArgumentError, DataError, DynormError, ModelError, StorageError
from dynorm.hub import load, save
from dynorm.layers import ELN, Derf, DyISRU, DyT, LinearControl, PointwiseNorm, param_groups
from dynorm.surgery import (
    CalibrationReport,
    CalibrationWarning,
    ConversionReport,
    InspectedSite,
    InspectionReport,
    ModelReport,
    NormSite,
    OutputReport,
    RefinementReport,
    SiteReport,
    calibrate_,
    convert_,
    find_norms,
    inspect_norms,
    measure,
    refine_,
    restore_,
)

__version__ = "0.1.0"

__all__ = [
    "ELN",
    "ArgumentError",
    "CalibrationReport",
    "CalibrationWarning",
    "ConversionReport",
    "DataError",
    "Derf",
    "DyISRU",
    "DyT",
    "DynormError",
    "InspectedSite",
    "InspectionReport",
    "LinearControl",
    "ModelError",
    "ModelReport",
    "NormSite",
    "OutputReport",
    "PointwiseNorm",
    "RefinementReport",
    "SiteReport",
    "StorageError",
    "calibrate_",
    "convert_",
    "find_norms",
    "functional",
    "inspect_norms",
    "load",
    "measure",
    "param_groups",
    "refine_",
    "restore_",
    "save",
    "theory",
]
