"""The folder of a pretrained model: whether a new one may be written, and what goes along beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from dynorm.errors import StorageError

# fmt: off
_WEIGHTS = frozenset([
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".onnx_data", ".xml", ".msgpack", ".ot", ".gguf",
    ".tflite",
])
# fmt: on


def require_free(out: Path, overwrite: bool) -> None:
    """Refuse before the work what would fail after it."""
    if (out / "model").exists() and not overwrite:
        raise StorageError(f"{out / 'model'} exists already: choose another folder, or pass --overwrite")
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(f"the output must go into a folder that can be written, but {parent} cannot")


def copy_rest(source: Path, target: Path) -> None:
    """Copy what else the model's folder holds: tokenizer, card, and the modules of sentence-transformers.

    Not its weights, which are the original's in whatever format; nor what is hidden, or was written by an earlier run.
    """
    source, out = source.absolute(), target.parent.absolute()
    parts = folders_of_modules(source)
    for file in sorted(source.rglob("*")):
        name, there = file.relative_to(source), target / file.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parent.parts)
        part = any(name.is_relative_to(folder) for folder in parts)
        weights = not part and (file.suffix in _WEIGHTS or name.name.endswith(".index.json"))
        written = str(name) in ("config.json", "generation_config.json") and there.exists()
        if file.is_file() and not (hidden or weights or written or file.is_relative_to(out)):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)


def folders_of_modules(source: Path) -> list[str]:
    """The folders of a sentence-transformers model's other modules, which have weights of their own (a Dense)."""
    file = source / "modules.json"
    if not file.is_file():
        return []
    try:
        return [str(entry["path"]) for entry in json.loads(file.read_text("utf-8")) if entry["path"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(f"{file} must be a list of modules with their paths, but: {error!r}") from error
