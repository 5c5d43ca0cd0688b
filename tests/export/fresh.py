"""A new process that has only the saved files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_fresh(script: str, *arguments: Path) -> str:
    """Run a script in a new Python process, and return its output; a failure of the script fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
