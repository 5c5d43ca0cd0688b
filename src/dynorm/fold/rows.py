"""The report of a plan that was carried out."""

from __future__ import annotations

import math

from torch import nn

from dynorm.fold.affine import AffineFold, slot_names
from dynorm.fold.check import Check
from dynorm.fold.marks import added_biases, untied
from dynorm.fold.places import Place
from dynorm.fold.plan import Plan
from dynorm.fold.report import FOLDED, NOTHING, OFF, REFUSED, FoldedSite, FoldReport, Rewrite
from dynorm.fold.slots import Slot
from dynorm.fold.stream import slots_of


def report_of(plan: Plan, model: nn.Module, before: Check | None, error: float | None = None) -> FoldReport:
    """Say what was done."""
    sites = [_row(plan, i, place) for i, place in enumerate(plan.places)]
    sites.sort(key=lambda row: [place.path for place in plan.places].index(row.path))
    biases, free = added_biases(model), untied(model)
    ours = bool(biases or plan.to_rms()) or any(place.pointwise for place in plan.places)
    # transformers does not tie what is saved apart; another class does.
    ours = ours or bool(free and not hasattr(model, "save_pretrained"))
    return FoldReport(
        sites,
        biases,
        free,
        error,
        None if before is None else before.tolerance,
        None if before is None else before.noise,
        "dynorm" if ours else "stock",
        fresh=0 if before is None else before.fresh,
    )


def _row(plan: Plan, index: int, place: Place) -> FoldedSite:
    affine, center = _affine_row(plan, index, place), _center_row(plan, index, place)
    constants = _constants_row(plan, index, place)
    elements, channels = sum(plan.calls.get(index, [])), math.prod(place.site.normalized_shape)
    parameters = operations = 0
    if affine.state == FOLDED:
        parameters = channels * ((place.weight is not None) + (place.bias is not None))
        operations = elements * ((place.weight is not None) + (place.bias is not None))
    if center.state == FOLDED:
        # A sum for the mean, and a difference.
        operations += 2 * elements
    fold = plan.centers.get(index)
    if fold is not None and fold.problem is None:
        parameters, operations = parameters + fold.center.numel(), operations + elements
    becomes = "RMSNorm" if center.state == FOLDED else ""
    return FoldedSite(
        place.path,
        place.site.kind or place.site.class_name,
        channels,
        affine,
        center,
        constants,
        parameters,
        operations,
        becomes,
    )


def _affine_row(plan: Plan, index: int, place: Place) -> Rewrite:
    if not plan.asked["affine"] or not place.chosen:
        return Rewrite(OFF)
    fold = plan.affine[index]
    if fold.problem is not None:
        empty = place.problem is None and place.weight is None and place.bias is None
        return Rewrite(NOTHING) if empty and not place.pointwise else Rewrite(REFUSED, reason=fold.problem)
    if fold.nothing or (place.weight is None and place.bias is None):
        return Rewrite(NOTHING)
    return Rewrite(FOLDED, tuple(_names(plan, fold)))


def _center_row(plan: Plan, index: int, place: Place) -> Rewrite:
    if not plan.asked["center"] or not place.chosen:
        return Rewrite(OFF)
    if place.site.kind != "layernorm":
        return Rewrite(REFUSED, reason=place.problem) if place.problem and not place.site.kind else Rewrite(NOTHING)
    streams = plan.streams.get(index)
    if streams is None:
        return Rewrite(REFUSED, reason=place.problem or "never called while the model was traced")
    problem = plan.center_problem(index)
    if problem is not None:
        return Rewrite(REFUSED, reason=problem)
    assert plan.slots is not None
    slots: dict[Slot, None] = {}
    for write in (write for stream in streams for write in stream.writes):
        slots.update(dict.fromkeys(slots_of(plan.slots, write)))
    return Rewrite(FOLDED, tuple(slot.name for slot in slots))


def _constants_row(plan: Plan, index: int, place: Place) -> Rewrite:
    if not place.pointwise or not place.chosen or not plan.asked["constants"]:
        return Rewrite(OFF)
    fold, center = plan.affine[index], plan.centers.get(index)
    into: list[str] = []
    if place.scale != 1 and fold.done:
        into += _names(plan, fold)
    if center is not None and center.bias is not None:
        into.append(center.bias.name)
    if into:
        return Rewrite(FOLDED, tuple(into))
    if center is not None and center.problem is not None:
        return Rewrite(REFUSED, reason=center.problem)
    return Rewrite(NOTHING) if place.scale == 1 else Rewrite(REFUSED, reason=fold.problem or place.problem)


def _names(plan: Plan, fold: AffineFold) -> list[str]:
    assert plan.slots is not None
    return slot_names(plan.slots, fold.reads)
