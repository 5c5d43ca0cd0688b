"""Trace a model's graph: each norm becomes one opaque node, and parameters know their owners."""

import functools
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from dynorm.batches import Inputs
from dynorm.errors import DynormError, ModelError
from dynorm.fold.graph import Owner, Slot, norm_index, packet
from dynorm.fold.tensors import mapped, tensors_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Owners = dict[Tensor, list[Owner]]
"""The modules that hold each parameter or buffer."""


@functools.cache
def _norm_call() -> Callable[[Tensor, int], Tensor]:
    """Return the operator that takes the place of the norm with an index while a model is traced.

    It is registered when it is first needed, not when dynorm is imported.
    """

    @torch.library.custom_op("dynorm::norm_call", mutates_args=())
    def norm_call(x: Tensor, index: int) -> Tensor:
        return x.clone()

    norm_call.register_fake(lambda x, index: torch.empty_like(x))
    return norm_call


def _hidden_norm(index: int) -> Callable[[Tensor], Tensor]:
    """Return the forward of a norm that is one opaque operator."""
    norm_call = _norm_call()
    return lambda x: norm_call(x, index)


Ties = list[list[nn.Parameter]]
"""Each tied parameter, followed by its copies for all owners but the first."""


@torch.inference_mode(False)
def separated_(model: nn.Module) -> Ties:
    """Give every owner of a tied parameter but the first a copy of it, and return which were tied."""
    ties = []
    for tensor, owners in _owners(model).items():
        if len(owners) == 1 or not isinstance(tensor, nn.Parameter):
            continue
        tie = [tensor]
        for owner in owners[1:]:
            copied = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
            owner.module._parameters[owner.name] = copied
            tie.append(copied)
        ties.append(tie)
    return ties


class Graph:
    """The graph of one call of a model, with all its parameters and buffers.

    The caller undoes all changes of the model: trace it inside
    ``undisturbed(model, attributes=True)``. Sizes are those of the example, and code that the
    example does not run is not in the graph. Each of the ``norms``, by index, becomes one node,
    ``norm_call(x, index)``. ``ties`` are the parameters that were separated.
    """

    def __init__(
        self,
        model: nn.Module,
        norms: Mapping[int, nn.Module],
        example: Inputs,
        ties: Ties,
    ) -> None:
        # Before the trace, which may keep tensors of its own on the modules.
        owners = _owners(model)
        overlapping = _overlapping(model)
        for number, norm in norms.items():
            # Python finds an instance attribute before the method of the class.
            norm.__dict__["forward"] = _hidden_norm(number)
        try:
            with catch_warnings(action="ignore"):
                program = exported(Flat(model, example))
        except DynormError:
            raise
        # torch.export raises many kinds of errors, and passes on those of the model's code.
        except Exception as error:
            raise _not_traceable(error) from error
        self.slots = _slots(owners, overlapping, norms.values(), _placeholders(program))
        self.ties = [[self.slots[parameter] for parameter in tie] for tie in ties]
        # The calls of each norm, by the index of the norm.
        self.calls: dict[int, list[Node]] = {}
        for node in program.graph.nodes:
            index = norm_index(node)
            if index is not None:
                self.calls.setdefault(index, []).append(node)
        # A dropout in place would write into the values around a norm that is gone.
        self.drops_in_place = any(isinstance(m, _DropoutNd) and m.inplace for m in model.modules())


def _slots(
    owners_of: Owners,
    overlapping: set[Tensor],
    norms: Iterable[nn.Module],
    placeholders: Mapping[str, list[Node]],
) -> dict[Tensor, Slot]:
    """Return all parameters and buffers of a model, with the reasons why some must not change."""
    inside: set[nn.Module] = set()
    for norm in norms:
        inside |= set(norm.modules())
    slots = {}
    for tensor, owners in owners_of.items():
        nodes = []
        for owner in owners:
            for path in owner.paths:
                nodes += placeholders.get(f"{path}.{owner.name}".lstrip("."), [])
        first = owners[0]
        is_left_out = first.name in first.module._non_persistent_buffers_set
        blocked = None
        if tensor in overlapping:
            blocked = f"{first} shares its memory with another tensor of the model"
        elif len(owners) > 1:
            blocked = f"{first} is {owners[1]} too"
            if isinstance(tensor, nn.Parameter):
                blocked += ": pass untie=True (--untie)"
        elif is_left_out or not tensor.is_floating_point():
            blocked = f"{first} is not saved with the model in floating point"
        is_in_norm = any(owner.module in inside for owner in owners)
        slots[tensor] = Slot(tensor, owners, nodes, blocked, is_in_norm)
    return slots


