"""The errors of layers against their norms, and the parameters that a distillation moves."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.train.site_errors import site_errors, unexplained_share

C = 16


def converted(original: nn.Module, x: Tensor) -> nn.Module:
    model = copy.deepcopy(original)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    dynorm.calibrate_(model, [x])
    return model


def test_the_error_leaves_padding_out_and_is_finite_for_a_single_token() -> None:
    layer, mask = dynorm.DyISRU(C), torch.tensor([[True, True, True, False]])
    y, f = torch.randn(2, 1, 4, C)
    other = torch.where(mask[..., None], f, 0.0)
    errors = [site_errors({layer: [y]}, {layer: [each]}, [mask]) for each in (f, other)]
    assert torch.equal(*errors)
    # Its target has no spread.
    y, f = y[0, :1], f[0, :1]
    share = (f - y).square().sum() / (0.01 * y.square().sum())
    assert torch.isclose(unexplained_share(f, y), share)


def test_a_call_without_rows_does_not_count() -> None:
    first, second = dynorm.DyISRU(C), dynorm.DyISRU(C)
    y, f = torch.randn(2, 64, C)
    none = torch.empty(0, C)
    errors = site_errors({first: [y], second: [none]}, {first: [f], second: [none]}, [])
    assert torch.allclose(errors, (f - y).square().sum() / (y - y.mean(0)).square().sum())
    with pytest.raises(DataError, match="with tokens"):
        site_errors({second: [none]}, {second: [none]}, [])


def test_a_layer_without_gradients_is_refused() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quiet, self.norm = nn.LayerNorm(C), nn.LayerNorm(C)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.quiet(x)
            return self.norm(x)

    original, x = Quiet(), torch.randn(64, C)
    model = converted(original, x)
    with pytest.raises(ModelError, match=r"gradients.*'quiet'"):
        dynorm.distill_(model, [x], teacher=original, steps=1)
    model.quiet.requires_grad_(False)
    assert dynorm.distill_(model, [x], teacher=original, steps=1).steps == 1


def test_frozen_weights_stay_as_they_are_and_the_layers_move() -> None:
    original, x = (
        nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C)),
        torch.randn(64, C),
    )
    model = converted(original, x)
    for module in model:
        module.requires_grad_(isinstance(module, PointwiseNorm))
    model[1].set_slope_(4 * model[1].beta().detach())
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = dynorm.distill_(model, [x], teacher=original, steps=20, lr=1e-2)
    assert report.loss_after < report.loss_before
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"1.log_beta", "1.weight", "1.bias"}


def test_bfloat16_is_not_used_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    original, x = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)), torch.randn(64, C)
    plain, model = converted(original, x), converted(original, x)
    dynorm.distill_(plain, [x], teacher=original, steps=2)
    with pytest.warns(CalibrationWarning, match="bfloat16 instructions") as caught:
        dynorm.distill_(model, [x], teacher=original, steps=2, bf16=True)
    assert caught[0].filename == __file__
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
def test_default_constants_are_told_once_and_fitted_ones_never(to: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.LayerNorm(C)), torch.randn(64, C)
    original = copy.deepcopy(model)
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    for act in (
        lambda: dynorm.measure(model, [x], original=original),
        lambda: dynorm.save(model, tmp_path / "early"),
    ):
        with pytest.warns(CalibrationWarning, match=r"point-wise.*constants") as caught:
            act()
        assert len(caught) == 1
    dynorm.calibrate_(model, [x])
    # Warnings are errors here.
    dynorm.measure(model, [x], original=original)
    dynorm.save(model, tmp_path / "m")
