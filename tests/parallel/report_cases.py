"""Reports in a group of processes: each is that of the process that makes it, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist

import dynorm
from tests.parallel.data_cases import batches, net

# The second rank has fewer batches: sums over the ranks would not even be of the same batch.
COUNTS = (3, 1)
CHANNEL = 5


def share(rank: int) -> list[dict[str, Tensor]]:
    """The batches of a rank, in which one channel makes some tokens large, another one on each rank."""
    found = batches(len(COUNTS), COUNTS)[rank]
    for batch in found:
        batch["x"][:, 0, CHANNEL + rank] = 40.0
    return found


def converted() -> nn.Module:
    """The same model on every rank, its constants no longer the default ones."""
    model = net(witnesses=(CHANNEL,))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, dynorm.DyISRU):
                layer.log_beta.add_(0.5)
    return model


def reported(rank: int) -> dict[str, Any]:
    """Both reports on a rank's batches."""
    model = converted()
    measured = dynorm.measure(model, share(rank)).to_dict()
    inspected = dynorm.inspect_norms(dynorm.restore_(model), share(rank)).to_dict()
    return {"measured": measured["sites"], "inspected": inspected["sites"]}


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing be sent: a collective on one rank only would wait for the others."""

    def send(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    with (
        mock.patch("torch.distributed.all_reduce", send),
        mock.patch("torch.distributed.all_gather_object", send),
    ):
        yield


def on_the_first(folder: Path) -> Any:
    """Only rank 0 reports; the other one has nothing to do with it."""
    if dist.get_rank() != 0:
        return None
    with silence():
        return reported(0)


def on_all(folder: Path) -> Any:
    """Each reports on its own batches."""
    with silence():
        return reported(dist.get_rank())
