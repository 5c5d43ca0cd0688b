"""Static int8 scales: the bounds hold, the readers are found, and torchao gets the scales of the layers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import dynorm
from benchmarks.compiled import converted, first, inputs, tiny_model
from dynorm.layers import PointwiseNorm
from dynorm.quantize import (
    Reader,
    find_readers,
    observed_ranges,
    output_bounds,
    output_range,
    quantize_,
    static_scale,
)

C = 16
BOUNDED = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf]


def layer_of(cls: type[PointwiseNorm], **options: Any) -> PointwiseNorm:
    layer = cls(C, center=True, **options).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(
                torch.randn_like(parameter)
                if name in ("weight", "bias", "center")
                else 0.7 + 0 * parameter
            )
    return layer


@pytest.mark.parametrize(
    "options", [{}, {"scale": -3.0}, {"bias": False}, {"elementwise_affine": False}], ids=str
)
@pytest.mark.parametrize("cls", BOUNDED)
def test_the_bound_holds_and_is_reached(cls: type[PointwiseNorm], options: dict[str, Any]) -> None:
    layer = layer_of(cls, **options)
    low, high = output_range(layer)
    y = layer(
        torch.cat([torch.randn(1000, C) * 1000, torch.full((1, C), 1e9), torch.full((1, C), -1e9)])
    ).detach()
    assert (y >= low - 1e-4).all()
    assert (y <= high + 1e-4).all()
    assert_close(y.amax(0), high)
    assert_close(y.amin(0), low)
    weight = 1.0 if layer.weight is None else layer.weight.detach().abs()
    bias = 0.0 if layer.bias is None else layer.bias.detach().abs()
    assert_close(output_bounds(layer), abs(layer.scale) * weight * torch.ones(C) + bias)


@pytest.mark.parametrize("cls", [*BOUNDED, dynorm.LinearControl])
def test_the_range_of_so_many_sigmas_is_the_layer_at_so_many_sigmas(
    cls: type[PointwiseNorm],
) -> None:
    layer = layer_of(cls)
    with torch.no_grad():
        sigma = (layer.beta() / C).sqrt()
        ends = [layer((layer.center + sign * 3 * sigma).expand(1, C))[0] for sign in (-1, 1)]
    low, high = output_range(layer, sigmas=3)
    assert_close(low, torch.minimum(*ends))
    assert_close(high, torch.maximum(*ends))


def test_the_range_of_sigmas_tends_to_the_bound() -> None:
    layer = layer_of(dynorm.Derf)
    assert_close(output_range(layer, sigmas=1e6), output_range(layer))


def test_bounds_are_in_float32_at_least() -> None:
    assert output_bounds(dynorm.DyISRU(C, dtype=torch.bfloat16)).dtype == torch.float32
    assert output_bounds(dynorm.DyISRU(C, dtype=torch.float64)).dtype == torch.float64


def test_an_annealed_layer_has_its_bound_at_the_end_only() -> None:
    layer = dynorm.layers.AnnealedDyISRU(C)
    with pytest.raises(dynorm.errors.ArgumentError, match=r"t = 1.*0: call finalize_"):
        output_bounds(layer)
    layer.set_t_(1.0)
    assert_close(output_bounds(layer), torch.full((C,), math.sqrt(C - 1)))


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (nn.LayerNorm(C), {}, "point-wise.*got LayerNorm"),
        (dynorm.LinearControl(C), {}, "LinearControl.*bound.*sigmas"),
        (dynorm.DyISRU(C), {"sigmas": 0.0}, "sigmas.*got 0.0"),
        (
            dynorm.DyISRU(C),
            {"sigmas": math.nan},
            "sigmas.*got nan",
        ),
    ],
)
def test_what_has_no_bound_is_refused(layer: Any, options: dict[str, float], message: str) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=message):
        output_range(layer, **options)


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_cover_the_range(symmetric: bool) -> None:
    low, high = torch.tensor([-1.0, 0.5, -4.0, 0.0]), torch.tensor([3.0, 2.0, -1.0, 0.0])
    scale, zero = static_scale(low, high, symmetric=symmetric)
    assert zero.dtype == torch.int8
    for y in (low, high, torch.zeros(4)):
        q = ((y / scale).round() + zero).clamp(-128, 127)
        assert ((q - zero) * scale - y).abs().max() <= 0.51 * scale.max()
    assert not symmetric or not zero.any()


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=r"low.*exceed"):
        static_scale(torch.tensor(low), torch.tensor(high))


class Net(nn.Module):
    """A residual block: a layer that two linear layers read, and one that a residual reads too."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two
        self.a, self.b, self.c = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = self.two(self.a(y) * self.b(y))
        return z + self.c(z)


