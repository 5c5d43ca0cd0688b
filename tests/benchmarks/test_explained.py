"""The parts of benchmarks/explained.py, on inputs whose results are known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.explained import (
    Norm,
    dyisru,
    dyt,
    fitted,
    layer,
    share,
    steps,
)


@pytest.fixture
def norm() -> Norm:
    """Tokens of two sizes: a constant is right for neither."""
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 4.0]).repeat(200)[:, None]
    return Norm("n", 0.0, sizes * torch.randn(400, 16), sizes * torch.randn(400, 16))


def test_the_share_of_an_estimate() -> None:
    y = torch.tensor([0.0, 2.0, 4.0])
    assert share(y, y) == 1
    assert share(y, torch.full((3,), 2.0)) == 0
    assert share(y, torch.tensor([0.0, 2.0, 2.0])) == 0.5


@pytest.mark.parametrize(("shape", "constant"), [(dyt, 0.3), (dyisru, 7.0)])
def test_a_function_of_the_family_is_found_again(shape, constant, monkeypatch) -> None:
    torch.manual_seed(0)
    norm = Norm("n", 0.0, 3 * torch.randn(1600, 8), torch.randn(4, 8))
    monkeypatch.setattr(Norm, "output", lambda self, x: 2.5 * shape(x, constant))
    found = fitted(shape, [norm])
    assert found.scale == pytest.approx(2.5, rel=0.01)
    assert found.constant == pytest.approx(constant, rel=0.02)


def test_a_function_of_any_shape_has_the_mean_of_each_interval() -> None:
    x = torch.arange(8.0)
    function = steps(torch.stack([x, -x]), torch.stack([x.square(), x]), 2)
    asked = torch.tensor([[-9.0, 3.0, 4.0, 99.0], [-9.0, -4.0, -3.0, 0.0]])
    assert function(asked).tolist() == [[3.5, 3.5, 31.5, 31.5], [5.5, 5.5, 1.5, 1.5]]


def test_witnesses_explain_tokens_of_different_sizes(norm: Norm) -> None:
    pure = norm.explained(layer(norm, True, 0))
    assert pure < 0.8
    assert pure + 0.1 < norm.explained(layer(norm, True, 8)) < 1
