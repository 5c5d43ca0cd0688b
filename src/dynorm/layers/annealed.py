"""Annealed layers, which begin as the norm they replace and end as a point-wise function."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from dynorm import functional
from dynorm.arguments import (
    Shape,
    check_channels,
    check_not_negative,
    check_share,
    upcast,
    writes_of,
)
from dynorm.errors import ArgumentError
from dynorm.kernels import traced
from dynorm.layers.derf import Derf
from dynorm.layers.dyisru import DyISRU
from dynorm.layers.dyt import DyT
from dynorm.layers.linear import LinearControl
from dynorm.layers.pointwise import PointwiseNorm

Kind = Literal["layernorm", "rmsnorm"]


class AnnealedNorm(PointwiseNorm):
    r"""Base of the annealed layers: a norm at t = 0, a point-wise function at t = 1, else a blend.

    .. math:: y = (1 - t)\,\mathrm{norm}(x) + t\,f(x)

    At t = 0 the norm is computed as in torch, without the constants of f; at t = 1 nothing is
    reduced over channels. The result is linear in t, and so are its gradients.
    A direct write to the buffer ``t`` takes effect at the next call, or, in a compiled model, when
    :attr:`position` is read next.

    Args:
        normalized_shape: the size C of the channel axis.
        kind: the norm it begins as: "layernorm" or "rmsnorm".
        norm_eps: the number that this norm adds to the variance, or to the mean square.
        t: how far it is annealed, from 0 to 1; :func:`dynorm.set_anneal_` moves it.
        **options: as for the point-wise layer that it ends as; so are shapes and dtypes. ``scale``
            is the norm's own bound by default, sqrt(C - 1), or sqrt(C) for "rmsnorm".

    Raises:
        ArgumentError: ``kind`` is unknown, ``norm_eps`` is negative, ``t`` is outside [0, 1], or
            another argument is outside its domain.

    Example:
        >>> x = torch.tensor([[1.0, 2.0, 6.0]])
        >>> layer = dynorm.layers.AnnealedDyISRU(3)
        >>> torch.equal(layer(x), nn.LayerNorm(3)(x))
        True
        >>> layer.set_t_(1.0)
        >>> torch.equal(layer(x), dynorm.DyISRU(3, scale=2**0.5)(x))
        True

    Reference:
        Closed forms 2 to 4: with constants from the rest of the token DyISRU is the norm, so the
        two ends differ only in the constants.
    """

    target: ClassVar[type[PointwiseNorm]]
    t: Tensor

    @torch.inference_mode(False)
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        kind: Kind = "layernorm",
        norm_eps: float = 1e-5,
        t: float = 0.0,
        **options: Any,
    ) -> None:
        if kind not in ("layernorm", "rmsnorm"):
            raise ArgumentError(f"kind must be 'layernorm' or 'rmsnorm', got {kind!r}")
        self.kind: Kind = kind
        self.norm_eps = check_not_negative("norm_eps", norm_eps)
        channels = check_channels(normalized_shape)
        if options.get("scale") is None and kind == "layernorm":
            options["scale"] = math.sqrt(max(channels - 1, 1))
        super().__init__(channels, **options)
        # A tensor, so that a step of t compiles nothing again, and so that checkpoints hold it.
        self.register_buffer("t", torch.zeros(1, dtype=torch.float32, device=options.get("device")))
        self.set_t_(t)

    @property
    def position(self) -> float:
        """Return the layer's t as a number; the buffer ``t`` holds the same."""
        self._follow()
        return self._position

    def set_t_(self, t: float) -> None:
        """Set how far the layer is annealed: 0 is the norm, 1 the point-wise function.

        Raises:
            ArgumentError: ``t`` is outside [0, 1].
        """
        t = check_share("t", t)
        self._position = t
        # The branch of forward: 0 is the norm, 1 the blend, 2 the function. torch.compile guards
        # it, and compiles for three values at most.
        if 0 < t < 1:
            self._stage = 1
        else:
            self._stage = 2 if t else 0
        if not self.t.is_meta:
            self.t.fill_(t)
        self._writes_seen = writes_of(self.t)

    def pointwise(self, x: Tensor) -> Tensor:
        """Return the function of ``x``; only at t = 1 is it point-wise."""
        if not torch.compiler.is_compiling():
            self._follow()
        if self._stage == 2:
            return super().pointwise(x)
        if self._stage == 0:
            return self._with_constants(self._norm(x))
        # Blended in at least float32: two roundings to bfloat16 would be visible.
        z = upcast(x)
        y = torch.lerp(self._norm(z), super().pointwise(z), self.t.to(z.dtype))
        return y.to(x.dtype)

    def end(self) -> PointwiseNorm:
        """Return the point-wise layer at t = 1, with the same parameters, not copies."""
        layer = self.target(**super().config(), device="meta")
        for name, parameter in self._parameters.items():
            layer.register_parameter(name, parameter)
        for name, buffer in self._buffers.items():
            if name != "t":
                layer.register_buffer(name, buffer)
        return layer.train(self.training)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except device and dtype, as values for JSON."""
        return super().config() | {
            "kind": self.kind,
            "norm_eps": self.norm_eps,
            "t": self.position,
        }

    def _norm(self, x: Tensor) -> Tensor:
        """Return the norm, by torch's own kernel if it takes this axis and these dtypes."""
        weight = self.factor()
        is_layer_norm = self.kind == "layernorm"
        has_dtype = all(p is None or p.dtype == x.dtype for p in (weight, self.bias))
        if has_dtype and self.dim == -1:
            if is_layer_norm:
                return layer_norm(x, self.normalized_shape, weight, self.bias, self.norm_eps)
            if self.bias is None:
                return rms_norm(x, self.normalized_shape, weight, self.norm_eps)
        plain = functional.layer_norm if is_layer_norm else functional.rms_norm
        return plain(x, weight, self.bias, self.norm_eps, self.dim)

    def _with_constants(self, y: Tensor) -> Tensor:
        """Give the constants a gradient of 0 in training: DistributedDataParallel waits for it."""
        if not (self.training and torch.is_grad_enabled()):
            return y
        zeros: list[Tensor] = []
        for parameter in self.constant_parameters():
            # Not a product with 0: that is NaN if a constant, or their sum, is infinite.
            everywhere = torch.ones_like(parameter, dtype=torch.bool)
            zeros.append(parameter.masked_fill(everywhere, 0.0).sum())
        return y + torch.stack(zeros).sum().to(y.dtype)

    def _follow(self) -> None:
        """Follow a direct write to ``t``, as an average over models makes one."""
        t = self.t
        # A transform or a mode replaces t by a tensor that may have no value.
        if t.is_meta or traced(t):
            return
        if writes_of(t) == self._writes_seen:
            return
        self._writes_seen = writes_of(t)
        value = min(max(_read(t), 0.0), 1.0)
        if value != round(self._position, 7):
            self.set_t_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._follow()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # In bfloat16 it would no longer be the number that was set; to_empty leaves any number.
        if self.t.dtype != torch.float32:
            self.t = torch.full_like(self.t, self._position, dtype=torch.float32)
        elif not self.t.is_meta:
            self.t.fill_(self._position)
        self._writes_seen = writes_of(self.t)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        t = state_dict.get(f"{prefix}t")
        if isinstance(t, Tensor) and not t.is_meta and not 0 <= _read(t) <= 1:
            errors: list[str] = args[-1]
            errors.append(
                f"{prefix}t must be from 0 (the norm) to 1 (point-wise), got {_read(t)}: the file "
                "is damaged"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        if t is not None and not self.t.is_meta:
            # With assign=True it is the saved tensor itself, in any dtype.
            self.t = self.t.float()
            self.set_t_(_read(self.t))


def _read(t: Tensor) -> float:
    """Return t to the seven digits that float32 holds."""
    return round(float(t), 7)


class AnnealedDyISRU(AnnealedNorm, DyISRU):
    """From a norm to :class:`DyISRU`, with its arguments and those of :class:`AnnealedNorm`."""

    target = DyISRU


class AnnealedDyT(AnnealedNorm, DyT):
    """From a norm to scaled :class:`DyT`, with its arguments and those of :class:`AnnealedNorm`."""

    target = DyT


class AnnealedDerf(AnnealedNorm, Derf):
    """From a norm to scaled :class:`Derf`; arguments of it and of :class:`AnnealedNorm`."""

    target = Derf


class AnnealedLinear(AnnealedNorm, LinearControl):
    """From a norm to :class:`LinearControl`; arguments of it and of :class:`AnnealedNorm`."""

    target = LinearControl
