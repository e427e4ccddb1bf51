import { app } from "../../scripts/app.js";
import { FONT, ask, isLinked, link, make, makeButton, nodeOf, nodes, toast } from "./parts.js";
import { closePopup, makeChoice, makeChooser, openPopup, placePopup } from "./popup.js";
import { t, told } from "./words.js";

// What sets a run from afar, on Train LoRA: a guess by the pictures and the memory, and presets. Both ask the server
// which input takes which value, set them in one step that the editor undoes, and tell what was set.

/**
 * @typedef {object} Filled a setting, as nodes/filling.py describes the input that takes it
 * @property {string} setting
 * @property {string | number | boolean} value
 * @property {string} [reason]
 * @property {boolean} taken without its node the run takes the value anyway
 * @property {string | null} node its id, where it is linked
 * @property {string} widget
 * @property {string} where the name of the node
 * @property {string} kind the class of the node
 * @property {[string, string] | null} into the node and the input that take a new node
 */
/** @typedef {{ title?: string, settings: Filled[], notes?: string[], sources?: string[], error?: string }} Answer */
/** @typedef {{ kind: string, title: string, memory: number[] }} Family */
/** @typedef {{ node: GraphNode, values?: Map<string, unknown>, set?: Map<string, unknown> }} Change no values: it is new */

const GAP = 40, TITLE = 40, STEP = 30, COLUMNS = 12, ROWS = 80; // pixels around a new node, and where one is looked for
const FRAMES = 3; // until a node has the height of what it shows
const STORED = "atelier.memory"; // the size of memory that somebody chose
const GUESS = t("Set resolution, batch, steps, rank and learning rate by the pictures, the model and the free memory, " +
  "with the reasons.");
const PRESET = t("Set what suits a character, a style or a thing, by the model and the memory of the GPU.");
/** @type {WeakMap<GraphNode, () => void>} */
const menus = new WeakMap(); // Train LoRA -> opens its presets
/** @type {Record<string, string>} */
const GOALS = { character: t("Character"), style: t("Style"), thing: t("Thing") };

