"""The benchmarks: a wrong result is not timed, and every table fits its committed results."""

import pytest
import torch
from torch import nn

import dynorm
from benchmarks import gpu, speed, tables
from benchmarks.timing import measure, ratio


@pytest.mark.parametrize("name", speed.CONTENDERS)
@pytest.mark.parametrize("dtype", speed.TOLERANCES)
def test_every_contender_computes_its_function(name, dtype):
    torch.manual_seed(0)
    module = speed.CONTENDERS[name](24).to(dtype)
    speed.check(module, torch.randn(7, 24).to(dtype), torch.randn(7, 24).to(dtype))


def test_a_wrong_result_ends_the_run():
    class Wrong(dynorm.DyISRU):
        def forward(self, x):
            return 1.01 * super().forward(x)

    torch.manual_seed(0)
    with pytest.raises(SystemExit, match="output is off by"):
        speed.check(Wrong(24), torch.randn(7, 24), torch.randn(7, 24))


def test_the_op_takes_the_layer_of_a_fused_product():
    x, weight, residual = torch.randn(4, 8), torch.randn(16, 8), torch.randn(4, 16)
    total, y = gpu.fused(x, weight, residual, gpu.layer_arguments(16, 2.0, 1.5))
    torch.testing.assert_close(total, x @ weight.t() + residual)
    torch.testing.assert_close(y, dynorm.functional.dyisru(total, 2.0, scale=1.5))


def test_calls_are_timed_in_every_round():
    calls = []
    times = measure({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3)
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert set(calls) == {"a", "b"}
    assert ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0]) == [3.0, 2.5, 3.5]


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_a_page_are_those_of_the_results(page):
    assert tables.renewed(page) == (tables.ROOT / page).read_text("utf-8")


def test_a_norm_is_defined_with_its_eps():
    x = torch.randn(5, 8, dtype=torch.float64)
    for norm in (nn.LayerNorm(8), nn.RMSNorm(8)):
        norm = norm.double()
        torch.testing.assert_close(speed.defined(norm, x), norm(x))
