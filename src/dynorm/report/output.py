"""How far the outputs of two models lie apart: embeddings, next-token losses, or plain tensors."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div

from dynorm.batches import token_masks
from dynorm.errors import ArgumentError, DataError
from dynorm.outputs import output_tensor, predicted_ids, require_floating, sample_vectors, unpadded

Kind = Literal["encoder", "language", "tensor"]

# All pairs of so many samples are two million, which takes a second; of more samples an even choice
# is taken.
_MOST_PAIRED = 2000
# How far rounding may move the logits before an exchanged token, relative to the largest logit.
_CAUSAL_TOLERANCE = 1e-5


@dataclass(frozen=True)
class OutputReport:
    """The output of a converted model beside the original's; None where a figure does not apply.

    Args:
        kind: "encoder" (samples are compared by their L2-normalized embeddings: the mean over a
            text's tokens, or the class token of an image), "language" (by their logits, and as
            next-token predictors) or "tensor" (by their flattened outputs, padding left out).
        samples: how many were compared.
        cosine_mean: mean cosine of a sample's two outputs.
        cosine_min: the worst.
        cosine_p05: the 5th percentile.
        cosine_median: the median.
        spearman: rank correlation of the similarities of all pairs of samples, of at most 2,000
            samples.
        tokens: how many tokens were predicted.
        loss_original: mean next-token cross-entropy of the original, in nats.
        loss_now: the same of the converted model.
        loss_difference: the latter less the former.
        kl: mean Kullback-Leibler divergence of the converted model's prediction from the
            original's, in nats per token.
        accuracy_original: how often the original's likeliest next token is the right one.
        accuracy_now: the same of the converted model.
        agreement: how often both have the same likeliest token, or class.
        error: of a "tensor", the distance to the original's over their spread; 1 is as bad as a
            constant.
        worst: the place of the sample with the least cosine, counted from 0; samples of padding
            alone do not count.
        neighbours: how often a sample's nearest neighbour, among 2,000 at most, is the same in both
            models.
    """

    kind: Kind
    samples: int
    cosine_mean: float | None = None
    cosine_min: float | None = None
    cosine_p05: float | None = None
    cosine_median: float | None = None
    spearman: float | None = None
    tokens: int | None = None
    loss_original: float | None = None
    loss_now: float | None = None
    loss_difference: float | None = None
    kl: float | None = None
    accuracy_original: float | None = None
    accuracy_now: float | None = None
    agreement: float | None = None
    error: float | None = None
    worst: int | None = None
    neighbours: float | None = None


class OutputComparison:
    """Compares two models' outputs batch by batch; of an encoder, the N x D embeddings are kept.

    ``pick`` finds the tensor to compare; None takes that of :func:`output_tensor`.
    """

    def __init__(self, pick: Callable[[Any], Tensor] | None = None) -> None:
        self._named_tensor = (
            output_tensor
            if pick is None
            else lambda output, _: (None, require_floating(pick(output)))
        )
        self.kind: Kind | None = None
        self.batches = 0
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._cosines: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self._tokens = 0
        self._predicted = torch.zeros(6, dtype=torch.float64, device="cpu")
        self._same_class: list[Tensor] = []

    def add(self, batch: Any, original: Any, now: Any, run_again: Callable[[Any], Any]) -> None:
        """Add a batch with both outputs; the original is run again once, on a batch in which a token was exchanged."""
        (name, first), (_, second) = (
            self._named_tensor(output, batch) for output in (original, now)
        )
        second = second.to(first.device)
        if first.shape != second.shape:
            shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
            raise DataError(
                f"both models must give outputs of one shape, got {shapes}: is `original` the same "
                "model?"
            )
        if self.kind is None:
            self.kind = self._kind(batch, name, first, run_again)
        a, b = (sample_vectors(t, batch, pooled=self.kind == "encoder") for t in (first, second))
        for vectors, which in ((a, "original"), (b, "converted")):
            if not vectors.isfinite().all():
                raise DataError(
                    f"outputs must be finite, but the {which} model gave NaN or inf: look for an "
                    "overflow"
                )
        self.batches += 1
        # The same zeros have no direction, and nothing was lost.
        self._cosines.append(cosine_similarity(a, b, dim=1).where((a != b).any(1), 1.0).cpu())
        if self.kind == "encoder":
            self._kept.append((a.cpu(), b.cpu()))
        elif self.kind == "language":
            self._add_predictions(batch, first, second)
        else:
            if name == "logits" and first.ndim == 2 and first.shape[1] > 1:
                self._same_class.append((first.argmax(1) == second.argmax(1)).cpu())
            a, b = a.cpu().double(), b.cpu().double()
            new = torch.stack([(b - a).square().sum(0), a.sum(0), a.square().sum(0)])
            self._sums[a.shape[1]] = self._sums.get(a.shape[1], 0) + new

    def report(self) -> OutputReport:
        """Return the figures of all batches so far."""
        kind, cosines = self.kind or "tensor", torch.cat(self._cosines).double()
        if not len(cosines):
            return OutputReport(kind, 0)
        low, median = cosines.quantile(
            torch.tensor([0.05, 0.5], dtype=torch.float64, device="cpu")
        ).tolist()
        least, worst = cosines.min(0)
        figures: dict[str, Any] = {"worst": int(worst)}
        if self._kept:
            first, second = (torch.cat(each) for each in zip(*self._kept, strict=True))
            figures["spearman"], figures["neighbours"] = pairs_alike(first, second)
        if self._same_class:
            figures["agreement"] = float(torch.cat(self._same_class).double().mean())
        if len(self._sums) == 1:
            ((distance, y, yy),) = self._sums.values()
            spread = (yy - y * y / len(cosines)).sum()
            if spread > 1e-12 * yy.sum():
                figures["error"] = float((distance.sum() / spread).sqrt())
        if self._tokens:
            names = (
                "loss_original",
                "loss_now",
                "kl",
                "accuracy_original",
                "accuracy_now",
                "agreement",
            )
            figures |= dict(zip(names, (self._predicted / self._tokens).tolist(), strict=True))
            figures |= {
                "tokens": self._tokens,
                "loss_difference": figures["loss_now"] - figures["loss_original"],
            }
        return OutputReport(
            kind, len(cosines), float(cosines.mean()), float(least), low, median, **figures
        )

    def _kind(
        self, batch: Any, name: str | None, tensor: Tensor, run_again: Callable[[Any], Any]
    ) -> Kind:
        if name == "logits":
            ids: Any = batch.get(predicted_ids(batch)) if isinstance(batch, Mapping) else None
            fits = (
                isinstance(ids, Tensor)
                and ids.ndim == 2
                and tensor.ndim == 3
                and ids.shape == tensor.shape[:2]
            )
            return (
                "language" if fits and self._is_causal(batch, ids, tensor, run_again) else "tensor"
            )
        is_masked = any(mask.shape == tensor.shape[:2] for mask in token_masks(batch))
        is_tokens = tensor.ndim == 3 and (name == "last_hidden_state" or is_masked)
        return "encoder" if name == "class_token" or is_tokens else "tensor"

    def _is_causal(
        self, batch: Any, ids: Tensor, logits: Tensor, run_again: Callable[[Any], Any]
    ) -> bool:
        """Return whether another last token leaves the logits before it as they were."""
        place = torch.arange(ids.shape[1], device=ids.device)
        last = (unpadded(logits, batch).to(ids.device) * place).argmax(1, keepdim=True)
        other = torch.where(place == last, (ids + 1) % logits.shape[-1], ids)
        _, again = self._named_tensor(run_again({**batch, predicted_ids(batch): other}), batch)
        before = (unpadded(logits, batch).to(ids.device) & (place < last)).to(logits.device)
        if again.shape != logits.shape or not before.any():
            return False
        change = (again[before] - logits[before]).abs().max()
        return bool(change <= _CAUSAL_TOLERANCE * logits[before].abs().max())

    def _add_predictions(self, batch: Any, original: Tensor, now: Tensor) -> None:
        """Add the loss of each model, the divergence and the hits; sample after sample, for logits are large."""
        valid = unpadded(original, batch)
        ids = batch[predicted_ids(batch)].to(original.device)
        for sample, target, p, q in zip(valid, ids, original, now, strict=True):
            known = sample[:-1] & sample[1:]
            p, q, target = p[:-1][known].float(), q[:-1][known].float(), target[1:][known]
            self._tokens += len(target)
            losses = [cross_entropy(each, target, reduction="sum") for each in (p, q)]
            kl = kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True)
            a, b = p.argmax(-1), q.argmax(-1)
            sums = (*losses, kl, (a == target).sum(), (b == target).sum(), (a == b).sum())
            self._predicted += torch.stack([each.double() for each in sums]).cpu()


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's rank correlation, ties with their average rank; None where one of the two does not vary."""
    if a.numel() != b.numel():
        raise ArgumentError(
            f"a and b must hold equally many values, got {a.numel()} and {b.numel()}"
        )
    if a.numel() < 2:
        return None
    found = float(torch.corrcoef(torch.stack([average_ranks(a), average_ranks(b)]))[0, 1])
    return None if math.isnan(found) else found


def average_ranks(values: Tensor) -> Tensor:
    """Return the ranks of values from 1 on, in float64; equal values share the mean of theirs."""
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return ranks[group.flatten()]


def pairs_alike(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    """Compare the similarities of all pairs of rows in two embeddings (N, D) of the same samples, of length 1.

    Return Spearman's correlation of the similarities, and how often a sample has the same nearest
    neighbour in both, as a share. None for fewer than 3 rows; of more than 2,000, an even choice of
    2,000 is compared.
    """
    if len(a) < 3:
        return None, None
    even = torch.linspace(
        0, len(a) - 1, min(len(a), _MOST_PAIRED), dtype=torch.float64, device="cpu"
    ).long()
    first, second = (each[even].double() @ each[even].double().T for each in (a, b))
    rows, columns = torch.triu_indices(len(even), len(even), 1, device="cpu")
    correlation = spearman(first[rows, columns], second[rows, columns])
    nearest, other = (each.fill_diagonal_(-math.inf).argmax(1) for each in (first, second))
    return correlation, float((nearest == other).double().mean())
