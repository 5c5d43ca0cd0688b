// The interface between the module, the plan and the kernels of each instruction set.
#pragma once

#include <cstdint>

namespace dynorm {

// The functions that a caller may name, and then DyISRU for constants that the fast way does not cover. Each has its
// functor in functions.h; Python knows them by the same numbers (kernels/_form.py).
enum Function { kDyisru = 0, kDyt, kDerf, kLinear, kNamed, kDyisruWide = kNamed, kFunctions };
enum Dtype { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3 };

// Sums over the elements of a channel, from which all gradients of parameters follow.
// With g the gradient of y and f the function: g, g f, g times the slope times the arm; and last, for the shift of Derf,
// the only function that has one, g times the slope.
enum Sum { kSumGrad = 0, kSumValue = 1, kSumMoment = 2, kSumShift = 3, kSums = 4 };
constexpr int number_of_sums(int function) { return function == kDerf ? kSums : kSumShift; }

// The parameters of a row, of the type that is computed in: float, or double for double x. Constant and shift are one
// number, the others arrays of its channels, padded to whole vectors.
struct Row {
  const void* constant;
  const void* shift;
  const void* gain;        // weight * scale
  const void* bias;
  const void* slope_gain;  // grad_y times the function's slope times this is grad_x
};

// y of some rows. stream: write past the caches.
using Forward = void (*)(const void* x, void* y, std::int64_t rows, std::int64_t channels, const Row& row, bool stream);

// grad_x of some rows; sums are added to `sums`, kSums arrays of `padded` numbers, of which only the first
// number_of_sums(F) change. grad_x or sums may be null.
using Backward = void (*)(const void* x, const void* grad, void* grad_x, std::int64_t rows, std::int64_t channels,
                          const Row& row, void* sums, std::int64_t padded);

constexpr int kDtypes = 4;
// The widest vector in numbers; rows of parameters are padded to it.
constexpr std::int64_t kWidest = 16;

struct Kernels {
  const char* name;
  Forward forward[kFunctions][kDtypes];
  Backward backward[kFunctions][kDtypes];
};

const Kernels& kernels_portable();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace dynorm
