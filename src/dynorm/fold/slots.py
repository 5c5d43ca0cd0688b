"""Parameters as a fold may change them: whole, or, where it may untie them, for one owner alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from dynorm.fold.graph import Graph, Leaf, Owner
from dynorm.fold.moves import leaves


@dataclass(eq=False)
class Slot:
    """A parameter with its uses, or the part of them that one owner makes.

    Args:
        tensor: the parameter or buffer.
        owners: the modules that hold it: all, or the one.
        leaves: its uses, or the one's.
        tied: why it cannot be changed whatever it is used for, or None.
    """

    tensor: Tensor
    owners: list[Owner]
    leaves: set[Leaf] = field(default_factory=set)
    tied: str | None = None

    @property
    def name(self) -> str:
        """The name in the model, the first one."""
        return str(self.owners[0])


class Slots:
    """The slots of a model's parameters.

    Args:
        graph: the graph.
        untie: give each owner of a tied parameter a slot of its own.
        norms: the modules that are one node each in the graph: it does not show what they do with their own.
    """

    def __init__(self, graph: Graph, untie: bool, norms: Sequence[nn.Module] = ()) -> None:
        self.graph, self.untie = graph, untie
        self._hidden = {id(part) for norm in norms for part in norm.modules()}
        self._slots: dict[int, list[Slot]] = {}
        storages: dict[tuple[object, int], set[int]] = {}
        for tensor in (*graph.model.parameters(), *graph.model.buffers()):
            if tensor.numel():
                storages.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), set()).add(id(tensor))
        self._overlapping = {one for ids in storages.values() if len(ids) > 1 for one in ids}
        for tensor in _kept_apart(graph.model):
            self._overlapping |= storages.get((tensor.device, tensor.untyped_storage().data_ptr()), set())

    def of(self, leaf: Leaf, placeholder: Node) -> Slot:
        """Return the slot that a use belongs to."""
        slots = self._of_tensor(placeholder)
        return next(slot for slot in slots if leaf in slot.leaves)

    def all_of(self, placeholder: Node) -> list[Slot]:
        """Return the slots of a parameter."""
        return self._of_tensor(placeholder)

    def owners(self, tensor: Tensor) -> list[Owner]:
        """Return every module that holds a parameter."""
        return self.graph.owners(tensor)

    def unused(self, tensor: Tensor) -> bool:
        """Whether no operator of the graph uses a tensor, and one module holds it."""
        uses = (use for node in self.graph.placeholders(tensor) for use in leaves(self.graph, node))
        return len(self.graph.owners(tensor)) == 1 and next(uses, None) is None and id(tensor) not in self._overlapping

    def _of_tensor(self, placeholder: Node) -> list[Slot]:
        tensor = self.graph.tensor(placeholder)
        assert tensor is not None
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = made = self._made(tensor)
            for slot in made:
                hidden = next((owner for owner in slot.owners if id(owner.module) in self._hidden), None)
                if hidden is not None:
                    slot.tied = slot.tied or f"{hidden} is part of a norm"
        return self._slots[id(tensor)]

    def _made(self, tensor: Tensor) -> list[Slot]:
        owners = self.graph.owners(tensor)
        uses = {use for node in self.graph.placeholders(tensor) for use in leaves(self.graph, node)}
        if id(tensor) in self._overlapping:
            reason = f"{owners[0]} shares its memory with another tensor of the model"
            return [Slot(tensor, owners, uses, reason)]
        if len(owners) == 1:
            return [Slot(tensor, owners, uses)]
        by_owner: dict[int, Slot] = {i: Slot(tensor, [owner]) for i, owner in enumerate(owners)}
        whole = Slot(tensor, owners, uses)
        for use in uses:
            index = self._owner_of(use, owners)
            if index is None:
                names = ", ".join(map(str, owners))
                whole.tied = f"{names} are one parameter, and nothing shows whose use {self.graph.where(use[0])} is"
                return [whole]
            by_owner[index].leaves.add(use)
        # A buffer stays one tensor: only parameters are untied.
        buffer = any(owner.name in owner.module._buffers for owner in owners)
        if self.untie and not buffer:
            return list(by_owner.values())
        idle = [owner for i, owner in enumerate(owners) if not by_owner[i].leaves]
        if idle:
            hint = "" if buffer else ": pass untie=True"
            whole.tied = f"{owners[0]} is {idle[0]} too, which the example does not use{hint}"
        return [whole]

    def _owner_of(self, use: Leaf, owners: list[Owner]) -> int | None:
        for module in reversed(self.graph.modules_of(use[0])):
            held = [i for i, owner in enumerate(owners) if owner.module is module]
            if held:
                return held[0] if len(held) == 1 else None
        return None


def _kept_apart(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules hold as plain attributes, or in plain containers: nothing shows their uses."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(value, 4)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        for part in list(value.values() if isinstance(value, Mapping) else value):
            yield from _tensors(part, depth - 1)
