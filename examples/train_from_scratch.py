"""Train a small transformer that never had a norm: DyISRU layers, constants from the first batch, a plain loop.

It learns to predict the next byte of torch's Python sources.
"""

import math
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dynorm

WIDTH = 64
HEADS = 4
LENGTH = 64
STEPS = 120


class Block(nn.Module):
    """A pre-norm block, with DyISRU in place of the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = dynorm.DyISRU(WIDTH)
        self.norm2 = dynorm.DyISRU(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens, then channels."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Tensor) -> Tensor:
        """Mix each token with those before it."""
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, T, channels of a head) each
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(-2)
        return self.out(y)


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = dynorm.DyISRU(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (B, T, 256)."""
        positions = torch.arange(tokens.shape[1])
        x = self.bytes(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def read_sources() -> Tensor:
    """Return the bytes of some of torch's sources."""
    files = sorted(Path(torch.__file__).parent.glob("*.py"))[:8]
    data = b"".join(file.read_bytes() for file in files)
    return torch.tensor(list(data))


def random_batch(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text, and for each byte the one after it."""
    starts = torch.randint(len(text) - LENGTH - 1, (16, 1))
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def entropy_of_bytes(text: Tensor) -> float:
    """Return the loss of a model that knows only how frequent each byte is."""
    frequencies = text.bincount(minlength=256) / len(text)
    return -(frequencies * frequencies.clamp_min(1e-12).log()).sum().item()


def main() -> None:
    """Train, and compare with a model that knows only the frequencies of bytes."""
    torch.manual_seed(0)
    text = read_sources()
    model = Model()
    inputs, _ = random_batch(text)
    report = dynorm.init_from_batch_(model, inputs)
    print(report)

    groups = dynorm.param_groups(model, lr=2e-3, weight_decay=0.1)
    rates = [group["lr"] for group in groups]
    print(f"{len(groups)} groups for the optimizer, rates {rates}")
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS)

    losses = []
    monitor = dynorm.Monitor(model)
    for step in range(STEPS):
        inputs, targets = random_batch(text)
        logits = model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 30 == 0:
            # The monitor warns when a layer saturates. For each layer it reads: saturated, beta,
            # drift, size.
            figures = monitor.read()
            saturated = [figures[name] for name in figures if name.startswith("saturated")]
            print(
                f"step {step:3}: {losses[-1]:.3f} nats per byte, "
                f"at most {max(saturated):.0%} of a layer's outputs saturated"
            )

    final = fmean(losses[-10:])
    entropy = entropy_of_bytes(text)
    chance = math.log(256)
    print(f"{final:.3f} at the end; frequencies alone {entropy:.3f}; chance {chance:.3f}")
    if not final < entropy - 0.3:
        raise SystemExit("the model should have learned more than the frequencies of bytes")


if __name__ == "__main__":
    main()
