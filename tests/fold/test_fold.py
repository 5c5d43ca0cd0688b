"""fold_ on small hand-made graphs: what folds, what must be refused, and that a failed call leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dynorm
from dynorm.errors import ArgumentError, ModelError
from dynorm.fold import FoldReport, Rewrite, fold_, plan
from dynorm.fold.check import Check, fresh, relative_error
from dynorm.layers.rmsnorm import RMSNorm

C = 8


def shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) + 0.1)
    return model.double().eval()


def folded(model: nn.Module, *example: Tensor, **options: Any) -> FoldReport:
    """Fold, and compare the outputs on inputs of our own; the check of fold_ itself is on too."""
    example = example or (torch.randn(2, 5, C).double(),)
    with torch.no_grad():
        exact = model(*example)
        report = fold_(model, *example, **options)
        assert relative_error([model(*example)], [exact]) <= 1e-12
    return report


class Net(nn.Module):
    """A linear layer, a norm, and whatever a test does with its output."""

    def __init__(
        self, read: Callable[[Net, Tensor], Tensor], norm: nn.Module | None = None, **parts: Any
    ) -> None:
        super().__init__()
        self.into = nn.Linear(C, C)
        self.norm = norm or nn.LayerNorm(C)
        self.reader = nn.Linear(C, 6)
        self.read = read
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.norm(self.into(x)))


def net(
    read: Callable[[Any, Tensor], Tensor], norm: nn.Module | None = None, **parts: Any
) -> nn.Module:
    return shaken(Net(read, norm, **parts))


def row(report: FoldReport, name: str = "affine", index: int = 0) -> Rewrite:
    found: Rewrite = getattr(report.sites[index], name)
    return found


PASSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda m, x: m.reader(x),
    "merged axes": lambda m, x: m.reader(x.view(-1, C)).view(2, 5, 6),
    "transposed twice": lambda m, x: m.reader(x.transpose(1, 2).permute(0, 2, 1)),
    "dropout in eval": lambda m, x: m.reader(functional.dropout(x, 0.5, m.training)),
    "casts": lambda m, x: m.reader(x.to(torch.float64).contiguous().clone()),
    "one token": lambda m, x: m.reader(x[:, 0]),
    "indexed tokens": lambda m, x: m.reader(x[torch.arange(2), torch.tensor([1, 3])]),
    "expanded": lambda m, x: m.reader(x[:, :, None].expand(2, 5, 3, C)),
    "mean over tokens": lambda m, x: m.reader(x.mean(1)),
    "parts of the tokens": lambda m, x: torch.cat(
        [m.reader(part) for part in x.split(2, dim=1)], 1
    ),
    "checkpoint": lambda m, x: checkpoint(m.reader, x, use_reentrant=False),
    "two uses of one reader": lambda m, x: m.reader(x) + m.reader(x.flip(1)),
    "matmul": lambda m, x: x @ m.reader.weight.T + m.reader.bias,
    "einsum": lambda m, x: torch.einsum("btc,oc->bto", x, m.reader.weight) + m.reader.bias,
    "in place after": lambda m, x: m.reader(x).add_(1.0).relu_(),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_keeps_the_channels_lets_weight_and_bias_through(name: str) -> None:
    model = net(PASSES[name])
    identities = {key: id(value) for key, value in model.named_parameters()}
    report = folded(model)
    assert row(report) == Rewrite("folded", ("reader.weight",))
    assert row(report, "center").state == "folded"
    assert isinstance(model.norm, RMSNorm)
    assert all(identities[key] == id(value) for key, value in model.named_parameters())


REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "not linear": (lambda m, x: m.reader(x.relu()), "aten.relu"),
    "returned too": (lambda m, x: torch.cat([m.reader(x), x], -1), "aten.cat"),
    "channels split": (
        lambda m, x: m.reader(x.view(2, 5, 2, 4).transpose(2, 3).flatten(2)),
        "split or reordered",
    ),
    "channels split and joined": (
        lambda m, x: m.reader(x.reshape(2, 5, 4, 2).flatten(2)),
        "split or reordered",
    ),
    "channels cut": (lambda m, x: x[..., :4] @ m.reader.weight[:, :4].T, "split or reordered"),
    "channels rolled": (lambda m, x: m.reader(x.roll(1, -1)), "split or reordered"),
    "tokens mixed with channels": (
        lambda m, x: m.reader(x.transpose(1, 2).reshape(2, 5, C)),
        "split or reordered",
    ),
    "added to something": (lambda m, x: m.reader(x + 1), "aten.add"),
    "computed weight": (
        lambda m, x: functional.linear(x, m.reader.weight.tanh(), m.reader.bias),
        "computed",
    ),
    "reads itself": (lambda m, x: x @ x.transpose(1, 2), "not a parameter"),
    "reader also reads another": (
        lambda m, x: m.reader(x) + m.reader(torch.ones_like(x)),
        "also used by",
    ),
    "bias used elsewhere": (lambda m, x: m.reader(x) * m.reader.bias, "also used by"),
    "scaled token by token": (
        lambda m, x: m.reader(x * x.new_ones(2, 5, 1)),
        "scaled token by token",
    ),
    "dropout in training": (lambda m, x: m.reader(functional.dropout(x, 0.5, True)), "dropout"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_safe_is_refused_with_the_reason(name: str) -> None:
    read, words = REFUSALS[name]
    model = net(read)
    before = copy.deepcopy(model.state_dict())
    report = fold_(model, torch.randn(2, 5, C).double(), center=False, check=False)
    assert row(report).state == "refused"
    assert words in (row(report).reason or "")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_weight_goes_through_a_factor_of_each_token() -> None:
    model = net(lambda m, x: m.reader(x * x.new_full((2, 5, 1), 3.0) / 2), nn.RMSNorm(C, eps=1e-6))
    assert row(folded(model)).state == "folded"


def images(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.conv(x.view(2, 5, 1, C).permute(0, 3, 1, 2))
    return y


@pytest.mark.parametrize("groups", [1, 2, C])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_bias_does_not_go_into_a_padded_convolution_and_a_weight_does(
    groups: int, padding: int
) -> None:
    conv = nn.Conv2d(C, 16, (3, 1), padding=(padding, 0), groups=groups)
    with_bias = net(images, conv=copy.deepcopy(conv))
    report = folded(with_bias)
    assert row(report).state == ("refused" if padding else "folded")
    assert "pads with zeros" in (row(report).reason or "pads with zeros")
    without = net(images, nn.RMSNorm(C, eps=1e-6), conv=conv)
    assert row(folded(without)).state == "folded"


def test_a_transposed_convolution_takes_a_weight_only() -> None:
    model = net(lambda m, x: m.conv(x.transpose(1, 2)), conv=nn.ConvTranspose1d(C, 3, 2))
    assert "transposed" in (row(folded(model)).reason or "")
    model = net(
        lambda m, x: m.conv(x.transpose(1, 2)),
        nn.RMSNorm(C, eps=1e-6),
        conv=nn.ConvTranspose1d(C, 3, 2),
    )
    assert row(folded(model)).state == "folded"


def test_a_missing_bias_is_added_only_when_asked_for() -> None:
    model = net(PASSES["plain"], reader=nn.Linear(C, 6, bias=False))
    assert "add_bias=True" in (row(folded(model)).reason or "")
    report = folded(model, add_bias=True)
    assert report.added_biases == ["reader"]
    assert model.reader.bias.dtype == torch.float64


class Tied(nn.Module):
    """An embedding whose table is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(11, C),
            nn.LayerNorm(C),
            nn.Linear(C, 11, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.embed(ids)))
        return y


