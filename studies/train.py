"""One run: ``python -m studies.train --arm dyisru --lr 1e-3``; it goes on where it was stopped."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dynorm
from dynorm.cli.application import quiet_libraries
from dynorm.errors import ArgumentError
from studies.runs import ROOT, RUNS, SCRATCH, Record, RunFiles
from studies.settings import PATH, SHARE, Settings

if TYPE_CHECKING:
    from torch import nn

    from studies.trainer import StudyTrainer

# The held-out blocks are in random order, so parts of them give the standard error, and, paired,
# that of a difference.
PARTS = 32
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    arm: Annotated[
        str, typer.Option(help="The layers in place of the norms; see studies/arms.py.")
    ],
    lr: Annotated[float, typer.Option(help="The highest learning rate.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of the data.")] = 0,
    task: Annotated[str, typer.Option(help="text or digits.")] = "text",
    model: Annotated[str | None, typer.Option(help="gpt2 or llama; vit for digits.")] = None,
    size: Annotated[str, typer.Option(help="tiny, small, medium or large.")] = "small",
    warmup: Annotated[int, typer.Option(help="Steps of warm-up.")] = 100,
    constants_rate: Annotated[
        float | None, typer.Option(help="The constants' rate over the others'.")
    ] = None,
    center: Annotated[bool | None, typer.Option(help="Learn a centre, or not.")] = None,
    warmup_constants: Annotated[
        bool,
        typer.Option(
            "--warmup-constants", help="Set the constants anew ten times during the warm-up."
        ),
    ] = False,
    share: Annotated[
        float, typer.Option(help="The witnesses' share of the sum at the start.")
    ] = SHARE,
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon for the blocks' matrices.")
    ] = "adamw",
    scale_loss: Annotated[
        float, typer.Option(help="Weight of a loss that holds the stream's scale.")
    ] = 0.0,
    fixed_writers: Annotated[
        bool,
        typer.Option(
            "--fixed-writers", help="Hold the norms of the matrices that write to the stream."
        ),
    ] = False,
    path_start: Annotated[
        float, typer.Option(help="Where the annealing begins, a share of the steps.")
    ] = PATH[0],
    path_length: Annotated[
        float, typer.Option(help="How long it is, a share of the steps.")
    ] = PATH[1],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the result and the log.")] = RUNS,
    checkpoints: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = SCRATCH,
    again: Annotated[
        bool, typer.Option("--again", help="Repeat a finished run; an unfinished one continues.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Train one model, and write its result and its log.

    The same command works under `accelerate launch -m studies.train ...` and
    `torchrun -m studies.train ...`.

    Example: python -m studies.train --arm dyisru --lr 1e-3
    """
    from studies.runs import dumps

    settings = Settings(
        arm, lr, steps, seed, task, model, size, warmup, constants_rate, center, warmup_constants,
        share, path_start, path_length, device, bf16, optimizer, scale_loss, fixed_writers,
    )  # fmt: skip
    quiet_libraries()
    record = run(settings, out=out, checkpoints=checkpoints, quiet=as_json, again=again)
    if _is_main():
        result = RunFiles(settings.name, out, checkpoints).result
        typer.echo(dumps(record, indent=1) if as_json else f"{said(record)}\n{result}")
    _leave_together()


def run(
    settings: Settings,
    *,
    out: Path = RUNS,
    checkpoints: Path = SCRATCH,
    quiet: bool = True,
    again: bool = False,
) -> Record:
    """Do one run, or go on with it where it was stopped, or return the result of one that is finished.

    Args:
        settings: of the run.
        out: the folder of results and logs.
        checkpoints: the folder of checkpoints.
        quiet: no progress bar.
        again: repeat a finished run. Its result and log are kept, as ``.old``, until
            there is a new result; a run that is begun goes on.

    Returns:
        The contents of the result's file.

    Raises:
        ArgumentError: there is no CUDA device, or the batch does not divide among the processes.
        StorageError: a folder cannot be written to.
        BusyError: another process works on this run.
    """
    _require_device(settings)
    files = RunFiles(settings.name, out, checkpoints)
    with files.lock() if _is_main() else nullcontext():
        if again and _is_main():
            files.set_aside()
        # The others do not wait for the first to have done so.
        record = None if again else files.read()
        if record is not None:
            return record
        files.prepare()
        if _is_main():
            files.claim(settings)
        record = _train(settings, files, quiet)
        if _is_main():
            files.write_result(record)
            files.clear()
    return record


