"""Measure the figures of docs/deploy.md, and write its tables: ``python -m benchmarks.deploy``.

It takes about half an hour on one core. Each part is written to benchmarks/results/deploy.json as
soon as it is measured: the code that Inductor generates, the kinds of export and the dtypes of
onnxruntime. ``--only code dtypes`` measures only these parts, and ``--only`` without a name measures
none. The tables are always written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import platform
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.tables import END, ROOT
from dynorm.files import write_text

RESULTS = ROOT / "benchmarks" / "results" / "deploy.json"
PAGE = ROOT / "docs" / "deploy.md"
START = "<!-- {name}: made by python -m benchmarks.deploy -->"
LAYERS = 2
NAMES = {"gpt2": "GPT-2", "llama": "Llama", "bert": "BERT", "vit": "ViT"}
LIBRARIES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "torchao")
Row = dict[str, Any]


def code() -> Row:
    """Count what Inductor generates before and after conversion, and cut out one kernel."""
    from benchmarks.compiled import converted, count, generated_code, inputs, kernels_of, tiny_model

    figures: Row = {"layers": LAYERS, "models": {}}
    for kind in NAMES:
        plain = tiny_model(kind, LAYERS)
        example = inputs(kind, 2, 8)
        model = converted(plain, example)
        before = generated_code(plain, example)
        after = generated_code(model, example)
        counts = {
            "before": count(before).to_dict(),
            "after": count(after).to_dict(),
        }
        figures["models"][kind] = counts
        print(kind, counts, flush=True)
        if kind == "bert":
            figures["excerpt"] = residual_kernel(kernels_of(after))
    return figures


def residual_kernel(kernels: dict[str, str]) -> Row:
    """Return the name and the loop of the first kernel with a residual sum and a layer."""
    for name, source in kernels.items():
        if "add" in name and "sqrt" in name and "embedding" not in name:
            return {"name": name, "lines": excerpt(source)}
    raise LookupError("no kernel has a sum and a root")


def excerpt(kernel: str) -> list[str]:
    """Return the loop of a kernel, without casts of constants and lines that have only braces."""
    start = kernel.index("        for(int64_t x0")
    lines = []
    for line in kernel[start:].splitlines():
        plain = re.sub(r"static_cast<int64_t>\((\w+|[^()]*)\)", r"\1", line).strip()
        if plain.startswith(("for(", "auto", "tmp")):
            lines.append(plain)
    return lines


def dtypes() -> Any:
    """Measure which dtypes onnxruntime runs."""
    from benchmarks.exports import dtypes

    return dtypes()


def parity() -> Any:
    """Measure how exact each road of export is."""
    from benchmarks.exports import parity

    return parity()


PARTS: dict[str, Callable[[], Any]] = {
    "code": code,
    "parity": parity,
    "dtypes": dtypes,
}


def load() -> Row:
    """Return the measurements so far."""
    if not RESULTS.exists():
        return {}
    return dict(json.loads(RESULTS.read_text("utf-8")))


def answers_table() -> str:
    """Return the figures that matter most, one row each."""
    document = load()
    code_of_bert = document["code"]["models"]["bert"]
    errors = [row["error"] for row in document["parity"] if "error" in row]
    lines = ["| measured | result |", "|---|---|"]

    def add(name: str, result: str) -> None:
        lines.append(f"| {name} | {result} |")

    passes = _before_and_after(code_of_bert, "loops")
    add("compiled BERT of two layers, passes over activations", passes)
    add("the same, reductions", _before_and_after(code_of_bert, "reductions"))
    add("exported models, largest error", f"{max(errors):.1e}")
    nodes = _onnx_nodes(document["parity"], "bert", "norms_and_reductions")
    add("ONNX graph of BERT, LayerNormalization and Reduce", nodes)
    return "\n".join(lines)


def _before_and_after(counts: dict[str, dict[str, int]], name: str) -> str:
    """Return a count before and after the conversion."""
    return f"{counts['before'][name]} → {counts['after'][name]}"


def _onnx_nodes(rows: list[Row], kind: str, name: str) -> str:
    """Return a count of nodes of a model's ONNX graph before and after the conversion."""
    counts = {}
    for row in rows:
        if row["model"] == kind and "onnx" in row:
            counts[row["onnx"]] = row[name]
    return f"{counts['before']} → {counts['after']}"


def code_table() -> str:
    """Return one row per model."""
    lines = [
        "| model | passes over activations | reductions | generated kernels called | matrix "
        "products, attention |",
        "|---|---|---|---|---|",
    ]
    for kind, counts in load()["code"]["models"].items():
        cells = [NAMES[kind]]
        for name in ("loops", "reductions", "launches", "library"):
            cells.append(_before_and_after(counts, name))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def code_excerpt() -> str:
    """Return the loop of one generated kernel, indented."""
    depth = 0
    lines = ["```cpp"]
    for line in load()["code"]["excerpt"]["lines"]:
        lines.append("    " * depth + line)
        if line.startswith("for("):
            depth += 1
    lines.append("```")
    return "\n".join(lines)


def parity_table() -> str:
    """Return one row per kind of export, and the operators of the ONNX graphs."""
    rows = load()["parity"]
    errors: dict[str, dict[str, float]] = {}
    for row in rows:
        if "road" in row:
            errors.setdefault(row["road"], {})[row["model"]] = row["error"]
    kinds = list(dict.fromkeys(row["model"] for row in rows))
    heads = ["largest error"]
    for kind in kinds:
        heads.append(NAMES[kind])
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for road, error_of in errors.items():
        cells = [road]
        for kind in kinds:
            cells.append(f"{error_of[kind]:.1e}")
        lines.append(f"| {' | '.join(cells)} |")
    titles = {
        "nodes": "ONNX nodes",
        "norms_and_reductions": "LayerNormalization and Reduce among them",
    }
    for name, title in titles.items():
        cells = [title]
        for kind in kinds:
            cells.append(_onnx_nodes(rows, kind, name))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def dtype_table() -> str:
    """Return one row per layer, one column per dtype."""
    cells: dict[str, list[str]] = {}
    dtypes_in_order: dict[str, None] = {}
    for row in load()["dtypes"]:
        dtypes_in_order[row["dtype"]] = None
        layer = row["layer"]
        if layer not in cells:
            cells[layer] = [layer, " ".join(row["operators"])]
        if row.get("error"):
            cells[layer].append(f"{row['error']:.0e}")
        else:
            cells[layer].append(row.get("refused", "0"))
    heads = ["layer", "operators", *dtypes_in_order]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cells_of_layer in cells.values():
        lines.append(f"| {' | '.join(cells_of_layer)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "answers": answers_table,
    "code": code_table,
    "excerpt": code_excerpt,
    "parity": parity_table,
    "dtypes": dtype_table,
}


def renewed() -> str:
    """Return the text of the page with its tables made from the results."""
    text = PAGE.read_text("utf-8")
    for name, table in TABLES.items():
        start = START.format(name=name)
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        text = f"{before}{start}\n{table()}\n{END}{after}"
    return text


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(PARTS),
        default=list(PARTS),
        help="the parts to measure",
    )
    arguments = parser.parse_args()
    # torch's exporters write many messages about themselves.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in arguments.only:
        figures = PARTS[name]()
        document = load()
        document["machine"] = {
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        }
        document["versions"] = {
            library: importlib.metadata.version(library) for library in LIBRARIES
        }
        document[name] = figures
        write_text(RESULTS, json.dumps(document, indent=1) + "\n")
    write_text(PAGE, renewed())


if __name__ == "__main__":
    main()
