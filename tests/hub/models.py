"""A small plain model, converted, and how models are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dynorm
from dynorm.replace.converted import dynorm_layers

WITNESSES = (3, 0)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8)).eval()


def converted(to: str = "dyisru") -> Any:
    model, x = build(), torch.randn(64, 8)
    dynorm.convert_(model, dynorm.find_norms(model, x), to)
    dynorm.calibrate_(model, [x])
    return model


def witnessed(model: nn.Module) -> nn.Module:
    """Name the same witnesses in every layer: calibration leaves out those that tell nothing."""
    for layer in dynorm_layers(model).values():
        layer.set_witnesses_(WITNESSES, (0.5, 2.0))
    return model


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )
