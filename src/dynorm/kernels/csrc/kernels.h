// The loops over memory, for one instruction set. A file that includes this one defines DYNORM_SET, the name of the
// namespace, DYNORM_VECTOR, the vector header, and is compiled with the instruction set's flags. Nothing of the
// standard library is called here: its inline functions, compiled with these flags, could be linked into other files.

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "half.h"
#include "types.h"

namespace dynorm {
namespace DYNORM_SET {
namespace {

#include DYNORM_VECTOR

inline V magnitude(V a) { return (V)((I)a & 0x7fffffff); }
inline V with_sign(V a, V sign) { return (V)((I)a | ((I)sign & (I)splat(-0.0f))); }

#include "functions.h"

// What a dtype is computed in: `Float` sixteen, eight or four at a time, `Double` one by one.
struct Float {
  using Number = float;
  using Vector = V;
  static constexpr std::int64_t lanes = kLanes;
  static V splat_of(float a) { return splat(a); }
  static V muladd(V a, V b, V c) { return fma(a, b, c); }
};
struct Double {
  using Number = double;
  using Vector = double;
  static constexpr std::int64_t lanes = 1;
  static double splat_of(double a) { return a; }
  static double muladd(double a, double b, double c) { return a * b + c; }
};
inline double load(const double* p) { return *p; }
inline void store(double* p, double a) { *p = a; }
inline void stream(double* p, double a) { *p = a; }

// Vectors computed side by side: one alone waits for its own steps, each of which takes four cycles or more where a new
// one could begin in every cycle. Not where each lane is computed by itself.
template <int F, class C>
constexpr int kSideBySide = F == kDyisruWide || C::lanes < 8 ? 1 : 4;

// Let `constant` be constant + u^2 where the function wants it. Where a square could overflow, u is clamped: f is at its
// bound to rounding there.
template <int F, int kCount>
__attribute__((always_inline)) inline void add_squares(V (&u)[kCount], V (&constant)[kCount]) {
  if constexpr (Of<F>::kRooted) {
    V square[kCount], sum = splat(0);
    for (int k = 0; k < kCount; ++k) square[k] = fma(u[k], u[k], constant[k]), sum = sum + square[k];
    if (__builtin_expect(any_above(sum, 0x1p124f), false)) {
      for (int k = 0; k < kCount; ++k) u[k] = clamped(u[k]), square[k] = fma(u[k], u[k], constant[k]);
    }
    for (int k = 0; k < kCount; ++k) constant[k] = square[k];
  }
}
template <int F>
inline void add_squares(double (&)[1], double (&)[1]) {}

template <int F, class T>
inline V value_of(V u, V constant, V shift) {
  if constexpr (Of<F>::kRooted && sizeof(T) == 2) return Of<F>::brief(u, constant);
  return Of<F>::value(u, constant, shift);
}
template <int F, class T>
inline double value_of(double u, double constant, double shift) {
  return Of<F>::value(u, constant, shift);
}

template <class T>
inline void store_two(T* p, V a, V b) {
  store(p, a);
  store(p + kLanes, b);
}

template <class T>
struct ComputedIn {
  using Type = Float;
};
template <>
struct ComputedIn<double> {
  using Type = Double;
};

// Fewer elements than a vector has, by way of a buffer.
template <class C, class T>
inline typename C::Vector load_some(const T* p, std::int64_t n) {
  T buffer[C::lanes] = {};
  __builtin_memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class C, class T>
inline void store_some(T* p, std::int64_t n, typename C::Vector a) {
  T buffer[C::lanes];
  store(buffer, a);
  __builtin_memcpy(p, buffer, n * sizeof(T));
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

// The parameters at place j of the period; what is one number is broadcast once, outside the loop. Whether a parameter
// is one number is the layout, a template argument: asked for each vector, it would cost as much as the function.
template <class C, int kLayout>
struct Parameters {
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  const Period& period;
  Vector constant_ = one(period.constant), shift_ = one(period.shift), center_ = one(period.center);
  Vector gain_ = one(period.gain), bias_ = one(period.bias), slope_gain_ = one(period.slope_gain);

  static Vector one(const void* p) { return C::splat_of(*(const Number*)p); }
  static Vector many(const void* p, std::int64_t j) { return load((const Number*)p + j); }
  Vector constant(std::int64_t j) const { return kLayout == kRows ? many(period.constant, j) : constant_; }
  // With witnesses it may depend on u.
  Vector constant(std::int64_t j, Vector) const { return constant(j); }
  Vector shift(std::int64_t j) const { return kLayout == kRows ? many(period.shift, j) : shift_; }
  Vector center(std::int64_t j) const { return kLayout == kRows ? many(period.center, j) : center_; }
  Vector centered(Vector x, std::int64_t j) const { return kLayout == kRowsPlain ? x : x - center(j); }
  Vector gain(std::int64_t j) const { return kLayout == kRun ? gain_ : many(period.gain, j); }
  Vector bias(std::int64_t j) const { return kLayout == kRun ? bias_ : many(period.bias, j); }
  // Of many witnesses.
  Vector term_gain(std::int64_t j) const { return many(period.term_gain, j); }
  Vector slope_gain(std::int64_t j) const { return kLayout == kRun ? slope_gain_ : many(period.slope_gain, j); }
  // Where results are known otherwise.
  template <class Some>
  void settle(Some&, std::int64_t) const {}
};

// One period, or what there is of the last.
template <int F, class T, class Given>
__attribute__((always_inline)) inline void forward_row(const T* x, T* y, std::int64_t n, const Given& p,
                                                       bool streamed) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  constexpr int kAtOnce = kSideBySide<F, C>;
  constexpr std::int64_t step = kAtOnce * C::lanes;
  std::int64_t j = 0;
  for (; j + step <= n; j += step) {
    Vector u[kAtOnce], constant[kAtOnce], shift[kAtOnce], f[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) {
      const std::int64_t i = j + k * C::lanes;
      u[k] = p.centered(load(x + i), i), constant[k] = p.constant(i, u[k]), shift[k] = p.shift(i);
    }
    add_squares<F>(u, constant);
    for (int k = 0; k < kAtOnce; ++k) f[k] = value_of<F, T>(u[k], constant[k], shift[k]);
    for (int k = 0; k < kAtOnce; ++k) f[k] = C::muladd(f[k], p.gain(j + k * C::lanes), p.bias(j + k * C::lanes));
    if (streamed) {
      p.settle(f, j);
      for (int k = 0; k < kAtOnce; ++k) stream(y + j + k * C::lanes, f[k]);
    } else if constexpr (kAtOnce == 1) {
      store(y + j, f[0]);
    } else {
      for (int k = 0; k < kAtOnce; k += 2) store_two(y + j + k * C::lanes, f[k], f[k + 1]);
    }
  }
  auto one = [&](Vector a) {
    Vector u[1] = {p.centered(a, j)}, constant[1] = {p.constant(j, u[0])};
    add_squares<F>(u, constant);
    Vector f[1] = {C::muladd(value_of<F, T>(u[0], constant[0], p.shift(j)), p.gain(j), p.bias(j))};
    if (streamed) p.settle(f, j);
    return f[0];
  };
  for (; j + C::lanes <= n; j += C::lanes) store(y + j, one(load(x + j)));
  if (j < n) store_some<C>(y + j, n - j, one(load_some<C>(x + j, n - j)));
}

template <int F, class T, int kLayout>
void forward(const void* x_, void* y_, std::int64_t n, std::int64_t length, const Period& period, bool streamed) {
  const T* x = (const T*)x_;
  T* y = (T*)y_;
  const Parameters<typename ComputedIn<T>::Type, kLayout> p{period};
  for (std::int64_t i = 0; i < n; i += length) {
    const std::int64_t here = n - i < length ? n - i : length;
    if (streamed) {
      forward_row<F, T>(x + i, y + i, here, p, true);
    } else {
      forward_row<F, T>(x + i, y + i, here, p, false);
    }
  }
  if (streamed) fence();
}

template <class Vector>
struct Sums {
  Vector at[kSums];
};

// Some vectors of the backward pass, each of a row of its own, at one place of the period: sums grow, grad becomes the
// gradient of x. The constant is each row's own.
template <int F, class C, int kCount, class Vector>
__attribute__((always_inline)) inline void step(Vector (&u)[kCount], Vector (&grad)[kCount], Vector (&constant)[kCount],
                                                Vector shift, Vector slope_gain, Sums<Vector>& sums) {
  add_squares<F>(u, constant);
  for (int k = 0; k < kCount; ++k) {
    const auto d = Of<F>::all(u[k], constant[k], shift, grad[k]);
    sums.at[kSumGrad] = sums.at[kSumGrad] + grad[k];
    sums.at[kSumValue] = C::muladd(d.left, d.right, sums.at[kSumValue]);
    sums.at[kSumMoment] = C::muladd(d.sloped, d.arm, sums.at[kSumMoment]);
    sums.at[kSumSlope] = sums.at[kSumSlope] + d.sloped;
    grad[k] = d.sloped * slope_gain;
  }
}

// Some rows side by side, along the period: each row is read and written in order, and few are open at a time.
template <int F, class T, int kLayout, int kRowsTogether>
__attribute__((always_inline)) inline void backward_some(const T* x, const T* grad, T* grad_x, std::int64_t stride,
                                                         std::int64_t n,
                                                         const Parameters<typename ComputedIn<T>::Type, kLayout>& p,
                                                         typename ComputedIn<T>::Type::Number* sums,
                                                         std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  along<C, T>(n, [&](std::int64_t j, auto read, auto write) __attribute__((always_inline)) {
    Vector u[kRowsTogether], g[kRowsTogether], constant[kRowsTogether];
    for (int k = 0; k < kRowsTogether; ++k) {
      u[k] = p.centered(read(x + k * stride + j), j), g[k] = read(grad + k * stride + j), constant[k] = p.constant(j);
    }
    Sums<Vector> here;
    for (int s = 0; s < kSums; ++s) here.at[s] = sums ? load(sums + s * padded + j) : C::splat_of(0);
    step<F, C>(u, g, constant, p.shift(j), p.slope_gain(j), here);
    for (int s = 0; sums && s < kSums; ++s) store(sums + s * padded + j, here.at[s]);
    for (int k = 0; grad_x && k < kRowsTogether; ++k) write(grad_x + k * stride + j, g[k]);
  });
}

template <int F, class T, int kLayout>
void backward_rows(const void* x_, const void* grad_, void* grad_x_, std::int64_t rows, std::int64_t stride,
                   std::int64_t n, const Period& period, void* sums_, std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  constexpr int kRowsTogether = kSideBySide<F, C>;
  const T *x = (const T*)x_, *grad = (const T*)grad_;
  T* grad_x = (T*)grad_x_;
  auto* sums = (typename C::Number*)sums_;
  const Parameters<C, kLayout> p{period};
  std::int64_t row = 0;
  auto to = [&](std::int64_t i) { return grad_x ? grad_x + i : grad_x; };
  for (; row + kRowsTogether <= rows; row += kRowsTogether) {
    const std::int64_t i = row * stride;
    backward_some<F, T, kLayout, kRowsTogether>(x + i, grad + i, to(i), stride, n, p, sums, padded);
  }
  for (; row < rows; ++row) {
    const std::int64_t i = row * stride;
    backward_some<F, T, kLayout, 1>(x + i, grad + i, to(i), stride, n, p, sums, padded);
  }
}

// Numbers added in float before they go to a double.
constexpr std::int64_t kRunBlock = 4096;

template <int F, class T>
void backward_run(const void* x_, const void* grad_, void* grad_x_, std::int64_t n, const Period& period,
                  double* sums) {
  using C = typename ComputedIn<T>::Type;
  using Vector = typename C::Vector;
  const T *x = (const T*)x_, *grad = (const T*)grad_;
  T* grad_x = (T*)grad_x_;
  const Parameters<C, kRun> p{period};
  for (std::int64_t start = 0; start < n; start += kRunBlock) {
    const std::int64_t end = start + kRunBlock < n ? start + kRunBlock : n;
    Sums<Vector> block;
    for (int k = 0; k < kSums; ++k) block.at[k] = C::splat_of(0);
    std::int64_t j = start;
    for (; j + C::lanes <= end; j += C::lanes) {
      Vector u[1] = {p.centered(load(x + j), j)}, g[1] = {load(grad + j)}, constant[1] = {p.constant_};
      step<F, C>(u, g, constant, p.shift_, p.slope_gain_, block);
      if (grad_x) store(grad_x + j, g[0]);
    }
    Sums<Vector> last;
    for (int k = 0; k < kSums; ++k) last.at[k] = C::splat_of(0);
    if (j < end) {
      Vector u[1] = {p.centered(load_some<C>(x + j, end - j), j)}, g[1] = {load_some<C>(grad + j, end - j)};
      Vector constant[1] = {p.constant_};
      step<F, C>(u, g, constant, p.shift_, p.slope_gain_, last);
      if (grad_x) store_some<C>(grad_x + j, end - j, g[0]);
    }
    for (int k = 0; k < kSums; ++k) {
      typename C::Number whole[C::lanes], some[C::lanes];
      store(whole, block.at[k]);
      store(some, last.at[k]);
      for (std::int64_t lane = 0; lane < C::lanes; ++lane) {
        // Lanes beyond the end hold zeros times a slope, which may be NaN: they are left out.
        sums[k] += whole[lane] + (lane < end - j ? some[lane] : 0);
      }
    }
  }
}

#include "row_constants.h"

#include "rare_rows.h"

#include "witnesses.h"

#include "many_witnesses.h"

template <int F, class T, int kLayout>
void fill_rows(Kernels& table, Dtype dtype) {
  table.forward[F][dtype][kLayout] = forward<F, T, kLayout>;
  table.backward_rows[F][dtype][kLayout] = backward_rows<F, T, kLayout>;
  table.forward[F][dtype][kLayout + kFewLayouts] = forward_few<F, T, kLayout>;
  table.backward_rows[F][dtype][kLayout + kFewLayouts] = backward_few<F, T, kLayout>;
  // Without a centre these subtract 0, which costs less than more code.
  if constexpr (kLayout != kRowsPlain) {
    table.forward[F][dtype][kLayout + kManyLayouts] = forward_many<F, T, kLayout>;
    table.backward_rows[F][dtype][kLayout + kManyLayouts] = backward_many<F, T, kLayout>;
  }
}

template <int F, class T>
void fill(Kernels& table, Dtype dtype) {
  table.forward[F][dtype][kRun] = forward<F, T, kRun>;
  table.backward_run[F][dtype] = backward_run<F, T>;
  fill_rows<F, T, kRowsPlain>(table, dtype);
  fill_rows<F, T, kRowsOneConstant>(table, dtype);
  fill_rows<F, T, kRows>(table, dtype);
}

template <int F>
void fill_dtypes(Kernels& table) {
  fill<F, float>(table, kFloat32);
  fill<F, double>(table, kFloat64);
  fill<F, Bfloat16>(table, kBfloat16);
  fill<F, Float16>(table, kFloat16);
}

template <int F = 0>
void fill_functions(Kernels& table) {
  fill_dtypes<F>(table);
  if constexpr (F + 1 < kFunctions) fill_functions<F + 1>(table);
}

Kernels make(const char* name) {
  Kernels table{};
  table.name = name;
  fill_functions(table);
  return table;
}

}  // namespace
}  // namespace DYNORM_SET
}  // namespace dynorm
