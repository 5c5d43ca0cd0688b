// The family's functions with their derivatives, on vectors of float and on double. Included once for each
// instruction set, inside its namespace, after its vector header.
//
// value(u, constant, shift) is f(u). all(u, constant, shift, grad) gives two factors whose product is grad f; grad times
// the slope df/du up to a factor that `Row::slope_gain` holds; and the arm, with which that makes grad df/dconstant,
// up to a factor that the plan applies. An arm is finite where the slope is 0, so that their product is 0 too.
// Coefficients: tools/kernel_coefficients.py. NaN stays NaN: every comparison with it is false.
//
// brief is the value for results of 16 bits. Where a function is `kRooted`, `constant` of its vectors is constant + u^2,
// which the caller has, because one look at several of them tells whether any u has to be clamped.

struct Derived {
  V left, right, sloped, arm;
};
struct DerivedDouble {
  double left, right, sloped, arm;
};

// exp(a) = scale (1 + small), exactly reduced; |a| < 88.
struct Exponential {
  V scale, small;
};

inline Exponential exponential(V a) {
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  V shifted = fma(a, splat(0x1.715476p+0f), magic);
  V n = shifted - magic;
  V r = fma(n, splat(-0x1.62e43p-1f), a);  // log 2 is within 2^-29 of this float
  V q = fma(r, splat(0x1.6bec04p-10f), splat(0x1.122788p-7f));
  q = fma(r, q, splat(0x1.555674p-5f));
  q = fma(r, q, splat(0x1.5554b0p-3f));
  q = fma(r, q, splat(0x1.fffffep-2f));
  I bits = ((I)shifted << 23) + 0x3f800000;
  return {(V)bits, fma(r * r, q, r)};
}

// c[0] + c[1] s + ... by Horner's rule.
template <int kCount>
inline V polynomial(V s, const float (&c)[kCount]) {
  V sum = splat(c[kCount - 1]);
  for (int k = kCount - 2; k >= 0; --k) sum = fma(sum, s, splat(c[k]));
  return sum;
}
// The same with s^kCount added: a step of it needs no product.
template <int kCount>
inline V monic(V s, const float (&c)[kCount]) {
  V sum = s + c[kCount - 1];
  for (int k = kCount - 2; k >= 0; --k) sum = fma(sum, s, splat(c[k]));
  return sum;
}

#if defined(DYNORM_LOOKUP)
#include "tanh_table.h"

// A permutation for each coefficient and no division: two thirds of the other way's time.
inline V tanh_(V z) {
  V a = at_most(magnitude(z), 9.125f), place = a + 1.0f;
  I bits = (I)place, row = bits >> 21;
  // Exact: the node has few bits, and is near a.
  V d = a - ((V)(bits & ~0x1fffff) - 1.0f);
  V t = lookup(kTanhTable[6], row);
  for (int k = 5; k >= 0; --k) t = fma(t, d, lookup(kTanhTable[k], row));
  return with_sign(t, z);
}

inline V tanh_brief(V z) { return tanh_(z); }
#else
inline V tanh_(V z) {
  V a = at_least(at_most(z, 9.125f), -9.125f);  // +-1 to rounding from 9.02 on
  Exponential e = exponential(a + a);
  // expm1(2a) keeps its digits near 0; tanh a = m / (m + 2) with m = expm1(2a).
  V m = fma(e.scale, e.small, e.scale - 1.0f);
  V inverse = 1.0f / (m + 2.0f), t = m * inverse;
  // What is left of m after t (m + 2), without the rounding of m + 2.
  V rest = fma(-t, m, fma(t, splat(-2.0f), m));
  // Only -0 has lost its sign.
  return with_sign(fma(rest, inverse, t), z);
}

// tanh a = a P(a^2) / Q(a^2), to five units of the last place: half the steps, for results of 16 bits and derivatives.
inline V tanh_brief(V z) {
  constexpr float kP[] = {0x1.342630p+20f, 0x1.4a3044p+17f, 0x1.14f94ap+12f, 0x1.a55fd8p+4f, 0x1.1b9d30p-6f};
  constexpr float kQ[] = {0x1.342630p+20f, 0x1.1ffad6p+19f, 0x1.ff7e2cp+14f, 0x1.a1e854p+8f};
  // At this bound the quotient is +-1 exactly, with and without FMA, so that the slope is 0 from there on.
  V a = at_least(at_most(z, 8.671875f), -8.671875f), s = a * a;
  return a * polynomial(s, kP) / monic(s, kQ);
}
#endif

