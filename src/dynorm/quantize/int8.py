"""Linear layers with torchao's static int8 quantization, and scales that the point-wise layers before them know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.quantize.bounds import Range, output_range, static_scale
from dynorm.quantize.readers import Reader

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_(
    model: nn.Module,
    readers: Sequence[Reader],
    *,
    sigmas: float | None = None,
    symmetric: bool = True,
    per_channel: bool = False,
    ranges: Mapping[str, Range] | None = None,
) -> list[Reader]:
    """Give linear layers torchao's static int8 quantization, with scales that the layers before them know.

    Weights become int8 with one scale per row. Activations become int8 with one scale, or one per channel, which is
    multiplied into the columns of the weight, and divided out of the point-wise layer's own weight and bias, or,
    where something that is not among ``readers`` reads its output too, of the linear layer's input.

    Args:
        model: the converted model, changed in place.
        readers: the result of :func:`find_readers`; refused ones are left alone.
        sigmas: clip beyond so many standard deviations, as for :func:`output_range`; None for the bound itself.
        symmetric: as for :func:`static_scale`.
        per_channel: a scale for each channel; symmetric only.
        ranges: least and largest values that were seen, by path of the point-wise layer, instead of the bound; see
            :func:`observed_ranges`.

    Returns:
        The readers that are now quantized.

    Raises:
        ArgumentError: ``per_channel`` without ``symmetric``, no range for a layer, a linear layer in float64, torchao
            is missing, or as for :func:`output_range`.
        ModelError: there is nothing to quantize, something is quantized already, or the paths are not this model's.
    """
    if per_channel and not symmetric:
        raise ArgumentError("scales per channel must be symmetric: one zero point serves all channels of a product")
    clear = [reader for reader in dict.fromkeys(readers) if reader.refused is None]
    if not clear:
        raise ModelError("there must be a linear layer to quantize, got none: pass the result of find_readers")
    try:
        from torchao.quantization import FqnToConfig
        from torchao.quantization import quantize_ as torchao_quantize_
    except ImportError as error:
        raise ArgumentError("quantize_ needs torchao: pip install 'dynorm[quantize]'") from error
    # All that can fail comes before the first change.
    seen = {reader: _range(model, reader, sigmas, ranges, per_channel) for reader in clear}
    if not per_channel:
        found = {reader: (seen[reader][0].min(), seen[reader][1].max()) for reader in clear}
        scales = {reader: static_scale(*ends, symmetric=symmetric) for reader, ends in found.items()}
        configs = {r.linear: _config(scale, None if symmetric else zero, r.ndim) for r, (scale, zero) in scales.items()}
        torchao_quantize_(model, FqnToConfig(configs), filter_fn=None)
        return clear
    steps = {reader: static_scale(*seen[reader])[0] for reader in clear}
    folded = {reader.layer for reader in clear if _foldable(model, reader, {each.linear for each in clear})}
    _multiply_scales_in_(model, steps, folded)
    # What arrives is in steps already.
    configs = {reader.linear: _config(torch.ones(()), None, reader.ndim) for reader in clear}
    torchao_quantize_(model, FqnToConfig(configs), filter_fn=None)
    for reader in clear:
        if reader.layer not in folded:
            linear: Any = model.get_submodule(reader.linear)
            linear.weight.act_pre_scale = (1 / steps[reader]).to(linear.weight.dtype)
    return clear


def _config(scale: Tensor, zero: Tensor | None, ndim: int) -> Any:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, MappingType, PerRow, PerTensor

    shape = (1,) * ndim
    return Int8StaticActivationInt8WeightConfig(
        act_quant_scale=scale.float().reshape(shape),
        act_quant_zero_point=None if zero is None else zero.reshape(shape),
        granularity=[PerTensor(), PerRow()],
        act_mapping_type=MappingType.SYMMETRIC if zero is None else MappingType.ASYMMETRIC,
        # It would change settings of the whole process.
        set_inductor_config=False,
    )


def _range(
    model: nn.Module, reader: Reader, sigmas: float | None, ranges: Mapping[str, Range] | None, per_channel: bool
) -> Range:
    """Return the range of a linear layer's input, having checked the two layers."""
    try:
        linear, layer = model.get_submodule(reader.linear), model.get_submodule(reader.layer)
    except AttributeError as error:
        raise ModelError(f"readers must be of this model, but: {error}: call find_readers on it") from error
    if type(linear) is not nn.Linear or not isinstance(layer, PointwiseNorm):
        raise ModelError(f"{reader.linear} must be an nn.Linear that reads a point-wise layer: call find_readers anew")
    if type(linear.weight) is not nn.Parameter:
        raise ModelError(f"{reader.linear} must hold a plain weight, got {type(linear.weight).__name__}: quantize once")
    if linear.weight.dtype not in _DTYPES:
        raise ArgumentError(
            f"{reader.linear} must be in float32, bfloat16 or float16 for torchao, got {linear.weight.dtype}: cast it"
        )
    if per_channel and (len(layer.normalized_shape) > 1 or layer.dim != -1):
        raise ArgumentError(
            f"{reader.layer} must have its channels last for one scale per channel, got dim {layer.dim}"
        )
    if ranges is None:
        return output_range(layer, sigmas=sigmas)
    if reader.layer not in ranges:
        raise ArgumentError(f"ranges must hold the layer {reader.layer}, got {', '.join(ranges) or 'none'}")
    return ranges[reader.layer]


def _foldable(model: nn.Module, reader: Reader, linears: set[str]) -> bool:
    """Say whether the layer's own output may change, because every reader changes with it."""
    complete = reader.linear in reader.peers and linears.issuperset(reader.peers)
    return reader.alone and complete and model.get_submodule(reader.layer).weight is not None


@torch.no_grad()
def _multiply_scales_in_(model: nn.Module, scales: Mapping[Reader, Tensor], folded: set[str]) -> None:
    """Multiply the scales into the linear layers that read them, and out of the layer where nothing else reads it."""
    for reader, scale in scales.items():
        linear: Any = model.get_submodule(reader.linear)
        linear.weight = nn.Parameter(linear.weight * scale.to(linear.weight.dtype), requires_grad=False)
    for path, scale in {reader.layer: scale for reader, scale in scales.items() if reader.layer in folded}.items():
        layer: Any = model.get_submodule(path)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter.div_(scale.to(parameter.dtype))
