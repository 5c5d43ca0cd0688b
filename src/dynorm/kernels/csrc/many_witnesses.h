// Rows with more than kMostFew witnesses, up to all channels. Included by kernels.h, inside its namespace, after
// witnesses.h, which has the formulas.
//
// Every channel has a gain in the row's sum T, which is 0 where it is no witness, so that all loops run along the row, and
// none looks for the witnesses. The first loop sums the terms, gain times u^2. DyISRU leaves a witness out of its own
// sum. The difference, T less its term, keeps its digits as long as the term is at most half of T; and at most one term is
// more than that, the largest: it dominates. So T is summed in two parts, the largest term and the rest. A term above the
// rest is the largest one, and the rest is then the sum without it.

inline float lesser(float a, float b) { return a < b ? a : b; }
inline float greater(float a, float b) { return a > b ? a : b; }
inline double lesser(double a, double b) { return a < b ? a : b; }
inline double greater(double a, double b) { return a > b ? a : b; }

// A sum of terms that are not negative, in two parts.
template <class Number>
struct Parts {
  Number largest, rest;

  // Of a number or a vector, each of whose lanes is a sum. NaN ends up in the rest.
  void add(Number term) {
    rest = rest + lesser(largest, term);
    largest = greater(largest, term);
  }
  void add(const Parts& other) {
    rest = rest + other.rest;
    add(other.largest);
  }
  Number total() const { return largest + rest; }
  bool dominated() const { return largest > rest; }
};

// The sum without a term. NaN is not above the rest.
inline V sum_without(V term, V total, V rest) { return term > rest ? rest : total - term; }
inline double sum_without(double term, double total, double rest) { return term > rest ? rest : total - term; }
// The number where a term is above the rest, and elsewhere: their sum is the number.
inline V where_dominant(V term, V rest, V a) { return term > rest ? a : splat(0); }
inline double where_dominant(double term, double rest, double a) { return term > rest ? a : 0; }

template <class Number, class Vector>
inline Parts<Number> parts_of_lanes(Parts<Vector> lanes) {
  constexpr int count = sizeof(Vector) / sizeof(Number);
  Number largest[count], rest[count];
  store(largest, lanes.largest);
  store(rest, lanes.rest);
  Parts<Number> parts[count];
  for (int k = 0; k < count; ++k) parts[k] = {largest[k], rest[k]};
  for (int half = count / 2; half > 0; half /= 2) {
    for (int k = 0; k < half; ++k) parts[k].add(parts[k + half]);
  }
  return parts[0];
}

// body(j, load, store) for each vector of a row of n; the last may be shorter.
template <class C, class T, class Body>
__attribute__((always_inline)) inline void along(std::int64_t n, const Body& body) {
  using Vector = typename C::Vector;
  std::int64_t j = 0;
  for (; j + C::lanes <= n; j += C::lanes) {
    body(j, [](const T* from) { return load(from); }, [](T* to, Vector a) { store(to, a); });
  }
  const std::int64_t left = n - j;
  if (left > 0) {
    body(j, [left](const T* from) { return load_some<C>(from, left); },
         [left](T* to, Vector a) { store_some<C>(to, left, a); });
  }
}

// The terms of a row's witnesses, in two parts. Several accumulators, so that no addition waits for the one before it.
template <int F, class T, int kLayout>
inline Parts<typename ComputedIn<T>::Type::Number> sum_terms(
    const T* x, std::int64_t n, const Parameters<typename ComputedIn<T>::Type, kLayout>& p) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  constexpr int kAtOnce = 4;
  Parts<Vector> parts[kAtOnce];
  for (int k = 0; k < kAtOnce; ++k) parts[k] = {C::splat_of(0), C::splat_of(0)};
  auto term = [&](Vector a, std::int64_t j) {
    const Vector u = p.centered(a, j);
    return u * p.term_gain(j) * u;
  };
  std::int64_t j = 0;
  for (; j + kAtOnce * C::lanes <= n; j += kAtOnce * C::lanes) {
    for (int k = 0; k < kAtOnce; ++k) parts[k].add(term(load(x + j + k * C::lanes), j + k * C::lanes));
  }
  for (; j + C::lanes <= n; j += C::lanes) parts[0].add(term(load(x + j), j));
  // Beyond the end gains are 0.
  if (j < n) parts[1].add(term(load_some<C>(x + j, n - j), j));
  for (int k = 1; k < kAtOnce; ++k) parts[0].add(parts[k]);
  return parts_of_lanes<typename C::Number>(parts[0]);
}

// The sum above which squares may overflow. Where it is NaN, a channel that is no witness may be infinite.
template <int F, class Number>
inline bool ordinary(Number total) {
  return total < (Number)Most<F, Number>::u;
}

