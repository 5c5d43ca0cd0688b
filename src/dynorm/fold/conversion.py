"""The folds that are part of a conversion: of means before it, and of lines after it.

A point-wise layer does not see the mean of its token. Where modules that
write into a residual stream are linear, the mean can be taken out of them, exactly.
"""

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import nn

from dynorm.batches import Batch, arguments
from dynorm.dtypes import HALVES
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.fold.fold import folded, require_foldable
from dynorm.fold.plan import Options
from dynorm.fold.report import FoldReport
from dynorm.guard import in_eval_mode
from dynorm.site import NormSite

# The relative error of the outputs that a fold may cause in float32. Large means and slopes can make
# rounding change them by more than fold_ allows; the conversion changes them far more.
_TOLERANCE = 1e-3
# This number of other batches is compared too, evenly spaced.
_COMPARED = 4


def fold_means_(
    model: nn.Module,
    sites: Sequence[NormSite],
    paths: Collection[str],
    batch: Batch,
    others: Sequence[Batch] = (),
) -> FoldReport | None:
    """Fold the means of the LayerNorms at some paths, in place.

    The outputs stay the same. The fold sees the operators that run on ``batch``. A few of the
    ``others`` are compared too: a branch that only they take may read a stream whose means are gone.

    Returns:
        The report, whose ``norms`` are those of the model now. None if none of the norms is a
        LayerNorm, or if the model cannot be folded: it is then as it was, with a warning.
    """
    layernorms = []
    for site in sites:
        if site.kind == "layernorm" and site.refused is None and site.path in paths:
            layernorms.append(site.path)
    if not layernorms:
        return None
    step = max(1, len(others) // _COMPARED)
    batches = [batch, *others[::step][:_COMPARED]]
    options = Options(center=True, untie=True)
    try:
        return _folded(model, batches, sites, layernorms, options)
    except (ModelError, DataError) as error:
        warnings.warn(
            "the means of LayerNorms must be foldable, or the layers in their place lose more, but "
            f"{error}. Pass fold_means=False to leave them",
            CalibrationWarning,
            stacklevel=2,
        )
        return None


def fold_lines_(model: nn.Module, batch: Batch) -> FoldReport:
    """Fold the lines of a model away, in place; the report has those that must stay.

    Other layers lose their weights and biases, exactly.
    """
    options = Options(affine=True, add_bias=True, untie=True)
    # The norms that are left are traced as they are.
    return _folded(model, [batch], (), None, options)


def _folded(
    model: nn.Module,
    batches: Sequence[Batch],
    sites: Sequence[NormSite],
    paths: Collection[str] | None,
    options: Options,
) -> FoldReport:
    examples = [arguments(model, batch) for batch in batches]
    dtypes = {parameter.dtype for parameter in model.parameters()}
    tolerance = None
    if torch.float32 in dtypes and dtypes.isdisjoint(HALVES):
        tolerance = _TOLERANCE
    with in_eval_mode(model):
        require_foldable(model)
        return folded(model, examples, sites, paths, options, tolerance)
