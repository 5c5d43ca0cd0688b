"""The loaders of real models in ``tools``, on parts of such files that are made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from tools import demo_figures
from tools.pictures import SHORTER_SIDE, smaller


def test_weights_are_named_by_their_nodes_and_turned() -> None:
    # Its import takes seconds, in each process that collects the tests.
    import onnx
    from onnx import helper, numpy_helper

    from tools.dinov2 import weights

    draw = np.random.default_rng(0)
    tensors = {
        "backbone.layernorm.bias": draw.random(2),
        "onnx::MatMul_9": draw.random((2, 3)),
        "onnx::Reshape_5": draw.random((1, 4, 2)),
        "onnx::Concat_7": draw.random((1, 1, 2)),
        "decoder.weight": draw.random(2),
    }
    nodes = [
        helper.make_node(
            "MatMul",
            ["x", "onnx::MatMul_9"],
            ["y"],
            name="/backbone/encoder/layer.0/mlp/fc1/MatMul",
        ),
        helper.make_node(
            "MatMul", ["x", "y"], ["z"], name="/backbone/encoder/layer.0/attention/attention/MatMul"
        ),
    ]
    graph = onnx.GraphProto(
        node=nodes,
        initializer=[numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    found = weights(graph)
    assert set(found) == {
        "layernorm.bias",
        "encoder.layer.0.mlp.fc1.weight",
        "embeddings.position_embeddings",
    }
    turned = torch.from_numpy(tensors["onnx::MatMul_9"]).T
    assert torch.equal(found["encoder.layer.0.mlp.fc1.weight"], turned)
    positions = np.concatenate([tensors["onnx::Concat_7"], tensors["onnx::Reshape_5"]], 1)
    assert torch.equal(found["embeddings.position_embeddings"], torch.from_numpy(positions))


def test_pictures_become_smaller_on_white() -> None:
    image = Image.new("RGBA", (3 * SHORTER_SIDE, 2 * SHORTER_SIDE), (255, 0, 0, 0))
    assert smaller(image).size == (SHORTER_SIDE * 3 // 2, SHORTER_SIDE)
    assert smaller(image).getpixel((0, 0)) == (255, 255, 255)
    assert smaller(Image.new("RGB", (9, 7), "red")).size == (9, 7)


def report_of(steps: int, cosine: float) -> dict[str, Any]:
    """A report of ``make demo``, with a mean cosine for each stage and the end."""

    def output(plus: float, samples: int) -> dict[str, float]:
        return {"samples": samples, "cosine_mean": cosine + plus, "cosine_min": 0.5}

    stages: dict[str, Any] = {
        "calibrate": {"output": output(0.0, 64)},
    }
    if steps:
        stages["distill"] = {"output": output(0.02, 64), "steps": steps}
    recipe = {"to": "dyisru"}
    return {"output": output(0.03, 512), "meta": {"recipe": recipe, "stages": stages}}


def test_the_figures_of_the_demo_are_shown_next_to_the_committed_ones() -> None:
    lines = demo_figures.comparison(report_of(9, 0.9), report_of(9, 0.8)).splitlines()
    rows = [line for line in lines if "mean cosine" in line]
    assert [(row.split("  ")[0], row.split()[-2:]) for row in rows] == [
        ("calibrated, 64 samples", ["0.9000", "0.8000"]),
        ("and distilled, 64 samples", ["0.9200", "0.8200"]),
        ("at the end, 512 samples", ["0.9300", "0.8300"]),
    ]
    assert "not comparable" not in "\n".join(lines)


def test_a_demo_with_other_options_is_compared_only_up_to_them() -> None:
    shown = demo_figures.comparison(report_of(0, 0.9), report_of(9, 0.8))
    assert "calibrated" in shown
    assert "distilled" not in shown
    assert "at the end" not in shown
    assert "not comparable: steps is 0 instead of 9." in shown
    other = report_of(9, 0.9)
    other["meta"]["stages"]["calibrate"]["output"]["samples"] = 3
    assert "other samples were held out" in demo_figures.comparison(other, report_of(9, 0.8))
