"""The matrix product with its epilogue, in Triton's interpreter or on a GPU; run by tests/kernels/test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.gemm import gemm_add_forward
from dynorm.errors import ArgumentError
from dynorm.kernels._form import Form, Parameters
from tests.kernels.triton_values import (
    DTYPES,
    DYISRU,
    DYT,
    FUNCTIONS,
    LINEAR,
    TOLERANCE,
    given,
    in_float64,
    parts,
    reference,
    sample,
)  # fmt: skip

BARE = Parameters(torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("transposed", [False, True])
# Aligned sizes go by descriptors (in 16 bits), the others by pointers; the last has nothing to
# multiply.
@pytest.mark.parametrize(("m", "n", "k"), [(80, 72, 136), (33, 35, 37), (1, 64, 64), (3, 4, 0)])
def test_product_with_residual_and_function(
    m: int, n: int, k: int, transposed: bool, dtype: torch.dtype
) -> None:
    a, residual = sample(m, k, seed=0, dtype=dtype), sample(m, n, seed=1, dtype=dtype)
    b = sample(n, k, seed=2, dtype=dtype).t() if transposed else sample(k, n, seed=2, dtype=dtype)
    p, gemm_bias = parts(DYISRU, n, torch.float32), sample(n, seed=6, dtype=torch.float32)
    y, h = gemm_add_forward(Form(DYISRU, False, 1.7), a, b, residual, gemm_bias, given(p))
    rtol, _ = TOLERANCE[dtype]
    assert y.dtype == h.dtype == dtype
    product = a.double() @ b.double() + gemm_bias.double() + residual.double()
    assert_close(h.double(), product, rtol=rtol, atol=rtol * max(k, 1) ** 0.5)
    with torch.no_grad():
        assert_close(
            y.double(), reference(DYISRU, h.double(), in_float64(p), 1.7), rtol=rtol, atol=rtol
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_product_with_each_function_and_no_parts(function: int) -> None:
    a, b, residual = sample(40, 24, seed=0), sample(24, 48, seed=1), sample(40, 48, seed=2)
    a, b, residual = a.float(), b.float(), residual.float()
    p = parts(function, 48, torch.float32, per_channel=False, bare=True)
    y, h = gemm_add_forward(Form(function, False, 0.5), a, b, residual, None, given(p))
    assert_close(h, a @ b + residual)
    assert_close(y, reference(function, h, p, 0.5))


def test_product_takes_any_strides() -> None:
    a, b = sample(24, 40, seed=0).float().t(), sample(48, 48, seed=1).float()[::2]
    residual = sample(40, 48, seed=2).float()
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
