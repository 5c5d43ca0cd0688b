"""Set the constants of layers from real activations: ``calibrate.py`` streams them, ``site_fit.py`` fits one site."""

from dynorm.fit.calibrate import calibrate_
from dynorm.fit.initialize import init_from_batch_
from dynorm.fit.published import init_as_published_
from dynorm.fit.refine import refine_

__all__ = ["calibrate_", "init_as_published_", "init_from_batch_", "refine_"]
