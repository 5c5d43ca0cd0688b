"""The layers as modules: parameters, saving and copying, torch's transforms, and torch's own transformer."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import dynorm
from dynorm import Derf, DyISRU, DyT, LinearControl, param_groups
from dynorm.errors import ArgumentError
from dynorm.layers import AnnealedDyISRU, PointwiseNorm

LAYERS = [DyISRU, DyT, Derf, LinearControl]
CONSTANTS = {
    DyISRU: ["log_beta"],
    DyT: ["alpha"],
    Derf: ["alpha", "shift"],
    LinearControl: ["log_beta"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no affine": {"elementwise_affine": False},
    "no bias": {"bias": False},
    "all": {"per_channel": True, "center": True, "scale": 1.7, "dim": 1},
}
with_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
with_least_and_most_options = pytest.mark.parametrize(
    "options", [OPTIONS["no affine"], OPTIONS["all"]], ids=["no affine", "all"]
)
ignore_prototype_warning = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
)


@pytest.fixture(params=LAYERS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[PointwiseNorm]:
    """Each layer class in turn."""
    return request.param


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
    assert [name for name, _ in other.named_parameters()] == [
        name for name, _ in layer.named_parameters()
    ]
    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
        assert_close(q, p, rtol=0, atol=0)
        assert q.requires_grad == p.requires_grad
        assert q.data_ptr() != p.data_ptr()
    x = torch.randn(3, *layer.normalized_shape)
    assert torch.equal(layer(x), other(x))


def test_parameter_names_and_shapes(kind: type[PointwiseNorm]) -> None:
    def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in layer.named_parameters()}

    constants, affine = dict.fromkeys(CONSTANTS[kind], (1,)), {"weight": (6,), "bias": (6,)}
    assert shapes(kind(6)) == constants | affine
    assert shapes(kind(6, elementwise_affine=False)) == constants
    assert shapes(kind(6, bias=False)) == constants | {"weight": (6,)}
    assert shapes(kind(6, center=True)) == constants | {"center": (1,)} | affine
    per_channel = dict.fromkeys(CONSTANTS[kind], (6,))
    assert shapes(kind(6, center=True, per_channel=True)) == per_channel | {"center": (6,)} | affine
    per_channel = dict.fromkeys(CONSTANTS[kind], (2, 3))
    assert shapes(kind((2, 3), per_channel=True)) == per_channel | {
        "weight": (2, 3),
        "bias": (2, 3),
    }
    assert list(kind(6).state_dict()) == [*CONSTANTS[kind], "weight", "bias"]
    assert not list(kind(6).buffers())
    assert kind(6, elementwise_affine=False).weight is None


@with_options
def test_parameters_suit_fsdp_and_optimizers(
    kind: type[PointwiseNorm], options: dict[str, Any]
) -> None:
    layer = kind(6, **options)
    for name, parameter in layer.named_parameters():
        assert "." not in name
        assert parameter.ndim >= 1
        assert parameter.is_contiguous()
        assert parameter.is_leaf
        assert parameter.requires_grad
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.randn(5, 6, 6)).pow(2).sum().backward()
    optimizer.step()
    assert all(
        p.isfinite().all() and not torch.equal(p, q)
        for p, q in zip(layer.parameters(), before, strict=True)
    )


class OfficialDyT(nn.Module):
    """DynamicTanh as published with arXiv 2503.10622."""

    def __init__(
        self, normalized_shape: int, channels_last: bool, alpha_init_value: float = 0.5
    ) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.alpha = nn.Parameter(torch.ones(1) * alpha_init_value)
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.alpha * x)
        if self.channels_last:
            return x * self.weight + self.bias
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class OfficialDerf(nn.Module):
    """Dynamic erf as published with arXiv 2512.10938."""

    def __init__(self, normalized_shape: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1) * 0.5)
        self.shift = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.shift) * self.weight + self.bias


@pytest.mark.parametrize(
    ("official", "layer"),
    [
        (OfficialDyT(6, channels_last=True), DyT(6)),
        (OfficialDyT(6, channels_last=False), DyT(6, dim=-3)),
        (OfficialDerf(6), Derf(6)),
    ],
    ids=["DyT", "DyT channels-first", "Derf"],
)
def test_official_checkpoints_load(official: nn.Module, layer: PointwiseNorm) -> None:
    x = 3 * torch.randn(2, 6, 6, 6)
    assert_close(layer(x), official(x))
    nn.utils.vector_to_parameters(torch.randn(13 + isinstance(layer, Derf)), official.parameters())
    layer.load_state_dict(official.state_dict(), strict=True)
    assert_close(layer(x), official(x))
    official.load_state_dict(layer.state_dict(), strict=True)


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


def test_dtype(kind: type[PointwiseNorm]) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        layer = kind(6, per_channel=True, center=True, dtype=dtype)
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert {p.dtype for p in kind(6).to(dtype).parameters()} == {dtype}
        assert layer.beta().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


SHOWN = {
    DyISRU: "beta=6",
    DyT: "alpha=0.5",
    Derf: "alpha=0.5, shift=0",
    LinearControl: "beta=6",
}


def test_extra_repr(kind: type[PointwiseNorm]) -> None:
    name, constants = kind.__name__, SHOWN[kind]
    rest = f"{constants}, scale=2, elementwise_affine=True, bias=True"
    assert repr(kind(6, scale=2)) == f"{name}(6, {rest})"
    assert repr(kind((2, 3), scale=2)) == f"{name}(2, 3, {rest})"
    full = kind(6, elementwise_affine=False, per_channel=True, center=True, scale=1 / 3, dim=1)
    rest = (
        "scale=0.3333, dim=1, per_channel=True, center=True, elementwise_affine=False, bias=False"
    )
    assert repr(full) == f"{name}(6, {constants}, {rest})"
    assert "dim=(1, 3)" in repr(kind((2, 3), dim=(1, 3)))
    assert repr(kind(6, scale=2, device="meta")) == (
        f"{name}(6, scale=2, elementwise_affine=True, bias=True)"
    )


def test_repr_shows_the_present_constants() -> None:
    layer = DyISRU(4, per_channel=True)
    layer.set_slope_(torch.tensor([2.0, 0.25, 12345.0, 1.0]))
    assert repr(layer).startswith("DyISRU(4, beta=0.25 to 1.234e+04, scale=2,")
    derf = Derf(4, alpha_init=0.125, shift_init=-1.5)
    assert repr(derf.bfloat16()).startswith("Derf(4, alpha=0.125, shift=-1.5, scale=1,")
    annealed = dynorm.layers.AnnealedDyISRU(4, beta_init=3.0)
    assert repr(annealed).startswith("AnnealedDyISRU(4, beta=3, scale=1.732,")


ANNEALED = [
    dynorm.layers.AnnealedDyISRU,
    dynorm.layers.AnnealedDyT,
    dynorm.layers.AnnealedDerf,
    dynorm.layers.AnnealedLinear,
]


@pytest.mark.parametrize("kind", [*LAYERS, *ANNEALED], ids=lambda kind: kind.__name__)
def test_written_as_a_layer_norm_it_is_refused(kind: type[PointwiseNorm]) -> None:
    """``nn.LayerNorm(64, 1e-5)`` sets eps: as beta, 1e-5 would saturate every value."""
    make: Any = kind
    first = kind.own_arguments[0]
    with pytest.raises(ArgumentError, match=rf"by name, got \(64, 1e-05\): .*\(64, {first}=...\)"):
        make(64, 1e-5)
    with pytest.raises(ArgumentError, match=r"arguments.*normalized_shape"):
        make(64, 1e-5, True)
    remedy = "pass norm_eps=" if kind in ANNEALED else f"its constant is {first}"
    with pytest.raises(ArgumentError, match=f"not.*got eps=1e-06.*{remedy}"):
        make(64, eps=1e-6)
    parameters = inspect.signature(kind).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["normalized_shape"]


@with_options
def test_copies_and_files(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    layer = build(kind, 6, **options)
    next(layer.parameters()).requires_grad_(False)
    assert_same(layer, copy.deepcopy(layer))
    assert_same(layer, pickle.loads(pickle.dumps(layer)))
    other = copy.deepcopy(layer)
    other.reset_parameters()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same(layer, other)


@pytest.mark.parametrize(
    "options",
    [
        *OPTIONS.values(),
        {"dim": (1, 2), "normalized_shape": (6, 6)},
        {"normalized_shape": torch.Size([6, 2])},
    ],
    ids=[*OPTIONS, "two axes", "torch.Size"],
)
def test_config_rebuilds_the_layer(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    names = {DyT: ["alpha_init"], Derf: ["alpha_init", "shift_init"]}.get(kind, ["beta_init"])
    for extra in ({}, {name: 0.3 + i for i, name in enumerate(names)}):
        layer = kind(**({"normalized_shape": 6} | options | extra))
        config = layer.config()
        assert json.loads(json.dumps(config)) == config
        assert_same(layer, kind(**config))


def test_sizes_may_be_numpy_integers(kind: type[PointwiseNorm]) -> None:
    numpy = pytest.importorskip("numpy")
    layer = kind(numpy.int64(6), dim=numpy.int32(1))
    assert json.dumps(layer.config()) == json.dumps(kind(6, dim=1).config())


@with_options
def test_autocast(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), build(kind, 6, **options))
    x = torch.randn(4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[0](x)
        y, direct = model(x), model[1](x)
    assert hidden.dtype == y.dtype == torch.bfloat16
    assert direct.dtype == torch.float32
    assert torch.equal(direct, model[1](x))
    assert torch.equal(y, model[1](hidden.float()).bfloat16())
    y.float().pow(2).sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


def gradients(function: Any, layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the value and all gradients of a fixed sum of the outputs."""
    x = x.clone().requires_grad_()
    y = function(x)
    return [
        y,
        *torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), [x, *layer.parameters()]
        ),
    ]


