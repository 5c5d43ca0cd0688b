"""Save and load models: directories that plain torch, or transformers, reads again."""

from wrapt import register_post_import_hook

from dynorm.hub.api import MODELING, load, register_with_transformers, save

__all__ = ["load", "save"]

register_post_import_hook(register_with_transformers, MODELING)
