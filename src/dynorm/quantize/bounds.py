"""The range of a point-wise layer's output, by its parameters or on batches, and its int8 scale."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dynorm.arguments import check_positive, upcast
from dynorm.batches import Batch, call, iterate, require_finite, site_tokens, token_masks
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

    With ``sigmas`` k, the range is that of inputs at most k standard deviations from the centre.
    The quantizer clips the others. If beta is C times the variance of the site, as theory sets it,
    these inputs have :math:`|x - c| \le k \sqrt{\beta / C}`, and DyISRU gives at most
    :math:`\mathrm{scale}\, z / \sqrt{1 + z^2}, z = k / \sqrt{C}`.

    ``calibrate_`` and training move beta away from that value, up to a thousandfold if a straight
    line fits best. With witnesses each token has its own beta and its own deviation; the bound for
    any input stays the same.

    Args:
        layer: a DyISRU, DyT or Derf, or, with ``sigmas``, a LinearControl; an annealed one at t =
            1.
        sigmas: how far inputs go; None for any input.

    Returns:
        Two tensors of ``normalized_shape``, in at least float32.

    Raises:
        ArgumentError: ``layer`` is not a point-wise layer, has no bound, or is annealed to t < 1;
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
            device = layer.first_constant.device
            weight = torch.ones(layer.normalized_shape, dtype=torch.float32, device=device)
        else:
            weight = upcast(factor)
        bias = torch.zeros_like(weight) if layer.bias is None else upcast(layer.bias)
        least, largest = _edges(layer, sigmas)
        first = layer.scale * weight * least + bias
        second = layer.scale * weight * largest + bias
        # A channel with a negative factor has them in reverse order.
        return torch.minimum(first, second), torch.maximum(first, second)


def require_function(layer: nn.Module) -> None:
    """Check that a module is a point-wise layer, and not one that is still annealed from a norm."""
    if not isinstance(layer, PointwiseNorm):
        raise ArgumentError(
            f"layer must be a point-wise layer of dynorm, got {type(layer).__name__}: pass a "
            "converted one"
        )
    if isinstance(layer, AnnealedNorm) and layer.position < 1:
        raise ArgumentError(
            f"an annealed layer must be at t = 1, but is at {layer.position:g}: call finalize_ "
            "first"
        )


def observed_ranges(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    inputs_of: Iterable[str] | None = None,
) -> dict[str, Range]:
    """Run a model to find the least and largest output of each channel of its point-wise layers.

    The result is an argument of :func:`quantize_`. The model runs in eval mode and is left as it
    was. Padding is not counted, as in ``calibrate_``. A layer that no batch reaches has no entry.

    Args:
        model: a converted model.
        batches: tensors, tuples or dicts, for ``model(x)``, ``model(*x)`` or ``model(**x)``.
        inputs_of: paths of linear or point-wise layers, to measure the ranges of their inputs
            instead.

    Returns:
        For each layer's path, two tensors of shape (C,) in at least float32.

    Raises:
        ModelError: the model has no point-wise layer, or none at a path of ``inputs_of``, or is
            wrapped or compiled.
        DataError: a batch is of the wrong kind, the model cannot run it, a layer returns NaN or
            inf, or no layer is reached at all.

    Example:
        >>> model = nn.Sequential(dynorm.DyISRU(4), nn.Linear(4, 4))
        >>> batches = [torch.zeros(1, 4), torch.tensor([[1.0, -1.0, 100.0, 0.0]])]
        >>> low, high = observed_ranges(model, batches)["0"]
        >>> high.round(decimals=2)
        tensor([0.8900, 0.0000, 2.0000, 0.0000])
    """
    require_plain_model(model)
    paths: dict[nn.Module, str] = {layer: path for path, layer in require_layers(model).items()}
    if inputs_of is not None:
        try:
            paths = {model.get_submodule(path): path for path in inputs_of}
        except AttributeError as error:
            raise ModelError(f"inputs_of must name modules of the model, but: {error}") from error
    ranges: dict[str, Range] = {}
    # Those of the present batch.
    masks: list[Tensor] = []

    def widen(
        layer: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Tensor,
    ) -> None:
        path = paths[layer]
        value = output if inputs_of is None else (*args, *kwargs.values())[0]
        site = layer if isinstance(layer, PointwiseNorm) else NormSite(path)
        tokens = site_tokens(site, value, masks)
        require_finite(path, tokens)
        if not len(tokens):
            return
        low, high = tokens.aminmax(dim=0)
        if path in ranges:
            low = low.minimum(ranges[path][0])
            high = high.maximum(ranges[path][1])
        ranges[path] = (low, high)

    for batch in iterate(batches):
        masks = token_masks(batch)
        with undisturbed(model, batch, evaluate=True), hooked(paths, widen, with_kwargs=True):
            call(model, batch)
    if not ranges:
        raise DataError(
            "the batches must reach at least one of the layers, but reached none: give others"
        )
    return ranges


def static_scale(
    low: Tensor,
    high: Tensor,
    *,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point with which int8 covers a range.

    The code of a value y is ``q = round(y / scale) + zero_point``.

    Args:
        low: least values.
        high: largest values, of the same shape.
        symmetric: zero point 0 and steps of ``max(|low|, |high|) / 127``. Otherwise the range is
            widened to hold 0, which is then exact, and the steps are ``(high - low) / 255``.

    Returns:
        Scales in the dtype of ``low`` and zero points in int8, of its shape.

    Raises:
        ArgumentError: the ranges are empty or not finite.

    Example:
        >>> static_scale(torch.tensor(-1.0), torch.tensor(4.1), symmetric=False)
        (tensor(0.0200), tensor(-78, dtype=torch.int8))
    """
    are_ranges = low.shape == high.shape
    if are_ranges:
        are_ranges = bool(((low <= high) & low.isfinite() & high.isfinite()).all())
    if not are_ranges:
        raise ArgumentError(
            "low must not exceed high, both finite and of the same shape: pass the result of "
            "output_range"
        )
    least = torch.finfo(torch.float32).eps
    if symmetric:
        largest = torch.maximum(low.abs(), high.abs())
        scale = (largest / 127).clamp(min=least)
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    low = low.clamp(max=0)
    high = high.clamp(min=0)
    scale = ((high - low) / 255).clamp(min=least)
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    return scale, zero.to(torch.int8)


def _edges(
    layer: PointwiseNorm,
    sigmas: float | None,
) -> tuple[float | Tensor, float | Tensor]:
    """Return the least and largest value of the function, before scale, weight and bias."""
    # The largest input, in units of sqrt(beta).
    z = math.inf if sigmas is None else sigmas / math.sqrt(layer.channels)
    if isinstance(layer, Derf):
        shift = upcast(layer.shift)
        # Without a shift erf(alpha x) has the slope 1 / sqrt(beta) at 0.
        argument = math.sqrt(math.pi) / 2 * z
        return torch.erf(shift - argument), torch.erf(shift + argument)
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
