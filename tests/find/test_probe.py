"""find_norms: found norms, refused norms with the reason, and no trace of the run."""

import contextlib
import functools
import math
import random
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

import dynorm
from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.find import probe
from dynorm.find.probe import find_norms
from dynorm.find.recover import affine_of, recover
from dynorm.site import NormSite, select_sites

C = 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Wrap(nn.Module):
    """Any function of modules and tensors as a model: the modules are parts, the function is its forward."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Norm(nn.Module):
    """A home-made norm whose formula is given as a function of itself and x."""

    def __init__(self, function: Callable[["Norm", Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rms(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def standardize(x: Tensor, dim: int, eps: float = 1e-5) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / (x.var(dim, keepdim=True, unbiased=False) + eps).sqrt()


def only(model: nn.Module, *args: Any) -> NormSite:
    (site,) = find_norms(model, *args)
    return site


def only_of(norm: nn.Module, x: Tensor) -> NormSite:
    """The single site of a model that holds a norm."""
    return only(nn.Sequential(norm), x)


def perturbed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


# Found norms


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(train: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(C, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(C), enable_nested_tensor=False).train(
        train
    )
    sites = find_norms(model, torch.randn(2, 5, C))
    assert [site.path for site in sites] == [
        "layers.0.norm1",
        "layers.0.norm2",
        "layers.1.norm1",
        "layers.1.norm2",
        "norm",
    ]
    assert all(
        (site.kind, site.dim, site.eps, site.refused) == ("layernorm", -1, 1e-5, None)
        for site in sites
    )
    assert [site.order for site in sites] == [0, 1, 2, 3, 4]
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.training is train


def test_transformer_encoder_with_padding() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 32, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.inference_mode():
        sites = find_norms(model, torch.randn(2, 3, C), src_key_padding_mask=padding)
    assert [site.path for site in sites] == ["layers.0.norm1", "layers.0.norm2"]


def test_shared_module_has_aliases_and_is_called_more_than_once() -> None:
    norm = nn.LayerNorm(C)
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(nn.Linear(C, C), norm), "c": norm})
    site = only(
        Wrap(lambda self, x: self.parts["c"](self.parts["b"](x)), parts=model), torch.randn(2, C)
    )
    assert (site.path, site.aliases, site.calls) == ("parts.a", ("parts.b.1", "parts.c"), 2)


def test_sites_come_in_call_order() -> None:
    model = Wrap(
        lambda self, x: self.early(self.late(x)), early=nn.RMSNorm(C), late=nn.LayerNorm(C)
    )
    assert [site.path for site in find_norms(model, torch.randn(2, C))] == ["late", "early"]


def test_query_and_key_norms_of_a_tiny_qwen3() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=50,
    )
    model = transformers.Qwen3Model(config).eval()
    sites = {site.path: site for site in find_norms(model, input_ids=torch.arange(6)[None])}
    assert sites["layers.0.self_attn.q_norm"].normalized_shape == (12,)
    assert sites["layers.0.self_attn.k_norm"].normalized_shape == (12,)
    assert sites["layers.0.input_layernorm"].normalized_shape == (32,)
    assert list(sites) == [
        "layers.0.input_layernorm",
        "layers.0.self_attn.q_norm",
        "layers.0.self_attn.k_norm",
        "layers.0.post_attention_layernorm",
        "norm",
    ]
    assert {site.kind for site in sites.values()} == {"rmsnorm"}
    assert {site.eps for site in sites.values()} == {1e-6}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 1e-3])
def test_every_dtype(dtype: torch.dtype, eps: float) -> None:
    model = perturbed(nn.Sequential(nn.LayerNorm(C, eps=eps), nn.RMSNorm(C, eps=eps))).to(dtype)
    layer_norm, rms_norm = find_norms(model, torch.randn(3, 4, C).to(dtype))
    assert (layer_norm.kind, layer_norm.eps, layer_norm.bias_name) == ("layernorm", eps, "bias")
    assert (rms_norm.kind, rms_norm.eps, rms_norm.weight_name) == ("rmsnorm", eps, "weight")
    weight, _ = affine_of(model[0], layer_norm)
    assert weight is not None
    assert weight.dtype == dtype
    assert torch.equal(weight, model[0].weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_machine_epsilon(dtype: torch.dtype) -> None:
    norm = nn.RMSNorm(C).to(dtype)
    site = only_of(norm, torch.randn(2, C).to(dtype))
    x = (1e-2 * torch.randn(3, C)).to(dtype).double()
    expected = x / (x.square().mean(-1, keepdim=True) + site.eps).sqrt()
    assert (norm(x.to(dtype)).double() - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_under_autocast() -> None:
    model = nn.Sequential(
        nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C, eps=1e-6)
    )
    with torch.autocast("cpu", torch.bfloat16):
        sites = find_norms(model, torch.randn(4, C))
        assert torch.is_autocast_enabled("cpu")
    assert [(site.path, site.kind) for site in sites] == [("1", "layernorm"), ("3", "rmsnorm")]


@pytest.mark.parametrize("shape", [(2, C, 4, 4), (2, C, C, C), (3, C, 5), (2, C, 3, 4, 5)])
def test_channels_first(shape: tuple[int, ...]) -> None:
    column = (C, *[1] * (len(shape) - 2))
    norm = Norm(
        lambda self, x: standardize(x, 1) * self.gain.view(column) + self.shift.view(column),
        gain=torch.rand(C),
        shift=torch.rand(C),
    )
    site = only_of(norm, torch.randn(shape))
    assert (site.kind, site.dim, site.normalized_shape) == ("layernorm", 1, (C,))
    assert (site.weight_name, site.bias_name) == ("gain", "shift")


def test_channels_first_without_batch() -> None:
    norm = Norm(lambda self, x: rms(x, 0) * self.g, g=torch.rand(C, 1, 1))
    site = only_of(norm, torch.randn(C, 4, 5))
    assert (site.kind, site.dim, site.normalized_shape, site.weight_name) == (
        "rmsnorm",
        0,
        (C,),
        "g",
    )
    weight, _ = affine_of(norm, site)
    assert weight is not None
    assert weight.shape == (C,)


def test_a_wrapper_that_permutes_leaves_the_inner_norm_as_the_site() -> None:
    wrapper = Wrap(lambda self, x: self.norm(x.movedim(1, -1)).movedim(-1, 1), norm=nn.LayerNorm(C))
    site = only_of(wrapper, torch.randn(2, C, 4, 4))
    assert (site.path, site.dim) == ("0.norm", -1)


def test_a_container_of_one_norm_is_not_a_site() -> None:
    assert (
        only_of(
            nn.Sequential(nn.Sequential(nn.LayerNorm(C)), nn.Identity()), torch.randn(2, C)
        ).path
        == "0.0.0"
    )


def test_the_model_itself_may_be_a_norm() -> None:
    assert only(nn.LayerNorm(C), torch.randn(2, C)).path == ""


def test_several_trailing_axes() -> None:
    norm = perturbed(nn.LayerNorm((4, C)))
    site = only_of(norm, torch.randn(3, 4, C))
    assert (site.dim, site.normalized_shape) == ((-2, -1), (4, C))
    weight, bias = affine_of(norm, site)
    assert weight is not None
    assert bias is not None
    assert torch.equal(weight, norm.weight)
    assert torch.equal(bias, norm.bias)
    assert only_of(nn.LayerNorm((4, C), elementwise_affine=False), torch.randn(3, 4, C)).dim == (
        -2,
        -1,
    )


@pytest.mark.parametrize(
    "shape", [(C,), (1, C), (1, 1, C), (7, C), (2, 3, 4, C), (C, C), (C, C, C)]
)
def test_every_rank(shape: tuple[int, ...]) -> None:
    for norm in (nn.LayerNorm(C), nn.RMSNorm(C, eps=1e-6, elementwise_affine=False)):
        site = only_of(norm, torch.randn(shape))
        assert (site.dim, site.normalized_shape, site.input_shape) == (-1, (C,), shape)


@pytest.mark.parametrize("width", [3, 5, 768])
def test_every_width(width: int) -> None:
    assert only_of(nn.LayerNorm(width), torch.randn(3, width)).kind == "layernorm"
    assert only_of(nn.RMSNorm(width, eps=1e-5), torch.randn(3, width)).kind == "rmsnorm"


def test_an_activation_without_mean_is_no_excuse_to_take_a_layernorm_for_an_rmsnorm() -> None:
    x = torch.randn(4, C)
    model = nn.Sequential(
        nn.LayerNorm(C, elementwise_affine=False), nn.LayerNorm(C), nn.RMSNorm(C, eps=1e-5)
    )
    assert [site.kind for site in find_norms(model, x - x.mean(-1, keepdim=True))] == [
        "layernorm",
        "layernorm",
        "rmsnorm",
    ]


def test_one_plus_weight() -> None:
    norm = Norm(
        lambda self, x: (rms(x.float()) * (1 + self.weight.float())).type_as(x),
        weight=torch.zeros(C),
    )
    site = only_of(norm, torch.randn(2, 3, C))
    assert (site.weight_offset, site.weight_name, site.has_bias) == (1.0, "weight", False)
    perturbed(norm).to(torch.bfloat16)
    weight, bias = affine_of(norm, site)
    assert bias is None
    assert weight is not None
    assert weight.dtype == torch.float32
    assert torch.equal(weight, 1 + norm.weight.float())


def test_weight_only_and_no_affine_at_all() -> None:
    weight_only = only_of(nn.LayerNorm(C, bias=False), torch.randn(2, C))
    assert (weight_only.has_weight, weight_only.has_bias) == (True, False)
    bare = nn.LayerNorm(C, elementwise_affine=False)
    site = only_of(bare, torch.randn(2, C))
    assert (site.has_weight, site.has_bias, site.weight_name, site.bias_name) == (
        False,
        False,
        None,
        None,
    )
    assert affine_of(bare, site) == (None, None)


def test_zero_weight_is_still_a_weight() -> None:
    norm = nn.LayerNorm(C)
    nn.init.zeros_(norm.weight)
    site = only_of(norm, torch.randn(2, C))
    assert (site.kind, site.weight_name, site.weight_offset) == ("layernorm", "weight", 0.0)


def test_weight_in_a_buffer() -> None:
    norm = Norm(lambda self, x: rms(x) * self.scale)
    norm.register_buffer("scale", torch.rand(C))
    assert only_of(norm, torch.randn(2, C)).weight_name == "scale"


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Norm(lambda self, x: F.normalize(x, dim=-1)), torch.full((C,), C**-0.5)),
        (
            Norm(lambda self, x: F.normalize(x, dim=-1) * self.g, g=torch.tensor(3.0)),
            torch.full((C,), 3 * C**-0.5),
        ),
        (
            Norm(lambda self, x: rms(x) * self.w.exp(), w=torch.linspace(-1, 1, C)),
            torch.linspace(-1, 1, C).exp(),
        ),
        (
            Norm(lambda self, x: rms(x) * self.w.abs(), w=torch.linspace(-1, 1, C)),
            torch.linspace(-1, 1, C).abs(),
        ),
    ],
    ids=["l2", "scaled l2", "exponential weight", "absolute weight"],
)
def test_weight_that_no_tensor_holds(norm: nn.Module, expected: Tensor) -> None:
    site = only_of(norm, torch.randn(2, C))
    assert (site.kind, site.has_weight, site.weight_name, site.has_bias) == (
        "rmsnorm",
        True,
        None,
        False,
    )
    weight, bias = affine_of(norm, replace(site, refused=None))
    assert bias is None
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_unbiased_deviation_is_a_weight() -> None:
    norm = Norm(
        lambda self, x: (
            self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b
        ),
        a=torch.ones(C),
        b=torch.rand(C),
    )
    site = only_of(norm, torch.randn(2, C))
    assert (site.kind, site.weight_name, site.bias_name) == ("layernorm", None, "b")
    weight, bias = affine_of(norm, site)
    torch.testing.assert_close(weight, torch.full((C,), math.sqrt((C - 1) / C)))
    assert torch.equal(bias, norm.b)  # type: ignore[arg-type]


def test_parametrized_weight() -> None:
    norm = nn.RMSNorm(C, eps=1e-6)
    nn.utils.parametrize.register_parametrization(norm, "weight", Wrap(lambda self, w: w.exp()))
    site = only_of(norm, torch.randn(2, C))
    assert (site.kind, site.weight_name) == ("rmsnorm", None)
    torch.testing.assert_close(
        affine_of(norm, site)[0], torch.full((C,), math.e), rtol=1e-5, atol=0
    )


def test_like_norms_of_other_values() -> None:
    norms = [perturbed(nn.LayerNorm(C)) for _ in range(3)]
    norms[1].eps = 1e-3
    model = nn.Sequential(*norms)
    sites = find_norms(model, torch.randn(2, C))
    assert [site.eps for site in sites] == [1e-5, 1e-3, 1e-5]
    for norm, site in zip(norms, sites, strict=True):
        assert torch.equal(affine_of(norm, site)[0], norm.weight)  # type: ignore[arg-type]


def test_like_modules_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    monkeypatch.setattr(
        probe, "recover", lambda module, *rest: tried.append(module) or recover(module, *rest)
    )
    model = nn.Sequential(
        *[layer for _ in range(5) for layer in (nn.LayerNorm(C), nn.GELU())],
        nn.LayerNorm(C, eps=0.1),
    )
    assert len(find_norms(model, torch.randn(2, C))) == 6
    assert tried == [model[0], model[1], model[10]]


def test_eps_of_home_made_norms() -> None:
    hidden = Norm(lambda self, x: rms(x, eps=3e-4))
    assert only_of(hidden, torch.randn(2, C)).eps == 3e-4
    named = Norm(lambda self, x: rms(x, eps=self.variance_epsilon))
    named.variance_epsilon = 1.2345e-6
    assert only_of(named, torch.randn(2, C)).eps == 1.2345e-6
    none = Norm(lambda self, x: rms(x, eps=0.0))
    assert only_of(none, torch.randn(2, C)).eps == 0.0


# Refused norms, with the reason


class TimesGate(nn.RMSNorm):
    """Gated."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * F.silu(gate)


