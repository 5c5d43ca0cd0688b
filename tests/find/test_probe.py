"""find_norms: found norms, refused norms with the reason, and no trace of the run."""

import math
import random
import re
import types
from collections.abc import Callable
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
from dynorm.find.affine import affine_parts
from dynorm.find.probe import find_norms
from dynorm.find.recover import recover
from dynorm.site import NormSite, require_matches

C = 16
TOKENS, HEADS, IMAGE = (2, 5, C), (2, 3, 4, C), (2, C, 4, 4)


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

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Head(Norm):
    """By its name no norm."""


def rms(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def standardize(x: Tensor, dim: int, eps: float = 1e-5) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) / (x.var(dim, keepdim=True, unbiased=False) + eps).sqrt()


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def only(model: nn.Module, *args: Any) -> NormSite:
    (site,) = find_norms(model, *args)
    return site


def only_of(norm: nn.Module, x: Tensor) -> NormSite:
    """The single site of a model that holds a norm."""
    return only(nn.Sequential(norm), x)


def refusal(norm: nn.Module, x: Tensor) -> str:
    return str(only_of(norm, x).refused)


def perturbed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


# Found norms


def test_sites_come_in_call_order_with_aliases_and_uncalled_ones_last() -> None:
    norm = nn.LayerNorm(C)
    parts = nn.ModuleDict(
        {"unused": nn.Sequential(nn.RMSNorm(C)), "late": nn.RMSNorm(C), "a": norm, "b": norm}
    )
    model = Wrap(lambda self, x: self.p["late"](self.p["b"](self.p["a"](x))), p=parts)
    sites = find_norms(model, torch.randn(2, C))
    assert [site.path for site in sites] == ["p.a", "p.late", "p.unused.0"]
    assert [site.calls for site in sites] == [2, 1, 0]
    assert sites[0].aliases == ("p.b",)
    assert str(sites[2].refused).startswith("never called with tokens by the example")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-3])
def test_every_dtype(dtype: torch.dtype, eps: float) -> None:
    model = perturbed(nn.Sequential(nn.LayerNorm(C, eps=eps), nn.RMSNorm(C, eps=eps))).to(dtype)
    layer_norm, rms_norm = find_norms(model, torch.randn(3, 4, C).to(dtype))
    assert (layer_norm.kind, layer_norm.eps, layer_norm.bias_name) == ("layernorm", eps, "bias")
    assert (rms_norm.kind, rms_norm.eps, rms_norm.weight_name) == ("rmsnorm", eps, "weight")
    weight = affine_parts(model[0], layer_norm)["weight"]
    assert weight.tensor is model[0].weight
    assert torch.equal(weight.value, model[0].weight.double())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), nn.RMSNorm(C, eps=1e-6))
    with torch.autocast("cpu", torch.bfloat16):
        sites = find_norms(model, torch.randn(4, C))
        assert torch.is_autocast_enabled("cpu")
    assert [(site.path, site.kind) for site in sites] == [("1", "layernorm"), ("2", "rmsnorm")]


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


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (Wrap(lambda self, x: self.n(x.mT).mT, n=nn.LayerNorm(5)), "n"),
        (nn.Sequential(nn.Sequential(nn.LayerNorm(C)), nn.Identity()), "0.0"),
        (nn.LayerNorm(C), ""),
    ],
    ids=["a wrapper that permutes", "a container of one norm", "the model itself"],
)
def test_the_innermost_module_is_the_site(model: nn.Module, path: str) -> None:
    assert only(model, torch.randn(TOKENS)).path == path


@pytest.mark.parametrize(
    "shape", [(C,), (1, C), (1, 1, C), HEADS, (C, C), (C, C, C), (3, 3), (3, 5), (3, 768)]
)
def test_every_rank_and_width(shape: tuple[int, ...]) -> None:
    for norm in (nn.LayerNorm(shape[-1]), nn.RMSNorm(shape[-1], elementwise_affine=False)):
        site = only_of(norm, torch.randn(shape))
        assert site.kind == type(norm).__name__.lower()
        assert (site.dim, site.normalized_shape, site.input_shape) == (-1, shape[-1:], shape)


