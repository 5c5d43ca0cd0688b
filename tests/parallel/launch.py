"""Several processes that run the same cases, and the result of each."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.fresh import Script

# How long a collective waits for a missing rank; well below the limit of a launch.
PATIENCE = 60
Found = list[dict[str, Any]]


def launch(module: str, processes: int, folder: Path, *cases: str) -> Found:
    """Run functions ``case(folder)`` of a module on several gloo processes; return the result of each rank, by case.

    A case that raises on a rank has {"error": class, "message": text, "trace": traceback} there.
    """
    ranks = []
    for rank in range(processes):
        arguments = (rank, processes, folder, module, *cases)
        ranks.append(Script("from tests.parallel.launch import work\nwork()", *arguments))
    for rank in ranks:
        rank.result()
    found = []
    for rank in range(processes):
        found.append(json.loads((folder / f"{rank}.json").read_text("utf-8")))
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


def work() -> None:
    """Do the cases of one rank, whose number is the first argument of the script."""
    rank, processes, folder, module, *names = sys.argv[1:]
    loaded = importlib.import_module(module)
    torch.set_num_threads(1)
    # As torchrun has it.
    for name, value in {"RANK": rank, "WORLD_SIZE": processes}.items():
        os.environ |= {name: value, f"LOCAL_{name}": value}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(processes),
        timeout=timedelta(seconds=PATIENCE),
    )
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = getattr(loaded, name)(Path(folder))
        # Whatever it is, the test wants to see it.
        except Exception as error:
            found[name] = {
                "error": type(error).__name__,
                "message": str(error),
                "trace": traceback.format_exc()[-3000:],
            }
        torch.distributed.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found), "utf-8")
    torch.distributed.destroy_process_group()