def test_tied_weights_are_untied_only_when_asked_for() -> None:
    ids = torch.randint(0, 11, (2, 5))
    model = shaken(Tied())
    report = folded(model, ids, add_bias=True)
    assert "untie=True" in (row(report).reason or "")
    assert "untie=True" in (row(report, "center").reason or "")
    assert model.head.weight is model.embed.weight
    report = folded(model, ids, add_bias=True, untie=True)
    assert row(report).state == row(report, "center").state == "folded"
    assert len(report.untied) == 1
    assert model.head.weight is not model.embed.weight
    assert report.loads_with == "dynorm"


def test_a_head_that_reads_the_table_itself_cannot_be_untied() -> None:
    model = shaken(nn.ModuleDict({"embed": nn.Embedding(11, C), "norm": nn.RMSNorm(C, eps=1e-6)}))
    model.forward = lambda ids: model["norm"](model["embed"](ids)) @ model["embed"].weight.T  # type: ignore[assignment]
    report = folded(model, torch.randint(0, 11, (2, 5)), untie=True)
    assert "also used by" in (row(report).reason or "")


def test_a_shared_block_folds_once() -> None:
    block = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.Tanh())
    model = shaken(nn.Sequential(block, block, block))
    report = folded(model)
    assert len(report.sites) == 1
    assert row(report).state == "folded"


