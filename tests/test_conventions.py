"""One convention in all functions: how an example is given, and that a report is not the model."""

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.hub import as_stock

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


class TakesADict(Encoder):
    """A model whose argument is the dict itself."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"], batch["scale"])


def build(kind: type[Encoder] = Encoder) -> Encoder:
    torch.manual_seed(0)
    return kind().eval()


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


def converted() -> Encoder:
    model = build()
    dynorm.convert_(model, dynorm.find_norms(model, **inputs()), "linear", center=False)
    dynorm.calibrate_(model, [inputs()])
    return model


@every_example
def test_find_norms_and_fold(example: str) -> None:
    args, kwargs = EXAMPLES[example]()
    model = build()
    expected = model(**inputs())
    assert [site.path for site in dynorm.find_norms(model, *args, **kwargs)] == ["norm"]
    report = dynorm.fold_(model, *args, **kwargs)
    assert report.count("affine") == 1
    torch.testing.assert_close(model(**inputs()), expected)


def test_a_model_may_take_a_dict_itself() -> None:
    model = build(TakesADict)
    assert [site.path for site in dynorm.find_norms(model, inputs())] == ["norm"]
    assert dynorm.fold_(model, inputs()).count("affine") == 1


def test_as_stock_says_what_is_left_and_what_to_do() -> None:
    config = SimpleNamespace(layer_norm_eps=1e-5)
    model, plain = converted(), build()
    model.config = plain.config = config
    with pytest.raises(dynorm.DynormError, match=r"still.*dynorm"):
        as_stock(model, inputs())
    with pytest.raises(dynorm.DynormError, match=r"none.*linear"):
        as_stock(plain, inputs())


def reports() -> dict[str, Any]:
    model = build()
    batches = [inputs() for _ in range(4)]
    original = copy.deepcopy(model)
    return {
        "convert_": dynorm.convert_(model, dynorm.find_norms(model, **inputs())),
        "calibrate_": dynorm.calibrate_(model, batches),
        "refine_": dynorm.refine_(model, batches, steps=1),
        "measure": dynorm.measure(model, batches),
        "fold_": dynorm.fold_(model, inputs()),
        "convert_model": dynorm.convert_model(original, batches, refine=1),
        "distill_": dynorm.distill_(
            original, batches, teacher=build(), steps=1, lr=1e-9, quiet=True
        ),
    }


@pytest.mark.filterwarnings("ignore::dynorm.errors.CalibrationWarning")
def test_a_report_is_not_the_model() -> None:
    """``model = dynorm.convert_model(model, ...)`` loses the model."""
    for report in reports().values():
        name = type(report).__name__
        for attribute in ("eval", "generate", "parameters"):
            with pytest.raises(AttributeError, match=rf"'{name}' .*'{attribute}': .*not the model"):
                getattr(report, attribute)
        with pytest.raises(TypeError, match=f"'{name}'.*callable.*not the"):
            report(torch.randn(2))
        with pytest.raises(AttributeError, match=r"has no attribute '__nothing__'$"):
            report.__nothing__  # noqa: B018
        assert pickle.loads(pickle.dumps(report)).to_dict() == report.to_dict()
        assert copy.deepcopy(report).to_dict() == report.to_dict()
    # A site is not returned in the place of a model.
    with pytest.raises(AttributeError, match=r"has no attribute 'eval'$"):
        dynorm.find_norms(build(), **inputs())[0].eval  # type: ignore[attr-defined]  # noqa: B018


def test_an_outlier_is_the_same_in_all_reports() -> None:
    model = build()
    batches = [inputs(), inputs()]
    model.embed.weight.data[int(inputs()["input_ids"][0, 0]), 3] = 50.0
    inspected = dynorm.inspect_norms(model, batches)
    dynorm.convert_model(model, batches, held_out=batches, refine=0)
    measured = dynorm.measure(model, batches)
    values = []
    for report in (inspected, measured):
        heads = [column.title for column in report.table().head()]
        row = report.table().rows[0]
        values.append(row[heads.index("outlier")])
    # One of 8 channels is at most the root of 7 in the sigma of its token.
    assert 2.6 < values[0] < 7**0.5
    assert values[1] == pytest.approx(values[0], rel=1e-6)