class Idle(Net):
    """It has layers and calls none."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def net() -> Net:
    return Net(layer_of(dynorm.DyISRU), layer_of(dynorm.DyT)).eval()


def test_readers_are_found() -> None:
    assert find_readers(net(), torch.randn(2, 5, C)) == [
        Reader("a", "one", 3, True, peers=("a", "b")),
        Reader("b", "one", 3, True, peers=("a", "b")),
        Reader("c", "two", 3, False, peers=("c",)),
    ]


def test_readers_of_transformers() -> None:
    pytest.importorskip("transformers")
    counts = {}
    for kind in ("llama", "bert", "vit", "gpt2"):
        example = inputs(kind, 2, 8)
        readers = find_readers(converted(tiny_model(kind), example), **example)
        clear = [reader for reader in readers if reader.refused is None]
        assert {r.refused for r in readers if r not in clear} == {"it reads no point-wise layer"}
        assert all(
            reader.layer is None and reader.ndim for reader in readers if reader not in clear
        )
        counts[kind] = (len(readers), len(clear), sum(reader.alone for reader in readers))
    # Query, key, value, gate and up of Llama; of pre-norm models every output is read by linear
    # layers only. The others come after attention or an activation; BERT has a pooler, and GPT-2's
    # linear layers are Conv1D.
    assert counts == {"llama": (7, 5, 5), "bert": (7, 4, 0), "vit": (7, 4, 4), "gpt2": (4, 2, 2)}


class Twice(nn.Module):
    """One linear layer that reads two things."""

    def __init__(self, second: nn.Module, *, flat: bool = False) -> None:
        super().__init__()
        self.norm, self.second, self.linear, self.flat = (
            layer_of(dynorm.DyISRU),
            second,
            nn.Linear(C, C),
            flat,
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(x[0] if self.flat else x)
        return self.linear(self.norm(x)).sum() + self.linear(y).sum()


class Functional(nn.Module):
    """A weight that is used where no hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = layer_of(dynorm.DyISRU), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(y) + nn.functional.linear(y, self.linear.weight)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(nn.ReLU()), "it reads other tensors too"),
        (Twice(dynorm.DyT(C)), "it reads several layers: norm, second"),
    ],
)
def test_unclear_readers_are_refused_and_left_alone(model: nn.Module, reason: str) -> None:
    (reader,) = find_readers(model.eval(), torch.randn(2, C))
    assert reader.refused == reason
    assert not reader.alone
    with pytest.raises(dynorm.errors.ModelError, match=r"linear.*quantize"):
        quantize_(model, [reader])


def test_several_numbers_of_dimensions_are_refused() -> None:
    norm = layer_of(dynorm.DyISRU)
    model = Twice(norm, flat=True)
    model.norm = norm
    (reader,) = find_readers(model.eval(), torch.randn(2, 3, C))
    assert reader.refused == "it reads tensors of 2 and 3 dimensions"


def test_a_weight_used_behind_the_module_is_another_reader() -> None:
    (reader,) = find_readers(Functional().eval(), torch.randn(2, C))
    assert not reader.alone


def test_an_output_that_the_model_returns_is_not_folded() -> None:
    class Returns(Functional):
        def forward(self, x: Tensor) -> Any:
            y = self.norm(x)
            return {"out": self.linear(y), "hidden": [y]}

    (reader,) = find_readers(Returns().eval(), torch.randn(2, C))
    assert not reader.alone


