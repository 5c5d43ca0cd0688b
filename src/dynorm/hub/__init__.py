"""Save and load models: directories that plain torch, or transformers, reads again."""

from dynorm.hub.api import load, register_with_transformers, save

__all__ = ["load", "save"]

register_with_transformers()
