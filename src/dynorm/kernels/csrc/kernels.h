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
  if constexpr (sizeof(T) == 2) return Of<F>::brief(u, constant, shift);
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

// The parameters at place j of the row; those of one number are broadcast once, outside the loop.
template <class C>
struct Parameters {
  using Number = typename C::Number;
  using Vector = typename C::Vector;
  const Row& row;
  Vector constant = one(row.constant), shift = one(row.shift);

  static Vector one(const void* p) { return C::splat_of(*(const Number*)p); }
  static Vector many(const void* p, std::int64_t j) { return load((const Number*)p + j); }
  Vector gain(std::int64_t j) const { return many(row.gain, j); }
  Vector bias(std::int64_t j) const { return many(row.bias, j); }
  Vector slope_gain(std::int64_t j) const { return many(row.slope_gain, j); }
};

template <int F, class T, class C = typename ComputedIn<T>::Type>
__attribute__((always_inline)) inline void forward_row(const T* x, T* y, std::int64_t n, const Parameters<C>& p,
                                                       bool streamed) {
  using Vector = typename C::Vector;
  constexpr int kAtOnce = kSideBySide<F, C>;
  constexpr std::int64_t step = kAtOnce * C::lanes;
  std::int64_t j = 0;
  for (; j + step <= n; j += step) {
    Vector u[kAtOnce], constant[kAtOnce], f[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) u[k] = load(x + j + k * C::lanes), constant[k] = p.constant;
    add_squares<F>(u, constant);
    for (int k = 0; k < kAtOnce; ++k) f[k] = value_of<F, T>(u[k], constant[k], p.shift);
    for (int k = 0; k < kAtOnce; ++k) f[k] = C::muladd(f[k], p.gain(j + k * C::lanes), p.bias(j + k * C::lanes));
    if (streamed) {
      for (int k = 0; k < kAtOnce; ++k) stream(y + j + k * C::lanes, f[k]);
    } else if constexpr (kAtOnce == 1) {
      store(y + j, f[0]);
    } else {
      for (int k = 0; k < kAtOnce; k += 2) store_two(y + j + k * C::lanes, f[k], f[k + 1]);
    }
  }
  auto one = [&](Vector a) {
    Vector u[1] = {a}, constant[1] = {p.constant};
    add_squares<F>(u, constant);
    return C::muladd(value_of<F, T>(u[0], constant[0], p.shift), p.gain(j), p.bias(j));
  };
  for (; j + C::lanes <= n; j += C::lanes) store(y + j, one(load(x + j)));
  if (j < n) store_some<C>(y + j, n - j, one(load_some<C>(x + j, n - j)));
}

template <int F, class T>
void forward(const void* x_, void* y_, std::int64_t rows, std::int64_t channels, const Row& row, bool streamed) {
  const T* x = (const T*)x_;
  T* y = (T*)y_;
  const Parameters<typename ComputedIn<T>::Type> p{row};
  for (std::int64_t i = 0; i < rows * channels; i += channels) {
    if (streamed) {
      forward_row<F, T>(x + i, y + i, channels, p, true);
    } else {
      forward_row<F, T>(x + i, y + i, channels, p, false);
    }
  }
  if (streamed) fence();
}

template <class Vector>
struct Sums {
  Vector at[kSums];
};

// Some vectors of the backward pass, each of a row of its own, at one place: sums grow, grad becomes the
// gradient of x. There is a constant for each, because add_squares writes to it.
template <int F, class C, int kCount, class Vector>
__attribute__((always_inline)) inline void step(Vector (&u)[kCount], Vector (&grad)[kCount], Vector (&constant)[kCount],
                                                Vector shift, Vector slope_gain, Sums<Vector>& sums) {
  add_squares<F>(u, constant);
  for (int k = 0; k < kCount; ++k) {
    const auto d = Of<F>::all(u[k], constant[k], shift, grad[k]);
    sums.at[kSumGrad] = sums.at[kSumGrad] + grad[k];
    sums.at[kSumValue] = C::muladd(d.left, d.right, sums.at[kSumValue]);
    sums.at[kSumMoment] = C::muladd(d.sloped, d.arm, sums.at[kSumMoment]);
    if constexpr (number_of_sums(F) > kSumShift) sums.at[kSumShift] = sums.at[kSumShift] + d.sloped;
    grad[k] = d.sloped * slope_gain;
  }
}

// Some rows side by side: each is read and written in order, and few are open at a time.
template <int F, class T, int kRowsTogether, class C = typename ComputedIn<T>::Type>
__attribute__((always_inline)) inline void backward_some(const T* x, const T* grad, T* grad_x, std::int64_t n,
                                                         const Parameters<C>& p, typename C::Number* sums,
                                                         std::int64_t padded) {
  using Vector = typename C::Vector;
  along<C, T>(n, [&](std::int64_t j, auto read, auto write) __attribute__((always_inline)) {
    Vector u[kRowsTogether], g[kRowsTogether], constant[kRowsTogether];
    for (int k = 0; k < kRowsTogether; ++k) {
      u[k] = read(x + k * n + j), g[k] = read(grad + k * n + j), constant[k] = p.constant;
    }
    Sums<Vector> here;
    for (int s = 0; s < number_of_sums(F); ++s) here.at[s] = sums ? load(sums + s * padded + j) : C::splat_of(0);
    step<F, C>(u, g, constant, p.shift, p.slope_gain(j), here);
    for (int s = 0; sums && s < number_of_sums(F); ++s) store(sums + s * padded + j, here.at[s]);
    for (int k = 0; grad_x && k < kRowsTogether; ++k) write(grad_x + k * n + j, g[k]);
  });
}

template <int F, class T>
void backward(const void* x_, const void* grad_, void* grad_x_, std::int64_t rows, std::int64_t channels,
              const Row& row_, void* sums_, std::int64_t padded) {
  using C = typename ComputedIn<T>::Type;
  constexpr int kRowsTogether = kSideBySide<F, C>;
  const T *x = (const T*)x_, *grad = (const T*)grad_;
  T* grad_x = (T*)grad_x_;
  auto* sums = (typename C::Number*)sums_;
  const Parameters<C> p{row_};
  std::int64_t row = 0;
  auto to = [&](std::int64_t i) { return grad_x ? grad_x + i : grad_x; };
  for (; row + kRowsTogether <= rows; row += kRowsTogether) {
    const std::int64_t i = row * channels;
    backward_some<F, T, kRowsTogether>(x + i, grad + i, to(i), channels, p, sums, padded);
  }
  for (; row < rows; ++row) {
    const std::int64_t i = row * channels;
    backward_some<F, T, 1>(x + i, grad + i, to(i), channels, p, sums, padded);
  }
}

template <int F, class T>
void fill(Kernels& table, Dtype dtype) {
  table.forward[F][dtype] = forward<F, T>;
  table.backward[F][dtype] = backward<F, T>;
}

template <int F = 0>
void fill_functions(Kernels& table) {
  fill<F, float>(table, kFloat32);
  fill<F, double>(table, kFloat64);
  fill<F, Bfloat16>(table, kBfloat16);
  fill<F, Float16>(table, kFloat16);
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