class AdaLayerNorm(nn.Module):
    """Adaptive, all by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, 2 * C)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.linear(condition).chunk(2, -1)
        return F.layer_norm(x, (C,)) * (1 + scale) + shift


class GroupedRMSNorm(nn.Module):
    """RMSNorm of each quarter of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return rms(x.unflatten(-1, (4, -1))).flatten(-2)


class HeadNorm(nn.Module):
    """One weight a head, as in Cohere's and Chameleon's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, C))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.weight


class TokenNorm(nn.Module):
    """Standardizes each channel over the tokens of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return standardize(x, 1)


class HandmadeBatchNorm(nn.Module):
    """Statistics of the batch, one scale a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return standardize(x, 0) * self.weight


class ConstantNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


class DropNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(rms(x), training=self.training)


class ScaledInputNorm(nn.Module):
    """Looks like an RMSNorm as long as its weight is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x * (1 + self.weight))


TOKENS, HEADS, IMAGE = (2, 5, C), (2, 3, 4, C), (2, C, 4, 4)


@pytest.mark.parametrize(
    ("norm", "shape", "reason"),
    [
        (nn.BatchNorm1d(C), (6, C), "batch norm"),
        (nn.BatchNorm2d(C), IMAGE, "batch norm"),
        (nn.BatchNorm1d(C).eval(), (6, C), "batch norm"),
        (HandmadeBatchNorm(), (6, C), "batch norm"),
        (nn.GroupNorm(4, C), IMAGE, "group norm"),
        (nn.GroupNorm(1, C), (6, C), "group norm"),
        (nn.InstanceNorm2d(C), IMAGE, "instance norm"),
        (nn.InstanceNorm1d(C, affine=True), (2, C, 5), "instance norm"),
        (nn.LocalResponseNorm(2), IMAGE, "local response norm"),
        (GroupedRMSNorm(), TOKENS, "groups: it normalizes groups of 4 channels"),
        (HeadNorm(), HEADS, "scale by position"),
        (TokenNorm(), TOKENS, "unmarked axis"),
        (ConstantNorm(), TOKENS, "constant"),
        (DropNorm(), TOKENS, "random"),
        (ScaledInputNorm(), TOKENS, "neither LayerNorm nor RMSNorm"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_other_norms_are_refused(norm: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    model = nn.Sequential(norm)
    site = only(model, torch.randn(shape))
    assert site.refused is not None
    assert site.refused.startswith(reason)
    assert (site.kind, site.path, site.class_name, site.calls) == (
        "",
        "0",
        type(norm).__qualname__,
        1,
    )
    with pytest.raises(ModelError, match="was refused"):
        affine_of(norm, site)


def test_gated_and_adaptive_norms_are_refused() -> None:
    x = torch.randn(2, C)
    for norm in (TimesGate(C, eps=1e-6), AdaLayerNorm()):
        for call in (
            lambda self, x: self.norm(x, x),
            lambda self, x: self.norm(x, **{self.name: x}),
        ):
            model = Wrap(call, norm=norm)
            model.name = "gate" if isinstance(norm, TimesGate) else "condition"
            assert only(model, x).refused == "takes another tensor along: gated or adaptive"


def test_a_gated_norm_that_gets_no_gate_is_a_norm() -> None:
    assert only_of(TimesGate(C, eps=1e-6), torch.randn(2, C)).kind == "rmsnorm"


def test_an_adaptive_norm_around_a_plain_one() -> None:
    adaptive = AdaLayerNorm()
    adaptive.norm = nn.LayerNorm(C, elementwise_affine=False)
    adaptive.forward = lambda x, c: adaptive.norm(x) * (1 + adaptive.linear(c)[:, :C])  # type: ignore[method-assign]
    inner, outer = find_norms(Wrap(lambda self, x: self.ada(x, x), ada=adaptive), torch.randn(2, C))
    assert (inner.path, inner.refused) == ("ada.norm", None)
    assert outer.path == "ada"
    assert outer.refused is not None
    assert "gated or adaptive; the norm inside is at 'ada.norm'" in outer.refused


def test_a_residual_before_the_norm_is_no_gate() -> None:
    class AddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return self.norm(x + residual)

    assert (
        only(Wrap(lambda self, x: self.part(x, x), part=AddNorm()), torch.randn(2, C)).path
        == "part.norm"
    )


def test_calls_that_a_pointwise_layer_could_not_take() -> None:
    x = torch.randn(2, C)
    keyword = only(Wrap(lambda self, x: self.norm(input=x) + x, norm=nn.LayerNorm(C)), x)
    assert keyword.refused is not None
    assert keyword.refused.startswith("other arguments")
    none = only(Wrap(lambda self, x: self.norm(x, None) + x, norm=TimesGate(C)), x)
    assert none.refused is not None
    assert none.refused.startswith("other arguments")


def test_calls_of_several_widths() -> None:
    norm = nn.RMSNorm(C, eps=1e-6)
    norm.forward = rms  # type: ignore[method-assign]

    class Weightless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return rms(x)

    model = Wrap(lambda self, x: self.norm(self.norm(x)[:, :4]), norm=Weightless())
    assert find_norms(model, torch.randn(2, C)) == []
    Weightless.__name__ = "WeightlessNorm"
    refused = only(model, torch.randn(2, C)).refused
    assert refused is not None
    assert refused.startswith("several widths")


def test_never_called() -> None:
    parts = nn.ModuleDict(
        {
            "unused": nn.LayerNorm(C),
            "wrapped": nn.Sequential(nn.RMSNorm(C)),
            "used": nn.LayerNorm(C),
        }
    )
    sites = find_norms(Wrap(lambda self, x: self.parts["used"](x), parts=parts), torch.randn(2, C))
    assert [site.path for site in sites] == ["parts.used", "parts.unused", "parts.wrapped.0"]
    assert [site.calls for site in sites] == [1, 0, 0]
    assert all(
        str(site.refused).startswith("never called by the example input") for site in sites[1:]
    )


LOOK_ALIKES = {
    "identity": nn.Identity(),
    "tanh": nn.Tanh(),
    "scaled tanh": Norm(
        lambda self, x: torch.tanh(self.a * x) * self.w, a=torch.ones(1), w=torch.ones(C)
    ),
    "dyisru": Norm(lambda self, x: math.sqrt(C) * x / (C + x * x).sqrt()),
    "sign": Norm(lambda self, x: x.sign()),
    "softmax": nn.Softmax(-1),
    "relu in place": nn.ReLU(inplace=True),
    "gelu": nn.GELU(),
    "dropout": nn.Dropout(0.5),
    "scale": Norm(lambda self, x: x * self.w, w=torch.ones(C)),
    "linear without bias": nn.Linear(C, C, bias=False),
    "depthwise": nn.Conv1d(5, 5, 1, groups=5),
    "largest entry": Norm(lambda self, x: x / x.abs().amax(-1, keepdim=True)),
    "l1": Norm(lambda self, x: F.normalize(x, p=1, dim=-1)),
    "deviation only": Norm(lambda self, x: x / x.std(-1, keepdim=True)),
    "part of the channels": Norm(
        lambda self, x: x * x[..., :4].pow(2).mean(-1, keepdim=True).rsqrt()
    ),
    "ranks": Norm(lambda self, x: x.argsort(-1).argsort(-1).to(x.dtype)),
    "norm and residual": Norm(lambda self, x: x + rms(x)),
    "norm and activation": Norm(lambda self, x: rms(x).relu()),
    "squared norm": Norm(lambda self, x: x / x.pow(2).mean(-1, keepdim=True)),
    "centring": Norm(lambda self, x: x - x.mean(-1, keepdim=True)),
    "over tokens": Norm(lambda self, x: standardize(x, 1)),
    "over tokens, scaled by channel": Norm(
        lambda self, x: standardize(x, 1) * self.w, w=torch.ones(C)
    ),
    "over the batch": Norm(lambda self, x: standardize(x, 0)),
    "over everything": Norm(lambda self, x: F.layer_norm(x, x.shape)),
    "weight by position": Norm(lambda self, x: rms(x) * self.w, w=torch.rand(5, C)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
@pytest.mark.parametrize("train", [True, False])
def test_look_alikes_are_not_found(name: str, train: bool) -> None:
    model = nn.Sequential(LOOK_ALIKES[name]).train(train)
    assert [site for site in find_norms(model, torch.randn(2, 5, C)) if site.refused is None] == []


def test_norms_whose_copies_raise_are_refused() -> None:
    class FixedNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, torch.ones_like(x)):
                raise RuntimeError("only ones")
            return x / 1

    site = only_of(FixedNorm(), torch.ones(2, C))
    assert site.refused == "cannot be probed: RuntimeError: only ones"


def test_a_norm_that_computes_something_else_differs_in_the_run() -> None:
    class CountingNorm(nn.LayerNorm):
        called = False

        def forward(self, x: Tensor) -> Tensor:
            factor = 1 if CountingNorm.called else 2
            CountingNorm.called = True
            return factor * super().forward(x)

    refused = only_of(CountingNorm(C), torch.randn(2, C)).refused
    assert refused is not None
    assert refused.startswith("differs in the run")


def liger_forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def test_a_norm_whose_instance_got_another_forward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.RMSNorm(C, eps=1e-6))
    model[1].forward = types.MethodType(liger_forward, model[1])
    x = torch.randn(3, C)
    site = only(model, x)
    assert site.path == "1"
    assert "undo the patch, or convert first" in str(site.refused)
    with pytest.raises(ModelError, match=r"undo.*convert"):
        dynorm.convert_(model, [site])
    # Undone.
    del model[1].forward
    assert only(model, x).refused is None


def test_a_hook_of_accelerate_is_no_other_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(C, C), nn.RMSNorm(C, eps=1e-6))
    x = torch.randn(3, C)
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    site = only(model, x)
    assert site.refused is None
    with pytest.raises(ModelError, match="remove_hook_from_submodules"):
        dynorm.convert_(model, [site])
    # The advice helps.
    hooks.remove_hook_from_submodules(model)
    assert len(dynorm.convert_(model, [site]).converted) == 1


def test_a_hook_of_accelerate_over_another_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = nn.Sequential(nn.Linear(C, C), nn.RMSNorm(C, eps=1e-6))
    model[1].forward = types.MethodType(liger_forward, model[1])
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    assert "undo the patch" in str(only(model, torch.randn(3, C)).refused)


def test_layers_of_dynorm_are_left_out() -> None:
    class Converted(nn.LayerNorm):
        _dynorm_layer = True

    outer = nn.Sequential(nn.Sequential(Converted(C)), nn.RMSNorm(C, eps=1e-6))
    assert only(outer, torch.randn(2, C)).path == "1"


CONSTANT = "one channel: its output does not depend on the input"
SIGN = "one channel: its output keeps only the sign of the input"


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm(1), CONSTANT),
        (nn.RMSNorm(1, eps=1e-6), SIGN),
        (Norm(lambda self, x: rms(x) * self.w, w=torch.ones(1)), SIGN),
        (nn.LayerNorm(2), "two channels: LayerNorm makes them 1 and -1"),
    ],
)
@pytest.mark.parametrize("positions", [(), (5,)])
def test_a_norm_of_too_few_channels_says_so(
    norm: nn.Module, reason: str, positions: tuple[int, ...]
) -> None:
    channels = 2 if reason.startswith("two") else 1
    model = nn.Sequential(nn.Linear(C, channels), norm)
    assert str(only(model, torch.randn(3, *positions, C)).refused).startswith(reason)


