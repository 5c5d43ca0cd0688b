"""Every script in examples/ runs as a user would run it, in a folder of its own, and its checks hold."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import dynorm

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
CPU_SECONDS = 120


def limited() -> None:
    """A minute is promised, on an idle machine: time in which others compute does not count."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)], cwd=tmp_path / "cwd", env=environment, capture_output=True, text=True,
        check=False, timeout=600, preexec_fn=limited,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
    # Other libraries say there what they like; what we or the script are warned of has one of these folders before it.
    folders = (str(Path(dynorm.__file__).parent), str(FOLDER))
    ours = [line for line in done.stderr.splitlines() if any(folder in line for folder in folders)]
    assert not ours
    assert not list((tmp_path / "cwd").iterdir())


def test_every_example_is_in_the_list_and_ends_with_a_check() -> None:
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert SCRIPTS
    for name in SCRIPTS:
        source = (FOLDER / name).read_text("utf-8")
        assert f"[{name}]({name})" in listed
        assert "raise SystemExit" in source or "assert_close" in source
