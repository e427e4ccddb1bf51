import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// Three buttons on Train LoRA, for use while it trains.

const HEIGHT = 26, MARGIN = 10; // pixels; a canvas node takes the margin off the height on every side
const ASKS = [
  ["stop", "Stop and keep", "End after this step; the next nodes get the LoRA so far. Press Run again to resume."],
  ["save", "Save now", "Save the run after this step."],
  ["sample", "Sample now", "Draw sample_prompts after this step."],
];

const buttons = new WeakMap(); // node -> its three
let current = null; // what the server works at, by its id there
let running = null; // that node of the open workflow, if it is a Train LoRA

function toast(severity, detail) {
  app.extensionManager.toast.add({ severity, summary: "Train LoRA", detail, life: 6000 });
}

async function ask(node, what) {
  if (running !== node) return;
  let answer;
  try {
    const response = await api.fetchApi("/atelier/ask", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ what, node: current }),
    });
    answer = await response.json();
  } catch (problem) {
    answer = { error: `The server did not answer: ${problem.message}.` };
  }
  toast(answer.error ? "warn" : "success", answer.error ?? answer.said);
}

function addButtons(node) {
  const box = document.createElement("div");
  box.className = "atelier-train";
  box.style.cssText = `display:flex;gap:4px;align-items:start;width:100%;min-height:${HEIGHT}px`;
  const made = ASKS.map(([what, name, help]) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.title = help;
    button.dataset.ask = what;
    button.style.cssText = `flex:1;min-width:0;height:${HEIGHT}px;padding:0 4px;border-radius:4px;` +
      "border:1px solid var(--border-color);background:var(--comfy-input-bg);color:var(--input-text);" +
      "font:12px sans-serif;white-space:nowrap;overflow:hidden;text-overflow:ellipsis";
    button.addEventListener("pointerdown", (event) => event.stopPropagation()); // else it drags the node
    button.addEventListener("click", () => ask(node, what));
    box.append(button);
    return button;
  });
  buttons.set(node, made);
  enable(node, false);

  // Neither the workflow's file nor the prompt knows of the buttons.
  const widget = node.addDOMWidget("wishes", "atelier_train", box, {
    serialize: false,
    hideOnZoom: false,
    margin: MARGIN,
    getMinHeight: () => HEIGHT + 2 * MARGIN,
    getMaxHeight: () => HEIGHT + 2 * MARGIN,
  });
  widget.serialize = false;
}

function enable(node, alive) {
  for (const button of buttons.get(node) ?? []) {
    button.disabled = !alive;
    button.style.opacity = alive ? 1 : 0.4;
    button.style.cursor = alive ? "pointer" : "default";
  }
}

// The node that the server calls "12:3": number 3 in the subgraph that node 12 stands for.
function findNode(id) {
  const path = String(id).split(":");
  let graph = app.rootGraph ?? app.graph;
  for (const step of path.slice(0, -1)) graph = graph?.getNodeById(Number(step))?.subgraph;
  return graph?.getNodeById(Number(path.at(-1)));
}

function follow(id) {
  if (running) enable(running, false);
  current = id == null ? null : String(id);
  const node = current === null ? null : findNode(current);
  running = buttons.has(node) ? node : null;
  if (running) enable(running, true);
}

app.registerExtension({
  name: "atelier.train",
  nodeCreated(node) {
    if (node.comfyClass === "AtelierTrain") addButtons(node);
  },
  afterConfigureGraph() {
    follow(current); // a workflow that was opened again has new nodes
  },
  setup() {
    api.addEventListener("executing", ({ detail }) => follow(detail));
    for (const end of ["execution_success", "execution_error", "execution_interrupted"])
      api.addEventListener(end, () => follow(null));
  },
});
