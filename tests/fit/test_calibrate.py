"""calibrate_: the truth where it is known, least squares elsewhere, padding without influence, errors without trace."""

import copy
import itertools
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import CalibrationWarning, DataError, ModelError
from dynorm.layers import PointwiseNorm
from dynorm.theory import leave_one_out_beta, leave_one_out_square_sum

C = 16
LAYERS = ("dyisru", "dyt", "derf", "linear")


class Block(nn.Module):
    """Attention and MLP, norms first, with dropout."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.RMSNorm(channels, eps=1e-6)
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


def transformer(depth: int = 3, channels: int = C) -> nn.Sequential:
    model = nn.Sequential(*(Block(channels) for _ in range(depth)), nn.LayerNorm(channels))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.5 if "norm" in name else 0.2) * torch.randn_like(parameter))
    return model


def site(norm: nn.Module) -> nn.Sequential:
    """A model that is nothing but a norm."""
    return nn.Sequential(norm)


def scaled_tokens(tokens: int, channels: int = C) -> Tensor:
    """Tokens of many sizes, with an outlier channel."""
    x = torch.randn(tokens, channels) * torch.rand(tokens, 1).add(0.5)
    x[:, 3] *= 6
    return x + 0.3


def converted(model: nn.Module, *args: Any, to: str = "dyisru", **options: Any) -> nn.Module:
    dynorm.convert_(model, dynorm.find_norms(model, *args), to, **options)
    return model


def parameters(model: nn.Module) -> dict[str, Tensor]:
    layers = {path: m for path, m in model.named_modules() if isinstance(m, PointwiseNorm)}
    return {
        f"{path}.{name}": p.detach().clone()
        for path, m in layers.items()
        for name, p in m.named_parameters()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


def function(to: str, x: Tensor, beta: Tensor, scale: float) -> Tensor:
    """The four functions written out."""
    u = x / beta.sqrt()
    if to == "dyisru":
        return scale * u / (1 + u * u).sqrt()
    if to == "dyt":
        return scale * u.tanh()
    return scale * (torch.erf(math.sqrt(math.pi) / 2 * u) if to == "derf" else u)


def dense(to: str, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Beta, weight and bias by ``torch.linalg.lstsq`` on all activations, candidate by candidate, in float64."""
    is_layer_norm = isinstance(norm, nn.LayerNorm)
    scale = math.sqrt(C - 1 if is_layer_norm else C)
    loo = leave_one_out_beta if is_layer_norm else leave_one_out_square_sum
    beta0 = loo(x, eps=norm.eps).log().mean().exp()
    has_bias = getattr(norm, "bias", None) is not None or (to == "linear" and is_layer_norm)
    best: tuple[float, Any] = (math.inf, None)
    for k in range(1 if to == "linear" else 17):
        beta = beta0 * (1.0 if to == "linear" else 10 ** (-1 + k / 4))
        f = function(to, x, beta, scale)
        weight, bias, residual = torch.empty(C).double(), torch.zeros(C).double(), 0.0
        for c in range(C):
            columns = [f[:, c], torch.ones(len(f)).double()] if has_bias else [f[:, c]]
            matrix = torch.stack(columns, 1)
            solution = torch.linalg.lstsq(matrix, y[:, c : c + 1], driver="gelsd").solution[:, 0]
            residual += float((matrix @ solution - y[:, c]).square().sum())
            weight[c] = solution[0]
            if has_bias:
                bias[c] = solution[1]
        if residual < best[0]:
            best = (residual, (beta, weight, bias))
    beta, weight, bias = best[1]
    return beta, weight, bias


@pytest.mark.parametrize("to", LAYERS)
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(C), nn.LayerNorm(C, bias=False), nn.RMSNorm(C, eps=1e-6)]
)
def test_one_batch_equals_dense_least_squares(to: str, norm: nn.Module) -> None:
    norm = copy.deepcopy(norm).double()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.4 * torch.randn_like(p))
    x = scaled_tokens(200).double()
    beta, weight, bias = dense(to, x, norm(x).detach(), norm)
    layer = converted(site(norm), x, to=to)
    report = dynorm.calibrate_(layer, [x])
    assert layer[0].beta().item() == pytest.approx(float(beta), rel=1e-9)
    assert torch.allclose(layer[0].weight, weight, rtol=1e-7)
    if layer[0].bias is not None:
        assert torch.allclose(layer[0].bias, bias, rtol=1e-7, atol=1e-9)
    assert report.sites[0].tokens == 200
    assert 0 < report.sites[0].error < 0.7


