"""fold_ on graphs that an adversarial review found: each is refused with a reason, or comes out equal, unchecked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dynorm
from dynorm.fold import FoldReport, fold_
from dynorm.fold.check import relative_error
from dynorm.layers.rmsnorm import RMSNorm

C = 8


class Free(nn.Module):
    """Modules and parameters by name, and a forward that a test writes."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


def model_of(run: Callable[..., Any], **parts: Any) -> Any:
    """A model with a writer e, a norm n, a reader h and more parts, with random parameters in float64."""
    torch.manual_seed(0)
    parts = {"e": nn.Linear(4, C), "n": nn.LayerNorm(C), "h": nn.Linear(C, 3), **parts}
    return random(Free(run, **parts))


def random(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape) + 0.3)
    return model.double().eval()


def vector(size: int = C) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def example(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (5, 4)), dtype=torch.float64)


def unchecked(
    model: Any, *args: Tensor, probe: tuple[Tensor, ...] = (), **options: Any
) -> FoldReport:
    """Fold without the check of fold_, and compare on inputs that it did not see."""
    args = args or (example(),)
    probe = probe or tuple(torch.randn_like(arg) for arg in args)
    with torch.no_grad():
        exact = model(*probe)
        report = fold_(model, *args, check=False, **options)
        assert relative_error([model(*probe)], [exact]) <= 1e-12
    return report


def reasons(report: FoldReport, name: str = "center") -> str:
    return "; ".join(
        getattr(site, name).reason or getattr(site, name).state for site in report.sites
    )


def two_streams(m: Any, x: Tensor, y: Tensor) -> Any:
    return m.h(m.n(m.e(x))) + m.h2(m.n(m.e2(y)).relu())


def test_every_stream_that_a_norm_is_called_on_is_centred() -> None:
    model = model_of(two_streams, e2=nn.Linear(4, C), h2=nn.Linear(C, 3))
    report = unchecked(model, example(), example())
    assert report.sites[0].center.into == ("e.weight", "e.bias", "e2.weight", "e2.bias")
    assert isinstance(model.n, RMSNorm)


def test_a_norm_on_two_streams_stays_where_one_cannot_be_centred() -> None:
    run = lambda m, x, y: m.h(m.n(m.e(x))) + m.h(m.n(m.e2(y).relu()))  # noqa: E731
    model = model_of(run, e2=nn.Linear(4, C))
    report = unchecked(model, example(), example(), affine=False)
    assert "aten.relu" in reasons(report)
    assert type(model.n) is nn.LayerNorm


GAINED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "two gains": (
        lambda m, a, b: m.l(a) * m.g + m.l(b) * m.g2,
        "not always scaled by the same gain",
    ),
    "a gain once": (lambda m, a, b: m.l(a) * m.g + m.l(b), "not always scaled by the same gain"),
    "a shared bias": (
        lambda m, a, b: (
            functional.linear(a, m.l.weight, m.b) * m.g + functional.linear(b, m.v, m.b)
        ),
        "not always scaled by the same gain",
    ),
    "a gain twice": (lambda m, a, b: m.l(a) * m.g + m.l(b) * m.g, "is used elsewhere too"),
}


@pytest.mark.parametrize("name", GAINED)
def test_a_gain_goes_into_a_parameter_only_if_all_its_uses_have_it(name: str) -> None:
    run, words = GAINED[name]
    parts = {
        "l": nn.Linear(4, C),
        "g": vector(),
        "g2": vector(),
        "b": vector(),
        "v": nn.Parameter(torch.ones(C, 4)),
    }
    model = model_of(lambda m, x: m.h(m.n(m.e(x) + run(m, x.relu(), x.tanh()))), **parts)
    assert words in reasons(unchecked(model, affine=False))


def test_stacked_weights_take_a_weight_and_no_bias() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.n(m.e(x))
        return functional.linear(h, m.w[0], m.b1) + functional.linear(h, m.w[1], m.b2).relu()

    parts = {"w": nn.Parameter(torch.ones(2, 3, C)), "b1": vector(3), "b2": vector(3)}
    assert "several weights in one" in reasons(unchecked(model_of(run, **parts)), "affine")
    model = model_of(run, **{**parts, "n": nn.LayerNorm(C, bias=False)})
    assert unchecked(model).count("affine") == 1


