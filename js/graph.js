import { FONT, make, makeButton } from "./parts.js";
import { t } from "./words.js";

// A graph of one run, or of several over each other: loss, validation, learning rates, concepts and saves.
//
// A point of the loss may be [step, mean, lowest, highest] of the steps since the point before. Values that are no
// numbers are left out.

/** @typedef {[number, number]} Range the lowest and the highest */
/** @typedef {{ range: Range, log?: boolean }} Axis */
/** @typedef {{ loss: Axis, validation: Axis, rate: Axis }} Axes */
/** @typedef {"raw" | "log" | "clip" | "validation" | "rate" | "concepts" | "levels"} Switch */
/** @typedef {Record<Switch, boolean> & { smoothing: number }} Settings */
/**
 * @typedef {object} Frame
 * @property {CanvasRenderingContext2D} pen
 * @property {Range} steps
 * @property {number} left where the steps begin
 * @property {number} width
 * @property {number} height
 * @property {(step: number) => number} x
 */
/** @typedef {[string, Curve][]} Named curves by name */
/**
 * @typedef {object} Drawn a run with curves that hold numbers only
 * @property {string | null} [name]
 * @property {string} [colour]
 * @property {Curve} loss
 * @property {Curve} validation
 * @property {Named} rate
 * @property {Named} concepts
 * @property {Named} levels
 * @property {{ step: number, best: boolean }[]} saves
 */
/**
 * @typedef {object} Line
 * @property {Drawn} run whose it is
 * @property {keyof Axes} axis
 * @property {string | null} [name]
 * @property {string} colour
 * @property {Curve} points
 * @property {Curve} [raw] the loss of single steps, of which `points` are the means
 * @property {number} thick
 * @property {number[]} [dash]
 * @property {boolean} [dots]
 */

const HEIGHT = 190, RIGHT = 10, TOP = 10; // pixels
const AXIS = 3.8, BOTTOM = 1.7; // in heights of letters: the width of an axis, the height of that of the steps
const SHARP = 2; // device pixels for each pixel: the editor enlarges its nodes
const GROUND = "rgb(24,25,28)", GRID = "rgb(52,55,60)", DIM = "rgb(152,156,164)", BRIGHT = "rgb(232,233,236)";
const LOSS = "rgb(255,176,66)", VALIDATION = "rgb(96,180,255)", RATE = "rgb(190,150,255)";
const CONCEPTS = ["rgb(126,211,120)", "rgb(240,120,150)", "rgb(90,210,200)", "rgb(220,220,110)", "rgb(235,130,90)"];
const OUTLIERS = 0.02; // share at each end that the axis leaves out
const REMEMBERED = "Atelier.Graph"; // in the browser's storage
/** @type {[string, string][]} how the names of parts in LoRA files begin, and the input that sets their rate */
const PARTS = [["lora_unet", "learning_rate"], ["lora_te2", "text_encoder_2_learning_rate"],
  ["lora_te1", "text_encoder_learning_rate"], ["lora_te", "text_encoder_learning_rate"]];
/** @type {Settings} */
const USUAL = { smoothing: 0.6, raw: true, log: false, clip: true, validation: true, rate: true, concepts: true,
  levels: true };
/** @type {Record<Switch, [string, string]>} */
const SWITCHES = {
  raw: [t("raw"), t("Show the loss of single steps")],
  log: [t("log"), t("Logarithmic axis of the loss")],
  clip: [t("clip"), t("Leave outliers out of the axis")],
  validation: [t("validation"), t("Show the validation loss, on an axis of its own")],
  rate: [t("rate"), t("Show the learning rates, on an axis of their own")],
  concepts: [t("concepts"), t("Show each concept's loss")],
  levels: [t("levels"), t("Show the validation loss at each noise level, on the validation's axis")],
};
const NAMES = /** @type {Switch[]} */ (Object.keys(SWITCHES));

// Names a learning rate by its input; the name of a group may go on for some layers of the part, as in "conv" or "x0.5".
/** @param {string} group */
function nameOf(group) {
  const [part, input] = PARTS.find(([part]) => group.startsWith(part)) ?? [];
  return part ? input + group.slice(part.length).replaceAll("_", " ") : group;
}

