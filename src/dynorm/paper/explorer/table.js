// The numbers next to the plot.

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** Six digits; a power of ten where the number is tiny or huge. */
function format(value, digits = 6) {
  if (value === null) return "none";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    const [digitsPart, power] = value.toExponential(Math.min(digits, 3) - 1).split("e");
    const raised = [...power.replace("+", "")].map((sign) => SUPERSCRIPTS[sign]).join("");
    return `${digitsPart} × 10${raised}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

/** The table's columns are narrow: no more than seven signs, and ten for a power of ten. */
function formatNarrow(name, value) {
  if (name.includes("residual")) return format(value, value !== null && value < 1e-4 ? 2 : 3);
  return format(value, value !== null && value < 1 ? 4 : 5);
}

const NARROW = /residual|-(now|fit|again)$/;

/** Writes the numbers of a picture into the elements that are named after them. */
function fillTable(cells, picture) {
  const { token, sample, constant, state, residuals, atFit } = picture;
  const last = state.channels - 1;
  const values = {
    "outlier-x": token.x[last],
    "outlier-y": token.y[last],
    "outlier-slope": token.derivative[last],
    mu: token.mu,
    "token-sigma": token.sigma,
    factor: token.factor,
    "left-out-mean": sample.centre,
    "left-out-variance": sample.variance,
    "closed-beta": sample.closedBeta,
    "channel-beta": token.channelBeta,
    "closed-residual": sample.closedResidual,
    "closed-beta-again": sample.closedBeta,
    "to-layer-norm": picture.toLayerNorm,
    "to-pointwise": picture.toPointwise,
    "pointwise-to-layer-norm": picture.pointwiseToLayerNorm,
    "witness-to-layer-norm": picture.witnessToLayerNorm,
  };
  for (const family of Object.keys(FAMILIES)) {
    values[`${family}-now`] = constant[family];
    values[`${family}-fit`] = sample.fits[family];
    values[`${family}-residual`] = meanAbsolute(residuals[family]);
    values[`${family}-residual-fit`] = atFit[family];
  }
  for (const [name, value] of Object.entries(values)) {
    const text = NARROW.test(name) ? formatNarrow(name, value) : format(value);
    if (cells[name].textContent !== text) cells[name].textContent = text;
  }
}