def float_in_place(self: Norm, x: Tensor) -> Tensor:
    v = x.float()
    v.mul_(v.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
    return (v * self.w).to(x.dtype)


def unnoticed(self: Norm, x: Tensor) -> Tensor:
    x.data.mul_(x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
    return x * self.w


def returns_its_input(self: Norm, x: Tensor) -> Tensor:
    return x.mul_(x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())


def view_of_its_input(self: Norm, x: Tensor) -> Tensor:
    return returns_its_input(self, x).view_as(x)


def into_its_input(self: Norm, x: Tensor) -> Tensor:
    return torch.mul(x, x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt(), out=x)


def after_the_norm(self: Norm, x: Tensor) -> Tensor:
    y = rms(x) * self.w
    x.zero_()
    return y


class InPlaceNorm(Norm):
    """Named a norm."""


@pytest.mark.parametrize(
    "function",
    [
        float_in_place,
        unnoticed,
        returns_its_input,
        view_of_its_input,
        into_its_input,
        after_the_norm,
    ],
)
def test_a_norm_that_modifies_its_input_is_refused(function: Any) -> None:
    norm = InPlaceNorm(function, w=torch.rand(C) + 0.5)
    model = Wrap(lambda self, x: x + self.norm(x), norm=norm)
    x = torch.randn(3, C)
    before = x.clone()
    assert str(only(model, x).refused).startswith("modifies its input in place")
    # Nor is the example modified.
    assert torch.equal(x, before)


def test_a_copy_in_another_dtype_may_be_modified() -> None:
    norm = InPlaceNorm(float_in_place, w=torch.rand(C) + 0.5)
    model = Wrap(lambda self, x: x + self.norm(x), norm=norm).bfloat16()
    x = torch.randn(3, C, dtype=torch.bfloat16)
    before = x.clone()
    site = only(model, x)
    assert (site.refused, site.kind, site.weight_name) == (None, "rmsnorm", "w")
    assert torch.equal(x, before)


def test_a_later_call_that_modifies_its_input_counts() -> None:
    def second_time(self: Norm, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            x.mul_(2)
        return rms(x) * self.w

    norm = InPlaceNorm(second_time, w=torch.rand(C) + 0.5)
    model = Wrap(lambda self, x: self.norm(x[:2]).sum() + self.norm(x), norm=norm)
    assert str(only(model, torch.randn(3, C)).refused).startswith("modifies its input in place")


def test_a_norm_that_returns_one_buffer_is_a_norm() -> None:
    class BufferNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.empty(0)

        def forward(self, x: Tensor) -> Tensor:
            if self.kept.shape != x.shape or self.kept.dtype != x.dtype:
                self.kept = torch.empty_like(x)
            return torch.mul(x, (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(), out=self.kept)

    site = only_of(BufferNorm(), torch.randn(3, C))
    assert (site.refused, site.kind) == (None, "rmsnorm")


def shifted(self: Wrap, x: Tensor) -> Tensor:
    return self.norm(x.mul_(2).add_(1))


def looked_up(self: Wrap, ids: Tensor) -> Tensor:
    return self.norm(self.table(ids.clamp_(max=2)))


@pytest.mark.parametrize(
    ("function", "value"),
    [(shifted, torch.arange(3.0 * C).view(3, C)), (looked_up, torch.arange(5))],
)
@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "keyword", "user dict"])
def test_a_model_may_modify_its_input_but_not_the_example(
    function: Any, value: Tensor, form: str
) -> None:
    model = Wrap(lambda self, x: function(self, x), norm=nn.LayerNorm(C), table=nn.Embedding(5, C))
    x = value.clone()
    if form == "keyword":
        sites = find_norms(model, x=x)
    else:
        forms: dict[str, Any] = {
            "tensor": x,
            "tuple": (x,),
            "dict": {"x": x},
            "user dict": UserDict(x=x),
        }
        model.forward = functools.partial(_unpacked, function, model)  # type: ignore[method-assign]
        sites = find_norms(model, forms[form])
    assert [site.refused for site in sites] == [None]
    assert torch.equal(x, value)


def _unpacked(function: Any, model: Wrap, x: Tensor) -> Tensor:
    return function(model, x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each expert has a norm; a token goes to the expert of its number."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(C, eps=1e-6) for _ in range(experts))
        self.shared = nn.RMSNorm(C, eps=1e-6)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, norm in enumerate(self.norms):
            out[expert == number] = norm(x[expert == number])
        # With rows, and then with none.
        return self.shared(out) + self.shared(out[:0]).sum()


def test_experts_without_tokens() -> None:
    sites = find_norms(Experts(3), torch.randn(4, C), torch.tensor([0, 0, 2, 2]))
    by_path = {site.path: site for site in sites}
    found = [site.path for site in sites if site.refused is None]
    assert found == ["norms.0", "norms.2", "shared"]
    assert str(by_path["norms.1"].refused).startswith("not reached")
    # A call without tokens does not count.
    assert [site.calls for site in sites] == [1, 1, 1, 0]


def test_an_expert_that_gets_tokens_later_only() -> None:
    norm = nn.RMSNorm(C, eps=1e-6)
    model = Wrap(lambda self, x: self.norm(x[:0]).sum() + self.norm(x), norm=norm)
    site = only(model, torch.randn(4, C))
    assert (site.refused, site.input_shape, site.calls) == (None, (4, C), 1)


def test_the_example_may_be_a_batch_as_other_functions_take() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C)

        def forward(self, a: Any, b: Any = None) -> Tensor:
            return self.norm(a["x"] if isinstance(a, dict) else a + b)

    model, x = Two(), torch.randn(2, C)
    for batch in ({"a": x, "b": x}, (x, x), {"x": x}):
        assert only(model, batch).path == "norm"


def test_parametrizations_of_weights_are_left_out() -> None:
    linear = nn.Linear(C, C)
    parametrize.register_parametrization(
        linear, "weight", Norm(lambda self, x: F.normalize(x, dim=-1))
    )
    assert only(nn.Sequential(linear, nn.RMSNorm(C, eps=1e-6)), torch.randn(2, C)).path == "1"


def test_a_head_that_gives_the_length_one_is_refused_unless_it_is_named() -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(C), nn.Linear(C, C), Norm(lambda self, x: F.normalize(x, dim=-1))
        )

    model = build()
    norm, head = find_norms(model, torch.randn(2, C))
    assert norm.refused is None
    assert "unit length" in str(head.refused)
    done = dynorm.convert_(model, [norm, head])
    assert [site.path for site in done.converted] == ["0"]
    assert [site.path for site in done.refused] == ["2"]
    assert [site.path for site in dynorm.convert_(build(), [norm, head], only="2").converted] == [
        "2"
    ]


class Head(Norm):
    """By its name no norm."""


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


@pytest.mark.parametrize(
    "head",
    [
        Norm(lambda self, x: unit(x - x.mean(-1, keepdim=True))),
        Head(lambda self, x: unit(x), logit_scale=torch.tensor(1.0)),
        Head(lambda self, x: unit(x) * self.scale, scale=torch.tensor(2.0)),
        Head(lambda self, x: unit(x) * 16.0),
    ],
    ids=["centred", "unused parameter", "learned length", "constant length"],
)
def test_heads_that_give_each_token_one_length_are_refused(head: nn.Module) -> None:
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), head)
    sites = find_norms(model, torch.randn(2, C))
    assert [bool(site.refused) for site in sites] == [False, True]
    # A glob that happens to match is no choice of this head.
    assert [site.path for site in dynorm.convert_(model, sites, only="*").converted] == ["0"]
    assert [
        site.path for site in dynorm.convert_(model, sites[1:], only=iter(["2"])).converted
    ] == ["2"]


