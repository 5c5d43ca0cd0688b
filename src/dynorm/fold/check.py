"""Proof by numbers: the outputs before and after, on the example and on inputs that are new."""

import copy
import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.batches import Inputs
from dynorm.dtypes import HALVES
from dynorm.errors import DataError, DynormError, ModelError
from dynorm.fold.tensors import are_equal, fresh, is_dense, mapped, tensors_in
from dynorm.guard import Function, FunctionMode, undisturbed
from dynorm.outputs import relative_errors

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
    """A model's outputs for some examples and for fresh inputs, to compare later outputs with.

    Args:
        model: the model before a change.
        examples: the arguments of one call each. The fresh inputs are like the first.
        tolerance: the relative error to allow; None chooses it by dtype.
    """

    def __init__(
        self, model: nn.Module, examples: Sequence[Inputs], tolerance: float | None = None
    ) -> None:
        self.dtype = _narrowest_dtype(model)
        self.inputs = list(examples)
        self._before = [self._of_example(model, inputs) for inputs in examples]
        # Two fresh inputs; but some models take nothing except the example.
        for seed in (1, 2):
            self._add_fresh(model, seed)
        self.fresh = len(self.inputs) - len(examples)
        # In half precision the noise of each output, on which the tolerance depends.
        self._noises: list[float] = []
        if tolerance is None and self.dtype in HALVES:
            self._compare_with_float32(model)
        if tolerance is not None:
            self.tolerance = tolerance
        elif self._noises:
            self.tolerance = _NOISE * max(self._noises)
        else:
            self.tolerance = 1e-12 if self.dtype == torch.float64 else 1e-5

    def errors(self, model: nn.Module) -> list[float]:
        """Return the largest relative error of each output now."""
        outputs = [self._outputs(model, inputs) for inputs in self.inputs]
        return _largest_errors(outputs, self._before)

    def require_same(self, model: nn.Module) -> dict[str, object]:
        """Check that the outputs are the same, and return the figures for a report."""
        errors = self.errors(model)
        rounding = 2 * torch.finfo(self.dtype).eps
        for error, noise in itertools.zip_longest(errors, self._noises, fillvalue=0.0):
            allowed = self.tolerance
            if self._noises:
                allowed = min(allowed, max(_NOISE_OF_ONE * noise, rounding))
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
            "noise": max(self._noises, default=None),
            "fresh": self.fresh,
        }

    def _of_example(self, model: nn.Module, example: Inputs) -> list[Tensor]:
        try:
            outputs = self._outputs(model, example)
        except DynormError:
            raise
        except Exception as error:
            raise DataError(
                "the model must run on a copy of the example, to be checked, but it raised "
                f"{type(error).__name__}: {error}"
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
            if are_equal(inputs, example):
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

    def _compare_with_float32(self, model: nn.Module) -> None:
        """Take the outputs of a float32 copy as the truth, and the distance from them as the noise."""
        try:
            in_float32 = copy.deepcopy(model).float()
            outputs = [self._outputs(in_float32, mapped(inputs, _float)) for inputs in self.inputs]
        except Exception as error:
            raise ModelError(
                "the model must have a float32 copy that runs, from which its own rounding error "
                f"is measured, but that raised {type(error).__name__}: {error}; pass tolerance= to "
                "compare in half precision"
            ) from error
        self._noises = _largest_errors(self._before, outputs)
        self._before = outputs
        noise = max(self._noises)
        if not noise <= _LARGEST_NOISE:
            raise ModelError(
                f"the model's outputs must be within {_LARGEST_NOISE} of its float32 copy's for a "
                f"check in half precision to mean something, but differ by {noise:.1e}: fold "
                "it in float32 and cast it then, or pass tolerance="
            )

    def _outputs(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:
        """Run the model on a copy of some inputs, and return its outputs in float64."""
        args, kwargs = mapped(inputs, lambda tensor: tensor.detach().clone())
        casts = WideCasts() if self.dtype == torch.float64 else nullcontext()
        with undisturbed(model, inputs, attributes=True), casts:
            torch.manual_seed(0)
            returned = model(*args, **kwargs)
            outputs = [tensor.detach().clone() for tensor in tensors_in(returned)]
        if outputs:
            # A layer that is gone returns its input, and a later operator in place would write
            # into the caller's tensor. So the inputs after the call are compared too.
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor) and is_dense(tensor):
                    outputs.append(tensor.nan_to_num())
        doubles = []
        for tensor in outputs:
            if not is_dense(tensor):
                raise ModelError(
                    "the model's outputs must be dense tensors to be checked, but one is nested or "
                    "sparse: fold the parts of the model that return dense ones"
                )
            if tensor.is_complex():
                doubles.append(torch.view_as_real(tensor.resolve_conj()).double())
            elif tensor.is_floating_point():
                doubles.append(tensor.double())
        return doubles


def _narrowest_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of the parameters with the fewest digits."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def _float(tensor: Tensor) -> Tensor:
    return tensor.detach().float() if tensor.dtype in HALVES else tensor


def _largest_errors(
    samples: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]
) -> list[float]:
    """Return the largest error of each output over the samples."""
    errors = map(relative_errors, samples, exact)
    return [max(column) for column in itertools.zip_longest(*errors, fillvalue=0.0)]


def _are_comparable(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().any()) for tensor in tensors if tensor.numel())


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
