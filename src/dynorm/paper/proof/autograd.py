"""The statements against dynorm's own functions and against automatic differentiation, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dynorm import functional, theory

CHANNELS = (2, 3, 100)
TOLERANCE = 1e-11

Comparison = tuple[Tensor, Tensor]
"""What was computed and what the statement says; elementwise equal up to rounding."""


def largest_error(name: str, seed: int = 0) -> float:
    """Return how far a statement is from what dynorm and autograd compute.

    Args:
        name: The statement's name; one of :data:`CHECKS`.
        seed: Seed of the tokens.

    Returns:
        Largest difference over all tokens, relative to the largest value of its comparison or to 1.

    Example:
        >>> largest_error("theorem-1") < 1e-12
        True
    """
    generator = torch.Generator().manual_seed(seed)
    errors = [
        (got - want).abs().max() / torch.cat([got, want]).abs().max().clamp(min=1)
        for channels in CHANNELS
        for got, want in CHECKS[name](_tokens(channels, generator))
    ]
    # Unlike Python's max, torch's does not lose a NaN.
    return float(torch.stack(errors).max())


def _tokens(channels: int, generator: torch.Generator) -> Tensor:
    """Return eight tokens whose values differ, so that no sigma is lost to rounding."""
    grid = torch.linspace(-2, 2, channels, dtype=torch.float64)
    order = torch.stack([torch.randperm(channels, generator=generator) for _ in range(8)])
    shake = torch.rand(8, channels, generator=generator, dtype=torch.float64) / channels
    return grid[order] + shake + torch.randn(8, 1, generator=generator, dtype=torch.float64)


def _diagonal(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return d f_i / d x_i of each token."""
    jacobian: Tensor = torch.func.vmap(torch.func.jacrev(function))(x)
    return torch.diagonal(jacobian, dim1=-2, dim2=-1)


def _slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the derivative of a point-wise function."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return gradient


def _norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, eps=0.0)


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _reduction(x: Tensor) -> Iterator[Comparison]:
    count, mean, variance = x.shape[-1], theory.leave_one_out_mean(x), theory.leave_one_out_variance(x)
    yield functional.center(x), (count - 1) / count * (x - mean)
    yield (
        count * x.var(-1, correction=0, keepdim=True).expand_as(x),
        (count - 1) * variance + (count - 1) / count * (x - mean) ** 2,
    )
    yield _diagonal(theory.leave_one_out_mean, x), torch.zeros_like(x)
    yield _diagonal(theory.leave_one_out_variance, x), torch.zeros_like(x)


def _theorem_1(x: Tensor) -> Iterator[Comparison]:
    yield _diagonal(_norm, x), theory.layer_norm_derivative(x)
    yield _diagonal(lambda z: z.std(-1, correction=0, keepdim=True).expand_as(z), x), _norm(x) / x.shape[-1]


def _equation_7(x: Tensor) -> Iterator[Comparison]:
    alone = torch.zeros_like(x)
    alone[:, 0] = x[:, 0].abs() + 1
    bound = torch.full_like(x[:, 0], math.sqrt(x.shape[-1] - 1))
    for sign in (1, -1):
        yield _norm(sign * alone)[:, 0], sign * bound
        yield _diagonal(_norm, sign * alone)[:, 0], torch.zeros_like(bound)


def _equation_8(x: Tensor) -> Iterator[Comparison]:
    factor = theory.layer_norm_slope_factor(x, keepdim=True)
    yield _slope(theory.layer_norm_slope_factor, x), -_norm(x) * factor**2


def _theorem_2(x: Tensor) -> Iterator[Comparison]:
    factor, count = 0.07, x.shape[-1]
    alpha = math.sqrt(count - 1) * factor
    y = functional.scaled_dyt(x, alpha)
    yield _slope(lambda z: functional.scaled_dyt(z, alpha), x), factor * (count - 1 - y**2)
    yield functional.scaled_dyt(torch.zeros_like(x), alpha), torch.zeros_like(x)
    yield y / math.sqrt(count - 1), functional.dyt(x, alpha)


def _theorem_3(x: Tensor) -> Iterator[Comparison]:
    count, beta = x.shape[-1], 1.7
    y, d = functional.dyisru_general(x, beta, _mean(x)), functional.center(x)
    factor = math.sqrt(count - 1) / (count * torch.sqrt(beta + d**2))
    moved = _diagonal(lambda z: functional.dyisru_general(z, beta, _mean(z)), x)
    yield moved, factor * (count - 1 - y**2)
    yield moved.clamp(max=0), torch.zeros_like(x)


def _theorem_4(x: Tensor) -> Iterator[Comparison]:
    # Rounding leaves a little, of either sign, where the constant is 0: with C = 2.
    beta = theory.channel_beta(x).clamp(min=1e-300)
    yield functional.dyisru_general(x, beta, _mean(x)), _norm(x)


def _equation_15(x: Tensor) -> Iterator[Comparison]:
    beta, mean, bound = 1.7, _mean(x), math.sqrt(x.shape[-1] - 1)
    exact, dropped = functional.dyisru_general(x, beta, mean), functional.dyisru(x, beta)
    neglected = bound**2 * beta * mean * (2 * x - mean) / ((beta + x**2) * (beta + (x - mean) ** 2))
    yield dropped**2 - exact**2, neglected
    yield functional.dyisru(x * 1e9, beta), functional.dyisru_general(x * 1e9, beta, mean)
    yield _slope(lambda z: functional.dyisru(z, beta), x), bound * beta * (beta + x**2) ** -1.5


