"""The folds of each model, and their effect: ``python -m benchmarks.fold [--timings]``, for docs/fold.md."""

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
START, END = "<!-- {name}: made by python -m benchmarks.fold -->", "<!-- end -->"
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


def coverage() -> list[dict[str, Any]]:
    """Fold each model twice, cautiously and with everything allowed, in float64 where it runs in it."""
    return [row_of(name) for name in NAMES]


def row_of(name: str) -> dict[str, Any]:
    """What folds in one model, and why the rest does not."""
    row: dict[str, Any] = {"model": name}
    for mode, options in (("default", {}), ("allowed", {"untie": True, "add_bias": True})):
        model = _double(name)
        report = fold_(model, **options, **inputs(name, model))
        row[mode] = {
            "sites": len(report.sites),
            "affine": [report.count("affine"), _asked(report, "affine")],
            "center": [report.count("center"), _asked(report, "center")],
            "error": report.error,
            "loads_with": report.loads_with,
            "refused": _reasons(report),
        }
    row["linear"] = linear_row(name)
    return row


def linear_row(name: str) -> dict[str, Any]:
    """The norms that are left if all of them are linear layers, and everything is allowed."""
    model = _double(name)
    given = inputs(name, model)
    linear_(model, **given)
    try:
        report = fold_(model, untie=True, add_bias=True, **given)
    except ModelError as error:
        return {"gone": 0, "error": None, "reasons": [str(error).split("; everything")[0]]}
    stay = [site for site in report.sites if site.becomes != "Identity"]
    # A site that holds something back says so in one of these.
    reasons = dict.fromkeys(site.constants.reason or site.affine.reason for site in stay)
    return {"gone": len(report.sites) - len(stay), "error": report.error, "reasons": list(reasons)}


def _double(name: str) -> nn.Module:
    # The kernel of the default implementation of experts knows no float64.
    own: dict[str, Any] = {"experts_implementation": "batched_mm"} if name == "mixtral" else {}
    return build(name, **own).double()


def _asked(report: FoldReport, rewrite: str) -> int:
    return report.count(rewrite) + report.count(rewrite, "refused")


def _reasons(report: FoldReport) -> list[dict[str, Any]]:
    found: Counter[tuple[str, str]] = Counter()
    for site in report.sites:
        for rewrite in ("affine", "center"):
            reason = getattr(site, rewrite).reason
            if reason is not None:
                found[rewrite, reason] += 1
    return [
        {"rewrite": rewrite, "reason": reason, "sites": n}
        for (rewrite, reason), n in found.most_common()
    ]


def timings(rounds: int = 60) -> list[dict[str, Any]]:
    """Time a forward pass of GPT-2's and ViT-B's shape, random weights, original and folded, one after the other."""
    import transformers

    def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
        config = transformers.GPT2Config(use_cache=False)
        return transformers.GPT2LMHeadModel(config), {
            "input_ids": torch.randint(0, 50257, (1, 128))
        }

    def vit() -> tuple[nn.Module, dict[str, Tensor]]:
        model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
        return model, {"pixel_values": torch.randn(1, 3, 224, 224)}

    makers: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
        "GPT-2 small, 1 x 128 tokens": gpt2,
        "ViT-B/16, 1 image of 224 x 224": vit,
    }
    return [measured(name, make, rounds) for name, make in makers.items()]


def measured(
    name: str, make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], rounds: int
) -> dict[str, Any]:
    """Times of one model, in milliseconds; no time is taken of a result that is wrong."""
    torch.manual_seed(0)
    model, given = make()
    _shake_(model.eval())
    torch.manual_seed(0)
    folded, _ = make()
    folded.load_state_dict(model.state_dict())
    report = fold_(folded.eval(), untie=True, add_bias=True, **given)
    row: dict[str, Any] = {
        "model": name,
        "affine": report.count("affine"),
        "center": report.count("center"),
        "error": report.error,
    }
    with torch.no_grad():
        exact = model(**given).logits
        for mode in ("eager", "compiled"):
            pair = (
                [model, folded]
                if mode == "eager"
                else [torch.compile(m, dynamic=False) for m in (model, folded)]
            )
            for one in pair:
                error = float((one(**given).logits - exact).norm() / exact.norm())
                if error > 1e-4:
                    raise SystemExit(
                        f"{name}, {mode}: the output is wrong by {error:.1e}; no time is taken"
                    )
            times: list[list[float]] = [[], []]
            for i in range(rounds + 5):
                # In turns, and which one comes first in turns too: the machine's mood is the same
                # for both.
                for j in (0, 1) if i % 2 else (1, 0):
                    start = time.perf_counter()
                    pair[j](**given)
                    if i >= 5:
                        times[j].append(1e3 * (time.perf_counter() - start))
            row[mode] = {
                "original_ms": median(times[0]),
                "folded_ms": median(times[1]),
                "ratio_of_pairs": median(b / a for a, b in zip(*times, strict=True)),
                "rounds": rounds,
            }
    return row


