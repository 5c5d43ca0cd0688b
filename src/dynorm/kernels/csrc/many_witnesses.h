// Rows with more than kMostFew witnesses, up to all channels. Included by kernels.h, inside its namespace, after
// row_constants.h and rare_rows.h.
//
// Every channel has a gain in the row's sum T, which is 0 where it is no witness, so that all loops run along the row, and
// none looks for the witnesses. The first loop sums the terms, gain times u^2. DyISRU leaves a witness out of its own
// sum. The difference, T less its term, keeps its digits as long as the term is at most half of T; and at most one term is
// more than that, the largest: it dominates. So T is summed in two parts, the largest term and the rest. A term above the
// rest is the largest one, and the rest is then the sum without it.

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
      forward_rare<F, T>(x, y, length, period, kLayout == kRows);
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
  const T *x = (const T*)x_, *grad = (const T*)grad_;
  T* grad_x = (T*)grad_x_;
  ManyRow<F, T, kLayout> ahead[kRowsTogether];
  auto to = [&](std::int64_t i) { return grad_x ? grad_x + i : grad_x; };
  auto prepare = [&](std::int64_t row, int count) {
    for (int k = 0; k < count; ++k) ahead[k].read_terms(x + (row + k) * stride, stride, p);
    int ready = 0;
    for (; ready < count; ++ready) {
      const std::int64_t i = (row + ready) * stride;
      if (!ahead[ready].read_moments(x + i, grad + i, stride, p)) break;
    }
    return ready;
  };
  auto together = [&](std::int64_t row) {
    const std::int64_t i = row * stride;
    backward_many_some<F, T, kLayout, kRowsTogether>(ahead, x + i, grad + i, to(i), stride, p, sums, padded);
  };
  auto one = [&](std::int64_t row, int k) {
    const std::int64_t i = row * stride;
    backward_many_some<F, T, kLayout, 1>(ahead + k, x + i, grad + i, to(i), stride, p, sums, padded);
  };
  auto rare = [&](std::int64_t row) {
    const std::int64_t i = row * stride;
    auto add_up = [&](std::int64_t j, int, const double* numbers) {
      for (int s = 0; sums && s <= kWitnessSums; ++s) sums[s * padded + j] += (typename C::Number)numbers[s];
    };
    backward_rare<F, T>(x + i, grad + i, to(i), stride, period, kLayout == kRows, add_up);
  };
  in_groups<kRowsTogether>(rows, prepare, together, one, rare);
}
