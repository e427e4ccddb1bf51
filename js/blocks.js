import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { FONT, ON_NODE, ask, isLinked, make, takePlace } from "./parts.js";
import { deciding, parse, write } from "./rules.js";
import { t, told } from "./words.js";

// LoRA Blocks has a slider for each block of its LoRA. The sliders hold nothing themselves: they show what the rules
// say, and write rules. Only the names of the blocks come from elsewhere: from the header of the file that is linked,
// or from the node's last run.

/** @import { Rule } from "./rules.js" */
/** @typedef {{ file?: string, output?: string }} Source the name of a file, or a key of an output */
/** @typedef {{ blocks?: string[], error?: string }} Known */
/** @typedef {{ slider: HTMLInputElement, number: HTMLElement, line: HTMLElement }} Row */
/** @typedef {{ list: string, rows: [string, string][] }} Group blocks of a list, or one by itself */

const MOST = 400; // sliders
const OTHER = "other"; // layers outside of all blocks, as trainer_core/lora_files/blocks.py calls them
// Pixels: the most height of the box, its room beneath, as Nodes 2.0 leaves none, and the margin, which a canvas node
// takes off the height on every side.
const TALLEST = 360, EDGE = 4, MARGIN = 10;
const INTERVAL = 250; // milliseconds
const STORED = "atelier.blocks", MOST_STORED = 30; // what runs told, for the page after a reload
const BOX = "position:relative;overflow:auto;box-sizing:border-box;width:100%;height:100%;border-radius:4px;" +
  `outline:none;color:var(--input-text);${ON_NODE};${FONT};background:var(--comfy-input-bg) padding-box;` +
  `border-bottom:${EDGE}px solid transparent`;
// Out of the flow: what is in the box gives no node its height.
const INNER = "position:absolute;left:0;top:0;width:100%;padding:6px 8px;box-sizing:border-box";
const ROW = "display:flex;align-items:center;gap:5px;height:20px;min-width:0";
const DIM = 0.7; // opacity of what is as usual
// The editor undoes nothing while an input has the focus, as a text has its own way back; a slider has none.
/** @type {Record<string, (shift: boolean) => string>} */
const UNDO = { z: (shift) => (shift ? "Comfy.Redo" : "Comfy.Undo"), y: () => "Comfy.Redo" };

// --- which blocks a node has ---------------------------------------------------------------------------------

/** @type {Map<string, Known>} */
const files = new Map(); // name of a LoRA file -> {blocks} or {error}, or a promise of it
/** @type {Map<string, string[]>} */
const toldByRuns = stored(); // the output that a LORA came from -> blocks

function stored() {
  try {
    return new Map(JSON.parse(localStorage.getItem(STORED) ?? "[]"));
  } catch {
    return new Map(); // damaged; the next run tells again
  }
}

// Where a node's LORA comes from: {file: its name}, {output: a key}, or null where nothing is linked.
/** @param {GraphNode} node @returns {Source | null} */
function sourceOf(node) {
  let at = node, slot = node.inputs?.findIndex((input) => input.name === "lora") ?? -1;
  for (let i = 0; i < 100; i++) {
    const link = slot >= 0 ? at.getInputLink(slot) : null, origin = link && at.graph.getNodeById(link.origin_id);
    if (!link) return null;
    if (origin?.type === "Reroute") [at, slot] = [origin, 0];
    else if (origin?.comfyClass === "AtelierLoadLoraFile" && !isLinked(origin, "lora_name"))
      return { file: String(widgetValue(origin, "lora_name")) };
    else return { output: [app.graph?.id, at.graph.id, link.origin_id, link.origin_slot].join(" ") };
  }
  return null;
}

/** @param {Source | null} source @returns {Known} */
function known(source) {
  if (source?.output) return { blocks: toldByRuns.get(source.output) };
  if (!source?.file) return {};
  const name = source.file, found = files.get(name);
  if (found) return found;
  files.set(name, {});
  ask("/atelier/blocks", { lora_name: name }).then((answer) => files.set(name, answer));
  return {};
}

/** @param {Source | null} source @param {string[]} blocks */
function learn(source, blocks) {
  if (source?.file) files.set(source.file, { blocks });
  if (!source?.output) return;
  toldByRuns.delete(source.output); // so that it is the newest
  toldByRuns.set(source.output, blocks);
  const newest = [...toldByRuns].slice(-MOST_STORED);
  try {
    localStorage.setItem(STORED, JSON.stringify(newest));
  } catch {
    // the browser's store is full: the page knows them until it is closed
  }
}

/** @param {GraphNode} node @param {string} name */
const widgetOf = (node, name) => node.widgets?.find((widget) => widget.name === name);
/** @param {GraphNode} node @param {string} name */
const widgetValue = (node, name) => widgetOf(node, name)?.value;

