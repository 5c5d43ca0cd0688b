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
// Rows added in float before they go to double; chunks are of a multiple of the rows that kernels take side by side.
constexpr std::int64_t kRowsInFloat = 128, kMostSideBySide = 4;
// Larger outputs do not fit the cache, so they need not pass through it.
constexpr std::int64_t kStreamedBytes = std::int64_t{16} << 20;
constexpr double kPi = 3.141592653589793;

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

enum Place { kAtConstant, kAtShift, kAtCenter, kAtGain, kAtBias, kAtSlopeGain, kPlaces };

// The parameters in the type that is computed in, laid out for the kernels.
template <class Number>
struct Plan {
  const Problem& problem;
  int function;
  bool constants_differ, mixed;
  std::int64_t period;  // elements of a period, or of a run
  Number* at[kPlaces];  // one number a channel; of the first three maybe one in all
  Number* term_gain;    // of each channel, where there are many witnesses
  Witnesses witnesses;
  int given_as[kMostFew];  // the places of the few witnesses, which are in order here, in the problem
  // The few witnesses' parameters, their gains, and who is in whose sum.
  alignas(64) Number columns[kPlaces + 1 + kMostFew][kMostFew];

  Plan(const Problem& given, bool backward) : problem(given), function(given.function) {
    const std::int64_t together = given.channels * given.inner;
    mixed = given.inner == 1 || together <= kLongestMixed;
    period = !mixed ? given.inner : given.witnesses > 0 ? given.channels : whole_vectors(together);
    const Numbers* p = given.parameters;
    constants_differ = p[kConstant].per_channel || p[kShift].per_channel || p[kCenter].per_channel;
    static thread_local Buffer<Number> buffer;
    // The last vector is read whole.
    const std::int64_t padded = round_up(given.channels, kWidest);
    Number* start = buffer.of((kPlaces + 1) * padded);
    for (int place = 0; place < kPlaces; ++place) at[place] = start + place * padded;
    term_gain = start + kPlaces * padded;
    read_constants(constants_differ ? given.channels : 1, backward);
    read_affine(padded, backward);
    if (has_few()) gather_witnesses(backward);
    if (has_many()) spread_gains(padded);
  }

  // A period of whole vectors, so that only the last row has a rest; and not too short. It may hold several tokens: what
  // looks at one token at a time needs a period of its channels alone.
  std::int64_t whole_vectors(std::int64_t together) const {
    if (problem.size <= together) return together;
    const std::int64_t vectors = together * (kWidest / std::gcd(together, kWidest));
    if (vectors > 2 * kLongestMixed) return together;
    return vectors * ceil_divide(256, vectors);
  }

