"""Cases for test_launch.py: a worker that a signal ends."""

from __future__ import annotations

import os
from pathlib import Path

from torch import distributed as dist


def dies_the_first_time(folder: Path) -> str:
    """End rank 1 by a signal, unless it was here before."""
    mark = folder / "died"
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os.abort()
    return "done"


def dies_every_time(folder: Path) -> None:
    if dist.get_rank() == 1:
        os.abort()


def leaves_once(folder: Path) -> str:
    """End rank 1 with an exit code, unless it was here before."""
    mark = folder / "left"
    if dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        os._exit(3)
    return "done"
