"""How far apart the outputs of two models are: embeddings, next-token losses, or tensors."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from dynorm.batches import Batch, token_masks
from dynorm.errors import DataError
from dynorm.outputs import output_tensor, predicted_ids, require_floating, sample_vectors, unpadded

Kind = Literal["encoder", "language", "tensor"]

# The most samples whose pairs are all compared: two million pairs, which takes a second.
_MOST_PAIRED = 2000
# How far rounding may move the logits before an exchanged token, relative to the largest logit.
_CAUSAL_TOLERANCE = 1e-5
# The figures of next tokens, fields of OutputReport.
_PREDICTED = (
    "loss_original",
    "loss_now",
    "kl",
    "agreement",
)


@dataclass(frozen=True)
class OutputReport:
    """The output of a converted model, compared with the original's.

    A figure that does not apply is None.

    Args:
        kind: "encoder" (samples are compared by their L2-normalized embeddings: the mean over a
            text's tokens, or the class token of an image), "language" (by their logits, and as
            next-token predictors) or "tensor" (by their flattened outputs, padding left out).
        samples: how many were compared.
        cosine_mean: mean cosine of a sample's two outputs.
        cosine_min: the worst.
        spearman: rank correlation of the similarities of all pairs of samples, of at most 2,000
            samples.
        tokens: how many tokens were predicted.
        loss_original: mean next-token cross-entropy of the original, in nats.
        loss_now: the same of the converted model.
        loss_difference: the latter less the former.
        kl: mean Kullback-Leibler divergence of the converted model's prediction from the
            original's, in nats per token.
        kl_worst: the largest divergence of a single token's prediction.
        agreement: how often both have the same likeliest token, or class.
        error: for a "tensor", the distance to the original's outputs over their spread; 1 is as bad
            as a constant.
        worst: the place of the sample with the least cosine, counted from 0; samples that are all
            padding do not count.
        neighbours: how often a sample's nearest neighbour, among 2,000 at most, is the same in both
            models.
    """

    kind: Kind
    samples: int
    cosine_mean: float | None = None
    cosine_min: float | None = None
    spearman: float | None = None
    tokens: int | None = None
    loss_original: float | None = None
    loss_now: float | None = None
    loss_difference: float | None = None
    kl: float | None = None
    kl_worst: float | None = None
    agreement: float | None = None
    error: float | None = None
    worst: int | None = None
    neighbours: float | None = None


class OutputComparison:
    """Compares two models' outputs batch by batch; for an encoder, all embeddings are kept.

    ``pick`` returns the tensor to compare; None takes that of :func:`output_tensor`.
    """

    def __init__(self, pick: Callable[[Any], Tensor] | None = None) -> None:
        self._pick = pick
        self.kind: Kind | None = None
        self.batches = 0
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._cosines: list[Tensor] = []
        # By the length of a sample.
        self._errors: dict[int, _TensorSums] = defaultdict(_TensorSums)
        self._tokens = 0
        # The sums of the figures of _PREDICTED.
        self._predicted = torch.zeros(len(_PREDICTED), dtype=torch.float64, device="cpu")
        self._worst_divergence = 0.0
        self._same_class: list[Tensor] = []

    def add(
        self, batch: Batch, original: object, now: object, run_original: Callable[[Batch], object]
    ) -> None:
        """Add a batch with the outputs of both models.

        At the first batch, ``run_original`` may run the original on a changed copy of it, to see
        whether the model is causal.
        """
        name, before = self._named_tensor(original, batch)
        _, after = self._named_tensor(now, batch)
        after = after.to(before.device)
        if before.shape != after.shape:
            shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
            raise DataError(
                f"both models must give outputs of one shape, got {shapes}: is `original` the same "
                "model?"
            )
        if self.kind is None:
            self.kind = self._kind(batch, name, before, run_original)
        pooled = self.kind == "encoder"
        a = sample_vectors(before, batch, pooled=pooled)
        b = sample_vectors(after, batch, pooled=pooled)
        for vectors, which in ((a, "original"), (b, "converted")):
            if not vectors.isfinite().all():
                raise DataError(
                    f"outputs must be finite, but the {which} model gave NaN or inf: look for an "
                    "overflow"
                )
        self.batches += 1
        # Two equal zero vectors have no direction, but nothing was lost.
        cosines = cosine_similarity(a, b, dim=1).where((a != b).any(1), 1.0)
        self._cosines.append(cosines.cpu())
        if self.kind == "encoder":
            self._kept.append((a.cpu(), b.cpu()))
        elif self.kind == "language":
            self._add_predictions(batch, before, after)
        else:
            if name == "logits" and before.ndim == 2 and before.shape[1] > 1:
                self._same_class.append((before.argmax(1) == after.argmax(1)).cpu())
            self._errors[a.shape[1]].add(a.cpu().double(), b.cpu().double())

    def report(self) -> OutputReport:
        """Return the figures of all batches so far."""
        kind = self.kind or "tensor"
        cosines = torch.cat(self._cosines).double()
        if not len(cosines):
            return OutputReport(kind, 0)
        least, worst = cosines.min(0)
        figures: dict[str, Any] = {"worst": int(worst)}
        if self._kept:
            originals = torch.cat([original for original, _ in self._kept])
            converted = torch.cat([now for _, now in self._kept])
            figures["spearman"], figures["neighbours"] = pairs_alike(originals, converted)
        if self._same_class:
            figures["agreement"] = float(torch.cat(self._same_class).double().mean())
        # Samples of several lengths have no common mean.
        if len(self._errors) == 1:
            (sums,) = self._errors.values()
            figures["error"] = sums.error(len(cosines))
        if self._tokens:
            means = (self._predicted / self._tokens).tolist()
            figures |= dict(zip(_PREDICTED, means, strict=True))
            figures["tokens"] = self._tokens
            figures["kl_worst"] = self._worst_divergence
            figures["loss_difference"] = figures["loss_now"] - figures["loss_original"]
        return OutputReport(kind, len(cosines), float(cosines.mean()), float(least), **figures)

    def _named_tensor(self, output: Any, batch: Batch) -> tuple[str | None, Tensor]:
        if self._pick is None:
            return output_tensor(output, batch)
        return None, require_floating(self._pick(output))

    def _kind(
        self,
        batch: Batch,
        name: str | None,
        tensor: Tensor,
        run_original: Callable[[Batch], object],
    ) -> Kind:
        if name == "logits":
            if not isinstance(batch, Mapping) or tensor.ndim != 3:
                return "tensor"
            ids = batch.get(predicted_ids(batch))
            if not isinstance(ids, Tensor) or ids.shape != tensor.shape[:2]:
                return "tensor"
            is_causal = self._is_causal(batch, ids, tensor, run_original)
            return "language" if is_causal else "tensor"
        is_masked = any(mask.shape == tensor.shape[:2] for mask in token_masks(batch))
        is_tokens = tensor.ndim == 3 and (name == "last_hidden_state" or is_masked)
        return "encoder" if name == "class_token" or is_tokens else "tensor"

    def _is_causal(
        self,
        batch: Mapping[str, object],
        ids: Tensor,
        logits: Tensor,
        run_original: Callable[[Batch], object],
    ) -> bool:
        """Return whether another last token leaves the logits before it as they were."""
        place = torch.arange(ids.shape[1], device=ids.device)
        last = (unpadded(logits, batch).to(ids.device) * place).argmax(1, keepdim=True)
        other = torch.where(place == last, (ids + 1) % logits.shape[-1], ids)
        output = run_original({**batch, predicted_ids(batch): other})
        _, again = self._named_tensor(output, batch)
        before = (unpadded(logits, batch).to(ids.device) & (place < last)).to(logits.device)
        if again.shape != logits.shape or not before.any():
            return False
        change = (again[before] - logits[before]).abs().max()
        return bool(change <= _CAUSAL_TOLERANCE * logits[before].abs().max())

    def _add_predictions(self, batch: Any, original: Tensor, now: Tensor) -> None:
        """Add the figures of the next tokens, one sample at a time because logits are large."""
        valid = unpadded(original, batch)
        ids = batch[predicted_ids(batch)].to(original.device)
        for is_token, tokens, before, after in zip(valid, ids, original, now, strict=True):
            # The places whose next token is a token too.
            is_known = is_token[:-1] & is_token[1:]
            p = before[:-1][is_known].float()
            q = after[:-1][is_known].float()
            target = tokens[1:][is_known]
            self._tokens += len(target)
            log_p = p.log_softmax(-1)
            divergences = (log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1)
            if len(divergences):
                self._worst_divergence = max(self._worst_divergence, float(divergences.max()))
            # In the order of _PREDICTED.
            sums = [
                cross_entropy(p, target, reduction="sum"),
                cross_entropy(q, target, reduction="sum"),
                divergences.sum(),
                (p.argmax(-1) == q.argmax(-1)).sum(),
            ]
            self._predicted += torch.stack([value.double() for value in sums]).cpu()


@dataclass
class _TensorSums:
    """Sums over samples of one length: squared error, the original's output and its square."""

    error_square: float = 0.0
    output: Tensor | float = 0.0
    square: float = 0.0

    def add(self, original: Tensor, now: Tensor) -> None:
        """Add some samples, (samples, outputs)."""
        self.error_square += float((now - original).square().sum())
        self.output = self.output + original.sum(0)
        self.square += float(original.square().sum())

    def error(self, samples: int) -> float | None:
        """Return the root of the squared error over the spread; None if nothing varies."""
        mean = torch.as_tensor(self.output, device="cpu") / samples
        spread = self.square - samples * float(mean.square().sum())
        if not spread > 1e-12 * self.square:
            return None
        return math.sqrt(self.error_square / spread)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's rank correlation, ties with their average rank; None if one is constant."""
    ranks = torch.stack([average_ranks(a), average_ranks(b)])
    correlation = float(torch.corrcoef(ranks)[0, 1])
    return None if math.isnan(correlation) else correlation


def average_ranks(values: Tensor) -> Tensor:
    """Return the ranks of values from 1 on, in float64; equal values share the mean of theirs."""
    _, group, count = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return ranks[group.flatten()]


def pairs_alike(a: Tensor, b: Tensor) -> tuple[float | None, float | None]:
    """Compare the similarities of all pairs of samples in two embeddings (N, D) of unit rows.

    Return Spearman's correlation of the similarities, and the share of samples with the same
    nearest neighbour in both; None for fewer than 3 samples. Of more than 2,000 samples, 2,000 at
    even distances are compared.
    """
    if len(a) < 3:
        return None, None
    count = min(len(a), _MOST_PAIRED)
    even = torch.linspace(0, len(a) - 1, count, dtype=torch.float64, device="cpu").long()
    a = a[even].double()
    b = b[even].double()
    first = a @ a.T
    second = b @ b.T
    rows, columns = torch.triu_indices(count, count, 1, device="cpu")
    correlation = spearman(first[rows, columns], second[rows, columns])
    # No sample is its own neighbour.
    nearest = first.fill_diagonal_(-math.inf).argmax(1)
    other = second.fill_diagonal_(-math.inf).argmax(1)
    return correlation, float((nearest == other).double().mean())
