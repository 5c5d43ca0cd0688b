// Rows with infinities, NaN or numbers whose squares overflow: the definition, one number after another. Included by
// kernels.h, inside its namespace, after row_constants.h.

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

// In double. All numbers are multiplied by `unit`, which changes no result, where double overflows too.
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
  // The place of a channel among few witnesses, or -1.
  int place_of(std::int64_t j) const {
    const int count = period.witnesses ? period.witnesses->count : 0;
    for (int i = 0; i < count; ++i) {
      if (period.witnesses->channel[i] == j) return i;
    }
    return -1;
  }
  double term_gain(std::int64_t j) const {
    if (!period.witnesses) return number(period.term_gain, j);
    const int place = place_of(j);
    return place < 0 ? 0 : number(period.witnesses->gain, place);
  }
  // In a backward pass the period has 0 for the few.
  double gain(std::int64_t j) const {
    const int place = place_of(j);
    return place < 0 ? number(period.gain, j) : number(period.witnesses->columns.gain, place);
  }
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
      const double result = value(j) * gain(j) + number(period.bias, j);
      store_some<C>(y + j, 1, C::splat_of((Number)result));
    }
  }

  // As `partials` has them, but that by T in the row's unit.
  Partials<double> derivatives(std::int64_t j, double grad) const {
    const double inverse = inverse_root(j);
    if constexpr (kLeftOut<F>) {
      const double cube = grad * gain(j) * inverse * inverse * inverse, moment_here = cube * u(j);
      const double constant = own(j) * unit * unit + sum(j);
      return {grad, value(j), cube * constant * unit, moment_here * unit * unit, moment_here, 0};
    } else {
      const double a = own(j) * inverse;
      const auto d = Of<F>::all(u(j), a, shift(j), grad);
      const double sloped = d.sloped * gain(j), moment_here = sloped * u(j);
      return {grad, value(j), sloped * a * unit, moment_here * inverse * inverse * inverse * unit * unit,
              moment_here * a * a * a, sloped};
    }
  }

  // add(j, place, numbers) gets what channel j has for each of the sums, the last of which is that of the gains.
  template <class Add>
  void backward(const T* grad, T* grad_x, std::int64_t n, const Add& add) {
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
      const double numbers[kWitnessSums + 1] = {g, d.left * d.right, d.constant, d.x, d.shift, u(j) * others * u(j)};
      add(j, place_of(j), numbers);
    }
  }
};

// Not inlined: the loops that call these would be compiled to slower code.
template <int F, class T>
__attribute__((noinline, cold)) void forward_rare(const T* x, T* y, std::int64_t n, const Period& period,
                                                  bool many_constants) {
  RareRow<F, T>(x, n, period, many_constants).forward(y, n);
}
template <int F, class T, class Add>
__attribute__((noinline, cold)) void backward_rare(const T* x, const T* grad, T* grad_x, std::int64_t n,
                                                   const Period& period, bool many_constants, const Add& add) {
  RareRow<F, T>(x, n, period, many_constants).backward(grad, grad_x, n, add);
}

// kRowsTogether rows side by side where all are ordinary, else one by one, and a rare one by itself. prepare(row, count)
// reads rows ahead and returns how many of them are ordinary before the first that is not; one(row, k) is the k-th of these.
template <int kRowsTogether, class Prepare, class Together, class One, class Rare>
__attribute__((always_inline)) inline void in_groups(std::int64_t rows, const Prepare& prepare,
                                                     const Together& together, const One& one, const Rare& rare) {
  for (std::int64_t row = 0; row < rows;) {
    const std::int64_t left = rows - row;
    const int count = left < kRowsTogether ? (int)left : kRowsTogether;
    const int ready = prepare(row, count);
    if (ready == kRowsTogether) {
      together(row);
      row += kRowsTogether;
      continue;
    }
    for (int k = 0; k < ready; ++k) one(row + k, k);
    row += ready;
    if (ready == count) continue;
    rare(row);
    ++row;
  }
}