def test_a_reader_of_two_norms_needs_them_equal() -> None:
    def two(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.reader(x) + m.reader(m.other(x.relu()))
        return y

    model = net(lambda m, x: m.reader(m.norm2(x.sin())) + m.reader(m.other(x.cos())), nn.Identity())
    del model
    for equal in (False, True):
        model = net(two, nn.RMSNorm(C, eps=1e-6), other=nn.RMSNorm(C, eps=1e-6))
        model.read = lambda m, x: m.reader(m.norm(x.sin())) + m.reader(m.other(x.cos()))
        model.forward = lambda x, model=model: model.read(model, x)
        if equal:
            model.other.load_state_dict(model.norm.state_dict())
        report = folded(model)
        assert {site.affine.state for site in report.sites} == (
            {"folded"} if equal else {"refused"}
        )


def test_a_norm_that_shares_its_weight_is_refused() -> None:
    model = net(lambda m, x: m.reader(x) + m.norm.weight.sum())
    assert "used elsewhere" in (row(folded(model)).reason or "")


class Stream(nn.Module):
    """A pre-norm stream: learned positions, two branches with LayerScale, a constant, and a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.positions = nn.Linear(4, C), nn.Parameter(torch.randn(1, 5, C))
        self.start = nn.Parameter(torch.randn(1, 1, C))
        self.register_buffer("constant", torch.randn(C))
        self.norm1, self.norm2, self.norm3 = (
            nn.LayerNorm(C),
            nn.LayerNorm(C),
            nn.LayerNorm(C, eps=1e-3),
        )
        self.one, self.two, self.gain = (
            nn.Linear(C, C),
            nn.Linear(C, C),
            nn.Parameter(torch.randn(C)),
        )
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x) * 2.0 + self.positions
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.constant
        x = x + functional.dropout(self.one(self.norm1(x)), 0.1, self.training)
        x = x - self.gain * self.two(self.norm2(x)).transpose(1, 2).transpose(1, 2)
        y: Tensor = self.head(self.norm3(x[:, 0]))
        return y


def stream() -> tuple[nn.Module, Tensor]:
    return shaken(Stream()), torch.randn(2, 5, 4).double()


def test_the_mean_leaves_a_stream_through_everything_that_writes_into_it() -> None:
    model, x = stream()
    report = folded(model, x, affine=False)
    assert [site.center.state for site in report.sites] == ["folded"] * 3
    written = {
        "into.weight",
        "into.bias",
        "positions",
        "start",
        "constant",
        "one.weight",
        "one.bias",
        "two.weight",
    }
    assert set(row(report, "center").into) == written | {"two.bias"}
    assert torch.equal(model.gain, torch.ones(C).double())
    assert model.norm3.norm_eps == 1e-3
    assert model.norm1.weight is not None
    assert float(model.positions.detach().mean(-1).abs().max()) < 1e-15


class Bent(Stream):
    """The same stream, with one more writer that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x) + x.mean(-1, keepdim=True).exp() * self.constant.sin()
        x = x + self.one(self.norm1(x))
        y: Tensor = self.head(self.norm3(x))
        return y


def test_linear_writers_lose_their_means_where_others_write_too() -> None:
    torch.manual_seed(0)
    model, x = shaken(Bent()), torch.randn(2, 5, 4).double()
    first = folded(copy.deepcopy(model), x, affine=False)
    assert row(first, "center").state == "refused"
    report = folded(model, x, affine=False, center_partly=True)
    states = [site.center.state for site in report.sites if site.center.state != "refused"]
    assert states == ["partly folded"] * 2
    assert set(row(report, "center").into) == {"into.weight", "into.bias", "one.weight", "one.bias"}
    assert "not linear" in (row(report, "center").reason or "")
    assert "0 of 3 means folded, 2 more partly" in str(report)
    assert type(model.norm1) is nn.LayerNorm
    assert float(model.one.weight.detach().mean(0).abs().max()) < 1e-15