// --- the sliders of a node -----------------------------------------------------------------------------------

class Sliders {
  #node;
  #box = make("div", BOX);
  #inner = make("div", INNER);
  #head = make("div", `opacity:${DIM};overflow-wrap:anywhere`);
  #body = make("div");
  /** @type {Map<string, Row>} */
  #rows = new Map(); // block -> {slider, number}
  #built = ""; // of which blocks
  #shown = ""; // what the rows were drawn of
  #height = 0;

  /** @param {GraphNode} node */
  constructor(node) {
    this.#node = node;
    this.#box.className = "atelier-blocks";
    this.#box.tabIndex = -1; // a click into it lets the wheel scroll it
    this.#box.dataset.captureWheel = "true";
    this.#inner.append(this.#head, this.#body);
    this.#box.append(this.#inner);
    for (const kind of ["pointerdown", "dblclick"])
      this.#box.addEventListener(kind, (event) => event.stopPropagation()); // else it drags the node, or adds one
    // Neither the workflow's file nor the prompt knows of it: what it shows is in the rules.
    const widget = node.addDOMWidget("blocks", "atelier_blocks", this.#box, {
      serialize: false,
      hideOnZoom: false,
      margin: MARGIN,
      getMinHeight: () => this.#height + 2 * MARGIN,
      getMaxHeight: () => this.#inner.offsetHeight + EDGE + 2 * MARGIN,
    });
    widget.serialize = false;
    new ResizeObserver(() => this.#fit()).observe(this.#inner);
  }

  refresh() {
    takePlace(this.#node, this.#box);
    const node = this.#node, rules = String(widgetValue(node, "rules") ?? "");
    const rest = Number(widgetValue(node, "rest") ?? 1);
    const { blocks = [], error } = known(sourceOf(node)), linked = isLinked(node, "rules");
    const shown = JSON.stringify([rules, rest, blocks, error, linked]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const names = blocks.slice(0, MOST);
    this.#build(names);
    const parsed = linked ? [] : parse(rules);
    for (const [block, row] of this.#rows) this.#set(row, deciding(parsed, block)?.factor ?? rest, rest, linked);
    this.#say(blocks, names, parsed, linked, error);
  }

  /**
   * @param {string[]} blocks @param {string[]} names those with a slider
   * @param {Rule[]} rules @param {boolean} linked @param {string} [error]
   */
  #say(blocks, names, rules, linked, error) {
    const sentences = [];
    const inside = rules.filter((rule) => !blocks.some(rule.fits)).map(({ pattern }) => pattern);
    if (error) sentences.push(told(error));
    else if (!blocks.length) sentences.push(t("After a run there is a slider for each block here."));
    else if (linked) sentences.push(t("{0} is linked, so the sliders are off.", "rules"));
    else if (inside.length) sentences.push(t("Not shown by sliders, since no block has this name: {0}",
      [...new Set(inside)].slice(0, 5).join(", ")));
    if (names.length < blocks.length)
      sentences.push(t("{0} more blocks have no slider; write rules for them.", blocks.length - names.length));
    this.#head.textContent = sentences.join(" ");
  }

  /** @param {Row} row @param {number} factor @param {number} rest @param {boolean} linked */
  #set({ slider, number, line }, factor, rest, linked) {
    slider.disabled = linked;
    if (Number(slider.value) !== factor) slider.value = String(factor);
    number.textContent = linked ? "" : String(Number(factor.toPrecision(4)));
    slider.setAttribute("aria-valuetext", number.textContent);
    line.style.opacity = factor === rest ? String(DIM) : "1";
    number.style.fontWeight = factor === rest ? "" : "bold";
  }

  // Rows for the blocks of a LoRA: those of a list (double_blocks.0, .1 …) beneath its name, others by their own.
  /** @param {string[]} blocks */
  #build(blocks) {
    if (JSON.stringify(blocks) === this.#built) return;
    this.#built = JSON.stringify(blocks);
    this.#rows.clear();
    /** @type {Map<string, Group>} */
    const groups = new Map();
    for (const block of blocks) {
      const [, list, number] = /^(.+)\.(\d+)$/.exec(block) ?? [null, "", block];
      const key = list || block;
      if (!groups.has(key)) groups.set(key, { list, rows: [] });
      groups.get(key)?.rows.push([block, number]);
    }
    /** @param {Group} group */
    const last = ({ list, rows }) => !list && rows[0][0] === OTHER;
    const sorted = [...groups.values()].sort((a, b) => Number(last(a)) - Number(last(b)));
    this.#body.replaceChildren(...sorted.map(({ list, rows }) => {
      const group = make("div", "margin-top:3px"), lines = make("div");
      if (list) {
        group.setAttribute("role", "group");
        group.setAttribute("aria-label", list);
        group.append(make("div", `opacity:${DIM}`, list));
      }
      lines.append(...rows.map(([block, label]) => this.#row(block, label, list ? "28px" : "auto")));
      group.append(lines);
      return group;
    }));
  }

