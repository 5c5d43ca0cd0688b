"""Train with norms, end without them, in a plain loop.

A schedule moves every layer from its norm (t = 0) to a point-wise function (t = 1). The activations
of the step at which it begins set the constants. With transformers' Trainer a callback does the
same: anneal_with_trainer.py.
"""

from statistics import fmean

import torch
from torch import Tensor, nn

import dynorm

WIDTH = 32
STEPS = 200
ANNEAL_START = 80
ANNEAL_LENGTH = 80


class Block(nn.Module):
    """A residual block with its norm first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the MLP to ``x``."""
        return x + self.mlp(self.norm(x))


def main() -> None:
    """Learn the product of two numbers while the norms are replaced."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, WIDTH),
        Block(),
        Block(),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 1),
    )
    sites = dynorm.find_norms(model, torch.randn(8, 2))
    dynorm.convert_(model, sites, to="annealed")
    schedule = dynorm.AnnealSchedule(start=ANNEAL_START / STEPS, length=ANNEAL_LENGTH / STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(STEPS):
        dynorm.set_anneal_(model, schedule.at(step, STEPS))
        x = torch.randn(256, 2)
        if step == ANNEAL_START:
            with dynorm.AnnealStart(model):
                prediction = model(x)
        else:
            prediction = model(x)
        loss = nn.functional.mse_loss(prediction, x.prod(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 40 == 0:
            t = model[3].position
            print(f"step {step:3}: t = {t:.2f}, loss {losses[-1]:.4f}")
    dynorm.finalize_(model)

    with_norms = fmean(losses[ANNEAL_START - 10 : ANNEAL_START])
    without = fmean(losses[-10:])
    print(
        f"loss {with_norms:.4f} with the norms, {without:.4f} at the end without; "
        f"the layers are {model[3]}"
    )
    if not isinstance(model[3], dynorm.DyISRU):
        raise SystemExit("the norms should have become DyISRU")
    if not without < with_norms:
        raise SystemExit("the loss should have gone on falling after the norms were replaced")


if __name__ == "__main__":
    main()
