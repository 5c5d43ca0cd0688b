"""Several processes that run the same cases, and the result of each.

All are forked from one server that has imported the modules of the cases: an import a launch would take
most of the time.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).parents[2]
# How long a collective waits for a missing rank; well below the limit of a launch.
PATIENCE = 60
# Optimizers and checkpoints would import the first in every process.
IMPORTED = [
    "torch._dynamo", "tests.parallel.launch", "tests.parallel.tensor_cases", "tests.parallel.data_cases",
    "tests.parallel.bad_cases", "tests.jobs.ranks_cases", "tests.train.test_callbacks",
    "tests.studies.process_cases",
]  # fmt: skip
Found = list[dict[str, Any]]


def launch(
    module: str, processes: int, folder: Path, *cases: str, timeout: float = 300, dead: bool = False
) -> Found:
    """Run functions ``case(folder)`` of a module on several gloo processes; return the result of each rank, by case.

    A case that raises on a rank has {"error": class, "message": text, "trace": traceback} there.
    With ``dead``, a rank ends in the last case, and has nothing of it.

    If a signal ends a worker, all are launched once more, and the summary of pytest has a warning
    with the stacks of its threads. An error or a wrong result never has a second launch.

    A signal came once in some twenty runs of all tests: glibc found its heap damaged ("unaligned tcache
    chunk detected") on one of the four ranks of test_tensor.py, in or after its case with FSDP2. It did
    not come back in more than thirty launches, twenty of them with glibc's checks of each block. Nothing was
    reported by valgrind on that case, which sees all of torch, nor by AddressSanitizer and UBSan in
    the kernels. The process that forks the workers has one thread. So it is probably a race in torch
    or gloo; no issue of theirs describes it.
    """
    words = (processes, folder, module if "." in module else f"tests.parallel.{module}", cases)
    said, codes = _launch(*words, timeout)
    signals = [signal.Signals(-code).name for code in codes if code < 0]
    if signals and not dead:
        warnings.warn(
            f"a worker died by {signals[0]}, so {module} was launched again: {said}", stacklevel=2
        )
        for suffix in ("json", "log", "store"):
            for path in folder.glob(f"{processes}*.{suffix}"):
                path.unlink()
        said, codes = _launch(*words, timeout)
    assert any(codes) == dead, said
    return [
        json.loads((folder / f"{processes}-{rank}.json").read_text("utf-8"))
        for rank in range(processes)
    ]


def _launch(
    processes: int, folder: Path, module: str, cases: tuple[str, ...], timeout: float
) -> tuple[str, list[int]]:
    """Run the workers once; return the end of their logs and the exit code of each."""
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(IMPORTED)
    words = (processes, folder, module, cases)
    workers = [fork.Process(target=_work, args=(rank, *words)) for rank in range(processes)]
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
    said = "\n".join(
        log.read_text("utf-8")[-12000:] for log in sorted(folder.glob(f"{processes}-*.log"))
    )
    assert not late, f"not done after {timeout} s\n{said}"
    return said, [worker.exitcode or 0 for worker in workers]


def values(found: Found, case: str) -> list[Any]:
    """The results of all ranks in a case, if none raised an error."""
    for rank, each in enumerate(found):
        got = each.get(case)
        assert not (isinstance(got, dict) and "trace" in got), (
            f"{case} on rank {rank}: {got['trace']}"
        )
    return [each[case] for each in found]


def errors(found: Found, case: str) -> list[tuple[str, str]]:
    """Class and message of the error that each rank raised in a case."""
    for rank, each in enumerate(found):
        assert isinstance(each[case], dict), (
            f"{case} on rank {rank} raised nothing, but gave {each[case]}"
        )
        assert "trace" in each[case], f"{case} on rank {rank} raised nothing, but gave {each[case]}"
    return [(each[case]["error"], each[case]["message"]) for each in found]


def _run(case: Callable[[Path], Any], folder: Path) -> Any:
    try:
        return case(folder)
    # Whatever it is, the test wants to see it.
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "trace": traceback.format_exc()[-3000:],
        }


def _work(rank: int, processes: int, folder: Path, module: str, names: tuple[str, ...]) -> None:
    with (folder / f"{processes}-{rank}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    # A signal, as that of glibc when its heap is damaged, leaves the stacks of all threads in the log.
    faulthandler.enable(file=2)
    loaded = importlib.import_module(module)
    cases: list[Callable[[Path], Any]] = [getattr(loaded, name) for name in names]
    torch.set_num_threads(1)
    store = f"file://{folder}/{processes}.store"
    patience = timedelta(seconds=PATIENCE)
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=processes, timeout=patience
    )
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
