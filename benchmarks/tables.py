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
START = "<!-- {name}: made by python -m benchmarks.tables -->"
END = "<!-- end -->"
NAMES = {
    "dyisru": "DyISRU",
    "dyt": "scaled DyT",
    "derf": "scaled Derf",
    "linear": "linear (control)",
}
STAGES = ("calibrated", "refined")
STAGES_OF_SPEECH = ("calibrated", "distilled")
RETRIEVED = {
    "original": "the original",
    "untrained": "converted, no training (`--refine 0`)",
    "demo": "refined, and distilled for {steps:,} steps (`make demo`)",
}
DISTILLATION_STEPS = 1200
# The values of a row that does not name them.
DEFAULTS = {"witnesses": 0}
Row = dict[str, Any]


def load(name: str) -> dict[str, Any]:
    """Return the committed results of a name."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


def select(rows: list[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    chosen = rows
    for name, value in values.items():
        default = DEFAULTS.get(name)
        chosen = [row for row in chosen if row.get(name, default) == value]
    return chosen


def grouped(rows: list[Row], *names: str) -> list[list[Row]]:
    """Return the rows with equal values together, in the order of the first of each group."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def cell(rows: list[Row]) -> str:
    """Return the mean cosine and Spearman over the seeds, with the spread if there are several."""
    if not rows:
        return "not run"
    cosines = [row["cosine"] for row in rows]
    ranks = [row["spearman"] for row in rows]
    if len(rows) == 1:
        return f"{cosines[0]:.4f} / {ranks[0]:.4f}"
    return f"{_mean(cosines)} / {_mean(ranks)}"


def quality_table() -> str:
    """Return one row per layer, one column per stage; the third is from benchmarks/distillation.py."""
    rows = load("quality")["rows"]
    distillation = load("distillation")["rows"]
    lines = [
        "| all 13 norms replaced by | calibrated, no training | constants refined together | "
        f"{DISTILLATION_STEPS:,} steps of distillation |",
        "|---|---|---|---|",
    ]
    for witnesses, words in ((4, ", four witnesses"), (0, "")):
        for rows_of_layer in grouped(select(rows, witnesses=witnesses), "layer", "per_channel"):
            name = NAMES[rows_of_layer[0]["layer"]] + words
            if not rows_of_layer[0]["per_channel"]:
                name += ", one constant per layer"
            cells = [cell(select(rows_of_layer, stage=stage)) for stage in STAGES]
            distilled = select(distillation, model="encoder", steps=DISTILLATION_STEPS, recipe=name)
            cells.append(cell([row["docstrings"] for row in distilled]))
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def retrieval_table() -> str:
    """Return one row per model: means over the draws of packages, and the largest loss in a draw."""
    rows = load("retrieval")["rows"]
    original = rows[0]
    lines = [
        "| all-MiniLM-L6-v2 | right package first | mean reciprocal rank | largest loss of a draw "
        "|",
        "|---|---|---|---|",
    ]
    steps = models.demo_steps()
    for row in rows:
        title = RETRIEVED[row["model"]].format(steps=steps)
        loss = ""
        if row is not original:
            pairs = zip(original["mrr"], row["mrr"], strict=True)
            loss = f"{max(before - after for before, after in pairs):.4f}"
        task = f"{mean(row['recall_at_1']):.1%} | {mean(row['mrr']):.4f}"
        lines.append(f"| {title} | {task} | {loss} |")
    return "\n".join(lines)