@pytest.mark.parametrize("to", LAYERS[:3])
def test_affine_free_layers_take_the_best_candidate(to: str) -> None:
    x = scaled_tokens(200).double()
    norm = nn.LayerNorm(C, elementwise_affine=False)
    y = norm(x)
    model = converted(site(norm), x, to=to)
    dynorm.calibrate_(model, [x])
    candidates = leave_one_out_beta(x, eps=1e-5).log().mean().exp() * torch.logspace(
        -1, 3, 17, dtype=torch.float64
    )
    errors = [(function(to, x, b, math.sqrt(C - 1)) - y).square().sum() for b in candidates]
    # An affine-free layer in a model without parameters is made in float32.
    assert model[0].beta().item() == pytest.approx(
        float(candidates[torch.stack(errors).argmin()]), rel=1e-5
    )


def deep(blocks: int = 4) -> nn.Module:
    """A residual network whose layers see what the ones before make of their tokens."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(C)
            self.linear = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.norm(x)).tanh()

    return nn.Sequential(*(Residual() for _ in range(blocks)))


@pytest.mark.parametrize("witnesses", [0, 3])
def test_the_split_into_batches_does_not_matter(witnesses: int) -> None:
    """Every layer is fitted to all tokens before any goes on, however they are split."""
    x = scaled_tokens(4000)
    model = deep()
    dynorm.convert_(model, dynorm.find_norms(model, x[:5]), witnesses=witnesses)
    twins = [copy.deepcopy(model) for _ in range(3)]
    dynorm.calibrate_(twins[0], [x])
    dynorm.calibrate_(twins[1], x.split(400))
    dynorm.calibrate_(twins[2], x.split(70))
    expected = parameters(twins[0])
    for twin in twins[1:]:
        for name, value in parameters(twin).items():
            assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name


def test_more_text_than_goes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    x = scaled_tokens(4000)
    model = converted(site(nn.LayerNorm(C)), x[:5])
    other = copy.deepcopy(model)
    dynorm.calibrate_(model, [x])
    monkeypatch.setattr("dynorm.fit.calibrate._TOKENS_AT_ONCE", 1000)
    report = dynorm.calibrate_(other, x.split(400))
    assert report.sites[0].tokens == 4000
    assert (model[0].beta() / other[0].beta()).item() == pytest.approx(1, rel=0.1)
    assert torch.allclose(model[0].weight, other[0].weight, rtol=0.1)
    assert torch.allclose(model[0].bias, other[0].bias, atol=0.1)


def test_batches_without_tokens_of_a_site_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at an expert to which nothing is routed; also where the witnesses would be chosen again."""
    monkeypatch.setattr("dynorm.fit.calibrate._TOKENS_AT_ONCE", 1)
    x = scaled_tokens(300)
    model = nn.Sequential(nn.LayerNorm(C))
    dynorm.convert_(model, dynorm.find_norms(model, x[:5]), witnesses=2)
    other = copy.deepcopy(model)
    nothing = x[:0]
    dynorm.calibrate_(model, x.split(100))
    report = dynorm.calibrate_(other, [*x.split(100), nothing, nothing])
    assert report.sites[0].tokens == 300
    assert math.isfinite(report.sites[0].error)
    expected = parameters(model)
    for name, value in parameters(other).items():
        assert torch.equal(value, expected[name]), name