SEES_THE_MEAN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an RMSNorm": (lambda m, x: m.reader(m.norm(x)) + m.reader(m.rms(x)), "rms sees its mean"),
    "a linear layer": (lambda m, x: m.reader(m.norm(x)) + m.reader(x), "sees its mean"),
    "the output": (
        lambda m, x: torch.cat([m.reader(m.norm(x)), x.mean(-1, keepdim=True)], -1),
        "sees its mean",
    ),
    "a number for all channels": (lambda m, x: m.reader(m.norm(x + 1.0)), "adds a number"),
    "a function": (lambda m, x: m.reader(m.norm(x.sin())), "aten.sin"),
    "a norm before it": (lambda m, x: m.reader(m.norm(m.first(x) + m.into(x))), "post-norm"),
    "a product with itself": (lambda m, x: m.reader(m.norm(x * x)), "aten.mul"),
    "channels split": (
        lambda m, x: m.reader(m.norm(x.view(2, 5, 4, 2).flatten(2))),
        "aten.flatten",
    ),
    "a number that it reads": (
        lambda m, x: m.reader(m.norm(x * m.reader.bias.sum().item())),
        "aten.mul",
    ),
    "moved by a number that it reads": (
        lambda m, x: m.reader(m.norm(x.roll(m.reader.bias.sum().int().item(), 0))),
        "aten.roll",
    ),
    "one of two results": (lambda m, x: m.reader(m.norm(x.max(1).values)), "aten.max"),
    "written in place": (lambda m, x: m.reader(m.norm(x.mul_(x))), "aten.mul"),
}


def test_a_model_that_writes_into_nothing_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", pytest.fail)
    assert folded(net(lambda m, x: m.reader(x))).count("affine") == 1


@pytest.mark.parametrize("name", SEES_THE_MEAN)
def test_a_stream_whose_mean_is_seen_stays(name: str) -> None:
    read, words = SEES_THE_MEAN[name]
    model = net(lambda m, x: x, nn.Identity(), rms=nn.RMSNorm(C, eps=1e-6), first=nn.LayerNorm(C))
    model.norm = nn.LayerNorm(C).double().eval()
    model.forward = lambda x: read(model, model.into(x))
    report = folded(model, affine=False)
    found = next(site for site in report.sites if site.path == "norm")
    assert found.center.state == "refused"
    assert words in (found.center.reason or "")


def test_norms_that_were_not_chosen_stay_norms_of_the_centred_stream() -> None:
    model, x = stream()
    report = folded(model, x, only=["norm1", "norm3"])
    assert [type(getattr(model, f"norm{i}")).__name__ for i in (1, 2, 3)] == [
        "RMSNorm",
        "LayerNorm",
        "RMSNorm",
    ]
    assert [site.center.state for site in report.sites] == ["folded", "off", "folded"]
    assert not torch.equal(model.norm2.weight, torch.ones(C).double())


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_scale_stays_with_a_bias_that_stays(has_bias: bool) -> None:
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C, bias=has_bias), nn.Linear(C, C))
    model = shaken(model)
    x = torch.randn(64, C).double()
    dynorm.convert_(model, dynorm.find_norms(model, x), witnesses=0)
    dynorm.calibrate_(model, [x])
    report = folded(model, x, affine=False)
    layer = model[1]  # type: ignore[index]
    assert (layer.scale == 1) is not has_bias
    assert layer.weight is not None
    assert row(report, "affine").state == "off"


