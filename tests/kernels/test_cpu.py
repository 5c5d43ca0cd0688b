"""The C++ kernels against the definition: every dtype, size and instruction set; edges, accuracy, threads."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from dynorm.kernels import _cpu
from dynorm.kernels._form import Form, FunctionCode, Parameters
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

pytestmark = pytest.mark.skipif(
    _cpu.name() == "torch", reason="the CPU kernels are not built: make setup"
)
DYISRU, DYT, DERF, LINEAR = FUNCTIONS
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda code: code.name.lower())


@each_function
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_values_and_gradients(instructions: str, function: int, dtype: torch.dtype) -> None:
    # Each two of a kind, a number of channels and a number of rows meet.
    sizes = (1, 3, 16, 33, 200)
    kinds = kinds_of(function)
    for i, j in itertools.product(range(len(kinds)), range(len(sizes))):
        rows = (0, 1, 5, 37)[(i + j) % 4]
        form = Form(function, False, -1.7)
        compare(_cpu, form, make(rows, sizes[j], dtype, kinds[i], function))


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_many_rows_and_long_ones(function: int, kind: str) -> None:
    for rows, channels in ((300, 500), (9, 8200)):
        compare(
            _cpu, Form(function, False, 0.8), make(rows, channels, torch.float32, kind, function)
        )


@pytest.mark.parametrize(
    ("function", "kind"), [case for case in CASES if case[0] in (DYISRU, LINEAR)]
)
@pytest.mark.parametrize("log_beta", [0.0, -30.0, 40.0])
def test_logarithmic_constants(
    instructions: str, function: int, kind: str, log_beta: float
) -> None:
    call = make(20, 48, torch.float32, kind, function)
    constant = call.parameters.constant + log_beta
    width = float(torch.tensor(log_beta / 2).exp())
    parameters = call.parameters._replace(constant=constant)
    token_constant = None if call.token_constant is None else width**2 * call.token_constant
    call = call._replace(x=width * call.x, parameters=parameters, token_constant=token_constant)
    y, grad_x, *_ = results_of(_cpu, Form(function, True, 3.0), call)
    wide = call._replace(
        x=call.x.double(),
        parameters=Parameters(*(None if p is None else p.double() for p in parameters)),
        grad=call.grad.double(),
        token_constant=None if token_constant is None else token_constant.double(),
    )
    exact_y, exact_x, *_ = results_of(_cpu, Form(function, True, 3.0), wide)
    compare(_cpu, Form(function, True, 3.0), wide) if log_beta == 0 else None
    for got, want in ((y, exact_y), (grad_x, exact_x)):
        assert got is not None
        assert want is not None
        assert_close(got.double(), want, rtol=1e-4, atol=2e-5 * float(want.abs().max()))


@each_function
@pytest.mark.parametrize("parameter_dtype", TOLERANCES, ids=str)
def test_parameters_of_another_dtype(function: int, parameter_dtype: torch.dtype) -> None:
    call = make(9, 33, torch.float32, "all", function)
    narrow = [None if p is None else p.to(parameter_dtype) for p in call.parameters]
    call = call._replace(parameters=Parameters(*narrow))  # type: ignore[arg-type]
    same = call._replace(parameters=Parameters(*(None if p is None else p.float() for p in narrow)))  # type: ignore[arg-type]
    form = Form(function, False, 1.5)
    for got, want in zip(results_of(_cpu, form, call), results_of(_cpu, form, same), strict=True):
        if want is not None:
            assert got is not None
            assert_close(got, want.to(got.dtype), rtol=1e-6, atol=1e-6)


@each_function
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_edges_are_the_definition_s(instructions: str, function: int, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, INF, -INF, NAN, info.max, -info.max, info.tiny, -info.tiny / 4, 1.0, -1.0]
    # Repeated, so that they meet every lane of whole vectors and of the rest.
    x = torch.tensor([edges * 8], dtype=torch.float64).to(dtype)[:, :83]
    totals = (None, 0.0, 3.0) if function == DYISRU else (None,)
    for constant, total in itertools.product((1.0, 1e-3), totals):
        form = Form(function, False, 2.0)
        parameters = Parameters(torch.tensor([constant], dtype=dtype))
        token_constant = None if total is None else torch.tensor([total])
        leaf = x.clone().requires_grad_()
        want = form.definition(leaf, parameters, token_constant)
        y = _cpu.forward(form, x, parameters, token_constant)
        smallest = 2 * info.tiny * info.eps
        assert_close(y, want.detach(), rtol=TOLERANCES[dtype], atol=smallest, equal_nan=True)
        # The sign of a zero too; Derf's shift of 0 makes it positive.
        zero = (x == 0) & (torch.tensor(function) != DERF)
        assert torch.equal(y[zero].signbit(), want[zero].signbit())
        grad = torch.ones_like(x)
        (slope,) = torch.autograd.grad(want, leaf, grad)
        needed = (True,) + (False,) * 5
        got = _cpu.gradients(form, grad, x, parameters, token_constant, needed)[0]
        assert_close(got, slope, rtol=4 * TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True)


@pytest.mark.parametrize(("function", "kind"), [case for case in CASES if case[0] != LINEAR])
def test_infinite_ones_add_nothing_to_the_constants(
    instructions: str, function: int, kind: str
) -> None:
    """Where the function is at its bound nothing moves it, however far out."""
    call = make(37, 20, torch.float32, kind, function)
    call.x[3], call.x[36] = INF, -INF
    grad = call.grad.clone()
    grad[3] = grad[36] = 0
    found = results_of(_cpu, Form(function, False, 1.5), call)
    finite = call.x.nan_to_num(0, 0, 0)
    want = results_of(_cpu, Form(function, False, 1.5), call._replace(x=finite, grad=grad))
    assert found[1] is not None
    assert not found[1][[3, 36]].any()
    # Constant and shift.
    for a, b in zip(found[2:4], want[2:4], strict=True):
        if b is not None:
            assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("total", [INF, NAN, 1e38, 0.0])
def test_numbers_of_tokens_at_the_edge_change_no_other_token(
    instructions: str, total: float
) -> None:
    call, form = make(6, 40, torch.float32, "bare of tokens", DYISRU), Form(DYISRU, False, 1.0)
    assert call.token_constant is not None
    changed = call.token_constant.clone()
    changed[2] = total
    y, grad_x, *_, of_tokens = results_of(_cpu, form, call)
    found = results_of(_cpu, form, call._replace(token_constant=changed))
    others = torch.arange(6) != 2
    for got, want in zip((found[0], found[1], found[-1]), (y, grad_x, of_tokens), strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got[others], want[others])
        if total == INF or total == 1e38:
            assert_close(got[2], torch.zeros_like(got[2]), rtol=0, atol=1e-15)
        else:
            assert bool(got[2].isnan().all()) == (total != total)


@pytest.mark.parametrize("huge", [5e18, -1.7e19, 3e38, -INF, NAN])
def test_one_that_is_huge_changes_no_other(instructions: str, huge: float) -> None:
    """A square that overflows is found among several vectors; those next to it do not change."""
    call = make(5, 83, torch.float32, "all", DYISRU)
    form = Form(DYISRU, False, 1.0)
    alone = results_of(_cpu, form, call)[:2]
    for place in range(0, call.x.numel(), 23):
        with_it = call.x.clone()
        with_it.view(-1)[place] = huge
        others = torch.arange(with_it.numel()) != place
        found = results_of(_cpu, form, call._replace(x=with_it))[:2]
        for got, want in zip(found, alone, strict=True):
            assert got is not None
            assert want is not None
            assert torch.equal(got.view(-1)[others], want.view(-1)[others])


@pytest.mark.parametrize("exponent", [40, 61, 80, 99])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_slopes_of_large_constants(instructions: str, exponent: int, size: float) -> None:
    """The slope without its constant is a cube that float32 cannot hold."""
    beta = 2.0**exponent
    x, grad = torch.randn(7, 48) * beta**0.5, size * torch.randn(7, 48)
    exact = grad.double() * beta / (beta + x.double() ** 2) ** 1.5
    # As the constant of the layer, and as the number of a token.
    for constant, total in ((beta, None), (1.0, torch.full((7,), beta))):
        parameters = Parameters(torch.tensor([constant]))
        found = _cpu.gradients(
            Form(DYISRU, False, 1.0), grad, x, parameters, total, (True,) + (False,) * 5
        )
        assert found[0] is not None
        assert_close(found[0].double(), exact, rtol=1e-5, atol=float(exact.abs().max()) * 1e-6)


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_what_is_wanted_changes_no_other(function: int, kind: str) -> None:
    call, form = make(23, 48, torch.float32, kind, function), Form(function, False, 1.3)
    everything = results_of(_cpu, form, call)[1:]
    arguments = (form, call.grad, call.x, call.parameters, call.token_constant)
    for needed in itertools.product((False, True), repeat=6):
        results = _cpu.gradients(*arguments, needed)
        for got, want, need in zip(results, everything, needed, strict=True):
            assert (got is not None) == (need and want is not None)
            if got is not None:
                assert torch.equal(got, want)  # type: ignore[arg-type]


@pytest.mark.parametrize(("function", "kind"), CASES)
def test_threads_change_nothing(function: int, kind: str) -> None:
    call, before = make(700, 384, torch.float32, kind, function), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(results_of(_cpu, Form(function, False, 1.0), call))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got is want is None or torch.equal(got, want)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_an_output_larger_than_the_cache_has_the_values_of_its_parts(
    instructions: str, dtype: torch.dtype
) -> None:
    x = torch.randn((20 << 20) // (512 * dtype.itemsize), 512).to(dtype)
    form, parameters = Form(DYISRU, False, 1.5), Parameters(torch.ones(1))
    parts = [_cpu.forward(form, part, parameters) for part in x.split(1000)]
    assert torch.equal(_cpu.forward(form, x, parameters), torch.cat(parts))


def test_sums_are_as_exact_as_float64_ones() -> None:
    # A million equal numbers in float32 would be off by parts in a thousand.
    x, grad = torch.ones(1_000_000, 3), torch.full((1_000_000, 3), 0.1)
    parameters = Parameters(torch.ones(1), bias=torch.zeros(3))
    needed = (False,) * 4 + (True, False)
    found = _cpu.gradients(Form(LINEAR, False, 1.0), grad, x, parameters, None, needed)
    assert_close(found[4], torch.full((3,), 1e5), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_read_and_rounded_as_torch_does(
    instructions: str, dtype: torch.dtype
) -> None:
    # Every value of the dtype; a product with thirds needs rounding, upwards and downwards, to
    # denormals, and past the largest number.
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(1, -1).view(dtype)
    for factor in (1.0, 1 / 3, 1.0009765625, 1.00390625, 1.5):
        y = _cpu.forward(Form(LINEAR, False, 1.0), x, Parameters(torch.tensor([factor])))
        exact = (x.float() * torch.tensor(factor)).to(dtype)
        assert_close(y, exact, rtol=0, atol=0, equal_nan=True)


# This is every 4099th float.
@pytest.mark.parametrize(
    ("function", "constant", "limit"),
    [
        (DYISRU, 1.0, 1.1),
        (DYISRU, 384.0, 1.1),
        (DYISRU, 3e-30, 1.1),
        (DYISRU, 1e35, 1.1),
        (DYT, 1.0, 2.1),
        (DERF, 1.0, 2.6),
    ],
)
def test_accuracy(instructions: str, function: int, constant: float, limit: float) -> None:
    x = torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()].reshape(1, -1)
    y = _cpu.forward(Form(function, False, 1.0), x, Parameters(torch.tensor([constant])))
    wide = x.double()
    beta = torch.tensor(constant).double()
    exact = {
        DYISRU: lambda: wide / (beta + wide * wide).sqrt(),
        DYT: wide.tanh,
        DERF: wide.erf,
    }[FunctionCode(function)]()
    size = exact.float().abs()
    unit = torch.nextafter(size, torch.full_like(size, INF)).double() - size.double()
    assert float(((y.double() - exact).abs() / unit).max()) <= limit
    assert y.abs().max() <= 1


def test_wrong_calls_are_refused_before_memory_is_touched() -> None:
    native: Any = _cpu._native()
    x, constant = torch.zeros(5, 2), torch.ones(1)
    absent = (None,) * 4
    assert native.forward(x, constant, *absent, 0, False, 1.0, x)
    assert not native.forward(x, constant, *absent, 9, False, 1.0, x)
    assert not native.forward(x, None, *absent, 0, False, 1.0, x)
    tokens = torch.ones(5)
    assert native.forward(x, constant, *absent[1:], tokens, 0, False, 1.0, x)
    assert not native.forward(x, constant, *absent[1:], tokens, 1, False, 1.0, x)
    assert not native.forward(x, constant, *absent, 0, False, 1.0, torch.zeros(2, 5))
    assert not native.forward(x, constant, *absent, 0, False, 1.0, x.double())
    with pytest.raises(TypeError, match="arguments"):
        native.forward(x)
    with pytest.raises(TypeError, match="number"):
        native.forward(x, constant, *absent, 0, False, "scale", x)
    with pytest.raises(ValueError, match="no instruction set"):
        native.choose("cpu-quantum")
