// From the reader's choices to everything that is shown. Nothing here touches the page.

/** Keeps the last result for as long as the arguments are the same. */
function remember(compute) {
  let known = null;
  let result;
  return (...values) => {
    if (known === null || values.some((value, i) => value !== known[i])) {
      result = compute(...values);
      known = values;
    }
    return result;
  };
}

/** The sample of eq. 16, its nine published outliers (eq. 17), the fits, and the closed form that needs none. */
const drawSample = remember((channels, sigma, seed) => {
  const x = new RandomState(seed).normals(channels).map((value) => sigma * value).sort();
  const last = channels - 1;
  const { mean: centre, variance } = momentsWithout(x, last);
  const outliers = [1, 2, 3, 4, 5, 6, 7, 8, 9].map((s) => published(x, s));
  const outputs = outliers.map((outlier) => outlier.y);
  const positions = outliers.map((outlier) => outlier.x);
  const fits = {};
  for (const family of Object.keys(FAMILIES)) fits[family] = fit(family, positions, outputs, channels);
  const closedBeta = channels * variance;
  const closedResiduals = positions.map((at, i) => softSign(at, centre, closedBeta, bound(channels)) - outputs[i]);
  return { x, centre, variance, closedBeta, fits, outliers, closedResidual: meanAbsolute(closedResiduals) };
});

/** LayerNorm of the sample's largest channel after S steps. */
function published(sample, steps) {
  const x = sample.slice();
  const last = x.length - 1;
  x[last] += STEP * steps;
  const norm = layerNorm(x);
  return { x: x[last], y: norm.y[last], slope: norm.derivative[last] };
}

/** The token with its outlier at S, and all that LayerNorm makes of it. */
const drawToken = remember((sample, steps) => {
  const x = sample.x.slice();
  const last = x.length - 1;
  x[last] += STEP * steps;
  const { centre, variance } = leaveOneOut(x, last);
  return { x, ...layerNorm(x), centre, variance, channelBeta: channelBeta(x, last) };
});

/** Whether LayerNorm is defined: not where the outlier has been moved onto channels that are all equal. */
function hasPicture(state) {
  return drawToken(drawSample(state.channels, state.sigma, state.seed), state.steps).sigma > 0;
}

/** The constants in numbers: a fit or the closed form where the reader asked for it; null where there is none. */
function constants(state, sample) {
  const number = (family, choice) => {
    const value = choice === "fit" ? sample.fits[family] : choice === "closed" ? sample.closedBeta : choice;
    return value > 0 && Number.isFinite(value) ? value : null;
  };
  return {
    dyt: number("dyt", state.alpha),
    derf: number("derf", state.derf),
    dyisru: number("dyisru", state.beta),
  };
}

/** Half the width of the view: everything that was and is drawn, or the sample without its outlier. */
function reach(state, sample) {
  const last = sample.x.length - 1;
  const bulk = Math.max(Math.abs(sample.x[0]), Math.abs(sample.x[Math.max(last - 1, 0)]));
  if (state.view === "sample") return roundUp(1.05 * bulk);
  const ends = [bulk, sample.outliers[0].x, sample.outliers[8].x, sample.x[last] + STEP * state.steps];
  return roundUp(1.06 * Math.max(...ends.map(Math.abs)));
}

/** The next number with one digit, or one and a half below 2. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  const step = value / unit < 2 ? unit / 5 : unit;
  return Math.ceil(value / step - 1e-9) * step;
}

const POINTS = 401;

/** The curves on an even grid: values, derivatives, and what is between them and LayerNorm. */
const drawCurves = remember((sample, half, dyt, derf, dyisru) => {
  const channels = sample.x.length;
  const x = Array.from({ length: POINTS }, (_, i) => half * ((2 * i) / (POINTS - 1) - 1));
  const scale = bound(channels);
  const value = { closed: x.map((at) => softSign(at, sample.centre, sample.closedBeta, scale)) };
  const slope = { closed: x.map((at) => softSignSlope(at, sample.centre, sample.closedBeta, scale)) };
  const residual = {};
  for (const [family, constant] of Object.entries({ dyt, derf, dyisru })) {
    const f = curve(family, constant, channels);
    value[family] = x.map(f.value);
    slope[family] = x.map(f.slope);
    residual[family] = value[family].map((y, i) => y - value.closed[i]);
  }
  return { x, value, slope, residual };
});

/** Function minus LayerNorm at the nine published outliers. */
function residualsAt(outliers, family, constant, channels) {
  const f = curve(family, constant, channels);
  return outliers.map(({ x, y }) => f.value(x) - y);
}

/** Everything that is shown for a state and its three constants in numbers. */
function compute(state, constant, half) {
  const sample = drawSample(state.channels, state.sigma, state.seed);
  const token = drawToken(sample, state.steps);
  const curves = drawCurves(sample, half ?? reach(state, sample), constant.dyt, constant.derf, constant.dyisru);
  const residuals = {};
  const atFit = {};
  for (const family of Object.keys(FAMILIES)) {
    residuals[family] = residualsAt(sample.outliers, family, constant[family], state.channels);
    const best = sample.fits[family];
    atFit[family] =
      best === null ? null : meanAbsolute(residualsAt(sample.outliers, family, best, state.channels));
  }
  const onPath = path(token.x, token.centre, token.variance, constant.dyisru, state.t);
  const pointwise = token.x.map(curve("dyisru", constant.dyisru, state.channels).value);
  const witness = witnessed(token.x, token.x.length - 1, constant.dyisru);
  return {
    state,
    sample,
    token,
    constant,
    curves,
    residuals,
    atFit,
    path: onPath,
    witness,
    witnessToLayerNorm: meanAbsolute(witness.map((y, i) => y - token.y[i])),
    pointwiseToLayerNorm: meanAbsolute(pointwise.map((y, i) => y - token.y[i])),
    toLayerNorm: meanAbsolute(onPath.map((y, i) => y - token.y[i])),
    toPointwise: meanAbsolute(onPath.map((y, i) => y - pointwise[i])),
  };
}

/** The numbers of a picture, to full precision, under the names that the table has; for tests and for the console. */
function numbersOf(picture) {
  const { state, sample, token, constant, residuals, atFit } = picture;
  const last = state.channels - 1;
  const residual = Object.fromEntries(Object.entries(residuals).map(([name, values]) => [name, meanAbsolute(values)]));
  return {
    x: Array.from(token.x),
    y: Array.from(token.y),
    derivative: Array.from(token.derivative),
    path: Array.from(picture.path),
    witness: Array.from(picture.witness),
    witnessToLayerNorm: picture.witnessToLayerNorm,
    pointwiseToLayerNorm: picture.pointwiseToLayerNorm,
    curves: picture.curves,
    outliers: sample.outliers,
    outlierX: token.x[last],
    outlierY: token.y[last],
    outlierSlope: token.derivative[last],
    mu: token.mu,
    sigma: token.sigma,
    factor: token.factor,
    leftOutMean: sample.centre,
    leftOutVariance: sample.variance,
    closedBeta: sample.closedBeta,
    channelBeta: token.channelBeta,
    leaveOneOutMean: Array.from(token.centre),
    leaveOneOutVariance: Array.from(token.variance),
    constant,
    fits: sample.fits,
    residual,
    residualAtFit: atFit,
    closedResidual: sample.closedResidual,
    toLayerNorm: picture.toLayerNorm,
    toPointwise: picture.toPointwise,
  };
}
