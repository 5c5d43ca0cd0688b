#include "plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "numbers.h"

namespace dynorm {
namespace {

// Fewer elements than this are not worth a second thread.
constexpr std::int64_t kGrain = 32768;
// Rows whose sums are taken are divided into chunks of about this many elements; never by the number of threads, so that
// sums do not depend on it.
constexpr std::int64_t kPiece = 65536;
constexpr std::int64_t kMostChunks = 64;
// Rows added in float before they go to double; chunks are of a multiple of the rows that kernels take side by side.
constexpr std::int64_t kRowsInFloat = 128, kMostSideBySide = 4;
// Larger outputs do not fit the cache, so they need not pass through it. From the second size on glibc maps new pages for
// each, and these are in the cache when they have been zeroed: past it they would take 7 % longer.
constexpr std::int64_t kStreamedBytes = std::int64_t{16} << 20, kMappedBytes = std::int64_t{32} << 20;

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

// Memory for one call that is kept for the next one of the same thread. A vector across two lines of the cache would take
// twice the time.
template <class Number>
class Buffer {
 public:
  Number* of(std::int64_t size) {
    constexpr std::uintptr_t kLine = 64;
    if (size > size_) {
      numbers_.reset(new Number[size + kLine / sizeof(Number)]);
      size_ = size;
    }
    const auto start = reinterpret_cast<std::uintptr_t>(numbers_.get());
    return reinterpret_cast<Number*>((start + kLine - 1) / kLine * kLine);
  }

 private:
  std::unique_ptr<Number[]> numbers_;
  std::int64_t size_ = 0;
};

// Whether DyISRU's fast way covers a constant. The slope without its constant is a cube, which leaves float's range
// sooner than f does.
template <class Number>
bool is_usual(Number constant, bool backward) {
  return constant >= 0x1p-60 && constant <= (backward ? 0x1p60 : 0x1p100);
}

enum Place { kAtGain, kAtBias, kAtSlopeGain, kPlaces };

// The parameters in the type that is computed in, laid out for the kernels.
template <class Number>
struct Plan {
  const Problem& problem;
  const bool backward;
  int function;
  std::int64_t padded;  // the last vector of a row is read whole
  Number constant, shift;
  Number* at[kPlaces];

  Plan(const Problem& given, bool is_backward) : problem(given), backward(is_backward), function(given.function) {
    padded = round_up(given.channels, kWidest);
    static thread_local Buffer<Number> buffer;
    Number* start = buffer.of(kPlaces * padded);
    for (int place = 0; place < kPlaces; ++place) at[place] = start + place * padded;
    read_constants();
    read_affine();
  }

  void read_constants() {
    read_all(problem.parameters[kConstant], 1, 1, &constant);
    read_all(problem.parameters[kShift], 1, 0, &shift);
    if (problem.logarithmic) constant = std::exp(problem.function == kLinear ? Number{-0.5} * constant : constant);
    if (problem.function == kDyisru && !is_usual(constant, backward)) function = kDyisruWide;
  }

  void read_affine() {
    const std::int64_t channels = problem.channels;
    Number* gain = at[kAtGain];
    read_all(problem.parameters[kWeight], channels, 1, gain);
    // -0 leaves the sign of a zero alone.
    read_all(problem.parameters[kBias], channels, -0.0, at[kAtBias]);
    const Number scale = static_cast<Number>(problem.scale);
    for (std::int64_t c = 0; c < channels; ++c) gain[c] *= scale;
    if (backward) set_slope_gain(function, constant, at[kAtSlopeGain]);
    for (std::int64_t c = channels; c < padded; ++c) {
      for (Number* place : at) place[c] = 1;
    }
  }

  // The wide DyISRU's slope has its constant in it.
  void set_slope_gain(int of, Number factor, Number* slope_gain) const {
    const Number* gain = at[kAtGain];
    for (std::int64_t c = 0; c < problem.channels; ++c) slope_gain[c] = of == kDyisruWide ? gain[c] : gain[c] * factor;
  }

  bool has_tokens() const { return problem.parameters[kToken].data != nullptr; }
  Row row() const { return {&constant, &shift, at[kAtGain], at[kAtBias], at[kAtSlopeGain]}; }
};

// DyISRU's parameters for one token, whose number T is added to beta.
template <class Number>
struct Token {
  const Plan<Number>& plan;
  int function = kDyisru;
  Number beta = 1;
  Number* slope_gain;

  explicit Token(const Plan<Number>& given) : plan(given) {
    static thread_local Buffer<Number> buffer;
    slope_gain = buffer.of(plan.padded);
    std::fill(slope_gain, slope_gain + plan.padded, Number{1});
  }

