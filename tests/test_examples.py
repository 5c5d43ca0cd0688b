"""Every script in examples/ runs as a user would run it, in a folder of its own, and its checks hold."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Its log goes to the stderr of its import; that of the first example is closed in the next one.
import transformers  # noqa: F401

import dynorm
from tests.fresh import Script

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
# Packages that only one example needs: without them its test is skipped, and says so.
NEEDS = {"logit_attribution.py": "transformer_lens"}
# These start processes that import torch again. Here they are forks of one that has imported it.
FORKS = {
    "tensor_parallel.py": """
from functools import partial
import torch
torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
""",
    "shard_decoder.py": """
import os, runpy, socket, subprocess, sys

def run(command, check, env):
    *options, script = command[1:]
    assert options == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    for rank in range(2):
        if not os.fork():
            os.environ["RANK"] = str(rank)
            runpy.run_path(script, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
    for rank in range(2):
        assert os.wait()[1] == 0

subprocess.run = run
""",
}
# Its default is 30 steps, with each of 5 norms at 2 rates.
OPTIONS = {"compare_norms.py": ["--steps", "10"]}
RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"


@pytest.fixture
def warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[warnings.WarningMessage]]:
    """An empty folder to work in, no network, and compilers and filters of warnings as a new process has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["example"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield caught
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_runs(
    name: str,
    tmp_path: Path,
    warned: list[warnings.WarningMessage],
    capfd: pytest.CaptureFixture[str],
) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    sys.argv += OPTIONS.get(name, [])
    if name in FORKS:
        script = Script(FORKS[name] + RUN, FOLDER / name, folder=tmp_path)
        print(script.result())
        print(script.complaints(), file=sys.stderr)
    else:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    said = capfd.readouterr()
    assert said.out.strip()
    # Other libraries may warn; warnings about us or the script have one of these
    # folders before it, and so has what processes say that the script starts.
    folders = (str(Path(dynorm.__file__).parent), str(FOLDER))
    ours = [line for line in said.err.splitlines() if any(folder in line for folder in folders)]
    assert not [*ours, *(warning for warning in warned if warning.filename.startswith(folders))]
    assert not list(tmp_path.iterdir())


def test_the_list_has_every_example_and_no_other() -> None:
    page = (FOLDER / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", page, re.MULTILINE)
    assert SCRIPTS
    assert sorted(rows) == [(name, name) for name in SCRIPTS]


MODEL = """
from torch import nn

def build(norm):
    return nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 8), norm(8), nn.Linear(8, 256))

def own():
    return build(nn.LayerNorm)
"""


@pytest.mark.parametrize(
    ("function", "names", "refused"),
    [
        ("build", ["RMSNorm", "DyT, published"], "its own"),
        ("own", ["its own", "Derf"], "LayerNorm"),
    ],
)
def test_norms_are_compared_on_a_model_of_the_user(
    function: str,
    names: list[str],
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_module.py").write_text(MODEL)
    (tmp_path / "data.txt").write_text("abcd" * 500)
    monkeypatch.chdir(tmp_path)
    words = f"compare_norms.py --model my_module:{function} --data data.txt --out norms.png"
    rates = ["--rates", "0.01", "0.03", "--steps", "12", "--seeds", "2", "--norms", *names]
    monkeypatch.setattr("sys.argv", [*words.split(), *rates])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)
    runpy.run_path(str(FOLDER / "compare_norms.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for name in names:
        assert re.search(
            rf"^│ {name} +│ \d\.\d+ ± \d\.\d+ │ \d\.\d+ ± \d\.\d+ │", printed, re.MULTILINE
        )
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    sys.argv[-1] = refused
    with pytest.raises(SystemExit, match=f"--norms must be some of .*, got '{refused}'"):
        runpy.run_path(str(FOLDER / "compare_norms.py"), run_name="__main__")
    sys.argv[2] = "my_module:other"
    with pytest.raises(SystemExit, match="a function of my_module, got 'other'"):
        runpy.run_path(str(FOLDER / "compare_norms.py"), run_name="__main__")
