// Numbers of any dtype.
#pragma once

#include <algorithm>

#include "half.h"
#include "plan.h"

namespace dynorm {

// A NaN with its low bits clear: rounding to 16 bits may add to them.
template <class Number, class T>
Number number(T a) {
  return a == a ? static_cast<Number>(a) : static_cast<Number>(__builtin_nanf(""));
}

template <class Number, class T, class Convert>
void convert_all(const Numbers& from, std::int64_t count, Number* to, Convert convert) {
  const T* values = static_cast<const T*>(from.data);
  for (std::int64_t c = 0; c < count; ++c) to[c] = number<Number>(convert(values[c]));
}

// `count` numbers, converted; `otherwise` where there are none.
template <class Number>
void read_all(const Numbers& from, std::int64_t count, double otherwise, Number* to) {
  if (from.data == nullptr) {
    std::fill(to, to + count, static_cast<Number>(otherwise));
    return;
  }
  switch (from.dtype) {
    case kFloat64:
      return convert_all<Number, double>(from, count, to, [](double a) { return a; });
    case kBfloat16:
      return convert_all<Number, Bfloat16>(
          from, count, to, [](Bfloat16 a) { return as_float(static_cast<std::uint32_t>(a.bits) << 16); });
    case kFloat16:
      return convert_all<Number, Float16>(from, count, to, [](Float16 a) { return float16_value(a.bits); });
    default:
      return convert_all<Number, float>(from, count, to, [](float a) { return a; });
  }
}

// One of the numbers of tokens, float or double.
inline double number_at(const Numbers& from, std::int64_t i) {
  return from.dtype == kFloat64 ? static_cast<const double*>(from.data)[i] : static_cast<const float*>(from.data)[i];
}

// The sum of term(i) for 0 <= i < n, in an order of its own.
template <class Term>
double sum_of(std::int64_t n, const Term& term) {
  double parts[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int k = 0; k < 8; ++k) parts[k] += term(i + k);
  }
  for (; i < n; ++i) parts[0] += term(i);
  return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

inline void put(const Numbers& to, std::int64_t i, double value) {
  const float narrow = static_cast<float>(value);
  const std::uint32_t bits = as_bits(narrow);
  switch (to.dtype) {
    case kFloat64:
      static_cast<double*>(to.data)[i] = value;
      return;
    case kBfloat16:
      static_cast<Bfloat16*>(to.data)[i].bits = static_cast<std::uint16_t>(
          value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
      return;
    case kFloat16:
      static_cast<Float16*>(to.data)[i].bits = float16_bits(narrow);
      return;
    default:
      static_cast<float*>(to.data)[i] = narrow;
  }
}

// Puts value(c) for each channel; nothing where it is not wanted.
template <class Value>
void put_all(const Numbers& to, std::int64_t channels, const Value& value) {
  if (to.data == nullptr) return;
  if (to.dtype == kFloat32) {
    // A loop of its own, for most are.
    float* numbers = static_cast<float*>(to.data);
    for (std::int64_t c = 0; c < channels; ++c) numbers[c] = static_cast<float>(value(c));
    return;
  }
  for (std::int64_t c = 0; c < channels; ++c) put(to, c, value(c));
}

inline std::int64_t size_of(Dtype dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

}  // namespace dynorm
