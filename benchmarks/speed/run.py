"""The whole run: every case is checked, then timed, and all becomes one document of plain values."""

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
# A model's share of a few per cent needs more rounds than a ratio of two.
MODEL_ROUNDS = 5
Track = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass
class Found:
    """Groups in the order they were timed, and how many tensors were compared."""

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
    before, threads_before, found = load_average(), torch.get_num_threads(), Found()
    whole = (
        models.pretrained(model, MODEL_BATCHES, settings.device, name) if model is not None else []
    )
    whole += models.gpt2_block(BLOCK_BATCHES, settings.device) if block else []
    modes = (False, True) if settings.compiled else (False,)
    cases = product(settings.threads, settings.dtypes, settings.sizes)
    jobs = [
        partial(_measure_case, settings, *size, dtype, threads) for threads, dtype, size in cases
    ]
    jobs += [
        partial(_measure_model, settings, *each) for each in product(whole, settings.threads, modes)
    ]
    try:
        for job in track(jobs, "bench"):
            job(found)
    finally:
        torch.set_num_threads(threads_before)
        torch.compiler.reset()
    return {
        "machine": describe(settings.device)
        | {"load_before": before, "load_after": load_average()},
        "settings": {
            "rounds": settings.rounds,
            "seconds_a_group": settings.seconds,
            "compiled": settings.compiled,
            "threads": list(settings.threads),
            "only": list(settings.only),
            "seed": settings.seed,
            "gradient": "forward passes and models under torch.no_grad(); inputs and parameters of one dtype",
        },
        "tensors_checked": found.compared,
        "targets": ratios(found.groups, found.models, settings.threads[0], settings.device),
        "operations": [group.to_dict() for group in found.groups],
        "models": [group.to_dict() for group in found.models],
    }


def _measure_case(
    settings: Settings, rows: int, channels: int, dtype: str, threads: int, found: Found
) -> None:
    """Check and time the three passes of a case."""
    torch.set_num_threads(threads)
    # Otherwise code for other sizes counts against torch.compile's limit, after which it
    # gives up.
    torch.compiler.reset()
    case = make_case(rows, channels, dtype, settings.device, settings.seed)
    entries = enter_modules(case, settings.only, settings.compiled)
    for stage in PASSES:
        with torch.set_grad_enabled(stage != "forward"), _compiling():
            entered = contenders(case, entries, stage, settings.only)
            found.compared += check(case, entered)
            calls = {contender.name: contender.call for contender in entered}
            limits = {"rounds": settings.rounds, "seconds": settings.seconds}
            times, repetitions = measure(
                calls, **limits, seed=settings.seed, device=settings.device
            )
        outputs = {contender.name: contender.output for contender in entered}
        found.groups.append(
            Group(rows, channels, dtype, threads, stage, times, outputs, repetitions)
        )


def _measure_model(
    settings: Settings, model: models.WholeModel, threads: int, compiled: bool, found: Found
) -> None:
    torch.set_num_threads(threads)
    torch.compiler.reset()
    with torch.no_grad(), _compiling():
        timed = models.calls(model, compiled)
        found.compared += models.check_model(model, timed)
        limits = {"rounds": MODEL_ROUNDS * settings.rounds, "seconds": 2 * settings.seconds}
        times, repetitions = measure(timed, **limits, seed=settings.seed, device=settings.device)
    found.models.append(
        ModelGroup(model.name, model.batch, model.norms, threads, compiled, times, repetitions)
    )


@contextmanager
def _compiling() -> Iterator[None]:
    """Say what to do where torch.compile has no compiler, or fails otherwise."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    try:
        yield
    except (TorchDynamoException, InductorError) as error:
        raise DynormError(
            f"torch.compile must work here, but: {str(error).splitlines()[0]}; --no-compile leaves "
            "it out"
        ) from error
