"""Rewrite (a): weight and bias of a norm into everything that reads it, W' = W diag(weight), b' = b + W bias."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.fold.graph import Graph, Leaf, packet, shape, users
from dynorm.fold.moves import averaged, factor_of, is_move, moved
from dynorm.fold.places import Place
from dynorm.fold.readers import Read, read
from dynorm.fold.slots import Slot, Slots


@dataclass(eq=False)
class AffineFold:
    """What happens to the affine map of one norm.

    Args:
        place: the norm.
        factor: what multiplies each channel, or None for 1.
        shift: what is added to it, or None for 0.
        reads: everything that reads it.
        problem: why it stays, or None.
        nothing: whether there is nothing to fold.
    """

    place: Place
    factor: Tensor | None = None
    shift: Tensor | None = None
    reads: list[Read] = field(default_factory=list)
    problem: str | None = None
    nothing: bool = False

    @property
    def done(self) -> bool:
        """Whether it is folded."""
        return self.problem is None and not self.nothing


def plan_affine(
    graph: Graph, slots: Slots, places: list[Place], *, affine: bool, constants: bool, add_bias: bool
) -> list[AffineFold]:
    """Decide for each norm whether its weight and bias can go into what reads it.

    They can if every use of its output, through whatever keeps the channels, is a product with a parameter, if no
    other value is multiplied by that parameter, and if the products have a bias where one is needed.

    Args:
        graph: the traced model.
        slots: its parameters.
        places: its norms, numbered as in the graph.
        affine: fold weight and bias.
        constants: fold the scale of point-wise layers.
        add_bias: a reader may get a bias that it lacks.
    """
    folds = [_open(graph, i, place, affine, constants) for i, place in enumerate(places)]
    of_leaf = {r.leaf: (fold, r) for fold in folds for r in fold.reads}
    for fold in folds:
        if fold.problem is None and not fold.nothing:
            fold.problem = _weights_problem(slots, fold, of_leaf) or _own_problem(slots, fold)
        if fold.problem is None and fold.shift is not None:
            fold.problem = _bias_problem(graph, slots, fold, of_leaf, add_bias)
    # A weight that several norms share changes for all of them or for none.
    changed = True
    while changed:
        changed = False
        for fold in folds:
            other = next((o for o in _partners(slots, fold, of_leaf) if not o.done), None)
            if fold.done and other is not None:
                fold.problem, changed = f"a reader is shared with {other.place.path}, which cannot be folded", True
    return folds


def new_bias_owner(slots: Slots, found: Read) -> nn.Module | None:
    """Return the module that can be given the bias that a reader lacks, or None."""
    slot = slots.of(found.leaf, found.weight)
    owner = slot.owners[0].module
    return owner if len(slot.owners) == 1 and takes_bias(owner) else None


def takes_bias(module: nn.Module) -> bool:
    """Whether a module lacks a bias, and would add one: a convolution of torch's own, or a linear layer."""
    if module._parameters.get("bias", 0) is not None or "forward" in module.__dict__:
        return False
    known = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if any(isinstance(module, kind) and type(module).forward is kind.forward for kind in known):
        return True
    return isinstance(module, nn.Linear) and _adds_bias(module)


def _adds_bias(module: nn.Linear) -> bool:
    """Whether a linear layer with a forward of its own adds its bias: tried on a copy whose weight is zero."""
    weight = torch.zeros_like(module.weight)
    bias = torch.arange(1, len(weight) + 1, dtype=weight.dtype, device=weight.device)
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = {**module._parameters, "weight": weight, "bias": bias}
    x = weight.new_ones(2, weight.shape[1])
    try:
        with torch.no_grad():
            result = tried.forward(x)
    # Whatever a foreign forward raises, it does not add the bias to the product with the weight, and nothing else.
    except Exception:
        return False
    return isinstance(result, Tensor) and torch.equal(result, bias.expand(2, -1))


def _open(graph: Graph, index: int, place: Place, affine: bool, constants: bool) -> AffineFold:
    fold = AffineFold(place, problem=place.problem)
    if fold.problem is not None:
        return fold
    if index not in graph.calls:
        fold.problem = "never called while the model was traced"
        return fold
    fold.factor, fold.shift = place.vectors(affine and place.chosen, constants and place.chosen)
    fold.nothing = fold.factor is None and fold.shift is None
    scaled = _collect(graph, fold, graph.calls[index])
    if fold.problem is None and scaled and fold.shift is not None:
        fold.problem = "scaled token by token before it is read, and its bias with it"
    if not place.chosen:
        fold.problem = "not chosen"
    return fold