  void set(std::int64_t token) {
    const double total = number_at(plan.problem.parameters[kToken], token);
    // An infinite beta has no slope, but its quotients would be NaN.
    const Number sum = static_cast<Number>(plan.constant + total), largest = std::numeric_limits<Number>::max();
    beta = plan.backward && sum > largest ? largest : sum;
    function = is_usual(beta, plan.backward) ? kDyisru : kDyisruWide;
    if (plan.backward) plan.set_slope_gain(function, beta, slope_gain);
  }

  Row row() const {
    Row row = plan.row();
    row.constant = &beta;
    row.slope_gain = slope_gain;
    return row;
  }

  // The gradient of T from the sums of the token's row.
  double gradient(const Number* sums) const {
    const Number *gain = plan.at[kAtGain], *moment = sums + kSumMoment * plan.padded;
    double sum = 0;
    for (std::int64_t c = 0; c < plan.problem.channels; ++c) sum += gain[c] * moment[c];
    return -0.5 * sum;
  }
};

const char* offset(const void* p, std::int64_t bytes) { return static_cast<const char*>(p) + bytes; }
char* offset(void* p, std::int64_t bytes) { return p == nullptr ? nullptr : static_cast<char*>(p) + bytes; }

template <class Number>
void forward_as(const Kernels& kernels, const Problem& problem, void* y) {
  const Plan<Number> plan(problem, false);
  const std::int64_t channels = problem.channels, row_bytes = channels * size_of(problem.dtype);
  const bool aligned = reinterpret_cast<std::uintptr_t>(y) % 64 == 0 && row_bytes % 64 == 0;
  const std::int64_t bytes = problem.rows * row_bytes;
  const bool streamed = aligned && bytes >= kStreamedBytes && bytes < kMappedBytes;
  auto run = [&](int function, std::int64_t begin, std::int64_t end, const Row& row) {
    const Forward kernel = kernels.forward[function][problem.dtype];
    const std::int64_t at = begin * row_bytes;
    kernel(offset(problem.x, at), offset(y, at), end - begin, channels, row, streamed);
  };
  parallel(problem.rows, channels, [&](std::int64_t begin, std::int64_t end) {
    if (!plan.has_tokens()) return run(plan.function, begin, end, plan.row());
    Token<Number> token(plan);
    for (std::int64_t i = begin; i < end; ++i) {
      token.set(i);
      run(token.function, i, i + 1, token.row());
    }
  });
}

using Totals = std::vector<double>[kSums];

// The sums that gradients are made of.
struct Wanted {
  bool total[kSums];

  Wanted(const Problem& problem, const Numbers (&gradients)[kRoles]) {
    total[kSumGrad] = gradients[kBias].data != nullptr;
    total[kSumValue] = gradients[kWeight].data != nullptr;
    total[kSumMoment] = gradients[kConstant].data != nullptr || gradients[kToken].data != nullptr;
    total[kSumShift] = problem.function == kDerf && gradients[kShift].data != nullptr;
  }
  bool any() const { return std::find(total, total + kSums, true) != total + kSums; }
};

// Into how many chunks rows are divided: few, because the chunks' sums are added by one thread, but at least eight
// where there is work for eight; an even number.
std::int64_t chunks_of(std::int64_t size) {
  const std::int64_t pieces = ceil_divide(size, kPiece);
  if (pieces < 2) return 1;
  return std::min(kMostChunks, round_up(std::max(std::min<std::int64_t>(8, pieces), pieces / 4), 4));
}

template <class Number>
struct Backwards {
  const Kernels& kernels;
  const Plan<Number>& plan;
  const void* grad_y;
  void* grad_x;
  const Numbers& grad_token;
  const Wanted wanted;
  const std::int64_t padded = plan.padded;

  // Rows that share their parameters, and their sums, kSums arrays; null if none is wanted.
  void run(int function, std::int64_t begin, std::int64_t end, const Row& row, Number* sums) const {
    const Problem& problem = plan.problem;
    const Backward kernel = kernels.backward[function][problem.dtype];
    const std::int64_t at = begin * problem.channels * size_of(problem.dtype);
    if (sums != nullptr) std::fill(sums, sums + kSums * padded, Number{0});
    kernel(offset(problem.x, at), offset(grad_y, at), offset(grad_x, at), end - begin, problem.channels, row, sums,
           padded);
  }