  void read_constants(std::int64_t count, bool backward) {
    const Numbers* p = problem.parameters;
    read_all(p[kConstant], count, 1, at[kAtConstant]);
    read_all(p[kShift], count, 0, at[kAtShift]);
    read_all(p[kCenter], count, 0, at[kAtCenter]);
    Number* constant = at[kAtConstant];
    for (std::int64_t c = 0; problem.logarithmic && c < count; ++c) {
      constant[c] = std::exp(problem.function == kLinear ? Number{-0.5} * constant[c] : constant[c]);
    }
    // One constant out of range, and all take the slow way: a question per element would cost more than is saved. The
    // slope without its constant is a cube, which leaves float's range sooner than f does.
    const Number most = backward ? 0x1p60 : 0x1p100;
    for (std::int64_t c = 0; problem.function == kDyisru && c < count; ++c) {
      if (!(constant[c] >= 0x1p-60 && constant[c] <= most)) function = kDyisruWide;
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

  void gather_witnesses(bool backward) {
    witnesses.count = problem.witnesses;
    Number* to[kPlaces];
    for (int place = 0; place < kPlaces; ++place) {
      to[place] = columns[place];
      std::fill(to[place], to[place] + kMostFew, Number{1});
    }
    Number *gain = columns[kPlaces], *others = columns[kPlaces + 1];
    Number log_gain[kMostFew];
    read_all(problem.log_gain, problem.witnesses, 0, log_gain);
    // In the order of a row.
    std::iota(given_as, given_as + problem.witnesses, 0);
    std::sort(given_as, given_as + problem.witnesses,
              [&](int a, int b) { return problem.witness[a] < problem.witness[b]; });
    std::fill(gain + problem.witnesses, gain + kMostFew, Number{0});
    std::fill(witnesses.channel, witnesses.channel + kMostFew, problem.witness[given_as[0]]);
    for (int i = 0; i < problem.witnesses; ++i) {
      const std::int64_t c = witnesses.channel[i] = problem.witness[given_as[i]];
      for (int place = 0; place < kPlaces; ++place) to[place][i] = at[place][place < kAtGain && !constants_differ ? 0 : c];
      gain[i] = std::exp(log_gain[given_as[i]]);
      for (int k = 0; backward && k < kMostFew; ++k) others[i * kMostFew + k] = i == k ? 0 : 1;
      if (backward) at[kAtGain][c] = 0;
    }
    witnesses.gain = gain;
    witnesses.others = others;
    witnesses.columns = as_period(to);
  }

  // Of many witnesses: a gain for every channel, 0 where it is no witness.
  void spread_gains(std::int64_t padded) {
    static thread_local Buffer<Number> buffer;
    Number* log_gain = buffer.of(problem.witnesses);
    read_all(problem.log_gain, problem.witnesses, 0, log_gain);
    std::fill(term_gain, term_gain + padded, Number{0});
    for (int i = 0; i < problem.witnesses; ++i) term_gain[problem.witness[i]] = std::exp(log_gain[i]);
  }

  Number constant_of(std::int64_t c) const { return at[kAtConstant][constants_differ ? c : 0]; }
  bool has_witnesses() const { return problem.witnesses > 0; }
  bool has_few() const { return has_witnesses() && !has_many(); }
  bool has_many() const { return problem.witnesses > kMostFew; }

  int layout() const {
    if (!mixed) return kRun;
    const int of_constants =
        constants_differ ? kRows : problem.parameters[kCenter].data == nullptr ? kRowsPlain : kRowsOneConstant;
    if (has_many()) return std::max<int>(of_constants, kRowsOneConstant) + kManyLayouts;
    return has_few() ? of_constants + kFewLayouts : of_constants;
  }

  // A period's worth of each parameter.
  Period rows() {
    if (period == problem.channels) {
      Period whole = as_period(at);
      if (has_few()) whole.witnesses = &witnesses;
      if (has_many()) whole.term_gain = term_gain;
      return whole;
    }
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

// What becomes of one of the sums: nothing, if no gradient is made of it; one number, weighted with the gains, if only
// gradients are that all channels share; else an array.
enum Kept { kNothing, kWeighted, kWhole };
struct Wanted {
  Kept kept[kWitnessSums] = {};
  int arrays = 0;
  bool gains = false;  // those of the witnesses

  // The gradients that are made of a sum.
  void add(Sum sum, const Numbers& gradient, bool shared) {
    if (gradient.data == nullptr || kept[sum] == kWhole) return;
    kept[sum] = shared && !gradient.per_channel ? kWeighted : kWhole;
    arrays += kept[sum] == kWhole;
  }
  bool any() const {
    return gains || std::any_of(kept, kept + kWitnessSums, [](Kept k) { return k != kNothing; });
  }
};

// Sums over all of x: of each channel, and over the channels with their gains.
struct Totals {
  std::vector<double> whole[kWitnessSums], gains;
  double weighted[kWitnessSums] = {};
};

// One call's backward pass over rows. A chunk of rows leaves few numbers, for one thread adds those of all chunks, and
// has to fetch what another has written.
template <class Number>
struct Rows {
  const BackwardRows kernel;
  const Problem& problem;
  const Period parameters;
  const void* grad_y;
  void* grad_x;
  const Wanted& wanted;
  const std::int64_t period, padded;
  const bool has_witnesses = problem.witnesses > 0;
  const int sums_of_each = has_witnesses ? kWitnessSums : kSums;
  const std::int64_t gains_at = sums_of_each * padded;
  // Few witnesses have a sum each, in their order; of many, every channel has one.
  const bool has_few = parameters.witnesses != nullptr;
  const std::int64_t sums_of_gains = has_few ? kMostFew : padded;
  const std::int64_t length = gains_at + (has_witnesses ? sums_of_gains : 0);

  // Rows begin to end; `whole` gets the arrays that are kept, one after another, and `weighted` the weighted sums.
  void chunk(std::int64_t begin, std::int64_t end, Number* whole, double* weighted, double* gains) const {
    static thread_local Buffer<Number> buffer;
    static thread_local std::vector<double> longer;
    const bool summed = wanted.any(), in_blocks = end - begin > kRowsInFloat;
    Number* sums = summed ? buffer.of(length) : nullptr;
    if (summed && in_blocks) longer.assign(length, 0.0);
    for (std::int64_t block = begin; block < end; block += kRowsInFloat) {
      if (summed) std::fill(sums, sums + length, Number{0});
      const std::int64_t stop = std::min(end, block + kRowsInFloat), last = std::min(stop, problem.size / period);
      if (last > block) run(block, last - block, period, sums);
      if (last < stop) run(last, 1, problem.size - last * period, sums);
      for (std::int64_t i = 0; summed && in_blocks && i < length; ++i) longer[i] += sums[i];
    }
    if (!summed) return;
    for (int k = 0; wanted.gains && k < problem.witnesses; ++k) {
      const std::int64_t i = gains_at + (has_few ? k : problem.witness[k]);
      gains[k] = in_blocks ? longer[i] : sums[i];
    }
    for (int s = 0; s < sums_of_each; ++s) {
      if (in_blocks) {
        keep(s, longer.data() + s * padded, whole, weighted);
      } else {
        keep(s, sums + s * padded, whole, weighted);
      }
      if (wanted.kept[s] == kWhole) whole += padded;
    }
  }

 private:
  void run(std::int64_t row, std::int64_t rows, std::int64_t n, Number* sums) const {
    const std::int64_t at = row * period * size_of(problem.dtype);
    kernel(offset(problem.x, at), offset(grad_y, at), offset(grad_x, at), rows, period, n, parameters, sums, padded);
  }

  template <class Longer>
  void keep(int s, const Longer* sum, Number* whole, double* weighted) const {
    const Number* gain = static_cast<const Number*>(parameters.gain);
    if (wanted.kept[s] == kWhole) {
      for (std::int64_t i = 0; i < period; ++i) whole[i] = static_cast<Number>(sum[i]);
    } else if (wanted.kept[s] == kWeighted) {
      weighted[s] = sum_of(period, [&](std::int64_t i) {
        // With witnesses the gain is in the terms.
        return has_witnesses ? sum[i] : static_cast<double>(gain[i]) * sum[i];
      });
    }
  }
};

// Into how many chunks rows are divided: few, because the chunks' sums are added by one thread, but at least eight
// where there is work for eight; an even number.
std::int64_t chunks_of(std::int64_t size) {
  const std::int64_t pieces = ceil_divide(size, kPiece);
  if (pieces < 2) return 1;
  return std::min(kMostChunks, round_up(std::max(std::min<std::int64_t>(8, pieces), pieces / 4), 4));
}

template <class Number>
Totals backward_rows(const Kernels& kernels, Plan<Number>& plan, const void* grad_y, void* grad_x,
                     const Wanted& wanted) {
  const Problem& problem = plan.problem;
  const std::int64_t period = plan.period, padded = round_up(period, kWidest), channels = problem.channels;
  const std::int64_t rows = ceil_divide(problem.size, period);
  const std::int64_t chunk = round_up(ceil_divide(rows, chunks_of(problem.size)), kMostSideBySide);
  const std::int64_t chunks = rows == 0 ? 0 : ceil_divide(rows, chunk), each = wanted.arrays * padded;
  // Of this thread, though others write to it: a new one would be new pages for each call.
  static thread_local Buffer<Number> buffer;
  Number* whole = buffer.of(chunks * each);
  double weighted[kMostChunks][kWitnessSums] = {};
  const int gains_per_chunk = wanted.gains ? problem.witnesses : 0;
  std::vector<double> gains(chunks * gains_per_chunk);
  const BackwardRows kernel = kernels.backward_rows[plan.function][problem.dtype][plan.layout()];
  const Rows<Number> work{kernel, problem, plan.rows(), grad_y, grad_x, wanted, period, padded};
  parallel(chunks, chunk * period, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      double* gains_here = gains.data() + k * gains_per_chunk;
      work.chunk(k * chunk, std::min(rows, (k + 1) * chunk), whole + k * each, weighted[k], gains_here);
    }
  });
  Totals totals;
  totals.gains.assign(gains_per_chunk, 0.0);
  for (std::int64_t k = 0; k < chunks; ++k) {
    for (int i = 0; i < gains_per_chunk; ++i) totals.gains[i] += gains[k * gains_per_chunk + i];
  }
  for (int s = 0, array = 0; s < work.sums_of_each; ++s) {
    for (std::int64_t k = 0; k < chunks; ++k) totals.weighted[s] += weighted[k][s];
    if (wanted.kept[s] != kWhole) continue;
    std::vector<double>& sum = totals.whole[s];
    sum.assign(period, 0.0);
    for (std::int64_t k = 0; k < chunks; ++k) {
      const Number* from = whole + k * each + array * padded;
      for (std::int64_t e = 0; e < period; ++e) sum[e] += from[e];
    }
    ++array;
    if (period == channels) continue;
    std::vector<double> folded(channels);
    for (std::int64_t e = 0, c = 0; e < period; c = c + 1 == channels ? 0 : c + 1) {
      for (std::int64_t i = 0; i < problem.inner; ++i) folded[c] += sum[e++];
    }
    sum = std::move(folded);
  }
  return totals;
}

template <class Number>
Totals backward_runs(const Kernels& kernels, Plan<Number>& plan, const void* grad_y, void* grad_x) {
  const Problem& problem = plan.problem;
  const std::int64_t width = size_of(problem.dtype), pieces = plan.pieces();
  const BackwardRun kernel = kernels.backward_run[plan.function][problem.dtype];
  std::vector<double> sums(pieces * kSums);
  parallel(pieces, std::min(problem.inner, kPiece), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t at = plan.start_of(piece) * width;
      kernel(offset(problem.x, at), offset(grad_y, at), offset(grad_x, at), plan.length_of(piece),
             plan.run(plan.channel_of(piece)), sums.data() + piece * kSums);
    }
  });
  Totals totals;
  for (int s = 0; s < kSums; ++s) {
    totals.whole[s].assign(problem.channels, 0.0);
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      totals.whole[s][plan.channel_of(piece)] += sums[piece * kSums + s];
    }
    totals.weighted[s] = sum_of(problem.channels, [&](std::int64_t c) {
      return static_cast<double>(plan.at[kAtGain][c]) * totals.whole[s][c];
    });
  }
  return totals;
}