// The constants of one row's channels.
template <int F, class C, int kLayout>
struct ManyConstants {
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  // Most rows have no term that dominates; in them no channel has to be asked.
  bool dominated;
  Vector total, rest;
  RowConstants<F, C, kLayout> row;  // of functions of a slope, where no witness is left out

  void set(const Parameters<C, kLayout>& p, Parts<Number> parts) {
    dominated = parts.dominated();
    total = C::splat_of(parts.total());
    rest = C::splat_of(parts.rest);
    if constexpr (!kLeftOut<F>) row.set(p, parts.total());
  }
  Vector term(const Parameters<C, kLayout>& p, Vector u, std::int64_t j) const { return u * p.term_gain(j) * u; }
  Effective<Vector> at(const Parameters<C, kLayout>& p, Vector u, std::int64_t j) const {
    if constexpr (kLeftOut<F>) {
      const Vector own = p.constant(j);
      if (dominated) return {own + sum_without(term(p, u, j), total, rest), own};
      return {C::muladd(-(u * p.term_gain(j)), u, own + total), own};
    } else {
      return row.at(p, j);
    }
  }
};

// What forward_row asks for.
template <int F, class T, int kLayout>
struct ManyParameters {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  const Parameters<C, kLayout>& p;
  ManyConstants<F, C, kLayout> constants;

  template <class Some>
  void settle(Some&, std::int64_t) const {}
  Vector constant(std::int64_t j, Vector u) const { return constants.at(p, u, j).constant; }
  Vector shift(std::int64_t j) const { return p.shift(j); }
  Vector gain(std::int64_t j) const { return p.gain(j); }
  Vector bias(std::int64_t j) const { return p.bias(j); }
  Vector centered(Vector x, std::int64_t j) const {
    const Vector u = p.centered(x, j);
    // Rooted, the square is looked at.
    if constexpr (Of<F>::kRooted && C::lanes > 1) return u;
    return bounded<F, typename C::Number>(u);
  }
};

// A row with infinities, NaN or numbers whose squares overflow, one number after another, in double. All numbers are
// multiplied by `unit`, which changes no result, where double overflows too.
template <int F, class T>
struct RareRow {
  using Number = typename ComputedIn<T>::Type::Number;
  // As the definition clamps.
  static constexpr double kLimit = sizeof(Number) == 4 ? 0x1p63 : 0x1p511;
  const T* x;
  const Period& period;
  const bool many_constants;
  double unit = 1, total = 0, rest = 0;
  // The gradient by T of all channels, and of all but the one whose term dominates.
  double moment = 0, moment_of_rest = 0;

  RareRow(const T* row, std::int64_t n, const Period& parameters, bool per_channel)
      : x(row), period(parameters), many_constants(per_channel) {
    sum_terms(n);
    if (total < 0x1p510) return;
    unit = 0x1p-400;
    sum_terms(n);
  }

  static double number(const void* numbers, std::int64_t j) { return ((const Number*)numbers)[j]; }
  double own(std::int64_t j) const { return number(period.constant, many_constants ? j : 0); }
  double shift(std::int64_t j) const { return number(period.shift, many_constants ? j : 0); }
  double term_gain(std::int64_t j) const { return number(period.term_gain, j); }
  double unbounded(std::int64_t j) const {
    return (double)number_of(x[j]) - number(period.center, many_constants ? j : 0);
  }
  double u(std::int64_t j) const { return at_least(at_most(unbounded(j), kLimit), -kLimit) * unit; }
  // Not a product where the gain is 0: it would be NaN if u is.
  double term(std::int64_t j) const { return term_gain(j) == 0 ? 0 : u(j) * term_gain(j) * u(j); }
  double sum(std::int64_t j) const { return kLeftOut<F> ? sum_without(term(j), total, rest) : total; }

  void sum_terms(std::int64_t n) {
    Parts<double> parts = {0, 0};
    for (std::int64_t j = 0; j < n; ++j) parts.add(term(j));
    total = parts.total();
    rest = parts.rest;
  }

  // 1 / sqrt(beta + T + u^2) of DyISRU, and for the others that by which the slope is multiplied.
  double inverse_root(std::int64_t j) const {
    const double a = own(j);
    if constexpr (kLeftOut<F>) return 1 / __builtin_sqrt(a * unit * unit + sum(j) + u(j) * u(j));
    return 1 / __builtin_sqrt(unit * unit + kRatio<F> * a * a * sum(j));
  }
  double value(std::int64_t j) const {
    const double inverse = inverse_root(j);
    if constexpr (kLeftOut<F>) return u(j) * inverse;
    return Of<F>::value(u(j), own(j) * inverse, shift(j));
  }

