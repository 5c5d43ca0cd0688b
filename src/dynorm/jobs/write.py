"""Write a changed pretrained model, with the other files of its folder, a card and a report."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynorm.errors import ArgumentError, StorageError
from dynorm.files import replaced_directory, require_replaceable, require_writable, write_text
from dynorm.hub.contents import contents_of
from dynorm.replace.edits import is_changed
from dynorm.report.rendering import rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENDINGS = ".safetensors .bin .pt .pth .ckpt .h5 .onnx .onnx_data .xml .msgpack .ot .gguf .tflite"
WEIGHTS = frozenset(_ENDINGS.split())
"""The endings of files that hold weights."""
CARD = "README.md"
ORIGINAL = "README.original.md"
# The metadata of the original's card that also hold for the changed model: a key and its lines.
_KEPT = re.compile(
    r"^(?:license\w*|language|library_name|pipeline_tag|datasets):.*\n(?:[ \t-].*\n)*", re.MULTILINE
)


def require_output(source: Path, out: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Refuse an output that cannot be written or would replace its source, before any work is done.

    ``names`` are the folders and files to write into ``out``; only files have a suffix.
    """
    for name in names:
        path = out / name
        is_file = bool(path.suffix)
        if source.resolve().is_relative_to(path.resolve()):
            raise ArgumentError(
                f"the output must not replace its own source, but {path} holds {source}"
            )
        if is_file and path.is_dir():
            raise StorageError(
                f"{path} must be a file, but is a folder: choose another output folder"
            )
        if path.exists():
            if not overwrite:
                raise StorageError(
                    f"{path} exists already: choose another folder, or pass --overwrite"
                )
            if not is_file:
                require_replaceable(Path(os.path.realpath(path)), overwrite)
    parent = out.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(
            f"the output must go into a folder that can be written, but {parent} cannot"
        )


def write_out(
    model: "PreTrainedModel",
    source: Path,
    out: Path,
    overwrite: bool,
    report: Any,
    *,
    remote_code: bool = False,
    **card: object,
) -> None:
    """Write a changed model and its card to ``out/model``, and its report to ``out/report.json``.

    ``card`` has arguments of :func:`write_card`.
    """
    require_writable(out / "report.json")
    write_model(
        model, source, out / "model", overwrite, remote_code=remote_code, report=report, **card
    )
    write_text(out / "report.json", json.dumps(report.to_dict(), indent=1) + "\n")


def write_model(
    model: "PreTrainedModel",
    source: Path,
    folder: Path,
    overwrite: bool,
    *,
    remote_code: bool = False,
    **card: Any,
) -> None:
    """Write a model with the other files of its old folder, or the tokenizer of its GGUF file.

    With ``remote_code`` the model loads without dynorm. ``card`` has arguments of
    :func:`write_card`; without them no card is written.
    """
    loader = type(model).__name__
    with replaced_directory(folder, overwrite=overwrite, keep_others=False) as new:
        if remote_code:
            from dynorm.hub.code import write_with_code

            write_with_code(model, contents_of(model), new)
            loader = _auto_class(new)
        else:
            model.save_pretrained(os.fspath(new))
        if source.is_file():
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(new)
        else:
            _copy_rest(source.absolute(), new)
        if card:
            needs_dynorm = is_changed(model) and not remote_code
            write_card(
                new, loader=loader, needs_dynorm=needs_dynorm, needs_trust=remote_code, **card
            )


def require_writable_with_code(model: "PreTrainedModel") -> None:
    """Refuse a model that cannot be written with its code, before it is converted."""
    from dynorm.hub.code import require_one_dtype, stock_classes

    stock_classes(model)
    require_one_dtype(model)


def _auto_class(folder: Path) -> str:
    """Return the Auto class of transformers that loads a model which was saved with its code."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    [name] = config["architectures"]
    loaders = []
    for auto, target in config["auto_map"].items():
        # A class for pretraining often loads the same as one with a plainer name.
        if target.endswith(f".{name}") and auto != "AutoModelForPreTraining":
            loaders.append(auto)
    return str(loaders[0]) if loaders else "AutoModelForPreTraining"


def write_card(folder: Path, template: str, **values: object) -> None:
    """Write the card of a changed model, and keep the original's card under another name.

    The ``template`` is in ``dynorm/templates``. Its values are the model's name, report and
    remarks, the class of transformers that loads it (``loader``), and whether dynorm must be
    imported for that (``needs_dynorm``), or code in the folder trusted (``needs_trust``).
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

    Left out are the original's weights in any format, hidden files, and the files of an earlier
    run. The modules of sentence-transformers keep their weights.
    """
    modules = folders_of_modules(source)
    out = target.parent.absolute()
    # The output folder may be the source, or contain it.
    earlier_run = out / "model" if source.is_relative_to(out) else out
    for file in sorted(source.rglob("*")):
        if not file.is_file():
            continue
        name = file.relative_to(source)
        copy = target / name
        if any(part.startswith(".") for part in name.parent.parts):
            continue
        if file.is_relative_to(earlier_run) or file.is_relative_to(target.absolute()):
            continue
        is_weights = file.suffix in WEIGHTS or name.name.endswith(".index.json")
        if is_weights and not any(map(name.is_relative_to, modules)):
            continue
        if not copy.exists():
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
