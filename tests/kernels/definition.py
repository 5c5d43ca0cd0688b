"""The C++ kernels beside the definition in float64: parameters of any kind, and the comparison of all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dynorm.kernels import _cpu
from dynorm.kernels._dispatch import plain
from dynorm.kernels._form import Form, FunctionCode, Parameters

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
INF, NAN = float("inf"), float("nan")


def every_pair(rows: Iterable[Any], columns: Iterable[Any], cases: Sequence[Any]) -> list[Any]:
    """Return parameters (row, column, case) that contain every pair of two values, but not every triple.

    Rows and columns have the same number of values, such as four functions and four dtypes, and
    there are at least as many cases.
    """
    rows, columns = list(rows), list(columns)
    size = len(rows)
    assert size == len(columns) <= len(cases)
    chosen = []
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            for k, case in enumerate(cases):
                # One column for each row and case, and one row for each column and case.
                if (i + j + k) % size == 0:
                    label = "-".join(_label(value) for value in (row, column, case))
                    chosen.append(pytest.param(row, column, case, id=label))
    return chosen


def _label(value: object) -> str:
    if isinstance(value, FunctionCode):
        return value.name.lower()
    if isinstance(value, type):
        return value.__name__
    return str(value)


def functions_and_dtypes(cases: Sequence[Any]) -> list[Any]:
    """Return parameters (function, dtype, case) that contain every pair of two values."""
    return every_pair(FunctionCode, TOLERANCES, cases)


def make(
    channels: int,
    dtype: torch.dtype,
    *,
    per_channel: bool,
    everything: bool,
    parameter_dtype: torch.dtype | None = None,
) -> Parameters:
    def randn(size: int) -> Tensor:
        return torch.randn(size).to(parameter_dtype or dtype)

    constants = channels if per_channel else 1
    constant = randn(constants).abs() + 0.3
    if not everything:
        return Parameters(constant)
    shift, center = 0.3 * randn(constants), randn(constants)
    return Parameters(constant, shift, center, randn(channels), randn(channels))


def compare(form: Form, x: Tensor, parameters: Parameters, tolerance: float) -> None:
    """Value and all gradients against the definition in float64; outputs begin as NaN, so that none is left out."""
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, *parameters)]
    want = plain(form, wide[0], Parameters(*wide[1:]))
    out = torch.full_like(x, NAN)
    y = _cpu.forward(form, x, parameters, out)
    assert y is out
    assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
    grad = torch.randn(x.shape).to(x.dtype)
    leaves = [t for t in wide if t is not None]
    expected = iter(torch.autograd.grad(want, leaves, grad.double(), materialize_grads=True))
    found = _cpu.gradients(form, grad, x, parameters, (True,) * (1 + len(parameters)))
    size = max(
        1.0,
        (x.numel() / form.channels) ** 0.5,
        x.numel() ** 0.5 if parameters[0].numel() == 1 else 1.0,
    )
    for given, exact, got in zip((x, *parameters), wide, found, strict=True):
        if given is None:
            assert got is None
            continue
        assert exact is not None
        assert got is not None
        assert got.dtype == given.dtype
        atol = tolerance * (4 if got.shape == x.shape else 4 * size)
        assert_close(got.double(), next(expected), rtol=4 * tolerance, atol=atol)


def with_gains(parameters: Parameters, count: int) -> Parameters:
    log_gain = (0.5 * torch.randn(count)).to(parameters.constant.dtype)
    return parameters._replace(log_gain=log_gain)


def require_same_for_all_threads(run: Callable[[], Sequence[Tensor | None]]) -> None:
    """Run with several numbers of threads; all results must have the same bits."""
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got is not None
            assert want is not None
            assert torch.equal(got, want)


def require_same_whatever_is_wanted(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters
) -> None:
    """Ask for every choice of the gradients; each must be there or not, and equal that of all."""
    all_of_them = _cpu.gradients(form, grad, x, parameters, (True,) * 7)
    for needed in itertools.product((False, True), repeat=7):
        results = _cpu.gradients(form, grad, x, parameters, needed)
        for got, want, need in zip(results, all_of_them, needed, strict=True):
            assert (got is not None) == need
            # A gradient that is not stored may be added without being rounded.
            if got is not None:
                assert_close(got, want, rtol=1e-6, atol=1e-5)


def infinite_witnesses(
    function: int, dtype: torch.dtype, count: int, sign: str
) -> tuple[Form, Tensor, Parameters]:
    """Rows with 1, 2, 5, 16, 17 and all witnesses infinite, each followed by an ordinary row.

    In the last two rows numbers whose squares overflow are next to an infinity.
    """
    channels = 40
    form = Form(function, False, 2.0, channels, 1, tuple(torch.randperm(channels)[:count].tolist()))
    infinities = [n for n in (1, 2, 5, 16, 17) if n < count] + [count]
    x = torch.randn(2 * len(infinities) + 2, channels)
    signs = {
        "plus": torch.ones(count),
        "minus": -torch.ones(count),
        "both": 1 - 2 * (torch.arange(count) % 2),
    }[sign]
    for row, number in enumerate(infinities):
        x[2 * row, list(form.witnesses[:number])] = INF * signs[:number]
    # Perhaps in a channel that is not a witness.
    x[0, (form.witnesses[0] + 1) % channels] = INF
    large = 1e19 if dtype != torch.float64 else 1e154
    wide = x.double()
    wide[-2:, form.witnesses[0]] = INF
    wide[-2:, form.witnesses[-1]] = torch.tensor([large / 3, -large / 2], dtype=torch.float64)
    if dtype == torch.float16:
        wide[-2:, form.witnesses[-1]] = torch.finfo(dtype).max
    parameters = Parameters(
        torch.rand(channels) + 0.5,
        shift=0.3 * torch.randn(channels) if function == FunctionCode.DERF else None,
        weight=torch.randn(channels),
        log_gain=torch.randn(count),
    )
    narrow = [None if p is None else p.to(dtype) for p in parameters]
    return form, wide.to(dtype), Parameters(*narrow)  # type: ignore[arg-type]


def compare_where_infinite(
    kernels: Any, form: Form, x: Tensor, parameters: Parameters, tolerance: float
) -> None:
    """Value and all gradients of ``kernels``, a module, against the definition in the dtype of x."""
    tensors: list[Any] = []
    for tensor in (x, *parameters):
        tensors.append(None if tensor is None else tensor.clone().requires_grad_())
    want = plain(form, tensors[0], Parameters(*tensors[1:]))
    y = kernels.forward(form, x, parameters)
    assert_close(y, want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
    grad = torch.randn(x.shape).to(x.dtype)
    want.backward(grad)
    results = kernels.gradients(form, grad, x, parameters, (True,) * 7)
    for name, got, tensor in zip(("x", *Parameters._fields), results, tensors, strict=True):
        if tensor is None:
            continue
        assert got is not None
        size = max(1.0, float(tensor.grad.abs().max()))
        assert_close(
            got,
            tensor.grad,
            rtol=8 * tolerance,
            atol=8 * tolerance * size,
            msg=lambda message, name=name: f"{name}: {message}",
        )
