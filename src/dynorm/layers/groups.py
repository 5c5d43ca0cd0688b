"""Optimizer groups: the constants of the point-wise layers have their own learning rate."""

from typing import Any

from torch import nn

from dynorm.arguments import check_module, check_not_negative, require_gathered
from dynorm.layers.constants import AlphaNorm
from dynorm.layers.derf import Derf
from dynorm.layers.pointwise import PointwiseNorm
from dynorm.wrappers import gathered

# The rate of a constant that is kept as its logarithm, over that of the weights.
LOG_RATE = 30.0


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    constants_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups, in which the constants of point-wise layers have their own rate.

    Matrices have weight decay, all other parameters none.

    Args:
        model: a model with or without point-wise layers.
        lr: the rate of all weights except the constants.
        weight_decay: for parameters of two and more dimensions, except those of point-wise layers.
        constants_lr: the rate of ``log_beta``, ``log_gain``, ``alpha`` and ``shift``;
            by default 30 times ``lr`` for the logarithms and ``lr`` for the others. That of ``shift``
            is divided by the layer's scale, which multiplies its effect. While a rate
            warms up, a layer's input can grow a hundredfold: beta must follow, or the layer
            saturates and the model is stuck. The rate of an alpha is multiplied by its present
            size, so that it changes in proportion, as beta does through ``log_beta``. So set the
            constants first, also of a layer that is to be annealed, with
            :func:`dynorm.init_from_batch_`.

    Returns:
        Groups for a ``torch.optim`` optimizer; parameters that need no gradient are left out, and
        so are empty groups. The number of groups does not depend on the values of the parameters.

    Raises:
        ArgumentError: a rate or the decay is not a number, negative or not finite; or ``model`` is
            not a module.
        ModelError: the parameters are the placeholders of DeepSpeed's ZeRO-3.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), dynorm.DyISRU(4))
        >>> groups = dynorm.param_groups(model, lr=1e-3, weight_decay=0.1, constants_lr=1e-2)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
        [(1, 0.001, 0.1), (3, 0.001, 0.0), (1, 0.01, 0.0)]
    """
    check_module(model)
    require_gathered(model)
    check_not_negative("lr", lr)
    check_not_negative("weight_decay", weight_decay)
    base_rate, log_factor = lr, LOG_RATE
    if constants_lr is not None:
        # A rate that is given holds for logarithms too.
        base_rate, log_factor = check_not_negative("constants_lr", constants_lr), 1.0
    factors: dict[nn.Parameter, float] = {}
    alphas: set[nn.Parameter] = set()
    of_layers: set[nn.Parameter] = set()
    for layer in model.modules():
        if isinstance(layer, PointwiseNorm):
            factors |= constant_factors(layer, log_factor)
            of_layers.update(layer.parameters())
        if isinstance(layer, AlphaNorm):
            alphas.add(layer.alpha)
    matrices: dict[str, Any] = {"params": [], "lr": lr, "weight_decay": weight_decay}
    others: dict[str, Any] = {"params": [], "lr": lr, "weight_decay": 0.0}
    # By the factor of the rate, and by the alpha that the group is for.
    constants: dict[tuple[float, nn.Parameter | None], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter in factors:
            factor = factors[parameter]
            rate = base_rate * factor
            # The rate of an alpha depends on its size now. With its own group, a run that goes on from
            # a checkpoint finds the groups that it was saved with, however the sizes have changed.
            alpha = parameter if parameter in alphas else None
            group = constants.setdefault(
                (factor, alpha), {"params": [], "lr": rate, "weight_decay": 0.0}
            )
        elif parameter.dim() > 1 and parameter not in of_layers:
            group = matrices
        else:
            group = others
        group["params"].append(parameter)
    return [group for group in (matrices, others, *constants.values()) if group["params"]]


def constant_factors(layer: PointwiseNorm, log_factor: float) -> dict[nn.Parameter, float]:
    """Return the factor of each constant's learning rate: ``log_factor`` for a logarithm.

    That of alpha is its size: a step of log_beta changes beta in proportion, and a step of alpha
    must do so too, or an alpha of 0.003 and one of 3 could not share a rate. A step of Derf's shift
    moves all outputs by ``scale`` times its size, so its factor is 1 / scale.
    """
    factors = dict.fromkeys(layer.constant_parameters(), log_factor)
    if isinstance(layer, AlphaNorm):
        factors[layer.alpha] = 1.0
        if not layer.alpha.is_meta:
            # The mean of the full tensor: if it is sharded, all ranks must get the same rate.
            factors[layer.alpha] = float(gathered(layer.alpha.detach()).abs().mean())
    if isinstance(layer, Derf):
        factors[layer.shift] = 1 / abs(layer.scale)
    return factors
