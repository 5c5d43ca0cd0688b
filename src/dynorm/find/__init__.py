"""Find the norms of a model by their behaviour.

``probe.py`` watches a run and decides which modules are norms; ``recover.py`` finds the formula of
each.
"""

from dynorm.find.probe import find_norms

__all__ = ["find_norms"]
