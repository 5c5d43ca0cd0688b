"""Several processes that run the same cases, and what each of them found; ``launch`` for tests, ``main`` inside.

The modules are imported once, and the processes forked from there: an import a process would take most of the time.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
# What a collective waits for a rank that does not come; well below what a launch may take.
PATIENCE = 60
Found = list[dict[str, Any]]


def launch(module: str, processes: int, folder: Path, *cases: str, timeout: float = 300, dead: bool = False) -> Found:
    """Run functions ``case(folder)`` of a module on so many gloo processes; return what each rank returned, by case.

    A case that raises on a rank has {"error": class, "message": text, "trace": traceback} there. With ``dead``, a rank
    ends in the last case, and has nothing of it.
    """
    words = [sys.executable, "-m", "tests.parallel.launch", module, str(processes), str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.Popen(
        words, cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = run.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # The group is the run and what it forked, nothing else.
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert (run.returncode != 0) == dead, f"{output[-2000:]}\n{errors[-4000:]}"
    return [json.loads((folder / f"{processes}-{rank}.json").read_text("utf-8")) for rank in range(processes)]


def values(found: Found, case: str) -> list[Any]:
    """What each rank returned in a case, where none raised."""
    for rank, each in enumerate(found):
        got = each.get(case)
        assert not (isinstance(got, dict) and "trace" in got), f"{case} on rank {rank}: {got['trace']}"
    return [each[case] for each in found]


def errors(found: Found, case: str) -> list[tuple[str, str]]:
    """Class and message of the error that each rank raised in a case."""
    for rank, each in enumerate(found):
        assert isinstance(each[case], dict), f"{case} on rank {rank} raised nothing, but gave {each[case]}"
        assert "trace" in each[case], f"{case} on rank {rank} raised nothing, but gave {each[case]}"
    return [(each[case]["error"], each[case]["message"]) for each in found]


def _run(case: Callable[[Path], Any], folder: Path) -> Any:
    try:
        return case(folder)
    # Whatever it is, the test wants to see it.
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()[-3000:]}


def _work(rank: int, processes: int, folder: Path, cases: list[Callable[[Path], Any]]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/{processes}.store"
    patience = timedelta(seconds=PATIENCE)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes, timeout=patience)
    # As torchrun has it.
    for name, value in {"RANK": rank, "WORLD_SIZE": processes}.items():
        os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    found: dict[str, Any] = {}
    results = folder / f"{processes}-{rank}.json"
    results.write_text("{}")
    for case in cases:
        torch.manual_seed(0)
        found[case.__name__] = _run(case, folder)
        results.write_text(json.dumps(found), encoding="utf-8")
        # The last case may have left the group.
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    """Fork the processes and wait for them."""
    module, processes, folder, *names = sys.argv[1:]
    # Optimizers and checkpoints would import it in every process.
    importlib.import_module("torch._dynamo")
    loaded = importlib.import_module(module if "." in module else f"tests.parallel.{module}")
    cases = [getattr(loaded, name) for name in names]
    fork = multiprocessing.get_context("fork")
    count = int(processes)
    workers = [fork.Process(target=_work, args=(rank, count, Path(folder), cases)) for rank in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))


if __name__ == "__main__":
    main()
