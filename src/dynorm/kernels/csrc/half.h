// The 16-bit dtypes as bits, and float16 without the processor's help.
#pragma once

#include <cstdint>

namespace dynorm {

struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

namespace {

inline float as_float(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t as_bits(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float16_value(std::uint16_t half) {
  const std::uint32_t sign = (std::uint32_t)(half & 0x8000) << 16, rest = (std::uint32_t)(half & 0x7fff) << 13;
  // Infinity and NaN keep their bits under the largest exponent; a product with 2^112 serves all others, denormals too.
  if (rest >= 0x0f800000) return as_float(sign | 0x70000000 | rest);
  return as_float(sign | as_bits(as_float(rest) * 0x1p112f));
}

// Rounded once, to nearest, ties to even.
inline std::uint16_t float16_bits(float value) {
  const std::uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (std::uint16_t)(sign | 0x7e00);
  if (rest >= 0x47800000) return (std::uint16_t)(sign | 0x7c00);
  // Below 2^-14 the result is denormal: adding 0.5 puts its last bit where the float's last bit is.
  if (rest < 0x38800000) return (std::uint16_t)(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000));
  return (std::uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

}  // namespace
}  // namespace dynorm
