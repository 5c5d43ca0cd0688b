"""The objective of a distillation: a model, its teacher, and the loss between them."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.arguments import require_gathered
from dynorm.batches import Batch, call, token_masks
from dynorm.errors import ArgumentError, ModelError
from dynorm.fit.refine import site_errors
from dynorm.guard import autocast, recomputing, require_trainable
from dynorm.ranks import BATCH, Ranks
from dynorm.replace import restore_
from dynorm.replace.converted import norms_of, require_layers
from dynorm.replace.original import recorded
from dynorm.replace.weights import require_same_weights

# A function of the model's output, the teacher's output, and the batch.
Loss = Callable[[Any, Any, Any], Tensor]

# The best learning rate is about four times the best first step: measured on a text encoder and on
# an image encoder.
_RATE_PER_FIRST_STEP = 4
_MOST_HALVINGS = 8
# The weight of the logarithm of a site's error. The logarithm is cut off below the second value, so
# that a site with hardly any error does not dominate.
_LOG_WEIGHT = 0.1
_LEAST_ERROR = 1e-4


class Distillation(nn.Module):
    """A converted model with its teacher; calling it returns the loss of a batch."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        loss: Loss,
        bf16: bool,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        layers = require_layers(model, with_norms=teacher is None)
        require_gathered(model)
        require_trainable(model)
        # Only a DTensor has this method.
        self.sharded = any(hasattr(p, "full_tensor") for p in model.parameters())
        # accelerate must not wrap a model whose parameters are sharded already.
        self._is_accelerate_prepared = self.sharded
        if teacher is None and self.sharded:
            raise ModelError(
                "a sharded model must be given its teacher, because it cannot be copied: pass "
                "teacher=, sharded as well"
            )
        if not self.sharded:
            ranks.require_alike(layers.items())
        if not any(p.requires_grad for p in model.parameters()):
            raise ModelError(
                "the model must have weights to train, but all are frozen: call requires_grad_() "
                "on some"
            )
        if teacher is None:
            require_same_weights(
                model,
                "pass teacher=, a copy of the model that was made before convert_; the norms on "
                "the present weights would teach another function",
            )
            teacher = restore_(copy.deepcopy(model))
        norms_of(teacher, layers, "teacher")
        require_gathered(teacher)
        if not set(model.parameters()).isdisjoint(teacher.parameters()):
            raise ModelError(
                "the teacher must not share weights with the model, but it does: pass a copy"
            )
        self.model = model
        self.teacher = teacher.eval().requires_grad_(False)
        self.loss = loss
        self.bf16 = bf16
        self.ranks = ranks
        # A checkpoint must have been made with the same values.
        self.recipe: dict[str, object] = {}

    def together(self) -> AbstractContextManager[None]:
        """Have every rank raise if one raises inside.

        Inside a sharded model a failing rank cannot notify the others, because they are waiting for
        its shards. It exits, and their collective fails.
        """
        return nullcontext() if self.sharded else self.ranks.sharing_errors()

    @torch.no_grad()
    def measure(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss of the batches of all ranks in eval mode."""
        self.model.eval()
        loss = fmean(float(self(batch)) for batch in batches)
        return fmean(self.ranks.exchange(loss))

    def rate(
        self,
        usual: float,
        batches: Sequence[Batch],
        weights: dict[str, Tensor],
    ) -> float:
        """Return the learning rate found on the first batch where a trial step lowers the loss.

        On a batch with an exploded token no step does.
        """
        for batch in batches:
            best = self.best_step(batch, usual, weights)
            if best > 0:
                return best
        return usual * 0.5**_MOST_HALVINGS

    def best_step(
        self,
        batch: Batch,
        usual: float,
        weights: dict[str, Tensor],
    ) -> float:
        """Halve the usual rate while trial steps lower the loss; return the best one, 0 if none."""
        self.model.load_state_dict(weights)
        best_rate = 0.0
        least_loss = self.measure([batch])
        self.model.zero_grad()
        self(batch).backward()
        # Notice a failed rank before the sums.
        self.ranks.exchange(BATCH)
        signs = {}
        for p in self.model.parameters():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                if not self.sharded:
                    gradient = self.ranks.summed(gradient)
                signs[p] = gradient.sign()
        self.model.zero_grad()
        for halvings in range(_MOST_HALVINGS):
            rate = usual * 0.5**halvings
            self.model.load_state_dict(weights)
            # The first step of Adam follows the signs of the gradients.
            with torch.no_grad():
                for p, sign in signs.items():
                    p.sub_(sign, alpha=rate / _RATE_PER_FIRST_STEP)
            loss = self.measure([batch])
            if loss < least_loss:
                best_rate = rate
                least_loss = loss
            elif best_rate > 0:
                break
        return best_rate

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of the sites plus the loss of the outputs."""
        # Looked up at every call: a callback may have replaced the layers.
        norms = norms_of(self.teacher, require_layers(self.model), "teacher")
        layers = {layer: layer for layer in norms}
        with autocast(self.model, self.bf16):
            with torch.no_grad(), recorded(norms) as targets:
                target = call(self.teacher, batch)
            with recomputing(self.model), recorded(layers) as outputs:
                output = call(self.model, batch)
        errors = site_errors(targets, outputs, token_masks(batch))
        output_loss: object = self.loss(output, target, batch)
        if not isinstance(output_loss, Tensor) or output_loss.dim() > 0:
            got = type(output_loss).__name__
            if isinstance(output_loss, Tensor):
                got = f"a tensor of shape {tuple(output_loss.shape)}"
            raise ArgumentError(
                f"loss must return a scalar tensor, got {got}: take its mean, or torch.zeros(())"
            )
        site_losses = errors + _LOG_WEIGHT * errors.clamp_min(_LEAST_ERROR).log()
        return site_losses.mean() + output_loss


def largest_tensor(batch: Batch) -> Tensor:
    """Return the tensor with the most elements in a batch."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max(tensors, key=Tensor.numel)
