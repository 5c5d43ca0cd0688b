"""Put a plan into a model: all new values are known by then, and are written at once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dynorm.find.affine import affine_parts
from dynorm.fold.plan import Plan
from dynorm.fold.site import SiteFold
from dynorm.guard import copies_of, edited_parts, unchanged_on_error
from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.replace.converted import identity
from dynorm.replace.edits import ADDED_BIAS, parameter_like, set_untied_, untie_
from dynorm.replace.swap import swap_, take_over_


@contextmanager
def applied(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Put a plan into a model; an error inside the context takes it out again."""
    before = copies_of(slot.tensor for slot in plan.values)
    with unchanged_on_error(edited_parts(model), before):
        is_untied = _untie_(plan)
        _write_values_(plan)
        for fold in plan.folds:
            if fold.is_absorbed and isinstance(fold.module, PointwiseNorm):
                _strip_(fold.module, is_line=fold.is_line)
        config: Any = getattr(model, "config", None)
        is_tied = hasattr(config, "to_dict") and config.__dict__.get("tie_word_embeddings") is True
        if is_untied and is_tied:
            _note_untied_(model, config)
        swap_(model, _replacements(plan.folds))
        yield


def _untie_(plan: Plan) -> bool:
    """Untie the parameters that are to differ, and return whether there are any.

    All owners of one, because a config says whether all or none are tied.
    """
    is_untied = False
    for tie in plan.ties:
        values = [plan.values[slot] for slot in tie if slot in plan.values]
        if not values:
            continue
        if len(values) == len(tie) and all(value.equal(values[0]) for value in values):
            continue
        is_untied = True
        for slot in tie[1:]:
            owner = slot.owners[0]
            assert isinstance(slot.tensor, nn.Parameter)
            set_untied_(owner.module, owner.name, slot.tensor)
    return is_untied


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


def _strip_(layer: PointwiseNorm, *, is_line: bool) -> None:
    """Take off a point-wise layer its scale, weight and bias; off a line also the slope."""
    layer._parameters.update(weight=None, bias=None)
    layer.scale = 1.0
    layer.weight_offset = 0.0
    if is_line:
        log_beta = layer.get_parameter("log_beta")
        layer._parameters["log_beta"] = parameter_like(torch.zeros_like(log_beta), log_beta)
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
    # As the norm holds them now: they may be untied.
    for name, part in affine_parts(fold.module, fold.site).items():
        if isinstance(part.tensor, nn.Parameter) and not part.offset:
            layer._parameters[name] = part.tensor
        else:
            # A buffer becomes a parameter without a gradient: its values are still saved.
            layer._parameters[name] = parameter_like(part.value, part.tensor)
    return layer
