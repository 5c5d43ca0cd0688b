"""The C++ kernels with more witnesses than are computed by themselves, up to all channels, against the definition."""

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
    functions_and_dtypes,
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
# Channels and witnesses: all channels, nearly all, few of many; widths that fill vectors, and not.
SIZES = [(17, 17), (19, 17), (64, 64), (131, 64), (144, 128), (300, 128), (257, 256), (777, 256)]


def chosen(channels: int, count: int) -> tuple[int, ...]:
    """Witnesses in no order, the first and the last channel among them."""
    inner = 1 + torch.randperm(channels - 2)[: count - 2]
    return (channels - 1, *inner.tolist(), 0)


def gradients_by_definition(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters
) -> tuple[Tensor, list[Tensor | None]]:
    """y and the gradients of all that is there, in float64."""
    wide: list[Tensor | None] = []
    for tensor in (x, *parameters):
        wide.append(None if tensor is None else tensor.detach().double().requires_grad_())
    assert wide[0] is not None
    y = plain(form, wide[0], Parameters(*wide[1:]))  # type: ignore[arg-type]
    leaves = [tensor for tensor in wide if tensor is not None]
    results = iter(
        torch.autograd.grad(y, leaves, grad.double(), allow_unused=True, materialize_grads=True)
    )
    return y.detach(), [None if tensor is None else next(results) for tensor in wide]


