"""Put a plan into a model: all new values are known by then, and are written at once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dynorm.fold.plan import Plan
from dynorm.fold.site import SiteFold
from dynorm.guard import edited_parts, unchanged_on_error
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.converted import identity
from dynorm.replace.edits import ADDED_BIAS, edits_of, parameter_like, set_untied_, untie_
from dynorm.replace.swap import swap_, take_over_

Ties = dict[nn.Parameter, list[tuple[nn.Module, str]]]
"""The modules that share each parameter, with its name in them; the first one keeps it."""


@torch.no_grad()
def separated_(model: nn.Module) -> Ties:
    """Give every module that shares a parameter, except the first, a copy of it; return which share."""
    holders: Ties = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((module, name))
    ties = {parameter: shared for parameter, shared in holders.items() if len(shared) > 1}
    for parameter, shared in ties.items():
        for module, name in shared[1:]:
            module._parameters[name] = parameter_like(parameter.clone(), parameter)
    return ties


@contextmanager
def applied(model: nn.Module, plan: Plan, ties: Ties) -> Iterator[None]:
    """Put a plan into a model; an error inside the context takes it out again.

    Parameters that were separated are tied again if they are still equal.
    """
    tensors = [slot.tensor for slot in plan.values]
    for fold in plan.folds:
        tensors += [part.tensor for part in fold.affine_parts]
    with unchanged_on_error(edited_parts(model), tensors):
        _write_values_(plan)
        _neutralize_(plan.folds)
        for parameter, shared in ties.items():
            _tie_equal_(parameter, shared[1:])
        config: Any = getattr(model, "config", None)
        is_tied = hasattr(config, "to_dict") and config.__dict__.get("tie_word_embeddings") is True
        if is_tied and edits_of(model).untied:
            _note_untied_(model, config)
        swap_(model, _replacements(plan.folds))
        yield


def _tie_equal_(parameter: nn.Parameter, copies: Sequence[tuple[nn.Module, str]]) -> None:
    """Put a parameter in the place of its copies, or note that they are untied if any differs.

    All or none, because a config says whether all are tied.
    """
    values = [module._parameters[name] for module, name in copies]
    is_one_value = all(value is not None and value.equal(parameter) for value in values)
    for (module, name), value in zip(copies, values, strict=True):
        if is_one_value:
            module._parameters[name] = parameter
        elif value is not None:
            set_untied_(module, name, value, parameter)


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
def _write_values_(plan: Plan) -> None:
    """Write the new values of parameters, which stay the same objects, and add biases."""
    for slot, value in plan.values.items():
        slot.tensor.copy_(value)
    for slot, value in plan.added.items():
        layer = slot.owners[0].module
        layer._parameters["bias"] = parameter_like(value, slot.tensor)
        layer.__dict__[ADDED_BIAS] = True


@torch.no_grad()
def _neutralize_(folds: Sequence[SiteFold]) -> None:
    """Make the folded parts of all norms and layers neutral.

    That includes modules that will be replaced: the model may also call them through a list.
    """
    for fold in folds:
        if not fold.is_absorbed:
            continue
        if isinstance(fold.module, PointwiseNorm):
            _strip_(fold.module, is_line=fold.is_line)
            continue
        for part in fold.affine_parts:
            part.tensor.fill_(part.neutral)


def _strip_(layer: PointwiseNorm, *, is_line: bool) -> None:
    """Take off a point-wise layer its scale, weight and bias; off a line also slope and centre."""
    layer._parameters.update(weight=None, bias=None)
    layer.scale = 1.0
    layer.weight_offset = 0.0
    if is_line:
        log_beta = layer.get_parameter("log_beta")
        neutral = parameter_like(torch.zeros_like(log_beta), log_beta)
        layer._parameters.update(center=None, log_beta=neutral)
    # The norm that it replaced no longer fits the weights around it.
    layer.__dict__.pop("replaced", None)


def _replacements(folds: Sequence[SiteFold]) -> dict[nn.Module, nn.Module]:
    """Return the layers to put in the place of norms."""
    layers: dict[nn.Module, nn.Module] = {}
    for fold in folds:
        if fold.becomes_rms or fold.is_gone:
            layer = identity() if fold.is_gone else _rms_for(fold)
            take_over_(layer, fold.module, None)
            layers[fold.module] = layer
    return layers


def _rms_for(fold: SiteFold) -> nn.Module:
    """Return the RMSNorm that takes a LayerNorm's place, with weight and bias unless folded."""
    layer = RMSNorm(
        fold.site.normalized_shape,
        fold.site.eps,
        elementwise_affine=False,
        dim=fold.site.dim,
        promote=fold.site.promote,
    )
    if fold.is_absorbed:
        return layer
    for part in fold.affine_parts:
        if isinstance(part.tensor, nn.Parameter) and not part.offset:
            layer._parameters[part.name] = part.tensor
        else:
            # A buffer becomes a parameter without a gradient: its values are still saved.
            layer._parameters[part.name] = parameter_like(part.value, part.tensor)
    return layer
