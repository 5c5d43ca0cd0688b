"""A layer's dtypes are the norm's: after casts, in models of several dtypes, and for norms that scale by 1 + w."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import dynorm
from dynorm.errors import ArgumentError
from dynorm.fold import fold_

C = 16
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.double(),
}
every_cast = pytest.mark.parametrize("cast", CASTS)
every_layer = pytest.mark.parametrize("to", ["dyisru", "dyt", "derf", "linear", "annealed"])


class Norm(nn.Module):
    """RMSNorm with a weight; a subclass chooses the dtype of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, C))

    def normalized(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


class LikeLlama(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalized(x).to(x.dtype)


class LikeT5(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalized(x).to(self.weight.dtype)


class LikeGemma(Norm):
    def __init__(self) -> None:
        super().__init__()
        # In bfloat16 1 + 2^-8 is 1, and 16.8125 is 16.75.
        small = torch.full((C // 2,), 2.0**-8)
        self.weight = nn.Parameter(torch.cat([small, torch.full((C // 2,), 15.8125)]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x) * (1 + self.weight.float())).type_as(x)


class StaysWide(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalized(x) * self.weight


class AlwaysFloat32(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalized(x) * self.weight).float()


RULES: dict[type[nn.Module], str | None] = {
    LikeLlama: "input+weight",
    LikeT5: "weight",
    LikeGemma: None,
    StaysWide: "input+weight+float32",
    AlwaysFloat32: "float32",
}
every_norm = pytest.mark.parametrize("norm", RULES)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(64, C, generator=torch.Generator().manual_seed(0)).to(dtype)


def pair(norm: type[nn.Module], dtype: torch.dtype, to: str = "dyisru") -> tuple[nn.Module, ...]:
    """Return a model with a converted norm, and the model before."""
    before = nn.Sequential(nn.Identity(), norm()).to(dtype)
    model = copy.deepcopy(before)
    dynorm.convert_(
        model, dynorm.find_norms(model, tokens(dtype)), to=to, per_channel=False, witnesses=0
    )
    return model, before


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_rule_is_found_in_every_dtype(norm: type[nn.Module], dtype: torch.dtype) -> None:
    (site,) = dynorm.find_norms(nn.Sequential(nn.Identity(), norm()).to(dtype), tokens(dtype))
    assert site.output_rule == RULES[norm]


@every_norm
@every_cast
def test_the_output_has_the_dtype_of_the_norms(norm: type[nn.Module], cast: str) -> None:
    for converted_in in (torch.float32, torch.bfloat16):
        for to in ("dyisru", "annealed"):
            models = [CASTS[cast](model) for model in pair(norm, converted_in, to)]
            for given in (torch.float32, torch.bfloat16, torch.float64):
                ours, theirs = (model(tokens(given)).dtype for model in models)
                assert ours == theirs, (converted_in, to, given)


@every_layer
@every_cast
def test_a_float32_norm_and_head_in_a_bfloat16_model(to: str, cast: str) -> None:
    body = nn.Sequential(nn.Linear(C, C), LikeLlama(), nn.Linear(C, C)).bfloat16()
    before = nn.Sequential(*body, LikeLlama(), nn.Linear(C, 5))
    x = tokens(torch.bfloat16)
    model = copy.deepcopy(before)
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    dynorm.calibrate_(model, [x])
    model, before = CASTS[cast](model), CASTS[cast](before)
    x = x.to(before[0].weight.dtype)
    assert model(x).dtype == before(x).dtype
    dynorm.restore_(model)
    assert torch.equal(model(x), before(x))


def test_a_cast_of_one_layer_only() -> None:
    model, _ = pair(LikeLlama, torch.float32)
    model.bfloat16()
    assert model(tokens(torch.bfloat16)).dtype == torch.bfloat16
    # As peft's prepare_model_for_kbit_training does.
    model[1].float()
    assert model(tokens(torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("order", ["cast, then convert", "convert, then cast"])
def test_one_plus_w_keeps_its_digits_in_bfloat16(order: str) -> None:
    x = tokens(torch.bfloat16)
    if order == "cast, then convert":
        model, before = pair(LikeGemma, torch.bfloat16, "annealed")
    else:
        model, before = (m.bfloat16() for m in pair(LikeGemma, torch.float32, "annealed"))
    exact = copy.deepcopy(before).double()
    # The formula in float64, of weights that bfloat16 holds.
    expected = exact[1].normalized(x.double()) * (1 + exact[1].weight)
    ours, theirs = ((m(x).double() - expected).norm() for m in (model, before))
    assert ours <= 1.001 * theirs
    assert model[1].weight.dtype == torch.bfloat16
    assert torch.equal(model[1].weight, before[1].weight)


@every_layer
def test_one_plus_w_is_one_more_than_the_weight(to: str) -> None:
    model, before = pair(LikeGemma, torch.bfloat16, to)
    layer = model[1]
    wanted = 1 + before[1].weight.float()
    assert torch.equal(layer.factor(), wanted)
    again = type(layer)(**layer.config(), dtype=torch.bfloat16)
    assert torch.equal(again.factor(), torch.ones(C))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.factor(), wanted)
    x = tokens(torch.bfloat16)
    assert torch.equal(again(x), layer(x))
    # The same layer with the whole factor as its weight.
    config = {name: value for name, value in layer.config().items() if name != "weight_offset"}
    plain = type(layer)(**config)
    plain.load_state_dict(
        {k: v.float() for k, v in layer.state_dict().items()} | {"weight": wanted}
    )
    assert torch.equal(plain(x), layer(x))
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad.bfloat16())


def test_calibration_and_folding_know_the_offset() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), LikeGemma(), nn.Linear(C, C)).eval()
    wanted = model(tokens())
    dynorm.convert_(model, dynorm.find_norms(model, tokens()))
    dynorm.calibrate_(model, [tokens()])
    after = model(tokens())
    assert (after - wanted).norm() < 0.4 * wanted.norm()
    fold_(model, tokens())
    assert model[1].weight is None
    torch.testing.assert_close(model(tokens()), after, atol=1e-4, rtol=1e-4)


def test_llamas_rule_does_not_keep_a_linear_layer_from_folding_away() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(C, C), LikeLlama(), nn.Linear(C, C)).eval()
    dynorm.convert_(model, dynorm.find_norms(model, tokens()), to="linear")
    dynorm.calibrate_(model, [tokens()])
    before = model(tokens())
    fold_(model, tokens())
    assert isinstance(model[1], nn.Identity)
    torch.testing.assert_close(model(tokens()), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("to", ["dyisru", "linear"])
def test_a_float32_norm_and_head_in_a_folded_bfloat16_model(to: str) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(C, C), LikeLlama(), nn.Linear(C, C)).bfloat16()
    model = nn.Sequential(*body, LikeLlama(), nn.Linear(C, 5)).eval()
    x = tokens(torch.bfloat16)
    dynorm.convert_(model, dynorm.find_norms(model, x), to=to)
    dynorm.calibrate_(model, [x])
    before = model(x)
    fold_(model, x)
    assert model[3].weight is None
    after = model(x)
    assert after.dtype == torch.float32
    assert (after - before).norm() < 1e-2 * before.norm()
    for cast in CASTS.values():
        cast(model)
        if model[0].weight.dtype == model[4].weight.dtype:
            assert model(tokens(model[0].weight.dtype)).dtype == model[4].weight.dtype


def test_a_folded_layer_keeps_its_constants_apart() -> None:
    model = nn.Sequential(nn.Linear(C, C), LikeLlama(), nn.Linear(C, C)).bfloat16().eval()
    x = tokens(torch.bfloat16)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    for parameter in model[1].constant_parameters():
        parameter.data = parameter.data.float()
    fold_(model, x)
    assert model[1].weight is None
    assert model(x).dtype == torch.bfloat16


def test_a_folded_layer_follows_casts() -> None:
    model = nn.Sequential(nn.Linear(C, C), LikeLlama(), nn.Linear(C, C)).eval()
    dynorm.convert_(model, dynorm.find_norms(model, tokens()))
    fold_(model, tokens())
    assert model[1].weight is None
    for cast in CASTS.values():
        cast(model)
        x = tokens(model[0].weight.dtype)
        assert model(x).dtype == x.dtype


class CentredLlama(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, C))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * self.normalized(centred).to(x.dtype) + self.bias


@pytest.mark.parametrize("affine", [False, True])
def test_the_rmsnorm_of_a_fold_follows_casts(affine: bool) -> None:
    model = nn.Sequential(nn.Linear(C, C), CentredLlama(), nn.Linear(C, C)).eval()
    before = copy.deepcopy(model)
    fold_(model, tokens(), affine=affine, center=True)
    assert type(model[1]).__name__ == "RMSNorm"
    for cast in CASTS.values():
        cast(model)
        cast(before)
        given = model[0].weight.dtype
        assert model(tokens(given)).dtype == before(tokens(given)).dtype
        if not affine:
            # Input and weight of two dtypes.
            for x in (tokens(torch.bfloat16), tokens(torch.float64)):
                assert model[1](x).dtype == before[1](x).dtype


def test_a_bfloat16_constant_moves_at_small_rates_only_in_float32() -> None:
    x = tokens(torch.bfloat16)
    for in_float32 in (False, True):
        model, _ = pair(LikeLlama, torch.bfloat16)
        if in_float32:
            for parameter in model[1].constant_parameters():
                parameter.data = parameter.data.float()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        values = [float(model[1].log_beta.detach())]
        for _ in range(5):
            optimizer.zero_grad()
            y = model(x)
            y.float().square().mean().backward()
            optimizer.step()
            values.append(float(model[1].log_beta.detach()))
        assert y.dtype == torch.bfloat16
        assert all((a != b) == in_float32 for a, b in pairwise(values))
        # The norm's own tensors keep their dtype.
        assert dynorm.restore_(model)[1].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("norm", [LikeLlama, LikeT5, LikeGemma])
def test_compiled_in_one_graph(norm: type[nn.Module]) -> None:
    model, _ = pair(norm, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for given in (torch.float32, torch.bfloat16):
        ours, theirs = compiled(tokens(given)), model(tokens(given))
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_two_dtypes_and_a_rule_in_a_folder(tmp_path: object) -> None:
    def built() -> nn.Sequential:
        return nn.Sequential(nn.Linear(C, C).bfloat16(), LikeLlama(), nn.Linear(C, 5))

    model, x = built(), tokens(torch.bfloat16)
    dynorm.convert_(model, dynorm.find_norms(model, x))
    dynorm.calibrate_(model, [x])
    dynorm.save(model, f"{tmp_path}/m")
    # The dtypes are the folder's, not those of the model that it is loaded into.
    for target in (built(), built().bfloat16(), built().double()):
        loaded = dynorm.load(f"{tmp_path}/m", target)
        ours, theirs = model.state_dict(), loaded.state_dict()
        assert all(ours[name].dtype == theirs[name].dtype for name in ours)
        assert torch.equal(loaded(x), model(x))
        loaded.bfloat16()
        assert loaded(x).dtype == torch.bfloat16


def test_fixed_dtypes_of_older_folders_still_hold() -> None:
    layer = dynorm.DyISRU(C, output_dtype="float32")
    assert layer(tokens(torch.bfloat16)).dtype == torch.float32
    assert layer.config()["output_dtype"] == "float32"


@pytest.mark.parametrize("rule", ["int8", "inputs", "input+", "weight+int8"])
def test_a_rule_must_be_known(rule: str) -> None:
    with pytest.raises(ArgumentError, match=r"output_dtype must be .* got "):
        dynorm.DyISRU(C, output_dtype=rule)


@pytest.mark.parametrize("offset", [float("nan"), float("inf"), "1"])
def test_an_offset_must_be_finite(offset: object) -> None:
    with pytest.raises(ArgumentError, match=r"weight_offset.*finite"):
        dynorm.DyISRU(C, weight_offset=offset)