@with_least_and_most_options
def test_compile(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    layer = build(kind, 6, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 7):
            x = torch.randn(rows, 6, 5 if "dim" in options else 6)
            assert_close(gradients(compiled, layer, x), gradients(layer, layer, x))


@with_least_and_most_options
def test_export(kind: type[PointwiseNorm], options: dict[str, Any]) -> None:
    layer = build(kind, 6, **options).eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        layer, (torch.randn(3, 6, 6),), dynamic_shapes=({0: batch},), strict=True
    )
    x = torch.randn(5, 6, 6)
    assert_close(program.module()(x), layer(x))
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [
        call
        for call in calls
        if any(word in call for word in ("mean", "sum", "var", "norm", "amax"))
    ]


def test_vmap_and_functional_call(kind: type[PointwiseNorm]) -> None:
    layers = [build(kind, 6, per_channel=True, center=True) for _ in range(3)]
    x = torch.randn(4, 5, 6)
    assert_close(vmap(layers[0])(x), layers[0](x))
    assert_close(vmap(layers[0], in_dims=1, out_dims=1)(x), layers[0](x))
    params, buffers = stack_module_state(layers)
    together = vmap(lambda p, x: functional_call(layers[0], (p, buffers), (x,)), in_dims=(0, None))(
        params, x
    )
    assert_close(together, torch.stack([layer(x) for layer in layers]))

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layers[0], params, (x,)).pow(2).sum()

    own = {name: p.detach() for name, p in layers[0].named_parameters()}
    per_sample = vmap(grad(loss), in_dims=(None, 0))(own, x)
    layers[0](x).pow(2).sum().backward()
    for name, parameter in layers[0].named_parameters():
        assert_close(per_sample[name].sum(0), parameter.grad)


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: type[PointwiseNorm]) -> list[Tensor]:
    """Return a list that fills with the layer's inputs; a hook would turn the fast path off by itself."""
    seen: list[Tensor] = []
    original = kind.forward

    def forward(self: PointwiseNorm, x: Tensor) -> Tensor:
        seen.append(x)
        return original(self, x)

    monkeypatch.setattr(kind, "forward", forward)
    return seen


