"""The files of a run: its result, its log, its checkpoints, and the lock that keeps two processes apart."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynorm.errors import DataError, ModelError, StorageError
from dynorm.files import require_writable, write_text
from studies.settings import Settings

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "studies" / "results" / "runs"
SCRATCH = ROOT / "build" / "studies"
Record = dict[str, Any]


class BusyError(ModelError):
    """Another process works on this very run."""


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what.

    Args:
        name: the run's name.
        out: the folder of results and logs.
        scratch: the folder of checkpoints.
    """

    name: str
    out: Path = RUNS
    scratch: Path = SCRATCH

    @property
    def result(self) -> Path:
        """The result, there when the run is finished."""
        return self.out / f"{self.name}.json"

    @property
    def log(self) -> Path:
        """The log, a line each time the Trainer logs."""
        return self.out / f"{self.name}.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the Trainer's checkpoints, deleted when the run is finished."""
        return self.scratch / self.name

    @property
    def old(self) -> tuple[Path, Path]:
        """The result and the log that were set aside, if any."""
        return self.out / f"{self.name}.json.old", self.out / f"{self.name}.jsonl.old"

    @property
    def locked(self) -> Path:
        """The file that says who works on the run; beside the results, which several folders of checkpoints share."""
        return self.out / ".locks" / f"{self.name}.lock"

    def prepare(self) -> None:
        """Make the folders, and refuse before the work what could not be written after it.

        Raises:
            StorageError: a folder cannot be made, or a file in it could not be written.
        """
        _make(self.out)
        _make(self.checkpoints)
        for file in (self.result, self.log, self.checkpoints / "settings.json"):
            require_writable(file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run: the system lets go of it when the process ends, however it ends.

        Raises:
            BusyError: another process holds it.
            StorageError: the folder cannot be made, or knows no locks.
        """
        # Not on Windows; the library itself runs there, the study does not.
        import fcntl

        _make(self.locked.parent)
        require_writable(self.locked)
        with open(self.locked, "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusyError(
                    f"{self.name} must be run by one process, but another runs it now: wait"
                ) from error
            except OSError as error:
                raise StorageError(
                    f"{self.locked} must be lockable: {error}; give a folder on another disk"
                ) from error
            yield

    def claim(self, settings: Settings) -> None:
        """Say whose checkpoints these are.

        Raises:
            StorageError: they are those of a run with other settings.
        """
        file = self.checkpoints / "settings.json"
        mine = json.dumps(settings.to_dict(), indent=1)
        if file.exists() and file.read_text("utf-8") != mine:
            raise StorageError(
                f"{self.checkpoints} must hold this run's checkpoints, but is another's: delete it"
            )
        write_text(file, mine)

    def checkpoint(self) -> Path | None:
        """Return the last checkpoint that was written to its end, if any."""
        # It imports transformers, which a report on the runs does not need.
        from dynorm.train.trainer import last_checkpoint

        return last_checkpoint(self.checkpoints)

    def set_aside(self) -> None:
        """Keep the result and the log of a finished run under other names, until there is a new result."""
        if self.result.exists():
            # The result last: while it has its name, this is done anew.
            for file, old in ((self.log, self.old[1]), (self.result, self.old[0])):
                if file.exists():
                    file.replace(old)

    def clear(self) -> None:
        """Delete the checkpoints."""
        shutil.rmtree(self.checkpoints)

    def read(self) -> Record | None:
        """Return the result, or None while there is none."""
        return read_record(self.result) if self.result.exists() else None

    def write_log(self, lines: Iterable[Record]) -> None:
        """Write the log, whole."""
        write_text(self.log, "".join(dumps(line) + "\n" for line in lines))

    def write_result(self, record: Record) -> None:
        """Write the result, and delete the old one that was kept."""
        write_text(self.result, dumps(record, indent=1) + "\n")
        for file in self.old:
            file.unlink(missing_ok=True)


def read_all(out: Path = RUNS) -> dict[str, Record]:
    """Return all results by the run's name.

    Raises:
        DataError: a file is no result, or is named as another run.
    """
    return {path.stem: read_record(path) for path in sorted(out.glob("*.json"))}


def read_log(name: str, out: Path = RUNS) -> list[Record]:
    """Return the lines of a run's log.

    Raises:
        DataError: there is no log, or a line of it is broken.
    """
    path = out / f"{name}.jsonl"
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} must be the run's log, but is not: {error}; run again with --again"
        ) from error


def read_record(path: Path) -> Record:
    """Return a result.

    Raises:
        DataError: the file is none, or is named as another run.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
        name = Settings(**record["settings"]).name
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} must be a run's result, but is not: {error}; delete it, and run again"
        ) from error
    if name != path.stem:
        raise DataError(f"{path} must be named as its run: rename it, or delete it")
    return dict(record)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the folder {str(folder)!r} cannot be made: {error}; give another"
        ) from error


def dumps(value: Any, indent: int | None = None) -> str:
    """Return JSON with null for numbers that are not finite."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
