"""Values and gradients of the Triton kernels, in its interpreter or on a GPU; run by test_triton.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from dynorm.kernels import _triton
from dynorm.kernels._form import Form, Parameters
from tests.kernels.definition import (
    CASES,
    FUNCTIONS,
    INF,
    NAN,
    TOLERANCES,
    compare,
    kinds_of,
    make,
    results_of,
)

DYISRU, DYT, DERF, LINEAR = FUNCTIONS
# One or the other for the whole process: Triton asks when it is first imported.
if not _triton.interpreted() and torch.cuda.is_available():
    torch.set_default_device("cuda")


# Less than a tile, more than a tile each way, and a size of 1.
SHAPES = [(7, 33), (40, 200), (1, 1), (600, 3), (0, 5)]


# Every function meets every kind and dtype, and every kind every dtype.
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_values_and_gradients_are_those_of_the_definition(function: int, place: int) -> None:
    dtype = list(TOLERANCES)[(function + place) % len(TOLERANCES)]
    # No rows, and a block of few columns, meet all parameters and numbers of tokens.
    kinds = kinds_of(function)
    call = make(*SHAPES[place], dtype, kinds[min(place, len(kinds) - 1)], function)
    compare(_triton, Form(function, False, 1.7), call)


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_every_kind_of_parameters(function: int, kind: str) -> None:
    compare(_triton, Form(function, False, 0.3), make(7, 33, torch.float64, kind, function))


@pytest.mark.parametrize(
    ("function", "kind"), [case for case in CASES if case[0] in (DYISRU, LINEAR)]
)
def test_gradients_are_those_of_the_parameters_as_stored(function: int, kind: str) -> None:
    compare(_triton, Form(function, True, 1.7), make(7, 33, torch.float64, kind, function))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("function", "total"),
    [*((function, None) for function in FUNCTIONS), (DYISRU, 0.0), (DYISRU, 3.0)],
)
def test_infinities_and_nan_are_those_of_the_definition(
    function: int, dtype: torch.dtype, total: float | None
) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor([[INF], [-INF], [NAN], [large], [-large], [0.0], [-0.0]], dtype=dtype)
    parameters = Parameters(torch.tensor([2.0], dtype=dtype))
    token_constant = None if total is None else torch.full((7,), total, dtype=dtype)
    form, needed = Form(function, False, 1.5), (True,) + (False,) * 5
    with np.errstate(all="ignore"):
        y = _triton.forward(form, x, parameters, token_constant)
        grad = torch.ones_like(x)
        got = _triton.gradients(form, grad, x, parameters, token_constant, needed)[0]
    leaf = x.clone().requires_grad_()
    expected = form.definition(leaf, parameters, token_constant)
    expected.sum().backward()
    assert_close(y, expected.detach(), equal_nan=True)
    assert torch.equal(y.signbit()[-2:], expected.signbit()[-2:])
    assert_close(got, leaf.grad, equal_nan=True)


def test_an_infinite_number_of_a_token_leaves_nothing_of_it() -> None:
    call = make(3, 40, torch.float32, "bare of tokens", DYISRU)
    assert call.token_constant is not None
    call.token_constant[1] = INF
    with np.errstate(all="ignore"):
        y, grad_x, *_ = results_of(_triton, Form(DYISRU, False, 1.0), call)
    for result in (y, grad_x):
        assert result is not None
        assert result[1].abs().max() < 1e-15
        assert result[[0, 2]].abs().max() > 0.1


def test_a_constant_that_underflows_has_no_gradient() -> None:
    """In a tile with fewer channels than columns the others must not divide 0 by 0."""
    call = make(9, 33, torch.float32, "bare", DYISRU)
    call = call._replace(parameters=Parameters(torch.tensor([-110.0])))
    with np.errstate(all="ignore"):
        _, _, of_constant, *_ = results_of(_triton, Form(DYISRU, True, 1.0), call)
    assert of_constant is not None
    assert of_constant.abs() < 1e-30


@pytest.mark.parametrize("programs", [1, 5, 1024])
def test_sums_of_many_chunks_are_whole_and_the_same_every_time(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_RESIDENT", programs)
    call, form = make(170, 80, torch.float32, "all", DYISRU), Form(DYISRU, False, 1.0)
    compare(_triton, form, call)
    for got, again in zip(
        results_of(_triton, form, call), results_of(_triton, form, call), strict=True
    ):
        assert got is again is None or torch.equal(got, again)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_added_and_its_gradient_too(dtype: torch.dtype) -> None:
    call, form = make(7, 80, dtype, "all", DYISRU), Form(DYISRU, True, 1.7)
    residual, grad_total = torch.randn(2, 7, 80).to(dtype)
    total = torch.empty_like(call.x)
    y = _triton.forward(form, call.x, call.parameters, residual=residual, total=total)
    assert_close(total, call.x + residual)
    assert torch.equal(y, _triton.forward(form, total, call.parameters))
    arguments = (form, call.grad, total, call.parameters, None, (True,) * 6)
    plain = _triton.gradients(*arguments)
    found = _triton.gradients(*arguments, grad_total)
    assert plain[0] is not None
    tolerance = 4 * TOLERANCES[dtype]
    assert_close(found[0], plain[0] + grad_total, rtol=tolerance, atol=tolerance)
    for got, want in zip(found[1:], plain[1:], strict=True):
        assert got is want is None or torch.equal(got, want)  # type: ignore[arg-type]


def test_output_may_be_the_input() -> None:
    call, form = make(7, 1100, torch.float32, "all of tokens", DYISRU), Form(DYISRU, False, 1.0)
    expected = _triton.forward(form, call.x, call.parameters, call.token_constant)
    assert _triton.forward(form, call.x, call.parameters, call.token_constant, out=call.x) is call.x
    assert torch.equal(call.x, expected)


def test_the_kernels_are_available() -> None:
    assert _triton.available()
