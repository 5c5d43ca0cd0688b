"""The family on a GPU: functions over raw tensors that launch the Triton kernels, without autograd.

They compute the same as :mod:`dynorm.kernels._cpu`, from the same arguments. Triton is imported at
the first call, not with this file.
"""

import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from dynorm.arguments import MOST_CHOSEN
from dynorm.errors import ArgumentError
from dynorm.kernels._form import Form, FunctionCode, Parameters

# The least that Triton for NVIDIA supports.
_CAPABILITY = (8, 0)
# Elements of a forward tile, and the warps that share them; the first is for inputs that are too
# small to be worth timing.
_FORWARD = ((2048, 4), (1024, 4), (4096, 4), (4096, 8), (8192, 8))
_WORTH_TIMING = 2**20
# Programs of a backward pass: a fixed number, so that sums do not depend on the device that adds
# them.
_PROGRAMS = 1024
# Elements of a backward tile.
_BACKWARD_TILE = 2048
# The most columns of any tile.
_WIDEST = 512

Candidate = TypeVar("Candidate")
_chosen: dict[Hashable, object] = {}
_lock = threading.Lock()


def available() -> bool:
    """Return whether the kernels can run: with Triton, and a GPU that it supports.

    With its interpreter instead of a GPU (``TRITON_INTERPRET=1`` before Triton is first imported)
    tensors may be on the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if interpreted():
        return True
    if not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= _CAPABILITY


def forward(
    form: Form,
    x: Tensor,
    parameters: Parameters,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``y = weight * scale * f(x - center) + bias`` of contiguous x, in one pass.

    It is written to ``out`` if that is given. It is computed in float32, in float64 for float64,
    and rounded once to the dtype of x.
    """
    y = torch.empty_like(x) if out is None else out
    _check(form, x, y, parameters)
    if not x.numel():
        return y
    from dynorm.kernels._triton_kernels import forward_kernel

    last = form.inner == 1
    columns = form.channels if last else form.inner
    rows = x.numel() // columns
    block = min(power_of_2(columns), _WIDEST)
    inputs = kernel_parameters(form, parameters)
    witnesses = _channels(form.witnesses, x.device)
    in_place = y.data_ptr() == x.data_ptr()
    few, many = _few_or_many(form)
    # Programs of other columns read few witnesses of a row too, and must not see the output of this
    # one.
    source = x
    if few and in_place:
        source = x.clone()
    options = {
        "FUNCTION": int(form.function),
        "CHANNELS_LAST": last,
        "BLOCK_COLUMNS": block,
        "WITNESSES": few,
        "PER_CHANNEL": inputs.constant.numel() > 1,
    }
    term_gain, sums = None, None
    if many:
        term_gain = _term_gain(form, x, parameters)
        sums = _row_sums(form, None, x, inputs, term_gain)

    # Without a sum over channels a row does not need its own program: a tile is any block of the
    # matrix.
    def launch(configuration: tuple[int, int]) -> None:
        elements, warps = configuration
        grid = (ceil_divide(rows, elements // block) * ceil_divide(columns, block),)
        forward_kernel[grid](
            *(source, *inputs[:5], witnesses, inputs.log_gain, term_gain, sums, y),
            *(rows, columns, form.channels, form.scale),
            **options,
            ELEMENTS=elements,
            num_warps=warps,
        )

    configuration = _FORWARD[0]
    # Triton launches on the current device, whatever its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        # Timing runs the kernel many times, which over its own input would give another result.
        if x.numel() >= _WORTH_TIMING and not in_place:
            kind = (form.function, columns, last, few, many > 0)
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
    """Return the gradient of x, of its dtype, and sums of the parameters' gradients.

    A result that is not needed is None. The sums ``(5, channels)``, over all axes but the channels,
    are of constant, shift, center, weight and bias (0 for a part that is None), in float32, or
    float64 for float64; they have the same bits at every call. With witnesses a sixth row begins
    with the gradient of log_gain.
    """
    _check(form, x, grad, parameters)
    channels, inner = form.channels, form.inner
    dtype = torch.promote_types(x.dtype, torch.float32)
    few, many = _few_or_many(form)
    count = few + many
    kinds = 6 if count else 5
    grad_x = torch.empty_like(x) if need_x else None
    if not need_x and not need_parameters:
        return None, None
    if not x.numel():
        if not need_parameters:
            return grad_x, None
        return grad_x, torch.zeros(kinds, channels, dtype=dtype, device=x.device)
    from dynorm.kernels._triton_kernels import backward_kernel, reduce_kernel, witness_kernel

    outer = x.numel() // (channels * inner)
    block_rows, block_columns, blocks, all_steps = _backward_tiles(outer, channels, inner)
    steps = ceil_divide(all_steps, max(_PROGRAMS // blocks, 1))
    chunks = ceil_divide(all_steps, steps)
    partial_sums = None
    if need_parameters:
        size = (chunks, 6 if many else 5, channels)
        partial_sums = torch.empty(size, dtype=dtype, device=x.device)
    # The gradients by T, which the programs of a token's other channels send to its few witnesses.
    rows = torch.empty(blocks, outer, dtype=dtype, device=x.device) if few else None
    inputs = kernel_parameters(form, parameters)
    witnesses = _channels(form.witnesses, x.device)
    # The bias has no part in any gradient.
    tensors = (grad, x, *inputs[:4], witnesses, inputs.log_gain, grad_x)
    options = {
        "FUNCTION": int(form.function),
        "WITNESSES": few,
        "PER_CHANNEL": inputs.constant.numel() > 1,
        "num_warps": 4,
    }
    term_gain, sums_of_rows = None, None
    if many:
        term_gain = _term_gain(form, x, parameters)
        sums_of_rows = _row_sums(form, grad, x, inputs, term_gain)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        backward_kernel[(chunks * blocks,)](
            *(*tensors, partial_sums, rows, term_gain, sums_of_rows),
            *(outer, channels, inner, steps, all_steps, form.scale),
            **options,
            CHANNELS_LAST=inner == 1,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
        )
        if few:
            height = max(_BACKWARD_TILE // 4 // power_of_2(few), 1)
            all_steps = ceil_divide(outer, height)
            steps = ceil_divide(all_steps, _PROGRAMS)
            size = (ceil_divide(all_steps, steps), 2, few)
            of_witnesses = torch.empty(size, dtype=dtype, device=x.device)
            witness_kernel[(len(of_witnesses),)](
                *(*tensors, of_witnesses, rows),
                *(outer, channels, blocks, steps, all_steps, form.scale),
                **options,
                BLOCK_ROWS=height,
                BLOCK_WITNESSES=power_of_2(few),
            )
        if partial_sums is None:
            return grad_x, None
        sums = torch.empty(kinds, channels, dtype=dtype, device=x.device)
        kinds_summed = partial_sums.shape[1]
        # The constant, the bias and, of many witnesses, the gains are always summed.
        present = 0b110001
        for kind, parameter in enumerate(inputs[1:4], start=1):
            present |= (parameter is not None) << kind
        reduce_kernel[(ceil_divide(channels, 64), kinds_summed)](
            partial_sums,
            sums,
            chunks,
            channels,
            PRESENT=present,
            KINDS=kinds_summed,
            BLOCK_CHUNKS=32,
            BLOCK_CHANNELS=64,
            num_warps=4,
        )
    if many:
        # From the channels' order to that of the witnesses.
        sums[5, :many] = sums[5, witnesses]
    if few:
        of_gains, of_centers = of_witnesses.sum(0)
        sums[5, :count] = of_gains
        if inputs.center is not None:
            sums[2, witnesses] -= of_centers
    if form.logarithmic:
        # d beta = beta d log(beta); d slope = -slope / 2 d log(beta).
        by_logarithm = inputs.constant
        if form.function == FunctionCode.LINEAR:
            by_logarithm = -0.5 * by_logarithm
        # In place: an assignment to sums[0] would copy the row once more.
        sums[0].mul_(by_logarithm.reshape(-1).to(dtype))
    return grad_x, sums


def gradients(
    form: Form, grad: Tensor, x: Tensor, parameters: Parameters, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of x and of the parameters, each like its tensor.

    A gradient that is not needed is None.
    """
    grad_x, sums = backward(
        form, grad, x, parameters, need_x=needed[0], need_parameters=any(needed[1:])
    )
    results: list[Tensor | None] = [grad_x]
    for role, (parameter, need) in enumerate(zip(parameters, needed[1:], strict=True)):
        if parameter is None or not need or sums is None:
            results.append(None)
            continue
        if parameter.numel() > 1 or role == 5:
            total = sums[role, : parameter.numel()]
        else:
            total = sums[role].sum()
        results.append(total.reshape(parameter.shape).to(parameter.dtype))
    return results


def _few_or_many(form: Form) -> tuple[int, int]:
    """Return the number of witnesses, and 0 for the other way in which they are computed.

    Many are computed with all channels, from sums along each row, because the code for few grows
    with each witness.
    """
    count = len(form.witnesses)
    return (count, 0) if count <= MOST_CHOSEN else (0, count)


def _term_gain(form: Form, x: Tensor, parameters: Parameters) -> Tensor:
    """Return the gain of each channel's square in the sum of a row: 0 if it is no witness."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    gains = torch.zeros(form.channels, dtype=dtype, device=x.device)
    witnesses = _channels(form.witnesses, x.device)
    assert witnesses is not None
    if parameters.log_gain is None:
        return gains.index_fill_(0, witnesses, 1.0)
    return gains.index_copy_(0, witnesses, parameters.log_gain.detach().to(dtype).exp())


def _row_sums(
    form: Form, grad: Tensor | None, x: Tensor, inputs: Parameters, term_gain: Tensor
) -> Tensor:
    """Return what ``rows_kernel`` adds up along each row, with the gradients by T for ``grad``."""
    from dynorm.kernels._triton_kernels import rows_kernel

    rows = x.numel() // form.channels
    columns = min(power_of_2(form.channels), _WIDEST)
    height = max(min(_BACKWARD_TILE // columns, power_of_2(rows)), 1)
    sums = torch.empty(3 if grad is None else 5, rows, dtype=term_gain.dtype, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        rows_kernel[(ceil_divide(rows, height),)](
            *(grad, x, *inputs[:4], term_gain, sums, rows, form.channels, form.scale),
            FUNCTION=int(form.function),
            PER_CHANNEL=inputs.constant.numel() > 1,
            BLOCK_ROWS=height,
            BLOCK_COLUMNS=columns,
            num_warps=4,
        )
    return sums


@lru_cache(maxsize=1024)
def _channels(witnesses: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Return the channels of witnesses on the device; None without witnesses.

    The tensor is cached, because a copy makes the CPU wait, and a CUDA graph cannot hold one.
    """
    if not witnesses:
        return None
    return torch.tensor(witnesses, device=device)


def _backward_tiles(
    outer: int,
    channels: int,
    inner: int,
) -> tuple[int, int, int, int]:
    """Return the rows and columns of a tile, the tiles side by side, and the steps of each.

    They are not tuned by timing: the order of the sums depends on them, and has to be the same in
    every process.
    """
    if inner == 1:
        columns = min(power_of_2(channels), _WIDEST // 2)
        rows = min(_BACKWARD_TILE // columns, power_of_2(outer))
        return rows, columns, ceil_divide(channels, columns), ceil_divide(outer, rows)
    columns = min(power_of_2(inner), _WIDEST)
    rows = min(_BACKWARD_TILE // columns, power_of_2(channels))
    return rows, columns, ceil_divide(channels, rows), outer * ceil_divide(inner, columns)


def kernel_parameters(form: Form, parameters: Parameters) -> Parameters:
    """Return the parameters as the kernels take them.

    The constant is not a logarithm. Constant, shift and center have one value for all channels, or
    each of them has one per channel.
    """
    inputs = parameters._replace(constant=form.constant(parameters.constant))
    constants = {}
    for name, constant in zip(Parameters._fields[:3], inputs, strict=False):
        if constant is not None:
            constants[name] = constant
    sizes = [constant.numel() for constant in constants.values()]
    if min(sizes) == max(sizes):
        return inputs
    for name, constant in constants.items():
        if constant.numel() == 1:
            constants[name] = constant.reshape(-1).expand(form.channels).contiguous()
    return inputs._replace(**constants)


def _check(form: Form, x: Tensor, other: Tensor, parameters: Parameters) -> None:
    """Refuse arguments for which the kernels would read or write out of bounds.

    ``other`` is out, or the gradient.
    """
    channels, inner = form.channels, form.inner
    possible = 1 <= channels < 2**31 and inner >= 1
    if not x.is_contiguous() or not possible or x.numel() % (channels * inner):
        raise ArgumentError(
            "x must be contiguous, of a multiple of channels * inner elements, got shape "
            f"{tuple(x.shape)}, strides {x.stride()}, channels {channels} and inner {inner}: call "
            ".contiguous(), and give the sizes of x"
        )
    if other.shape != x.shape or other.device != x.device or not other.is_contiguous():
        raise ArgumentError(
            f"gradients and out must be contiguous, of x's shape {tuple(x.shape)} and on "
            f"{x.device}, got {tuple(other.shape)} with strides {other.stride()} on "
            f"{other.device}: call .contiguous()"
        )
    check_parameters(x, channels, parameters[:5])
    witnesses, log_gain = form.witnesses, parameters.log_gain
    count = len(witnesses)
    if count and (inner != 1 or min(witnesses) < 0 or max(witnesses) >= channels):
        raise ArgumentError(
            f"witnesses must be among {channels} channels that come last, got {witnesses}"
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
    """Return the fastest candidate, timed when the key, this kind of call, was first seen.

    If nothing can be timed, in the interpreter or while a CUDA graph is captured, it is the first
    one. Triton's own autotuner breaks such a capture, and keeps the arguments of a call on itself,
    so that threads disturb each other.
    """
    if key not in _chosen:
        if interpreted() or torch.cuda.is_current_stream_capturing():
            return candidates[0]
        with _lock:
            # Another thread may have timed it while this one waited.
            if key not in _chosen:
                times = [_milliseconds(partial(launch, candidate)) for candidate in candidates]
                _chosen[key] = candidates[times.index(min(times))]
    return cast(Candidate, _chosen[key])


def interpreted() -> bool:
    """Return whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _milliseconds(call: Callable[[], object]) -> float:
    """Time a call; infinite if this GPU has too little shared memory or too few registers."""
    # Imported by name, because mypy has no types for them where Triton is not installed.
    testing = importlib.import_module("triton.testing")
    errors = importlib.import_module("triton.runtime.errors")
    try:
        return float(testing.do_bench(call, warmup=5, rep=20, return_mode="median"))
    except errors.OutOfResources:
        return math.inf
