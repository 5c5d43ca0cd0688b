"""The graph of one call of a model, in which each norm is a single node."""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.errors import ModelError
from dynorm.surgery.fold.graph import Graph
from dynorm.surgery.observe import no_trace, slow_path


@torch.library.custom_op("dynorm::fold_site", mutates_args=())
def fold_site(x: Tensor, index: int) -> Tensor:
    """Stand for the norm of an index while a model is traced."""
    return x.clone()


@fold_site.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


def capture(model: nn.Module, norms: Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
    """Trace one call with ``torch.export``, non-strict, and make it functional; linear operators stay whole.

    The values are fake, so nothing is computed, and control flow that asks for one is refused by torch. Sizes are
    those of the example. What the example does not run is not in the graph.

    Args:
        model: in eval mode; it is as before afterwards.
        norms: the modules that become one node each, ``fold_site(x, index)``.
        args: of the call.
        kwargs: of the call.

    Raises:
        ModelError: the model cannot be traced; the message says where, and why.
    """
    # Brings sympy, which importing dynorm must not.
    import torch.export
    from torch.export.graph_signature import InputKind

    try:
        with no_trace(model, (args, kwargs)), torch.no_grad(), slow_path(), _opaque(norms), _silent():
            program = torch.export.export(_Flat(model), tuple(args), dict(kwargs), strict=False)
            program = program.run_decompositions({})
    # torch.export raises a dozen kinds of its own, and whatever the model makes of tensors without values.
    except Exception as error:
        where = _place(error)
        raise ModelError(
            f"the model must be traceable by torch.export, but{where} it raised {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'nothing more'}; data-dependent control "
            "flow cannot be analysed. Pass trace='modules' to fold only the affine maps, from what the modules do"
        ) from error
    held = {
        spec.arg.name: str(spec.target).removeprefix("model.")
        for spec in program.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and spec.target is not None
    }
    calls: dict[int, list[Node]] = {}
    for node in program.graph.nodes:
        if node.target is torch.ops.dynorm.fold_site.default:
            calls.setdefault(int(node.args[1]), []).append(node)
    return Graph(model, program.graph, held, calls)


class _Flat(nn.Module):
    """A model that returns only the tensors in what it returns: an exporter need not know its classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors_in(self.model(*args, **kwargs)))


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and plain objects (outputs, caches), each object once, in order.

    Example:
        >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [torch.tensor(2), "c"]})]
        [1, 2]
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list, set)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in list(parts):
        yield from tensors_in(part, seen)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from printing the half-traced graph of a model that cannot be traced: the error says where."""
    logger = logging.getLogger("torch")
    level = logger.level
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


@contextmanager
def _opaque(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let each norm be one operator, called as the norm would be."""
    before = [(norm, dict(norm.__dict__)) for norm in norms]
    try:
        for index, norm in enumerate(norms):
            # An instance attribute is found before the class's method.
            norm.__dict__["forward"] = _site_forward(index)
        yield
    finally:
        for norm, state in before:
            norm.__dict__.pop("forward", None)
            if "forward" in state:
                norm.__dict__["forward"] = state["forward"]


def _site_forward(index: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.dynorm.fold_site(x, index)
        return result

    return forward


def _place(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours, as " at file:line (function)"."""
    own = ("/torch/", "/dynorm/surgery/", "<string>", "/site-packages/sympy/")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in own)]
    frames = [frame for frame in frames if not frame.filename.startswith(sys.base_prefix + "/lib")]
    if not frames:
        return ""
    frame = frames[-1]
    return f" at {frame.filename}:{frame.lineno} (in {frame.name})"
