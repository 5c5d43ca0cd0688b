"""Put a plan into a model: all new values are known by then, and are written at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dynorm.fold.plan import Plan
from dynorm.fold.site import SiteFold
from dynorm.guard import edited_parts, unchanged_on_error
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import identity
from dynorm.replace.edits import ADDED_BIAS, edits_of, parameter_like, untie_, write_values_
from dynorm.replace.specs import LayerSpec
from dynorm.replace.swap import swap_, take_over_

Modules = Mapping[SiteFold, nn.Module]
"""The norms and point-wise layers of a model, by their records."""


@contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Put a plan into a model; an error inside the context takes it out again."""
    tensors = [slot.tensor for slot in plan.new.values]
    for fold in plan.folds:
        tensors += [part.tensor for part in fold.affine_parts]
    config: Any = getattr(model, "config", None)
    is_tied = hasattr(config, "to_dict") and config.__dict__.get("tie_word_embeddings") is True
    # The plan knows the norms by their paths.
    modules = {fold: model.get_submodule(fold.path) for fold in plan.folds}
    with unchanged_on_error(edited_parts(model), tensors):
        _write_values_(plan, modules)
        _neutralize_(modules)
        if is_tied and edits_of(model).untied:
            _note_untied_(model, config)
        swap_(model, _replacements(modules))
        yield


def _note_untied_(model: nn.Module, config: Any) -> None:
    """Set in a config of transformers that weights are not tied; a forward may read it.

    The class then ties nothing when it loads the model, not even the biases of a masked language
    model's head. So all that it ties are untied, and each is saved.
    """
    values = config.to_dict() | {"tie_word_embeddings": False}
    # Some classes derive more from it when loaded: T5 derives how it scales its output.
    if type(config).from_dict(dict(values)).to_dict() != values:
        return
    config.tie_word_embeddings = False
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pairs: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, source in pairs.items():
        tensor = parameters.get(name)
        if tensor is not None and tensor is parameters.get(source):
            untie_(modules, name)


@torch.no_grad()
def _write_values_(plan: Plan, modules: Modules) -> None:
    """Write the new values of parameters, untied where owners differ, and add biases."""
    for rescaled in plan.rescaled:
        for norm in rescaled.writers:
            _forget_original_(modules[norm])
    new = plan.new
    write_values_(plan.slots, new.values)
    for slot, value in new.added.items():
        layer = slot.owners[0].module
        layer._parameters["bias"] = parameter_like(value, slot.tensor)
        layer.__dict__[ADDED_BIAS] = True


@torch.no_grad()
def _neutralize_(modules: Modules) -> None:
    """Make the folded parts of all norms and layers neutral.

    That includes modules that will be replaced: the model may also call them through a list.
    """
    for fold, module in modules.items():
        if isinstance(module, PointwiseNorm):
            if fold.is_absorbed or fold.by_rescaling:
                _strip_(module, fold)
        elif fold.is_absorbed:
            for part in fold.affine_parts:
                part.tensor.fill_(part.neutral)
        if fold.learned_center_into is not None and not fold.by_rescaling:
            module._parameters["center"] = None
            _forget_original_(module)


def _strip_(layer: PointwiseNorm, fold: SiteFold) -> None:
    """Take off a point-wise layer all that was folded: scale, weight and bias, slope and centre."""
    log_beta = layer._parameters.get("log_beta")
    layer.scale = 1.0
    if fold.with_affine:
        weight = None
        if fold.remaining_weight is not None:
            assert log_beta is not None
            weight = parameter_like(fold.remaining_weight, log_beta)
        else:
            _release_dtype_(layer)
        layer._parameters.update(weight=weight, bias=None)
        layer.weight_offset = 0.0
        layer.elementwise_affine = weight is not None
    if fold.is_line:
        assert log_beta is not None
        neutral = parameter_like(torch.zeros_like(log_beta), log_beta)
        layer._parameters.update(center=None, log_beta=neutral)
    _forget_original_(layer)


def _release_dtype_(layer: PointwiseNorm) -> None:
    """Let the output's dtype no longer follow a weight that goes.

    If the constant has the weight's dtype, the rule stays: the constant then takes the place of the
    weight in it.
    """
    constant = layer.first_constant
    if layer.weight is None or layer.weight.dtype == constant.dtype:
        return
    layer.promote = False


def _forget_original_(module: nn.Module) -> None:
    """Drop the norm that a point-wise layer replaced: it no longer fits the weights around it."""
    module.__dict__.pop("replaced", None)


def _replacements(modules: Modules) -> dict[nn.Module, nn.Module]:
    """Return the layers to put in the place of norms."""
    layers: dict[nn.Module, nn.Module] = {}
    for fold, module in modules.items():
        if fold.becomes_rms or fold.is_gone:
            layer = identity() if fold.is_gone else _rms_for(fold)
            take_over_(layer, module, None)
            layers[module] = layer
    return layers


def _rms_for(fold: SiteFold) -> nn.Module:
    """Return the RMSNorm that takes a LayerNorm's place, with weight and bias unless folded."""
    config = {
        "normalized_shape": fold.site.normalized_shape,
        "norm_eps": fold.site.eps,
        "dim": fold.site.dim,
        "elementwise_affine": False,
        "promote": fold.site.promote,
    }
    layer = LayerSpec("rmsnorm", config).build(None, None)
    if fold.is_absorbed:
        return layer
    for part in fold.affine_parts:
        if isinstance(part.tensor, nn.Parameter) and not part.offset:
            layer._parameters[part.name] = part.tensor
        else:
            # A buffer becomes a parameter without a gradient: its values are still saved.
            layer._parameters[part.name] = parameter_like(part.value, part.tensor)
    return layer
