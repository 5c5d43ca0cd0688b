"""The command of a run as each process of ``torchrun -m studies.train`` calls it; see tests/parallel/launch.py."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch import distributed

# Imports of the command: here once, and not in every process.
from studies import callbacks, data, models, trainer  # noqa: F401
from studies.train import app

WORDS = [
    "--arm",
    "dyisru_annealed",
    "--lr",
    "1e-2",
    "--steps",
    "20",
    "--size",
    "tiny",
    "--warmup",
    "10",
    "--json",
]


def command(folder: Path) -> dict[str, Any] | None:
    """Run it, and return its output: a result on the first rank, nothing on the others."""
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    # By these torchrun tells a process which of them it is.
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"WORLD_SIZE": f"{processes}", "LOCAL_WORLD_SIZE": f"{processes}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    folders = ["--out", str(folder / "runs"), "--checkpoints", str(folder / "checkpoints")]
    with redirect_stdout(io.StringIO()) as printed:
        app([*WORDS, *folders], standalone_mode=False)
    # The command leaves the group of processes itself.
    assert not distributed.is_initialized()
    return json.loads(printed.getvalue()) if printed.getvalue() else None
