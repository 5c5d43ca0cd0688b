"""The plan of the study: which runs are wanted, given the results so far."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from studies.settings import Settings
from studies.train import Record

# A rate is good if it costs at most this many nats over the arm's best.
GOOD = 0.05
SEEDS = 3


@dataclass(frozen=True)
class Part:
    """Sweeps over the learning rate with seed 0, one per arm, and more seeds at the best rate.

    Args:
        title: its name in tables and pictures.
        rates: the learning rates of each arm.
        steps: optimizer steps.
        seeds: further seeds at the best rate, for arms of which more than one rate was run.
        model: "gpt2" or "llama".
        size: the size of the model.
    """

    title: str
    rates: Mapping[str, tuple[float, ...]]
    steps: int = 600
    seeds: tuple[int, ...] = ()
    model: str = "gpt2"
    size: str = "small"

    def sweep(self, arm: str) -> list[Settings]:
        """Return the runs of an arm with seed 0."""
        runs = []
        for lr in self.rates[arm]:
            runs.append(Settings(arm, lr, self.steps, model=self.model, size=self.size))
        return runs


SMALL = Part(
    "600 steps",
    {
        "layernorm": (2e-3, 4e-3, 8e-3),
        "rmsnorm": (2e-3, 4e-3, 8e-3),
        "dyisru": (5e-4, 1e-3, 2e-3),
        "dyt": (5e-4, 1e-3, 2e-3),
        "derf": (5e-4, 1e-3, 2e-3),
        "linear": (5e-4, 1e-3, 2e-3),
        "dyisru_witnesses": (1e-3, 2e-3, 4e-3, 8e-3),
        "dyt_published": (5e-4, 1e-3, 2e-3),
    },
    seeds=(1, 2),
)
LONG = Part(
    "3,000 steps",
    {
        "layernorm": (2e-3, 4e-3, 8e-3),
        "dyisru": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        "dyt": (5e-4, 1e-3, 2e-3),
        "dyisru_witnesses": (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
        "dyt_published": (2e-3,),
    },
    steps=3000,
    seeds=(1, 2),
)
LONGEST = Part("12,000 steps", {"layernorm": (4e-3,), "dyt": (1e-3,)}, steps=12_000)
MEDIUM = Part(
    "10 M parameters, 600 steps",
    {
        "layernorm": (5e-4, 1e-3, 2e-3),
        "dyisru": (2.5e-4, 5e-4),
        "dyt": (1.25e-4, 2.5e-4, 5e-4),
    },
    size="medium",
)
LLAMA = Part(
    "Llama, 600 steps",
    {
        "rmsnorm": (2e-3, 4e-3, 8e-3),
        "dyisru": (5e-4, 1e-3, 2e-3),
        "dyt": (5e-4, 1e-3, 2e-3),
    },
    model="llama",
)
PLAN = (SMALL, LONG, LONGEST, MEDIUM, LLAMA)


def missing(results: Mapping[str, Record]) -> Iterator[Settings]:
    """Yield the runs of the plan that may start and are not done, in order of priority."""
    for part in PLAN:
        for arm in part.rates:
            sweep = part.sweep(arm)
            yield from (settings for settings in sweep if settings.name not in results)
            chosen = best(sweep, results)
            if chosen is None or len(sweep) == 1:
                continue
            for seed in part.seeds:
                repeated = replace(chosen, seed=seed)
                if repeated.name not in results:
                    yield repeated


def best(sweep: list[Settings], results: Mapping[str, Record]) -> Settings | None:
    """Return the run with seed 0 at the rate that is repeated and reported; None before all are done.

    Of the rates that are good by seed 0 it is the one with the most seeds, then with the lowest
    mean: the luck of one seed does not decide between rates that are alike.
    """
    if any(settings.name not in results for settings in sweep):
        return None
    losses = {settings: _chosen_by(settings, results) for settings in sweep}
    finished = [settings for settings in sweep if losses[settings]]
    if not finished:
        return None
    limit = min(losses[settings][0] for settings in finished) + GOOD
    good = [settings for settings in finished if losses[settings][0] <= limit]
    return min(good, key=lambda settings: (-len(losses[settings]), fmean(losses[settings])))


def _chosen_by(settings: Settings, results: Mapping[str, Record]) -> list[float]:
    """Return the losses for choosing of seed 0, and of the other seeds that are done."""
    losses = []
    for seed in range(SEEDS):
        record = results.get(replace(settings, seed=seed).name)
        if record is not None and record["loss"] is not None:
            losses.append(fmean(for_choosing(record)))
        elif seed == 0:
            return []
    return losses


def for_choosing(record: Record) -> list[float]:
    """Return the losses of the parts by which a rate is chosen: the first half of the held-out ones."""
    return list(record["parts"][: len(record["parts"]) // 2])


def for_reporting(record: Record) -> list[float]:
    """Return the losses of the other parts, by which nothing was chosen."""
    return list(record["parts"][len(record["parts"]) // 2 :])
