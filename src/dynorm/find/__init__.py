"""Find the norms of a model by their behaviour.

``watch.py`` observes the modules in a run, ``probe.py`` decides which of them are norms,
``recover.py`` finds the formula of each, and ``trial.py`` shows whether the model only calls them.
"""

from dynorm.find.probe import find_norms

__all__ = ["find_norms"]
