"""Train with the norms, end without, in a plain loop: a schedule moves t, and one step's activations set the constants.

With transformers' Trainer a callback does the same: anneal_with_trainer.py.
"""

import contextlib

import torch
from torch import nn

import dynorm

STEPS, BEGIN, OVER, WIDTH = 200, 80, 80, 32


class Block(nn.Module):
    """A residual block with its norm first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block finds."""
        return x + self.mlp(self.norm(x))


def main() -> None:
    """Learn the product of two numbers, with norms at first."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
    )
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(8, 2)), to="annealed")
    schedule = dynorm.AnnealSchedule(start=BEGIN, length=OVER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(STEPS):
        schedule.apply_(model, step, STEPS)
        x = torch.randn(256, 2)
        with dynorm.AnnealStart(model) if step == BEGIN else contextlib.nullcontext():
            loss = nn.functional.mse_loss(model(x), x.prod(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 40 == 0:
            t = next(
                layer for layer in model.modules() if isinstance(layer, dynorm.layers.AnnealedNorm)
            ).position
            print(f"step {step:3}: t = {t:.2f}, loss {loss.item():.4f}")
    dynorm.finalize_(model)

    norms, end = sum(losses[BEGIN - 10 : BEGIN]) / 10, sum(losses[-10:]) / 10
    print(
        f"loss {norms:.4f} with the norms, {end:.4f} at the end without; the layers are {model[3]}"
    )
    if not (isinstance(model[3], dynorm.DyISRU) and end < norms):
        raise SystemExit(
            "the point-wise model should have gone on learning where the norms left it"
        )


if __name__ == "__main__":
    main()
