"""Point-wise layers in the place of a model's norms, in plain torch.

This file was written by dynorm, and is needed to load the model next to it: pass
``trust_remote_code=True`` to transformers. dynorm itself is not needed. config.json lists the
layers, with their paths, under "dynorm".

A layer computes ``y = weight * scale * f(x - center) + bias``, element by element and in at least
float32. With witnesses, some chosen channels, the slope of f also depends on the token.
"""

import math
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

# Up to this number of witnesses their squares are added one by one.
MOST_CHOSEN = 16
# config.json has this key and value, and the configuration below removes it. If the model is loaded
# without this file, transformers takes the value for the name of a file, and quotes it in its
# error. Otherwise it would load the model with norms, and only warn.
BARRIER = "transformers_weights"
ADVICE = "pass trust_remote_code=True: only modeling_dynorm.py knows the layers of this model"


class PointwiseLayer(nn.Module):
    """The parts that all functions share: the centre, the witnesses and the affine map."""

    center: nn.Parameter | None
    log_gain: nn.Parameter
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: list[int],
        *,
        elementwise_affine: bool,
        bias: bool,
        per_channel: bool,
        center: bool,
        scale: float,
        dim: int | list[int] = -1,
        output_dtype: str = "input",
        weight_offset: float = 0.0,
        witnesses: tuple[int, ...] = (),
        **first_values: float | None,
    ) -> None:
        super().__init__()
        self.shape = list(normalized_shape)
        self.dims = [dim] if isinstance(dim, int) else list(dim)
        self.scale = scale
        self.output_dtype = output_dtype
        self.weight_offset = weight_offset
        self.witnesses = tuple(witnesses)
        # The place of each channel's sum over the other witnesses: its own if it is one, else the last.
        self.places = [len(self.witnesses)] * math.prod(self.shape)
        for place, channel in enumerate(self.witnesses):
            self.places[channel] = place
        constant_shape = self.shape if per_channel else [1]
        for name, value in self.first_constants(first_values).items():
            self.register_parameter(name, _parameter(constant_shape, value))
        self.register_parameter("center", _parameter(constant_shape, 0.0, center))
        self.register_parameter("log_gain", _parameter([len(witnesses)], 0.0, bool(witnesses)))
        self.register_parameter(
            "weight", _parameter(self.shape, 1.0 - weight_offset, elementwise_affine)
        )
        self.register_parameter("bias", _parameter(self.shape, 0.0, elementwise_affine and bias))

    def first_constants(self, first_values: dict[str, float | None]) -> dict[str, float]:
        """Return the constants of a model that is not loaded from a checkpoint, by name."""
        raise NotImplementedError

    def function(self, u: Tensor) -> Tensor:
        """Return f(u), with the channels last."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element; the shape stays."""
        returned = self.returned_dtype(x.dtype)
        wide = torch.promote_types(torch.promote_types(x.dtype, returned), torch.float32)
        last = list(range(-len(self.dims), 0))
        moved = x.to(wide).movedim(self.dims, last)
        u = moved.flatten(-len(self.dims))
        if self.center is not None:
            u = u - self.center.flatten()
        factor: Any = self.scale
        if self.weight is not None:
            factor = (self.weight.flatten().to(wide) + self.weight_offset) * factor
        y: Tensor = self.function(u) * factor
        if self.bias is not None:
            y = y + self.bias.flatten()
        return y.reshape(moved.shape).movedim(last, self.dims).to(returned)

    def returned_dtype(self, given: torch.dtype) -> torch.dtype:
        """Return the dtype of the output: one promoted from those that ``output_dtype`` names."""
        stored = next(self.parameters()).dtype
        for tensor in (self.bias, self.weight):
            if tensor is not None:
                stored = tensor.dtype
        return _promoted(self.output_dtype, given, stored)

    def extra_repr(self) -> str:
        """Describe the layer as ``print(model)`` shows it."""
        return f"{self.shape}, scale={self.scale:.4g}, witnesses={self.witnesses}"

    def in_units(self, u: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return u in units of each token in which no square overflows, and the units.

        A unit is 1 in nearly all tokens. The result does not depend on it, so it needs no gradient.
        """
        if not self.witnesses:
            return u, 1.0
        u = _clamped(u)
        sizes = u.detach().abs()
        if len(self.witnesses) > MOST_CHOSEN:
            positions = torch.tensor(self.witnesses, device=u.device)
            largest = sizes.index_select(-1, positions).amax(-1, keepdim=True)
        else:
            columns = [sizes[..., channel : channel + 1] for channel in self.witnesses]
            largest = reduce(torch.maximum, columns)
        root = _limit(u.dtype) ** 0.5
        unit = torch.ones_like(largest).masked_fill(largest >= root, 1.0 / root)
        return u * unit, unit

    def witness_sum(self, u: Tensor, *, leave_one_out: bool = False) -> Tensor | float:
        """Return the sum of gain * u^2 over the witnesses of each token, 0 without witnesses.

        With ``leave_one_out`` a witness is not in its own sum.
        """
        total: Tensor | float = 0.0
        if not self.witnesses:
            return total
        channels = torch.arange(u.shape[-1], device=u.device)
        gains = self.log_gain.to(u.dtype).exp()
        if len(self.witnesses) > MOST_CHOSEN:
            return self._sum_of_many(u, gains, leave_one_out)
        for gain, channel in zip(gains, self.witnesses, strict=True):
            square = gain * u[..., channel : channel + 1].square()
            if leave_one_out:
                square = torch.where(channels == channel, 0.0, square)
            total = total + square
        return total

    def _sum_of_many(self, u: Tensor, gains: Tensor, leave_one_out: bool) -> Tensor:
        """Return the sum without a loop over the witnesses."""
        positions = torch.tensor(self.witnesses, device=u.device)
        squares = gains * u.index_select(-1, positions).square()
        if not leave_one_out:
            return squares.sum(-1, keepdim=True)
        # Only the largest can be more than half of the sum: a difference loses no digits of the others.
        largest = squares.argmax(-1, keepdim=True)
        is_largest = torch.arange(len(self.witnesses), device=u.device) == largest
        rest = torch.where(is_largest, 0.0, squares).sum(-1, keepdim=True)
        total = rest + torch.where(is_largest, squares, 0.0).sum(-1, keepdim=True)
        sums = torch.cat([torch.where(is_largest, rest, total - squares), total], -1)
        return sums.index_select(-1, torch.tensor(self.places, device=u.device))


class DyISRU(PointwiseLayer):
    """``f(u) = u / sqrt(beta + sum of gain_k * u_k^2 + u^2)`` (arXiv 2503.21708)."""

    log_beta: nn.Parameter

    def first_constants(self, first_values: dict[str, float | None]) -> dict[str, float]:
        """Return log(beta), of which beta is the number of channels by default."""
        return {"log_beta": math.log(first_values["beta_init"] or math.prod(self.shape))}

    def function(self, u: Tensor) -> Tensor:
        """Return f(u), with the channels last."""
        u, unit = self.in_units(_clamped(u))
        beta = self.log_beta.flatten().to(u.dtype).exp() * unit * unit
        return u / torch.sqrt(beta + self.witness_sum(u, leave_one_out=True) + u * u)


class LinearControl(DyISRU):
    """``f(u) = u / sqrt(beta + sum of gain_k * u_k^2)``."""

    def function(self, u: Tensor) -> Tensor:
        """Return f(u), with the channels last."""
        u, unit = self.in_units(u)
        beta = self.log_beta.flatten().to(u.dtype).exp() * unit * unit
        return u / torch.sqrt(beta + self.witness_sum(u))


class DyT(PointwiseLayer):
    """``f(u) = tanh(slope * u)``, ``slope = alpha / sqrt(1 + alpha^2 * sum of gain_k * u_k^2)``."""

    alpha: nn.Parameter
    # alpha^-2 times this is the constant beta of a DyISRU with the same slope at 0.
    slope_ratio = 1.0

    def first_constants(self, first_values: dict[str, float | None]) -> dict[str, float]:
        """Return alpha, and for Derf the shift."""
        return {name.removesuffix("_init"): value or 0.0 for name, value in first_values.items()}

    def slope_times(self, u: Tensor) -> Tensor:
        """Return slope * u."""
        alpha = self.alpha.flatten().to(u.dtype)
        if not self.witnesses:
            return alpha * u
        u, unit = self.in_units(u)
        relative = alpha * alpha / self.slope_ratio * self.witness_sum(u)
        return alpha * u * torch.rsqrt(unit * unit + relative)

    def function(self, u: Tensor) -> Tensor:
        """Return f(u), with the channels last."""
        return torch.tanh(self.slope_times(u))


class Derf(DyT):
    """``f(u) = erf(slope * u + shift)``, with a slope as in DyT (arXiv 2512.10938)."""

    shift: nn.Parameter
    slope_ratio = math.pi / 4

    def function(self, u: Tensor) -> Tensor:
        """Return f(u), with the channels last."""
        return torch.erf(self.slope_times(u) + self.shift.flatten())


class RootMeanSquareNorm(nn.Module):
    """RMSNorm, with a bias and any channel axis.

    Some programs replace any class by a kernel without these parts if its name ends in RMSNorm.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: list[int],
        *,
        norm_eps: float,
        elementwise_affine: bool,
        bias: bool,
        dim: int = -1,
        output_dtype: str = "input",
    ) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.dim = dim
        self.output_dtype = output_dtype
        self.register_parameter("weight", _parameter(normalized_shape, 1.0, elementwise_affine))
        self.register_parameter("bias", _parameter(normalized_shape, 0.0, bias))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the channels; the shape stays."""
        stored = x.dtype
        for tensor in (self.bias, self.weight):
            if tensor is not None:
                stored = tensor.dtype
        returned = _promoted(self.output_dtype, x.dtype, stored)
        z = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(self.dim, -1)
        y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.norm_eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.movedim(-1, self.dim).to(returned)


class Identity(nn.Identity):
    """A norm that was folded away."""


LAYERS: dict[str, Any] = {
    "dyisru": DyISRU,
    "linear": LinearControl,
    "dyt": DyT,
    "derf": Derf,
    "rmsnorm": RootMeanSquareNorm,
    "identity": Identity,
}


class PointwiseConfig:
    """The part of a configuration that names the layers, as its attribute ``dynorm``."""

    dynorm: dict[str, Any]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration without the key that keeps it from being loaded without this."""
        values = dict(config_dict)
        values.pop(BARRIER, None)
        return super().from_dict(values, **kwargs)  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the configuration with that key."""
        setattr(self, BARRIER, ADVICE)
        try:
            super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
        finally:
            delattr(self, BARRIER)


class PointwiseModel:
    """The part of a model that puts the layers of its configuration in the place of its norms."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        _put_layers_(self, config.dynorm)


