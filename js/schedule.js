import { app } from "../../scripts/app.js";
import { ask, isLinked, takePlace } from "./parts.js";
import { t, told } from "./words.js";

// The Scheduler shows the learning rate's curve, in the colours of the loss plot. The server computes it, so that
// the picture is what a run does.

const WIDTH = 320, HEIGHT = 150, LEFT = 34, RIGHT = 12, TOP = 12, BOTTOM = 20;
const MARGIN = 10; // pixels; a canvas node takes the margin off the height on every side
const GROUND = "rgb(24,25,28)", GRID = "rgb(52,55,60)", SMOOTH = "rgb(255,176,66)", HELD_OUT = "rgb(96,180,255)";
const BRIGHT = "rgb(232,233,236)", DIM = "rgb(152,156,164)", RAW = "rgb(104,92,66)";
const INTERVAL = 250; // milliseconds

function element(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function label(x, y, anchor, text, fill = DIM) {
  return element("text", { x, y, "text-anchor": anchor, "font-size": 10, "font-family": "sans-serif", fill }, text);
}

const short = (value) => String(Number(value.toPrecision(2)));

function draw(svg, curve, known) {
  const { steps, warmup, floor, points } = curve;
  const width = WIDTH - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
  const top = Math.max(1, ...points.map(([, factor]) => factor));
  const x = (step) => LEFT + (width * step) / Math.max(steps - 1, 1);
  const y = (factor) => TOP + height * (1 - factor / top);
  const parts = [];
  if (warmup > 0) {
    const right = x(Math.min(warmup, steps - 1)), bottom = Math.min(y(0), y(floor) + (floor > 0.25 * top ? height : 0));
    parts.push(element("rect", { x: LEFT, y: TOP, width: right - LEFT, height, fill: RAW, opacity: 0.35 }));
    parts.push(label(right + 4, bottom - 5, "start", t("warm-up {0}", warmup)));
  }
  for (const factor of [0, top / 2, top]) {
    parts.push(element("line", { x1: LEFT, x2: LEFT + width, y1: y(factor), y2: y(factor), stroke: GRID }));
    parts.push(label(LEFT - 5, y(factor) + 3.5, "end", short(factor)));
  }
  if (floor > 0) {
    const dashes = { stroke: HELD_OUT, "stroke-dasharray": "4 3" };
    const line = { x1: LEFT, x2: LEFT + width, y1: y(floor), y2: y(floor), ...dashes };
    const words = label(LEFT + width / 4, y(floor) - 4, "middle", t("floor {0}", short(floor)), HELD_OUT);
    parts.push(element("line", line), words);
  }
  const ends = known ? [t("step {0}", 1), String(Math.round(steps / 2)), String(steps)]
    : [t("start"), "50 %", t("end")];
  ["start", "middle", "end"].forEach((anchor, i) =>
    parts.push(label(LEFT + (width * i) / 2, HEIGHT - 6, anchor, ends[i])));
  const path = points.map(([step, factor]) => `${x(step).toFixed(2)},${y(factor).toFixed(2)}`).join(" ");
  if (points.length > 1)
    parts.push(element("polyline", { points: path, fill: "none", stroke: SMOOTH, "stroke-width": 2 }));
  else parts.push(element("circle", { cx: x(0), cy: y(points[0][1]), r: 3, fill: SMOOTH }));
  svg.replaceChildren(...parts);
}

// How long the run is: the steps of a Train LoRA that the Scheduler is linked to, where it counts in steps.
function stepsOf(node) {
  for (const train of node.getOutputNodes(0) ?? []) {
    if (train.comfyClass !== "AtelierTrain") continue;
    if (["steps", "epochs"].some((name) => isLinked(train, name))) continue;
    const value = (name) => train.widgets?.find((widget) => widget.name === name)?.value;
    if (value("epochs") === 0) return value("steps");
  }
  return null;
}

function addCurve(node) {
  const box = document.createElement("div");
  box.className = "atelier-schedule";
  box.style.cssText = `background:${GROUND};border-radius:4px;overflow:hidden;width:100%;height:100%;` +
    `min-height:${HEIGHT}px;display:flex;align-items:center;justify-content:center;box-sizing:border-box`;
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", height: "100%" });
  const words = document.createElement("div");
  words.style.cssText = `color:${BRIGHT};font:12px sans-serif;padding:8px;overflow-wrap:anywhere`;
  const say = (sentence) => {
    words.textContent = sentence;
    box.replaceChildren(words);
  };

  // Neither the workflow's file nor the prompt knows of the picture: it is made of what they hold.
  const widget = node.addDOMWidget("curve", "atelier_schedule", box, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => HEIGHT + 2 * MARGIN,
    getMaxHeight: () => 2 * (HEIGHT + MARGIN),
  });
  widget.serialize = false;

  let shown = "";
  async function refresh() {
    takePlace(node, box);
    const inputs = node.widgets.filter((input) => input.serialize !== false);
    const linked = inputs.find((input) => isLinked(node, input.name));
    const steps = stepsOf(node);
    const values = Object.fromEntries(inputs.map((input) => [input.name, input.value]));
    const question = JSON.stringify({ values, steps, linked: linked?.name });
    if (question === shown) return;
    shown = question;
    if (linked) return say(t("{0} is linked, so the curve is unknown before the run.", linked.name));
    const answer = await ask("/atelier/schedule", { values, steps });
    if (question !== shown) return; // something newer is being asked
    if (answer.error) return say(told(answer.error));
    draw(svg, answer, steps !== null);
    box.replaceChildren(svg);
  }
  return refresh;
}

const curves = new WeakMap();

app.registerExtension({
  name: "atelier.schedule",
  nodeCreated(node) {
    if (node.comfyClass === "AtelierScheduler") curves.set(node, addCurve(node));
  },
  setup() {
    // A curve depends on widgets that come and go with the chosen shape, on links and on another node's widgets, in
    // two renderers with different events: looking is simpler than listening, and costs nothing when nothing changed.
    setInterval(() => {
      if (document.hidden) return;
      for (const node of app.canvas?.graph?.nodes ?? []) curves.get(node)?.();
    }, INTERVAL);
  },
});