def headline_table() -> str:
    """Return one row per stage: the task, and the cosine to the original on held-out texts."""
    retrieved = {row["model"]: row for row in load("retrieval")["rows"]}
    lines = [
        "| all-MiniLM-L6-v2, all 13 norms | right package first | mean reciprocal rank | "
        "mean cosine | worst cosine |",
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
    """Return one row per model with the default number of witnesses: the loss without and with training."""
    untrained = models.untrained_encoder()
    trained = load("demo")["output"]
    decoder = models.decoder_rows(DEFAULT_WITNESSES)
    images = load("images")["rows"]
    speech = [row for row in load("speech")["rows"] if row["stage"] in STAGES_OF_SPEECH]

    def loss(row: Row) -> str:
        kind = row["docstrings"]
        return f"loss {kind['loss_difference']:+.3f}, {kind['agreement']:.0%} same next token"

    def neighbours(row: Row) -> str:
        return f"cosine {row['cosine_mean']:.3f}, {row['neighbours']:.0%} same nearest neighbour"

    distilled_decoder = "not run"
    if decoder[-1]["steps"]:
        kind = decoder[-1]["docstrings"]
        distilled_decoder = (
            f"loss {kind['loss_difference']:+.3f}, {kind['agreement']:.0%}, "
            f"{decoder[-1]['steps']} steps"
        )
    lines = ["| model, all norms replaced | no training | distilled |", "|---|---|---|"]

    def add(title: str, no_training: str, distilled: str) -> None:
        lines.append(f"| {title} | {no_training} | {distilled} |")

    add(
        "[encoder](docs/howto/encoder.md) all-MiniLM-L6-v2",
        f"cosine {untrained['cosine_mean']:.4f}",
        f"{trained['cosine_mean']:.4f}, {models.demo_steps():,} steps",
    )
    add("[decoder](docs/howto/decoder.md) SmolLM2-135M", loss(decoder[0]), distilled_decoder)
    add(
        "[images](docs/howto/vision.md) DINOv2-small",
        neighbours(images[0]),
        f"cosine {images[1]['cosine_mean']:.3f}, {images[1]['neighbours']:.0%}, "
        f"{images[1]['steps']} steps",
    )
    add(
        "[speech](docs/howto/speech.md) Whisper tiny.en",
        f"{speech[0]['word_agreement_median']:.0%} same words (median file)",
        f"{speech[-1]['word_agreement_median']:.0%}, {speech[-1]['steps']} steps",
    )
    return "\n".join(lines)


def witness_table() -> str:
    """Return one row per layer and number of witnesses, with the worst text between the means."""
    rows = select(load("quality")["rows"], per_channel=True)
    layers = ("dyisru", "dyt", "linear")
    counts = sorted({row.get("witnesses", 0) for row in rows})
    lines = [
        "| all 13 norms replaced by | witnesses, at most | calibrated, no training | constants "
        "refined together |",
        "|---|---|---|---|",
    ]
    for count in counts:
        for layer in layers:
            rows_of_layer = select(rows, layer=layer, witnesses=count)
            if rows_of_layer:
                cells = [_with_worst(select(rows_of_layer, stage=stage)) for stage in STAGES]
                lines.append(f"| {NAMES[layer]} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def decoder_table() -> str:
    """Return one row per stage of SmolLM2: the loss, divergence and agreement on each kind of text."""
    kinds = ("docstrings", "reference")
    lines = [
        f"| stage | witnesses | tokens of training | {' | '.join(kinds)} | greedy tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in load("decoder")["rows"]:
        cells = [row["stage"], str(row["witnesses"] or ""), f"{row['tokens']:,}"]
        for kind in kinds:
            figures = row[kind]
            cells.append(
                f"{figures['loss_difference']:+z.3f} / {figures['kl']:.3f} / "
                f"{figures['agreement']:.0%}"
            )
        cells.append(f"{row['greedy']['equal']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draws_table() -> str:
    """Return one row per number of witnesses and size of the calibration text, over the draws."""
    rows = load("draws")["rows"]
    kinds = ("docstrings", "reference", "licences", "random tokens")
    lines = [
        f"| witnesses | blocks of 256 tokens | draws | {' | '.join(kinds)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for witnesses, blocks in dict.fromkeys((row["witnesses"], row["blocks"]) for row in rows):
        summaries = [draws.summary(rows, witnesses, blocks, kind) for kind in kinds]
        cells = [str(witnesses), str(blocks), str(summaries[0]["draws"])]
        # A divergence of some thousandths needs a third digit.
        digits = 2 if witnesses < DEFAULT_WITNESSES else 3
        for summary in summaries:
            spread = f"{summary['mean']:.{digits}f} ± {summary['noise']:.{digits}f}"
            cells.append(f"{spread}, worst {summary['worst']:.{digits}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def explained_table() -> str:
    """Return one row per function: the share of the outputs of 25 norms that it explains."""
    document = load("explained")
    lines = [
        "| function | fitted | explained, mean of the norms | at the worst norm |",
        "|---|---|---|---|",
    ]
    for row in document["rows"]:
        name = "any function" if row["function"] == "any" else row["function"]
        lines.append(f"| {name} | {row['constants']} | {row['mean']:.1%} | {row['least']:.1%} |")
    for constants, share in document["reported"].items():
        lines.append(f"| evolved (2605.14047, a ViT-B) | {constants} | {share:.1%} | |")
    return "\n".join(lines)


def untrained_table() -> str:
    """Return one row per number of witnesses of the decoder: its loss on each kind of text."""
    rows = select(load("untrained")["rows"], model="smollm2")
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
    """Return one row per number of witnesses of the other models."""
    names = {"minilm": "all-MiniLM-L6-v2", "dinov2": "DINOv2-small"}
    lines = [
        "| model | witnesses | means folded | cosine, mean / worst | same neighbour | same words | "
        "same likeliest token | KL (worst token) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in load("untrained")["rows"]:
        begin = f"{row['witnesses']} | {row.get('means_folded', 0)}"
        if "cosine_mean" in row:
            name = names[row["model"]]
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
    """Return one row per stage of Whisper: how far it agrees with the original, and with the speech."""
    rows = load("speech")["rows"]
    lines = [
        "| stage | files heard | same words | in the median file | same likeliest token | KL | "
        "correct words |",
        "|---|---|---|---|---|---|---|",
        f"| the original | | | | | | {rows[0]['words_right_original']:.1%} |",
    ]
    for row in rows:
        cells = [row["stage"], str(row["files"] or "")]
        for name in ("word_agreement", "word_agreement_median", "agreement"):
            cells.append(f"{row[name]:.1%}")
        cells += [f"{row['kl']:.3f}", f"{row['words_right']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def images_table() -> str:
    """Return one row per conversion of DINOv2, and one for the original on moved photographs."""
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
        **document["moved"],
    }
    for row in (*document["rows"], original):
        cells = [str(row["refined"]), str(row["steps"])]
        for name in ("cosine_mean", "cosine_median", "cosine_min", "spearman"):
            cells.append(f"{row[name]:.3f}")
        cells.append(f"{row['neighbours']:.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_worst(rows: list[Row]) -> str:
    """Return the mean cosine, the worst text of any seed, and the mean Spearman."""
    if not rows:
        return "not run"
    cosine = mean(row["cosine"] for row in rows)
    worst = min(row["worst"] for row in rows)
    rank = mean(row["spearman"] for row in rows)
    return f"{cosine:.4f} / {worst:.3f} / {rank:.4f}"


def distillation_tables() -> str:
    """Return a table per model and number of steps: one row per recipe, one column per kind of text."""
    document = load("distillation")
    titles = {
        "docstrings": "docstrings",
        "code": "code",
        "reference": "reference",
        "torch.nn": "docstrings of torch.nn",
        "numpy": "docstrings of numpy",
        "sympy": "docstrings of sympy",
    }
    blocks = []
    keys = {(row["model"], row["steps"]) for row in document["rows"]}
    for model, steps in sorted(keys):
        rows = select(document["rows"], model=model, steps=steps)
        show = _with_worst if model == "encoder" else _nats
        names = set().union(*rows)
        kinds = [kind for kind in titles if kind in names]
        heads = [titles[kind] for kind in kinds]
        lines = [
            f"**{document['models'][model]}; {steps:,} steps**",
            "",
            f"| recipe | {' | '.join(heads)} |",
            "|---" * (len(kinds) + 1) + "|",
        ]
        for rows_of_recipe in grouped(rows, "recipe"):
            cells = [rows_of_recipe[0]["recipe"]]
            for kind in kinds:
                cells.append(show([row[kind] for row in rows_of_recipe if kind in row]))
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def paper_table() -> str:
    """Return the fits of section 4 and the paper's printed values."""
    document = load("paper")
    constants = {"DyT": "alpha", "DyISRU": "beta", "Derf": "alpha", "linear": "slope"}
    not_printed = {"constant": "", "mean_absolute_residual": ""}
    lines = [
        "| function | constant | in the paper | mean absolute residual | in the paper |",
        "|---|---|---|---|---|",
    ]
    for name, constant in constants.items():
        fit = document["fits"][name]
        printed = document["paper"].get(name, not_printed)
        lines.append(
            f"| {name} | {constant} = {fit[constant]:.8g} | {printed['constant']} | "
            f"{fit['mean_absolute_residual']:.6g} | {printed['mean_absolute_residual']} |"
        )
    form = document["closed_form"]
    exact = f"m = {form['center']:.5f}, C v = {form['beta']:.8g}"
    lines.append(f"| closed form, no fit | {exact} | | {form['mean_absolute_residual']:.1e} | |")
    return "\n".join(lines)


def generality() -> str:
    """Return the result of a thousand samples, in the words of ``dynorm paper``."""
    lines: list[str] = []
    for sentence in re.split(r"(?<=[.:]) (?=[A-Z])", load("paper")["generality"]["verdict"]):
        lines += wrap(f"- {sentence}", 118, break_on_hyphens=False, subsequent_indent="  ")
    return "\n".join(lines)


def inspection_table() -> str:
    """Return the comparison of section 4 on two models: one row per norm."""
    blocks = []
    for name, report in load("inspection")["models"].items():
        summary = report["summary"]
        best = summary["outliers_best"]
        core = summary["core_best"]
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
        for site in report["sites"]:
            lines.append(
                f"| `{site['path']}` | {site['outlier']:.1f} | {site['sigma_spread']:.2f} | "
                f"{_three(site['outliers']['residuals'])} | {_three(site['core']['errors'])} |"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def speed_machine() -> str:
    """Return the machine that the figures of speed were measured on."""
    lines = speed.headline(load("speed")).splitlines()
    # Two spaces break a line in Markdown.
    return "  \n".join(lines)


def speed_headline() -> str:
    """Return one row per pass and dtype: the ratio of DyISRU and LayerNorm at each size."""
    lines: list[str] = []
    for table in _operation_tables():
        by_name = {row[0]: row for row in table.rows}
        if not lines:
            columns = ["DyISRU", *table.columns[1:]]
            lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        cells = [table.title]
        for text in by_name["DyISRU"][1:]:
            # The ratio follows the time in brackets.
            _, _, ratio = text.partition("(")
            cells.append(ratio.rstrip(")"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def speed_ratios() -> str:
    """Return the ratios that matter most."""
    return _markdown(speed.ratios(load("speed")))


def speed_models() -> str:
    """Return the times of whole models."""
    return _markdown(speed.models(load("speed")))


def speed_operations() -> str:
    """Return one table per dtype and pass, for the most threads."""
    blocks = []
    for table in _operation_tables():
        blocks += [f"**{table.title}**", _markdown(table)]
    return "\n\n".join(blocks)


def _operation_tables() -> list[speed.Rows]:
    """Return the tables of the passes, for the most threads."""
    document = load("speed")
    threads = document["settings"]["threads"][0]
    groups = select(document["operations"], threads=threads)
    return speed.operation_tables(document | {"operations": groups})


def steps_table() -> str:
    """Return the time of a training step over that with norms, per model and number of threads."""
    document = load("steps")
    rows = document["rows"]
    names = {"gpt2": "GPT-2", "llama": "Llama"}
    heads = []
    norms = []
    for row in rows:
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        heads.append(f"{names[row['model']]}, {threads}")
        milliseconds = row["milliseconds"][row["norm"]]
        norms.append(f"{milliseconds[0]:.0f} ms")
    lines = [
        f"| | {' | '.join(heads)} |",
        "|---" * (len(rows) + 1) + "|",
        f"| with its norms | {' | '.join(norms)} |",
    ]
    for name in rows[0]["over_norm"]:
        cells = [name]
        for row in rows:
            median, lower, upper = row["over_norm"][name]
            cells.append(f"{median:.2f} ({lower:.2f} to {upper:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    load_average = document["load"]
    note = (
        "Time of a step over that of the same model with its norms in the same rounds: median and "
        f"quartiles of {rows[0]['rounds']}. "
        f"Load average {load_average['before'][0]:.1f} before, "
        f"{load_average['after'][0]:.1f} after."
    )
    return "\n".join([*lines, "", *wrap(note, 118, break_on_hyphens=False)])


def auto_table() -> str:
    """Return the norms of a real encoder that ``to="auto"`` leaves, and the quality."""
    document = load("auto")
    lines = [
        "| layers | linear | linear with witnesses | DyISRU | norms left | Spearman, calibrated | "
        "Spearman, distilled |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["calibrated"]:
        tolerance = row["tolerance"]
        name = "DyISRU, four witnesses" if tolerance is None else f"auto, tolerance {tolerance:g}"
        trained = []
        for distilled in select(document["distilled"], to=row["to"], tolerance=tolerance):
            if distilled["steps"]:
                length = f"{distilled['steps']:,} steps"
            else:
                length = f"{distilled['minutes']:g} minutes"
            trained.append(f"{distilled['spearman']:.4f} ({length})")
        cells = [
            name,
            str(row["linear"]),
            str(row["linear with witnesses"]),
            str(row["dyisru"]),
            str(row["linear with witnesses"] + row["dyisru"]),
            f"{row['spearman']:.4f}",
            ", ".join(trained) or "not run",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def encrypted_table() -> str:
    """Return time, levels and error of the functions that can replace a norm under encryption."""
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
    most = max(row["error_of_encryption"] for row in document["rows"])
    note = (
        "The error is against the norm, over the spread of its outputs on held-out tokens. That of "
        f"the encryption is at most {most:.1e}. Load average {document['load'][0]:.1f}."
    )
    return "\n".join([*lines, "", *wrap(note, 118, break_on_hyphens=False)])


def memory_table() -> str:
    """Return one row per stage: bytes per unit, the check on a small model, and a scaled large model."""
    document = load("memory")
    large = memory.terms(memory.LARGE)
    lines = [
        "| bytes | per parameter | per token, layer and channel | per token and word "
        "| check: formula / measured, GiB | 8 B, scaled: one process | each of eight, sharded "
        "|",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, bytes_per_unit in document["bytes"].items():
        cells = []
        parts = []
        for units, unit_bytes in zip(large, bytes_per_unit.values(), strict=True):
            cells.append(f"{unit_bytes:.1f}")
            parts.append(units * unit_bytes)
        check = document["check"][stage]
        cells.append(f"{check['formula'] / 2**30:.2f} / {check['measured'] / 2**30:.2f}")
        # The first part is the parameters, which these stages shard.
        ranks = 8 if stage in ("train", "distill") else 1
        sharded = parts[0] / ranks + sum(parts[1:])
        cells.append(f"{sum(parts) / 2**30:.0f} GiB")
        cells.append(f"{sharded / 2**30:.0f} GiB")
        name = "train once, for comparison" if stage == "train" else stage
        lines.append(f"| {name} | {' | '.join(cells)} |")
    ratios = [row["distill"] / row["train"] for row in document["small"]]
    times = f"{min(ratios):.2f} to {max(ratios):.2f} times"
    note = f"On the four Llamas distillation needs {times} the memory of training once."
    return "\n".join([*lines, "", note])


GPU_CONTENDERS = {
    "copy": "a copy, the limit",
    "layer_norm": "torch's LayerNorm",
    "rms_norm": "torch's RMSNorm",
    "dyt compiled": "DyT, compiled by torch",
    "dyisru kernel": "DyISRU, the kernel",
    "dyt kernel": "DyT, the kernel",
    "derf kernel": "Derf, the kernel",
    "dyisru layer": "DyISRU, the layer",
    "dyisru layer, few witnesses": "DyISRU, the layer, 4 witnesses",
    "dyisru layer, many witnesses": "DyISRU, the layer, 192 witnesses",
    "dyisru layer, many witnesses, compiled": "the same, compiled by torch",
}
# A forward kernel is timed without the allocation of its output.
GIVEN = ", output given"


def gpu_table() -> str:
    """Return the time of each contender on a GPU, forward, and forward and backward, in each size."""
    result = load("gpu")
    device = result["device"]
    families = result["family"]
    titles = []
    for family in families:
        size = f"{family['rows']:,} x {family['columns']:,}"
        titles += [f"{size}: forward", "with backward"]
    lines = [
        f"{device['name']}, torch {device['torch']}, Triton {device['triton']}, "
        f"{families[0]['dtype']}. Median milliseconds of {result['rounds']} rounds.",
        "",
        "| | " + " | ".join(titles) + " |",
        "|---|" + "---|" * len(titles),
    ]
    for name, title in GPU_CONTENDERS.items():
        cells = []
        for family in families:
            forward = family["forward"].get(name) or family["forward"][name + GIVEN]
            both = family["both"].get(name)
            cells.append(f"{forward['median']:.3f}")
            # A copy has no gradient.
            cells.append("" if both is None else f"{both['median']:.3f}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _markdown(table: speed.Rows) -> str:
    lines = [f"| {' | '.join(table.columns)} |", "|---" * len(table.columns) + "|"]
    for cells in table.rows:
        lines.append(f"| {' | '.join(cells)} |")
    note = "\n".join(wrap(table.note, 118, break_on_hyphens=False))
    return "\n".join([*lines, "", note])


def _nats(rows: list[dict[str, float]]) -> str:
    """Return the growth of the loss and the divergence from the original, means over the seeds."""
    growths = [row["nats"] - row["original_nats"] for row in rows]
    divergence = mean(row["divergence"] for row in rows)
    spread = f" ± {_half_range(growths):.4f}" if len(rows) > 1 else ""
    return f"{mean(growths):+.4f}{spread} / {divergence:.4f}"


def _three(values: dict[str, float]) -> str:
    """Return the cells of the three functions, the least in bold."""
    least = f"{min(values.values()):.3f}"
    cells = []
    for name in ("linear", "dyt", "dyisru"):
        text = f"{values[name]:.3f}"
        cells.append(f"**{text}**" if text == least else text)
    return " | ".join(cells)


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
    "docs/howto/gpu.md": {"gpu": gpu_table},
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
    """Return the text of a page with its tables made from the results."""
    text = (ROOT / page).read_text("utf-8")
    for name, table in PAGES[page].items():
        start = START.format(name=name)
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        text = f"{before}{start}\n{table()}\n{END}{after}"
    return text


def _mean(values: list[float]) -> str:
    """Return the mean and half the range, with one more digit if the seeds are that close."""
    half_range = _half_range(values)
    digits = 4 if half_range < 0.0005 else 3
    return f"{mean(values):.{digits}f} ± {half_range:.{digits}f}"


def _half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2


def main() -> None:
    """Renew the tables."""
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), "utf-8")


if __name__ == "__main__":
    main()
