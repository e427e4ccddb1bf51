import { app } from "../../scripts/app.js";
import { link, nodes, toast } from "./parts.js";
import { set } from "./saves.js";
import { t } from "./words.js";

// What can be done in the graph with a run that ended: draw with its LoRA, and compare its saves. A node that does it
// already is brought into view; else one is put beside Train LoRA and linked.

const GAP = 60, TITLE = 30; // pixels: between two nodes, and of a node's title above its place
const OF_A_RUN = "saves of a run"; // as nodes/compare.py calls it
const SIZES = ["width", "height"];

// Bring a node into view, also of another graph.
/** @param {GraphNode} node */
function focus(node) {
  const { canvas } = app;
  if (canvas.graph !== node.graph) canvas.setGraph(node.graph);
  canvas.selectNode(node);
  canvas.centerOnNode(node);
  canvas.setDirty(true, true);
}

// Every node that gets something of some nodes, the nearest first.
/** @param {GraphNode[]} from */
function following(from) {
  const found = new Set(from);
  for (const node of found) // also those that are added meanwhile
    for (const slot of (node.outputs ?? []).keys()) for (const next of node.getOutputNodes(slot) ?? []) found.add(next);
  return [...found];
}

// Where the base model of a Train LoRA has its MODEL, CLIP or VAE: at a loader's outputs, or at what is linked to it.
/** @param {GraphNode} train @param {string} kind @returns {[GraphNode, number] | null} */
function origin(train, kind) {
  const base = train.getInputNode(slotOf(train.inputs, "base_model"));
  if (!base) return null; // a subgraph's input
  const own = base.outputs.findIndex(({ type }) => type === kind);
  if (own >= 0) return [base, own];
  const link = base.getInputLink(slotOf(base.inputs, kind.toLowerCase()));
  const node = link && base.graph.getNodeById(link.origin_id);
  return node ? [node, link.origin_slot] : null;
}

/** @param {{ name: string }[] | undefined} slots @param {string} name */
const slotOf = (slots, name) => slots?.findIndex((slot) => slot.name === name) ?? -1;

// Put a node of a class to the right of another, where there is room.
/** @param {GraphNode} node @param {string} comfyClass */
function putBeside(node, comfyClass) {
  const made = window.LiteGraph?.createNode(comfyClass), { graph, pos, size } = node;
  if (!made) return null;
  const x = pos[0] + size[0] + GAP, others = graph.nodes;
  let y = pos[1];
  for (const other of [...others].sort((one, next) => one.pos[1] - next.pos[1])) {
    const across = other.pos[0] < x + made.size[0] + GAP && other.pos[0] + other.size[0] + GAP > x;
    const down = other.pos[1] - TITLE < y + made.size[1] + GAP && other.pos[1] + other.size[1] + GAP > y - TITLE;
    if (across && down) y = other.pos[1] + other.size[1] + GAP + TITLE;
  }
  graph.add(made);
  made.pos = [x, y];
  return made;
}

// Add a node beside Train LoRA with its links, as one step that can be undone.
/**
 * @param {GraphNode} train @param {string} comfyClass @param {Record<string, [GraphNode, number] | null>} links
 * @param {(made: GraphNode) => void} [fill]
 */
function add(train, comfyClass, links, fill) {
  app.canvas.emitBeforeChange();
  const made = putBeside(train, comfyClass);
  for (const [name, from] of Object.entries(made ? links : {}))
    if (made && from) link(...from, made, slotOf(made.inputs, name));
  if (made) fill?.(made);
  app.canvas.emitAfterChange();
  return made;
}

/** @param {import("./parts.js").Found} train */
export function drawWithIt({ node: train, around }) {
  const all = following([train, ...around]).filter((node) => node.comfyClass === "AtelierSample");
  const known = all.find((node) => node.graph === app.canvas.graph) ?? all[0];
  const sample = known ?? add(train, "AtelierSample",
    { model: [train, slotOf(train.outputs, "MODEL")], clip: [train, slotOf(train.outputs, "CLIP")],
      vae: origin(train, "VAE") });
  if (!sample) return;
  focus(sample);
  toast({ said: t("Write a prompt into Sample, then press Run.") });
}

/** @param {import("./parts.js").Found} train @param {Partial<Run>} run */
export function compareSaves({ node: train }, { run = "", prompts = [], settings = {} }) {
  const all = [...nodes()].map(({ node }) => node).filter((node) => node.comfyClass === "AtelierCompareLoras");
  const known = all.find((node) => node.widgets.find(({ name }) => name === "of.run")?.value === run);
  const compare = known ?? add(train, "AtelierCompareLoras",
    { model: origin(train, "MODEL"), clip: origin(train, "CLIP"), vae: origin(train, "VAE") }, (made) => {
      set(made, "of", OF_A_RUN);
      const { values } = made.widgets.find(({ name }) => name === "of.run")?.options ?? {};
      if (Array.isArray(values) && !values.includes(run)) values.unshift(run); // the page read the list before the run
      set(made, "of.run", run);
      if (prompts.length) set(made, "prompt", prompts.join("\n"));
      for (const name of SIZES) {
        const size = Number(settings[`sample.${name}`]);
        if (size > 0) set(made, name, size);
      }
    });
  if (!compare) return;
  focus(compare);
  toast({ said: t("Press Run to draw the saves of this run side by side.") });
}
