"""The weight and the bias of a norm, as its tensors hold them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError
from dynorm.find.tokens import named_tensors
from dynorm.site import NormSite


@dataclass(frozen=True)
class AffinePart:
    """The weight or the bias of a norm or layer."""

    tensor: Tensor
    offset: float  # the number that the norm adds to it
    neutral: float  # the value of the tensor that makes a weight multiply by 1, or a bias add 0

    @property
    def value(self) -> Tensor:
        """Return the factor or the term that the norm computes with, (C,) in float64 on the CPU."""
        # Not all devices have float64.
        return self.tensor.detach().to("cpu", torch.float64).flatten() + self.offset


def affine_parts(module: nn.Module, site: NormSite) -> dict[str, AffinePart]:
    """Return the "weight" and the "bias" that a norm has; ModelError if it is not the one found."""
    tensors = named_tensors(module)
    parts = {}
    for part, name, offset, unit in (
        ("weight", site.weight_name, site.weight_offset, 1.0),
        ("bias", site.bias_name, 0.0, 0.0),
    ):
        if name is None:
            continue
        if name not in tensors or tensors[name].numel() != site.normalized_shape[0]:
            raise ModelError(
                f"the sites must be this model's, but {site.path!r} does not hold a tensor "
                f"{name!r} for {site.normalized_shape[0]} channels: call find_norms again"
            )
        parts[part] = AffinePart(tensors[name], offset, unit - offset)
    return parts
