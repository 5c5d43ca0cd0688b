"""The range of a point-wise layer's output, from its parameters alone or on some batches, and the int8 scale for it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.arguments import check_positive, upcast
from dynorm.batches import call, iterate, require_finite, site_tokens, token_masks
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.guard import hooked, require_plain_model, undisturbed
from dynorm.layers import AnnealedNorm, Derf, DyISRU, DyT, LinearControl, PointwiseNorm
from dynorm.replace.converted import require_layers
from dynorm.site import NormSite

Range = tuple[Tensor, Tensor]


def output_bounds(layer: PointwiseNorm, *, sigmas: float | None = None) -> Tensor:
    r"""Return the largest absolute value that each channel of a layer's output can take.

    .. math:: |y_c| \le |\mathrm{scale}\, w_c| + |b_c|

    Arguments, dtype and errors are those of :func:`output_range`; the shape is
    ``normalized_shape``.

    Example:
        >>> output_bounds(dynorm.DyISRU(4))
        tensor([2., 2., 2., 2.])
    """
    low, high = output_range(layer, sigmas=sigmas)
    return torch.maximum(low.abs(), high.abs())


def output_range(layer: PointwiseNorm, *, sigmas: float | None = None) -> Range:
    r"""Return the least and the largest value that each channel of a layer's output can take.

    .. math:: b - |\mathrm{scale}\, w| \le y \le b + |\mathrm{scale}\, w|

    With ``sigmas`` k, of inputs at most k standard deviations from the centre: where beta is C
    times the variance of the site, as theory sets it, these are inputs of
    :math:`|x - c| \le k \sqrt{\beta / C}`, and DyISRU gives at most
    :math:`\mathrm{scale}\, z / \sqrt{1 + z^2}, z = k / \sqrt{C}`. Whatever lies beyond is clipped by
    the quantizer.
    ``calibrate_`` and training move beta away from that, up to a thousandfold where a straight line
    fits best. With witnesses beta is the token's own, and so is the deviation; the bound for any
    input is the same as without.

    Args:
        layer: a DyISRU, DyT or Derf, or, with ``sigmas``, a LinearControl; an annealed one at t =
            1.
        sigmas: how far inputs go; None for any input.

    Returns:
        Two tensors of ``normalized_shape``, in at least float32.

    Raises:
        ArgumentError: ``layer`` is no point-wise layer, has no bound, or is annealed to t < 1;
            ``sigmas`` is not positive.

    Example:
        >>> layer = dynorm.DyISRU(100)
        >>> [float(edge[0]) for edge in output_range(layer)]
        [-10.0, 10.0]
        >>> [round(float(edge[0]), 3) for edge in output_range(layer, sigmas=4)]
        [-3.714, 3.714]

    Reference:
        arXiv 2503.21708, eq. 15: DyISRU's bound, sqrt(C - 1), is the largest value that LayerNorm
        itself can give.
    """
    require_function(layer)
    if sigmas is not None:
        check_positive("sigmas", sigmas)
    with torch.no_grad():
        factor = layer.factor()
        if factor is None:
            device = getattr(layer, layer.constants[0]).device
            weight = torch.ones(layer.normalized_shape, dtype=torch.float32, device=device)
        else:
            weight = upcast(factor)
        bias = torch.zeros_like(weight) if layer.bias is None else upcast(layer.bias)
        edges = [layer.scale * weight * edge + bias for edge in _edges(layer, sigmas)]
        return torch.minimum(*edges), torch.maximum(*edges)


def require_function(layer: nn.Module) -> None:
    """Check that a module is a point-wise layer, and not on its way from a norm."""
    if not isinstance(layer, PointwiseNorm):
        raise ArgumentError(
            f"layer must be a point-wise layer of dynorm, got {type(layer).__name__}: pass a "
            "converted one"
        )
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ArgumentError(
            f"an annealed layer must stand at t = 1, but is at {layer.position:g}: call finalize_ "
            "first"
        )


def observed_ranges(
    model: nn.Module, batches: Iterable[Any], *, inputs_of: Iterable[str] | None = None
) -> dict[str, Range]:
    """Return the least and largest value that each channel of each point-wise layer gave, for :func:`quantize_`.

    The model runs in eval mode and is left as it was. Padding is left out, as in ``calibrate_``. A
    layer that no batch reaches is left out.

    Args:
        model: a converted model.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``.
        inputs_of: paths of linear or point-wise layers; the ranges are those of their inputs then.

    Returns:
        By the layer's path, two tensors of shape (C,) in at least float32.

    Raises:
        ModelError: the model has no point-wise layer, or none at a path of ``inputs_of``, or is
            wrapped or compiled.
        DataError: a batch is of the wrong kind, the model cannot run it, a layer gives what is not
            finite, or no layer is reached at all.

    Example:
        >>> model = nn.Sequential(dynorm.DyISRU(4), nn.Linear(4, 4))
        >>> low, high = observed_ranges(model, [torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 100.0, 0.0]])])["0"]
        >>> high.round(decimals=2)
        tensor([0.8900, 0.0000, 2.0000, 0.0000])
    """
    require_plain_model(model)
    watched: dict[nn.Module, str] = {layer: path for path, layer in require_layers(model).items()}
    if inputs_of is not None:
        try:
            watched = {model.get_submodule(path): path for path in inputs_of}
        except AttributeError as error:
            raise ModelError(f"inputs_of must name modules of the model, but: {error}") from error
    found: dict[str, Range] = {}
    for batch in iterate(batches):
        masks = token_masks(batch)

        def widen(
            layer: nn.Module, args: Any, kwargs: Any, output: Tensor, masks: list[Tensor] = masks
        ) -> None:
            value = output if inputs_of is None else (*args, *kwargs.values())[0]
            site = layer if isinstance(layer, PointwiseNorm) else NormSite(watched[layer])
            tokens, path = upcast(site_tokens(site, value, masks)), watched[layer]
            require_finite(path, tokens)
            if len(tokens):
                low, high = tokens.aminmax(dim=0)
                before = found.get(path, (low, high))
                found[path] = low.minimum(before[0]), high.maximum(before[1])

        with (
            undisturbed(model, batch, evaluate=True),
            hooked(watched, widen, with_kwargs=True),
        ):
            call(model, batch)
    if not found:
        raise DataError(
            "the batches must reach at least one of the layers, but reached none: give others"
        )
    return found


def static_scale(low: Tensor, high: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of int8 that cover a range: ``q = round(y / scale) + zero_point``.

    Args:
        low: least values.
        high: largest values, of the same shape.
        symmetric: zero point 0 and steps of ``max(|low|, |high|) / 127``; else of ``(high - low) /
            255``, the range widened to hold 0, which is then exact.

    Returns:
        Scales in the dtype of ``low`` and zero points in int8, of its shape.

    Raises:
        ArgumentError: the ranges are empty or not finite.

    Example:
        >>> static_scale(torch.tensor(-1.0), torch.tensor(4.1), symmetric=False)
        (tensor(0.0200), tensor(-78, dtype=torch.int8))
    """
    if low.shape != high.shape or not bool(
        ((low <= high) & low.isfinite() & high.isfinite()).all()
    ):
        raise ArgumentError(
            "low must not exceed high, both finite and of one shape: pass the result of "
            "output_range"
        )
    least = torch.finfo(torch.float32).eps
    if symmetric:
        scale = (torch.maximum(low.abs(), high.abs()) / 127).clamp(min=least)
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / 255).clamp(min=least)
    return scale, (-128 - (low / scale).round()).clamp(-128, 127).to(torch.int8)


def _edges(layer: PointwiseNorm, sigmas: float | None) -> tuple[float | Tensor, float | Tensor]:
    """Return the least and the largest value of the function itself, before scale, weight and bias."""
    z = math.inf if sigmas is None else sigmas / math.sqrt(layer.channels)
    if isinstance(layer, Derf):
        shift = upcast(layer.shift)
        # The slope that beta() stands for.
        reach = math.sqrt(math.pi) / 2 * z
        return torch.erf(shift - reach), torch.erf(shift + reach)
    if isinstance(layer, DyISRU):
        edge = z / math.hypot(1, z) if math.isfinite(z) else 1.0
    elif isinstance(layer, DyT):
        edge = math.tanh(z)
    elif isinstance(layer, LinearControl) and sigmas is not None:
        edge = z
    else:
        raise ArgumentError(
            f"{type(layer).__name__} has no bound: pass sigmas, or convert to dyisru, dyt or derf"
        )
    return -edge, edge
