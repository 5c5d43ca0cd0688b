"""The figures and tables of docs/deploy.md: ``python -m benchmarks.deploy``, about an hour on one core.

Each part is written to benchmarks/results/deploy.json as soon as it is measured: the code that
Inductor generates, the roads of export, the dtypes of onnxruntime, and int8 on three models, two of
which ``make models`` installs. ``--only code int8`` measures some of them anew, ``--only`` without
a name none; the page is renewed in any case.
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


def code() -> dict[str, Any]:
    """Count what Inductor generates before and after conversion, and cut out one kernel."""
    from benchmarks.compiled import converted, count, generated_code, inputs, kernels_of, tiny_model

    found: dict[str, Any] = {"layers": LAYERS, "models": {}}
    for kind in NAMES:
        plain, example = tiny_model(kind, LAYERS), inputs(kind, 2, 8)
        before, after = (
            generated_code(model, example) for model in (plain, converted(plain, example))
        )
        found["models"][kind] = {"before": count(before).to_dict(), "after": count(after).to_dict()}
        print(kind, found["models"][kind], flush=True)
        if kind == "bert":
            kernels = kernels_of(after)
            name = next(
                name
                for name in kernels
                if "add" in name and "sqrt" in name and "embedding" not in name
            )
            found["excerpt"] = {"name": name, "lines": excerpt(kernels[name])}
    return found


def excerpt(kernel: str) -> list[str]:
    """Return the loop of a kernel, without casts of constants and the branches that hold only braces."""
    lines = kernel[kernel.index("        for(int64_t x0") :].splitlines()
    body = [re.sub(r"static_cast<int64_t>\((\w+|[^()]*)\)", r"\1", line) for line in lines]
    return [line.strip() for line in body if line.strip().startswith(("for(", "auto", "tmp"))]


def dtypes() -> Any:
    """Measure which dtypes onnxruntime runs."""
    from benchmarks.exports import dtypes

    return dtypes()


def parity() -> Any:
    """Measure how exact each road of export is."""
    from benchmarks.exports import parity

    return parity()


def int8() -> Any:
    """Measure int8 on all-MiniLM-L6-v2."""
    from benchmarks.int8 import study

    return study()


def decoder() -> Any:
    """Measure int8 on a decoder."""
    from benchmarks.int8_models import decoder

    return decoder()


def images() -> Any:
    """Measure int8 on a model of images."""
    from benchmarks.int8_models import images

    return images()


PARTS: dict[str, Callable[[], Any]] = {
    "code": code,
    "parity": parity,
    "dtypes": dtypes,
    "int8": int8,
    "decoder": decoder,
    "images": images,
}


def load() -> dict[str, Any]:
    """Return the measurements so far."""
    return dict(json.loads(RESULTS.read_text("utf-8"))) if RESULTS.exists() else {}


def answers_table() -> str:
    """Return the figures that matter most, one row each."""
    found = load()
    counts = found["code"]["models"]["bert"]
    passes, reductions = (
        f"{counts['before'][name]} → {counts['after'][name]}" for name in ("loops", "reductions")
    )
    errors = [row["error"] for row in found["parity"] if "error" in row]
    nodes = []
    for row in found["parity"]:
        if row["model"] == "bert" and "onnx" in row:
            nodes.append(row["norms_and_reductions"])
    encoder = {row["way"]: f"{row['cosine']:.4f}" for row in found["int8"]["rows"]}
    decoder = _after_norms(found["decoder"]["rows"])
    images = _after_norms(found["images"]["rows"])
    rows = [
        ("compiled BERT of two layers, passes over activations", passes),
        ("the same, reductions", reductions),
        ("exported models, largest error", f"{max(errors):.1e}"),
        ("ONNX graph of BERT, LayerNormalization and Reduce", " → ".join(map(str, nodes[:2]))),
        ("int8 encoder, static scales per channel, cosine", encoder[_STATIC]),
        ("int8 encoder, dynamic scales per token, cosine", encoder["dynamic, one scale per token"]),
    ]
    for way, words in (("static, power 0.75", "static"), ("dynamic", "dynamic")):
        rows.append(
            (
                f"int8 decoder, {words}, divergence on docstrings in nats",
                f"{decoder[way]['docstrings']['kl']:.4f}",
            )
        )
    for way, words in (("static, power 0.75", "static"), ("dynamic", "dynamic")):
        rows.append((f"int8 images, {words}, worst cosine", f"{images[way]['worst']:.4f}"))
    lines = ["| measured | result |", "|---|---|"]
    lines += [f"| {name} | {result} |" for name, result in rows]
    return "\n".join(lines)


_STATIC = "data, least and largest, one scale per channel"


def _after_norms(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows of the linear layers after a norm, by their way."""
    return {row["way"]: row for row in rows if row["linears"] == "after a norm"}


