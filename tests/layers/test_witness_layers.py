"""Layers with witnesses: their state in every form that a layer takes, their values, and bad input."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dynorm import Derf, DyISRU, DyT, LinearControl, functional
from dynorm.errors import ArgumentError
from dynorm.layers import AnnealedDerf, AnnealedDyISRU, AnnealedDyT, AnnealedLinear, AnnealedNorm

with_each_class = pytest.mark.parametrize("cls", [DyISRU, AnnealedDyISRU])
C, WITNESSES, GAINS = 6, (4, 1), (0.3, 2.0)


def layer_of(cls: type[DyISRU] = DyISRU, **options: Any) -> Any:
    torch.manual_seed(0)
    if issubclass(cls, AnnealedNorm):
        options = {"t": 1.0, **options}
    layer = cls(C, witnesses=WITNESSES, **options)
    layer.set_witnesses_(WITNESSES, GAINS)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "log_gain":
                parameter.add_(0.3 * torch.rand_like(parameter))
    return layer


def tokens() -> Tensor:
    x = torch.randn(5, C, generator=torch.Generator().manual_seed(1))
    return x * torch.tensor([1, 30, 1, 1, 9, 1])


def same(one: Any, other: Any) -> None:
    """Both have the same state, and give the same."""
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert one.config() == other.config()
    assert torch.equal(one(tokens()), other(tokens()))


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_functions(dim: int, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    layer = layer_of(dim=dim, dtype=dtype)
    x = torch.randn(3, 4, C).movedim(-1, dim).to(dtype).requires_grad_()
    y = functional.dyisru(
        x,
        layer.beta(),
        layer.weight,
        layer.bias,
        scale=layer.scale,
        dim=dim,
        witnesses=torch.tensor(WITNESSES),
        gain=layer.log_gain.exp(),
    )
    tensors = [x, *layer.parameters()]
    wanted = torch.autograd.grad(y.sin().sum(), tensors)
    for got in (layer(x), layer.definition(x)):
        assert_close(got, y, rtol=tolerance, atol=tolerance)
        found = torch.autograd.grad(got.sin().sum(), tensors)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)


def test_huge_infinite_and_missing_witnesses() -> None:
    layer = DyISRU(C, witnesses=WITNESSES)
    for value in (1e18, 3e38, math.inf):
        x = torch.ones(2, C)
        x[1, 4] = value
        y = layer(x)
        assert y.isfinite().all()
        assert_close(y[0], layer(torch.ones(C)))
        # It is large itself, and shrinks the others.
        assert y[1, 4] > 1.0
        assert y[1, 0].abs() < 1e-12
    x = torch.full((1, C), math.nan)
    x[0, 0] = 1.0
    assert layer(x).isnan().all()
    # A term that overflows by its gain.
    layer.set_witnesses_(WITNESSES, [1e30, 1.0])
    x = torch.ones(1, C)
    x[0, 4] = 1e10
    assert_close(layer(x), layer.definition(x))


@pytest.mark.parametrize("value", [1e17, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_extreme_inputs_are_those_of_the_definition(dtype: torch.dtype, value: float) -> None:
    layers = [DyISRU(C, witnesses=WITNESSES, dtype=dtype)]
    layers += [cls(C, dtype=dtype) for cls in (DyISRU, DyT, Derf, LinearControl)]
    for layer in layers:
        # A channel that is a witness, and one that is none.
        x = torch.ones(3, C, dtype=torch.float64)
        x[1, 4] = x[2, 0] = value
        x = x.to(dtype).requires_grad_()
        both = [layer(x), layer.definition(x)]
        tensors = [x, layer.weight, layer.bias]
        got, want = (torch.autograd.grad(y.sum(), tensors) for y in both)
        assert_close(both[0], both[1], equal_nan=True)
        assert_close(got, want, equal_nan=True)
        assert got[0][0].isfinite().all()
        # The slope of a line is its constant.
        is_lost = math.isnan(value) and not isinstance(layer, LinearControl)
        assert bool(got[0][1, 4].isnan()) == is_lost


@pytest.mark.parametrize(
    "cls", [DyT, Derf, LinearControl, AnnealedDyT, AnnealedDerf, AnnealedLinear]
)
def test_other_functions_refuse_witnesses(cls: Any) -> None:
    words = rf"witnesses must be 0 for {cls.__name__}, got .*only DyISRU's beta.*to=\"dyisru\""
    with pytest.raises(ArgumentError, match=words):
        cls(C, witnesses=WITNESSES)
    layer = cls(C, witnesses=0)
    with pytest.raises(ArgumentError, match=words):
        layer.set_witnesses_(WITNESSES, GAINS)
    layer.set_witnesses_(())
    assert layer.witness_channels == ()


@with_each_class
def test_the_state_is_the_index_and_the_gains(cls: type[DyISRU]) -> None:
    layer = layer_of(cls)
    state = layer.state_dict()
    assert state["witnesses"].tolist() == list(WITNESSES)
    assert state["log_gain"].exp().tolist() == pytest.approx(GAINS)
    assert layer.config()["witnesses"] == list(WITNESSES)
    assert any(p is layer.log_gain for p in layer.constant_parameters())
    for dtype in (torch.bfloat16, torch.float64):
        moved = copy.deepcopy(layer).to(dtype)
        assert moved.witnesses.dtype == torch.int64
        assert moved.log_gain.dtype == dtype
    # A layer without any has neither.
    plain = cls(C)
    assert state.keys() - plain.state_dict().keys() == {"witnesses", "log_gain"}
    layer.set_witnesses_(())
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert layer.config().keys() == plain.config().keys()


@with_each_class
def test_copies_configs_and_the_meta_device(cls: type[DyISRU]) -> None:
    layer = layer_of(cls)
    same(copy.deepcopy(layer), layer)
    same(pickle.loads(pickle.dumps(layer)), layer)
    built = cls(**layer.config(), device="meta")
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


def test_gains_of_an_annealed_layer() -> None:
    layer, x = layer_of(AnnealedDyISRU), tokens()
    end = layer.end()
    assert end.log_gain is layer.log_gain
    assert end.witness_channels == WITNESSES
    assert torch.equal(end(x), layer(x))
    # At 0 it is the norm, and the gains have a gradient all the same.
    layer.set_t_(0.0)
    layer(x).sum().backward()
    assert layer.log_gain.grad.tolist() == [0.0, 0.0]
    layer.set_t_(0.5)
    layer(x).sum().backward()
    assert layer.log_gain.grad.abs().min() > 0


def test_a_checkpoint_of_other_witnesses_does_not_load() -> None:
    layer, other = layer_of(), DyISRU(C, witnesses=(1, 4))
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"witnesses.*\[1, 4\].*\[4, 1\]"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"witnesses.*\[4\.0, 1\.0\]"):
        layer.load_state_dict({**state, "witnesses": state["witnesses"].float()})
    with pytest.raises(RuntimeError, match=r"Missing key.*witnesses"):
        layer.load_state_dict({name: value for name, value in state.items() if name != "witnesses"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*witnesses"):
        DyISRU(C).load_state_dict(state)


@pytest.mark.parametrize("witnesses", [[3, 1], np.array([3, 1]), range(3, 0, -2)])
def test_witnesses_may_come_as_any_sequence(witnesses: Any) -> None:
    assert DyISRU(C, witnesses=witnesses).witness_channels == (3, 1)


@pytest.mark.parametrize(
    ("witnesses", "message"),
    [
        ((6,), "0 to 5.*6.*range"),
        ((-1,), "0 to 5.*-1.*range"),
        ((1, 1), "named twice"),
        (7, "6 channels, got 7"),
        (-1, "6 channels, got -1"),
        ((1.0,), r"positions.*got \(1.0,\)"),
        ((True,), r"positions.*got \(True,\)"),
        (1.5, "integers, got 1.5"),
        ("3", "integers, got '3'"),
    ],
)
def test_bad_witnesses(witnesses: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DyISRU(C, witnesses=witnesses)
    layer = layer_of()
    with pytest.raises(ArgumentError, match=message):
        layer.set_witnesses_(witnesses)
    same(layer, layer_of())


@pytest.mark.parametrize("witnesses", [17, range(17)])
def test_a_sum_over_many_channels_is_refused(witnesses: Any) -> None:
    assert len(DyISRU(64, witnesses=16).witness_channels) == 16
    with pytest.raises(ArgumentError, match=r"at most 16.*got 17.*keep the norm"):
        DyISRU(64, witnesses=witnesses)


def test_bad_gains() -> None:
    layer = layer_of()
    for gains in ((1.0, 0.0), (1.0, -1.0), (1.0, math.nan), (1.0, "1"), (1.0,), 0.5):
        with pytest.raises(ArgumentError, match="gains"):
            layer.set_witnesses_((1, 2), gains)  # type: ignore[arg-type]
    same(layer, layer_of())