// From blue, little noise, to red.
/** @param {number} i @param {number} count */
const levelColour = (i, count) => `hsl(${210 - (210 * i) / Math.max(count - 1, 1)},60%,68%)`;
/** @param {unknown} value @returns {value is number} */
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
/** @param {ToldCurve} [points] */
const sound = (points = []) =>
  /** @type {Curve} */ (points.filter((point) => isNumber(point[0]) && isNumber(point[1])));
/** @param {number} value */
const short = (value) => (value === 0 ? "0" : Math.abs(value) < 0.001 ? value.toExponential(1) : value.toPrecision(3));

/** @returns {Settings} */
function remembered() {
  try {
    const stored = Object.entries(JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}"));
    /** @param {[string, unknown]} setting */
    const fits = ([name, value]) => typeof value === typeof USUAL[/** @type {keyof Settings} */ (name)];
    return { ...USUAL, ...Object.fromEntries(stored.filter(fits)) };
  } catch {
    return { ...USUAL }; // somebody wrote something else there
  }
}

// The running mean over a share of the run; a point counts for the steps since the point before.
/** @param {Curve} points @param {number} amount @returns {Curve} */
export function smoothed(points, amount) {
  if (!points.length) return [];
  const reach = (amount ** 2 / 4) * Math.max(1, points[points.length - 1][0] - points[0][0]); // steps
  let mean = 0, weight = 0, before = points[0][0] - 1;
  return points.map(([step, value]) => {
    const steps = Math.max(step - before, 1), kept = reach > 0 ? weight * Math.exp(-steps / reach) : 0;
    weight = kept + steps;
    mean += ((value - mean) * steps) / weight;
    before = step;
    return [step, mean];
  });
}

// The ends of an axis that shows the values, all or without the outliers at both ends.
/** @param {number[]} values @param {boolean} [clip] @param {boolean} [log] @returns {Range} */
function limits(values, clip, log) {
  const sorted = values.filter((value) => !log || value > 0).sort((one, other) => one - other);
  if (!sorted.length) return log ? [0.1, 1] : [0, 1];
  const cut = clip ? Math.floor(sorted.length * OUTLIERS) : 0;
  const low = sorted[cut], high = sorted[sorted.length - 1 - cut];
  if (log) return [low / 1.1, high * 1.1];
  const edge = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.5;
  return [low - edge, high + edge];
}

// Round values between two, about as many as asked for.
/** @param {number} low @param {number} high @param {number} count @param {boolean} [log] */
function ticks(low, high, count, log) {
  if (log) return Array.from({ length: count }, (_, i) => low * (high / low) ** (i / (count - 1)));
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => power * factor >= rough) ?? 10);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high && found.length <= 2 * count; i++) found.push(i * step);
  return found;
}

// The point whose step is nearest.
/** @param {Curve} points @param {number} step */
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  const [one, other] = [points[low - 1], points[low]];
  return one && Math.abs(one[0] - step) <= Math.abs(other[0] - step) ? one : other;
}

export class RunGraph {
  /** @type {Drawn[]} */
  #runs = []; // with the curves to draw
  #settings = remembered();
  /** @type {Range | null} */
  #view = null; // [first step, last step] that is shown; null = all
  /** @type {number | null} */
  #hover = null; // the step under the pointer
  /** @type {Range | null} */
  #drag = null; // [step where it began, step now]
  #frame = 0;
  #canvas = make("canvas", `width:100%;height:${HEIGHT}px;display:block;border-radius:4px;cursor:crosshair`);
  #words = make("div", `${FONT};min-height:2lh;overflow-wrap:anywhere`);
  /** @type {Partial<Record<Switch, HTMLButtonElement>>} */
  #switches = {};
  #slider = make("input", "width:70px;min-width:30px;max-width:140px;flex:1;accent-color:var(--p-primary-color, #888)");
  #whole = makeButton(t("whole run"), t("Show all steps again (or double-click the graph)"), () => this.#look(null));
  #box = make("div", "display:flex;flex-direction:column;gap:4px;width:100%");
  #watch = new ResizeObserver(() => this.#redraw());

