"""The point-wise layers as modules: settings, witnesses, checkpoints, and what ``print`` shows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dynorm import kernels
from dynorm.arguments import (
    check_positive,
    check_witnesses,
    require_gathered,
    upcast,
)
from dynorm.errors import ArgumentError


class NoEps:
    """The eps of a module that has none: no number, and equal to nothing.

    In eval mode ``nn.TransformerEncoderLayer`` calls its norms unless ``norm1.eps == norm2.eps``. A
    model that computes with the eps of its norm gets a TypeError.
    """

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class PointwiseModule(nn.Module):
    """The part of a point-wise layer that is the same for every function."""

    _dynorm_layer: ClassVar[bool] = True
    kernel: ClassVar[kernels.FunctionCode]
    # The names of the function's parameters, first the one that sets the slope.
    constants: ClassVar[tuple[str, ...]] = ()
    # Whether that one is kept as its logarithm.
    logarithmic: ClassVar[bool] = False
    # The parameters in the order of the kernels, and the gains of witnesses.
    numbers: ClassVar[tuple[str, ...]]
    # DyISRU's beta for the same slope at 0, times the square of the function's constant.
    slope_ratio: ClassVar[float] = 1.0
    # Maps beta to the first parameter that gives f the slope 1 / sqrt(beta) at 0.
    constant_from: ClassVar[Callable[..., Tensor]]

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    log_gain: nn.Parameter | None
    witnesses: Tensor | None
    witness_channels: tuple[int, ...]
    channels: int
    dim: int
    scale: float
    promote: bool
    weight_offset: float

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.constants:
            cls.numbers = (cls.constants[0], "shift", "weight", "bias", "log_gain")

    @property
    def normalized_shape(self) -> tuple[int]:
        """The size of the channel axis, as a tuple of one."""
        return (self.channels,)

    @property
    def eps(self) -> NoEps:
        """No number: see :class:`NoEps`."""
        return NoEps()

    @property
    def first_constant(self) -> nn.Parameter:
        """The constant that sets the slope."""
        constant: nn.Parameter = getattr(self, self.constants[0])
        return constant

    def beta(self) -> Tensor:
        """Return the constant as DyISRU's beta, the inverse square of the slope of ``f`` at 0."""
        raise NotImplementedError

    def form(self) -> tuple[int, bool, float]:
        """Return the fields of :class:`dynorm.kernels.Form`."""
        return int(self.kernel), self.logarithmic, self.scale

    def kernel_parameters(self) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the fields of :class:`dynorm.kernels.Parameters`, and the logarithms of the gains."""
        # From the dictionary of nn.Module: a kernel takes a few microseconds, and attributes as long.
        stored: Mapping[str, Tensor | None] = self._parameters
        if self._modules or not stored:
            # A parametrization, or a replica of DataParallel, keeps a parameter elsewhere.
            stored = {name: getattr(self, name, None) for name in self.numbers}
        # A list, which Dynamo makes a tuple of if it is unpacked with a star.
        parameters = [stored.get(name) for name in self.numbers]
        log_gain = parameters.pop()
        if self.weight_offset:
            parameters[2] = self.factor()
        return parameters, log_gain

    def initial_constants(self) -> dict[str, float]:
        """Return the first values of the constants, by the size and the scale."""
        raise NotImplementedError

    def witnesses_and_gains(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the witnesses, and the weight of the square of each."""
        assert self.witnesses is not None
        assert self.log_gain is not None
        return self.witnesses, upcast(self.log_gain).exp()

    def constant_parameters(self) -> list[nn.Parameter]:
        """Return all parameters except weight and bias: the constants and the gains."""
        parameters = [getattr(self, name) for name in self.constants]
        if self.log_gain is not None:
            parameters.append(self.log_gain)
        return parameters

    def returned_dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype of the output for an input of dtype ``given`` and the present weight."""
        if not self.promote:
            return given
        like = self.first_constant if self.weight is None else self.weight
        return torch.promote_types(given, like.dtype)

    def factor(self) -> Tensor | None:
        """Return the factor of each channel, ``weight + weight_offset``; None for 1.

        With an offset it has at least float32, which holds 1 + w of a bfloat16 w; otherwise it is
        the parameter.
        """
        if self.weight is None or not self.weight_offset:
            return self.weight
        return upcast(self.weight) + self.weight_offset

    @torch.no_grad()
    def set_slope_(self, beta: Tensor | float) -> None:
        """Set the first constant so that ``f`` has slope ``1 / sqrt(beta)`` at 0.

        So one number, beta, has the same meaning for all functions.

        Args:
            beta: DyISRU's constant, positive; a number or a tensor of one, which is checked on the
                CPU only, to avoid waiting for a device.

        Raises:
            ArgumentError: ``beta`` is not positive and finite, or more than one number.
            ModelError: the layer's parameters are the placeholders of DeepSpeed's ZeRO-3.
        """
        require_gathered(self)
        stored = self.first_constant
        value = beta
        if not isinstance(value, Tensor):
            value = torch.tensor(beta, dtype=torch.float64, device="cpu")
        value = value.detach().to(torch.promote_types(value.dtype, upcast(stored).dtype))
        if value.numel() != 1:
            raise ArgumentError(
                f"beta must be one number for all channels, got the shape {tuple(value.shape)}"
            )
        if value.is_cpu and not 0 < float(value) < math.inf:
            raise ArgumentError(f"beta must be positive and finite, got {beta}")
        # A number beyond the dtype's range becomes the largest in it: an infinite alpha would turn
        # an input of 0 into NaN.
        largest = torch.finfo(stored.dtype).max
        store_(stored, self.constant_from(value).to(stored.dtype).clamp(-largest, largest))

    @torch.inference_mode(False)
    def set_witnesses_(
        self,
        witnesses: int | Sequence[int],
        gains: Sequence[float] | None = None,
    ) -> None:
        """Replace the witnesses; an empty sequence makes the layer a function of one channel again.

        ``log_gain`` becomes a new parameter: give it to the optimizer afterwards.

        Args:
            witnesses: the positions of at most 16 channels; a number N for the first N.
            gains: the weight of the square of each, 1 by default.

        Raises:
            ArgumentError: there are too many witnesses, one is out of range or named twice, or the
                gains are not positive numbers, one for each witness.
        """
        channels = check_witnesses(witnesses, self.channels)
        if gains is None:
            gains = [1.0] * len(channels)
        if not isinstance(gains, Iterable) or len(gains) != len(channels):
            raise ArgumentError(
                f"gains must be a list, one for each of {len(channels)} witnesses, got {gains!r}"
            )
        logarithms = [math.log(check_positive("gains", gain)) for gain in gains]
        log_gain = None
        positions = None
        if channels:
            like = self.first_constant
            values = torch.tensor(logarithms, device=like.device, dtype=like.dtype)
            log_gain = nn.Parameter(values, like.requires_grad)
            positions = torch.tensor(channels, device=like.device)
        self.witness_channels = channels
        self.register_parameter("log_gain", log_gain)
        # In the state dict, so that a checkpoint says which channels its gains belong to.
        self.register_buffer("witnesses", positions)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # From the meta device to_empty brings arbitrary numbers.
        if self.witnesses is not None and not self.witnesses.is_meta:
            self.witnesses = torch.tensor(self.witness_channels, device=self.witnesses.device)
        return self

    def has_witnesses(self, saved: Tensor) -> bool:
        """Return whether the tensor of a checkpoint names this layer's witnesses."""
        return saved.dtype == torch.int64 and saved.tolist() == list(self.witness_channels)

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

    @torch.no_grad()
    def fill_constants_(self, beta: Tensor | float) -> None:
        """Set the slope by ``beta``, and every other constant to 0."""
        self.set_slope_(beta)
        for name in self.constants[1:]:
            self.get_parameter(name).zero_()

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except device and dtype, as values for JSON."""
        config = {
            "normalized_shape": [self.channels],
            "elementwise_affine": self.weight is not None,
            "bias": self.bias is not None,
            "scale": self.scale,
            "dim": self.dim,
        }
        for name in ("promote", "weight_offset"):
            if getattr(self, name):
                config[name] = getattr(self, name)
        if self.witness_channels:
            config["witnesses"] = list(self.witness_channels)
        return config

    def extra_repr(self) -> str:
        """Describe the layer as ``print(model)`` shows it."""
        parts = [str(self.channels)]
        for name, value in self._shown_constants().items():
            text = _shown(value)
            if text is not None:
                parts.append(f"{name}={text}")
        parts.append(f"scale={self.scale:.4g}")
        defaults = {"elementwise_affine": True, "bias": True, "dim": -1}
        for name, value in self.config().items():
            if name not in ("normalized_shape", "scale") and value != defaults.get(name, False):
                parts.append(f"{name}={value}")
        return ", ".join(parts)

    def _shown_constants(self) -> dict[str, Tensor]:
        """Return the constants that ``print`` shows, by name."""
        return {name: getattr(self, name).detach() for name in self.constants}


def _shown(constant: Tensor) -> str | None:
    """Return a constant as text; None if it has no value here."""
    if constant.is_meta or kernels.traced(constant) or not constant.numel():
        return None
    return f"{float(constant):.4g}"


def store_(parameter: nn.Parameter, value: Tensor) -> None:
    """Write a value that broadcasts into a parameter; into a sharded one, this rank's part."""
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        value = value.to(parameter.device, parameter.dtype).expand(parameter.shape).contiguous()
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)
