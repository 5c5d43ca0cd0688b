"""Ranks that hold the same constants: checked, for nothing else would say that they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dynorm.errors import ModelError
from dynorm.fit.ranks import Ranks
from dynorm.replace.specs import dynorm_layers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def require_equal_ranks(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Check that every rank has the same point-wise layers, with the same constants, weights and biases.

    Ranks that were converted or calibrated apart differ without a sign: each computes with its own constants. Call it
    on every rank; 8 bytes are exchanged. :class:`PointwiseParallel` calls it for each layer that it shards.

    Args:
        model: before it is sharded or wrapped; on the meta device only paths and shapes are compared.
        group: the processes; the default group when None.

    Raises:
        ModelError: on every rank, if one differs; the message names the ranks.

    Example:
        >>> require_equal_ranks(nn.Sequential(dynorm.DyISRU(8)))  # one process, nothing to compare
    """
    ranks = Ranks(group, ModelError)
    with ranks.together():
        ranks.require_alike(dynorm_layers(model).items())
