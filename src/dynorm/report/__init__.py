"""Reports on a model's norms: what replacing them lost, and how the functions fit what they do."""

from dynorm.report.inspection import InspectedSite, InspectionReport, inspect_norms
from dynorm.report.measure import ModelReport, SiteReport, measure
from dynorm.report.output import OutputReport

__all__ = [
    "InspectedSite",
    "InspectionReport",
    "ModelReport",
    "OutputReport",
    "SiteReport",
    "inspect_norms",
    "measure",
]
