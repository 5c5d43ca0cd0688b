"""Fold the means of LayerNorms into the weights, before point-wise layers replace them.

A point-wise layer has one centre for all tokens, but each token has its own mean. Where modules that
write into a residual stream are linear, the mean can be taken out of them, exactly.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dynorm.batches import Batch, arguments
from dynorm.dtypes import HALVES
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.fold.fold import folded, require_foldable
from dynorm.fold.plan import Options
from dynorm.fold.report import FOLDED, PARTLY
from dynorm.guard import in_eval_mode
from dynorm.plain import PlainRecord
from dynorm.site import NormSite

# The relative error of the outputs that a fold may cause in float32.
_TOLERANCE = 1e-3
# This number of other batches is compared too, evenly spaced.
_COMPARED = 4


@dataclass(frozen=True)
class FoldedMeans(PlainRecord):
    """The means that went into the weights before a conversion.

    Args:
        folded: the number of LayerNorms whose input has no mean any more, which were then RMSNorms.
        partly: the number of others on streams that not only linear modules write into. The mean
            that is left is that of the others.
        layernorms: the number of all LayerNorms that are to be replaced.
        refused: why means stayed, each reason once.
        untied: the parameters that were tied to others before, such as a head's.

    Example:
        >>> print(FoldedMeans(12, 0, 12, (), ("lm_head.weight",)))
        the means of 12 of 12 LayerNorms were folded into the weights, and lm_head.weight untied
    """

    folded: int
    partly: int
    layernorms: int
    refused: tuple[str, ...]
    untied: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as a sentence."""
        text = (
            f"the means of {self.folded} of {self.layernorms} LayerNorms were folded into the "
            "weights"
        )
        if self.untied:
            text += f", and {', '.join(self.untied)} untied"
        return text


def fold_means_(
    model: nn.Module,
    sites: Sequence[NormSite],
    paths: Collection[str],
    batch: Batch,
    others: Sequence[Batch] = (),
) -> tuple[list[NormSite], FoldedMeans | None]:
    """Fold the means of the LayerNorms at some paths, in place; return the norms as they are then.

    The outputs stay the same. A model that cannot be folded is left as it is, with a warning and the
    reason in the record. The record is None if none of the norms is a LayerNorm.

    The fold sees the operators that run on ``batch``. A few of the ``others`` are compared too: a
    branch that only they take may read a stream whose means are gone.
    """
    layernorms = []
    for site in sites:
        if site.kind == "layernorm" and site.refused is None and site.path in paths:
            layernorms.append(site.path)
    if not layernorms:
        return list(sites), None
    step = max(1, len(others) // _COMPARED)
    examples = [arguments(model, one) for one in (batch, *others[::step][:_COMPARED])]
    # In float32 the rounding of large means can change the outputs by more than fold_ allows.
    # The conversion changes them far more.
    dtypes = {parameter.dtype for parameter in model.parameters()}
    tolerance = None
    if torch.float32 in dtypes and dtypes.isdisjoint(HALVES):
        tolerance = _TOLERANCE
    options = Options(affine=False, center=True, center_partly=True, add_bias=False, untie=True)
    try:
        with in_eval_mode(model):
            require_foldable(model)
            report = folded(model, examples, sites, layernorms, options, tolerance)
    except (ModelError, DataError) as error:
        warnings.warn(
            "the means of LayerNorms must be foldable, or the layers in their place lose more, but "
            f"{error}. Pass fold_means=False to leave them",
            CalibrationWarning,
            stacklevel=2,
        )
        return list(sites), FoldedMeans(0, 0, len(layernorms), (str(error),))
    reasons = [site.center.reason for site in report.sites if site.center.reason is not None]
    means = FoldedMeans(
        report.count("center", FOLDED),
        report.count("center", PARTLY),
        len(layernorms),
        tuple(dict.fromkeys(reasons)),
        tuple(report.untied),
    )
    return report.norms, means
