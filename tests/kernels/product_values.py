"""The matrix product with its epilogue, in Triton's interpreter or on a GPU; run by test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from dynorm.kernels import _triton
from dynorm.kernels._form import Form, Parameters
from dynorm.kernels._triton_product import can_multiply, product
from tests.kernels.definition import FUNCTIONS, TOLERANCES, make

DYISRU = FUNCTIONS[0]
if not _triton.interpreted() and torch.cuda.is_available():
    torch.set_default_device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
# A few rows, and more than one tile each way.
@pytest.mark.parametrize(("m", "n", "k"), [(3, 72, 136), (80, 136, 72)])
def test_product_with_all_parts(
    m: int, n: int, k: int, transposed: bool, dtype: torch.dtype
) -> None:
    x, bias, factor = torch.randn(m, k).to(dtype), torch.randn(n), torch.rand(n)
    weight = torch.randn(n, k).to(dtype)
    stored = weight.t().contiguous() if transposed else weight
    call, form = make(m, n, dtype, "all", DYISRU), Form(DYISRU, True, 1.7)
    total, y = torch.empty_like(call.x), torch.empty_like(call.x)
    others = (bias, factor, call.x)
    assert can_multiply(x, stored, call.x)
    product(x, stored, transposed, others, call.parameters, form, total, y)
    tolerance = 2 * TOLERANCES[dtype]
    expected = (x.double() @ weight.double().t() + bias) * factor + call.x
    assert_close(total.double(), expected, rtol=tolerance, atol=tolerance * k**0.5)
    wide = Parameters(*(None if p is None else p.double() for p in call.parameters))
    assert_close(y.double(), form.definition(total.double(), wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_product_with_each_function_and_no_parts(function: int) -> None:
    x, weight = torch.randn(40, 24).half(), torch.randn(48, 24).half()
    parameters, form = Parameters(torch.ones(1)), Form(function, False, 0.5)
    y = torch.empty(40, 48).half()
    product(x, weight, False, (None, None, None), parameters, form, None, y)
    expected = form.definition(x.double() @ weight.double().t(), Parameters(torch.ones(1).double()))
    assert_close(y.double(), expected, rtol=5e-3, atol=5e-3)


def test_rows_that_the_copy_engine_cannot_load_are_left_to_torch() -> None:
    x = torch.zeros(8, 64).half()
    assert can_multiply(x, None)
    for other in (x.float(), x[:, :60], x.flatten()[4:].view(-1, 4), x.t()):
        assert not can_multiply(x, other)
