"""RMSNorm with a bias and any channel axis: a LayerNorm whose input has no mean becomes it."""

from typing import Any

import torch
from torch import Tensor, nn

from dynorm import functional
from dynorm.arguments import (
    Shape,
    check_channels,
    check_dim,
    check_not_negative,
    upcast,
)
from dynorm.errors import ArgumentError
from dynorm.layers.module import NoEps


class RMSNorm(nn.Module):
    r"""Root mean square normalization: ``y = weight * x / sqrt(mean(x^2) + eps) + bias``.

    It replaces a LayerNorm anywhere in a folded model, which ``nn.RMSNorm`` cannot: that has no
    bias, needs its channels last, and ``nn.TransformerEncoderLayer`` would read its parameters as
    those of a LayerNorm.

    Args:
        normalized_shape: the size C of the channel axis.
        norm_eps: the number added to the mean square.
        elementwise_affine: has a ``weight``.
        bias: has a ``bias``.
        dim: the channel axis, -1 or any other (1 for channels-first).
        promote: return the promotion of the dtypes of x and ``weight`` instead of that of x.
        device: where the parameters live.
        dtype: the parameters' dtype.

    Shape:
        input and output ``(*, C)``, or C at ``dim``; float16 and bfloat16 are computed in float32.

    Raises:
        ArgumentError: a size, ``dim`` or ``norm_eps`` is outside its domain.

    Example:
        >>> layer = RMSNorm(2, norm_eps=0.0, elementwise_affine=False, bias=False)
        >>> layer(torch.tensor([3.0, -3.0]))
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
        promote: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = (check_channels(normalized_shape),)
        self.dim = check_dim(dim)
        self.norm_eps = check_not_negative("norm_eps", norm_eps)
        self.promote = promote
        weight = torch.ones(self.normalized_shape, device=device, dtype=dtype)
        offset = torch.zeros(self.normalized_shape, device=device, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(weight) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(offset) if bias else None)

    @property
    def eps(self) -> NoEps:
        """No number, which keeps ``nn.TransformerEncoderLayer`` off its fused LayerNorm path."""
        return NoEps()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` over its channels; the shape stays, and without ``promote`` the dtype.

        Raises:
            ArgumentError: ``x`` has another size at ``dim``.
        """
        has_dim = -x.ndim <= self.dim < x.ndim
        if not has_dim or x.shape[self.dim] != self.normalized_shape[0]:
            raise ArgumentError(
                f"x must have {self.normalized_shape[0]} channels at dim {self.dim}, got "
                f"{tuple(x.shape)}"
            )
        if self.promote and self.weight is not None:
            x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        if self.dim not in (-1, x.ndim - 1):
            return functional.rms_norm(x, self.weight, self.bias, self.norm_eps, self.dim)
        wide = upcast(x)
        weight = None if self.weight is None else self.weight.to(wide.dtype)
        y = nn.functional.rms_norm(wide, self.normalized_shape, weight, self.norm_eps)
        if self.bias is not None:
            y = y + self.bias.to(wide.dtype)
        return y.to(x.dtype)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except device and dtype, as values for JSON."""
        return {
            "normalized_shape": list(self.normalized_shape),
            "norm_eps": self.norm_eps,
            "elementwise_affine": self.weight is not None,
            "bias": self.bias is not None,
            "dim": self.dim,
            "promote": self.promote,
        }

    def extra_repr(self) -> str:
        """Describe the layer as ``print(model)`` shows it."""
        return ", ".join(f"{name}={value}" for name, value in self.config().items())
