// float to bfloat16 on vectors; the vector headers include it once V and I are known.

// Rounded to nearest, ties to even, in the upper half. A NaN stays one: none comes with low bits, which the sum could carry
// on, from a bfloat16 x and the plan's parameters.
inline I bfloat16_above(V a) {
  I bits = (I)a;
  return bits + 0x7fff + (bits >> 16 & 1);
}
