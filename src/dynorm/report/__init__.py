"""Reports on a model's norms: the loss from replacing them, and how functions describe them.

The records that the other verbs return are here too, except those of ``dynorm.train``.
"""

from dynorm.fit.calibrate import CalibrationReport, SiteCalibration
from dynorm.fit.initialize import InitializationReport
from dynorm.fit.refine import RefinementReport
from dynorm.fold import FoldedSite, FoldReport
from dynorm.replace import ConversionReport
from dynorm.report.conversion import measure
from dynorm.report.inspection import inspect_norms
from dynorm.report.inspection_report import InspectedSite, InspectionReport
from dynorm.report.model_report import ModelReport, SiteReport
from dynorm.report.output import OutputReport

__all__ = [
    "CalibrationReport",
    "ConversionReport",
    "FoldReport",
    "FoldedSite",
    "InitializationReport",
    "InspectedSite",
    "InspectionReport",
    "ModelReport",
    "OutputReport",
    "RefinementReport",
    "SiteCalibration",
    "SiteReport",
    "inspect_norms",
    "measure",
]
