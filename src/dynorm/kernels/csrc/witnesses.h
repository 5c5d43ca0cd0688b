// Rows with up to kMostFew witnesses. Included by kernels.h, inside its namespace, after row_constants.h, which has the
// formulas.
//
// DyISRU leaves a witness out of its own sum, and takes no difference for that: one channel may be nearly all of the sum.
// So the loop along a row knows one sum, and the witnesses' columns are computed by themselves, side by side in vectors.

// The witnesses of one row: u, each one's sum, and the sum that all other channels have.
template <int F, class T>
struct RowSums {
  using C = typename ComputedIn<T>::Type;
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  alignas(64) Number u[kMostFew] = {}, without[kMostFew] = {}, total = 0;

  // at(i) is the number of witness i.
  // Numbers rather than vectors: they are few, and wanted a row later, when they have reached memory.
  template <class At>
  void read(At at, const Witnesses& w) {
    const Number *center = (const Number*)w.columns.center, *gain = (const Number*)w.gain;
    Number terms[kMostFew], sum = 0;
    for (int i = 0; i < w.count; ++i) {
      u[i] = number_of(at(i)) - center[i];
      terms[i] = u[i] * gain[i] * u[i];
      without[i] = sum;
      sum = sum + terms[i];
    }
    total = sum;
    sum = 0;
#pragma GCC unroll 1
    for (int i = w.count - 1; i >= 0; --i) {
      without[i] = kLeftOut<F> ? without[i] + sum : total;
      sum = sum + terms[i];
    }
  }
};

// What the witnesses of some rows tell: each row's sum for all other channels, and the witnesses' own results. Of few
// witnesses several rows are looked at together, in one vector, because all vectors cost alike, however few lanes they use.
template <int F, class T>
struct Ahead {
  using C = typename ComputedIn<T>::Type;
  using Number = typename C::Number;
  // Those of a row begin kVeryFew places after those of the last; 0 where there are no more rows.
  alignas(64) T x[kMostFew] = {};
  alignas(64) Number totals[kMostFew] = {};
  alignas(64) T own[kMostFew];

  static int rows_together(const Witnesses& w) { return C::lanes > 1 && w.count <= kVeryFew ? C::lanes / kVeryFew : 1; }

  void take(const T* row, int place, const Witnesses& w) {
    // The first stands again where there are fewer.
#pragma GCC unroll 4
    for (int i = 0; i < kVeryFew; ++i) x[place + i] = row[w.channel[i]];
    for (int i = kVeryFew; __builtin_expect(i < w.count, false); ++i) x[i] = row[w.channel[i]];
  }

  void look(const Witnesses& w) {
    if constexpr (C::lanes > 1) {
      if (w.count <= kVeryFew) return look_at_few(w);
    }
    look_at_row(w);
  }

  void look_at_few(const Witnesses& w) {
    auto at = [](const void* numbers) { return fours((const float*)numbers); };
    const V u = load(x) - at(w.columns.center), term = u * at(w.gain) * u;
    const V next = turned<1>(term), others = next + turned<1>(next) + turned<3>(term), total = others + term;
    store(totals, total);
    if constexpr (kLeftOut<F>) {
      V z[1] = {u}, constant[1] = {at(w.columns.constant) + others};
      add_squares<F>(z, constant);
      store(own, fma(value_of<F, T>(z[0], constant[0], splat(0)), at(w.columns.gain), at(w.columns.bias)));
    }
  }

  void look_at_row(const Witnesses& w) {
    using Vector = typename C::Vector;
    const Parameters<C, kRows> columns{w.columns};
    RowSums<F, T> row_sums;
    row_sums.read([&](int i) { return x[i]; }, w);
    totals[0] = row_sums.total;
    for (int j = 0; kLeftOut<F> && j < w.count; j += C::lanes) {
      Vector z[1] = {load(row_sums.u + j)}, constant[1] = {columns.constant(j) + load(row_sums.without + j)};
      add_squares<F>(z, constant);
      store(own + j, C::muladd(value_of<F, T>(z[0], constant[0], columns.shift(j)), columns.gain(j), columns.bias(j)));
    }
  }

  // Over what the row's loop has left in their place.
  void write(T* y, int place, const Witnesses& w) const {
    // Backwards, because the first witness stands again where there are no more.
#pragma GCC unroll 4
    for (int i = kVeryFew - 1; i >= 0; --i) y[w.channel[i]] = own[place + i];
    for (int i = kVeryFew; __builtin_expect(i < w.count, false); ++i) y[w.channel[i]] = own[i];
  }
};

inline void set_lane(double& a, std::int64_t, double value) { a = value; }
inline void set_lane(V& a, std::int64_t lane, float value) { a[lane] = value; }

// What forward_row asks for.
template <int F, class T, int kLayout>
struct RowParameters {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  const Parameters<C, kLayout>& p;
  const Witnesses& w;
  RowConstants<F, C, kLayout> row;
  // The witnesses' own results, and which of them comes next.
  const T* own;
  mutable int next;

