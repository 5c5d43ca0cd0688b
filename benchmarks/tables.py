"""Write the tables of README.md and docs/ from the committed results: ``python -m benchmarks.tables``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any

from benchmarks import draws, memory, models
from benchmarks.field import table as field
from benchmarks.speed import table as speed
from dynorm.recipe import DEFAULT_WITNESSES

ROOT = Path(__file__).parent.parent
START, END = "<!-- {name}: made by python -m benchmarks.tables -->", "<!-- end -->"
NAMES = {
    "dyisru": "DyISRU",
    "dyt": "scaled DyT",
    "derf": "scaled Derf",
    "linear": "linear (control)",
}
STAGES = ("calibrated", "refined")
RETRIEVED = {
    "original": "the original",
    "untrained": "converted, no training (`--refine 0`)",
    "demo": "refined, and distilled for {steps:,} steps (`make demo`)",
}
DISTILLATION_STEPS = 1200


def load(name: str) -> dict[str, Any]:
    """Return the committed results of a name."""
    document: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8")
    )
    return document


def cell(rows: list[dict[str, Any]]) -> str:
    """Mean cosine / Spearman over the seeds, with the spread where there are several."""
    if not rows:
        return "not run"
    cosines, ranks = [row["cosine"] for row in rows], [row["spearman"] for row in rows]
    if len(rows) == 1:
        return f"{cosines[0]:.4f} / {ranks[0]:.4f}"
    return f"{_mean(cosines)} / {_mean(ranks)}"


def quality_table() -> str:
    """One row per layer, one column per stage; the third is that of benchmarks/distillation.py."""
    rows = load("quality")["rows"]
    trained = [
        row
        for row in load("distillation")["rows"]
        if (row["model"], row["steps"]) == ("encoder", DISTILLATION_STEPS)
    ]
    lines = [
        "| all 13 norms replaced by | calibrated, no training | constants refined together | "
        f"{DISTILLATION_STEPS:,} steps of distillation |",
        "|---|---|---|---|",
    ]
    for witnesses, words in ((4, ", four witnesses"), (0, "")):
        alike = [row for row in rows if row.get("witnesses", 0) == witnesses]
        for layer, per_channel in dict.fromkeys(
            (row["layer"], row["per_channel"]) for row in alike
        ):
            name = NAMES[layer] + words + ("" if per_channel else ", one constant per layer")
            mine = [
                row for row in alike if (row["layer"], row["per_channel"]) == (layer, per_channel)
            ]
            cells = [cell([row for row in mine if row["stage"] == stage]) for stage in STAGES]
            cells.append(cell([row["docstrings"] for row in trained if row["recipe"] == name]))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def retrieval_table() -> str:
    """One row per model: means over the draws of packages, and the most that a draw has lost to the original."""
    first, *others = load("retrieval")["rows"]
    lines = [
        "| all-MiniLM-L6-v2 | right package first | mean reciprocal rank | largest loss of a draw "
        "|",
        "|---|---|---|---|",
    ]
    steps = models.demo_steps()
    for row in (first, *others):
        title = RETRIEVED[row["model"]].format(steps=steps)
        lost = max(theirs - ours for theirs, ours in zip(first["mrr"], row["mrr"], strict=True))
        cells = f"{mean(row['recall_at_1']):.1%} | {mean(row['mrr']):.4f} | {f'{lost:.4f}' if row is not first else ''}"
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines)


def headline_table() -> str:
    """One row per stage: the task, and the cosine to the original on held-out texts."""
    retrieved = {row["model"]: row for row in load("retrieval")["rows"]}
    lines = [
        "| all-MiniLM-L6-v2, all 13 norms | right package first | mean reciprocal rank | "
        "cosine: mean | worst |",
        "|---|---|---|---|---|",
    ]
    for name, title, figures in (
        ("original", "the original", None),
        ("untrained", "converted, no training", models.untrained_encoder()),
        ("demo", f"and distilled, {models.demo_steps():,} steps", load("demo")["output"]),
    ):
        row = retrieved[name]
        task = f"{mean(row['recall_at_1']):.1%} | {mean(row['mrr']):.4f}"
        cosines = " | "
        if figures is not None:
            cosines = f"{figures['cosine_mean']:.4f} | {figures['cosine_min']:.3f}"
        lines.append(f"| {title} | {task} | {cosines} |")
    return "\n".join(lines)


def converted_table() -> str:
    """One row per model with the default number of witnesses: what is left without training, and after some."""
    decoder = models.decoder_rows(DEFAULT_WITNESSES)
    images = load("images")["rows"]
    speech = load("speech")["rows"]
    trained = load("demo")["output"]
    encoder = [
        f"cosine {models.untrained_encoder()['cosine_mean']:.4f}",
        f"{trained['cosine_mean']:.4f}, {models.demo_steps():,} steps",
    ]

    def loss(row: dict[str, Any]) -> str:
        kind = row["docstrings"]
        return f"{kind['loss_difference']:+.3f} nats, {kind['agreement']:.0%} same token"

    def neighbours(row: dict[str, Any]) -> str:
        return f"cosine {row['cosine_mean']:.3f}, {row['neighbours']:.0%} same neighbour"

    distilled_decoder = "not run"
    if decoder[-1]["steps"]:
        distilled_decoder = f"{loss(decoder[-1])}, {decoder[-1]['steps']} steps"
    lines = ["| all norms replaced | no training | distilled |", "|---|---|---|"]
    for title, cells in (
        ("[encoder](docs/howto/encoder.md) all-MiniLM-L6-v2", encoder),
        (
            "[decoder](docs/howto/decoder.md) SmolLM2-135M",
            [loss(decoder[0]), distilled_decoder],
        ),
        (
            "[images](docs/howto/vision.md) DINOv2-small",
            [neighbours(images[0]), f"{neighbours(images[1])}, {images[1]['steps']} steps"],
        ),
        (
            "[speech](docs/howto/speech.md) Whisper tiny.en",
            [
                f"{speech[0]['word_agreement']:.0%} same words",
                f"{speech[-1]['word_agreement']:.0%}, {speech[-1]['steps']} steps",
            ],
        ),
    ):
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def witness_table() -> str:
    """One row per layer and number of witnesses, one column per stage; the worst text stands between the means."""
    measured = [
        row for row in load("quality")["rows"] if row["per_channel"] and row["layer"] != "derf"
    ]
    lines = [
        "| all 13 norms replaced by | witnesses, at most | calibrated, no training | constants "
        "refined together |",
        "|---|---|---|---|",
    ]
    for count in sorted({row.get("witnesses", 0) for row in measured}):
        for layer in dict.fromkeys(row["layer"] for row in measured):
            rows = [
                row for row in measured if (row["layer"], row.get("witnesses", 0)) == (layer, count)
            ]
            if not rows:
                continue
            cells = (
                _with_worst([row for row in rows if row["stage"] == stage]) for stage in STAGES
            )
            lines.append(f"| {NAMES[layer]} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decoder_table() -> str:
    """One row per stage of SmolLM2: for each kind of text the growth of the loss, the divergence and the agreement."""
    kinds = ("docstrings", "reference")
    lines = [
        f"| stage | witnesses | tokens of training | {' | '.join(kinds)} | greedy tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in load("decoder")["rows"]:
        cells = [
            f"{row[kind]['loss_difference']:+z.3f} / {row[kind]['kl']:.3f} / "
            f"{row[kind]['agreement']:.0%}"
            for kind in kinds
        ]
        begin = f"| {row['stage']} | {row['witnesses'] or ''} | {row['tokens']:,} |"
        lines.append(f"{begin} {' | '.join(cells)} | {row['greedy']['equal']:.0%} |")
    return "\n".join(lines)


def draws_table() -> str:
    """One row per size of the calibration text: the divergence over the draws, for each kind of text."""
    rows = load("draws")["rows"]
    kinds = ("docstrings", "reference", "licences", "random tokens")
    lines = [
        f"| blocks of 256 tokens | draws | {' | '.join(kinds)} |",
        "|---|---|---|---|---|---|",
    ]
    for blocks in draws.SIZES:
        summaries = [draws.summary(rows, blocks, kind) for kind in kinds]
        if summaries[0]["draws"]:
            cells = [
                f"{s['mean']:.2f} ± {s['noise']:.2f}, worst {s['worst']:.2f}" for s in summaries
            ]
            lines.append(f"| {blocks} | {summaries[0]['draws']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def explained_table() -> str:
    """One row per function: the share of the outputs of 25 norms that it explains."""
    document = load("explained")
    lines = [
        "| function | fitted | explained, mean of the norms | at the worst norm |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        name = "any function" if row["function"] == "any" else row["function"]
        lines.append(f"| {name} | {row['constants']} | {row['mean']:.1%} | {row['least']:.1%} |")
    for fitted, part in document["reported"].items():
        lines.append(f"| evolved (2605.14047, a ViT-B) | {fitted} | {part:.1%} | |")
    return "\n".join(lines)


def untrained_table() -> str:
    """One row per number of witnesses of the decoder: what it loses on each kind of text."""
    rows = [row for row in load("untrained")["rows"] if row["model"] == "smollm2"]
    facts = ("model", "witnesses", "means_folded", "seconds", "made_with")
    kinds = [name for name in rows[0] if name not in facts]
    lines = [f"| witnesses | {' | '.join(kinds)} |", "|---|" + "---|" * len(kinds)]
    for row in rows:
        cells = []
        for kind in kinds:
            figures = row[kind]
            cells.append(
                f"{figures['loss_difference']:+.3f} / {figures['kl']:.3f} "
                f"({figures['kl_worst_token']:.1f}) / {figures['agreement']:.0%}"
            )
        lines.append(f"| {row['witnesses']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def untrained_others_table() -> str:
    """One row per model and number of witnesses: images and speech."""
    lines = [
        "| model | witnesses | means folded | cosine, mean / worst | same neighbour | same words | "
        "same likeliest token | KL (worst token) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in load("untrained")["rows"]:
        begin = f"{row['witnesses']} | {row.get('means_folded', 0)}"
        if "cosine_mean" in row:
            name = {"minilm": "all-MiniLM-L6-v2", "dinov2": "DINOv2-small"}[row["model"]]
            if row.get("refined"):
                name += f", {row['refined']} steps of refinement"
            cosines = f"{row['cosine_mean']:.4f} / {row['cosine_min']:.3f}"
            lines.append(f"| {name} | {begin} | {cosines} | {row['neighbours']:.0%} | | | |")
        if row["model"] == "whisper":
            shares = f"{row['word_agreement']:.0%} | {row['agreement']:.1%}"
            divergence = f"{row['kl']:.3f} ({row['kl_worst_token']:.1f})"
            lines.append(f"| Whisper tiny.en | {begin} | | | {shares} | {divergence} |")
    return "\n".join(lines)


def speech_table() -> str:
    """One row per stage of Whisper: its words and likeliest tokens beside the original's, and the right words."""
    found = load("speech")
    lines = [
        "| stage | files heard | same words | same likeliest token | KL | correct words |",
        "|---|---|---|---|---|---|",
        f"| the original | | | | | {found['rows'][0]['words_right_original']:.1%} |",
    ]
    for row in found["rows"]:
        shares = " | ".join(f"{row[name]:.1%}" for name in ("word_agreement", "agreement"))
        figures = f"{shares} | {row['kl']:.2f} | {row['words_right']:.1%}"
        lines.append(f"| {row['stage']} | {row['files']} | {figures} |")
    return "\n".join(lines)


