"""A model may write into its input: no verb lets that change the caller's batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm

C = 12


class InPlace(nn.Module):
    """Shifts its input, or clips its numbers of tokens, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, C)
        self.norm = nn.LayerNorm(C)
        self.out = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.out(self.norm(x.mul_(2).add_(1)))  # type: ignore[no-any-return]
        return self.out(self.norm(self.table(x.add_(1).remainder_(5))))  # type: ignore[no-any-return]


def built() -> InPlace:
    torch.manual_seed(0)
    model = InPlace().eval()
    dynorm.convert_(model, dynorm.find_norms(model, torch.randn(4, C)))
    dynorm.calibrate_(model, [torch.randn(80, C)])
    return model


def example_of(batch: Any) -> dict[str, Tensor]:
    return batch if isinstance(batch, dict) else {"x": batch}


VERBS: dict[str, Callable[[Any], object]] = {
    "find_norms": lambda batch: dynorm.find_norms(InPlace(), batch),
    "inspect_norms": lambda batch: dynorm.inspect_norms(InPlace(), [batch]),
    "calibrate_": lambda batch: dynorm.calibrate_(built(), [batch]),
    "refine_": lambda batch: dynorm.refine_(built(), [batch], steps=1),
    "measure": lambda batch: dynorm.measure(built(), [batch], original=InPlace().eval()),
    "init_from_batch_": lambda batch: dynorm.init_from_batch_(built(), batch),
    "fold_": lambda batch: dynorm.fold_(built(), **example_of(batch)),
    "distill_": lambda batch: dynorm.distill_(
        built(), [batch], teacher=InPlace().eval(), steps=1, lr=1e-4
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("form", ["floats", "integers", "dict"])
def test_the_batch_is_as_it_was(verb: str, form: str) -> None:
    torch.manual_seed(1)
    x = torch.randint(0, 5, (2, 80)) if form == "integers" else torch.randn(80, C)
    before = x.clone()
    VERBS[verb]({"x": x} if form == "dict" else x)
    assert torch.equal(x, before)


def test_the_original_and_the_converted_model_see_the_same_batch() -> None:
    """Doubled twice, the input of the converted model would be another one."""
    model = built()
    torch.manual_seed(0)
    original = InPlace().eval()
    batch = torch.randn(80, C)
    report = dynorm.measure(model, [batch], original=original)
    with torch.no_grad():
        now = model(batch.clone())
        expected = original(batch.clone())
    error = float((now - expected).square().sum() / (expected - expected.mean(0)).square().sum())
    assert report.output.error == pytest.approx(error**0.5, rel=1e-4)
