"""How far apart the outputs of two models are: embeddings, next-token losses, or tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from dynorm.batches import Batch, call, token_masks
from dynorm.errors import DataError
from dynorm.guard import undisturbed
from dynorm.outputs import output_tensor, predicted_ids, sample_vectors, unpadded
from dynorm.plain import JsonObject

Kind = Literal["encoder", "language", "tensor"]

# The most samples whose pairs are all compared: two million pairs, which takes a second.
_MOST_PAIRED = 2000
# The figures of next tokens, fields of OutputReport.
_PREDICTED = ("loss_original", "loss_now", "kl", "agreement")


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
    """Compares two models' outputs batch by batch; for an encoder, all embeddings are kept."""

    def __init__(self, original: nn.Module) -> None:
        self._original = original
        self.kind: Kind | None = None
        self.batches = 0
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._cosines: list[Tensor] = []
        # The sums behind the error of a tensor: of the squared error, the original and its square.
        self._error_square = 0.0
        self._sum: Tensor | float = 0.0
        self._square = 0.0
        self._lengths: set[int] = set()
        # For each next token the figures of _PREDICTED.
        self._predicted: list[Tensor] = []
        self._same_class: list[Tensor] = []

    def add(self, batch: Batch, original: object, now: object) -> None:
        """Add a batch with the outputs of both models."""
        name, before = output_tensor(original, batch)
        _, after = output_tensor(now, batch)
        after = after.to(before.device)
        if before.shape != after.shape:
            shapes = f"{tuple(before.shape)} and {tuple(after.shape)}"
            raise DataError(
                f"both models must give outputs of one shape, got {shapes}: is `original` the same "
                "model?"
            )
        if self.kind is None:
            self.kind = self._kind(batch, name, before)
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
        if pooled:
            self._kept.append((a.cpu(), b.cpu()))
        elif self.kind == "language":
            self._add_predictions(batch, before, after)
        else:
            if name == "logits" and before.ndim == 2 and before.shape[1] > 1:
                self._same_class.append((before.argmax(1) == after.argmax(1)).cpu())
            self._add_error(a.cpu().double(), b.cpu().double())

    def report(self) -> OutputReport:
        """Return the figures of all batches so far."""
        kind = self.kind or "tensor"
        cosines = torch.cat(self._cosines).double()
        if not len(cosines):
            return OutputReport(kind, 0)
        least, worst = cosines.min(0)
        figures: JsonObject = {"worst": int(worst)}
        if self._kept:
            originals = torch.cat([original for original, _ in self._kept])
            converted = torch.cat([now for _, now in self._kept])
            figures["spearman"], figures["neighbours"] = pairs_alike(originals, converted)
        if self._same_class:
            figures["agreement"] = float(torch.cat(self._same_class).double().mean())
        # Samples of several lengths have no common mean.
        if len(self._lengths) == 1:
            mean = torch.as_tensor(self._sum, device="cpu") / len(cosines)
            # sum |y - mean|^2 = sum |y|^2 - N |mean|^2
            spread = self._square - len(cosines) * float(mean.square().sum())
            if spread > 1e-12 * self._square:
                figures["error"] = math.sqrt(self._error_square / spread)
        if self._predicted:
            predicted = torch.cat(self._predicted)
            means = predicted.mean(0).tolist()
            figures |= dict(zip(_PREDICTED, means, strict=True))
            figures["tokens"] = len(predicted)
            figures["kl_worst"] = float(predicted[:, _PREDICTED.index("kl")].max())
            figures["loss_difference"] = figures["loss_now"] - figures["loss_original"]
        return OutputReport(
            kind=kind,
            samples=len(cosines),
            cosine_mean=float(cosines.mean()),
            cosine_min=float(least),
            **figures,
        )

    def _kind(self, batch: Batch, name: str | None, tensor: Tensor) -> Kind:
        if name == "logits":
            return "language" if self._predicts_next(batch, tensor) else "tensor"
        is_masked = any(mask.shape == tensor.shape[:2] for mask in token_masks(batch))
        is_tokens = tensor.ndim == 3 and (name == "last_hidden_state" or is_masked)
        return "encoder" if name == "class_token" or is_tokens else "tensor"

    def _predicts_next(self, batch: Batch, logits: Tensor) -> bool:
        """Return whether the original generates, and has logits for each token of the batch."""
        can_generate = getattr(self._original, "can_generate", None)
        ids = batch.get(predicted_ids(batch)) if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or logits.ndim != 3 or ids.shape != logits.shape[:2]:
            return False
        return callable(can_generate) and bool(can_generate())

    def _add_error(self, original: Tensor, now: Tensor) -> None:
        self._lengths.add(original.shape[1])
        if len(self._lengths) == 1:
            self._error_square += float((now - original).square().sum())
            self._sum = self._sum + original.sum(0)
            self._square += float(original.square().sum())

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
            log_p = p.log_softmax(-1)
            # In the order of _PREDICTED.
            figures = [
                cross_entropy(p, target, reduction="none"),
                cross_entropy(q, target, reduction="none"),
                (log_p.exp() * (log_p - q.log_softmax(-1))).sum(-1),
                p.argmax(-1) == q.argmax(-1),
            ]
            if len(target):
                self._predicted.append(torch.stack([row.double() for row in figures], 1).cpu())


def both_outputs(original: nn.Module, model: nn.Module, batch: Batch) -> tuple[object, object]:
    """Return the outputs of two models, which draw the same random numbers if they draw any."""
    with undisturbed(original, batch):
        before = call(original, batch)
    return before, call(model, batch)


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
    nearest neighbour in both; None for fewer than 3 samples. Of more than 2,000 samples the first
    2,000 are compared.
    """
    if len(a) < 3:
        return None, None
    a = a[:_MOST_PAIRED].double()
    b = b[:_MOST_PAIRED].double()
    first = a @ a.T
    second = b @ b.T
    rows, columns = torch.triu_indices(len(a), len(a), 1, device="cpu")
    correlation = spearman(first[rows, columns], second[rows, columns])
    # No sample is its own neighbour.
    nearest = first.fill_diagonal_(-math.inf).argmax(1)
    other = second.fill_diagonal_(-math.inf).argmax(1)
    return correlation, float((nearest == other).double().mean())
