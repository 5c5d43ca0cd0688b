// The constant of a row with witnesses: beta + T with T the sum of g_k u_k^2 over them, and for the functions of a slope
// alpha / sqrt(1 + ratio alpha^2 T). Included by kernels.h, inside its namespace.

template <int F>
constexpr bool kLeftOut = F == kDyisru || F == kDyisruWide;
// 1 / (beta slope^2): the slope of erf at 0 is 2 / sqrt(pi).
template <int F>
constexpr double kRatio = F == kDerf ? 1.2732395447351628 : 1.0;

// The bound of u, so that its square is finite; of DyISRU it leaves room for a second square.
template <int F, class Number>
constexpr double kMostOfU = sizeof(Number) == 4 ? (kLeftOut<F> ? 0x1p62 : 0x1p63) : (kLeftOut<F> ? 0x1p510 : 0x1p511);
// Whether no square of the sum was at its bound. A row for which this is false is a RareRow. NaN is not below.
template <int F, class Number>
inline bool ordinary(Number total) {
  return total < (Number)kMostOfU<F, Number>;
}
inline float at_most(float a, float bound) { return a > bound ? bound : a; }
inline double at_most(double a, double bound) { return a > bound ? bound : a; }
inline float at_least(float a, float bound) { return a < bound ? bound : a; }
inline double at_least(double a, double bound) { return a < bound ? bound : a; }
// Of one number or a vector of them; NaN stays NaN.
template <int F, class Number, class Some>
inline Some bounded(Some u) {
  constexpr Number most = (Number)kMostOfU<F, Number>;
  return at_least(at_most(u, most), -most);
}
// Infinity as the largest number.
template <class Number, class Some>
inline Some capped(Some square) {
  return at_most(square, (Number)(sizeof(Number) == 4 ? 0x1.fffffep127 : 0x1.fffffffffffffp1023));
}

// The slope of a line where u is at its bound: 0, as in the definition.
inline V flat_at_bound(V u, V slope) { return magnitude(u) < 0x1p63f ? slope : splat(0); }
inline double flat_at_bound(double u, double slope) { return u < 0x1p511 && u > -0x1p511 ? slope : u != u ? u : 0; }

inline double over_root_of(double a) { return 1 / __builtin_sqrt(a); }
inline V over_root_of(V a) {
#if defined(DYNORM_RSQRT_BITS)
  return inverse_root(a);
#else
  for (int k = 0; k < kLanes; ++k) a[k] = 1 / __builtin_sqrtf(a[k]);
  return a;
#endif
}

// A row's constant, and what the functions of a slope have multiplied it by.
template <class Vector>
struct Effective {
  Vector constant, root;
};
template <int F, class C, class Vector>
inline Effective<Vector> effective(Vector own, Vector sum) {
  if constexpr (kLeftOut<F>) {
    return {own + sum, own};
  } else {
    using Number = typename C::Number;
    const Vector square = kRatio<F> == 1 ? own : own * (Number)kRatio<F>;
    const Vector root = over_root_of(capped<Number>(C::muladd(own * sum, square, C::splat_of(1))));
    return {own * root, root};
  }
}

inline double number_of(double a) { return a; }
inline float number_of(float a) { return a; }
inline float number_of(Bfloat16 a) { return as_float((std::uint32_t)a.bits << 16); }

// A row's constants, of parameters and the row's sum.
template <int F, class C, int kLayout>
struct RowConstants {
  using Vector = typename C::Vector;
  Vector sum_;
  Effective<Vector> shared;

  void set(const Parameters<C, kLayout>& p, typename C::Number sum) {
    sum_ = C::splat_of(sum), shared = effective<F, C>(p.constant_, sum_);
  }
  Effective<Vector> at(const Parameters<C, kLayout>& p, std::int64_t j) const {
    if constexpr (kLayout == kRows) return effective<F, C>(p.constant(j), sum_);
    return shared;
  }
};

// Two factors of grad f; and the gradients by x, by the constant as the plan holds it, by T and by the shift, with the
// gain in them: the constant's is -2 times DyISRU's, that of T -2 / ratio times.
template <class Vector>
struct Partials {
  Vector left, right, x, constant, sum, shift;
};
template <int F, class C, class Vector>
__attribute__((always_inline)) inline Partials<Vector> partials(Vector u, Effective<Vector> e, Vector shift,
                                                                Vector gain, Vector grad) {
  if constexpr (!kLeftOut<F>) {
    const auto d = Of<F>::all(u, e.constant, shift, grad);
    const Vector sloped = d.sloped * gain, moment = sloped * d.arm, a = e.constant, x = sloped * a;
    Vector slope = x;
    if constexpr (F == kLinear) slope = flat_at_bound(u, x);
    return {d.left, d.right, slope, moment * e.root * e.root * e.root, moment * a * a * a, sloped};
  } else if constexpr (Of<F>::kRooted && C::lanes > 1) {
    // The cube is 0 beyond a sum of 2^84, where no slope matters beside 1.
    const Vector inverse = inverse_root(fma(u, u, e.constant)), left = grad * inverse;
    const Vector cube = left * gain * (inverse * inverse), moment = cube * u;
    return {left, u, cube * e.constant, moment, moment, moment};
  } else {
    const auto d = Of<kDyisruWide>::all(u, e.constant, shift, grad);
    const Vector sloped = d.sloped * gain, moment = sloped * d.arm;
    return {d.left, d.right, sloped, moment, moment, moment};
  }
}

template <int F, class C, class Vector>
__attribute__((always_inline)) inline void add(Vector (&sums)[kWitnessSums], Vector grad, const Partials<Vector>& d) {
  sums[kSumGrad] = sums[kSumGrad] + grad;
  sums[kSumValue] = C::muladd(d.left, d.right, sums[kSumValue]);
  sums[kSumMoment] = sums[kSumMoment] + d.constant;
  sums[kSumSlope] = sums[kSumSlope] + d.x;
  if constexpr (F == kDerf) sums[kSumShift] = sums[kSumShift] + d.shift;
}

template <class Number, class Vector>
inline Number sum_of_lanes(Vector a) {
  constexpr int lanes = sizeof(Vector) / sizeof(Number);
  Number each[lanes];
  store(each, a);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) each[k] += each[k + half];
  }
  return each[0];
}

