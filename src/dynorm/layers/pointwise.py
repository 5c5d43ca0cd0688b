"""The base of the point-wise layers: ``y = weight * scale * f(x - center) + bias``."""

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from dynorm import kernels
from dynorm.arguments import (
    Shape,
    along,
    check_channels,
    check_count,
    check_dim,
    check_finite,
    check_floating,
    upcast,
)
from dynorm.dtypes import is_floating_dtype
from dynorm.errors import ArgumentError
from dynorm.layers.by_kernel import by_kernel
from dynorm.layers.module import PointwiseModule
from dynorm.token_sums import slope_of_token


class PointwiseNorm(PointwiseModule):
    """Base of the layers that replace a norm: ``y = weight * scale * f(x - center) + bias``.

    A subclass has ``f``, its constants and the number of its kernel. Parameters are never
    0-dimensional: a constant has shape ``(1,)``, or ``(C,)`` with ``per_channel=True``. The
    arguments are explained at :class:`dynorm.DyISRU`.
    """

    # Tensors that are made in inference mode can never be trained.
    @torch.inference_mode(False)
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        per_channel: bool = False,
        center: bool = False,
        scale: float | None = None,
        witnesses: int | Sequence[int] = (),
        room: int = 0,
        dim: int = -1,
        promote: bool = False,
        weight_offset: float = 0.0,
        keep_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not is_floating_dtype(dtype):
            raise ArgumentError(f"dtype must be a real floating point dtype, got {dtype}")
        self.channels = check_channels(normalized_shape)
        self.dim = check_dim(dim)
        self.scale = check_finite("scale", math.sqrt(self.channels) if scale is None else scale)
        if self.scale == 0:
            raise ArgumentError("scale must not be 0, got 0: leave it out for sqrt(C)")
        self.weight_offset = check_finite("weight_offset", weight_offset)
        self.promote = promote
        self.keep_order = keep_order
        self.per_channel = per_channel

        def add(name: str, size: int, exists: bool = True) -> None:
            parameter = None
            if exists:
                parameter = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

        constant_size = self.channels if per_channel else 1
        for name in self.constants:
            add(name, constant_size)
        add("center", constant_size, center)
        self.set_witnesses_(witnesses, room=check_count("room", room, 0))
        add("weight", self.channels, elementwise_affine)
        add("bias", self.channels, elementwise_affine and bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set factors and gains to 1, bias and centre to 0, the constants to their defaults."""
        for name, value in self.initial_constants().items():
            getattr(self, name).fill_(value)
        if self.weight is not None:
            self.weight.fill_(1.0 - self.weight_offset)
        for parameter in (self.bias, self.center, self.log_gain):
            if parameter is not None:
                parameter.zero_()

    @overload
    def __call__(self, x: Tensor) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return ``forward(x)``; with a residual ``forward(x + residual)`` and the sum, in one pass.

        Hooks see a call with the sum.
        """
        if residual is None:
            return super().__call__(x)
        if isinstance(x, Tensor) and not isinstance(residual, Tensor):
            raise ArgumentError(f"residual must be a tensor like x, got {type(residual).__name__}")
        if self._fuses(x, residual):
            results = by_kernel(self, x, residual)
            if results is not None:
                return results[0], results[1]
        total = x + residual
        return super().__call__(total), total

    def _fuses(self, x: Tensor, residual: Tensor) -> bool:
        """Return whether one kernel may add the residual, because nobody has to see the sum first."""
        if not isinstance(x, Tensor) or type(self).pointwise is not PointwiseNorm.pointwise:
            return False
        # As torch decides whether a call needs more than forward.
        own_hooks = (
            self._forward_pre_hooks,
            self._forward_hooks,
            self._backward_pre_hooks,
            self._backward_hooks,
        )
        global_hooks: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
        if any(own_hooks) or global_hooks or "forward" in vars(self):
            return False
        is_alike = x.shape == residual.shape and x.dtype == residual.dtype
        is_right = x.shape[self.dim :][:1] == (self.channels,)
        return is_alike and is_right and self.returned_dtype(x.dtype) == x.dtype

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element of ``x``.

        Args:
            x: any floating dtype, with C channels at ``dim``.

        Returns:
            The shape of ``x`` and its dtype, or with ``promote`` the promotion with the weight's;
            contiguous if the channels come last, except with ``keep_order``.

        Raises:
            ArgumentError: ``x`` is not a floating point tensor, or has another size at ``dim``.
        """
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"x must be a tensor, got {type(x).__name__}: make the layer a leaf for a Proxy of fx"
            )
        if x.shape[self.dim :][:1] != (self.channels,):
            raise ArgumentError(
                f"x must have {self.channels} channels at dim {self.dim}, got shape "
                f"{tuple(x.shape)}: pass the dim that holds the channels"
            )
        if self.promote:
            x = x.to(self.returned_dtype(x.dtype))
        return self.pointwise(x)

    def pointwise(self, x: Tensor) -> Tensor:
        """Return the function of ``x``, whose size is checked, by a kernel if one serves."""
        results = by_kernel(self, x)
        if results is not None:
            return results[0]
        if torch.compiler.is_compiling() and self.is_one_operator(x):
            return self.operator(x)
        y = self.definition(x)
        return y.contiguous() if self.dim == -1 and not self.keep_order else y

    def is_one_operator(self, x: Tensor) -> bool:
        """Return whether a compiler may see the layer of x as one operator."""
        is_strict = self.log_gain is None and self.dim == -1
        return is_strict and x.is_floating_point() and not torch.compiler.is_exporting()

    def operator(self, x: Tensor) -> Tensor:
        """Return :meth:`definition` by one operator, which a pass may find before it is taken apart."""
        names = (self.constants[0], "shift", "center")
        parameters = [getattr(self, name, None) for name in names] + [self.factor(), self.bias]
        form = (int(self.kernel), self.logarithmic, self.scale)
        x = x if self.keep_order else x.contiguous()
        return kernels.definition(x, *parameters, *form)

    def definition(self, x: Tensor) -> Tensor:
        """Return ``weight * scale * f(x - center) + bias`` by plain torch, in at least float32."""
        check_floating("x", x)
        u = upcast(x)
        if self.center is not None:
            u = u - self.laid(self.center, u)
        constant = self.laid(self.constant(), u)
        if self.log_gain is not None:
            u, constant = self.of_token(u, constant)
        y = self.f(u, constant)
        weight = self.factor()
        if weight is None:
            y = y * self.scale
        else:
            y = y * (self.laid(weight, u) * self.scale)
        if self.bias is not None:
            y = y + self.laid(self.bias, u)
        return y.to(x.dtype)

    def of_token(self, u: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``u`` and the constant of its token, which the witnesses change."""
        axis = self.dim % u.ndim
        return slope_of_token(
            u, constant, axis, *self.witnesses_and_gains(), ratio=1 / self.slope_ratio
        )

    def laid(self, parameter: Tensor, u: Tensor) -> Tensor:
        """Return one number, or one per channel, in the dtype and along the channels of ``u``."""
        if self.dim != -1 and parameter.numel() > 1:
            parameter = along(parameter, u, self.dim % u.ndim)
        return parameter.to(u.dtype)
