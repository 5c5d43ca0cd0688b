"""Check every case, then time it, and return one document of plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import models
from benchmarks.speed.cases import make_case
from benchmarks.speed.check import check
from benchmarks.speed.contenders import PASSES, contenders, enter_modules
from benchmarks.speed.figures import Group, ModelGroup, ratios
from benchmarks.speed.machine import describe, load_average
from benchmarks.speed.settings import Settings
from benchmarks.speed.timing import measure
from dynorm.errors import DynormError

MODEL_BATCHES = ((1, 32), (8, 128))
BLOCK_BATCHES = ((1, 128), (8, 128))
# A share of a few per cent needs more rounds than a ratio of two.
MODEL_ROUNDS = 5
Track = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass
class Results:
    """Groups in the order of their timing, and the number of tensors that were compared."""

    groups: list[Group] = field(default_factory=list)
    models: list[ModelGroup] = field(default_factory=list)
    compared: int = 0


def run(
    settings: Settings,
    *,
    model: str | Path | None = None,
    name: str | None = None,
    block: bool = True,
    track: Track = lambda jobs, description: jobs,
) -> dict[str, Any]:
    """Check and time everything: operations, a block of GPT-2, and the transformers model of a folder.

    Returns the machine, the settings, one row per group of contenders, one per model, and the
    ratios that goals.json names; plain values for JSON. A wrong result ends the run before it is
    timed.
    """
    load_before = load_average()
    threads_before = torch.get_num_threads()
    whole_models = []
    if model is not None:
        whole_models += models.pretrained(model, MODEL_BATCHES, settings.device, name)
    if block:
        whole_models += models.gpt2_block(BLOCK_BATCHES, settings.device)
    modes = (False, True) if settings.compiled else (False,)
    jobs = []
    for threads, dtype, size in product(settings.threads, settings.dtypes, settings.sizes):
        jobs.append(partial(_measure_case, settings, *size, dtype, threads))
    for whole_model, threads, compiled in product(whole_models, settings.threads, modes):
        jobs.append(partial(_measure_model, settings, whole_model, threads, compiled))
    results = Results()
    try:
        for job in track(jobs, "bench"):
            job(results)
    finally:
        torch.set_num_threads(threads_before)
        torch.compiler.reset()
    machine = describe(settings.device)
    machine["load_before"] = load_before
    machine["load_after"] = load_average()
    return {
        "machine": machine,
        "settings": {
            "rounds": settings.rounds,
            "seconds_a_group": settings.seconds,
            "compiled": settings.compiled,
            "threads": list(settings.threads),
            "only": list(settings.only),
            "seed": settings.seed,
            "gradient": "forward passes and models under torch.no_grad(); inputs and parameters of one dtype",
        },
        "tensors_checked": results.compared,
        "targets": ratios(results.groups, results.models, settings.threads[0], settings.device),
        "operations": [group.to_dict() for group in results.groups],
        "models": [group.to_dict() for group in results.models],
    }


def _measure_case(
    settings: Settings,
    rows: int,
    channels: int,
    dtype: str,
    threads: int,
    results: Results,
) -> None:
    """Check and time the three passes of a case."""
    torch.set_num_threads(threads)
    # The code for other sizes would count against the limit at which torch.compile gives up.
    torch.compiler.reset()
    case = make_case(rows, channels, dtype, settings.device, settings.seed)
    entries = enter_modules(case, settings.only, settings.compiled)
    for stage in PASSES:
        with torch.set_grad_enabled(stage != "forward"), _compiling():
            entered = contenders(case, entries, stage, settings.only)
            results.compared += check(case, entered)
            times, repetitions = measure(
                {contender.name: contender.call for contender in entered},
                rounds=settings.rounds,
                seconds=settings.seconds,
                seed=settings.seed,
                device=settings.device,
            )
        outputs = {contender.name: contender.output for contender in entered}
        group = Group(rows, channels, dtype, threads, stage, times, outputs, repetitions)
        results.groups.append(group)


def _measure_model(
    settings: Settings,
    model: models.WholeModel,
    threads: int,
    compiled: bool,
    results: Results,
) -> None:
    """Check and time the variants of a model."""
    torch.set_num_threads(threads)
    torch.compiler.reset()
    with torch.no_grad(), _compiling():
        calls = models.calls(model, compiled)
        results.compared += models.check_model(model, calls)
        times, repetitions = measure(
            calls,
            rounds=MODEL_ROUNDS * settings.rounds,
            seconds=2 * settings.seconds,
            seed=settings.seed,
            device=settings.device,
        )
    group = ModelGroup(model.name, model.batch, model.norms, threads, compiled, times, repetitions)
    results.models.append(group)


@contextmanager
def _compiling() -> Iterator[None]:
    """Raise an error with advice if torch.compile fails, for example without a compiler."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    try:
        yield
    except (TorchDynamoException, InductorError) as error:
        raise DynormError(
            f"torch.compile must work here, but: {str(error).splitlines()[0]}; --no-compile leaves "
            "it out"
        ) from error
