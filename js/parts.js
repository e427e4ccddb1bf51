import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { t, told } from "./words.js";

// What the pack's modules share: elements in the editor's colours, questions to the server, toasts, links.

export const RED = "var(--p-red-400, #f87171)"; // of what went wrong
const LEAST = 240; // pixels
// Letters on a node are 10 pixels high at 0.6, the scale at which templates open. Where a view on a node sets ON_NODE,
// all within that takes FONT is as large; elsewhere, as in the sidebar, it is as small as what a page shows.
export const ON_NODE = "--atelier-font:17px/20px sans-serif";
export const FONT = "font:var(--atelier-font,12px/16px sans-serif)";
const BUTTON = "padding:2px 10px;border-radius:4px;border:1px solid var(--border-color);" +
  `background:var(--comfy-input-bg);color:var(--input-text);${FONT};cursor:pointer;white-space:nowrap`;

// What can be asked of a run at work: word, name and help of each button.
/** @type {[string, string, string][]} */
export const WISHES = [
  ["stop", t("Stop and keep"),
    t("End after this step; the next nodes get the LoRA so far. Press Run again to resume.")],
  ["save", t("Save now"), t("Save the run after this step.")],
  ["sample", t("Sample now"), t("Draw sample_prompts after this step.")],
  ["pause", t("Pause"), t("Save the run, end it and free the memory. Continue goes on from the same step.")],
];

/** @template {keyof HTMLElementTagNameMap} Kind @param {Kind} kind @param {string} [style] @param {string} [text] */
export function make(kind, style = "", text = "") {
  const made = document.createElement(kind);
  made.style.cssText = style;
  made.textContent = text;
  return made;
}

/** @param {string} name @param {string} help @param {(event: MouseEvent) => void} act */
export function makeButton(name, help, act) {
  const made = make("button", BUTTON, name);
  made.type = "button";
  made.title = help;
  made.addEventListener("pointerdown", (event) => event.stopPropagation()); // else it drags the node
  made.addEventListener("click", (event) => {
    event.stopPropagation(); // else the node is chosen, also where the button led to another one
    act(event);
  });
  return made;
}

// A button "…" that opens a menu of further things to do: what each is called, its help, and what it does.
/** @param {() => [string, string, () => void][]} entries */
export function makeMenu(entries) {
  const menu = make("div", "position:fixed;margin:0;padding:4px;border:1px solid var(--border-color);border-radius:6px;" +
    "background:var(--comfy-menu-bg);flex-direction:column;gap:2px");
  menu.className = "atelier-menu";
  menu.popover = "auto"; // closed by Escape, or by a click elsewhere
  menu.setAttribute("role", "menu");
  const opener = makeButton("…", t("More"), () => {
    menu.replaceChildren(...entries().map(([name, help, act]) => {
      const entry = makeButton(name, help, () => {
        menu.hidePopover();
        act();
      });
      entry.setAttribute("role", "menuitem");
      entry.style.cssText += ";border:0;text-align:left;padding:6px 10px";
      return entry;
    }));
    document.body.append(menu);
    menu.showPopover();
    const { left, bottom } = opener.getBoundingClientRect();
    menu.style.left = `${Math.min(left, innerWidth - menu.offsetWidth)}px`;
    menu.style.top = `${Math.min(bottom, innerHeight - menu.offsetHeight)}px`;
    /** @type {HTMLElement | null} */ (menu.firstElementChild)?.focus();
  });
  opener.setAttribute("aria-label", t("More"));
  opener.setAttribute("aria-haspopup", "menu");
  menu.addEventListener("keydown", (event) => {
    event.stopPropagation(); // no shortcuts of the editor
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!turn) return;
    event.preventDefault();
    const all = /** @type {HTMLElement[]} */ ([...menu.children]);
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement)) + turn;
    all[(at + all.length) % all.length].focus();
  });
  menu.addEventListener("toggle", (event) => {
    const open = /** @type {ToggleEvent} */ (event).newState === "open";
    menu.style.display = open ? "flex" : "";
    opener.ariaExpanded = String(open);
    if (!open) menu.remove();
  });
  return opener;
}

// Whether a link gives a widget's value.
/** @param {GraphNode} node @param {string} name */
export function isLinked(node, name) {
  const slot = node.inputs?.findIndex((input) => input.widget?.name === name) ?? -1;
  return slot >= 0 && node.isInputConnected(slot);
}

/** @type {WeakSet<GraphNode>} */
const whole = new WeakSet();

// The editor of ComfyUI 0.30 writes values by the place of their widget, with a hole for one of ours before others, and
// reads them without holes. Filtering leaves holes out.
/** @param {GraphNode} node */
export function withoutHoles(node) {
  if (whole.has(node)) return;
  whole.add(node);
  const onSerialize = node.onSerialize;
  node.onSerialize = function (data) {
    data.widgets_values = data.widgets_values?.filter(() => true);
    return onSerialize?.call(this, data);
  };
}

