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

from dynorm.errors import DynormError, ModelError
from dynorm.fold.graph import Graph
from dynorm.fold.nested import held_tensors, mapped, tensors_in
from dynorm.watch import undisturbed


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
        ModelError: the model cannot be traced; the message says where, and why. Or what it returns cannot be seen.
        DataError: the arguments cannot be copied.
    """
    # Brings sympy, which importing dynorm must not.
    import torch.export
    from torch.export.graph_signature import InputKind

    try:
        with attributes_kept(model), undisturbed(model), _opaque(norms), _silent():
            flat = _Flat(model, (tuple(args), dict(kwargs)))
            program = torch.export.export(flat, tuple(flat.tensors), strict=False)
            program = program.run_decompositions({})
    except DynormError:
        raise
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
    """A model that takes and returns only the tensors in its inputs and outputs: no exporter knows all classes."""

    def __init__(self, model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.tensors = held_tensors(inputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = {id(held): tensor for held, tensor in zip(self.tensors, tensors, strict=True)}
        args, kwargs = mapped(self.inputs, lambda tensor: given[id(tensor)])
        return tuple(tensors_in(self.model(*args, **kwargs)))


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Put the plain attributes of all modules back: what a forward keeps on ``self`` is of the caller's calls only.

    Example:
        >>> model = nn.ReLU()
        >>> with attributes_kept(model):
        ...     model.last = 1
        >>> hasattr(model, "last")
        False
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, state in before:
            for name in module.__dict__.keys() - state.keys():
                del module.__dict__[name]
            module.__dict__.update(state)


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
    own = ("/torch/", "/dynorm/", "<string>", "/site-packages/sympy/")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in own)]
    frames = [frame for frame in frames if not frame.filename.startswith(sys.base_prefix + "/lib")]
    if not frames:
        return ""
    frame = frames[-1]
    return f" at {frame.filename}:{frame.lineno} (in {frame.name})"