@pytest.mark.parametrize("values", ["without mean", "not finite"])
def test_activations_do_not_decide_the_kind(values: str) -> None:
    x = torch.randn(4, C)
    x = x - x.mean(-1, keepdim=True) if values == "without mean" else x * math.nan
    model = nn.Sequential(nn.LayerNorm(C, elementwise_affine=False), nn.RMSNorm(C, eps=1e-5))
    assert [site.kind for site in find_norms(model, x)] == ["layernorm", "rmsnorm"]


def test_one_plus_weight() -> None:
    norm = Norm(
        lambda self, x: (rms(x.float()) * (1 + self.weight.float())).type_as(x),
        weight=torch.zeros(C),
    )
    site = only_of(norm, torch.randn(2, 3, C))
    assert (site.weight_offset, site.weight_name, site.bias_name) == (1.0, "weight", None)
    perturbed(norm).to(torch.bfloat16)
    assert torch.equal(affine_parts(norm, site)["weight"].value, 1 + norm.weight.double())


def test_parts_that_a_norm_has_not() -> None:
    site = only_of(nn.LayerNorm(C, bias=False), torch.randn(2, C))
    assert (site.weight_name, site.bias_name) == ("weight", None)
    bare = nn.LayerNorm(C, elementwise_affine=False)
    site = only_of(bare, torch.randn(2, C))
    assert (site.weight_name, site.bias_name) == (None, None)
    assert affine_parts(bare, site) == {}
    zero = nn.LayerNorm(C)
    nn.init.zeros_(zero.weight)
    site = only_of(zero, torch.randn(2, C))
    assert site.weight_name == "weight"


W = torch.linspace(-1, 1, C)
ONES = torch.ones(C)


def unbiased(self: Norm, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def with_exponential_weight() -> nn.Module:
    norm = nn.RMSNorm(C, eps=1e-6)
    parametrize.register_parametrization(norm, "weight", Wrap(lambda self, w: w.exp()))
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        Norm(lambda self, x: unit(x) * self.g, g=torch.tensor(1.0)),
        Norm(lambda self, x: unit(x)),
        Norm(lambda self, x: unit(x) * self.weight, weight=ONES),
        Norm(lambda self, x: rms(x) * self.w.abs(), w=W),
        with_exponential_weight(),
        Norm(unbiased),
    ],
    ids=["learned length", "unit", "times weight", "absolute weight", "parametrized", "unbiased"],
)
def test_a_scale_that_no_tensor_holds_is_refused(norm: nn.Module) -> None:
    assert refusal(norm, torch.randn(2, C)).startswith("its scale is computed: no tensor holds")


def test_a_shift_that_no_tensor_holds_is_refused() -> None:
    norm = Norm(lambda self, x: rms(x) + self.shift**2, shift=W)
    assert refusal(norm, torch.randn(2, C)).startswith("its shift is computed")


def test_like_modules_are_tried_once_but_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    monkeypatch.setattr(
        probe, "recover", lambda module, *rest: tried.append(module) or recover(module, *rest)
    )
    model = nn.Sequential(nn.LayerNorm(C), nn.GELU(), nn.LayerNorm(C), nn.LayerNorm(C, eps=0.1))
    sites = find_norms(perturbed(model), torch.randn(2, C))
    assert tried == [model[0], model[1], model[3]]
    assert [site.eps for site in sites] == [1e-5, 1e-5, 0.1]
    for norm, site in zip((model[0], model[2], model[3]), sites, strict=True):
        assert affine_parts(norm, site)["weight"].tensor is norm.weight


@pytest.mark.parametrize("eps", [3e-4, 1.2345e-6, 0.0])
def test_eps_of_home_made_norms(eps: float) -> None:
    norm = Norm(lambda self, x: rms(x, eps=self.variance_epsilon))
    norm.variance_epsilon = eps
    assert only_of(norm, torch.randn(2, C)).eps == eps


def test_the_eps_of_the_machine() -> None:
    assert only_of(nn.RMSNorm(C), torch.randn(2, C)).eps == torch.finfo(torch.float32).eps


# The dtype of the output


