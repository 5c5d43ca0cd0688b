"""Saving and loading: directories that plain torch, or transformers, reads again."""

from dynorm.hub._api import load, register_with_transformers, save

__all__ = ["load", "save"]

register_with_transformers()