  template <int kCount>
  void settle(Vector (&f)[kCount], std::int64_t j) const {
    if constexpr (kLeftOut<F>) {
      for (; next < w.count && w.channel[next] < j + kCount * C::lanes; ++next) {
        const std::int64_t at = w.channel[next] - j;
        for (int k = 0; k < kCount; ++k) {
          if (at / C::lanes == k) set_lane(f[k], at % C::lanes, number_of(own[next]));
        }
      }
    }
  }
  Vector constant(std::int64_t j, Vector) const { return row.at(p, j).constant; }
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
void forward_few(const void* x_, void* y_, std::int64_t n, std::int64_t length, const Period& period, bool streamed) {
  using C = typename ComputedIn<T>::Type;
  const T* x = (const T*)x_;
  T* y = (T*)y_;
  const Parameters<C, kLayout> p{period};
  const Witnesses& w = *period.witnesses;
  // Taken two blocks of rows ahead, because they may come from far, and looked at one ahead, so that no loop waits.
  Ahead<F, T> ahead[3];
  RowParameters<F, T, kLayout> of_row{p, w, {}, nullptr, 0};
  const std::int64_t together = Ahead<F, T>::rows_together(w), rows = n / length;
  auto take = [&](std::int64_t row, Ahead<F, T>& block, int place) {
    if (row < rows) block.take(x + row * length, place, w);
  };
  for (int row = 0; row < 2 * together; ++row) take(row, ahead[row / together], row % together * kVeryFew);
  ahead[0].look(w);
  for (std::int64_t first = 0, block = 0; first < rows; first += together, ++block) {
    const Ahead<F, T>& here = ahead[block % 3];
    if (first + together < rows) ahead[(block + 1) % 3].look(w);
    for (int r = 0; r < together && first + r < rows; ++r) {
      const std::int64_t row = first + r;
      take(row + 2 * together, ahead[(block + 2) % 3], r * kVeryFew);
      if (__builtin_expect(!ordinary<F>(here.totals[r * kVeryFew]), false)) {
        forward_rare<F, T>(x + row * length, y + row * length, length, period, kLayout == kRows);
        continue;
      }
      of_row.row.set(p, here.totals[r * kVeryFew]);
      of_row.own = here.own + r * kVeryFew, of_row.next = 0;
      if (streamed) {
        forward_row<F, T>(x + row * length, y + row * length, length, of_row, true);
      } else {
        forward_row<F, T>(x + row * length, y + row * length, length, of_row, false);
        if constexpr (kLeftOut<F>) here.write(y + row * length, r * kVeryFew, w);
      }
    }
  }
  if (streamed) fence();
}

// The sums over the rows of the witnesses' columns.
template <int F, class T>
struct ColumnSums {
  using C = typename ComputedIn<T>::Type;
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  static constexpr int kVectors = kMostFew / C::lanes;
  Vector at[kVectors][kWitnessSums] = {}, gain[kVectors] = {};
  // Of rare rows: the sums, and the gains'.
  Number rare[kWitnessSums + 1][kMostFew] = {};

  // The witnesses' columns of one row, `rest` being the gradient by T of all others.
  void row(const RowSums<F, T>& row_sums, const T* grad, T* grad_x, const Witnesses& w, Vector rest) {
    const Parameters<C, kRows> columns{w.columns};
    T some[kMostFew] = {};
    Number terms[kMostFew];
    Partials<Vector> d[kVectors];
    Vector u[kVectors], g[kVectors], by_sum[kVectors];
    for (int i = 0; i < w.count; ++i) some[i] = grad[w.channel[i]];
    for (int v = 0; v * (int)C::lanes < w.count; ++v) {
      const int j = v * C::lanes;
      g[v] = load(some + j);
      const Effective<Vector> e = effective<F, C>(columns.constant(j), load(row_sums.without + j));
      u[v] = bounded<F, Number>(load(row_sums.u + j));
      d[v] = partials<F, C>(u[v], e, columns.shift(j), columns.gain(j), g[v]);
      store(terms + j, d[v].sum);
    }
    for (int v = 0; v * (int)C::lanes < w.count; ++v) by_sum[v] = rest;
    for (int i = 0; i < w.count; ++i) {
      for (int v = 0; v * (int)C::lanes < w.count; ++v) {
        Vector other = C::splat_of(1);
        if constexpr (kLeftOut<F>) other = load((const Number*)w.others + i * kMostFew + v * C::lanes);
        by_sum[v] = C::muladd(C::splat_of(terms[i]), other, by_sum[v]);
      }
    }
    for (int v = 0; v * (int)C::lanes < w.count; ++v) {
      const int j = v * C::lanes;
      const Vector ratio = C::splat_of((Number)kRatio<F>);
      d[v].x = d[v].x - ratio * load((const Number*)w.gain + j) * u[v] * by_sum[v];
      add<F, C>(at[v], g[v], d[v]);
      gain[v] = gain[v] + u[v] * by_sum[v] * u[v];
      store(some + j, d[v].x);
    }
    for (int i = 0; grad_x && i < w.count; ++i) grad_x[w.channel[i]] = some[i];
  }