@pytest.mark.parametrize("to", ["dyisru", "dyt", "derf"])
def test_pointwise_layers_give_away_weight_bias_scale_and_centre(to: str) -> None:
    model = shaken(
        nn.Sequential(
            nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, C), nn.RMSNorm(C), nn.Linear(C, 3)
        )
    )
    x = torch.randn(7, C).double()
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    shaken(model)
    report = folded(model, x)
    for i, (writer, reader) in ((1, ("0.bias", "2.weight")), (3, ("2.bias", "4.weight"))):
        layer = model[i]  # type: ignore[index]
        assert (layer.scale, layer.weight, layer.bias, layer.center) == (1.0, None, None, None)
        assert report.sites[i // 2].constants.into == (reader, writer)
    with pytest.raises(ModelError, match=r"original.*norms"):
        dynorm.restore_(model)


@pytest.mark.parametrize("other", ["sum", "reader"])
def test_a_centre_goes_into_one_bias_of_a_sum_that_nothing_else_reads(other: str) -> None:
    model = net(PASSES["plain"], dynorm.DyT(C, center=True))
    if other == "sum":
        model.forward = lambda x: model.reader(model.norm(model.into(x) + x))
    else:
        model.forward = lambda x: model.reader(model.norm(y := model.into(x)) + y)
    report = folded(model)
    assert row(report, "constants").state == ("folded" if other == "sum" else "refused")
    assert (model.norm.center is None) == (other == "sum")


def test_attention_in_heads_with_a_cache_is_followed() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)

        def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.qkv(self.norm(x)).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
            cache = torch.cat([past, torch.stack([k, v])], 3)
            return self.out(
                functional.scaled_dot_product_attention(q, *cache).transpose(1, 2).flatten(2)
            ), cache

    model, past = shaken(Attention()), torch.randn(2, 2, 2, 3, 4).double()
    x = torch.randn(2, 5, C).double()
    with torch.no_grad():
        exact = model(x, past)
        report = fold_(model, x, past)
        assert relative_error(model(x, past), exact) <= 1e-12
    assert row(report).into == ("qkv.weight",)


def test_a_vector_that_only_looks_like_a_bias_is_none() -> None:
    # Outputs before tokens, and as many of both: what is added goes along the tokens.
    square = nn.Parameter(torch.randn(5, C))
    model = net(
        lambda m, x: m.square @ x.transpose(1, 2) + m.vector,
        square=square,
        vector=nn.Parameter(torch.randn(5)),
    )
    assert "no bias" in (row(folded(model)).reason or "")
    conv = nn.Conv1d(C, 5, 1, bias=False)
    model = net(
        lambda m, x: m.conv(x.transpose(1, 2)) + m.vector,
        conv=conv,
        vector=nn.Parameter(torch.randn(5)),
    )
    assert "no bias" in (row(folded(model)).reason or "")
    assert row(folded(model, add_bias=True)).state == "folded"


def test_a_layer_whose_weight_is_borrowed_gets_no_bias() -> None:
    model = net(
        lambda m, x: functional.linear(x, m.reader.weight), reader=nn.Linear(C, 6, bias=False)
    )
    assert "no bias can be added" in (row(folded(model, add_bias=True)).reason or "")


@pytest.mark.parametrize("seed", range(24))
def test_random_graphs_keep_their_outputs(seed: int) -> None:
    torch.manual_seed(seed)
    model = shaken(RandomNet(seed))
    report = folded(
        model, torch.randn(2, 5, C).double(), untie=bool(seed % 2), add_bias=bool(seed % 3)
    )
    assert len(report.sites) == len(model.norms)