def like_llama(self: Norm, x: Tensor) -> Tensor:
    return self.w * rms(x.float()).to(x.dtype)


def like_gemma(self: Norm, x: Tensor) -> Tensor:
    return (rms(x.float()) * (1 + self.w.float())).type_as(x)


def like_t5(self: Norm, x: Tensor) -> Tensor:
    return self.w * rms(x.float()).to(self.w.dtype)


def always_wide(self: Norm, x: Tensor) -> Tensor:
    return rms(x.float()) * self.w.float()


@pytest.mark.parametrize(
    ("function", "given", "stored", "promote"),
    [
        (like_llama, torch.float32, torch.float32, True),
        (like_llama, torch.bfloat16, torch.bfloat16, True),
        (like_llama, torch.bfloat16, torch.float32, True),
        (like_llama, torch.float32, torch.bfloat16, True),
        (like_gemma, torch.float32, torch.float32, False),
        (like_gemma, torch.bfloat16, torch.float32, False),
        # T5's differs from Llama's only where the input is wider than the weight.
        (like_t5, torch.bfloat16, torch.bfloat16, True),
        (like_t5, torch.float32, torch.bfloat16, None),
        (always_wide, torch.float32, torch.float32, None),
    ],
)
def test_the_dtype_of_the_output(
    function: Any, given: torch.dtype, stored: torch.dtype, promote: bool | None
) -> None:
    site = only_of(Norm(function, w=torch.rand(C) + 0.5).to(stored), torch.randn(4, C).to(given))
    if promote is None:
        assert str(site.refused).startswith("another dtype")
    else:
        assert (site.refused, site.promote) == (None, promote)


# Refused norms, with the reason


