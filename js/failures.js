import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { RED, ask, link, make, nodeOf, nodes, putFirst, widen } from "./parts.js";
import { t, told } from "./words.js";

// What went wrong at a node stands on it in red until its workflow is queued again: live, after a reload, in each tab
// that has the workflow open, on the node itself and on the nodes that stand for its subgraphs. The server tells of
// what failed while it ran; what it refused before that, only the page that asked has heard.

const MARGIN = 10; // pixels
export const LARGE = "600 17px/20px sans-serif"; // 10 pixels high at 0.6, the scale at which templates open
const DRAWN = 300, MARKED = 2500; // milliseconds until the editor has drawn a node anew; that a field is ringed
const LOOKS = 10; // for a field that is not there yet
/** @typedef {{ widget: Widget, box: HTMLElement, words: HTMLElement, text: string, tall: number, height: number }} Shown */
/** @typedef {{ said: Record<string, string>, whole: boolean }} Refused by the node's id; whether nothing else runs */
/** @type {Refused} */
const NOTHING = { said: {}, whole: false };
/** @type {WeakMap<GraphNode, Shown>} */
const shown = new WeakMap();
/** @type {Record<string, string>} */
let failed = {}, refused = {}; // of the open workflow, by the node's id in the prompt
/** @type {string[]} */
let early = []; // what failed before a run began, at its Train LoRA or before it
let whole = false; // whether nothing of the prompt that was refused runs
let heard = 0; // events of failures
let form = false; // whether it was drawn as a form last
/** @type {(() => void)[]} */
const listeners = []; // that draw nodes of their own

// What went wrong at a node; "" where nothing did. inside: or within the subgraph that it stands for.
/** @param {string} id @param {boolean} [inside] */
export function failureOf(id, inside = false) {
  return sentenceOf(keyOf(id, inside));
}

// Whether a node failed before its run began, so that what it shows is the run before.
/** @param {string} id @param {boolean} [inside] */
export function failedEarly(id, inside = false) {
  const key = keyOf(id, inside);
  return key !== undefined && (early.includes(key) || (whole && key in refused));
}

// What Train LoRA says: a form shows no other node, so there it says what went wrong at any of them.
/** @param {string} id */
export const failureOfRun = (id) => failureOf(id) || (isForm() ? sentenceOf(all()[0]) : "");

const all = () => [...Object.keys(failed), ...Object.keys(refused)];

/** @param {string} id @param {boolean} inside */
const keyOf = (id, inside) => all().find((each) => each === id) ??
  (inside ? all().find((each) => each.startsWith(`${id}:`)) : undefined);

/** @param {string} [key] */
const sentenceOf = (key) => key === undefined ? "" : String(told({ ...failed, ...refused }[key]));

// Whether the open workflow is shown as an app: a form in place of the graph.
export function isForm() {
  const open = app.extensionManager.workflow?.activeWorkflow;
  return (open?.activeMode ?? open?.initialMode) === "app";
}

/** @param {() => void} listen */
export const onFailures = (listen) => void listeners.push(listen);

// A sentence, in which each setting of a node here leads to it: "learning_rate of Optimizer". near: the node that says
// it; where the setting's node is missing and fits into the graph, the link adds it there.
/** @param {string} text @param {GraphNode} near @returns {(string | HTMLElement)[]} */
export function linked(text, near) {
  /** @type {(string | HTMLElement)[]} */
  let parts = [text];
  /** @type {Map<string, [string, () => void]>} */
  const named = new Map(); // what the sentence calls a setting -> what it is called where it is set, and the way there
  const all = [...nodes()].sort((one, other) => namedIn(one.node, text) - namedIn(other.node, text));
  for (const found of all) { // of several of a kind, that whose folder or file the sentence names
    const title = titleOf(found.node.constructor.nodeData?.display_name);
    for (const { name } of title ? found.node.widgets ?? [] : []) {
      const words = `${name.split(".").at(-1)} of ${title}`;
      if (!text.includes(words)) continue;
      const [node, own] = whereSet(found, name), { label } = node.widgets.find((each) => each.name === own) ?? {};
      const said = node === found.node ? words : `${label ?? own} of ${titleOf(node.title)}`;
      named.set(words, [said, () => lead(node, own)]);
    }
  }
  for (const { type, title } of missing(near)) {
    const [words, name] = text.match(new RegExp(`(\\w+) of ${title.replace(/\W/g, "\\$&")}(?!\\w)`)) ?? [];
    if (words && name && !named.has(words)) named.set(words, [words, () => addAnd(type, name, near)]);
  }
  for (const [words, [said, go]] of named)
    parts = parts.flatMap((part) => typeof part === "string" ? cut(part, words, () => linkTo(go, said)) : part);
  return parts;
}

