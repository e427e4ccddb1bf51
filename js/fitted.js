import { app } from "../../scripts/app.js";

// The editor makes a node as tall as all its inputs need. Nodes 2.0 hides the advanced ones, so that room stays empty
// there: where nobody made a node taller by hand, it becomes as tall as what it shows.

const TITLE = 30, LEAST = 60; // units; less than any node takes
const BY_HAND = 40; // units above what all inputs need: who made a node taller wants it so
const PATIENCE = 120; // frames until the editor has drawn a new node

/** @param {GraphNode} node @param {number} frames */
function fit(node, frames = PATIENCE) {
  if (!window.LiteGraph?.vueNodesMode || !node.comfyClass?.startsWith("Atelier") || node.flags?.collapsed) return;
  if (node.graph !== app.canvas?.graph || node.size[1] > node.computeSize()[1] + BY_HAND) return;
  const box = document.querySelector(`[data-node-id="${CSS.escape(String(node.id))}"]`);
  if (!(box instanceof HTMLElement)) return void (frames && requestAnimationFrame(() => fit(node, frames - 1)));
  const before = box.offsetHeight;
  node.setSize([node.size[0], LEAST]);
  requestAnimationFrame(() => requestAnimationFrame(() => {
    node.setSize([node.size[0], Math.min(before, box.offsetHeight) - TITLE]);
  }));
}

app.registerExtension({
  name: "atelier.fitted",
  nodeCreated(node) {
    requestAnimationFrame(() => fit(node));
  },
  afterConfigureGraph() {
    app.graph?.nodes.forEach((node) => void fit(node));
  },
});
