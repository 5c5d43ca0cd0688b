"""Point-wise layers under the signatures by which timm and Megatron make their norms."""

from typing import Any

from dynorm.errors import ArgumentError
from dynorm.layers.derf import Derf
from dynorm.layers.dyisru import DyISRU
from dynorm.layers.dyt import DyT
from dynorm.layers.pointwise import PointwiseNorm

_LAYERS: dict[str, type[PointwiseNorm]] = {"dyisru": DyISRU, "dyt": DyT, "derf": Derf}

# Options of Megatron's config that its own norms heed, and why a layer cannot.
_UNFIT = {
    "sequence_parallel": "Megatron would not reduce the gradients of the layer's parameters",
    "layernorm_zero_centered_gamma": "the layer multiplies by its weight, not by 1 + weight",
}


def norm_layer(name: str) -> type:
    """Return a class that other libraries call as a norm, and that makes a point-wise layer.

    It is called ``(hidden_size, eps=None, affine=True, *, config=None, **options)``: so timm calls
    its ``norm_layer``, and Megatron the norms of a layer spec. ``eps`` has no effect,
    ``config`` is only checked, and ``options`` are those of the layer, such as ``scale=1``.

    Args:
        name: "dyisru", "dyt" or "derf"; "dyisru2d", "dyt2d" or "derf2d" for channels at dim 1.

    Raises:
        ArgumentError: the name is unknown; or, when the class is called, Megatron's config has
            sequence parallelism or a zero-centred gamma.

    Example:
        >>> dynorm.layers.norm_layer("dyt2d")(8, eps=1e-6)
        DyT(8, alpha=0.3536, scale=2.828, dim=1)
        >>> dynorm.layers.norm_layer("dyisru")(config=None, hidden_size=8, eps=1e-5)
        DyISRU(8, beta=8, scale=2.828)

    Reference:
        ``timm.layers.get_norm_layer``; ``megatron.core.transformer.spec_utils.build_module``.
    """
    function = name.removesuffix("2d")
    if function not in _LAYERS:
        raise ArgumentError(f"the name must be one of {', '.join(_LAYERS)}, got {name!r}")
    layer = _LAYERS[function]
    dim = -1
    if name.endswith("2d"):
        dim = 1

    # A class, because Megatron returns a function as it is. Its call makes a layer of another class.
    class Norm:
        def __new__(  # type: ignore[misc]
            cls,
            hidden_size: int,
            eps: float | None = None,
            affine: bool = True,
            *,
            config: object = None,
            **options: Any,
        ) -> PointwiseNorm:
            for option, reason in _UNFIT.items():
                if getattr(config, option, False):
                    raise ArgumentError(
                        f"the config's {option} must be False, got True: turn it off, because "
                        f"{reason}"
                    )
            options.setdefault("elementwise_affine", affine)
            return layer(hidden_size, dim=dim, **options)

    return Norm
