// The outlier on the plot: a slider that is dragged, or moved with the arrow keys.

const KEYS = { ArrowRight: 0.1, ArrowUp: 0.1, ArrowLeft: -0.1, ArrowDown: -0.1, PageUp: 1, PageDown: -1 };

class Handle {
  /** Calls moveTo(x) with a position, and hold(true or false) when a drag begins and ends. */
  constructor(chart, { moveTo, hold }) {
    this.chart = chart;
    this.moveTo = moveTo;
    this.hold = hold;
    this.x = 0;
    this.grip = 0;
    this.element = document.createElement("div");
    this.element.id = "handle";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "slider");
    this.element.setAttribute("aria-label", "Outlier: input x of the largest channel");
    chart.over.append(this.element);
    this.listen();
  }

  listen() {
    this.element.addEventListener("pointerdown", (event) => this.take(event));
    this.element.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
      this.element.addEventListener(name, () => this.release());
    }
    this.element.addEventListener("keydown", (event) => this.press(event));
  }

  take(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.element.focus({ preventScroll: true });
    this.element.setPointerCapture(event.pointerId);
    this.grip = this.chart.valToPos(this.x, "x") - this.pixel(event);
    this.dragging = true;
    this.hold(true);
  }

  drag(event) {
    if (!this.dragging) return;
    const { min, max } = this.chart.scales.x;
    const margin = (max - min) * 0.01;
    const x = this.chart.posToVal(this.pixel(event) + this.grip, "x");
    this.moveTo(Math.min(Math.max(x, min + margin), max - margin));
  }

  release() {
    if (!this.dragging) return;
    this.dragging = false;
    this.hold(false);
  }

  press(event) {
    const steps = KEYS[event.key];
    const { min, max } = this.chart.scales.x;
    if (steps) this.moveTo(this.x + steps * STEP * (event.shiftKey ? 10 : 1));
    else if (event.key === "Home") this.moveTo(min * 0.98);
    else if (event.key === "End") this.moveTo(max * 0.98);
    else return;
    event.preventDefault();
  }

  pixel(event) {
    return event.clientX - this.chart.over.getBoundingClientRect().left;
  }

  /** Puts the handle where the outlier is; it goes where the view does not reach. */
  show(x, y) {
    this.x = x;
    const { min, max } = this.chart.scales.x;
    this.element.hidden = x < min || x > max;
    const left = this.chart.valToPos(x, "x");
    const top = this.chart.valToPos(y, "y");
    this.element.style.transform = `translate(${left}px, ${top}px)`;
    this.element.setAttribute("aria-valuemin", min);
    this.element.setAttribute("aria-valuemax", max);
    this.element.setAttribute("aria-valuenow", x);
    this.element.setAttribute("aria-valuetext", `x ${x.toFixed(2)}, LayerNorm gives ${y.toFixed(2)}`);
  }
}
