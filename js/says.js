import { app } from "../../scripts/app.js";
import { FONT, ON_NODE, make } from "./parts.js";
import { told } from "./words.js";

// What a node said when it ran, as text on it. The editor shows pictures of an output, and no text. Train LoRA shows
// its run instead.

const LEAST = 60, MOST = 120, MARGIN = 10; // pixels
/** @type {Record<string, number>} */
const LONG = { AtelierConnectModel: 240 }; // pixels; of nodes that have much to say
/** @type {WeakMap<GraphNode, HTMLElement>} */
const boxes = new WeakMap(); // node -> the element of its text

/** @param {GraphNode} node @param {string} text */
function show(node, text) {
  let box = boxes.get(node);
  if (!box) {
    const most = LONG[node.comfyClass ?? ""] ?? MOST;
    box = make("div", `overflow:auto;white-space:pre-wrap;overflow-wrap:anywhere;${ON_NODE};${FONT};` +
      "padding:4px;border-radius:4px;background:var(--comfy-input-bg);color:var(--input-text);user-select:text;" +
      `cursor:text;box-sizing:border-box;width:100%;height:100%;min-height:${LEAST}px;max-height:${most}px`);
    box.className = "atelier-says";
    box.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
    const [getMinHeight, getMaxHeight] = [LEAST, most].map((height) => () => height + 2 * MARGIN);
    const options = { serialize: false, hideOnZoom: false, margin: MARGIN, getMinHeight, getMaxHeight };
    node.addDOMWidget("says", "atelier_says", box, options).serialize = false;
    boxes.set(node, box);
    const [width, height] = node.size;
    node.setSize([width, Math.max(height, node.computeSize()[1])]);
  }
  box.textContent = text.split("\n").map(told).join("\n");
}

app.registerExtension({
  name: "atelier.says",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("Atelier") || node.comfyClass === "AtelierTrain") return;
    const onExecuted = node.onExecuted;
    node.onExecuted = (output, ...rest) => {
      onExecuted?.call(node, output, ...rest);
      const text = [output?.text ?? []].flat().join("\n");
      if (text || boxes.has(node)) show(node, text);
    };
  },
});