@pytest.mark.parametrize(
    "norm",
    [
        Norm(lambda self, x: unit(x) * self.g, g=torch.tensor(1.0)),
        Norm(lambda self, x: unit(x) * self.weight, weight=torch.ones(C)),
        Head(lambda self, x: rms(x)),
        Head(lambda self, x: rms(x) * self.weight, weight=torch.full((C,), 0.5)),
    ],
    ids=[
        "ScaleNorm",
        "a scale per channel",
        "RMSNorm by another name",
        "a constant scale per channel",
    ],
)
def test_norms_of_one_length_are_norms(norm: nn.Module) -> None:
    assert only_of(norm, torch.randn(2, C)).refused is None


class Functional(nn.Module):
    """Has norms that no module stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(C), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(F.layer_norm(self.norm(x), (C,), self.weight), (C,))


def test_norms_called_as_functions_are_counted_and_named() -> None:
    model = nn.Sequential(nn.Linear(C, C), Functional(), Functional())
    model[2].forward = lambda x: x  # type: ignore[method-assign]
    found = {site.path: site.refused for site in find_norms(model, torch.randn(2, C))}
    assert found["1.norm"] is None
    assert found["1"] == (
        "calls F.layer_norm and F.rms_norm in its forward, 2 times in the run: write it as a "
        "module to have it replaced"
    )
    assert "2" not in found
    report = dynorm.convert_(model, find_norms(model, torch.randn(2, C)))
    assert "1: Functional kept, calls F.layer_norm" in " ".join(str(report).split())
    # The layers themselves may use torch's norms: an annealed one does.
    dynorm.restore_(model)
    dynorm.convert_(model, find_norms(model, torch.randn(2, C)), to="annealed", only="1.norm")
    assert [site.path for site in find_norms(model, torch.randn(2, C)) if site.calls] == ["1"]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.layer_norm", lambda x: torch.layer_norm(x, (C,))),
        (
            "torch.native_layer_norm",
            lambda x: torch.native_layer_norm(x, (C,), None, None, 1e-5)[0],
        ),
        ("torch.rms_norm", lambda x: torch.rms_norm(x, (C,))),
    ],
)
def test_the_functions_of_torch_are_counted_too(
    name: str, function: Callable[[Tensor], Tensor]
) -> None:
    model = Wrap(lambda self, x: function(self.linear(x)), linear=nn.Linear(C, C))
    (site,) = find_norms(model, torch.randn(2, C))
    assert str(site.refused).startswith(f"calls {name} in its forward, once in the run")
    with pytest.raises(ModelError, match="the model: calls"):
        dynorm.convert_(model, [site])


def test_a_child_that_raises_does_not_take_its_parents_functions() -> None:
    def forward(self: Wrap, x: Tensor) -> Tensor:
        with contextlib.suppress(IndexError):
            self.child(x)
        return F.layer_norm(self.linear(x), (C,))

    model = nn.Sequential(
        Wrap(forward, child=Wrap(lambda self, x: x[:, C]), linear=nn.Linear(C, C))
    )
    (site,) = find_norms(model, torch.randn(2, C))
    assert (site.path, str(site.refused)[:18]) == ("0", "calls F.layer_norm")


def test_the_dtype_that_a_norm_returns_is_kept() -> None:
    norm = Norm(lambda self, x: rms(x.float()) * self.w, w=torch.rand(C) + 0.5)
    model, x = nn.Sequential(nn.Identity(), norm), torch.randn(64, C).bfloat16()
    (site,) = find_norms(model, x)
    assert site.output_dtype == "float32"
    wanted = norm(x)
    dynorm.convert_(model, [site])
    assert model(x).dtype == torch.float32
    dynorm.calibrate_(model, [x])
    assert model(x).dtype == torch.float32
    assert (model(x) - wanted).square().mean() < 0.2 * wanted.square().mean()
    # Computed in float32, and not rounded to bfloat16 before it is returned.
    assert not torch.equal(model(x), model(x).bfloat16().float())
    again = type(model[1])(**model[1].config())
    # Never narrower than float32, and as wide as the weight and the input.
    assert str(again.output_dtype) == site.output_rule == "weight+float32"
    with pytest.raises(ArgumentError, match=r"output_dtype.*int8"):
        dynorm.DyISRU(C, output_dtype="int8")


def test_a_model_without_norms() -> None:
    assert find_norms(nn.Sequential(nn.Linear(C, C), nn.ReLU()), torch.randn(2, C)) == []


# No trace


class Restless(nn.Module):
    """Draws numbers of every kind, writes into one buffer and replaces another."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.batch_norm = nn.BatchNorm1d(C)
        self.register_buffer("cache", torch.zeros(3))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.rand_like(x) + random.random() + float(np.random.rand())
        self.cache = torch.full((3,), 7.0)
        y = self.norm(self.batch_norm(F.dropout(x)))
        if self.fails:
            raise RuntimeError("on purpose")
        return y


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_nothing_of_the_run_stays(fails: bool, train: bool) -> None:
    model = Restless(fails).train(train)
    model.norm.eval()
    calls: list[int] = []
    model.norm.register_forward_hook(lambda *_: calls.append(1))
    cache, running = model.cache, model.batch_norm.running_mean
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]

    if fails:
        with pytest.raises(DataError, match="RuntimeError: on purpose") as caught:
            find_norms(model, torch.randn(4, C, generator=torch.Generator().manual_seed(0)))
        assert isinstance(caught.value.__cause__, RuntimeError)
    else:
        sites = find_norms(model, torch.randn(4, C, generator=torch.Generator().manual_seed(0)))
        assert [site.refused is None for site in sites] == [False, True]

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[2] == before[2]
    assert model.cache is cache
    assert model.batch_norm.running_mean is running
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    # The model ran once, and the copies that were tried ran without its hooks.
    assert calls == [1]