class RandomNet(nn.Module):
    """A stream of random steps: norms, readers and writers are drawn, and may be shared."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        numbers = iter(torch.randint(0, 36, (64,), generator=draw).tolist())
        self.norms = nn.ModuleList(self._norm(next(numbers) % 4) for _ in range(3))
        self.steps = [[next(numbers) % 9, next(numbers) % 9] for _ in range(3)]
        self.ends = [[next(numbers) % 4, next(numbers) % 2, next(numbers) % 3] for _ in range(3)]
        self.linears = nn.ModuleList(nn.Linear(C, C, bias=bool(i % 2)) for i in range(4))
        self.table = nn.Parameter(torch.randn(5, C))
        if seed % 4 == 0:
            self.linears[3].weight = self.linears[0].weight

    @staticmethod
    def _norm(kind: int) -> nn.Module:
        norms = (
            nn.LayerNorm(C),
            nn.LayerNorm(C, bias=False),
            nn.RMSNorm(C, eps=1e-6),
            nn.LayerNorm(C, eps=1e-2),
        )
        return norms[kind]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linears[0](x) + self.table
        for norm, steps, (pick, squashed, ends) in zip(
            self.norms, self.steps, self.ends, strict=True
        ):
            y = norm(x)
            for kind in steps:
                y = self._step(y, kind)
            y = self.linears[pick](y)
            y = y.tanh() if squashed else y
            x = self.linears[(pick + 1) % 4](y) if ends == 0 else x + y
        return x

    def _step(self, y: Tensor, kind: int) -> Tensor:
        steps: list[Callable[[], Tensor]] = [
            lambda: y,
            lambda: y.reshape(10, C).view(2, 5, C),
            lambda: y.transpose(0, 1).contiguous().transpose(0, 1),
            lambda: functional.dropout(y, 0.3, self.training),
            lambda: y * 0.5,
            lambda: y * y.new_full((2, 5, 1), 1.5),
            lambda: y.flip(1),
            lambda: y.reshape(2, 5, 2, 4).transpose(2, 3).reshape(2, 5, C),
            lambda: y.relu(),
        ]
        return steps[kind]()


def state(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    return {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors.items()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]], text: str) -> None:
    after = state(model)
    assert before.keys() == after.keys()
    assert all(before[name][0] == after[name][0] for name in before)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert repr(model) == text
    assert not any("_dynorm" in name for module in model.modules() for name in module.__dict__)


def test_a_wrong_fold_is_found_and_rolled_back_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = plan.new_values

    def wrong(*folds: Any) -> Any:
        new = right(*folds)
        for table in (new.values, new.added):
            for slot, value in table.items():
                table[slot] = value * (1 + 1e-9)
        return new

    monkeypatch.setattr(plan, "new_values", wrong)
    model = nn.Sequential(Tied(), nn.LayerNorm(11), nn.Linear(11, 2, bias=False))
    shaken(model)
    before, text = state(model), repr(model)
    with pytest.raises(ModelError, match=r"everything.*put"):
        fold_(model, torch.randint(0, 11, (2, 5)), untie=True, add_bias=True)
    assert_untouched(model, before, text)


def test_an_error_while_swapping_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Check, model: nn.Module) -> list[float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Check, "errors", fail)
    model, x = stream()
    before, text = state(model), repr(model)
    with pytest.raises(KeyboardInterrupt):
        fold_(model, x)
    assert_untouched(model, before, text)


def test_a_branch_that_the_example_does_not_take_is_found_by_no_graph_but_named_in_the_docs() -> (
    None
):
    assert "Only what the example runs is seen" in (fold_.__doc__ or "")


class Branching(nn.Module):
    """Control flow that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reader = nn.LayerNorm(C), nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x * 2
        y: Tensor = self.reader(self.norm(x))
        return y


def test_what_cannot_be_traced_says_where_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    model = shaken(Branching())
    with pytest.raises(ModelError, match=r"test_fold\.py:\d+.*torch\.where.*is_exporting"):
        fold_(model, torch.randn(2, C).double())
    assert capfd.readouterr().out == ""
    assert "forward" not in model.norm.__dict__


def test_a_folder_that_is_called_as_torch_or_this_package_is_not_taken_for_it(
    tmp_path: Path,
) -> None:
    """As a clone of the repository is, by default."""
    file = tmp_path / "torch" / "dynorm" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text("def decide(x):\n    return x * 2 if x.sum() > 0 else x\n")
    namespace: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)

    class Deciding(Branching):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.reader(self.norm(namespace["decide"](x)))
            return y

    with pytest.raises(ModelError, match=r"dynorm/mine\.py:2.*raised"):
        fold_(shaken(Deciding()), torch.randn(2, C).double())


