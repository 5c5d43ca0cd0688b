"""Values and gradients of the Triton kernels in Triton's interpreter; run by test_triton.py."""

from __future__ import annotations

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
from dynorm.kernels._triton_gemm import gemm_add_forward

DYISRU, DYT, DERF, LINEAR = range(4)
FUNCTIONS = (DYISRU, DYT, DERF, LINEAR)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Relative and absolute; the interpreter cuts bfloat16 off where a GPU rounds, and so is off by up to an ulp.
TOLERANCE = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (2e-6, 4e-6),
    torch.bfloat16: (2**-7, 1e-5),
    torch.float16: (2**-10, 1e-5),
}
# Shape and channel axis: less than a tile, more than a tile each way, sizes of 1, and channels first.
LAYOUTS = [((7, 33), -1), ((19, 600), -1), ((300, 3), -1), ((1, 1), -1), ((3, 5, 7, 2), 1), ((2, 3, 700), 1)]
Parts = dict[str, Tensor | None]


def sample(*shape: int, seed: int, dtype: torch.dtype = torch.float64, width: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (width * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def parts(function: int, channels: int, dtype: torch.dtype, *, per_channel: bool = True, bare: bool = False) -> Parts:
    """Constant, shift, center, weight and bias; all of them, or the constant alone."""
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


def in_float64(p: Parts) -> Parts:
    return {name: None if v is None else v.double().requires_grad_() for name, v in p.items()}


def sizes(x: Tensor, dim: int) -> dict[str, int]:
    return {"channels": x.shape[dim], "inner": 1 if dim == -1 else math.prod(x.shape[dim + 1 :])}


def without_bias(p: Parts) -> Parts:
    return {name: v for name, v in p.items() if name != "bias"}


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
        assert_close(got, parameter.grad, rtol=20 * rtol, atol=20 * atol * max(1.0, float(row.abs().max())), msg=name)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS)
def test_values_and_gradients_are_those_of_the_definition(
    function: int, dtype: torch.dtype, shape: tuple[int, ...], dim: int
) -> None:
    x, grad = sample(*shape, seed=0, dtype=dtype, width=3), sample(*shape, seed=9, dtype=dtype)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    p = parts(function, shape[dim], computed)
    rtol, atol = TOLERANCE[dtype]

    y = _triton.forward(function, x, **p, scale=1.7, **sizes(x, dim))  # type: ignore[arg-type]
    grad_x, sums = _triton.backward(
        function, grad, x, **without_bias(p), scale=1.7, **sizes(x, dim), need_x=True, need_parameters=True
    )  # type: ignore[arg-type]

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
    y = _triton.forward(function, x, **p, scale=0.3, **sizes(x, dim))  # type: ignore[arg-type]
    grad_x, sums = _triton.backward(
        function, grad, x, **without_bias(p), scale=0.3, **sizes(x, dim), need_x=True, need_parameters=True
    )  # type: ignore[arg-type]
    exact, exact_x = in_float64(p), x.clone().requires_grad_()
    expected = reference(function, exact_x, exact, 0.3, dim)
    expected.backward(grad)
    assert_close(y, expected.detach())
    assert_close(grad_x, exact_x.grad)
    check_sums(sums, exact, torch.float64)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize(("shape", "dim"), [((9, 33), -1), ((3, 5, 7), 1)])
def test_residual_variant_is_the_sum_then_the_function(
    function: int, elsewhere: bool, shape: tuple[int, ...], dim: int
) -> None:
    x, residual, grad = (sample(*shape, seed=seed) for seed in (0, 7, 9))
    grad_h = sample(*shape, seed=8) if elsewhere else None
    p = parts(function, shape[dim], torch.float64)
    y, h = _triton.add_forward(function, x, residual, **p, scale=1.7, **sizes(x, dim))  # type: ignore[arg-type]
    got, sums = _triton.add_backward(
        function, grad, grad_h, h, **without_bias(p), scale=1.7, **sizes(x, dim), need_x=True, need_parameters=True
    )  # type: ignore[arg-type]

    exact, leaf = in_float64(p), x.clone().requires_grad_()
    total = leaf + residual
    expected = reference(function, total, exact, 1.7, dim)
    ((expected * grad).sum() + (0.0 if grad_h is None else (total * grad_h).sum())).backward()
    assert torch.equal(h, total.detach())
    assert_close(y, expected.detach())
    assert_close(got, leaf.grad)
    check_sums(sums, exact, torch.float64)


def test_residual_variant_takes_the_function_of_the_rounded_sum() -> None:
    x, residual = (sample(5, 40, seed=seed, dtype=torch.float16, width=30) for seed in (0, 1))
    p = parts(LINEAR, 40, torch.float32)
    y, h = _triton.add_forward(LINEAR, x, residual, **p, scale=1.0, channels=40, inner=1)  # type: ignore[arg-type]
    assert torch.equal(h, x + residual)
    assert torch.equal(y, _triton.forward(LINEAR, h, **p, scale=1.0, channels=40, inner=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_infinities_and_nan_are_those_of_the_definition(function: int, dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, math.nan, large, -large, large**0.5, 0.0, -0.0], dtype=dtype)[:, None]
    constant, grad = torch.tensor([2.0], dtype=dtype), torch.ones_like(x)
    p: Parts = {"constant": constant, "shift": None, "center": None, "weight": None, "bias": None}
    with np.errstate(all="ignore"):
        y = _triton.forward(function, x, **p, scale=1.5, channels=1, inner=1)  # type: ignore[arg-type]
        grad_x, _ = _triton.backward(
            function, grad, x, **without_bias(p), scale=1.5, channels=1, inner=1, need_x=True, need_parameters=False
        )  # type: ignore[arg-type]
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
    # A GPU rounds once where the interpreter's fma rounds twice; from float64 the sum is as good as rounded once.
    fused = lambda self, x, y, z: interpreter.TensorHandle(  # noqa: E731
        (x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype.scalar
    )
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
    # Numbers of every size, and again where the functions bend.
    sizes_ = np.concatenate([np.geomspace(1e-30, 1e30, 200_000), np.linspace(0.01, 12, 200_000)])
    x = torch.from_numpy(np.concatenate([sizes_, -sizes_])).float()
    constant = torch.tensor([1.5])
    with np.errstate(over="ignore"):
        y = _triton.forward(function, x, constant, None, None, None, None, 1.0, 1, 1)
        z = x.double().numpy()
        # The argument of tanh is rounded before tanh sees it, as in the definition.
        z = (1.5 * x).double().numpy() / 1.5 if function == DYT else z
        expected = exact(z).astype(np.float32)
    distance = np.abs(y.numpy().view(np.int32).astype(np.int64) - expected.view(np.int32))
    assert distance.max() <= ulps


@pytest.mark.parametrize(("shape", "dim"), [((20_000, 3), -1), ((40, 3, 90), 1), ((64, 700), -1)])
def test_sums_of_many_chunks_are_whole_and_the_same_every_time(shape: tuple[int, ...], dim: int) -> None:
    x, grad = (sample(*shape, seed=seed, dtype=torch.float32) for seed in (0, 1))
    p = parts(DYISRU, shape[dim], torch.float32)
    found = [
        _triton.backward(
            DYISRU, grad, x, **without_bias(p), scale=1.0, **sizes(x, dim), need_x=False, need_parameters=True
        )  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert found[0][0] is None
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]
    exact, exact_x = in_float64(p), x.double()
    reference(DYISRU, exact_x, exact, 1.0, dim).backward(grad.double())
    check_sums(found[0][1], exact, torch.float32)


@pytest.mark.parametrize("programs", [1, 5, 1024])
@pytest.mark.parametrize(("shape", "dim"), [((500, 300), -1), ((7, 20, 600), 1)])
def test_no_element_is_left_out_or_taken_twice(
    programs: int, shape: tuple[int, ...], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_PROGRAMS", programs)
    x, grad = torch.zeros(shape), torch.ones(shape)
    one = torch.ones(1)
    grad_x, sums = _triton.backward(LINEAR, grad, x, one, None, None, None, 1.0, **sizes(x, dim), need_x=True,
                                    need_parameters=True)  # fmt: skip
    assert grad_x is not None
    assert sums is not None
    assert torch.equal(grad_x, grad)
    assert torch.equal(sums[4], torch.full((shape[dim],), x.numel() / shape[dim]))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, p = torch.empty(shape), parts(DERF, 5, torch.float32)
    y = _triton.forward(DERF, x, **p, scale=1.0, channels=5, inner=1)  # type: ignore[arg-type]
    grad_x, sums = _triton.backward(
        DERF, y, x, **without_bias(p), scale=1.0, channels=5, inner=1, need_x=True, need_parameters=True
    )  # type: ignore[arg-type]
    assert y.shape == shape
    assert grad_x is not None
    assert grad_x.shape == shape
    assert torch.equal(sums, torch.zeros(5, 5))  # type: ignore[arg-type]


def test_output_given_is_filled_and_returned() -> None:
    x, p = sample(7, 33, seed=0, dtype=torch.float32), parts(DYT, 33, torch.float32)
    out = torch.full_like(x, math.nan)
    y = _triton.forward(DYT, x, **p, scale=1.0, channels=33, inner=1, out=out)  # type: ignore[arg-type]
    assert y is out
    assert torch.equal(y, _triton.forward(DYT, x, **p, scale=1.0, channels=33, inner=1))  # type: ignore[arg-type]


def test_output_may_be_the_input() -> None:
    x, p = sample(7, 33, seed=0, dtype=torch.float32), parts(DYT, 33, torch.float32)
    expected = _triton.forward(DYT, x, **p, scale=1.0, channels=33, inner=1)  # type: ignore[arg-type]
    _triton.forward(DYT, x, **p, scale=1.0, channels=33, inner=1, out=x)  # type: ignore[arg-type]
    assert torch.equal(x, expected)


def test_parameters_of_other_dtypes_than_x() -> None:
    x = sample(7, 33, seed=0, dtype=torch.float32)
    p = parts(DERF, 33, torch.float32)
    kinds = dict(zip(p, (torch.float64, torch.bfloat16, torch.float16, torch.bfloat16, torch.float64), strict=True))
    mixed = {name: None if v is None else v.to(kinds[name]) for name, v in p.items()}
    y = _triton.forward(DERF, x, **mixed, scale=1.0, channels=33, inner=1)  # type: ignore[arg-type]
    same = {name: None if v is None else v.float() for name, v in mixed.items()}
    assert torch.equal(y, _triton.forward(DERF, x, **same, scale=1.0, channels=33, inner=1))  # type: ignore[arg-type]


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
    given = {"x": torch.ones(7, 33), **parts(DYT, 33, torch.float32), "scale": 1.0, "channels": 33, "inner": 1}
    with pytest.raises(ArgumentError, match="must be"):
        _triton.forward(DYT, **(given | change))


def test_a_gradient_of_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gradients"):
        _triton.backward(DYT, torch.ones(2), torch.ones(3), torch.ones(1), None, None, None, 1.0, 3, 1, True, True)


def test_the_interpreter_counts_as_available() -> None:
    assert _triton.available()


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("transposed", [False, True])
# Aligned sizes go by descriptors (in 16 bits), the others by pointers; the last has nothing to multiply.
@pytest.mark.parametrize(("m", "n", "k"), [(80, 72, 136), (33, 35, 37), (1, 64, 64), (3, 4, 0)])
def test_product_with_residual_and_function(m: int, n: int, k: int, transposed: bool, dtype: torch.dtype) -> None:
    a, residual = sample(m, k, seed=0, dtype=dtype), sample(m, n, seed=1, dtype=dtype)
    b = sample(n, k, seed=2, dtype=dtype).t() if transposed else sample(k, n, seed=2, dtype=dtype)
    p, gemm_bias = parts(DYISRU, n, torch.float32), sample(n, seed=6, dtype=torch.float32)
    y, h = gemm_add_forward(DYISRU, a, b, residual, gemm_bias, **p, scale=1.7)  # type: ignore[arg-type]
    rtol, _ = TOLERANCE[dtype]
    assert y.dtype == h.dtype == dtype
    product = a.double() @ b.double() + gemm_bias.double() + residual.double()
    assert_close(h.double(), product, rtol=rtol, atol=rtol * max(k, 1) ** 0.5)
    with torch.no_grad():
        assert_close(y.double(), reference(DYISRU, h.double(), in_float64(p), 1.7), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_product_with_each_function_and_no_parts(function: int) -> None:
    a, b, residual = sample(40, 24, seed=0), sample(24, 48, seed=1), sample(40, 48, seed=2)
    a, b, residual = a.float(), b.float(), residual.float()
    p = parts(function, 48, torch.float32, per_channel=False, bare=True)
    y, h = gemm_add_forward(function, a, b, residual, None, **p, scale=0.5)  # type: ignore[arg-type]
    assert_close(h, a @ b + residual)
    assert_close(y, reference(function, h, p, 0.5))


def test_product_takes_any_strides() -> None:
    a, b = sample(24, 40, seed=0).float().t(), sample(48, 48, seed=1).float()[::2]
    residual, one = sample(40, 48, seed=2).float(), torch.ones(1)
    _, h = gemm_add_forward(LINEAR, a, b, residual, None, one, None, None, None, None, 1.0)
    assert_close(h, a @ b + residual)


@pytest.mark.parametrize(
    ("a", "b", "residual"),
    [
        (torch.ones(4, 5), torch.ones(4, 6), torch.ones(4, 6)),
        (torch.ones(4, 5), torch.ones(5, 6), torch.ones(4, 5)),
        (torch.ones(2, 4, 5), torch.ones(5, 6), torch.ones(2, 4, 6)),
        (torch.ones(4, 5).double(), torch.ones(5, 6).double(), torch.ones(4, 6).double()),
        (torch.ones(4, 5), torch.ones(5, 6).half(), torch.ones(4, 6)),
        (torch.ones(4, 5), torch.ones(5, 6), torch.ones(6, 4).t()),
    ],
)
def test_what_is_no_product_is_refused(a: Tensor, b: Tensor, residual: Tensor) -> None:
    with pytest.raises(ArgumentError, match="must"):
        gemm_add_forward(DYT, a, b, residual, None, torch.ones(1), None, None, None, None, 1.0)


def test_an_empty_product() -> None:
    y, h = gemm_add_forward(
        DYT, torch.ones(0, 5), torch.ones(5, 6), torch.ones(0, 6), None, torch.ones(1), None, None, None, None, 1.0
    )
    assert y.shape == h.shape == (0, 6)
