// Sixteen floats in a register of AVX-512.

constexpr std::int64_t kLanes = 16;
typedef float V __attribute__((vector_size(64)));
typedef std::int32_t I __attribute__((vector_size(64)));
#define DYNORM_RSQRT

inline V splat(float a) { return (V)_mm512_set1_ps(a); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
// The bound where a is beyond it, else a; NaN stays NaN, the second operand is what comes then.
inline V at_most(V a, float bound) { return (V)_mm512_min_ps(_mm512_set1_ps(bound), (__m512)a); }
inline V at_least(V a, float bound) { return (V)_mm512_max_ps(_mm512_set1_ps(bound), (__m512)a); }
// Of 14 bits or more.
inline V reciprocal(V a) { return (V)_mm512_rcp14_ps((__m512)a); }
inline V rsqrt_estimate(V a) { return (V)_mm512_rsqrt14_ps((__m512)a); }

inline V load(const float* p) { return (V)_mm512_loadu_ps(p); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, (__m512)a); }
inline void stream(float* p, V a) { _mm512_stream_ps(p, (__m512)a); }

inline V load(const Bfloat16* p) {
  return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
// As bfloat16_bits does; not VCVTNEPS2BF16, which makes 0 of denormals.
inline __m256i narrow(const Bfloat16*, V a) {
  __m512i bits = (__m512i)a, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  __mmask16 nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
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