inline V erf_(V z) {
  V a = at_most(magnitude(z), 3.925f);  // 1 to rounding from 3.92 on
  // erf a = -expm1(-w) with w = -log(erfc(a)) = a (c0 + a q(a)), c0 in two parts.
  V q = fma(a, splat(-0x1.396f52p-17f), splat(0x1.f0ba08p-14f));
  q = fma(a, q, splat(-0x1.4d5352p-11f));
  q = fma(a, q, splat(0x1.b679c4p-10f));
  q = fma(a, q, splat(-0x1.5ce0b8p-13f));
  q = fma(a, q, splat(-0x1.39bf3ap-6f));
  q = fma(a, q, splat(0x1.a4f94ap-4f));
  q = fma(a, q, splat(0x1.45f2fep-1f));
  q = fma(a, q, splat(-0x1.f7ac92p-25f));
  V w = fma(a, splat(0x1.20dd76p+0f), a * q);
  Exponential e = exponential(-w);
  return with_sign(fma(-e.scale, e.small, 1.0f - e.scale), z);
}

// erf a = a P(a^2) / Q(a^2), to six units of the last place: for results of 16 bits.
inline V erf_brief(V z) {
  constexpr float kP[] = {0x1.c734f6p+14f, 0x1.2f3546p+12f, 0x1.52bdacp+10f,
                          0x1.7b6f1cp+6f,  0x1.d80caep+2f,  0x1.bde89ap-5f};
  constexpr float kQ[] = {0x1.936aa6p+14f, 0x1.934cb4p+13f, 0x1.6d1ba4p+11f, 0x1.7dbb34p+8f, 0x1.d936c4p+4f};
  V a = at_least(at_most(z, 3.85f), -3.85f), s = a * a;
  return a * polynomial(s, kP) / monic(s, kQ);
}

// 2 / sqrt(pi) exp(-z^2), the derivative of erf, to 2^-23: a power of 2, its exponent a whole number and a rest.
inline V erf_slope(V z) {
  constexpr float kPower[] = {0x1.000002p+0f, 0x1.62e428p-1f, 0x1.ebf918p-3f, 0x1.c6b6e4p-5f, 0x1.3d0c52p-7f, 0x1.5c08e6p-10f};
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  // -127 makes the bits of a 0 below.
  V exponent = at_least(fma(z * z, splat(-0x1.715476p+0f), splat(0x1.64de32p-3f)), -127.0f);
  V shifted = exponent + magic, rest = exponent - (shifted - magic);
  I whole = ((I)shifted << 23) + 0x3f800000;
  return (V)whole * polynomial(rest, kPower);
}

// erf by its derivative, 1 - slope t p(t) with t = 1 / (1 + c a), to 2^-22 of 1, not of erf: for sums of gradients.
inline V erf_from_slope(V z, V slope) {
  constexpr float kP[] = {0x1.cc8e06p-3f, 0x1.5985b0p-2f, -0x1.94336ap-4f, 0x1.3913d8p-1f, -0x1.82d104p-3f};
  V t = 1.0f / fma(magnitude(z), splat(0.475f), splat(1.0f));
  return with_sign(fma(slope * t, -polynomial(t, kP), splat(1.0f)), z);
}

// Far out the function is at its bound to rounding, but the square would overflow.
inline V clamped(V u) { return at_least(at_most(u, 0x1p62f), -0x1p62f); }
inline double clamped(double u) {
  u = u > 0x1p510 ? 0x1p510 : u;
  return u < -0x1p510 ? -0x1p510 : u;
}

// Infinity as the largest number.
inline V finite(V u) { return at_least(at_most(u, 0x1.fffffep127f), -0x1.fffffep127f); }
inline double finite(double u) {
  u = u > 0x1.fffffffffffffp1023 ? 0x1.fffffffffffffp1023 : u;
  return u < -0x1.fffffffffffffp1023 ? -0x1.fffffffffffffp1023 : u;
}

// f = u / sqrt(beta + u^2); its slope without beta, so that the arm is u.
inline DerivedDouble soft_sign(double u, double beta, double grad) {
  u = clamped(u);
  double root = __builtin_sqrt(beta + u * u);
  return {grad, u / root, grad * (1 / (root * root * root)), u};
}

// The same with beta in the slope, which may be too small or too large for a cube.
inline DerivedDouble soft_sign_wide(double u, double beta, double grad) {
  u = clamped(u);
  double root = __builtin_sqrt(beta + u * u), slope = beta / root / root / root;
  // A beta that has underflowed to 0 has no gradient, for its logarithm's is beta times as much.
  return {grad, u / root, grad * slope, beta == 0 || slope == 0 ? 0 : u / beta};
}

// Lane by lane in double: for every beta, and where there is no estimate of the inverse root.
inline V soft_sign_value(V u, V beta) {
  V f = u;
  for (int k = 0; k < kLanes; ++k) {
    double a = clamped((double)u[k]);
    f[k] = (float)(a / __builtin_sqrt(beta[k] + a * a));
  }
  return f;
}
template <DerivedDouble (*kOne)(double, double, double)>
inline Derived soft_sign_all(V u, V beta, V grad) {
  Derived d = {grad, u, u, u};
  for (int k = 0; k < kLanes; ++k) {
    DerivedDouble one = kOne(u[k], beta[k], grad[k]);
    d.right[k] = (float)one.right, d.sloped[k] = (float)one.sloped;
    d.arm[k] = (float)one.arm;
  }
  // An arm beyond float's range, for a beta below 2^-120 or so, must not make NaN of a slope that is rounded to 0.
  d.arm = finite(d.arm);
  return d;
}

