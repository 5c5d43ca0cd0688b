// The reader's settings, their limits, and the link that stores them.

const STEP = 5;

const DEFAULTS = {
  channels: 100,
  sigma: 2,
  seed: 1,
  steps: 5,
  // "fit" and "closed" follow the sample; a number stays.
  alpha: "fit",
  derf: "fit",
  beta: "fit",
  t: 0,
  view: "all",
  witness: "none",
  hidden: "",
};

const LAYERS = ["points", "closed", "dyt", "derf", "dyisru", "path"];

/** What a number must be: from, to, whole or not, and the words for it. */
const DOMAINS = {
  channels: { from: 2, to: 4096, whole: true, words: "C must be a whole number from 2 to 4096" },
  sigma: { from: 1e-6, to: 1e6, words: "σ must be positive, from 0.000001 to 1,000,000" },
  seed: { from: 0, to: 4294967295, whole: true, words: "The seed must be a whole number from 0 to 4,294,967,295" },
  steps: { from: -1e6, to: 1e6, words: "S must be a number from −1,000,000 to 1,000,000" },
  position: { from: -1e7, to: 1e7, words: "The position must be a number from −10,000,000 to 10,000,000" },
  alpha: { from: 1e-9, to: 1e9, words: "α must be positive, from 1e-9 to 1e9" },
  derf: { from: 1e-9, to: 1e9, words: "α of Derf must be positive, from 1e-9 to 1e9" },
  beta: { from: 1e-12, to: 1e15, words: "β must be positive, from 1e-12 to 1e15" },
  t: { from: 0, to: 1, words: "t must be a number from 0 to 1" },
};

/** Words for a choice that are not numbers. */
const WORDS = {
  alpha: ["fit"],
  derf: ["fit"],
  beta: ["fit", "closed"],
  view: ["all", "sample"],
  witness: ["none", "outlier"],
};

/** Why a value cannot be taken, in words; null where it can. */
function complaint(key, value) {
  if (WORDS[key]?.includes(value)) return null;
  if (key === "hidden") return typeof value === "string" ? null : "hidden must be names of layers with dots between";
  if (key === "view") return "The view must be all or sample";
  if (key === "witness") return "The witness must be none or outlier";
  const { from, to, whole, words } = DOMAINS[key];
  const good = typeof value === "number" && value >= from && value <= to && (!whole || Number.isInteger(value));
  return good ? null : `${words}, got ${Number.isNaN(value) ? "nothing" : value}.`;
}

const isHidden = (state, layer) => state.hidden.split(".").includes(layer);

/** What differs from the defaults, as the part of a link behind the #. */
function toHash(state) {
  const changed = Object.keys(DEFAULTS).filter((key) => state[key] !== DEFAULTS[key]);
  return changed.map((key) => `${key}=${encodeURIComponent(state[key])}`).join("&");
}

/** The choices in a link; what is unknown or out of its domain is left at its default. */
function fromHash(hash) {
  const state = { ...DEFAULTS };
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!(key in DEFAULTS)) continue;
    const value = DOMAINS[key] && !WORDS[key]?.includes(text) ? Number(text || NaN) : text;
    if (complaint(key, value) === null) state[key] = value;
  }
  return state;
}
