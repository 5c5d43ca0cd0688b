"""The summary of the runs: per arm the best rate, mean and spread there, and the width of the good range."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, mean, stdev
from typing import Any

from scipy.stats import t

from studies.arms import ARMS
from studies.plan import GOOD, PLAN, Part, for_reporting, missing, settled
from studies.runs import Record
from studies.settings import Settings

# The comparison that the paper leaves open, with constants set from a batch and as published; and
# the control.
PAIRS = (
    ("dyisru", "dyt"),
    ("dyisru_published", "dyt_published"),
    ("dyisru", "linear"),
    ("dyisru_annealed", "dyt_annealed"),
    ("dyisru_annealed", "linear_annealed"),
)
Runs = list[tuple[Settings, Record]]


def summarize(
    results: Mapping[str, Record],
    plan: tuple[Part, ...] = PLAN,
    log: Callable[[str], list[Record]] = lambda name: [],
) -> dict[str, Any]:
    """Return the study as plain values: a summary of each group of runs, and how many runs are left.

    Args:
        results: the runs by name.
        plan: the parts.
        log: gives a run's log by its name; by default there are none.
    """
    groups: dict[str, Runs] = {}
    for record in results.values():
        settings = Settings(**record["settings"])
        groups.setdefault(settings.group, []).append((settings, record))
    found = {name: summary(runs) for name, runs in sorted(groups.items())}
    for name, runs in groups.items():
        norm = baseline_of(runs[0][0]).group
        baseline = groups.get(norm)
        if baseline is not None and baseline is not runs and found[name]["best_lr"] is not None:
            found[name]["against"] = against(_at_best(runs), _at_best(baseline))
            if found[norm]["best_lr"] is not None:
                found[name]["level"] = level(found[name], found[norm])
        found[name]["on_the_way"] = on_the_way(_at_best(runs), log)
    waiting = [item.part for item in missing(results, plan)]
    finished = [(s, log(s.name)) for runs in groups.values() for s, r in runs if not r["diverged"]]
    return {
        "command": "python -m studies.report",
        "good_within_nats": GOOD,
        "groups": found,
        "pairs": {part.key: compared(groups, part) for part in plan},
        "checkpoints": checkpoints(finished),
        "left": {part.title: waiting.count(part.title) for part in plan},
    }


def summary(runs: Runs) -> dict[str, Any]:
    """Return the summary of the runs of one group; they differ in rate and seed only.

    The best rate is the settled one. Mean and half the range are over all seeds at the best rate
    that did not diverge. Losses are those of the held-out items by which no rate was chosen;
    accuracies are of all of them.
    """
    settings = runs[0][0]
    first = sorted(((s, loss_of(r)) for s, r in runs if s.seed == 0), key=lambda run: run[0].lr)
    at_best = _at_best(runs)
    best = at_best[0][0].lr if at_best else None
    losses = {s.seed: loss_of(r) for s, r in at_best}
    values = [loss for loss in losses.values() if loss is not None]
    reported = mean(values) if values else None
    return {
        **{
            name: getattr(settings, name)
            for name in ("task", "model", "size", "steps", "arm", "variant")
        },
        "parameters": runs[0][1]["parameters"],
        "rates": {f"{s.lr:g}": loss for s, loss in first},
        "runs": len(runs),
        "diverged": sum(r["diverged"] for _, r in runs),
        "best_lr": best,
        "losses": losses,
        "mean": reported,
        "half_range": (max(values) - min(values)) / 2 if values else None,
        "accuracy": mean(r["accuracy"] for _, r in at_best if r["loss"] is not None)
        if values
        else None,
        **good_range(costs(runs, reported), best),
    }


def costs(runs: Runs, reported: float | None) -> dict[float, float]:
    """Return the loss of each rate above the reported one, mean over mean of the seeds; inf where one diverged.

    It may be below 0, for the reported rate was chosen by other items. Not seed by seed: a seed
    that is lucky at one rate is not at the next.

    Args:
        runs: of one group.
        reported: the mean loss at that rate, of the seeds that did not diverge; None where all did.
    """
    if reported is None:
        return {}
    found: dict[float, list[float]] = defaultdict(list)
    for s, r in runs:
        loss = loss_of(r)
        found[s.lr] += [math.inf] if loss is None else [loss]
    # The losses have six digits, and so have their differences.
    return {lr: round(fmean(each) - reported, 6) for lr, each in found.items()}


def good_range(cost: Mapping[float, float], best: float | None) -> dict[str, Any]:
    """Return the range of rates about the best that cost no more than 0.05 nats, without a gap.

    Args:
        cost: of each rate over the best, in nats; inf is one that diverged.
        best: the best rate; None where all diverged.

    Returns:
        ``good`` (lowest and highest rate), ``width``, highest over lowest, and ``open``, the ends
        where the sweep ended first.
    """
    if best is None:
        return {"good": None, "width": None, "open": []}
    rates = sorted(cost)
    fits = [cost[lr] <= GOOD for lr in rates]
    low = high = rates.index(best)
    while low > 0 and fits[low - 1]:
        low -= 1
    while high < len(rates) - 1 and fits[high + 1]:
        high += 1
    ends = ["low"] * (low == 0) + ["high"] * (high == len(rates) - 1)
    return {"good": [rates[low], rates[high]], "width": rates[high] / rates[low], "open": ends}


def against(runs: Runs, baseline: Runs) -> dict[str, Any] | None:
    """Return the difference to the baseline over the seeds that both have, each at its own best rate.

    Args:
        runs: of one group at its best rate.
        baseline: of another.

    Returns:
        Mean and half the range in nats, the number of seeds, half of the mean's 95 % interval over
        the seeds (Student's t; None for one), the mean without seed 0, which chose the rates (None
        for one), and the standard error that the choice of held-out blocks leaves in the
        difference, from the first seed; None where no seed is common.
    """
    theirs = {s.seed: r for s, r in baseline if r["loss"] is not None}
    pairs = {
        s.seed: (r, theirs[s.seed]) for s, r in runs if s.seed in theirs and r["loss"] is not None
    }
    if not pairs:
        return None
    parts = {
        seed: [a - b for a, b in zip(for_reporting(mine), for_reporting(other), strict=True)]
        for seed, (mine, other) in pairs.items()
    }
    by_seed = {seed: fmean(differences) for seed, differences in parts.items()}
    values, others = list(by_seed.values()), [value for seed, value in by_seed.items() if seed]
    first, several = parts[min(parts)], len(values) > 1
    return {
        "mean": mean(values),
        "half_range": (max(values) - min(values)) / 2,
        "seeds": len(values),
        "interval": float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
        if several
        else None,
        "without_seed_0": mean(others) if several else None,
        "standard_error": stdev(first) / len(first) ** 0.5,
    }


def compared(groups: Mapping[str, Runs], part: Part) -> dict[str, Any]:
    """Return what point-wise arms of a part lose to one another; below zero the first is the better."""
    names = {sweep[0].arm: sweep[0].group for sweep in part.sweeps()}
    found = {}
    for mine, other in PAIRS:
        runs, baseline = (_at_best(groups.get(names.get(arm, ""), [])) for arm in (mine, other))
        if (said := against(runs, baseline)) is not None:
            found[f"{mine} against {other}"] = said
    return found


def checkpoints(runs: Iterable[tuple[Settings, list[Record]]]) -> list[dict[str, Any]]:
    """Return how far the last checkpoint's held-out loss is above the lowest on the way, for each kind of run.

    Args:
        runs: settings and logs; both losses are those of the log, over the same few items.

    Returns:
        For each kind how many runs there are, in how many the last is the lowest, and the most that
        it lies above, in nats.
    """
    found: dict[tuple[str, int, str], list[float]] = {}
    for settings, log in runs:
        losses = [line["held_out"] for line in measured(log)]
        if len(losses) > 1:
            arm = settings.arm_spec
            kind = "annealed" if arm.annealed else "point-wise" if arm.direct else "norm"
            found.setdefault((settings.task, settings.steps, kind), []).append(
                losses[-1] - min(losses)
            )
    names = ("task", "steps", "kind")
    return [
        dict(zip(names, key, strict=True))
        | {"runs": len(gaps), "last": gaps.count(0), "most": max(gaps)}
        for key, gaps in sorted(found.items(), reverse=True)
    ]


def on_the_way(runs: Runs, log: Callable[[str], list[Record]]) -> dict[str, float] | None:
    """Return the lowest held-out loss on the way, its step and the last loss: means over runs; None without a log."""
    logs = [measured(log(s.name)) for s, r in runs if not r["diverged"]]
    lowest = [min(lines, key=lambda line: float(line["held_out"])) for lines in logs if lines]
    if not lowest:
        return None
    last = fmean(lines[-1]["held_out"] for lines in logs if lines)
    return {
        "lowest": fmean(line["held_out"] for line in lowest),
        "step": fmean(line["step"] for line in lowest),
        "last": last,
    }


def measured(log: list[Record]) -> list[Record]:
    """Return the lines with a held-out loss; of an annealed run those that are point-wise."""
    return [line for line in log if line.get("held_out") is not None and line.get("t", 1) == 1]


def level(group: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[float]:
    """Return the rates at which a group's runs lose no more than 0.05 nats to the baseline at its best rate."""
    limit = baseline["rates"][f"{baseline['best_lr']:g}"] + GOOD
    return [float(lr) for lr, loss in group["rates"].items() if loss is not None and loss <= limit]


