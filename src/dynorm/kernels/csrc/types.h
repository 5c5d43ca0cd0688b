// What the module, the plan and the kernels of each instruction set tell one another.
#pragma once

#include <cstdint>

namespace dynorm {

// The functions a caller may name, and then DyISRU for constants that the fast way does not cover. Each has its functor in
// functions.h; Python knows them by the same numbers (kernels/_form.py).
enum Function { kDyisru = 0, kDyt, kDerf, kLinear, kNamed, kDyisruWide = kNamed, kFunctions };
enum Dtype { kFloat32 = 0, kFloat64 = 1, kBfloat16 = 2, kFloat16 = 3 };

// Sums over the elements of a channel, from which all gradients of parameters follow.
// With g the gradient of y and f the function: g, g f, g times the slope times the arm, g times the slope.
enum Sum { kSumGrad = 0, kSumValue = 1, kSumMoment = 2, kSumSlope = 3, kSums = 4 };

// With witnesses the constant is another one in every row, so that gain and constant are in the terms: kSumMoment holds
// the gradient of the constant up to a number, kSumSlope the gradient of x, kSumShift that of the shift. After these
// arrays comes one of the sums of the gains' gradients: kMostFew of them, or one for each channel.
constexpr Sum kSumShift = Sum(4);
constexpr int kWitnessSums = 5;
// Up to the first, which is MOST_CHOSEN of arguments.py, the witnesses are computed by themselves (witnesses.h), beyond
// with all channels (many_witnesses.h). Up to the second, rows are looked at together.
constexpr int kMostFew = 16, kVeryFew = 4;

struct Witnesses;

// One period of parameters, each an array as long as the period (padded to whole vectors) or one number, of the
// type that is computed in: float, or double for double x.
struct Period {
  const void* constant;
  const void* shift;
  const void* center;
  const void* gain;        // weight * scale
  const void* bias;
  const void* slope_gain;  // what grad_y and the function's slope are multiplied by to give grad_x
  const Witnesses* witnesses = nullptr;  // where they are few
  const void* term_gain = nullptr;       // where they are many: what u^2 has in the row's sum, 0 of other channels
};

// A row's few witnesses, in the period's type, each array kMostFew long. In the backward pass the period has a gain of
// 0 where they stand: they are computed by themselves.
struct Witnesses {
  int count;
  std::int64_t channel[kMostFew];  // in order, and then the first again
  const void* gain;    // g, the weight of each square; 0 where there is no witness
  const void* others;  // kMostFew rows: 1 where a witness is in another's sum, else 0
  Period columns;      // the parameters of the witnesses' channels
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
// one constant; several. The same three of rows, with few witnesses, and with many, where there may be a centre of 0.
enum Layout { kRun = 0, kRowsPlain = 1, kRowsOneConstant = 2, kRows = 3, kFewLayouts = 3, kManyLayouts = 6, kLayouts = 10 };

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
