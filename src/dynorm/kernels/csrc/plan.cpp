#include "plan.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "numbers.h"

namespace dynorm {
namespace {

// Fewer elements than this are not worth a second thread.
constexpr std::int64_t kGrain = 32768;
// A channel's neighbours are laid out in one period up to this many elements; beyond, each channel is a run.
constexpr std::int64_t kLongestMixed = 4096;
// What a worker does at once of a long run, and of rows whose sums are taken; never the number of threads, so that
// sums do not depend on it.
constexpr std::int64_t kPiece = 65536;
constexpr std::int64_t kMostChunks = 64;
// Rows that share a load and a store of their sums; rows added in float before they go to double.
constexpr std::int64_t kRowsAtOnce = 16, kRowsInFloat = 128;
// Larger outputs do not fit the cache, so they need not pass through it.
constexpr std::int64_t kStreamedBytes = std::int64_t{16} << 20;

ParallelFor parallel_for_of_torch = nullptr;

std::int64_t ceil_divide(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }
std::int64_t round_up(std::int64_t n, std::int64_t to) { return ceil_divide(n, to) * to; }

// body(begin, end) over 0..count, in one piece where it is small.
template <class Body>
void parallel(std::int64_t count, std::int64_t elements_each, const Body& body) {
  const std::int64_t grain = std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, elements_each));
  if (count <= grain || parallel_for_of_torch == nullptr) {
    body(0, count);
    return;
  }
  auto call = [](std::int64_t begin, std::int64_t end, void* context) {
    (*static_cast<const Body*>(context))(begin, end);
  };
  // Only memory can run out in a body.
  if (parallel_for_of_torch(0, count, grain, call, const_cast<Body*>(&body)) != 0) throw std::bad_alloc();
}

// Memory for one call that is kept for the next one of the same thread.
template <class Number>
class Buffer {
 public:
  Number* of(std::int64_t size) {
    if (size > size_) {
      numbers_.reset(new Number[size]);
      size_ = size;
    }
    return numbers_.get();
  }

 private:
  std::unique_ptr<Number[]> numbers_;
  std::int64_t size_ = 0;
};

enum Place { kAtConstant, kAtShift, kAtCenter, kAtGain, kAtBias, kAtSlopeGain, kPlaces };

// The parameters in the type that is computed in, laid out for the kernels.
template <class Number>
struct Plan {
  const Problem& problem;
  int function;
  bool constants_differ, mixed;
  std::int64_t period;  // elements of a period, or of a run
  Number* at[kPlaces];  // one number a channel; of the first three maybe one in all

  Plan(const Problem& given, bool backward) : problem(given), function(given.function) {
    const std::int64_t together = given.channels * given.inner;
    mixed = given.inner == 1 || together <= kLongestMixed;
    period = mixed ? whole_vectors(together) : given.inner;
    const Numbers* p = given.parameters;
    constants_differ = p[kConstant].per_channel || p[kShift].per_channel || p[kCenter].per_channel;
    static thread_local Buffer<Number> buffer;
    // The last vector is read whole.
    const std::int64_t padded = round_up(given.channels, kWidest);
    Number* start = buffer.of(kPlaces * padded);
    for (int place = 0; place < kPlaces; ++place) at[place] = start + place * padded;
    read_constants(constants_differ ? given.channels : 1);
    read_affine(padded, backward);
  }

  // A period of whole vectors, so that only the last row has a rest; and not too short.
  std::int64_t whole_vectors(std::int64_t together) const {
    if (problem.size <= together) return together;
    const std::int64_t vectors = together * (kWidest / std::gcd(together, kWidest));
    if (vectors > 2 * kLongestMixed) return together;
    return vectors * ceil_divide(256, vectors);
  }

  void read_constants(std::int64_t count) {
    const Numbers* p = problem.parameters;
    read_all(p[kConstant], count, 1, at[kAtConstant]);
    read_all(p[kShift], count, 0, at[kAtShift]);
    read_all(p[kCenter], count, 0, at[kAtCenter]);
    Number* constant = at[kAtConstant];
    for (std::int64_t c = 0; problem.logarithmic && c < count; ++c) {
      constant[c] = std::exp(problem.function == kLinear ? Number{-0.5} * constant[c] : constant[c]);
    }
    for (std::int64_t c = 0; problem.function == kDyisru && c < count; ++c) {
      if (!(constant[c] >= 0x1p-60 && constant[c] <= 0x1p100)) function = kDyisruWide;
    }
  }

