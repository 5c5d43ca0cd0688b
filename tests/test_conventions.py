"""One convention in all functions: how an example is given, and that reports are plain values."""

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm

WIDTH = 8


class Encoder(nn.Module):
    """A model that is called with names, as those of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(input_ids) * scale))


def build() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "input_ids": torch.randint(30, (2, 5), generator=generator),
        "scale": torch.tensor(2.0),
    }


EXAMPLES: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "names": lambda: ((), inputs()),
    "positions": lambda: (tuple(inputs().values()), {}),
    "dict": lambda: ((inputs(),), {}),
    "tuple": lambda: ((tuple(inputs().values()),), {}),
    "tokenizer": lambda: ((UserDict(inputs()),), {}),
}
every_example = pytest.mark.parametrize("example", list(EXAMPLES))


@every_example
def test_find_norms_and_fold(example: str) -> None:
    args, kwargs = EXAMPLES[example]()
    model = build()
    expected = model(**inputs())
    assert [site.path for site in dynorm.find_norms(model, *args, **kwargs)] == ["norm"]
    report = dynorm.fold_(model, *args, **kwargs)
    assert report.count("affine") == 1
    torch.testing.assert_close(model(**inputs()), expected)


def reports() -> dict[str, Any]:
    model, original = build(), build()
    batches = [inputs() for _ in range(4)]
    return {
        "convert_": dynorm.convert_(model, dynorm.find_norms(model, **inputs())),
        "calibrate_": dynorm.calibrate_(model, batches),
        "refine_": dynorm.refine_(model, batches, steps=1),
        "measure": dynorm.measure(model, batches, original=original),
        "fold_": dynorm.fold_(build(), inputs()),
    }


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_reports_can_be_copied_and_pickled() -> None:
    for report in reports().values():
        assert pickle.loads(pickle.dumps(report)).to_dict() == report.to_dict()
        assert copy.deepcopy(report).to_dict() == report.to_dict()
