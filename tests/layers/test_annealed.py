"""Annealed layers: exactly the norm at t = 0, without a reduction at t = 1, and smooth in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import dynorm
from dynorm.layers.annealed import (
    AnnealedDerf,
    AnnealedDyISRU,
    AnnealedDyT,
    AnnealedLinear,
    AnnealedNorm,
)

LAYERS = [AnnealedDyISRU, AnnealedDyT, AnnealedDerf, AnnealedLinear]
KINDS = ["layernorm", "rmsnorm"]


def randomized(layer: nn.Module) -> Any:
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.add_(
                0.3 * torch.rand_like(parameter)
                if name == "alpha"
                else 0.3 * torch.randn_like(parameter)
            )
    return layer


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_between_it_is_the_blend_and_smooth(cls: type[AnnealedNorm], kind: str) -> None:
    layer = randomized(cls(9, kind=kind, dtype=torch.float64))
    x = torch.randn(5, 9, dtype=torch.float64)

    def at(t: float) -> Tensor:
        layer.set_t_(t)
        return layer(x).detach()

    assert layer.end().scale == pytest.approx((9 if kind == "rmsnorm" else 8) ** 0.5)
    start, end = at(0.0), at(1.0)
    for t in (0.125, 0.5, 0.875):
        torch.testing.assert_close(at(t), (1 - t) * start + t * end, rtol=1e-7, atol=1e-7)
    # t is held in float32: continuous at both ends to that.
    torch.testing.assert_close(at(1e-9), start, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(at(1 - 1e-7), end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(cls: type[AnnealedNorm], kind: str) -> None:
    layer = randomized(cls(5, kind=kind, t=0.375, dtype=torch.float64))
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [
        torch.randn(3, 5, dtype=torch.float64),
        *(p.detach().clone() for p in layer.parameters()),
    ]
    assert torch.autograd.gradcheck(function, [i.requires_grad_() for i in inputs])


# torch.export's own.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
@pytest.mark.parametrize(("kind", "dim"), [("layernorm", -1), ("rmsnorm", 1)])
def test_the_exported_graph_reduces_nothing_at_1_and_something_before(kind: str, dim: int) -> None:
    model = nn.Sequential(
        *[randomized(cls(8, kind=kind, dim=dim, t=t)) for cls in LAYERS for t in (0.0, 0.5, 1.0)]
    ).eval()
    x = torch.randn(3, 8, 5).movedim(1, dim)
    nodes = torch.export.export(model, (x,)).run_decompositions().graph.nodes
    marks = ("sum", "mean", "var", "norm", "amax", "cumsum")
    reducing = set()
    for node in nodes:
        if node.op == "call_function" and any(mark in str(node.target) for mark in marks):
            reducing.add(list(node.meta["nn_module_stack"].values())[-1][0])
    assert reducing == {path for path, layer in model.named_children() if layer.position < 1}


def test_compiled_once_for_each_stage() -> None:
    layer, x = AnnealedDyISRU(8), torch.randn(3, 8)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for t in (0.0, 0.1, 0.2, 0.7, 0.9, 1.0, 0.0, 0.3):
        layer.set_t_(t)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 3


@pytest.mark.parametrize("kind", KINDS)
def test_channels_first(kind: str) -> None:
    x = torch.randn(2, 6, 4, 5)
    first = AnnealedDyISRU(6, kind=kind, dim=1, bias=False)
    last = AnnealedDyISRU(6, kind=kind, bias=False)
    for t in (0.0, 0.5, 1.0):
        first.set_t_(t)
        last.set_t_(t)
        torch.testing.assert_close(first(x), last(x.movedim(1, -1)).movedim(-1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_is_rounded_once(dtype: torch.dtype, kind: str) -> None:
    layer = AnnealedDyISRU(64, kind=kind, dtype=dtype)
    exact = copy.deepcopy(layer).double()
    x = (3 * torch.randn(50, 64)).to(dtype)
    for t in (0.0, 0.3, 1.0):
        layer.set_t_(t)
        exact.set_t_(t)
        y = layer(x)
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), exact(x.double()), rtol=2 * torch.finfo(dtype).eps, atol=1e-3
        )


@pytest.mark.parametrize("t", [0.0, 0.5, 1.0])
def test_empty_and_not_finite(t: float) -> None:
    layer = AnnealedDyISRU(4, t=t)
    assert layer(torch.empty(0, 4)).shape == (0, 4)
    y = layer(torch.tensor([[1.0, torch.nan, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]))
    assert y[0, 1].isnan()
    assert y[1].isfinite().all()


def test_every_constant_has_a_gradient_in_training_wherever_it_stands() -> None:
    layer = AnnealedDerf(4)
    for t in (0.5, 1.0):
        layer.set_t_(t)
        layer.zero_grad()
        layer(torch.randn(3, 4)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())


def test_t_is_saved_loaded_copied_and_kept_in_every_dtype() -> None:
    layer = AnnealedDyISRU(4)
    layer.set_t_(0.3)
    x = torch.randn(3, 4)
    other = AnnealedDyISRU(4)
    other.load_state_dict(layer.state_dict())
    assert other.position == pytest.approx(0.3)
    assert torch.equal(other(x), layer(x))
    assert copy.deepcopy(layer).position == 0.3
    assert AnnealedDyISRU(**layer.config()).position == 0.3
    for moved in (layer.bfloat16(), layer.half(), layer.double()):
        assert moved.t.dtype == torch.float32
        assert moved.t.item() == pytest.approx(0.3)
    at_the_end = AnnealedDyISRU(4, t=1.0)
    other.load_state_dict(at_the_end.state_dict())
    assert torch.equal(other(x), at_the_end(x))
    meta = AnnealedDyISRU(4, t=0.25, device="meta")
    assert meta.to_empty(device="cpu").t.item() == 0.25


def test_bad_arguments() -> None:
    for t in (-0.1, 1.1, float("nan"), "0.5", None, True):
        with pytest.raises(dynorm.errors.ArgumentError, match=r"t.*number from 0"):
            AnnealedDyISRU(4).set_t_(t)  # type: ignore[arg-type]
        with pytest.raises(dynorm.errors.ArgumentError):
            AnnealedDyISRU(4, t=t)
    with pytest.raises(dynorm.errors.ArgumentError, match="kind"):
        AnnealedDyISRU(4, kind="batchnorm")  # type: ignore[arg-type]
    for eps in (-1.0, float("inf"), None, "1e-5"):
        with pytest.raises(dynorm.errors.ArgumentError, match="norm_eps"):
            AnnealedDyISRU(4, norm_eps=eps)
    with pytest.raises(dynorm.errors.ArgumentError, match="4 channels"):
        AnnealedDyISRU(4)(torch.randn(2, 5))


@pytest.mark.parametrize("cls", LAYERS)
def test_the_constants_have_no_part_at_0_whatever_they_are(cls: type[AnnealedNorm]) -> None:
    layer, x = cls(8), torch.randn(3, 8)
    for constant in layer.constant_parameters():
        constant.detach().fill_(torch.inf)
    y = layer(x)
    assert torch.equal(y, nn.LayerNorm(8)(x))
    y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.constant_parameters())


def test_in_float16_the_constants_of_many_channels_do_not_overflow() -> None:
    layer = AnnealedDyISRU(16384, dtype=torch.float16)
    assert layer(torch.randn(2, 16384, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_parameters_in_bfloat16_under_autocast(kind: str, t: float) -> None:
    layer = AnnealedDyISRU(16, kind=kind, t=t, bias=kind == "layernorm", dtype=torch.bfloat16)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found.float(), layer(x).float(), rtol=2e-2, atol=2e-2)


def test_a_place_outside_the_path_is_not_loaded() -> None:
    layer = AnnealedDyISRU(8, t=0.25)
    for bad in (2.0, -1.0, float("nan")):
        state = layer.state_dict() | {"t": torch.tensor([bad]), "log_beta": torch.tensor([7.0])}
        with pytest.raises(RuntimeError, match=r"t must.*from 0"):
            layer.load_state_dict(state)
        assert layer.position == 0.25
        assert layer.log_beta.item() != 7
    layer.load_state_dict(
        layer.state_dict() | {"t": torch.tensor([0.5], dtype=torch.bfloat16)}, assign=True
    )
    layer.set_t_(0.7)
    assert layer.t.item() == pytest.approx(0.7)


def test_a_direct_write_to_t_is_followed() -> None:
    layer = AnnealedDyISRU(8, t=0.25)
    layer.t.fill_(0.75)
    assert layer.position == 0.75
