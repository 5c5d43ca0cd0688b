"""The whole run: every case is checked, then timed, and all becomes one document of plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed import models
from benchmarks.speed.cases import make_case
from benchmarks.speed.check import check
from benchmarks.speed.contenders import PASSES, check_globs, contenders, enter_modules
from benchmarks.speed.goals import ratios
from benchmarks.speed.groups import Group, ModelGroup
from benchmarks.speed.machine import describe, load_average
from benchmarks.speed.settings import Settings
from benchmarks.speed.timing import measure
from dynorm.errors import DynormError

MODEL_BATCHES = ((1, 32), (8, 128))
BLOCK_BATCHES = ((1, 128), (8, 128))
# A model's share of a few per cent needs more rounds than a ratio of two.
MODEL_ROUNDS = 5
Track = Callable[[Sequence["Job"], str], Iterable["Job"]]


@dataclass
class Found:
    """Groups in the order they were timed, and how many tensors were compared."""

    groups: list[Group] = field(default_factory=list)
    models: list[ModelGroup] = field(default_factory=list)
    compared: int = 0


Job = Callable[[Found], None]


def run(
    settings: Settings,
    *,
    model: str | Path | None = None,
    name: str | None = None,
    block: bool = True,
    track: Track = lambda jobs, description: jobs,
) -> dict[str, Any]:
    """Check and time everything.

    Returns:
        The machine, the settings, one row per group of contenders, one per model, and the ratios that goals.json names;
        plain values for JSON.

    Raises:
        ArgumentError: a glob matches no contender.
        StorageError: the model's folder holds none.
        WrongResultError: a contender does not compute what the definition does; it is not timed.
        DynormError: torch.compile failed.
    """
    check_globs(settings.only)
    before = load_average()
    found = Found()
    with _threads_restored():
        jobs = [*_operation_jobs(settings), *_model_jobs(settings, model, name, block)]
        for job in track(jobs, "bench"):
            job(found)
    return {
        "machine": describe(settings.device) | {"load_before": before, "load_after": load_average()},
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


def _operation_jobs(settings: Settings) -> list[Job]:
    return [
        partial(_measure_case, settings, rows, channels, dtype, threads)
        for threads in settings.threads
        for dtype in settings.dtypes
        for rows, channels in settings.sizes
    ]


def _measure_case(settings: Settings, rows: int, channels: int, dtype: str, threads: int, found: Found) -> None:
    """Check and time the three passes of a case."""
    torch.set_num_threads(threads)
    # Else what was compiled for other sizes counts against torch.compile's limit, after which it gives up.
    torch.compiler.reset()
    case = make_case(rows, channels, dtype, settings.device, settings.seed)
    entries = enter_modules(case, settings.only, settings.compiled)
    for stage in PASSES:
        with torch.set_grad_enabled(stage != "forward"), _compiling():
            entered = contenders(case, entries, stage, settings.only)
            found.compared += check(case, entered)
            times, repetitions = measure(
                {contender.name: contender.call for contender in entered},
                rounds=settings.rounds,
                seconds=settings.seconds,
                seed=settings.seed,
                device=settings.device,
            )
        outputs = {contender.name: contender.output for contender in entered}
        found.groups.append(Group(rows, channels, dtype, threads, stage, times, outputs, repetitions))


def _model_jobs(settings: Settings, folder: str | Path | None, name: str | None, block: bool) -> list[Job]:
    made: list[models.WholeModel] = []
    if folder is not None:
        made += models.pretrained(folder, MODEL_BATCHES, settings.device, name)
    if block:
        made += models.gpt2_block(BLOCK_BATCHES, settings.device)
    modes = (False, True) if settings.compiled else (False,)
    return [
        partial(_measure_model, settings, model, threads, compiled)
        for threads in settings.threads
        for model in made
        for compiled in modes
    ]


def _measure_model(settings: Settings, model: models.WholeModel, threads: int, compiled: bool, found: Found) -> None:
    torch.set_num_threads(threads)
    torch.compiler.reset()
    with torch.no_grad(), _compiling():
        timed = models.calls(model, compiled)
        found.compared += models.check_model(model, timed)
        times, repetitions = measure(
            timed,
            rounds=MODEL_ROUNDS * settings.rounds,
            seconds=2 * settings.seconds,
            seed=settings.seed,
            device=settings.device,
        )
    found.models.append(ModelGroup(model.name, model.batch, model.norms, threads, compiled, times, repetitions))


@contextmanager
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.compiler.reset()


@contextmanager
def _compiling() -> Iterator[None]:
    """Say what to do where torch.compile has no compiler, or fails otherwise."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    try:
        yield
    except (TorchDynamoException, InductorError) as error:
        raise DynormError(
            f"torch.compile must work here, but: {str(error).splitlines()[0]}; --no-compile leaves it out"
        ) from error
