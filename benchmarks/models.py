"""Make the tables of docs/models.md: measured conversions, and tested architectures."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import memory
from dynorm.recipe import DEFAULT_WITNESSES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COUNTS = ROOT / "tests" / "find" / "norm_counts.txt"
NOT_MEASURED = "not measured"
GIB = 2**30
COLUMNS = (
    "model",
    "command",
    "time",
    "peak memory",
    "calibrated",
    "refined",
    "distilled",
    "measure, on held-out data",
)
Rows = list[dict[str, Any]]


def models_table() -> str:
    """Return one row per conversion that has a committed result."""
    rows = [
        _encoder(),
        _pure_encoder(),
        _lines(),
        _decoder(DEFAULT_WITNESSES),
        _decoder(8),
        _decoder(16),
        _byte_model(),
        _images(),
        _speech(),
        _small_llama(),
        _large_llama(),
    ]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def architectures() -> str:
    """Return the tested model types, one row per initial letter; a star marks norms that are kept."""
    names = []
    for line in COUNTS.read_text("utf-8").splitlines():
        if line[0] == "#":
            continue
        name, *counts = line.split()
        refused = int(counts[-1])
        names.append(f"{name} ✓\\*" if refused else f"{name} ✓")
    lines = ["| | model types of transformers |", "|---|---|"]
    for letter, group in groupby(names, key=lambda name: name[0].upper()):
        lines.append(f"| {letter} | {', '.join(group)} |")
    lines += ["", f"{len(names)} model types."]
    return "\n".join(lines)


def _load(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


def _only(rows: Rows, **values: Any) -> dict[str, Any]:
    """Return the row that has these values; ValueError unless there is exactly one."""
    for name, value in values.items():
        rows = [row for row in rows if row[name] == value]
    (row,) = rows
    return row


def _row(
    model: str,
    command: str,
    measure: str,
    *,
    time: str = NOT_MEASURED,
    peak: str = NOT_MEASURED,
    calibrated: str = NOT_MEASURED,
    refined: str = NOT_MEASURED,
    distilled: str = NOT_MEASURED,
) -> list[str]:
    return [model, command, time, peak, calibrated, refined, distilled, measure]


def _encoder() -> list[str]:
    demo = _load("demo")
    seconds = demo["meta"]["seconds"]
    untrained = untrained_encoder()
    return _row(
        f"all-MiniLM-L6-v2, encoder, {untrained['witnesses']} witnesses",
        "`make demo`",
        "mean cosine to the original, 512 docstrings",
        time=f"{seconds['calibrate']:.0f} s, {seconds['refine']:.0f} s, {seconds['distill']:.0f} s",
        calibrated=f"{untrained['cosine_mean']:.4f}",
        refined=f"{untrained_encoder(refined=50)['cosine_mean']:.4f}",
        distilled=f"{demo['output']['cosine_mean']:.4f} ({demo_steps():,} steps)",
    )


def demo_steps() -> int:
    """Return the steps of distillation of the committed run of ``make demo``."""
    steps: int = _load("demo")["meta"]["stages"]["distill"]["steps"]
    return steps


def untrained_encoder(refined: int = 0) -> dict[str, Any]:
    """Return the figures of all-MiniLM-L6-v2 by the default recipe, after steps of refinement."""
    rows = [{"refined": 0, **row} for row in _load("untrained")["rows"]]
    return _only(rows, model="minilm", refined=refined)


def _pure_encoder() -> list[str]:
    rows = _load("distillation")["rows"]
    trained = _only(rows, model="encoder", recipe="DyISRU", steps=1200)
    return _row(
        "the same, a pure function (no witnesses)",
        "`dynorm convert MODEL OUT --witnesses 0 --per-channel --steps 1200`",
        "the same",
        calibrated=f"{mean(cosines(0, 'calibrated')):.4f}",
        refined=f"{mean(cosines(0, 'refined')):.4f}",
        distilled=f"{trained['docstrings']['cosine']:.4f} ({trained['steps']:,} steps)",
    )


def cosines(witnesses: int, stage: str) -> list[float]:
    """Return the cosine of DyISRU with one constant per channel, for each seed."""
    by_seed = []
    for row in _load("quality")["rows"]:
        is_layer = row["layer"] == "dyisru" and row["per_channel"]
        has_witnesses = row.get("witnesses", 0) == witnesses
        if is_layer and has_witnesses and row["stage"] == stage:
            by_seed.append(row["cosine"])
    return by_seed


def _lines() -> list[str]:
    document = _load("auto")
    calibrated = _only(document["calibrated"], to="auto", tolerance=0.05)
    distilled = _only(document["distilled"], to="auto", tolerance=0.05)
    return _row(
        f"the same, {calibrated['linear']} of 13 norms become lines, which `dynorm fold` then removes",
        "`dynorm convert MODEL OUT --to auto --witnesses 4 --per-channel --steps 200`",
        "rank correlation of all pairs, 512 docstrings",
        calibrated=f"{calibrated['spearman']:.4f}",
        distilled=f"{distilled['spearman']:.4f} ({distilled['steps']} steps)",
    )


def _decoder(witnesses: int) -> list[str]:
    rows = decoder_rows(witnesses)
    last = rows[-1]
    options = "--refine 0"
    distilled = "not run"
    if last["steps"]:
        distilled = f"{_two_losses(last)} ({last['steps']} steps)"
    # With the default number no training is needed. The distilled row is what it would add.
    if witnesses != DEFAULT_WITNESSES:
        options = f"--witnesses {witnesses} {options} --steps {last['steps']}"
    command = f"`dynorm convert MODEL OUT {options}`"
    return _row(
        f"SmolLM2-135M-Instruct, decoder, {witnesses} witnesses",
        command,
        "growth of the loss in nats per token: docstrings; language reference",
        time=_processor_time(rows[0], last),
        calibrated=_two_losses(rows[0]),
        refined="not run",
        distilled=distilled,
    )


def decoder_rows(witnesses: int) -> Rows:
    """Return the calibrated decoder's row, and those along its distillation."""
    rows = []
    for row in _load("decoder")["rows"]:
        if row["witnesses"] == witnesses and row["stage"] != "refined":
            rows.append(row)
    return sorted(rows, key=lambda row: row["tokens"])


