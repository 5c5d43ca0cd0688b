// What of DLPack's C exchange interface, version 1, is used: a look at a tensor's memory in one call.
#pragma once

#include <cstdint>

#include "types.h"

namespace dynorm {

struct Strided {
  void* data;
  std::int32_t device, device_index;
  std::int32_t dims;
  std::uint8_t kind, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t offset;
};

struct ExchangeApi {
  std::uint32_t major, minor;
  void* previous;
  void* allocate;
  void* own;
  void* give;
  // 0, or -1 with an exception of Python's set.
  int (*look)(void* object, Strided* out);
  void* stream;
};

inline std::int64_t elements(const Strided& t) {
  std::int64_t count = 1;
  for (std::int32_t d = 0; d < t.dims; ++d) count *= t.shape[d];
  return count;
}

// Whether the kernels can read it: contiguous, on the processor, of one of their dtypes.
inline bool usable(const Strided& t, Dtype& dtype) {
  constexpr std::int32_t kProcessor = 1;
  constexpr std::uint8_t kFloat = 2, kBrain = 4;
  if (t.device != kProcessor || t.dims < 1 || t.lanes != 1 || t.offset != 0) return false;
  if (t.kind == kFloat && t.bits == 32) {
    dtype = kFloat32;
  } else if (t.kind == kFloat && t.bits == 64) {
    dtype = kFloat64;
  } else if (t.kind == kBrain && t.bits == 16) {
    dtype = kBfloat16;
  } else if (t.kind == kFloat && t.bits == 16) {
    dtype = kFloat16;
  } else {
    return false;
  }
  std::int64_t expected = 1;
  for (std::int32_t d = t.dims - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return t.data != nullptr || expected == 0;
}

}  // namespace dynorm
