"""Write a model that was made from a pretrained one: with the other files of its folder, a card and a report."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynorm.errors import ArgumentError, StorageError
from dynorm.files import replaced_directory, require_replaceable, require_writable, write_text
from dynorm.replace.edits import is_changed
from dynorm.report.rendering import rendered

_ENDINGS = ".safetensors .bin .pt .pth .ckpt .h5 .onnx .onnx_data .xml .msgpack .ot .gguf .tflite"
WEIGHTS = frozenset(_ENDINGS.split())
"""The endings of files that hold weights."""
CARD, ORIGINAL = "README.md", "README.original.md"
# Of the original's metadata, with the lines below each: what holds for the changed model too.
_KEPT = re.compile(
    r"^(?:license\w*|language|library_name|pipeline_tag|datasets):.*\n(?:[ \t-].*\n)*", re.MULTILINE
)


def require_output(source: Path, out: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Refuse before the work an output that could not be written after it, or would replace its own source.

    ``names`` are the folders, and the files with an ending, that will be written into ``out``.
    """
    for place in (out / name for name in names):
        if source.resolve().is_relative_to(place.resolve()):
            raise ArgumentError(
                f"the output must not replace its own source, but {place} holds {source}"
            )
        if place.suffix and place.is_dir():
            raise StorageError(
                f"{place} must be a file, but is a folder: choose another output folder"
            )
        if place.exists() and not overwrite:
            raise StorageError(
                f"{place} exists already: choose another folder, or pass --overwrite"
            )
        if place.exists() and not place.suffix:
            require_replaceable(Path(os.path.realpath(place)), overwrite)
    parent = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(
            f"the output must go into a folder that can be written, but {parent} cannot"
        )


def write_out(
    model: Any, source: Path, out: Path, overwrite: bool, report: Any, **card: Any
) -> None:
    """Write a changed model to ``out/model``, with a card of :func:`write_card`, and its report beside it."""
    require_writable(out / "report.json")
    write_model(model, source, out / "model", overwrite, report=report, **card)
    write_text(out / "report.json", json.dumps(report.to_dict(), indent=1) + "\n")


def write_model(model: Any, source: Path, folder: Path, overwrite: bool, **card: Any) -> None:
    """Write a model with the other files of its old folder, or the tokenizer of its GGUF file; if changed, a card.

    ``card`` has the arguments of :func:`write_card`; none for a model as it was.
    """
    with replaced_directory(folder, overwrite=overwrite, keep_others=False) as new:
        model.save_pretrained(os.fspath(new))
        if source.is_file():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(new)
        else:
            _copy_rest(source.absolute(), new)
        if card:
            write_card(new, loader=type(model).__name__, needs_dynorm=is_changed(model), **card)


def write_card(folder: Path, template: str, **values: Any) -> None:
    """Write the card of a model made from another, whose own card is kept under another name.

    The ``template`` is one of ``dynorm/templates``. It needs the model's name, report, remarks, the
    class of transformers that loads the model (``loader``), and whether that needs dynorm to be
    imported (``needs_dynorm``).
    """
    own, before = folder / CARD, folder / ORIGINAL
    if own.is_file() and not before.exists():
        own.rename(before)
    old = before.read_text("utf-8", errors="replace") if before.is_file() else ""
    found = re.match(r"---\n(.*?\n)---\n", old, re.DOTALL)
    metadata, original = (
        "".join(_KEPT.findall(found[1] if found else "")),
        before.is_file() and ORIGINAL,
    )
    text = rendered(template, metadata=metadata, original=original, **values)
    # Where a part is left out, its blank lines stay.
    write_text(own, re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n")


def _copy_rest(source: Path, target: Path) -> None:
    """Copy the other files of the model's folder: tokenizer, card, and the modules of sentence-transformers.

    Left out are its weights in any format, which are the original's, hidden files, and those of an
    earlier run.
    """
    parts, out = folders_of_modules(source), target.parent.absolute()
    # The source may stand in the output folder, or be it.
    earlier = out / "model" if source.is_relative_to(out) else out
    for file in filter(Path.is_file, sorted(source.rglob("*"))):
        name, there = file.relative_to(source), target / file.relative_to(source)
        hidden = any(part.startswith(".") for part in name.parent.parts)
        weights = file.suffix in WEIGHTS or name.name.endswith(".index.json")
        others = weights and not any(name.is_relative_to(folder) for folder in parts)
        written = (
            any(file.is_relative_to(folder) for folder in (earlier, target.absolute()))
            or there.exists()
        )
        if not (hidden or others or written):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)


def folders_of_modules(source: Path) -> list[str]:
    """Return the folders of a sentence-transformers model's other modules, which have weights of their own."""
    file = source / "modules.json"
    if not file.is_file():
        return []
    try:
        return [
            str(entry["path"]) for entry in json.loads(file.read_text("utf-8")) if entry["path"]
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{file} must be a list of modules with their paths, but: {error!r}"
        ) from error
