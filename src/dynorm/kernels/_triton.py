"""The family on a GPU: functions over raw tensors that launch the Triton kernels, without autograd.

They compute the same as :mod:`dynorm.kernels._cpu`, from the same arguments. Triton is imported at
the first call, not with this file.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynorm.kernels._form import Form, FunctionCode, Parameters

# The least that Triton for NVIDIA supports.
_CAPABILITY = (8, 0)
# Elements of a tile, on four warps.
_TILE = 2048
# The most columns of a tile, forward and backward.
_WIDEST = 512
_WIDEST_BACKWARD = 256
# Programs of a backward pass: a fixed number, so that sums do not depend on the device that adds
# them.
_PROGRAMS = 1024


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


def interpreted() -> bool:
    """Return whether Triton's interpreter is on."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def forward(
    form: Form,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``y = weight * scale * f(x - center) + bias`` of contiguous x, in one pass.

    It is written to ``out`` if that is given. It is computed in float32, in float64 for float64,
    and rounded once to the dtype of x.
    """
    y = torch.empty_like(x) if out is None else out
    if not x.numel():
        return y
    from dynorm.kernels._triton_kernels import forward_kernel

    channels = x.shape[-1]
    rows = x.numel() // channels
    block_rows, block_columns = _tile(rows, channels, _WIDEST)
    programs = ceil_divide(rows, block_rows) * ceil_divide(channels, block_columns)
    inputs = kernel_parameters(form, channels, parameters)
    # Triton launches on the current device, whatever its arguments are.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        forward_kernel[(programs,)](
            *(x, *inputs, token_constant, y, rows, channels, form.scale),
            FUNCTION=int(form.function),
            PER_CHANNEL=inputs.constant.numel() > 1,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            num_warps=4,
        )
    return y


def gradients(
    form: Form,
    grad: Tensor,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of x, of the parameters and of the tokens' numbers, each like its tensor.

    A gradient that is not needed is None. The sums have the same bits at every call.
    """
    need_x, *need_parameters, need_token = needed
    has_token = need_token and token_constant is not None
    grad_x, sums, by_token = _backward(
        *(form, grad, x, parameters, token_constant), (need_x, any(need_parameters), has_token)
    )
    results: list[Tensor | None] = [grad_x]
    for role, (parameter, need) in enumerate(zip(parameters, need_parameters, strict=True)):
        if parameter is None or not need or sums is None:
            results.append(None)
            continue
        total = sums[role] if parameter.numel() > 1 else sums[role].sum()
        results.append(total.reshape(parameter.shape).to(parameter.dtype))
    if by_token is not None and token_constant is not None:
        results.append(by_token.sum(0).reshape(token_constant.shape).to(token_constant.dtype))
    else:
        results.append(None)
    return results


def _backward(
    form: Form,
    grad: Tensor,
    x: Tensor,
    parameters: Parameters,
    token_constant: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradient of x, sums of the parameters' gradients, and parts of the tokens'.

    A result that is not ``needed`` is None. The sums ``(5, channels)``, over all axes but the
    channels, are of constant, shift, center, weight and bias (0 for a part that is None), in
    float32, or float64 for float64. The tokens' gradients are the sum of the parts ``(blocks,
    rows)``.
    """
    need_x, need_sums, need_token = needed
    channels = x.shape[-1]
    rows = x.numel() // channels
    dtype = torch.promote_types(x.dtype, torch.float32)
    block_rows, block_columns = _tile(max(rows, 1), channels, _WIDEST_BACKWARD)
    blocks = ceil_divide(channels, block_columns)
    all_steps = ceil_divide(rows, block_rows)
    steps = max(ceil_divide(all_steps, max(_PROGRAMS // blocks, 1)), 1)
    chunks = ceil_divide(all_steps, steps)
    options: dict[str, Any] = {"dtype": dtype, "device": x.device}
    grad_x = torch.empty_like(x) if need_x else None
    partial_sums = torch.empty(chunks, 5, channels, **options) if need_sums else None
    by_token = torch.empty(blocks, rows, **options) if need_token else None
    sums = torch.zeros(5, channels, **options) if need_sums else None
    if not x.numel():
        return grad_x, sums, by_token
    from dynorm.kernels._triton_kernels import backward_kernel, sum_kernel

    inputs = kernel_parameters(form, channels, parameters)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        # The bias has no part in any gradient.
        backward_kernel[(chunks * blocks,)](
            *(grad, x, *inputs[:4], token_constant, grad_x, partial_sums, by_token),
            *(rows, channels, steps, all_steps, form.scale),
            FUNCTION=int(form.function),
            PER_CHANNEL=inputs.constant.numel() > 1,
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
            num_warps=4,
        )
        if sums is None:
            return grad_x, None, by_token
        # The constant and the bias are always summed.
        present = 0b10001
        for kind, parameter in enumerate(inputs[1:4], start=1):
            present |= (parameter is not None) << kind
        sum_kernel[(ceil_divide(channels, 64), 5)](
            partial_sums,
            sums,
            chunks,
            channels,
            PRESENT=present,
            BLOCK_CHUNKS=32,
            BLOCK_CHANNELS=64,
            num_warps=4,
        )
    if form.logarithmic:
        # d beta = beta d log(beta); d slope = -slope / 2 d log(beta).
        by_logarithm = inputs.constant
        if form.function == FunctionCode.LINEAR:
            by_logarithm = -0.5 * by_logarithm
        # In place: an assignment to sums[0] would copy the row once more.
        sums[0].mul_(by_logarithm.reshape(-1).to(dtype))
    return grad_x, sums, by_token


def _tile(rows: int, channels: int, widest: int) -> tuple[int, int]:
    """Return the rows and columns of a tile.

    They are not tuned by timing: the order of the sums depends on them, and has to be the same in
    every process.
    """
    columns = min(power_of_2(channels), widest)
    return min(_TILE // columns, power_of_2(rows)), columns


def kernel_parameters(form: Form, channels: int, parameters: Parameters) -> Parameters:
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
            constants[name] = constant.reshape(-1).expand(channels).contiguous()
    return inputs._replace(**constants)


def ceil_divide(n: int, by: int) -> int:
    """Divide and round up."""
    return -(-n // by)


def power_of_2(n: int) -> int:
    """Return the least power of 2 that is not less than ``n``."""
    return 1 << (n - 1).bit_length()
