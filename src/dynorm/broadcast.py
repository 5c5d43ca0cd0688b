"""Several processes: rank 0 changes the layers of a model, and all ranks get them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dynorm.errors import DataError, DynormError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import dynorm_layers

Result = TypeVar("Result")


def layers_from_first_rank_(model: nn.Module, work: Callable[[], Result]) -> Result:
    """Do work that changes a model's point-wise layers on rank 0; give its layers and result to all ranks.

    An error of rank 0 is raised on every rank. Without a process group this process works alone.
    The result must be possible to pickle.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return work()
    sent: list[Any] = [None, {}, None]
    if torch.distributed.get_rank() == 0:
        failure = None
        try:
            sent[0] = work()
            sent[1] = {path: _state_of(layer) for path, layer in dynorm_layers(model).items()}
        except Exception as error:
            failure = error
            # An error of another library may not survive the way.
            kind = type(error) if isinstance(error, DynormError) else DataError
            sent[2] = kind(f"rank 0 must get through, but failed: {error}")
        torch.distributed.broadcast_object_list(sent)
        if failure is not None:
            raise failure
        return sent[0]  # type: ignore[no-any-return]
    torch.distributed.broadcast_object_list(sent)
    result, states, error_of_first = sent
    if error_of_first is not None:
        raise error_of_first
    layers = dynorm_layers(model)
    if layers.keys() != states.keys():
        raise ModelError(
            "all ranks must have the same point-wise layers, but those of rank "
            f"{torch.distributed.get_rank()} are not rank 0's: convert the model alike on every rank"
        )
    for path, layer in layers.items():
        witnesses, state = states[path]
        layer.set_witnesses_(witnesses)
        layer.load_state_dict(state)
    return result  # type: ignore[no-any-return]


def _state_of(layer: PointwiseNorm) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return a layer's witnesses, and its tensors on the CPU."""
    state = {name: value.cpu() for name, value in layer.state_dict().items()}
    return layer.witness_channels, state
