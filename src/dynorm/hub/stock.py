"""A folded model in its own class, which loads where dynorm is unknown."""

import copy
from typing import Any

import torch
from torch import nn

from dynorm.errors import ModelError
from dynorm.fold.check import Check
from dynorm.replace.edits import added_biases
from dynorm.replace.specs import is_ours

# A power of two, and so is its root: neither rounds a number.
_EPS = 2.0**80


def as_stock(
    model: nn.Module, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> nn.Module:
    r"""Return a folded transformers model in its own class, which loads where dynorm is unknown.

    Where a linear layer is gone, the class's RMSNorm computes the identity: with eps = 2^80 and a
    weight of 2^40, ``weight * x / sqrt(mean(x^2) + eps)`` is x to the last digit, which is checked.
    A LayerNorm cannot do so.

    Args:
        model: a model of transformers in which :func:`dynorm.fold_` has left no other layer of dynorm.
        *args: the example, as for :func:`dynorm.fold_`.
        tolerance: the relative error to allow, as for :func:`dynorm.fold_`.
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
