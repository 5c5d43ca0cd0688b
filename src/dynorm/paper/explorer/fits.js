// Least squares with one constant.

/**
 * The constant with which a family comes closest to the points, to the last bits; null where there is none, because the
 * error falls all the way to a constant of 0 or infinity. Mirror images of the points would change nothing: the
 * functions are odd.
 */
function fit(family, x, y, channels) {
  const { power, shape, slope } = FAMILIES[family];
  const scale = bound(channels);
  // On the bound itself, as always with two channels, a steeper function is always better.
  if (y.every((value) => Math.abs(value) > scale * (1 - 1e-12))) return null;
  const error = (k, i) => scale * shape(k * x[i]) - y[i];
  const cost = (w) => sum(x.map((_, i) => error(Math.exp(w), i) ** 2));
  const gradient = (w) => {
    const k = Math.exp(w);
    return sum(x.map((value, i) => error(k, i) * value * slope(k * value)));
  };
  const start = -Math.log(Math.max(...x.map(Math.abs)));
  const lowest = lowestOnGrid(cost, start - GRID.below, start + GRID.above, GRID.step);
  if (lowest === null) return null;
  const w = risingZero(gradient, lowest - GRID.step, lowest + GRID.step);
  return w === null ? null : Math.exp(power * w);
}

/** The search in log k, from 0 at a function that bends where the largest point lies. */
const GRID = { below: 9, above: 18, step: 0.25 };

/** The grid point with the lowest cost, or null where that is the first or the last. */
function lowestOnGrid(cost, low, high, step) {
  const count = Math.round((high - low) / step);
  const costs = Array.from({ length: count + 1 }, (_, i) => cost(low + i * step));
  const best = costs.indexOf(Math.min(...costs));
  return best <= 0 || best === count ? null : low + best * step;
}

/** Where a function that is negative at low and positive at high is 0, by bisection; null where its signs differ. */
function risingZero(f, low, high) {
  if (!(f(low) < 0 && f(high) > 0)) return null;
  for (;;) {
    const middle = (low + high) / 2;
    if (middle <= low || middle >= high) return middle;
    if (f(middle) < 0) low = middle;
    else high = middle;
  }
}
