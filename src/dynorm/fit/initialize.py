"""Constants for training from the first step: by theory, from one batch (closed form 5)."""

import math
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dynorm.batches import Batch, call, require_batch, site_tokens, token_masks
from dynorm.broadcast import layers_from_first_rank_
from dynorm.errors import CalibrationWarning, DataError
from dynorm.guard import (
    hooked,
    require_plain_model,
    require_trainable,
    unchanged_on_error,
    undisturbed,
)
from dynorm.layers import DyISRU, LinearControl, PointwiseNorm
from dynorm.plain import Plain
from dynorm.replace.converted import require_layers
from dynorm.table import Table

# The part of a token's typical sum that the witnesses carry.
_SHARE = 0.1
# The sum of the witnesses counts as at least this part of beta for each channel: if they are always
# 0, no gain would give them their share.
_LEAST_SUM = 1e-4


@dataclass(frozen=True)
class InitializationReport(Plain):
    """The result of ``init_from_batch_``, by path.

    Args:
        beta: the constant of each layer, as DyISRU's.
        sigma: the size of its input: its root mean square.
        unreached: the layers that the batch did not reach; they keep their constants.
    """

    beta: dict[str, float]
    sigma: dict[str, float]
    unreached: list[str]

    def __str__(self) -> str:
        """Return the report as a table."""
        columns = ("layer", "sigma", "beta")
        rows = [(path, self.sigma[path], beta) for path, beta in self.beta.items()]
        notes = [f"{path}: not reached" for path in self.unreached]
        return str(Table(columns, rows, notes, f"{len(rows)} layers initialized from one batch"))


def init_from_batch_(model: nn.Module, batch: Batch) -> InitializationReport:
    r"""Set the constants of point-wise layers for training from the first step, from one batch, in place.

    .. math:: \beta_0 = s^2 \sigma^2, \quad \sigma^2 = \langle x^2 \rangle

    with s the layer's scale and :math:`\sigma^2` the mean square of the layer's input. Every
    function then has the slope :math:`1 / \sigma` at 0, as a norm would; with the default scale
    sqrt(C) that is :math:`\beta_0 = C \sigma^2`. DyT, Derf and the linear control get the same slope.
    In a DyISRU with K witnesses the sum stays the same, and they carry a tenth of it:
    :math:`\beta = 0.9 \beta_0` and :math:`g = 0.1 \beta_0 / \langle \sum_k x_k^2 \rangle` for each of them.
    The model is run once. Each layer is set as it is reached, so the next ones see the inputs of
    the new model. Weights and biases stay. Under torch.distributed with an initialized group, call
    it on every rank: rank 0 sets the constants from its batch, and all ranks get them.

    Args:
        model: a model with point-wise layers, built so or converted; plain, neither compiled nor
            wrapped.
        batch: a tensor, tuple or dict, for ``model(x)``, ``model(*x)`` or ``model(**x)``; its
            padding is left out.

    Returns:
        The constants, by path.

    Raises:
        ModelError: the model has no point-wise layer, is compiled, wrapped or sharded, or another
            rank's layers differ.
        DataError: the batch is of the wrong kind, the model cannot run it, it reaches no layer, or
            the input of a layer is not finite or all 0. The constants are then as they were.

    Warns:
        CalibrationWarning: a layer's bound is below the outputs of a norm on this batch, as that of
            ``scale=1`` is.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), dynorm.DyISRU(8), nn.Linear(8, 8), dynorm.DyT(8))
        >>> report = dynorm.init_from_batch_(model, torch.randn(64, 8))
        >>> list(report.beta)
        ['1', '3']

    Reference:
        Eq. 14 for many channels of like size (closed form 5).
    """
    return layers_from_first_rank_(model, partial(_initialize, model, batch))


def _initialize(model: nn.Module, batch: Batch) -> InitializationReport:
    """Set the constants in this process."""
    require_plain_model(model)
    layers = require_layers(model)
    for path, layer in layers.items():
        require_trainable(layer, path)
        layer.require_stored(path)
    require_batch(batch)
    masks = token_masks(batch)
    paths = {layer: path for path, layer in layers.items()}
    sigma: dict[str, float] = {}

    def set_(layer: PointwiseNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        path = paths[layer]
        if path not in sigma:
            tokens = site_tokens(layer, args[0], masks).double()
            sigma[path] = _set_constants_(layer, tokens, path)
        return layer.forward(args[0])

    with (
        unchanged_on_error(paths),
        undisturbed(model, batch),
        hooked(paths, set_),
    ):
        call(model, batch)
        if not sigma:
            raise DataError(
                "the batch must reach at least one point-wise layer, but reached none: give another"
            )
    beta = {}
    for path, layer in layers.items():
        if path in sigma:
            beta[path] = float(layer.beta().detach())
    return InitializationReport(beta, sigma, [path for path in layers if path not in sigma])


@torch.no_grad()
def _set_constants_(layer: PointwiseNorm, x: Tensor, path: str) -> float:
    """Set a layer's constants by its input, (tokens, C), and return the input's size."""
    square = float(x.square().mean())
    if not 0 < layer.scale**2 * square < float("inf"):
        raise DataError(
            f"a layer's input must be finite and not all 0, but that of {path!r} has a mean square "
            f"of {square:g} over {x.numel()} values: look for an overflow or an empty batch"
        )
    _warn_of_bound(layer, x, path)
    beta = layer.scale**2 * square
    if isinstance(layer, DyISRU) and layer.log_gain is not None:
        squares = x[:, list(layer.witness_channels)].square()
        typical = max(float(squares.sum() / len(x)), _LEAST_SUM * beta / squares.shape[1])
        layer.log_gain.fill_(math.log(_SHARE * beta / typical))
        beta *= 1 - _SHARE
    layer.fill_constants_(beta)
    return float(square**0.5)


def _warn_of_bound(layer: PointwiseNorm, x: Tensor, path: str) -> None:
    """Warn if a norm of these tokens, (tokens, C), would give more than the layer can."""
    if isinstance(layer, LinearControl):
        return
    sizes = x.square().mean(1).sqrt()
    alive = sizes > 0
    largest = float((x.abs().amax(1)[alive] / sizes[alive]).max())
    # A token of one large channel is exactly at the bound.
    if largest > abs(layer.scale) * (1 + 1e-6):
        warnings.warn(
            f"the layer {path!r} cannot give more than its scale {layer.scale:g}, where a norm "
            f"gives up to {largest:.3g} on this batch: with the norm's slope it saturates early. "
            "Leave scale out for the norm's own bound, sqrt(C), or keep the published constants of "
            "scale=1 and do not call this function",
            CalibrationWarning,
            stacklevel=6,
        )
