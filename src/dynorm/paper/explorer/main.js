// Connects state, plots, controls and numbers: after a change the whole page is redrawn in the next frame.

const byId = (id) => document.getElementById(id);

class Explorer {
  constructor() {
    this.state = { ...DEFAULTS };
    // The constants in numbers; those of the paper until the first sample is drawn.
    this.constant = { dyt: 0.049, derf: 0.04, dyisru: 301.1 };
    this.half = null;
    this.frame = 0;
    this.plots = [
      new Plot(byId("main-plot"), mainPlot, () => this.showHandle()),
      new Plot(byId("residual-plot"), residualPlot),
      new Plot(byId("slope-plot"), slopePlot),
    ];
    this.handle = new Handle(this.plots[0].chart, {
      moveTo: (x) => this.choose("position", x),
      hold: (held) => this.hold(held),
    });
    const choose = (...choice) => this.choose(...choice);
    this.controls = Object.fromEntries(
      CONTROLS.map((spec) => [spec.key, new Control(spec, byId(`${spec.group}-controls`), choose)]),
    );
    const cells = [...document.querySelectorAll("[data-number]")];
    this.cells = Object.fromEntries(cells.map((cell) => [cell.dataset.number, cell]));
    this.boxes = [...document.querySelectorAll("input[data-layer]")];
    this.readColours();
    this.listen();
    this.accept(stateOf(location.hash));
    this.draw();
  }

  listen() {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    const watcher = new ResizeObserver(() => this.mark());
    for (const plot of this.plots) watcher.observe(plot.host);
    addEventListener("hashchange", () => this.follow(location.hash));
    addEventListener("click", (event) => {
      // Otherwise the settings, which are written later, would replace the equation in the address.
      if (event.target.closest("a[href^='#']")) clearTimeout(this.saving);
    });
    byId("reset").addEventListener("click", () => this.reset());
    byId("zoom").addEventListener("change", (event) => this.choose("view", event.target.checked ? "sample" : "all"));
    byId("witness").addEventListener("change", (event) =>
      this.choose("witness", event.target.checked ? "outlier" : "none"),
    );
    for (const box of this.boxes) {
      box.addEventListener("change", () => this.choose("hidden", this.hiddenNames()));
    }
  }

  /** Takes one choice, or complains beside its control and leaves everything as it was. Returns whether it took it. */
  choose(key, value, control = this.controls[key]) {
    const words = complaint(key, value) ?? this.consequence(key, value);
    control?.complain(words);
    if (words) return false;
    this.accept(this.changed(key, value));
    return true;
  }

  /** The state after one choice. A position is S in other words. */
  changed(key, value) {
    if (key !== "position") return { ...this.state, [key]: value };
    const { channels, sigma, seed } = this.state;
    const largest = drawSample(channels, sigma, seed).x[channels - 1];
    return { ...this.state, steps: (value - largest) / STEP };
  }

  /** Why a choice within its domain still has no picture. */
  consequence(key, value) {
    return hasPicture(this.changed(key, value)) ? null : ALL_EQUAL;
  }

  /** Takes a state. Where a constant follows a fit that this sample does not have, its last value serves meanwhile. */
  accept(state) {
    const found = constants(state, drawSample(state.channels, state.sigma, state.seed));
    for (const [key, family] of Object.entries(CONSTANT_OF)) {
      this.controls[key].remark(found[family] !== null ? null : state[key] === "closed" ? NO_CLOSED_FORM : NO_FIT);
      if (found[family] !== null) this.constant[family] = found[family];
    }
    for (const [key, control] of Object.entries(this.controls)) {
      const choice = key === "position" ? "steps" : key;
      // A message about a wrong input is out of date once the value has changed in another way.
      if (state[choice] !== this.state[choice]) control.complain(null);
    }
    this.state = state;
    this.mark();
    this.saveSoon();
  }

  /** Takes the choices of a link that was followed; a link to an equation has none. */
  follow(hash) {
    if (!hash.includes("=") || hash.slice(1) === toHash(this.state)) return;
    this.clearComplaints();
    this.accept(stateOf(hash));
  }

  reset() {
    this.clearComplaints();
    this.accept({ ...DEFAULTS });
  }

  clearComplaints() {
    for (const control of Object.values(this.controls)) control.complain(null);
  }

  /** While the outlier is held, the axes stand still, or they would run away from under the pointer. */
  hold(held) {
    this.half = held ? this.picture.curves.x[this.picture.curves.x.length - 1] : null;
    this.mark();
  }

  mark() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    this.picture = compute(this.state, this.constant, this.half);
    for (const plot of this.plots) {
      plot.fit();
      plot.show(this.picture, this.colours);
    }
    const { token, constant } = this.picture;
    this.showControls(token.x[token.x.length - 1], constant);
    fillTable(this.cells, this.picture);
  }

  showHandle() {
    const { x, y } = this.picture.token;
    this.handle.show(x[x.length - 1], y[y.length - 1]);
  }

  showControls(position, constant) {
    for (const [key, control] of Object.entries(this.controls)) {
      const choice = this.state[key];
      const value = key === "position" ? position : (constant[CONSTANT_OF[key]] ?? choice);
      control.show(value, choice);
    }
    byId("zoom").checked = this.state.view === "sample";
    byId("witness").checked = this.state.witness === "outlier";
    for (const box of this.boxes) {
      box.checked = !isHidden(this.state, box.dataset.layer);
    }
  }

  hiddenNames() {
    return this.boxes.filter((box) => !box.checked).map((box) => box.dataset.layer).join(".");
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const names = ["card", "soft", "grid", "handle", ...LAYERS];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.mark();
  }

  /** Browsers allow few changes of the address a second, so it follows once the reader pauses. */
  saveSoon() {
    clearTimeout(this.saving);
    this.saving = setTimeout(() => {
      const hash = toHash(this.state);
      history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    }, 300);
  }
}

const ALL_EQUAL = "All channels would be equal, and LayerNorm 0 / 0: move the outlier elsewhere.";
const NO_FIT = "No constant fits this sample best: the error falls all the way to 0 or infinity. The last value stays.";
const NO_CLOSED_FORM = "C v_o is 0 for this sample, and β must be positive. The last value stays.";

/** The state in a link, or the default where that has no picture. */
function stateOf(hash) {
  const state = fromHash(hash);
  return hasPicture(state) ? state : { ...DEFAULTS };
}

const explorer = new Explorer();

/** For tests and for the console. */
window.dynorm = {
  state: () => ({ ...explorer.state }),
  set: (choices) => Object.entries(choices).every(([key, value]) => explorer.choose(key, value)),
  numbers: () => numbersOf(compute(explorer.state, explorer.constant, explorer.half)),
};
