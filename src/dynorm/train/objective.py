"""The objective of a distillation: a model, its teacher, and the loss between them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.checkpoint import checkpoint

from dynorm.arguments import require_gathered, upcast
from dynorm.batches import Batch, call, token_masks, valid_tokens
from dynorm.errors import ModelError
from dynorm.fit.site_errors import require_gradients, site_errors, unexplained_share
from dynorm.guard import autocast, recomputing, require_trainable
from dynorm.outputs import output_tensor, sample_vectors
from dynorm.replace.converted import norms_of, require_layers
from dynorm.replace.original import recorded

# The weight of the logarithm of a site's error. The logarithm is cut off below the second value, so
# that a site with hardly any error does not dominate.
_LOG_WEIGHT = 0.1
_LEAST_ERROR = 1e-4
# Logits per chunk of the loss: they stay in the cache of a CPU core.
_CHUNK = 1 << 20


class Distillation(nn.Module):
    """A converted model with its teacher; calling it returns the loss of a batch."""

    def __init__(self, model: nn.Module, teacher: nn.Module, bf16: bool) -> None:
        super().__init__()
        layers = require_layers(model)
        require_gathered(model)
        require_trainable(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                "the model must have weights to train, but all are frozen: call requires_grad_() "
                "on some"
            )
        norms_of(teacher, layers)
        require_gathered(teacher)
        if not set(model.parameters()).isdisjoint(teacher.parameters()):
            raise ModelError(
                "the teacher must not share weights with the model, but it does: pass a copy that "
                "was made before convert_"
            )
        self.model = model
        # In a tuple it is not a part of this module: it is neither trained nor wrapped nor saved.
        self._teacher = (teacher,)
        self.bf16 = bf16
        # Only a DTensor has this method.
        self.sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
        # accelerate must not wrap a model whose parameters are sharded already.
        self._is_accelerate_prepared = self.sharded

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of the sites plus the loss of the outputs."""
        (teacher,) = self._teacher
        # Looked up at every call: a callback may have replaced the layers.
        norms = norms_of(teacher, require_layers(self.model))
        layers = {layer: layer for layer in norms}
        with autocast(self.model, self.bf16):
            with torch.no_grad(), recorded(norms) as targets:
                target = call(teacher, batch)
            with recomputing(self.model), recorded(layers) as outputs:
                output = call(self.model, batch)
        require_gradients(self.model, outputs)
        errors = site_errors(targets, outputs, token_masks(batch))
        site_losses = errors + _LOG_WEIGHT * errors.clamp_min(_LEAST_ERROR).log()
        return site_losses.mean() + output_loss(output, target, batch)


def output_loss(ours: Any, theirs: object, batch: Batch) -> Tensor:
    """Return the error of a model's output, a part of the loss of :func:`distill_`.

    Logits (B, classes) or (B, T, classes): the Kullback-Leibler divergence of the distributions, in
    nats per row or token. A ``last_hidden_state`` (B, T, D) or the class token of images: one minus
    the mean cosine of the embeddings, mean-pooled. Any other tensor: ``|f - y|^2 / |y - mean y|^2``.
    Padding is left out.

    Args:
        ours: the model's output.
        theirs: the teacher's; its ``logits`` are compared, else its ``last_hidden_state``, else its
            first tensor that is not a single number.
        batch: the input.

    Raises:
        DataError: the output has no floating point tensor.
    """
    name, target = output_tensor(theirs, batch)
    _, output = output_tensor(ours, batch)
    if name == "logits" and target.dim() in (2, 3) and target.shape[-1] > 1:
        return _mean_divergence(target, output, batch)
    is_embedding = name in ("last_hidden_state", "class_token") and target.dim() in (2, 3)
    y = sample_vectors(target, batch, pooled=is_embedding)
    f = sample_vectors(output, batch, pooled=is_embedding)
    if is_embedding:
        return (1 - (y * f).sum(-1)).mean()
    return unexplained_share(f, y)


def _mean_divergence(theirs: Tensor, ours: Tensor, batch: Batch) -> Tensor:
    """Return the mean divergence of the rows of logits (..., classes) that are not padding."""
    valid = valid_tokens(theirs.shape, -1, token_masks(batch))
    target_rows = theirs.flatten(0, -2)
    output_rows = ours.flatten(0, -2)
    if valid is not None:
        valid = valid.to(ours.device)
        target_rows = target_rows[valid]
        output_rows = output_rows[valid]
    size = max(1, _CHUNK // theirs.shape[-1])
    total = torch.zeros((), dtype=torch.float32, device=ours.device)
    chunks = zip(torch.split(target_rows, size), torch.split(output_rows, size), strict=True)
    for target, output in chunks:
        # Computed again for the gradient: all logits at once would be held in float32 six times.
        total = total + checkpoint(
            _divergence, target, output, use_reentrant=False, preserve_rng_state=False
        )
    return total / max(len(target_rows), 1)


def _divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """Return the sum of the rows' divergences."""
    p = log_softmax(upcast(theirs), -1)
    q = log_softmax(upcast(ours), -1)
    return kl_div(q, p, log_target=True, reduction="sum")
