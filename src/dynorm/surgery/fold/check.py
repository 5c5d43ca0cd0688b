"""Proof by numbers: the outputs before and after, on inputs that the model has not seen."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynorm.errors import DataError
from dynorm.surgery.fold.capture import tensors_in
from dynorm.surgery.observe import no_trace, slow_path

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
_HALVES = (torch.float16, torch.bfloat16)
# The folded weights are rounded once more than the original's, as its activations are: sqrt(2) of its noise, and room.
_NOISE = 2.0
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Wide(TorchFunctionMode):
    """Compute in float64 what a float64 model computes in float32: norms, softmax, rotations, by their own casts.

    Example:
        >>> with Wide():
        ...     torch.ones(2, dtype=torch.float64).float().dtype
        torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Check:
    """What a model gave for fresh inputs, to compare what it gives later with.

    Args:
        model: in eval mode.
        args: of one call.
        kwargs: of one call.
        tolerance: the relative error to allow; by dtype if None.
        samples: how many fresh inputs.

    Raises:
        DataError: the model's outputs hold nothing to compare.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tolerance: float | None = None,
        samples: int = 2,
    ) -> None:
        self.dtype = _dtype_of(model)
        self.inputs = [fresh((tuple(args), dict(kwargs)), seed) for seed in range(1, samples + 1)]
        try:
            self._before = [self._outputs(model, inputs) for inputs in self.inputs]
        # Random integers may be no input of this model, as where a token marks the place of an image.
        except Exception:
            self.inputs = [fresh((tuple(args), dict(kwargs)), seed, integers=False) for seed in (1, 2)]
            self._before = [self._outputs(model, inputs) for inputs in self.inputs]
        if not any(self._before):
            raise DataError("the model must return floating-point tensors to be checked, but its outputs hold none")
        self.noise: float | None = None
        if self.dtype in _HALVES:
            exact = copy.deepcopy(model).float()
            wide = [self._outputs(exact, _float(inputs)) for inputs in self.inputs]
            self.noise = max(map(relative_error, self._before, wide))
            self._before = wide
        self.tolerance = tolerance if tolerance is not None else self._default()

    def error(self, model: nn.Module) -> float:
        """Return the largest relative error of any output now."""
        return max(relative_error(self._outputs(model, x), y) for x, y in zip(self.inputs, self._before, strict=True))

    def _default(self) -> float:
        return TOLERANCES.get(self.dtype, 1e-5) if self.noise is None else _NOISE * self.noise

    def _outputs(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:
        with no_trace(model, inputs), torch.no_grad(), _wide_if(self.dtype == torch.float64):
            torch.manual_seed(0)
            args, kwargs = copy.deepcopy(inputs)
            found = [t.detach().clone() for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point()]
        return [tensor.double() for tensor in found if not tensor.is_nested]


def relative_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest of |given - exact| / |exact| over several tensors, in the Euclidean norm.

    What is infinite or no number in one must be the same in the other, else the error is infinite.

    Example:
        >>> relative_error([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])])
        0.1
    """
    if [t.shape for t in given] != [t.shape for t in exact]:
        return math.inf
    return max((_relative(a, b) for a, b in zip(given, exact, strict=True)), default=0.0)


def fresh(inputs: Inputs, seed: int, integers: bool = True) -> Inputs:
    """Return random inputs like an example: of its shapes and dtypes, integers in its range, masks as they are.

    Example:
        >>> fresh(((torch.tensor([3, 9, 5]), torch.tensor([1, 0, 1])), {}), seed=1)[0][1]
        tensor([1, 0, 1])
    """
    generator = torch.Generator().manual_seed(seed)

    def renew(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _renewed(value, generator, integers)
        if isinstance(value, dict):
            return {key: renew(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(renew(part) for part in value)
        return copy.deepcopy(value)

    args, kwargs = inputs
    return tuple(renew(arg) for arg in args), {key: renew(value) for key, value in kwargs.items()}


def _renewed(value: Tensor, generator: torch.Generator, integers: bool) -> Tensor:
    if not value.numel():
        return value.clone()
    if value.is_floating_point():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        wide = value.detach().double()
        spread = wide.std() if value.numel() > 1 else wide.abs().max()
        # A mask of zeros and minus infinities is no activation.
        if not bool(wide.isfinite().all()) or float(spread) == 0:
            return value.clone()
        return (wide.mean() + spread * noise).to(value.dtype)
    low, high = int(value.min()), int(value.max())
    if not integers or value.dtype == torch.bool or (low >= 0 and high <= 1):
        return value.clone()
    return torch.randint(low, high + 1, value.shape, generator=generator).to(value.device, value.dtype)


def _relative(given: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite()
    if not torch.equal(finite, given.isfinite()) or not torch.equal(
        given[~finite].nan_to_num(), exact[~finite].nan_to_num()
    ):
        return math.inf
    size = float(exact[finite].norm())
    error = float((given[finite] - exact[finite]).norm())
    return error / size if size else (math.inf if error else 0.0)


def _float(inputs: Inputs) -> Inputs:
    def widened(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.float() if value.dtype in _HALVES else value
        if isinstance(value, dict):
            return {key: widened(part) for key, part in value.items()}
        return type(value)(map(widened, value)) if type(value) in (list, tuple) else value

    args, kwargs = inputs
    return tuple(map(widened, args)), {key: widened(value) for key, value in kwargs.items()}


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The narrowest dtype among the parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return min(dtypes, key=lambda dtype: (torch.finfo(dtype).bits, -torch.finfo(dtype).eps), default=torch.float32)


@contextmanager
def _wide_if(wide: bool) -> Iterator[None]:
    # The fused path of nn.TransformerEncoder rounds otherwise; what it computes is checked with it in the tests.
    with slow_path():
        if not wide:
            yield
            return
        with Wide():
            yield
