"""Static int8 of torchao for linear layers, with scales from the point-wise layers they read."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dynorm.batches import copied_tensors, example_arguments
from dynorm.errors import ArgumentError, ModelError, require_library
from dynorm.guard import Function, FunctionMode, require_plain_model
from dynorm.layers import PointwiseNorm
from dynorm.quantize.bounds import Range, output_range, static_scale
from dynorm.replace.converted import require_layers
from dynorm.replace.weights import hand_over_record_

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Functions that return a property of a tensor and never its values.
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
        layer: the path of the point-wise layer; None if it does not read one.
        ndim: the number of dimensions of its input; 0 if that varies.
        alone: only linear layers read the point-wise layer, so that scales per channel can be
            folded into them and into the layer.
        refused: why a point-wise layer cannot give the linear layer its scale; None if one can.
        peers: the paths of all linear layers that read the point-wise layer, including this one; a
            fold needs them all.
    """

    linear: str
    layer: str | None
    ndim: int
    alone: bool
    refused: str | None = None
    peers: tuple[str, ...] = ()


def find_readers(
    model: nn.Module,
    *args: object,
    **kwargs: object,
) -> list[Reader]:
    """Run a model once to find its linear layers and the point-wise layers that they read.

    A linear layer is an ``nn.Linear`` or a ``Conv1D`` of transformers. It reads a point-wise layer
    when its input is the very tensor that the point-wise layer returned. If it reads anything else,
    or tensors with different numbers of dimensions, :attr:`Reader.refused` gives the reason.

    Args:
        model: a converted model in eval mode.
        *args: its example inputs; or one batch, a tuple or dict of them.
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
    args, kwargs = example_arguments(model, args, kwargs)
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
    # Whoever called the model reads its result.
    watch.read_elsewhere |= watch.sources(
        list(result.values()) if isinstance(result, Mapping) else result
    )
    inputs = {path: watch.inputs[path] for path in linears.values() if path in watch.inputs}
    if all(read.layer is None for read in inputs.values()):
        raise ModelError(
            "a linear layer must read a point-wise layer's output, but none does: convert more "
            "norms"
        )
    linears_of: dict[str | None, list[str]] = {}
    for path, read in inputs.items():
        for source in read.sources:
            linears_of.setdefault(source, []).append(path)
            # A refused linear layer stays as it is, so the layers that it reads must too.
            if read.refusal is not None and source is not None:
                watch.read_elsewhere.add(source)
    readers = []
    for path, read in inputs.items():
        reader = Reader(
            linear=path,
            layer=read.layer,
            ndim=read.ndims[0] if len(read.ndims) == 1 else 0,
            alone=read.layer is not None and read.layer not in watch.read_elsewhere,
            refused=read.refusal,
            peers=() if read.layer is None else tuple(linears_of[read.layer]),
        )
        readers.append(reader)
    return readers


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's linear layer, whose weight is transposed."""
    kind = type(module)
    return kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"


@dataclass
class _Inputs:
    """The inputs that one linear layer has had, each property once and in order."""

    # Paths of the point-wise layers that returned them; None for a tensor from elsewhere.
    sources: list[str | None] = field(default_factory=list)
    ndims: list[int] = field(default_factory=list)

    def add(self, source: str | None, ndim: int) -> None:
        if source not in self.sources:
            self.sources.append(source)
        if ndim not in self.ndims:
            self.ndims.append(ndim)

    @property
    def layer(self) -> str | None:
        """The first point-wise layer that is read."""
        return next((source for source in self.sources if source is not None), None)

    @property
    def refusal(self) -> str | None:
        """Why one static scale does not suit all the inputs; None if it does."""
        if self.sources == [None]:
            return "it reads no point-wise layer"
        if None in self.sources:
            return "it reads other tensors too"
        if len(self.sources) > 1:
            return f"it reads several layers: {', '.join(map(str, self.sources))}"
        if len(self.ndims) > 1:
            return f"it reads tensors of {' and '.join(map(str, sorted(self.ndims)))} dimensions"
        return None


