// The three plots: uPlot draws axes, grid and curves; points and bounds are drawn over them.

/** The curves in the order in which they are drawn; LayerNorm's own comes last, thin, on top of DyISRU's. */
const CURVES = [
  { layer: "dyisru", width: 4 },
  { layer: "dyt", width: 2.25, dash: [9, 5] },
  { layer: "derf", width: 2.25, dash: [2, 4] },
  { layer: "closed", width: 1.5 },
];

const TAU = 2 * Math.PI;
const FONT = "13px system-ui, sans-serif";

class Plot {
  /**
   * Options: title (for screen readers), xLabel, yLabel, layers (of curves), basis(picture), the parts that it is drawn
   * from, values(picture) by layer, range(picture), and draw(picture, pen). afterDraw() is called once scales and
   * canvas are up to date, which uPlot does last of all.
   */
  constructor(host, options, afterDraw = () => {}) {
    this.afterDraw = afterDraw;
    this.host = host;
    this.options = options;
    this.colours = {};
    this.picture = null;
    this.curves = CURVES.filter(({ layer }) => options.layers.includes(layer));
    this.chart = new uPlot(this.chartOptions(), [[0, 1], ...this.curves.map(() => [0, 0])], host);
    const canvas = host.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", options.title);
  }

  chartOptions() {
    const colour = (name) => () => this.colours[name];
    const axis = {
      stroke: colour("soft"),
      grid: { stroke: colour("grid"), width: 1 },
      ticks: { stroke: colour("grid"), width: 1, size: 5 },
      font: FONT,
      labelFont: FONT,
      labelSize: 20,
      values: (_, splits) => splits.map((value) => formatTick(value)),
    };
    return {
      ...this.size(),
      cursor: { show: false },
      legend: { show: false },
      padding: [10, 14, 0, 0],
      scales: { x: { time: false, range: () => this.xRange() }, y: { range: () => this.yRange() } },
      axes: [
        { ...axis, label: this.options.xLabel, size: 30, space: 56 },
        { ...axis, label: this.options.yLabel, size: (_, values) => tickWidth(values), space: 34 },
      ],
      series: [
        {},
        ...this.curves.map(({ layer, width, dash }) => ({
          stroke: colour(layer),
          width,
          dash,
          points: { show: false },
          // Not rounded to whole pixels, which would turn a shallow slope into stairs.
          pxAlign: 0,
        })),
      ],
      hooks: { draw: [() => this.drawOver()] },
    };
  }

  size() {
    const { width, height } = this.host.getBoundingClientRect();
    return { width: Math.max(Math.floor(width), 200), height: Math.max(Math.floor(height), 120) };
  }

  fit() {
    const { width, height } = this.size();
    if (width !== this.chart.width || height !== this.chart.height) this.chart.setSize({ width, height });
  }

  xRange() {
    const x = this.picture?.curves.x;
    return x ? [x[0], x[x.length - 1]] : [-1, 1];
  }

  yRange() {
    return this.picture ? this.options.range(this.picture) : [-1, 1];
  }

  /** Draws a picture, unless all that this plot shows of it is on the screen already. */
  show(picture, colours) {
    const basis = [colours, ...this.options.basis(picture)];
    if (this.basis?.every((part, i) => part === basis[i])) return;
    this.basis = basis;
    this.picture = picture;
    this.colours = colours;
    const values = this.options.values(picture);
    const nothing = new Array(picture.curves.x.length).fill(null);
    const shown = this.curves.map(({ layer }) => (isHidden(picture.state, layer) ? nothing : values[layer]));
    this.chart.setData([picture.curves.x, ...shown]);
  }

  drawOver() {
    if (!this.picture) return;
    const { ctx, bbox } = this.chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    this.options.draw(this.picture, new Pen(this.chart, this.colours));
    ctx.restore();
    this.afterDraw();
  }
}

/** Draws in the units of the data; sizes are in CSS pixels. */
class Pen {
  constructor(chart, colours) {
    this.ctx = chart.ctx;
    this.colours = colours;
    this.unit = uPlot.pxRatio;
    this.left = chart.valToPos(0, "x", true);
    this.across = chart.valToPos(1, "x", true) - this.left;
    this.top = chart.valToPos(0, "y", true);
    this.down = chart.valToPos(1, "y", true) - this.top;
    this.box = chart.bbox;
  }

  at(x, y) {
    return [this.left + this.across * x, this.top + this.down * y];
  }

  /** A circle at every point, filled or an empty ring; one that would lie on the circle before it is left out. */
  circles(xs, ys, radius, colour, { filled = false, alpha = 1, width = 1.3 } = {}) {
    const { ctx, unit } = this;
    const size = radius * unit;
    ctx.globalAlpha = alpha;
    ctx.beginPath();
    let [lastLeft, lastTop] = [Infinity, Infinity];
    for (let i = 0; i < xs.length; i++) {
      const [left, top] = this.at(xs[i], ys[i]);
      if (Math.abs(left - lastLeft) < 0.5 && Math.abs(top - lastTop) < 0.5) continue;
      [lastLeft, lastTop] = [left, top];
      ctx.moveTo(left + size, top);
      ctx.arc(left, top, size, 0, TAU);
    }
    ctx.fillStyle = ctx.strokeStyle = this.colours[colour];
    ctx.lineWidth = width * unit;
    if (filled) ctx.fill();
    else ctx.stroke();
    ctx.globalAlpha = 1;
  }

