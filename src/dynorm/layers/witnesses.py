"""Witnesses: the few named channels whose squares are added to DyISRU's beta.

The sum is that of the closed form of RMSNorm, with a few of its terms, so it has a place in beta and in
no other function's constant.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from dynorm import functional, kernels
from dynorm.arguments import check_positive, check_witnesses, clamped, upcast
from dynorm.errors import ArgumentError
from dynorm.layers.by_kernel import call_kernel
from dynorm.layers.constants import LogBetaNorm


class WitnessNorm(LogBetaNorm):
    """Base of DyISRU: ``beta + sum of gain_k * x_k^2`` over the witnesses k is the beta of a token."""

    log_gain: nn.Parameter | None
    witnesses: Tensor | None

    @torch.inference_mode(False)
    def set_witnesses_(
        self, witnesses: int | Sequence[int], gains: Sequence[float] | None = None
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
        if not isinstance(gains, Sequence) or len(gains) != len(channels):
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

    def reset_parameters(self) -> None:
        """Set factors and gains to 1, the bias to 0, the constants to their defaults."""
        super().reset_parameters()
        if self.log_gain is not None:
            nn.init.zeros_(self.log_gain)

    def constant_parameters(self) -> list[nn.Parameter]:
        """Return all parameters except weight and bias: the constants and the gains."""
        parameters = super().constant_parameters()
        if self.log_gain is not None:
            parameters.append(self.log_gain)
        return parameters

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments, except device and dtype, as values for JSON."""
        config = super().config()
        if self.witness_channels:
            config["witnesses"] = list(self.witness_channels)
        return config

    def witnesses_and_gains(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the witnesses, and the weight of the square of each."""
        assert self.witnesses is not None
        assert self.log_gain is not None
        return self.witnesses, upcast(self.log_gain).exp()

    def definition(self, x: Tensor) -> Tensor:
        """Return ``weight * scale * f(x) + bias`` by plain torch, in at least float32."""
        if self.witnesses is None:
            return super().definition(x)
        witnesses, gain = self.witnesses_and_gains()
        return functional.dyisru(
            x,
            self.beta(),
            self.factor(),
            self.bias,
            scale=self.scale,
            dim=self.dim,
            witnesses=witnesses,
            gain=gain,
        )

    def by_kernel(self, x: Tensor, residual: Tensor | None = None) -> Sequence[Tensor] | None:
        """Return the function of ``x`` by a kernel that takes one number per token; None if none serves.

        It adds ``T = sum_k gain_k x_k^2`` to the beta of each token. A witness is not in its own sum, so
        its channel is computed by the definition and written over.
        """
        # From the dictionary of nn.Module, as in kernel_parameters.
        if self._buffers["witnesses"] is None:
            return super().by_kernel(x, residual)
        if residual is not None or kernels.traced(x) or not x.is_floating_point():
            return None
        witnesses, gain = self.witnesses_and_gains()
        u = clamped(upcast(x.movedim(self.dim, -1).index_select(-1, witnesses)))
        squares = u.square()
        terms = squares * gain
        # If a sum may overflow, or is NaN, the definition serves. On a GPU the test would wait for it.
        limit = torch.finfo(u.dtype).max / 32
        if u.is_cpu and not bool((torch.maximum(squares, terms) <= limit).all()):
            return None
        results = call_kernel(self, x, token_constant=terms.sum(-1))
        if results is None:
            return None
        # Added without its own, and not subtracted from the sum: a witness may be larger than the others together.
        is_own = torch.eye(len(witnesses), dtype=torch.bool, device=u.device)
        others = terms.unsqueeze(-2).masked_fill(is_own, 0).sum(-1)
        f = u / (self.beta() + others + squares).sqrt()
        weight, bias = _chosen(self.factor(), witnesses), _chosen(self.bias, witnesses)
        columns = functional.linear(f, 1.0, weight, bias, scale=self.scale).to(x.dtype)
        return [results[0].index_copy_(self.dim, witnesses, columns.movedim(-1, self.dim))]

    def has_witnesses(self, saved: Tensor) -> bool:
        """Return whether the tensor of a checkpoint names this layer's witnesses."""
        return saved.dtype == torch.int64 and saved.tolist() == list(self.witness_channels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # From the meta device to_empty brings arbitrary numbers.
        if self.witnesses is not None and not self.witnesses.is_meta:
            self.witnesses = torch.tensor(self.witness_channels, device=self.witnesses.device)
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


def _chosen(parameter: Tensor | None, witnesses: Tensor) -> Tensor | None:
    """Return the part of a weight or bias that belongs to the witnesses."""
    return None if parameter is None else parameter.index_select(0, witnesses)
