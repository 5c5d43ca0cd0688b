"""Several processes that run the same cases, and the result of each.

All are forked from one server that has imported the modules of the cases: an import a launch would take
most of the time.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[2]
# How long a collective waits for a missing rank; well below the limit of a launch.
PATIENCE = 60
# Optimizers and checkpoints would import the first in every process.
IMPORTED = ["torch._dynamo", "tests.parallel.launch", "tests.parallel.cases"]
Found = list[dict[str, Any]]


def launch(module: str, processes: int, folder: Path, *cases: str, timeout: float = 300) -> Found:
    """Run functions ``case(folder)`` of a module on several gloo processes; return the result of each rank, by case.

    A case that raises on a rank has {"error": class, "message": text, "trace": traceback} there.
    """
    name = module if "." in module else f"tests.parallel.{module}"
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(IMPORTED)
    workers = []
    for rank in range(processes):
        workers.append(fork.Process(target=_work, args=(rank, processes, folder, name, cases)))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    # The server that the first launch starts keeps this environment.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", PYTHONPATH=path):
        for worker in workers:
            worker.start()
    until = time.monotonic() + timeout
    for worker in workers:
        worker.join(max(0, until - time.monotonic()))
    late = [worker for worker in workers if worker.is_alive()]
    for worker in late:
        worker.kill()
        worker.join()
    said = ""
    for log in sorted(folder.glob(f"{processes}-*.log")):
        said += log.read_text("utf-8")[-12000:]
    assert not late, f"not done after {timeout} s\n{said}"
    assert not any(worker.exitcode for worker in workers), said
    found = []
    for rank in range(processes):
        found.append(json.loads((folder / f"{processes}-{rank}.json").read_text("utf-8")))
    return found


def values(found: Found, case: str) -> list[Any]:
    """The results of all ranks in a case, if none raised an error."""
    for rank, each in enumerate(found):
        got = each.get(case)
        is_error = isinstance(got, dict) and "trace" in got
        assert not is_error, f"{case} on rank {rank}: {got['trace']}"
    return [each[case] for each in found]


def errors(found: Found, case: str) -> list[tuple[str, str]]:
    """Class and message of the error that each rank raised in a case."""
    raised = []
    for rank, each in enumerate(found):
        got = each[case]
        is_error = isinstance(got, dict) and "trace" in got
        assert is_error, f"{case} on rank {rank} raised nothing, but gave {got}"
        raised.append((got["error"], got["message"]))
    return raised


def _work(rank: int, processes: int, folder: Path, module: str, names: tuple[str, ...]) -> None:
    with (folder / f"{processes}-{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    loaded = importlib.import_module(module)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{processes}.store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=PATIENCE),
    )
    # As torchrun has it.
    for name, value in {"RANK": rank, "WORLD_SIZE": processes}.items():
        os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(loaded, name)(folder)
        # Whatever it is, the test wants to see it.
        except Exception as error:
            found[name] = {
                "error": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc()[-3000:],
            }
        torch.distributed.barrier()
    (folder / f"{processes}-{rank}.json").write_text(json.dumps(found), "utf-8")
    torch.distributed.destroy_process_group()
