"""A new process that reads a saved folder."""

from __future__ import annotations

import subprocess
import sys


def fresh(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check)