  /** @param {string} block @param {string} label @param {string} width */
  #row(block, label, width) {
    const line = make("label", ROW), slider = make("input", "flex:1 1 0;min-width:0;height:14px;margin:0;" +
      "accent-color:var(--p-primary-color, #5b9bd5)");
    Object.assign(slider, { type: "range", min: 0, max: 2, step: 0.05 });
    slider.setAttribute("aria-label", t("Factor of {0}", block));
    slider.dataset.block = block;
    line.title = t("Factor of {0}; double-click for 1", block);
    const number = make("span", "flex:0 0 36px;text-align:right;font-variant-numeric:tabular-nums");
    const name = make("span", `flex:0 0 ${width};overflow:hidden;text-overflow:ellipsis;white-space:nowrap`, label);
    line.append(name, slider, number);
    this.#listen(slider, block);
    this.#rows.set(block, { slider, number, line });
    return line;
  }

  /** @param {HTMLInputElement} slider @param {string} block */
  #listen(slider, block) {
    /** @param {boolean} settled */
    const write = (settled) => this.#write(block, Number(slider.value), settled);
    let moved = false; // what was only clicked stays as it is: a factor of 3 is at the end of the slider, too
    slider.addEventListener("input", () => {
      moved = true;
      write(false);
    });
    for (const kind of ["pointerup", "change"]) // the editor looks for what to undo right after the first
      slider.addEventListener(kind, () => {
        if (moved) write(true);
        moved = false;
      });
    slider.addEventListener("dblclick", () => this.#write(block, 1, true));
    slider.addEventListener("keydown", (event) => {
      const undo = (event.ctrlKey || event.metaKey) && UNDO[event.key.toLowerCase()]?.(event.shiftKey);
      if (undo && !(app.ui?.autoQueueEnabled && app.ui.autoQueueMode === "change")) { // else the editor does it
        event.preventDefault();
        app.extensionManager.command.execute(undo);
      }
      if (!event.ctrlKey && !event.metaKey) event.stopPropagation(); // else arrows move the node
    });
  }

  /** @param {string} block @param {number} factor @param {boolean} settled */
  #write(block, factor, settled) {
    const node = this.#node, rules = widgetOf(node, "rules"), rest = Number(widgetValue(node, "rest") ?? 1);
    if (!rules) return;
    const text = write(String(rules.value ?? ""), block, factor, isLinked(node, "rest") ? NaN : rest, settled);
    if (settled) app.canvas.emitBeforeChange(); // what happened until the end of the change is one step to undo
    if (text !== rules.value) {
      rules.value = text;
      rules.callback?.(text);
      node.graph?.setDirtyCanvas(true, true);
    }
    if (settled) app.canvas.emitAfterChange();
    this.refresh();
  }

  // Give the widget the height of what it holds, up to a limit; more is scrolled.
  #fit() {
    const all = this.#inner.offsetHeight + EDGE, height = Math.min(TALLEST, all), node = this.#node;
    if (this.#inner.offsetWidth < node.size[0] / 2) return; // it has no place yet
    this.#box.style.maxHeight = `${all}px`;
    if (height === this.#height) return;
    this.#height = height;
    this.#box.style.minHeight = `${height}px`;
    const needed = node.computeSize()[1];
    if (node.size[1] < needed) node.setSize([node.size[0], needed]);
    node.graph?.setDirtyCanvas(true, true);
  }
}

/** @type {WeakMap<GraphNode, Sliders>} */
const sliders = new WeakMap();

app.registerExtension({
  name: "atelier.blocks",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierLoraBlocks") return;
    sliders.set(node, new Sliders(node));
    const onExecuted = node.onExecuted;
    node.onExecuted = (output, ...rest) => {
      onExecuted?.call(node, output, ...rest);
      if (output?.blocks) learn(sourceOf(node), output.blocks);
    };
  },
  setup() {
    for (const event of ["atelier.lora_saved", "reconnected"]) api.addEventListener(event, () => files.clear());
    // What they show depends on typed rules, links and another node's widget, in two renderers with different events:
    // looking is simpler than listening, and costs nothing when nothing changed.
    setInterval(() => {
      if (document.hidden) return;
      for (const node of app.canvas?.graph?.nodes ?? []) sliders.get(node)?.refresh();
    }, INTERVAL);
  },
});
