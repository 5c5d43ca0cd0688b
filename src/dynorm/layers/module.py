"""A point-wise layer without its values: its settings, its slope, its config, and its text in ``print``."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dynorm import kernels
from dynorm.arguments import (
    Shape,
    check_channels,
    check_dim,
    check_finite,
    check_positive,
    check_witnesses,
    refuse_witnesses,
    require_gathered,
    upcast,
)
from dynorm.errors import ArgumentError, ModelError


class NoEps:
    """The eps of a module that has none: no number, and equal to nothing.

    In eval mode ``nn.TransformerEncoderLayer`` calls its norms unless ``norm1.eps == norm2.eps``. A
    model that computes with the eps of its norm gets a TypeError.
    """

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class PointwiseModule(nn.Module):
    """The settings of a point-wise layer, and what models, optimizers and saved files ask of it."""

    _dynorm_layer: ClassVar[bool] = True
    kernel: ClassVar[kernels.FunctionCode]
    # The names of the function's parameters, first the one that sets the slope.
    constants: ClassVar[tuple[str, ...]] = ()
    # Whether that one is kept as its logarithm.
    logarithmic: ClassVar[bool] = False
    # DyISRU's beta for the same slope at 0, times the square of the function's constant.
    slope_ratio: ClassVar[float] = 1.0
    # Maps beta to the first parameter that gives f the slope 1 / sqrt(beta) at 0.
    constant_from: ClassVar[Callable[..., Tensor]]

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    witness_channels: tuple[int, ...] = ()  # of DyISRU only

    def __init__(
        self,
        normalized_shape: Shape,
        scale: float | None,
        dim: int,
        promote: bool,
        weight_offset: float,
    ) -> None:
        super().__init__()
        self.channels = check_channels(normalized_shape)
        self.dim = check_dim(dim)
        self.scale = check_finite("scale", math.sqrt(self.channels) if scale is None else scale)
        if self.scale == 0:
            raise ArgumentError("scale must not be 0, got 0: leave it out for sqrt(C)")
        self.promote = promote
        self.weight_offset = check_finite("weight_offset", weight_offset)

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

    def kernel_parameters(self) -> list[Tensor | None]:
        """Return the fields of :class:`dynorm.kernels.Parameters`."""
        names = (self.constants[0], "shift", "weight", "bias")
        # From the dictionary of nn.Module: a kernel takes a few microseconds, and attributes as long.
        stored: Mapping[str, Tensor | None] = self._parameters
        elsewhere = [name for name in (*self.constants, "weight", "bias") if name not in stored]
        if elsewhere:
            # Pruning, a parametrization, or a replica of DataParallel keeps a parameter elsewhere.
            stored = {name: getattr(self, name, None) for name in names}
        # A list, which Dynamo makes a tuple of if it is unpacked with a star.
        parameters = list(map(stored.get, names))
        if self.weight_offset:
            parameters[2] = self.factor()
        return parameters

    def require_stored(self, path: str) -> None:
        """Refuse a parameter that is computed at each call, because a value that it is given would be lost."""
        for name in (*self.constants, "weight", "bias"):
            if name not in self._parameters:
                raise ModelError(
                    f"a layer must hold its parameters, but {name!r} of {path!r} is computed, by pruning or a "
                    "parametrization: make it a parameter first, as torch.nn.utils.prune.remove does"
                )

    def initial_constants(self) -> dict[str, float]:
        """Return the first values of the constants, by the size and the scale."""
        raise NotImplementedError

    def constant_parameters(self) -> list[nn.Parameter]:
        """Return all parameters except weight and bias."""
        return [getattr(self, name) for name in self.constants]

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
        if not isinstance(beta, Tensor):
            beta = torch.tensor(check_positive("beta", beta), dtype=torch.float64, device="cpu")
        value = beta.detach().to(torch.promote_types(beta.dtype, upcast(stored).dtype))
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

    def set_witnesses_(
        self, witnesses: int | Sequence[int], gains: Sequence[float] | None = None
    ) -> None:
        """Refuse witnesses: only :class:`dynorm.DyISRU` takes them.

        Raises:
            ArgumentError: there are some.
        """
        if gains or check_witnesses(witnesses, self.channels):
            refuse_witnesses(type(self).__name__, witnesses)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set factors to 1, the bias to 0, the constants to their defaults."""
        for name, value in self.initial_constants().items():
            getattr(self, name).fill_(value)
        if self.weight is not None:
            self.weight.fill_(1.0 - self.weight_offset)
        if self.bias is not None:
            self.bias.zero_()

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
