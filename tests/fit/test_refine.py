"""refine_: the joint error falls, nothing but the point-wise layers moves, and errors leave no trace."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.batches import call
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.fit.site_errors import site_errors, unexplained_share
from dynorm.layers import PointwiseNorm
from dynorm.replace.converted import dynorm_layers
from dynorm.replace.original import norm_outputs, recorded

C = 16


class Block(nn.Module):
    """A residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(C), nn.Linear(C, C), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).relu())


def model_and_batches(to: str = "dyisru") -> tuple[nn.Module, list[Tensor]]:
    model = nn.Sequential(*(Block() for _ in range(4)), nn.RMSNorm(C))
    batches = [torch.randn(16, 8, C) * torch.rand(16, 8, 1).add(0.3) for _ in range(4)]
    sites = dynorm.find_norms(model, batches[0])
    dynorm.convert_(model, sites, to=to)
    dynorm.calibrate_(model, batches)
    return model, batches


def is_ours(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), PointwiseNorm)


def error(model: nn.Module, batches: list[Any]) -> float:
    total = 0.0
    twin = copy.deepcopy(model).eval()
    for batch in batches:
        with torch.no_grad():
            wanted = norm_outputs(twin, batch)
            with recorded({layer: layer for layer in wanted}) as given:
                call(twin, batch)
        total += float(site_errors(wanted, given, []).mean())
    return total / len(batches)


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
def test_the_joint_error_falls(to: str) -> None:
    model, batches = model_and_batches(to)
    # Worse constants than those of the calibration, which leaves little to gain.
    for layer in dynorm_layers(model).values():
        layer.set_slope_(2 * layer.beta().detach())
    before = error(model, batches)
    report = dynorm.refine_(model, batches, steps=41)
    assert error(model, batches) < 0.9 * before
    assert report.steps == 41
    # Both of all batches.
    assert report.first_error == pytest.approx(math.sqrt(before), rel=1e-5)
    assert report.last_error == pytest.approx(math.sqrt(error(model, batches)), rel=1e-5)
    assert report.to_dict() == {
        "steps": 41,
        "first_error": report.first_error,
        "last_error": report.last_error,
    }
    assert str(report).startswith("41 steps of joint refinement: mean site error 0.")


def test_only_point_wise_layers_move() -> None:
    model, batches = model_and_batches()
    model[1].linear.weight.requires_grad_(False)
    model[2].norm.requires_grad_(False)
    model[0].linear.weight.grad, model[0].norm.weight.grad = torch.ones(C, C), torch.ones(C)
    model[3].eval()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    before = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    dynorm.refine_(model, batches, steps=3)
    assert torch.equal(torch.rand(1), expected)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != is_ours(model, name), name
        assert p.requires_grad == flags[name]
    assert [m.training for m in model.modules()] == modes
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads == {"0.linear.weight", "0.norm.weight"}
    assert torch.equal(model[0].norm.weight.grad, torch.ones(C))
    assert not any(m._forward_hooks for m in model.modules())