// The gradients of the parameters from the sums.
template <class Number>
void derive(const Plan<Number>& plan, const Totals& totals, const Wanted& wanted, const Gradients& wanted_of) {
  const Problem& problem = plan.problem;
  const Numbers* gradients = wanted_of.parameters;
  const double sign = problem.function == kDyisru ? -0.5 : 1.0, halved = problem.function == kLinear ? -0.5 : 1.0;
  // What the gain times the sum is multiplied by.
  auto of_constant = [&](std::int64_t c) { return problem.logarithmic ? sign * halved * plan.constant_of(c) : sign; };
  auto of_shift = [&](std::int64_t) { return 1.0; };
  auto of_center = [&](std::int64_t c) {
    return plan.has_witnesses() || plan.function == kDyisruWide ? -1.0 : -double{plan.constant_of(c)};
  };
  // With witnesses the gain is in the sums.
  auto gain_of = [&](std::int64_t c) { return plan.has_witnesses() ? Number{1} : plan.at[kAtGain][c]; };
  auto put_constant = [&](Role role, Sum sum, auto factor) {
    const Numbers& to = gradients[role];
    if (to.data == nullptr) return;
    // A product may be -0, a sum is not.
    if (wanted.kept[sum] == kWeighted) return put(to, 0, 0.0 + factor(0) * totals.weighted[sum]);
    const std::vector<double>& whole = totals.whole[sum];
    put_all(to, problem.channels, [&](std::int64_t c) { return factor(c) * gain_of(c) * whole[c]; });
  };
  put_constant(kConstant, kSumMoment, of_constant);
  if (problem.function == kDerf) {
    put_constant(kShift, plan.has_witnesses() ? kSumShift : kSumSlope, of_shift);
  } else {
    put_all(gradients[kShift], problem.channels, [](std::int64_t) { return 0.0; });
  }
  put_constant(kCenter, kSumSlope, of_center);
  const std::vector<double>&value = totals.whole[kSumValue], &grad = totals.whole[kSumGrad];
  put_all(gradients[kWeight], problem.channels, [&](std::int64_t c) { return problem.scale * value[c]; });
  put_all(gradients[kBias], problem.channels, [&](std::int64_t c) { return grad[c]; });
  // The sums are those of the gradients by T, up to a number, and T is the sum of gains times squares.
  const double of_sum = problem.function == kDerf ? -2 / kPi : -0.5;
  for (int i = 0; wanted.gains && i < problem.witnesses; ++i) {
    const int place = plan.has_few() ? plan.given_as[i] : i;
    const double gain = plan.has_few() ? plan.columns[kPlaces][i] : plan.term_gain[problem.witness[i]];
    put(wanted_of.log_gain, place, 0.0 + of_sum * gain * totals.gains[i]);
  }
}