  void read_affine(std::int64_t padded, bool backward) {
    const std::int64_t channels = problem.channels;
    Number *gain = at[kAtGain], *bias = at[kAtBias], *slope_gain = at[kAtSlopeGain];
    read_all(problem.parameters[kWeight], channels, 1, gain);
    // -0 leaves the sign of a zero alone.
    read_all(problem.parameters[kBias], channels, -0.0, bias);
    const Number scale = static_cast<Number>(problem.scale);
    for (std::int64_t c = 0; c < channels; ++c) gain[c] *= scale;
    // The wide DyISRU's slope has its constant in it.
    for (std::int64_t c = 0; backward && c < channels; ++c) {
      slope_gain[c] = function == kDyisruWide ? gain[c] : gain[c] * constant_of(c);
    }
    for (std::int64_t c = channels; c < padded; ++c) {
      for (Number* place : at) place[c] = 1;
    }
  }

  Number constant_of(std::int64_t c) const { return at[kAtConstant][constants_differ ? c : 0]; }

  Layout layout() const {
    if (!mixed) return kRun;
    if (constants_differ) return kRows;
    return problem.parameters[kCenter].data == nullptr ? kRowsPlain : kRowsOneConstant;
  }

  // A period's worth of each parameter.
  Period rows() {
    if (period == problem.channels) return as_period(at);
    static thread_local Buffer<Number> buffer;
    const std::int64_t padded = round_up(period, kWidest);
    Number* start = buffer.of(kPlaces * padded);
    Number* laid_out[kPlaces];
    for (int place = 0; place < kPlaces; ++place) {
      Number* to = laid_out[place] = start + place * padded;
      if (place < kAtGain && !constants_differ) {
        *to = *at[place];
        continue;
      }
      std::int64_t e = 0;
      for (std::int64_t c = 0; e < period; c = c + 1 == problem.channels ? 0 : c + 1) {
        for (std::int64_t i = 0; i < problem.inner; ++i) to[e++] = at[place][c];
      }
      while (e < padded) to[e++] = 1;
    }
    return as_period(laid_out);
  }

  Period run(std::int64_t c) const {
    const std::int64_t k = constants_differ ? c : 0;
    return {at[kAtConstant] + k, at[kAtShift] + k, at[kAtCenter] + k, at[kAtGain] + c, at[kAtBias] + c,
            at[kAtSlopeGain] + c};
  }

  static Period as_period(Number* const from[kPlaces]) {
    return {from[0], from[1], from[2], from[3], from[4], from[5]};
  }

  // The pieces of all runs: each belongs to one channel.
  std::int64_t pieces_of_run() const { return ceil_divide(problem.inner, kPiece); }
  std::int64_t pieces() const { return problem.size / problem.inner * pieces_of_run(); }
  std::int64_t channel_of(std::int64_t piece) const { return piece / pieces_of_run() % problem.channels; }
  std::int64_t start_of(std::int64_t piece) const {
    return piece / pieces_of_run() * problem.inner + piece % pieces_of_run() * kPiece;
  }
  std::int64_t length_of(std::int64_t piece) const {
    return std::min(kPiece, problem.inner - piece % pieces_of_run() * kPiece);
  }
};

