"""Norms of other papers for comparison: TaperNorm and BHyT, each with the network's last norm kept."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from dynorm.site import NormSite
from studies.settings import WARMUP

# The share of the past in a running mean of TaperNorm.
PAST = 0.99
# BHyT: how many root mean squares of a token its channels are taken to stay within.
SPREAD = 10.0
# BHyT: the first bound of tanh's argument for channels within that spread; it is learned.
BOUND = 3.0
# BHyT: how often in a run the constants are made of the weights.
UPDATES = 50


class TaperNorm(nn.Module):
    r"""An RMSNorm that becomes a fixed scaling during training.

    .. math:: y = g\,w\,x / \mathrm{rms}(x) + (1 - g)\,s\,v\,x

    While the gate g is 1, running means measure s, with which the scaling is nearest to the norm by
    least squares. Then s is fixed, v begins as a copy of w, and the gate falls to 0.

    Reference: Kanavalau, Amo Alonso and Lall, arXiv:2602.10408, section 3.
    """

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gate = 1.0
        self.weight = nn.Parameter(torch.ones(channels))
        self.gain = nn.Parameter(torch.ones(channels))
        # Both means begin at 0, so their quotient has no bias.
        self.product = torch.tensor(0.0)
        self.square = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the blend of the norm and the scaling."""
        if self.gate == 0:
            return self._scaled(x)
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        normed = self.weight * x * inverse
        if self.gate == 1:
            if self.training:
                self._watch(x.detach(), inverse.detach())
            return normed
        return self.gate * normed + (1 - self.gate) * self._scaled(x)

    @torch.no_grad()
    def set_gate_(self, gate: float) -> None:
        """Set the gate; the scaling begins as near to the norm as it can be."""
        if self.gate == 1 and gate < 1:
            self.gain.copy_(self.weight)
        self.gate = gate

    def _scaled(self, x: Tensor) -> Tensor:
        return self.product / self.square * self.gain * x

    @torch.no_grad()
    def _watch(self, x: Tensor, inverse: Tensor) -> None:
        """Move the means of the product of norm and scaling, and of the scaling's square, for s = 1."""
        squares = (self.weight * x).square().sum(-1, keepdim=True)
        self.product = PAST * self.product + (1 - PAST) * (squares * inverse).mean()
        self.square = PAST * self.square + (1 - PAST) * squares.mean()


class TaperCallback(TrainerCallback):  # type: ignore[misc]
    """Moves the gates of all layers; ``taper`` is that of an arm."""

    def __init__(self, taper: tuple[float, float]) -> None:
        self.taper = taper

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Set the gate for this step."""
        gate = gate_at(state.global_step, state.max_steps, self.taper)
        for layer in model.modules():
            if isinstance(layer, TaperNorm):
                layer.set_gate_(gate)


def gate_at(step: int, steps: int, taper: tuple[float, float]) -> float:
    """Return the gate: 1, then half a cosine down to 0, then 0."""
    start, length = taper
    # The scaling is measured on a network that has left the warm-up of its rate.
    begin = max(round(start * steps), min(WARMUP, steps // 2))
    progress = min(max((step - begin) / (length * steps), 0.0), 1.0)
    return (1 + math.cos(math.pi * progress)) / 2 if progress < 1 else 0.0


class BoundedTanh(nn.Module):
    r"""BHyT, a tanh whose slope is that of the token, measured once per block.

    .. math:: y = w \tanh(\lambda x / (\kappa s))

    At the first site of a block, s is the token's root mean square. At the second it is that of the
    first site and a constant for the output of the attention, made of its weights: with T tokens of C
    channels, :math:`s_2^2 = s_1^2 + \lambda_1^2 / \kappa^2 \cdot \lVert W_V W_O \rVert^2 / (T C)`.

    Reference: Byun et al., arXiv:2601.09719, and github.com/MLAI-Yonsei/BHyT.

    Args:
        channels, eps: those of the norm.
        first: the layer at the first site of the block, for the second.
    """

    def __init__(self, channels: int, eps: float, first: "BoundedTanh | None" = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bound = nn.Parameter(torch.tensor([BOUND]))
        self.attention = 0.0
        self.square = torch.tensor(0.0)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        """Return the bounded tokens."""
        if self.first is None:
            square = x.square().mean(-1, keepdim=True)
            self.square = square
        else:
            bound = self.first.bound.detach()
            square = self.first.square + self.attention * (bound / SPREAD).square()
        slope = self.bound / SPREAD * torch.rsqrt(square + self.eps)
        return self.weight * torch.tanh(slope * x)


class BoundedTanhCallback(TrainerCallback):  # type: ignore[misc]
    """Makes the constants of the second sites of a GPT-2 anew, ``UPDATES`` times in a run."""

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Read the weights of the attention."""
        if state.global_step % max(state.max_steps // UPDATES, 1) == 0:
            for block in model.transformer.h:
                block.ln_2.attention = attention_share(block.attn, model.config.n_positions)


@torch.no_grad()
def attention_share(attention: nn.Module, tokens: int) -> float:
    """Return the mean square that GPT-2's attention adds by the paper's estimate, for inputs of size 1."""
    values = attention.c_attn.weight.chunk(3, dim=1)[2]
    product = values @ attention.c_proj.weight
    return float(product.square().sum()) / (tokens * len(product))


def replace_norms_(model: nn.Module, sites: Sequence[NormSite], norm: str) -> None:
    """Put TaperNorm or BHyT at all sites except the last, which gets an RMSNorm."""
    *inner, last = sites
    # The sites of a block follow each other: before its attention, and before its feed-forward part.
    for one, other in zip(inner[::2], inner[1::2], strict=True):
        channels = one.normalized_shape[0]
        if norm == "tapernorm":
            layers = [TaperNorm(channels, one.eps), TaperNorm(channels, other.eps)]
        else:
            first = BoundedTanh(channels, one.eps)
            layers = [first, BoundedTanh(channels, other.eps, first)]
        model.set_submodule(one.path, layers[0])
        model.set_submodule(other.path, layers[1])
    model.set_submodule(last.path, nn.RMSNorm(last.normalized_shape, eps=last.eps))
