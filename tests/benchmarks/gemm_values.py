"""The matrix product with its epilogue, in Triton's interpreter or on a GPU; run by tests/kernels/test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.gemm import gemm_add_forward
from dynorm.errors import ArgumentError
from dynorm.kernels._form import Form, Parameters
from tests.kernels.definition import FUNCTIONS, TOLERANCES, make

DYISRU, DYT, _, LINEAR = FUNCTIONS
BARE = Parameters(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
# Aligned sizes go by descriptors (in 16 bits), the others by pointers; the last has nothing to
# multiply.
@pytest.mark.parametrize(("m", "n", "k"), [(80, 72, 136), (33, 35, 37), (1, 64, 64), (3, 4, 0)])
def test_product_with_residual_and_function(
    m: int, n: int, k: int, transposed: bool, dtype: torch.dtype
) -> None:
    a, gemm_bias = torch.randn(m, k).to(dtype), torch.randn(n)
    b = torch.randn(n, k).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
    call, form = make(m, n, dtype, "per channel", DYISRU), Form(DYISRU, False, 1.7)
    y, h = gemm_add_forward(form, a, b, call.x, gemm_bias, call.parameters)
    tolerance = 2 * TOLERANCES[dtype]
    assert y.dtype == h.dtype == dtype
    product = a.double() @ b.double() + gemm_bias.double() + call.x.double()
    assert_close(h.double(), product, rtol=tolerance, atol=tolerance * max(k, 1) ** 0.5)
    wide = Parameters(*(None if p is None else p.double() for p in call.parameters))
    expected = form.definition(h.double(), wide)
    assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_product_with_each_function_and_no_parts(function: int) -> None:
    a, b = torch.randn(40, 24), torch.randn(24, 48)
    call, form = make(40, 48, torch.float32, "bare", function), Form(function, False, 0.5)
    y, h = gemm_add_forward(form, a, b, call.x, None, call.parameters)
    assert_close(h, a @ b + call.x)
    assert_close(y, form.definition(h, call.parameters), rtol=1e-5, atol=1e-5)


def test_product_takes_any_strides() -> None:
    a, b, residual = torch.randn(24, 40).t(), torch.randn(48, 48)[::2], torch.randn(40, 48)
    _, h = gemm_add_forward(Form(LINEAR, False, 1.0), a, b, residual, None, BARE)
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
        gemm_add_forward(Form(DYT, False, 1.0), a, b, residual, None, BARE)


def test_an_empty_product() -> None:
    a, b, residual = torch.ones(0, 5), torch.ones(5, 6), torch.ones(0, 6)
    y, h = gemm_add_forward(Form(DYT, False, 1.0), a, b, residual, None, BARE)
    assert y.shape == h.shape == (0, 6)


def test_parameters_that_do_not_fit_are_refused() -> None:
    a, b, residual = torch.ones(4, 5), torch.ones(5, 6), torch.ones(4, 6)
    for gemm_bias, constant in (
        (torch.ones(5), torch.ones(1)),
        (torch.ones(1), torch.ones(1)),
        (None, torch.ones(2)),
    ):
        with pytest.raises(ArgumentError, match=r"parameter.*contiguous"):
            gemm_add_forward(Form(DYT, False, 1.0), a, b, residual, gemm_bias, Parameters(constant))
