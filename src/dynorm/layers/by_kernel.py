"""How a layer is called: by a fused kernel where one serves. Kernels know one number per token, not witnesses."""

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from dynorm import kernels
from dynorm.arguments import upcast
from dynorm.errors import ArgumentError
from dynorm.layers.module import PointwiseModule


class KernelModule(PointwiseModule):
    """A point-wise layer that is computed by a kernel where one serves, else by its definition."""

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
            _check_residual(x, residual)
            results = by_kernel(self, x, residual) if self._fuses(x, residual) else None
            if results is not None:
                return results[0], results[1]
        total = x + residual
        return super().__call__(total), total

    def _fuses(self, x: Tensor, residual: Tensor) -> bool:
        """Return whether one kernel may add the residual, because nobody has to see the sum first."""
        if type(self).pointwise is not KernelModule.pointwise or "forward" in vars(self):
            return False
        # As torch decides whether a call needs more than forward, by a function that has no types.
        own_hooks = (
            self._forward_pre_hooks,
            self._forward_hooks,
            self._backward_pre_hooks,
            self._backward_hooks,
        )
        global_hooks: bool = _has_any_global_hook()  # type: ignore[no-untyped-call]
        if any(own_hooks) or global_hooks or not self._has_channels(x):
            return False
        return x.dtype == residual.dtype == self.returned_dtype(x.dtype)

    def _has_channels(self, x: Tensor) -> bool:
        return x.shape[self.dim :][:1] == (self.channels,)

    def pointwise(self, x: Tensor) -> Tensor:
        """Return the function of ``x``, whose size is checked, by a kernel if one serves."""
        # As torch's own norms return it.
        if self.dim == -1:
            x = x.contiguous()
        results = by_kernel(self, x)
        if results is not None:
            return results[0]
        return self.definition(x)

    def definition(self, x: Tensor) -> Tensor:
        """Return the function of ``x`` by plain torch."""
        raise NotImplementedError


def by_kernel(
    layer: PointwiseModule, x: Tensor, residual: Tensor | None = None
) -> Sequence[Tensor] | None:
    """Return a layer's function of x, or of ``x + residual`` and that sum, by a kernel.

    A residual has the shape and dtype of x. None if only the definition serves.
    """
    is_last = layer.dim in (-1, x.ndim - 1)
    if not is_last:
        x = x.movedim(layer.dim, -1)
        residual = None if residual is None else residual.movedim(layer.dim, -1)
    parameters, log_gain = layer.kernel_parameters()
    form = layer.form()
    results: Sequence[Tensor] | None
    if residual is not None:
        # The sum lies in memory as torch lays it, which is certain only here.
        if log_gain is not None or not (x.is_contiguous() and residual.is_contiguous()):
            return None
        results = kernels.pointwise(form, x, residual, parameters)
    else:
        is_laid = x.is_contiguous() or (x.stride(-1) == 1 and log_gain is None)
        laid = x if is_laid else x.contiguous()
        if log_gain is None:
            results = kernels.pointwise(form, laid, None, parameters)
        else:
            results = _with_witnesses(layer, laid, parameters)
        if results is not None and not is_laid:
            results = [torch.empty_like(x).copy_(results[0])]
    if is_last or results is None:
        return results
    return [result.movedim(-1, layer.dim) for result in results]


def _with_witnesses(
    layer: PointwiseModule, x: Tensor, parameters: Sequence[Tensor | None]
) -> Sequence[Tensor] | None:
    """Return y of x with its channels last, by a kernel that takes one number per token.

    It adds ``T = sum_k gain_k u_k^2`` to the beta of each token. A witness of DyISRU is not in its
    own sum, so its channel is computed by the definition and written over.
    """
    # A line has no bound, and where tokens grow its constant, the definition clamps x.
    if kernels.traced(x) or layer.kernel == kernels.FunctionCode.LINEAR:
        return None
    witnesses, gain = layer.witnesses_and_gains()
    shown = x.index_select(-1, witnesses)
    own = [_chosen(parameter, witnesses) for parameter in parameters]
    u = upcast(shown)
    # So far from the largest number that a sum of 16 squares with large gains stays finite.
    limit = torch.finfo(u.dtype).max ** 0.5 / 2**14
    # The definition clamps x too where a witness is larger, or not a number. A GPU is not waited for.
    if u.is_cpu and not bool((u.abs() <= limit).all()):
        return None
    total = (u.clamp(-limit, limit).square() * gain).sum(-1)
    results = kernels.pointwise(layer.form(), x, None, parameters, total)
    if results is None or layer.kernel != kernels.FunctionCode.DYISRU:
        return results
    places = torch.arange(shown.shape[-1], device=x.device)
    form = kernels.Form(*layer.form())
    columns = form.definition(shown, own, witnesses=places, gain=gain)
    return [results[0].index_copy_(-1, witnesses, columns)]


def _chosen(parameter: Tensor | None, witnesses: Tensor) -> Tensor | None:
    """Return the part of a parameter that belongs to the witnesses."""
    if parameter is None or parameter.numel() == 1:
        return parameter
    return parameter.index_select(0, witnesses)


def _check_residual(x: Tensor, residual: Tensor) -> None:
    """Refuse a residual that is not like x."""
    if not isinstance(residual, Tensor):
        raise ArgumentError(
            f"residual must be a tensor like x, got {type(residual).__name__}: give a tensor"
        )
    if residual.shape != x.shape:
        raise ArgumentError(
            f"residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}: "
            "expand it first"
        )
