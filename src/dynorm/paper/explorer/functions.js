// The mathematics: LayerNorm, leave-one-out statistics, the point-wise functions, and the annealing between them.
// The tests compare each function with its counterpart in dynorm.functional or dynorm.theory.

const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const meanAbsolute = (values) => mean(values.map(Math.abs));
const bound = (channels) => Math.sqrt(channels - 1);

/** Eq. 1 to 3, without eps, and eq. 5 and 6. */
function layerNorm(x) {
  const channels = x.length;
  const mu = mean(x);
  const centred = x.map((value) => value - mu);
  const sigma = Math.sqrt(mean(centred.map((value) => value * value)));
  const y = centred.map((value) => value / sigma);
  const factor = 1 / (channels * sigma);
  return { mu, sigma, y, factor, derivative: y.map((value) => factor * (channels - 1 - value * value)) };
}

/** Mean and biased variance of all channels but one. */
function momentsWithout(x, index) {
  const rest = x.filter((_, i) => i !== index);
  const middle = mean(rest);
  return { mean: middle, variance: mean(rest.map((value) => (value - middle) ** 2)) };
}

/** m_i and v_i of every channel in O(C); the outlier is left out of all sums, or small channels would drown in it. */
function leaveOneOut(x, outlier) {
  const others = x.length - 1;
  const rest = momentsWithout(x, outlier);
  const deviation = x.map((value) => value - rest.mean);
  const peak = deviation[outlier];
  const centre = deviation.map((d) => rest.mean + (peak - d) / others);
  // The change of the sum of squares when the outlier is added and channel i removed, as a product.
  const variance = deviation.map((d) => {
    const added = ((peak - d) * ((others - 1) * peak + (others + 1) * d)) / others;
    return Math.max(others * rest.variance + added, 0) / others;
  });
  return { centre, variance };
}

/** Eq. 14 as the paper writes it. */
function channelBeta(x, index) {
  const mu = mean(x);
  const squares = x.map((value) => (value - mu) ** 2);
  return sum(squares.filter((_, i) => i !== index)) - mean(squares);
}

/** Eq. 13: DyISRU around a centre. With m_i and C v_i it is LayerNorm itself. */
function softSign(x, centre, beta, scale) {
  const d = x - centre;
  return (scale * d) / Math.sqrt(beta + d * d);
}

/** Its derivative. */
function softSignSlope(x, centre, beta, scale) {
  const d = x - centre;
  return (scale * beta) / Math.pow(beta + d * d, 1.5);
}

/** The annealing from the exact norm (t = 0) to one DyISRU for all channels (t = 1), geometric in b. */
function path(x, centre, variance, beta, t) {
  const channels = x.length;
  return x.map((value, i) => {
    const own = Math.pow(channels * variance[i], 1 - t) * Math.pow(beta, t);
    return softSign(value, (1 - t) * centre[i], own, bound(channels));
  });
}

/** DyISRU with the outlier as a witness of gain 1: all other channels see its square beside their constant. */
function witnessed(x, outlier, beta) {
  const square = x[outlier] * x[outlier];
  return x.map((value, i) => softSign(value, 0, i === outlier ? beta : beta + square, bound(x.length)));
}

/** The error function, from a series of positive terms, in which nothing cancels. */
function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  let term = size;
  let total = size;
  for (let n = 1; term > total * 1e-17; n++) {
    term *= (2 * size * size) / (2 * n + 1);
    total += term;
  }
  return (x < 0 ? -1 : 1) * total * Math.exp(-size * size) * (2 / Math.sqrt(Math.PI));
}

/**
 * The point-wise functions as bound * shape(k x). The constant that the papers name is a power of k: alpha = k for DyT
 * and Derf, beta = 1 / k^2 for DyISRU.
 */
const FAMILIES = {
  dyt: { power: 1, shape: Math.tanh, slope: (u) => 1 / Math.cosh(u) ** 2 },
  derf: { power: 1, shape: erf, slope: (u) => (2 / Math.sqrt(Math.PI)) * Math.exp(-u * u) },
  dyisru: { power: -2, shape: (u) => u / Math.sqrt(1 + u * u), slope: (u) => Math.pow(1 + u * u, -1.5) },
};

/** A family with its constant and C given: value and derivative as functions of x. */
function curve(family, constant, channels) {
  const { power, shape, slope } = FAMILIES[family];
  const k = Math.pow(constant, 1 / power);
  const scale = bound(channels);
  return { value: (x) => scale * shape(k * x), slope: (x) => scale * k * slope(k * x) };
}