class TimesGate(nn.RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * F.silu(gate)


class HandmadeBatchNorm(Norm):
    """Statistics of the batch, one scale a channel."""


class CountingNorm(nn.LayerNorm):
    """Twice its values in the first call."""

    factor = 2

    def forward(self, x: Tensor) -> Tensor:
        factor, CountingNorm.factor = CountingNorm.factor, 1
        return factor * super().forward(x)


def fails_on_others(self: Norm, x: Tensor) -> Tensor:
    if not torch.equal(x, torch.ones_like(x)):
        raise RuntimeError("only ones")
    return x / 1


@pytest.mark.parametrize(
    ("norm", "shape", "reason"),
    [
        (nn.BatchNorm1d(C), (6, C), "batch norm"),
        (HandmadeBatchNorm(lambda s, x: standardize(x, 0) * s.w, w=ONES), (6, C), "batch norm"),
        (nn.GroupNorm(4, C), IMAGE, "group norm"),
        (nn.InstanceNorm1d(C, affine=True), (2, C, 5), "instance norm"),
        (nn.LocalResponseNorm(2), IMAGE, "local response norm"),
        (nn.LayerNorm((4, C)), (3, 4, C), "several axes: it normalizes (4, 16) together"),
        (
            Norm(lambda s, x: rms(x.unflatten(-1, (4, -1))).flatten(-2)),
            TOKENS,
            "neither LayerNorm nor RMSNorm",
        ),
        # As in Cohere's and Chameleon's attention.
        (
            Norm(lambda s, x: rms(x) * s.w, w=torch.rand(4, C)),
            HEADS,
            "holds matrices, or a scale that differs",
        ),
        (Norm(lambda s, x: standardize(x, 1)), TOKENS, "unmarked axis"),
        (Norm(lambda s, x: torch.ones_like(x)), TOKENS, "constant"),
        (Norm(lambda s, x: F.dropout(rms(x))), TOKENS, "random"),
        (Norm(lambda s, x: rms(x * (1 + s.w)), w=0 * ONES), TOKENS, "neither LayerNorm"),
        (Norm(fails_on_others), None, "cannot be probed: RuntimeError: only ones"),
        (CountingNorm(C), TOKENS, "differs in the run"),
        (nn.RMSNorm(1, eps=1e-6), (3, 1), "cannot be probed: it has no axis"),
        (nn.LayerNorm(2), (3, 5, 2), "two channels: LayerNorm makes them 1 and -1"),
    ],
)
def test_other_norms_are_refused(
    norm: nn.Module, shape: tuple[int, ...] | None, reason: str
) -> None:
    x = torch.ones(2, C) if shape is None else torch.randn(shape)
    site = only_of(norm, x)
    assert str(site.refused).startswith(reason)
    assert (site.kind, site.path, site.class_name) == ("", "0", type(norm).__qualname__)


GATED = "takes another tensor along: gated or adaptive"


@pytest.mark.parametrize(
    ("norm", "call", "reason"),
    [
        (TimesGate(C), lambda s, x: s.norm(x, x), GATED),
        (TimesGate(C), lambda s, x: s.norm(x, gate=x), GATED),
        (TimesGate(C), lambda s, x: s.norm(x), "None"),
        (TimesGate(C), lambda s, x: s.norm(x, None) + x, "other arguments"),
        (nn.LayerNorm(C), lambda s, x: s.norm(input=x) + x, "other arguments"),
        (Norm(lambda s, x: rms(x)), lambda s, x: s.norm(s.norm(x)[:, :4]), "several widths"),
    ],
)
def test_calls_that_a_pointwise_layer_could_not_take(norm: Any, call: Any, reason: str) -> None:
    assert str(only(Wrap(call, norm=norm), torch.randn(2, C)).refused).startswith(reason)


def test_a_residual_before_the_norm_is_no_gate() -> None:
    part = Wrap(lambda self, x, residual: self.norm(x + residual), norm=nn.LayerNorm(C))
    model = Wrap(lambda self, x: self.part(x, x), part=part)
    assert only(model, torch.randn(2, C)).path == "part.norm"


LOOK_ALIKES: dict[str, nn.Module] = {
    "tanh": nn.Tanh(),
    "dyisru": Norm(lambda self, x: math.sqrt(C) * x / (C + x * x).sqrt()),
    "sign": Norm(lambda self, x: x.sign()),
    "softmax": nn.Softmax(-1),
    "relu in place": nn.ReLU(inplace=True),
    "dropout": nn.Dropout(0.5),
    "linear without bias": nn.Linear(C, C, bias=False),
    "depthwise": nn.Conv1d(5, 5, 1, groups=5),
    "l1": Norm(lambda self, x: F.normalize(x, p=1, dim=-1)),
    "part of the channels": Norm(lambda self, x: x * rms(x[..., :4]).norm(dim=-1, keepdim=True)),
    "norm and residual": Norm(lambda self, x: x + rms(x)),
    "norm and activation": Norm(lambda self, x: rms(x).relu()),
    "over tokens, scaled by channel": Norm(lambda self, x: standardize(x, 1) * self.w, w=ONES),
    "over the batch": Norm(lambda self, x: standardize(x, 0)),
    "weight by position": Norm(lambda self, x: rms(x) * self.w, w=torch.rand(5, C)),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_not_found(name: str) -> None:
    for train in (True, False):
        sites = find_norms(nn.Sequential(LOOK_ALIKES[name]).train(train), torch.randn(2, 5, C))
        assert all(site.refused is not None for site in sites)


def float_in_place(self: Norm, x: Tensor) -> Tensor:
    v = x.float()
    v.mul_(v.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
    return (v * self.w).to(x.dtype)


def unnoticed(self: Norm, x: Tensor) -> Tensor:
    x.data.mul_(x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())
    return x * self.w


def returns_its_input(self: Norm, x: Tensor) -> Tensor:
    return x.mul_(x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt())


def after_the_norm(self: Norm, x: Tensor) -> Tensor:
    y = rms(x) * self.w
    x.zero_()
    return y


def second_time(self: Norm, x: Tensor) -> Tensor:
    if x.shape[0] == 3:
        x.mul_(2)
    return rms(x) * self.w


@pytest.mark.parametrize(
    "function", [float_in_place, unnoticed, returns_its_input, after_the_norm, second_time]
)
def test_a_norm_that_modifies_its_input_is_refused(function: Any) -> None:
    norm = Norm(function, w=torch.rand(C) + 0.5)
    model = Wrap(lambda self, x: self.norm(x[:2].clone()).sum() + self.norm(x), norm=norm)
    x = torch.randn(3, C)
    before = x.clone()
    assert str(only(model, x).refused).startswith("modifies its input in place")
    # Nor is the example modified.
    assert torch.equal(x, before)


def test_a_copy_in_another_dtype_may_be_modified() -> None:
    norm = Norm(float_in_place, w=torch.rand(C) + 0.5).bfloat16()
    site = only_of(norm, torch.randn(3, C, dtype=torch.bfloat16))
    assert (site.refused, site.kind, site.weight_name) == (None, "rmsnorm", "w")


def liger_forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def test_a_norm_whose_instance_got_another_forward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.Sequential(nn.RMSNorm(C, eps=1e-6)))
    norm, x = model[1][0], torch.randn(3, C)
    norm.forward = types.MethodType(liger_forward, norm)
    site = only(model, x)
    assert site.path == "1.0"
    assert "undo the patch, or convert first" in str(site.refused)
    with pytest.raises(ModelError, match=r"undo.*convert"):
        dynorm.convert_(model, [site])
    del norm.forward
    assert only(model, x).refused is None


def test_a_hook_of_accelerate_is_no_other_forward() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = nn.Sequential(nn.Linear(C, C), nn.RMSNorm(C, eps=1e-6)), torch.randn(3, C)
    hooks.add_hook_to_module(model[1], hooks.ModelHook())
    site = only(model, x)
    with pytest.raises(ModelError, match="remove_hook_from_submodules"):
        dynorm.convert_(model, [site])
    # The advice helps.
    hooks.remove_hook_from_submodules(model)
    assert len(dynorm.convert_(model, [site]).converted) == 1


class Hiding(nn.Module):
    """Calls a norm by its path, by another reference, or by both."""

    def __init__(self, hide: Callable[[nn.Module], Any], call: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.linear, self.good, self.norm = nn.Linear(C, C), nn.LayerNorm(C), nn.LayerNorm(C)
        self.hidden = hide(self.norm)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.good(self.linear(x)))


@pytest.mark.parametrize(
    ("hide", "call"),
    [
        (lambda norm: [norm], lambda s, x: s.hidden[0](x)),
        (lambda norm: (norm,), lambda s, x: s.norm(s.hidden[0](x))),
        (lambda norm: norm.__call__, lambda s, x: s.hidden(x)),
    ],
    ids=["list", "tuple and path", "method"],
)
def test_a_norm_called_by_another_reference_is_refused(hide: Any, call: Any) -> None:
    model = Hiding(hide, call)
    norm, x = model.norm, torch.randn(4, C)
    by_path = {site.path: site for site in find_norms(model, x)}
    assert "the model calls this norm by another reference" in str(by_path["norm"].refused)
    assert by_path["good"].refused is None
    assert model.norm is norm
    assert dynorm.convert_(model, list(by_path.values())).refused == [by_path["norm"]]
    with pytest.raises(ModelError, match="norm: the model calls this norm by another reference"):
        dynorm.convert_(Hiding(hide, call), [by_path["norm"]])


def test_a_hook_of_the_user_does_not_hide_another_reference() -> None:
    """Nor a weight that is used outside; and the hook finds its module in a dict."""
    for hide, call, reason in (
        (lambda norm: [norm], lambda s, x: s.hidden[0](x), "by another reference"),
        (lambda norm: [], lambda s, x: s.norm(x) + s.norm.bias, "its output changes"),
    ):
        model = Hiding(hide, call)
        calls = {model.norm: 0}

        def count(norm: nn.Module, args: object, output: object, calls: Any = calls) -> None:
            calls[norm] += 1

        model.norm.register_forward_hook(count)
        (site,) = [site for site in find_norms(model, torch.randn(4, C)) if site.path == "norm"]
        assert reason in str(site.refused)
        # In both runs, and in one more for each norm.
        assert calls[model.norm] == 4


def test_a_reference_that_is_not_called_does_no_harm() -> None:
    model = Hiding(lambda norm: [norm], lambda self, x: self.norm(x))
    assert [site.refused for site in find_norms(model, torch.randn(4, C))] == [None, None]


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda norm, x: (x.var(-1, keepdim=True) + norm.eps).rsqrt(), "raised TypeError.*NoEps"),
        (lambda norm, x: x if hasattr(norm, "eps_of_mine") else x.T, "raised RuntimeError"),
        (lambda norm, x: F.layer_norm(x, norm.normalized_shape, norm.weight), "output changes"),
        (lambda norm, x: F.layer_norm(x, (C,), *norm.parameters()), "raised TypeError|changes"),
        (lambda norm, x: norm._parameters["bias"] + x, "output changes"),
        (lambda norm, x: x if isinstance(norm, nn.LayerNorm) else 2 * x, "output changes"),
        (lambda norm, x: norm(x) if type(norm) is nn.LayerNorm else x, "asks for its class"),
    ],
)
def test_a_norm_that_the_model_does_not_only_call_is_refused(use: Any, reason: str) -> None:
    norms = nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)])
    norms[1].eps_of_mine = 1.0
    model = Wrap(lambda self, x: self.n[0](self.n[1](x)) + use(self.n[1], x), n=norms)
    refused = {site.path: site.refused for site in find_norms(model, torch.randn(4, C))}
    assert refused["n.0"] is None
    assert re.search(reason, str(refused["n.1"]))
    assert "let the model only call the norm" in str(refused["n.1"])


