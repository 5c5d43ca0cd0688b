"""The begin of the path: constants from the activations of one training step, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynorm.errors import DataError, ModelError
from dynorm.layers import AnnealedNorm
from dynorm.surgery.activations import site_tokens
from dynorm.surgery.batches import token_masks
from dynorm.surgery.fit import own_betas
from dynorm.surgery.path import annealed_layers
from dynorm.surgery.ranks import Ranks


class PathStart:
    r"""Watches the annealed layers of a model and then sets their constants in closed form.

    .. math:: \log \beta = \langle \log b_i \rangle, \quad c = \langle x_i \rangle

    with :math:`b_i = C v_i + C^2 \varepsilon / (C - 1)` of LayerNorm or :math:`s_i + C \varepsilon` of RMSNorm (whose
    centre is 0), over all tokens that go by until :meth:`finish_`, padding left out, on all ranks. With one constant a
    channel, each channel takes its own mean.

    Args:
        model: with annealed layers.

    Raises:
        ModelError: it has none.

    Example:
        >>> model = nn.Sequential(dynorm.AnnealedDyISRU(64, center=True))
        >>> start = PathStart(model)
        >>> _ = model(3 + 2 * torch.randn(100, 64))
        >>> start.finish_()
        >>> 3 * 64 < model[0].beta().item() < 5 * 64
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {layer: path for path, layer in annealed_layers(model).items()}
        self._sums = {
            layer: torch.zeros(3, layer.channels, dtype=torch.float64, device=layer.t.device) for layer in self._paths
        }
        self._masks: list[Tensor] = []
        # A graph that was compiled before knows nothing of these hooks; until they are gone the model runs eagerly.
        self._stance = torch.compiler.set_stance("force_eager")
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._keep_masks, with_kwargs=True, prepend=True),
            *(layer.register_forward_hook(self._add, prepend=True) for layer in self._paths),
        ]

    def finish_(self) -> None:
        """Set the constants from what was seen, and watch no more.

        Raises:
            DataError: a layer was not reached, or its activations are not finite; no constant is changed then.
        """
        for handle in self._handles:
            handle.remove()
        self._stance.__exit__(None, None, None)
        ranks = Ranks()
        found = {layer: self._constants(layer, ranks.summed(sums)) for layer, sums in self._sums.items()}
        for layer, (log_beta, center) in found.items():
            layer.fill_constants_(_shaped(log_beta.exp(), layer), _shaped(center, layer))

    def _keep_masks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._masks = token_masks(kwargs)

    def _add(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(layer, AnnealedNorm)
        with torch.no_grad():
            x = site_tokens(layer, args[0].detach(), self._masks).double()
            beta = own_betas(x, layer.kind, layer.norm_eps)
            # Where all other channels are the same and there is no eps, no constant is asked for.
            counts = (beta != 0).to(x)
            sums = torch.stack([counts.sum(0), beta.where(beta != 0, 1.0).log().sum(0), (x * counts).sum(0)])
            self._sums[layer] += sums

    def _constants(self, layer: AnnealedNorm, sums: Tensor) -> tuple[Tensor, Tensor]:
        if not bool(sums.isfinite().all() and sums[0].min() > 0):
            saw = "NaN or inf" if sums[0].min() > 0 else "none"
            raise DataError(
                f"the path must begin with finite activations at every norm, but {self._paths[layer]!r} saw {saw}: "
                "look for an overflow, or for a layer that is not used"
            )
        if not layer.per_channel:
            sums = sums.sum(1, keepdim=True)
        center = torch.zeros_like(sums[2]) if layer.kind == "rmsnorm" else sums[2] / sums[0]
        return sums[1] / sums[0], center


def require_equal_ranks(model: nn.Module) -> None:
    """Check that every rank has the same t and the same constants.

    Raises:
        ModelError: on every rank, if one differs.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    layers = annealed_layers(model).values()
    mine = torch.cat([value for layer in layers for value in _state(layer)])
    high, low = mine.clone(), mine.clone()
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
    if not torch.equal(high, low):
        raise ModelError(
            "all ranks must have the same t and the same constants, but they differ: build the model from one seed or "
            "checkpoint, and call dynorm.set_path_ and dynorm.calibrate_ alike on every rank"
        )


def _state(layer: AnnealedNorm) -> Iterator[Tensor]:
    # Not the buffer: DistributedDataParallel has made it the same on all ranks.
    yield torch.full((1,), layer.set_to, dtype=torch.float64, device=layer.t.device)
    for value in layer.constant_parameters():
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield whole.detach().double().flatten()


def _shaped(value: Tensor, layer: AnnealedNorm) -> Tensor:
    return value.reshape(layer.normalized_shape) if layer.per_channel else value
