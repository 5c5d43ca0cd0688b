// What the module, the plan and the kernels of each instruction set tell one another.
#pragma once

#include <cstdint>

namespace dynorm {

enum Function { kDyisru = 0, kDyt = 1, kDerf = 2, kLinear = 3 };
enum Dtype { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3 };

// Sums over the elements of a channel, from which all gradients of parameters follow.
// With g the gradient of y and f the function: g, g f, g times the slope times the arm, g times the slope.
enum Sum { kSumGrad = 0, kSumValue = 1, kSumMoment = 2, kSumSlope = 3, kSums = 4 };

// One period of parameters, each an array as long as the period (padded to whole vectors) or one number, of the
// type that is computed in: float, or double for double x.
struct Period {
  const void* constant;
  const void* shift;
  const void* center;
  const void* gain;        // weight * scale
  const void* bias;
  const void* slope_gain;  // what grad_y and the function's slope are multiplied by to give grad_x
};

// y[i] for n elements that begin at the period's first, which is `length` long; a run has no end. stream: write past the
// caches.
using Forward = void (*)(const void* x, void* y, std::int64_t n, std::int64_t length, const Period& period,
                         bool stream);

// grad_x for `rows` periods of which the first n elements are there, `stride` elements apart; sums are added to
// `sums`, kSums arrays of `padded` numbers. grad_x or sums may be null.
using BackwardRows = void (*)(const void* x, const void* grad, void* grad_x, std::int64_t rows, std::int64_t stride,
                              std::int64_t n, const Period& period, void* sums, std::int64_t padded);

// The same for n elements of one channel, whose sums are added to kSums doubles.
using BackwardRun = void (*)(const void* x, const void* grad, void* grad_x, std::int64_t n, const Period& period,
                             double* sums);

// How a period's parameters are held: one of each; one constant and no centre, with a gain and a bias for each element;
// one constant; several.
enum Layout { kRun = 0, kRowsPlain = 1, kRowsOneConstant = 2, kRows = 3, kLayouts = 4 };

// Function number 4 is DyISRU for constants that the fast way does not cover.
constexpr int kDyisruWide = 4;
constexpr int kFunctions = 5;
constexpr int kDtypes = 4;
// The widest vector in numbers; periods are padded to it.
constexpr std::int64_t kWidest = 16;

struct Kernels {
  const char* name;
  Forward forward[kFunctions][kDtypes][kLayouts];
  BackwardRows backward_rows[kFunctions][kDtypes][kLayouts];
  BackwardRun backward_run[kFunctions][kDtypes];
};

const Kernels& kernels_portable();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

}  // namespace dynorm
