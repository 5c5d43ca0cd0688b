"""The definition of a layer as one operator of torch, so that a pass over a graph can find layers.

Every compiler takes it apart, so that Inductor can fuse it. Nothing but its name is hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynorm.kernels._form import FORM, NAMESPACE, TENSORS, Form

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"definition(Tensor x, {TENSORS}, {FORM}) -> Tensor")


def _definition(x: Tensor, *arguments: Any) -> Tensor:
    return Form(*arguments[5:]).definition(x, arguments[:5])


_library.impl("definition", _definition, "CompositeImplicitAutograd")
definition: Callable[..., Tensor] = getattr(torch.ops, NAMESPACE).definition.default
