"""The tables of the study's page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from studies.arms import ARMS
from studies.plan import (
    BOUND,
    BOUND_LONG,
    DIGITS,
    EARLY,
    FASTER,
    FASTER_LONG,
    FINAL,
    FINAL_LONG,
    LLAMA,
    LONG,
    LONGEST,
    MEDIUM,
    MUON,
    PATHS,
    PLAN,
    SHARES_LONG,
    SMALL,
    WITNESSES,
    Part,
)
from studies.settings import Settings
from studies.summary import PAIRS, baseline_of, words

NOT_YET = "not run yet"
_HEAD = ("| comparison | difference in loss, nats |", "|---|---|")
_RATES_HEAD = ("| series | learning rates |", "|---|---|")
# A question, and the arm whose difference from its norm answers it.
_HEADLINE = (
    ("DyISRU against LayerNorm, 600 steps", SMALL, "dyisru"),
    ("DyISRU against LayerNorm, 3,000 steps", LONG, "dyisru"),
    ("scaled DyT against LayerNorm, 600 steps", SMALL, "dyt"),
    ("scaled DyT against LayerNorm, 3,000 steps", LONG, "dyt"),
    ("scaled DyT against LayerNorm, 12,000 steps", LONGEST, "dyt"),
    ("a straight line (control) against LayerNorm, 600 steps", SMALL, "linear"),
    ("DyISRU, 4 witnesses, against LayerNorm, 3,000 steps", LONG, "dyisru_witnesses"),
    ("DyT as published against LayerNorm, 600 steps", SMALL, "dyt_published"),
    ("annealed DyISRU against LayerNorm, 3,000 steps", LONG, "dyisru_annealed"),
    ("Llama: DyISRU against RMSNorm, 600 steps", LLAMA, "dyisru"),
)
_ANSWERS = (
    ("DyISRU from the first step against LayerNorm, 600 steps", SMALL, "dyisru"),
    ("DyISRU from the first step against LayerNorm, 3,000 steps", LONG, "dyisru"),
    ("scaled DyT from the first step against LayerNorm, 600 steps", SMALL, "dyt"),
    ("scaled DyT from the first step against LayerNorm, 3,000 steps", LONG, "dyt"),
    ("scaled DyT from the first step against LayerNorm, 12,000 steps", LONGEST, "dyt"),
    ("DyT as tuned by its authors against LayerNorm, 600 steps", SMALL, "dyt_tuned"),
    ("annealed DyISRU against LayerNorm, 600 steps", SMALL, "dyisru_annealed"),
    ("the same, with 30 times the weights' rate for the constants", FASTER, "dyisru_annealed"),
    ("annealed linear control against LayerNorm, 600 steps", SMALL, "linear_annealed"),
    ("annealed DyISRU against LayerNorm, 3,000 steps", LONG, "dyisru_annealed"),
    ("the same, with 30 times the weights' rate for the constants", FASTER_LONG, "dyisru_annealed"),
    ("the same, from a twentieth to three twentieths, at a lower rate", EARLY, "dyisru_annealed"),
    ("the same at the weights' rate, from a fifth to three fifths", PATHS, "dyisru_annealed"),
    ("annealed scaled DyT against LayerNorm, 3,000 steps", LONG, "dyt_annealed"),
    ("DyISRU with four witnesses against LayerNorm, 600 steps", WITNESSES, "dyisru_witnesses"),
    ("DyISRU with four witnesses against LayerNorm, 3,000 steps", LONG, "dyisru_witnesses"),
    ("the same, carrying a fiftieth of the sum at the start", SHARES_LONG, "dyisru_witnesses"),
    ("DyISRU with four witnesses against LayerNorm, 12,000 steps", LONGEST, "dyisru_witnesses"),
    (
        "annealed DyISRU with four witnesses against LayerNorm, 600 steps",
        WITNESSES,
        "dyisru_witnesses_annealed",
    ),
    (
        "annealed DyISRU with four witnesses against LayerNorm, 3,000 steps",
        LONG,
        "dyisru_witnesses_annealed",
    ),
    (
        "the same, with 30 times the weights' rate for the constants",
        FASTER_LONG,
        "dyisru_witnesses_annealed",
    ),
    ("DyISRU with the final norm kept against LayerNorm, 600 steps", FINAL, "dyisru_final_norm"),
    (
        "DyISRU with the final norm kept against LayerNorm, 3,000 steps",
        FINAL_LONG,
        "dyisru_final_norm",
    ),
    (
        "DyISRU with the stream's growth bounded against LayerNorm, 600 steps",
        BOUND,
        "dyisru-bound0.1",
    ),
    ("the same after 3,000 steps", BOUND_LONG, "dyisru-bound0.1"),
    ("the same, with the writers' norms fixed, 600 steps", BOUND, "dyisru-writers"),
    ("the same after 3,000 steps", BOUND_LONG, "dyisru-writers"),
    ("Muon: DyISRU from the first step against LayerNorm, 600 steps", MUON, "dyisru"),
    ("Muon: scaled DyT from the first step against LayerNorm, 600 steps", MUON, "dyt"),
    ("Muon: DyISRU with four witnesses against LayerNorm, 600 steps", MUON, "dyisru_witnesses"),
    ("Llama: DyISRU from the first step against RMSNorm, 600 steps", LLAMA, "dyisru"),
    ("Llama: scaled DyT from the first step against RMSNorm, 600 steps", LLAMA, "dyt"),
    ("Llama: annealed DyISRU against RMSNorm, 600 steps", LLAMA, "dyisru_annealed"),
    ("10 M parameters: DyISRU from the first step against LayerNorm, 600 steps", MEDIUM, "dyisru"),
    ("10 M parameters: scaled DyT from the first step against LayerNorm, 600 steps", MEDIUM, "dyt"),
    ("10 M parameters: annealed DyISRU against LayerNorm, 600 steps", MEDIUM, "dyisru_annealed"),
)


def table(part: Part, study: Mapping[str, Any]) -> str:
    """Return a part's table: one row for each arm that was run."""
    accuracy = part is DIGITS
    head = [
        "arm",
        "best rate",
        "held-out loss",
        *(["accuracy"] if accuracy else []),
        "against the norm",
        "good rates",
    ]
    head += ["diverged"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for sweep in part.sweeps():
        group = study["groups"].get(sweep[0].group)
        name = words({"arm": sweep[0].arm, "variant": sweep[0].variant})
        if group is not None:
            rows.append(f"| {' | '.join([name, *cells(group, sweep, accuracy)])} |")
    return _unless_empty(rows)


def titled(parts: Iterable[Part], study: Mapping[str, Any]) -> str:
    """Return the tables of those parts that have a run, each below its title."""
    ran = [
        part for part in parts if any(sweep[0].group in study["groups"] for sweep in part.sweeps())
    ]
    return "\n\n".join(f"{part.title}:\n\n{table(part, study)}" for part in ran)


def cells(group: Mapping[str, Any], sweep: list[Settings], accuracy: bool) -> list[str]:
    """Return the cells of a row, but the first."""
    diverged = f"{group['diverged']} of {group['runs']}"
    if lost := _lost(group, sweep):
        return [
            f"none{_in_brackets(_so_far(group, sweep))}",
            lost,
            *([""] if accuracy else []),
            "",
            "",
            diverged,
        ]
    return [
        rate(group["best_lr"]) + _in_brackets(_open(group, sweep)),
        spread(group),
        *([f"{group['accuracy']:.1%}"] if accuracy else []),
        difference(group, error=accuracy),
        good(group),
        diverged,
    ]


def _open(group: Mapping[str, Any], sweep: list[Settings]) -> str:
    """Return a remark on a best rate: that others are not run yet, or that it is at the edge of the sweep."""
    so_far, rates = _so_far(group, sweep), [float(lr) for lr in group["rates"]]
    if so_far or group["best_lr"] not in (min(rates), max(rates)):
        return so_far
    return f"the {'only' if len(rates) == 1 else 'lowest' if group['best_lr'] == min(rates) else 'highest'} rate run"


def _in_brackets(text: str) -> str:
    return text and f" ({text})"


def _so_far(group: Mapping[str, Any], sweep: list[Settings]) -> str:
    done = sum(f"{settings.lr:g}" in group["rates"] for settings in sweep)
    return f"{done} of {len(sweep)} rates so far" if done < len(sweep) else ""


def _lost(group: Mapping[str, Any] | None, sweep: list[Settings]) -> str:
    """Return why there is nothing to say of a group, if so."""
    if group is not None and group["best_lr"] is not None:
        return ""
    if group is None or not group["rates"]:
        return NOT_YET
    return "diverged so far" if _so_far(group, sweep) else "diverged at every rate"


def opening(study: Mapping[str, Any]) -> str:
    """Return the paragraphs that open the page of the runs."""

    def sentence(start: str, arm: str, *parts: Part) -> str:
        found = [
            (part, group)
            for part in parts
            if (group := _group(study, part, arm)[0]) and group.get("against")
        ]
        return (
            f"{start} {', '.join(_lead(part, group['against']) for part, group in found)}"
            if found
            else ""
        )

    direct = (
        sentence(
            "A network that is point-wise from the first step, with DyISRU, is",
            "dyisru",
            SMALL,
            LONG,
        ),
        sentence("with scaled DyT it is", "dyt", SMALL, LONG, LONGEST),
    )
    annealed = (
        sentence(
            "A network that begins with LayerNorm and ends with DyISRU is",
            "dyisru_annealed",
            FASTER,
            FASTER_LONG,
        ),
        sentence(
            "annealed early, at a learning rate of point-wise networks, it is",
            "dyisru_annealed",
            EARLY,
        ),
    )
    sentences = (
        "; ".join(filter(None, direct)),
        "; ".join(filter(None, annealed)),
        sentence(
            "The constants must be measured on activations. With the published constant DyT is",
            "dyt_published",
            SMALL,
        ),
    )
    return "\n\n".join(f"{text}." for text in sentences if text) or f"{NOT_YET.capitalize()}."


def _lead(part: Part, against: Mapping[str, Any]) -> str:
    place = f"LayerNorm after {part.steps:,} steps ({_seeds(against['seeds'])})"
    size = abs(against["mean"])
    if against["interval"] is None:
        return f"{size:.3f} nats {'below' if against['mean'] < 0 else 'above'} {place}"
    around = f"{against['half_range']:.3f}"
    if size <= against["interval"]:
        return f"level with {place[:-1]}, {_signed(against['mean'])} ± {around} nats)"
    return f"{size:.3f} ± {around} nats {'ahead of' if against['mean'] < 0 else 'behind'} {place}"


def headline(study: Mapping[str, Any]) -> str:
    """Return the ten differences of the first page."""
    return _differences(study, _HEADLINE)


def answers(study: Mapping[str, Any]) -> str:
    """Return the difference of each arm and its norm, in a table."""
    return _differences(study, _ANSWERS)


def _differences(study: Mapping[str, Any], questions: Iterable[tuple[str, Part, str]]) -> str:
    return _found(study, *((*question, difference) for question in questions))


def rates(study: Mapping[str, Any]) -> str:
    """Return the range of rates that each arm bears, in a table."""
    behind = "rates at most 0.05 nats behind LayerNorm's best, 3,000 steps, seed 0: DyISRU from the first step"
    return _found(
        study,
        (
            "good rates of DyISRU with four witnesses, 600 steps",
            WITNESSES,
            "dyisru_witnesses",
            good,
        ),
        ("good rates of DyISRU from the first step, 3,000 steps", LONG, "dyisru", good),
        ("good rates of DyISRU with four witnesses, 3,000 steps", LONG, "dyisru_witnesses", good),
        (
            "the same, carrying a fiftieth of the sum at the start",
            SHARES_LONG,
            "dyisru_witnesses",
            good,
        ),
        ("good rates of scaled DyT from the first step, 3,000 steps", LONG, "dyt", good),
        ("good rates of LayerNorm, 3,000 steps", LONG, "layernorm", good),
        (behind, LONG, "dyisru", level),
        ("the same of DyISRU with four witnesses", LONG, "dyisru_witnesses", level),
        (
            "the same, carrying a fiftieth of the sum at the start",
            SHARES_LONG,
            "dyisru_witnesses",
            level,
        ),
        ("the same of scaled DyT", LONG, "dyt", level),
        head=_RATES_HEAD,
    )


def functions(study: Mapping[str, Any]) -> str:
    """Return the differences between the functions, in a table."""
    rows = [*_HEAD]
    for part in (SMALL, LONG, LLAMA):
        arms = {sweep[0].arm for sweep in part.sweeps()}
        for mine, other in PAIRS:
            if {mine, other} <= arms:
                against = study["pairs"].get(part.key, {}).get(f"{mine} against {other}")
                question = f"{ARMS[mine].words} against {ARMS[other].words}, {part.title}"
                both = [_group(study, part, arm) for arm in (mine, other)]
                found = next(filter(None, (_lost(*each) for each in both)), "")
                if against is not None:
                    found = "; ".join((difference({"against": against}), *_edges(both)))
                rows += [f"| {question} | {found} |"] if found not in ("", NOT_YET) else []
    return _unless_empty(rows)


def _found(
    study: Mapping[str, Any],
    *questions: tuple[str, Part, str, Callable[[Mapping[str, Any]], str]],
    head: tuple[str, str] = _HEAD,
) -> str:
    """Return a table of questions about an arm of a part, each with the function that answers it."""
    rows = [*head]
    for question, part, arm, say in questions:
        group, sweep = _group(study, part, arm)
        found = _lost(group, sweep)
        if group is not None and not found:
            said = say(group)
            edges = (
                _edges([(group, sweep), _norm(study, sweep)])
                if say is difference
                else [_so_far(group, sweep)]
            )
            found = "; ".join(filter(None, (said, *edges))) if said else NOT_YET
        rows += [f"| {question} | {found} |"] if found != NOT_YET else []
    return _unless_empty(rows)


def _edges(both: Iterable[tuple[Mapping[str, Any] | None, list[Settings]]]) -> list[str]:
    """Return remarks on the best rates of two arms that are compared."""
    known = [
        (sweep[0].arm_spec.words, _open(group, sweep)) for group, sweep in both if group is not None
    ]
    return [f"{name}: {text}" for name, text in known if text]


def _norm(
    study: Mapping[str, Any], sweep: list[Settings]
) -> tuple[Mapping[str, Any] | None, list[Settings]]:
    """Return the group and the sweep of the norm that a sweep is compared with, in whatever part it was run."""
    name = baseline_of(sweep[0]).group
    norms = (each for part in PLAN for each in part.sweeps() if each[0].group == name)
    return study["groups"].get(name), max(norms, key=len, default=sweep)


def _unless_empty(rows: list[str]) -> str:
    return "\n".join(rows) if len(rows) > 2 else f"{NOT_YET.capitalize()}."


def _group(
    study: Mapping[str, Any], part: Part, arm: str
) -> tuple[Mapping[str, Any] | None, list[Settings]]:
    sweep = next(sweep for sweep in part.sweeps() if arm in (sweep[0].arm, sweep[0].variant))
    return study["groups"].get(sweep[0].group), sweep


def checkpoints(study: Mapping[str, Any]) -> str:
    """Return how often an earlier checkpoint would have been better than the last, and by how much."""
    rows = [
        "| data | steps | arms | runs | the last checkpoint is the best in | otherwise the last is "
        "worse by at most |"
    ]
    rows += ["|---" * 6 + "|"]
    for found in study["checkpoints"]:
        most = f"{found['most']:.3f}" if found["last"] < found["runs"] else ""
        rows.append(
            f"| {found['task']} | {found['steps']:,} | {found['kind']} | {found['runs']} | "
            f"{found['last']} | {most} |"
        )
    if len(rows) == 2:
        return _unless_empty(rows)
    worst = max(
        (found["most"] for found in study["checkpoints"] if found["task"] == "text"),
        default=math.nan,
    )
    said = f"On text the last checkpoint of a run is at most {worst:.3f} nats of held-out loss above its best one."
    return "\n".join(
        (said, "Choosing another checkpoint changes no difference by more than that.", "", *rows)
    )


def on_the_way(study: Mapping[str, Any]) -> str:
    """Return each arm's lowest held-out loss on the way at its best rate, and the last one."""
    rows = ["| arm | lowest loss on the way | at step | last loss |", "|---|---|---|---|"]
    for part in PLAN:
        for sweep in part.sweeps():
            found = (study["groups"].get(sweep[0].group) or {}).get("on_the_way")
            if found is not None:
                cells = (f"{found['lowest']:.3f}", f"{found['step']:,.0f}", f"{found['last']:.3f}")
                name = words({"arm": sweep[0].arm, "variant": sweep[0].variant})
                rows.append(f"| {name}, {part.title} | {' | '.join(cells)} |")
    return _unless_empty(rows)


def left(study: Mapping[str, Any]) -> str:
    """Return a sentence with the missing runs."""
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


def spread(group: Mapping[str, Any]) -> str:
    """Return a group's loss, with half its range where several seeds did not diverge."""
    losses = group["losses"].values()
    done = sum(loss is not None for loss in losses)
    text = f"{group['mean']:.3f}" + (f" ± {group['half_range']:.3f}" if done > 1 else "")
    lost = f", {len(losses) - done} diverged" if done < len(losses) else ""
    return f"{text} ({_seeds(done)}{lost})"


def difference(group: Mapping[str, Any], *, error: bool = False) -> str:
    """Return a loss less the baseline's, with sign; and the standard error that the held-out items leave in it."""
    found = group.get("against")
    if found is None:
        return ""
    text = _signed(found["mean"])
    text += f" ± {found['half_range']:.3f}" if found["seeds"] > 1 else ""
    spoken = f", error {found['standard_error']:.3f}" if error else ""
    return f"{text} ({_seeds(found['seeds'])}{spoken})"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def _seeds(count: int) -> str:
    return f"{count} seed" + ("s" if count > 1 else "")


def level(group: Mapping[str, Any]) -> str:
    """Return the rates that keep up with the norm at its best."""
    if "level" not in group:
        return ""
    return ", ".join(map(rate, group["level"])) or "none"


def good(group: Mapping[str, Any]) -> str:
    """Return the good range, and how many times its lowest rate the highest is; open where the sweep ended first."""
    if group["good"] is None:
        return ""
    low, high = group["good"]
    at_least = "at least " if group["open"] else ""
    rates = f"only {rate(low)}" if low == high else f"{rate(low)} to {rate(high)}"
    return f"{rates}: {at_least}{group['width']:.3g} x"
