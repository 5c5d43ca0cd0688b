"""Put a fold into a model: all new values are computed first, then put in at once; and the result in its own class."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.dtypes import DtypeRule
from dynorm.errors import ModelError
from dynorm.fold.check import Check
from dynorm.fold.graph import Graph, Owner, Slot, along
from dynorm.fold.refusals import SiteFold
from dynorm.fold.rewrites import Part
from dynorm.guard import unchanged_on_error
from dynorm.layers import PointwiseNorm
from dynorm.replace.specs import LayerSpec, identity, is_ours, swap_, take_over_
from dynorm.wrappers import plain_modules

Values = dict[Slot, Tensor]
# Attributes of the modules that a fold gave a parameter of their own.
ADDED_BIAS = "_dynorm_added_bias"
UNTIED = "_dynorm_untied"
# A power of two, and so is its root: neither rounds a number.
_EPS = 2.0**80


def added_biases(model: nn.Module) -> list[str]:
    """Return the paths of the modules that got a bias."""
    modules = plain_modules(model)
    return [path for path, module in modules.items() if module.__dict__.get(ADDED_BIAS)]


def untied(model: nn.Module) -> list[str]:
    """Return the names of the parameters that were tied to others."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, m in plain_modules(model).items()
        for name in m.__dict__.get(UNTIED, ())
    ]


def is_changed(model: nn.Module) -> bool:
    """Tell whether a load needs to know what was done; a class that builds layers of its own needs no help."""
    # transformers does not tie tensors that were saved apart; other classes do.
    apart = bool(untied(model)) and not hasattr(model, "save_pretrained")
    return apart or bool(added_biases(model)) or any(map(is_ours, model.modules()))


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def give_bias_(model: nn.Module, path: str) -> None:
    """Give the linear layer at a path, which must be there, a bias for a state dict to fill; one that it has stays."""
    module = plain_modules(model, remove_duplicate=False).get(path)
    if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        raise ModelError(
            f"the model must have a linear layer at {path!r}, where the saved model has a bias "
            "added"
        )
    if module.bias is None:
        out = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        module.bias = nn.Parameter(
            module.weight.new_zeros(out), requires_grad=module.weight.requires_grad
        )
    module.__dict__[ADDED_BIAS] = True


def untie_(model: nn.Module, name: str) -> None:
    """Give the parameter of a name, which must be there, a tensor of its own, where it shares one."""
    path, _, leaf = name.rpartition(".")
    module = plain_modules(model, remove_duplicate=False).get(path)
    tensor = None if module is None else module._parameters.get(leaf)
    if module is None or tensor is None:
        raise ModelError(f"the model must have a parameter {name!r}, as the saved one has")
    _set_own_(module, leaf, tensor, tensor)


def _set_own_(module: nn.Module, name: str, value: Tensor, like: Tensor) -> None:
    module._parameters[name] = _parameter(value.detach().clone(), like)
    module.__dict__[UNTIED] = (*module.__dict__.get(UNTIED, ()), name)


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
        layer._parameters["bias"] = _parameter(value, slot.tensor)
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
                _set_own_(owner.module, owner.name, tensor if own is None else own, tensor)
    if value is not None:
        # It stays the object it is, of its dtype, on its device.
        tensor.copy_(value)


def _strip(layer: PointwiseNorm, fold: SiteFold) -> None:
    """Take scale, and weight and bias where they were folded too, off a point-wise layer; a slope where it goes."""
    kept = None if fold.left is None else _parameter(fold.left, layer.get_parameter("log_beta"))
    constant = getattr(layer, layer.constants[0])
    layer.scale = 1.0
    if fold.with_affine:
        weight = layer.weight
        # From now on the constant's dtype decides for the weight's, if it has been the same.
        if kept is None and weight is not None and weight.dtype != constant.dtype:
            follows_input = layer.output_dtype == DtypeRule("input+weight")
            layer.output_dtype = None if follows_input else layer.output_dtype
        layer._parameters.update(weight=kept, bias=None)
        layer.elementwise_affine = kept is not None
        layer.weight_offset = 0.0
    if fold.goes:
        slope = layer.get_parameter("log_beta")
        layer._parameters.update(center=None, log_beta=_parameter(torch.zeros_like(slope), slope))
    layer.__dict__.pop("replaced", None)


