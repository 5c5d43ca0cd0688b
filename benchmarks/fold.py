"""Measure what folds in each model, and its effect: ``python -m benchmarks.fold [--timings]``, for docs/fold.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fold_models import NAMES, build, inputs, linear_
from dynorm.errors import ModelError
from dynorm.fold import FoldReport, fold_

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fold.json"
PAGE = ROOT / "docs" / "fold.md"
START = "<!-- {name}: made by python -m benchmarks.fold -->"
END = "<!-- end -->"
# The models of the short table, which are the best known.
SHOWN = ("gpt2", "llama", "qwen3", "mixtral", "bert", "t5", "vit", "dinov2", "whisper")
TITLES = {
    "encoder_pre": "nn.TransformerEncoder, pre-norm",
    "encoder_post": "nn.TransformerEncoder, post-norm",
    "nanogpt": "a hand-written GPT",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "gptj": "GPT-J",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "convnext": "ConvNeXt",
    "dinov2": "DINOv2",
    "wav2vec2": "Wav2Vec2",
    "modernbert": "ModernBERT",
    "roberta": "RoBERTa",
    "stablelm": "StableLM",
    "vit": "ViT",
}
_UPPER = {"opt", "mpt", "bert", "t5", "bart", "clip"}
Row = dict[str, Any]
Inputs = dict[str, Tensor]
# A function that returns a model and its inputs.
Maker = Callable[[], tuple[nn.Module, Inputs]]


def coverage() -> list[Row]:
    """Fold each model twice in float64, with the defaults and with everything allowed."""
    return [row_of(name) for name in NAMES]


def row_of(name: str) -> Row:
    """Return which norms of a model fold, and why the rest does not."""
    row: Row = {"model": name}
    modes = {"default": {}, "allowed": {"untie": True, "add_bias": True}}
    for mode, options in modes.items():
        model = _double(name)
        report = fold_(model, **options, **inputs(name, model))
        row[mode] = {
            "sites": len(report.sites),
            "affine": _count_and_total(report, "affine"),
            "center": _count_and_total(report, "center"),
            "error": report.error,
            "loads_with": report.loads_with,
            "refused": _reasons(report),
        }
    row["linear"] = linear_row(name)
    return row


def linear_row(name: str) -> Row:
    """Return how many norms are left if all of them are linear layers and everything is allowed."""
    model = _double(name)
    example = inputs(name, model)
    linear_(model, **example)
    try:
        report = fold_(model, untie=True, add_bias=True, **example)
    except ModelError as error:
        reason = str(error).split("; everything")[0]
        return {"gone": 0, "error": None, "reasons": [reason]}
    left = [site for site in report.sites if site.becomes != "Identity"]
    reasons = []
    for site in left:
        reason = site.constants.reason or site.affine.reason
        if reason not in reasons:
            reasons.append(reason)
    return {
        "gone": len(report.sites) - len(left),
        "error": report.error,
        "reasons": reasons,
    }


def _double(name: str) -> nn.Module:
    options: dict[str, Any] = {}
    if name == "mixtral":
        # The kernel of the default implementation of experts does not support float64.
        options["experts_implementation"] = "batched_mm"
    return build(name, **options).double()


def _count_and_total(report: FoldReport, rewrite: str) -> list[int]:
    """Return at how many norms a rewrite was done, and at how many it could be asked for."""
    count = report.count(rewrite)
    return [count, count + report.count(rewrite, "refused")]


def _reasons(report: FoldReport) -> list[Row]:
    counts: Counter[tuple[str, str]] = Counter()
    for site in report.sites:
        for rewrite in ("affine", "center"):
            reason = getattr(site, rewrite).reason
            if reason is not None:
                counts[rewrite, reason] += 1
    rows = []
    for (rewrite, reason), count in counts.most_common():
        rows.append({"rewrite": rewrite, "reason": reason, "sites": count})
    return rows


def gpt2() -> tuple[nn.Module, Inputs]:
    """Return GPT-2 small with random weights, and a text."""
    import transformers

    config = transformers.GPT2Config(use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    return model, {"input_ids": torch.randint(0, 50257, (1, 128))}


def vit() -> tuple[nn.Module, Inputs]:
    """Return ViT-B/16 with random weights, and an image."""
    import transformers

    config = transformers.ViTConfig(num_labels=1000)
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": torch.randn(1, 3, 224, 224)}


def timings(rounds: int = 60) -> list[Row]:
    """Time a forward pass of the original and the folded GPT-2 and ViT-B, with random weights."""
    return [
        measured("GPT-2 small, 1 x 128 tokens", gpt2, rounds),
        measured("ViT-B/16, 1 image of 224 x 224", vit, rounds),
    ]


def measured(name: str, make: Maker, rounds: int) -> Row:
    """Return the times of one model in milliseconds, after a check that its results are right."""
    torch.manual_seed(0)
    model, example = make()
    _shake_(model.eval())
    torch.manual_seed(0)
    folded, _ = make()
    folded.load_state_dict(model.state_dict())
    report = fold_(folded.eval(), untie=True, add_bias=True, **example)
    row: Row = {
        "model": name,
        "affine": report.count("affine"),
        "center": report.count("center"),
        "error": report.error,
    }
    with torch.no_grad():
        exact = model(**example).logits
        for mode in ("eager", "compiled"):
            pair: list[Any] = [model, folded]
            if mode == "compiled":
                pair = [torch.compile(module, dynamic=False) for module in pair]
            for module in pair:
                difference = module(**example).logits - exact
                error = float(difference.norm() / exact.norm())
                if error > 1e-4:
                    raise SystemExit(
                        f"{name}, {mode}: the output is wrong by {error:.1e}; no time is taken"
                    )
            row[mode] = paired_times(pair, example, rounds)
    return row


def paired_times(pair: list[Any], example: Inputs, rounds: int) -> Row:
    """Time the original and the folded model in turns, so that a busy machine slows down both."""
    warmup = 5
    original: list[float] = []
    folded: list[float] = []
    times = [original, folded]
    for i in range(rounds + warmup):
        # The two also take turns at being the first of a round.
        order = (0, 1) if i % 2 else (1, 0)
        for j in order:
            start = time.perf_counter()
            pair[j](**example)
            milliseconds = 1e3 * (time.perf_counter() - start)
            if i >= warmup:
                times[j].append(milliseconds)
    ratios = [after / before for before, after in zip(original, folded, strict=True)]
    return {
        "original_ms": median(original),
        "folded_ms": median(folded),
        "ratio_of_pairs": median(ratios),
        "rounds": rounds,
    }


@torch.no_grad()
def _shake_(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))


def answers_table(document: dict[str, Any]) -> str:
    """Return a row for each of the best-known models, with everything allowed."""
    lines = [
        "| model | norms | affine folded | means removed | linear layers removed |",
        "|---|---|---|---|---|",
    ]
    for row in document["models"]:
        if row["model"] in SHOWN:
            allowed = row["allowed"]
            removed = f"{row['linear']['gone']} of {allowed['sites']}"
            cells = [_of(allowed["affine"]), _of(allowed["center"]), removed]
            lines.append(f"| {_title(row)} | {allowed['sites']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def coverage_table(document: dict[str, Any]) -> str:
    """Return one row per model."""
    lines = [
        "| model | norms | affine | means | affine, allowed | means, allowed | loads with | "
        "refused even then |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["models"]:
        default = row["default"]
        allowed = row["allowed"]
        cells = [
            _of(default["affine"]),
            _of(default["center"]),
            _of(allowed["affine"]),
            _of(allowed["center"]),
        ]
        loads = default["loads_with"]
        if allowed["loads_with"] != loads:
            loads += f", then {allowed['loads_with']}"
        lines.append(
            f"| {_title(row)} | {allowed['sites']} | {' | '.join(cells)} | {loads} | "
            f"{_why(allowed['refused'])} |"
        )
    return "\n".join(lines)


def _title(row: Row) -> str:
    name: str = row["model"]
    if name in TITLES:
        return TITLES[name]
    if name in _UPPER:
        return name.upper()
    return name.capitalize()


def linear_table(document: dict[str, Any]) -> str:
    """Return the models that lose all linear layers, then one row for each of the others."""
    complete = []
    partial = []
    for row in document["models"]:
        if row["linear"]["gone"] == row["allowed"]["sites"]:
            complete.append(row)
        else:
            partial.append(row)
    titles = ", ".join(_title(row) for row in complete)
    error = max(row["linear"]["error"] for row in complete)
    lines = [
        f"All go in {len(complete)} of {len(document['models'])} models, with an error of at most "
        f"{error:.0e}: {titles}.",
        "",
        "| model | gone | why the others stay |",
        "|---|---|---|",
    ]
    for row in partial:
        count = f"{row['linear']['gone']} of {row['allowed']['sites']}"
        reason = row["linear"]["reasons"][0].replace("|", "/")
        lines.append(f"| {_title(row)} | {count} | {reason} |")
    return "\n".join(lines)


def _of(pair: list[int]) -> str:
    count, total = pair
    return f"{count} of {total}" if total else "none"


def _why(refused: list[Row]) -> str:
    """Return the commonest reason for each rewrite, or that a norm is post-norm if one is."""
    first: dict[str, str] = {}
    for entry in sorted(refused, key=lambda entry: "(post-norm)" not in entry["reason"]):
        first.setdefault(entry["rewrite"], entry["reason"])
    names = {"affine": "affine", "center": "mean"}
    reasons = [f"{names[rewrite]}: {reason}" for rewrite, reason in first.items()]
    return "; ".join(reasons).replace("|", "/")


def timings_table(document: dict[str, Any]) -> str:
    """Return one row per model and mode."""
    lines = [
        "| forward pass | LayerNorm | folded | folded / LayerNorm |",
        "|---|---|---|---|",
    ]
    timed = document.get("timings", {})
    for row in timed.get("rows", []):
        for mode in ("eager", "compiled"):
            times = row[mode]
            lines.append(
                f"| {row['model']}, {mode} | {times['original_ms']:.1f} ms | "
                f"{times['folded_ms']:.1f} ms | {times['ratio_of_pairs']:.3f} |"
            )
    if timed.get("load", float("inf")) > timed.get("threads", 0) + 0.5:
        lines += [
            "",
            "(Taken while the machine was busy with other work: these times are to be taken "
            "again.)",
        ]
    return "\n".join(lines)


def renewed(text: str, document: dict[str, Any]) -> str:
    """Return the page with its tables made from the results."""
    tables = {
        "answers": answers_table,
        "coverage": coverage_table,
        "linear": linear_table,
        "timings": timings_table,
    }
    for name, table in tables.items():
        start = START.format(name=name)
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        text = f"{before}{start}\n{table(document)}\n{END}{after}"
    return text


def main() -> None:
    """Fold, or time, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", action="store_true", help="time the forward passes instead")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each model")
    parser.add_argument("--tables", action="store_true", help="only write the page")
    options = parser.parse_args()
    document: dict[str, Any] = {}
    if RESULTS.exists():
        document = json.loads(RESULTS.read_text("utf-8"))
    if options.timings:
        document["timings"] = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
            # Times on a busy machine are not reliable.
            "load": os.getloadavg()[0],
            "rows": timings(options.rounds),
        }
    elif not options.tables:
        document["models"] = coverage()
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), document), "utf-8")


if __name__ == "__main__":
    main()
