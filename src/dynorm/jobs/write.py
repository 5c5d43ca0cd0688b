"""Write a changed pretrained model, with the other files of its folder, a card and a report."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynorm.errors import ArgumentError, StorageError, listed
from dynorm.files import replaced_directory, require_replaceable, write_text
from dynorm.replace.edits import is_changed
from dynorm.report.rendering import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dynorm.recipe import Recipe

_ENDINGS = ".safetensors .bin .pt .pth .ckpt .h5 .onnx .onnx_data .xml .msgpack .ot .gguf .tflite"
WEIGHTS = frozenset(_ENDINGS.split())
"""The endings of files that hold weights."""
REPORT = "report.json"
PAGE = "report.html"
RECIPE = "recipe.json"
PREFIX = "prefix"
_WRITTEN = frozenset(["model", PREFIX, REPORT, PAGE, RECIPE])
CARD = "README.md"
ORIGINAL = "README.original.md"
# The metadata of the original's card that also hold for the changed model: a key and its lines.
_KEPT = re.compile(
    r"^(?:license\w*|language|library_name|pipeline_tag|datasets):.*\n(?:[ \t-].*\n)*", re.MULTILINE
)


def require_output(source: Path, out: Path, *, overwrite: bool) -> None:
    """Refuse an output that cannot be written or would replace something else, before any work.

    It is a new or empty folder, or one of an earlier run, apart from its source.
    """
    here = source.resolve()
    there = out.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise ArgumentError(
            f"the output must be apart from its own source, but {out} holds {source}, or is in it"
        )
    parent = there
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(
            f"the output must go into a folder that can be written, but {parent} cannot"
        )
    if out.is_dir() and any(out.iterdir()):
        require_replaceable(there, overwrite, (REPORT,))
        others = {path.name for path in out.iterdir()} - _WRITTEN
        if others:
            raise StorageError(
                f"{out} must hold only files of an earlier run, but has {listed(others)}: choose "
                "another folder"
            )
    folders_of_modules(source)


def write_out(
    model: PreTrainedModel,
    source: Path,
    out: Path,
    overwrite: bool,
    report: Any,
    *,
    template: str,
    save: Callable[[Path], None] | None = None,
    recipe: Recipe | None = None,
    prefixed: Any = None,
    **card: object,
) -> None:
    """Write a folder with a changed model and its report, as a whole or not at all.

    It gets ``model`` with its card and ``report.json``; ``save`` writes the weights, by default
    with ``save_pretrained``; with a recipe also ``recipe.json`` and ``report.html``; and ``prefix``
    with the model ``prefixed``, of which ``model`` is the base. The ``template`` and the rest,
    ``card``, are arguments of :func:`write_card`.
    """
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with replaced_directory(
        out, overwrite=overwrite or out.is_dir(), keep_others=False, markers=(REPORT,)
    ) as new:
        write_model(save or model.save_pretrained, source, new / "model")
        write_card(
            new / "model",
            template,
            loader=type(model).__name__,
            needs_dynorm=is_changed(model),
            report=report,
            has_prefix=prefixed is not None,
            **card,
        )
        if prefixed is not None:
            # AutoPeftModelForCausalLM joins them; by default it would take the original.
            prefixed.peft_config["default"].base_model_name_or_path = str(out.absolute() / "model")
            prefixed.save_pretrained(new / PREFIX, save_embedding_layers=False)
            # It is an empty form, and names the original as the base.
            (new / PREFIX / CARD).unlink(missing_ok=True)
        write_text(new / REPORT, json.dumps(report.to_dict(), indent=1) + "\n")
        if recipe is not None:
            # Another run with it must not continue this one's checkpoints.
            recipe.changed(checkpoints=None).save(new / RECIPE)
            report.to_html(new / PAGE)


def write_model(save: Callable[[Path], None], source: Path, folder: Path) -> None:
    """Write a model with the other files of its old folder, or the tokenizer of its GGUF file."""
    save(folder)
    if source.is_file():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    else:
        _copy_rest(source, folder)


def write_card(folder: Path, template: str, **values: object) -> None:
    """Write the card of a changed model, and keep the original's card under another name.

    The ``template`` is in ``dynorm/templates``. Its values are the model's name, report and
    remarks, the class of transformers that loads it (``loader``), and whether dynorm must be
    imported for that (``needs_dynorm``).
    """
    card = folder / CARD
    original = folder / ORIGINAL
    if card.is_file() and not original.exists():
        card.rename(original)
    metadata = ""
    has_original = original.is_file()
    if has_original:
        old = original.read_text("utf-8", errors="replace")
        header = re.match(r"---\n(.*?\n)---\n", old, re.DOTALL)
        if header:
            metadata = "".join(_KEPT.findall(header[1]))
    text = rendered(template, metadata=metadata, original=has_original and ORIGINAL, **values)
    # Parts that the template leaves out still leave their blank lines.
    write_text(card, re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n")


def _copy_rest(source: Path, target: Path) -> None:
    """Copy the other files of a model's folder, such as the tokenizer and the card.

    Left out are the original's weights in any format, and hidden folders. The modules of
    sentence-transformers keep their weights.
    """
    modules = folders_of_modules(source)
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        copy = target / name
        if not file.is_file() or copy.exists():
            continue
        is_hidden = any(part.startswith(".") for part in name.parent.parts)
        is_weights = file.suffix in WEIGHTS or name.name.endswith(".index.json")
        is_of_module = any(map(name.is_relative_to, modules))
        if is_hidden or (is_weights and not is_of_module):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def folders_of_modules(source: Path) -> list[str]:
    """Return the folders of the modules that sentence-transformers adds to a model."""
    file = source / "modules.json"
    if not file.is_file():
        return []
    try:
        modules = json.loads(file.read_text("utf-8"))
        # The model itself has an empty path.
        return [str(module["path"]) for module in modules if module["path"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{file} must be a list of modules with their paths, but: {error!r}"
        ) from error
