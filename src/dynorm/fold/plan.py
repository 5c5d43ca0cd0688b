"""The analysis of a fold, from a model's graph to a plan: it does not touch the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dynorm.fold.redundant import MeanSquares, decide_redundant
from dynorm.fold.rewrites import decide_affine, decide_learned_centers, decide_means
from dynorm.fold.site import SiteFold
from dynorm.fold.through import RescaledStream, decide_rescaling
from dynorm.fold.values import NewValues, new_values
from dynorm.stream.capture import Graph
from dynorm.stream.feeds import bias_before
from dynorm.stream.graph import Slot
from dynorm.stream.operators import RefusedError
from dynorm.stream.survey import survey


@dataclass(frozen=True)
class Options:
    """The rewrites that the caller wants, and the changes that the caller allows."""

    affine: bool
    center: bool
    center_partly: bool
    redundant: float
    add_bias: bool
    dropout_in_place: bool  # a dropout of the model writes into its input


@dataclass(frozen=True)
class Plan:
    """All changes of a fold."""

    slots: Sequence[Slot]  # all parameters of the model
    folds: Sequence[SiteFold]
    rescaled: Sequence[RescaledStream]
    new: NewValues

    @property
    def changes_anything(self) -> bool:
        """Return whether there is anything to fold."""
        return any(fold.is_changed for fold in self.folds)

    @property
    def is_inexact(self) -> bool:
        """Return whether outputs change by more than rounding."""
        return any(fold.change for fold in self.folds)


def planned(
    graph: Graph,
    sites: Sequence[SiteFold],
    options: Options,
    squares: MeanSquares | None,
) -> Plan:
    """Decide where every part of every norm goes, or why it stays.

    ``squares`` are needed for redundant norms only.
    """
    dims = {index: sites[index].dim for index in graph.calls}
    for index, surroundings in survey(graph, dims).items():
        fold = sites[index]
        fold.around = surroundings
        if fold.is_pointwise:
            try:
                fold.bias_before = bias_before(fold.calls, fold.dim, options.add_bias)
            except RefusedError as refusal:
                fold.bias_before_refused = str(refusal)
        fold.tensors_refused = _tensors_refusal(fold, graph.slots)
    folds, rescaled = _affine_plan(sites, options)
    if options.center:
        decide_means(folds, options.center_partly)
    decide_learned_centers(folds)
    if squares is not None:
        decide_redundant(folds, squares, options.redundant)
    return Plan(graph.slots, folds, rescaled, new_values(folds, rescaled, graph.slots))


def _affine_plan(
    sites: Sequence[SiteFold], options: Options
) -> tuple[list[SiteFold], list[RescaledStream]]:
    """Decide where weights, biases and whole linear layers go.

    A linear layer that cannot be removed as a whole gives its readers what any other layer would.
    Others may depend on it, so all are then decided again.
    """
    # Why each linear layer stays.
    reasons: dict[int, str] = {}
    if options.dropout_in_place:
        # In training it would write into the input of an identity before it.
        reasons = dict.fromkeys(range(len(sites)), "a dropout of the model works in place")
    while True:
        folds = _copies(sites, options.affine, reasons)
        decide_affine(folds, options.affine, options.add_bias)
        rescaled = decide_rescaling(folds)
        new_reasons = {}
        for index, fold in enumerate(folds):
            if fold.is_line and not (fold.is_absorbed or fold.by_rescaling):
                new_reasons[index] = fold.affine_refused or ""
        if not new_reasons:
            return folds, rescaled
        reasons |= new_reasons


def _copies(
    sites: Sequence[SiteFold],
    affine: bool,
    reasons: Mapping[int, str],
) -> list[SiteFold]:
    """Return a copy of each site, as a line if it is a linear layer that may be removed as a whole."""
    folds = []
    for index, fold in enumerate(sites):
        if not affine or fold.line is None or not fold.keeps_dtype:
            folds.append(replace(fold))
        elif index in reasons:
            folds.append(replace(fold, remains_because=reasons[index]))
        else:
            weight, bias = fold.line
            folds.append(replace(fold, is_line=True, weight=weight, bias=bias, scale=1.0))
    return folds


def _tensors_refusal(fold: SiteFold, slots: Sequence[Slot]) -> str | None:
    """Return why a norm's weight and bias cannot change; None if they are saved, and only the norm uses them."""
    for part in fold.affine_parts:
        held = [slot for slot in slots if slot.tensor is part.tensor]
        slot = held[0]
        if not slot.is_saved:
            return f"{slot.name} is not saved with the model: it would come back when it is loaded"
        if len(held) > 1 or len(slot.owners) > 1 or slot.leaves or slot.overlaps:
            return f"{slot.name} is used elsewhere too"
    return None
