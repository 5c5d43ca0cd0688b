"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order. ``refusals.py`` says what is refused; ``affine.py``, ``stream.py`` and
``rescale.py``, one for each direction from a norm and one for both, add the operators that they cannot follow.
"""

from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite
from dynorm.fold.stock import as_stock

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "as_stock", "fold_"]
