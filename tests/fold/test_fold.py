"""fold_ on small graphs: what folds, what is refused and why, and that a failed call leaves no trace."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dynorm
from dynorm.errors import ArgumentError, ModelError
from dynorm.fold import FoldReport, Rewrite, fold, fold_
from dynorm.fold.check import Check
from dynorm.fold.plan import Options
from dynorm.layers.rmsnorm import RMSNorm
from dynorm.outputs import relative_error
from dynorm.site import NormSite

C = 8
Run = Callable[..., Any]


class Free(nn.Module):
    """Modules and parameters by name, and a forward that a test writes."""

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Any:
        return self.run(self, *args)


def model_of(run: Run, **parts: Any) -> Any:
    """A model with a writer e, a norm n, a reader h and more parts, with random parameters in float64."""
    torch.manual_seed(0)
    parts = {"e": nn.Linear(4, C), "n": nn.LayerNorm(C), "h": nn.Linear(C, 3), **parts}
    return random(Free(run, **parts))


def net(read: Run, **parts: Any) -> Any:
    """A model whose forward reads the norm's outputs as a test says."""
    return model_of(lambda m, x: read(m, m.n(m.e(x))), **parts)


def random(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape) + 0.3)
    return model.double().eval()


def rms() -> nn.Module:
    return nn.RMSNorm(C, eps=1e-6)


def unseen(norm: nn.Module, name: str) -> Any:
    """A norm's parameter, read in a way that find_norms does not see."""
    return vars(norm)["_parameters"][name]


def vector(size: int = C) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))


def example(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (2, 5, 4)), dtype=torch.float64)


def only_means(model: nn.Module, *args: Tensor) -> FoldReport:
    """Fold as a conversion does, whose layers take over the weights."""
    return fold.folded(model, [(args, {})], None, None, Options(center=True), None)


def folded(
    model: Any,
    *args: Tensor,
    probe: tuple[Tensor, ...] = (),
    verb: Callable[..., FoldReport] = fold_,
    **options: Any,
) -> FoldReport:
    """Fold, and compare on inputs that the fold did not see."""
    args = args or (example(),)
    probe = probe or tuple(
        torch.randn_like(arg) if arg.is_floating_point() else arg.flip(0) for arg in args
    )
    with torch.no_grad():
        exact = model(*probe)
        report = verb(model, *args, **options)
        assert relative_error([model(*probe)], [exact]) <= 1e-12
    return report


def row(report: FoldReport, name: str = "affine", path: str = "n") -> Rewrite:
    found: Rewrite = next(getattr(site, name) for site in report.sites if site.path == path)
    return found


def reason(report: FoldReport, name: str = "affine", path: str = "n") -> str:
    return row(report, name, path).reason or row(report, name, path).state


PASSES: dict[str, Run] = {
    "plain": lambda m, h: m.h(h),
    "merged axes": lambda m, h: m.h(h.view(-1, C)).view(2, 5, 3),
    "transposed twice": lambda m, h: m.h(h.transpose(1, 2).permute(0, 2, 1)),
    "dropout in eval": lambda m, h: m.h(functional.dropout(h, 0.5, m.training)),
    "casts": lambda m, h: m.h(h.to(torch.float64).contiguous().clone()),
    "indexed tokens": lambda m, h: m.h(h[torch.arange(2), torch.tensor([1, 3])]),
    "expanded": lambda m, h: m.h(h[:, :, None].expand(2, 5, 3, C)),
    "mean over tokens": lambda m, h: m.h(h.mean(1)),
    "parts of the tokens": lambda m, h: torch.cat([m.h(part) for part in h.split(2, dim=1)], 1),
    "checkpoint": lambda m, h: checkpoint(m.h, h, use_reentrant=False),
    "two uses of one reader": lambda m, h: m.h(h) + m.h(h.flip(1)),
    "addmm": lambda m, h: torch.addmm(m.h.bias, h.view(-1, C), m.h.weight.T),
    "by name": lambda m, h: m.h(input=h),
    "in place after": lambda m, h: m.h(h).add_(1.0).relu_(),
    "an image": lambda m, h: m.conv(h.transpose(1, 2).reshape(2, C, 5, 1)).flatten(1),
}


