"""Optimizer groups: the constants of the point-wise layers have a rate of their own."""

from typing import Any

from torch import nn

from dynorm.arguments import check_module, check_not_negative, require_gathered
from dynorm.layers.base import PointwiseNorm

# Of a constant kept as its logarithm, over that of the weights.
LOG_RATE = 30.0


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, constants_lr: float | None = None
) -> list[dict[str, Any]]:
    """Return optimizer groups: matrices with weight decay, other weights without, the constants with their own rate.

    Args:
        model: a model with or without point-wise layers.
        lr: the rate of all weights but the constants.
        weight_decay: for parameters of two and more dimensions, but those of point-wise layers.
        constants_lr: the rate of ``log_beta``, ``log_gain``, ``alpha``, ``shift`` and ``center``;
            by default 30 times ``lr`` for the logarithms and ``lr`` for the others. While a rate
            warms up, a layer's input can grow a
            hundredfold: beta must follow, or the layer saturates and the model is stuck. An alpha's
            rate is multiplied by its present size, so that it changes in proportion, as
            ``log_beta`` lets beta do: give a layer that is to be annealed to DyT or Derf its
            constants (:func:`dynorm.init_from_batch_`) before this, though annealing sets them
            anew.

    Returns:
        Groups for a ``torch.optim`` optimizer; parameters that need no gradient are left out, and
        so are empty groups. Which groups there are does not depend on the values of the parameters.

    Raises:
        ArgumentError: a rate or the decay is no number, negative or not finite; or ``model`` is no
            module.
        ModelError: the parameters are the placeholders of DeepSpeed's ZeRO-3.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), dynorm.DyISRU(4))
        >>> groups = dynorm.param_groups(model, lr=1e-3, weight_decay=0.1, constants_lr=1e-2)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
        [(1, 0.001, 0.1), (3, 0.001, 0.0), (1, 0.01, 0.0)]

    Reference:
        The default is measured: see "Learning rates" in docs/howto/from-scratch.md.
    """
    check_module(model)
    require_gathered(model)
    base = lr if constants_lr is None else constants_lr
    for name, rate in (("lr", lr), ("weight_decay", weight_decay), ("constants_lr", base)):
        check_not_negative(name, rate)
    layers = [module for module in model.modules() if isinstance(module, PointwiseNorm)]
    rates = {p: rate for layer in layers for p, rate in layer.constant_rates().items()}
    if constants_lr is None:
        logarithms = (
            p
            for layer in layers
            for name, p in layer.named_parameters()
            if name in ("log_beta", "log_gain")
        )
        rates |= dict.fromkeys(logarithms, LOG_RATE)
    affine = {p for layer in layers for p in layer.parameters()} - rates.keys()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {p for p in trained if p.dim() > 1} - affine - rates.keys()
    groups = [
        {"params": [p for p in trained if p in matrices], "lr": lr, "weight_decay": weight_decay},
        {
            "params": [p for p in trained if p not in matrices and p not in rates],
            "lr": lr,
            "weight_decay": 0.0,
        },
    ]
    # A constant whose rate moves with its size stands alone: however the sizes have changed, a run
    # that goes on from a checkpoint finds the groups that it was saved with.
    alone = {getattr(layer, name) for layer in layers for name in layer.relative_constants}
    for rate in dict.fromkeys(rates[p] for p in rates if p not in alone):
        same = [p for p in trained if p not in alone and rates.get(p) == rate]
        groups.append({"params": same, "lr": base * rate, "weight_decay": 0.0})
    groups += [
        {"params": [p], "lr": base * rates[p], "weight_decay": 0.0} for p in trained if p in alone
    ]
    return [group for group in groups if group["params"]]
