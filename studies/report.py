"""Write the study's summary, its table and its picture: ``python -m studies.report``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from studies.plan import GOOD, LLAMA, LONG, LONGEST, MEDIUM, PLAN, SMALL, Part, best, for_reporting
from studies.settings import ARMS, Settings
from studies.sweep import RESULTS, read_results
from studies.train import Record

ROOT = Path(__file__).parent.parent
SUMMARY = RESULTS.with_name("study.json")
PICTURE = ROOT / "docs" / "images" / "study-curves.png"
# A comparison of the page: its name, the part, the arm, and the arm that it is compared with.
HEADLINE = (
    ("DyISRU against LayerNorm, 600 steps", SMALL, "dyisru", "layernorm"),
    ("DyISRU against LayerNorm, 3,000 steps", LONG, "dyisru", "layernorm"),
    ("scaled DyT against LayerNorm, 600 steps", SMALL, "dyt", "layernorm"),
    ("scaled DyT against LayerNorm, 3,000 steps", LONG, "dyt", "layernorm"),
    ("scaled DyT against LayerNorm, 12,000 steps", LONGEST, "dyt", "layernorm"),
    ("a straight line (control) against LayerNorm, 600 steps", SMALL, "linear", "layernorm"),
    ("DyT as published against LayerNorm, 600 steps", SMALL, "dyt_published", "layernorm"),
    ("DyISRU, 4 witnesses, against LayerNorm, 3,000 steps", LONG, "dyisru_witnesses", "layernorm"),
    ("10 M parameters: scaled DyT against LayerNorm, 600 steps", MEDIUM, "dyt", "layernorm"),
    ("Llama: DyISRU against RMSNorm, 600 steps", LLAMA, "dyisru", "rmsnorm"),
    ("RMSNorm against LayerNorm, 600 steps", SMALL, "rmsnorm", "layernorm"),
)
# How far above the lowest loss of a panel its top is, in nats.
TALL = 1.2
COLOURS = {
    "layernorm": "#111111",
    "rmsnorm": "#8a8a8a",
    "dyisru": "#1f77b4",
    "dyisru_witnesses": "#17becf",
    "dyt": "#d95f02",
    "dyt_published": "#e7a15f",
    "derf": "#2ca02c",
    "linear": "#c2185b",
}


def summarize(results: Mapping[str, Record]) -> dict[str, Any]:
    """Return for each part and arm the losses by rate, the best rate and its range, and the seeds there."""
    parts: dict[str, Any] = {}
    for part in PLAN:
        arms: dict[str, Any] = {}
        for arm in part.rates:
            sweep = part.sweep(arm)
            chosen = best(sweep, results)
            rates = {}
            for settings in sweep:
                if settings.name in results:
                    rates[f"{settings.lr:g}"] = _loss(results[settings.name])
            arms[arm] = {"rates": rates}
            if chosen is not None:
                losses = _losses_by_seed(part, chosen, results)
                lowest = rates[f"{chosen.lr:g}"]
                good = [lr for lr, loss in rates.items() if loss and loss <= lowest + GOOD]
                arms[arm] |= {"best_lr": chosen.lr, "good_rates": good, "losses": losses}
        parts[part.title] = arms
    return {
        "command": "python -m studies.report",
        "good_within_nats": GOOD,
        "parts": parts,
        "headline": [_compared(*row, parts) for row in HEADLINE],
    }


def _losses_by_seed(
    part: Part, chosen: Settings, results: Mapping[str, Record]
) -> dict[str, float]:
    losses = {}
    for seed in (0, *part.seeds):
        name = Settings(**chosen.to_dict() | {"seed": seed}).name
        if name in results and results[name]["loss"] is not None:
            losses[str(seed)] = _loss(results[name])
    return losses


def _loss(record: Record) -> float | None:
    """Return the loss on the blocks by which no rate was chosen; None if the run diverged."""
    if record["loss"] is None:
        return None
    return round(fmean(for_reporting(record)), 6)


def _compared(
    title: str, part: Part, arm: str, other: str, parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the difference of two arms, each at its best rate, over the seeds that both have."""
    losses = parts[part.title][arm].get("losses", {})
    baseline = parts[part.title][other]["losses"]
    differences = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
    row = {"comparison": title, "nats": None, "half_range": None, "seeds": len(differences)}
    if differences:
        row["nats"] = round(fmean(differences), 3)
        row["half_range"] = round((max(differences) - min(differences)) / 2, 3)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return comparisons as a Markdown table."""
    lines = ["| comparison | difference in loss, nats per byte |", "|---|---|"]
    for row in rows:
        if row["nats"] is None:
            lines.append(f"| {row['comparison']} | diverged at every rate |")
            continue
        difference = f"{row['nats']:+.3f}".replace("-", "−")
        if row["seeds"] == 1:
            spread = "(1 seed)"
        else:
            spread = f"± {row['half_range']:.3f} ({row['seeds']} seeds)"
        lines.append(f"| {row['comparison']} | {difference} {spread} |")
    return "\n".join(lines)


def curves(results: Mapping[str, Record]) -> Figure:
    """Draw the held-out loss over the steps, each arm at its best rate with seed 0."""
    figure = Figure(figsize=(11.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, part in zip(panels, (SMALL, LONG), strict=True):
        lowest = float("inf")
        for arm in part.rates:
            chosen = best(part.sweep(arm), results)
            if chosen is None:
                continue
            record = results[chosen.name]
            steps, losses = zip(*record["curve"], strict=True)
            label = ARMS[arm].title if part is SMALL else None
            panel.plot(steps, losses, color=COLOURS[arm], lw=1.6, label=label)
            lowest = min(lowest, record["loss"])
        panel.set(title=part.title, xlabel="step", xlim=(0, part.steps))
        panel.set_ylim(lowest - 0.05, lowest + 2 * TALL)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, lw=0.5)
    panels[0].set_ylabel("held-out loss (nats per byte)")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8.5)
    return figure


def main() -> None:
    """Write the summary and the picture, and print the tables for the page."""
    results = read_results()
    summary = summarize(results)
    SUMMARY.write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    # Without the version of matplotlib in it, the same runs give the same bytes.
    curves(results).savefig(PICTURE, dpi=110, metadata={"Software": None})
    print(table(summary["headline"]))


if __name__ == "__main__":
    main()
