"""The loaders of real models in ``tools``, on parts of such files that are made here."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from PIL import Image

from tools.dinov2 import weights
from tools.pictures import SHORTER_SIDE, smaller


def test_weights_are_named_by_their_nodes_and_turned() -> None:
    draw = np.random.default_rng(0)
    tensors = {
        "backbone.layernorm.bias": draw.random(2),
        "onnx::MatMul_9": draw.random((2, 3)),
        "onnx::Reshape_5": draw.random((1, 4, 2)),
        "onnx::Concat_7": draw.random((1, 1, 2)),
        "decoder.weight": draw.random(2),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_9"], ["y"], name="/backbone/encoder/layer.0/mlp/fc1/MatMul"),
        helper.make_node("MatMul", ["x", "y"], ["z"], name="/backbone/encoder/layer.0/attention/attention/MatMul"),
    ]
    graph = onnx.GraphProto(
        node=nodes, initializer=[numpy_helper.from_array(value, name) for name, value in tensors.items()]
    )
    found = weights(graph)
    assert set(found) == {"layernorm.bias", "encoder.layer.0.mlp.fc1.weight", "embeddings.position_embeddings"}
    turned = torch.from_numpy(tensors["onnx::MatMul_9"]).T
    assert torch.equal(found["encoder.layer.0.mlp.fc1.weight"], turned)
    positions = np.concatenate([tensors["onnx::Concat_7"], tensors["onnx::Reshape_5"]], 1)
    assert torch.equal(found["embeddings.position_embeddings"], torch.from_numpy(positions))


def test_pictures_become_smaller_on_white() -> None:
    image = Image.new("RGBA", (3 * SHORTER_SIDE, 2 * SHORTER_SIDE), (255, 0, 0, 0))
    assert smaller(image).size == (SHORTER_SIDE * 3 // 2, SHORTER_SIDE)
    assert smaller(image).getpixel((0, 0)) == (255, 255, 255)
    assert smaller(Image.new("RGB", (9, 7), "red")).size == (9, 7)
