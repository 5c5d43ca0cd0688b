// Tensors of torch, read through DLPack's C interface, so that one build serves every version of torch that has it.
#pragma once

#include <Python.h>

#include "plan.h"

namespace dynorm {

// Of dlpack.h, version 1.
struct DLTensor {
  void* data;
  std::int32_t device_type, device_id, ndim;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DLPackExchange {
  std::uint32_t major, minor;
  void *older, *allocate, *from_tensor, *to_tensor;
  int (*read)(PyObject* tensor, DLTensor* out);
  void* current_stream;
};

// What torch has given once: its interface, and its two classes, because a subclass may be anything.
struct Torch {
  const DLPackExchange* exchange;
  PyObject *tensor, *parameter, *is_neg;
};

// Whether there are channels, on the last axis, innermost in memory, and the elements fill their memory, in any order of
// the other axes.
inline bool is_dense(const DLTensor& t) {
  const int last = t.ndim - 1;
  if (last < 0 || t.shape[last] == 0) return false;
  if (t.shape[last] > 1 && t.strides[last] != 1) return false;
  for (int i = 0; i < t.ndim; ++i) {
    std::int64_t inside = 1;
    for (int k = 0; k < t.ndim; ++k) {
      if (k != i && (k == last || t.strides[k] <= t.strides[i])) inside *= t.shape[k];
    }
    if (i != last && t.shape[i] > 1 && t.strides[i] != inside) return false;
  }
  return true;
}

// Whether element k of a is at `factor` times the place of element k of b, over b's axes.
inline bool is_alike(const DLTensor& a, const DLTensor& b, std::int64_t factor) {
  for (int i = 0; i < b.ndim; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.strides[i] != factor * b.strides[i])) return false;
  }
  return true;
}

// Reads the tensors of one call. `fits` becomes false with the first that the kernels do not take.
class Reader {
 public:
  explicit Reader(const Torch& given) : torch(given) {}
  bool fits = true;

  DLTensor tensor(PyObject* object, Dtype& dtype) {
    constexpr std::int32_t kCpu = 1;
    DLTensor t{};
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if ((type != torch.tensor && type != torch.parameter) || torch.exchange->read(object, &t) != 0) return refused();
    if (t.device_type != kCpu || !read_dtype(t, dtype)) return refused();
    bool has_memory = t.data != nullptr;
    for (int i = 0; i < t.ndim; ++i) has_memory |= t.shape[i] == 0;
    // DLPack does not know the sign that torch changes in a view.
    PyObject* negative = PyObject_CallMethodObjArgs(object, torch.is_neg, nullptr);
    Py_XDECREF(negative);
    return has_memory && negative == Py_False ? t : refused();
  }

  // One like x, its data; null for None.
  void* like(PyObject* object, const DLTensor& x, Dtype x_dtype) {
    if (object == Py_None || !fits) return nullptr;
    Dtype dtype;
    const DLTensor t = tensor(object, dtype);
    fits = fits && dtype == x_dtype && t.ndim == x.ndim && is_alike(t, x, 1);
    return t.data;
  }

  // A parameter, the numbers of tokens, or their gradient; nothing for None.
  Numbers numbers(PyObject* object, const DLTensor& x, int role) {
    if (object == Py_None || !fits) return {};
    Numbers n{};
    const DLTensor t = tensor(object, n.dtype);
    if (!fits) return {};
    const std::int64_t channels = x.shape[x.ndim - 1];
    n.data = t.data;
    if (role == kToken) {
      fits = t.ndim == x.ndim - 1 && is_alike(x, t, channels) && (n.dtype == kFloat32 || n.dtype == kFloat64);
    } else {
      if (t.ndim != 1) return fits = false, Numbers{};
      const std::int64_t count = role <= kShift ? 1 : channels;
      fits = t.shape[0] == count && (count == 1 || t.strides[0] == 1);
    }
    return n;
  }

 private:
  const Torch& torch;

  DLTensor refused() {
    fits = false;
    PyErr_Clear();
    return {};
  }
  static bool read_dtype(const DLTensor& t, Dtype& dtype) {
    constexpr int kFloat = 2, kBfloat = 4;
    if (t.code == kBfloat) dtype = kBfloat16;
    if (t.code == kFloat) dtype = t.bits == 64 ? kFloat64 : t.bits == 32 ? kFloat32 : kFloat16;
    return t.code == kBfloat || t.code == kFloat;
  }
};

}  // namespace dynorm
