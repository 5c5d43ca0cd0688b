"""Watch the point-wise layers of a model while it trains."""

import warnings
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import check_share
from dynorm.batches import site_tokens
from dynorm.errors import CalibrationWarning
from dynorm.layers import PointwiseNorm
from dynorm.layers.base import gathered
from dynorm.layers.saturation import saturated_share
from dynorm.replace.converted import require_layers

# So many tokens of a call are enough.
_TOKENS = 256
_ADVICE = """the layer {path!r} saturates: {saturated:.0%} of its outputs lie near their bound, where hardly a gradient
comes through, because its inputs have grown to {size:.3g} while sqrt(beta) is {root:.3g}. Give the constants their own,
higher rate with dynorm.param_groups, set them with dynorm.init_from_batch_ before the first step, or lower the learning
rate"""


class Monitor:
    """Hooks that watch the point-wise layers of a model in training, for a loop of your own or Lightning.

    :meth:`read` returns figures named ``figure/path``: ``saturated`` is the share of a layer's outputs beyond 95 % of
    their bound, where gradients vanish; ``size`` the root mean square of its inputs, the scale of
    the stream; ``beta`` its constant, the channels' median, and ``drift`` the same over the first
    one seen; ``gradient`` the norm of its constants' last gradient. Padding counts. A model that is
    compiled should be watched before. The figures are those of this process. Constants that are
    sharded (DTensors) are gathered for them: watch such a model on every rank.

    Args:
        model: any model with point-wise layers.
        warn_at: the share of saturated outputs at which :meth:`read` warns, once for each layer.

    Raises:
        ArgumentError: ``model`` is no module, or ``warn_at`` not from 0 to 1.
        ModelError: the model has no point-wise layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), dynorm.DyISRU(8))
        >>> with dynorm.Monitor(model) as monitor:
        ...     model(torch.ones(2, 4)).sum().backward()
        ...     sorted(monitor.read())
        ['beta/1', 'drift/1', 'gradient/1', 'saturated/1', 'size/1']
    """

    def __init__(self, model: nn.Module, warn_at: float = 0.8) -> None:
        self.warn_at = check_share("warn_at", warn_at)
        self._first: dict[str, float] = {}
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._clear()
        for path, layer in require_layers(model).items():
            self._handles.append(
                layer.register_forward_hook(partial(self._see, path), with_kwargs=True)
            )
            for place, p in enumerate(layer.constant_parameters()):
                if p.requires_grad:
                    see: Any = partial(self._see_gradient, path, place)
                    self._handles.append(p.register_post_accumulate_grad_hook(see))  # type: ignore[no-untyped-call]

    def read(self) -> dict[str, float]:
        """Return the figures since the last call, means over a layer's calls; there are none of one without a call.

        Warns:
            CalibrationWarning: a layer saturates; the message says what to do.
        """
        found: dict[str, float] = {}
        for path, seen in self._seen.items():
            saturated, size, _ = torch.stack(seen).mean(0).tolist()
            beta = float(seen[-1][2])
            drift = beta / self._first.setdefault(path, float(seen[0][2]))
            figures = {"saturated": saturated, "size": size, "beta": beta, "drift": drift}
            if gradients := self._gradients[path]:
                figures["gradient"] = float(torch.stack(list(gradients.values())).norm())
            found |= {f"{name}/{path}": value for name, value in figures.items()}
            if saturated > self.warn_at and path not in self._warned:
                self._warned.add(path)
                advice = _ADVICE.format(path=path, saturated=saturated, size=size, root=beta**0.5)
                warnings.warn(advice.replace("\n", " "), CalibrationWarning, stacklevel=2)
        self._clear()
        return found

    def close(self, *_: Any) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    __exit__ = close

    def __enter__(self) -> "Monitor":
        return self

    def _clear(self) -> None:
        self._seen: dict[str, list[Tensor]] = defaultdict(list)
        self._gradients: dict[str, dict[int, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def _see(self, path: str, layer: PointwiseNorm, args: Any, kwargs: Any, output: Tensor) -> None:
        if layer.training and not output.is_nested and output.numel():
            step = output.numel() // layer.channels // _TOKENS + 1
            x, y = (
                site_tokens(layer, each.detach(), [])[::step]
                for each in (*args, *kwargs.values(), output)
            )
            size, beta = x.square().mean().sqrt(), gathered(layer.beta()).median()
            self._seen[path].append(torch.stack([saturated_share(layer, y), size, beta]))

    def _see_gradient(self, path: str, place: int, constant: Tensor) -> None:
        assert constant.grad is not None
        self._gradients[path][place] = gathered(constant.grad).float().norm()