class _Watch(FunctionMode):
    """Record which linear layers and other operators read the tensors that point-wise layers return."""

    def __init__(
        self,
        layers: Mapping[nn.Module, str],
        linears: Mapping[nn.Module, str],
    ) -> None:
        super().__init__()
        self.layers = layers
        self.linears = linears
        # By id. The tensors are kept alive, so that no other tensor gets the same id.
        self.outputs: dict[int, tuple[Tensor, str]] = {}
        self.inputs: dict[str, _Inputs] = {}
        # Point-wise layers whose output is read by anything but a linear layer.
        self.read_elsewhere: set[str] = set()
        # The input of the linear layer that is running.
        self.entered: Tensor | None = None

    def source(self, value: object) -> str | None:
        """Return the path of the point-wise layer that returned this very tensor."""
        if id(value) not in self.outputs:
            return None
        return self.outputs[id(value)][1]

    def sources(self, values: object) -> set[str]:
        """Return the paths of the point-wise layers that returned any of these."""
        paths = {self.source(leaf) for leaf in tree_leaves(values)}
        return {path for path in paths if path is not None}

    def returned(self, layer: nn.Module, args: object, output: Tensor) -> None:
        self.outputs[id(output)] = (output, self.layers[layer])

    def enters(
        self,
        linear: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
    ) -> None:
        x = (*args, *kwargs.values())[0]
        self.entered = x
        self.inputs.setdefault(self.linears[linear], _Inputs()).add(self.source(x), x.ndim)

    def leaves(self, linear: nn.Module, args: object, output: Tensor) -> None:
        self.entered = None

    def call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        read = args
        # The input of a linear layer has been recorded by its hook.
        if args and args[0] is self.entered:
            read = args[1:]
        if getattr(func, "__name__", "") not in _HARMLESS:
            self.read_elsewhere |= self.sources((read, kwargs))
        return super().call(func, args, kwargs)


@dataclass(frozen=True)
class _Plan:
    """The quantization of one linear layer."""

    reader: Reader
    # Multiplied into the columns of the weight: one per channel, or 1.
    step: Tensor
    # The scale of the input after its division by the step.
    scale: Tensor
    # The zero point of the input; None if symmetric.
    zero: Tensor | None


