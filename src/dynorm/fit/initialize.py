"""Constants for training from the first step: by theory, from one batch (closed form 5)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, call, require_batch, site_tokens, token_masks
from dynorm.errors import ArgumentError, DataError
from dynorm.guard import (
    hooked,
    require_plain_model,
    require_trainable,
    unchanged_on_error,
    undisturbed,
)
from dynorm.layers import PointwiseNorm
from dynorm.plain import Plain
from dynorm.ranks import Ranks
from dynorm.replace.converted import require_layers
from dynorm.table import Column, Table

# The sum of the witnesses counts as at least this part of beta for each channel: if they are always
# 0, no gain would give them their share.
_LEAST_SUM = 1e-4


@dataclass(frozen=True)
class InitializationReport(Plain):
    """The result of ``init_from_batch_``, by path.

    Args:
        beta: the constant of each layer, as DyISRU's.
        sigma: the size of its input: the root of the mean square about the layer's centre.
        unreached: the layers that the batch did not reach; they keep their constants.
    """

    beta: dict[str, float]
    sigma: dict[str, float]
    unreached: list[str]

    def __str__(self) -> str:
        """Return the report as a table."""
        columns = ("layer", Column("sigma", ".4g"), Column("beta", ".4g"))
        rows = [(path, self.sigma[path], beta) for path, beta in self.beta.items()]
        notes = [f"{path}: not reached" for path in self.unreached]
        return str(Table(columns, rows, notes, f"{len(rows)} layers initialized from one batch"))


def init_from_batch_(model: nn.Module, batch: Batch, *, share: float = 0.1) -> InitializationReport:
    r"""Set the constants of point-wise layers for training from the first step, from one batch, in place.

    .. math:: \beta_0 = s^2 \sigma^2, \quad \sigma^2 = \langle (x - c)^2 \rangle

    with s the layer's scale, :math:`\sigma^2` the mean square of the layer's input, and c its
    centre, the mean of the input if the layer has one. Every function then has the slope
    :math:`1 / \sigma` at 0, as a norm would; with the default scale sqrt(C) that is
    :math:`\beta_0 = C \sigma^2`. DyT, Derf and the linear control get the same slope.
    In a layer with K witnesses the sum stays the same, and they carry a share p of it:
    :math:`\beta = (1 - p) \beta_0` and :math:`g = p \beta_0 / \langle \sum_k (x_k - c)^2 \rangle` for each of them.
    The model is run once. Each layer is set as it is reached, so the next ones see the inputs of
    the new model. Weights and biases stay. Under torch.distributed with an initialized group, call
    it on every rank, each with its own share of the batch: all get the same constants.

    Args:
        model: a model with point-wise layers, built so or converted; plain, neither compiled nor
            wrapped.
        batch: a tensor, tuple or dict, for ``model(x)``, ``model(*x)`` or ``model(**x)``; its
            padding is left out.
        share: how much of a token's typical sum the witnesses carry, between 0 and 1; for layers
            that have some.

    Returns:
        The constants, by path.

    Raises:
        ArgumentError: ``share`` is not between 0 and 1.
        ModelError: the model has no point-wise layer, is compiled, wrapped or sharded, or another
            rank's layers differ.
        DataError: the batch is of the wrong kind, the model cannot run it, it reaches no layer, the
            input of a layer is not finite or all 0, or another rank failed or reached other layers.
            The constants are then as they were, on every rank.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), dynorm.DyISRU(8), nn.Linear(8, 8), dynorm.DyT(8, scale=8**0.5))
        >>> report = dynorm.init_from_batch_(model, torch.randn(64, 8))
        >>> list(report.beta)
        ['1', '3']

    Reference:
        Eq. 14 for many channels of like size (closed form 5).
    """
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ArgumentError(
            f"share must be between 0 and 1, got {share!r}: the part of the sum that witnesses "
            "carry"
        )
    ranks = Ranks()
    sigma: dict[str, float] = {}
    with ranks.sharing_errors():
        require_plain_model(model)
        layers = require_layers(model)
        for path, layer in layers.items():
            require_trainable(layer, path)
        require_batch(batch)
        ranks.require_alike(layers.items())
        masks = token_masks(batch)
        paths = {layer: path for path, layer in layers.items()}

        def set_(layer: PointwiseNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            path = paths[layer]
            if path not in sigma:
                ranks.require_same_place(path)
                sigma[path] = _set_constants_(
                    layer, site_tokens(layer, args[0], masks), path, share, ranks
                )
            return layer.forward(args[0])

        with (
            unchanged_on_error(paths),
            undisturbed(model, batch),
            hooked(paths, set_),
        ):
            call(model, batch)
            ranks.require_same_place()
            if not sigma:
                raise DataError(
                    "the batch must reach at least one point-wise layer, but reached none: give "
                    "another"
                )
    beta = {}
    for path, layer in layers.items():
        if path in sigma:
            beta[path] = float(layer.beta().detach().median())
    return InitializationReport(beta, sigma, [path for path in layers if path not in sigma])


def _set_constants_(
    layer: PointwiseNorm, x: Tensor, path: str, share: float, ranks: Ranks
) -> float:
    """Set a layer's constants by its input, (tokens, C), and return the input's size."""
    x = x.double()
    count_here = x.new_tensor(x.numel())
    sums = ranks.summed(torch.stack([count_here, x.sum(), x.square().sum()]))
    count = float(sums[0])
    mean = float(sums[1] / sums[0])
    square = float(sums[2] / sums[0])
    center = 0.0
    if layer.center is not None:
        center = mean
    variance = square - center * center
    if not (count > 0 and variance > 0 and layer.scale**2 * variance < float("inf")):
        raise DataError(
            f"a layer's input must be finite and not all the same, but that of {path!r} has mean "
            f"{mean:g} and mean square {square:g} over {int(count)} values: look for an overflow or an empty batch"
        )
    beta = x.new_tensor(layer.scale**2 * variance)
    channels = list(layer.witness_channels)
    if channels:
        squares = (x[:, channels] - center).square().sum()
        typical = ranks.summed(squares) / (sums[0] / x.shape[1])
        typical = typical.clamp_min(_LEAST_SUM * beta / len(channels))
        layer.fill_gains_((share * beta / typical).expand(len(channels)))
        beta = (1 - share) * beta
    layer.fill_constants_(beta, x.new_tensor(mean))
    return float(variance**0.5)
