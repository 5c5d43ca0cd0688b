"""Find the norms of a model by their behaviour."""

from dynorm.find.probe import find_norms

__all__ = ["find_norms"]
