import { isLinked } from "./parts.js";
import { beneath, BOTTOM, element, grid, HEIGHT, HELD_OUT, label, LEFT, RAW, RIGHT, short, showPicture, SMOOTH, TOP,
  WIDTH } from "./picture.js";
import { t } from "./words.js";

// The Scheduler shows the learning rate's curve.

/**
 * @param {{steps: number, warmup: number, floor: number, points: [number, number][]}} answer
 * @param {{steps: number | null}} question
 */
function draw({ steps, warmup, floor, points }, { steps: known }) {
  const width = WIDTH - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
  const top = Math.max(1, ...points.map(([, factor]) => factor));
  const x = (/** @type {number} */ step) => LEFT + (width * step) / Math.max(steps - 1, 1);
  const y = (/** @type {number} */ factor) => TOP + height * (1 - factor / top);
  const parts = [];
  if (warmup > 0) {
    const right = x(Math.min(warmup, steps - 1)), bottom = Math.min(y(0), y(floor) + (floor > 0.25 * top ? height : 0));
    parts.push(element("rect", { x: LEFT, y: TOP, width: right - LEFT, height, fill: RAW, opacity: 0.35 }));
    parts.push(label(right + 4, bottom - 5, "start", t("warm-up {0}", warmup)));
  }
  parts.push(...grid([0, top / 2, top], y));
  if (floor > 0) {
    const dashes = { stroke: HELD_OUT, "stroke-dasharray": "4 3" };
    const line = { x1: LEFT, x2: LEFT + width, y1: y(floor), y2: y(floor), ...dashes };
    const words = label(LEFT + width / 4, y(floor) - 4, "middle", t("floor {0}", short(floor)), HELD_OUT);
    parts.push(element("line", line), words);
  }
  parts.push(...beneath(known !== null ? [t("step {0}", 1), String(Math.round(steps / 2)), String(steps)]
    : [t("start"), "50 %", t("end")]));
  const path = points.map(([step, factor]) => `${x(step).toFixed(2)},${y(factor).toFixed(2)}`).join(" ");
  if (points.length > 1)
    parts.push(element("polyline", { points: path, fill: "none", stroke: SMOOTH, "stroke-width": 2 }));
  else parts.push(element("circle", { cx: x(0), cy: y(points[0][1]), r: 3, fill: SMOOTH }));
  return parts;
}

// How long the run is: the steps of a Train LoRA that the Scheduler is linked to, where it counts in steps.
/** @param {GraphNode} node */
function stepsOf(node) {
  for (const train of node.getOutputNodes(0) ?? []) {
    if (train.comfyClass !== "AtelierTrain") continue;
    if (["steps", "epochs"].some((name) => isLinked(train, name))) continue;
    const value = (/** @type {string} */ name) => train.widgets?.find((widget) => widget.name === name)?.value;
    if (value("epochs") === 0) return value("steps");
  }
  return null;
}

showPicture({
  comfyClass: "AtelierScheduler",
  kind: "schedule",
  address: "/atelier/schedule",
  more: (node) => ({ steps: stepsOf(node) }),
  draw,
  unknown: (name) => t("{0} is linked, so the curve is unknown before the run.", name),
});