/** @param {string} [title] */
const titleOf = (title) => title?.replace(/ \(Atelier\)$/, "");

// Where a setting is set: a subgraph may have given it to its outside, where it may be called otherwise.
/** @param {{ node: GraphNode, around: GraphNode[] }} found @param {string} name @returns {[GraphNode, string]} */
export function whereSet({ node, around }, name) {
  const slot = node.inputs?.findIndex((input) => input.widget?.name === name) ?? -1, outer = around.at(-1);
  const link = slot >= 0 && outer ? node.getInputLink(slot) : null;
  const given = link && !node.graph.getNodeById(link.origin_id) ? outer?.inputs?.[link.origin_slot]?.widget : null;
  return outer && given ? whereSet({ node: outer, around: around.slice(0, -1) }, given.name) : [node, name];
}

// How many letters of a sentence are a folder or a file that is set at a node.
/** @param {GraphNode} node @param {string} text */
function namedIn(node, text) {
  const values = (node.widgets ?? []).map(({ value }) => value).filter((value) => typeof value === "string" && value);
  const named = values.filter((value) => ["/", "\\", "'"].some((before) => text.includes(before + value)));
  return Math.max(0, ...named.map((value) => value.length));
}

// Our optional nodes that the graph around a node lacks, and that some node there would take.
/** @param {GraphNode} near */
function missing(near) {
  const around = near.graph?.nodes ?? [], there = new Set(around.map((node) => node.comfyClass));
  return Object.entries(window.LiteGraph?.registered_node_types ?? {}).flatMap(([type, { nodeData }]) => {
    const title = titleOf(nodeData?.display_name);
    const fits = title && type.startsWith("Atelier") && !there.has(type) && takerOf(nodeData?.output?.[0], near);
    return fits ? [{ type, title }] : [];
  });
}

// The node of a graph, first the one that asks, that has a free input of a type that only this pack knows.
/** @param {unknown} type @param {GraphNode} near */
function takerOf(type, near) {
  if (!String(type).startsWith("ATELIER_")) return undefined;
  const text = failureOf(idOf(near)), others = [...near.graph?.nodes ?? []];
  others.sort((one, other) => namedIn(other, text) - namedIn(one, text));
  for (const node of [near, ...others]) {
    const slot = node.inputs?.findIndex((input, i) => input.type === type && !node.isInputConnected(i)) ?? -1;
    if (slot >= 0) return { node, slot };
  }
}

/** @param {GraphNode} node */
const idOf = (node) => [...nodes()].find((each) => each.node === node)?.id ?? "";

// Add a node for one of its settings, left of all others, and lead to the setting.
/** @param {string} type @param {string} name @param {GraphNode} near */
function addAnd(type, name, near) {
  const node = window.LiteGraph?.createNode(type), { graph } = near;
  if (!node || !graph) return;
  app.canvas.emitBeforeChange(); // the editor undoes it as one step
  node.pos = [Math.min(...graph.nodes.map((each) => each.pos[0])) - node.size[0] - 6 * MARGIN, near.pos[1]];
  graph.add(node);
  const taker = takerOf(node.outputs?.[0]?.type, near);
  if (taker) link(node, 0, taker.node, taker.slot);
  app.canvas.emitAfterChange();
  lead(node, node.widgets?.find((each) => each.name.split(".").at(-1) === name)?.name ?? name);
}

/** @param {string} text @param {string} words @param {() => HTMLElement} put @returns {(string | HTMLElement)[]} */
const cut = (text, words, put) => text.split(words).flatMap((rest, i) => i ? [put(), rest] : [rest]);

/** @param {() => void} go @param {string} words */
function linkTo(go, words) {
  const link = make("a", "color:inherit;text-decoration:underline;cursor:pointer", words);
  link.tabIndex = 0;
  link.setAttribute("role", "link");
  link.addEventListener("pointerdown", (event) => event.stopPropagation());
  link.addEventListener("click", (event) => {
    event.stopPropagation(); // the editor would choose the node that the text stands on
    go();
  });
  link.addEventListener("keydown", ({ key }) => key === "Enter" && go());
  return link;
}

// Bring a setting into view: its graph, its node, with its advanced inputs where it is one of them; and its field.
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
  if (widget) setTimeout(() => focus(node, widget), DRAWN);
}

