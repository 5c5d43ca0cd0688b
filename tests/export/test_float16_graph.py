"""Graphs that another tool converts to float16: in onnxruntime, and with every single result rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import dynorm
from dynorm.layers import PointwiseNorm

# The exporter's own.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
C = 64
SIZES = [1e-3, 1.0, 100.0, 300.0, 1e3, 1e4]
LAYERS: list[type[PointwiseNorm]] = [
    dynorm.DyISRU,
    dynorm.DyT,
    dynorm.Derf,
    dynorm.LinearControl,
]


class RoundedToFloat16(TorchDispatchMode):
    """Round the result of every operation in float32 to float16, as a graph of float16 does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map(in_float16, func(*args, **(kwargs or {})))


def in_float16(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.half().float()
    return value


def tokens(size: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(64, C, generator=generator) * size).half().float()


def layer_of(cls: type[PointwiseNorm], per_channel: bool = False) -> PointwiseNorm:
    layer = cls(C, center=True, per_channel=per_channel).eval()
    layer.set_witnesses_([3, 40], [0.3, 2.0])
    return layer


def require_close(found: Tensor, layer: PointwiseNorm, x: Tensor) -> None:
    expected = layer.double()(x.double()).detach()
    error = float((found.double() - expected).norm() / expected.norm())
    assert error <= 2e-3
    assert int((found == 0).sum()) == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cls", LAYERS)
def test_every_result_in_float16(cls: type[PointwiseNorm], size: float) -> None:
    for per_channel in (False, True):
        layer, x = layer_of(cls, per_channel), tokens(size)
        with torch.no_grad(), RoundedToFloat16():
            # A mode sees the definition, which is also exported.
            found = layer(x)
        require_close(found, layer, x)


@pytest.mark.parametrize("cls", LAYERS)
def test_converted_by_onnxruntime(cls: type[PointwiseNorm]) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    layer = layer_of(cls)
    program = torch.onnx.export(layer, (tokens(1.0),), dynamo=True, verbose=False)
    assert program is not None
    graph = float16.convert_float_to_float16(program.model_proto).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert given.type == "tensor(float16)"
    for size in SIZES:
        x = tokens(size)
        (found,) = session.run(None, {given.name: x.half().numpy()})
        require_close(torch.from_numpy(found), layer, x)
        layer.float()