const char* offset(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
char* offset(void* p, std::int64_t bytes) { return p == nullptr ? nullptr : static_cast<char*>(p) + bytes; }

template <class Number>
void forward_as(const Kernels& kernels, const Problem& problem, void* y) {
  Plan<Number> plan(problem, false);
  const std::int64_t width = size_of(problem.dtype), period = plan.period;
  const Forward kernel = kernels.forward[plan.function][problem.dtype][plan.layout()];
  const bool aligned = reinterpret_cast<std::uintptr_t>(y) % 64 == 0 && period * width % 64 == 0;
  const bool streamed = aligned && problem.size * width >= kStreamedBytes;
  if (plan.mixed) {
    const Period parameters = plan.rows();
    parallel(ceil_divide(problem.size, period), period, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t at = begin * period, count = std::min(end * period, problem.size) - at;
      kernel(offset(problem.x, at * width), offset(y, at * width), count, period, parameters, streamed);
    });
    return;
  }
  parallel(plan.pieces(), std::min(problem.inner, kPiece), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t at = plan.start_of(piece) * width;
      const std::int64_t count = plan.length_of(piece);
      kernel(offset(problem.x, at), offset(y, at), count, count, plan.run(plan.channel_of(piece)), streamed);
    }
  });
}

// Sums of each channel, in double: kSums arrays of `channels`.
using ChannelSums = std::vector<double>;

// One chunk of rows; `total` gets kSums arrays of `padded` doubles, where sums are wanted.
template <class Number>
void backward_chunk(const BackwardRows kernel, const Problem& problem, const Period& parameters, std::int64_t period,
                    const void* grad_y, void* grad_x, std::int64_t begin, std::int64_t end, std::int64_t padded,
                    double* total) {
  static thread_local std::vector<Number> sums;
  const std::int64_t width = size_of(problem.dtype);
  auto run = [&](std::int64_t row, std::int64_t rows, std::int64_t n) {
    const std::int64_t at = row * period * width;
    kernel(offset(problem.x, at), offset(grad_y, at), offset(grad_x, at), rows, period, n, parameters,
           total == nullptr ? nullptr : sums.data(), padded);
  };
  for (std::int64_t block = begin; block < end; block += kRowsInFloat) {
    if (total != nullptr) sums.assign(kSums * padded, Number{0});
    const std::int64_t stop = std::min(end, block + kRowsInFloat);
    for (std::int64_t row = block; row < stop; row += kRowsAtOnce) {
      const std::int64_t last = std::min(stop, row + kRowsAtOnce), whole = std::min(last, problem.size / period);
      if (whole > row) run(row, whole - row, period);
      if (whole < last) run(whole, 1, problem.size - whole * period);
    }
    if (total == nullptr) continue;
    if (block == begin) {
      std::copy(sums.begin(), sums.end(), total);
    } else {
      for (std::int64_t i = 0; i < kSums * padded; ++i) total[i] += sums[i];
    }
  }
}

// Into how many chunks rows are divided: few, because the chunks' sums are added by one thread, but at least eight
// where there is work for eight; an even number.
std::int64_t chunks_of(std::int64_t size) {
  const std::int64_t pieces = ceil_divide(size, kPiece);
  if (pieces < 2) return 1;
  return std::min(kMostChunks, round_up(std::max(std::min<std::int64_t>(8, pieces), pieces / 4), 4));
}

template <class Number>
ChannelSums backward_rows(const Kernels& kernels, Plan<Number>& plan, const void* grad_y, void* grad_x, bool sums) {
  const Problem& problem = plan.problem;
  const std::int64_t period = plan.period, padded = round_up(period, kWidest);
  const std::int64_t rows = ceil_divide(problem.size, period);
  const std::int64_t chunk = round_up(ceil_divide(rows, chunks_of(problem.size)), kRowsAtOnce);
  const std::int64_t chunks = rows == 0 ? 0 : ceil_divide(rows, chunk), each = kSums * padded;
  // Of this thread, though others write to it: a new one would be new pages for each call.
  static thread_local Buffer<double> buffer;
  double* totals = sums ? buffer.of(std::max<std::int64_t>(1, chunks) * each) : nullptr;
  const Period parameters = plan.rows();
  const BackwardRows kernel = kernels.backward_rows[plan.function][problem.dtype][plan.layout()];
  parallel(chunks, chunk * period, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      backward_chunk<Number>(kernel, problem, parameters, period, grad_y, grad_x, k * chunk,
                             std::min(rows, (k + 1) * chunk), padded, sums ? totals + k * each : nullptr);
    }
  });
  ChannelSums result(sums ? kSums * problem.channels : 0);
  if (!sums || chunks == 0) return result;
  for (std::int64_t k = 1; k < chunks; ++k) {
    for (std::int64_t i = 0; i < each; ++i) totals[i] += totals[k * each + i];
  }
  for (int s = 0; s < kSums; ++s) {
    double* to = result.data() + s * problem.channels;
    const double* from = totals + s * padded;
    for (std::int64_t e = 0, c = 0; e < period; c = c + 1 == problem.channels ? 0 : c + 1) {
      for (std::int64_t i = 0; i < problem.inner; ++i) to[c] += from[e++];
    }
  }
  return result;
}

