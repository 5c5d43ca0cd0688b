"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order. ``refusals.py`` says what is refused; ``affine.py`` and ``stream.py``, one for each
direction from a norm, add what they cannot follow, and ``operators.py`` the operators that are not linear.
"""

from dynorm.fold.fold import as_stock, fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "as_stock", "fold_"]
