"""The plan of the study: which runs are wanted, in order of priority, given the results so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from dynorm.layers.groups import LOG_RATE
from studies.arms import ARMS
from studies.runs import Record
from studies.settings import Settings
from studies.sizes import size_of, weights

# Where sweeps begin: the best of the first arms stood in the middle of these, and a sweep goes on
# where it does not.
NORM_RATES = (2e-3, 4e-3, 8e-3)
DIRECT_RATES = (5e-4, 1e-3, 2e-3)
# A rate is good when it costs no more than this, in nats, over the arm's best.
GOOD = 0.05
# Beyond these a sweep is not extended, wherever its best is.
LOWEST, HIGHEST = 2.5e-5, 6.4e-2
CORE = ("layernorm", "dyisru_annealed", "dyisru", "dyt")
ALL = (
    *CORE,
    "linear_annealed",
    "linear",
    "dyt_published",
    "derf",
    "rmsnorm",
    "dyisru_published",
    "dyt_annealed",
)


@dataclass(frozen=True)
class Part:
    """Sweeps over the learning rate with seed 0, one an arm, and more seeds at the best of each.

    Args:
        key: its mark in the page.
        title: its name in the report.
        arms: in order of priority.
        steps: optimizer steps.
        norm_rates: the rates of arms that begin with a norm.
        direct_rates: the rates of arms that are point-wise from the first step.
        seeds: further seeds at the best rate.
        extend: whether a sweep goes on by a factor of 2 where its best is at its edge.
        fixed: other settings, the same for all.
        variants: settings of each arm's variants; the default is the arm as it is.
        rates: where sweeps of single arms begin, if not with the above.
        once: arms of which one seed is enough.
    """

    key: str
    title: str
    arms: tuple[str, ...] = ALL
    steps: int = 600
    norm_rates: tuple[float, ...] = NORM_RATES
    direct_rates: tuple[float, ...] = DIRECT_RATES
    seeds: tuple[int, ...] = ()
    extend: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Mapping[str, Any], ...] = ({},)
    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    once: tuple[str, ...] = ()

    def sweeps(self) -> Iterator[list[Settings]]:
        """Give the runs of each arm and variant with seed 0, rates rising."""
        for arm in self.arms:
            rates = self.rates.get(arm) or (
                self.direct_rates if ARMS[arm].direct else self.norm_rates
            )
            for variant in self.variants:
                yield [
                    Settings(arm, lr, steps=self.steps, **{**self.fixed, **variant}) for lr in rates
                ]


SMALL = Part("small", "600 steps", (*ALL, "dyt_tuned"), seeds=(1, 2), once=("dyt_tuned",))
LONG = Part(
    "long",
    "3,000 steps",
    (*CORE, "dyisru_witnesses", "dyisru_witnesses_annealed", "dyt_published", "dyt_annealed"),
    steps=3000,
    # A run takes half an hour: of the main arms the range is asked for, of the last three one rate.
    rates={
        "dyisru": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        "dyt": (5e-4, 1e-3, 2e-3),
        "dyisru_witnesses": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        "dyisru_witnesses_annealed": (4e-3,),
        "dyt_published": (2e-3,),
        "dyt_annealed": (4e-3,),
    },
    extend=False,
    seeds=(1, 2),
    once=("dyisru_witnesses_annealed", "dyt_published", "dyt_annealed"),
)
LONGEST = Part(
    "longest",
    "12,000 steps",
    # The norm, and the best two at 3,000 steps; each at the best of its rates there.
    ("layernorm", "dyt", "dyisru_witnesses"),
    steps=12_000,
    rates={"layernorm": (4e-3,), "dyt": (1e-3,), "dyisru_witnesses": (5e-4,)},
    extend=False,
)
WITNESSES = Part(
    "witnesses",
    "DyISRU with the first four channels as witnesses, 600 steps",
    ("dyisru_witnesses", "dyisru_witnesses_annealed"),
    direct_rates=(1e-3, 2e-3, 4e-3, 8e-3),
    norm_rates=(4e-3, 8e-3),
    extend=False,
    seeds=(1, 2),
)
SHARES = Part(
    "shares",
    "Another share of the sum for the witnesses at the start, 600 steps",
    ("dyisru_witnesses",),
    direct_rates=(1e-3, 4e-3, 8e-3),
    extend=False,
    variants=({"share": 0.5},),
)
SHARES_LONG = Part(
    "shares_long",
    "Another share of the sum for the witnesses at the start, 3,000 steps",
    ("dyisru_witnesses",),
    steps=3000,
    # Finer than factors of two at both ends, where the range ends.
    direct_rates=(3.5e-4, 5e-4, 1e-3, 1.4e-3, 2e-3),
    extend=False,
    seeds=(1, 2),
    variants=({"share": 0.02},),
)
RECIPES = Part(
    "recipes",
    "Variants of direct DyISRU, 600 steps",
    ("dyisru",),
    direct_rates=(1e-3, 2e-3),
    extend=False,
    variants=(
        {"constants_rate": 1.0},
        {"constants_rate": 15.0},
        {"center": True},
        {"warmup_constants": True},
    ),
)
# So that no function is ahead because only its constants were given a fit rate.
OTHERS = Part(
    "others",
    "Scaled DyT with a higher rate of the constants, 600 steps",
    ("dyt",),
    direct_rates=(1e-3, 2e-3),
    extend=False,
    variants=({"constants_rate": 15.0},),
)
RATES = Part(
    "constants_rate",
    "Another rate of the constants, 3,000 steps",
    ("dyisru",),
    steps=3000,
    direct_rates=(2.5e-4, 5e-4, 1e-3, 2e-3),
    extend=False,
    variants=({"constants_rate": 15.0},),
)
# It ends earlier than by default: two fifths of the steps follow, at rates that still move the
# weights.
PATHS = Part(
    "paths",
    "The annealing from a fifth to three fifths of the steps, 3,000 steps",
    ("dyisru_annealed",),
    steps=3000,
    norm_rates=(4e-3,),
    extend=False,
    seeds=(1, 2),
    variants=({"path_start": 0.2, "path_length": 0.4},),
)
# As direct arms have it, and param_groups by default.
FASTER = Part(
    "faster",
    "The annealing with 30 times the weights' rate for the constants, 600 steps",
    ("dyisru_annealed",),
    norm_rates=(4e-3,),
    extend=False,
    seeds=(1, 2),
    variants=({"constants_rate": LOG_RATE},),
)
FASTER_LONG = replace(
    FASTER,
    key="faster_long",
    title="The annealing with 30 times the weights' rate for the constants, 3,000 steps",
    arms=("dyisru_annealed", "dyisru_witnesses_annealed"),
    steps=3000,
    once=("dyisru_witnesses_annealed",),
)
# The net is point-wise from three twentieths of its steps on, and so at the rates of one that
# always was.
EARLY = Part(
    "early",
    "The annealing from a twentieth to three twentieths of the steps, constants at 30 times the "
    "rate, 3,000 steps",
    ("dyisru_annealed",),
    steps=3000,
    norm_rates=(5e-4, 1e-3),
    extend=False,
    seeds=(1, 2),
    variants=({"path_start": 0.05, "path_length": 0.1, "constants_rate": LOG_RATE},),
)
DIGITS = Part(
    "digits",
    "Digits",
    norm_rates=(1e-3, 2e-3, 4e-3),
    seeds=(1, 2),
    fixed={"task": "digits"},
)
MEDIUM = Part(
    "medium",
    "About 10 M parameters, 600 steps",
    CORE,
    norm_rates=(1e-3, 2e-3, 4e-3),
    direct_rates=(2.5e-4, 5e-4),
    extend=False,
    seeds=(1, 2),
    fixed={"size": "medium"},
    # At 4e-3 it hardly learns.
    rates={"layernorm": (5e-4, 1e-3, 2e-3, 4e-3), "dyt": (1.25e-4, 2.5e-4, 5e-4)},
    once=("dyisru", "dyisru_annealed"),
)
LLAMA = Part(
    "llama",
    "Llama, 600 steps",
    ("rmsnorm", "dyisru", "dyt", "dyisru_annealed"),
    rates={"dyisru_annealed": (1e-3, 2e-3, 4e-3)},
    fixed={"model": "llama"},
)
# An update has the size of AdamW's, and so may the rates.
MUON = Part(
    "muon",
    "Muon in place of AdamW for the matrices of the blocks, 600 steps",
    ("layernorm", "dyisru", "dyt", "dyisru_witnesses"),
    rates={
        "layernorm": (*NORM_RATES, 1.6e-2),
        "dyisru": (*DIRECT_RATES, 4e-3),
        "dyisru_witnesses": (1e-3, 4e-3),
    },
    extend=False,
    fixed={"optimizer": "muon"},
)
FINAL = Part(
    "final_norm",
    "The final norm kept, 600 steps",
    ("dyisru_final_norm",),
    direct_rates=(1e-3, 2e-3, 4e-3),
    extend=False,
)
# One rate: of both ideas 600 steps say that they lose much.
FINAL_LONG = replace(
    FINAL,
    key="final_norm_long",
    title="The final norm kept, 3,000 steps",
    steps=3000,
    direct_rates=(1e-3,),
)
BOUND = Part(
    "bound",
    "The growth of the stream bounded, 600 steps",
    ("dyisru",),
    direct_rates=(1e-3, 2e-3),
    extend=False,
    variants=({"scale_loss": 0.1}, {"fixed_writers": True}),
)
BOUND_LONG = replace(
    BOUND,
    key="bound_long",
    title="The growth of the stream bounded, 3,000 steps",
    steps=3000,
    direct_rates=(1e-3,),
)
# What changes one thing; the page has these in one place.
CHANGES = (RECIPES, OTHERS, RATES, PATHS, FASTER, FASTER_LONG, EARLY)
SIDE = (MUON, FINAL, FINAL_LONG, BOUND, BOUND_LONG, SHARES, SHARES_LONG, *CHANGES)
PLAN = (SMALL, LONG, WITNESSES, MEDIUM, LLAMA, DIGITS, LONGEST, *SIDE)


@dataclass(frozen=True)
class Planned:
    """A run of the plan.

    Args:
        settings: of the run.
        part: the part's title.
        certain: whether it may start; a further seed waits for the best rate, and stands here with
            a guessed one.
    """

    settings: Settings
    part: str
    certain: bool = True


def planned(results: Mapping[str, Record], plan: tuple[Part, ...] = PLAN) -> list[Planned]:
    """Return all runs of the plan, those that are done too, in order of priority.

    Args:
        results: the results so far, by the run's name.
        plan: the parts.
    """
    found: list[Planned] = []
    for part in plan:
        sweeps = [extended(sweep, results) if part.extend else sweep for sweep in part.sweeps()]
        found += [Planned(settings, part.title) for sweep in sweeps for settings in sweep]
        for sweep in sweeps:
            seeds = () if sweep[0].arm in part.once else part.seeds
            chosen = settled(sweep, results, seeds)
            done = all(settings.name in results for settings in sweep)
            # Where all runs diverged there is nothing to repeat.
            if chosen is not None or not done:
                like = chosen if done and chosen is not None else sweep[len(sweep) // 2]
                found += [Planned(_again(like, seed), part.title, certain=done) for seed in seeds]
    return found


def missing(results: Mapping[str, Record], plan: tuple[Part, ...] = PLAN) -> list[Planned]:
    """Return the runs of the plan that are not done, in order of priority."""
    return [run for run in planned(results, plan) if run.settings.name not in results]


def extended(sweep: list[Settings], results: Mapping[str, Record]) -> list[Settings]:
    """Return a sweep with the rate beyond its edge, as long as the best run stands there."""
    while all(settings.name in results for settings in sweep):
        chosen = best(sweep, results)
        # Where all diverged a lower rate may not.
        if (chosen is None or chosen is sweep[0]) and sweep[0].lr / 2 >= LOWEST:
            sweep = [_at(sweep[0], sweep[0].lr / 2), *sweep]
        elif chosen is sweep[-1] and sweep[-1].lr * 2 <= HIGHEST:
            sweep = [*sweep, _at(sweep[-1], sweep[-1].lr * 2)]
        else:
            break
    return sweep


def best(sweep: list[Settings], results: Mapping[str, Record]) -> Settings | None:
    """Return the best run of a sweep, of those that are done and did not diverge, by the items for choosing."""
    done = [s for s in sweep if s.name in results and results[s.name]["loss"] is not None]
    return min(done, key=lambda s: fmean(for_choosing(results[s.name])), default=None)


def settled(
    sweep: list[Settings], results: Mapping[str, Record], seeds: Iterable[int]
) -> Settings | None:
    """Return the run of a sweep at the rate that is repeated and reported.

    Of the rates that are good by the sweep alone it is that with the most seeds, and of several
    such the one with the lowest mean: so neither the luck of one seed nor an only one decides
    between rates that are alike.

    Args:
        sweep: with seed 0.
        results: the results so far, by the run's name.
        seeds: the others that count.
    """
    first = best(sweep, results)
    if first is None:
        return None

    def losses(settings: Settings) -> list[float]:
        names = [settings.name, *(_again(settings, seed).name for seed in seeds if seed)]
        done = (results[name] for name in names if name in results)
        return [fmean(for_choosing(record)) for record in done if record["loss"] is not None]

    (lowest,) = losses(first)[:1]
    good = [s for s in sweep if best([s], results) and losses(s)[0] <= lowest + GOOD]
    return min(good, key=lambda s: (-len(losses(s)), fmean(losses(s))))


def for_choosing(record: Record) -> list[float]:
    """Return the losses of the parts of the held-out items by which a rate is chosen: the first half."""
    return list(record["parts"][: len(record["parts"]) // 2])


def for_reporting(record: Record) -> list[float]:
    """Return the losses of the other parts, which no choice has seen."""
    return list(record["parts"][len(record["parts"]) // 2 :])


def seconds(settings: Settings, results: Mapping[str, Record]) -> float | None:
    """Estimate how long a run takes, from the time of those that are done; None where there is none.

    The runs of the same arm, model and size are asked first, then those of the same model and size,
    then all of the same task, by weights times tokens.
    """
    done = [(Settings(**record["settings"]), record) for record in results.values()]
    same = [(s, r) for s, r in done if (s.task, s.model, s.size, s.device) == _kind(settings)]
    own = [r for s, r in same if s.arm == settings.arm]
    if chosen := own or [r for _, r in same]:
        return float(settings.steps * median(_step(r) for r in chosen))
    alike = [(s, r) for s, r in done if (s.task, s.device) == (settings.task, settings.device)]
    if not alike:
        return None
    pace: float = median(_step(record) / _work(s) for s, record in alike)
    return settings.steps * _work(settings) * pace


def _step(record: Record) -> float:
    """Seconds a step with all that comes with it: measuring, logging, checkpoints."""
    return float(record["wall_seconds"]) / max(1, int(record["steps_taken"]))


def _kind(settings: Settings) -> tuple[str, str | None, str, str]:
    return settings.task, settings.model, settings.size, settings.device


def _work(settings: Settings) -> float:
    size = size_of(settings.task, settings.size)
    return float(weights(size) * size.batch * size.context)


def _at(settings: Settings, lr: float) -> Settings:
    return Settings(**settings.to_dict() | {"lr": float(f"{lr:.6g}")})


def _again(settings: Settings, seed: int) -> Settings:
    return Settings(**settings.to_dict() | {"seed": seed})