// Put the cursor into a setting's field. The classic renderer draws most fields and opens a box to change them; the other
// one makes a field some time after its graph is opened.
/** @param {GraphNode} node @param {Widget} widget @param {number} [left] times to look again */
function focus(node, widget, left = LOOKS) {
  const words = CSS.escape(widget.label ?? widget.name), drawn = !isForm() && !window.LiteGraph?.vueNodesMode;
  const field = drawn ? widget.element
    : document.querySelector(`${isForm() ? "" : `[data-node-id="${CSS.escape(String(node.id))}"] `}[aria-label="${words}"]`);
  const inner = field?.matches("input, textarea, button") ? field : field?.querySelector("input, textarea, button");
  if (inner) return void /** @type {HTMLElement} */ (inner).focus();
  if (!drawn) return void (left && setTimeout(() => focus(node, widget, left - 1), DRAWN));
  const place = placeOf(node, widget);
  ring(place);
  if (!["string", "number"].includes(typeof widget.value) || widget.options?.values) return; // the arrows change it
  const set = (/** @type {string} */ text) => {
    const value = typeof widget.value === "number" ? Number(text) : text;
    if (!Number.isNaN(value)) widget.setValue?.(value, { e: null, node, canvas: app.canvas });
  };
  app.canvas.constructor.active_canvas = app.canvas; // as the editor sets it when the pointer moves over its canvas
  const at = new MouseEvent("click", { clientX: place.x, clientY: place.y }); // where the box opens
  app.canvas.prompt(String(widget.label ?? widget.name), widget.value, set, at);
}

// Where the classic renderer draws a field, in pixels of the page.
/** @param {GraphNode} node @param {Widget} widget */
function placeOf(node, widget) {
  const { ds, canvas } = app.canvas, { left, top } = canvas.getBoundingClientRect();
  const [x, y] = [node.pos[0] + MARGIN, node.pos[1] + (widget.y ?? 0)].map((at, i) => (at + ds.offset[i]) * ds.scale);
  const [width, height] = [node.size[0] - 2 * MARGIN, 20].map((size) => size * ds.scale);
  return new DOMRect(left + x, top + y, width, height);
}

// Ring a field for a while.
/** @param {DOMRect} place */
function ring({ x, y, width, height }) {
  const made = make("div", `position:fixed;left:${x}px;top:${y}px;pointer-events:none;z-index:1000;` +
    `width:${width}px;height:${height}px;border-radius:${height / 2}px;outline:3px solid ${RED}`);
  made.className = "atelier-ring";
  document.body.append(made);
  setTimeout(() => made.remove(), MARKED);
}

/** @param {GraphNode} node @param {string} text */
function show(node, text) {
  const before = shown.get(node);
  if ((before?.text ?? "") === text) return;
  if (!text) return drop(node, before);
  if (before) {
    before.text = text;
    return before.words.replaceChildren(...linked(text, node));
  }
  widen(node);
  const box = make("div", "width:100%;overflow:hidden");
  const words = make("div", "overflow-wrap:anywhere;white-space:pre-wrap;user-select:text;cursor:text;" +
    `font:${LARGE};padding:4px;border-radius:4px;box-sizing:border-box;` +
    `border:1px solid ${RED};color:${RED};background:var(--comfy-input-bg)`);
  box.className = "atelier-failure";
  box.setAttribute("role", "alert");
  box.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
  words.replaceChildren(...linked(text, node));
  box.append(words);
  const options = { serialize: false, hideOnZoom: false, margin: MARGIN };
  const widget = node.addDOMWidget("failure", "atelier_failure", box, options);
  const entry = { widget, box, words, text, tall: node.size[1], height: 0 };
  widget.serialize = false; // neither the workflow's file nor the prompt knows of it
  widget.computeLayoutSize = undefined; // it takes what it needs, and no share of the room that is left
  widget.computeSize = (width) => [width ?? 0, entry.height + 2 * MARGIN];
  putFirst(node); // where the eye is: the end of a long node may lie below the screen
  shown.set(node, entry);
  new ResizeObserver(() => fit(node, entry)).observe(words);
  app.canvas?.setDirty(true, true); // the editor gives it a place when it draws next
}

// Give the widget the height of its words. Nodes 2.0 makes room by itself; the computed size counts rows that it hides.
/** @param {GraphNode} node @param {Shown} entry */
function fit(node, entry) {
  const { offsetHeight: height, offsetWidth: width } = entry.words;
  if (width < node.size[0] / 2 || height === entry.height || shown.get(node) !== entry) return; // it has no place yet
  entry.height = height;
  if (!window.LiteGraph?.vueNodesMode) node.setSize([node.size[0], Math.max(entry.tall, node.computeSize()[1])]);
  app.canvas?.setDirty(true, true);
}

/** @param {GraphNode} node @param {Shown} [before] */
function drop(node, before) {
  if (!before) return;
  shown.delete(node);
  const place = node.widgets.indexOf(before.widget);
  if (place >= 0) node.widgets.splice(place, 1);
  before.widget.onRemove?.();
  before.box.remove();
  if (!window.LiteGraph?.vueNodesMode) node.setSize([node.size[0], Math.max(before.tall, node.computeSize()[1])]);
  app.canvas?.setDirty(true, true);
}