  /** @param {HTMLElement} host */
  constructor(host) {
    this.#box.className = "atelier-graph";
    const picture = make("div", "position:relative");
    this.#whole.style.cssText += ";position:absolute;right:8px;top:4px;padding:0 6px";
    picture.append(this.#canvas, this.#whole);
    this.#box.append(this.#tools(), picture, this.#words);
    this.#canvas.addEventListener("pointerdown", (event) => this.#press(event));
    this.#canvas.addEventListener("pointermove", (event) => this.#move(event));
    this.#canvas.addEventListener("pointerup", () => this.#release());
    this.#canvas.addEventListener("pointercancel", () => this.#release());
    this.#canvas.addEventListener("pointerleave", () => this.#point(null));
    this.#canvas.addEventListener("dblclick", (event) => {
      event.stopPropagation();
      this.#look(null);
    });
    host.append(this.#box);
    this.#watch.observe(this.#canvas);
  }

  /** @param {GraphRun[]} runs */
  setRuns(runs) {
    this.#runs = runs.map((run) => ({
      name: run.name,
      colour: run.colour,
      loss: sound(run.points?.loss),
      validation: sound(run.points?.validation),
      rate: Object.entries(run.points?.rate ?? {}).map(([name, points]) => [name, sound(points)]),
      concepts: Object.entries(run.concepts ?? {}).map(([name, points]) => [name, sound(points)]),
      levels: Object.entries(run.levels ?? {}).map(([level, points]) => [level, sound(points)]),
      saves: run.saves ?? [],
    }));
    this.#redraw();
  }

  dispose() {
    cancelAnimationFrame(this.#frame);
    this.#watch.disconnect();
    this.#box.remove();
    this.#runs = [];
  }

  // --- what a person does --------------------------------------------------------------------------------

  #tools() {
    const bar = make("div", "display:flex;flex-wrap:wrap;gap:3px;align-items:center;color:var(--input-text)");
    Object.assign(this.#slider, { type: "range", min: 0, max: 1, step: 0.02, value: this.#settings.smoothing });
    this.#slider.title = t("Smoothing");
    this.#slider.setAttribute("aria-label", t("Smoothing"));
    this.#slider.addEventListener("pointerdown", (event) => event.stopPropagation());
    this.#slider.addEventListener("input", () => this.#set("smoothing", Number(this.#slider.value)));
    const label = make("span", FONT, t("smooth"));
    bar.append(label, this.#slider);
    for (const name of NAMES) {
      const [words, help] = SWITCHES[name];
      const button = makeButton(words, help, () => this.#set(name, !this.#settings[name]));
      button.style.cssText += ";padding:0 6px";
      this.#switches[name] = button;
      bar.append(button);
    }
    return bar;
  }

  /** @template {keyof Settings} Name @param {Name} name @param {Settings[Name]} value */
  #set(name, value) {
    this.#settings[name] = value;
    localStorage.setItem(REMEMBERED, JSON.stringify(this.#settings));
    this.#redraw();
  }

  /** @param {Range | null} view */
  #look(view) {
    this.#view = view;
    this.#redraw();
  }

  /** @param {number | null} step */
  #point(step) {
    this.#hover = step;
    this.#redraw();
  }

  /** @param {PointerEvent} event */
  #press(event) {
    event.stopPropagation(); // else it drags the node
    if (event.button !== 0) return;
    this.#canvas.setPointerCapture(event.pointerId);
    this.#drag = [this.#stepAt(event), this.#stepAt(event)];
  }

  /** @param {PointerEvent} event */
  #move(event) {
    if (this.#drag) {
      event.stopPropagation();
      this.#drag[1] = this.#stepAt(event);
    }
    this.#point(this.#stepAt(event));
  }

  #release() {
    const [from, to] = (this.#drag ?? [0, 0]).sort((one, other) => one - other);
    this.#drag = null;
    const [first, last] = this.#steps();
    if (to - from >= Math.max(2, (last - first) / 100)) this.#look([Math.floor(from), Math.ceil(to)]);
    else this.#redraw();
  }

  /** @param {PointerEvent} event */
  #stepAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.#canvas.clientWidth; // the editor may enlarge it
    const [first, last] = this.#steps(), left = this.#axis();
    const width = this.#canvas.clientWidth - left - this.#right();
    return first + Math.min(1, Math.max(0, (x - left) / width)) * (last - first);
  }

  // --- the picture ---------------------------------------------------------------------------------------

  /** @param {Switch} name @returns {boolean} */
  #has(name) {
    if (name === "validation") return this.#runs.some((run) => run.validation.length);
    if (name === "rate") return this.#runs.some((run) => run.rate.some(([, points]) => points.length));
    const [run, ...others] = this.#runs, one = run && !others.length;
    if (name === "levels") return one && run.levels.length > 0 && this.#shows("validation");
    if (name === "concepts") return one && run.concepts.length > 1;
    return true;
  }

  /** @param {Switch} name @returns {boolean} */
  #shows(name) {
    return this.#settings[name] && this.#has(name);
  }

  // The height of its letters, in pixels: they are larger on a node.
  #letters() {
    return Number.parseFloat(getComputedStyle(this.#words).fontSize);
  }

  #axis() {
    return AXIS * this.#letters();
  }

  #right() {
    return RIGHT + this.#axis() * (Number(this.#shows("validation")) + Number(this.#shows("rate")));
  }

  /** @returns {Range} */
  #steps() {
    if (this.#view) return this.#view;
    const last = this.#runs.flatMap((run) => [run.loss.at(-1)?.[0] ?? 0, run.validation.at(-1)?.[0] ?? 0]);
    return [0, Math.max(2, ...last)];
  }

  #redraw() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      if (this.#canvas.clientWidth) this.#draw();
    });
  }

  #draw() {
    for (const name of NAMES) {
      const button = this.#switches[name];
      if (!button) continue;
      button.style.display = this.#has(name) ? "" : "none";
      button.style.opacity = this.#settings[name] ? "1" : "0.45";
      button.setAttribute("aria-pressed", String(this.#settings[name]));
    }
    this.#whole.style.display = this.#view ? "" : "none";
    const frame = this.#frameOf(), curves = this.#curves(frame.steps);
    this.#grid(frame, curves.axes);
    frame.pen.save();
    frame.pen.beginPath();
    frame.pen.rect(frame.left, TOP, frame.width, frame.height);
    frame.pen.clip();
    if (this.#settings.raw) for (const run of this.#runs) this.#raw(frame, curves.axes.loss, run, this.#colour(run));
    for (const curve of curves.lines) this.#line(frame, curves.axes[curve.axis], curve);
    this.#marks(frame, curves.axes.validation);
    frame.pen.restore();
    this.#pointer(frame);
    this.#say(curves.lines);
  }

  /** @param {Drawn} run */
  #colour(run) {
    return run.colour ?? LOSS;
  }

  // The canvas in pixels of the page, and where a step stands on it.
  #frameOf() {
    const canvas = this.#canvas, wide = canvas.clientWidth, high = canvas.clientHeight;
    const ratio = SHARP * Math.min(2, window.devicePixelRatio || 1);
    if (canvas.width !== Math.round(wide * ratio)) canvas.width = Math.round(wide * ratio);
    if (canvas.height !== Math.round(high * ratio)) canvas.height = Math.round(high * ratio);
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = GROUND;
    pen.fillRect(0, 0, wide, high);
    const steps = this.#steps(), left = this.#axis(), width = wide - left - this.#right();
    const height = high - TOP - BOTTOM * this.#letters();
    /** @param {number} step */
    const x = (step) => left + ((step - steps[0]) / (steps[1] - steps[0])) * width;
    return { pen, steps, left, width, height, x };
  }

  // The lines to draw, and the axis of each kind.
  /** @param {Range} steps */
  #curves([first, last]) {
    const { smoothing, clip, log } = this.#settings, one = this.#runs.length === 1;
    /** @type {Line[]} */
    const lines = [];
    /** @param {Curve} points */
    const seen = (points) => points.filter(([step]) => step >= first && step <= last);
    for (const run of this.#runs) {
      const colour = this.#colour(run);
      lines.push({ run, axis: "loss", name: smoothing ? t("smoothed loss") : t("loss of the step"), colour,
        points: smoothed(run.loss, smoothing), raw: run.loss, thick: 2 });
      if (this.#shows("concepts"))
        for (const [i, [concept, points]] of run.concepts.entries())
          lines.push({ run, axis: "loss", name: concept, colour: CONCEPTS[i % CONCEPTS.length],
            points: smoothed(points, smoothing), thick: 1.2 });
      if (this.#shows("validation") && run.validation.length)
        lines.push({ run, axis: "validation", name: t("validation"),
          colour: one ? VALIDATION : colour, points: run.validation, thick: 1.5, dash: one ? [] : [6, 3], dots: true });
      if (this.#shows("levels"))
        for (const [i, [level, points]] of run.levels.entries())
          lines.push({ run, axis: "validation", name: t("level {0}", level), colour: levelColour(i, run.levels.length),
            points, thick: 1, dots: true });
      if (this.#shows("rate"))
        for (const [group, points] of run.rate.filter(([, points]) => points.length))
          lines.push({ run, axis: "rate", name: nameOf(group),
            colour: one ? RATE : colour, points, thick: 1.2, dash: [2, 3] });
    }
    /** @param {Curve} points */
    const onAxis = (points) => seen(points).map(([, value]) => value);
    /** @param {keyof Axes} axis */
    const values = (axis) => lines.filter((line) => line.axis === axis).flatMap((line) => onAxis(line.points));
    const raw = this.#settings.raw ? this.#runs.flatMap((run) => onAxis(run.loss)) : [];
    let loss = limits([...raw, ...values("loss")], clip, log);
    if (clip) { // the outliers of single steps may go, those of the means may not
      const mean = limits(values("loss"), false, log);
      if (values("loss").length) loss = [Math.min(loss[0], mean[0]), Math.max(loss[1], mean[1])];
    }
    const rates = values("rate");
    /** @type {Axes} */
    const axes = { loss: { range: loss, log }, validation: { range: limits(values("validation")) },
      rate: { range: [0, 1.06 * Math.max(Number.MIN_VALUE, ...rates)] } };
    return { lines, axes };
  }

  /** @param {Frame} frame @param {Axis} axis @param {number} value */
  #y(frame, { range: [low, high], log }, value) {
    const share = log ? Math.log(Math.max(value, 1e-30) / low) / Math.log(high / low) : (value - low) / (high - low);
    return TOP + frame.height * (1 - Math.min(1.02, Math.max(-0.02, share)));
  }

  /** @param {Frame} frame @param {Axes} axes */
  #grid(frame, axes) {
    const { pen, left } = frame, end = left + frame.width, letters = this.#letters();
    pen.font = `${letters}px sans-serif`;
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    pen.strokeStyle = GRID;
    /**
     * @param {string} text @param {number} x @param {number} y
     * @param {string} colour @param {CanvasTextAlign} align
     */
    const label = (text, x, y, colour, align) => {
      pen.fillStyle = colour;
      pen.textAlign = align;
      pen.fillText(text, x, y);
    };
    for (const value of ticks(...axes.loss.range, 5, axes.loss.log)) {
      const y = this.#y(frame, axes.loss, value);
      pen.beginPath();
      pen.moveTo(left, y);
      pen.lineTo(end, y);
      pen.stroke();
      label(short(value), left - 5, y, DIM, "right");
    }
    let x = end + 6;
    for (const [name, colour] of /** @type {const} */ ([["validation", VALIDATION], ["rate", RATE]])) {
      if (!this.#shows(name)) continue;
      for (const value of ticks(...axes[name].range, 4))
        label(short(value), x, this.#y(frame, axes[name], value), colour, "left");
      x += this.#axis();
    }
    for (const step of ticks(...frame.steps, 5).filter(Number.isInteger))
      label(String(step), frame.x(step), TOP + frame.height + 0.9 * letters, DIM, "center");
  }

  /** @param {Frame} frame @param {Axis} axis @param {Drawn} run @param {string} colour */
  #raw(frame, axis, run, colour) {
    const { pen } = frame;
    pen.fillStyle = pen.strokeStyle = colour;
    pen.lineWidth = 1;
    for (const [step, mean, low, high] of run.loss) {
      if (step < frame.steps[0] || step > frame.steps[1]) continue;
      const x = frame.x(step);
      if (isNumber(low) && isNumber(high) && high > low) {
        const top = this.#y(frame, axis, high);
        pen.globalAlpha = 0.14;
        pen.fillRect(x - 0.75, top, 1.5, this.#y(frame, axis, low) - top);
      }
      pen.globalAlpha = 0.35;
      pen.fillRect(x - 0.75, this.#y(frame, axis, mean) - 0.75, 1.5, 1.5);
    }
    pen.globalAlpha = 1;
  }

  /** @param {Frame} frame @param {Axis} axis @param {Line} line */
  #line(frame, axis, { points, colour, thick, dash = [], dots = false }) {
    const { pen } = frame;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = thick;
    pen.setLineDash(dash);
    pen.beginPath();
    for (const [step, value] of points) pen.lineTo(frame.x(step), this.#y(frame, axis, value));
    pen.stroke();
    pen.setLineDash([]);
    if ((!dots && points.length > 1) || points.length > 100) return;
    for (const [step, value] of points) {
      pen.beginPath();
      pen.arc(frame.x(step), this.#y(frame, axis, value), 2.5, 0, 7);
      pen.fill();
    }
  }

  // Saves as ticks at the lower edge; the best one as a line, with a ring on its validation loss.
  /** @param {Frame} frame @param {Axis} axis */
  #marks(frame, axis) {
    const { pen } = frame, bottom = TOP + frame.height;
    for (const run of this.#runs) for (const { step, best } of run.saves) {
      pen.strokeStyle = best ? BRIGHT : this.#colour(run);
      pen.lineWidth = best ? 1 : 2;
      pen.setLineDash(best ? [3, 3] : []);
      pen.beginPath();
      pen.moveTo(frame.x(step), best ? TOP : bottom - 6);
      pen.lineTo(frame.x(step), bottom);
      pen.stroke();
      pen.setLineDash([]);
      const measured = best && this.#shows("validation") && run.validation.find((point) => point[0] === step);
      if (!measured) continue;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.arc(frame.x(step), this.#y(frame, axis, measured[1]), 6, 0, 7);
      pen.stroke();
    }
  }

  /** @param {Frame} frame */
  #pointer({ pen, x, height }) {
    if (this.#drag) {
      const [one, other] = this.#drag.map(x);
      pen.fillStyle = "rgba(232,233,236,0.15)";
      pen.fillRect(Math.min(one, other), TOP, Math.abs(other - one), height);
    }
    if (this.#hover === null) return;
    pen.fillStyle = "rgba(232,233,236,0.5)";
    pen.fillRect(x(this.#hover), TOP, 1, height);
  }

  // The values under the pointer, else the last ones, each in the colour of its curve; a line for each run. A curve
  // whose nearest point is at another step says so.
  /** @param {Line[]} lines */
  #say(lines) {
    const [, last] = this.#steps(), step = this.#hover ?? last, several = this.#runs.length > 1;
    const said = this.#runs.flatMap((run) => {
      const own = lines.filter((line) => line.run === run && line.points.length);
      if (!own.length) return [];
      const [at] = nearest(own[0].points, step), words = [make("span", "color:var(--input-text)", t("step {0}", at))];
      if (several) words.unshift(make("span", `color:${this.#colour(run)};font-weight:600`, `${run.name} · `));
      for (const { name, colour, points, raw } of own) {
        const [there, value] = nearest(points, step), when = there === at ? "" : ` ${t("at step {0}", there)}`;
        const single = raw && points !== raw && this.#settings.raw && this.#settings.smoothing
          ? ` · ${t("loss of the step")} ${short(nearest(raw, step)[1])}` : "";
        words.push(make("span", `color:${colour}`, ` · ${name} ${short(value)}${when}${single}`));
      }
      const best = several ? null : run.saves.find((save) => save.best);
      if (best) words.push(make("span", `color:${BRIGHT}`, ` · ${t("best {0}", best.step)}`));
      const line = make("div");
      line.append(...words);
      return [line];
    });
    this.#words.replaceChildren(...(said.length ? said : [make("span", "", t("No step is finished yet."))]));
  }
}
