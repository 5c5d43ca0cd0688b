"""The tables of the study's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from studies.arms import ARMS
from studies.plan import DIGITS, LONG, SMALL, Part
from studies.settings import Settings
from studies.summary import PAIRS, words

NOT_YET = "not run yet"


def table(part: Part, study: Mapping[str, Any]) -> str:
    """Return a part's table: a row an arm, in words what is missing."""
    accuracy = part is DIGITS
    head = ["arm", "best rate", "held-out loss", *(["accuracy"] if accuracy else []), "against the norm", "good rates"]
    head += ["diverged"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for sweep in part.sweeps():
        group = study["groups"].get(sweep[0].group)
        name = words({"arm": sweep[0].arm, "variant": sweep[0].variant})
        if group is None:
            rows.append(f"| {name} | {NOT_YET} " + "| " * (len(head) - 2) + "|")
            continue
        rows.append(f"| {' | '.join([name, *cells(group, sweep, accuracy)])} |")
    return "\n".join(rows)


def cells(group: Mapping[str, Any], sweep: list[Settings], accuracy: bool) -> list[str]:
    """Return the cells of a row, but the first."""
    done = sum(f"{settings.lr:g}" in group["rates"] for settings in sweep)
    so_far = "" if done == len(sweep) else f" ({done} of {len(sweep)} rates so far)"
    diverged = f"{group['diverged']} of {group['runs']}"
    if group["best_lr"] is None:
        return [f"none{so_far}", "diverged", *([""] if accuracy else []), "", "", diverged]
    return [
        rate(group["best_lr"]) + so_far,
        spread(group["mean"], group["half_range"], len(group["losses"])),
        *([f"{group['accuracy']:.1%}"] if accuracy else []),
        difference(group),
        good(group),
        diverged,
    ]


def answers(study: Mapping[str, Any]) -> str:
    """Return the questions of the study with what was found, in a table."""
    groups = study["groups"]

    def of(part: Part, arm: str) -> Mapping[str, Any] | None:
        found = groups.get(next(sweep[0].group for sweep in part.sweeps() if sweep[0].arm == arm))
        return found if found is not None and found["best_lr"] is not None else None

    rows = ["| question | found |", "|---|---|"]
    for question, part, arm, say in (
        ("annealed DyISRU against LayerNorm, 600 steps", SMALL, "dyisru_annealed", difference),
        ("annealed linear control against LayerNorm, 600 steps", SMALL, "linear_annealed", difference),
        ("annealed DyISRU against LayerNorm, 3,000 steps", LONG, "dyisru_annealed", difference),
        ("DyISRU from the first step against LayerNorm, 600 steps", SMALL, "dyisru", difference),
        ("DyISRU from the first step against LayerNorm, 3,000 steps", LONG, "dyisru", difference),
        ("scaled DyT from the first step against LayerNorm, 600 steps", SMALL, "dyt", difference),
        ("scaled DyT from the first step against LayerNorm, 3,000 steps", LONG, "dyt", difference),
        ("good rates of DyISRU from the first step, 3,000 steps", LONG, "dyisru", good),
        (
            "rates of DyISRU from the first step at most 0.05 nats behind LayerNorm's best, 3,000 steps",
            LONG,
            "dyisru",
            level,
        ),
        ("good rates of scaled DyT from the first step, 3,000 steps", LONG, "dyt", good),
        ("good rates of LayerNorm, 3,000 steps", LONG, "layernorm", good),
    ):
        group = of(part, arm)
        rows.append(f"| {question} | {NOT_YET if group is None else say(group) or NOT_YET} |")
    for part in (SMALL, LONG):
        for mine, other in PAIRS:
            arms = {sweep[0].arm for sweep in part.sweeps()}
            if {mine, other} <= arms:
                found = study["pairs"].get(part.key, {}).get(f"{mine} against {other}")
                question = f"{ARMS[mine].words} against {ARMS[other].words}, {part.title}"
                rows.append(f"| {question} | {difference({'against': found}) or NOT_YET} |")
    return "\n".join(rows)


def left(study: Mapping[str, Any]) -> str:
    """Return a sentence that says what is missing."""
    waiting = [f"{title}: {count}" for title, count in study["left"].items() if count]
    return (
        f"Runs of the plan that are not done yet: {'; '.join(waiting)}."
        if waiting
        else "All runs of the plan are done."
    )


def rate(value: float) -> str:
    """Return a learning rate as 1e-3 or 1.6e-2."""
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def spread(value: float, half_range: float, seeds: int) -> str:
    """Return a loss, with half its range where there are several seeds."""
    return f"{value:.3f}" + (f" ± {half_range:.3f} ({seeds} seeds)" if seeds > 1 else " (1 seed)")


def difference(group: Mapping[str, Any]) -> str:
    """Return a loss less the baseline's, with sign."""
    found = group.get("against")
    if found is None:
        return ""
    text = f"{found['mean']:+.3f}".replace("-", "\N{MINUS SIGN}")
    return text + (f" ± {found['half_range']:.3f} ({found['seeds']} seeds)" if found["seeds"] > 1 else " (1 seed)")


def level(group: Mapping[str, Any]) -> str:
    """Return the rates that keep up with the norm at its best."""
    if "level" not in group:
        return ""
    return ", ".join(map(rate, group["level"])) or "none"


def good(group: Mapping[str, Any]) -> str:
    """Return the good range, and how many times its lowest rate the highest is; open where the sweep ended first."""
    low, high = group["good"]
    at_least = "at least " if group["open"] else ""
    rates = f"only {rate(low)}" if low == high else f"{rate(low)} to {rate(high)}"
    return f"{rates}: {at_least}{group['width']:.3g} x"
