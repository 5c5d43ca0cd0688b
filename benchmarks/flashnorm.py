"""Measure ``dynorm fold --format flashnorm`` on a Llama's shapes with random weights: time and peak memory.

``python -m benchmarks.flashnorm FOLDER --size 8b`` writes the checkpoint into FOLDER, folds it in a
process of its own, and adds a row to benchmarks/results/flashnorm.json. The files take twice the
size of the model.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from benchmarks.timing import machine

RESULTS = Path(__file__).parent / "results" / "flashnorm.json"

# Hidden size, inner size, layers, heads, heads of keys and values, vocabulary.
SIZES = {
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
SHARD = 4 * 2**30


def config_of(size: str) -> LlamaConfig:
    """Return the config of a Llama of a size."""
    width, inner, layers, heads, groups, vocabulary = SIZES[size]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        dtype="bfloat16",
    )


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name."""
    width = config.hidden_size
    narrow = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn"
        feedforward = f"model.layers.{layer}.mlp"
        for name, outputs in (("q", width), ("k", narrow), ("v", narrow), ("o", width)):
            shapes[f"{attention}.{name}_proj.weight"] = (outputs, width)
        shapes[f"{feedforward}.gate_proj.weight"] = (config.intermediate_size, width)
        shapes[f"{feedforward}.up_proj.weight"] = (config.intermediate_size, width)
        shapes[f"{feedforward}.down_proj.weight"] = (width, config.intermediate_size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (width,)
    shapes["model.norm.weight"] = (width,)
    shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def write_checkpoint(config: LlamaConfig, folder: Path) -> None:
    """Write random weights, a million numbers again and again, in files of at most 4 GiB."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    noise = torch.empty(2**20, dtype=torch.bfloat16).normal_(std=0.02)
    places: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        tensors.clear()

    for name, shape in shapes_of(config).items():
        held = sum(tensor.nbytes for tensor in tensors.values())
        count = math.prod(shape)
        tensor = noise.repeat(-(-count // len(noise)))[:count].view(shape).clone()
        if len(shape) == 1:
            tensor += 1
        if held and held + tensor.nbytes > SHARD:
            flush()
        tensors[name] = tensor
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def main() -> None:
    """Write a checkpoint, fold it, and add time and peak memory to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a new folder for the checkpoint and its fold")
    parser.add_argument("--size", choices=SIZES, default="1b")
    options = parser.parse_args()
    source = options.folder / "source"
    write_checkpoint(config_of(options.size), source)
    sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
    fold = [sys.executable, "-m", "dynorm", "fold", str(source), str(options.folder / "out")]
    begun = time.perf_counter()
    subprocess.run([*fold, "--format", "flashnorm"], check=True)
    seconds = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {
        "gib": round(sum(sizes) / 2**30, 1),
        "largest_file_gib": round(max(sizes) / 2**30, 1),
        "seconds": round(seconds),
        "processor_seconds": round(used.ru_utime + used.ru_stime),
        "peak_memory_gib": round(used.ru_maxrss / 2**20, 1),
    }
    rows = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else {}
    rows[options.size] = row
    command = "python -m benchmarks.flashnorm FOLDER --size SIZE"
    document = {"command": command, "machine": machine(), "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