def test_norms_that_the_model_asks_for_their_class_together_are_all_refused() -> None:
    def forward(self: Wrap, x: Tensor) -> Tensor:
        size = 1 if any(isinstance(norm, nn.LayerNorm) for norm in self.n) else 2
        return size * self.n[0](self.n[1](x))

    model = Wrap(forward, n=nn.ModuleList([nn.LayerNorm(C), nn.LayerNorm(C)]))
    for site in find_norms(model, torch.randn(4, C)):
        assert "its output changes" in str(site.refused)


def test_the_model_may_read_what_a_layer_has_too() -> None:
    def forward(self: Wrap, x: Tensor) -> Tensor:
        x = x.to(self.norm.weight.device, self.norm.weight.dtype)
        return self.norm(x).view(-1, *self.norm.normalized_shape)

    assert only(Wrap(forward, norm=nn.LayerNorm(C)), torch.randn(4, C)).refused is None


def test_a_model_that_reads_eps_in_another_mode_is_no_success() -> None:
    def forward(self: Wrap, x: Tensor) -> Tensor:
        return self.norm(x) if self.training else self.norm(x) * (1 + self.norm.eps)

    model, x = Wrap(forward, norm=nn.LayerNorm(C)), torch.randn(4, C)
    dynorm.convert_(model, find_norms(model, x))
    with pytest.raises(DataError, match=r"TypeError.*NoEps"):
        dynorm.calibrate_(model, [x])


