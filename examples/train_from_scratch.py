"""Train a small transformer that never had a norm: DyISRU layers, constants from the first batch, a plain loop.

It predicts the next byte of Python sources that come with Python.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dynorm

WIDTH, HEADS, LENGTH, STEPS = 64, 4, 64, 120


class Block(nn.Module):
    """A pre-norm block, with DyISRU where the norms would be."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = dynorm.DyISRU(WIDTH), dynorm.DyISRU(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, then channels."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = dynorm.DyISRU(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (B, T, 256)."""
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    """Train, and compare with a model that knows only the frequencies of bytes."""
    torch.manual_seed(0)
    files = sorted(Path(torch.__file__).parent.glob("*.py"))[:8]
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    frequencies = text.bincount(minlength=256) / len(text)
    entropy = -(frequencies * frequencies.clamp_min(1e-12).log()).sum().item()

    def batch() -> Tensor:
        starts = torch.randint(len(text) - LENGTH - 1, (16, 1))
        return text[starts + torch.arange(LENGTH + 1)]

    model = Model()
    print(dynorm.init_from_batch_(model, batch()[:, :-1]))
    groups = dynorm.param_groups(model, lr=2e-3, weight_decay=0.1)
    print(f"{len(groups)} groups for the optimizer, rates {[group['lr'] for group in groups]}")
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [g["lr"] for g in groups], total_steps=STEPS
    )

    losses, monitor = [], dynorm.Monitor(model)
    for step in range(STEPS):
        tokens = batch()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 30 == 0:
            # It warns when a layer saturates. Per layer: saturated, beta, drift, size, gradient.
            figures = monitor.read()
            worst = max(value for name, value in figures.items() if name.startswith("saturated"))
            print(
                f"step {step:3}: {losses[-1]:.3f} nats per byte, at most {worst:.0%} of a layer's "
                "outputs saturated"
            )

    end = sum(losses[-10:]) / 10
    print(f"{end:.3f} at the end; frequencies alone {entropy:.3f}; chance {math.log(256):.3f}")
    if not end < entropy - 0.3:
        raise SystemExit("the model should have learned more than the frequencies of bytes")


if __name__ == "__main__":
    main()
