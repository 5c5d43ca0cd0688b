// Eight floats in a register of AVX2, with FMA and F16C.

constexpr std::int64_t kLanes = 8;
typedef float V __attribute__((vector_size(32)));
typedef std::int32_t I __attribute__((vector_size(32)));

inline V splat(float a) { return (V)_mm256_set1_ps(a); }
inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
// The bound where a is beyond it, else a; NaN stays NaN, the second operand is what comes then.
inline V at_most(V a, float bound) { return (V)_mm256_min_ps(_mm256_set1_ps(bound), (__m256)a); }
inline V at_least(V a, float bound) { return (V)_mm256_max_ps(_mm256_set1_ps(bound), (__m256)a); }
// Whether any lane is above the bound, or NaN.
inline bool any_above(V a, float bound) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, _mm256_set1_ps(bound), _CMP_NLE_UQ)) != 0;
}
// The inverse of a square root, to 11 bits or more.
#define DYNORM_RSQRT
inline V rsqrt_estimate(V a) { return (V)_mm256_rsqrt_ps((__m256)a); }

#include "bfloat16.h"

inline V load(const float* p) { return (V)_mm256_loadu_ps(p); }
inline void store(float* p, V a) { _mm256_storeu_ps(p, (__m256)a); }
inline void stream(float* p, V a) { _mm256_stream_ps(p, (__m256)a); }

inline V load(const Bfloat16* p) {
  return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline __m256i bfloat16_words(V a) { return _mm256_srli_epi32((__m256i)bfloat16_above(a), 16); }
inline __m128i narrow(const Bfloat16*, V a) {
  const __m256i words = bfloat16_words(a);
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline void store_two(Bfloat16* p, V a, V b) {
  const __m256i words = _mm256_packus_epi32(bfloat16_words(a), bfloat16_words(b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
}

inline V load(const Float16* p) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i narrow(const Float16*, V a) { return _mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT); }

template <class T>
inline void store(T* p, V a) {
  _mm_storeu_si128((__m128i*)p, narrow(p, a));
}
template <class T>
inline void stream(T* p, V a) {
  _mm_stream_si128((__m128i*)p, narrow(p, a));
}
inline void fence() { _mm_sfence(); }