def test_layers_and_parametrizations_are_left_out() -> None:
    linear = nn.Linear(C, C)
    parametrize.register_parametrization(linear, "weight", Norm(lambda self, x: unit(x)))
    model = nn.Sequential(linear, nn.Sequential(dynorm.DyISRU(C)), nn.RMSNorm(C, eps=1e-6))
    assert only(model, torch.randn(2, C)).path == "2"


def test_experts_without_tokens() -> None:
    def forward(self: Wrap, x: Tensor, expert: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, norm in enumerate(self.norms):
            out[expert == number] = norm(x[expert == number])
        # First with no rows.
        return self.shared(out[:0]).sum() + self.shared(out)

    norms = nn.ModuleList(nn.RMSNorm(C, eps=1e-6) for _ in range(3))
    model = Wrap(forward, norms=norms, shared=nn.RMSNorm(C, eps=1e-6))
    sites = find_norms(model, torch.randn(4, C), torch.tensor([0, 0, 2, 2]))
    assert [site.path for site in sites] == ["norms.0", "norms.2", "shared", "norms.1"]
    # A call without tokens does not count.
    assert [site.calls for site in sites] == [1, 1, 1, 0]
    assert sites[2].input_shape == (4, C)
    assert str(sites[3].refused).startswith("never called with tokens")


def test_a_head_of_one_length_is_not_a_norm() -> None:
    """An embedding's length is what its readers compare."""
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), Head(lambda self, x: unit(x) * 16.0))
    assert [site.path for site in find_norms(model, torch.randn(2, C))] == ["0"]


