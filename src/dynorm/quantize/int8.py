"""Linear layers that read point-wise layers, and torchao's static int8 for them, with scales that those know."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dynorm.batches import copied_tensors
from dynorm.errors import ArgumentError, ModelError, require_library
from dynorm.guard import require_plain_model
from dynorm.layers import PointwiseNorm
from dynorm.quantize.bounds import Range, output_range, static_scale
from dynorm.replace.converted import require_layers

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Questions about a tensor that say nothing of its values.
_HARMLESS = {
    "__get__",
    "size",
    "dim",
    "stride",
    "numel",
    "is_floating_point",
    "is_contiguous",
    "__len__",
    "get_device",
}


@dataclass(frozen=True)
class Reader:
    """A linear layer, and the point-wise layer whose output it reads.

    Args:
        linear: the path of the linear layer.
        layer: the path of the point-wise layer; None where it reads none.
        ndim: how many dimensions its input has; 0 where that varies.
        alone: only such linear layers read it, so that scales per channel can be folded into them
            and the layer.
        refused: why no point-wise layer tells the linear layer's scale; None if one does.
        peers: the paths of all linear layers that read it, this one among them; a fold needs them
            all.
    """

    linear: str
    layer: str | None
    ndim: int
    alone: bool
    refused: str | None = None
    peers: tuple[str, ...] = ()


def find_readers(model: nn.Module, *args: Any, **kwargs: Any) -> list[Reader]:
    """Find the linear layers of a model, and which read a point-wise layer's output, by running the model once.

    A linear layer is an ``nn.Linear`` or a ``Conv1D`` of transformers. It reads a point-wise layer
    when the very tensor that one returned is the other's input. Where it reads something else, or
    tensors of several numbers of dimensions, :attr:`Reader.refused` says so.

    Args:
        model: a converted model in eval mode.
        *args: its example inputs.
        **kwargs: more of them.

    Returns:
        One reader per linear layer that was called, in the order of the model's modules.

    Raises:
        ModelError: nothing is converted, no linear layer reads a point-wise one, or the model is in
            training mode, compiled, wrapped or on meta.

    Example:
        >>> model = nn.Sequential(dynorm.DyISRU(8), nn.Linear(8, 4)).eval()
        >>> find_readers(model, torch.randn(2, 8))
        [Reader(linear='1', layer='0', ndim=2, alone=True, refused=None, peers=('1',))]
    """
    require_plain_model(model)
    layers: dict[nn.Module, str] = {layer: path for path, layer in require_layers(model).items()}
    if model.training:
        raise ModelError("the model must be in eval mode, as it will run: call model.eval()")
    linears: dict[nn.Module, str] = {m: path for path, m in model.named_modules() if _is_linear(m)}
    watch = _Watch(layers, linears)
    with ExitStack() as stack:
        for module in layers:
            stack.enter_context(module.register_forward_hook(watch.returned))
        for module in linears:
            stack.enter_context(module.register_forward_pre_hook(watch.enters, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(watch.leaves, prepend=True))
        with torch.no_grad(), watch:
            args, kwargs = copied_tensors((args, kwargs))
            result = model(*args, **kwargs)
    watch.others |= watch.sources(list(result.values()) if isinstance(result, Mapping) else result)
    reads = {path: [*watch.reads[path]] for path in linears.values() if path in watch.reads}
    if not any(layer is not None for read in reads.values() for layer, _ in read):
        raise ModelError(
            "a linear layer must read a point-wise layer's output, but none does: convert more "
            "norms"
        )
    refused = {path: _refusal(read) for path, read in reads.items()}
    # A layer that a refused one reads cannot be changed either.
    watch.others |= {
        layer
        for path, read in reads.items()
        if refused[path]
        for layer, _ in read
        if layer is not None
    }
    found = []
    for path, read in reads.items():
        layer = next((layer for layer, _ in read if layer is not None), None)
        ndims = {ndim for _, ndim in read}
        peers = tuple(
            peer for peer, others in reads.items() if layer is not None and layer in dict(others)
        )
        alone = layer is not None and layer not in watch.others
        found.append(
            Reader(path, layer, ndims.pop() if len(ndims) == 1 else 0, alone, refused[path], peers)
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Tell whether a module is GPT-2's linear layer, whose weight lies the other way."""
    return (type(module).__module__, type(module).__name__) == (
        "transformers.pytorch_utils",
        "Conv1D",
    )


