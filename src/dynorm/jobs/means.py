"""Fold the means of LayerNorms into the weights, before point-wise layers replace them.

A point-wise layer has one centre for all tokens, but each token has its own mean. If all modules that
write into a residual stream are linear, the mean can be taken out of these; if not, out of those that
read the norms. Both are exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from dynorm.batches import Batch
from dynorm.errors import DataError, ModelError
from dynorm.find import find_norms
from dynorm.fold import fold_
from dynorm.fold.report import FOLDED, REFUSED
from dynorm.replace.convert import Globs
from dynorm.table import PlainRecord


@dataclass(frozen=True)
class FoldedMeans(PlainRecord):
    """The means that went into the weights before a conversion.

    Args:
        folded: the number of LayerNorms whose input has no mean any more, which were then RMSNorms.
        in_readers: the number of others whose readers subtract the mean.
        layernorms: the number of all LayerNorms.
        refused: why the rest stayed, each reason once.
        untied: the parameters that were tied to others before, such as a head's.
        added_biases: the modules that got a bias.

    Example:
        >>> print(FoldedMeans(10, 2, 12, (), ("lm_head.weight",)))
        the means of 12 of 12 LayerNorms were folded into the weights, and lm_head.weight untied
    """

    folded: int
    in_readers: int
    layernorms: int
    refused: tuple[str, ...]
    untied: tuple[str, ...] = ()
    added_biases: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as a sentence."""
        text = (
            f"the means of {self.folded + self.in_readers} of {self.layernorms} LayerNorms were "
            "folded into the weights"
        )
        if self.untied:
            text += f", and {', '.join(self.untied)} untied"
        if self.refused:
            text += f"; the others were refused: {'; '.join(self.refused)}"
        return text


def fold_means_(
    model: nn.Module, batch: Batch, only: Globs = None, skip: Globs = None
) -> FoldedMeans | None:
    """Fold the means of the selected LayerNorms, in place; return None for a model without any.

    The outputs stay the same. A model that cannot be folded is left as it is, with the reason in the
    result: it can be converted all the same.
    """
    sites = find_norms(model, batch)
    layernorms = sum(site.kind == "layernorm" and site.refused is None for site in sites)
    if not layernorms:
        return None
    try:
        with _in_eval_mode(model):
            return _folded(model, batch, only, skip, layernorms)
    except (ModelError, DataError) as error:
        return FoldedMeans(0, 0, layernorms, (str(error),))


def _folded(
    model: nn.Module, batch: Batch, only: Globs, skip: Globs, layernorms: int
) -> FoldedMeans:
    written = fold_(model, batch, affine=False, untie=True, only=only, skip=skip)
    paths = [site.path for site in written.sites if site.center.state == REFUSED]
    if not paths:
        return FoldedMeans(written.count("center"), 0, layernorms, (), tuple(written.untied))
    # Their weights and biases go into the readers too, or the centring would not be between them
    # and the norm.
    read = fold_(
        model,
        batch,
        center=False,
        center_readers=True,
        add_bias=True,
        untie=True,
        only=paths,
    )
    in_readers = 0
    reasons: dict[str, None] = {}
    for site in read.sites:
        if site.center.state == FOLDED:
            in_readers += 1
        elif site.affine.reason is not None:
            reasons[site.affine.reason] = None
    return FoldedMeans(
        written.count("center"),
        in_readers,
        layernorms,
        tuple(reasons),
        tuple(read.untied),
        tuple(read.added_biases),
    )


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and afterwards its modules back in theirs."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
