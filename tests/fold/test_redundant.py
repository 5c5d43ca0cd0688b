"""A norm that feeds norms only goes: its scale cancels, up to their eps, and anything else that sees it is a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import RMSNorm, functional
from transformers import CONFIG_MAPPING

from dynorm.fold import FoldReport, fold_
from dynorm.fold.check import relative_error
from tests.find.test_architectures import inputs_of, tiny_model

C, HEADS = 8, 2


class Attention(nn.Module):
    """A residual block whose queries, keys and values have norms; a test may put another part in the place of one."""

    def __init__(
        self, eps: float = 0.0, read: Callable[[Any, Tensor], Tensor] | None = None, **parts: Any
    ) -> None:
        super().__init__()
        self.into, self.out, self.read = nn.Linear(C, C), nn.Linear(C, C), read
        self.norm = RMSNorm(C, eps)
        for name in "qkv":
            setattr(self, name, nn.Linear(C, C, bias=False))
            setattr(self, f"{name}_norm", RMSNorm(C // HEADS, eps))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if self.read is not None:
            return self.out(self.read(self, self.norm(x)))
        return x + self.out(self.attention(self.norm(x)))

    def attention(self, x: Tensor) -> Tensor:
        parts = (
            getattr(self, name)(x).view(*x.shape[:-1], HEADS, -1).transpose(1, 2) for name in "qkv"
        )
        q, k, v = (
            getattr(self, f"{name}_norm")(part) for name, part in zip("qkv", parts, strict=True)
        )
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def block(*args: Any, **parts: Any) -> Attention:
    torch.manual_seed(0)
    model = Attention(*args, **parts).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) + 0.1)
    return model


def example() -> Tensor:
    return torch.randn(2, 5, C, dtype=torch.float64)


def gone(model: nn.Module, **options: Any) -> FoldReport:
    report = fold_(model, example(), **({"redundant": 0.5} | options))
    assert type(model.norm) is nn.Identity
    assert report.count("redundant") == 1
    return report


@pytest.mark.parametrize(
    "first", [RMSNorm(C, 0.0), RMSNorm(C, 1e-6, elementwise_affine=False)], ids=["weight", "none"]
)
def test_without_an_eps_it_is_exact(first: nn.Module) -> None:
    model, other = block(norm=first), 100 * example()
    with torch.no_grad():
        exact = model(other)
        report = gone(model, redundant=1e-300)
        assert relative_error([model(other)], [exact]) <= 1e-12
    row = report.sites[0]
    assert row.redundant.into == ("q_norm", "k_norm", "v_norm")
    assert row.becomes == "Identity"
    assert row.change == 0
    assert "change by at most 0.0e+00" in str(report)


def test_a_layernorm_goes_where_its_mean_goes_into_what_writes_the_stream() -> None:
    def with_mean() -> Attention:
        norms = {f"{name}_norm": nn.LayerNorm(C // HEADS, 0.0) for name in "qkv"}
        return block(norm=nn.LayerNorm(C, 1e-6, bias=False), read=Attention.attention, **norms)

    model, other = with_mean(), example()
    with torch.no_grad():
        exact = model(other)
        gone(model)
        assert relative_error([model(other)], [exact]) <= 1e-12
    report = fold_(with_mean(), example(), redundant=0.5, center=False)
    assert report.sites[0].redundant.reason == "it takes the mean out: center is off"


@pytest.mark.parametrize("eps", [1e-2, 1e-5])
@pytest.mark.parametrize("scale", [0.03, 1.0, 50.0])
def test_what_an_eps_changes_is_within_the_bound_and_not_far_from_it(
    eps: float, scale: float
) -> None:
    model = block(eps)
    with torch.no_grad():
        model.into.weight.mul_(scale)
        model.into.bias.mul_(scale)
    x, found = example(), dict[str, Tensor]()
    for name in "qkv":
        norm = model.get_submodule(f"{name}_norm")
        norm.register_forward_hook(lambda _, args, y, name=name: found.update({name: y.detach()}))
    model(x)
    before = dict(found)
    report = fold_(model, x, redundant=10.0, check=False)
    model(x)
    changes = [((found[name] - y) / y).abs().max() for name, y in before.items()]
    bound = report.sites[0].change
    assert 0.05 * bound < max(changes) <= bound * (1 + 1e-9)
    assert f"change by at most {bound:.1e}" in str(report)


def test_more_than_is_accepted_is_refused() -> None:
    model = block(1e-2)
    report = fold_(model, example(), redundant=1e-6)
    assert isinstance(model.norm, RMSNorm)
    assert "an eps after it would change outputs by up to" in str(report.sites[0].redundant.reason)
    assert report.sites[0].affine.state == "folded"
    assert report.error is not None
    assert report.error <= 1e-12


def test_without_the_option_nothing_is_looked_for() -> None:
    report = fold_(block(), example())
    assert {site.redundant.state for site in report.sites} == {"off"}
    assert "redundant" not in str(report)


def over_tokens(model: Any, x: Tensor) -> Tensor:
    """The next norm takes one channel of four tokens together."""
    y: Tensor = model.q_norm(model.q(x[:, :4]).transpose(1, 2)).transpose(1, 2)
    return y


def averaged(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.q(x.mean(1, keepdim=True))
    return torch.cat([model.q_norm(part) for part in y.split(C // HEADS, -1)], -1)


def halves(model: Any, x: Tensor) -> Tensor:
    return torch.cat([model.q_norm(part) for part in model.q(x).split(C // HEADS, -1)], -1)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            {"v_norm": nn.Identity()},
            "aten.scaled_dot_product_attention sees the scale of its tokens",
        ),
        ({"q": nn.Linear(C, C)}, "aten.linear in q with its bias sees the scale of its tokens"),
        ({"norm": nn.LayerNorm(C), "read": halves}, "its bias is not 0"),
        ({"read": over_tokens}, "the norm q_norm sees the scale of its tokens"),
        ({"read": averaged}, "aten.mean sees the scale of its tokens"),
        (
            {"read": lambda m, x: halves(m, x) + x},
            "read by aten.add, which is not linear in the channels",
        ),
        (
            {"read": lambda m, x: halves(m, m.k_norm(x.unflatten(-1, (2, 4))).flatten(-2))},
            "split or reordered",
        ),
        ({"read": lambda m, x: halves(m, m.k(x).exp())}, "aten.exp sees the scale of its tokens"),
        (
            {"read": lambda m, x: m.conv(x.mT).mT, "conv": nn.Conv1d(C, C, 2, bias=False)},
            "aten.conv1d in conv sees the scale of its tokens",
        ),
    ],
    ids=[
        "value",
        "bias",
        "norm's bias",
        "over tokens",
        "mean",
        "residual",
        "direct",
        "function",
        "convolution",
    ],
)
def test_anything_else_that_sees_the_scale_is_a_reason(parts: dict[str, Any], reason: str) -> None:
    model = block(**parts)
    report = fold_(model, example(), redundant=0.5, add_bias=True)
    assert reason in str(report.sites[0].redundant.reason)
    assert not isinstance(model.norm, nn.Identity)


def test_of_norms_in_a_row_the_first_goes_and_the_next_one_stays() -> None:
    model, other = (
        block(read=lambda m, x: halves(m, m.between(m.k(x))), between=RMSNorm(C, 0.0)),
        example(),
    )
    with torch.no_grad():
        exact = model(other)
        report = gone(model)
        assert relative_error([model(other)], [exact]) <= 1e-12
    assert "norms in a row" in (report.sites[1].redundant.reason or "")


def test_a_norm_whose_products_nothing_reads_stays() -> None:
    model = block(read=lambda m, x: torch.ones_like(m.k(x)))
    report = fold_(model, example(), redundant=0.5, check=False)
    assert report.sites[0].redundant.reason == "no norm follows it"


def test_a_norm_that_is_called_twice_does_not_go_for_itself() -> None:
    model = block(read=lambda m, x: halves(m, m.norm(m.k(x))))
    report = fold_(model, example(), redundant=0.5)
    assert "norms in a row" in (report.sites[0].redundant.reason or "")
    assert isinstance(model.norm, RMSNorm)


@pytest.mark.parametrize("kind", ["gemma4_text", "embedding_gemma2_text", "deepseek_v4"])
def test_models_whose_queries_keys_and_values_all_have_norms_lose_the_one_before(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    model = tiny_model(kind)
    report = fold_(model, **inputs_of(model)[0], redundant=0.1)
    gone = [site.path for site in report.sites if site.becomes == "Identity"]
    assert gone == ["layers.0.input_layernorm", "layers.1.input_layernorm"]
    assert report.error is not None
    assert report.error < 0.01


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_others_have_a_value_or_a_rotated_key_without_one(kind: str) -> None:
    if kind == "deepseek_v3" and torch.__version__.startswith("2.10."):
        pytest.skip("torch 2.10 exports the product of its experts only in bfloat16")
    torch.manual_seed(0)
    model = tiny_model(kind)
    report = fold_(model, **inputs_of(model)[0], redundant=0.1)
    reasons = {site.path: str(site.redundant.reason) for site in report.sites}
    assert "self_attn sees the scale of its tokens" in reasons["layers.0.input_layernorm"]
    assert report.count("redundant") == 0
