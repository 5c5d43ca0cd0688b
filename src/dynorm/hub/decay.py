"""Weight decay: transformers excludes norms, and must exclude the layers that replace them."""

from collections.abc import Iterable
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from dynorm.layers import PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm

# The layers of a converted model, and the norms that remain after a fold.
_OURS = (PointwiseNorm, RMSNorm)


def leave_out_of_decay(utilities: ModuleType) -> None:
    """Let ``get_parameter_names`` leave out the layers when it leaves out norms.

    The Trainer passes the class LayerNorm and parts of names such as "layernorm". A name such as
    ``ln_1`` has none of these parts, so only the class decides. The function looks up its own name
    in this module to call itself for each child, so callers that imported it earlier get this
    version too.
    """
    replaced = utilities.get_parameter_names
    names_of = getattr(replaced, "_without_dynorm", replaced)

    @wraps(names_of)
    def get_parameter_names(
        model: nn.Module, forbidden_layer_types: Iterable[type], *args: Any, **kwargs: Any
    ) -> list[str]:
        kinds = list(forbidden_layer_types)
        without_norms = any("norm" in kind.__name__.lower() for kind in kinds)
        if without_norms and isinstance(model, _OURS):
            return []
        names: list[str] = names_of(model, kinds, *args, **kwargs)
        return names

    get_parameter_names._without_dynorm = names_of  # type: ignore[attr-defined]
    utilities.get_parameter_names = get_parameter_names  # type: ignore[attr-defined]
