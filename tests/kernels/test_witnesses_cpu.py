"""The C++ kernels with witnesses against the definition: every dtype, size, instruction set; edges; threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dynorm.kernels import _cpu
from dynorm.kernels._dispatch import plain
from dynorm.kernels._form import Form, FunctionCode, Parameters
from tests.kernels.definition import (
    INF,
    NAN,
    TOLERANCES,
    compare,
    compare_where_infinite,
    functions_and_dtypes,
    infinite_witnesses,
    make,
    require_same_for_all_threads,
    require_same_whatever_is_wanted,
    with_gains,
)

pytestmark = pytest.mark.skipif(
    _cpu.name() == "torch", reason="the CPU kernels are not built: make setup"
)
DYISRU, DYT, DERF, LINEAR = FunctionCode
NUMBERS = list(FunctionCode)
FUNCTIONS = [code.name.lower() for code in FunctionCode]
# In one vector, in several, in the last that is not whole; with first and last channel; out of
# order.
WITNESSES = [
    (5, (4,)),
    (16, (0, 15)),
    (33, (32, 3)),
    (100, (97, 98, 99, 5)),
    (768, (700, 5, 6, 301, 767)),
]
WITNESSES += [(1, (0,)), (3, (0, 1, 2)), (40, tuple(range(39, 23, -1)))]


@pytest.mark.parametrize(("function", "dtype", "chosen"), functions_and_dtypes(WITNESSES))
def test_values_and_gradients(
    instructions: str, function: int, dtype: torch.dtype, chosen: tuple[int, tuple[int, ...]]
) -> None:
    channels, witnesses = chosen
    for per_channel, everything, rows in itertools.product(
        (False, True), (False, True), (1, 6, 37)
    ):
        parameters = make(channels, dtype, per_channel=per_channel, everything=everything)
        form = Form(function, False, -1.7, channels, 1, witnesses)
        x = (2 * torch.randn(rows, channels)).to(dtype)
        compare(form, x, with_gains(parameters, len(witnesses)), TOLERANCES[dtype])


@pytest.mark.parametrize("function", [DYISRU, LINEAR], ids=["dyisru", "linear"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_logarithmic_constants(instructions: str, function: int, per_channel: bool) -> None:
    """Also such that the fast way does not cover."""
    parameters = with_gains(make(48, torch.float32, per_channel=per_channel, everything=True), 2)
    for log_beta in (parameters[0], parameters[0] - 60, parameters[0] + 75):
        form = Form(function, True, 3.0, 48, 1, (7, 40))
        x = torch.randn(50, 48) * max(1.0, float(log_beta.mean().exp() ** 0.5))
        compare(form, x, parameters._replace(constant=log_beta), 1e-5)


@pytest.mark.parametrize("parameter_dtype", TOLERANCES, ids=lambda d: f"parameters {d}")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: f"input {d}")
def test_mixed_dtypes(dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    parameters = make(33, dtype, per_channel=True, everything=True, parameter_dtype=parameter_dtype)
    tolerance = max(TOLERANCES[dtype], TOLERANCES[parameter_dtype])
    form, x = Form(DYISRU, False, 1.5, 33, 1, (32, 0)), torch.randn(9, 33).to(dtype)
    compare(form, x, with_gains(parameters, 2), tolerance)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("massive", [(7,), (7, 90)], ids=str)
def test_a_massive_witness(instructions: str, function: int, massive: tuple[int, ...]) -> None:
    """Ten thousand times the others: its own sum is that of the others, to the last digits."""
    parameters = with_gains(make(100, torch.float32, per_channel=True, everything=True), 3)
    x = torch.randn(37, 100)
    x[::2, list(massive)] *= 1e4
    form = Form(function, False, 10.0, 100, 1, (7, 90, 3))
    wide: list[Tensor | None] = [
        None if t is None else t.double().requires_grad_() for t in (x, *parameters)
    ]
    want = plain(form, wide[0], Parameters(*wide[1:]))  # type: ignore[arg-type]
    assert_close(_cpu.forward(form, x, parameters).double(), want, rtol=1e-5, atol=1e-6)
    grad = torch.randn(37, 100)
    found = _cpu.gradients(form, grad, x, parameters, (True,) * 7)
    leaves = [t for t in wide if t is not None]
    for got, exact in zip(
        found, torch.autograd.grad(want, leaves, grad.double(), allow_unused=True), strict=True
    ):
        if got is None or exact is None:
            continue
        # Terms of a sum cancel: what counts is its error beside their size.
        assert_close(got.double(), exact, rtol=2e-5, atol=2e-6 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize(
    ("function", "dtype", "columns"), functions_and_dtypes([(2,), (19,), (2, 19), (2, 18)])
)
def test_edges_are_the_definition_s(
    instructions: str, function: int, dtype: torch.dtype, columns: tuple[int, ...]
) -> None:
    """One edge in each row: in a witness, in another channel, in both, in two witnesses."""
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, INF, -INF, NAN, info.max, -info.max, info.tiny, 1e4]
    x = torch.randn(len(edges), 20).to(dtype)
    x[:, list(columns)] = torch.tensor(edges, dtype=torch.float64).to(dtype)[:, None]
    grad = torch.randn(x.shape).to(dtype)
    # Larger ones make the definition's sum overflow.
    constant, weight = 0.3 * torch.rand(20).to(dtype) + 0.5, torch.randn(20).to(dtype)
    parameters = Parameters(constant, weight=weight, log_gain=torch.zeros(2, dtype=dtype))
    form = Form(function, False, 2.0, 20, 1, (2, 18))
    leaf = x.clone().requires_grad_()
    want = plain(form, leaf, parameters)
    y = _cpu.forward(form, x, parameters)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype], "equal_nan": True}
    assert_close(y, want.detach(), **close)
    # The definition's clamp has a gradient of 0 at a NaN; in these rows it stays NaN.
    known = ~x.isnan().any(1)
    (slope,) = torch.autograd.grad(want, leaf, grad)
    found = _cpu.gradients(form, grad, x, parameters, (True,) + (False,) * 6)[0]
    assert found is not None
    assert found[~known].isnan().any()
    assert_close(found[known], slope[known], rtol=4 * TOLERANCES[dtype], atol=4 * TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 17, 40], ids=lambda count: f"{count} witnesses")
@pytest.mark.parametrize("sign", ["plus", "minus", "both"])
def test_any_number_of_infinite_witnesses(
    instructions: str, function: int, dtype: torch.dtype, count: int, sign: str
) -> None:
    """Few and many: equal infinities share the sum, in proportion to their gains."""
    form, x, parameters = infinite_witnesses(function, dtype, count, sign)
    compare_where_infinite(_cpu, form, x, parameters, TOLERANCES[dtype])


@pytest.mark.parametrize("count", [2, 5, 16, 17, 40])
def test_equal_infinities_share_the_sum(instructions: str, count: int) -> None:
    """``1 / sqrt(n)`` each: of n equal numbers, however large, each is that part of their size."""
    x = torch.zeros(1, 40)
    x[0, :count] = INF
    form = Form(DYISRU, False, 1.0, 40, 1, tuple(range(count)))
    y = _cpu.forward(form, x, Parameters(torch.ones(1)))
    assert_close(y[0, :count], torch.full((count,), count**-0.5))
    assert not y[0, count:].any()


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_a_row_tells_no_other_row(instructions: str, function: int, value: float) -> None:
    x, grad = torch.randn(9, 37), torch.randn(9, 37)
    parameters = with_gains(make(37, torch.float32, per_channel=True, everything=True), 2)
    form = Form(function, False, 1.0, 37, 1, (3, 36))
    others = torch.arange(9) != 4
    alone = (
        _cpu.forward(form, x, parameters),
        _cpu.gradients(form, grad, x, parameters, (True,) * 7)[0],
    )
    x[4, 36] = value
    told = (
        _cpu.forward(form, x, parameters),
        _cpu.gradients(form, grad, x, parameters, (True,) * 7)[0],
    )
    for got, want in zip(told, alone, strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_what_is_wanted_changes_no_other(function: int) -> None:
    parameters = with_gains(
        make(48, torch.float32, per_channel=function % 2 == 0, everything=True), 3
    )
    x, grad, form = (
        torch.randn(23, 48),
        torch.randn(23, 48),
        Form(function, False, 1.3, 48, 1, (47, 0, 20)),
    )
    # A row that is computed number by number.
    x[5, [47, 0]] = INF
    require_same_whatever_is_wanted(form, grad, x, parameters)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("shape", [(700, 384), (3000, 100), (40_000, 16)], ids=str)
def test_threads_change_nothing(function: int, shape: tuple[int, int]) -> None:
    parameters = with_gains(make(shape[1], torch.float32, per_channel=False, everything=True), 2)
    x, grad, form = (
        torch.randn(shape),
        torch.randn(shape),
        Form(function, False, 1.0, shape[1], 1, (5, 15)),
    )

    def run() -> list[Tensor | None]:
        return [
            _cpu.forward(form, x, parameters),
            *_cpu.gradients(form, grad, x, parameters, (True,) * 7),
        ]

    require_same_for_all_threads(run)


@pytest.mark.parametrize("function", [DYISRU, DYT, DERF], ids=["dyisru", "dyt", "derf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("channels", "witnesses"), [(1024, (0, 15, 16, 1023)), (1056, (1055, 1030, 2, 70, 0))], ids=str
)
def test_large_outputs_that_pass_by_the_caches(
    function: int, dtype: torch.dtype, channels: int, witnesses: tuple[int, ...]
) -> None:
    """Where a line is written once: the second way ends in a vector that is not written past the caches."""
    x = torch.randn(8300, channels).to(dtype)
    # A row that is computed number by number.
    x[4050, witnesses[0]] = INF
    parameters = with_gains(
        make(channels, torch.float32, per_channel=True, everything=True), len(witnesses)
    )
    form = Form(function, False, 1.0, channels, 1, witnesses)
    y = _cpu.forward(form, x, parameters)
    assert torch.equal(y[4000:4100], _cpu.forward(form, x[4000:4100].contiguous(), parameters))
    in_place = _cpu.forward(form, x, parameters, x)
    assert torch.equal(in_place, y)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_no_rows(function: int) -> None:
    parameters = with_gains(make(8, torch.float32, per_channel=True, everything=True), 2)
    form, x = Form(function, False, 1.0, 8, 1, (1, 7)), torch.empty(0, 8)
    assert _cpu.forward(form, x, parameters).shape == (0, 8)
    found = _cpu.gradients(form, x, x, parameters, (True,) * 7)
    for got, like in zip(found, (x, *parameters), strict=True):
        assert like is not None
        assert_close(got, torch.zeros_like(like))


def test_without_gains_they_are_one() -> None:
    x, five = torch.randn(6, 20), make(20, torch.float32, per_channel=False, everything=True)
    form = Form(DYISRU, False, 1.0, 20, 1, (3, 4))
    one = _cpu.forward(form, x, five._replace(log_gain=torch.zeros(2)))
    assert torch.equal(_cpu.forward(form, x, five), one)
    found = _cpu.gradients(form, x, x, five, (True,) * 7)
    assert found[6] is None


@pytest.mark.parametrize("witnesses", [(8,), (-1,), tuple(range(17))], ids=str)
def test_witnesses_that_do_not_fit_are_refused_before_memory_is_touched(
    witnesses: tuple[int, ...],
) -> None:
    form = Form(DYISRU, False, 1.0, 8, 1, witnesses)
    with pytest.raises(ValueError, match="sizes"):
        _cpu.forward(form, torch.zeros(2, 8), Parameters(torch.ones(1)))