def _two_losses(row: dict[str, Any]) -> str:
    docstrings = row["docstrings"]["loss_difference"]
    reference = row["reference"]["loss_difference"]
    return f"{docstrings:+.3f}; {reference:+.3f}"


def _processor_time(first: dict[str, Any], last: dict[str, Any]) -> str:
    return f"{first['cpu_seconds']} s to calibrate, {last['cpu_seconds']:,} s in all (CPU time)"


def _byte_model() -> list[str]:
    row = _only(_load("distillation")["rows"], model="language", recipe="DyISRU")
    growth = row["docstrings"]["nats"] - row["docstrings"]["original_nats"]
    return _row(
        "GPT-2 over bytes, 4 layers, no witnesses",
        "`python -m benchmarks.distillation`",
        "growth of the loss in nats per token, docstrings",
        distilled=f"{growth:+.3f} ({row['steps']} steps)",
    )


def _images() -> list[str]:
    calibrated, distilled = _load("images")["rows"]
    return _row(
        f"DINOv2-small, images, {calibrated['witnesses']} witnesses",
        f"`dynorm convert MODEL OUT --images FILES --refine 0 --steps {distilled['steps']}`",
        "mean cosine to the original; same nearest neighbour; 96 photographs",
        calibrated=f"{calibrated['cosine_mean']:.3f}; {calibrated['neighbours']:.0%}",
        refined="not run",
        distilled=f"{distilled['cosine_mean']:.3f}; {distilled['neighbours']:.0%} "
        f"({distilled['steps']} steps)",
    )


def _speech() -> list[str]:
    document = _load("speech")
    first = _only(document["rows"], stage="calibrated")
    last = document["rows"][-1]
    return _row(
        f"Whisper tiny.en, speech, {document['witnesses']} witnesses",
        f"`dynorm convert MODEL OUT --audio FILES --refine 0 --steps {last['steps']}`",
        "words equal to the original transcript: all; in the median file; "
        f"{document['held_out']} synthetic files",
        calibrated=_two_shares(first),
        refined="not run",
        distilled=f"{_two_shares(last)} ({last['files']} files)",
    )


def _two_shares(row: dict[str, Any]) -> str:
    return f"{row['word_agreement']:.0%}; {row['word_agreement_median']:.0%}"


def _small_llama() -> list[str]:
    row = _load("memory")["small"][0]
    peaks = [f"{stage} {row[stage] / GIB:.2f} GiB" for stage in ("calibrate", "refine", "distill")]
    return _row(
        f"Llama with random weights, {row['parameters'] / 1e6:.0f} M parameters",
        "`python -m benchmarks.memory`",
        "memory only",
        peak="; ".join(peaks),
    )


def _large_llama() -> list[str]:
    bytes_of = _load("memory")["bytes"]
    large = memory.terms(memory.LARGE)

    def scaled(stage: str) -> str:
        total = 0.0
        for count, per_unit in zip(large, bytes_of[stage].values(), strict=True):
            total += count * per_unit
        return f"{stage} {total / GIB:.0f} GiB"

    stages = "; ".join(map(scaled, ("calibrate", "refine", "distill")))
    return _row(
        "Llama, 8 B parameters",
        "[on several processes](howto/processes.md#what-8-b-parameters-need)",
        "memory only, scaled from small models",
        peak=f"{stages} (one process)",
    )


TABLES: dict[str, Callable[[], str]] = {"models": models_table, "architectures": architectures}
"""The tables of the page by their mark."""
