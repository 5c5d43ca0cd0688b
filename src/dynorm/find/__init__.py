"""Find the norms of a model by their behaviour.

``watch.py`` observes the modules in a run, ``probe.py`` decides which of them are norms, and
``recover.py`` finds the formula of each.
"""

from dynorm.find.probe import find_norms

__all__ = ["find_norms"]