class Masked(nn.Module):
    """Normalizes token embeddings in batch order or in time order; the mask is not used."""

    def __init__(self, in_time_order: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, C), nn.LayerNorm(C)
        self.in_time_order = in_time_order

    def forward(self, input_ids: Tensor, **masks: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.norm(x.transpose(0, 1) if self.in_time_order else x)


@pytest.mark.parametrize("name", ["attention_mask", "src_key_padding_mask"])
@pytest.mark.parametrize("in_time_order", [False, True])
def test_what_stands_at_padding_has_no_influence(name: str, in_time_order: bool) -> None:
    model = Masked(in_time_order)
    ids = torch.randint(0, 50, (3, 6))
    is_token = torch.arange(6) < torch.tensor([[6], [5], [4]])
    mask = is_token.long() if name == "attention_mask" else ~is_token
    converted(model, ids)
    other = copy.deepcopy(model)
    changed = torch.where(is_token, ids, 49 - ids)
    report = dynorm.calibrate_(model, [{"input_ids": ids, name: mask}] * 2)
    dynorm.calibrate_(other, [{"input_ids": changed, name: mask}] * 2)
    assert same(parameters(model), parameters(other))
    assert report.sites[0].tokens == 30


def test_nothing_of_the_run_stays_behind() -> None:
    model = converted(transformer(2), torch.randn(2, 3, C))
    model[1].eval()
    model[0].norm1.weight.grad = torch.ones(C)
    modes = [m.training for m in model.modules()]
    others = {
        name: p.clone()
        for name, p in model.named_parameters()
        if "norm" not in name and name[0] != "2"
    }
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    batches = [torch.zeros(2, 3, C).normal_(generator=torch.Generator()) for _ in range(2)]
    dynorm.calibrate_(model, batches)
    assert torch.equal(torch.rand(1), expected)
    assert [m.training for m in model.modules()] == modes
    assert all(
        torch.equal(p, others[name]) for name, p in model.named_parameters() if name in others
    )
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model[0].norm1.weight.grad, torch.ones(C))
    assert not any(m._forward_hooks for m in model.modules())


class Drawing(nn.Module):
    """Hides random positions in eval mode too, as masked autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, torch.randperm(x.shape[1])[:2]])


def test_both_passes_draw_the_same_numbers() -> None:
    """Otherwise the targets would be those of other positions, and the error that of a guess."""
    x = torch.randn(64, 8, C)
    model = converted(Drawing(), x)
    assert dynorm.calibrate_(model, [x]).sites[0].error < 0.3


class Writing(nn.Module):
    """Goes on in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).relu_())


