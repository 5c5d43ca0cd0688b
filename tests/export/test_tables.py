"""Tables of 256 entries: equal to the layer between a dequantization and a quantization, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import dynorm
from dynorm.layers import PointwiseNorm
from dynorm.quantize import Int8Table, find_readers, observed_ranges, quantize_, static_scale

C = 7
LAYERS = [dynorm.DyISRU, dynorm.DyT, dynorm.Derf, dynorm.LinearControl]
WHOLE = (torch.tensor(-4.0), torch.tensor(5.0))
Range = tuple[Tensor, Tensor]


def layer_of(cls: type[PointwiseNorm], shape: Any = C, **options: Any) -> PointwiseNorm:
    layer = cls(shape, center=True, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.3, 1.5)
    return layer.requires_grad_(False)


def quantized(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)


def by_hand(
    layer: PointwiseNorm, codes: Tensor, inputs: Range, outputs: Range, symmetric: bool
) -> Tensor:
    """Return the int8 outputs of a layer with its channels last, or at dim 1."""
    scale, zero = static_scale(*inputs, symmetric=symmetric)
    if scale.ndim and layer.dim == 1:
        scale, zero = scale[:, None], zero[:, None]
    return quantized(
        layer((codes.float() - zero) * scale), *static_scale(*outputs, symmetric=symmetric)
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (C, {}),
        (C, {"per_channel": True}),
        (C, {"elementwise_affine": False}),
        (C, {"dim": 1}),
        ((3, 5), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", LAYERS)
def test_a_table_is_the_layer(
    cls: type[PointwiseNorm], shape: Any, options: dict[str, Any], wide: bool, symmetric: bool
) -> None:
    layer = layer_of(cls, shape, **options)
    sizes = layer.normalized_shape
    inputs = (
        (-3 * torch.rand(sizes), 3 * torch.rand(sizes))
        if wide
        else (torch.tensor(-3.0), torch.tensor(2.5))
    )
    table = Int8Table(layer, inputs, WHOLE, symmetric=symmetric)
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(3)[torch.randperm(768)]
    codes = (
        codes[: 1 * C * 9].reshape(1, C, 9)
        if layer.dim == 1
        else codes[: 9 * layer.channels].reshape(9, *sizes)
    )
    expected = by_hand(layer, codes, inputs, WHOLE, symmetric)
    assert torch.equal(table(codes), expected)
    assert table.table.nbytes == (
        256 if options == {"elementwise_affine": False} and not wide else 256 * math.prod(sizes)
    )


@pytest.mark.parametrize("cls", LAYERS[:3])
def test_the_output_without_a_range_is_that_of_the_bound(cls: type[PointwiseNorm]) -> None:
    layer = cls(C, elementwise_affine=False)
    table = Int8Table(layer, (torch.tensor(-1e6), torch.tensor(1e6)))
    assert table(torch.tensor([-127, 0, 127], dtype=torch.int8).repeat(C, 1).T).tolist() == [
        [-127] * C, [0] * C, [127] * C
    ]  # fmt: skip
    assert_close(table.output_scale, torch.tensor(abs(layer.scale) / 127))


def test_a_floating_point_input_is_quantized_and_given_back() -> None:
    layer = layer_of(dynorm.DyISRU)
    table = Int8Table(layer, (torch.tensor(-3.0), torch.tensor(3.0)), WHOLE)
    x = torch.randn(4, 5, C).clamp(-3, 3)
    assert (table(x) - layer(x)).abs().max() < 0.2
    codes = quantized(x, table.input_scale, table.input_zero)
    assert torch.equal(table(x), table(codes) * table.output_scale)
    assert table(x.bfloat16()).dtype == torch.bfloat16
    # Beyond its range it saturates.
    assert torch.equal(table(100 * torch.ones(1, C)), table(3 * torch.ones(1, C)))
    assert table(x[:0]).shape == (0, 5, C)


def test_it_is_saved_and_moved_with_its_model() -> None:
    inputs = (torch.tensor(-3.0), torch.tensor(3.0))
    one, two = (Int8Table(layer_of(dynorm.DyISRU), inputs, WHOLE) for _ in range(2))
    codes = torch.randint(-128, 128, (5, C), dtype=torch.int8)
    assert not torch.equal(one(codes), two(codes))
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(codes), two(codes))


@pytest.mark.parametrize(
    ("layer", "ranges", "message"),
    [
        (
            dynorm.DyISRU(C, witnesses=2),
            (WHOLE, WHOLE),
            r"no witnesses, got \(0, 1\): .* keep the layer",
        ),
        (nn.LayerNorm(C), (WHOLE, WHOLE), "a point-wise layer of dynorm, got LayerNorm"),
        (dynorm.layers.AnnealedDyISRU(C), (WHOLE, WHOLE), "must be at t = 1"),
        (dynorm.LinearControl(C), (WHOLE,), "LinearControl has no bound"),
        (
            dynorm.DyISRU(C),
            ((torch.zeros(3), torch.ones(3)), WHOLE),
            r"two numbers or of \(7,\), got \(3,\)",
        ),
        (dynorm.DyISRU(C), (WHOLE[::-1], WHOLE), "low must not exceed high"),
    ],
)
def test_what_no_table_holds_is_refused(layer: Any, ranges: Any, message: str) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=message):
        Int8Table(layer, *ranges)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.zeros(2, C, dtype=torch.int32),
            "must be a real floating point tensor, got torch.int32: give int8",
        ),
        (torch.zeros(2, C + 1), r"x must have \(7,\) at dim \(-1,\), got \(8,\)"),
    ],
)
def test_what_a_table_cannot_read_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(dynorm.errors.ArgumentError, match=message):
        Int8Table(layer_of(dynorm.DyISRU), WHOLE, WHOLE)(x)


def test_a_table_in_the_place_of_its_layer() -> None:
    """Its readers are already in int8, and their inputs are already rounded."""
    pytest.importorskip("torchao")
    model = (
        nn.Sequential(nn.Linear(C, C), layer_of(dynorm.DyISRU), nn.Linear(C, C))
        .eval()
        .requires_grad_(False)
    )
    batches = [torch.randn(8, 5, C) for _ in range(4)]
    want = model(batches[0])
    readers = [reader for reader in find_readers(model, batches[0]) if reader.refused is None]
    quantize_(model, readers, ranges=observed_ranges(model, batches), per_channel=True)
    whole = torch.tensor(127.0)
    inputs = observed_ranges(model, batches, inputs_of=["1"])["1"]
    table = Int8Table(model.get_submodule("1"), inputs, (-whole, whole))
    model.set_submodule("1", table)
    y = table(batches[0])
    assert torch.equal(y, y.round())
    assert y.abs().max() > 64
    assert (model(batches[0]) - want).norm() / want.norm() < 0.03
