"""Several processes: rank 0 does the work, and all ranks get its result."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from dynorm.errors import DataError, DynormError, ModelError
from dynorm.replace.converted import dynorm_layers

Result = TypeVar("Result")


def rank() -> int:
    """Return the number of this process in the default group; 0 without a group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Return on every rank what ``work`` returns on rank 0; raise its error on every rank.

    Without a process group this process works alone. The result must be possible to pickle.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return work()
    sent: list[Any] = [None, None]
    failure = None
    if rank() == 0:
        try:
            sent[0] = work()
        except Exception as error:
            failure = error
            # An error of another library may not survive the way.
            kind = type(error) if isinstance(error, DynormError) else DataError
            sent[1] = kind(f"rank 0 must get through, but failed: {error}")
    torch.distributed.broadcast_object_list(sent)
    result, error_of_first = sent
    if failure is not None:
        raise failure
    if error_of_first is not None:
        raise error_of_first
    return result  # type: ignore[no-any-return]


def layers_from_first_rank_(model: nn.Module, work: Callable[[], Result]) -> Result:
    """Do work that changes a model's point-wise layers on rank 0, and give its layers to all ranks."""

    def work_and_layers() -> tuple[Result, dict[str, Any]]:
        result = work()
        layers = {}
        for path, layer in dynorm_layers(model).items():
            state = {name: value.cpu() for name, value in layer.state_dict().items()}
            layers[path] = (layer.witness_channels, state)
        return result, layers

    result, layers = on_first_rank(work_and_layers)
    if rank() == 0:
        return result
    ours = dynorm_layers(model)
    if ours.keys() != layers.keys():
        raise ModelError(
            "all ranks must have the same point-wise layers, but those of rank "
            f"{rank()} are not rank 0's: convert the model alike on every rank"
        )
    for path, layer in ours.items():
        witnesses, state = layers[path]
        layer.set_witnesses_(witnesses)
        if "center" not in state:
            layer.center = None
        layer.load_state_dict(state)
    return result
