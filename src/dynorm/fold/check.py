"""Proof by numbers: the outputs before and after, on the example and on inputs that are new."""

import copy
import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import Inputs
from dynorm.dtypes import HALVES
from dynorm.errors import DataError, DynormError, ModelError
from dynorm.fold.tensors import detached_copy, mapped, tensors_in
from dynorm.guard import Function, FunctionMode, undisturbed

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# The folded weights are rounded once more than the original's: sqrt(2) of its noise, and a margin.
_NOISE = 2.0
# For a single output, which may have only a few numbers.
_NOISE_OF_ONE = 4.0
# With more noise than this, a wrong fold could pass.
_LARGEST_NOISE = 0.1


class WideCasts(FunctionMode):
    """Widen a float64 model's own casts to float32, as in norms and softmax, to float64."""

    def call(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call in which float64 takes the place of float32."""
        if func is Tensor.float:
            func = Tensor.double
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return super().call(func, tuple(map(_widened, args)), kwargs)


def _widened(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


class Check:
    """A model's outputs for the example and for fresh inputs, to compare later outputs with.

    Args:
        model: the model before a change.
        example: the arguments of one call.
        tolerance: the relative error to allow; None chooses it by dtype.
    """

    def __init__(self, model: nn.Module, example: Inputs, tolerance: float | None = None) -> None:
        self.dtype = _narrowest_dtype(model)
        self.inputs = [detached_copy(example)]
        self._before = [self._of_example(model)]
        # Two fresh inputs; but some models take nothing except the example.
        for seed in (1, 2):
            self._add_fresh(model, seed)
        self.fresh = len(self.inputs) - 1
        self.noise: float | None = None
        # The noise of each output, if the tolerance depends on it.
        self._noises: list[float] = []
        if self.dtype in HALVES:
            self._use_float32(model, tolerance)
        if tolerance is not None:
            self.tolerance = tolerance
        elif self.noise is not None:
            self.tolerance = _NOISE * self.noise
        else:
            self.tolerance = 1e-12 if self.dtype == torch.float64 else 1e-5

    def errors(self, model: nn.Module) -> list[float]:
        """Return the largest relative error of each output now."""
        outputs = [self._outputs(model, inputs) for inputs in self.inputs]
        return _largest_errors(outputs, self._before)

    def require_same(self, model: nn.Module) -> dict[str, object]:
        """Check that the outputs are the same, and return the figures for a report.

        In half precision each output is also compared with its own noise.
        """
        errors = self.errors(model)
        limits = [(max(errors), self.tolerance)]
        rounding = 2 * torch.finfo(self.dtype).eps
        if self._noises:
            for error, noise in itertools.zip_longest(errors, self._noises, fillvalue=0.0):
                limits.append((error, max(_NOISE_OF_ONE * noise, rounding)))
        for error, allowed in reversed(limits):
            # A comparison with NaN is False.
            if not error <= allowed:
                inputs = "the example or fresh random inputs" if self.fresh else "the example"
                raise ModelError(
                    f"the folded model's outputs must be the original's to {allowed:.1e}, but "
                    f"differ by {error:.1e} on {inputs}; everything was put back. A branch that "
                    "the example does not take may read a norm, an operator may write into it in "
                    "place, or rounding needs a larger tolerance=; paths= helps to find the site"
                )
        return {
            "error": max(errors),
            "tolerance": self.tolerance,
            "noise": self.noise,
            "fresh": self.fresh,
        }

    def _of_example(self, model: nn.Module) -> list[Tensor]:
        try:
            outputs = self._outputs(model, self.inputs[0])
        except DynormError:
            raise
        except Exception as error:
            raise DataError(
                "the model must run on a copy of the example, to be checked, but it raised "
                f"{type(error).__name__}: {error}; check=False skips the check"
            ) from error
        if not any(tensor.numel() for tensor in outputs):
            raise DataError(
                "the model must return floating-point tensors to be checked, but its outputs hold "
                "none"
            )
        if not _are_comparable(outputs):
            raise DataError(
                "the model's outputs must hold finite numbers to be checked, but for the example "
                "one is all NaN or infinite: pass another example"
            )
        return outputs

    def _add_fresh(self, model: nn.Module, seed: int) -> None:
        """Add the first inputs that the model takes: all random, or only the varied floats."""
        example = self.inputs[0]
        for all_random in (True, False):
            inputs = fresh(example, seed, all_random)
            if _are_equal(inputs, example):
                continue
            try:
                outputs = self._outputs(model, inputs)
            # A model may refuse random numbers: a token that marks an image, a range that it checks.
            except Exception:
                continue
            is_finite = _are_finite(outputs) or not _are_finite(self._before[0])
            if _are_comparable(outputs) and is_finite:
                self.inputs.append(inputs)
                self._before.append(outputs)
                return

    def _use_float32(self, model: nn.Module, tolerance: float | None) -> None:
        """Take the outputs of a float32 copy as the truth, and the distance from them as the noise."""
        try:
            in_float32 = copy.deepcopy(model).float()
            outputs = [self._outputs(in_float32, mapped(inputs, _float)) for inputs in self.inputs]
        except Exception as error:
            if tolerance is not None:
                # The half-precision outputs remain the reference.
                return
            raise ModelError(
                "the model must have a float32 copy that runs, from which its own rounding error "
                f"is measured, but that raised {type(error).__name__}: {error}; pass tolerance= to "
                "compare in half precision"
            ) from error
        noises = _largest_errors(self._before, outputs)
        self.noise = max(noises)
        self._before = outputs
        if tolerance is not None:
            return
        if not self.noise <= _LARGEST_NOISE:
            raise ModelError(
                f"the model's outputs must be within {_LARGEST_NOISE} of its float32 copy's for a "
                f"check in half precision to mean something, but differ by {self.noise:.1e}: fold "
                "it in float32 and cast it then, or pass tolerance="
            )
        self._noises = noises

    def _outputs(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:
        """Run the model on a copy of some inputs, and return its outputs in float64."""
        casts = WideCasts() if self.dtype == torch.float64 else nullcontext()
        with undisturbed(model, inputs, attributes=True), casts:
            torch.manual_seed(0)
            args, kwargs = detached_copy(inputs)
            returned = model(*args, **kwargs)
            outputs = [tensor.detach().clone() for tensor in tensors_in(returned)]
        if outputs:
            # A layer that is gone returns its input, and a later operator in place would write
            # into the caller's tensor. So the inputs after the call are compared too.
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor) and _is_dense(tensor):
                    outputs.append(tensor.nan_to_num())
        doubles = []
        for tensor in outputs:
            if not _is_dense(tensor):
                raise ModelError(
                    "the model's outputs must be dense tensors to be checked, but one is nested or "
                    "sparse: check=False skips the check"
                )
            if tensor.is_complex():
                doubles.append(torch.view_as_real(tensor.resolve_conj()).double())
            elif tensor.is_floating_point():
                doubles.append(tensor.double())
        return doubles


def run(model: nn.Module, inputs: Inputs) -> object:
    """Call a model on a copy of its inputs; nothing of the call stays."""
    args, kwargs = detached_copy(inputs)
    with undisturbed(model, inputs, attributes=True):
        return model(*args, **kwargs)


def _narrowest_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of the parameters with the fewest digits."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALVES else tensor


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def relative_error(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest |tensor - exact| / |exact| over several tensors, in the Euclidean norm."""
    return max(_errors(tensors, exact), default=0.0)


def _largest_errors(
    samples: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]
) -> list[float]:
    """Return the largest error of each output over the samples."""
    errors = map(_errors, samples, exact)
    return [max(column) for column in itertools.zip_longest(*errors, fillvalue=0.0)]