#if defined(DYNORM_RSQRT)
// An estimate of 1 / sqrt(s) of 11 bits, cut to 12 so that its square is exact, and what is to be added to it, as a
// part of it.
struct Estimate {
  V inverse, correction;
};
inline Estimate estimate(V s) {
  V r = (V)((I)rsqrt_estimate(s) & ~0xfff);
  V e = fma(-s, r * r, splat(1.0f));
  return {r, e * fma(e, splat(0.375f), splat(0.5f))};
}
// To 2^-22, by one step of Newton's method: for derivatives.
inline V inverse_root(V s) {
  V r = rsqrt_estimate(s), half = (V)((I)r - 0x800000);
  return fma(fma(-s, r * r, splat(1.0f)), half, r);
}
// u / sqrt(s), with what rounding takes from the first product put back.
inline V over_root(V u, V s) {
  Estimate r = estimate(s);
  V f = u * r.inverse, excess = fma(-u, r.inverse, f);
  // A difference, because a sum would make 0 of -0.
  return f - fma(-f, r.correction, excess);
}
#endif

// What most functions have in common.
struct Common {
  static constexpr bool kRooted = false;
};

template <int F>
struct Of;

// DyISRU for every constant; its slope has beta in it, slope_gain has not.
template <>
struct Of<kDyisruWide> : Common {
  static V value(V u, V beta, V) { return soft_sign_value(u, beta); }
  static V brief(V u, V beta, V) { return soft_sign_value(u, beta); }
  static Derived all(V u, V beta, V, V grad) { return soft_sign_all<soft_sign_wide>(u, beta, grad); }
  static double value(double u, double beta, double) { return soft_sign(u, beta, 1).right; }
  static DerivedDouble all(double u, double beta, double, double grad) { return soft_sign_wide(u, beta, grad); }
};

// DyISRU for constants from 2^-60 to 2^100, where squares do not leave float's range, and, for derivatives, to 2^60, where
// cubes do not.
template <>
struct Of<kDyisru> : Common {
#if defined(DYNORM_RSQRT)
  static constexpr bool kRooted = true;
  static V value(V u, V square, V) { return over_root(u, square); }
  static V brief(V u, V square, V) { return u * inverse_root(square); }
  static Derived all(V u, V square, V, V grad) {
    V inverse = inverse_root(square), left = grad * inverse;
    return {left, u, left * (inverse * inverse), u};
  }
#else
  static V value(V u, V beta, V) { return soft_sign_value(u, beta); }
  static V brief(V u, V beta, V) { return soft_sign_value(u, beta); }
  static Derived all(V u, V beta, V, V grad) { return soft_sign_all<soft_sign>(u, beta, grad); }
#endif
  static double value(double u, double beta, double) { return soft_sign(u, beta, 1).right; }
  static DerivedDouble all(double u, double beta, double, double grad) { return soft_sign(u, beta, grad); }
};

template <>
struct Of<kDyt> : Common {
  static V value(V u, V alpha, V) { return tanh_(alpha * u); }
  static V brief(V u, V alpha, V) { return tanh_brief(alpha * u); }
  static Derived all(V u, V alpha, V, V grad) {
    V t = tanh_brief(alpha * u);
    return {grad, t, grad * fma(-t, t, splat(1.0f)), finite(u)};
  }
  static double value(double u, double alpha, double) { return __builtin_tanh(alpha * u); }
  static DerivedDouble all(double u, double alpha, double, double grad) {
    double t = __builtin_tanh(alpha * u);
    return {grad, t, grad * (1.0 - t * t), finite(u)};
  }
};

template <>
struct Of<kDerf> : Common {
  static V value(V u, V alpha, V shift) { return erf_(alpha * u + shift); }
  static V brief(V u, V alpha, V shift) { return erf_brief(alpha * u + shift); }
  static Derived all(V u, V alpha, V shift, V grad) {
    V z = alpha * u + shift, slope = erf_slope(z);
    return {grad, erf_from_slope(z, slope), grad * slope, finite(u)};
  }
  static double value(double u, double alpha, double shift) { return __builtin_erf(alpha * u + shift); }
  static DerivedDouble all(double u, double alpha, double shift, double grad) {
    double z = alpha * u + shift, slope = 1.1283791670955126 * __builtin_exp(-z * z);
    return {grad, __builtin_erf(z), grad * slope, finite(u)};
  }
};

template <>
struct Of<kLinear> : Common {
  static V value(V u, V slope, V) { return slope * u; }
  static V brief(V u, V slope, V) { return slope * u; }
  static Derived all(V u, V slope, V, V grad) { return {grad, slope * u, grad, u}; }
  static double value(double u, double slope, double) { return slope * u; }
  static DerivedDouble all(double u, double slope, double, double grad) { return {grad, slope * u, grad, u}; }
};
