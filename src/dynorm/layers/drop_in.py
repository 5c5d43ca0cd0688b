"""Point-wise layers under the signature by which timm makes its norms."""

from collections.abc import Callable
from typing import Any

from dynorm.errors import ArgumentError
from dynorm.layers.derf import Derf
from dynorm.layers.dyisru import DyISRU
from dynorm.layers.dyt import DyT
from dynorm.layers.pointwise import PointwiseNorm

_LAYERS: dict[str, type[PointwiseNorm]] = {"dyisru": DyISRU, "dyt": DyT, "derf": Derf}


def norm_layer(name: str) -> Callable[..., PointwiseNorm]:
    """Return a function that timm calls as its ``norm_layer``, and that makes a point-wise layer.

    It is called ``(channels, eps=None, affine=True, **options)``. ``eps`` has no effect, and
    ``options`` are those of the layer, such as ``scale=1``.

    Args:
        name: "dyisru", "dyt" or "derf"; "dyisru2d", "dyt2d" or "derf2d" for channels at dim 1.

    Raises:
        ArgumentError: the name is unknown.

    Example:
        >>> dynorm.layers.norm_layer("dyt2d")(8, eps=1e-6)
        DyT(8, alpha=0.3536, scale=2.828, dim=1)

    Reference:
        ``timm.layers.get_norm_layer``.
    """
    function = str(name).removesuffix("2d")
    if function not in _LAYERS:
        raise ArgumentError(f"the name must be one of {', '.join(_LAYERS)}, got {name!r}")
    layer = _LAYERS[function]
    dim = -1
    if name.endswith("2d"):
        dim = 1

    def norm(
        channels: int, eps: float | None = None, affine: bool = True, **options: Any
    ) -> PointwiseNorm:
        options.setdefault("elementwise_affine", affine)
        return layer(channels, dim=dim, **options)

    return norm
