import { app } from "../../scripts/app.js";
import { FONT, ON_NODE, ask, isLinked, onceRead, takePlace } from "./parts.js";
import { told } from "./words.js";

// A picture on a node of what its widgets mean, in the colours of the loss plot. The server computes it, so that it
// shows what a run does.

export const WIDTH = 320, HEIGHT = 170, LEFT = 50, RIGHT = 12, TOP = 14, BOTTOM = 30;
export const LETTERS = 22; // units of the picture, which is fitted into its node: as high as others on the narrowest
export const SMOOTH = "rgb(255,176,66)", HELD_OUT = "rgb(96,180,255)", RAW = "rgb(104,92,66)";
const GROUND = "rgb(24,25,28)", GRID = "rgb(52,55,60)", BRIGHT = "rgb(232,233,236)", DIM = "rgb(152,156,164)";
const MARGIN = 10; // pixels; a canvas node takes the margin off the height on every side
const INTERVAL = 250; // milliseconds

/** @param {string} kind @param {Record<string, string | number>} attributes @param {string} [text] */
export function element(kind, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

/** @param {number} x @param {number} y @param {string} anchor @param {string} text @param {string} [fill] */
export function label(x, y, anchor, text, fill = DIM) {
  const halo = { stroke: GROUND, "stroke-width": 5, "paint-order": "stroke" }; // it may stand on a curve
  return element("text", { x, y, "text-anchor": anchor, "font-size": LETTERS, "font-family": "sans-serif", fill,
    ...halo }, text);
}

/** @param {number} value */
export const short = (value) => String(Number(value.toPrecision(2)));

// Lines across the picture at some values, with the values beside them.
/** @param {number[]} values @param {(value: number) => number} y */
export function grid(values, y) {
  const ends = { x1: LEFT, x2: WIDTH - RIGHT, stroke: GRID };
  return values.flatMap((value) => [element("line", { ...ends, y1: y(value), y2: y(value) }),
    label(LEFT - 5, y(value) + 0.35 * LETTERS, "end", short(value))]);
}

// Words beneath the picture: at its start, middle and end.
/** @param {string[]} words */
export function beneath(words) {
  return ["start", "middle", "end"].map((anchor, i) =>
    label(LEFT + ((WIDTH - LEFT - RIGHT) * i) / 2, HEIGHT - 8, anchor, words[i]));
}

/** @type {WeakMap<GraphNode, () => void>} */
const refreshers = new WeakMap();

/**
 * @typedef {object} Picture
 * @property {string} comfyClass
 * @property {string} kind its name in classes and widgets
 * @property {string} address of the server's answer
 * @property {(node: GraphNode) => object} more what the question holds besides the widgets' values
 * @property {(answer: any, question: any) => Element[]} draw the parts of the picture
 * @property {(name: string) => string | false} unknown a sentence where a widget of that name is linked; false if the
 *   picture does not need it
 */
// Give every node of a class a picture.
/** @param {Picture} picture */
export function showPicture(picture) {
  app.registerExtension({
    name: `atelier.${picture.kind}`,
    nodeCreated(node) {
      if (node.comfyClass === picture.comfyClass) refreshers.set(node, addPicture(node, picture));
    },
  });
}

/** @param {GraphNode} node @param {Picture} picture */
function addPicture(node, { kind, address, more, draw, unknown }) {
  const box = document.createElement("div");
  box.className = `atelier-${kind}`;
  box.style.cssText = `background:${GROUND};border-radius:4px;overflow:hidden;width:100%;height:100%;` +
    `min-height:${HEIGHT}px;display:flex;align-items:center;justify-content:center;box-sizing:border-box`;
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: "100%", height: "100%" });
  const words = document.createElement("div");
  words.style.cssText = `${ON_NODE};${FONT};color:${BRIGHT};padding:8px;overflow-wrap:anywhere`;
  /** @param {string} sentence */
  const say = (sentence) => {
    words.textContent = sentence;
    box.replaceChildren(words);
  };

  // Neither the workflow's file nor the prompt knows of the picture: it is made of what they hold.
  const options = {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => HEIGHT + 2 * MARGIN,
    getMaxHeight: () => 2 * (HEIGHT + MARGIN),
  };
  onceRead(() => {
    node.addDOMWidget("curve", `atelier_${kind}`, box, options).serialize = false;
  });

  let shown = "";
  return async function refresh() {
    takePlace(node, box);
    const inputs = node.widgets.filter((input) => input.serialize !== false);
    const linked = inputs.filter((input) => isLinked(node, input.name)).map((input) => input.name);
    const known = inputs.filter((input) => !linked.includes(input.name)).map((input) => [input.name, input.value]);
    const question = { values: Object.fromEntries(known), ...more(node) };
    const key = JSON.stringify([question, linked]);
    if (key === shown) return;
    shown = key;
    const sentence = linked.map(unknown).find(Boolean);
    if (sentence) return say(sentence);
    const answer = await ask(address, question);
    if (key !== shown) return; // something newer is being asked
    if (answer.error) return say(told(answer.error));
    svg.replaceChildren(...draw(answer, question));
    box.replaceChildren(svg);
  };
}

app.registerExtension({
  name: "atelier.pictures",
  setup() {
    // A picture depends on widgets that come and go with a choice, on links and on another node's widgets, in two
    // renderers with different events: looking is simpler than listening, and costs nothing when nothing changed.
    setInterval(() => {
      if (document.hidden) return;
      for (const node of app.canvas?.graph?.nodes ?? []) refreshers.get(node)?.();
    }, INTERVAL);
  },
});
