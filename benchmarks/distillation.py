"""What distillation gives back in about ten minutes on two cores, on held-out docstrings and on texts of other kinds.

``python -m benchmarks.distillation`` writes benchmarks/results/distillation.json. The recipe is that of
``dynorm convert``; steps and not minutes are given, so that a busy machine gives the same figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import sysconfig
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.quality import BATCH, HELD_OUT, stages
from dynorm.files import write_text
from dynorm.integrations.pretrained import encode, library_versions, make_batches

RESULTS = Path(__file__).parent / "results" / "distillation.json"
ARMS = (("dyisru", False), ("dyisru", True), ("linear", False), ("dyt", False), ("linear", True))
# Lines of a function that make a text, and modules whose functions are taken.
LINES, MODULES = 8, ("json", "email", "asyncio", "http", "xml", "logging", "importlib", "concurrent", "tkinter")


def code() -> list[str]:
    """Return the first lines of functions of the standard library, without docstrings and comments."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for module in MODULES:
        for file in sorted((root / module).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    if ast.get_docstring(node) is not None:
                        node.body = node.body[1:] or [ast.Pass()]
                    found.append("\n".join(ast.unparse(node).splitlines()[:LINES]))
    return sample([text for text in dict.fromkeys(found) if len(text) >= 60])


def reference() -> list[str]:
    """Return paragraphs of Python's language reference, as ``help()`` shows it: prose, and no docstring."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for text in topics.values() for part in re.split(r"\n\s*\n", text))
    return sample([text for text in dict.fromkeys(paragraphs) if len(text) >= 60])


def sample(texts: list[str]) -> list[str]:
    """Return as many texts as are held out, at random."""
    return random.Random(0).sample(texts, HELD_OUT)


def measured(to: str, per_channel: bool, steps: int, seed: int) -> dict[str, Any]:
    """Return the figures of one layer after distillation."""
    row: dict[str, Any] = {"layer": to, "per_channel": per_channel, "steps": steps, "seed": seed}
    *_, (_, seconds, subject) = stages(to, seed, steps, per_channel)
    kinds = {"code": code(), "reference": reference()}
    row["docstrings"] = subject.figures()
    for kind, texts in kinds.items():
        row[kind] = subject.figures(make_batches(subject.pretrained, encode(subject.pretrained, texts), BATCH))
    return row | {"seconds": round(seconds, 1)}


def main() -> None:
    """Measure the arms that no earlier run has measured; each is written when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="distillation steps of 32 texts")
    parser.add_argument("--arms", type=int, default=len(ARMS), help="how many of the arms")
    arguments = parser.parse_args()
    for to, per_channel in ARMS[: arguments.arms]:
        rows = json.loads(RESULTS.read_text("utf-8"))["rows"] if RESULTS.exists() else []
        if not any((r["layer"], r["per_channel"], r["steps"]) == (to, per_channel, arguments.steps) for r in rows):
            rows.append(measured(to, per_channel, arguments.steps, seed=0))
            print(rows[-1], flush=True)
            document = {"model": "all-MiniLM-L6-v2, 13 LayerNorms", "batch": BATCH, "texts": HELD_OUT}
            write_text(RESULTS, json.dumps(document | {"versions": library_versions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
