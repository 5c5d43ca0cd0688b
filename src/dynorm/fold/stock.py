"""A folded model in its own class, which loads where dynorm is unknown."""

import copy
from typing import Any

import torch
from torch import nn

from dynorm.batches import example_arguments
from dynorm.errors import ModelError, listed
from dynorm.fold.check import Check
from dynorm.guard import kept_random_states, require_plain_model
from dynorm.replace.converted import is_ours
from dynorm.replace.edits import edits_of

# A power of two, and so is its root: neither rounds a number.
_EPS = 2.0**80
# The identity rounds no number, so the outputs are the same in every dtype.
_TOLERANCE = 1e-5


@torch.inference_mode(False)
def as_stock(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    r"""Return a folded transformers model in its own class, which loads where dynorm is unknown.

    In the place of a linear layer that was folded away, the class's RMSNorm computes the identity:
    with eps = 2^80 and a weight of 2^40, ``weight * x / sqrt(mean(x^2) + eps)`` is x to the last
    digit, which is checked. A LayerNorm cannot compute the identity, so classes with LayerNorms
    are refused.

    Args:
        model: a model of transformers, in which :func:`dynorm.fold_` left no other layer of
            dynorm.
        *args: the example, as for :func:`dynorm.fold_`.
        **kwargs: the example's keyword arguments.

    Returns:
        A new model, for ``save_pretrained``.

    Raises:
        ModelError: the class has LayerNorms, a norm, a layer of dynorm or an added bias is left,
            the config has no eps, the model is in float16, or the outputs differ.

    Example:
        >>> as_stock(nn.Linear(2, 2))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        dynorm.errors.ModelError: the model must have a config with the eps of its norms, but ...

    Reference:
        L. Baroni et al., "Transformers Don't Need LayerNorm at Inference Time", arXiv 2507.02559,
        with 1e12 and 1e6.
    """
    config, eps_names = stock_config(model)
    identities = _identities(model)
    like = next(model.parameters())
    args, kwargs = example_arguments(model, args, kwargs)
    before = Check(model, [(args, kwargs)], _TOLERANCE)
    vars(config).update(dict.fromkeys(eps_names, _EPS))
    with kept_random_states(torch.cuda.is_available()):
        stock: nn.Module = type(model)(config).to(like.device, like.dtype).eval()
    stock.load_state_dict(stock.state_dict() | model.state_dict())
    # Those that are not saved keep their dtype, such as the frequencies of positions.
    for name, buffer in model.named_buffers():
        path, _, own_name = name.rpartition(".")
        stock.get_submodule(path)._buffers[own_name] = buffer.clone()
    if "generation_config" in vars(model):
        stock.__dict__["generation_config"] = copy.deepcopy(vars(model)["generation_config"])
    for path in identities:
        _make_identity_(stock.get_submodule(path))
    error = max(before.errors(stock))
    # A comparison with NaN is False.
    if not error <= _TOLERANCE:
        raise ModelError(
            f"all norms of {type(model).__name__} must be gone, because one large eps serves all, "
            f"but with it the outputs differ by {error:.1e}: fold the others too, or save the model "
            "with dynorm.save"
        )
    return stock


def stock_config(model: nn.Module) -> tuple[object, list[str]]:
    """Return a copy of a model's config, and the names of its eps.

    A model whose class can never hold it without norms is refused, in any state.
    """
    require_plain_model(model)
    config: object = copy.deepcopy(getattr(model, "config", None))
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model must be of its own class, but is in a model of peft: pass "
            "model.get_base_model(), and save the adapter beside it"
        )
    eps_names = []
    for name in getattr(config, "__dict__", ()):
        if name.endswith(("_eps", "_epsilon")):
            eps_names.append(name)
    if not eps_names:
        raise ModelError(
            f"the model must have a config with the eps of its norms, but {type(model).__name__} "
            "has none: pass a model of transformers, or save this one with dynorm.save"
        )
    if next(model.parameters()).dtype is torch.float16:
        raise ModelError(
            "the model must have numbers up to 2^40, but is in float16: cast it to bfloat16 or "
            "float32"
        )
    # A config that names layers builds no norms.
    vars(config).pop("quantization_config", None)
    _require_no_layernorm(model, config)
    return config, eps_names


def _require_no_layernorm(model: nn.Module, config: object) -> None:
    """Refuse a class of transformers with LayerNorms, before its layers are looked at."""
    if not hasattr(model, "config_class"):
        return
    with torch.device("meta"):
        empty = type(model)(config)
    for path, module in empty.named_modules():
        if isinstance(module, nn.LayerNorm):
            raise ModelError(
                f"the norms of {type(model).__name__} must be RMSNorms, which compute the identity "
                f"with a large eps, but {path!r} is a LayerNorm, which takes out the mean at any "
                "eps: leave out --stock, or save the model with dynorm.save; programs load that folder with "
                "trust_remote_code=True where dynorm is installed"
            )


def _identities(model: nn.Module) -> list[str]:
    """Return the paths of the identities, and check that no other edit is in the model."""
    paths = []
    layers = []
    for path, module in model.named_modules():
        if type(module) is nn.Identity and is_ours(module):
            paths.append(path)
        elif is_ours(module):
            layers.append(path)
    if layers or not paths:
        raise ModelError(
            "every norm of the model must be converted to 'linear' and folded away by fold_, but "
            f"{len(paths)} are, and {len(layers)} layers are still there ({listed(layers)}): the "
            "report of fold_ has the reason; or save the model with dynorm.save, and import dynorm "
            "to load it"
        )
    biases = edits_of(model).biases
    if biases:
        raise ModelError(
            "the model must not have parameters that its class does not make, but fold_ added "
            f"biases to {listed(biases)}: fold the converted model with add_bias=False, or save "
            "this one with dynorm.save"
        )
    return paths


@torch.no_grad()
def _make_identity_(norm: nn.Module) -> None:
    """Give an RMSNorm with the large eps the weight with which it computes the identity."""
    weight = norm.get_parameter("weight")
    weight.zero_()
    # Some classes scale by 1 + w.
    offset = float(norm(torch.ones_like(weight)).any())
    weight.fill_(_EPS**0.5 - offset)