def _errors(tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in exact]:
        return [math.inf]
    return [_error(a, b) for a, b in zip(tensors, exact, strict=True)]


def _error(tensor: Tensor, exact: Tensor) -> float:
    finite = exact.isfinite()
    # Infinities and NaN must be the same in both, else the error is infinite.
    if not torch.equal(finite, tensor.isfinite()):
        return math.inf
    if not torch.equal(tensor[~finite].nan_to_num(), exact[~finite].nan_to_num()):
        return math.inf
    size = float(exact[finite].norm())
    difference = float((tensor[finite] - exact[finite]).norm())
    if size:
        return difference / size
    return math.inf if difference else 0.0


def _are_comparable(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().any()) for tensor in tensors if tensor.numel())


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _are_equal(inputs: Inputs, example: Inputs) -> bool:
    """Return whether the tensors are equal; those of other layouts are never drawn at random."""
    for a, b in zip(tensors_in(inputs), tensors_in(example), strict=True):
        if _is_dense(a) and not a.nan_to_num().equal(b.nan_to_num()):
            return False
    return True


def fresh(inputs: Inputs, seed: int, all_random: bool = True) -> Inputs:
    """Return random inputs like an example.

    If not ``all_random``, tensors of integers or of one number stay as they are.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def renewed(value: Tensor) -> Tensor:
        same = value.detach().clone()
        if not _is_dense(value) or value.is_quantized or not value.numel():
            return same
        if value.is_floating_point():
            drawn = _fresh_floats(same, generator, all_random)
        elif all_random and value.dtype in _INTEGERS:
            drawn = _fresh_integers(same, generator)
        else:
            return same
        return drawn.to(value.device, value.dtype)

    return mapped(inputs, renewed)


def _fresh_integers(value: Tensor, generator: torch.Generator) -> Tensor:
    low = int(value.min())
    high = int(value.max())
    # Zeros and ones are a mask.
    if low >= 0 and high <= 1:
        return value
    return torch.randint(low, high + 1, value.shape, generator=generator, device="cpu")


def _fresh_floats(value: Tensor, generator: torch.Generator, constants: bool) -> Tensor:
    values = value.to("cpu", torch.float64)
    low = float(values.min())
    high = float(values.max())
    is_constant = low == high
    # A mask of zeros and minus infinities is not an activation.
    if not bool(values.isfinite().all()) or (is_constant and not constants):
        return value
    if low < 0 < high or low == high == 0:
        normal = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu")
        size = 1.0 if is_constant else float(values.std())
        return values.mean() + size * normal
    # Numbers of one sign may need it, as under a logarithm.
    if is_constant:
        low *= 0.5
        high *= 1.5
    uniform = torch.rand(values.shape, generator=generator, dtype=torch.float64, device="cpu")
    return low + (high - low) * uniform