def test_models_that_write_into_a_norms_output() -> None:
    x = scaled_tokens(200)
    model, plain = converted(Writing(), x), converted(site(nn.LayerNorm(C)), x)
    dynorm.calibrate_(model, [x])
    dynorm.calibrate_(plain, [x])
    assert torch.equal(model.norm.weight, plain[0].weight)
    dynorm.refine_(model, [x], steps=2)
    dynorm.refine_(plain, [x], steps=2)
    assert torch.equal(model.norm.weight, plain[0].weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", LAYERS)
def test_half_precision(dtype: torch.dtype, to: str) -> None:
    model = transformer(2).eval()
    x = torch.randn(4, 10, C)
    half = converted(copy.deepcopy(model).to(dtype), x.to(dtype), to=to)
    full = converted(model, x, to=to)
    errors = [
        [s.error for s in dynorm.calibrate_(m, [x.to(kind)] * 2).sites]
        for m, kind in ((half, dtype), (full, torch.float32))
    ]
    assert {p.dtype for p in half.parameters()} == {dtype}
    assert errors[0] == pytest.approx(errors[1], rel=0.1, abs=0.01)
    assert torch.isfinite(half(x.to(dtype))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_means(dtype: torch.dtype) -> None:
    """The bias makes up for a mean, as far as the layer's dtype holds it."""
    x = (1000.7 + 30 * torch.randn(300, C)).to(dtype)
    model = converted(site(nn.LayerNorm(C).to(dtype)), x)
    assert dynorm.calibrate_(model, [x]).sites[0].error < 0.4
    y = dynorm.restore_(copy.deepcopy(model))(x).float()
    assert (model(x).float() - y).norm() < 0.45 * y.norm()


def test_dead_channels_keep_their_weight() -> None:
    """A channel that never moves says nothing of its slope; its bias makes the mean right."""
    x = scaled_tokens(300)
    x[:, 5] = 0.7
    x[:, 6] = 0.0
    norm = nn.LayerNorm(C)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    model = converted(site(norm), x)
    dynorm.calibrate_(model, [x, x])
    assert torch.equal(model[0].weight[[5, 6]], norm.weight[[5, 6]])
    assert not torch.equal(model[0].weight[:5], norm.weight[:5])
    assert torch.allclose(model(x).mean(0), norm(x).mean(0), atol=1e-4)


# To an RMSNorm only zeros are without spread.
@pytest.mark.parametrize(
    ("norm", "value"),
    [
        (nn.LayerNorm(C), 0.0),
        (nn.LayerNorm(C), 3.3),
        (nn.LayerNorm(C, eps=0.0), 0.0),
        (nn.LayerNorm(C, eps=0.0), 3.3),
        (nn.RMSNorm(C, eps=1e-6), 0.0),
    ],
)
def test_inputs_without_spread_keep_the_constants(norm: nn.Module, value: float) -> None:
    x = torch.full((10, C), value)
    model = converted(site(norm), torch.randn(4, C))
    before = parameters(model)
    if norm.eps == 0 and isinstance(norm, nn.LayerNorm):
        with pytest.raises(DataError, match=r"norm.*'0'.*NaN"):
            dynorm.calibrate_(model, [x])
    else:
        with pytest.warns(CalibrationWarning, match="constants.*0.*reached"):
            assert dynorm.calibrate_(model, [x]).unreached == ["0"]
    assert same(parameters(model), before)


@pytest.mark.parametrize("to", LAYERS)
def test_tokens_of_zeros_do_not_move_the_candidates(to: str) -> None:
    x = scaled_tokens(300)
    model = converted(site(nn.LayerNorm(C, eps=1e-12)), x, to=to)
    other = copy.deepcopy(model)
    dynorm.calibrate_(model, [x])
    dynorm.calibrate_(other, [torch.cat([x, torch.zeros(300, C)])])
    assert (other[0].beta() / model[0].beta()).item() == pytest.approx(1, abs=0.9)


def test_a_single_token() -> None:
    x = torch.randn(1, C)
    model = converted(site(nn.LayerNorm(C)), x)
    before = model[0].weight.clone()
    dynorm.calibrate_(model, [x])
    assert torch.allclose(model(x), dynorm.restore_(copy.deepcopy(model))(x), atol=1e-5)
    assert torch.equal(model[0].weight, before)


def test_constants_that_are_not_fitted_are_reset() -> None:
    x = scaled_tokens(200)
    model = converted(site(nn.LayerNorm(C)), x, to="derf")
    dynorm.calibrate_(model, [x])
    fitted = parameters(model)
    with torch.no_grad():
        model[0].shift.fill_(2.0)
    dynorm.calibrate_(model, [x])
    assert same(parameters(model), fitted)


class Twice(nn.Module):
    """Calls a norm at two places, another at none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.other = nn.Linear(C, C), nn.LayerNorm(C), nn.LayerNorm(C)

    def forward(self, x: Tensor, all_of_it: Tensor | None = None) -> Tensor:
        y = self.norm(self.linear(self.norm(x)))
        return y if all_of_it is None else self.other(y)


def test_a_norm_called_twice_and_one_that_is_not_reached() -> None:
    x = torch.randn(20, C)
    model = converted(Twice(), x, x)
    before = parameters(model)
    with pytest.warns(CalibrationWarning, match="constants.*other.*reached") as caught:
        report = dynorm.calibrate_(model, [x, x])
    assert [warning.filename for warning in caught] == [__file__]
    assert [(s.path, s.tokens) for s in report.sites] == [("norm", 80)]
    assert report.unreached == ["other"]
    assert "other: not reached" in str(report)
    after = parameters(model)
    assert all(
        torch.equal(after[name], before[name]) == name.startswith("other")
        for name in after
        if "bias" in name
    )


def test_the_report() -> None:
    x = torch.randn(20, C)
    model = converted(transformer(1), x[None])
    report = dynorm.calibrate_(model, [x[None]])
    assert str(report).splitlines()[0] == "3 sites calibrated on 1 batch"
    assert str(report).splitlines()[2].split() == ["site", "tokens", "beta", "error"]
    paths = ["0.norm1", "0.norm2", "1"]
    assert [line.split()[0] for line in str(report).splitlines()[3:6]] == paths
    assert report.to_dict()["sites"][0]["path"] == "0.norm1"
    assert report.sites[0].beta == pytest.approx(model[0].norm1.beta().item())


def fails(
    model: nn.Module,
    batches: Any,
    match: str,
    error: type[Exception] = DataError,
) -> None:
    before, modes = parameters(model), [m.training for m in model.modules()]
    with pytest.raises(error, match=match):
        dynorm.calibrate_(model, batches)
    assert same(parameters(model), before)
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("tune", [dynorm.calibrate_, dynorm.refine_])
def test_a_layer_whose_norm_is_not_known_is_refused(tune: Any) -> None:
    """A norm was converted next to a layer that was loaded or built."""
    model = nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C), dynorm.DyT(C))
    batch = scaled_tokens(64)
    dynorm.convert_(model, dynorm.find_norms(model, batch))
    before = parameters(model)
    with pytest.raises(ModelError, match=r"'2' must have replaced a norm.*convert all norms"):
        tune(model, [batch])
    assert same(parameters(model), before)


@pytest.mark.parametrize("other", ["norm", "scale"])
def test_a_shared_weight_is_refused(other: str) -> None:
    """A fit for one of its modules would change the other without a word."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(C))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    second = nn.LayerNorm(C) if other == "norm" else Scale()
    model = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), second)
    second.weight = model[0].weight
    batch = scaled_tokens(64)
    dynorm.convert_(model, dynorm.find_norms(model, batch))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="must not share its parameters"):
        dynorm.calibrate_(model, [batch])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert dynorm.calibrate_(model, [batch]).unreached == []


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        ([], "batch.*got none"),
        (iter([]), "batch.*got none"),
        (torch.randn(2, 3, C), "got a Tensor"),
        (None, "got a NoneType"),
        ([torch.randn(2, 3, C), "text"], "got str at 1"),
        ([{"input": [1, 2]}], "got dict at 0"),
        ([torch.randn(2, 3, C + 1)], "run.*batch.*ArgumentError"),
        (
            [torch.randn(2, 3, C), {"wrong": torch.randn(2)}],
            "run.*batch.*TypeError",
        ),
    ],
)
def test_wrong_batches(batches: Any, match: str) -> None:
    fails(converted(transformer(1), torch.randn(2, 3, C)), batches, match)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_activations_that_are_not_finite(value: float) -> None:
    x = torch.randn(2, 3, C)
    model = converted(transformer(1), x)
    bad = x.clone()
    bad[0, 0, 0] = value
    fails(
        model,
        [x, bad],
        r"'0\.norm1'.*NaN.*batch 1",
    )


