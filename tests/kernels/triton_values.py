"""Values and gradients of the Triton kernels, in its interpreter or on a GPU; run by test_triton.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter

from dynorm import functional
from dynorm.errors import ArgumentError
from dynorm.kernels import _triton
from dynorm.kernels._dispatch import plain
from dynorm.kernels._form import Form, FunctionCode, Parameters
from tests.kernels.definition import compare_where_infinite, every_pair, infinite_witnesses

# One or the other for the whole process: Triton asks when it is first imported.
INTERPRETED = _triton.interpreted()
if not INTERPRETED and torch.cuda.is_available():
    torch.set_default_device("cuda")
FUNCTIONS = DYISRU, DYT, DERF, LINEAR = tuple(FunctionCode)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Relative and absolute; the interpreter cuts bfloat16 off where a GPU rounds, and so is off by up
# to an ulp.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 4e-6),
    torch.bfloat16: (2**-7, 1e-5),
    torch.float16: (2**-10, 1e-5),
}
# Shape and channel axis: less than a tile, more than a tile each way, sizes of 1, and channels
# first.
LAYOUTS = [
    ((7, 33), -1),
    ((9, 600), -1),
    ((300, 3), -1),
    ((1, 1), -1),
    ((3, 5, 7, 2), 1),
    ((2, 3, 700), 1),
]
Parts = dict[str, Tensor | None]


def call_helper(helper: Any, *arguments: Any, **named: Any) -> Any:
    """Call a function of a kernel in the interpreter; its language is patched at the first call from its module.

    The interpreter itself patches the language at each call, and takes nothing back before the
    kernel ends: that took half of the time of these tests.
    """
    if helper.fn.__module__ not in PATCHED:
        interpreter._patch_lang(helper.fn)
        PATCHED.add(helper.fn.__module__)
    return helper.rewrite()(*arguments, **named)


PATCHED: set[str] = set()
if INTERPRETED:
    interpreter.InterpretedFunction.__call__ = call_helper


def sample(
    *shape: int, seed: int, dtype: torch.dtype = torch.float64, width: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (width * numbers).to(torch.get_default_device(), dtype)


def parts(
    function: int,
    channels: int,
    dtype: torch.dtype,
    *,
    per_channel: bool = True,
    bare: bool = False,
) -> Parts:
    """Constant, shift, center, weight and bias; all of them, or only the constant."""
    size = channels if per_channel else 1
    return {
        "constant": sample(size, seed=1, dtype=dtype).abs() + 0.5,
        "shift": sample(size, seed=2, dtype=dtype) if function == DERF and not bare else None,
        "center": None if bare else sample(size, seed=3, dtype=dtype),
        "weight": None if bare else sample(channels, seed=4, dtype=dtype),
        "bias": None if bare else sample(channels, seed=5, dtype=dtype),
    }


def reference(function: int, x: Tensor, p: Parts, scale: float, dim: int = -1) -> Tensor:
    """The plain definition."""
    c, s, m, w, b = (p[name] for name in ("constant", "shift", "center", "weight", "bias"))
    assert c is not None
    if function == DYISRU:
        return functional.dyisru_general(x, c, m, w, b, scale=scale, dim=dim)
    if function == DYT:
        return functional.dyt(x, c, w, b, center=m, scale=scale, dim=dim)
    if function == DERF:
        return functional.derf(x, c, 0.0 if s is None else s, w, b, center=m, scale=scale, dim=dim)
    return functional.linear(x, scale * c, w, b, center=m, dim=dim)


def with_gains(p: Parts, witnesses: int) -> Parts:
    return p | {"log_gain": sample(witnesses, seed=6, dtype=torch.float64, width=0.5)}


def in_float64(p: Parts) -> Parts:
    return {name: None if v is None else v.double().requires_grad_() for name, v in p.items()}


def form_of(function: int, x: Tensor, dim: int, scale: float) -> Form:
    return Form(
        function, False, scale, x.shape[dim], 1 if dim == -1 else math.prod(x.shape[dim + 1 :])
    )


def given(p: Parts) -> Any:
    return Parameters(**p)  # type: ignore[arg-type]


def check_sums(sums: Tensor | None, p: Parts, dtype: torch.dtype) -> None:
    """Compare each row of the sums with the gradient of its parameter, a scalar's with the row's own sum."""
    assert sums is not None
    assert sums.dtype == dtype
    rtol, atol = TOLERANCE[dtype]
    for row, (name, parameter) in zip(sums.double(), p.items(), strict=True):
        if parameter is None:
            assert name == "bias" or not row.any()
            continue
        got = row if parameter.numel() > 1 else row.sum(0, keepdim=True)
        assert parameter.grad is not None
        # Terms of a sum cancel: what counts is the sum's error against the size of its terms.
        assert_close(
            got,
            parameter.grad,
            rtol=20 * rtol,
            atol=20 * atol * max(1.0, float(row.abs().max())),
            msg=name,
        )


@pytest.mark.parametrize(("function", "dtype", "layout"), every_pair(FUNCTIONS, DTYPES, LAYOUTS))
def test_values_and_gradients_are_those_of_the_definition(
    function: int, dtype: torch.dtype, layout: tuple[tuple[int, ...], int]
) -> None:
    shape, dim = layout
    x, grad = sample(*shape, seed=0, dtype=dtype, width=3), sample(*shape, seed=9, dtype=dtype)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    p = parts(function, shape[dim], computed)
    rtol, atol = TOLERANCE[dtype]

    form = form_of(function, x, dim, 1.7)
    y = _triton.forward(form, x, given(p))
    grad_x, sums = _triton.backward(form, grad, x, given(p))

    exact, exact_x = in_float64(p), x.double().requires_grad_()
    expected = reference(function, exact_x, exact, 1.7, dim)
    expected.backward(grad.double())
    assert y.dtype == dtype
    assert_close(y.double(), expected.detach(), rtol=rtol, atol=max(atol, rtol))
    assert grad_x is not None
    assert grad_x.dtype == dtype
    assert_close(grad_x.double(), exact_x.grad, rtol=2 * rtol, atol=max(atol, rtol))
    check_sums(sums, exact, computed)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("per_channel", "bare"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("shape", "dim"), [((7, 33), -1), ((3, 5, 7), 1)])
def test_parts_may_be_left_out_and_constants_shared(
    function: int, per_channel: bool, bare: bool, shape: tuple[int, ...], dim: int
) -> None:
    x, grad = sample(*shape, seed=0), sample(*shape, seed=9)
    p = parts(function, shape[dim], torch.float64, per_channel=per_channel, bare=bare)
    form = form_of(function, x, dim, 0.3)
    y = _triton.forward(form, x, given(p))
    grad_x, sums = _triton.backward(form, grad, x, given(p))
    exact, exact_x = in_float64(p), x.clone().requires_grad_()
    expected = reference(function, exact_x, exact, 0.3, dim)
    expected.backward(grad)
    assert_close(y, expected.detach())
    assert_close(grad_x, exact_x.grad)
    check_sums(sums, exact, torch.float64)


@pytest.mark.parametrize("one", ["constant", "shift", "center"])
def test_one_constant_may_be_shared_while_others_differ(one: str) -> None:
    x, grad = sample(7, 33, seed=0), sample(7, 33, seed=9)
    p = parts(DERF, 33, torch.float64)
    whole = p[one]
    assert whole is not None
    p[one] = whole[:1].clone()
    form = form_of(DERF, x, -1, 0.3)
    grad_x, sums = _triton.backward(form, grad, x, given(p))
    exact, exact_x = in_float64(p), x.clone().requires_grad_()
    expected = reference(DERF, exact_x, exact, 0.3)
    expected.backward(grad)
    assert_close(_triton.forward(form, x, given(p)), expected.detach())
    assert_close(grad_x, exact_x.grad)
    check_sums(sums, exact, torch.float64)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_infinities_and_nan_are_those_of_the_definition(function: int, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor(
        [math.inf, -math.inf, math.nan, large, -large, large**0.5, 0.0, -0.0], dtype=dtype
    )[:, None]
    constant, grad = torch.tensor([2.0], dtype=dtype), torch.ones_like(x)
    p: Parts = {"constant": constant, "shift": None, "center": None, "weight": None, "bias": None}
    with np.errstate(all="ignore"):
        y = _triton.forward(Form(function, False, 1.5, 1, 1), x, given(p))
        grad_x, _ = _triton.backward(
            Form(function, False, 1.5, 1, 1), grad, x, given(p), need_parameters=False
        )
    leaf = x.clone().requires_grad_()
    expected = reference(function, leaf, p, 1.5)
    expected.sum().backward()
    assert_close(y, expected.detach(), equal_nan=True)
    assert torch.equal(y.signbit()[-2:], expected.signbit()[-2:])
    assert_close(grad_x, leaf.grad, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "ulps", "exact"),
    [(DYISRU, 1, lambda x: x / np.sqrt(1.5 + x * x)), (DYT, 2, lambda x: np.tanh(1.5 * x))],
)
def test_float32_is_exact_to_an_ulp_or_two(
    function: int,
    ulps: int,
    exact: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A GPU rounds once where the interpreter's fma rounds twice; from float64 the sum is as good as
    # rounded once.
    fused = lambda self, x, y, z: interpreter.TensorHandle(  # noqa: E731
        (x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype.scalar
    )
    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
        # The interpreter takes as long for a small tile as for a large one.
        monkeypatch.setattr(_triton, "_FORWARD", ((2**17, 4),))
    # Numbers of every size, and again where the functions bend.
    sizes_ = np.concatenate([np.geomspace(1e-30, 1e30, 200_000), np.linspace(0.01, 12, 200_000)])
    x = torch.from_numpy(np.concatenate([sizes_, -sizes_])).float().to(torch.get_default_device())
    constant = torch.tensor([1.5])
    with np.errstate(over="ignore"):
        y = _triton.forward(Form(function, False, 1.0, 1, 1), x, Parameters(constant))
        z = x.double().cpu().numpy()
        # The argument of tanh is rounded before tanh sees it, as in the definition.
        z = (1.5 * x).double().cpu().numpy() / 1.5 if function == DYT else z
        expected = exact(z).astype(np.float32)
    distance = np.abs(y.cpu().numpy().view(np.int32).astype(np.int64) - expected.view(np.int32))
    assert distance.max() <= ulps


@pytest.mark.parametrize(("shape", "dim"), [((20_000, 3), -1), ((40, 3, 90), 1), ((64, 700), -1)])
def test_sums_of_many_chunks_are_whole_and_the_same_every_time(
    shape: tuple[int, ...], dim: int
) -> None:
    x, grad = (sample(*shape, seed=seed, dtype=torch.float32) for seed in (0, 1))
    p = parts(DYISRU, shape[dim], torch.float32)
    form = form_of(DYISRU, x, dim, 1.0)
    found = [_triton.backward(form, grad, x, given(p), need_x=False) for _ in range(2)]
    assert found[0][0] is None
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]
    exact, exact_x = in_float64(p), x.double()
    reference(DYISRU, exact_x, exact, 1.0, dim).backward(grad.double())
    check_sums(found[0][1], exact, torch.float32)


WITNESSES = [
    ((7, 33), (32, 4)),
    ((9, 600), (599, 0, 300)),
    ((300, 3), (1,)),
    ((1, 1), (0,)),
    ((9, 40), (1, 2, 3, 4, 39)),
]
# Many: all channels; in no order; more than a tile of channels.
WITNESSES += [
    ((5, 64), tuple(range(64))),
    ((9, 33), (32, *range(20, 4, -1), 0)),
    ((3, 600), tuple(range(599, 87, -2))),
]


@pytest.mark.parametrize(("function", "dtype", "case"), every_pair(FUNCTIONS, DTYPES, WITNESSES))
def test_witnesses_are_the_definition_s(
    function: int, dtype: torch.dtype, case: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, witnesses = case
    # What may be left out or shared is the same code in each dtype.
    shared = ((False, False), (False, True)) if dtype == torch.float64 else ()
    for per_channel, bare in ((True, False), *shared):
        x, grad = sample(*shape, seed=0, dtype=dtype, width=3), sample(*shape, seed=9, dtype=dtype)
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        p = with_gains(
            parts(function, shape[1], computed, per_channel=per_channel, bare=bare), len(witnesses)
        )
        form = form_of(function, x, -1, 1.7)._replace(witnesses=witnesses)
        rtol, atol = TOLERANCE[dtype]
        y = _triton.forward(form, x, given(p))
        found = _triton.gradients(form, grad, x, given(p), (True,) * 7)
        leaves: list[Any] = [
            None if t is None else t.double().requires_grad_() for t in (x, *p.values())
        ]
        expected = plain(form, leaves[0], Parameters(*leaves[1:]))
        expected.backward(grad.double())
        assert_close(y.double(), expected.detach(), rtol=2 * rtol, atol=max(atol, rtol))
        for name, got, leaf in zip(("x", *p), found, leaves, strict=True):
            assert (got is None) == (leaf is None)
            if got is None:
                continue
            size = (
                1.0
                if name == "x"
                else 20 * max(1.0, float(x.shape[0] ** 0.5), float(leaf.grad.abs().max()))
            )
            assert_close(
                got.double(), leaf.grad, rtol=4 * rtol, atol=size * max(atol, rtol), msg=name
            )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_massive_witness(function: int) -> None:
    x, grad = sample(5, 40, seed=0, dtype=torch.float32), sample(5, 40, seed=9, dtype=torch.float32)
    x[::2, 7] *= 1e4
    x[1, 7] = math.inf
    # A line has no bound, so that this would be one of the dtype.
    x[3, 9] = -math.inf if function != LINEAR else 9.0
    p = with_gains(parts(function, 40, torch.float32, bare=True), 2)
    form = form_of(function, x, -1, 10.0)._replace(witnesses=(7, 30))
    with np.errstate(all="ignore"):
        y = _triton.forward(form, x, given(p))
        grad_x = _triton.gradients(form, grad, x, given(p), (True,) + (False,) * 6)[0]
    leaf = x.double().requires_grad_()
    expected = plain(form, leaf, tuple(None if t is None else t.double() for t in p.values()))  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(expected, leaf, grad.double())
    finite = x.isfinite()
    assert_close(y.double()[finite], expected.detach()[finite], rtol=1e-5, atol=1e-6)
    assert grad_x is not None
    assert_close(grad_x.double(), slope, rtol=2e-5, atol=1e-6)


COUNTS_AND_SIGNS = list(itertools.product([1, 5, 16, 17, 40], ["plus", "both"]))


@pytest.mark.parametrize(
    ("function", "dtype", "case"), every_pair(FUNCTIONS, DTYPES, COUNTS_AND_SIGNS)
)
def test_any_number_of_infinite_witnesses(
    function: int, dtype: torch.dtype, case: tuple[int, str]
) -> None:
    """Few and many: equal infinities share the sum, in proportion to their gains."""
    count, sign = case
    form, x, parameters = infinite_witnesses(function, dtype, count, sign)
    with np.errstate(all="ignore"):
        compare_where_infinite(_triton, form, x, parameters, max(TOLERANCE[dtype]))


# In witnesses, in other channels, in both; in one and in more.
PLACES = [(2,), (39,), (2, 39), (2, 18), (0, 1, 2, 3, 4, 5), tuple(range(40))]


@pytest.mark.parametrize(("function", "dtype", "columns"), every_pair(FUNCTIONS, DTYPES, PLACES))
def test_edges_of_many_witnesses_are_the_definition_s(
    function: int, dtype: torch.dtype, columns: tuple[int, ...]
) -> None:
    """One edge in each row."""
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).tiny, 1e4]
    if dtype != torch.float16:
        edges += [4e9, 3e18, 1e19]
    if dtype == torch.float64:
        edges += [1e153, 1e155]
    x = sample(len(edges), 40, seed=0, dtype=dtype)
    grad = sample(len(edges), 40, seed=9, dtype=dtype)
    x[:, list(columns)] = torch.tensor(edges, dtype=torch.float64).to(dtype)[:, None]
    p = parts(function, 40, torch.float64 if dtype == torch.float64 else torch.float32, bare=True)
    form = form_of(function, x, -1, 2.0)._replace(witnesses=tuple(range(20)))
    with np.errstate(all="ignore"):
        y = _triton.forward(form, x, given(p))
        grad_x = _triton.gradients(form, grad, x, given(p), (True,) + (False,) * 6)[0]
    leaf = x.clone().requires_grad_()
    expected = plain(form, leaf, given(p))
    (slope,) = torch.autograd.grad(expected, leaf, grad)
    rtol, atol = TOLERANCE[dtype]
    assert_close(y, expected.detach(), rtol=2 * rtol, atol=max(atol, rtol), equal_nan=True)
    # At a NaN a gradient is NaN or 0.
    known = ~x.isnan().any(1)
    assert grad_x is not None
    assert_close(grad_x[known], slope[known], rtol=4 * rtol, atol=4 * max(atol, rtol))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("massive", [1, 2, 3])
def test_massive_ones_of_many_witnesses(function: int, massive: int) -> None:
    x = sample(5, 70, seed=0, dtype=torch.float32)
    grad = sample(5, 70, seed=9, dtype=torch.float32)
    x[::2, 7 : 7 + massive] *= 1e4
    p = with_gains(parts(function, 70, torch.float32), 32)
    form = form_of(function, x, -1, 10.0)._replace(witnesses=tuple(range(4, 36)))
    results = _triton.gradients(form, grad, x, given(p), (True,) * 7)
    leaves: list[Any] = [
        None if t is None else t.double().requires_grad_() for t in (x, *p.values())
    ]
    expected = plain(form, leaves[0], Parameters(*leaves[1:]))
    expected.backward(grad.double())
    y = _triton.forward(form, x, given(p))
    assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for name, got, leaf in zip(("x", *p), results, leaves, strict=True):
        assert (got is None) == (leaf is None)
        if got is not None:
            size = max(1.0, float(leaf.grad.abs().max()))
            assert_close(got.double(), leaf.grad, rtol=2e-5, atol=4e-6 * size, msg=name)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_in_a_gradient_reaches_only_many_witnesses(function: int) -> None:
    x, grad = sample(5, 40, seed=0, dtype=torch.float32), sample(5, 40, seed=9, dtype=torch.float32)
    grad[2, 39] = math.nan
    form = form_of(function, x, -1, 1.0)._replace(witnesses=tuple(range(20)))
    p = parts(function, 40, torch.float32, bare=True)
    with np.errstate(all="ignore"):
        grad_x = _triton.gradients(form, grad, x, given(p), (True,) + (False,) * 6)[0]
    assert grad_x is not None
    assert grad_x[2, :20].isnan().all()
    assert grad_x[2, 20:39].isfinite().all()
    assert grad_x[torch.arange(5) != 2].isfinite().all()


@pytest.mark.parametrize("many", [False, True])
def test_output_may_be_the_input_with_witnesses(many: bool) -> None:
    x, p = (
        sample(7, 1100, seed=0, dtype=torch.float32),
        with_gains(parts(DYISRU, 1100, torch.float32), 20 if many else 2),
    )
    witnesses = (0, 1099, *range(5, 23)) if many else (0, 1099)
    form = Form(DYISRU, False, 1.0, 1100, 1, witnesses)
    expected = _triton.forward(form, x, given(p))
    _triton.forward(form, x, given(p), out=x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("witnesses", [(33,), (-1, 2)], ids=str)
def test_witnesses_that_are_no_channels_are_refused(witnesses: tuple[int, ...]) -> None:
    p = with_gains(parts(DYT, 33, torch.float32), len(witnesses))
    with pytest.raises(ArgumentError, match="witnesses"):
        _triton.forward(Form(DYT, False, 1.0, 33, 1, witnesses), torch.ones(7, 33), given(p))


@pytest.mark.parametrize("programs", [1, 5, 1024])
@pytest.mark.parametrize(("shape", "dim"), [((500, 300), -1), ((7, 20, 600), 1)])
def test_no_element_is_left_out_or_taken_twice(
    programs: int, shape: tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_PROGRAMS", programs)
    x, grad = torch.zeros(shape), torch.ones(shape)
    one = Parameters(torch.ones(1))
    grad_x, sums = _triton.backward(form_of(LINEAR, x, dim, 1.0), grad, x, one)
    assert grad_x is not None
    assert sums is not None
    assert torch.equal(grad_x, grad)
    assert torch.equal(sums[4], torch.full((shape[dim],), x.numel() / shape[dim]))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, p = torch.empty(shape), parts(DERF, 5, torch.float32)
    y = _triton.forward(Form(DERF, False, 1.0, 5, 1), x, given(p))
    grad_x, sums = _triton.backward(Form(DERF, False, 1.0, 5, 1), y, x, given(p))
    assert y.shape == shape
    assert grad_x is not None
    assert grad_x.shape == shape
    assert torch.equal(sums, torch.zeros(5, 5))  # type: ignore[arg-type]


def test_output_given_is_filled_and_returned() -> None:
    x, p = sample(7, 33, seed=0, dtype=torch.float32), parts(DYT, 33, torch.float32)
    out = torch.full_like(x, math.nan)
    y = _triton.forward(Form(DYT, False, 1.0, 33, 1), x, given(p), out=out)
    assert y is out
    assert torch.equal(y, _triton.forward(Form(DYT, False, 1.0, 33, 1), x, given(p)))


def test_output_may_be_the_input() -> None:
    x, p = sample(7, 33, seed=0, dtype=torch.float32), parts(DYT, 33, torch.float32)
    expected = _triton.forward(Form(DYT, False, 1.0, 33, 1), x, given(p))
    _triton.forward(Form(DYT, False, 1.0, 33, 1), x, given(p), out=x)
    assert torch.equal(x, expected)


def test_parameters_of_other_dtypes_than_x() -> None:
    x = sample(7, 33, seed=0, dtype=torch.float32)
    p = parts(DERF, 33, torch.float32)
    kinds = dict(
        zip(
            p,
            (torch.float64, torch.bfloat16, torch.float16, torch.bfloat16, torch.float64),
            strict=True,
        )
    )
    mixed = {name: None if v is None else v.to(kinds[name]) for name, v in p.items()}
    y = _triton.forward(Form(DERF, False, 1.0, 33, 1), x, given(mixed))
    same = {name: None if v is None else v.float() for name, v in mixed.items()}
    assert torch.equal(y, _triton.forward(Form(DERF, False, 1.0, 33, 1), x, given(same)))


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.ones(33, 7).t()},
        {"x": torch.ones(7, 32)},
        {"constant": torch.ones(2)},
        {"weight": torch.ones(1)},
        {"weight": torch.ones(66)[::2]},
        {"bias": torch.ones(33, device="meta")},
        {"out": torch.ones(7, 34)},
        {"channels": 0},
    ],
)
def test_what_would_be_read_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    p = parts(DYT, 33, torch.float32) | {
        name: t for name, t in change.items() if name in ("constant", "weight", "bias")
    }
    form = Form(DYT, False, 1.0, change.get("channels", 33), 1)
    with pytest.raises(ArgumentError, match="must be"):
        _triton.forward(form, change.get("x", torch.ones(7, 33)), given(p), change.get("out"))


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gradients"):
        _triton.backward(
            Form(DYT, False, 1.0, 3, 1),
            torch.ones(2),
            torch.ones(3),
            Parameters(torch.ones(1)),
        )


def test_the_kernels_are_available() -> None:
    assert _triton.available()


@pytest.mark.parametrize("function", [DYISRU, LINEAR])
@pytest.mark.parametrize("per_channel", [False, True])
def test_gradients_are_those_of_the_parameters_as_stored(function: int, per_channel: bool) -> None:
    x, grad = sample(7, 33, seed=0), sample(7, 33, seed=9)
    p = parts(function, 33, torch.float64, per_channel=per_channel)
    form = form_of(function, x, -1, 1.7)._replace(logarithmic=True)
    found = _triton.gradients(
        form, grad, x, given(p), (True, True, False, True, False, True, False)
    )
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, *given(p))]
    plain(form, leaves[0], Parameters(*leaves[1:])).backward(grad)  # type: ignore[arg-type]
    assert [g is not None for g in found] == [True, True, False, True, False, True, False]
    for got, leaf in zip(found, leaves, strict=True):
        if got is not None:
            assert leaf is not None
            assert_close(got, leaf.grad)
