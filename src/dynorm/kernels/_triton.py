"""The family on a GPU: plain functions over raw tensors that launch the Triton kernels; no autograd inside.

What they compute and what they are given is that of :mod:`dynorm.kernels._cpu`. Triton is imported
at the first call, not with this file.
"""

import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dynorm.errors import ArgumentError
from dynorm.kernels._form import LINEAR, Form, Parameters

# Triton for NVIDIA says that it needs this much.
_CAPABILITY = (8, 0)
# Elements of a forward tile, and the warps that share them; the first is for what is too small to
# be worth timing.
_FORWARD = ((2048, 4), (1024, 4), (4096, 4), (4096, 8), (8192, 8))
_WORTH_TIMING = 2**20
# Programs of a backward pass: a fixed number, so that sums do not depend on the device that adds
# them.
_PROGRAMS = 1024
_BACKWARD_TILE, _WIDEST = 2048, 512

Candidate = TypeVar("Candidate")
_chosen: dict[Hashable, Any] = {}
_lock = threading.Lock()


def available() -> bool:
    """Say whether the kernels can run: Triton is there, and a GPU that it serves, or its interpreter is on.

    In the interpreter (``TRITON_INTERPRET=1`` before Triton is first imported) tensors may be on
    the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if interpreted():
        return True
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= _CAPABILITY


def forward(form: Form, x: Tensor, parameters: Parameters, out: Tensor | None = None) -> Tensor:
    """Return ``y = weight * scale * f(x - center) + bias`` of contiguous x, in one pass; in ``out`` where it is given.

    It is computed in float32, in float64 for float64, and rounded once to the dtype of x.
    """
    y = torch.empty_like(x) if out is None else out
    _check(form, x, y, parameters)
    if not x.numel():
        return y
    from dynorm.kernels._triton_kernels import forward_kernel

    last = form.inner == 1
    columns = form.channels if last else form.inner
    rows, block = x.numel() // columns, min(power_of_2(columns), _WIDEST)
    given = (form.constant(parameters[0]), *parameters[1:5])
    told = _told(form, parameters, x.device)
    # Programs of other columns read a row's witnesses too: not from where this one has written.
    source = x.clone() if form.witnesses and y.data_ptr() == x.data_ptr() else x
    options = {
        "FUNCTION": form.function,
        "CHANNELS_LAST": last,
        "BLOCK_COLUMNS": block,
        **per_channel(given),
    }
    options["WITNESSES"] = len(form.witnesses)

    # Without a sum over channels, rows need no program of their own: a tile is any block of the
    # matrix.
    def launch(configuration: tuple[int, int]) -> None:
        elements, warps = configuration
        grid = (ceil_divide(rows, elements // block) * ceil_divide(columns, block),)
        sizes = (rows, columns, form.channels, form.scale)
        forward_kernel[grid](
            source, *given, *told, y, *sizes, **options, ELEMENTS=elements, num_warps=warps
        )

    configuration = _FORWARD[0]
    # Triton launches on the current device, whatever its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        # Timing runs the kernel again and again, which over its own input would not be the same
        # again.
        if x.numel() >= _WORTH_TIMING and y.data_ptr() != x.data_ptr():
            kind = (form.function, columns, last, len(form.witnesses))
            key = (x.device, x.dtype, *kind, x.numel().bit_length() // 3)
            configuration = choose(key, _FORWARD, launch)
        launch(configuration)
    return y


def backward(
    form: Form,
    grad: Tensor,
    x: Tensor,
    parameters: Parameters,
    *,
    need_x: bool = True,
    need_parameters: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradient of x, of its dtype, and sums of the parameters' gradients; None for what is not wanted.

    The sums ``(5, channels)``, over all but the channels, are of constant, shift, center, weight
    and bias (0 for a part that is None), in float32, or float64 for float64; the same bits at every
    call. With witnesses a sixth row begins with log_gain's gradient.
    """
    _check(form, x, grad, parameters)
    channels, inner = form.channels, form.inner
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    kinds = 6 if form.witnesses else 5
    grad_x = torch.empty_like(x) if need_x else None
    if not x.numel() or not (need_x or need_parameters):
        return grad_x, torch.zeros(
            kinds, channels, dtype=dtype, device=x.device
        ) if need_parameters else None
    from dynorm.kernels._triton_kernels import backward_kernel, reduce_kernel, witness_kernel

    outer = x.numel() // (channels * inner)
    block_rows, block_columns, blocks, all_steps = _backward_tiles(outer, channels, inner)
    steps = ceil_divide(all_steps, max(_PROGRAMS // blocks, 1))
    chunks = ceil_divide(all_steps, steps)
    partial = (
        torch.empty(chunks, 5, channels, dtype=dtype, device=x.device) if need_parameters else None
    )
    constant, shift, center, weight, _ = given = (form.constant(parameters[0]), *parameters[1:5])
    told = _told(form, parameters, x.device)
    count = len(form.witnesses)
    rows = torch.empty(blocks, outer, dtype=dtype, device=x.device) if count else None
    options = {"FUNCTION": form.function, "WITNESSES": count, **per_channel(given), "num_warps": 4}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        backward_kernel[(chunks * blocks,)](
            *(grad, x, *given[:4], *told, grad_x, partial, rows),
            *(outer, channels, inner, steps, all_steps, form.scale),
            **options
            | {
                "CHANNELS_LAST": inner == 1,
                "BLOCK_ROWS": block_rows,
                "BLOCK_COLUMNS": block_columns,
            },
        )
        if count:
            height = max(_BACKWARD_TILE // 4 // power_of_2(count), 1)
            all_steps = ceil_divide(outer, height)
            steps = ceil_divide(all_steps, _PROGRAMS)
            of_witnesses = torch.empty(
                ceil_divide(all_steps, steps), 2, count, dtype=dtype, device=x.device
            )
            witness_kernel[(len(of_witnesses),)](
                *(grad, x, *given[:4], *told, grad_x, of_witnesses, rows),
                *(outer, channels, blocks, steps, all_steps, form.scale),
                **options | {"BLOCK_ROWS": height, "BLOCK_WITNESSES": power_of_2(count)},
            )
        if partial is None:
            return grad_x, None
        sums = torch.empty(kinds, channels, dtype=dtype, device=x.device)
        parts = {"WITH_SHIFT": shift, "WITH_CENTER": center, "WITH_WEIGHT": weight}
        present = {name: part is not None for name, part in parts.items()}
        reduce_kernel[(ceil_divide(channels, 64), 5)](
            partial,
            sums,
            chunks,
            channels,
            **present,
            BLOCK_CHUNKS=32,
            BLOCK_CHANNELS=64,
            num_warps=4,
        )
    if count:
        of_gains, of_centers = of_witnesses.sum(0)
        sums[5, :count] = of_gains
        if center is not None:
            sums[2, told[0]] -= of_centers
    if form.logarithmic:
        # d beta = beta d log(beta); d slope = -slope / 2 d log(beta).
        sums[0] *= (-0.5 * constant if form.function == LINEAR else constant).reshape(-1).to(dtype)
    return grad_x, sums


def gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of x and of the parameters, each of its own dtype and shape; None where not needed."""
    grad_x, sums = backward(
        form, grad, x, parameters, need_x=needed[0], need_parameters=any(needed[1:])
    )
    found: list[Tensor | None] = [grad_x]
    for role, (p, need) in enumerate(zip(parameters, needed[1:], strict=True)):
        if p is None or not need or sums is None:
            found.append(None)
            continue
        row = sums[role, : p.numel()] if p.numel() > 1 or role == 5 else sums[role].sum()
        found.append(row.reshape(p.shape).to(p.dtype))
    return found


def _told(
    form: Form, parameters: Parameters, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the witnesses' channels and log_gain as the kernels take them; None where there are none."""
    return (
        (_channels(form.witnesses, device), parameters[5]) if len(parameters) > 5 else (None, None)
    )


@lru_cache(maxsize=1024)
def _channels(witnesses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the channels on the device; kept, because a copy makes the CPU wait, and a CUDA graph cannot hold one."""
    return torch.tensor(witnesses, device=device)


def _backward_tiles(outer: int, channels: int, inner: int) -> tuple[int, int, int, int]:
    """Return a tile's rows and columns, how many tiles lie side by side, and how many are walked for each.

    Not tuned by timing: the order of the sums depends on it, and they shall be the same in every
    process.
    """
    if inner == 1:
        columns = min(power_of_2(channels), _WIDEST // 2)
        rows = min(_BACKWARD_TILE // columns, power_of_2(outer))
        return rows, columns, ceil_divide(channels, columns), ceil_divide(outer, rows)
    columns = min(power_of_2(inner), _WIDEST)
    rows = min(_BACKWARD_TILE // columns, power_of_2(channels))
    return rows, columns, ceil_divide(channels, rows), outer * ceil_divide(inner, columns)


def per_channel(given: Parameters) -> dict[str, bool]:
    """Say of each parameter that may be one number whether it has one per channel."""
    names = ("CONSTANTS", "SHIFTS", "CENTERS")
    return {name: p is not None and p.numel() > 1 for name, p in zip(names, given, strict=False)}


def _check(form: Form, x: Tensor, other: Tensor, parameters: Parameters) -> None:
    """Refuse what the kernels would read or write out of bounds; ``other`` is out, or the gradient."""
    channels, inner = form.channels, form.inner
    if (
        not x.is_contiguous()
        or channels < 1
        or inner < 1
        or channels >= 2**31
        or x.numel() % (channels * inner)
    ):
        raise ArgumentError(
            "x must be contiguous, of a multiple of channels * inner elements, got shape "
            f"{tuple(x.shape)}, strides "
            f"{x.stride()}, channels {channels} and inner {inner}: call .contiguous(), and give "
            "the sizes of x"
        )
    if other.shape != x.shape or other.device != x.device or not other.is_contiguous():
        raise ArgumentError(
            f"gradients and out must be contiguous, of x's shape {tuple(x.shape)} and on "
            f"{x.device}, "
            f"got {tuple(other.shape)} with strides {other.stride()} on {other.device}: call "
            ".contiguous()"
        )
    check_parameters(x, channels, parameters[:5])
    log_gain, count = parameters[5] if len(parameters) > 5 else None, len(form.witnesses)
    if count and (inner != 1 or not 0 <= min(form.witnesses) <= max(form.witnesses) < channels):
        raise ArgumentError(
            f"witnesses must be among {channels} channels that come last, got {form.witnesses}"
        )
    if log_gain is not None and (log_gain.numel() != count or log_gain.device != x.device):
        raise ArgumentError(
            f"log_gain must have {count} elements on {x.device}, got {tuple(log_gain.shape)}"
        )


def check_parameters(x: Tensor, channels: int, parameters: Sequence[Tensor | None]) -> None:
    """Refuse parameters of a wrong size, layout or device."""
    for role, p in enumerate(parameters):
        sizes = (1, channels) if role < 3 else (channels,)
        if p is not None and (
            p.numel() not in sizes or p.device != x.device or not p.is_contiguous()
        ):
            raise ArgumentError(
                f"a parameter must be contiguous, on {x.device} and of "
                f"{' or '.join(map(str, sizes))} elements, got "
                f"{tuple(p.shape)} with strides {p.stride()} on {p.device}"
            )


def ceil_divide(n: int, by: int) -> int:
    """Divide and round up."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than ``n``."""
    return 1 << (n - 1).bit_length()


def choose(
    key: Hashable, candidates: Sequence[Candidate], launch: Callable[[Candidate], object]
) -> Candidate:
    """Return the candidate that was fastest when the key, this kind of call, was first seen.

    Where nothing can be timed, in the interpreter or while a CUDA graph is captured, it is the
    first one. Triton's own autotuner keeps a call's arguments on itself, so that threads disturb
    each other, and breaks such a capture.
    """
    if key not in _chosen:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        with _lock:
            # Another thread may have timed it meanwhile.
            if key not in _chosen:
                _chosen[key] = min(
                    candidates, key=lambda candidate: _milliseconds(lambda: launch(candidate))
                )
    return cast(Candidate, _chosen[key])


def interpreted() -> bool:
    """Say whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _milliseconds(call: Callable[[], object]) -> float:
    """Time a call; one that this GPU has too little shared memory or too few registers for takes forever."""
    # By name, for their types are not there where Triton is not.
    testing, errors = (
        importlib.import_module("triton.testing"),
        importlib.import_module("triton.runtime.errors"),
    )
    try:
        return float(testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
    except errors.OutOfResources:
        return math.inf
