import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { RED, ask, make, nodes } from "./parts.js";
import { told } from "./words.js";

// What went wrong at a node stands on it in red until its workflow is queued again: live, after a reload, in each tab
// that has the workflow open, on the node itself and on the nodes that stand for its subgraphs. The server tells of
// what failed while it ran; what it refused before that, only the page that asked has heard.

const MARGIN = 10, LINE = 15, LETTER = 7.2, MOST = 150; // pixels; a letter of the widest sort that paths are made of
/** @typedef {{ widget: Widget, box: HTMLElement, words: HTMLElement, text: string }} Shown */
/** @type {WeakMap<GraphNode, Shown>} */
const shown = new WeakMap();
/** @type {Record<string, string>} */
let failed = {}, refused = {}; // of the open workflow, by the node's id in the prompt
/** @type {(() => void)[]} */
const listeners = []; // that draw nodes of their own

// What went wrong at a node, or within the subgraph that it stands for; "" where nothing did.
/** @param {string} id @param {boolean} [inside] */
export function failureOf(id, inside = false) {
  /** @type {Record<string, string>} */
  const all = { ...failed, ...refused };
  const key = id in all ? id : inside ? Object.keys(all).find((each) => each.startsWith(`${id}:`)) : undefined;
  return key === undefined ? "" : String(told(all[key]));
}

/** @param {() => void} listen */
export const onFailures = (listen) => void listeners.push(listen);

// A sentence, in which each setting of a node here leads to it: "learning_rate of Optimizer".
/** @param {string} text @returns {(string | HTMLElement)[]} */
export function linked(text) {
  /** @type {(string | HTMLElement)[]} */
  let parts = [text];
  const named = new Map();
  for (const { node } of nodes()) {
    const title = node.constructor.nodeData?.display_name?.replace(/ \(Atelier\)$/, "");
    for (const { name } of title ? node.widgets ?? [] : []) {
      const words = `${name.split(".").at(-1)} of ${title}`;
      if (text.includes(words)) named.set(words, { node, name });
    }
  }
  for (const [words, { node, name }] of named)
    parts = parts.flatMap((part) => typeof part === "string" ? cut(part, words, () => linkTo(node, name, words)) : part);
  return parts;
}

/** @param {string} text @param {string} words @param {() => HTMLElement} put @returns {(string | HTMLElement)[]} */
const cut = (text, words, put) => text.split(words).flatMap((rest, i) => i ? [put(), rest] : [rest]);

/** @param {GraphNode} node @param {string} name @param {string} words */
function linkTo(node, name, words) {
  const link = make("a", "color:inherit;text-decoration:underline;cursor:pointer", words);
  link.tabIndex = 0;
  link.setAttribute("role", "link");
  link.addEventListener("pointerdown", (event) => event.stopPropagation());
  link.addEventListener("click", (event) => {
    event.stopPropagation(); // the editor would choose the node that the text stands on
    lead(node, name);
  });
  link.addEventListener("keydown", ({ key }) => key === "Enter" && lead(node, name));
  return link;
}

// Bring a setting into view: its graph, its node, with its advanced inputs where it is one of them.
/** @param {GraphNode} node @param {string} name */
function lead(node, name) {
  const { canvas } = app;
  if (node.graph && canvas.graph !== node.graph) canvas.setGraph(node.graph);
  const widget = node.widgets?.find((each) => each.name === name);
  if (widget?.options?.advanced && !node.showAdvanced) {
    node.showAdvanced = true;
    const [width, height] = node.computeSize();
    node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])]);
  }
  canvas.selectNode(node);
  canvas.centerOnNode(node);
  canvas.setDirty(true, true);
}

