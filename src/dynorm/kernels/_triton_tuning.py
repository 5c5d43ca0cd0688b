"""Which of a few configurations a Triton kernel is launched with: timed once for each kind of call, then remembered.

Triton's own autotuner keeps a call's arguments on itself, so that threads disturb each other, and measures while a
CUDA graph is being captured, which breaks the capture.
"""

import contextlib
import importlib
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Candidate = TypeVar("Candidate")

_chosen: dict[Hashable, Any] = {}
_lock = threading.Lock()


def choose(key: Hashable, candidates: Sequence[Candidate], launch: Callable[[Candidate], object]) -> Candidate:
    """Return the candidate that was fastest when the key, this kind of call, was first seen.

    Where nothing can be timed, in the interpreter or while a CUDA graph is captured, it is the first one.
    """
    if key not in _chosen:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        with _lock:
            # Another thread may have timed it meanwhile.
            if key not in _chosen:
                _chosen[key] = min(candidates, key=lambda candidate: _milliseconds(lambda: launch(candidate)))
    return cast(Candidate, _chosen[key])


def interpreted() -> bool:
    """Say whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of ``x`` the current one: Triton launches there, whatever its arguments are."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _milliseconds(call: Callable[[], object]) -> float:
    """Time a call; one that this GPU has too little shared memory or too few registers for takes forever."""
    # By name, for their types are not there where Triton is not.
    testing, errors = importlib.import_module("triton.testing"), importlib.import_module("triton.runtime.errors")
    try:
        return float(testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
    except errors.OutOfResources:
        return math.inf
