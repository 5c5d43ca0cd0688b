// The controls: a slider and a number field for each choice, buttons that follow a fit, and error messages.

/** Sliders reach where it is interesting, number fields the whole domain. A slider of ratios is even in the log. */
const CONTROLS = [
  { group: "outlier", key: "steps", label: "S", note: "outlier, in steps of 5", slider: [-12, 12], grain: 0.01 },
  { group: "outlier", key: "position", label: "x<sub>o</sub>", note: "the same as a position" },
  { group: "outlier", key: "t", label: "t", note: "0 LayerNorm, 1 DyISRU", slider: [0, 1] },
  { group: "sample", key: "channels", label: "C", note: "channels of the token", slider: [2, 1024], ratio: true },
  { group: "sample", key: "sigma", label: "σ", note: "spread of the sample", slider: [0.1, 20], ratio: true },
  { group: "sample", key: "seed", label: "seed", note: "of sample", next: "Next sample" },
  constantControl("alpha", "α", "dyt", "DyT", [0.005, 2], { fit: "Fit" }),
  constantControl("derf", "α", "derf", "Derf", [0.005, 2], { fit: "Fit" }),
  constantControl("beta", "β", "dyisru", "DyISRU", [1, 1e5], { fit: "Fit", closed: "Closed form" }),
];

function constantControl(key, label, colour, note, slider, follow) {
  return { group: "constant", key, label, colour, note, slider, ratio: true, follow };
}

const CONSTANT_OF = { alpha: "dyt", derf: "derf", beta: "dyisru" };

/** One row: label, slider, number field, buttons, complaint. */
class Control {
  constructor(spec, host, choose) {
    this.spec = spec;
    this.choose = choose;
    this.row = document.createElement("div");
    this.row.className = "control";
    this.row.innerHTML = controlMarkup(spec);
    host.append(this.row);
    this.field = this.row.querySelector("input[type=number]");
    this.slider = this.row.querySelector("input[type=range]");
    this.complaint = this.row.querySelector(".complaint");
    this.listen();
  }

  listen() {
    const { key } = this.spec;
    this.field.addEventListener("input", () => this.choose(key, this.typed(), this));
    this.field.addEventListener("change", () => this.choose(key, this.typed(), this));
    this.slider?.addEventListener("input", () => this.choose(key, this.fromSlider(), this));
    for (const button of this.row.querySelectorAll("button[data-follow]")) {
      button.addEventListener("click", () => this.choose(key, button.dataset.follow, this));
    }
    this.row.querySelector("button[data-next]")?.addEventListener("click", () => {
      this.choose(key, (this.value + 1) % 2 ** 32, this);
    });
  }

  typed() {
    return this.field.value === "" ? NaN : Number(this.field.value);
  }

  fromSlider() {
    const { slider: [from, to], ratio, key } = this.spec;
    const place = Number(this.slider.value);
    if (!ratio) return place;
    const value = Number((from * (to / from) ** place).toPrecision(3));
    return DOMAINS[key].whole ? Math.round(value) : value;
  }

  /** Says what is wrong with what was typed, or that nothing is. */
  complain(words) {
    this.wrong = words;
    if (words) this.field.setAttribute("aria-invalid", "true");
    else this.field.removeAttribute("aria-invalid");
    this.say();
  }

  /** Says what is to be known about a value that is in order. */
  remark(words) {
    this.known = words;
    this.say();
  }

  say() {
    const words = this.wrong ?? this.known ?? "";
    if (this.complaint.textContent !== words) this.complaint.textContent = words;
  }

  /** Shows a value. What the reader is typing is left alone, and so is a field with a complaint until it is mended. */
  show(value, followed) {
    this.value = value;
    // A position comes back from S with a rounding error, which must not cut "20." short on its way to "20.5".
    const typing = this.field === document.activeElement && this.typed().toPrecision(12) === value.toPrecision(12);
    if (!typing && !this.field.hasAttribute("aria-invalid")) this.field.value = Number(value.toPrecision(6));
    if (this.slider) {
      const { slider: [from, to], ratio } = this.spec;
      const place = ratio ? Math.log(value / from) / Math.log(to / from) : value;
      this.slider.value = place;
      this.slider.setAttribute("aria-valuetext", Number(value.toPrecision(4)));
    }
    for (const button of this.row.querySelectorAll("button[data-follow]")) {
      button.setAttribute("aria-pressed", String(button.dataset.follow === followed));
    }
  }
}

function controlMarkup({ key, label, note, colour, slider, ratio, grain, follow, next }) {
  const [from, to] = ratio ? [0, 1] : (slider ?? []);
  const swatch = colour ? `<i class="line ${colour}" aria-hidden="true"></i>` : "";
  const range = slider
    ? `<input type="range" id="${key}-slider" min="${from}" max="${to}" step="${grain ?? 0.001}"
        aria-label="${label}, ${note}: slider">`
    : "";
  const buttons = Object.entries(follow ?? {}).map(
    ([choice, words]) => `<button type="button" id="${key}-${choice}" data-follow="${choice}">${words}</button>`,
  );
  if (next) buttons.push(`<button type="button" id="${key}-next" data-next>${next}</button>`);
  return `<label for="${key}">${swatch}<b>${label}</b> <span>${note}</span></label>
    ${range}<input type="number" id="${key}" step="any" inputmode="decimal" aria-describedby="${key}-complaint">
    ${buttons.length ? `<span class="buttons">${buttons.join("")}</span>` : ""}
    <p class="complaint" id="${key}-complaint" role="alert"></p>`;
}