class _Watch(TorchFunctionMode):
    """Which linear layers, and what else, read the tensors that point-wise layers have returned."""

    def __init__(self, layers: Mapping[nn.Module, str], linears: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.layers, self.linears = layers, linears
        # Tensors are kept alive, so that an id stays theirs.
        self.outputs: dict[int, tuple[Tensor, str]] = {}
        # For each linear layer: the point-wise layers it reads, if any, and the numbers of
        # dimensions, in order.
        self.reads: dict[str, dict[tuple[str | None, int], None]] = {}
        self.others: set[str] = set()
        self.entered: Tensor | None = None  # what the linear layer that runs now has been given

    def source(self, value: Any) -> str | None:
        """Return the path of the point-wise layer that returned this very tensor."""
        return self.outputs[id(value)][1] if id(value) in self.outputs else None

    def sources(self, values: Any) -> set[str]:
        """Return the paths of the point-wise layers that returned any of these."""
        return {path for leaf in tree_leaves(values) if (path := self.source(leaf)) is not None}

    def returned(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs[id(output)] = (output, self.layers[layer])

    def enters(self, linear: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered = x = (*args, *kwargs.values())[0]
        self.reads.setdefault(self.linears[linear], {})[self.source(x), x.ndim] = None

    def leaves(self, linear: nn.Module, args: Any, output: Tensor) -> None:
        self.entered = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # But for the input of a linear layer, which its hook has noted.
        taken = args[1:] if args and args[0] is self.entered else args
        if getattr(func, "__name__", "") not in _HARMLESS:
            self.others |= self.sources((taken, kwargs))
        return func(*args, **(kwargs or {}))


def _refusal(read: list[tuple[str | None, int]]) -> str | None:
    """Say why one static scale does not serve all that a linear layer reads; None if it does."""
    sources, ndims = (
        list(dict.fromkeys(layer for layer, _ in read)),
        sorted({ndim for _, ndim in read}),
    )
    if sources == [None]:
        return "it reads no point-wise layer"
    if None in sources:
        return "it reads other tensors too"
    if len(sources) > 1:
        return f"it reads several layers: {', '.join(map(str, sources))}"
    if len(ndims) > 1:
        return f"it reads tensors of {' and '.join(map(str, ndims))} dimensions"
    return None


def quantize_(
    model: nn.Module,
    readers: Sequence[Reader],
    *,
    sigmas: float | None = None,
    symmetric: bool = True,
    per_channel: bool | float = False,
    ranges: Mapping[str, Range] | None = None,
) -> list[Reader]:
    """Give linear layers torchao's static int8 quantization, with scales that the layers before them know.

    Weights become int8 with one scale per row. Activations become int8 with one scale, or one per
    channel, which is multiplied into the columns of the weight, and divided out of the point-wise
    layer's own weight and bias, or, where something that is not among ``readers`` reads its output
    too, of the linear layer's input. A ``Conv1D`` becomes the ``nn.Linear`` that it equals.

    Args:
        model: the converted model, changed in place.
        readers: the result of :func:`find_readers`, or some of it. Refused ones are left alone,
            unless ``ranges`` has the linear layer's own path.
        sigmas: clip beyond so many standard deviations, as for :func:`output_range`; None for the
            bound itself.
        symmetric: as for :func:`static_scale`.
        per_channel: a scale for each channel; symmetric only. A number from 0 to 1 raises these
            scales to that power, so that weights and activations share the differences between
            channels. True is 1.
        ranges: least and largest values that were seen, by path of the linear layer or else of the
            point-wise layer that it reads, instead of the bound; see :func:`observed_ranges`.

    Returns:
        The readers that are now quantized.

    Raises:
        ArgumentError: ``per_channel`` without ``symmetric`` or beyond 1, no range for a layer, a
            linear layer in float64, torchao is missing, or as for :func:`output_range`.
        ModelError: there is nothing to quantize, something is quantized already, or the paths are
            not this model's.
    """
    if not (hasattr(per_channel, "__float__") and 0 <= per_channel <= 1):
        raise ArgumentError(
            f"per_channel must be True, False or a power from 0 to 1, got {per_channel!r}"
        )
    if per_channel and not symmetric:
        raise ArgumentError(
            "scales per channel must be symmetric: one zero point serves all channels of a product"
        )
    clear = [
        r
        for r in dict.fromkeys(readers)
        if r.refused is None or (r.ndim and r.linear in (ranges or ()))
    ]
    if not clear:
        raise ModelError(
            "there must be a linear layer to quantize, got none: pass the result of find_readers"
        )
    require_library("torchao", "quantize_", "quantize")
    from torchao.quantization import FqnToConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    # All that can fail comes before the first change.
    seen = {reader: _range(model, reader, sigmas, ranges, bool(per_channel)) for reader in clear}
    if not per_channel:
        seen = {reader: (low.min(), high.max()) for reader, (low, high) in seen.items()}
    scales = {reader: static_scale(*each, symmetric=symmetric) for reader, each in seen.items()}
    for reader in clear:
        _replace_conv1d_(model, reader.linear)
    steps = {reader: scale**per_channel for reader, (scale, _) in scales.items() if per_channel}
    folded = _foldable(model, steps)
    _multiply_scales_in_(model, steps, folded)
    # What arrives is in steps already, which the channel of the widest range has most of.
    ends = {
        reader: ((scale / steps.get(reader, 1)).max(), zero)
        for reader, (scale, zero) in scales.items()
    }
    configs = {
        r.linear: _config(scale, None if symmetric else zero, r.ndim)
        for r, (scale, zero) in ends.items()
    }
    torchao_quantize_(model, FqnToConfig(configs), filter_fn=None)
    for reader, step in steps.items():
        if reader.layer not in folded:
            linear: Any = model.get_submodule(reader.linear)
            linear.weight.act_pre_scale = (1 / step).to(linear.weight.dtype)
    return clear


def _foldable(model: nn.Module, steps: Mapping[Reader, Tensor]) -> set[str | None]:
    """Return the layers whose own output may change, because every reader changes with it, and by the same steps."""
    found = set()
    for reader, step in steps.items():
        peers = {other.linear: each for other, each in steps.items() if other.layer == reader.layer}
        complete = reader.alone and peers.keys() >= {*reader.peers, reader.linear}
        if complete and all(torch.equal(step, each) for each in peers.values()):
            found |= (
                {reader.layer}
                if model.get_submodule(str(reader.layer)).weight is not None
                else set()
            )
    return found


@torch.no_grad()
def _replace_conv1d_(model: nn.Module, path: str) -> None:
    """Put the ``nn.Linear`` that equals a ``Conv1D`` in its place, wherever the model holds it."""
    module: Any = model.get_submodule(path)
    if _is_conv1d(module):
        linear = nn.Linear(1, 1, device=module.weight.device).train(module.training)
        linear.in_features, linear.out_features = module.weight.shape
        linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
        for place in [
            name for name, each in model.named_modules(remove_duplicate=False) if each is module
        ]:
            model.set_submodule(place, linear)


def _config(scale: Tensor, zero: Tensor | None, ndim: int) -> Any:
    from torchao.quantization import (
        Int8StaticActivationInt8WeightConfig,
        MappingType,
        PerRow,
        PerTensor,
    )

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
    model: nn.Module,
    reader: Reader,
    sigmas: float | None,
    ranges: Mapping[str, Range] | None,
    per_channel: bool,
) -> Range:
    """Return the range of a linear layer's input, having checked the two layers."""
    own = ranges is not None and reader.linear in ranges
    try:
        linear = model.get_submodule(reader.linear)
        layer = None if reader.layer is None else model.get_submodule(reader.layer)
    except AttributeError as error:
        raise ModelError(
            f"readers must be of this model, but: {error}: call find_readers on it"
        ) from error
    if not _is_linear(linear) or not (isinstance(layer, PointwiseNorm) or (own and layer is None)):
        raise ModelError(
            f"{reader.linear} must be an nn.Linear that reads a point-wise layer: call "
            "find_readers anew"
        )
    if type(linear.weight) is not nn.Parameter:
        raise ModelError(
            f"{reader.linear} must hold a plain weight, got {type(linear.weight).__name__}: "
            "quantize once"
        )
    if linear.weight.dtype not in _DTYPES:
        raise ArgumentError(
            f"{reader.linear} must be in float32, bfloat16 or float16 for torchao, got "
            f"{linear.weight.dtype}: cast it"
        )
    if per_channel and layer is not None and (len(layer.normalized_shape) > 1 or layer.dim != -1):
        raise ArgumentError(
            f"{reader.layer} must have channels last for one scale per channel, got dim {layer.dim}"
        )
    if ranges is None:
        assert layer is not None
        return output_range(layer, sigmas=sigmas)
    if not own and reader.layer not in ranges:
        raise ArgumentError(
            f"ranges must hold the layer {reader.layer}, got {', '.join(ranges) or 'none'}"
        )
    low, high = ranges[reader.linear if own else str(reader.layer)]
    channels = linear.weight.shape[0 if _is_conv1d(linear) else 1]
    if low.shape not in ((), (channels,)):
        raise ArgumentError(
            f"the range for {reader.linear} must be two numbers or ({channels},), got "
            f"{(*low.shape,)}"
        )
    return low, high


@torch.no_grad()
def _multiply_scales_in_(
    model: nn.Module, scales: Mapping[Reader, Tensor], folded: set[str | None]
) -> None:
    """Multiply the scales into the linear layers that read them, and out of the layer where nothing else reads it."""
    for reader, scale in scales.items():
        linear: Any = model.get_submodule(reader.linear)
        linear.weight = nn.Parameter(
            linear.weight * scale.to(linear.weight.dtype), requires_grad=False
        )
    for path, scale in {
        reader.layer: scale for reader, scale in scales.items() if reader.layer in folded
    }.items():
        layer: Any = model.get_submodule(str(path))
        if layer.weight_offset:
            # The quotient may be far from 1, where an offset of 1 would cost digits.
            factor = layer.factor()
            layer.weight_offset = 0.0
            layer.set_factor_(factor)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter.div_(scale.to(parameter.dtype))