  void write(Number* sums, std::int64_t padded, const Witnesses& w) const {
    Number some[kWitnessSums + 1][kMostFew];
    for (int v = 0; v < kVectors; ++v) {
      for (int s = 0; s < kWitnessSums; ++s) store(some[s] + v * C::lanes, at[v][s]);
      store(some[kWitnessSums] + v * C::lanes, gain[v]);
    }
    for (int i = 0; i < w.count; ++i) {
      for (int s = 0; s < kWitnessSums; ++s) sums[s * padded + w.channel[i]] = some[s][i] + rare[s][i];
      sums[kWitnessSums * padded + i] = some[kWitnessSums][i] + rare[kWitnessSums][i];
    }
  }
};

// Some rows side by side, as backward_some.
template <int F, class T, int kLayout, int kRowsTogether>
__attribute__((always_inline)) inline void backward_few_some(const RowSums<F, T>* row_sums, const T* x, const T* grad,
                                                              T* grad_x, std::int64_t n,
                                                              const Parameters<typename ComputedIn<T>::Type, kLayout>& p,
                                                              const Witnesses& w, ColumnSums<F, T>& columns,
                                                              typename ComputedIn<T>::Type::Number* sums,
                                                              std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  RowConstants<F, C, kLayout> constants[kRowsTogether];
  Vector by_sum[kRowsTogether];
  for (int k = 0; k < kRowsTogether; ++k) {
    constants[k].set(p, row_sums[k].total);
    by_sum[k] = C::splat_of(0);
  }
  along<C, T>(n, [&](std::int64_t j, auto read, auto write) __attribute__((always_inline)) {
    Vector here[kWitnessSums];
    for (int s = 0; s < kWitnessSums; ++s) here[s] = sums ? load(sums + s * padded + j) : C::splat_of(0);
    for (int k = 0; k < kRowsTogether; ++k) {
      const Vector u = bounded<F, typename C::Number>(p.centered(read(x + k * n + j), j)), g = read(grad + k * n + j);
      const auto d = partials<F, C>(u, constants[k].at(p, j), p.shift(j), p.gain(j), g);
      add<F, C>(here, g, d);
      by_sum[k] = by_sum[k] + d.sum;
      if (grad_x) write(grad_x + k * n + j, d.x);
    }
    for (int s = 0; sums && s < kWitnessSums; ++s) store(sums + s * padded + j, here[s]);
  });
  for (int k = 0; k < kRowsTogether; ++k) {
    const Vector others = C::splat_of(sum_of_lanes<typename C::Number>(by_sum[k]));
    columns.row(row_sums[k], grad + k * n, grad_x ? grad_x + k * n : grad_x, w, others);
  }
}

template <int F, class T, int kLayout>
void backward_few(const void* x_, const void* grad_, void* grad_x_, std::int64_t rows, std::int64_t stride,
                   std::int64_t, const Period& period, void* sums_, std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  constexpr int kRowsTogether = kSideBySide<F, C>;
  const T *x = (const T*)x_, *grad = (const T*)grad_;
  T* grad_x = (T*)grad_x_;
  auto* sums = (typename C::Number*)sums_;
  const Parameters<C, kLayout> p{period};
  const Witnesses& w = *period.witnesses;
  ColumnSums<F, T> columns;
  RowSums<F, T> row_sums[kRowsTogether];
  auto to = [&](std::int64_t i) { return grad_x ? grad_x + i : grad_x; };
  auto prepare = [&](std::int64_t row, int count) {
    int ready = 0;
    for (int k = 0; k < count; ++k) {
      const T* from = x + (row + k) * stride;
      row_sums[k].read([&](int i) { return from[w.channel[i]]; }, w);
      if (ready == k && ordinary<F>(row_sums[k].total)) ++ready;
    }
    return ready;
  };
  auto together = [&](std::int64_t row) {
    const std::int64_t i = row * stride;
    backward_few_some<F, T, kLayout, kRowsTogether>(row_sums, x + i, grad + i, to(i), stride, p, w, columns, sums,
                                                    padded);
  };
  auto one = [&](std::int64_t row, int k) {
    const std::int64_t i = row * stride;
    backward_few_some<F, T, kLayout, 1>(row_sums + k, x + i, grad + i, to(i), stride, p, w, columns, sums, padded);
  };
  auto rare = [&](std::int64_t row) {
    const std::int64_t i = row * stride;
    auto add_up = [&](std::int64_t j, int place, const double* numbers) {
      for (int s = 0; place >= 0 && s <= kWitnessSums; ++s) columns.rare[s][place] += (typename C::Number)numbers[s];
      for (int s = 0; place < 0 && sums && s < kWitnessSums; ++s) {
        sums[s * padded + j] += (typename C::Number)numbers[s];
      }
    };
    backward_rare<F, T>(x + i, grad + i, to(i), stride, period, kLayout == kRows, add_up);
  };
  in_groups<kRowsTogether>(rows, prepare, together, one, rare);
  if (sums) columns.write(sums, padded, w);
}