@pytest.mark.parametrize(
    "norm",
    [
        # As lucidrains' RMSNorm.
        Norm(lambda self, x: unit(x) * C**0.5 * self.weight, weight=ONES),
        Head(lambda self, x: rms(x)),
        Head(lambda self, x: rms(x) * self.weight, weight=torch.full((C,), 0.5)),
    ],
    ids=["scaled unit length", "RMSNorm by another name", "constant scale"],
)
def test_norms_by_other_names_and_formulas(norm: nn.Module) -> None:
    assert only_of(norm, torch.randn(2, C)).refused is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("layer_norm", lambda x: torch.layer_norm(x, (C,))),
        ("native_layer_norm", lambda x: torch.native_layer_norm(x, (C,), None, None, 1e-5)[0]),
        ("layer_norm and rms_norm", lambda x: F.rms_norm(F.layer_norm(x, (C,)), (C,))),
    ],
)
def test_norms_called_as_functions_are_named(name: str, function: Any) -> None:
    model = Wrap(lambda self, x: function(self.linear(x)), linear=nn.Linear(C, C))
    site = only(nn.Sequential(model), torch.randn(2, C))
    reason = f"calls {name} as a function: write it as a module to have it replaced"
    assert (site.path, site.refused) == ("0", reason)


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
    model(torch.randn(4, C)).sum().backward() if not fails else None
    calls.clear()
    cache, running = model.cache, model.batch_norm.running_mean
    grads = [parameter.grad for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = list(model.named_modules())
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    x = torch.randn(4, C)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]

    if fails:
        with pytest.raises(DataError, match="RuntimeError: on purpose") as caught:
            find_norms(model, x)
        assert isinstance(caught.value.__cause__, RuntimeError)
    else:
        assert [site.refused is None for site in find_norms(model, x)] == [False, True]

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[2] == before[2]
    assert model.cache is cache
    assert model.batch_norm.running_mean is running
    assert list(model.named_modules()) == modules
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    # The model ran twice, and the copies that were tried ran without its hooks.
    assert calls == ([1] if fails else [1, 1])


# Bad input


def refused_models() -> dict[str, tuple[nn.Module, str]]:
    plain = nn.Sequential(nn.LayerNorm(C))
    in_place = nn.LayerNorm(C)
    in_place.compile(backend="eager")
    offloaded = nn.Sequential(nn.LayerNorm(C, device="meta"))
    offloaded[0]._hf_hook = object()
    return {
        "compiled": (torch.compile(plain, backend="eager"), r"compiled.*model\._orig_mod"),
        "part": (nn.Sequential(torch.compile(nn.LayerNorm(C), backend="eager")), r"part.*compiled"),
        "in place": (in_place, "compiled"),
        "DataParallel": (nn.DataParallel(plain), r"pass model\.module"),
        "meta": (nn.Sequential(nn.LayerNorm(C, device="meta")), r"0\.weight.*model\.to_empty"),
        "offloaded": (offloaded, r"0\.weight.*accelerate has offloaded"),
        "lazy": (nn.LazyLinear(C), "'weight' is lazy"),
        "traced": (torch.jit.trace(nn.LayerNorm(C), torch.randn(2, C)), "ScriptModule"),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_models_that_are_not_plain() -> None:
    for model, message in refused_models().values():
        with pytest.raises(ModelError, match=message):
            find_norms(model, torch.randn(2, C))


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


def test_examples_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"run.*example"):
        find_norms(nn.Linear(C, C), torch.randn(2, C + 1))
    with pytest.raises(DataError, match="TypeError"):
        find_norms(nn.Linear(C, C))
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module.*str"):
        find_norms("model")  # type: ignore[arg-type]


def test_a_glob_matches_paths_and_aliases() -> None:
    site = NormSite("layers.0.norm", aliases=("tied.norm",))
    assert site.matches("layers.*")
    assert site.matches("tied.norm")
    assert not site.matches("layers")
    with pytest.raises(ArgumentError, match=r"nearest.*layers\.0\.norm"):
        require_matches([site, NormSite("head")], ["layer.*"])
