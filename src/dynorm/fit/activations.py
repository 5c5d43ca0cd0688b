"""Watching the layers of a converted model: what they see, and what their norms would give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import DataError, ModelError
from dynorm.fit.site_fit import as_tokens
from dynorm.layers import PointwiseNorm
from dynorm.replace.specs import dynorm_layers, original_, replaced_by
from dynorm.site import NormSite
from dynorm.watch import call, hooked, undisturbed, valid_tokens

Outputs = dict[PointwiseNorm, list[Tensor]]


def layers_to_fit(model: nn.Module) -> dict[str, PointwiseNorm]:
    """Return the point-wise layers of a model by path.

    Raises:
        ModelError: there is none, or one did not replace a norm that is still known.
    """
    layers = dynorm_layers(model)
    if not layers:
        raise ModelError(
            "the model must have point-wise layers, but has none: call dynorm.convert_(model, sites) first"
        )
    for path, layer in layers.items():
        if replaced_by(layer) is None:
            raise ModelError(
                f"the layer {path!r} must have replaced a norm to be fitted to it, but it was loaded or built so: "
                "calibrate right after convert_, before saving"
            )
    return layers


def norm_outputs(model: nn.Module, batch: Any) -> Outputs:
    """Run a batch through the original model and return what its norms gave, a list a site in call order."""
    outputs: Outputs = defaultdict(list)

    def hook(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(layer, PointwiseNorm)
        original = original_forward(layer, *args)
        # A copy: the model may go on to write into its own.
        outputs[layer].append(original.clone())
        return original

    # The random state comes back, so that a model which draws numbers draws the same ones when it is run again.
    with undisturbed(model, batch, grad=True), hooked(dynorm_layers(model).values(), hook):
        call(model, batch)
    return outputs


@contextmanager
def recorded(modules: Mapping[PointwiseNorm, nn.Module]) -> Iterator[Outputs]:
    """Record what modules return, a list a key in call order, for as long as the context lasts.

    Args:
        modules: the module to watch for each layer: the layer itself, or its counterpart in another model.
    """
    outputs: Outputs = defaultdict(list)

    def keep(layer: PointwiseNorm) -> Any:
        return lambda module, args, output: outputs[layer].append(output.clone())

    handles = [module.register_forward_hook(keep(layer), prepend=True) for layer, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def joint_error(wanted: Outputs, given: Outputs, masks: list[Tensor]) -> Tensor:
    r"""Return the mean over the sites of ``|f - y|^2 / |y - mean y|^2``, padding left out.

    Args:
        wanted: y, what each layer should have returned.
        given: f, what it did return.
        masks: the batch's padding masks.

    Raises:
        DataError: no site has both.
    """
    errors = [
        _relative_error(site_tokens(layer, y, masks), site_tokens(layer, f, masks))
        for layer, ys in wanted.items()
        for y, f in zip(ys, given[layer], strict=False)
        if y.shape == f.shape
    ]
    if not errors:
        raise DataError(
            "a batch must reach at least one point-wise layer, but reached none: give batches that use them"
        )
    return torch.stack(errors).mean()


def _relative_error(y: Tensor, f: Tensor) -> Tensor:
    spread = (y - y.mean(0)).square().sum()
    # A single token has no spread: a hundredth of the size stands for it.
    floor = (0.01 * y.square().sum()).clamp_min(torch.finfo(y.dtype).tiny)
    return (f - y).square().sum() / torch.maximum(spread, floor)


def site_tokens(site: PointwiseNorm | NormSite, x: Tensor, masks: list[Tensor]) -> Tensor:
    """Return what a layer, or a norm, saw as (tokens, C), without padding."""
    dims = (site.dim,) if isinstance(site.dim, int) else site.dim
    tokens = as_tokens(x, dims)
    valid = valid_tokens(x.shape, dims, masks)
    return tokens if valid is None else tokens[valid.to(tokens.device)]


def require_finite(tokens: Tensor, path: str) -> None:
    """Check what a site saw, (tokens, C).

    Raises:
        DataError: a value is not finite, or its square overflows.
    """
    if not tokens.square().sum(-1).isfinite().all():
        raise DataError(
            f"activations must be finite, but at {path!r} there was NaN, inf or a value whose square "
            "overflows: look for an overflow (float16?) or bad inputs"
        )


def original_forward(layer: PointwiseNorm, *args: Any) -> Tensor:
    """Return what the norm that ``layer`` replaced gives."""
    # forward, not a call: layer and norm share their hooks, ours among them.
    output: Tensor = original_(layer).forward(*args)
    return output


def snapshot(layers: Iterable[PointwiseNorm]) -> dict[nn.Parameter, Tensor]:
    """Return copies of the layers' parameters, for :func:`put_back`."""
    return {p: p.detach().clone() for layer in layers for p in layer.parameters()}


def put_back(before: dict[nn.Parameter, Tensor]) -> None:
    """Give parameters the values of a :func:`snapshot` again."""
    with torch.no_grad():
        for parameter, value in before.items():
            parameter.copy_(value)