def _owners(model: nn.Module) -> Owners:
    """Return the modules that hold each tensor."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    owners: Owners = {}
    for module in paths:
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                owner = Owner(module, name, tuple(paths[module]))
                owners.setdefault(tensor, []).append(owner)
    return owners


def exported(flat: "Flat") -> "ExportedProgram":
    """Trace a model without strict mode, with functional operators; linear operators stay whole."""
    # This import loads sympy, which importing dynorm must not do.
    import torch.export

    program = torch.export.export(
        flat, tuple(tensor.detach() for tensor in flat.tensors), strict=False
    )
    if all(map(_is_functional, program.graph.nodes)):
        # An operator whose result is not used is not a use of its inputs.
        program.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        return program
    # This is a second trace, and takes longer than the rest of a fold.
    decomposed: ExportedProgram = program.run_decompositions({})
    return decomposed


def _is_functional(node: Node) -> bool:
    """Return whether a node writes into no other value, and is not a subgraph."""
    if node.op == "get_attr":
        return False
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    # A constant in the model's code is detached in place.
    if packet(node) == "aten.detach_":
        return True
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable


def _not_traceable(error: Exception) -> ModelError:
    """Return the error that says which line of the model cannot be traced."""
    message = (str(error).strip().splitlines() or ["nothing more"])[0]
    # The innermost line that is neither torch's nor ours. A user's folder may be called torch or
    # dynorm too, so whole paths are compared.
    torch_folder = str(Path(torch.__file__).parent)
    our_folder = str(Path(__file__).parents[1])
    foreign = (torch_folder, our_folder, "<string>", sys.base_prefix + "/lib")
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        if not name.startswith(foreign) and "/site-packages/sympy/" not in name:
            where = f" at {name}:{frame.lineno} (in {frame.name})"
    return ModelError(
        f"the model must be traceable by torch.export, but{where} it raised "
        f"{type(error).__name__}: {message}; data-dependent control flow cannot be analysed: write "
        "it with torch.where, skip it if torch.compiler.is_exporting(), or fold the parts of the "
        "model that have none"
    )


def _placeholders(program: "ExportedProgram") -> dict[str, list[Node]]:
    """Return the nodes of each parameter and buffer, by its name in the model."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if node.name in names:
            nodes.setdefault(names[node.name].removeprefix("model."), []).append(node)
    return nodes


def _overlapping(model: nn.Module) -> set[Tensor]:
    """Return the tensors that share memory with others: the graph does not show their uses."""
    tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
    # A module may hold tensors as plain attributes too, or in plain containers.
    plain: list[Tensor] = []
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                plain += filter(_is_strided, tree_leaves(value))
    by_memory: dict[object, list[Tensor]] = {}
    for tensor in (*tensors, *plain):
        if tensor.numel():
            memory = (tensor.device, tensor.untyped_storage().data_ptr())
            by_memory.setdefault(memory, []).append(tensor)
    overlapping: set[Tensor] = set()
    for tensors_there in by_memory.values():
        if len(tensors_there) > 1:
            overlapping.update(tensors_there)
    return overlapping


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


class Flat(nn.Module):
    """A model that takes and returns plain tensors, because no exporter knows all classes."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.tensors = tensors_in(inputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the model's output, with these in the place of its inputs'."""
        by_id = {id(held): tensor for held, tensor in zip(self.tensors, tensors, strict=True)}
        args, kwargs = mapped(self.inputs, lambda tensor: by_id[id(tensor)])
        return tuple(tensors_in(self.model(*args, **kwargs)))
