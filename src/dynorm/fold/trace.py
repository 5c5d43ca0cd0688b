"""Trace a model's graph: each norm becomes one opaque node, and parameters know their owners."""

import itertools
import logging
import operator
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from dynorm.batches import Inputs
from dynorm.errors import DynormError, ModelError
from dynorm.fold.graph import Owner, Slot, leaves_of, norm_index, packet
from dynorm.fold.tensors import mapped, tensors_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram

Owners = dict[Tensor, list[Owner]]


@torch.library.custom_op("dynorm::norm_call", mutates_args=())
def norm_call(x: Tensor, index: int) -> Tensor:
    """Take the place of the norm with an index while a model is traced."""
    return x.clone()


@norm_call.register_fake
def _(x: Tensor, index: int) -> Tensor:
    return torch.empty_like(x)


class Graph:
    """The graph of one call of a model, with all its parameters and buffers.

    The caller undoes all changes of the model: trace it inside
    ``undisturbed(model, attributes=True)``. Sizes are those of the example, and code that the
    example does not run is not in the graph. Each of the ``norms``, by index, becomes one node,
    ``norm_call(x, index)``. With ``untie``, each owner of a tied parameter may get a tensor that it
    does not share.
    """

    def __init__(
        self, model: nn.Module, norms: Mapping[int, nn.Module], example: Inputs, untie: bool
    ) -> None:
        owners = _owners(model)
        overlapping = _overlapping(model)
        separable = {tensor: owners[tensor] for tensor in owners if tensor not in overlapping}
        _show_owners_(separable)
        _hide_norms_(norms)
        try:
            with _silent():
                program = _exported(_Flat(model, example))
        except DynormError:
            raise
        # torch.export raises many kinds of errors, and passes on those of the model's code.
        except Exception as error:
            raise _not_traceable(error) from error
        placeholders = _placeholders(program)
        self.slots: list[Slot] = []
        for tensor, holders in owners.items():
            nodes = {owner: _nodes_of(owner, placeholders) for owner in holders}
            self.slots += _slots(tensor, nodes, tensor in overlapping, untie)
        _forbid_parts_of(norms.values(), self.slots)
        # The calls of each norm, by the index of the norm.
        self.calls: dict[int, list[Node]] = {}
        for node in program.graph.nodes:
            index = norm_index(node)
            if index is not None:
                self.calls.setdefault(index, []).append(node)


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


def _show_owners_(owners: Owners) -> None:
    """Give every owner of a tied tensor but the first an alias of it, so that the graph shows whose is used."""
    for tensor, holders in owners.items():
        for owner in holders[1:]:
            alias = tensor.detach()
            if isinstance(tensor, nn.Parameter):
                alias = nn.Parameter(alias, tensor.requires_grad)
            owner.table[owner.name] = alias


def _hide_norms_(norms: Mapping[int, nn.Module]) -> None:
    """Make each norm compute one opaque operator."""

    def hidden(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.ops.dynorm.norm_call(x, index)

    for index, norm in norms.items():
        # Python finds an instance attribute before the method of the class.
        norm.__dict__["forward"] = hidden(index)


def _exported(flat: "_Flat") -> "ExportedProgram":
    """Trace a model without strict mode, with functional operators; linear operators stay whole."""
    # This import loads sympy, which importing dynorm must not do.
    import torch.export

    program = torch.export.export(flat, tuple(flat.tensors), strict=False)
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


def _nodes_of(
    owner: Owner,
    placeholders: Mapping[str, list[Node]],
) -> list[Node]:
    """Return the nodes of a parameter under all paths of its module."""
    nodes = []
    for path in owner.paths:
        nodes += placeholders.get(f"{path}.{owner.name}" if path else owner.name, [])
    return nodes


def _slots(
    tensor: Tensor, nodes: Mapping[Owner, list[Node]], overlaps: bool, untie: bool
) -> list[Slot]:
    """Return the slots of one tensor: one for each owner if it may be untied, else one for all."""
    # Only parameters are untied; a buffer stays one tensor.
    is_buffer = any(owner.table is owner.module._buffers for owner in nodes)
    if untie and not overlaps and not is_buffer:
        return [Slot(tensor, [owner], nodes[owner]) for owner in nodes]
    hint = "" if len(nodes) == 1 or untie or is_buffer else ": pass untie=True"
    all_nodes = list(itertools.chain.from_iterable(nodes.values()))
    slot = Slot(tensor, list(nodes), all_nodes, overlaps=overlaps, hint=hint)
    if overlaps:
        slot.refused = f"{slot.name} shares its memory with another tensor of the model"
    elif len(nodes) > 1:
        for owner, owner_nodes in nodes.items():
            if not any(map(leaves_of, owner_nodes)):
                slot.refused = f"{slot.name} is {owner} too, which the example does not use{hint}"
                break
    return [slot]


def _forbid_parts_of(norms: Iterable[nn.Module], slots: Sequence[Slot]) -> None:
    """Note that a norm's tensors must not change: an opaque norm does not show how it uses them."""
    inside: set[nn.Module] = set()
    for norm in norms:
        inside |= set(norm.modules())
    for slot in slots:
        for owner in slot.owners:
            if owner.module in inside and slot.refused is None:
                slot.refused = f"{owner} is part of a norm"


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


class _Flat(nn.Module):
    """A model that takes and returns plain tensors, because no exporter knows all classes."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.tensors = tensors_in(inputs)
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        by_id = {id(held): tensor for held, tensor in zip(self.tensors, tensors, strict=True)}
        args, kwargs = mapped(self.inputs, lambda tensor: by_id[id(tensor)])
        return tuple(tensors_in(self.model(*args, **kwargs)))


@contextmanager
def _silent() -> Iterator[None]:
    """Keep torch from printing the half-traced graph of a model that cannot be traced."""
    logger = logging.getLogger("torch")
    with (
        catch_warnings(action="ignore"),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        ExitStack() as stack,
    ):
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        yield