  /** A line across the plot at a height, with words above its left end. */
  level(y, colour, words, dash = [4, 4]) {
    const { ctx, unit, box } = this;
    const top = Math.round(this.at(0, y)[1]) + 0.5;
    ctx.strokeStyle = ctx.fillStyle = this.colours[colour];
    ctx.lineWidth = unit;
    ctx.setLineDash(dash.map((length) => length * unit));
    ctx.beginPath();
    ctx.moveTo(box.left, top);
    ctx.lineTo(box.left + box.width, top);
    ctx.stroke();
    ctx.setLineDash([]);
    if (!words) return;
    ctx.font = `${12 * unit}px system-ui, sans-serif`;
    ctx.textBaseline = y > 0 ? "top" : "bottom";
    ctx.textAlign = y > 0 ? "left" : "right";
    const side = y > 0 ? box.left + 8 * unit : box.left + box.width - 8 * unit;
    ctx.fillText(words, side, top + (y > 0 ? 5 : -4) * unit);
  }
}

const formatTick = (value) => String(Number(value.toPrecision(6))).replace("-", "−");
// At least four characters wide, so that the plots are aligned.
const tickWidth = (values) => 22 + 7.5 * Math.max(4, ...(values ?? []).map((text) => text.length));
const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

/** What the layers show at their largest. */
const largestShown = (state, layers, values) =>
  Math.max(0, ...layers.filter((layer) => !isHidden(state, layer)).map((layer) => largest(values[layer])));

const mainPlot = {
  title: "Output against input: LayerNorm's points, the three point-wise functions, the closed form and the annealed layer.",
  xLabel: "input x",
  yLabel: "output y, in σ of the token",
  layers: ["dyisru", "dyt", "derf", "closed"],
  basis: (picture) => [picture],
  values: (picture) => picture.curves.value,
  range(picture) {
    const { state, token } = picture;
    const last = state.channels - 1;
    const others = Math.max(largest(token.y.slice(0, last)), largest(picture.path.slice(0, last)));
    const most = state.view === "sample" ? roundUp(1.1 * others) : 1.14 * bound(state.channels);
    return [-most, most];
  },
  draw(picture, pen) {
    const { state, token, sample, path: onPath } = picture;
    const limit = bound(state.channels);
    pen.level(limit, "soft", "√(C − 1)");
    pen.level(-limit, "soft", "−√(C − 1)");
    if (!isHidden(state, "points")) {
      pen.circles(token.x, token.y, 3.6, "points", { alpha: state.channels > 300 ? 0.55 : 0.85 });
      const { xs, ys } = columns(sample.outliers, "y");
      pen.circles(xs.map((x) => -x), ys.map((y) => -y), 3.6, "points", { alpha: 0.45 });
      pen.circles(xs, ys, 5.5, "card", { filled: true });
      pen.circles(xs, ys, 4, "points", { filled: true });
    }
    if (state.witness === "outlier") pen.circles(token.x, picture.witness, 2.4, "dyisru", { filled: true });
    if (!isHidden(state, "path")) pen.circles(token.x, onPath, 2, "path", { filled: true });
  },
};

const residualPlot = {
  title: "What each function gives minus what LayerNorm gives, against the outlier's input.",
  xLabel: "input x of the outlier",
  yLabel: "function − LayerNorm",
  layers: ["dyisru", "dyt", "derf"],
  // Neither the curves nor the nine residuals depend on where the outlier is now.
  basis: (picture) => [picture.curves, picture.state.hidden],
  values: (picture) => picture.curves.residual,
  range(picture) {
    const most = roundUp(1.1 * largestShown(picture.state, residualPlot.layers, picture.curves.residual)) || 1;
    return [-most, most];
  },
  draw(picture, pen) {
    const { sample, residuals, state } = picture;
    if (!isHidden(state, "closed")) pen.level(0, "closed", "", []);
    const xs = sample.outliers.map((outlier) => outlier.x);
    for (const layer of residualPlot.layers) {
      if (!isHidden(state, layer)) pen.circles(xs, residuals[layer], 4, layer, { filled: true });
    }
  },
};

const slopePlot = {
  title: "The derivative of each function and of LayerNorm against the input.",
  xLabel: "input x",
  yLabel: "slope dy/dx",
  layers: ["dyisru", "dyt", "derf", "closed"],
  basis: (picture) => [picture],
  values: (picture) => picture.curves.slope,
  range(picture) {
    const { state, token, curves } = picture;
    const points = isHidden(state, "points") ? 0 : largest(token.derivative);
    return [0, roundUp(1.06 * Math.max(largestShown(state, slopePlot.layers, curves.slope), points))];
  },
  draw(picture, pen) {
    const { state, token, sample } = picture;
    if (isHidden(state, "points")) return;
    const last = state.channels - 1;
    pen.circles(token.x.slice(0, last), token.derivative.slice(0, last), 3.6, "points", { alpha: 0.7 });
    const { xs, ys } = columns(sample.outliers, "slope");
    pen.circles(xs, ys, 4, "points", { filled: true });
    pen.circles([token.x[last]], [token.derivative[last]], 8, "handle", { width: 3 });
  },
};

const columns = (outliers, name) => ({
  xs: outliers.map((outlier) => outlier.x),
  ys: outliers.map((outlier) => outlier[name]),
});