def images_table() -> str:
    """One row per conversion of DINOv2, and the original on moved photographs: how far embeddings are from its own."""
    lines = [
        "| refined, steps | distilled, steps | cosine: mean | median | worst | rank correlation of "
        "all pairs "
        "| same nearest neighbour |",
        "|---|---|---|---|---|---|---|",
    ]
    document = load("images")
    original = {
        "refined": "the original, on photographs moved by one pixel",
        "steps": "",
    } | document["moved"]
    for row in (*document["rows"], original):
        figures = (
            f"{row[name]:.3f}"
            for name in ("cosine_mean", "cosine_median", "cosine_min", "spearman")
        )
        lines.append(
            f"| {row['refined']} | {row['steps']} | {' | '.join(figures)} | "
            f"{row['neighbours']:.0%} |"
        )
    return "\n".join(lines)


def _with_worst(rows: list[dict[str, Any]]) -> str:
    """Mean cosine / worst text of any seed / mean Spearman."""
    if not rows:
        return "not run"
    cosine, ranks = (mean(row[name] for row in rows) for name in ("cosine", "spearman"))
    return f"{cosine:.4f} / {min(row['worst'] for row in rows):.3f} / {ranks:.4f}"


def distillation_tables() -> str:
    """One table per model and number of steps, one row per recipe, one column per kind of text."""
    document = load("distillation")
    titles = {kind: kind for kind in ("docstrings", "code", "reference")}
    titles |= {library: f"docstrings of {library}" for library in ("torch.nn", "numpy", "sympy")}
    blocks = []
    for model, steps in sorted({(row["model"], row["steps"]) for row in document["rows"]}):
        mine = [row for row in document["rows"] if (row["model"], row["steps"]) == (model, steps)]
        lines = [f"**{document['models'][model]}; {steps:,} steps**", ""]
        kinds = [kind for kind in titles if any(kind in row for row in mine)]
        lines += [
            f"| recipe | {' | '.join(titles[kind] for kind in kinds)} |",
            "|---" * (len(kinds) + 1) + "|",
        ]
        show = _with_worst if model == "encoder" else _nats
        for recipe in dict.fromkeys(row["recipe"] for row in mine):
            rows = [row for row in mine if row["recipe"] == recipe]
            lines.append(
                f"| {recipe} | "
                f"{' | '.join(show([row[kind] for row in rows if kind in row]) for kind in kinds)} "
                "|"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def paper_table() -> str:
    """The fits of section 4 beside the paper's printed values."""
    document = load("paper")
    printed = document["paper"]
    lines = [
        "| function | constant | in the paper | mean absolute residual | in the paper |",
        "|---|---|---|---|---|",
    ]
    for name, constant in (
        ("DyT", "alpha"),
        ("DyISRU", "beta"),
        ("Derf", "alpha"),
        ("linear", "slope"),
    ):
        fit, theirs = (
            document["fits"][name],
            printed.get(name, {"constant": "", "mean_absolute_residual": ""}),
        )
        lines.append(
            f"| {name} | {constant} = {fit[constant]:.8g} | {theirs['constant']} | "
            f"{fit['mean_absolute_residual']:.6g} | {theirs['mean_absolute_residual']} |"
        )
    form = document["closed_form"]
    exact = f"m = {form['center']:.5f}, C v = {form['beta']:.8g}"
    lines.append(f"| closed form, no fit | {exact} | | {form['mean_absolute_residual']:.1e} | |")
    return "\n".join(lines)


def generality() -> str:
    """The result of a thousand samples, in the words of ``dynorm paper``."""
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", load("paper")["generality"]["verdict"])
    return "\n".join(
        "\n".join(wrap(f"- {each}", 118, break_on_hyphens=False, subsequent_indent="  "))
        for each in sentences
    )


def inspection_table() -> str:
    """Section 4 on two models: one row per norm."""
    blocks = []
    for name, report in load("inspection")["models"].items():
        summary = report["summary"]
        best, core = summary["outliers_best"], summary["core_best"]
        lines = [
            f"**{name}**: DyISRU's residual is below DyT's at {summary['holds']} of "
            f"{summary['sites']} norms; smallest "
            f"of the three: DyISRU {best['dyisru']}, DyT {best['dyt']}, linear {best['linear']}. "
            "On all channels "
            f"DyISRU's error is below DyT's at {summary['core_holds']}; smallest: DyISRU "
            f"{core['dyisru']}, "
            f"DyT {core['dyt']}, linear {core['linear']}.",
            "",
            "| norm | largest outlier, σ | spread of ln σ | outliers: linear | DyT | DyISRU "
            "| all channels: linear | DyT | DyISRU |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| `{site['path']}` | {site['outlier']:.1f} | {site['sigma_spread']:.2f} | "
            f"{_three(site['outliers']['residuals'])} | {_three(site['core']['errors'])} |"
            for site in report["sites"]
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def speed_machine() -> str:
    """The machine that the figures of speed were measured on."""
    return "\n".join(f"{line}  " for line in speed.headline(load("speed")).splitlines()).rstrip()


def speed_headline() -> str:
    """Return one row per pass and dtype: the ratio of DyISRU and LayerNorm at each size."""
    lines: list[str] = []
    for table in _operation_tables():
        [row] = [row for row in table.rows if row[0] == "DyISRU"]
        if not lines:
            columns = ["DyISRU", *table.columns[1:]]
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        # A cell has the time, and in brackets the ratio.
        ratios = [cell.partition("(")[2].rstrip(")") for cell in row[1:]]
        lines.append(f"| {table.title} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def speed_ratios() -> str:
    """The ratios that matter most."""
    return _markdown(speed.ratios(load("speed")))


def speed_models() -> str:
    """Whole models."""
    return _markdown(speed.models(load("speed")))


def speed_operations() -> str:
    """One table per dtype and pass, for the most threads."""
    return "\n\n".join(f"**{table.title}**\n\n{_markdown(table)}" for table in _operation_tables())


def _operation_tables() -> list[speed.Rows]:
    """Return the tables of the passes, for the most threads."""
    document = load("speed")
    first = document["settings"]["threads"][0]
    groups = [group for group in document["operations"] if group["threads"] == first]
    return speed.operation_tables(document | {"operations": groups})


def steps_table() -> str:
    """A training step's time over that with norms, one column per model and number of threads."""
    document = load("steps")
    rows = document["rows"]
    heads = [
        f"{'GPT-2' if row['model'] == 'gpt2' else 'Llama'}, {row['threads']} threads"
        for row in rows
    ]
    heads = [head.replace(", 1 threads", ", 1 thread") for head in heads]
    norms = (f"{row['milliseconds'][row['norm']][0]:.0f} ms" for row in rows)
    lines = [
        f"| | {' | '.join(heads)} |",
        "|---" * (len(rows) + 1) + "|",
        f"| with its norms | {' | '.join(norms)} |",
    ]
    for name in rows[0]["over_norm"]:
        cells = ("{:.2f} ({:.2f} to {:.2f})".format(*row["over_norm"][name]) for row in rows)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    load_, rounds = document["load"], rows[0]["rounds"]
    note = (
        "Time of a step over that of the same model with its norms in the same rounds: median and "
        "quartiles of "
        f"{rounds}. "
        f"Load average {load_['before'][0]:.1f} before, {load_['after'][0]:.1f} after."
    )
    return "\n".join([*lines, "", *wrap(note, 118, break_on_hyphens=False)])


def auto_table() -> str:
    """What ``to="auto"`` leaves of the norms of a real encoder, and of the quality."""
    document = load("auto")
    lines = [
        "| layers | linear | linear with witnesses | DyISRU | norms left | Spearman, calibrated | "
        "Spearman, distilled |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["calibrated"]:
        tolerance = row["tolerance"]
        name = "DyISRU, four witnesses" if tolerance is None else f"auto, tolerance {tolerance:g}"
        alike = [
            each
            for each in document["distilled"]
            if (each["to"], each.get("tolerance")) == (row["to"], tolerance)
        ]
        spans = (
            f"{each['steps']:,} steps" if each["steps"] else f"{each['minutes']:g} minutes"
            for each in alike
        )
        trained = (
            f"{each['spearman']:.4f} ({span})" for each, span in zip(alike, spans, strict=True)
        )
        counts = [row[kind] for kind in ("linear", "linear with witnesses", "dyisru")]
        cells = [name, *map(str, counts), str(sum(counts[1:])), f"{row['spearman']:.4f}"]
        lines.append(f"| {' | '.join([*cells, ', '.join(trained) or 'not run'])} |")
    return "\n".join(lines)


def encrypted_table() -> str:
    """Time, levels and error of what may stand at a norm under encryption."""
    document = load("encrypted")
    lines = [
        "| site | function | levels | milliseconds, smallest ring | one ring for all | error |",
        "|---|---|---|---|---|---|",
    ]
    words = {"norm": f"the norm, its root a polynomial of degree {document['degree']}"}
    for row in document["rows"]:
        site = row["site"].removeprefix("encoder.layer.1.").removesuffix(".LayerNorm")
        times = f"{row['milliseconds']:,.1f} | {row['milliseconds_in_one_ring']:,.1f}"
        name = words.get(row["function"], row["function"])
        lines.append(f"| {site} | {name} | {row['levels']} | {times} | {row['error']:.4f} |")
    most, load_ = max(row["error_of_encryption"] for row in document["rows"]), document["load"][0]
    note = (
        "The error is against the norm, over the spread of its outputs on held-out tokens. That of "
        "the encryption is "
        f"at most {most:.1e}. Load average {load_:.1f}."
    )
    return "\n".join([*lines, "", *wrap(note, 118, break_on_hyphens=False)])


def memory_table() -> str:
    """One row per stage: the bytes per unit, the check on a small model, and a large model scaled from it."""
    found, large = load("memory"), memory.terms(memory.LARGE)
    lines = [
        "| bytes | per parameter | per token, layer and channel | per token and word "
        "| check: formula / measured, GiB | 8 B, scaled: one process | each of eight, sharded "
        "|",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, per in found["bytes"].items():
        parts = [count * each for count, each in zip(large, per.values(), strict=True)]
        ranks = 8 if stage in ("train", "distill") else 1
        check = [f"{found['check'][stage][name] / 2**30:.2f}" for name in ("formula", "measured")]
        cells = [*(f"{each:.1f}" for each in per.values()), " / ".join(check)]
        cells += [
            f"{sum(parts) / 2**30:.0f} GiB",
            f"{(parts[0] / ranks + sum(parts[1:])) / 2**30:.0f} GiB",
        ]
        name = "train once, for comparison" if stage == "train" else stage
        lines.append(f"| {name} | {' | '.join(cells)} |")
    ratios = [row["distill"] / row["train"] for row in found["small"]]
    times = f"{min(ratios):.2f} to {max(ratios):.2f} times"
    return "\n".join(
        [*lines, "", f"On the four Llamas distillation needs {times} the memory of training once."]
    )


def _markdown(table: speed.Rows) -> str:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (table.columns, *table.rows))
    note = "\n".join(wrap(table.note, 118, break_on_hyphens=False))
    return "\n".join([head, "|---" * len(table.columns) + "|", *rows, "", note])


def _nats(rows: list[dict[str, float]]) -> str:
    """Growth of the next token's loss / divergence from the original, means over the seeds."""
    more = [row["nats"] - row["original_nats"] for row in rows]
    apart = f"{mean(row['divergence'] for row in rows):.4f}"
    spread = f" ± {_half_range(more):.4f}" if len(rows) > 1 else ""
    return f"{mean(more):+.4f}{spread} / {apart}"


def _three(values: dict[str, float]) -> str:
    """Cells of the three functions, the least in bold."""
    least = min(values.values())
    cells = (f"{values[name]:.3f}" for name in ("linear", "dyt", "dyisru"))
    return " | ".join(f"**{cell}**" if cell == f"{least:.3f}" else cell for cell in cells)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"converted": converted_table, "headline": headline_table},
    "docs/quality.md": {
        "retrieval": retrieval_table,
        "speech": speech_table,
        "quality": quality_table,
        "distillation": distillation_tables,
    },
    "docs/speed.md": {
        "speed-headline": speed_headline,
        "speed-machine": speed_machine,
        "speed-ratios": speed_ratios,
        "speed-models": speed_models,
        "speed-operations": speed_operations,
    },
    "docs/witnesses.md": {
        "explained": explained_table,
        "untrained": untrained_table,
        "untrained_others": untrained_others_table,
        "witnesses": witness_table,
        "decoder": decoder_table,
        "draws": draws_table,
    },
    "docs/models.md": models.TABLES,
    "docs/benchmarks.md": {"field": field.field_table},
    "docs/anneal.md": {"steps": steps_table},
    "docs/without-norms.md": {"auto": auto_table, "encrypted": encrypted_table},
    "docs/howto/vision.md": {"images": images_table},
    "docs/howto/processes.md": {"memory": memory_table},
    "docs/mathematics.md": {
        "paper": paper_table,
        "generality": generality,
        "inspection": inspection_table,
    },
}
"""The tables of each page, by their marks."""


def renewed(page: str) -> str:
    """Return the text of a page with its tables as the results say."""
    text = (ROOT / page).read_text("utf-8")
    for name, table in PAGES[page].items():
        before, rest = text.split(START.format(name=name))
        _, after = rest.split(END, 1)
        text = f"{before}{START.format(name=name)}\n{table()}\n{END}{after}"
    return text


def _mean(values: list[float]) -> str:
    """Mean and half the range, with a digit more where the seeds are that close."""
    digits = 4 if _half_range(values) < 0.0005 else 3
    return f"{mean(values):.{digits}f} ± {_half_range(values):.{digits}f}"


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def main() -> None:
    """Renew the tables."""
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), "utf-8")


if __name__ == "__main__":
    main()