def encoder_layer(**kwargs: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **kwargs)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("replaced", [("norm1",), ("norm2",), ("norm1", "norm2")], ids="+".join)
def test_encoder_layer_calls_it_in_eval_mode(
    kind: type[PointwiseNorm],
    replaced: tuple[str, ...],
    norm_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = encoder_layer(norm_first=norm_first)
    for name in replaced:
        setattr(layer, name, build(kind, 8))
    x = torch.randn(2, 5, 8)
    wanted = layer.train()(x)
    seen = count_calls(monkeypatch, kind)
    with torch.no_grad():
        assert_close(layer.eval()(x), wanted)
    assert len(seen) == len(replaced)


def test_encoder_built_from_such_a_layer_says_that_it_is_not_nested(
    kind: type[PointwiseNorm],
) -> None:
    layer = encoder_layer()
    layer.norm1, layer.norm2 = build(kind, 8), build(kind, 8)
    with pytest.warns(UserWarning, match=r"norm1\.eps.*encoder_layer\.norm2\.eps"):
        encoder = nn.TransformerEncoder(layer, 2)
    assert not encoder.use_nested_tensor
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@ignore_prototype_warning
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "no affine"])
def test_encoder_whose_norms_are_replaced_takes_padding(
    kind: type[PointwiseNorm], affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = nn.TransformerEncoder(encoder_layer(), 2, norm=build(kind, 8))
    for layer in encoder.layers:
        layer.norm1, layer.norm2 = (build(kind, 8, elementwise_affine=affine) for _ in range(2))
    x = torch.randn(3, 5, 8)
    lengths = torch.tensor([5, 2, 3])
    padding = torch.arange(5) >= lengths[:, None]
    wanted = encoder.train()(x, src_key_padding_mask=padding)
    seen = count_calls(monkeypatch, kind)
    with torch.no_grad():
        got = encoder.eval()(x, src_key_padding_mask=padding)
        # Without a mask nothing is nested.
        assert_close(encoder(x), encoder.train()(x))
    # Torch nests the batch, once for the encoder; the final norm gets it padded again.
    assert sum(x.is_nested for x in seen) == 4
    assert_close(got[~padding], wanted[~padding])


@ignore_prototype_warning
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(kind: type[PointwiseNorm], layout: torch.layout) -> None:
    layer = build(kind, 8, per_channel=True, center=True)
    parts = [torch.randn(n, 8) for n in (3, 0, 5)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    y = layer(nested)
    assert y.is_nested
    assert y.layout == layout
    for got, part in zip(y.unbind(), parts, strict=True):
        assert_close(got, layer(part))
    sum(part.pow(2).sum() for part in y.unbind()).backward()
    together = torch.cat(parts).requires_grad_()
    (wanted,) = torch.autograd.grad(layer(together).pow(2).sum(), together)
    assert_close(torch.cat(nested.grad.unbind()), wanted)


@ignore_prototype_warning
def test_nested_tensors_refused(kind: type[PointwiseNorm]) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with pytest.raises(ArgumentError, match=r"dim.*negative"):
        kind(8, dim=2)(nested)
    with pytest.raises(ArgumentError, match=r"\(4,\) at dim -1, got \(8,\)"):
        kind(4)(nested)


def test_constants_that_scale_x_learn_in_proportion_to_their_size() -> None:
    layers = [DyISRU(4), DyT(4, alpha_init=0.01), Derf(4, alpha_init=0.02, scale=5.0)]
    rates = [layer.constant_rates() for layer in layers]
    assert rates[0] == {layers[0].log_beta: 1.0}
    assert rates[1][layers[1].alpha] == pytest.approx(0.01)
    assert rates[2][layers[2].alpha] == pytest.approx(0.02)
    assert rates[2][layers[2].shift] == pytest.approx(0.2)
    groups = param_groups(nn.Sequential(*layers), lr=1e-3, constants_lr=1e-2)
    found = {p: group["lr"] for group in groups for p in group["params"]}
    assert found[layers[1].alpha] == pytest.approx(1e-4)
    assert found[layers[0].log_beta] == pytest.approx(1e-2)
    assert len(found) == sum(1 for layer in layers for _ in layer.parameters())


def test_a_logarithm_learns_fast_by_default() -> None:
    layers = [
        DyISRU(4),
        DyT(4, alpha_init=0.5),
        LinearControl(4),
        AnnealedDyISRU(4, kind="layernorm"),
    ]
    found = {
        p: group["lr"]
        for group in param_groups(nn.Sequential(*layers), lr=1e-3)
        for p in group["params"]
    }
    assert [found[layer.log_beta] for layer in (layers[0], layers[2], layers[3])] == pytest.approx(
        [3e-2] * 3
    )
    assert found[layers[1].alpha] == pytest.approx(5e-4)
    assert found[layers[0].weight] == pytest.approx(1e-3)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "constants_lr"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "a", [1e-3]])
def test_rates_are_numbers(name: str, bad: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name}.*finite.*got"):
        param_groups(DyISRU(4), **{"lr": 1e-3, name: bad})


@pytest.mark.parametrize("model", ["a", [nn.Parameter(torch.ones(1))], None])
def test_groups_are_those_of_a_module(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"model.*torch\.nn\.Module"):
        param_groups(model, lr=1e-3)


def test_a_resumed_run_finds_the_groups_it_was_saved_with() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), DyT(4, alpha_init=0.5), Derf(4, alpha_init=0.5), DyISRU(4)
    )
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    saved = optimizer.state_dict()
    with torch.no_grad():
        model[1].alpha.fill_(0.1)
        model[2].alpha.fill_(0.7)
    torch.optim.AdamW(param_groups(model, lr=1e-3)).load_state_dict(saved)
    assert len(saved["param_groups"]) == len(param_groups(nn.Sequential(*model), lr=1.0))
