"""Set the constants of point-wise layers from real activations."""

from dynorm.fit.calibrate import calibrate_
from dynorm.fit.initialize import init_from_batch_
from dynorm.fit.monitor import Monitor
from dynorm.fit.refine import refine_

__all__ = ["Monitor", "calibrate_", "init_from_batch_", "refine_"]