def test_bad_models_are_refused() -> None:
    x = torch.randn(2, C)
    for model, message in [
        (
            nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C)).eval(),
            "point-wise layers",
        ),
        (nn.Sequential(dynorm.DyISRU(C), nn.Linear(C, C)), "eval mode"),
        (nn.Sequential(dynorm.DyISRU(C), nn.ReLU(), nn.Linear(C, C)).eval(), "but none does"),
    ]:
        with pytest.raises(dynorm.errors.ModelError, match=message):
            find_readers(model, x)


class Mixed(nn.Module):
    """A linear layer that reads a layer, and one that reads an activation of widely different channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            layer_of(dynorm.DyISRU),
            nn.Linear(C, 4 * C),
            nn.Linear(4 * C, C),
        )
        with torch.no_grad():
            self.up.weight.mul_(10 ** torch.linspace(-1, 1, 4 * C)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x)).relu())
        return y


def mixed(batches: int = 4) -> tuple[nn.Module, list[Tensor]]:
    return Mixed().eval().requires_grad_(False), [torch.randn(8, 5, C) for _ in range(batches)]


def test_a_linear_layer_of_anything_takes_its_own_range() -> None:
    pytest.importorskip("torchao")
    model, batches = mixed()
    readers = find_readers(model, batches[0])
    assert [(r.linear, r.layer, r.refused) for r in readers] == [
        ("up", "norm", None),
        ("down", None, "it reads no point-wise layer"),
    ]
    assert [r.linear for r in quantize_(copy.deepcopy(model), readers)] == ["up"]
    ranges = observed_ranges(model, batches, inputs_of=["up", "down"])
    hidden = model.up(model.norm(torch.cat(batches))).relu().flatten(0, -2)
    assert_close(ranges["down"], (hidden.amin(0), hidden.amax(0)))
    errors = {}
    for power in (False, 0.5, 0.75, True):
        quantized = copy.deepcopy(model)
        assert len(quantize_(quantized, readers, ranges=ranges, per_channel=power)) == 2
        errors[power] = error_of(model, quantized, batches[0])
    # A wide range costs the weights' rounding or the inputs': shared between them it costs least.
    assert max(errors[0.5], errors[0.75]) < errors[True] < errors[False]
    assert errors[0.75] < 0.015


def test_a_power_of_the_scales_is_folded() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    scales = output_bounds(model.one) / 127
    weight = model.one.weight.clone()
    quantize_(model, find_readers(model, x), per_channel=0.75)
    assert_close(model.one.weight, weight / scales**0.75)
    assert_close(model.a.weight.act_quant_scale, scales.max().pow(0.25).reshape(1, 1, 1))


def test_scales_are_folded_into_a_weight_that_is_one_less_than_the_factor() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    factor = model.one.weight.detach().clone()
    model.one.weight_offset = 1.0
    model.one.set_factor_(factor)
    assert_close(model.one.weight.detach(), factor - 1)
    scales = output_bounds(model.one) / 127
    quantize_(model, find_readers(model, x), per_channel=0.75)
    assert_close(model.one.factor().detach(), factor / scales**0.75)


@pytest.mark.parametrize("power", [-0.1, 1.5, math.nan, "all"])
def test_a_power_outside_of_0_to_1_is_refused(power: Any) -> None:
    model, x = net(), torch.randn(2, C)
    readers = find_readers(model, x)
    assert_refused_unchanged(
        model, readers, dynorm.errors.ArgumentError, "power.*0.*1", per_channel=power
    )


def test_readers_of_several_ranges_are_not_folded_into_their_layer() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    ranges = observed_ranges(model, [x]) | observed_ranges(model, [x], inputs_of=["a"])
    ranges["a"] = (2 * ranges["a"][0], 2 * ranges["a"][1])
    quantized = copy.deepcopy(model)
    quantize_(quantized, find_readers(model, x), ranges=ranges, per_channel=True)
    assert torch.equal(quantized.one.weight, model.one.weight)
    assert error_of(model, quantized, x) < 0.03


def test_inputs_of_nothing_are_refused() -> None:
    with pytest.raises(dynorm.errors.ModelError, match=r"inputs_of.*modules"):
        observed_ranges(net(), [torch.randn(2, C)], inputs_of=["nowhere"])


def error_of(model: nn.Module, quantized: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        want = model(x)
        return float((quantized(x) - want).norm() / want.norm())


OPTIONS: list[dict[str, Any]] = [{}, {"symmetric": False}, {"per_channel": True}, {"sigmas": 20.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantized_is_close(options: dict[str, Any], dtype: torch.dtype) -> None:
    torchao = pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    quantized = copy.deepcopy(model).to(dtype)
    done = quantize_(quantized, find_readers(quantized, x.to(dtype)), **options)
    assert [reader.linear for reader in done] == ["a", "b", "c"]
    for name in "abc":
        weight = quantized.get_submodule(name).weight
        assert isinstance(weight, torchao.quantization.Int8Tensor)
        assert weight.act_quant_scale is not None
    with torch.no_grad():
        assert quantized(x.to(dtype)).dtype == dtype
        want = model(x)
        assert (quantized(x.to(dtype)).float() - want).norm() / want.norm() < 0.03


def test_scales_are_those_of_the_bound() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    bound = output_bounds(model.one).max()
    quantize_(model, find_readers(model, x))
    assert_close(model.a.weight.act_quant_scale, (bound / 127).reshape(1, 1, 1))


def test_a_scale_a_channel_is_folded_where_nothing_else_reads() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    one, two = output_bounds(model.one), output_bounds(model.two)
    before = copy.deepcopy(model)
    quantize_(model, find_readers(model, x), per_channel=True)
    assert_close(output_bounds(model.one), torch.full((C,), 127.0))
    assert model.a.weight.act_pre_scale is None
    assert_close(output_bounds(model.two), two)
    assert_close(model.c.weight.act_pre_scale, 127 / two)
    assert_close(model.a.weight.dequantize(), before.a.weight * one / 127, rtol=0.02, atol=1e-3)


def test_nothing_is_folded_when_a_reader_is_left_out() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(8, 5, C)
    quantized = copy.deepcopy(model)
    quantize_(quantized, find_readers(quantized, x)[:1], per_channel=True)
    assert torch.equal(quantized.one.weight, model.one.weight)
    assert quantized.a.weight.act_pre_scale is not None
    assert error_of(model, quantized, x) < 0.03


def test_seen_ranges_serve_as_well() -> None:
    pytest.importorskip("torchao")
    model, x = net(), 0.1 * torch.randn(8, 5, C)
    readers = find_readers(model, x)
    with torch.no_grad():
        seen = {
            "one": model.one(x),
            "two": model.two(model.a(model.one(x)) * model.b(model.one(x))),
        }
    whole, channels, bound = (copy.deepcopy(model) for _ in range(3))
    quantize_(bound, readers)
    quantize_(whole, readers, ranges={path: (y.min(), y.max()) for path, y in seen.items()})
    flat = {path: y.flatten(0, -2) for path, y in seen.items()}
    quantize_(
        channels,
        readers,
        ranges={path: (y.amin(0), y.amax(0)) for path, y in flat.items()},
        per_channel=True,
    )
    assert_close(whole.c.weight.act_quant_scale, (seen["two"].abs().max() / 127).reshape(1, 1, 1))
    assert_close(channels.one.weight, model.one.weight * 127 / flat["one"].abs().amax(0))
    assert error_of(model, whole, x) < error_of(model, bound, x)


def test_ranges_are_what_the_layers_gave() -> None:
    model, batches = net(), [0.1 * torch.randn(8, 5, C), 3 * torch.randn(2, 7, C)]
    # In training mode it would draw numbers.
    model.a = nn.Sequential(model.a, nn.Dropout(0.5))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = observed_ranges(model, iter(batches))
    assert all(module.training for module in model.modules())
    model.eval()
    with torch.no_grad():
        ones = torch.cat([model.one(x).flatten(0, -2) for x in batches])
        twos = torch.cat(
            [model.two(model.a(y) * model.b(y)).flatten(0, -2) for y in map(model.one, batches)]
        )
    for path, y in (("one", ones), ("two", twos)):
        assert_close(found[path], (y.amin(0), y.amax(0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_ranges_of_padding_channels_first_and_half_precision() -> None:
    class Masked(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.layer = dynorm.DyISRU(C, dim=dim)

        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            y: Tensor = self.layer(x)
            return y

    x, mask = torch.randn(2, 4, C), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    x[mask == 0] = 1e6
    model = Masked(-1)
    low, high = observed_ranges(model, [{"x": x, "attention_mask": mask}])["layer"]
    y = model(x).detach()[mask == 1]
    assert_close((low, high), (y.amin(0), y.amax(0)))
    first = observed_ranges(Masked(1), [torch.randn(2, C, 3)])["layer"][0]
    assert first.shape == (C,)
    half = observed_ranges(Masked(-1).bfloat16(), [torch.randn(2, 3, C, dtype=torch.bfloat16)])[
        "layer"
    ][0]
    assert half.dtype == torch.float32


def test_ranges_of_nothing_are_refused() -> None:
    x = torch.randn(2, 5, C)
    with pytest.raises(dynorm.errors.ModelError, match="point-wise layers"):
        observed_ranges(nn.Linear(C, C), [x])
    with pytest.raises(dynorm.errors.DataError, match=r"least.*batch"):
        observed_ranges(net(), [])
    with pytest.raises(dynorm.errors.DataError, match="must be finite"):
        observed_ranges(net(), [x * math.nan])
    with pytest.raises(dynorm.errors.ModelError, match="plain"):
        observed_ranges(nn.DataParallel(net()), [x])
    with pytest.raises(dynorm.errors.DataError, match="reached none"):
        observed_ranges(Idle(dynorm.DyISRU(C), dynorm.DyT(C)), [x])


def assert_refused_unchanged(
    model: nn.Module, readers: Any, kind: type[Exception], message: str, **options: Any
) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(kind, match=message):
        quantize_(model, readers, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_refused_call_leaves_the_model_alone() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(2, C)
    readers = find_readers(model, x)
    for options, message in [
        ({"per_channel": True, "symmetric": False}, "scales per channel must be symmetric"),
        ({"ranges": {"one": (x.min(), x.max())}}, "ranges must hold the layer two, got one"),
        (
            {"ranges": {"one": (-x[0, 1:].abs(), x[0, 1:].abs())}},
            r"for a must be two numbers or \(16,\), got \(15,\)",
        ),
        ({"sigmas": -1.0}, "sigmas must be a positive"),
    ]:
        assert_refused_unchanged(model, readers, dynorm.errors.ArgumentError, message, **options)
    wrong = [*readers, Reader("nowhere", "one", 2, False)]
    assert_refused_unchanged(model, wrong, dynorm.errors.ModelError, "readers.*model")
    wrong = [*readers, Reader("a", "b", 2, False)]
    assert_refused_unchanged(model, wrong, dynorm.errors.ModelError, "find_readers again")
    linear = Net(layer_of(dynorm.DyISRU), layer_of(dynorm.LinearControl)).eval()
    assert_refused_unchanged(
        linear, find_readers(linear, x), dynorm.errors.ArgumentError, "LinearControl has no bound"
    )
    double = net().double()
    readers = find_readers(double, x.double())
    assert_refused_unchanged(
        double, readers, dynorm.errors.ArgumentError, "torchao, got torch.float64"
    )


def test_quantizing_twice_is_refused() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(2, C)
    readers = find_readers(model, x)
    quantize_(model, readers)
    with pytest.raises(dynorm.errors.ModelError, match=r"hold.*Int8Tensor"):
        quantize_(model, readers)


def test_a_quantized_model_compiles_to_one_graph() -> None:
    pytest.importorskip("torchao")
    model, x = net(), torch.randn(2, C)
    quantize_(model, find_readers(model, x))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x), model(x))


def decoder(kind: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A converted decoder, two channels of whose norms are far larger than the others, as in real ones; and batches."""
    pytest.importorskip("transformers")
    model = tiny_model(kind, 2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and ("norm" in name or "ln_" in name) and "weight" in name:
                weight[[3, 7]] *= 30
            elif (
                weight.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name
            ):
                # Their readers weigh them less.
                (weight if kind == "gpt2" else weight.T)[[3, 7]] /= 30
    batches = [inputs(kind, n, 16) for n in (2, 3, 4, 5)]
    dynorm.convert_(model, dynorm.find_norms(model, **batches[0]), witnesses=2)
    dynorm.calibrate_(model, batches[1:])
    return model.requires_grad_(False), batches


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_decoders_of_transformers(kind: str) -> None:
    torchao = pytest.importorskip("torchao")
    model, (test, *batches) = decoder(kind)
    want = first(model(**test))
    readers = find_readers(model, **test)
    ranges = observed_ranges(model, batches, inputs_of=[reader.linear for reader in readers])

    def error(quantized: nn.Module) -> float:
        return float((first(quantized(**test)) - want).norm() / want.norm())

    static = copy.deepcopy(model)
    assert quantize_(static, readers, ranges=ranges, per_channel=0.75) == readers
    paths = {reader.linear for reader in readers}
    for path in paths:
        module = static.get_submodule(path)
        assert type(module) is nn.Linear
        assert module.weight.act_quant_scale is not None
        assert module.weight.shape == (module.out_features, module.in_features)
    tensor, dynamic = copy.deepcopy(model), copy.deepcopy(static)
    quantize_(tensor, readers, ranges=ranges)
    # The same linear layers, the Conv1D among them replaced.
    for path in paths:
        place: Any = dynamic.get_submodule(path)
        old: Any = model.get_submodule(path)
        place.weight = nn.Parameter(
            old.weight if kind == "llama" else old.weight.T.contiguous(), requires_grad=False
        )
    dynamic.load_state_dict(
        {n: v for n, v in model.state_dict().items() if n.rpartition(".")[0] not in paths}, False
    )
    assert error(dynamic) < 1e-5
    config = torchao.quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    torchao.quantization.quantize_(dynamic, config, filter_fn=lambda _, path: path in paths)
    assert 3 * error(static) < error(dynamic) < error(tensor)
    assert error(static) < 0.03


def test_a_shared_conv1d_is_replaced_in_both_places() -> None:
    pytest.importorskip("torchao")
    utils = pytest.importorskip("transformers.pytorch_utils")

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one = layer_of(dynorm.DyISRU), utils.Conv1D(6, C)
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.one(y) + self.two(y)

    model, x = Shared().eval(), torch.randn(8, 5, C)
    quantized = copy.deepcopy(model)
    (reader,) = find_readers(quantized, x)
    assert (reader.linear, reader.alone, reader.refused) == ("one", True, None)
    quantize_(quantized, [reader])
    assert type(quantized.one) is nn.Linear
    assert quantized.one is quantized.two
    assert error_of(model, quantized, x) < 0.03


def test_the_model_of_images_of_transformers() -> None:
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    model = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    test, *batches = [{"pixel_values": torch.randn(n, 3, 28, 28)} for n in (2, 3, 4)]
    dynorm.convert_(model, dynorm.find_norms(model, **test), witnesses=2)
    dynorm.calibrate_(model, batches)
    readers = find_readers(model, **test)
    assert sum(reader.refused is None and reader.alone for reader in readers) == 8
    quantized = copy.deepcopy(model)
    ranges = observed_ranges(model, batches, inputs_of=[reader.linear for reader in readers])
    assert len(quantize_(quantized, readers, ranges=ranges, per_channel=0.75)) == 12
    with torch.no_grad():
        got, want = first(quantized(**test)), first(model(**test))
    assert (got - want).norm() / want.norm() < 0.02


def test_bert_of_transformers() -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("transformers")
    example = inputs("bert", 2, 8)
    model = converted(tiny_model("bert"), example)
    quantized = copy.deepcopy(model)
    quantize_(quantized, find_readers(model, **example), sigmas=8, per_channel=True)
    with torch.no_grad():
        got, want = first(quantized(**example)), first(model(**example))
    assert (got - want).norm() / want.norm() < 0.01