  void forward(T* y, std::int64_t n) const {
    using C = typename ComputedIn<T>::Type;
    for (std::int64_t j = 0; j < n; ++j) {
      const double result = value(j) * number(period.gain, j) + number(period.bias, j);
      store_some<C>(y + j, 1, C::splat_of((Number)result));
    }
  }

  // As `partials` has them, but that by T in the row's unit.
  Partials<double> derivatives(std::int64_t j, double grad) const {
    const double gain = number(period.gain, j), inverse = inverse_root(j);
    if constexpr (kLeftOut<F>) {
      const double cube = grad * gain * inverse * inverse * inverse, moment_here = cube * u(j);
      const double constant = own(j) * unit * unit + sum(j);
      return {grad, value(j), cube * constant * unit, moment_here * unit * unit, moment_here, 0};
    } else {
      const double a = own(j) * inverse;
      const auto d = Of<F>::all(u(j), a, shift(j), grad);
      const double sloped = d.sloped * gain, moment_here = sloped * u(j);
      return {grad, value(j), sloped * a * unit, moment_here * inverse * inverse * inverse * unit * unit,
              moment_here * a * a * a, sloped};
    }
  }

  void backward(const T* grad, T* grad_x, std::int64_t n, Number* sums, std::int64_t padded) {
    using C = typename ComputedIn<T>::Type;
    for (std::int64_t j = 0; j < n; ++j) {
      const double here = derivatives(j, number_of(grad[j])).sum;
      moment += here;
      if (!(term(j) > rest)) moment_of_rest += here;
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const double g = number_of(grad[j]), far = unbounded(j);
      Partials<double> d = derivatives(j, g);
      double others = moment;
      if constexpr (kLeftOut<F>) others = term(j) > rest ? moment_of_rest : moment - d.sum;
      if (term_gain(j) != 0) d.x -= kRatio<F> * term_gain(j) * u(j) * others * unit;
      // As the definition's clamp; NaN stays NaN.
      if (far > kLimit || far < -kLimit) d.x = 0;
      if (grad_x) store_some<C>(grad_x + j, 1, C::splat_of((Number)d.x));
      if (!sums) continue;
      const double added[kWitnessSums + 1] = {g, d.left * d.right, d.constant, d.x, d.shift, u(j) * others * u(j)};
      for (int s = 0; s <= kWitnessSums; ++s) sums[s * padded + j] += (Number)added[s];
    }
  }
};

template <int F, class T, int kLayout>
void forward_many(const void* x_, void* y_, std::int64_t n, std::int64_t length, const Period& period, bool streamed) {
  using C = typename ComputedIn<T>::Type;
  const Parameters<C, kLayout> p{period};
  ManyParameters<F, T, kLayout> of_row{p, {}};
  // A row is summed before the one before it is computed, so that no loop waits for the sum of a vector's lanes.
  Parts<typename C::Number> next = {0, 0};
  if (n >= length) next = sum_terms<F, T, kLayout>((const T*)x_, length, p);
  for (std::int64_t i = 0; i + length <= n; i += length) {
    const T* x = (const T*)x_ + i;
    T* y = (T*)y_ + i;
    const auto parts = next;
    if (i + 2 * length <= n) next = sum_terms<F, T, kLayout>(x + length, length, p);
    if (__builtin_expect(!ordinary<F>(parts.total()), false)) {
      RareRow<F, T>(x, length, period, kLayout == kRows).forward(y, length);
      continue;
    }
    of_row.constants.set(p, parts);
    if (streamed) {
      forward_row<F, T>(x, y, length, of_row, true);
    } else {
      forward_row<F, T>(x, y, length, of_row, false);
    }
  }
  if (streamed) fence();
}

// What a row's backward pass needs before its loop: the constants, and the gradient by T of all channels, and of all but
// the one whose term dominates.
template <int F, class T, int kLayout>
struct ManyRow {
  using C = typename ComputedIn<T>::Type;
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  Parts<Number> parts;
  ManyConstants<F, C, kLayout> constants;
  Vector moment, moment_of_rest;

