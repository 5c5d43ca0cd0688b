"""Try a model with point-wise layers in the place of its norms, to see whether it only calls them."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.batches import Inputs, copied_tensors
from dynorm.find.affine import affine_parts
from dynorm.find.tokens import tensor_like
from dynorm.guard import undisturbed
from dynorm.layers import DyISRU
from dynorm.outputs import relative_error
from dynorm.site import NormSite

_ONLY_CALL = "let the model only call the norm, by its path, self.norm(x), and whatever its class"
_ELSEWHERE = (
    "the model calls this norm by another reference than its path, such as a list, dict, function "
    "or helper object that also holds the module, or asks for its class, as "
    f"isinstance(self.norm, nn.LayerNorm) does: {_ONLY_CALL}"
)
_OUTSIDE = (
    "the model uses this norm outside of its call, its weight, eps or class: {}; " + _ONLY_CALL
)
# The outputs of a model that only calls its norms differ by no more: a GPU may round otherwise.
_SAME = 1e-2


def with_uses(
    model: nn.Module, example: Inputs, sites: Sequence[NormSite], expected: object
) -> list[NormSite]:
    """Refuse the norms that the model does not only call; ``expected`` is its output."""
    tried = [site for site in sites if site.refused is None and site.path]
    reason = _difference(model, example, tried, expected) if tried else None
    if reason is None:
        return list(sites)
    reasons = {site.path: _difference(model, example, [site], expected) for site in tried}
    if not any(reasons.values()):
        # It asks something of several at once.
        reasons = dict.fromkeys(reasons, reason)
    return [replace(site, refused=site.refused or reasons.get(site.path)) for site in sites]


def _difference(
    model: nn.Module, example: Inputs, sites: Sequence[NormSite], expected: object
) -> str | None:
    """Return how a model differs that has layers at some sites, which compute the norm when called.

    Their own parameters are NaN, so that any other use of them shows. None if it does not differ.
    """
    layers = {model.get_submodule(site.path): _StandIn(model, site) for site in sites}
    args, kwargs = copied_tensors(example)
    with undisturbed(model, example, attributes=True), ExitStack() as after:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child in layers:
                    after.callback(parent._modules.__setitem__, name, child)
                    parent._modules[name] = layers[child]
        try:
            output = model(*args, **kwargs)
        # The model's code may raise anything with other modules in it.
        except Exception as error:
            return _OUTSIDE.format(f"it raised {type(error).__name__}: {error}")
    if any(layer.calls < site.calls for layer, site in zip(layers.values(), sites, strict=True)):
        return _ELSEWHERE
    if relative_error(_tensors(output), _tensors(expected)) > _SAME:
        return _OUTSIDE.format("its output changes with a layer in the norm's place")
    return None


class _StandIn(DyISRU):
    """A layer as it replaces a norm, but without numbers: the norm computes its output."""

    def __init__(self, model: nn.Module, site: NormSite) -> None:
        norm = model.get_submodule(site.path)
        parts = affine_parts(norm, site)
        like = tensor_like(norm, model)
        super().__init__(
            site.normalized_shape,
            elementwise_affine=bool(parts),
            bias="bias" in parts,
            dim=site.dim,
            device=like.device,
            dtype=like.dtype,
        )
        for name, part in parts.items():
            values = torch.full_like(part.tensor, torch.nan).reshape(site.normalized_shape)
            setattr(self, name, nn.Parameter(values, part.tensor.requires_grad))
        self.train(norm.training)
        self.calls = 0
        # Not as a submodule.
        self.__dict__["norm"] = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm's output; its hooks run too."""
        self.calls += x.numel() > 0
        output: Tensor = self.__dict__["norm"](x)
        # In the memory order of a layer: a model may take views that need another.
        return output.contiguous() if self.dim == -1 else output


def _tensors(output: Any) -> list[Tensor]:
    """Return the real tensors in an output, in float64."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    plain = [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_complex()]
    return [leaf.double() for leaf in plain]