def _appendix_b(x: Tensor) -> Iterator[Comparison]:
    alpha = 0.6
    yield functional.isru(x, alpha), functional.dyisru(x, 1 / alpha, scale=math.sqrt(1 / alpha))
    yield functional.isru(x, alpha), x / torch.sqrt(1 + alpha * x**2)
    yield _slope(lambda z: functional.isru(z, alpha), x), (1 + alpha * x**2) ** -1.5


def _note_centering(x: Tensor) -> Iterator[Comparison]:
    matrix = functional.centering_matrix(x.shape[-1], dtype=x.dtype)
    yield x @ matrix, functional.center(x)
    yield matrix @ matrix, matrix
    yield torch.func.vmap(torch.func.jacrev(functional.center))(x), matrix.expand(len(x), -1, -1)


def _note_variance(x: Tensor) -> Iterator[Comparison]:
    yield x.var(-1, correction=0), functional.mean_square(functional.center(x))
    yield functional.rms(x), torch.linalg.vector_norm(x, dim=-1) / math.sqrt(x.shape[-1])


def _affine(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0].cos() + 1, x[0].sin()


def _note_rmsnorm(x: Tensor) -> Iterator[Comparison]:
    weight, bias = _affine(x)
    torch_norm = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-3)
    yield functional.rms_norm(functional.center(x), weight, None, 1e-3) + bias, torch_norm
    yield functional.layer_norm(x, weight, bias, 1e-3), torch_norm


def _note_matrix(x: Tensor) -> Iterator[Comparison]:
    weight, bias = _affine(x)
    matrix = functional.centering_matrix(x.shape[-1], dtype=x.dtype) @ torch.diag(weight)
    yield functional.layer_norm(x, weight, bias, 1e-3), x / torch.sqrt(_variance(x) + 1e-3) @ matrix + bias


def _variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0, keepdim=True)


def _closed_form_1(x: Tensor) -> Iterator[Comparison]:
    count = x.shape[-1]
    yield theory.channel_beta(x), (count - 1) ** 2 / count * theory.leave_one_out_variance(x)
    yield _diagonal(theory.channel_beta, x), torch.zeros_like(x)


def _closed_form_2(x: Tensor) -> Iterator[Comparison]:
    for eps in (0.0, 0.1):
        yield theory.layer_norm_as_dyisru(x, eps), functional.layer_norm(x, eps=eps)
        beta, middle = theory.leave_one_out_beta(x, eps=eps), theory.leave_one_out_mean(x)
        held = _slope(lambda z, b=beta, m=middle: functional.dyisru_general(z, b, m), x)  # type: ignore[misc]
        yield held, _diagonal(lambda z, e=eps: functional.layer_norm(z, eps=e), x)  # type: ignore[misc]


def _closed_form_3(x: Tensor) -> Iterator[Comparison]:
    for eps in (0.0, 0.1):
        yield theory.rms_norm_as_dyisru(x, eps), functional.rms_norm(x, eps=eps)
    y, root = functional.rms_norm(x, eps=0.0), functional.rms(x, keepdim=True)
    yield _diagonal(lambda z: functional.rms_norm(z, eps=0.0), x), (x.shape[-1] - y**2) / (x.shape[-1] * root)


def _closed_form_4(x: Tensor) -> Iterator[Comparison]:
    if x.shape[-1] < 3:
        return
    beta, middle = theory.leave_one_out_beta(x), theory.leave_one_out_mean(x)
    for t, want in ((0.0, _norm(x)), (1.0, functional.dyisru_general(x, 1.7, 0.4))):
        constant = torch.exp((1 - t) * beta.log() + t * math.log(1.7))
        yield functional.dyisru_general(x, constant, (1 - t) * middle + t * 0.4), want


def _closed_form_5(x: Tensor) -> Iterator[Comparison]:
    count, sigma = x.shape[-1], 1.3
    beta = theory.closed_form_beta(sigma**2, count)
    for scale in (math.sqrt(count), math.sqrt(count - 1)):
        slope = _slope(lambda z, s=scale: functional.dyisru(z, beta, scale=s), torch.zeros_like(x))  # type: ignore[misc]
        yield slope, torch.full_like(x, scale / math.sqrt(count) / sigma)


def _misprint_first_version(x: Tensor) -> Iterator[Comparison]:
    count = x.shape[-1]
    y = math.sqrt(count - 1) * torch.sigmoid(x)
    slope = _slope(lambda z: -torch.log((count - 1) * z**-2 - 1) / (2 * (count - 1)), y)
    yield slope * ((count - 1) * y - y**3), torch.ones_like(x)


def _misprint_note(x: Tensor) -> Iterator[Comparison]:
    count = x.shape[-1]
    yield x @ (torch.eye(count, dtype=x.dtype) - torch.ones(count, count, dtype=x.dtype) / count), x - _mean(x)


CHECKS: dict[str, Callable[[Tensor], Iterator[Comparison]]] = {
    "reduction": _reduction,
    "theorem-1": _theorem_1,
    "equation-7": _equation_7,
    "equation-8": _equation_8,
    "theorem-2": _theorem_2,
    "theorem-3": _theorem_3,
    "theorem-4": _theorem_4,
    "equation-15": _equation_15,
    "appendix-b": _appendix_b,
    "note-centering": _note_centering,
    "note-variance": _note_variance,
    "note-rmsnorm": _note_rmsnorm,
    "note-matrix": _note_matrix,
    "closed-form-1": _closed_form_1,
    "closed-form-2": _closed_form_2,
    "closed-form-3": _closed_form_3,
    "closed-form-4": _closed_form_4,
    "closed-form-5": _closed_form_5,
    "misprint-first-version": _misprint_first_version,
    "misprint-note": _misprint_note,
}
"""For each statement, what to compare on given tokens."""
