"""One norm is converted, saved and loaded, then another is converted: every verb works on the second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import CalibrationWarning, ModelError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.first = nn.LayerNorm(24)
        self.middle = nn.Linear(24, 24)
        self.second = nn.LayerNorm(24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + torch.tanh(self.middle(self.first(h)))
        return self.head(self.second(h))


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def batches(count: int = 4) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [3 * torch.randn(64, 8, generator=source) for _ in range(count)]


def half_loaded(folder: Path, first: str = "dyisru", second: str = "dyisru", **options: int) -> Net:
    """Return a model whose first layer was loaded and whose second one has just been converted."""
    model = build()
    x = batches()[0]
    dynorm.convert_(model, dynorm.find_norms(model, x), {"first": first, "*": None})
    dynorm.calibrate_(model, batches())
    dynorm.save(model, folder)
    loaded = dynorm.load(folder, build())
    assert isinstance(loaded, Net)
    report = dynorm.convert_(loaded, dynorm.find_norms(loaded, x), second, **options)
    assert [site.path for site in report.converted] == ["second"]
    return loaded


def first_layer(model: Net) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.first.state_dict().items()}


@pytest.mark.parametrize("second", ["dyisru", "dyt", "annealed"])
@pytest.mark.parametrize("witnesses", [0, 2])
def test_calibration_sets_the_second_as_if_the_first_were_part_of_the_model(
    tmp_path: Path, second: str, witnesses: int
) -> None:
    model = half_loaded(tmp_path / "model", second=second, witnesses=witnesses)
    first = first_layer(model)
    report = dynorm.calibrate_(model, batches())
    assert [site.path for site in report.sites] == ["second"]
    assert (report.left, report.unreached) == (["first"], [])
    assert "first: left as it is, its norm is not known" in str(report)
    assert all(torch.equal(value, first[name]) for name, value in model.first.state_dict().items())
    # The same second layer, in a model whose first layer is plain arithmetic to dynorm.
    plain = dynorm.load(tmp_path / "model", build())
    assert isinstance(plain, Net)
    alone = nn.Sequential(plain.second)
    dynorm.convert_(
        alone, dynorm.find_norms(alone, torch.randn(3, 24)), second, witnesses=witnesses
    )
    inputs = []
    handle = model.second.register_forward_hook(lambda _, args, __: inputs.append(args[0].detach()))
    for batch in batches():
        model(batch)
    handle.remove()
    dynorm.calibrate_(alone, inputs)
    for name, value in alone[0].state_dict().items():
        torch.testing.assert_close(model.second.state_dict()[name], value)


# An annealed layer that was loaded as the norm does not stop the refinement.
@pytest.mark.parametrize("first_kind", ["dyisru", "annealed"])
def test_refinement_moves_the_second_only(tmp_path: Path, first_kind: str) -> None:
    model = half_loaded(tmp_path / "model", first_kind)
    dynorm.calibrate_(model, batches())
    first, second = first_layer(model), model.second.log_beta.detach().clone()
    report = dynorm.refine_(model, [2 * batch for batch in batches()], steps=4)
    assert report.left == ["first"]
    assert "first: left as it is" in str(report)
    assert all(torch.equal(value, first[name]) for name, value in model.first.state_dict().items())
    assert not torch.equal(model.second.log_beta, second)


def test_the_second_norm_comes_back(tmp_path: Path) -> None:
    model = half_loaded(tmp_path / "model")
    dynorm.calibrate_(model, batches())
    first = model.first
    with pytest.warns(CalibrationWarning, match="left first.*known"):
        dynorm.restore_(model)
    assert model.first is first
    assert isinstance(model.second, nn.LayerNorm)
    expected = dynorm.load(tmp_path / "model", build())
    x = batches()[0]
    assert torch.equal(model(x), expected(x))
    # Then there is nothing left that is known.
    with pytest.raises(ModelError, match="those of first"):
        dynorm.restore_(model)
    with pytest.raises(ModelError, match=r"'first'.*replaced.*norm"):
        dynorm.calibrate_(model, batches())