def _collect(graph: Graph, fold: AffineFold, calls: list[Node]) -> bool:
    """Find all reads of a norm's outputs; whether some are of outputs that a factor of each token scaled."""
    any_scaled = False
    todo = [(call, fold.place.axis(len(shape(call))), False, _bytes(call)) for call in calls]
    seen = set()
    while todo and fold.problem is None:
        value, axis, scaled, narrowest = todo.pop()
        if (value, axis) in seen:
            continue
        seen.add((value, axis))
        for user in users(value):
            if user.op == "output":
                fold.problem = "the model returns it"
                break
            to = axis if factor_of(user, value, axis) else averaged(user, value, axis)
            if to is None and is_move(user, value):
                to = moved(user, value, axis)
                if to is None:
                    fold.problem = f"its channels are split or reordered by {graph.where(user)}"
                    break
            if to is not None:
                factor = packet(user) in ("aten.mul", "aten.div")
                todo.append((user, to, scaled or factor, min(narrowest, _bytes(user))))
                continue
            found = read(graph, user, value, axis)
            if isinstance(found, str):
                fold.problem = found
                break
            if narrowest < min(_bytes(call) for call in calls) and narrowest < _bytes(found.weight):
                fold.problem = f"rounded to fewer digits than the weight has before {graph.where(user)} reads it"
                break
            if found not in fold.reads:
                fold.reads.append(found)
            any_scaled |= scaled
    if fold.problem is None and not fold.reads:
        fold.problem = "nothing reads it"
    return any_scaled


def _bytes(node: Node) -> int:
    size: int = node.meta["val"].dtype.itemsize
    return size


def _weights_problem(slots: Slots, fold: AffineFold, of_leaf: dict[Leaf, tuple[AffineFold, Read]]) -> str | None:
    for found in fold.reads:
        slot = slots.of(found.leaf, found.weight)
        if slot.tied is not None:
            return slot.tied
        if not slots.graph.is_saved(slot.tensor) or not slot.tensor.is_floating_point():
            return f"{slot.name}, which reads it, is no parameter of floating point"
        for leaf in slot.leaves:
            other, theirs = of_leaf.get(leaf, (None, None))
            if other is None or theirs is None:
                use = slots.graph.where(leaf[0])
                hint = ": pass untie=True" if len(slot.owners) > 1 and not slots.untie else ""
                return f"{slot.name}, which reads it, is also used by {use}{hint}"
            same = _equal(fold.factor, other.factor) and _equal(fold.shift, other.shift)
            if not same or (theirs.axis, theirs.groups) != (found.axis, found.groups):
                return f"{slot.name}, which reads it, also reads {other.place.path}, whose weight or bias differs"
    return None


def _own_problem(slots: Slots, fold: AffineFold) -> str | None:
    if fold.place.pointwise:
        return None
    tensors = fold.place.parameters()
    unsaved = next((tensor for tensor in tensors if not slots.graph.is_saved(tensor)), None)
    if unsaved is not None:
        return f"{slots.graph.owners(unsaved)[0]} is not saved with the model: it would come back when it is loaded"
    shared = next((tensor for tensor in tensors if not slots.unused(tensor)), None)
    if shared is None:
        return None
    return f"{slots.graph.owners(shared)[0]} is used elsewhere too"


def _bias_problem(
    graph: Graph, slots: Slots, fold: AffineFold, of_leaf: dict[Leaf, tuple[AffineFold, Read]], add_bias: bool
) -> str | None:
    for found in fold.reads:
        slot = slots.of(found.leaf, found.weight)
        # A bias added to the layer would reach the use that has one of its own too.
        if any((of_leaf[leaf][1].bias is None) != (found.bias is None) for leaf in slot.leaves):
            return f"{slot.name}, which reads it, has a bias in one use and none in another"
        if found.shift is not None:
            return f"its bias cannot be folded: {found.shift}"
        if found.bias is None:
            if not add_bias:
                return f"{slot.name} has no bias to take its bias: pass add_bias=True"
            owner = new_bias_owner(slots, found)
            # Whoever takes the weight without calling the layer would not add its bias.
            if owner is None or owner not in graph.modules_of(found.node):
                return f"no bias can be added to {slot.name}: it is not the weight of one linear layer"
            continue
        bias = slots.of(*found.bias)
        if bias.tied is not None or bias.tensor is slot.tensor:
            return bias.tied or f"{bias.name} is a weight too"
        mine = {r.bias[0] for r in fold.reads if r.bias is not None and slots.of(r.leaf, r.weight) is slot}
        other = next((leaf for leaf in bias.leaves if leaf not in mine), None)
        if other is not None:
            return f"{bias.name} is also used by {graph.where(other[0])}"
    return None


def _partners(slots: Slots, fold: AffineFold, of_leaf: dict[Leaf, tuple[AffineFold, Read]]) -> list[AffineFold]:
    if not fold.done:
        return []
    found = [of_leaf[leaf][0] for r in fold.reads for leaf in slots.of(r.leaf, r.weight).leaves if leaf in of_leaf]
    return [other for other in found if other is not fold]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def slot_names(slots: Slots, reads: list[Read]) -> list[str]:
    """Return the names of the weights that read a norm, each once, in order."""
    found: dict[Slot, None] = dict.fromkeys(slots.of(r.leaf, r.weight) for r in reads)
    return [slot.name for slot in found]
