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
    parameters = [_of_rows(x, parameter) for parameter in arguments[:4]]
    return Form(*arguments[4:]).definition(x, parameters)


def _of_rows(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Return a parameter's one number, once for each row of x.

    Its gradient is then the sum of the rows' sums, and Inductor computes sums of rows and of columns
    in the pass over x that computes the gradient of x.
    """
    if parameter is None or parameter.shape != (1,) or x.shape[-1] == 1:
        return parameter
    return parameter.expand(*x.shape[:-1], 1)


_library.impl("definition", _definition, "CompositeImplicitAutograd")
definition: Callable[..., Tensor] = getattr(torch.ops, NAMESPACE).definition.default
