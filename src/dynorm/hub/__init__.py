"""Save and load models, which plain torch or transformers reads again; a decoder's prefix, and its own class."""

from dynorm.fold.stock import as_stock
from dynorm.hub.api import load, save
from dynorm.hub.prefix import with_prefix

__all__ = ["as_stock", "load", "save", "with_prefix"]
