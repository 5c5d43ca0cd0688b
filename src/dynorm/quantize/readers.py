"""Which linear layers read a point-wise layer's output, found by running the model once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dynorm.errors import ModelError
from dynorm.replace.specs import require_layers
from dynorm.watch import require_plain_model

# Questions about a tensor that say nothing of its values.
_HARMLESS = {"__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_contiguous", "__len__", "get_device"}


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads the output of a point-wise layer.

    Args:
        linear: the path of the linear layer.
        layer: the path of the point-wise layer.
        ndim: how many dimensions the tensor has that goes from one to the other.
        alone: only such linear layers read it, so that scales per channel can be folded into them and the layer.
        refused: why the linear layer's scale is not clear; None if it is.
        peers: the paths of all linear layers that read it, this one among them; a fold needs them all.
    """

    linear: str
    layer: str
    ndim: int
    alone: bool
    refused: str | None = None
    peers: tuple[str, ...] = ()


def find_readers(model: nn.Module, *args: Any, **kwargs: Any) -> list[Reader]:
    """Find the linear layers that read a point-wise layer's output, by running the model once.

    A linear layer reads a point-wise layer when the very tensor that one returned is the other's input. Where it also
    reads something else, or tensors of several numbers of dimensions, :attr:`Reader.refused` says so.

    Args:
        model: a converted model in eval mode.
        *args: its example inputs.
        **kwargs: more of them.

    Returns:
        One reader per linear layer, in the order of the model's modules.

    Raises:
        ModelError: nothing is converted, no linear layer reads a point-wise one, or the model is in training mode,
            compiled, wrapped or on meta.

    Example:
        >>> model = nn.Sequential(dynorm.DyISRU(8), nn.Linear(8, 4)).eval()
        >>> find_readers(model, torch.randn(2, 8))
        [Reader(linear='1', layer='0', ndim=2, alone=True, refused=None, peers=('1',))]
    """
    require_plain_model(model)
    layers: dict[nn.Module, str] = {layer: path for path, layer in require_layers(model).items()}
    if model.training:
        raise ModelError("the model must be in eval mode, as it will run: call model.eval()")
    linears: dict[nn.Module, str] = {m: path for path, m in model.named_modules() if type(m) is nn.Linear}
    watch = _Watch()
    with _hooks(watch, layers, linears), torch.no_grad(), watch:
        result = model(*args, **kwargs)
    watch.others |= watch.sources(list(result.values()) if isinstance(result, Mapping) else result)
    reads = {path: watch.reads[path] for path in linears.values() if path in watch.reads}
    reads = {path: read for path, read in reads.items() if any(layer is not None for layer, _ in read)}
    if not reads:
        raise ModelError(
            "a linear layer must read a point-wise layer's output, but none does: only nn.Linear is known, "
            "so replace transformers' Conv1D first"
        )
    refused = {path: _refusal(read) for path, read in reads.items()}
    # A layer that a refused one reads cannot be changed either.
    watch.others |= {layer for path, read in reads.items() if refused[path] for layer, _ in read if layer is not None}
    found = []
    for path, read in reads.items():
        layer, ndim = next((layer, ndim) for layer, ndim in read if layer is not None)
        peers = tuple(peer for peer, others in reads.items() if layer in dict(others))
        found.append(Reader(path, layer, ndim, layer not in watch.others, refused[path], peers))
    return found


class _Watch(TorchFunctionMode):
    """Which linear layers, and what else, read the tensors that point-wise layers have returned."""

    def __init__(self) -> None:
        super().__init__()
        # Tensors are kept alive, so that an id stays theirs.
        self.outputs: dict[int, tuple[Tensor, str]] = {}
        # For each linear layer: the point-wise layer it reads, if any, and the number of dimensions.
        self.reads: dict[str, list[tuple[str | None, int]]] = {}
        self.others: set[str] = set()
        self.entered: Tensor | None = None

    def source(self, value: Any) -> str | None:
        """Return the path of the point-wise layer that returned this very tensor."""
        return self.outputs[id(value)][1] if id(value) in self.outputs else None

    def sources(self, values: Any) -> set[str]:
        """Return the paths of the point-wise layers that returned any of these."""
        return {path for leaf in tree_leaves(values) if (path := self.source(leaf)) is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the reader, and compute."""
        kwargs = kwargs or {}
        taken = args
        if func is functional.linear and args and args[0] is self.entered:
            # The input of a linear layer, which its hook has noted.
            self.entered, taken = None, args[1:]
        if getattr(func, "__name__", "") not in _HARMLESS:
            self.others |= self.sources((taken, kwargs))
        return func(*args, **kwargs)


@contextmanager
def _hooks(watch: _Watch, layers: Mapping[nn.Module, str], linears: Mapping[nn.Module, str]) -> Iterator[None]:
    def returned(module: nn.Module, args: Any, output: Tensor) -> None:
        watch.outputs[id(output)] = (output, layers[module])

    def enters(module: nn.Module, args: Any, kwargs: Any) -> None:
        watch.entered = x = (*args, *kwargs.values())[0]
        read = watch.reads.setdefault(linears[module], [])
        if (watch.source(x), x.ndim) not in read:
            read.append((watch.source(x), x.ndim))

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_hook(returned))
        for linear in linears:
            stack.enter_context(linear.register_forward_pre_hook(enters, with_kwargs=True))
        yield


def _refusal(read: list[tuple[str | None, int]]) -> str | None:
    """Say why one static scale does not serve all that a linear layer reads; None if it does."""
    sources, ndims = list(dict.fromkeys(layer for layer, _ in read)), sorted({ndim for _, ndim in read})
    if None in sources:
        return "it reads other tensors too"
    if len(sources) > 1:
        return f"it reads several layers: {', '.join(map(str, sources))}"
    if len(ndims) > 1:
        return f"it reads tensors of {' and '.join(map(str, ndims))} dimensions"
    return None