def test_batches_without_an_end_are_refused_before_the_model_runs() -> None:
    model = converted(transformer(1), torch.randn(2, 3, C))
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(DataError, match="must have an end, got more than 500"):
        dynorm.calibrate_(model, itertools.repeat(torch.randn(2, 3, C)))


@pytest.mark.parametrize("tune", [dynorm.calibrate_, dynorm.refine_])
def test_an_interrupt_inside_the_model_leaves_it_as_it_was(tune: Any) -> None:
    model, x = converted(transformer(1), torch.randn(2, 3, C), witnesses=2), torch.randn(8, 3, C)
    dynorm.calibrate_(model, [x])
    model.train()[1].weight.requires_grad_(False)
    before, calls, threads = parameters(model), itertools.count(), threading.active_count()

    def interrupt(*_: object) -> None:
        # After the first of the fits or steps.
        if next(calls) == 6:
            raise KeyboardInterrupt

    with model[0].mlp[0].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        tune(model, [x, 2 * x, x, x])
    assert same(parameters(model), before)
    assert model.training
    assert not model[1].weight.requires_grad
    assert threading.active_count() == threads


@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_computes_with_the_calibrated_constants(before: bool) -> None:
    x = torch.randn(8, 3, C)
    model = converted(transformer(1), x, witnesses=2).eval()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        if before:
            compiled(x)
        dynorm.calibrate_(model, [x])
        torch.testing.assert_close(compiled(x), model(x))


def test_batches_that_break_off() -> None:
    def feed() -> Iterator[Tensor]:
        yield torch.randn(2, 3, C)
        raise KeyboardInterrupt("stopped")

    fails(converted(transformer(1), torch.randn(2, 3, C)), feed(), "stopped", KeyboardInterrupt)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_the_error_is_that_of_the_layer_as_it_is_now(kind: type[nn.Module]) -> None:
    x = scaled_tokens(400).double()
    norm = kind(C).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.5 * torch.randn(C))
    model = converted(site(copy.deepcopy(norm)), x)
    error = dynorm.calibrate_(model, [x]).sites[0].error
    with torch.no_grad():
        y = norm(x)
        about = y.mean(0) if kind is nn.LayerNorm else 0.0
        measured = (model(x) - y).norm() / (y - about).norm()
    assert error > 0.1
    assert error == pytest.approx(float(measured), rel=1e-6)
