"""Reports on a model's norms: the loss from replacing them, and how functions describe them."""

from dynorm.report.conversion import measure
from dynorm.report.inspection import inspect_norms
from dynorm.report.output import OutputReport
from dynorm.report.records import InspectedSite, InspectionReport, ModelReport, SiteReport

__all__ = [
    "InspectedSite",
    "InspectionReport",
    "ModelReport",
    "OutputReport",
    "SiteReport",
    "inspect_norms",
    "measure",
]