def bad_models() -> dict[str, tuple[Callable[[], nn.Module], str]]:
    def sharded() -> nn.Module:
        model = net(PASSES["plain"])
        model.reader.weight = type("DTensor", (nn.Parameter,), {})(model.reader.weight.detach())
        return model

    def int8() -> nn.Module:
        model = net(PASSES["plain"])
        model.reader.weight.data = model.reader.weight.data.to(torch.float8_e4m3fn)
        return model

    return {
        "training": (lambda: net(PASSES["plain"]).train(), "eval mode"),
        "meta": (lambda: net(PASSES["plain"]).to("meta"), "meta"),
        "compiled": (lambda: torch.compile(net(PASSES["plain"])), "compiled"),  # type: ignore[return-value]
        "wrapped": (lambda: nn.DataParallel(net(PASSES["plain"])), "wrapped"),
        "sharded": (sharded, "DTensor"),
        "float8": (int8, "float8"),
        "no norm": (lambda: shaken(nn.Sequential(nn.Linear(C, C))), "must have norms"),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", bad_models())
def test_models_that_cannot_be_folded_say_what_to_do(name: str) -> None:
    make, words = bad_models()[name]
    with pytest.raises(ModelError, match=words):
        fold_(make(), torch.randn(2, 5, C).double())


def test_bad_arguments_name_themselves() -> None:
    model, x = net(PASSES["plain"]), torch.randn(2, 5, C).double()
    for options, words in (
        ({"only": "nothing.*"}, "matches none"),
        ({"skip": "nothing.*"}, "matches none"),
        ({"tolerance": -1.0}, "tolerance must be"),
    ):
        with pytest.raises(ArgumentError, match=words):
            fold_(model, x, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Module"):
        fold_(3, x)  # type: ignore[arg-type]


def test_values_stay_in_their_parameters() -> None:
    model = net(PASSES["plain"])
    model.reader.weight.requires_grad_(False)
    hooked = []
    model.norm.register_forward_hook(lambda *_: hooked.append(1))
    weight = model.reader.weight
    folded(model)
    assert model.reader.weight is weight
    assert not weight.requires_grad
    assert hooked
    assert (model.norm.weight, model.norm.bias) == (None, None)
    assert not model.norm.training


def test_the_report_reads_well_and_is_json() -> None:
    import json

    model, x = stream()
    report = folded(model, x)
    text = str(report)
    assert "3 of 3 affine maps folded, 3 of 3 means" in text
    assert "norm1  layernorm(8) -> RMSNorm" in text
    assert json.loads(json.dumps(report.to_dict()))["sites"][0]["affine"]["into"] == ["one.weight"]


def test_a_rewrite_says_why_a_part_stays() -> None:
    into = ("a", "b", "c", "d")
    assert str(Rewrite("folded", into)) == "folded into a, b, c and 1 more"
    assert str(Rewrite("partly folded", ("a",), "a reason")) == "partly folded into a; a reason"
    assert str(Rewrite("nothing to fold", reason="a reason")) == "nothing to fold; a reason"
    assert str(Rewrite("refused", reason="a reason")) == "refused: a reason"


def test_fresh_inputs_are_like_the_example() -> None:
    mask, ids = torch.tensor([[1, 0, 1]]), torch.tensor([[3, 9, 5]])
    (x, m, minus), named = fresh(
        ((torch.full((3, 2), 5.0) + torch.eye(3, 2), mask, torch.tensor([-torch.inf])), {"i": ids}),
        3,
    )
    assert x.mean() > 3
    assert torch.equal(m, mask)
    assert torch.isinf(minus).all()
    assert ((named["i"] >= 3) & (named["i"] <= 9)).all()


def test_rmsnorm_is_layernorm_without_a_mean() -> None:
    x = torch.randn(4, C, 3).double()
    x = x - x.mean(1, keepdim=True)
    ours, norm = RMSNorm(C, 1e-3, bias=True, dim=1).double(), nn.LayerNorm(C, 1e-3).double()
    assert torch.allclose(ours(x), norm(x.transpose(1, 2)).transpose(1, 2), 1e-12, 1e-12)
    with pytest.raises(ArgumentError, match="channels"):
        ours(torch.randn(4, 3))
    with pytest.raises(ArgumentError, match="norm_eps"):
        RMSNorm(C, -1.0)
    torch.autograd.gradcheck(ours, (x.requires_grad_(),))


@pytest.mark.parametrize("layer", [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl])
def test_a_layer_with_witnesses_folds_its_affine_map_and_centre_and_keeps_the_witnesses(
    layer: Any,
) -> None:
    norm = layer(C, center=True, witnesses=(5, 2))
    model = net(lambda m, y: m.reader(y), norm)
    gains = norm.log_gain.detach().clone()
    (site,) = folded(model).sites
    assert (site.affine.state, site.constants.state) == ("folded", "folded")
    after: Any = model.norm
    assert (after.weight, after.bias, after.center) == (None, None, None)
    assert after.witness_channels == (5, 2)
    assert torch.equal(after.log_gain, gains)
