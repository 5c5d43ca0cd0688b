"""The README.md of a changed model: what it was made from, how, and what was lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dynorm.files import write_text

CARD, ORIGINAL = "README.md", "README.original.md"
# Of the original's metadata, with the lines below each: what holds for the changed model too.
_KEPT = re.compile(r"^(?:license\w*|language|library_name|pipeline_tag|datasets):.*\n(?:[ \t-].*\n)*", re.MULTILINE)


def write_card(folder: Path, source: Path, facts: Sequence[str], loader: str, *, needs_dynorm: bool) -> None:
    """Write the card of a model that was made from the one in ``source``, whose own card is kept under another name.

    Args:
        folder: the new model's, which holds copies of the original's other files.
        source: the original's folder.
        facts: what was changed, how, on what, and what was measured; a paragraph each.
        loader: the class of transformers that loads it.
        needs_dynorm: whether the model loads only once dynorm is imported.
    """
    own, before = folder / CARD, folder / ORIGINAL
    if own.is_file() and not before.exists():
        own.rename(before)
    metadata = ""
    if before.is_file():
        found = re.match(r"---\n(.*?\n)---\n", before.read_text("utf-8", errors="replace"), re.DOTALL)
        metadata = "".join(_KEPT.findall(found[1])) if found else ""
    name = source.absolute().name
    lines = ["import dynorm  # first: it brings the layers"] * needs_dynorm
    lines += [f"from transformers import {loader}", "", f'model = {loader}.from_pretrained("path/to/this/folder")']
    beside = f"The original's card is {ORIGINAL}." if before.exists() else "The original came without a card."
    parts = [
        f"---\n{metadata}base_model: {name}\ntags:\n- dynorm\n---",
        f"# {name}, its norms changed by dynorm",
        *facts,
        "\n".join(["```python", *lines, "```"]),
        f"{beside} Its license holds for this model too.",
    ]
    write_text(own, "\n\n".join(parts) + "\n")
