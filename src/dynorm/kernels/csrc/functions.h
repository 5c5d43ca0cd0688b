// The family's functions with their derivatives, on vectors of float and on double. Included once for each
// instruction set, inside its namespace, after its vector header.
//
// value(u, constant, shift) is f(u). all(...) gives f, the slope df/du (up to a factor that `Period::slope_gain`
// holds) and the moment df/dconstant (up to a factor that the plan applies).
// Coefficients: tools/kernel_coefficients.py. NaN stays NaN: every comparison with it is false.

struct Derived {
  V f, slope, moment;
};
struct DerivedDouble {
  double f, slope, moment;
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

inline V tanh_(V z) {
  V a = at_most(magnitude(z), 9.125f);  // 1 to rounding from 9.02 on
  Exponential e = exponential(a + a);
  // expm1(2a) keeps its digits near 0; tanh a = m / (m + 2) with m = expm1(2a).
  V m = fma(e.scale, e.small, e.scale - 1.0f);
  V inverse = reciprocal(m + 2.0f), t = m * inverse;
  // What is left of m after t (m + 2), without the rounding of m + 2.
  V rest = fma(-t, m, fma(t, splat(-2.0f), m));
  return with_sign(fma(rest, inverse, t), z);
}

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

// 2 / sqrt(pi) exp(-z^2), the derivative of erf.
inline V erf_slope(V z) {
  V a = -(z * z);
  Exponential e = exponential(at_least(a, -87.0f));
  V d = fma(e.scale, e.small, e.scale) * 0x1.20dd76p+0f;
  return a < -87.0f ? splat(0.0f) : d;
}

// Far out the function is at its bound to rounding, but the square would overflow.
inline V clamped(V u) { return at_least(at_most(u, 0x1p62f), -0x1p62f); }
inline double clamped(double u) {
  u = u > 0x1p510 ? 0x1p510 : u;
  return u < -0x1p510 ? -0x1p510 : u;
}

// f = u / sqrt(beta + u^2), and its derivatives by u and, times -2, by beta.
inline DerivedDouble soft_sign(double u, double beta) {
  u = clamped(u);
  double root = __builtin_sqrt(beta + u * u), f = u / root;
  return {f, beta / root / root / root, f / root / root};
}

// The same lane by lane in double: for every beta, and where there is no estimate of the inverse root.
inline V soft_sign_value(V u, V beta) {
  V f = u;
  for (int k = 0; k < kLanes; ++k) {
    double a = clamped((double)u[k]);
    f[k] = (float)(a / __builtin_sqrt(beta[k] + a * a));
  }
  return f;
}
inline Derived soft_sign_all(V u, V beta) {
  Derived d = {u, u, u};
  for (int k = 0; k < kLanes; ++k) {
    DerivedDouble one = soft_sign(u[k], beta[k]);
    d.f[k] = (float)one.f, d.slope[k] = (float)one.slope, d.moment[k] = (float)one.moment;
  }
  return d;
}

#if defined(DYNORM_RSQRT)
// u / sqrt(s) and 1 / sqrt(s) from an estimate of 11 bits, cut to 12 so that its square is exact.
struct Quotient {
  V f, inverse;
};
inline Quotient over_root(V u, V s) {
  V r = (V)((I)rsqrt_estimate(s) & ~0xfff);
  V e = fma(-s, r * r, splat(1.0f));
  V correction = e * fma(e, splat(0.375f), splat(0.5f));
  V f = u * r, excess = fma(-u, r, f);
  // A difference, because a sum would make 0 of -0.
  return {f - fma(-f, correction, excess), fma(r, correction, r)};
}
#endif

template <int F>
struct Of;

// DyISRU for every constant; slope_gain has no beta in it.
template <>
struct Of<kDyisruWide> {
  static V value(V u, V beta, V) { return soft_sign_value(u, beta); }
  static Derived all(V u, V beta, V) { return soft_sign_all(u, beta); }
  static double value(double u, double beta, double) { return soft_sign(u, beta).f; }
  static DerivedDouble all(double u, double beta, double) { return soft_sign(u, beta); }
};

// DyISRU for constants from 2^-80 to 2^100, where neither cubes nor squares leave float's range.
template <>
struct Of<kDyisru> : Of<kDyisruWide> {
#if defined(DYNORM_RSQRT)
  using Of<kDyisruWide>::value;
  using Of<kDyisruWide>::all;
  static V value(V u, V beta, V) {
    u = clamped(u);
    return over_root(u, fma(u, u, beta)).f;
  }
  static Derived all(V u, V beta, V) {
    u = clamped(u);
    Quotient q = over_root(u, fma(u, u, beta));
    V cube = q.inverse * q.inverse * q.inverse;
    return {q.f, beta * cube, u * cube};
  }
#endif
};

template <>
struct Of<kDyt> {
  static V value(V u, V alpha, V) { return tanh_(alpha * u); }
  static Derived all(V u, V alpha, V) {
    V t = tanh_(alpha * u);
    V slope = fma(-t, t, splat(1.0f));
    return {t, slope, u * slope};
  }
  static double value(double u, double alpha, double) { return __builtin_tanh(alpha * u); }
  static DerivedDouble all(double u, double alpha, double) {
    double t = __builtin_tanh(alpha * u), slope = 1.0 - t * t;
    return {t, slope, u * slope};
  }
};

template <>
struct Of<kDerf> {
  static V value(V u, V alpha, V shift) { return erf_(alpha * u + shift); }
  static Derived all(V u, V alpha, V shift) {
    V z = alpha * u + shift, slope = erf_slope(z);
    return {erf_(z), slope, u * slope};
  }
  static double value(double u, double alpha, double shift) { return __builtin_erf(alpha * u + shift); }
  static DerivedDouble all(double u, double alpha, double shift) {
    double z = alpha * u + shift, slope = 1.1283791670955126 * __builtin_exp(-z * z);
    return {__builtin_erf(z), slope, u * slope};
  }
};

template <>
struct Of<kLinear> {
  static V value(V u, V slope, V) { return slope * u; }
  static Derived all(V u, V slope, V) { return {slope * u, splat(1.0f), u}; }
  static double value(double u, double slope, double) { return slope * u; }
  static DerivedDouble all(double u, double slope, double) { return {slope * u, 1.0, u}; }
};