  // First for some rows, so that no loop waits for the sum of a vector's lanes; then the moments.
  void read_terms(const T* x, std::int64_t n, const Parameters<C, kLayout>& p) {
    parts = sum_terms<F, T, kLayout>(x, n, p);
  }
  // False where the row is rare.
  bool read_moments(const T* x, const T* grad, std::int64_t n, const Parameters<C, kLayout>& p) {
    if (!ordinary<F>(parts.total())) return false;
    constants.set(p, parts);
    Vector all = C::splat_of(0), dominant = C::splat_of(0);
    along<C, T>(n, [&](std::int64_t j, auto read, auto) __attribute__((always_inline)) {
      const Vector u = bounded<F, Number>(p.centered(read(x + j), j));
      const Vector here = partials<F, C>(u, constants.at(p, u, j), p.shift(j), p.gain(j), read(grad + j)).sum;
      if (!kLeftOut<F> || !constants.dominated) {
        all = all + here;
        return;
      }
      const Vector apart = where_dominant(constants.term(p, u, j), constants.rest, here);
      dominant = dominant + apart;
      all = all + (here - apart);
    });
    const Number of_rest = sum_of_lanes<Number>(all), sum = of_rest + sum_of_lanes<Number>(dominant);
    moment = C::splat_of(sum);
    moment_of_rest = C::splat_of(of_rest);
    // A product of it with a gain of 0 would be NaN where it is not finite.
    return sum - sum == 0;
  }
};

// Some rows side by side, as backward_some.
template <int F, class T, int kLayout, int kRowsTogether>
__attribute__((always_inline)) inline void backward_many_some(
    const ManyRow<F, T, kLayout>* rows, const T* x, const T* grad, T* grad_x, std::int64_t n,
    const Parameters<typename ComputedIn<T>::Type, kLayout>& p, typename ComputedIn<T>::Type::Number* sums,
    std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  const Vector ratio = C::splat_of((typename C::Number)kRatio<F>);
  along<C, T>(n, [&](std::int64_t j, auto read, auto write) __attribute__((always_inline)) {
    Vector here[kWitnessSums], by_gain = C::splat_of(0);
    for (int s = 0; s < kWitnessSums; ++s) here[s] = sums ? load(sums + s * padded + j) : C::splat_of(0);
    for (int k = 0; k < kRowsTogether; ++k) {
      const ManyRow<F, T, kLayout>& row = rows[k];
      const Vector u = bounded<F, typename C::Number>(p.centered(read(x + k * n + j), j)), g = read(grad + k * n + j);
      auto d = partials<F, C>(u, row.constants.at(p, u, j), p.shift(j), p.gain(j), g);
      Vector others = row.moment;
      if constexpr (kLeftOut<F>) {
        others = others - d.sum;
        if (row.constants.dominated) {
          const Vector term = row.constants.term(p, u, j);
          others = term > row.constants.rest ? row.moment_of_rest : others;
        }
      }
      d.x = d.x - ratio * (p.term_gain(j) * u) * others;
      by_gain = by_gain + u * others * u;
      add<F, C>(here, g, d);
      if (grad_x) write(grad_x + k * n + j, d.x);
    }
    if (!sums) return;
    for (int s = 0; s < kWitnessSums; ++s) store(sums + s * padded + j, here[s]);
    store(sums + kWitnessSums * padded + j, load(sums + kWitnessSums * padded + j) + by_gain);
  });
}

template <int F, class T, int kLayout>
void backward_many(const void* x_, const void* grad_, void* grad_x_, std::int64_t rows, std::int64_t stride,
                   std::int64_t, const Period& period, void* sums_, std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  constexpr int kRowsTogether = kSideBySide<F, C>;
  auto* sums = (typename C::Number*)sums_;
  const Parameters<C, kLayout> p{period};
  ManyRow<F, T, kLayout> together[kRowsTogether];
  for (std::int64_t row = 0; row < rows;) {
    const T *x = (const T*)x_ + row * stride, *grad = (const T*)grad_ + row * stride;
    T* grad_x = grad_x_ ? (T*)grad_x_ + row * stride : nullptr;
    const std::int64_t left = rows - row;
    const int count = left < kRowsTogether ? (int)left : kRowsTogether;
    for (int k = 0; k < count; ++k) together[k].read_terms(x + k * stride, stride, p);
    int ready = 0;
    while (ready < count && together[ready].read_moments(x + ready * stride, grad + ready * stride, stride, p)) ++ready;
    if (ready == kRowsTogether) {
      backward_many_some<F, T, kLayout, kRowsTogether>(together, x, grad, grad_x, stride, p, sums, padded);
      row += kRowsTogether;
      continue;
    }
    for (int k = 0; k < ready; ++k) {
      const std::int64_t i = k * stride;
      backward_many_some<F, T, kLayout, 1>(together + k, x + i, grad + i, grad_x ? grad_x + i : grad_x, stride, p, sums,
                                           padded);
    }
    row += ready;
    // What stopped it: a rare row, or the end.
    if (row == rows) continue;
    const std::int64_t i = ready * stride;
    RareRow<F, T>(x + i, stride, period, kLayout == kRows).backward(grad + i, grad_x ? grad_x + i : grad_x, stride, sums,
                                                                    padded);
    ++row;
  }
}
