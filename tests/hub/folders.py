"""Changes to a saved folder: edits, damage, a full disk, and a new process that reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from safetensors.torch import load_file, save_file
from torch import Tensor

# Ways to damage a saved folder, with the words of the error.
Damages = dict[str, tuple[Callable[[Path], object], str]]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def fresh(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def full_disk(*arguments: object, **options: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def edit_config(folder: Path, **values: object) -> None:
    """Change the file, as where someone meant it."""
    path = folder / ("dynorm.json" if (folder / "dynorm.json").exists() else "config.json")
    config = json.loads(path.read_text())
    for key, value in values.items():
        holder = config
        *parents, last = key.split("__")
        for parent in parents:
            holder = holder[int(parent) if parent.isdigit() else parent]
        last = int(last) if last.isdigit() else last
        if value is None:
            del holder[last]
        else:
            holder[last] = value
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def replace_text(folder: Path, name: str, old: str, new: str) -> None:
    """Change a file as damage does, its checksums left as they were."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def garbage(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"no tensors here")