function draw() {
  form = isForm();
  for (const { id, node } of nodes())
    if (node.comfyClass?.startsWith("Atelier") && node.comfyClass !== "AtelierTrain") show(node, failureOf(id));
  for (const listen of listeners) listen(); // Train LoRA, and what stands for a subgraph with one, show it themselves
}

/** @param {{ workflow: string, failed: Record<string, string>, early: string[] }} state */
function take(state) {
  if (state.workflow !== app.graph?.id) return;
  heard++;
  ({ failed, early } = state);
  draw();
}

async function refresh() {
  const workflow = app.graph?.id;
  ({ said: refused, whole } = recall()[workflow ?? ""] ?? NOTHING);
  [failed, early] = [{}, []];
  if (workflow && !nodes().next().done) {
    const before = heard, answer = await ask("/atelier/failed", { workflow });
    if (workflow !== app.graph?.id || before !== heard) return; // what an event said since is newer
    ({ failed = {}, early = [] } = answer);
  }
  draw();
}

// What ComfyUI refused before it queued a prompt, in words: ours as they are, its own with the setting.
/** @param {Record<string, any>} errors of nodes, by their ids */
function sentences(errors) {
  return Object.fromEntries(Object.entries(errors).map(([id, { errors: found }]) => {
    const said = (/** @type {any} */ { type, message, details, extra_info: more }) => {
      const name = more?.input_name ?? "";
      if (type === "custom_validation_failed") return details.replace(`${name} - `, "");
      const title = titleOf(nodeOf(id)?.constructor.nodeData?.display_name);
      const setting = title ? `${name} of ${title}` : name, { min = "-∞", max = "∞" } = more?.input_config?.[1] ?? {};
      if (type === "required_input_missing") return t("Nothing is linked into {0}; link a node into it.", setting);
      if (type === "value_smaller_than_min" || type === "value_bigger_than_max")
        return t("{0} is {1}; set it to a number from {2} to {3}.", setting, more.received_value, min, max);
      if (type === "value_not_in_list" && details.endsWith(" not in []"))
        return t("There is no file for {0} yet; put one into ComfyUI's folder for it and press R.", setting);
      if (type === "value_not_in_list" && more.received_value === "")
        return t("{0} is empty; set it to one of its list.", setting);
      if (type === "value_not_in_list")
        return t("{0} is {1}, which is not in its list; set it to one of the list.", setting, more.received_value);
      return `${name ? setting : details}: ${message}.`; // in ComfyUI's words
    };
    return [id, [...new Set(found.map(said))].join("\n")];
  }));
}

// Not an async function: the editor logs what it refuses with the calls that led to it, and this one is none of them.
const queue = api.queuePrompt;
/** @param {[number, Prompt, ...unknown[]]} given */
api.queuePrompt = function (...given) {
  keep(NOTHING);
  const hear = (/** @type {Record<string, any> | undefined} */ errors, /** @type {boolean} */ whole) => {
    keep({ said: sentences(errors ?? {}), whole });
    draw();
  };
  /** @type {Promise<any>} */
  const answer = queue.apply(this, given);
  answer.then((taken) => hear(taken?.node_errors, false), (problem) => hear(problem?.response?.node_errors, true));
  return answer;
};

const KEPT = "atelier.refusals", MOST_KEPT = 20; // the browser's own store; the workflows that it remembers

// What was refused, by the workflow's id: it stands there after a reload and in other tabs, until it is queued again.
/** @returns {Record<string, Refused>} */
function recall() {
  try {
    return JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  } catch (problem) {
    if (problem instanceof SyntaxError) return {}; // somebody else wrote it
    throw problem;
  }
}

/** @param {Refused} now */
function keep(now) {
  ({ said: refused, whole } = now);
  const { [app.graph?.id ?? ""]: before, ...others } = recall();
  if (!before && !Object.keys(refused).length) return;
  const kept = [...Object.entries(others), ...Object.keys(refused).length ? [[app.graph?.id ?? "", now]] : []];
  localStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(kept.slice(-MOST_KEPT))));
}

// Say at nodes of the open workflow what is still to be set there, as if they had been queued.
/** @param {Record<string, string>} found */
export function refuse(found) {
  keep({ said: found, whole: true });
  draw();
}

api.addEventListener("atelier.failed", ({ detail }) => take(detail)); // early: the editor warns of events without one

app.registerExtension({
  name: "atelier.failures",
  afterConfigureGraph: refresh,
  setup() {
    api.addEventListener("reconnected", refresh);
    window.addEventListener("storage", ({ key }) => key === KEPT && refresh()); // another tab's
    setInterval(() => isForm() === form || draw(), DRAWN); // the editor tells nobody, and after a reload knows it late
  },
});