def test_gradients_and_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C))
    model(torch.randn(2, C)).sum().backward()
    before = {name: (p.detach().clone(), p.grad) for name, p in model.named_parameters()}
    find_norms(model, torch.randn(2, C))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert parameter.grad is before[name][1]
        assert parameter.requires_grad


# Bad input


def test_models_that_must_be_unwrapped_first() -> None:
    plain = nn.Sequential(nn.LayerNorm(C))
    x = torch.randn(2, C)
    with pytest.raises(ModelError, match=r"compiled.*model\._orig_mod"):
        find_norms(torch.compile(plain, backend="eager"), x)
    with pytest.raises(ModelError, match=r"part.*compiled"):
        find_norms(nn.Sequential(torch.compile(nn.LayerNorm(C), backend="eager")), x)
    with pytest.raises(ModelError, match=r"pass model\.module"):
        find_norms(nn.DataParallel(plain), x)
    in_place = nn.LayerNorm(C)
    in_place.compile(backend="eager")
    with pytest.raises(ModelError, match="compiled"):
        find_norms(in_place, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_models() -> None:
    with pytest.raises(ModelError, match="ScriptModule"):
        find_norms(torch.jit.trace(nn.LayerNorm(C), torch.randn(2, C)), torch.randn(2, C))


def test_distributed_models(tmp_path: Any) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.LayerNorm(C)))
        with pytest.raises(ModelError, match=r"wrapped.*model\.module"):
            find_norms(wrapped, torch.randn(2, C))
        sharded = torch.distributed.fsdp.fully_shard(nn.Sequential(nn.LayerNorm(C)))
        with pytest.raises(ModelError, match=r"sharded.*fully_shard"):
            find_norms(sharded, torch.randn(2, C))
    finally:
        torch.distributed.destroy_process_group()