def test_a_bias_that_is_a_part_of_a_stack_takes_none() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.n(m.e(x))
        return functional.linear(h, m.h.weight, m.b[:, 0])

    report = unchecked(model_of(run, b=nn.Parameter(torch.ones(3, 3))))
    assert "part of a larger parameter" in reasons(report, "affine")


def test_a_layer_with_a_bias_in_one_use_only_gets_none() -> None:
    def run(m: Any, x: Tensor) -> Any:
        h = m.n(m.e(x))
        return (m.h(h) + m.p) + m.h(h).relu()

    report = unchecked(model_of(run, h=nn.Linear(C, 3, bias=False), p=vector(3)), add_bias=True)
    assert "has a bias in one use and none in another" in reasons(report, "affine")


def test_a_parameter_of_a_norm_that_writes_into_a_stream_stays() -> None:
    report = unchecked(model_of(lambda m, x: m.h(m.n(m.e(x) + m.n.weight))))
    assert "n.weight is part of a norm" in reasons(report)
    assert "is used elsewhere too" in reasons(report, "affine")


def test_a_parameter_of_a_norm_that_is_a_readers_bias_stays() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.k(m.n2(functional.linear(m.n(m.e(x)), m.h.weight, m.n2.bias)).relu())

    report = unchecked(
        model_of(run, h=nn.Linear(C, C), n2=nn.LayerNorm(C), k=nn.Linear(C, 3)), center=False
    )
    assert "n2.bias is part of a norm" in report.sites[0].affine.reason  # type: ignore[operator]


MIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "permuted, then viewed": lambda m, h: m.h(h.transpose(1, 2).reshape(h.shape)),
    "permuted, then merged": lambda m, h: m.h(h.transpose(1, 2).contiguous().view(-1, C)),
    "viewed, then permuted": lambda m, h: m.h(h.reshape(h.shape[0], C, -1).transpose(1, 2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_tokens_are_seen_to_be_mixed_with_channels_at_length_one_too(name: str) -> None:
    run = MIXED[name]
    model = model_of(lambda m, x: run(m, m.n(m.e(x))))
    report = unchecked(model, example(2, 1, 4), probe=(example(2, 5, 4),))
    assert "split or reordered" in reasons(report, "affine")


KEPT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "permuted twice": lambda m, h: m.h(h.transpose(1, 2).permute(0, 2, 1).reshape(-1, C)),
    "merged tokens": lambda m, h: m.h(h.reshape(-1, C)),
    "an image": lambda m, h: m.conv(h.transpose(1, 2).reshape(2, C, 1, 1)).flatten(1),
    "one axis more": lambda m, h: m.h(h.unsqueeze(1).view(2, 1, 1, C).squeeze(1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_the_channels_does_so_at_length_one_too(name: str) -> None:
    run = KEPT[name]
    model = model_of(lambda m, x: run(m, m.n(m.e(x))), conv=nn.Conv2d(C, 3, 1))
    assert unchecked(model, example(2, 1, 4)).count("affine") == 1


class Scale(nn.Module):
    """An RMS norm whose weight is a buffer."""

    w: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer(
            "w", torch.linspace(0.1, 2, C, dtype=torch.float64), persistent=persistent
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w
        return y


def test_a_weight_that_is_not_saved_stays() -> None:
    report = unchecked(model_of(lambda m, x: m.h(m.n(m.e(x))), n=Scale(False)))
    assert "not saved with the model" in reasons(report, "affine")
    assert unchecked(model_of(lambda m, x: m.h(m.n(m.e(x))), n=Scale(True))).count("affine") == 1


@pytest.mark.parametrize("persistent", [True, False])
def test_a_gain_that_is_not_saved_stays(persistent: bool, tmp_path: Any) -> None:
    def run(m: Any, x: Tensor) -> Any:
        x = m.e(x)
        return m.h(m.n(x + m.l(m.n2(x).relu()) * m.g))

    def build() -> Any:
        model = model_of(run, l=nn.Linear(C, C), n2=nn.LayerNorm(C))
        model.register_buffer(
            "g", torch.linspace(0.1, 2, C, dtype=torch.float64), persistent=persistent
        )
        return model

    model, x = build(), example()
    with torch.no_grad():
        exact = model(x)
        report = unchecked(model, x)
        assert report.count("center") == (2 if persistent else 0)
        assert persistent or re.search("g scales .* not saved", reasons(report))
        loaded = build()
        if persistent:
            dynorm.save(model, tmp_path / "saved")
            loaded = dynorm.load(tmp_path / "saved", loaded)
        else:
            loaded.load_state_dict(model.state_dict())
        assert relative_error([loaded(x)], [exact]) <= 1e-12


class BufferBias(nn.Module):
    """A LayerNorm whose bias is a buffer."""

    beta: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gamma = vector()
        self.register_buffer("beta", torch.linspace(-1, 1, C))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (C,), self.gamma, self.beta, 1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_an_rmsnorm_takes_over_a_bias_that_is_a_buffer(affine: bool) -> None:
    model = model_of(lambda m, x: m.h(m.n(m.e(x))), n=BufferBias())
    assert unchecked(model, affine=affine).count("center") == 1
    assert isinstance(model.n, RMSNorm)
    assert affine or (model.n.bias is not None and not model.n.bias.requires_grad)


@pytest.mark.parametrize("add_bias", [True, False])
def test_one_number_that_is_added_to_all_outputs_is_no_bias(add_bias: bool) -> None:
    model = model_of(
        lambda m, x: m.h(m.n(m.e(x))) + m.p, h=nn.Linear(C, 3, bias=False), p=vector(1)
    )
    report = unchecked(model, add_bias=add_bias)
    assert report.count("affine") == add_bias
    assert add_bias or "pass add_bias=True" in reasons(report, "affine")


def test_an_einsum_that_repeats_its_weight_over_the_channels_is_refused() -> None:
    run = lambda m, x: torch.einsum("bc,oc->bo", m.n(m.e(x)), m.w)  # noqa: E731
    report = unchecked(
        model_of(run, n=nn.LayerNorm(C, bias=False), w=nn.Parameter(torch.ones(3, 1)))
    )
    assert reasons(report, "affine") != "folded"


def test_an_einsum_that_adds_tokens_up_takes_no_bias() -> None:
    run = lambda m, x: torch.einsum("btc,oc->bo", m.n(m.e(x)), m.h.weight) + m.h.bias  # noqa: E731
    report = unchecked(model_of(run), example(2, 5, 4))
    assert "several weights in one" in reasons(report, "affine")


def test_a_weight_that_is_the_bias_too_is_refused() -> None:
    run = lambda m, x: torch.addmm(m.w, m.n(m.e(x)), m.w)  # noqa: E731
    report = unchecked(
        model_of(run, n=nn.LayerNorm(C, bias=False), w=nn.Parameter(torch.ones(C, C))),
        example(C, 4),
    )
    assert reasons(report, "affine") != "folded"


class Product(nn.Module):
    """A product with a buffer that another module may hold too."""

    w: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("w", weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.w)


@pytest.mark.parametrize("untie", [True, False])
def test_a_shared_buffer_is_not_untied(untie: bool) -> None:
    weight = torch.randn(C, 4, dtype=torch.float64)
    model = model_of(
        lambda m, x: m.h(m.n(m.e(x))) + m.e2(x).relu().sum(), e=Product(weight), e2=Product(weight)
    )
    report = unchecked(model, untie=untie)
    assert "e.w writes into it, and is also used by" in reasons(report)
    assert model.e.w is model.e2.w


def test_a_norm_that_the_model_calls_through_a_list_becomes_neutral_too() -> None:
    def run(m: Any, x: Tensor) -> Any:
        for function in m.functions:
            x = function(x)
        return x

    model = model_of(run)
    model.functions = [model.e, model.n, model.h]
    assert unchecked(model).count("affine") == 1


def test_a_weight_that_is_held_outside_of_the_parameters_stays() -> None:
    model = model_of(lambda m, x: m.h(m.n(m.e(x))) + functional.linear(x.repeat(1, 2), m.held[0]))
    model.held = [model.h.weight]
    assert "shares its memory" in reasons(unchecked(model), "affine")


class Ignores(nn.Linear):
    """A linear layer that would not add a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Adds(nn.Linear):
    """A linear layer that would, in a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("kind", [Ignores, Adds])
def test_a_layer_with_a_forward_of_its_own_gets_a_bias_if_it_adds_it(kind: type[nn.Linear]) -> None:
    model = model_of(lambda m, x: m.h(m.n(m.e(x))), h=kind(C, 3, bias=False))
    assert unchecked(model, add_bias=True).count("affine") == (kind is Adds)


@pytest.mark.parametrize("at", ["stream", "norm"])
def test_what_is_rounded_on_the_way_is_refused(at: str) -> None:
    def run(m: Any, x: Tensor) -> Any:
        x = m.e(x)
        x = x.float().double() if at == "stream" else x
        x = m.n(x)
        return m.h(x if at == "stream" else x.float().double())

    report = unchecked(model_of(run))
    assert "fewer digits" in reasons(report, "center" if at == "stream" else "affine")
    assert (report.count("affine"), report.count("center")) == (
        (1, 0) if at == "stream" else (0, 1)
    )


def test_norms_whose_readers_are_shared_in_a_chain_fall_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dynorm.fold import site

    def run(m: Any, x: Tensor) -> Any:
        x = m.e(x)
        a, b, c = m.n(x), m.n2(x), m.n3(x)
        return m.h(a).relu() + m.h(b).tanh() + m.k(b).sin() + m.k(c).relu()

    norms = {name: nn.LayerNorm(C, bias=False) for name in ("n", "n2", "n3")}
    model = model_of(run, k=nn.Linear(C, 3), **norms)
    for name in norms:
        getattr(model, name).load_state_dict(model.n.state_dict())
    monkeypatch.setattr(
        site, "is_exact", lambda fold, module, as_layernorm=False: fold.path != "n3"
    )
    report = unchecked(model, center=False)
    assert report.count("affine") == 0


@pytest.mark.parametrize("untie", [True, False])
def test_a_tied_value_of_a_stream_is_followed_from_all_its_owners(untie: bool) -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.h(m.n(m.e(x) + m.a[0])) + m.b[0].relu().sum()

    table = vector()
    model = model_of(run, a=nn.ParameterList([table]), b=nn.ParameterList([table]))
    report = unchecked(model, untie=untie)
    assert report.count("center") == untie
    assert (model.a[0] is not model.b[0]) == untie
    assert untie or "aten.relu" in reasons(report)


class OnePlus(nn.Module):
    """RMSNorm with the factor 1 + weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_a_weight_that_is_added_to_one_is_0_when_it_is_folded() -> None:
    model = model_of(lambda m, x: m.h(m.n(m.e(x))), n=OnePlus())
    report = unchecked(model)
    assert report.count("affine") == 1
    assert not model.n.weight.any()


def test_a_norm_whose_weight_is_added_to_one_writes_into_a_rescaled_stream() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.h(m.m(m.n(m.e(x))).relu())

    model = model_of(run, n=OnePlus(), m=dynorm.LinearControl(C, bias=False, center=False))
    before = model.n.weight.detach().clone()
    report = unchecked(model)
    assert [site.becomes for site in report.sites] == ["", "Identity"]
    assert not torch.isclose(model.n.weight, before).any()


def test_the_report_counts_the_affine_maps_that_stay() -> None:
    def run(m: Any, x: Tensor) -> Any:
        return m.h(m.n(m.e(x))) + m.n2(m.e(x)).tanh().sum()

    report = unchecked(model_of(run, n2=nn.LayerNorm(C)), center=False)
    assert str(report).startswith("1 of 2 affine maps folded\n")
