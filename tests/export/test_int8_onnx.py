"""Static int8 in ONNX: onnxruntime multiplies integers, and gives what torch gives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import dynorm
from benchmarks.compiled import converted, first, inputs, tiny_model
from dynorm.quantize import Int8Table, find_readers, observed_ranges, quantize_

pytest.importorskip("transformers")
pytest.importorskip("torchao")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
exports = pytest.importorskip("benchmarks.exports")
# The exporter's own.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")


def operators(program: torch.onnx.ONNXProgram) -> Counter[str]:
    return Counter(node.op_type for node in program.model_proto.graph.node)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_decoder_in_static_int8(kind: str) -> None:
    example = inputs(kind, 2, 8)
    model = converted(tiny_model(kind), example).requires_grad_(False)
    want = first(model(**inputs(kind, 3, 13)))
    readers = find_readers(model, **example)
    ranges = observed_ranges(model, [example], inputs_of=[reader.linear for reader in readers])
    done = quantize_(model, readers, ranges=ranges, per_channel=0.75)
    program = exports.onnx_program(model, example)
    assert operators(program)["MatMulInteger"] == len(done) == {"llama": 7, "gpt2": 4}[kind]
    other = inputs(kind, 3, 13)
    (got,) = exports.onnx_session(program).run(None, {"input_ids": other["input_ids"].numpy()})
    ours = first(model(**other))
    # Where a value lies between two steps, a difference in the last digit may take it to the other
    # one.
    assert (torch.from_numpy(got) - ours).norm() < 0.1 * (ours - want).norm()


def test_a_table_is_one_look_up() -> None:
    layer = dynorm.DyISRU(6, center=True).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.2, 1.5)
    model = nn.Sequential(
        Int8Table(layer, (torch.tensor(-3.0), torch.tensor(2.0)), symmetric=False)
    ).eval()
    for x in (torch.randint(-128, 128, (2, 8, 6), dtype=torch.int8), torch.randn(2, 8, 6)):
        given: dict[str, Any] = {"input": x}
        program = exports.onnx_program(model, given)
        found = operators(program)
        assert found["Gather"] + found["GatherND"] == 1
        assert not {"Sqrt", "Pow", "Tanh", "Erf"} & found.keys()
        other = x.flip(0)[:1].repeat(3, 1, 1)
        (got,) = exports.onnx_session(program).run(None, {"input": other.numpy()})
        assert torch.equal(torch.from_numpy(got), model(other))
