"""Trace a model's graph: every norm becomes one opaque node, and every parameter knows its owners."""

import logging
import operator
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node

from dynorm.errors import DynormError, ModelError
from dynorm.stream.graph import Graph, Owner, Slot, leaves, packet
from dynorm.stream.tensors import Inputs, held_tensors, mapped, tensors_in
from dynorm.watch import undisturbed


@torch.library.custom_op("dynorm::fold_site", mutates_args=())
def fold_site(x: Tensor, index: int) -> Tensor:
    """Stand for the norm of an index while a model is traced."""
    return x.clone()


@fold_site.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


def capture(
    model: nn.Module, norms: Mapping[int, nn.Module], example: Inputs, untie: bool
) -> Graph:
    """Trace one call with ``torch.export``, non-strict, and make it functional; linear operators stay whole.

    Nothing is computed, sizes are those of the example, and what that does not run is not in the
    graph. Each of the ``norms`` becomes one node, ``fold_site(x, index)``. With ``untie`` each
    owner of a tied one may get its own.
    """
    # Brings sympy, which importing dynorm must not.
    import torch.export

    owners: dict[Tensor, list[Owner]] = {}
    for path, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owners.setdefault(tensor, []).append(Owner(module, name, path))
    apart = _overlapping(model)
    try:
        with undisturbed(model, attributes=True), _silent():
            # Each owner holds a tensor of its own, in the same memory: the graph then shows whose
            # use is whose.
            for tensor, held_by in owners.items():
                for owner in held_by[1:] if tensor not in apart else ():
                    alias, is_parameter = tensor.detach(), isinstance(tensor, nn.Parameter)
                    owner.table[owner.name] = (
                        nn.Parameter(alias, tensor.requires_grad) if is_parameter else alias
                    )
            for index, norm in norms.items():
                # An instance attribute is found before the class's method.
                norm.__dict__["forward"] = lambda x, index=index: torch.ops.dynorm.fold_site(
                    x, index
                )
            flat = _Flat(model, example)
            program = torch.export.export(flat, tuple(flat.tensors), strict=False)
            if all(_is_functional(node) for node in program.graph.nodes):
                # What nothing takes is no use of a value.
                program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
            else:
                # A second trace, which takes longer than the rest of a fold.
                program = program.run_decompositions({})
    except DynormError:
        raise
    # torch.export raises a dozen kinds of its own, and passes on whatever the model's code raises.
    except Exception as error:
        message = (str(error).strip().splitlines() or ["nothing more"])[0]
        # The innermost line that is neither torch's nor ours; a user's folder may be called torch
        # or dynorm too.
        ours = (
            str(Path(torch.__file__).parent),
            str(Path(__file__).parents[1]),
            "<string>",
            sys.base_prefix + "/lib",
        )
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
        ]
        frames = [f for f in frames if "/site-packages/sympy/" not in f.filename]
        where = (
            f" at {frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name})"
            if frames
            else ""
        )
        raise ModelError(
            f"the model must be traceable by torch.export, but{where} it raised "
            f"{type(error).__name__}: "
            f"{message}; data-dependent control flow cannot be analysed: write it with "
            "torch.where, skip it if "
            "torch.compiler.is_exporting(), or fold the parts of the model that have none"
        ) from error
    names = {
        **program.graph_signature.inputs_to_parameters,
        **program.graph_signature.inputs_to_buffers,
    }
    modules = dict(model.named_modules(remove_duplicate=False))
    read: dict[tuple[nn.Module, str], list[Node]] = {}
    for node in program.graph.nodes:
        if node.name in names:
            path, _, name = names[node.name].removeprefix("model.").rpartition(".")
            read.setdefault((modules[path], name), []).append(node)
    inside = {part for norm in norms.values() for part in norm.modules()}
    slots = [
        slot
        for tensor, held_by in owners.items()
        for slot in _slots(
            tensor, {o: read.get((o.module, o.name), []) for o in held_by}, tensor in apart, untie
        )
    ]
    for slot in slots:
        # An opaque norm does not show what it does with its own parameters.
        hidden = next((owner for owner in slot.owners if owner.module in inside), None)
        slot.fixed = slot.fixed or (f"{hidden} is part of a norm" if hidden else None)
    return Graph(modules, program.graph.nodes, slots)


def _slots(
    tensor: Tensor, nodes: Mapping[Owner, list[Node]], apart: bool, untie: bool
) -> list[Slot]:
    """Return the slots of one tensor: one for each owner where it may be untied, else one for all of them."""
    # A buffer stays one tensor: only parameters are untied.
    is_buffer = any(owner.table is owner.module._buffers for owner in nodes)
    if untie and not apart and not is_buffer:
        return [Slot(tensor, [owner], own) for owner, own in nodes.items()]
    hint = "" if len(nodes) == 1 or untie or is_buffer else ": pass untie=True"
    whole = Slot(tensor, list(nodes), [node for own in nodes.values() for node in own], apart, hint)
    idle = next((owner for owner, own in nodes.items() if not any(map(leaves, own))), None)
    if apart:
        whole.fixed = f"{whole.name} shares its memory with another tensor of the model"
    elif idle is not None and len(nodes) > 1:
        whole.fixed = f"{whole.name} is {idle} too, which the example does not use{hint}"
    return [whole]


def _is_functional(node: Node) -> bool:
    """Tell whether a node writes no values into another, and hides no graph of its own."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "get_attr"
    # A constant in the model's code is detached in place.
    writes = not isinstance(node.target, OpOverload) or node.target._schema.is_mutable
    return not writes or packet(node) == "aten.detach_"


def _overlapping(model: nn.Module) -> set[Tensor]:
    """Return the parameters whose memory others use too: their uses cannot be told from the graph."""
    # A module may hold tensors as plain attributes too, or in plain containers.
    known = ("_parameters", "_buffers", "_modules")
    plain = [
        {name: held for name, held in vars(m).items() if name not in known} for m in model.modules()
    ]
    storages: dict[Any, list[Tensor]] = {}
    for tensor in (
        *dict.fromkeys((*model.parameters(), *model.buffers())),
        *_held_plainly(plain, 6),
    ):
        if tensor.numel():
            storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(
                tensor
            )
    return {tensor for tensors in storages.values() if len(tensors) > 1 for tensor in tensors}


def _held_plainly(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for part in list(value.values() if isinstance(value, Mapping) else value):
            yield from _held_plainly(part, depth - 1)


class _Flat(nn.Module):
    """A model that takes and returns only the tensors in its inputs and outputs: no exporter knows all classes."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model, self.inputs, self.tensors = model, inputs, held_tensors(inputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = {id(held): tensor for held, tensor in zip(self.tensors, tensors, strict=True)}
        args, kwargs = mapped(self.inputs, lambda tensor: given[id(tensor)])
        return tuple(tensors_in(self.model(*args, **kwargs)))


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from printing the half-traced graph of a model that cannot be traced: the error says where."""
    logger = logging.getLogger("torch")
    with (
        catch_warnings(action="ignore"),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        ExitStack() as end,
    ):
        end.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        yield
