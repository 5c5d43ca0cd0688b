"""Watch the point-wise layers of a model while it trains."""

import warnings
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynorm.batches import site_tokens
from dynorm.errors import CalibrationWarning
from dynorm.guard import require_values
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import require_layers
from dynorm.wrappers import gathered

# This many tokens of a call are enough.
_TOKENS = 256
# An output is saturated beyond this share of its bound: for inputs beyond 3 sqrt(beta) of DyISRU.
_SATURATION = 0.95
# The share of saturated outputs from which a layer is warned of, once.
_WARNED_FROM = 0.8
# From this growth of a layer's inputs on, its start was not the fault.
_GROWN = 2.0


class Monitor:
    """Watch the point-wise layers of a model in training, in your own loop or with Lightning.

    :meth:`read` returns figures named ``figure/path``:

    - ``saturated`` is the share of a layer's outputs beyond 95% of their bound, where gradients
      vanish;
    - ``size`` is the root mean square of its inputs, the scale of the stream;
    - ``beta`` is its constant;
    - ``drift`` is ``beta`` divided by the first one seen.

    Padding counts. Compile a model after the monitor is attached. The figures are those of this
    process. Sharded constants (DTensors) are gathered: watch such a model on every rank.

    Args:
        model: any model with point-wise layers.

    Raises:
        ArgumentError: ``model`` is not a module.
        ModelError: the model has no point-wise layer, or is offloaded.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), dynorm.DyISRU(8))
        >>> with dynorm.Monitor(model) as monitor:
        ...     _ = model(torch.ones(2, 4))
        ...     sorted(monitor.read())
        ['beta/1', 'drift/1', 'saturated/1', 'size/1']
    """

    def __init__(self, model: nn.Module) -> None:
        layers = require_layers(model)
        require_values(model)
        # By path the figures of each call since the last reading: the share that is saturated, the
        # size, and beta.
        self._calls: dict[str, list[Tensor]] = defaultdict(list)
        # By path: size and beta as they were first seen.
        self._first: dict[str, list[float]] = {}
        self._warned: set[str] = set()
        self._handles: list[RemovableHandle] = []
        for path, layer in layers.items():
            hook = partial(self._see, path)
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def read(self) -> dict[str, float]:
        """Return the figures since the last call of this method.

        They are means over the calls of a layer; a layer that was not called has none.

        Warns:
            CalibrationWarning: a layer saturates; the message names the remedy that fits.
        """
        all_figures: dict[str, float] = {}
        for path, calls in self._calls.items():
            saturated, size, _ = torch.stack(calls).mean(0).tolist()
            beta = float(calls[-1][2])
            first_size, first_beta = self._first.setdefault(path, calls[0][1:].tolist())
            figures = {
                "saturated": saturated,
                "size": size,
                "beta": beta,
                "drift": beta / first_beta,
            }
            for name, value in figures.items():
                all_figures[f"{name}/{path}"] = value
            if saturated > _WARNED_FROM and path not in self._warned:
                self._warned.add(path)
                remedy = _remedy(size / max(first_size, 1e-30), (beta / first_beta) ** 0.5)
                warnings.warn(
                    f"the layer {path!r} saturates: {saturated:.0%} of its outputs are near their "
                    f"bound, where the gradient almost vanishes. Its inputs have the size {size:.3g}, "
                    f"and sqrt(beta) is {beta**0.5:.3g}. {remedy}",
                    CalibrationWarning,
                    stacklevel=2,
                )
        self._calls.clear()
        return all_figures

    def close(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    __exit__ = close

    def __enter__(self) -> "Monitor":
        return self

    @torch.no_grad()
    def _see(
        self,
        path: str,
        layer: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        # A restored norm keeps the hooks of its layer.
        if not isinstance(layer, PointwiseNorm):
            return
        if not layer.training or output.numel() == 0:
            return
        # By position or by keyword.
        x = (*args, *kwargs.values())[0]
        step = output.numel() // layer.channels // _TOKENS + 1
        inputs = site_tokens(layer, x.detach(), [])[::step]
        outputs = site_tokens(layer, output.detach(), [])[::step]
        size = inputs.square().mean().sqrt()
        beta = gathered(layer.beta()).squeeze()
        saturated = _saturated_share(layer, outputs)
        self._calls[path].append(torch.stack([saturated, size, beta]))


def _saturated_share(layer: PointwiseNorm, tokens: Tensor) -> Tensor:
    """Return the share of a layer's outputs (tokens, C) that lie near its bound.

    For the linear control, which has no bound, it is the bound of the norm.
    """
    factor, bias = layer.factor(), layer.bias
    if bias is not None:
        tokens = tokens - gathered(bias.detach()).flatten()
    bound: float | Tensor = _SATURATION * abs(layer.scale)
    if factor is not None:
        bound = bound * gathered(factor.detach()).flatten().abs()
    return (tokens.abs() > bound).float().mean()


def _remedy(growth: float, drift: float) -> str:
    """Say what to do, by the growth of a layer's inputs and that of sqrt(beta)."""
    if growth < _GROWN:
        return (
            "Its constants did not fit from the start: leave out a scale below sqrt(C), and call "
            "dynorm.init_from_batch_ before the first step"
        )
    return (
        f"Its inputs have grown {growth:.3g}-fold, and sqrt(beta) {drift:.3g}-fold: make the optimizer "
        "of dynorm.param_groups, lower the learning rate, or make the warm-up longer"
    )