def _rms_for(fold: SiteFold) -> nn.Module:
    """Return the RMSNorm that takes a LayerNorm's place: its own weight and bias, unless they were folded."""
    config = {
        "normalized_shape": fold.site.normalized_shape,
        "norm_eps": fold.site.eps,
        "dim": fold.site.dim,
        "output_dtype": fold.site.output_rule,
    }
    layer = LayerSpec("rmsnorm", config | {"elementwise_affine": False}).build(None, None)
    for name, tensor, offset in () if fold.is_given else fold.own():
        # A buffer becomes a parameter without a gradient: the values are the same, and saved.
        value = _parameter(tensor.detach().double() + offset, tensor)
        layer._parameters[name] = (
            tensor if isinstance(tensor, nn.Parameter) and not offset else value
        )
    return layer


@torch.inference_mode(False)
def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    value = value.to(like.device, like.dtype)
    if value.is_inference():
        value = value.clone()
    return nn.Parameter(value, requires_grad=like.requires_grad)


@torch.inference_mode(False)
def as_stock(
    model: nn.Module, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> nn.Module:
    r"""Return a folded transformers model in its own class, which loads where dynorm is unknown.

    Where a linear layer is gone, the class's RMSNorm computes the identity: with eps = 2^80 and a
    weight of 2^40, ``weight * x / sqrt(mean(x^2) + eps)`` is x to the last digit, which is checked.
    A LayerNorm cannot do so.

    Args:
        model: a model of transformers in which :func:`fold_` has left no other layer of dynorm.
        *args: the example, as for :func:`fold_`.
        tolerance: the relative error to allow, as for :func:`fold_`.
        **kwargs: the example's keyword arguments.

    Returns:
        A new model, for ``save_pretrained``.

    Raises:
        ModelError: a norm, a layer of dynorm or an added bias is left, the config has no eps, it is
            in float16, or the outputs differ.

    Example:
        >>> as_stock(nn.Linear(2, 2))
        Traceback (most recent call last):
        dynorm.errors.ModelError: the model must have a config with the eps of its norms, but Linear
        has none

    Reference:
        L. Baroni et al., "Transformers Don't Need LayerNorm at Inference Time", arXiv 2507.02559,
        with 1e12 and 1e6.
    """
    config: Any = copy.deepcopy(getattr(model, "config", None))
    names = [
        name for name in getattr(config, "__dict__", ()) if name.endswith(("_eps", "_epsilon"))
    ]
    if not names:
        raise ModelError(
            f"the model must have a config with the eps of its norms, but {type(model).__name__} "
            "has none"
        )
    ours = {path: module for path, module in model.named_modules() if is_ours(module)}
    left = [
        *(path for path, module in ours.items() if type(module) is not nn.Identity),
        *added_biases(model),
    ]
    if left or not ours:
        what = f"not the layers or added biases {', '.join(left[:3])}" if left else "it has none"
        raise ModelError(
            f"the model must have identities where linear layers were folded away, but {what}"
        )
    like = next(model.parameters())
    if like.dtype is torch.float16:
        raise ModelError(
            "the model must have numbers up to 2^40, but is in float16: cast it to bfloat16 or "
            "float32"
        )
    before = Check(model, (args, kwargs), tolerance)
    vars(config).pop("quantization_config", None)
    vars(config).update(dict.fromkeys(names, _EPS))
    stock: nn.Module = type(model)(config).to(like.device, like.dtype).eval()
    stock.load_state_dict(stock.state_dict() | model.state_dict())
    vars(stock).update(
        {name: copy.deepcopy(v) for name, v in vars(model).items() if name == "generation_config"}
    )
    kinds = {type(stock.get_submodule(path)) for path in ours}
    kept = [
        path for path, module in stock.named_modules() if type(module) in kinds and path not in ours
    ]
    if kept:
        raise ModelError(
            f"all norms of the model must be gone, as one eps is for all, but {kept[0]!r} is there "
            "still"
        )
    with torch.no_grad():
        for norm in map(stock.get_submodule, ours):
            weight = norm.get_parameter("weight")
            # Some classes scale by 1 + w.
            offset = float(norm(torch.ones_like(weight.zero_())).any())
            weight.fill_(_EPS**0.5 - offset)
    error = max(before.errors(stock))
    if not error <= before.tolerance:
        raise ModelError(
            f"the norms of {type(model).__name__} must compute the identity with a large eps, but "
            "the outputs differ "
            f"by {error:.1e}: a LayerNorm takes the mean out, T5 ties weights again; save such a "
            "model with dynorm.save"
        )
    return stock
