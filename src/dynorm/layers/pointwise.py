"""The base of the point-wise layers: ``y = weight * scale * f(x) + bias``."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from dynorm import kernels
from dynorm.arguments import Shape, along, is_exporting, resolve, upcast
from dynorm.dtypes import is_floating_dtype
from dynorm.errors import ArgumentError
from dynorm.layers.by_kernel import call_kernel, check_input, check_residual, may_add
from dynorm.layers.module import PointwiseModule


class PointwiseNorm(PointwiseModule):
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
        super().__init__(normalized_shape, scale, dim, promote, weight_offset)
        if dtype is not None and not is_floating_dtype(dtype):
            raise ArgumentError(f"dtype must be a real floating point dtype, got {dtype}")

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

    @overload
    def __call__(self, x: Tensor) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return ``forward(x)``; with a residual ``forward(x + residual)`` and the sum, in one pass.

        Hooks see a call with the sum.

        Raises:
            ArgumentError: ``residual`` is not a tensor of the shape of ``x``, or as :meth:`forward`.
        """
        if residual is None:
            return super().__call__(x)
        # A Proxy of fx has neither shape nor values.
        if isinstance(x, Tensor):
            check_residual(x, residual)
            # An annealed layer is not one kernel.
            is_one_kernel = type(self).pointwise is PointwiseNorm.pointwise
            if is_one_kernel and may_add(self, x, residual):
                results = self.by_kernel(x, residual)
                if results is not None:
                    return results[0], results[1]
        total = x + residual
        return super().__call__(total), total

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
        check_input(self, x)
        if self.promote:
            x = x.to(self.returned_dtype(x.dtype))
        return self.pointwise(x)

    def pointwise(self, x: Tensor) -> Tensor:
        """Return the function of ``x``, whose size is checked, by a kernel if one serves."""
        # As torch's own norms return it.
        if self.dim == -1:
            x = x.contiguous()
        results = self.by_kernel(x)
        return self.definition(x) if results is None else results[0]

    def by_kernel(self, x: Tensor, residual: Tensor | None = None) -> Sequence[Tensor] | None:
        """Return the function of x, or of ``x + residual`` and that sum, by a kernel; None if none serves."""
        return call_kernel(self, x, residual)

    def definition(self, x: Tensor) -> Tensor:
        """Return ``weight * scale * f(x) + bias`` by plain torch, in at least float32."""
        z, axis = resolve(x, self.dim)
        parameters = self.kernel_parameters()
        form = kernels.Form(*self.form())
        if self.dim == -1 and torch.compiler.is_compiling() and not is_exporting():
            # One operator, which a pass may find before it is taken apart.
            return kernels.definition(x, *parameters, *form)
        # The second is Derf's shift, which its ``f`` reads itself.
        constant, _, weight, bias = parameters
        assert constant is not None
        y = self.f(z, form.constant(constant))
        if weight is None:
            y = y * self.scale
        else:
            y = y * along(upcast(weight) * self.scale, z, axis)
        if bias is not None:
            y = y + along(bias, z, axis)
        return y.to(x.dtype)

    def f(self, x: Tensor, constant: Tensor) -> Tensor:
        """Return the function of ``x``, which has at least float32: the formula for plain torch and export.

        Kernels, compiled models and witnesses have that of :mod:`dynorm.functional`, which is the same.
        """
        raise NotImplementedError
