"""Static int8 in ONNX: onnxruntime multiplies integers, and gives what torch gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from benchmarks.compiled import converted, first, inputs, tiny_model
from dynorm.quantize import find_readers, observed_ranges, quantize_

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
