"""The two formulas of a norm, and how well a function of tokens fits them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dynorm.find.tokens import TokenFunction, sample_tokens

KINDS = ("layernorm", "rmsnorm")

# Relative errors that rounding may leave: in float64 a module may still compute in float32 inside.
TOLERANCE = 1e-4
HALF_TOLERANCE = 3e-2


@dataclass(frozen=True)
class Fit:
    """A function of tokens as core(x) * weight + bias.

    Args:
        kind: "layernorm" or "rmsnorm".
        weight: One number a channel.
        bias: The same.
        error: What is left over, relative to the output, as a root mean square.
    """

    kind: str
    weight: Tensor
    bias: Tensor
    error: float


def core(tokens: Tensor, kind: str, eps: float = 0.0) -> Tensor:
    """The norm without its affine part, over the last axis.

    Example:
        >>> core(torch.tensor([[3.0, -3.0]]), "rmsnorm")
        tensor([[ 1., -1.]])
    """
    if kind == "layernorm":
        tokens = tokens - tokens.mean(-1, keepdim=True)
    return tokens / (tokens.square().mean(-1, keepdim=True) + eps).sqrt()


def fit_norm(function: TokenFunction, kinds: tuple[str, ...] = KINDS) -> Fit | None:
    """The LayerNorm or RMSNorm that a function of tokens is, or None.

    A norm's core is odd: f(x) - f(-x) shows the weight alone and f(x) + f(-x) the bias alone. The tokens are so large
    that no eps shows.

    Args:
        function: The function.
        kinds: Formulas to compare it with.

    Returns:
        The better fit, if it leaves no more than rounding.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> packing = Packing((2, 4), axes=(1,))
        >>> function = TokenFunction(torch.nn.LayerNorm(4), packing, torch.float32, torch.device("cpu"))
        >>> fit_norm(function).kind
        'layernorm'
    """
    tokens, odd, even = large_parts(function, at_least=16)
    fits = [regress(core(tokens, kind), odd, even, kind) for kind in kinds]
    best = min(fits, key=lambda fit: fit.error)
    return best if best.error <= tolerance(function) else None


def large_parts(function: TokenFunction, at_least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Large tokens, at least so many, and the odd and the even part of what a function makes of them.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> function = TokenFunction(torch.nn.Tanh(), Packing((2, 4), (1,)), torch.float32, torch.device("cpu"))
        >>> tokens, odd, even = large_parts(function, at_least=5)
        >>> tokens.shape, even.abs().max().item()
        (torch.Size([6, 4]), 0.0)
    """
    # Squares of half-precision numbers must stay finite.
    scale = 1e3 if tolerance(function) == TOLERANCE else 30.0
    tokens = function.rounded(several_tokens(function, scale, seed=2, at_least=at_least))
    return tokens, *parts(function, tokens)


def several_tokens(function: TokenFunction, scale: float, seed: int, at_least: int = 1) -> Tensor:
    """Tokens for two calls of a function, or for more, until there are enough.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> function = TokenFunction(torch.nn.Tanh(), Packing((2, 4), (1,)), torch.float32, torch.device("cpu"))
        >>> several_tokens(function, scale=1.0, seed=0).shape
        torch.Size([4, 4])
    """
    count = function.packing.count
    return sample_tokens(count * max(2, -(-at_least // count)), function.packing.channels, scale, seed)


def parts(function: TokenFunction, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The odd and the even part of a function at some tokens.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> function = TokenFunction(torch.nn.ReLU(), Packing((1, 2), (1,)), torch.float32, torch.device("cpu"))
        >>> [part.tolist() for part in parts(function, torch.tensor([[2.0, -4.0]]))]
        [[[1.0, -2.0]], [[1.0, 2.0]]]
    """
    plus, minus = function(tokens), function(-tokens)
    return (plus - minus) / 2, (plus + minus) / 2


def regress(z: Tensor, odd: Tensor, even: Tensor, kind: str) -> Fit:
    """Least squares of `odd` on `z`, column by column, and the mean of `even`.

    Example:
        >>> z = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> regress(z, 3 * z, torch.ones(2, 2), "layernorm")
        Fit(kind='layernorm', weight=tensor([3., 3.]), bias=tensor([1., 1.]), error=0.0)
    """
    weight = (z * odd).sum(0) / z.square().sum(0).clamp_min(1e-30)
    bias = even.mean(0)
    size = root_mean_square(odd + even)
    error = root_mean_square(torch.stack([odd - z * weight, even - bias])) / size if size != 0 else 0.0
    # NaN compares as neither more nor less, so it must not get as far as a comparison.
    return Fit(kind, weight, bias, error if error == error else float("inf"))


def root_mean_square(tensor: Tensor) -> float:
    """The root of the mean square of all elements.

    Example:
        >>> root_mean_square(torch.tensor([3.0, -3.0]))
        3.0
    """
    return float(tensor.square().mean().sqrt())


def tolerance(function: TokenFunction) -> float:
    """The relative error to forgive a function, by the dtype that it is tried in.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> packing, cpu = Packing((1, 2), (1,)), torch.device("cpu")
        >>> [tolerance(TokenFunction(torch.nn.ReLU(), packing, d, cpu)) for d in (torch.float64, torch.bfloat16)]
        [0.0001, 0.03]
    """
    return TOLERANCE if function.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE


def measure_eps(function: TokenFunction, fit: Fit) -> float:
    """The number beside the mean square in the root, from ever smaller tokens.

    With q = |f(x)| / |weight * x| it is 1/q^2 - mean(x^2), read where it outweighs the mean square. What stands outside
    the root, or bounds it from below, gives the eps with the same limit for small tokens.

    Args:
        function: The norm.
        fit: Its formula and weight.

    Returns:
        The measured value; 0.0 if tokens as small as the dtype allows show none.

    Example:
        >>> from dynorm.find.tokens import Packing
        >>> norm = torch.nn.LayerNorm(4, eps=1e-3)
        >>> function = TokenFunction(norm, Packing((2, 4), (1,)), torch.float32, torch.device("cpu"))
        >>> round(measure_eps(function, fit_norm(function)), 6)
        0.001
    """
    unit = core(sample_tokens(function.packing.count, function.packing.channels, 1.0, seed=3), "layernorm")
    eps = 0.0
    # Powers of two scale without rounding; those of float16 end early.
    for exponent in range(1, 13 if function.dtype == torch.float16 else 51, 3):
        tokens = function.rounded(unit * 2.0**-exponent)
        square, found = _eps_at(function, fit, tokens)
        if not abs(found) < float("inf"):
            return eps
        eps = found if found > 0.01 * square else 0.0
        if eps > 16 * square:
            return eps
    return eps


def _eps_at(function: TokenFunction, fit: Fit, tokens: Tensor) -> tuple[float, float]:
    """The mean square of small tokens, centred for a LayerNorm, and the eps that they show."""
    centred = tokens - tokens.mean(-1, keepdim=True) if fit.kind == "layernorm" else tokens
    square = centred.square().mean(-1)
    scaled = fit.weight * centred
    q = (parts(function, tokens)[0] * scaled).sum(-1) / scaled.square().sum(-1)
    return float(square.median()), float((q**-2 - square).median())
