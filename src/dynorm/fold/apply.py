"""Put a fold into a model: all new values are computed first, then put in at once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.fold.rewrites import Part
from dynorm.fold.site import SiteFold
from dynorm.layers import PointwiseNorm
from dynorm.replace.edits import ADDED_BIAS, parameter_like, set_own_, untied
from dynorm.replace.specs import LayerSpec, identity, swap_, take_over_
from dynorm.stream.graph import Graph, Owner, Slot, along
from dynorm.watch import unchanged_on_error

Values = dict[Slot, Tensor]


def new_values(folds: Sequence[SiteFold], parts: Sequence[Part]) -> tuple[Values, Values]:
    """Return the new values of all parameters that a fold changes, in float64, and the biases to add, by the weight."""
    values: Values = {}
    added: Values = {}

    def value(slot: Slot) -> Tensor:
        return values[slot] if slot in values else slot.double()

    def scale(slot: Slot, factor: Tensor, axis: int) -> None:
        values[slot] = value(slot) * along(factor, axis, slot.tensor.ndim)
        if slot in added:
            added[slot] = added[slot] * factor

    # The readers first. Norms that share one have the same factor and shift, which go in once.
    given = [(fold, found) for fold in folds if fold.is_given for found in fold.reads]
    pairs = {(found.weight, found.bias and found.bias[1]): (fold, found) for fold, found in given}
    for (weight, bias), (fold, found) in pairs.items():
        if fold.factor is not None:
            values[weight] = found.scaled(weight.double(), fold.factor)
        if fold.shift is not None:
            constant = found.constant(weight.double(), fold.shift)
            if bias is None:
                added[weight] = constant
            else:
                values[bias] = value(bias) + constant
    for fold in folds:
        if (write := fold.center_into) is not None and fold.center is not None:
            if write.is_new:
                added[write.slot] = added.get(write.slot, 0) - fold.center
            else:
                values[write.slot] = value(write.slot) - along(
                    fold.center, write.axis, write.slot.tensor.ndim
                )
    # Then the writers. A gain (LayerScale) goes into them first, for the mean is that of the scaled
    # outputs.
    streams = dict.fromkeys(stream for fold in folds if fold.becomes_rms for stream in fold.streams)
    for slot, write in {write.slot: write for stream in streams for write in stream.writes}.items():
        if write.gain is not None:
            gain = write.gain[1].double()
            scale(slot, gain, write.axis)
            values[write.gain[1]] = torch.ones_like(gain)
        values[slot] = value(slot) - value(slot).mean(write.axis, keepdim=True)
        if slot in added:
            added[slot] = added[slot] - added[slot].mean()
    # Last the factors of rescaled streams, for the writers wrote what was there before.
    for part in parts:
        for found in {found.weight: found for found in part.reads}.values():
            values[found.weight] = found.scaled(value(found.weight), part.factor)
        # A gain takes the factor, where there is one.
        for slot, axis in dict(
            (w.slot, w.axis) if w.gain is None else (w.gain[1], 0) for w in part.writes
        ).items():
            scale(slot, 1 / part.factor, axis)
    return values, added


@contextmanager
def applied(
    model: nn.Module,
    graph: Graph,
    folds: Sequence[SiteFold],
    parts: Sequence[Part],
    new: tuple[Values, Values],
) -> Iterator[None]:
    """Put new values, biases (by the weight of their layer) and layers into a model, out again on an error inside."""
    written = [
        *(slot.tensor for slot in new[0]),
        *(tensor for fold in folds for _, tensor, _ in fold.own()),
    ]
    config: Any = getattr(model, "config", None)
    tied = hasattr(config, "to_dict") and config.__dict__.get("tie_word_embeddings") is True
    with unchanged_on_error([*model.modules(), *([config] if tied else [])], written):
        swap_(model, _apply_(graph, folds, parts, *new))
        # The model's forward may read whether weights are tied.
        if tied and untied(model):
            told = config.to_dict() | {"tie_word_embeddings": False}
            # Some classes read more from it when they are loaded: T5 how it scales its output.
            if type(config).from_dict(dict(told)).to_dict() == told:
                config.tie_word_embeddings = False
        yield


@torch.no_grad()
def _apply_(
    graph: Graph, folds: Sequence[SiteFold], parts: Sequence[Part], values: Values, added: Values
) -> dict[nn.Module, nn.Module]:
    """Write all new values, and return the modules to put in the place of others."""
    for norm, factor in [(norm, part.factor) for part in parts for norm in part.norms]:
        for _, tensor, offset in norm.own():
            value = (tensor.detach().to("cpu", torch.float64).flatten() + offset) / factor - offset
            tensor.copy_(value.view(tensor.shape))
        # The norm that a point-wise layer replaced wrote another stream.
        norm.module.__dict__.pop("replaced", None)
    layers: dict[nn.Module, nn.Module] = {}
    for fold in (fold for fold in folds if fold.becomes_rms or fold.is_gone):
        layers[fold.module] = identity() if fold.is_gone else _rms_for(fold)
        take_over_(layers[fold.module], fold.module, None)
    for tensor in dict.fromkeys(slot.tensor for slot in values):
        slots = [slot for slot in graph.all_slots if slot.tensor is tensor]
        _set_values(tensor, {owner: values.get(slot) for slot in slots for owner in slot.owners})
    for slot, value in added.items():
        layer = slot.owners[0].module
        layer._parameters["bias"] = parameter_like(value, slot.tensor)
        layer.__dict__[ADDED_BIAS] = True
    for fold in folds:
        # One that is replaced too: the model may call it through a list of its own as well.
        if (fold.is_given or fold.through) and isinstance(fold.module, PointwiseNorm):
            _strip(fold.module, fold)
        elif fold.is_given:
            for name, tensor, offset in fold.own():
                tensor.fill_((name == "weight") - offset)
        if fold.center_into is not None and not fold.through:
            fold.module._parameters["center"] = None
            fold.module.__dict__.pop("replaced", None)
    return layers


def _set_values(tensor: Tensor, new: Mapping[Owner, Tensor | None]) -> None:
    """Give a parameter its new value; where its owners' values differ, all are untied: a config says all or none.

    An owner that does not change, None, keeps the parameter as it is, else the first one does.
    """
    first = next((owner for owner, value in new.items() if value is None), next(iter(new)))
    value = new[first]
    if value is None or not all(other is not None and other.equal(value) for other in new.values()):
        for owner, own in new.items():
            if owner is not first:
                set_own_(owner.module, owner.name, tensor if own is None else own, tensor)
    if value is not None:
        # It stays the object it is, of its dtype, on its device.
        tensor.copy_(value)


def _strip(layer: PointwiseNorm, fold: SiteFold) -> None:
    """Take scale, and weight and bias where they were folded too, off a point-wise layer; a slope where it goes."""
    kept = None if fold.left is None else parameter_like(fold.left, layer.get_parameter("log_beta"))
    layer.scale = 1.0
    if fold.with_affine:
        layer._parameters.update(weight=kept, bias=None)
        layer.elementwise_affine = kept is not None
    if fold.goes:
        slope = layer.get_parameter("log_beta")
        layer._parameters.update(
            center=None, log_beta=parameter_like(torch.zeros_like(slope), slope)
        )
    layer.__dict__.pop("replaced", None)


def _rms_for(fold: SiteFold) -> nn.Module:
    """Return the RMSNorm that takes a LayerNorm's place: its own weight and bias, unless they were folded."""
    config = {
        "normalized_shape": fold.site.normalized_shape,
        "norm_eps": fold.site.eps,
        "dim": fold.site.dim,
    }
    layer = LayerSpec("rmsnorm", config | {"elementwise_affine": False}).build(None, None)
    for name, tensor, offset in () if fold.is_given else fold.own():
        # A buffer becomes a parameter without a gradient: the values are the same, and saved.
        value = parameter_like(tensor.detach().double() + offset, tensor)
        layer._parameters[name] = (
            tensor if isinstance(tensor, nn.Parameter) and not offset else value
        )
    return layer
