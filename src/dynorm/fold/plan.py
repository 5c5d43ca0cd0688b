"""What is to be done at each place of a model, and the doing: everything is computed before anything is swapped."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from dynorm.fold.affine import AffineFold, plan_affine
from dynorm.fold.capture import capture
from dynorm.fold.constants import CenterFold, plan_constants
from dynorm.fold.edits import Edits
from dynorm.fold.exact import affine_is_exact, center_is_exact
from dynorm.fold.graph import Owner, shape
from dynorm.fold.marks import untied
from dynorm.fold.modules import plan_modules
from dynorm.fold.places import Place, fill_neutral
from dynorm.fold.slots import Slot, Slots
from dynorm.fold.stream import Stream, plan_center
from dynorm.fold.swap import Swap, rms_for
from dynorm.layers import PointwiseNorm


class Plan:
    """What is to be done at each place, and how it is done."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places
        self.affine: list[AffineFold] = []
        self.streams: dict[int, list[Stream]] = {}
        self.centers: dict[int, CenterFold] = {}
        self.asked = {"affine": False, "center": False, "constants": False}
        self.slots: Slots | None = None
        self.edits: Edits | None = None
        self.calls: dict[int, list[int]] = {}

    def by_graph(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        affine: bool,
        center: bool,
        constants: bool,
        add_bias: bool,
        untie: bool,
    ) -> None:
        """Make the plan from the model's graph."""
        self.asked = {"affine": affine, "center": center, "constants": constants}
        # A norm that cannot be folded is traced as what it is.
        opaque = [place for place in self.places if place.problem is None]
        graph = capture(model, [place.module for place in opaque], args, kwargs)
        index = {i: self.places.index(place) for i, place in enumerate(opaque)}
        graph.renumber(index)
        self.calls = {i: [math.prod(shape(call)) for call in calls] for i, calls in graph.calls.items()}
        slots = self.slots = Slots(graph, untie, [place.module for place in opaque])
        self.edits = Edits(slots)
        self.affine = plan_affine(graph, slots, self.places, affine=affine, constants=constants, add_bias=add_bias)
        self._require_exact_affine()
        if center:
            self.streams = plan_center(graph, slots, self.places)
            self._require_exact_center()
        if constants:
            self.centers = plan_constants(graph, slots, self.places)
        self._edit()

    def by_modules(
        self, model: nn.Module, args: Any, kwargs: Any, affine: bool, constants: bool, add_bias: bool
    ) -> None:
        """Make the plan from what the linear layers are seen to read; affine maps only."""
        self.asked["affine"], self.asked["constants"] = affine, constants
        self.slots, self.affine = plan_modules(
            model, self.places, args, kwargs, affine=affine, constants=constants, add_bias=add_bias
        )
        sites = [place.site for place in self.places]
        self.calls = {i: [site.calls * math.prod(site.input_shape)] for i, site in enumerate(sites)}
        self._require_exact_affine()
        self.edits = Edits(self.slots)
        self._edit()

    def anything(self) -> bool:
        """Whether there is something to fold."""
        return bool(self.edits is not None and (self.edits.changes or self.edits.added)) or self.to_rms() != []

    def _require_exact_affine(self) -> None:
        for fold in self.affine:
            if fold.done and not fold.place.pointwise and not affine_is_exact(fold.place):
                fold.problem = "it is no norm times its weight plus its bias to the last digits"
        # Partners of one weight fall together, and their partners with them.
        changed = True
        while changed:
            changed = False
            bad = {id(r.weight) for fold in self.affine if not fold.done for r in fold.reads}
            for fold in self.affine:
                if fold.done and any(id(r.weight) in bad for r in fold.reads):
                    fold.problem, changed = "a reader is shared with a norm that cannot be folded", True

    def _require_exact_center(self) -> None:
        for index, streams in self.streams.items():
            if any(stream.problem is None for stream in streams) and not center_is_exact(self.places[index]):
                for stream in streams:
                    stream.problem = stream.problem or f"{self.places[index].path} is no LayerNorm to the last digits"

    def _edit(self) -> None:
        assert self.edits is not None
        for fold in self.affine:
            if fold.done:
                self.edits.affine(fold)
        for stream in dict.fromkeys(stream for i in self.to_rms() for stream in self.streams[i]):
            self.edits.center(stream)
        for center in self.centers.values():
            if center.problem is None:
                self.edits.offset(center)

    def to_rms(self) -> list[int]:
        """The LayerNorms that become RMSNorms: chosen, and in streams that are centred, all of them."""
        return [i for i in self.streams if self.center_problem(i) is None and self.places[i].chosen]

    def center_problem(self, index: int) -> str | None:
        """Why a LayerNorm stays one: one of the streams that it is called on cannot be centred."""
        return next((s.problem for s in self.streams[index] if s.problem is not None), None)

    def apply_(self, model: nn.Module, swap: Swap) -> None:
        """Compute everything, then swap."""
        assert self.edits is not None
        assert self.slots is not None
        values = list(self.edits.values())
        biases = list(self.edits.biases())
        layers = [(self.places[i], rms_for(model, self.places[i], self.affine[i].done)) for i in self.to_rms()]
        for tensor, mine in _by_tensor(values).items():
            _swap_tensor(swap, tensor, mine, self.slots)
        if untied(model):
            swap.untie_config(model)
        for owner, bias in biases:
            swap.add_bias(owner, bias)
        for fold in self.affine:
            if not fold.done:
                continue
            if isinstance(fold.place.module, PointwiseNorm):
                swap.neutral_layer(fold.place.module, self.asked["affine"])
            else:
                # A norm that is replaced too: the model may call it through a list of its own as well.
                for held, value in fill_neutral(fold.place):
                    swap.fill(held, held.detach().new_full(held.shape, value))
        for place, layer in layers:
            swap.replace(model, place.module, layer)
        for center in self.centers.values():
            if center.problem is None:
                assert isinstance(center.place.module, PointwiseNorm)
                swap.remove_center(center.place.module)


def _by_tensor(values: list[tuple[Slot, Tensor]]) -> dict[Tensor, list[tuple[Slot, Tensor]]]:
    found: dict[Tensor, list[tuple[Slot, Tensor]]] = {}
    for slot, value in values:
        found.setdefault(slot.tensor, []).append((slot, value))
    return found


def _swap_tensor(swap: Swap, tensor: Tensor, mine: list[tuple[Slot, Tensor]], slots: Slots) -> None:
    """Give a parameter its new value; where its owners' values differ, the first unchanged one keeps it as it is."""
    holders = slots.owners(tensor)
    changed: dict[Owner, Tensor] = {owner: value for slot, value in mine for owner in slot.owners}
    if len(changed) == len(holders) and all(value.equal(mine[0][1]) for _, value in mine):
        swap.fill(tensor, mine[0][1])
        return
    everyone = len(changed) == len(holders)
    for i, (owner, value) in enumerate(changed.items()):
        if everyone and i == 0:
            continue
        swap.untie(owner, value)
    if everyone:
        swap.fill(tensor, next(iter(changed.values())))
