"""A Llama-shaped block in plain torch: norm, attention, residual, norm, gated MLP, residual; heads counted locally."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

C, HEADS, HIDDEN = 32, 4, 48


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.size = channels // heads
        self.q, self.k, self.v, self.o = (
            nn.Linear(channels, channels, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as this rank has.
        q, k, v = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        return self.o(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(channels, hidden, bias=False),
            nn.Linear(channels, hidden, bias=False),
        )
        self.down = nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The block; ``norms`` makes a norm of so many channels."""

    def __init__(
        self, norms: object, channels: int = C, heads: int = HEADS, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        assert callable(norms)
        self.norm1, self.norm2 = norms(channels), norms(channels)
        self.attention, self.mlp = Attention(channels, heads), MLP(channels, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))