def test_tensors_without_values() -> None:
    with pytest.raises(ModelError, match=r"0\.weight.*model\.to_empty"):
        find_norms(nn.Sequential(nn.LayerNorm(C, device="meta")), torch.randn(2, C))
    with pytest.raises(ModelError, match="'weight' is lazy"):
        find_norms(nn.LazyLinear(C), torch.randn(2, C))


def test_examples_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"run.*example"):
        find_norms(nn.Linear(C, C), torch.randn(2, C + 1))
    with pytest.raises(DataError, match="TypeError"):
        find_norms(nn.Linear(C, C))
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module.*str"):
        find_norms("model")  # type: ignore[arg-type]


def test_affine_of_another_module() -> None:
    model = nn.Sequential(nn.LayerNorm(C))
    with pytest.raises(ModelError, match="must hold 'weight'"):
        affine_of(nn.Identity(), only(model, torch.randn(2, C)))
    norm = Norm(lambda self, x: 2 * F.normalize(x, dim=-1))
    with pytest.raises(ModelError, match=r"norm.*found"):
        affine_of(nn.Identity(), only_of(norm, torch.randn(2, C)))


def test_activations_that_are_not_finite_do_not_hide_a_norm() -> None:
    assert only_of(nn.LayerNorm(C), torch.full((2, C), math.nan)).kind == "layernorm"


