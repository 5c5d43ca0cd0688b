"""Watch the point-wise layers of a model while it trains."""

import warnings
import weakref
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dynorm.batches import site_tokens
from dynorm.errors import CalibrationWarning, listed
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
# From this growth of a layer's mean square input on, its start was not the fault.
_GROWN = 4.0


class Monitor:
    """Watch the point-wise layers of a model in training, in your own loop or with Lightning.

    :meth:`read` returns figures named ``figure/path``:

    - ``saturated`` is the share of a layer's outputs beyond 95% of their bound, where gradients
      vanish;
    - ``size`` is the root mean square of its inputs, the scale of the stream;
    - ``beta`` is its constant;
    - ``drift`` is ``beta`` divided by the first one seen.

    It also looks at the rates of the optimizers that step the model. Padding counts. Compile a
    model after the monitor is attached. The figures are those of this process.
    Sharded constants (DTensors) are gathered: watch such a model on every rank.

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
        # By path: size and beta as they were first seen.
        self._first: dict[str, list[float]] = {}
        self._warned: set[str] = set()
        self._has_warned_of_rates = False
        self._handles: list[RemovableHandle] = []
        self._clear()
        layers = require_layers(model)
        require_values(model)
        self._model = model
        self._layers = layers
        _OPEN.add(self)
        for path, layer in layers.items():
            self._handles.append(
                layer.register_forward_hook(partial(self._see, path), with_kwargs=True)
            )

    def read(self) -> dict[str, float]:
        """Return the figures since the last call of this method.

        They are means over the calls of a layer; a layer that was not called has none.

        Warns:
            CalibrationWarning: a layer saturates, or its constant is in no optimizer or has the
                rate of all other parameters; the message names the one remedy that fits.
        """
        self._warn_of_rates()
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
                remedy = _remedy((size / max(first_size, 1e-30)) ** 2, beta / first_beta)
                warnings.warn(
                    f"the layer {path!r} saturates: {saturated:.0%} of its outputs are near their "
                    f"bound, where the gradient almost vanishes. Its inputs have the size {size:.3g}, "
                    f"and sqrt(beta) is {beta**0.5:.3g}. {remedy}",
                    CalibrationWarning,
                    stacklevel=2,
                )
        self._clear()
        return all_figures

    def close(self, *_: object) -> None:
        """Remove the hooks."""
        _OPEN.discard(self)
        for handle in self._handles:
            handle.remove()

    __exit__ = close

    def __enter__(self) -> "Monitor":
        return self

    def _clear(self) -> None:
        # By path the figures of each call: the share that is saturated, the size, and beta.
        self._calls: dict[str, list[Tensor]] = defaultdict(list)
        # By the parameter of the model.
        self._rates: dict[Tensor, float] = {}
        self._stepped: set[int] = set()

    def _see_rates(self, optimizer: Optimizer) -> None:
        """Note the rates of an optimizer, at its first step since the last reading."""
        if id(optimizer) in self._stepped:
            return
        self._stepped.add(id(optimizer))
        own = set(self._model.parameters())
        for group in optimizer.param_groups:
            for parameter in own.intersection(group["params"]):
                self._rates[parameter] = float(group["lr"])

    def _warn_of_rates(self) -> None:
        """Warn once if the optimizers leave out a logarithmic constant, or have one rate for everything."""
        if not self._rates or self._has_warned_of_rates:
            return
        constants = {}
        for path, layer in self._layers.items():
            if layer.logarithmic and layer.first_constant.requires_grad:
                constants[layer.first_constant] = path
        left_out = [path for constant, path in constants.items() if constant not in self._rates]
        problem = None
        if left_out:
            problem = (
                f"no optimizer has the constants of {listed(left_out)}, which stay as they are: "
                "make it after convert_ and calibrate_, of dynorm.param_groups"
            )
        # A warm-up may begin at 0.
        elif (
            constants
            and len(self._rates) > len(constants)
            and len({*self._rates.values(), 0.0}) == 2
        ):
            problem = (
                "all parameters have the same learning rate, but the logarithms of the layers' "
                "constants need 30 times that of the weights: use dynorm.param_groups, and let a "
                "schedule scale the rate of each group in place of setting one for all"
            )
        if problem is not None:
            self._has_warned_of_rates = True
            warnings.warn(problem, CalibrationWarning, stacklevel=3)

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
    """Say what to do, by the factors that a layer's mean square input and its beta have grown by."""
    if growth < _GROWN:
        return (
            "Its constants did not fit from the start: leave out a scale below sqrt(C), and call "
            "dynorm.init_from_batch_ before the first step"
        )
    return (
        f"Its inputs have grown {growth**0.5:.3g}-fold, and sqrt(beta) {drift**0.5:.3g}-fold: lower the "
        "learning rate, or make the warm-up longer"
    )


# Not to keep a model: a monitor lives as long as its model's hooks, which may be pickled.
_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _see_step(optimizer: Optimizer, *_: object) -> None:
    """Show the step of any optimizer to the open monitors."""
    for monitor in list(_OPEN):
        monitor._see_rates(optimizer)


register_optimizer_step_pre_hook(_see_step)
