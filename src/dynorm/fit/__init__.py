"""Set the constants of point-wise layers from real activations."""

from dynorm.fit.calibrate import CalibrationReport, CalibrationWarning, calibrate_
from dynorm.fit.initialize import InitializationReport, init_from_batch_
from dynorm.fit.monitor import Monitor
from dynorm.fit.refine import RefinementReport, refine_

__all__ = [
    "CalibrationReport",
    "CalibrationWarning",
    "InitializationReport",
    "Monitor",
    "RefinementReport",
    "calibrate_",
    "init_from_batch_",
    "refine_",
]