# Choosing sites

SITES = [
    NormSite("layers.0.norm", aliases=("tied.norm",)),
    NormSite("layers.1.norm"),
    NormSite("head"),
]


@pytest.mark.parametrize(
    ("choice", "paths"),
    [
        ({}, ["layers.0.norm", "layers.1.norm", "head"]),
        ({"only": "layers.*"}, ["layers.0.norm", "layers.1.norm"]),
        ({"only": ["head", "tied.*"]}, ["layers.0.norm", "head"]),
        ({"skip": "*.norm"}, ["head"]),
        ({"only": "layers.*", "skip": ["*.1.*"]}, ["layers.0.norm"]),
        ({"only": []}, []),
    ],
)
def test_select_sites(choice: dict[str, Any], paths: list[str]) -> None:
    assert [site.path for site in select_sites(SITES, **choice)] == paths


@pytest.mark.parametrize("choice", [{"only": "layer.*"}, {"skip": "layer.*"}])
def test_a_glob_that_matches_nothing(choice: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match=r"match.*layers\.0\.norm"):
        select_sites(SITES, **choice)


def test_sites_as_plain_values() -> None:
    site = only_of(nn.LayerNorm((2, 3)), torch.randn(4, 2, 3))
    plain = site.to_dict()
    assert plain["dim"] == [-2, -1]
    assert plain["normalized_shape"] == [2, 3]
    assert plain["refused"] is None


def test_a_site_gives_its_axes_as_a_tuple() -> None:
    assert dynorm.site.NormSite("norm", dim=1).dims == (1,)
    assert dynorm.site.NormSite("norm", dim=(-2, -1)).dims == (-2, -1)
    assert "dims" not in dynorm.site.NormSite("norm").to_dict()