def test_it_is_deterministic_and_needs_no_grad_mode() -> None:
    model, batches = model_and_batches()
    twin = copy.deepcopy(model)
    dynorm.refine_(model, batches, steps=5)
    with torch.no_grad():
        dynorm.refine_(twin, iter(batches), steps=5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_bfloat16_autocast_moves_the_parameters_nearly_alike() -> None:
    model, batches = model_and_batches()
    twin, before = copy.deepcopy(model), error(model, batches)
    plain = dynorm.refine_(model, batches, steps=30)
    with torch.autocast("cpu", torch.bfloat16):
        report = dynorm.refine_(twin, batches, steps=30)
    assert {p.dtype for p in twin.parameters()} == {torch.float32}
    gain, rounded = (before - error(each, batches) for each in (model, twin))
    assert rounded == pytest.approx(gain, rel=0.1)
    assert report.first_error == pytest.approx(plain.first_error, rel=0.01)
    assert report.first_error != plain.first_error
    assert twin[0].linear(batches[0]).dtype == torch.float32


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


def fails(
    model: nn.Module,
    batches: Any,
    match: str,
    kind: type[Exception] = DataError,
    steps: Any = 6,
    **options: Any,
) -> None:
    before = [(p, p.detach().clone(), p.requires_grad, p.dtype) for p in model.parameters()]
    with pytest.raises(kind, match=match):
        dynorm.refine_(model, batches, steps=steps, **options)
    after = list(model.parameters())
    assert all(
        p is q and torch.equal(p, v) and p.requires_grad == r
        for q, (p, v, r, _) in zip(after, before, strict=True)
    )
    assert all(p.dtype == dtype and p.grad is None for p, _, _, dtype in before)
    assert not any(m._forward_hooks for m in model.modules())


def test_wrong_batches() -> None:
    model, batches = model_and_batches()
    fails(model, [], "least.*batch")
    fails(model, [torch.randn(2, C + 1)], "run.*batch")
    fails(
        model,
        [*batches, batches[0] * math.nan],
        "loss.*nan.*batch 4",
    )
    fails(
        model.bfloat16(),
        [*(b.bfloat16() for b in batches), batches[0].bfloat16() * math.nan],
        "nan.*batch 4",
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "steps.*got 0"),
        ({"lr": math.nan}, "lr.*got nan"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str) -> None:
    model, batches = model_and_batches()
    fails(model, batches, match, ArgumentError, **options)


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear"])
def test_default_constants_are_told_once_and_fitted_ones_never(to: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.LayerNorm(C)), torch.randn(64, C)
    original = copy.deepcopy(model)
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    for k, act in enumerate(
        (
            lambda: dynorm.measure(model, [x], original=original),
            lambda: dynorm.save(model, tmp_path / "early"),
            lambda: dynorm.refine_(copy.deepcopy(model), [x], steps=1),
        )
    ):
        with pytest.warns(
            dynorm.errors.CalibrationWarning, match=r"point-wise.*constants"
        ) as caught:
            act()
        assert len(caught) == 1, k
    dynorm.calibrate_(model, [x])
    # Warnings are errors here.
    dynorm.refine_(model, [x], steps=1)
    dynorm.measure(model, [x], original=original)
    dynorm.save(model, tmp_path / "m")


def test_models_that_cannot_be_refined() -> None:
    x = [torch.randn(2, C)]
    with pytest.raises(ModelError, match=r"none.*dynorm\.convert_"):
        dynorm.refine_(nn.Sequential(nn.LayerNorm(C)), x, steps=1)
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
    dynorm.convert_(model, dynorm.find_norms(model, x[0]), to="annealed")
    with pytest.raises(ModelError, match=r"annealed.*t = 0"):
        dynorm.refine_(model, x, steps=1)
    dynorm.set_anneal_(model, 1.0)
    assert dynorm.refine_(model, x, steps=1).steps == 1


def test_a_rate_that_is_far_too_high_leaves_the_constants_as_they_were() -> None:
    model, batches = model_and_batches()
    before = copy.deepcopy(model.state_dict())
    report = dynorm.refine_(model, batches, steps=3, lr=30.0)
    assert report.last_error == report.first_error
    assert "the old constants are put back" in " ".join(str(report).split())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


class Experts(nn.Module):
    """Two experts, of which the first takes the rows that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        return torch.cat([self.first(x[chosen]), self.second(x[~chosen])])


def experts() -> tuple[nn.Module, list[Tensor]]:
    """A model whose second norm gets no rows in the second batch."""
    model, mixed = Experts(), torch.randn(64, C)
    dynorm.convert_(model, dynorm.find_norms(model, mixed))
    dynorm.calibrate_(model, [mixed])
    routed = torch.randn(64, C)
    routed[:, 0] = routed[:, 0].abs()
    return model, [mixed, routed]


def test_a_call_without_rows_does_not_count() -> None:
    model, (_, routed) = experts()
    report = dynorm.refine_(copy.deepcopy(model), [routed], steps=1, lr=1e-9)
    with torch.no_grad():
        y = dynorm.restore_(copy.deepcopy(model)).first(routed)
        f = model.first(routed)
    only = (f - y).square().sum() / (y - y.mean(0)).square().sum()
    assert report.first_error == pytest.approx(float(only.sqrt()), rel=1e-5)
    masks = [torch.ones(64, 1, dtype=torch.bool)]
    wanted, given = ({layer: [x[:0]] for layer in (model.first,)} for x in (routed, routed))
    with pytest.raises(DataError, match="with tokens"):
        site_errors(wanted, given, masks)


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
    model = copy.deepcopy(original)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    dynorm.calibrate_(model, [x])
    fails(model, [x], "gradients.*'quiet'", ModelError)
    with pytest.raises(ModelError, match=r"gradients.*'quiet'"):
        dynorm.distill_(model, [x], teacher=original, steps=1)
    model.quiet.requires_grad_(False)
    assert dynorm.distill_(model, [x], teacher=original, steps=1).steps == 1