template <class Number>
void backward_as(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
                 const Gradients& wanted_of) {
  Plan<Number> plan(problem, true);
  Wanted wanted;
  const Numbers* gradients = wanted_of.parameters;
  wanted.add(kSumGrad, gradients[kBias], false);
  wanted.add(kSumValue, gradients[kWeight], false);
  wanted.add(kSumMoment, gradients[kConstant], !plan.constants_differ);
  const Sum of_shift = plan.has_witnesses() ? kSumShift : kSumSlope;
  if (problem.function == kDerf) wanted.add(of_shift, gradients[kShift], !plan.constants_differ);
  wanted.add(kSumSlope, gradients[kCenter], !plan.constants_differ);
  wanted.gains = plan.has_witnesses() && wanted_of.log_gain.data != nullptr;
  const Totals totals = plan.mixed ? backward_rows(kernels, plan, grad_y, grad_x, wanted)
                                   : backward_runs(kernels, plan, grad_y, grad_x);
  derive(plan, totals, wanted, wanted_of);
}

}  // namespace

void set_parallel_for(ParallelFor function) { parallel_for_of_torch = function; }

void forward(const Kernels& kernels, const Problem& problem, void* y) {
  if (problem.size == 0) return;
  problem.dtype == kFloat64 ? forward_as<double>(kernels, problem, y) : forward_as<float>(kernels, problem, y);
}

void backward(const Kernels& kernels, const Problem& problem, const void* grad_y, void* grad_x,
              const Gradients& gradients) {
  problem.dtype == kFloat64 ? backward_as<double>(kernels, problem, grad_y, grad_x, gradients)
                            : backward_as<float>(kernels, problem, grad_y, grad_x, gradients);
}

}  // namespace dynorm
