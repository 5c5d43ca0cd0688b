"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order, ``rewrites.py`` decides each of them, and ``apply.py`` puts the
result in. ``refusals.py`` says what is refused; ``rewrites.py`` adds what it cannot follow,
``operators.py`` what is not linear.
"""

from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "fold_"]
