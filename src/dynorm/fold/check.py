"""Proof by numbers: the outputs before and after, on the example and on inputs that the model has not seen."""

import copy
import enum
import gc
import itertools
import math
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynorm.errors import DataError, DynormError, ModelError
from dynorm.guard import undisturbed

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_Value = TypeVar("_Value")
# These hold no tensor that a model computes.
_EMPTY = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        type,
        range,
        slice,
        enum.Enum,
        re.Pattern,
    ),
    *(
        np.generic,
        np.dtype,
        nn.Module,
        types.ModuleType,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
    *(torch.Generator, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Stream, torch.Event),
)
# The flag of a class whose objects show the garbage collector all that they refer to.
_SHOWS_ITS_PARTS = 1 << 14

_HALVES = (torch.float16, torch.bfloat16)
# The folded weights are rounded once more than the original's: sqrt(2) of its noise, and room.
_NOISE = 2.0
# Of one output alone, which may have a few numbers only.
_NOISE_OF_ONE = 4.0
# Beyond this noise a wrong fold could hide.
_LARGEST_NOISE = 0.1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Wide(TorchFunctionMode):
    """Widen a float64 model's own casts to float32, as in norms, softmax and rotations, to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Check:
    """A model's outputs for the example and for fresh inputs, to compare later ones with; the tolerance is by dtype."""

    def __init__(self, model: nn.Module, example: Inputs, tolerance: float | None = None) -> None:
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        # The narrowest.
        self.dtype = min(
            dtypes, key=lambda d: (torch.finfo(d).bits, -torch.finfo(d).eps), default=torch.float32
        )
        self.inputs = [copied(example)]
        self._before = [self._of_example(model)]
        # Two fresh inputs; a model may take none but the example.
        for seed in (1, 2):
            self._add_fresh(model, seed)
        self.fresh = len(self.inputs) - 1
        self.noise: float | None = None
        self._noises: list[float] = []
        if self.dtype in _HALVES:
            self._widen(model, tolerance)
        self._given = tolerance
        exact = 1e-12 if self.dtype == torch.float64 else 1e-5
        usual = exact if self.noise is None else _NOISE * self.noise
        self.tolerance = usual if tolerance is None else tolerance

    def errors(self, model: nn.Module) -> list[float]:
        """Return the largest relative error of each output now."""
        return _largest(
            [
                _errors(self._outputs(model, x), y)
                for x, y in zip(self.inputs, self._before, strict=True)
            ]
        )

    def require_same(self, model: nn.Module) -> float:
        """Return the error, if it is allowed, and, in half precision, no output's is far beyond that output's noise."""
        each = self.errors(model)
        error = max(each, default=0.0)
        excess = error if not error <= self.tolerance else None
        if self._given is None:
            room = 2 * torch.finfo(self.dtype).eps
            pairs = itertools.zip_longest(each, self._noises, fillvalue=0.0) if self._noises else ()
            excess = next(
                (e for e, noise in pairs if not e <= max(_NOISE_OF_ONE * noise, room)), excess
            )
        if excess is not None:
            raise ModelError(
                f"the folded model's outputs must be the original's to {self.tolerance:.1e}, but "
                "differ by "
                f"{excess:.1e} on {'fresh random inputs' if self.fresh else 'the example'}; "
                "everything was put back. A "
                "branch that the example does not take may read a norm, an operator may write into "
                "it in place, or "
                "rounding needs a larger tolerance=; only= and skip= help to find the site"
            )
        return error

    def _of_example(self, model: nn.Module) -> list[Tensor]:
        try:
            found = self._outputs(model, self.inputs[0])
        except DynormError:
            raise
        except Exception as error:
            raise DataError(
                "the model must run on a copy of the example, to be checked, but it raised "
                f"{type(error).__name__}: {error}; check=False does without"
            ) from error
        if not any(tensor.numel() for tensor in found):
            raise DataError(
                "the model must return floating-point tensors to be checked, but its outputs hold "
                "none"
            )
        if not _all_comparable(found):
            raise DataError(
                "the model's outputs must hold finite numbers to be checked, but for the example "
                "one is all NaN or "
                "infinite: pass another example"
            )
        return found

    def _add_fresh(self, model: nn.Module, seed: int) -> None:
        """Add the first inputs that the model takes: all random, or with integers or constants as in the example."""
        example = self.inputs[0]
        for integers, constants in itertools.product((True, False), (True, False)):
            inputs = fresh(example, seed, integers, constants)
            # Layouts other than plain ones are never drawn anew.
            pairs = zip(held_tensors(inputs), held_tensors(example), strict=True)
            plain = [(a, b) for a, b in pairs if a.layout == torch.strided and not a.is_nested]
            if all(a.nan_to_num().equal(b.nan_to_num()) for a, b in plain):
                continue
            try:
                outputs = self._outputs(model, inputs)
            # Random numbers may be no input of this model: a token that marks an image, a range
            # that it checks.
            except Exception:
                continue
            whole, whole_before = (
                all(bool(y.isfinite().all()) for y in ys) for ys in (outputs, self._before[0])
            )
            if _all_comparable(outputs) and (whole or not whole_before):
                self.inputs.append(inputs)
                self._before.append(outputs)
                return

    def _widen(self, model: nn.Module, tolerance: float | None) -> None:
        """Take the float32 outputs for the truth, and the model's own distance from them for its noise."""
        try:
            exact = copy.deepcopy(model).float()
            inputs = [
                mapped(x, lambda t: t.detach().float() if t.dtype in _HALVES else t)
                for x in self.inputs
            ]
            wide = [self._outputs(exact, x) for x in inputs]
        except Exception as error:
            if tolerance is not None:
                # The half-precision outputs stay those to compare with.
                return
            raise ModelError(
                "the model must have a float32 copy that runs, from which its own rounding error "
                "is measured, but that "
                f"raised {type(error).__name__}: {error}; pass tolerance= to compare in half "
                "precision"
            ) from error
        self._noises = _largest([_errors(a, b) for a, b in zip(self._before, wide, strict=True)])
        self.noise = max(self._noises)
        if tolerance is None and not self.noise <= _LARGEST_NOISE:
            raise ModelError(
                f"the model's outputs must be within {_LARGEST_NOISE} of its float32 copy's for a "
                "check in half "
                f"precision to mean something, but differ by {self.noise:.1e}: fold it in float32 "
                "and cast it then, or "
                "pass tolerance="
            )
        self._before = wide

    def _outputs(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:
        wide = Wide() if self.dtype == torch.float64 else nullcontext()
        with undisturbed(model, inputs, attributes=True), wide:
            torch.manual_seed(0)
            args, kwargs = copied(inputs)
            found = [tensor.detach().clone() for tensor in tensors_in(model(*args, **kwargs))]
            # A layer that is gone gives its input on: an operator in place would write into what
            # the caller holds.
            given = [
                t
                for t in (*args, *kwargs.values())
                if isinstance(t, Tensor) and t.layout == torch.strided
            ]
            found += [t.nan_to_num() for t in given if found and not t.is_nested]
        outputs = []
        for tensor in (
            tensor for tensor in found if tensor.is_floating_point() or tensor.is_complex()
        ):
            # Of any layout, as one dense float64 tensor.
            dense = torch.nested.to_padded_tensor(tensor, 0.0) if tensor.is_nested else tensor
            dense = dense.to_dense() if dense.layout != torch.strided else dense
            outputs.append(
                (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()
            )
        return outputs


def relative_error(given: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest of |given - exact| / |exact| over several tensors, in the Euclidean norm."""
    return max(_errors(given, exact), default=0.0)


def _errors(given: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    if [t.shape for t in given] != [t.shape for t in exact]:
        return [math.inf]
    errors = []
    for a, b in zip(given, exact, strict=True):
        # What is infinite or no number in one must be the same in the other, else the error is
        # infinite.
        finite = b.isfinite()
        same = torch.equal(finite, a.isfinite()) and torch.equal(
            a[~finite].nan_to_num(), b[~finite].nan_to_num()
        )
        size, error = (
            float(b[finite].norm()),
            float((a[finite] - b[finite]).norm()) if same else math.inf,
        )
        errors.append(error / size if size else (math.inf if error else 0.0))
    return errors


def _largest(errors: Sequence[Sequence[float]]) -> list[float]:
    """Return the largest error of each output over the samples."""
    return [max(column) for column in itertools.zip_longest(*errors, fillvalue=0.0)]


def _all_comparable(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().any()) for tensor in tensors if tensor.numel())


def fresh(inputs: Inputs, seed: int, integers: bool = True, constants: bool = True) -> Inputs:
    """Return random inputs like an example; without ``integers`` or ``constants`` these tensors stay as they are."""
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def renewed(value: Tensor) -> Tensor:
        same = value.detach().clone()
        if (
            value.is_nested
            or value.layout != torch.strided
            or value.is_quantized
            or not value.numel()
        ):
            return same
        if value.is_floating_point():
            return _renewed_floats(same, generator, constants).to(value.device, value.dtype)
        low, high = (
            (int(value.min()), int(value.max()))
            if integers and value.dtype in _INTEGERS
            else (0, 1)
        )
        # Zeros and ones are a mask.
        if low >= 0 and high <= 1:
            return same
        return torch.randint(low, high + 1, value.shape, generator=generator, device="cpu").to(
            value.device, value.dtype
        )

    return mapped(inputs, renewed)


def _renewed_floats(value: Tensor, generator: torch.Generator, constants: bool) -> Tensor:
    wide = value.to("cpu", torch.float64)
    low, high = float(wide.min()), float(wide.max())
    # A mask of zeros and minus infinities is no activation.
    if not bool(wide.isfinite().all()) or (low == high and not constants):
        return value
    if low < high and low < 0:
        return wide.mean() + wide.std() * torch.randn(
            wide.shape, generator=generator, dtype=torch.float64, device="cpu"
        )
    if low == high == 0:
        return torch.randn(wide.shape, generator=generator, dtype=torch.float64, device="cpu")
    # What has one sign may need it, as under a logarithm.
    low, high = (low, high) if low < high else (0.5 * low, 1.5 * high)
    return low + (high - low) * torch.rand(
        wide.shape, generator=generator, dtype=torch.float64, device="cpu"
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, plain objects, functions and arrays, once each, in order; refuse others."""
    for part in _walk(value, {}):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, np.ndarray) and part.dtype.kind in "biufc":
            yield torch.from_numpy(part)
        elif not isinstance(part, np.ndarray) or part.dtype.kind not in "SUmM":
            raise ModelError(
                "the outputs must be tensors in tuples, lists, dicts, sets or plain objects, but "
                "hold a "
                f"{type(part).__qualname__}, in which tensors cannot be seen: return one of these "
                "instead"
            )


def held_tensors(value: Any) -> list[Tensor]:
    """Return the tensors that can be seen, each once, whatever else there is."""
    return [part for part in _walk(value, {}) if isinstance(part, Tensor)]


def mapped(value: _Value, function: Callable[[Tensor], Tensor]) -> _Value:
    """Return a deep copy in which a function has replaced each tensor; classes and aliases are kept."""
    memo: dict[int, Any] = {id(tensor): function(tensor) for tensor in held_tensors(value)}
    try:
        return copy.deepcopy(value, memo)
    # Classes raise what they like when they are copied.
    except Exception as error:
        raise DataError(
            "the example must be what copy.deepcopy can copy, as the model is run several times, "
            "but that raised "
            f"{type(error).__name__}: {error}"
        ) from error


def copied(value: _Value) -> _Value:
    """Return a deep copy, its tensors detached, so that a run cannot write into what the caller holds."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def run(model: nn.Module, inputs: Inputs) -> Any:
    """Call a model on a copy of its inputs; nothing of the call stays."""
    args, kwargs = copied(inputs)
    with undisturbed(model, inputs, attributes=True):
        return model(*args, **kwargs)


def _walk(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield tensors, arrays, and objects that cannot be looked into."""
    if isinstance(value, _EMPTY) or type(value) is object or id(value) in seen:
        return
    # Kept, so that no temporary's id is used twice.
    seen[id(value)] = value
    parts: list[Any] = []
    if isinstance(value, types.FunctionType):
        # Not its globals, which lead to everything.
        parts = [value.__closure__, value.__defaults__, value.__kwdefaults__]
    elif isinstance(value, weakref.ref):
        parts = [value()]
    # Looking into an iterator would use it up.
    elif (
        isinstance(value, (Tensor, np.ndarray, Iterator, memoryview))
        or not type(value).__flags__ & _SHOWS_ITS_PARTS
    ):
        yield value
    else:
        # In their own order first: the collector goes through lists and tuples from the end.
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, (tuple, list, deque)):
            parts = list(value)
        parts += gc.get_referents(value)
    for part in parts:
        yield from _walk(part, seen)
