"""Layers with witnesses: their state in every form that a layer takes, and bad input."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError
from dynorm.layers import AnnealedNorm, PointwiseNorm
from dynorm.layers.annealed import AnnealedDerf, AnnealedDyISRU, AnnealedDyT, AnnealedLinear

LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl]
ANNEALED = [AnnealedDyISRU, AnnealedDyT, AnnealedDerf, AnnealedLinear]
ALL: list[type[PointwiseNorm]] = [*LAYERS, *ANNEALED]
C, WITNESSES, GAINS = 6, (4, 1), (0.3, 2.0)


def layer_of(cls: type[PointwiseNorm], **options: Any) -> Any:
    torch.manual_seed(0)
    if issubclass(cls, AnnealedNorm):
        options = {"t": 1.0, **options}
    layer = cls(C, center=True, witnesses=WITNESSES, **options)
    layer.set_witnesses_(WITNESSES, GAINS)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "log_gain":
                parameter.add_(0.3 * torch.rand_like(parameter))
    return layer


def tokens() -> Tensor:
    return torch.randn(5, C, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [1, 30, 1, 1, 9, 1]
    )


def same(one: Any, other: Any) -> None:
    """Both have the same state, and give the same."""
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert one.config() == other.config()
    assert torch.equal(one(tokens()), other(tokens()))


@pytest.mark.parametrize("cls", ALL)
def test_the_state_is_the_index_and_the_gains(cls: type[PointwiseNorm]) -> None:
    layer = layer_of(cls)
    state = layer.state_dict()
    assert state["witnesses"].tolist() == list(WITNESSES)
    assert state["witnesses"].dtype == torch.int64
    assert state["log_gain"].exp().tolist() == pytest.approx(GAINS)
    assert layer.config()["witnesses"] == list(WITNESSES)
    assert any(p is layer.log_gain for p in layer.constant_parameters())
    # A layer without any has neither.
    plain = cls(C, center=True)
    assert state.keys() - plain.state_dict().keys() == {"witnesses", "log_gain"}
    assert "witnesses" not in plain.config()
    layer.set_witnesses_(())
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert layer.config().keys() == plain.config().keys()


@pytest.mark.parametrize("cls", ALL)
def test_copies_pickles_and_configs(cls: type[PointwiseNorm]) -> None:
    layer = layer_of(cls)
    same(copy.deepcopy(layer), layer)
    same(pickle.loads(pickle.dumps(layer)), layer)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    same(torch.load(file, weights_only=False), layer)
    again = cls(**layer.config())
    again.load_state_dict(layer.state_dict())
    same(again, layer)
    copied = copy.deepcopy(layer)
    copied.log_gain.data += 1
    assert layer.log_gain.exp().tolist() == pytest.approx(GAINS)


@pytest.mark.parametrize("cls", ALL)
def test_the_meta_device_and_to_empty(cls: type[PointwiseNorm]) -> None:
    layer = layer_of(cls)
    built = cls(**layer.config(), device="meta")
    assert built.witnesses.is_meta
    assert built(torch.empty(3, C, device="meta")).is_meta
    built.to_empty(device="cpu")
    # The index is no matter of initialization: it is right before anything is loaded.
    assert built.witnesses.tolist() == list(WITNESSES)
    built.reset_parameters()
    assert built.log_gain.tolist() == [0.0, 0.0]
    built.load_state_dict(layer.state_dict())
    same(built, layer)
    assigned = cls(**layer.config(), device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    same(assigned, layer)


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_index_stays_whole_numbers_in_any_dtype(
    cls: type[PointwiseNorm], dtype: torch.dtype
) -> None:
    layer = layer_of(cls).to(dtype)
    assert layer.witnesses.dtype == torch.int64
    assert layer.log_gain.dtype == dtype
    assert layer(tokens().to(dtype)).dtype == dtype
    layer.set_witnesses_((0,), (1e-5,))
    assert layer.log_gain.dtype == dtype


@pytest.mark.parametrize("cls", ANNEALED)
def test_gains_go_with_the_layer_at_the_end(cls: type[AnnealedNorm]) -> None:
    layer = layer_of(cls)
    end = layer.end()
    assert type(end) is layer.target
    assert end.log_gain is layer.log_gain
    assert end.witness_channels == WITNESSES
    assert torch.equal(end(tokens()), layer(tokens()))
    model = nn.Sequential(nn.Linear(C, C), layer)
    dynorm.finalize_(model)
    assert model[1].log_gain is layer.log_gain
    assert model[1].state_dict().keys() == end.state_dict().keys()


@pytest.mark.parametrize("cls", ANNEALED)
def test_at_0_it_is_the_norm_and_gains_have_a_gradient_all_the_same(
    cls: type[AnnealedNorm],
) -> None:
    layer = layer_of(cls, t=0.0)
    plain = cls(C, center=True)
    plain.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if name in plain.state_dict()}
    )
    x = tokens()
    assert torch.equal(layer(x), plain(x))
    layer(x).sum().backward()
    assert layer.log_gain.grad.tolist() == [0.0, 0.0]
    layer.set_t_(0.5)
    layer(x).sum().backward()
    assert layer.log_gain.grad.abs().min() > 0


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_gradcheck(cls: type[PointwiseNorm], per_channel: bool) -> None:
    layer = layer_of(cls, per_channel=per_channel, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [
        torch.randn(3, C, dtype=torch.float64),
        *(p.detach().clone() for p in layer.parameters()),
    ]
    assert torch.autograd.gradcheck(function, [i.requires_grad_() for i in inputs])


def test_all_channels_with_gain_1_are_an_rms_norm() -> None:
    layer = dynorm.DyISRU(C, beta_init=C * 1e-6, bias=False, witnesses=C, dtype=torch.float64)
    x = tokens().double()
    torch.testing.assert_close(
        layer(x), nn.functional.rms_norm(x, (C,), eps=1e-6), rtol=1e-12, atol=1e-12
    )


def test_gains_learn_at_the_rate_of_the_logarithms() -> None:
    layer = layer_of(dynorm.DyT)
    groups = dynorm.param_groups(nn.Sequential(nn.Linear(C, C), layer), lr=1e-3, weight_decay=0.1)
    (own,) = [group for group in groups if any(p is layer.log_gain for p in group["params"])]
    assert own["lr"] == pytest.approx(30e-3)
    assert own["weight_decay"] == 0.0
    before = layer.log_gain.detach().clone()
    optimizer = torch.optim.AdamW(groups)
    layer(tokens()).square().sum().backward()
    optimizer.step()
    assert (layer.log_gain != before).all()


def test_a_checkpoint_of_other_witnesses_does_not_load() -> None:
    layer, other = layer_of(dynorm.DyISRU), dynorm.DyISRU(C, center=True, witnesses=(1, 4))
    with pytest.raises(
        RuntimeError,
        match=r"witnesses.*\[1, 4\].*\[4, 1\]",
    ):
        other.load_state_dict(layer.state_dict())
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"witnesses.*\[4\.0, 1\.0\]"):
        layer.load_state_dict({**state, "witnesses": state["witnesses"].float()})
    with pytest.raises(RuntimeError, match=r"Missing key.*witnesses"):
        layer.load_state_dict({name: value for name, value in state.items() if name != "witnesses"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*witnesses"):
        dynorm.DyISRU(C, center=True).load_state_dict(state)


@pytest.mark.parametrize(
    "witnesses", [[3, 1], (3, 1), np.array([3, 1]), torch.tensor([3, 1]), range(3, 0, -2)]
)
def test_witnesses_may_come_as_any_sequence(witnesses: Any) -> None:
    assert dynorm.DyISRU(C, witnesses=witnesses).witness_channels == (3, 1)


ERRORS: list[tuple[Any, str]] = [
    ((6,), "0 to 5.*6.*range"),
    ((-1,), "0 to 5.*-1.*range"),
    ((1, 1), "named twice"),
    (7, "6 channels, got 7"),
    (-1, "6 channels, got -1"),
    (tuple(range(7)), "6.*range"),
    ((1.0,), r"positions.*got \(1.0,\)"),
    ((True,), r"positions.*got \(True,\)"),
    (True, "integers, got True"),
    (1.5, "integers, got 1.5"),
    ("3", "integers, got '3'"),
    ((math.nan,), "integers, got"),
]


@pytest.mark.parametrize(("witnesses", "message"), ERRORS)
def test_bad_witnesses(witnesses: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        dynorm.DyT(C, witnesses=witnesses)
    layer = layer_of(dynorm.DyISRU)
    with pytest.raises(ArgumentError, match=message):
        layer.set_witnesses_(witnesses)
    same(layer, layer_of(dynorm.DyISRU))


@pytest.mark.parametrize("gain", [0.0, -1.0, math.inf, math.nan, "1", None])
def test_bad_gains(gain: Any) -> None:
    layer = layer_of(dynorm.DyISRU)
    with pytest.raises(ArgumentError, match=r"gains.*positive"):
        layer.set_witnesses_((1, 2), (1.0, gain))
    with pytest.raises(ArgumentError, match=r"witness.*gains"):
        layer.set_witnesses_((1, 2), (1.0,))
    with pytest.raises(ArgumentError, match=r"gains.*0\.5"):
        layer.set_witnesses_((1, 2), 0.5)  # type: ignore[arg-type]
    same(layer, layer_of(dynorm.DyISRU))


CONVERSIONS: list[tuple[Any, str]] = [
    (-1, "positions, got -1"),
    (True, "positions, got True"),
    ("3", "positions, got '3'"),
    (2.0, "positions, got 2.0"),
    ((C,), "out of range"),
    ((0, 0), "named twice"),
]


@pytest.mark.parametrize(("witnesses", "message"), CONVERSIONS)
def test_bad_witnesses_of_a_conversion_leave_the_model_as_it_was(
    witnesses: Any, message: str
) -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
    sites = dynorm.find_norms(model, torch.randn(3, C))
    with pytest.raises(ArgumentError, match=message):
        dynorm.convert_(model, sites, witnesses=witnesses)
    assert type(model[1]) is nn.LayerNorm


def refine(model: nn.Module, batches: Any) -> None:
    with pytest.warns(dynorm.errors.CalibrationWarning, match="default constants"):
        dynorm.refine_(model, batches, steps=3)


@pytest.mark.parametrize("fit", [dynorm.calibrate_, refine])
def test_calibration_and_refinement_move_the_gains(fit: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
    batches = [tokens() + torch.randn(5, C) for _ in range(3)]
    dynorm.convert_(model, dynorm.find_norms(model, batches[0]), witnesses=WITNESSES)
    before = model[1].log_gain.detach().clone()
    fit(model, batches)
    assert model[1].witness_channels[0] in WITNESSES
    assert len(before) != len(model[1].log_gain) or (model[1].log_gain != before).all()
