import { app } from "../../scripts/app.js";
import { ON_NODE, make, makeButton, nodeOf, toast } from "./parts.js";
import { t } from "./words.js";

// Buttons on Dataset Preview: one runs this node and what it needs, nothing else of the workflow. Others appear with
// its report, and write the names of pictures that stand out into leave_out of their Concept Dataset.

const HEIGHT = 60; // pixels
/** @type {Record<string, (count: number) => string>} */
const KINDS = { // of the server's findings
  "near-duplicates": (count) => t("Leave out near-duplicates: {0}", count),
  blurred: (count) => t("Leave out blurred pictures: {0}", count),
  borders: (count) => t("Leave out pictures with borders: {0}", count),
  fit: (count) => t("Leave out pictures with high losses: {0}", count),
  enlarged: (count) => t("Leave out pictures that are too small: {0}", count),
};
/** @type {WeakMap<GraphNode, HTMLElement>} */
const boxes = new WeakMap(); // node -> the element of its buttons

/** @param {Record<string, string[]>} nodes */
function leaveOut(nodes) {
  for (const [id, names] of Object.entries(nodes)) {
    const widget = nodeOf(id)?.widgets?.find((each) => each.name === "leave_out");
    if (!widget) {
      toast({ error: t("The Concept Dataset of these pictures is no longer here; run the preview again.") });
      return;
    }
    const known = String(widget.value).split(",").map((name) => name.trim()).filter(Boolean);
    widget.value = [...new Set([...known, ...names])].join(", ");
    widget.callback?.(widget.value);
  }
  app.graph?.setDirtyCanvas(true, true);
  toast({ said: t("Written into leave_out of Concept Dataset. The files stay as they are.") });
}

/** @param {GraphNode} node @param {{kind: string, nodes: Record<string, string[]>}[]} findings */
function offer(node, findings) {
  let box = boxes.get(node);
  if (!box) {
    if (!findings.length) return;
    box = make("div", `overflow:auto;display:flex;flex-wrap:wrap;gap:4px;align-content:start;width:100%;` +
      `height:100%;${ON_NODE}`);
    box.className = "atelier-leave-out";
    const [getMinHeight, getMaxHeight] = [() => HEIGHT, () => HEIGHT];
    const options = { serialize: false, hideOnZoom: false, getMinHeight, getMaxHeight };
    node.addDOMWidget("leave out", "atelier_leave_out", box, options).serialize = false;
    boxes.set(node, box);
    const [width, height] = node.size;
    node.setSize([width, Math.max(height, node.computeSize()[1])]);
  }
  const help = t("Writes the names of these pictures into leave_out of Concept Dataset.");
  box.replaceChildren(...findings.map(({ kind, nodes }) => {
    const button = makeButton(KINDS[kind](Object.values(nodes).flat().length), help, () => {
      leaveOut(nodes);
      button.disabled = true;
    });
    return button;
  }));
}

app.registerExtension({
  name: "atelier.preview",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierDatasetPreview") return;
    const button = node.addWidget("button", t("Show what will be trained"), null, () => {
      app.canvas.selectItems([node]);
      requestAnimationFrame(() => app.extensionManager.command.execute("Comfy.QueueSelectedOutputNodes"));
    }, { serialize: false }); // in the prompt
    button.serialize = false; // in the workflow's file
    const onExecuted = node.onExecuted;
    node.onExecuted = (output, ...rest) => {
      onExecuted?.call(node, output, ...rest);
      offer(node, output?.leave_out ?? []);
    };
  },
});
