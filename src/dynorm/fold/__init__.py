"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order. What is refused, and with which words, stands in ``refusals.py``.
"""

from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "fold_"]