def code_table() -> str:
    """One row per model."""
    lines = [
        "| model | passes over activations | reductions | generated kernels called | matrix "
        "products, attention |",
        "|---|---|---|---|---|",
    ]
    for kind, found in load()["code"]["models"].items():
        before, after = found["before"], found["after"]
        cells = [
            f"{before[name]} → {after[name]}"
            for name in ("loops", "reductions", "launches", "library")
        ]
        lines.append(f"| {NAMES[kind]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def code_excerpt() -> str:
    """The loop of one generated kernel, indented."""
    depth, lines = 0, []
    for line in load()["code"]["excerpt"]["lines"]:
        lines.append("    " * depth + line)
        depth += line.startswith("for(")
    return "\n".join(["```cpp", *lines, "```"])


def parity_table() -> str:
    """One row per kind of export, and the operators of the ONNX graphs."""
    rows = load()["parity"]
    kinds = list(dict.fromkeys(row["model"] for row in rows))
    lines = [
        "| largest error | " + " | ".join(NAMES[kind] for kind in kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for road in dict.fromkeys(row["road"] for row in rows if "road" in row):
        errors = [
            next(r["error"] for r in rows if r["model"] == kind and r.get("road") == road)
            for kind in kinds
        ]
        lines.append(f"| {road} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    for name, title in (
        ("nodes", "ONNX nodes"),
        ("norms_and_reductions", "LayerNormalization and Reduce among them"),
    ):
        cells = []
        for kind in kinds:
            before, after = ([r[name] for r in rows if r["model"] == kind and "onnx" in r])[:2]
            cells.append(f"{before} → {after}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dtype_table() -> str:
    """One row per layer, one column per dtype."""
    rows = load()["dtypes"]
    names = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = ["| layer | operators | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for layer in dict.fromkeys(row["layer"] for row in rows):
        mine = [row for row in rows if row["layer"] == layer]
        cells = [
            f"{row['error']:.0e}" if row.get("error") else row.get("refused", "0") for row in mine
        ]
        lines.append(f"| {layer} | {' '.join(mine[0]['operators'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def int8_table() -> str:
    """One row per way to find the scales."""
    lines = ["| activations' scales | mean cosine | worst |", "|---|---|---|"]
    lines += [
        f"| {row['way']} | {row['cosine']:.4f} | {row['worst']:.3f} |"
        for row in load()["int8"]["rows"]
    ]
    return "\n".join(lines)


def bound_table() -> str:
    """One row per layer: its bound, and the outputs that were seen."""
    lines = [
        "| layer | bound | largest seen | 0.999 quantile | root mean square | bound / largest, "
        "median channel |",
        "|---|---|---|---|---|---|",
    ]
    names = ("bound", "largest", "quantile_0.999", "root_mean_square", "median_channel_ratio")
    for row in load()["int8"]["layers"]:
        lines.append(
            f"| `{row['path']}` | "
            + " | ".join(f"{row[name]:.{0 if row[name] >= 100 else 1}f}" for name in names)
            + " |"
        )
    return "\n".join(lines)


def decoder_table() -> str:
    """One row per way: the loss compared with the converted model on two kinds of text."""
    found = load()["decoder"]
    lines = [
        "| linear layers in int8 | activations | docstrings: loss | KL | reference: loss | KL |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("original", "converted"):
        losses = found[f"loss_{name}"]
        lines.append(
            f"| none: {name}, float32 | | {losses['docstrings']:.4f} | | {losses['reference']:.4f} "
            "| |"
        )
    for row in found["rows"]:
        cells = [
            f"{row[name]['loss']:+.4f} | {row[name]['kl']:.4f}"
            for name in ("docstrings", "reference")
        ]
        lines.append(
            f"| {row['linears']}: {row['count']} | {row['way']} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def image_table() -> str:
    """One row per way: how near the class tokens stay."""
    lines = ["| linear layers in int8 | activations | mean cosine | worst |", "|---|---|---|---|"]
    for row in load()["images"]["rows"]:
        lines.append(
            f"| {row['linears']}: {row['count']} | {row['way']} | {row['cosine']:.5f} | "
            f"{row['worst']:.4f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "answers": answers_table,
    "code": code_table,
    "excerpt": code_excerpt,
    "parity": parity_table,
    "dtypes": dtype_table,
    "int8": int8_table,
    "bounds": bound_table,
    "decoder": decoder_table,
    "images": image_table,
}


def renewed() -> str:
    """Return the text of the page with its tables as the results say."""
    text = PAGE.read_text("utf-8")
    for name, table in TABLES.items():
        before, rest = text.split(START.format(name=name))
        _, after = rest.split(END, 1)
        text = f"{before}{START.format(name=name)}\n{table()}\n{END}{after}"
    return text


def main() -> None:
    """Measure, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(PARTS),
        default=list(PARTS),
        help="the parts to measure anew",
    )
    arguments = parser.parse_args()
    # What torch's exporters say of themselves.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in arguments.only:
        found = PARTS[name]()
        document = load() | {
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "versions": {library: importlib.metadata.version(library) for library in LIBRARIES},
            name: found,
        }
        write_text(RESULTS, json.dumps(document, indent=1) + "\n")
    write_text(PAGE, renewed())


if __name__ == "__main__":
    main()