def baseline_of(settings: Settings) -> Settings:
    """Return the settings that a run is compared with: the model's own norm, everything else equal."""
    plain = ("center", "constants_rate", "warmup_constants", "share", "scale_loss", "fixed_writers")
    kept = {
        name: value
        for name, value in settings.to_dict().items()
        if name not in plain and "path" not in name
    }
    return Settings(**kept | {"arm": own_norm(settings)})


def own_norm(settings: Settings) -> str:
    """Return the arm that leaves the model as it is."""
    return "rmsnorm" if settings.model == "llama" else "layernorm"


def words(group: Mapping[str, Any]) -> str:
    """Return the name of a group's arm, with its variant."""
    arm = ARMS[group["arm"]]
    rest = str(group["variant"]).removeprefix(arm.name).removeprefix("-")
    return arm.words + (f", {rest}" if rest else "")


def loss_of(record: Record) -> float | None:
    """Return the loss of a run on items that no choice has used; None if it diverged."""
    return None if record["loss"] is None else round(fmean(for_reporting(record)), 6)


def _at_best(runs: Runs) -> Runs:
    """The runs of a group at the rate that is reported, lowest seed first."""
    by_name = {s.name: r for s, r in runs}
    chosen = settled([s for s, _ in runs if s.seed == 0], by_name, {s.seed for s, _ in runs})
    return (
        []
        if chosen is None
        else sorted((run for run in runs if run[0].lr == chosen.lr), key=lambda run: run[0].seed)
    )
