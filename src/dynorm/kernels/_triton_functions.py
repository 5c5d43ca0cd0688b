"""The functions of the family in Triton, with their derivatives: DyISRU, tanh, erf, linear map.

All are written so that they run on a GPU and in Triton's interpreter, in float32 or float64.
``FUNCTION`` is a :class:`dynorm.kernels._form.FunctionCode`.
"""

# Triton's language has Python's syntax, not its types, and its constants are in capitals.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

from dynorm.kernels._form import FunctionCode

DYISRU = tl.constexpr(int(FunctionCode.DYISRU))
DYT = tl.constexpr(int(FunctionCode.DYT))
DERF = tl.constexpr(int(FunctionCode.DERF))
LINEAR = tl.constexpr(int(FunctionCode.LINEAR))


@triton.constexpr_function
def compute(values):
    """Return the dtype in which a tensor, or that of a pointer, is computed."""
    dtype = values.dtype.element_ty if values.dtype.is_ptr() else values.dtype.scalar
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def by_channel(pointer, channel, inside, COMPUTE: tl.constexpr):
    """Load a parameter for some channels."""
    return tl.load(pointer + channel, inside, other=0.0).to(COMPUTE)


@triton.jit
def shift_of(pointer, COMPUTE: tl.constexpr):
    """Load the shift; 0 for None."""
    return tl.full([], 0.0, COMPUTE) if pointer is None else tl.load(pointer).to(COMPUTE)


@triton.jit
def constant_of(pointer, COMPUTE: tl.constexpr, FORM: tl.constexpr):
    """Load the constant as the functions take it, which may be stored as log(beta)."""
    constant = tl.load(pointer).to(COMPUTE)
    if FORM.logarithmic:
        constant = tl.exp(constant * (-0.5 if FORM.function == LINEAR else 1.0))
    return constant


@triton.jit
def value(u, constant, shift, FUNCTION: tl.constexpr, NARROW: tl.constexpr):
    """Compute ``f(u)``; for ``NARROW``, at most 16 bits, the fast inverse root is enough."""
    if FUNCTION == DYISRU:
        d = clamped(u)
        if NARROW:
            y = d * tl.rsqrt(constant + d * d)
        elif u.dtype == tl.float64:
            y = d / tl.sqrt(constant + d * d)
        else:
            y = d * inverse_root(d, constant)
    elif FUNCTION == DYT:
        y, _ = tanh(constant * u, NARROW)
    elif FUNCTION == DERF:
        y = tl.erf(constant * u + shift)
    else:
        tl.static_assert(FUNCTION == LINEAR, "no such function")
        y = constant * u
    return y


@triton.jit
def derivatives(u, constant, shift, FUNCTION: tl.constexpr, NARROW: tl.constexpr):
    """Compute ``f(u)`` and its derivatives by u, by the constant and by the shift."""
    if FUNCTION == DYISRU:
        d = clamped(u)
        square = constant + d * d
        inverse = 1.0 / tl.sqrt(square) if u.dtype == tl.float64 else tl.rsqrt(square)
        f = d * inverse
        # Grouped so that no factor leaves float32's range before the product does.
        slope = (constant * inverse * inverse) * inverse
        # The definition clamps x, and so has slope 0 where it does; at NaN both have NaN.
        slope = tl.where(tl.abs(u) > limit(u), 0.0, slope)
        by_constant, by_shift = -0.5 * f * inverse * inverse, 0.0
    elif FUNCTION == DYT:
        f, steepness = tanh(constant * u, NARROW)
        slope, by_constant, by_shift = constant * steepness, u * steepness, 0.0
    elif FUNCTION == DERF:
        z = constant * u + shift
        f = tl.erf(z)
        # 2 / sqrt(pi)
        by_shift = 1.1283791670955126 * tl.exp2(-1.4426950408889634 * (z * z))
        slope, by_constant = constant * by_shift, u * by_shift
    else:
        tl.static_assert(FUNCTION == LINEAR, "no such function")
        f, slope, by_constant, by_shift = constant * u, constant, u, 0.0
    return f, slope, by_constant, by_shift


