"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model."""

from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "fold_"]