@pytest.mark.parametrize(("function", "dtype", "size"), functions_and_dtypes(SIZES))
def test_values_and_gradients(
    instructions: str, function: int, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    channels, count = size
    for (per_channel, everything), rows in itertools.product(
        ((False, False), (False, True), (True, True)), (1, 7)
    ):
        parameters = make(channels, dtype, per_channel=per_channel, everything=everything)
        form = Form(function, False, -1.7, channels, 1, chosen(channels, count))
        x = (2 * torch.randn(rows, channels)).to(dtype)
        compare(form, x, with_gains(parameters, count), TOLERANCES[dtype])


@pytest.mark.parametrize("function", [DYISRU, LINEAR], ids=["dyisru", "linear"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_logarithmic_constants(instructions: str, function: int, per_channel: bool) -> None:
    """Also such that the fast way does not cover."""
    parameters = with_gains(make(48, torch.float32, per_channel=per_channel, everything=True), 20)
    form = Form(function, True, 3.0, 48, 1, chosen(48, 20))
    for log_beta in (parameters[0], parameters[0] - 60, parameters[0] + 75):
        x = torch.randn(50, 48) * max(1.0, float(log_beta.mean().exp() ** 0.5))
        compare(form, x, parameters._replace(constant=log_beta), 1e-5)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("massive", [1, 2, 3], ids=lambda count: f"{count} massive")
def test_massive_witnesses(instructions: str, function: int, massive: int) -> None:
    """Ten thousand times the others: its own sum is that of the others, to the last digits."""
    witnesses = chosen(100, 32)
    parameters = with_gains(make(100, torch.float32, per_channel=True, everything=True), 32)
    x = torch.randn(37, 100)
    x[::2, list(witnesses[:massive])] *= 1e4
    form, grad = Form(function, False, 10.0, 100, 1, witnesses), torch.randn(37, 100)
    want, expected = gradients_by_definition(form, grad, x, parameters)
    assert_close(_cpu.forward(form, x, parameters).double(), want, rtol=1e-5, atol=1e-6)
    results = _cpu.gradients(form, grad, x, parameters, (True,) * 7)
    for got, exact in zip(results, expected, strict=True):
        assert got is not None
        assert exact is not None
        # Terms of a sum cancel: what counts is its error relative to their size.
        assert_close(got.double(), exact, rtol=2e-5, atol=2e-6 * max(1.0, float(exact.abs().max())))


def test_a_witness_s_own_sum_keeps_its_digits(instructions: str) -> None:
    """A hundred thousand times the others: its gradient is their sum, of which a difference has no digit."""
    witnesses = tuple(range(20))
    x = torch.rand(8, 24) + 0.5
    for row in range(8):
        x[row, row] = 1e5
    parameters = Parameters(torch.full((1,), 1e-3))
    # So that its gradient is not too small to be compared.
    form, grad = Form(DYISRU, False, 1e15, 24, 1, witnesses), torch.zeros(8, 24)
    grad[range(8), range(8)] = 1.0
    _, expected = gradients_by_definition(form, grad, x, parameters)
    result = _cpu.gradients(form, grad, x, parameters, (True,) + (False,) * 6)[0]
    assert result is not None
    assert expected[0] is not None
    assert float(expected[0].diagonal().min()) > 1
    assert_close(result.diagonal().double(), expected[0].diagonal(), rtol=1e-5, atol=0)


# In witnesses, in other channels, in both; in one and in more.
PLACES = [(2,), (39,), (2, 39), (2, 18), (0, 1, 2, 3, 4, 5), tuple(range(40))]


@pytest.mark.parametrize(("function", "dtype", "columns"), functions_and_dtypes(PLACES))
def test_edges_are_the_definition_s(
    instructions: str, function: int, dtype: torch.dtype, columns: tuple[int, ...]
) -> None:
    """One edge in each row."""
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, INF, -INF, NAN, info.max, -info.max, info.tiny, 1e4]
    if dtype not in (torch.float16,):
        edges += [3e18, 1e19, 4e9]
    if dtype == torch.float64:
        edges += [1e153, 1e154, 1e155]
    x = torch.randn(len(edges), 40).to(dtype)
    x[:, list(columns)] = torch.tensor(edges, dtype=torch.float64).to(dtype)[:, None]
    grad = torch.randn(x.shape).to(dtype)
    constant, weight = 0.3 * torch.rand(40).to(dtype) + 0.5, torch.randn(40).to(dtype)
    witnesses = tuple(range(20))
    parameters = Parameters(constant, weight=weight, log_gain=torch.zeros(20, dtype=dtype))
    form = Form(function, False, 2.0, 40, 1, witnesses)
    leaf = x.clone().requires_grad_()
    want = plain(form, leaf, parameters)
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype], "equal_nan": True}
    assert_close(_cpu.forward(form, x, parameters), want.detach(), **close)
    # The definition's clamp has a gradient of 0 at a NaN; in these rows it stays NaN.
    known = ~x.isnan().any(1)
    (slope,) = torch.autograd.grad(want, leaf, grad)
    result = _cpu.gradients(form, grad, x, parameters, (True,) + (False,) * 6)[0]
    assert result is not None
    assert result[~known].isnan().any()
    assert_close(
        result[known], slope[known], rtol=4 * TOLERANCES[dtype], atol=4 * TOLERANCES[dtype]
    )


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_gradients_of_parameters_with_rare_rows(instructions: str, function: int) -> None:
    """Infinities, and squares that overflow, among ordinary rows."""
    x = torch.randn(11, 40)
    x[1, 3], x[2, 30], x[5, [4, 31]], x[6, 5:9] = INF, -INF, 3e18, 1e19
    witnesses = chosen(30, 20)
    parameters = with_gains(make(40, torch.float32, per_channel=True, everything=True), 20)
    form, grad = Form(function, False, 1.3, 40, 1, witnesses), torch.randn(11, 40)
    if function == LINEAR:
        # Its value grows with x: the definition's is infinite where x is.
        x = x.clamp(-1e9, 1e9)
    tensors = [None if t is None else t.clone().requires_grad_() for t in (x, *parameters)]
    assert tensors[0] is not None
    plain(form, tensors[0], Parameters(*tensors[1:])).backward(grad)  # type: ignore[arg-type]
    results = _cpu.gradients(form, grad, x, parameters, (True,) * 7)
    for name, got, tensor in zip(("x", *Parameters._fields), results, tensors, strict=True):
        assert got is not None
        assert tensor is not None
        if tensor.grad is None:
            continue
        size = max(1.0, float(tensor.grad.abs().max()))
        assert_close(
            got, tensor.grad, rtol=2e-5, atol=2e-5 * size, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize(
    ("value", "channel"),
    [(NAN, 3), (INF, 36), (1e30, 3), (NAN, 36)],
    ids=["NaN in a witness", "infinity in another", "huge in a witness", "NaN in another"],
)
def test_a_row_changes_no_other_row(
    instructions: str, function: int, value: float, channel: int
) -> None:
    x, grad = torch.randn(9, 37), torch.randn(9, 37)
    parameters = with_gains(make(37, torch.float32, per_channel=True, everything=True), 20)
    form = Form(function, False, 1.0, 37, 1, tuple(range(20)))
    others = torch.arange(9) != 4
    before = (
        _cpu.forward(form, x, parameters),
        _cpu.gradients(form, grad, x, parameters, (True,) * 7)[0],
    )
    x[4, channel] = value
    after = (
        _cpu.forward(form, x, parameters),
        _cpu.gradients(form, grad, x, parameters, (True,) * 7)[0],
    )
    for got, want in zip(after, before, strict=True):
        assert got is not None
        assert want is not None
        assert_close(got[others], want[others], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_nan_in_a_gradient_reaches_only_the_witnesses(instructions: str, function: int) -> None:
    x, grad = torch.randn(5, 40), torch.randn(5, 40)
    grad[2, 39] = NAN
    form = Form(function, False, 1.0, 40, 1, tuple(range(20)))
    result = _cpu.gradients(form, grad, x, Parameters(torch.ones(1)), (True,) + (False,) * 6)[0]
    assert result is not None
    assert result[2, :20].isnan().all()
    assert result[2, 39].isnan()
    assert result[2, 20:39].isfinite().all()
    assert result[torch.arange(5) != 2].isfinite().all()


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_what_is_wanted_changes_no_other(function: int) -> None:
    parameters = with_gains(
        make(48, torch.float32, per_channel=function % 2 == 0, everything=True), 30
    )
    x, grad = torch.randn(23, 48), torch.randn(23, 48)
    form = Form(function, False, 1.3, 48, 1, chosen(48, 30))
    require_same_whatever_is_wanted(form, grad, x, parameters)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
@pytest.mark.parametrize("shape", [(700, 384), (3000, 100)], ids=str)
def test_threads_change_nothing(function: int, shape: tuple[int, int]) -> None:
    witnesses = chosen(shape[1], 64)
    parameters = with_gains(make(shape[1], torch.float32, per_channel=False, everything=True), 64)
    x, grad = torch.randn(shape), torch.randn(shape)
    form = Form(function, False, 1.0, shape[1], 1, witnesses)

    def run() -> list[Tensor | None]:
        y = _cpu.forward(form, x, parameters)
        return [y, *_cpu.gradients(form, grad, x, parameters, (True,) * 7)]

    require_same_for_all_threads(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1024, 1056])
def test_large_outputs_that_pass_by_the_caches(dtype: torch.dtype, channels: int) -> None:
    """Among them a row that is computed number by number, and one with a massive witness."""
    x = torch.randn(8300, channels).to(dtype)
    witnesses = chosen(channels, 128)
    x[4050, witnesses[0]], x[4051, witnesses[1]] = INF, 1e4
    parameters = with_gains(make(channels, torch.float32, per_channel=True, everything=True), 128)
    form = Form(DYISRU, False, 1.0, channels, 1, witnesses)
    y = _cpu.forward(form, x, parameters)
    assert torch.equal(y[4000:4100], _cpu.forward(form, x[4000:4100].contiguous(), parameters))
    in_place = _cpu.forward(form, x, parameters, x)
    assert torch.equal(in_place, y)


@pytest.mark.parametrize("function", NUMBERS, ids=FUNCTIONS)
def test_no_rows(function: int) -> None:
    parameters = with_gains(make(20, torch.float32, per_channel=True, everything=True), 18)
    form, x = Form(function, False, 1.0, 20, 1, chosen(20, 18)), torch.empty(0, 20)
    assert _cpu.forward(form, x, parameters).shape == (0, 20)
    results = _cpu.gradients(form, x, x, parameters, (True,) * 7)
    for got, like in zip(results, (x, *parameters), strict=True):
        assert like is not None
        assert_close(got, torch.zeros_like(like))


def test_without_gains_they_are_one() -> None:
    x, parameters = torch.randn(6, 40), make(40, torch.float32, per_channel=False, everything=True)
    form = Form(DYISRU, False, 1.0, 40, 1, chosen(40, 20))
    one = _cpu.forward(form, x, parameters._replace(log_gain=torch.zeros(20)))
    assert torch.equal(_cpu.forward(form, x, parameters), one)
    assert _cpu.gradients(form, x, x, parameters, (True,) * 7)[6] is None


def test_sixteen_and_seventeen_witnesses_agree(instructions: str) -> None:
    """A witness with a gain of nearly 0 takes the call from one kernel to the other."""
    x, grad = torch.randn(9, 60), torch.randn(9, 60)
    parameters = make(60, torch.float32, per_channel=True, everything=True)
    few, log_gain = chosen(60, 16), 0.5 * torch.randn(16)
    spare = next(channel for channel in range(60) if channel not in few)
    form_few = Form(DYISRU, False, 2.0, 60, 1, few)
    form_many = form_few._replace(witnesses=(*few, spare))
    of_few = parameters._replace(log_gain=log_gain)
    of_many = parameters._replace(log_gain=torch.cat([log_gain, torch.tensor([-80.0])]))
    y_few, y_many = _cpu.forward(form_few, x, of_few), _cpu.forward(form_many, x, of_many)
    assert_close(y_many, y_few, rtol=2e-6, atol=2e-6)
    few_results = _cpu.gradients(form_few, grad, x, of_few, (True,) * 7)
    many_results = _cpu.gradients(form_many, grad, x, of_many, (True,) * 7)
    for got, want in zip(many_results, few_results, strict=True):
        assert got is not None
        assert want is not None
        assert_close(got[: len(want)], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "witnesses",
    [tuple(range(21)), (*range(19), 20), (*range(19), -1)],
    ids=["more", "beyond", "below"],
)
def test_witnesses_that_do_not_fit_are_refused_before_memory_is_touched(
    witnesses: tuple[int, ...],
) -> None:
    form = Form(DYISRU, False, 1.0, 20, 1, witnesses)
    with pytest.raises(ValueError, match="sizes"):
        _cpu.forward(form, torch.zeros(2, 20), Parameters(torch.ones(1)))
