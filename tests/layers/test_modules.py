"""The layers as modules: parameters, saving and copying, torch's transforms, and torch's own transformer."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune
from torch.testing import assert_close

import dynorm
from dynorm import Derf, DyISRU, DyT, param_groups
from dynorm.errors import ArgumentError, ModelError
from dynorm.layers import AnnealedDyISRU, PointwiseNorm
from dynorm.layers.rmsnorm import RMSNorm

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no affine": {"elementwise_affine": False},
    "all": {"scale": 1.7, "dim": 1, "promote": True},
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def build(kind: type[PointwiseNorm], *args: Any, **kwargs: Any) -> PointwiseNorm:
    """Return a layer whose parameters have no two values the same."""
    layer = kind(*args, **kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.2, 1.5)
    return layer


def assert_same(layer: PointwiseNorm, other: nn.Module) -> None:
    """Check that two layers have the same type, settings and parameters, and share no memory."""
    assert type(other) is type(layer)
    assert repr(other) == repr(layer)
    assert other.config() == layer.config()
    assert list(other.state_dict()) == list(layer.state_dict())
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(q, p)
        assert q.requires_grad == p.requires_grad
        assert q.data_ptr() != p.data_ptr()
    x = torch.randn(3, *layer.normalized_shape)
    assert torch.equal(layer(x), other(x))


def test_parameters_of_one_dimension_and_their_names(kind: type[PointwiseNorm]) -> None:
    constants = dict.fromkeys(kind.constants, (1,))
    affine = {"weight": (6,), "bias": (6,)}
    for options, wanted in (
        ({}, constants | affine),
        ({"elementwise_affine": False}, constants),
        ({"bias": False}, constants | {"weight": (6,)}),
    ):
        layer = kind(6, **options)
        assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == wanted
        assert list(layer.state_dict()) == list(wanted)
        before = [p.detach().clone() for p in layer.parameters()]
        layer(torch.randn(5, 6)).pow(2).sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1).step()
        for p, q in zip(layer.parameters(), before, strict=True):
            assert p.isfinite().all()
            assert not torch.equal(p, q)


@pytest.mark.parametrize("cls", [DyT, Derf])
@pytest.mark.parametrize("dim", [-1, 1])
def test_official_checkpoints_load(cls: Any, dim: int) -> None:
    """The published layers, arXiv 2503.10622 and 2512.10938: ``weight * f(alpha x + shift) + bias``."""
    saved = {"alpha": torch.tensor([0.7]), "weight": torch.randn(6), "bias": torch.randn(6)}
    shape = (6,) if dim == -1 else (6, 1, 1)
    x = 3 * torch.randn(2, 6, 6, 6)
    if cls is Derf:
        saved["shift"] = torch.tensor([0.2])
        f = torch.erf(saved["alpha"] * x + 0.2)
    else:
        f = torch.tanh(saved["alpha"] * x)
    layer = cls(6, scale=1, dim=dim)
    layer.load_state_dict(saved, strict=True)
    assert_close(layer(x), f * saved["weight"].view(shape) + saved["bias"].view(shape))


@with_options
def test_meta_device(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    with torch.device("meta"):
        under_context = kind(6, **options)
    for layer in (kind(6, **options, device="meta"), under_context):
        assert all(p.is_meta for p in layer.parameters())
        assert layer(torch.empty(2, 6, 6, device="meta")).shape == (2, 6, 6)
        layer.set_slope_(3.0)
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, torch.nan)
        layer.reset_parameters()
        assert_same(kind(6, **options), layer)


def test_what_print_shows() -> None:
    layer = DyISRU(4)
    layer.set_slope_(12345.0)
    assert repr(layer) == "DyISRU(4, beta=1.234e+04, scale=2)"
    derf = Derf(4, dim=1, bias=False).bfloat16()
    nn.init.constant_(derf.alpha, 0.125)
    assert repr(derf) == "Derf(4, alpha=0.125, shift=0, scale=2, bias=False, dim=1)"
    meta = DyISRU(6, scale=2, device="meta", witnesses=(1,))
    assert repr(meta) == "DyISRU(6, scale=2, witnesses=[1])"


@with_options
def test_copies_files_and_configs(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    layer = build(kind, 6, **options)
    next(layer.parameters()).requires_grad_(False)
    assert_same(layer, copy.deepcopy(layer))
    assert_same(layer, pickle.loads(pickle.dumps(layer)))
    fresh = kind(6, **options)
    config = fresh.config()
    assert json.loads(json.dumps(config)) == config
    assert_same(fresh, kind(**config))


def test_sizes_may_be_numpy_integers(kind: type[PointwiseNorm]) -> None:
    numpy = pytest.importorskip("numpy")
    layer = kind(numpy.int64(6), dim=numpy.int32(1))
    assert json.dumps(layer.config()) == json.dumps(kind(6, dim=1).config())


def test_an_offset_keeps_the_digits_of_the_weight(kind: type[PointwiseNorm]) -> None:
    layer = kind(2, weight_offset=1.0, dtype=torch.bfloat16)
    assert not layer.weight.any()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.001, -0.5]))
    assert_close(layer.factor(), torch.tensor([1.001, 0.5]), rtol=1e-5, atol=0)
    x = torch.ones(2)
    plain = kind(2, bias=False, elementwise_affine=False)(x)
    assert_close(layer(x), plain * layer.factor(), rtol=1e-2, atol=0)


def test_autocast(kind: type[PointwiseNorm]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), build(kind, 6))
    x = torch.randn(4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[0](x)
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, model[1](hidden.float()).bfloat16())
    y.float().pow(2).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@with_options
def test_compile(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = build(kind, 6, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 7):
            x = torch.randn(rows, 6, 6, requires_grad=True)
            tensors = [x, *layer.parameters()]
            for got, wanted in zip(
                torch.autograd.grad(compiled(x).square().sum(), tensors),
                torch.autograd.grad(layer(x).square().sum(), tensors),
                strict=True,
            ):
                assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_fx_takes_a_layer_as_a_leaf(kind: type[PointwiseNorm]) -> None:
    model = nn.Sequential(nn.Identity(), build(kind, 6))

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return module is model[1] or super().is_leaf_module(module, name)

    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    x = torch.randn(2, 6)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(ArgumentError, match="leaf"):
        torch.fx.symbolic_trace(model)


def test_gradients_of_single_samples(kind: type[PointwiseNorm]) -> None:
    layer, x = build(kind, 6), torch.randn(4, 5, 6)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, params, (x,)).pow(2).sum()

    own = {name: p.detach() for name, p in layer.named_parameters()}
    per_sample = vmap(grad(loss), in_dims=(None, 0))(own, x)
    layer(x).pow(2).sum().backward()
    for name, parameter in layer.named_parameters():
        assert_close(per_sample[name].sum(0), parameter.grad)


def test_a_parametrized_weight_is_followed(kind: type[PointwiseNorm]) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer, x = kind(6, bias=False), torch.randn(3, 6)
    plain = layer(x)
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    assert_close(layer(x), 2 * plain)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_pruned_parameter_is_followed(kind: type[PointwiseNorm], name: str) -> None:
    layer, x = kind(6), torch.randn(3, 6)
    nn.init.normal_(layer.bias)
    prune.random_unstructured(layer, name, amount=3)
    y = layer(x)
    assert_close(layer.definition(x), y)
    prune.remove(layer, name)
    assert_close(layer(x), y)


def test_a_pruned_parameter_is_not_written_into() -> None:
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    dynorm.convert_(model, dynorm.find_norms(model, x), to="annealed")
    prune.random_unstructured(model[1], "weight", amount=3)
    dynorm.set_anneal_(model, 1.0)
    with pytest.raises(ModelError, match="'weight' of '1' is computed"):
        dynorm.finalize_(model)
    with pytest.raises(ModelError, match="must hold its parameters"):
        dynorm.calibrate_(model, [x])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("replaced", [("norm1",), ("norm2",), ("norm1", "norm2")], ids="+".join)
def test_encoder_layer_calls_it_in_eval_mode(
    kind: type[PointwiseNorm],
    replaced: tuple[str, ...],
    norm_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    for name in replaced:
        setattr(layer, name, build(kind, 8))
    x = torch.randn(2, 5, 8)
    wanted = layer.train()(x)
    # A hook would turn the fast path off by itself.
    seen: list[Tensor] = []
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: seen.append(x) or original(self, x))
    with torch.no_grad():
        assert_close(layer.eval()(x), wanted)
    assert len(seen) == len(replaced)


def test_rates_of_the_constants() -> None:
    layers = [
        DyISRU(4),
        DyT(4),
        Derf(4, scale=5.0),
        AnnealedDyISRU(4),
        DyISRU(4, witnesses=1),
    ]
    nn.init.constant_(layers[1].alpha, 0.01)
    nn.init.constant_(layers[2].alpha, 0.02)
    model = nn.Sequential(*layers)
    for constants_lr, base, of_logarithm in ((1e-2, 1e-2, 1e-2), (None, 1e-3, 3e-2)):
        groups = param_groups(model, lr=1e-3, constants_lr=constants_lr)
        found = {p: group["lr"] for group in groups for p in group["params"]}
        assert found[layers[1].alpha] == pytest.approx(0.01 * base)
        assert found[layers[2].alpha] == pytest.approx(0.02 * base)
        assert found[layers[2].shift] == pytest.approx(0.2 * base)
        assert found[layers[0].weight] == pytest.approx(1e-3)
        logarithms = [layers[0].log_beta, layers[3].log_beta, layers[4].log_gain]
        assert [found[p] for p in logarithms] == pytest.approx([of_logarithm] * 3)
        assert found.keys() == set(model.parameters())


def test_matrices_have_decay_and_the_groups_an_order() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = DyISRU(4)
            self.tokens = nn.Embedding(9, 4)
            self.patches = nn.Conv1d(4, 4, 1)
            self.head = nn.Linear(4, 9)

    model = Model()
    model.head.weight = model.tokens.weight
    matrices, others, constants = param_groups(model, lr=1e-3, weight_decay=0.1)
    assert matrices["params"] == [model.tokens.weight, model.patches.weight]
    assert others["params"] == [
        *(model.norm.weight, model.norm.bias),
        *(model.patches.bias, model.head.bias),
    ]
    assert constants["params"] == [model.norm.log_beta]
    assert [group["weight_decay"] for group in (matrices, others, constants)] == [0.1, 0.0, 0.0]
    assert constants["lr"] == pytest.approx(0.03)


def test_a_resumed_run_finds_the_groups_it_was_saved_with() -> None:
    model = nn.Sequential(nn.Linear(4, 4), DyT(4, scale=1), Derf(4, scale=1))
    groups = param_groups(model, lr=1e-3, weight_decay=0.1)
    saved = torch.optim.AdamW(groups).state_dict()
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0, 0.0, 0.0]
    with torch.no_grad():
        model[1].alpha.fill_(0.1)
    torch.optim.AdamW(param_groups(model, lr=1e-3)).load_state_dict(saved)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "constants_lr"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), "a"])
def test_refused_rates_and_models(name: str, bad: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name}.*finite.*got"):
        param_groups(DyISRU(4), **{"lr": 1e-3, name: bad})
    with pytest.raises(ArgumentError, match=r"model.*torch\.nn\.Module"):
        param_groups(bad, lr=1e-3)


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_a_bias(dim: int, dtype: torch.dtype) -> None:
    layer = RMSNorm(6, 1e-3, bias=True, dim=dim)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 6, 6).to(dtype)
    wide = x.double().movedim(dim, -1)
    y = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight + layer.bias
    assert_close(layer(x), y.movedim(-1, dim).to(dtype))
    again = RMSNorm(**layer.config() | {"promote": True})
    assert again(x).dtype == torch.float32
    with pytest.raises(ArgumentError, match="6 channels"):
        layer(torch.ones(2, 5))
    assert "norm_eps=0.001" in repr(dynorm.layers.rmsnorm.RMSNorm(6, 1e-3))