def quantize_(
    model: nn.Module,
    readers: Sequence[Reader],
    *,
    sigmas: float | None = None,
    symmetric: bool = True,
    per_channel: bool | float = False,
    ranges: Mapping[str, Range] | None = None,
) -> list[Reader]:
    """Give linear layers torchao's static int8 quantization, with scales from the layers they read.

    Weights become int8 with one scale per row. Activations become int8 with one scale, or one per
    channel. Scales per channel are multiplied into the columns of the weight, and divided out of
    the point-wise layer's own weight and bias. If anything that is not among ``readers`` reads the
    layer's output too, they are divided out of the linear layer's input instead. A ``Conv1D``
    becomes the ``nn.Linear`` that it equals.

    Args:
        model: the converted model, changed in place.
        readers: the result of :func:`find_readers`, or some of it. Refused ones are left as they
            are, unless ``ranges`` has the linear layer's own path.
        sigmas: clip beyond this many standard deviations, as for :func:`output_range`; None for the
            bound itself.
        symmetric: as for :func:`static_scale`.
        per_channel: a scale for each channel; symmetric only. A number from 0 to 1 raises these
            scales to that power, so that weights and activations share the differences between
            channels. True is 1.
        ranges: least and largest values that were seen, used instead of the bound; by path of the
            linear layer, or else of the point-wise layer that it reads. See
            :func:`observed_ranges`.

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
    quantized = []
    # Each reader once.
    for reader in dict.fromkeys(readers):
        has_own_range = bool(reader.ndim) and ranges is not None and reader.linear in ranges
        if reader.refused is None or has_own_range:
            quantized.append(reader)
    if not quantized:
        raise ModelError(
            "there must be a linear layer to quantize, got none: pass the result of find_readers"
        )
    require_library("torchao", "quantize_", "quantize")
    from torchao.quantization import FqnToConfig
    from torchao.quantization import quantize_ as torchao_quantize_

    # Everything that can fail comes before the first change.
    plans = []
    for reader in quantized:
        low, high = _range(model, reader, sigmas, ranges, bool(per_channel))
        if not per_channel:
            low = low.min()
            high = high.max()
        scale, zero = static_scale(low, high, symmetric=symmetric)
        # The power 0, without scales per channel, makes it 1.
        step = scale ** float(per_channel)
        # Inputs are divided by their steps, so one scale, the largest, covers all channels.
        remaining = (scale / step).max()
        plans.append(_Plan(reader, step, remaining, None if symmetric else zero))

    for reader in quantized:
        _replace_conv1d_(model, reader.linear)
    folded: set[str | None] = set()
    if per_channel:
        folded = _foldable(model, plans)
        _multiply_steps_in_(model, plans, folded)
    configs = {plan.reader.linear: _config(plan) for plan in plans}
    torchao_quantize_(model, FqnToConfig(configs), filter_fn=None)
    if per_channel:
        for plan in plans:
            if plan.reader.layer not in folded:
                weight: Any = model.get_submodule(plan.reader.linear).weight
                weight.act_pre_scale = (1 / plan.step).to(weight.dtype)
    return quantized


def _foldable(model: nn.Module, plans: Sequence[_Plan]) -> set[str | None]:
    """Return the layers that can be divided by steps: all that read one expect the same steps."""
    plans_of: dict[str | None, list[_Plan]] = {}
    for plan in plans:
        plans_of.setdefault(plan.reader.layer, []).append(plan)
    foldable: set[str | None] = set()
    for path, readers in plans_of.items():
        if path is None or model.get_submodule(path).weight is None:
            continue
        linears = {plan.reader.linear for plan in readers}
        step = readers[0].step
        if all(
            plan.reader.alone
            and linears.issuperset(plan.reader.peers)
            # A linear layer with its own range may have other steps.
            and torch.equal(plan.step, step)
            for plan in readers
        ):
            foldable.add(path)
    return foldable


@torch.no_grad()
def _replace_conv1d_(model: nn.Module, path: str) -> None:
    """Replace a ``Conv1D`` by the ``nn.Linear`` that equals it, at every path that has it."""
    module: Any = model.get_submodule(path)
    if not _is_conv1d(module):
        return
    linear = nn.Linear(1, 1, device=module.weight.device).train(module.training)
    linear.in_features, linear.out_features = module.weight.shape
    linear.weight = nn.Parameter(module.weight.T.contiguous())
    linear.bias = module.bias
    hand_over_record_(linear, module)
    for name, other in list(model.named_modules(remove_duplicate=False)):
        if other is module:
            model.set_submodule(name, linear)


def _config(plan: _Plan) -> object:
    from torchao.quantization import (
        Int8StaticActivationInt8WeightConfig,
        MappingType,
        PerRow,
        PerTensor,
    )

    shape = (1,) * plan.reader.ndim
    zero = plan.zero
    return Int8StaticActivationInt8WeightConfig(
        act_quant_scale=plan.scale.float().reshape(shape),
        act_quant_zero_point=None if zero is None else zero.reshape(shape),
        granularity=[PerTensor(), PerRow()],
        act_mapping_type=MappingType.SYMMETRIC if zero is None else MappingType.ASYMMETRIC,
        # True would change settings of the whole process.
        set_inductor_config=False,
    )


def _range(
    model: nn.Module,
    reader: Reader,
    sigmas: float | None,
    ranges: Mapping[str, Range] | None,
    per_channel: bool,
) -> Range:
    """Check a linear layer and the layer that it reads, and return the range of its input."""
    try:
        linear = model.get_submodule(reader.linear)
        layer = None if reader.layer is None else model.get_submodule(reader.layer)
    except AttributeError as error:
        raise ModelError(
            f"readers must be of this model, but: {error}: call find_readers on it"
        ) from error
    has_own_range = ranges is not None and reader.linear in ranges
    has_range = isinstance(layer, PointwiseNorm) or (layer is None and has_own_range)
    if not _is_linear(linear) or not has_range:
        raise ModelError(
            f"{reader.linear} must be an nn.Linear that reads a point-wise layer: call "
            "find_readers again"
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
    if per_channel and isinstance(layer, PointwiseNorm) and layer.dim != -1:
        raise ArgumentError(
            f"{reader.layer} must have channels last for one scale per channel, got dim {layer.dim}"
        )
    if ranges is None:
        assert isinstance(layer, PointwiseNorm)
        return output_range(layer, sigmas=sigmas)
    path = reader.linear if has_own_range else str(reader.layer)
    if path not in ranges:
        raise ArgumentError(f"ranges must hold the layer {path}, got {', '.join(ranges) or 'none'}")
    low, high = ranges[path]
    channels = linear.weight.shape[0 if _is_conv1d(linear) else 1]
    if low.shape not in ((), (channels,)):
        raise ArgumentError(
            f"the range for {reader.linear} must be two numbers or ({channels},), got "
            f"{(*low.shape,)}"
        )
    return low, high


@torch.no_grad()
def _multiply_steps_in_(
    model: nn.Module,
    plans: Sequence[_Plan],
    folded: set[str | None],
) -> None:
    """Multiply the steps into the linear layers, and divide the folded layers by them."""
    step_of: dict[str, Tensor] = {}
    for plan in plans:
        linear: Any = model.get_submodule(plan.reader.linear)
        weight = linear.weight * plan.step.to(linear.weight.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if plan.reader.layer in folded:
            step_of[str(plan.reader.layer)] = plan.step
    for path, step in step_of.items():
        layer: Any = model.get_submodule(path)
        if layer.weight_offset:
            # The quotient may be far from 1, and an offset of 1 would then cost digits.
            factor = layer.factor()
            layer.weight_offset = 0.0
            layer.set_factor_(factor)
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                parameter.div_(step.to(parameter.dtype))
