"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order. ``plan.py`` is the analysis: ``rewrites.py``, ``through.py`` and
``redundant.py`` decide where each part of each norm goes, and ``values.py`` computes the new
weights. ``apply.py`` puts the plan into the model, and ``check.py`` compares the outputs. Reasons
for a refusal are in these files and in ``refusals.py``; in ``dynorm.stream``, if they concern the
graph.
"""

from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = ["FoldReport", "FoldedSite", "Rewrite", "fold_"]
