"""The common parts of the point-wise layers: shapes, affine map, learned centre, serial form."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ClassVar, ParamSpec, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn

from dynorm import kernels
from dynorm.arguments import (
    Shape,
    check_dim,
    check_positive,
    check_shape,
    check_witnesses,
    require_gathered,
    upcast,
)
from dynorm.dtypes import DtypeRule, is_floating_dtype
from dynorm.errors import ArgumentError

Arguments = ParamSpec("Arguments")


class LayerArguments(TypedDict, total=False):
    """The keyword arguments that every point-wise layer takes."""

    elementwise_affine: bool
    bias: bool
    per_channel: bool
    center: bool
    scale: float | None
    witnesses: int | Sequence[int]
    dim: int | Sequence[int]
    output_dtype: str | None
    weight_offset: float
    device: torch.device | str | None
    dtype: torch.dtype | None


def arguments_by_name(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Refuse a second argument by position, and ``eps``, in the ``__init__`` of a layer.

    ``nn.LayerNorm(64, 1e-5)`` sets eps. In a layer 1e-5 would become beta, and the layer would
    saturate everywhere.
    """

    @wraps(init)
    def checked_init(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        layer: Any = args[0]
        name = type(layer).__name__
        first = layer.own_arguments[0] if layer.own_arguments else "scale"
        if len(args) > 2:
            raise ArgumentError(
                f"{name} must get all arguments except normalized_shape by name, got {args[1:]!r}: "
                f"it has no eps; write for example {name}({args[1]!r}, {first}=...)"
            )
        if "eps" in options:
            remedy = f"leave it out; its constant is {first}"
            if hasattr(layer, "target"):
                remedy = "pass norm_eps= for the norm that the layer begins as"
            raise ArgumentError(
                f"{name} must not get an eps, because its function divides by no statistic, got "
                f"eps={options['eps']!r}: {remedy}"
            )
        init(*args, **options)

    return checked_init


class PointwiseNorm(nn.Module):
    """Base of the layers that replace a norm: ``y = weight * scale * f(x - center) + bias``.

    The function acts on each element. A subclass names its constants, first the one that sets the
    slope, and its kernel; everything else is here. Parameters are never 0-dimensional: a constant
    has shape ``(1,)``, or ``normalized_shape`` with ``per_channel=True``.

    With witnesses K the constant of a token is ``beta + sum over k in K of gain_k * (x_k -
    center_k)^2``: the layer also reads these channels of the token, and is no longer a function
    of one channel. Their gains are learned as ``log_gain``. Without witnesses the layer has no
    ``log_gain`` and no ``witnesses``.

    Args:
        normalized_shape: the size C of the channel axis, or the sizes of the last axes; this
            argument and all but those below are explained at :class:`dynorm.DyISRU`.
        scale: the fixed factor in front; the value that the function tends to.
        dim: with several sizes, their axes (the last ones by default).
        output_dtype: the dtypes whose promotion is returned, joined by "+": "input", "weight" (with a
            weight), or a dtype such as "float32". "input+weight" is the rule of Llama's RMSNorm; None
            returns the input's.
        weight_offset: added to ``weight``, in at least float32, before it multiplies: 1.0 for a
            norm whose factor is 1 + w, of which the layer then holds w with all its digits.
        device: where the parameters live; on ``"meta"`` they have no values.

    Raises:
        ArgumentError: a size is not positive; ``dim`` and ``normalized_shape`` disagree; ``scale``
            is 0 or not finite; ``weight_offset`` is not finite; a witness is out of range or named
            twice; ``dtype`` is not floating point; or ``output_dtype`` is not such a rule.
    """

    _dynorm_layer: ClassVar[bool] = True
    kernel: ClassVar[kernels.FunctionCode]
    # Whether the first constant is kept as its logarithm.
    logarithmic: ClassVar[bool] = False
    # Maps beta to the first constant that gives f the slope 1 / sqrt(beta) at 0.
    constant_from: ClassVar[Callable[..., Tensor]]
    constants: ClassVar[tuple[str, ...]] = ()
    # The constructor's arguments that a subclass adds, each also an attribute.
    own_arguments: ClassVar[tuple[str, ...]] = ()
    # The constants whose learning rate is in proportion to their size.
    relative_constants: ClassVar[tuple[str, ...]] = ()

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    center: nn.Parameter | None
    log_gain: nn.Parameter | None
    witnesses: Tensor | None
    witness_channels: tuple[int, ...]

    # Tensors that are made in inference mode can never be trained.
    @arguments_by_name
    @torch.inference_mode(False)
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
        per_channel: bool = False,
        center: bool = False,
        scale: float | None = None,
        witnesses: int | Sequence[int] = (),
        dim: int | Sequence[int] = -1,
        output_dtype: str | None = None,
        weight_offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype is not None and not is_floating_dtype(dtype):
            raise ArgumentError(f"dtype must be a real floating point dtype, got {dtype}")
        self.output_dtype = None if output_dtype is None else DtypeRule(output_dtype)
        if not (hasattr(weight_offset, "__float__") and math.isfinite(weight_offset)):
            raise ArgumentError(f"weight_offset must be a finite number, got {weight_offset!r}")
        self.weight_offset = float(weight_offset)
        self.normalized_shape = check_shape(normalized_shape)
        self.dim = check_dim(dim, self.normalized_shape)
        self.dims = (self.dim,) if isinstance(self.dim, int) else self.dim
        self.channels = math.prod(self.normalized_shape)
        scale = self._default_scale() if scale is None else scale
        if not (hasattr(scale, "__float__") and math.isfinite(scale)) or scale == 0:
            raise ArgumentError(f"scale must be a finite number other than 0, got {scale!r}")
        self.scale = float(scale)
        self.elementwise_affine = elementwise_affine
        self.per_channel = per_channel

        def empty(
            shape: tuple[int, ...],
            exists: bool = True,
        ) -> nn.Parameter | None:
            if not exists:
                return None
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        constant_shape = self.normalized_shape if per_channel else (1,)
        for name in self.constants:
            self.register_parameter(name, empty(constant_shape))
        self.register_parameter("center", empty(constant_shape, center))
        channels = check_witnesses(witnesses, self.channels)
        self._register_witnesses(channels, empty((len(channels),), bool(channels)))
        self.register_parameter("weight", empty(self.normalized_shape, elementwise_affine))
        self.register_parameter("bias", empty(self.normalized_shape, elementwise_affine and bias))
        self.reset_parameters()

    @property
    def eps(self) -> float:
        """Not a number: there is nothing to keep from zero, beta is positive by construction.

        ``nn.TransformerEncoderLayer`` takes its fused LayerNorm path in eval mode only when
        ``norm1.eps == norm2.eps``; NaN equals nothing, so the layer is really called.
        """
        return math.nan

    @property
    def first_constant(self) -> nn.Parameter:
        """The constant that sets the slope."""
        constant: nn.Parameter = getattr(self, self.constants[0])
        return constant

    def reset_parameters(self) -> None:
        """Set factors and gains to 1, bias and centre to 0, the constants to their defaults."""
        with torch.no_grad():
            for name, value in self._initial_constants().items():
                getattr(self, name).fill_(value)
            if self.weight is not None:
                self.weight.fill_(1.0 - self.weight_offset)
            for parameter in (self.bias, self.center, self.log_gain):
                if parameter is not None:
                    parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element of ``x``.

        Args:
            x: any floating dtype, with ``normalized_shape`` at ``dim``; nested tensors too, if
                ``dim`` is negative.

        Returns:
            The shape of ``x``, in the dtype of ``x`` or of the rule ``output_dtype``, contiguous
            if the channels come last; computed in at least float32.

        Raises:
            ArgumentError: ``x`` is not a floating point tensor, or its sizes at ``dim`` are not
                ``normalized_shape``.
        """
        if not isinstance(x, Tensor):
            return self._forward_symbol(x)
        # A jagged one without witnesses broadcasts as any other tensor.
        if x.is_nested and (x.layout == torch.strided or self.witness_channels):
            return self._forward_nested(x)
        # The usual case first: this runs at every call.
        if not (self.dim == -1 and x.ndim and x.shape[-1] == self.normalized_shape[0]):
            sizes = tuple(x.shape[d] for d in self.dims if -x.ndim <= d < x.ndim)
            if sizes != self.normalized_shape:
                raise ArgumentError(
                    f"x must have normalized_shape {self.normalized_shape} at dim {self.dim}, got "
                    f"{sizes} in shape {tuple(x.shape)}: pass the dim that holds the channels"
                )
        returned = x.dtype if self.output_dtype is None else self.returned_dtype(x.dtype)
        if returned == x.dtype:
            y = self.pointwise(x)
        else:
            widest = torch.promote_types(x.dtype, returned)
            y = self.pointwise(x.to(widest)).to(returned)
        # Contiguous as the output of nn.LayerNorm: the next operation may ask for a view.
        return y.contiguous() if self.dims[-1] == -1 else y

    def _forward_nested(self, x: Tensor) -> Tensor:
        """Apply the function to a nested tensor, as nn.TransformerEncoder makes in eval mode."""
        if x.layout != torch.strided:
            jagged: Any = x
            values = self.forward(jagged.values())
            return torch.nested.nested_tensor_from_jagged(values, jagged.offsets())
        if max(self.dims) >= 0:
            raise ArgumentError(
                f"dim must be negative for a nested tensor, got {self.dim}: count it from the end"
            )
        return torch.nested.as_nested_tensor([self.forward(part) for part in x.unbind()])

    def returned_dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype of the output for an input of dtype ``given`` and the present weight."""
        if self.output_dtype is None:
            return given
        stored = self._parameters
        for name in ("weight", "bias", self.constants[0]):
            # As in `_kernel_parameters`: attributes of a module take longer.
            tensor = stored[name] if name in stored else getattr(self, name)
            if tensor is not None:
                return self.output_dtype(given, tensor.dtype)
        raise AssertionError("a layer has a constant")

    def factor(self) -> Tensor | None:
        """Return the factor of each channel, ``weight + weight_offset``; None for 1.

        With an offset it has at least float32, which holds 1 + w of a bfloat16 w; otherwise it is
        the parameter.
        """
        if self.weight is None or not self.weight_offset:
            return self.weight
        return upcast(self.weight) + self.weight_offset

    @torch.no_grad()
    def set_factor_(self, factor: Tensor) -> None:
        """Set the weight so that ``factor`` multiplies each channel, in place."""
        assert self.weight is not None
        if self.weight_offset:
            factor = upcast(factor) - self.weight_offset
        self.weight.copy_(factor.reshape(self.weight.shape))

    def pointwise(self, x: Tensor) -> Tensor:
        """Return the function of ``x``, whose sizes are checked, by a kernel if one serves."""
        parameters = self._kernel_parameters()
        y = kernels.pointwise(
            self.kernel,
            x,
            parameters,
            self.scale,
            self.normalized_shape,
            self.dim,
            self.logarithmic,
            self.witness_channels,
        )
        if y is None:
            return self.form(self.scale).definition(x, parameters, self.dim, self.witnesses)
        return y

    def _kernel_parameters(self) -> kernels.Parameters:
        """Return the parameters in the order of the kernels.

        They are read from the dictionary of nn.Module, at a tenth of the time of its attributes:
        this runs at every call, and a kernel is done in a few microseconds.
        """
        stored: Any = self._parameters
        constants = self.constants
        has_shift = len(constants) > 1
        try:
            constant = stored[constants[0]]
            shift = stored[constants[1]] if has_shift else None
            center = stored["center"]
            weight = stored["weight"]
            bias = stored["bias"]
            log_gain = stored["log_gain"]
        except KeyError:
            # A parametrization keeps a parameter elsewhere.
            constant = getattr(self, constants[0])
            shift = getattr(self, constants[1]) if has_shift else None
            center = self.center
            weight = self.weight
            bias = self.bias
            log_gain = self.log_gain
        if self.weight_offset:
            weight = self.factor()
        return kernels.Parameters(constant, shift, center, weight, bias, log_gain)

    @classmethod
    def form(cls, scale: float) -> kernels.Form:
        """Return everything that the definition needs except tensors and their axes."""
        # The definition reads neither channels nor inner.
        return kernels.Form(cls.kernel, cls.logarithmic, scale, channels=1, inner=1)

    @classmethod
    def curve(
        cls,
        x: Tensor,
        beta: Tensor,
        center: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        """Return ``scale * f(x - center)``, with slope ``scale / sqrt(beta)`` at the centre."""
        # The definition, unlike the kernels, takes a number as the centre.
        number: Any = center
        parameters = kernels.Parameters(cls.constant_from(beta), center=number)
        return cls.form(scale).definition(x, parameters)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except device and dtype, as values for JSON."""
        config = {
            "normalized_shape": list(self.normalized_shape),
            "elementwise_affine": self.elementwise_affine,
            "bias": self.bias is not None,
            "per_channel": self.per_channel,
            "center": self.center is not None,
            "scale": self.scale,
            "dim": self.dim if isinstance(self.dim, int) else list(self.dim),
        }
        if self.output_dtype is not None:
            config["output_dtype"] = str(self.output_dtype)
        if self.weight_offset:
            config["weight_offset"] = self.weight_offset
        if self.witness_channels:
            config["witnesses"] = list(self.witness_channels)
        return config | {name: getattr(self, name) for name in self.own_arguments}

    def extra_repr(self) -> str:
        """Describe the layer as ``print(model)`` shows it."""
        parts = [", ".join(map(str, self.normalized_shape))]
        for name, value in self._shown_constants().items():
            text = _shown(value)
            if text is not None:
                parts.append(f"{name}={text}")
        parts.append(f"scale={self.scale:.4g}")
        if self.dim != -1 and self.dim != tuple(range(-len(self.normalized_shape), 0)):
            parts.append(f"dim={self.dim}")
        if self.per_channel:
            parts.append("per_channel=True")
        if self.center is not None:
            parts.append("center=True")
        if self.witness_channels:
            parts.append(f"witnesses={self.witness_channels}")
        if self.weight_offset:
            parts.append(f"weight_offset={self.weight_offset:g}")
        parts += [f"elementwise_affine={self.elementwise_affine}", f"bias={self.bias is not None}"]
        return ", ".join(parts)

    def _shown_constants(self) -> dict[str, Tensor]:
        """Return the constants that ``print`` shows, by name."""
        return {name: getattr(self, name).detach() for name in self.constants}

    def set_slope_(self, beta: Tensor | float) -> None:
        """Set the first constant so that ``f`` has slope ``1 / sqrt(beta)`` at 0.

        So one number, beta, has the same meaning for all functions.

        Args:
            beta: DyISRU's constant, positive; a number or a tensor that broadcasts to the
                constant's shape.

        Raises:
            ArgumentError: ``beta`` is not positive and finite, or does not broadcast.
            ModelError: the layer's parameters are the placeholders of DeepSpeed's ZeRO-3.
        """
        require_gathered(self)
        constant = self.first_constant
        if isinstance(beta, Tensor):
            value = beta
        else:
            value = torch.tensor(beta, dtype=torch.float64, device="cpu")
        value = value.to(torch.promote_types(value.dtype, upcast(constant).dtype))
        trailing = zip(reversed(value.shape), reversed(constant.shape), strict=False)
        if value.ndim > constant.ndim or any(n not in (1, m) for n, m in trailing):
            raise ArgumentError(
                f"beta must broadcast to the constant's shape {tuple(constant.shape)}, got shape "
                f"{tuple(value.shape)}"
            )
        are_positive = value.isfinite() & (value > 0)
        if not value.is_meta and not bool(are_positive.all()):
            raise ArgumentError(f"beta must be positive and finite, got {beta}")
        self.fill_beta_(value)

    def fill_beta_(self, beta: Tensor) -> None:
        """Set the slope as :meth:`set_slope_` does, without its check: that waits for a GPU."""
        _store_(self.first_constant, self.constant_from(beta.detach()))

    def fill_gains_(self, gains: Tensor) -> None:
        """Set the gains of the witnesses, in their order."""
        assert self.log_gain is not None
        _store_(self.log_gain, gains.detach().log())

    def fill_constants_(self, beta: Tensor, center: Tensor) -> None:
        """Set the slope by ``beta``, the centre if there is one, and every other constant to 0."""
        self.fill_beta_(beta)
        for name in self.constants[1:]:
            getattr(self, name).detach().zero_()
        if self.center is not None:
            _store_(self.center, center)

    @torch.inference_mode(False)
    def set_witnesses_(
        self, witnesses: int | Sequence[int], gains: Sequence[float] | None = None
    ) -> None:
        """Replace the witnesses; an empty sequence makes the layer a function of one channel again.

        ``log_gain`` becomes a new parameter: give it to the optimizer afterwards.

        Args:
            witnesses: their positions in ``normalized_shape``; a number N for the first N.
            gains: the weight of the square of each, 1 by default.

        Raises:
            ArgumentError: a witness is out of range or named twice, or the gains are not positive
                numbers, one for each witness.
        """
        channels = check_witnesses(witnesses, self.channels)
        if not isinstance(gains, Iterable | None):
            raise ArgumentError(f"gains must be a list, one for each witness, got {gains!r}")
        if gains is None:
            gains = [1.0] * len(channels)
        values = [check_positive("gains", gain) for gain in gains]
        if len(values) != len(channels):
            raise ArgumentError(
                f"each witness must have a gain, got {len(values)} gains for {len(channels)} "
                "witnesses"
            )
        log_gain = None
        if channels:
            constant = self.first_constant
            logarithms = torch.tensor(values, dtype=torch.float64, device="cpu").log()
            log_gain = nn.Parameter(
                logarithms.to(constant.device, constant.dtype), constant.requires_grad
            )
        self._register_witnesses(channels, log_gain)

    def _register_witnesses(
        self,
        channels: tuple[int, ...],
        log_gain: nn.Parameter | None,
    ) -> None:
        self.witness_channels = channels
        self.register_parameter("log_gain", log_gain)
        # In the state dict, so that a checkpoint says which channels its gains belong to.
        positions = None
        if log_gain is not None:
            positions = torch.tensor(channels, device=log_gain.device)
        self.register_buffer("witnesses", positions)

    def _apply(
        self,
        fn: Callable[[Tensor], Tensor],
        recurse: bool = True,
    ) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # From the meta device to_empty brings arbitrary numbers.
        if self.witnesses is not None and not self.witnesses.is_meta:
            positions = self.witnesses
            if hasattr(positions, "to_local"):
                positions = positions.to_local()
            positions.copy_(torch.tensor(self.witness_channels, device="cpu"))
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}witnesses")
        has_values = isinstance(saved, Tensor) and not saved.is_meta
        if has_values and self.witness_channels and not self.has_witnesses(saved):
            errors: list[str] = args[-1]
            errors.append(
                f"{prefix}witnesses must be the layer's, {list(self.witness_channels)}, got "
                f"{saved.tolist()}: build the layer with the witnesses of the checkpoint"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def has_witnesses(self, saved: Tensor) -> bool:
        """Return whether the tensor of a checkpoint names this layer's witnesses."""
        return saved.dtype == torch.int64 and saved.tolist() == list(self.witness_channels)

    def beta(self) -> Tensor:
        """Return the constant as DyISRU's beta, the inverse square of the slope of ``f`` at 0."""
        raise NotImplementedError

    def constant_rates(self) -> dict[nn.Parameter, float]:
        """Return the factor of each constant's learning rate: 1, or the size of one that scales x.

        A step of log_beta changes beta in proportion; a step of alpha must do so too, or an alpha
        of 0.003 and one of 3 could not share a rate.
        """
        rates = dict.fromkeys(self.constant_parameters(), 1.0)
        for name in self.relative_constants:
            constant: nn.Parameter = getattr(self, name)
            if not constant.is_meta:
                # The mean of the full tensor: if it is sharded, all ranks must get the same rate.
                rates[constant] = float(gathered(constant.detach()).abs().mean())
        return rates

    def constant_parameters(self) -> list[nn.Parameter]:
        """Return all parameters except weight and bias: the constants, the centre and the gains."""
        parameters = [getattr(self, name) for name in self.constants]
        return parameters + [p for p in (self.center, self.log_gain) if p is not None]

    def _initial_constants(self) -> dict[str, float]:
        """Return the first values of the constants, from the constructor's arguments."""
        return {
            name: getattr(self, first)
            for name, first in zip(self.constants, self.own_arguments, strict=True)
        }

    def _forward_symbol(self, x: Any) -> Any:
        """Record one call of the layer for ``torch.fx.symbolic_trace``, as for torch's own layers.

        Anything but its proxies is refused.
        """
        if not isinstance(x, torch.fx.Proxy):
            raise ArgumentError(f"x must be a tensor, got {type(x).__name__}")
        tracer: Any = x.tracer
        path = tracer.path_of_module(self)
        if not path:
            raise ArgumentError(
                "symbolic_trace records a layer as one call, got the layer itself: trace its model"
            )
        return tracer.create_proxy("call_module", path, (x,), {})

    def _default_scale(self) -> float:
        return 1.0


class LogBetaNorm(PointwiseNorm):
    """Base of the layers whose only constant is beta, kept as ``log_beta``.

    So beta is positive by construction, and a step changes it in proportion. ``beta_init`` is C by
    default, and ``scale`` sqrt(C); the rest is as for :class:`PointwiseNorm`.
    """

    constants = ("log_beta",)
    own_arguments = ("beta_init",)
    logarithmic = True
    log_beta: nn.Parameter

    @arguments_by_name
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        beta_init: float | None = None,
        **options: Unpack[LayerArguments],
    ) -> None:
        self.beta_init = None if beta_init is None else check_positive("beta_init", beta_init)
        super().__init__(normalized_shape, **options)

    def beta(self) -> Tensor:
        """Return ``exp(log_beta)`` in at least float32."""
        return upcast(self.log_beta).exp()

    def _shown_constants(self) -> dict[str, Tensor]:
        return {"beta": self.beta().detach()}

    # Not torch.log itself, whose docstring would appear in the reference.
    @staticmethod
    def constant_from(beta: Tensor, /) -> Tensor:
        """Return ``log(beta)``."""
        return beta.log()

    def _initial_constants(self) -> dict[str, float]:
        beta = self.channels if self.beta_init is None else self.beta_init
        return {"log_beta": math.log(beta)}

    def _default_scale(self) -> float:
        return math.sqrt(self.channels)


class AlphaNorm(PointwiseNorm):
    """Base of the layers whose first constant is alpha, a factor of x, by default 0.5."""

    constants: ClassVar[tuple[str, ...]] = ("alpha",)
    own_arguments: ClassVar[tuple[str, ...]] = ("alpha_init",)
    relative_constants = ("alpha",)
    slope_ratio: ClassVar[float] = 1.0  # beta of the function over alpha ** -2
    alpha: nn.Parameter

    @arguments_by_name
    def __init__(
        self,
        normalized_shape: Shape,
        *,
        alpha_init: float = 0.5,
        **options: Unpack[LayerArguments],
    ) -> None:
        self.alpha_init = check_positive("alpha_init", alpha_init)
        super().__init__(normalized_shape, **options)

    def beta(self) -> Tensor:
        """Return DyISRU's beta for the same slope at 0 (shift 0): ``slope_ratio * alpha ** -2``."""
        return self.slope_ratio * upcast(self.alpha) ** -2


def _shown(constant: Tensor) -> str | None:
    """Return a constant as text, the range of several values; None if it has no values here."""
    if constant.is_meta or kernels.traced(constant) or not constant.numel():
        return None
    low, high = constant.double().aminmax()
    text = f"{float(low):.4g}"
    if low != high:
        text += f" to {float(high):.4g}"
    return text


@torch.no_grad()
def _store_(parameter: Tensor, value: Tensor) -> None:
    """Write a value that broadcasts into a parameter; into a sharded one, this rank's part.

    A number beyond the dtype's range becomes the largest in it: an infinite alpha would turn an
    input of 0 into NaN.
    """
    largest = torch.finfo(parameter.dtype).max
    value = value.to(parameter.dtype).clamp(-largest, largest)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        value = value.expand(parameter.shape).contiguous()
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


def gathered(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, by a collective of all ranks; another one as it is."""
    if hasattr(value, "full_tensor"):
        full: Tensor = value.full_tensor()
        return full
    return value