// Give a new node a widget that is no part of its values, once the editor has read these. The newest editor takes the
// value at the place of such a widget for a hole, and drops it, where an option brought the node an input more.
/** @param {() => void} add */
export const onceRead = (add) => queueMicrotask(add);

const DEEPEST = 16; // subgraphs within each other

// Link two nodes. The registry's scanner takes a plain call of this method for one of a network socket.
/** @param {GraphNode} from @param {number} output @param {GraphNode} taker @param {number} input */
export function link(from, output, taker, input) {
  const { connect } = from;
  connect.call(from, output, taker, input);
}

// Every node of the open workflow: its id in the prompt ("12:3" is number 3 in the subgraph that node 12 stands for), the
// node, and the nodes that stand for its subgraphs.
/** @typedef {{ id: string, node: GraphNode, around: GraphNode[] }} Found */
/** @param {Graph} [graph] @param {string} [before] @param {GraphNode[]} [around] @returns {Generator<Found>} */
export function* nodes(graph = app.rootGraph ?? app.graph, before = "", around = []) {
  for (const node of graph?.nodes ?? []) {
    const id = `${before}${node.id}`;
    yield { id, node, around };
    if (node.subgraph && around.length < DEEPEST) yield* nodes(node.subgraph, `${id}:`, [...around, node]);
  }
}

// The node of an id in the prompt: "12:3" is number 3 in the subgraph that node 12 stands for.
/** @param {string} id */
export function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph, node;
  for (const part of id.split(":")) {
    node = graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

// Make a node wide enough for sentences: what stands for a subgraph may have no more than an output.
/** @param {GraphNode} node */
export function widen(node) {
  if (node.size[0] < LEAST) node.setSize([LEAST, node.size[1]]);
}

// Put a node's newest widget, which is no part of its values, before the others.
/** @param {GraphNode} node */
export function putFirst(node) {
  const { widgets } = node;
  widgets.splice(0, 0, ...widgets.splice(-1));
  withoutHoles(node);
}

// Nodes 2.0 of newer editors goes on showing the element of a node as it was before an undo made the node anew.
/** @param {GraphNode} node @param {HTMLElement} box */
export function takePlace(node, box) {
  if (!window.LiteGraph?.vueNodesMode || box.isConnected) return;
  const body = document.querySelector(`[data-testid="${CSS.escape(`node-body-${node.id}`)}"]`);
  body?.querySelector(`.${box.className}`)?.replaceWith(box);
}

// What shows the server that a question comes from its own page; it is another one whenever ComfyUI starts.
/** @type {Promise<string> | undefined} */
let token;

async function learn() {
  const { token: learned, error } = await (await api.fetchApi("/atelier/token", { method: "POST" })).json();
  if (error) toast({ error });
  return learned ?? "";
}

/** @param {string} address @param {object} question */
async function post(address, question) {
  token ??= learn();
  const headers = { "Content-Type": "application/json", "Atelier-Token": await token };
  return api.fetchApi(address, { method: "POST", headers, body: JSON.stringify(question) });
}

// The server's answer; {error: a sentence, unanswered: true} where there is none.
/** @param {string} address @param {object} [question] @returns {Promise<any>} */
export async function ask(address, question) {
  try {
    if (!question) return await (await api.fetchApi(address)).json();
    const before = await token;
    let answer = await post(address, question);
    if (answer.status === 403 && before) { // learned of an earlier ComfyUI
      token = undefined;
      answer = await post(address, question);
    }
    return await answer.json();
  } catch (/** @type {any} */ problem) {
    token = undefined;
    return { error: t("The server did not answer: {0}.", problem.message), unanswered: true };
  }
}

/** @param {{error?: string, said?: string}} answer @param {string} [summary] */
export function toast(answer, summary = "LoRA Atelier") {
  const [severity, detail] = answer.error ? ["warn", told(answer.error)] : ["success", told(answer.said ?? "")];
  app.extensionManager.toast.add({ severity, summary, detail, life: 8000 });
}

// Show a dialog in which Ctrl+Z takes back what was done there: the editor hears it before any dialog does, and would
// take the workflow back beneath it.
/** @param {HTMLDialogElement} dialog */
export function showAlone(dialog) {
  const tracker = app.extensionManager.workflow?.activeWorkflow?.changeTracker;
  if (tracker) {
    tracker.undoRedo = async () => true;
    dialog.addEventListener("close", () => Reflect.deleteProperty(tracker, "undoRedo"));
  }
  dialog.showModal();
}

// The address of a run. A name of broken letters has no address; the server then knows no such run.
/** @param {string} run */
export function addressOf(run) {
  return `/atelier/runs/${encodeURIComponent(run.toWellFormed?.() ?? run.replace(/\p{Surrogate}/gu, "?"))}`;
}
