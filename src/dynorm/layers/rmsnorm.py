"""RMSNorm with a bias and any channel axis: a LayerNorm whose input has no mean becomes it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dynorm import functional
from dynorm.arguments import Shape, check_dim, check_not_negative, check_shape, upcast
from dynorm.errors import ArgumentError


class RMSNorm(nn.Module):
    r"""Root mean square normalization: ``y = weight * x / sqrt(mean(x^2) + eps) + bias``.

    ``nn.RMSNorm`` has no bias, its channels come last, and ``nn.TransformerEncoderLayer`` would
    read its parameters as those of a LayerNorm; this layer is for all places of a folded model.

    Args:
        normalized_shape: the size C of the channel axis.
        norm_eps: the number added to the mean square.
        elementwise_affine: has a ``weight``.
        bias: has a ``bias``.
        dim: the channel axis, -1 or any other (1 for channels-first).
        device: where the parameters live.
        dtype: the parameters' dtype.

    Shape:
        input and output ``(*, C)``, or C at ``dim``; float16 and bfloat16 are computed in float32.

    Raises:
        ArgumentError: a size, ``dim`` or ``norm_eps`` is outside its domain.

    Example:
        >>> RMSNorm(2, norm_eps=0.0, elementwise_affine=False, bias=False)(torch.tensor([3.0, -3.0]))
        tensor([ 1., -1.])

    Reference:
        B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @torch.inference_mode(False)
    def __init__(
        self,
        normalized_shape: Shape,
        norm_eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = False,
        *,
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = check_shape(normalized_shape)
        if len(self.normalized_shape) != 1:
            raise ArgumentError(f"normalized_shape must be one size, got {normalized_shape!r}")
        checked = check_dim(dim, self.normalized_shape)
        assert isinstance(checked, int)
        self.dim, self.norm_eps = checked, check_not_negative("norm_eps", norm_eps)
        for name, has, value in (("weight", elementwise_affine, 1.0), ("bias", bias, 0.0)):
            full = torch.full(self.normalized_shape, value, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(full) if has else None)

    @property
    def eps(self) -> float:
        """Not a number, so that the fused path of ``nn.TransformerEncoderLayer``, a LayerNorm's, is not taken."""
        return math.nan

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over its channels; the shape and dtype stay.

        Raises:
            ArgumentError: ``x`` has another size at ``dim``.
        """
        if (
            x.ndim <= (self.dim if self.dim >= 0 else -self.dim - 1)
            or x.shape[self.dim] != self.normalized_shape[0]
        ):
            raise ArgumentError(
                f"x must have {self.normalized_shape[0]} channels at dim {self.dim}, got "
                f"{tuple(x.shape)}"
            )
        if self.dim not in (-1, x.ndim - 1):
            return functional.rms_norm(x, self.weight, self.bias, self.norm_eps, self.dim)
        wide = upcast(x)
        weight, bias = (None if p is None else p.to(wide.dtype) for p in (self.weight, self.bias))
        y = nn.functional.rms_norm(wide, self.normalized_shape, weight, self.norm_eps)
        return (y if bias is None else y + bias).to(x.dtype)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, all but device and dtype, as plain values that JSON knows."""
        return {
            "normalized_shape": list(self.normalized_shape),
            "norm_eps": self.norm_eps,
            "elementwise_affine": self.weight is not None,
            "bias": self.bias is not None,
            "dim": self.dim,
        }

    def extra_repr(self) -> str:
        """Describe the layer as ``print(model)`` shows it."""
        parts = [str(self.normalized_shape[0]), f"norm_eps={self.norm_eps:g}"]
        parts += [f"elementwise_affine={self.weight is not None}", f"bias={self.bias is not None}"]
        return ", ".join(parts + ([f"dim={self.dim}"] if self.dim != -1 else []))
