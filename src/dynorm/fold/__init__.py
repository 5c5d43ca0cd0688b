"""Fold the linear parts of norms into their neighbours, exactly, on the graph of any model.

``fold.py`` has the steps in order. ``trace.py`` traces the model into a graph (``graph.py``),
``channels.py`` follows the channels of a value through it, ``operators.py`` recognises linear
operators, and ``stream.py`` collects the readers and streams around the norms. ``plan.py`` decides
where each part of each norm (``site.py``) goes and computes the new weights. ``apply.py`` puts the
plan into the model, and ``check.py`` compares the outputs. ``conversion.py`` and
``stock.py`` are uses of a fold, and ``attribution.py`` a use of what it leaves.
"""

from dynorm.fold.attribution import attribution
from dynorm.fold.conversion import fold_lines_, fold_means_
from dynorm.fold.fold import fold_
from dynorm.fold.report import FoldedSite, FoldReport, Rewrite

__all__ = [
    "FoldReport",
    "FoldedSite",
    "Rewrite",
    "attribution",
    "fold_",
    "fold_lines_",
    "fold_means_",
]
