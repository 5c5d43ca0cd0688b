"""Save and load models: directories that plain torch, or transformers, reads again."""

from wrapt import register_post_import_hook

from dynorm.hub.api import MODELING, load, register_with_transformers, save
from dynorm.hub.stock import as_stock

__all__ = ["as_stock", "load", "save"]

register_post_import_hook(register_with_transformers, MODELING)