def _put_layers_(model: Any, changes: dict[str, Any]) -> None:
    """Put the layers and the added biases into a model, of which weights are loaded later.

    Paths are those of the base model, and under "outside" those of a head.
    """
    prefix = ""
    if model.base_model is not model:
        prefix = f"{model.base_model_prefix}."
    is_whole = type(model).__name__ == changes["model"]

    def paths_of(inside: list[str], outside: list[str]) -> list[str]:
        paths = [prefix + path for path in inside]
        return paths + outside if is_whole else paths

    for entry in changes["layers"]:
        layer = LAYERS[entry["layer"]](**entry["config"])
        paths = paths_of(entry["paths"], entry.get("outside", []))
        for path in paths:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer)
        # The parameters of a layer with several paths are saved once.
        for path in paths[1:]:
            for name, _ in layer.named_parameters():
                model.all_tied_weights_keys[f"{path}.{name}"] = f"{paths[0]}.{name}"
    for path in paths_of(changes["biases"], changes["biases_outside"]):
        linear = model.get_submodule(path)
        # The first axis of a weight is that of the outputs, unless the convolution is transposed.
        outputs = getattr(linear, "out_channels", None) or linear.out_features
        linear.bias = _parameter([outputs], 0.0)


def _parameter(shape: list[int], value: float, exists: bool = True) -> nn.Parameter | None:
    if not exists:
        return None
    return nn.Parameter(torch.full(shape, float(value)))


def _promoted(rule: str, given: torch.dtype, stored: torch.dtype) -> torch.dtype:
    """Return the dtype that is promoted from the parts of a rule, such as "input+weight"."""
    dtypes = []
    for part in rule.split("+"):
        if part == "input":
            dtypes.append(given)
        elif part == "weight":
            dtypes.append(stored)
        else:
            dtypes.append(getattr(torch, part))
    promoted = dtypes[0]
    for dtype in dtypes[1:]:
        promoted = torch.promote_types(promoted, dtype)
    return promoted


def _clamped(u: Tensor) -> Tensor:
    """Return u up to the size from which squares no longer matter."""
    limit = _limit(u.dtype)
    return u.clamp(-limit, limit)


def _limit(dtype: torch.dtype) -> float:
    """Return half the root of the largest number: 2**63 in float32."""
    return math.sqrt(torch.finfo(dtype).max) / 2
