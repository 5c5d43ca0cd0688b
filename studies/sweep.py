"""The whole study, run by run: ``python -m studies.sweep``; kill it at any time, and start it again.

One sweep a core: ``OMP_NUM_THREADS=1 python -m studies.sweep &``, as many times as there are cores.
No two of them do the same run.
"""

from __future__ import annotations

import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from dynorm.cli.application import quiet_libraries
from dynorm.errors import ArgumentError, ModelError
from studies.plan import PLAN, Part, Planned, missing, planned, seconds
from studies.runs import RUNS, SCRATCH, BusyError, Record, read_all
from studies.train import main, run, said

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    minutes: Annotated[
        float | None, typer.Option(help="Start no run after so many minutes; none by default.")
    ] = None,
    only: Annotated[str, typer.Option(help="A glob that the run's name must match.")] = "*",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs that are left, and stop.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of results and logs.")] = RUNS,
    checkpoints: Annotated[Path, typer.Option(help="Folder of checkpoints.")] = SCRATCH,
) -> None:
    """Do the runs of the plan that are missing, in order of priority.

    Example: OMP_NUM_THREADS=1 python -m studies.sweep --minutes 60
    """
    if minutes is not None and not minutes > 0:
        raise ArgumentError(f"minutes must be positive, got {minutes}")
    if not any(fnmatchcase(item.settings.name, only) for item in planned(read_all(out))):
        raise ArgumentError(
            f"the glob must match a run of the plan, but {only!r} matches none: see --dry-run"
        )
    failed: list[str] = []
    if not dry_run:
        quiet_libraries()
        failed = sweep(minutes, only, out=out, checkpoints=checkpoints)
    for line in left(only, read_all(out), each=dry_run):
        typer.echo(line)
    if failed:
        raise ModelError(
            f"all runs must succeed, but {len(failed)} did not: {', '.join(failed)}; see above"
        )


def sweep(
    minutes: float | None = None,
    only: str = "*",
    *,
    out: Path = RUNS,
    checkpoints: Path = SCRATCH,
    plan: tuple[Part, ...] = PLAN,
) -> list[str]:
    """Do the missing runs, until none is left that may start, or the time is over.

    Args:
        minutes: after which no run is started.
        only: a glob that the run's name must match.
        out: the folder of results and logs.
        checkpoints: the folder of checkpoints.
        plan: the parts.

    Returns:
        The names of the runs that failed.
    """
    until = None if minutes is None else time.monotonic() + 60 * minutes
    skipped: set[str] = set()
    failed: list[str] = []
    while until is None or time.monotonic() < until:
        # Read anew each time: another sweep works on the same plan, and results change what is
        # wanted.
        waiting = [
            item for item in _chosen(only, read_all(out), plan) if item.settings.name not in skipped
        ]
        item = next((item for item in waiting if item.certain), None)
        if item is None:
            break
        name = item.settings.name
        typer.echo(f"{time.strftime('%H:%M:%S')} {name}")
        try:
            typer.echo(
                f"{time.strftime('%H:%M:%S')} "
                f"{said(run(item.settings, out=out, checkpoints=checkpoints))}"
            )
        except BusyError:
            skipped.add(name)
        # One run that fails must not keep the others from being done; it is reported here and in
        # the exit status.
        except Exception:
            traceback.print_exc()
            skipped.add(name)
            failed.append(name)
    return failed


def left(
    only: str, results: dict[str, Record], *, each: bool = False, plan: tuple[Part, ...] = PLAN
) -> list[str]:
    """Return lines with the missing runs and their estimated time.

    Args:
        only: a glob that the run's name must match.
        results: the finished runs.
        each: a line a run, too.
        plan: the parts.
    """
    items = _chosen(only, results, plan)
    times = {item.settings.name: seconds(item.settings, results) for item in items}
    said = [_line(item, times[item.settings.name]) for item in items] if each else []
    for part in dict.fromkeys(item.part for item in items):
        mine = [times[item.settings.name] for item in items if item.part == part]
        said.append(f"{part}: {len(mine)} runs left, {_total(mine)}")
    said.append(f"all: {len(items)} runs left, {_total(list(times.values()))}")
    return said


def _chosen(only: str, results: dict[str, Record], plan: tuple[Part, ...]) -> list[Planned]:
    return [item for item in missing(results, plan) if fnmatchcase(item.settings.name, only)]


def _line(item: Planned, estimate: float | None) -> str:
    time_of = "time not known yet" if estimate is None else f"{estimate / 60:.1f} min"
    return f"  {item.settings.name}  {time_of}" + (
        "" if item.certain else "  (or at the best rate, once it is known)"
    )


def _total(times: list[float | None]) -> str:
    known = [value for value in times if value is not None]
    if times and not known:
        return "time not known yet"
    text = f"about {sum(known) / 3600:.1f} h on one core"
    return (
        text
        if len(known) == len(times)
        else f"{text} and {len(times) - len(known)} whose time is not known yet"
    )


if __name__ == "__main__":
    main(app, "studies.sweep")
