// Four floats, as the compiler has them: SSE2 on x86-64, Neon on aarch64.

constexpr std::int64_t kLanes = 4;
typedef float V __attribute__((vector_size(16)));
typedef std::int32_t I __attribute__((vector_size(16)));

inline V splat(float a) { return V{a, a, a, a}; }
inline V fma(V a, V b, V c) { return a * b + c; }
// The bound where a is beyond it, else a; NaN stays NaN.
inline V at_most(V a, float bound) { return a > bound ? splat(bound) : a; }
inline V at_least(V a, float bound) { return a < bound ? splat(bound) : a; }
// Whether any lane is above the bound, or NaN.
inline bool any_above(V a, float bound) {
  return !(a[0] <= bound && a[1] <= bound && a[2] <= bound && a[3] <= bound);
}

#include "bfloat16.h"

inline V load(const float* p) {
  V a;
  __builtin_memcpy(&a, p, sizeof a);
  return a;
}
inline void store(float* p, V a) { __builtin_memcpy(p, &a, sizeof a); }

inline V load(const Bfloat16* p) { return (V)(I{p[0].bits, p[1].bits, p[2].bits, p[3].bits} << 16); }
inline void store(Bfloat16* p, V a) {
  I bits = bfloat16_above(a) >> 16;
  for (int k = 0; k < 4; ++k) p[k].bits = (std::uint16_t)bits[k];
}

inline V load(const Float16* p) {
  return V{float16_value(p[0].bits), float16_value(p[1].bits), float16_value(p[2].bits), float16_value(p[3].bits)};
}
inline void store(Float16* p, V a) {
  for (int k = 0; k < 4; ++k) p[k].bits = float16_bits(a[k]);
}

template <class T>
inline void stream(T* p, V a) {
  store(p, a);
}
inline void fence() {}
