"""The base of the point-wise layers: ``y = weight * scale * f(x) + bias``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dynorm import kernels
from dynorm.arguments import (
    Shape,
    check_channels,
    check_dim,
    check_finite,
    is_exporting,
    upcast,
)
from dynorm.dtypes import is_floating_dtype
from dynorm.errors import ArgumentError
from dynorm.layers.by_kernel import KernelModule


class PointwiseNorm(KernelModule):
    """Base of the layers that replace a norm: ``y = weight * scale * f(x) + bias``.

    A subclass has ``f``, its constants and the number of its kernel. Parameters are never
    0-dimensional: a constant has shape ``(1,)``. The arguments are explained at
    :class:`dynorm.DyISRU`, except those that :func:`dynorm.convert_` and saved models give for the
    habits of a norm and its place.

    Args:
        promote: return the promotion of the dtypes of x and ``weight``, as Llama's RMSNorm does,
            and not that of x.
        weight_offset: added to ``weight``: 1 for a norm whose factor is 1 + w, so that w keeps all
            its digits.
    """

    # Tensors that are made in inference mode can never be trained.
    @torch.inference_mode(False)
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        scale: float | None = None,
        witnesses: int | Sequence[int] = (),
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        promote: bool = False,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        if dtype is not None and not is_floating_dtype(dtype):
            raise ArgumentError(f"dtype must be a real floating point dtype, got {dtype}")
        self.channels = check_channels(normalized_shape)
        self.dim = check_dim(dim)
        self.scale = check_finite("scale", math.sqrt(self.channels) if scale is None else scale)
        if self.scale == 0:
            raise ArgumentError("scale must not be 0, got 0: leave it out for sqrt(C)")
        self.promote = promote
        self.weight_offset = check_finite("weight_offset", weight_offset)

        def add(name: str, size: int, exists: bool = True) -> None:
            parameter = None
            if exists:
                parameter = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
            self.register_parameter(name, parameter)

        for name in self.constants:
            add(name, 1)
        self.set_witnesses_(witnesses)
        add("weight", self.channels, elementwise_affine)
        add("bias", self.channels, elementwise_affine and bias)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set factors and gains to 1, the bias to 0, the constants to their defaults."""
        for name, value in self.initial_constants().items():
            getattr(self, name).fill_(value)
        if self.weight is not None:
            self.weight.fill_(1.0 - self.weight_offset)
        for parameter in (self.bias, self.log_gain):
            if parameter is not None:
                parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element of ``x``.

        Args:
            x: any floating dtype, with C channels at ``dim``.

        Returns:
            The shape of ``x`` and its dtype. With channels last it is contiguous, as torch's
            ``layer_norm`` returns it; with another ``dim`` it has the memory order of ``x``.

        Raises:
            ArgumentError: ``x`` is not a floating point tensor, or has another size at ``dim``.
        """
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"x must be a tensor, got {type(x).__name__}: make the layer a leaf for a Proxy of fx"
            )
        if not self._has_channels(x):
            raise ArgumentError(
                f"x must have {self.channels} channels at dim {self.dim}, got shape "
                f"{tuple(x.shape)}: pass the dim that holds the channels"
            )
        if self.promote:
            x = x.to(self.returned_dtype(x.dtype))
        return self.pointwise(x)

    def definition(self, x: Tensor) -> Tensor:
        """Return ``weight * scale * f(x) + bias`` by plain torch, in at least float32."""
        parameters, log_gain = self.kernel_parameters()
        form = kernels.Form(*self.form())
        if log_gain is not None:
            witnesses, gain = self.witnesses_and_gains()
            return form.definition(x, parameters, dim=self.dim, witnesses=witnesses, gain=gain)
        # An integer gets its error there.
        if self.dim != -1 or not x.is_floating_point():
            return form.definition(x, parameters, dim=self.dim)
        if torch.compiler.is_compiling() and not is_exporting():
            # One operator, which a pass may find before it is taken apart.
            return kernels.definition(x, *parameters, *form)
        constant, _, weight, bias = parameters
        assert constant is not None
        y = self.f(upcast(x), form.constant(constant))
        y = y * (self.scale if weight is None else upcast(weight) * self.scale)
        if bias is not None:
            y = y + bias
        return y.to(x.dtype)

    def f(self, x: Tensor, constant: Tensor) -> Tensor:
        """Return the function of ``x``, which has at least float32."""
        raise NotImplementedError