/** @param {GraphNode} node @param {string} text */
function show(node, text) {
  const before = shown.get(node);
  if ((before?.text ?? "") === text) return;
  if (!text) return drop(node, before);
  if (before) {
    before.text = text;
    return before.words.replaceChildren(...linked(text));
  }
  const box = make("div", "overflow:auto;width:100%;max-height:100%"); // Nodes 2.0 gives it all room that is left
  const words = make("div", "overflow-wrap:anywhere;white-space:pre-wrap;user-select:text;cursor:text;" +
    `font:600 12px/${LINE}px sans-serif;padding:4px;border-radius:4px;box-sizing:border-box;` +
    `border:1px solid ${RED};color:${RED};background:var(--comfy-input-bg)`);
  box.className = "atelier-failure";
  box.setAttribute("role", "alert");
  box.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
  words.replaceChildren(...linked(text));
  box.append(words);
  const height = () => Math.min(MOST, LINE * Math.ceil(((shown.get(node)?.text ?? text).length * LETTER) /
    Math.max(100, node.size[0] - 4 * MARGIN)) + 12) + 2 * MARGIN;
  const options = { serialize: false, hideOnZoom: false, margin: MARGIN, getMinHeight: height, getMaxHeight: height };
  const widget = node.addDOMWidget("failure", "atelier_failure", box, options);
  widget.serialize = false; // neither the workflow's file nor the prompt knows of it
  shown.set(node, { widget, box, words, text });
  const [width, tall] = node.size;
  // Nodes 2.0 makes room by itself; the computed size counts rows that it hides.
  if (!window.LiteGraph?.vueNodesMode) node.setSize([width, Math.max(tall, node.computeSize()[1])]);
  app.canvas?.setDirty(true, true); // the editor gives it a place when it draws next
}

/** @param {GraphNode} node @param {Shown} [before] */
function drop(node, before) {
  if (!before) return;
  shown.delete(node);
  const place = node.widgets.indexOf(before.widget);
  if (place >= 0) node.widgets.splice(place, 1);
  before.widget.onRemove?.();
  before.box.remove();
  app.canvas?.setDirty(true, true);
}

function draw() {
  for (const { id, node } of nodes())
    if (node.comfyClass?.startsWith("Atelier") && node.comfyClass !== "AtelierTrain") show(node, failureOf(id));
  for (const listen of listeners) listen(); // Train LoRA, and what stands for a subgraph with one, show it themselves
}

/** @param {{ workflow: string, failed: Record<string, string> }} state */
function take(state) {
  if (state.workflow !== app.graph?.id) return;
  failed = state.failed;
  draw();
}

async function refresh() {
  const workflow = app.graph?.id;
  [failed, refused] = [{}, {}];
  if (workflow && !nodes().next().done) failed = (await ask("/atelier/failed", { workflow })).failed ?? {};
  if (workflow === app.graph?.id) draw();
}

// What ComfyUI refused before it queued a prompt, in words: ours as they are, its own with the setting.
/** @param {Record<string, any>} errors of nodes, by their ids */
function sentences(errors) {
  return Object.fromEntries(Object.entries(errors).map(([id, { errors: found }]) => {
    const said = (/** @type {any} */ { type, message, details, extra_info: more }) => {
      const name = more?.input_name ?? "";
      if (type === "custom_validation_failed") return details.replace(`${name} - `, "");
      return `${name || details}: ${message}.`; // in ComfyUI's words
    };
    return [id, [...new Set(found.map(said))].join("\n")];
  }));
}

// Not an async function: the editor logs what it refuses with the calls that led to it, and this one is none of them.
const queue = api.queuePrompt;
/** @param {[number, Prompt, ...unknown[]]} given */
api.queuePrompt = function (...given) {
  refused = {};
  /** @type {Promise<any>} */
  const answer = queue.apply(this, given);
  answer.then((taken) => taken?.node_errors, (problem) => problem?.response?.node_errors).then((errors) => {
    refused = sentences(errors ?? {});
    draw();
  });
  return answer;
};

api.addEventListener("atelier.failed", ({ detail }) => take(detail)); // early: the editor warns of events without one

app.registerExtension({
  name: "atelier.failures",
  afterConfigureGraph: refresh,
  setup() {
    api.addEventListener("reconnected", refresh);
  },
});
