"""Export all-MiniLM-L6-v2 with its norms, with strict layers and with lines: ``python -m benchmarks.deploy``.

Each is exported to ONNX, compared with torch, and timed in onnxruntime side by side on one thread.
The results, nodes, reductions over the channels and times, are benchmarks/results/deploy.json.
"""

import copy
import io
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import dynorm
from benchmarks.timing import machine, measure, ratio
from dynorm.jobs import encode, load_pretrained, make_batches
from dynorm.jobs.texts import standard_library_docstrings
from tools.demo_model import folder

RESULTS = Path(__file__).parent / "results" / "deploy.json"
REDUCTIONS = ("LayerNormalization", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2")
TOKENS = 128
ROUNDS = 21


class Hidden(nn.Module):
    """The model as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the last hidden states."""
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def exported(model: nn.Module, example: tuple[Tensor, Tensor]) -> bytes:
    """Return the model as an ONNX file."""
    buffer = io.BytesIO()
    torch.onnx.export(Hidden(model).eval(), example, dynamo=True, verbose=False).save(buffer)
    return buffer.getvalue()


def session_of(content: bytes) -> onnxruntime.InferenceSession:
    """Return an inference session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Convert, export, compare, time, and write the file."""
    pretrained = load_pretrained(folder())
    texts = encode(pretrained, standard_library_docstrings()[::40])
    batches = make_batches(pretrained, texts, 32)
    models = {"its norms": pretrained.model}
    for title, to in (("DyISRU", "dyisru"), ("a line", "linear")):
        model = copy.deepcopy(pretrained.model)
        sites = dynorm.find_norms(model, **batches[0])
        dynorm.convert_(model, sites, to)
        dynorm.calibrate_(model, batches)
        dynorm.fold_(model, **batches[0])
        models[title] = model.eval()
    ids = torch.randint(1000, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    example = (ids, torch.ones_like(ids))
    feed: dict[str, Any] = {}
    calls = {}
    rows = {}
    for title, model in models.items():
        content = exported(model, example)
        session = session_of(content)
        names = [node.name for node in session.get_inputs()]
        feed = {name: value.numpy() for name, value in zip(names, example, strict=True)}
        with torch.no_grad():
            expected = Hidden(model)(*example).numpy()
        (result,) = session.run(None, feed)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)
        kinds = Counter(node.op_type for node in onnx.load_from_string(content).graph.node)
        rows[title] = {
            "nodes": sum(kinds.values()),
            "reductions": {kind: kinds[kind] for kind in REDUCTIONS if kinds[kind]},
        }
        calls[title] = partial(session.run, None, feed)
    times = measure(calls, ROUNDS)
    for title, row in rows.items():
        row["time_over_norms"] = ratio(times[title], times["its norms"])
        print(title, json.dumps(row), flush=True)
    document = {"command": "python -m benchmarks.deploy", "machine": machine(), "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
