"""The fallback without a graph: which linear layers read a norm, seen from one real run; affine maps only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from dynorm.fold.affine import AffineFold, takes_bias
from dynorm.fold.graph import Leaf, Owner
from dynorm.fold.places import Place
from dynorm.fold.readers import Read
from dynorm.fold.slots import Slot, Slots
from dynorm.fold.watch import READERS, watch


class ModuleSlots(Slots):
    """The parameters of readers, each held by one module only."""

    def __init__(self) -> None:
        self.untie = False
        self._by_node: dict[int, Slot] = {}

    def add(self, node: Node, tensor: Tensor, owner: Owner) -> None:
        """Let a node stand for a parameter."""
        self._by_node[id(node)] = Slot(tensor, [owner])

    def of(self, leaf: Leaf, placeholder: Node) -> Slot:
        """Return the slot of a parameter."""
        return self._by_node[id(placeholder)]

    def owners(self, tensor: Tensor) -> list[Owner]:
        """Return the module that holds a parameter."""
        return [owner for slot in self._by_node.values() if slot.tensor is tensor for owner in slot.owners]


def plan_modules(
    model: nn.Module,
    places: list[Place],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    affine: bool,
    constants: bool,
    add_bias: bool,
) -> tuple[ModuleSlots, list[AffineFold]]:
    """Decide as :func:`plan_affine` does, from one run: every operator that touches a norm's output must be a reader's.

    What the run does not do is not seen, so the check by numbers is all that stands behind such a fold.
    """
    seen, inputs = watch(model, places, args, kwargs)
    slots = ModuleSlots()
    paths = {module: path for path, module in model.named_modules()}
    holders: dict[int, int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            holders[id(tensor)] = holders.get(id(tensor), 0) + 1
    unsaved = {id(m._buffers[name]) for m in model.modules() for name in m._non_persistent_buffers_set}
    folds = []
    for place in places:
        fold = AffineFold(place, problem=place.problem if place.chosen else "not chosen")
        folds.append(fold)
        if fold.problem is not None:
            continue
        fold.factor, fold.shift = place.vectors(affine, constants)
        fold.nothing = fold.factor is None and fold.shift is None
        if fold.nothing:
            continue
        fold.problem = seen[place.module].problem
        if any(id(tensor) in unsaved for tensor in place.parameters()):
            fold.problem = "its weight or bias is not saved with the model: it would come back when it is loaded"
        if fold.problem is None and not seen[place.module].readers:
            fold.problem = "nothing reads it"
        for reader in dict.fromkeys(seen[place.module].readers):
            fold.problem = fold.problem or _reader_problem(reader, place, fold, inputs, holders, paths, add_bias)
            if fold.problem is None:
                fold.reads.append(_read(slots, reader, paths[reader]))
    return slots, folds


def _reader_problem(
    reader: nn.Module,
    place: Place,
    fold: AffineFold,
    inputs: dict[nn.Module, list[nn.Module | None]],
    holders: dict[int, int],
    paths: dict[nn.Module, str],
    add_bias: bool,
) -> str | None:
    path = paths[reader]
    if any(source is not place.module for source in inputs[reader]):
        return f"{path}, which reads it, also reads something else"
    if any(holders[id(p)] > 1 for p in [*reader._parameters.values(), *place.parameters()] if p is not None):
        return f"{path}, or the norm itself, shares a parameter"
    if fold.shift is not None and reader._parameters.get("bias") is None:
        if not add_bias:
            return f"{path} has no bias to take its bias: pass add_bias=True"
        if not takes_bias(reader):
            return f"no bias can be added to {path}"
    return None


def _read(slots: ModuleSlots, reader: nn.Module, path: str) -> Read:
    graph = FxGraph()
    nodes = [graph.placeholder(name) for name in ("weight", "bias")]
    axis = READERS[type(reader).__name__]
    assert isinstance(reader.weight, Tensor)
    slots.add(nodes[0], reader.weight, Owner(reader, "weight", path))
    bias = None
    if reader.bias is not None:
        assert isinstance(reader.bias, Tensor)
        slots.add(nodes[1], reader.bias, Owner(reader, "bias", path))
        bias = ((nodes[1], nodes[1]), nodes[1])
    return Read(nodes[0], (nodes[0], nodes[0]), nodes[0], axis, 1 - axis, bias=bias)