template <class Number>
ChannelSums backward_runs(const Kernels& kernels, Plan<Number>& plan, const void* grad_y, void* grad_x) {
  const Problem& problem = plan.problem;
  const std::int64_t width = size_of(problem.dtype), pieces = plan.pieces();
  const BackwardRun kernel = kernels.backward_run[plan.function][problem.dtype];
  std::vector<double> totals(pieces * kSums);
  parallel(pieces, std::min(problem.inner, kPiece), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t at = plan.start_of(piece) * width;
      kernel(offset(problem.x, at), offset(grad_y, at), offset(grad_x, at), plan.length_of(piece),
             plan.run(plan.channel_of(piece)), totals.data() + piece * kSums);
    }
  });
  ChannelSums result(kSums * problem.channels);
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    for (int s = 0; s < kSums; ++s) {
      result[s * problem.channels + plan.channel_of(piece)] += totals[piece * kSums + s];
    }
  }
  return result;
}

// The gradients of one channel's parameters from its sums.
template <class Number>
void derive(const Plan<Number>& plan, const ChannelSums& sums, std::int64_t c, double gradients[kRoles]) {
  const Problem& problem = plan.problem;
  auto sum = [&](Sum which) { return sums[which * problem.channels + c]; };
  const double gain = plan.at[kAtGain][c], constant = plan.constant_of(c);
  double factor = problem.function == kDyisru ? -0.5 * gain : gain;
  if (problem.logarithmic) factor *= problem.function == kLinear ? -0.5 * constant : constant;
  gradients[kConstant] = factor * sum(kSumMoment);
  gradients[kShift] = problem.function == kDerf ? gain * sum(kSumSlope) : 0.0;
  gradients[kCenter] = -static_cast<double>(plan.at[kAtSlopeGain][c]) * sum(kSumSlope);
  gradients[kWeight] = problem.scale * sum(kSumValue);
  gradients[kBias] = sum(kSumGrad);
}

template <class Number>
void backward_as(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
                 const Numbers gradients[kRoles]) {
  Plan<Number> plan(problem, true);
  const bool wanted = std::any_of(gradients, gradients + kRoles, [](const Numbers& g) { return g.data != nullptr; });
  const ChannelSums sums = plan.mixed ? backward_rows(kernels, plan, grad_y, grad_x, wanted)
                                      : backward_runs(kernels, plan, grad_y, grad_x);
  if (!wanted) return;
  double whole[kRoles] = {};
  for (std::int64_t c = 0; c < problem.channels; ++c) {
    double here[kRoles];
    derive(plan, sums, c, here);
    for (int role = 0; role < kRoles; ++role) {
      whole[role] += here[role];
      if (gradients[role].data != nullptr && gradients[role].per_channel) put(gradients[role], c, here[role]);
    }
  }
  for (int role = 0; role < kRoles; ++role) {
    if (gradients[role].data != nullptr && !gradients[role].per_channel) put(gradients[role], 0, whole[role]);
  }
}

}  // namespace

void set_parallel_for(ParallelFor function) { parallel_for_of_torch = function; }

void forward(const Kernels& kernels, const Problem& problem, void* y) {
  if (problem.size == 0) return;
  problem.dtype == kFloat64 ? forward_as<double>(kernels, problem, y) : forward_as<float>(kernels, problem, y);
}

void backward(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
              const Numbers gradients[kRoles]) {
  problem.dtype == kFloat64 ? backward_as<double>(kernels, problem, grad_y, grad_x, gradients)
                            : backward_as<float>(kernels, problem, grad_y, grad_x, gradients);
}

}  // namespace dynorm
