"""Fold the means of LayerNorms into the weights, before point-wise layers replace them.

A point-wise layer has one centre for all tokens, but each token has its own mean. Where modules that
write into a residual stream are linear, the mean can be taken out of them, exactly.
"""

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from dynorm.batches import Batch
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.find import find_norms
from dynorm.fold import fold_
from dynorm.fold.report import FOLDED, PARTLY
from dynorm.guard import in_eval_mode
from dynorm.replace.convert import Globs
from dynorm.table import PlainRecord

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class FoldedMeans(PlainRecord):
    """The means that went into the weights before a conversion.

    Args:
        folded: the number of LayerNorms whose input has no mean any more, which were then RMSNorms.
        partly: the number of others on streams that not only linear modules write into. The mean
            that is left is that of the others.
        layernorms: the number of all LayerNorms.
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
        if self.partly:
            text += f", and those of {self.partly} more partly"
        if self.untied:
            text += f", and {', '.join(self.untied)} untied"
        if self.refused:
            text += f"; some means stay: {'; '.join(self.refused)}"
        return text


def fold_means_(
    model: nn.Module, batch: Batch, only: Globs = None, skip: Globs = None
) -> FoldedMeans | None:
    """Fold the means of the selected LayerNorms, in place; return None for a model without any.

    The outputs stay the same. A model that cannot be folded is left as it is, with a warning and the
    reason in the result: it can be converted all the same.
    """
    sites = find_norms(model, batch)
    layernorms = sum(site.kind == "layernorm" and site.refused is None for site in sites)
    if not layernorms:
        return None
    try:
        with in_eval_mode(model):
            report = fold_(
                model,
                batch,
                affine=False,
                center_partly=True,
                untie=True,
                only=only,
                skip=skip,
                tolerance=_tolerance(model),
            )
    except (ModelError, DataError) as error:
        warnings.warn(
            "the means of LayerNorms must be foldable, or the layers in their place lose more, but "
            f"{error}. Pass fold_means=False to leave them",
            CalibrationWarning,
            stacklevel=2,
        )
        return FoldedMeans(0, 0, layernorms, (str(error),))
    reasons = [site.center.reason for site in report.sites if site.center.reason is not None]
    return FoldedMeans(
        report.count("center", FOLDED),
        report.count("center", PARTLY),
        layernorms,
        tuple(dict.fromkeys(reasons)),
        tuple(report.untied),
    )


def _tolerance(model: nn.Module) -> float | None:
    """Return the relative error to allow; None for that of ``fold_``.

    In float32 means can be so large that rounding alone changes the outputs by more than ``fold_``
    allows. The conversion changes them far more.
    """
    in_float32 = any(parameter.dtype == torch.float32 for parameter in model.parameters())
    return _TOLERANCE if in_float32 else None
