"""Optimizer groups: the constants of the point-wise layers have their own learning rate."""

from typing import Any

from torch import Tensor, nn

from dynorm.arguments import check_module, check_not_negative, require_gathered
from dynorm.layers.constants import AlphaNorm
from dynorm.layers.derf import Derf
from dynorm.layers.pointwise import PointwiseNorm
from dynorm.wrappers import gathered

# The rate of a constant kept as its logarithm, over that of the weights.
LOG_RATE = 30.0


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    constants_lr: float | None = None,
    muon_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups, in which the constants of point-wise layers have their own rate.

    Matrices have weight decay, all other parameters none.

    Args:
        model: a model with or without point-wise layers.
        lr: the rate of all weights except the constants.
        weight_decay: for parameters of two and more dimensions, except those of point-wise layers.
        constants_lr: the rate of ``log_beta``, ``log_gain``, ``alpha`` and ``shift``;
            by default 30 times ``lr`` for the logarithms and ``lr`` for the others. While a rate
            warms up, a layer's input can grow a hundredfold: beta must follow, or the layer
            saturates and the model is stuck. The rate of an alpha is multiplied by its present
            size, so that it changes in proportion, as beta does through ``log_beta``. So call
            :func:`dynorm.init_from_batch_` before this if the layer is to be annealed to DyT or
            Derf, although annealing sets the constants again.
        muon_lr: the rate of the hidden matrices under Muon. They are then the first group, and each
            group has the key ``use_muon``. Hidden matrices have two dimensions and belong neither
            to an ``nn.Embedding`` nor to the ``nn.Linear`` that the model defines last, taken for
            the head. A matrix that is a parameter by itself, say of positions, is hidden.

    Returns:
        Groups for a ``torch.optim`` optimizer; parameters that need no gradient are left out, and
        so are empty groups. The number of groups does not depend on the values of the parameters.
        With ``muon_lr`` they are for two optimizers, or for one that reads ``use_muon``.

    Raises:
        ArgumentError: a rate or the decay is not a number, negative or not finite; or ``model`` is
            not a module.
        ModelError: the parameters are the placeholders of DeepSpeed's ZeRO-3.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), dynorm.DyISRU(4))
        >>> groups = dynorm.param_groups(model, lr=1e-3, weight_decay=0.1, constants_lr=1e-2)
        >>> [(len(group["params"]), group["lr"], group["weight_decay"]) for group in groups]
        [(1, 0.001, 0.1), (3, 0.001, 0.0), (1, 0.01, 0.0)]
        >>> model = nn.Sequential(nn.Linear(4, 4), dynorm.DyISRU(4), nn.Linear(4, 2))
        >>> hidden, *rest = dynorm.param_groups(model, lr=3e-4, muon_lr=0.02)
        >>> optimizers = [torch.optim.Muon([hidden]), torch.optim.AdamW(rest)]
    """
    check_module(model)
    require_gathered(model)
    base = lr if constants_lr is None else constants_lr
    named = {"lr": lr, "weight_decay": weight_decay, "constants_lr": base, "muon_lr": muon_lr}
    for name, rate in named.items():
        if rate is not None:
            check_not_negative(name, rate)
    rates: dict[nn.Parameter, float] = {}
    # The constants whose rate depends on their size.
    relative: set[nn.Parameter] = set()
    affine: set[nn.Parameter] = set()
    for layer in model.modules():
        if not isinstance(layer, PointwiseNorm):
            continue
        rates |= constant_rates(layer)
        if isinstance(layer, AlphaNorm):
            relative.add(layer.alpha)
        for name, parameter in layer.named_parameters():
            if constants_lr is None and name in ("log_beta", "log_gain"):
                rates[parameter] = LOG_RATE
            affine.add(parameter)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trained if p not in rates]
    matrices = [p for p in weights if p.dim() > 1 and p not in affine]
    others = [p for p in weights if p.dim() <= 1 or p in affine]
    groups = [
        {"params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"params": others, "lr": lr, "weight_decay": 0.0},
    ]
    # A constant whose rate moves with its size has its own group: however the sizes have changed, a
    # run that goes on from a checkpoint finds the groups that it was saved with.
    for rate in dict.fromkeys(rates[p] for p in rates if p not in relative):
        same = [p for p in trained if p not in relative and rates.get(p) == rate]
        groups.append({"params": same, "lr": base * rate, "weight_decay": 0.0})
    for parameter in trained:
        if parameter in relative:
            rate = base * rates[parameter]
            groups.append({"params": [parameter], "lr": rate, "weight_decay": 0.0})
    if muon_lr is not None:
        outer = _outer_weights(model)
        hidden = [p for p in matrices if p.dim() == 2 and p not in outer]
        groups[0]["params"] = [p for p in matrices if p.dim() > 2 or p in outer]
        groups.insert(0, {"params": hidden, "lr": muon_lr, "weight_decay": weight_decay})
        for group in groups:
            group["use_muon"] = group["params"] is hidden
    return [group for group in groups if group["params"]]


def _outer_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of the embeddings and of the last linear layer, which is the head."""
    outer: set[Tensor] = set()
    head: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outer.add(module.weight)
        elif isinstance(module, nn.Linear):
            head = [module.weight]
    return outer.union(head)


def constant_rates(layer: PointwiseNorm) -> dict[nn.Parameter, float]:
    """Return the factor of each constant's learning rate.

    It is 1, except for alpha its size: a step of log_beta changes beta in proportion, and a step of
    alpha must do so too, or an alpha of 0.003 and one of 3 could not share a rate. A step of Derf's
    shift moves all outputs by ``scale`` times its size, so its factor is 1 / scale.
    """
    rates = dict.fromkeys(layer.constant_parameters(), 1.0)
    if isinstance(layer, AlphaNorm) and not layer.alpha.is_meta:
        # The mean of the full tensor: if it is sharded, all ranks must get the same rate.
        rates[layer.alpha] = float(gathered(layer.alpha.detach()).abs().mean())
    if isinstance(layer, Derf):
        rates[layer.shift] = 1 / abs(layer.scale)
    return rates