def said(record: Record) -> str:
    """Return a line about a result."""
    if record["diverged"]:
        return f"{record['name']}: diverged at step {record['steps_taken']}"
    return (
        f"{record['name']}: {record['loss']:.4f} nats, {record['seconds_per_step']:.3f} s a step, "
        f"{record['seconds'] / 60:.1f} min"
    )


def _train(settings: Settings, files: RunFiles, quiet: bool) -> Record:
    from studies.callbacks import DIVERGED, diverged
    from studies.data import load
    from studies.models import build
    from studies.trainer import make_trainer

    started, versions = time.perf_counter(), _versions()
    data = load(settings)
    model = build(settings, data)
    trainer = make_trainer(model, data, settings, files, quiet=quiet)
    checkpoint = files.checkpoint()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    lost = diverged(trainer.state.log_history)
    record = _record(settings, trainer, model, lost) | {"data": data.words, "versions": versions}
    if not lost:
        if settings.arm_spec.annealed:
            dynorm.finalize_(model)
        measured = _measured(trainer, data.held_out, settings.size_spec.final)
        record |= measured if measured["loss"] <= DIVERGED else {"diverged": True}
    # Of all sessions: what the log knows of those before a kill, and this one with all that is not
    # training.
    before = trainer.watch.before
    return record | {"wall_seconds": round(before + time.perf_counter() - started, 1)}


def _record(settings: Settings, trainer: StudyTrainer, model: nn.Module, lost: bool) -> Record:
    from studies.models import constants

    history = trainer.state.log_history
    logged = [entry for entry in history if "loss" in entry]
    return {
        "name": settings.name,
        "settings": settings.to_dict(),
        "size": asdict(settings.size_spec),
        "diverged": lost,
        "loss": None,
        "steps_taken": trainer.state.global_step,
        "train_loss": logged[-1]["loss"],
        "seconds": logged[-1]["seconds"],
        "seconds_per_step": median(entry["step_seconds"] for entry in logged),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "constants": {path: float(f"{value:.4g}") for path, value in constants(model).items()},
        "processes": trainer.args.world_size,
        "machine": _machine(settings),
    }


def _measured(trainer: StudyTrainer, held_out: Any, count: int) -> Record:
    """The point-wise (or normed) model on the held-out items: loss in nats, and the loss of each part of them."""
    import torch

    outcome = trainer.predict(torch.utils.data.Subset(held_out, range(count)))
    parts = [float(part.mean()) for part in torch.tensor(outcome.predictions).tensor_split(PARTS)]
    return {
        "loss": float(outcome.predictions.mean()),
        "standard_error": float(outcome.predictions.std(ddof=1) / count**0.5),
        "accuracy": float(outcome.label_ids.mean()),
        "items": count,
        "parts": [round(part, 5) for part in parts],
    }


def _machine(settings: Settings) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if settings.device == "cuda" else None
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _versions() -> dict[str, str | None]:
    import accelerate
    import torch
    import transformers

    modules = {
        "dynorm": dynorm,
        "torch": torch,
        "transformers": transformers,
        "accelerate": accelerate,
    }
    return {"python": platform.python_version(), "commit": _commit()} | {
        name: str(m.__version__) for name, m in modules.items()
    }


def _commit() -> str | None:
    """The commit that this session of a run begins with, and "-dirty" after a change; None where git knows of none."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _require_device(settings: Settings) -> None:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "the device cuda needs a CUDA device, but torch sees none: leave --device out"
        )


def _is_main() -> bool:
    """Whether this is the only process, or the first of those that accelerate or torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _leave_together() -> None:
    """Wait for the other processes, if there are any: gloo aborts those that are left alone."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main(application: typer.Typer = app, name: str = "studies.train") -> None:
    """Run a command of the study; exit status as dynorm's."""
    try:
        application()
    except dynorm.DynormError as error:
        typer.echo(f"{name}: {error}", err=True)
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from error
    except KeyboardInterrupt:
        typer.echo(f"{name}: stopped; the same command goes on from the last checkpoint", err=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
