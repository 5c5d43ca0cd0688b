// Sixteen floats in a register of AVX-512.

constexpr std::int64_t kLanes = 16;
typedef float V __attribute__((vector_size(64)));
typedef std::int32_t I __attribute__((vector_size(64)));

inline V splat(float a) { return (V)_mm512_set1_ps(a); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
// The bound where a is beyond it, else a; NaN stays NaN, the second operand is what comes then.
inline V at_most(V a, float bound) { return (V)_mm512_min_ps(_mm512_set1_ps(bound), (__m512)a); }
inline V at_least(V a, float bound) { return (V)_mm512_max_ps(_mm512_set1_ps(bound), (__m512)a); }
// Whether any lane is above the bound, or NaN.
inline bool any_above(V a, float bound) {
  return _mm512_cmp_ps_mask((__m512)a, _mm512_set1_ps(bound), _CMP_NLE_UQ) != 0;
}
// The number of a table of sixteen that the last four bits of each lane name.
#define DYNORM_LOOKUP
inline V lookup(const float* table, I index) {
  return (V)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(table));
}
// The inverse of a square root, to 11 bits or more.
#define DYNORM_RSQRT
inline V rsqrt_estimate(V a) { return (V)_mm512_rsqrt14_ps((__m512)a); }

inline V load(const float* p) { return (V)_mm512_loadu_ps(p); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, (__m512)a); }
inline void stream(float* p, V a) { _mm512_stream_ps(p, (__m512)a); }

// Where the halves of sixteen lanes, or of two times sixteen, come from or go to.
alignas(64) constexpr std::uint16_t kOddWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
alignas(64) constexpr std::uint16_t kTwice[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                                  8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};

inline V load(const Bfloat16* p) {
  const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
  return (V)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(kTwice), words);
}
// As bfloat16_bits does, in the upper halves, but for NaN: none comes with low bits, which the sum could carry on, from
// a bfloat16 x and the plan's parameters. Not VCVTNEPS2BF16, which makes 0 of denormals.
inline __m512i upper(V a) {
  __m512i bits = (__m512i)a, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
inline __m256i narrow(const Bfloat16*, V a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper(a), 16)); }
inline void store_two(Bfloat16* p, V a, V b) {
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(upper(a), _mm512_load_si512(kOddWords), upper(b)));
}

inline V load(const Float16* p) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m256i narrow(const Float16*, V a) { return _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT); }

template <class T>
inline void store(T* p, V a) {
  _mm256_storeu_si256((__m256i*)p, narrow(p, a));
}
template <class T>
inline void stream(T* p, V a) {
  _mm256_stream_si256((__m256i*)p, narrow(p, a));
}
inline void fence() { _mm_sfence(); }
