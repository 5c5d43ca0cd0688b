"""What is done to a model: find its norms, replace them, set their constants, report, undo."""

from dynorm.surgery.calibrate import CalibrationReport, CalibrationWarning, calibrate_
from dynorm.surgery.convert import ConversionReport, convert_, restore_
from dynorm.surgery.probe import find_norms
from dynorm.surgery.refine import RefinementReport, refine_
from dynorm.surgery.report import (
    InspectedSite,
    InspectionReport,
    ModelReport,
    OutputReport,
    SiteReport,
    inspect_norms,
    measure,
)
from dynorm.surgery.sites import NormSite

__all__ = [
    "CalibrationReport",
    "CalibrationWarning",
    "ConversionReport",
    "InspectedSite",
    "InspectionReport",
    "ModelReport",
    "NormSite",
    "OutputReport",
    "RefinementReport",
    "SiteReport",
    "calibrate_",
    "convert_",
    "find_norms",
    "inspect_norms",
    "measure",
    "refine_",
    "restore_",
]
