import { app } from "../../scripts/app.js";

// The editor makes a node as tall as all its inputs need. Nodes 2.0 hides the advanced ones, so that room stays empty
// there: where nobody made a node taller by hand, it becomes as tall as what it shows. Its file keeps the height that
// it had, so that a workflow which was only looked at is not called changed.

const TITLE = 30, LEAST = 60; // units; less than any node takes
const BY_HAND = 40; // units above what all inputs need: who made a node taller wants it so
const PATIENCE = 120; // frames until the editor has drawn a new node
/** @type {WeakMap<GraphNode, { file: number, fitted: number }>} */
const heights = new WeakMap(); // of a node: in its file, and as it is shown

// The height that a node needs for what it shows. The browser answers at once, so that nobody sees it lower meanwhile.
/** @param {HTMLElement} box */
function neededBy(box) {
  const before = box.style.getPropertyValue("--node-height");
  box.style.setProperty("--node-height", `${LEAST}px`);
  const height = box.offsetHeight;
  box.style.setProperty("--node-height", before);
  return height - TITLE;
}

/** @param {GraphNode} node @param {number} frames */
function fit(node, frames = PATIENCE) {
  if (!window.LiteGraph?.vueNodesMode || !node.comfyClass?.startsWith("Atelier") || node.flags?.collapsed) return;
  if (node.graph !== app.canvas?.graph || node.size[1] > node.computeSize()[1] + BY_HAND) return;
  const box = document.querySelector(`[data-node-id="${CSS.escape(String(node.id))}"]`);
  if (!(box instanceof HTMLElement)) return void (frames && requestAnimationFrame(() => fit(node, frames - 1)));
  requestAnimationFrame(() => requestAnimationFrame(() => { // what it shows is drawn by then
    const fitted = neededBy(box);
    if (!box.isConnected || fitted >= node.size[1]) return;
    if (!heights.has(node)) keepFile(node);
    const file = ofFile(node); // a second look may find it a fraction lower
    heights.set(node, { file, fitted });
    node.setSize([node.size[0], fitted]);
  }));
}

// The height that a node has in its file: what it had before it was fitted, unless somebody has changed it since.
/** @param {GraphNode} node */
function ofFile(node) {
  const { file = 0, fitted = 0 } = heights.get(node) ?? {};
  return Math.abs(node.size[1] - fitted) < 1 ? file : node.size[1];
}

/** @param {GraphNode} node */
function keepFile(node) {
  const onSerialize = node.onSerialize;
  node.onSerialize = function (data) {
    data.size = [this.size[0], ofFile(this)];
    return onSerialize?.call(this, data);
  };
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
