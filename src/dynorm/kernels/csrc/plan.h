// One call of the family: its tensors, and the two passes that divide it over kernels and threads.
#pragma once

#include <cstdint>

#include "types.h"

namespace dynorm {

// A parameter, or the gradient of one. Absent where data is null.
struct Numbers {
  void* data;
  Dtype dtype;
};

// Order of the parameters, and of their gradients: two of one number, two of one per channel, and one per token.
enum Role { kConstant = 0, kShift, kWeight, kBias, kToken, kRoles };

// y = weight * scale * f(x) + bias for each row of `channels` numbers. A token's number is added to beta: only DyISRU
// takes them.
struct Problem {
  Function function;
  // The constant is log(beta), for DyISRU and the linear map, whose slope is then 1 / sqrt(beta).
  bool logarithmic;
  Dtype dtype;
  std::int64_t rows, channels;
  double scale;
  const void* x;
  Numbers parameters[kRoles];
};

void forward(const Kernels& kernels, const Problem& problem, void* y);

// grad_x may be null; so may the data of every gradient.
void backward(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
              const Numbers (&gradients)[kRoles]);

// torch's own pool of threads, by the address of torch_parallel_for in its C interface; none: one thread.
using ParallelBody = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain, ParallelBody body,
                                     void* context);
void set_parallel_for(ParallelFor function);

}  // namespace dynorm