@triton.jit
def plus_tokens(beta, token_ptr, inside, FUNCTION: tl.constexpr):
    """Compute the betas of some tokens, with their numbers T."""
    tl.static_assert(FUNCTION == DYISRU, "only DyISRU takes numbers of tokens")
    total = tl.load(token_ptr, inside, other=0.0).to(beta.dtype)
    # A sum that is not finite has no inverse root of its own.
    most = limit(total) * limit(total)
    return beta + tl.where(total > most, most, total)


@triton.jit
def tanh(z, NARROW: tl.constexpr):
    """Compute tanh and its derivative, both to a few units in the last place, near 0 and near 1."""
    magnitude = tl.abs(z)
    # exp2 rather than exp: that is one instruction, where exp takes four.
    decay = tl.exp2(-2.8853900817779268 * magnitude)
    if NARROW:
        root = tl.rsqrt(1.0 + decay)
        inverse = root * root
    else:
        inverse = 1.0 / (1.0 + decay)
        # A GPU's quotient is off by up to two units: half of one after this step.
        inverse = tl.fma(inverse, tl.fma(-(1.0 + decay), inverse, 1.0), inverse)
    far = 1.0 - 2.0 * decay * inverse
    far = tl.where(z < 0, -far, far)
    if z.dtype == tl.float64:
        # (1 - decay) to full precision, after Kahan: log recovers the digits that exp rounded away.
        logarithm = tl.log(decay)
        grown = tl.where(
            decay == 1.0, 2.0, (decay - 1.0) * 2.0 / tl.where(decay == 1.0, 1.0, logarithm)
        )
        near = z * grown * inverse
    else:
        s = z * z
        if NARROW:
            p = -0.3333333333333333 + s * 0.13333333333333333
        else:
            # The best polynomial to 0.9: within 1.1e-9 of tanh, a fiftieth of float32's rounding.
            # Beyond 0.9 the error of the GPU's exp2 stays below two units of the result.
            p = -0.0004554592596832663
            p = p * s + 0.002582665765658021
            p = p * s - 0.008264541625976562
            p = p * s + 0.021663540974259377
            p = p * s - 0.05392930284142494
            p = p * s + 0.13332977890968323
            p = p * s - 0.33333322405815125
        near = z * (1.0 + s * p)
    return tl.where(
        magnitude < (0.1 if NARROW else 0.9), near, far
    ), 4.0 * decay * inverse * inverse


@triton.jit
def inverse_root(d, constant):
    """Compute ``1 / sqrt(constant + d**2)`` in float32 to half an ulp; DyISRU is then right to one.

    This is a step of Newton's method from the fast inverse root, with the rounding error of the
    square added back. It takes half the instructions of the precise square root and division.
    """
    square = tl.fma(d, d, constant)
    # The error of Knuth's TwoSum. d**2 has no name, because a compiler would fuse the product with the
    # subtraction, and its own rounding error would be counted twice.
    virtual = square - constant
    lost = tl.fma(d, d, -virtual) + (constant - (square - virtual))
    inverse = tl.rsqrt(square)
    root = square * inverse
    rest = (
        tl.fma(-root, inverse, 1.0)
        - inverse * tl.fma(square, inverse, -root)
        - inverse * (inverse * lost)
    )
    return tl.fma(0.5 * inverse, rest, inverse)


@triton.jit
def clamped(u):
    """Clamp u to the range of finite squares; DyISRU is flat beyond, and NaN stays NaN."""
    if u.dtype == tl.float64:
        # Triton makes a float64 clamp into an instruction that does not exist.
        d = tl.where(u > limit(u), limit(u), tl.where(u < -limit(u), -limit(u), u))
    else:
        d = tl.clamp(u, -limit(u), limit(u), propagate_nan=tl.PropagateNan.ALL)
    return d


@triton.jit
def limit(u):
    """Return half the root of the largest number: 2**63 in float32, 2**511 in float64."""
    return tl.full(
        [], 6.703903964971298e153 if u.dtype == tl.float64 else 9.223372036854776e18, u.dtype
    )