  // Calls body(begin, end, sums) for every `step` rows; adds the sums in double, and puts the totals in `whole`.
  template <class Body>
  void add_up(std::int64_t begin, std::int64_t end, std::int64_t step, Number* whole, const Body& body) const {
    static thread_local Buffer<Number> sums_buffer;
    static thread_local Buffer<double> totals_buffer;
    const std::int64_t size = whole == nullptr ? 0 : kSums * padded;
    Number* sums = whole == nullptr ? nullptr : sums_buffer.of(size);
    double* totals = totals_buffer.of(size);
    std::fill(totals, totals + size, 0.0);
    for (; begin < end; begin += step) {
      body(begin, std::min(end, begin + step), sums);
      for (std::int64_t i = 0; i < size; ++i) totals[i] += sums[i];
    }
    for (std::int64_t i = 0; i < size; ++i) whole[i] = static_cast<Number>(totals[i]);
  }

  // Rows begin to end, whose sums go to `whole`, kSums arrays; null if none is wanted.
  void chunk(std::int64_t begin, std::int64_t end, Number* whole) const {
    auto rows = [&](std::int64_t from, std::int64_t to, Number* sums) { run(plan.function, from, to, plan.row(), sums); };
    if (plan.has_tokens()) {
      Token<Number> token(plan);
      add_up(begin, end, 1, whole, [&](std::int64_t i, std::int64_t next, Number* sums) {
        token.set(i);
        run(token.function, i, next, token.row(), sums);
        if (grad_token.data != nullptr) put(grad_token, i, token.gradient(sums));
      });
    } else if (whole == nullptr || end - begin <= kRowsInFloat) {
      rows(begin, end, whole);
    } else {
      add_up(begin, end, kRowsInFloat, whole, rows);
    }
  }
};

// The gradients of the parameters from the totals.
template <class Number>
void derive(const Plan<Number>& plan, const Totals& totals, const Numbers (&gradients)[kRoles]) {
  const Problem& problem = plan.problem;
  const std::int64_t channels = problem.channels;
  const Number* gain = plan.at[kAtGain];
  auto sum_over = [&](const std::vector<double>& total) {
    return sum_of(channels, [&](std::int64_t c) { return gain[c] * total[c]; });
  };
  if (gradients[kConstant].data != nullptr) {
    // The gradient of the stored constant is this times the moment: of a square root, and of a logarithm.
    const double of_root = problem.function == kDyisru ? -0.5 : 1, of_log = problem.function == kLinear ? -0.5 : 1;
    const double stored = problem.logarithmic ? of_log * plan.constant : 1;
    put(gradients[kConstant], 0, of_root * stored * sum_over(totals[kSumMoment]));
  }
  if (gradients[kShift].data != nullptr) {
    put(gradients[kShift], 0, problem.function == kDerf ? sum_over(totals[kSumShift]) : 0.0);
  }
  put_all(gradients[kWeight], channels, [&](std::int64_t c) { return problem.scale * totals[kSumValue][c]; });
  put_all(gradients[kBias], channels, [&](std::int64_t c) { return totals[kSumGrad][c]; });
}

template <class Number>
void backward_as(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
                 const Numbers (&gradients)[kRoles]) {
  const Plan<Number> plan(problem, true);
  const Backwards<Number> work{kernels, plan, grad_y, grad_x, gradients[kToken], Wanted(problem, gradients)};
  const std::int64_t rows = problem.rows, channels = problem.channels, each = kSums * plan.padded;
  const std::int64_t chunk = round_up(ceil_divide(rows, chunks_of(rows * channels)), kMostSideBySide);
  const std::int64_t chunks = rows == 0 ? 0 : ceil_divide(rows, chunk);
  // Of this thread, though others write to it: a new one would be new pages for each call.
  static thread_local Buffer<Number> buffer;
  Number* whole = buffer.of(chunks * each);
  parallel(chunks, chunk * channels, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      work.chunk(k * chunk, std::min(rows, (k + 1) * chunk), work.wanted.any() ? whole + k * each : nullptr);
    }
  });
  Totals totals;
  for (int kind = 0; kind < kSums; ++kind) {
    if (!work.wanted.total[kind]) continue;
    totals[kind].assign(channels, 0.0);
    for (std::int64_t k = 0; k < chunks; ++k) {
      const Number* from = whole + k * each + kind * plan.padded;
      for (std::int64_t c = 0; c < channels; ++c) totals[kind][c] += from[c];
    }
  }
  derive(plan, totals, gradients);
}

}  // namespace

void set_parallel_for(ParallelFor function) { parallel_for_of_torch = function; }

void forward(const Kernels& kernels, const Problem& problem, void* y) {
  if (problem.rows == 0) return;
  problem.dtype == kFloat64 ? forward_as<double>(kernels, problem, y) : forward_as<float>(kernels, problem, y);
}

void backward(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
              const Numbers (&gradients)[kRoles]) {
  problem.dtype == kFloat64 ? backward_as<double>(kernels, problem, grad_y, grad_x, gradients)
                            : backward_as<float>(kernels, problem, grad_y, grad_x, gradients);
}

}  // namespace dynorm
