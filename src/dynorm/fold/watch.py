"""One real run, in which the memory of each norm's output is followed into the linear layers that read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from dynorm.fold.capture import attributes_kept
from dynorm.fold.nested import copied, tensors_in
from dynorm.fold.places import Place
from dynorm.watch import undisturbed

# The axis of the weight that the inputs go along; of a transformers Conv1D it is the first.
READERS = {"Linear": 1, "NonDynamicallyQuantizableLinear": 1, "Conv1D": 0}
_MODULES = {
    "Linear": "torch.nn.modules.linear",
    "NonDynamicallyQuantizableLinear": "torch.nn.modules.linear",
    "Conv1D": "transformers.pytorch_utils",
}
_HARMLESS = {"aten.detach", "aten.alias"}


@dataclass(eq=False)
class Seen:
    """What was seen of one norm.

    Args:
        readers: the linear layers that read it.
        problem: what else did, or None.
    """

    readers: list[nn.Module] = field(default_factory=list)
    problem: str | None = None


def watch(
    model: nn.Module, places: list[Place], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[nn.Module, Seen], dict[nn.Module, list[nn.Module | None]]]:
    """Run a model once; return what was seen of each norm, and the norms, or None, that each reader was given."""
    watcher = _Watcher(places)
    handles = watcher.hooks(model)
    try:
        with attributes_kept(model), undisturbed(model, (args, kwargs)), watcher:
            given, named = copied((tuple(args), dict(kwargs)))
            watcher.returned(model(*given, **named))
    finally:
        for handle in handles:
            handle.remove()
    return watcher.seen, watcher.inputs


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of each norm's output through a run."""

    def __init__(self, places: list[Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = {place.module: Seen() for place in places}
        self.inputs: dict[nn.Module, list[nn.Module | None]] = {}
        self.norms = {p.module: p for p in places if p.problem is None and p.site.dim == -1}
        for place in places:
            if place.module not in self.norms:
                self.seen[place.module].problem = "its channels are not last"
        # The outputs are kept, so that no memory is used twice.
        self._source: dict[int, nn.Module] = {}
        self._kept: list[Tensor] = []
        self._inside: list[nn.Module] = []

    def hooks(self, model: nn.Module) -> list[RemovableHandle]:
        """Watch the norms and the readers."""
        found = []
        for module in model.modules():
            enter, leave = self._enter, self._leave_norm
            if module not in self.norms:
                if not _is_reader(module):
                    continue
                self.inputs[module] = []
                enter, leave = self._enter_reader, self._leave
            found.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            # Before the user's own hooks, which are no part of the layer.
            found.append(module.register_forward_hook(leave, prepend=True))
        return found

    def returned(self, output: Any) -> None:
        """Look for norms in what the model returns."""
        for tensor in tensors_in(output):
            source = self._of(tensor)
            if source is not None:
                self.seen[source].problem = "the model returns it"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sources = {self._of(arg) for arg in _flat((args, kwargs or {})) if isinstance(arg, Tensor)} - {None}
        name = str(func.overloadpacket)
        views = isinstance(result, Tensor) and self._of(result) is not None and not func._schema.is_mutable
        for source in sources:
            assert source is not None
            if self._inside or views or name in _HARMLESS:
                continue
            self.seen[source].problem = self.seen[source].problem or f"read by {name}, outside of a linear layer"
        return result

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        value = _first(args, kwargs)
        source = None if value is None else self._of(value)
        if source is not None:
            self.seen[source].problem = self.seen[source].problem or "read by another norm"

    def _enter_reader(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        value = _first(args, kwargs)
        source = None if value is None else self._of(value)
        self.inputs[module].append(source)
        if source is None:
            return
        assert value is not None
        channels = self.norms[source].site.normalized_shape[0]
        if value.shape[-1] != channels or value.stride(-1) != 1:
            self.seen[source].problem = "its channels are split or reordered before it is read"
        self.seen[source].readers.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def _leave_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()
        if isinstance(output, Tensor):
            self._kept.append(output)
            self._source[output.untyped_storage().data_ptr()] = module

    def _of(self, tensor: Tensor) -> nn.Module | None:
        return self._source.get(tensor.untyped_storage().data_ptr())


def _is_reader(module: nn.Module) -> bool:
    """Whether it is one of the classes itself, with a weight that is a parameter: neither subclass nor weight_norm."""
    kind = type(module)
    known = (kind.__module__, kind.__name__) in {(where, name) for name, where in _MODULES.items()}
    return known and "forward" not in module.__dict__ and module._parameters.get("weight") is not None


def _first(args: Any, kwargs: Any) -> Tensor | None:
    """The first argument of a layer that takes one, by position or by name."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [part for item in value for part in _flat(item)] if isinstance(value, (list, tuple)) else [value]