@torch.no_grad()
def _shake_(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))


SHOWN = ("gpt2", "llama", "qwen3", "mixtral", "bert", "t5", "vit", "dinov2", "whisper")


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
        default, allowed = row["default"], row["allowed"]
        cells = [_of(mode[name]) for mode in (default, allowed) for name in ("affine", "center")]
        loads = default["loads_with"]
        loads += f", then {allowed['loads_with']}" if allowed["loads_with"] != loads else ""
        lines.append(
            f"| {_title(row)} | {allowed['sites']} | {' | '.join(cells)} | {loads} | "
            f"{_why(allowed['refused'])} |"
        )
    return "\n".join(lines)


def _title(row: dict[str, Any]) -> str:
    name: str = row["model"]
    return TITLES.get(name, name.upper() if name in _UPPER else name.capitalize())


def linear_table(document: dict[str, Any]) -> str:
    """The models of which a linear layer stays, one row each, after those of which none does."""
    rows = [(row, row["linear"], row["allowed"]["sites"]) for row in document["models"]]
    whole = [row for row, linear, sites in rows if linear["gone"] == sites]
    lines = [
        f"All go in {len(whole)} of {len(rows)} models, with an error of at most "
        f"{max(row['linear']['error'] for row in whole):.0e}: {', '.join(map(_title, whole))}.",
        "",
        "| model | gone | why the others stay |",
        "|---|---|---|",
    ]
    for row, linear, sites in rows:
        if linear["gone"] != sites:
            lines.append(
                f"| {_title(row)} | {linear['gone']} of {sites} | "
                f"{linear['reasons'][0].replace('|', '/')} |"
            )
    return "\n".join(lines)


def _of(pair: list[int]) -> str:
    return f"{pair[0]} of {pair[1]}" if pair[1] else "none"


def _why(refused: list[dict[str, Any]]) -> str:
    """The commonest reason of each rewrite; that it is post-norm, where it is."""
    first: dict[str, str] = {}
    for entry in sorted(refused, key=lambda entry: "(post-norm)" not in entry["reason"]):
        first.setdefault(entry["rewrite"], entry["reason"])
    names = {"affine": "affine", "center": "mean"}
    return "; ".join(f"{names[rewrite]}: {reason}" for rewrite, reason in first.items()).replace(
        "|", "/"
    )


def timings_table(document: dict[str, Any]) -> str:
    """Return one row per model and mode."""
    lines = [
        "| forward pass | LayerNorm | folded | folded / LayerNorm |",
        "|---|---|---|---|",
    ]
    for row in document.get("timings", {}).get("rows", []):
        for mode in ("eager", "compiled"):
            times = row[mode]
            lines.append(
                f"| {row['model']}, {mode} | {times['original_ms']:.1f} ms | "
                f"{times['folded_ms']:.1f} ms | "
                f"{times['ratio_of_pairs']:.3f} |"
            )
    timed = document.get("timings", {})
    if timed.get("load", float("inf")) > timed.get("threads", 0) + 0.5:
        lines += [
            "",
            "(Taken while the machine was busy with other work: these times are to be taken "
            "again.)",
        ]
    return "\n".join(lines)


def renewed(text: str, document: dict[str, Any]) -> str:
    """Return the page with its tables as the results say."""
    for name, table in (
        ("answers", answers_table),
        ("coverage", coverage_table),
        ("linear", linear_table),
        ("timings", timings_table),
    ):
        before, rest = text.split(START.format(name=name))
        _, after = rest.split(END, 1)
        text = f"{before}{START.format(name=name)}\n{table(document)}\n{END}{after}"
    return text


def main() -> None:
    """Fold, or time, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timings", action="store_true", help="time the forward passes instead")
    parser.add_argument("--rounds", type=int, default=60, help="calls of each model")
    parser.add_argument("--tables", action="store_true", help="renew the page only")
    options = parser.parse_args()
    document: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if options.timings:
        machine: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        # The load of the machine: times on a busy machine are not reliable.
        machine["load"] = os.getloadavg()[0]
        document["timings"] = machine | {"rows": timings(options.rounds)}
    elif not options.tables:
        document["models"] = coverage()
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8"), document), "utf-8")


if __name__ == "__main__":
    main()
