"""Watch one run of a model, and note of each module what can be seen of a norm from outside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from dynorm.arguments import writes_of
from dynorm.batches import Inputs, call_hint
from dynorm.errors import DataError
from dynorm.find.recover import candidate_axes
from dynorm.guard import Function, FunctionMode

_IN_PLACE = (
    "modifies its input in place: a model that uses the input again, as a residual, would change; "
    "let it compute on a copy, x.clone(), since x.float() copies only other dtypes than float32"
)
# Functions of torch that are norms.
_FUNCTIONS = {
    functional.layer_norm,
    functional.rms_norm,
    torch.layer_norm,
    torch.native_layer_norm,
    torch.rms_norm,
}


class _Input(NamedTuple):
    """The input of a call, as it was before the call."""

    value: Tensor
    writes: int | None

    def differs_from(self, now: Tensor) -> bool:
        """Return whether the call wrote into its input."""
        if writes_of(now) != self.writes:
            return True
        # torch does not count a write through .data or by a kernel. NaN is not equal to itself.
        return not torch.equal(now.nan_to_num(), self.value.nan_to_num())


@dataclass
class Observation:
    """One module, as a run showed it."""

    module: nn.Module
    paths: list[str]  # all of them, the first one of ``named_modules`` leading
    calls: int = 0
    # Why its calls cannot be those of a norm.
    problem: str | None = None
    # Why it cannot be replaced even if it is a norm.
    obstacle: str | None = None
    # The distinct shapes of its input, in order.
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    # The dtypes of its input and output at the first call.
    dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    autocast: bool = False
    # Some tokens of the first call, in and out, by the axis that may hold the channels.
    samples: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The norm functions that its own forward called.
    functions: set[str] = field(default_factory=set)

    @property
    def has_matrix(self) -> bool:
        """Whether a parameter is more than the scale or shift of a norm."""
        return any(max(p.shape, default=1) != p.numel() for p in self.module.parameters())

    def input_of(self, args: tuple[object, ...]) -> _Input | None:
        """Return the input of a call that begins, if it may be that of a norm."""
        x = args[0] if args else None
        if not _is_plain(x) or self.has_matrix:
            return None
        return _Input(x.detach().clone(), writes_of(x))

    def record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, object],
        output: Any,
        before: _Input | None,
    ) -> None:
        """Record one call; ``before`` is its input as it was when the call began."""
        # An expert that no token was sent to.
        if args and isinstance(args[0], Tensor) and args[0].numel() == 0:
            return
        self.calls += 1
        self.problem = self.problem or _problem(args, kwargs, output)
        if self.problem is not None:
            return
        x = args[0]
        shape = tuple(x.shape)
        if shape not in self.shapes:
            self.shapes.append(shape)
        was_modified = before is not None and before.differs_from(x)
        if was_modified:
            self.obstacle = self.obstacle or _IN_PLACE
        is_identity = output is x and not was_modified
        if self.calls > 1 or before is None or is_identity:
            return
        self.dtype = x.dtype
        self.output_dtype = output.dtype
        self.device = x.device
        self.autocast = torch.is_autocast_enabled(x.device.type)
        for axis in candidate_axes(self.module, shape):
            # All channels, but of every other axis two entries, are enough for the last check.
            part = tuple(slice(None) if k == axis else slice(2) for k in range(x.ndim))
            # Cloned at once: later parts of the model may write into it.
            self.samples[axis] = (before.value[part].clone(), output[part].detach().clone())


def _problem(
    args: tuple[object, ...],
    kwargs: dict[str, object],
    output: object,
) -> str | None:
    extras = (*args[1:], *kwargs.values())
    if args and any(isinstance(leaf, Tensor) for leaf in tree_leaves(extras)):
        return "takes another tensor along: gated or adaptive"
    if extras or not args:
        return "other arguments: a point-wise layer takes one tensor, by position"
    x = args[0]
    if not _is_plain(x) or not _is_plain(output):
        return "not tensor to tensor: it does not take and return one floating-point tensor"
    if x.shape != output.shape:
        return "another shape: its output is not shaped as its input"
    return None


def _is_plain(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_nested:
        return False
    return value.is_floating_point() and value.ndim > 0 and value.numel() > 0


def observe(model: nn.Module, example: Inputs) -> tuple[list[Observation], object]:
    """Run a model once, and return its modules and its output.

    The modules that were called come first, in the order of return.

    The caller undoes all changes of the model, and passes an example that the run may write into.
    Layers of dynorm and parametrizations of weights, and the modules inside them, are left out.

    Raises:
        DataError: the model raises on this input.
    """
    left_out: set[nn.Module] = set()
    for module in model.modules():
        if getattr(module, "_dynorm_layer", False) or isinstance(module, ParametrizationList):
            left_out.update(module.modules())
    observations: dict[nn.Module, Observation] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if module not in left_out:
            seen = observations.setdefault(module, Observation(module, []))
            seen.paths.append(path)
    run = _Run(observations)
    try:
        with run.watching(model):
            args, kwargs = example
            output = model(*args, **kwargs)
    except Exception as error:
        raise DataError(
            "the model could not be run on the example, which must fit its forward: "
            f"it raised {type(error).__name__}: {error}{call_hint(example[0])}"
        ) from error
    uncalled = [seen for seen in observations.values() if not seen.calls]
    return run.called + uncalled, output


class _Run(FunctionMode):
    """One run of a model, in which hooks note the calls of its modules."""

    def __init__(self, observations: dict[nn.Module, Observation]) -> None:
        super().__init__()
        self._seen = dict(observations)
        # The module calls that are running, the innermost last, each with its input if it matters.
        self._running: list[tuple[Observation | None, _Input | None]] = []
        # In the order in which they returned.
        self.called: list[Observation] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Have hooks on all modules while the context lasts."""
        with ExitStack() as stack:
            for module in model.modules():
                for handle in (
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._record, with_kwargs=True),
                    # Always, because a parent may catch an exception of its child and continue.
                    module.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.enter_context(handle)
            with self:
                yield

    def _enter(self, module: nn.Module, args: tuple[object, ...]) -> None:
        """Note that a call begins."""
        seen = self._seen.get(module)
        before = None
        if seen is not None:
            before = seen.input_of(args)
        self._running.append((seen, before))

    def _record(
        self,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        output: object,
    ) -> None:
        """Note the output of the innermost call."""
        seen, before = self._running[-1]
        if seen is None:
            return
        is_first = not seen.calls
        seen.record(args, kwargs, output, before)
        if is_first and seen.calls:
            self.called.append(seen)

    def _leave(self, *_: object) -> None:
        """Note that the innermost call ends."""
        self._running.pop()

    def call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note which modules call norms as functions."""
        if func in _FUNCTIONS and self._running and self._running[-1][0] is not None:
            self._running[-1][0].functions.add(func.__name__)
        return super().call(func, args, kwargs)
