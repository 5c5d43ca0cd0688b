"""A fresh process, which knows what was saved and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_fresh(script: str, *arguments: Path) -> str:
    """Run a script in a new Python process, and return what it prints; its own failure fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