@pytest.mark.parametrize("name", PASSES)
def test_weight_bias_and_mean_pass_what_keeps_the_channels(name: str) -> None:
    model = net(PASSES[name], conv=nn.Conv2d(C, 3, 1))
    parameters = dict(model.named_parameters())
    report = folded(model)
    reader = "conv.weight" if name == "an image" else "h.weight"
    assert row(report) == Rewrite("folded", (reader,))
    assert row(report, "center") == Rewrite("folded", ("e.weight", "e.bias"))
    assert isinstance(model.n, RMSNorm)
    assert all(parameters[key] is value for key, value in model.named_parameters())


# Each with parts of the model in addition, and words of the reason.
REFUSALS: dict[str, tuple[Run, dict[str, Any], str]] = {
    "not linear": (lambda m, h: m.h(h.relu()), {}, "aten.relu"),
    "returned too": (lambda m, h: torch.cat([m.h(h), h], -1), {}, "aten.cat"),
    "split": (
        lambda m, h: m.h(h.view(2, 5, 2, 4).transpose(2, 3).flatten(2)),
        {},
        "split or reordered",
    ),
    "cut": (lambda m, h: h[..., :4] @ m.h.weight[:, :4].T, {}, "split or reordered"),
    "rolled": (lambda m, h: m.h(h.roll(1, -1)), {}, "split or reordered"),
    "mixed with tokens": (
        lambda m, h: m.h(h.transpose(1, 2).reshape(2, 5, C)),
        {},
        "split or reordered",
    ),
    "added to": (lambda m, h: m.h(h + 1), {}, "aten.add"),
    "changed in place": (lambda m, h: m.h(h.add_(1)), {}, "aten.add"),
    "a computed weight": (lambda m, h: h @ m.h.weight.tanh().T, {}, "computed"),
    "its own reader": (lambda m, h: h @ h.transpose(1, 2), {}, "not a parameter"),
    "a shared reader": (lambda m, h: m.h(h) + m.h(torch.ones_like(h)), {}, "also used by"),
    "a shared bias": (lambda m, h: m.h(h) * m.h.bias, {}, "also used by"),
    "a shared weight of its own": (
        lambda m, h: m.h(h) + unseen(m.n, "weight").sum(),
        {},
        "uses this norm outside of its call",
    ),
    "scaled token by token": (lambda m, h: m.h(h * h.new_ones(2, 5, 1)), {}, "scaled token"),
    "dropout in training": (lambda m, h: m.h(functional.dropout(h, 0.5, True)), {}, "dropout"),
    "rounded": (lambda m, h: m.h(h.float().double()), {}, "fewer digits"),
    "einsum": (lambda m, h: torch.einsum("btc,oc->bto", h, m.h.weight), {}, "not linear"),
    "sum": (lambda m, h: m.h(h + 1), {}, "a sum, which has no weight"),
    "groups": (
        lambda m, h: m.conv(h.mT),
        {"conv": nn.Conv1d(C, C, 1, groups=2)},
        "not linear in the channels",
    ),
    "no bias": (lambda m, h: m.h(h), {"h": nn.Linear(C, 3, bias=False)}, "pass add_bias=True"),
    "stacked weights": (
        lambda m, h: functional.linear(h, m.w[0], m.b) + functional.linear(h, m.w[1], m.b2),
        {"w": nn.Parameter(torch.ones(2, 3, C)), "b": vector(3), "b2": vector(3)},
        "several weights in one",
    ),
    "a part of a bias": (
        lambda m, h: functional.linear(h, m.h.weight, m.b[:, 0]),
        {"b": nn.Parameter(torch.ones(3, 3))},
        "not a parameter with one number per output",
    ),
    "a bias in one use": (
        lambda m, h: m.h(h) + functional.linear(h, m.h.weight).relu(),
        {},
        "has not the same bias in all uses",
    ),
    "a norm's bias as reader's": (
        lambda m, h: m.n2(functional.linear(h, m.h.weight, unseen(m.n2, "bias"))),
        {"h": nn.Linear(C, C), "n2": nn.LayerNorm(C)},
        "n2.bias is also used by aten.layer_norm in n2",
    ),
    "held in a list": (
        lambda m, h: m.h(h) + functional.linear(torch.ones_like(h), m.held[0]),
        {},
        "shares its memory",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_anything_unsafe_is_refused_with_the_reason(name: str) -> None:
    read, parts, words = REFUSALS[name]
    model = net(read, **parts)
    if "held" in name:
        model.held = [model.h.weight]
    before = copy.deepcopy(model.state_dict())
    report = fold_(model, example(), center=False)
    assert row(report).state == "refused"
    assert words in reason(report)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


MIXED: dict[str, Run] = {
    "permuted, then viewed": lambda m, h: m.h(h.transpose(1, 2).reshape(h.shape)),
    "permuted, then merged": lambda m, h: m.h(h.transpose(1, 2).contiguous().view(-1, C)),
    "viewed, then permuted": lambda m, h: m.h(h.reshape(h.shape[0], C, -1).transpose(1, 2)),
}
KEPT: dict[str, Run] = {
    "permuted twice": lambda m, h: m.h(h.transpose(1, 2).permute(0, 2, 1).reshape(-1, C)),
    "merged tokens": lambda m, h: m.h(h.reshape(-1, C)),
    "one axis more": lambda m, h: m.h(h.unsqueeze(1).view(2, 1, 1, C).squeeze(1)),
}


@pytest.mark.parametrize("name", [*MIXED, *KEPT])
def test_tokens_are_seen_to_be_mixed_with_channels_at_length_one_too(name: str) -> None:
    model = net((MIXED | KEPT)[name])
    probe = example(2, 5, 4) if name in MIXED else example(2, 1, 4)
    report = folded(model, example(2, 1, 4), probe=(probe,))
    assert ("split or reordered" in reason(report)) is (name in MIXED)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_weight_goes_into_a_padded_convolution_and_a_bias_does_not(padding: int) -> None:
    def read(m: Any, h: Tensor) -> Any:
        return m.conv(h.transpose(1, 2))

    conv = nn.Conv1d(C, 16, 3, padding=padding)
    assert ("pads with zeros" in reason(folded(net(read, conv=conv)))) is bool(padding)
    assert row(folded(net(read, conv=conv, n=rms()))).state == "folded"


def test_a_weight_goes_through_a_factor_of_each_token_and_into_a_stack() -> None:
    model = net(lambda m, h: m.h(h * h.new_full((2, 5, 1), 3.0) / 2), n=rms())
    assert row(folded(model)).state == "folded"
    model = net(
        lambda m, h: h @ m.w[0] + (h @ m.w[1]).relu(), n=rms(), w=nn.Parameter(torch.ones(2, C, 3))
    )
    assert row(folded(model)).state == "folded"


class Ignores(nn.Linear):
    """A linear layer that would not add a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class Adds(nn.Linear):
    """A linear layer that would, in a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


@pytest.mark.parametrize("kind", [nn.Linear, Adds, Ignores])
def test_a_missing_bias_is_added_to_a_layer_that_adds_it(kind: type[nn.Linear]) -> None:
    model = net(PASSES["plain"], h=kind(C, 3, bias=False))
    report = folded(model, add_bias=True)
    assert report.added_biases == ([] if kind is Ignores else ["h"])
    assert report.loads_with == "dynorm"


def tied() -> Any:
    model = random(
        Free(
            lambda m, ids: m.head(m.n(m.embed(ids))),
            embed=nn.Embedding(11, C),
            n=nn.LayerNorm(C),
            head=nn.Linear(C, 11, bias=False),
        )
    )
    model.head.weight = model.embed.weight
    return model


def test_tied_weights_are_untied_only_when_asked_for() -> None:
    ids = torch.randint(0, 11, (2, 5))
    model = tied()
    report = folded(model, ids, add_bias=True)
    assert "untie=True" in reason(report)
    assert "untie=True" in reason(report, "center")
    assert model.head.weight is model.embed.weight
    report = folded(model, ids, add_bias=True, untie=True)
    assert row(report).state == row(report, "center").state == "folded"
    assert len(report.untied) == 1
    assert model.head.weight is not model.embed.weight
    model = tied()
    model.run = lambda m, ids: m.n(m.embed(ids)) @ m.embed.weight.T
    assert "also used by" in reason(folded(model, ids, untie=True))


def test_a_shared_block_folds_once() -> None:
    block = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.Tanh())
    report = folded(random(nn.Sequential(block, block, block)), example(2, C))
    assert len(report.sites) == report.count("affine") == 1


def test_a_reader_of_two_norms_takes_the_weight_of_neither() -> None:
    model = model_of(
        lambda m, x: m.h(m.n(m.e(x))) + m.h(m.n2(m.e(x).cos())).relu(), n=rms(), n2=rms()
    )
    model.n2.load_state_dict(model.n.state_dict())
    report = folded(model)
    assert report.count("affine") == 0
    assert "h.weight, which reads it, is also used by" in reason(report)


class Stream(nn.Module):
    """A pre-norm stream: learned positions, two branches with LayerScale, a constant, and a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(4, C)
        self.positions = nn.Parameter(torch.randn(1, 5, C))
        self.start = nn.Parameter(torch.randn(1, 1, C))
        self.register_buffer("constant", torch.randn(C))
        self.n = nn.LayerNorm(C)
        self.n2 = nn.LayerNorm(C)
        self.n3 = nn.LayerNorm(C, eps=1e-3)
        self.one = nn.Linear(C, C)
        self.two = nn.Linear(C, C)
        self.gain = vector()
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x) * 2.0 + self.positions
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.constant
        x = x + functional.dropout(self.one(self.n(x)), 0.1, self.training)
        x = x - self.gain * self.two(self.n2(x)).transpose(1, 2).transpose(1, 2)
        y: Tensor = self.head(self.n3(x[:, 0]))
        return y


def test_the_mean_leaves_a_stream_through_everything_that_writes_into_it() -> None:
    model = random(Stream())
    report = folded(model, verb=only_means)
    assert report.count("center") == 3
    written = "into.weight into.bias positions start constant one.weight one.bias two.weight"
    assert set(row(report, "center").into) == {*written.split(), "two.bias"}
    assert torch.equal(model.gain, torch.ones(C).double())
    assert (model.n3.norm_eps, model.n.weight is not None) == (1e-3, True)
    assert float(model.positions.detach().mean(-1).abs().max()) < 1e-15
    assert report.norms == dynorm.find_norms(model, example())


ones = torch.ones_like
# The stream between the writer and the norm, with words of the reason why its mean stays.
MEANS: dict[str, tuple[Run, str]] = {
    "an RMSNorm": (lambda m, x: m.h(m.n(x)) + m.h(m.rms(x)), "rms sees its mean"),
    "a linear layer": (lambda m, x: m.h(m.n(x)) + m.h(x), "sees its mean"),
    "the output": (lambda m, x: torch.cat([m.h(m.n(x)), x], -1), "sees its mean"),
    "a number": (lambda m, x: m.h(m.n(x + 1.0)), "one number for all channels"),
    "a number per token": (lambda m, x: m.h(m.n(x + m.i(x.sin()))), "one number for all channels"),
    "a function": (lambda m, x: m.h(m.n(x.sin())), "aten.sin"),
    "a norm before it": (lambda m, x: m.h(m.n(m.n2(x) + m.g)), "post-norm"),
    "channels split": (lambda m, x: m.h(m.n(x.view(2, 5, 4, 2).flatten(2))), "aten.flatten"),
    "one of two results": (lambda m, x: m.h(m.n(x.max(0, True).values)), "aten.max"),
    "written in place": (lambda m, x: m.h(m.n(x.mul_(x))), "aten.mul"),
    "rounded": (lambda m, x: m.h(m.n(x.float().double())), "fewer digits"),
    "a writer elsewhere": (
        lambda m, x: m.h(m.n(x)) + (m.h.weight @ m.e.weight).sum(),
        "e.weight writes into it, and is also used by",
    ),
    "a norm's weight": (
        lambda m, x: m.h(m.n(x + unseen(m.n, "weight"))),
        "uses this norm outside of its call",
    ),
    "two gains": (
        lambda m, x: m.h(m.n(x + m.l(ones(x)) * m.g + m.l(2 * ones(x)) * m.g2)),
        "l.weight writes into it, and is also used by",
    ),
    "a gain once": (
        lambda m, x: m.h(m.n(x + m.l(ones(x)) * m.g + m.l(2 * ones(x)))),
        "l.weight writes into it, and is also used by",
    ),
    "a gain elsewhere": (
        lambda m, x: m.h(m.n(x + m.l(ones(x)) * m.g)) + m.g.sum(),
        "g scales writes into it, and is used elsewhere too",
    ),
    "a gain that is not saved": (
        lambda m, x: m.h(m.n(x + m.l(ones(x)) * m.kept)),
        "kept is not saved with the model",
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_stays_where_something_else_writes_or_reads_it(name: str) -> None:
    read, words = MEANS[name]
    parts = {"rms": rms(), "n2": nn.LayerNorm(C), "i": nn.Linear(C, 1), "l": nn.Linear(C, C)}
    model = model_of(lambda m, x: read(m, m.e(x)), g=vector(), g2=vector(), **parts)
    model.register_buffer("kept", torch.linspace(0.1, 2, C).double(), persistent=False)
    report = folded(model, verb=only_means)
    assert words in reason(report, "center")
    assert type(model.n) is nn.LayerNorm


def test_every_stream_that_a_norm_is_called_on_is_centred_or_none() -> None:
    for bend in (False, True):

        def run(m: Any, x: Tensor, y: Tensor, bend: bool = bend) -> Any:
            other = m.e2(y).relu() if bend else m.e2(y)
            return m.h(m.n(m.e(x))) + m.h(m.n(other)).relu()

        model = model_of(run, e2=nn.Linear(4, C))
        report = folded(model, example(), example(), verb=only_means)
        into = () if bend else ("e.weight", "e.bias", "e2.weight", "e2.bias")
        assert row(report, "center").into == into


@pytest.mark.parametrize("untie", [True, False])
def test_a_tied_value_of_a_stream_is_followed_from_all_its_owners(untie: bool) -> None:
    table = vector()
    model = model_of(
        lambda m, x: m.h(m.n(m.e(x) + m.a[0])) + m.b[0].relu().sum(),
        a=nn.ParameterList([table]),
        b=nn.ParameterList([table]),
    )
    assert folded(model, untie=untie).count("center") == untie
    assert (model.a[0] is not model.b[0]) == untie


class Custom(nn.Module):
    """A norm of one's own: RMSNorm with the factor 1 + weight, or LayerNorm with buffers."""

    weight: Tensor

    def __init__(self, one_plus: bool, persistent: bool = True) -> None:
        super().__init__()
        self.one_plus = one_plus
        self.register_buffer("weight", torch.linspace(0.1, 2, C), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.one_plus:
            return (1 + self.weight) * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return functional.layer_norm(x, (C,), self.weight)


def test_norms_of_ones_own() -> None:
    model = net(PASSES["plain"], n=Custom(True))
    assert row(folded(model)).state == "folded"
    assert not model.n.weight.any()
    model = net(PASSES["plain"], n=Custom(False))
    assert row(folded(model, verb=only_means), "center").state == "folded"
    assert not model.n.weight.requires_grad
    report = folded(net(PASSES["plain"], n=Custom(False, persistent=False)))
    assert "not saved with the model" in reason(report)


@pytest.mark.parametrize(
    "layer", [dynorm.DyISRU(C, witnesses=(5, 2)), dynorm.DyT(C), dynorm.Derf(C)]
)
def test_a_layer_gives_weight_bias_and_scale_and_keeps_its_constants(layer: Any) -> None:
    model = net(PASSES["plain"], n=layer)
    constants = [constant.detach().clone() for constant in layer.constant_parameters()]
    assert row(folded(model)).state == "folded"
    assert (model.n.weight, model.n.bias, model.n.scale) == (None, None, 1.0)
    for constant, before in zip(model.n.constant_parameters(), constants, strict=True):
        assert torch.equal(constant, before)


def test_given_sites_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random(Stream())
    x = example()
    sites = dynorm.find_norms(model, x)
    monkeypatch.setattr(fold, "find_norms", pytest.fail)
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", pytest.fail)
    report = folded(model, x, sites=sites, paths=["n2"])
    assert [site.affine.state for site in report.sites] == ["off", "folded", "off"]
    assert [site.kind for site in report.norms] == ["layernorm", "rmsnorm", "layernorm"]


def state(model: nn.Module) -> dict[str, Any]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor, tensor.detach().clone()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_after_all_is_changed_puts_everything_back(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(self: Check, model: nn.Module) -> list[float]:
        raise error

    monkeypatch.setattr(Check, "errors", fail)
    model = tied()
    before, text = state(model), repr(model)
    with pytest.raises(ModelError if error is RuntimeError else error):
        fold_(model, torch.randint(0, 11, (2, 5)), untie=True, add_bias=True)
    after = state(model)
    assert before.keys() == after.keys()
    assert all(before[name][0] is after[name][0] for name in before)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert model.head.weight is model.embed.weight
    assert repr(model) == text
    assert not any("_dynorm" in name for module in model.modules() for name in module.__dict__)


def test_an_error_of_tracing_says_where_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    model = net(lambda m, h: m.h(h * 2) if h.sum() > 0 else m.h(h))
    with pytest.raises(ModelError, match=r"test_fold\.py:\d+.*torch\.where.*is_exporting"):
        fold_(model, example())
    assert capfd.readouterr().out == ""
    assert "forward" not in model.n.__dict__


def sharded() -> nn.Module:
    model = net(PASSES["plain"])
    model.h.weight = type("DTensor", (nn.Parameter,), {})(model.h.weight.detach())
    return model


def float8() -> nn.Module:
    model = net(PASSES["plain"])
    model.h.weight.data = model.h.weight.data.to(torch.float8_e4m3fn)
    return model


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "training": (lambda: net(PASSES["plain"]).train(), "eval mode"),
    "meta": (lambda: net(PASSES["plain"]).to("meta"), "meta"),
    "compiled": (lambda: torch.compile(net(PASSES["plain"])), "compiled"),
    "sharded": (sharded, "DTensor"),
    "float8": (float8, "float8"),
    "no norm": (lambda: random(nn.Sequential(nn.Linear(4, C))), "must have norms"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", BAD)
def test_models_that_cannot_be_folded_say_what_to_do(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(ModelError, match=words):
        fold_(make(), example())


@pytest.mark.parametrize(
    "options",
    [{"paths": ["x"]}, {"paths": 3}, {"sites": [NormSite("x")]}, {"sites": 3}, {"add_biases": True}]
    + [{"tolerance": value} for value in ("1e-3", True, -1.0, float("nan"))],
)
def test_bad_arguments_name_themselves(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        fold_(net(PASSES["plain"]), example(), **options)


def test_hooks_and_settings_of_parameters_stay() -> None:
    model = net(PASSES["plain"])
    model.h.weight.requires_grad_(False)
    calls = []
    model.n.register_forward_hook(lambda *_: calls.append(1))
    folded(model)
    assert not model.h.weight.requires_grad
    assert calls


def test_the_report_reads_well_and_is_json() -> None:
    report = folded(random(Stream()))
    assert "3 of 3 affine maps folded, 3 of 3 means" in str(report)
    assert "n     layernorm(8) -> RMSNorm" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["sites"][0]["affine"]["into"] == ["one.weight"]
