"""Put a fold into a model: all new values are computed first, then put in at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.fold.affine import Part
from dynorm.fold.graph import Slot, along
from dynorm.fold.site_fold import SiteFold
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.specs import identity, swap_, take_over_
from dynorm.watch import unchanged_on_error

Values = dict[Slot, Tensor]
# Attributes of the modules that a fold gave a parameter of their own.
ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"


def added_biases(model: nn.Module) -> list[str]:
    """Return the paths of the modules that got a bias."""
    return [path for path, module in model.named_modules() if module.__dict__.get(ADDED_BIAS)]


def untied(model: nn.Module) -> list[str]:
    """Return the names of the parameters that were tied to others."""
    return [f"{path}.{name}".lstrip(".") for path, m in model.named_modules() for name in m.__dict__.get(UNTIED, ())]


def give_bias_(model: nn.Module, path: str) -> None:
    """Give the linear layer at a path, which must be there, a bias for a state dict to fill; one that it has stays."""
    module = dict(model.named_modules(remove_duplicate=False)).get(path)
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        raise ModelError(f"the model must have a linear layer at {path!r}, where the saved model has a bias added")
    if module.bias is None:
        out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        module.bias = nn.Parameter(module.weight.new_zeros(out), requires_grad=module.weight.requires_grad)
    module.__dict__[ADDED_BIAS] = True


def untie_(model: nn.Module, name: str) -> None:
    """Give the parameter of a name, which must be there, a tensor of its own, where it shares one."""
    tensor = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if tensor is None:
        raise ModelError(f"the model must have a parameter {name!r}, as the saved one has")
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    module._parameters[leaf] = _parameter(tensor.detach().clone(), tensor)
    module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), leaf)


def new_values(folds: Sequence[SiteFold], parts: Sequence[Part]) -> tuple[Values, Values]:
    """Return the new values of all parameters that a fold changes, in float64, and the biases to add, by the weight."""
    values: Values = {}
    added: Values = {}

    def value(slot: Slot) -> Tensor:
        return values[slot] if slot in values else slot.double()

    # The readers first. Norms that share one have the same factor and shift, which go in once.
    given = [(fold, found) for fold in folds if fold.is_given for found in fold.reads]
    pairs = {(found.weight, found.bias and found.bias[1]): (fold, found) for fold, found in given}
    for (weight, bias), (fold, found) in pairs.items():
        if fold.factor is not None:
            values[weight] = found.scaled(weight.double(), fold.factor)
        constant = None if fold.shift is None else found.constant(weight.double(), fold.shift)
        if constant is not None and bias is None:
            added[weight] = constant
        elif constant is not None and bias is not None:
            values[bias] = value(bias) + constant.to(bias.tensor.device)
    for fold in folds:
        if fold.center_into is not None and fold.center is not None:
            slot, center = fold.center_into.slot, fold.center.to(fold.center_into.slot.tensor.device)
            if fold.center_into.is_new:
                added[slot] = added.get(slot, torch.zeros_like(center)) - center
            else:
                values[slot] = value(slot) - along(center, fold.center_into.axis, slot.tensor.ndim)
    # Then the writers. A gain (LayerScale) goes into them first, for the mean is that of the scaled outputs.
    streams = dict.fromkeys(stream for fold in folds if fold.becomes_rms for stream in fold.streams)
    writes = {write.slot: write for stream in streams for write in stream.writes}
    for slot, write in writes.items():
        new, own = value(slot), added.get(slot)
        if write.gain is not None:
            gain = write.gain[1].double().to(new.device)
            new, own = new * along(gain, write.axis, new.ndim), None if own is None else own * gain
            values[write.gain[1]] = torch.ones_like(gain)
        values[slot] = new - new.mean(write.axis, keepdim=True)
        if own is not None:
            added[slot] = own - own.mean()
    # Last the factors of rescaled streams, for the writers wrote what was there before.
    for part in parts:
        for found in {found.weight: found for found in part.reads}.values():
            values[found.weight] = found.scaled(value(found.weight), part.factor)
        # A gain takes the factor, where there is one.
        for slot, axis in dict((w.slot, w.axis) if w.gain is None else (w.gain[1], 0) for w in part.writes).items():
            values[slot] = value(slot) / along(part.factor.to(slot.tensor.device), axis, slot.tensor.ndim)
            if slot in added:
                added[slot] = added[slot] / part.factor.to(slot.tensor.device)
    return values, added


@contextmanager
def applied(
    model: nn.Module, folds: Sequence[SiteFold], parts: Sequence[Part], values: Values, added: Values, drop_affine: bool
) -> Iterator[None]:
    """Put new values, biases (by the weight of their layer) and layers into a model, out again on an error inside.

    With ``drop_affine`` the point-wise layers that gave their scale away gave weight and bias too.
    """
    written = [*(slot.tensor for slot in values), *(tensor for fold in folds for _, tensor, _ in fold.own())]
    config: Any = getattr(model, "config", None)
    tied = hasattr(config, "to_dict") and config.__dict__.get("tie_word_embeddings") is True
    with unchanged_on_error([*model.modules(), *([config] if tied else [])], written):
        _apply_(model, folds, parts, values, added, drop_affine)
        # The model's forward may read it.
        if tied and untied(model):
            _untie_config_(config)
        yield


@torch.no_grad()
def _apply_(
    model: nn.Module, folds: Sequence[SiteFold], parts: Sequence[Part], values: Values, added: Values, drop_affine: bool
) -> None:
    for norm, factor in [(norm, part.factor) for part in parts for norm in part.norms]:
        for _, tensor, offset in norm.own():
            value = (tensor.detach().double().flatten() + offset) / factor.to(tensor.device) - offset
            tensor.copy_(value.view(tensor.shape))
        # The norm that a point-wise layer replaced wrote another stream.
        norm.module.__dict__.pop("replaced", None)
    layers: dict[nn.Module, nn.Module] = {}
    for fold in (fold for fold in folds if fold.becomes_rms or fold.is_gone):
        layers[fold.module] = identity() if fold.is_gone else _rms_for(fold)
        take_over_(layers[fold.module], fold.module, None)
    by_tensor: dict[Tensor, dict[tuple[nn.Module, str], Tensor]] = {}
    for slot, value in values.items():
        by_tensor.setdefault(slot.tensor, {}).update({(owner.module, owner.name): value for owner in slot.owners})
    for tensor, of_owner in by_tensor.items():
        _set_values(model, tensor, of_owner)
    for slot, value in added.items():
        layer = slot.owners[0].module
        layer._parameters["bias"] = _parameter(value, slot.tensor)
        layer.__dict__[ADDED_BIAS] = True
    for fold in folds:
        # One that is replaced too: the model may call it through a list of its own as well.
        if (fold.is_given or fold.through) and isinstance(fold.module, PointwiseNorm):
            _strip(fold.module, fold, drop_affine)
        elif fold.is_given:
            for name, tensor, offset in fold.own():
                tensor.fill_((name == "weight") - offset)
        if fold.center_into is not None and not fold.through:
            fold.module._parameters["center"] = None
            fold.module.__dict__.pop("replaced", None)
    swap_(model, layers)


def _set_values(model: nn.Module, tensor: Tensor, new: dict[tuple[nn.Module, str], Tensor]) -> None:
    """Give a parameter its new value; where its owners' values differ, all are untied: a config says all or none.

    An owner that does not change keeps the parameter as it is, else the first one does.
    """
    tables = [(m, table) for m in model.modules() for table in (m._parameters, m._buffers)]
    held = {(m, name): table for m, table in tables for name, own in table.items() if own is tensor}
    first = next((owner for owner in held if owner not in new), next(iter(held)))
    value = new.get(first)
    if value is None or not all(owner in new and new[owner].equal(value) for owner in held):
        for (module, name), table in held.items():
            if (module, name) != first:
                table[name] = _parameter(new.get((module, name), tensor.detach().clone()), tensor)
                module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), name)
    if value is not None:
        # It stays the object it is, of its dtype, on its device.
        tensor.copy_(value)


def _strip(layer: PointwiseNorm, fold: SiteFold, affine: bool) -> None:
    """Take scale, and weight and bias where they were folded too, off a point-wise layer; a slope where it goes."""
    kept = None if fold.left is None else _parameter(fold.left, layer.get_parameter("log_beta"))
    layer.scale = 1.0
    if affine:
        layer._parameters.update(weight=kept, bias=None)
        layer.elementwise_affine = kept is not None
    if fold.goes:
        slope = layer.get_parameter("log_beta")
        layer._parameters.update(center=None, log_beta=_parameter(torch.zeros_like(slope), slope))
    layer.__dict__.pop("replaced", None)


def _untie_config_(config: Any) -> None:
    """Let the config of a transformers model with untied weights say so, where that changes nothing else."""
    told = config.to_dict() | {"tie_word_embeddings": False}
    # Some classes read more from it when they are loaded: T5 how it scales its output.
    if type(config).from_dict(dict(told)).to_dict() == told:
        config.tie_word_embeddings = False


def _rms_for(fold: SiteFold) -> RMSNorm:
    """Return the RMSNorm that takes a LayerNorm's place: its own weight and bias, unless they were folded."""
    site, keep = fold.site, not fold.is_given
    assert isinstance(site.dim, int)
    # Its own tensors are replaced at once by those of the LayerNorm.
    shape, has_weight, has_bias = site.normalized_shape, keep and site.has_weight, keep and site.has_bias
    layer = RMSNorm(shape, site.eps, has_weight, has_bias, dim=site.dim)
    for name, tensor, offset in fold.own() if keep else ():
        # A buffer becomes a parameter without a gradient: the values are the same, and saved.
        value = _parameter(tensor.detach().double() + offset, tensor)
        layer._parameters[name] = tensor if isinstance(tensor, nn.Parameter) and not offset else value
    return layer


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(like.device, like.dtype), requires_grad=like.requires_grad)
