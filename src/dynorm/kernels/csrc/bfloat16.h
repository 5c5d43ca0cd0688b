// float to bfloat16 on vectors; the vector headers include it once V and I are known.

// Rounded to nearest, ties to even, in the low half; NaN, which the sum could carry into infinity, stays.
inline I bfloat16_bits(V a) {
  I bits = (I)a, rounded = bits + 0x7fff + (bits >> 16 & 1);
  I nan = (bits & (I)splat(-0.0f)) | 0x7fc00000;
  return (a == a ? rounded : nan) >> 16 & 0xffff;
}
