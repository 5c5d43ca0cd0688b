"""What is done to a model: find its norms, replace them, set their constants, report, undo."""

from dynorm.surgery.calibrate import CalibrationReport, CalibrationWarning, calibrate_
from dynorm.surgery.convert import ConversionReport, convert_, restore_
from dynorm.surgery.fold import FoldedSite, FoldReport, fold_
from dynorm.surgery.initialize import InitializationReport, init_from_batch_
from dynorm.surgery.path import PathSchedule, finalize_, set_path_
from dynorm.surgery.path_start import PathStart
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
    "FoldReport",
    "FoldedSite",
    "InitializationReport",
    "InspectedSite",
    "InspectionReport",
    "ModelReport",
    "NormSite",
    "OutputReport",
    "PathSchedule",
    "PathStart",
    "RefinementReport",
    "SiteReport",
    "calibrate_",
    "convert_",
    "finalize_",
    "find_norms",
    "fold_",
    "init_from_batch_",
    "inspect_norms",
    "measure",
    "refine_",
    "restore_",
    "set_path_",
]
