// One call of the family: what comes in, and the two passes that divide it over kernels and threads.
#pragma once

#include <cstdint>

#include "types.h"

namespace dynorm {

// A parameter, or the gradient of one: `channels` numbers, or one. Absent where data is null.
struct Numbers {
  void* data;
  Dtype dtype;
  bool per_channel;
};

// Order of the parameters, and of their gradients.
enum Role { kConstant = 0, kShift = 1, kCenter = 2, kWeight = 3, kBias = 4, kRoles = 5 };

// y = weight * scale * f(x - center) + bias; the channel of element i is (i / inner) % channels.
struct Problem {
  Function function;
  // The constant is log(beta), for DyISRU and the linear map, whose slope is then 1 / sqrt(beta).
  bool logarithmic;
  Dtype dtype;
  std::int64_t size, channels, inner;
  double scale;
  const void* x;
  Numbers parameters[kRoles];
  // The witnesses' channels, each once, and the logarithms of their gains; only where inner is 1.
  int witnesses;
  const std::int64_t* witness;
  Numbers log_gain;
};

void forward(const Kernels& kernels, const Problem& problem, void* y);

// The gradients of the parameters, and of the witnesses' gains.
struct Gradients {
  Numbers parameters[kRoles];
  Numbers log_gain;
};

// grad_x may be null; so may the data of every gradient.
void backward(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
              const Gradients& gradients);

// torch's own pool of threads, by the address of torch_parallel_for in its C interface; none: one thread.
using ParallelBody = void (*)(std::int64_t begin, std::int64_t end, void* context);
using ParallelFor = std::int32_t (*)(std::int64_t begin, std::int64_t end, std::int64_t grain, ParallelBody body,
                                     void* context);
void set_parallel_for(ParallelFor function);

}  // namespace dynorm