export class Filling {
  #node;
  /** @type {Change[]} */
  #changes = [];
  #busy = false;
  box = make("div", `${FONT};display:none;user-select:text;overflow-wrap:anywhere`);
  guess = makeButton(t("Guess settings"), GUESS, () => this.#takeGuess());
  preset = makeButton(t("Preset…"), PRESET, () => this.#offer());

  /** @param {GraphNode} node a Train LoRA */
  constructor(node) {
    this.#node = node;
    this.box.className = "atelier-guesses";
    this.box.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
    this.preset.setAttribute("aria-haspopup", "dialog");
    menus.set(node, () => void (this.#busy || this.#offer()));
  }

  // A run at work has the settings that it began with, and leaves no memory to guess by.
  /** @param {boolean} alive */
  update(alive) {
    this.#busy = alive;
    const why = t("A LoRA is being trained here. Change the settings after it.");
    for (const [button, help] of /** @type {[HTMLButtonElement, string][]} */ ([[this.guess, GUESS],
      [this.preset, PRESET]])) {
      button.disabled = alive;
      button.title = alive ? why : help;
      button.style.opacity = alive ? "0.4" : "1";
      button.style.cursor = alive ? "default" : "pointer";
    }
  }

  async #takeGuess() {
    this.guess.disabled = true;
    const answer = await this.#ask("/atelier/guess");
    this.guess.disabled = this.#busy;
    if (answer) this.#take(answer);
  }

  // Ask about this node; a refusal is shown as a toast.
  /** @param {string} address @param {object} [more] @returns {Promise<any>} */
  async #ask(address, more = {}) {
    const id = [...nodes()].find(({ node }) => node === this.#node)?.id ?? "";
    const { output } = await app.graphToPrompt();
    const answer = await ask(address, { prompt: leadingTo(id, output), node: id, ...more });
    if (!answer.error) return answer;
    toast(answer, t("Train LoRA"));
    return null;
  }

  // Choose family and memory; one click on a goal sets them.
  async #offer() {
    const offered = await this.#ask("/atelier/presets");
    if (!offered) return;
    /** @type {{ families: Family[], networks: Record<string, string>, goals: string[], family: string, unknown: string,
     *   memory: number }} */
    const { families, networks, goals, family, unknown, memory } = offered;
    const dialog = openPopup(t("Preset"), this.preset);
    const [model, familyOf] = makeChooser(t("Model")), [size, memoryOf] = makeChooser(t("Memory of the GPU"));
    const [network, networkOf] = makeChooser(t("Network"));
    const buttons = goals.map((goal) => makeButton(GOALS[goal] ?? goal, "", async () => {
      closePopup();
      localStorage.setItem(STORED, memoryOf.value);
      const more = { goal, family: familyOf.value, memory: Number(memoryOf.value), network: networkOf.value };
      const answer = await this.#ask("/atelier/presets", more);
      const title = t("Preset: {0}, {1}, {2} GB", GOALS[goal], answer?.family, more.memory);
      if (answer) this.#take({ ...answer, title });
    }));
    const sizes = () => {
      const all = families.find(({ kind }) => kind === familyOf.value)?.memory ?? [];
      const most = Number(localStorage.getItem(STORED) ?? 0) || memory || all[0];
      memoryOf.replaceChildren(...all.map((gigabytes, i) => makeChoice(String(gigabytes),
        i === all.length - 1 ? t("{0} GB or more", gigabytes) : t("{0} GB", gigabytes))));
      memoryOf.value = String(all.findLast((gigabytes) => gigabytes <= most) ?? all[0] ?? "");
      for (const button of buttons) button.disabled = !familyOf.value;
    };
    if (!family) familyOf.append(makeChoice("", t("Choose…")));
    familyOf.append(...families.map(({ kind, title }) => makeChoice(kind, title)));
    familyOf.value = family;
    familyOf.addEventListener("change", sizes);
    sizes();
    networkOf.append(...Object.entries(networks).map(([name, title]) => makeChoice(name, title)));
    const row = make("div", "display:flex;gap:6px");
    for (const button of buttons) button.style.cssText += ";flex:1;padding:6px;font-size:13px";
    row.append(...buttons);
    if (unknown) dialog.append(make("div", "font:12px/16px sans-serif", told(unknown)));
    dialog.append(model, size, network, row, make("div", "font:12px/16px sans-serif",
      t("Sets steps, batch, resolution, rank, learning rate and memory. Pictures, trigger word and names stay.")));
    placePopup(dialog, this.preset);
    (family ? buttons[0] : familyOf).focus();
  }

  // Set what an answer holds, as one step to undo, and tell it.
  /** @param {Answer} answer */
  #take(answer) {
    asOneStep(() => {
      const [lines, changes] = fill(answer.settings);
      this.#changes = changes;
      this.#tell(lines, answer);
    });
  }

  /** @param {string[]} lines @param {Answer} answer */
  #tell(lines, { title, notes = [], sources = [] }) {
    /** @type {HTMLElement[]} */
    const parts = [...(title ? [make("div", "font-weight:600", title)] : []),
      ...[...lines, ...notes.map(told)].map((line) => make("div", "", line))];
    if (title && !lines.length) parts.splice(1, 0, make("div", "", t("All of it is set already.")));
    if (sources.length) {
      const from = make("details", "opacity:0.8");
      from.append(make("summary", "cursor:pointer", t("Where the numbers come from")),
        ...sources.map((source) => make("div", "", source)));
      parts.push(from);
    }
    const close = makeButton(t("Close"), "", () => this.#close());
    const undo = makeButton(t("Undo"), t("Set all of it back."), () => this.#undo());
    const row = make("div", "display:flex;gap:4px;margin-top:4px");
    row.append(...(this.#changes.length ? [undo] : []), close);
    this.box.replaceChildren(...parts, row);
    this.box.style.display = "";
  }

  #undo() {
    asOneStep(() => {
      for (const change of this.#changes.reverse()) restore(change);
      this.#close();
    });
  }

  #close() {
    this.#changes = [];
    this.box.replaceChildren();
    this.box.style.display = "none";
  }
}

// Change the graph as one step that the editor undoes, with the height that the node takes for what it then shows.
/** @param {() => void} change */
async function asOneStep(change) {
  app.canvas.emitBeforeChange();
  change();
  app.graph?.setDirtyCanvas(true, true);
  for (let frame = 0; frame < FRAMES; frame++) await new Promise((done) => requestAnimationFrame(done));
  app.canvas.emitAfterChange();
}

// --- setting ------------------------------------------------------------------------------------------------------

// Set values, with the nodes that some of them need; returns what to tell and what to undo.
/** @param {Filled[]} settings @returns {[string[], Change[]]} */
function fill(settings) {
  /** @type {string[]} */
  const lines = [];
  /** @type {Map<string, Change>} */
  const changes = new Map();
  for (const each of settings) {
    const known = changes.get(each.node ?? each.kind), needed = settings.some(({ kind, node, taken }) =>
      kind === each.kind && !node && !taken);
    let node = known?.node ?? (each.node ? nodeOf(each.node) : undefined);
    if (!node && each.into && needed) {
      node = add(each.kind, each.into);
      if (node) changes.set(each.kind, { node });
      if (node) lines.push(t("Added {0}.", each.where));
    }
    const words = each.reason ? `${each.setting} ${each.value}: ${told(each.reason)}` : "";
    const line = node ? put(node, each, changes, words) : without(each, words);
    if (line) lines.push(line);
  }
  for (const [key, { node, values }] of changes)
    if (values && [...values].every(([name, value]) => valueIn(node, name) === value)) changes.delete(key);
  return [lines, [...changes.values()]];
}

/** @param {Filled} each @param {string} words */
function without({ setting, taken, where }, words) {
  if (taken) return words && `${words} ${t("{0} is not linked; it is the same without.", where)}`;
  return `${words} ${t("{0} is not linked; link it to set {1}.", where, setting)}`.trim();
}

// Put a value into its widget; returns what to tell.
/** @param {GraphNode} node @param {Filled} filled @param {Map<string, Change>} changes @param {string} words */
function put(node, { setting, value, widget: name, where, kind, node: id }, changes, words) {
  const widget = node.widgets?.find((each) => each.name === name);
  if (!widget || isLinked(node, name))
    return `${words} ${t("{0} of {1} is linked and stays as it is.", setting, where)}`.trim();
  if (widget.value === value) return words;
  if (!changes.has(id ?? kind)) changes.set(id ?? kind, { node, values: valuesOf(node) });
  const before = widget.value;
  set(widget, value);
  const change = /** @type {Change} */ (changes.get(id ?? kind));
  change.set = (change.set ?? new Map()).set(name, value);
  if (words) return words;
  return change.values ? t("Set {0} of {1} to {2} (was {3}).", setting, where, value, before)
    : t("Set {0} of {1} to {2}.", setting, where, value);
}

/** @param {Widget} widget @param {unknown} value */
function set(widget, value) {
  widget.value = value;
  widget.callback?.(value);
}

/** @param {GraphNode} node @param {string} name */
const valueIn = (node, name) => node.widgets?.find((each) => each.name === name)?.value;

/** @param {GraphNode} node */
const valuesOf = (node) => new Map((node.widgets ?? []).filter((each) => each.serialize !== false)
  .map((each) => [each.name, each.value]));

// Take a change back, but for what somebody has set since.
/** @param {Change} change */
function restore({ node, values, set: ours = new Map() }) {
  if (!node.graph?.nodes.includes(node)) return; // it was deleted, or the editor made it anew
  if (!values) return node.graph.remove(node);
  const theirs = [...ours].filter(([name, value]) => valueIn(node, name) !== value).map(([name]) => name);
  for (const [name, value] of values) { // in their order: a choice brings its own inputs
    const widget = node.widgets?.find((each) => each.name === name);
    const touched = ours.has(name) || name.includes(".");
    if (widget && touched && !theirs.includes(name) && widget.value !== value) set(widget, value);
  }
}

// Add a node beside the one that takes it, where nothing else is, and link it.
/** @param {string} kind @param {[string, string]} into */
function add(kind, [id, socket]) {
  const taker = nodeOf(id), slot = taker?.inputs?.findIndex((input) => input.name === socket) ?? -1;
  if (!taker || slot < 0 || taker.isInputConnected(slot)) return; // linked to what gives nothing
  const node = window.LiteGraph?.createNode(kind);
  if (!node) return;
  taker.graph.add(node);
  node.pos = free(taker, node.size);
  link(node, 0, taker, slot);
  return node;
}

/** @param {GraphNode} taker @param {[number, number]} size @returns {[number, number]} */
function free(taker, [width, height]) {
  const others = taker.graph.nodes.filter((each) => each.pos && each.size);
  /** @param {number} x @param {number} y */
  const isFree = (x, y) => others.every(({ pos, size }) => x + width + GAP <= pos[0] || pos[0] + size[0] + GAP <= x ||
    y + height + GAP <= pos[1] - TITLE || pos[1] + size[1] + GAP <= y - TITLE);
  for (let column = 0; column < COLUMNS; column++)
    for (let row = 0; row < ROWS; row++) {
      const x = taker.pos[0] - (column + 1) * (width + GAP), y = taker.pos[1] + row * STEP;
      if (isFree(x, y)) return [x, y];
    }
  return [taker.pos[0] - width - GAP, taker.pos[1] - height - TITLE - GAP];
}

// The part of a prompt that leads to a node.
/** @param {string} id @param {Prompt["output"]} prompt */
export function leadingTo(id, prompt) {
  const found = new Set([id]);
  for (const key of found) // also those that are added meanwhile
    for (const value of Object.values(prompt[key]?.inputs ?? {}))
      if (Array.isArray(value) && prompt[value[0]]) found.add(value[0]);
  return Object.fromEntries([...found].filter((key) => prompt[key]).map((key) => [key, prompt[key]]));
}

// The right-click menu of Train LoRA has the presets, too.
app.registerExtension({
  name: "atelier.presets",
  getNodeMenuItems(node) {
    const offer = menus.get(node);
    return offer ? [{ content: t("Preset…"), callback: offer }] : [];
  },
});
