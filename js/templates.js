import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { make } from "./parts.js";

// Our templates stand in the order of their numbers. The server lists a folder as its file system does, in any order.
const PACK = decodeURIComponent(new URL(import.meta.url).pathname.split("/extensions/")[1]?.split("/")[0] ?? "");
const list = api.getWorkflowTemplates;
if (list)
  api.getWorkflowTemplates = async function (...given) {
    /** @type {Record<string, string[]>} */
    const names = await list.apply(this, given);
    names[PACK]?.sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    return names;
  };

// The notes of our templates have letters as large as those on our nodes. ComfyUI's own size for texts is smaller, and
// holds for every other note.

const MARK = "atelier_note"; // a property of such a note
const NOTE = "[data-atelier-note]";
const STYLE = `${NOTE}{--comfy-textarea-font-size:17px}
${NOTE} :is(.tiptap,.comfy-markdown-content){line-height:20px}
${NOTE} :is(p,ol,ul){margin:0 0 6px}
${NOTE} li{margin:0 0 2px}
${NOTE} :is(ol,ul){padding-left:22px}`;
const INTERVAL = 500; // milliseconds between two looks: each renderer draws notes anew, and tells nobody

function mark() {
  if (document.hidden) return;
  for (const node of app.canvas?.graph?.nodes ?? []) {
    if (!node.properties?.[MARK]) continue;
    const drawn = document.querySelector(`[data-node-id="${CSS.escape(String(node.id))}"]`);
    for (const element of [node.widgets?.[0]?.element, drawn]) element?.setAttribute("data-atelier-note", "");
  }
}

// The editor fits a template into its whole canvas, also where a side panel lies over a part of it. A template of ours
// opens beside the panel, no larger than the editor made it and no smaller than one reads, and leaves the minimap what
// lies beneath it. A view that was kept stays as it is.

const PANEL = ".side-bar-panel", MINIMAP = "[data-testid=minimap-container]"; // of the editor
const BESIDE = 24; // pixels between panel and nodes
const LEAST = 0.6; // below this scale the classic renderer leaves letters out
const FRAMES = 30; // after opening, within which the editor fits

/** @param {number} frames */
function openBeside(frames = FRAMES) {
  const { graph, ds, canvas } = app.canvas;
  if (!frames || !graph?.nodes.some((node) => node.properties?.[MARK])) return;
  const kept = graph.extra?.ds; // of the file, or of this tab before F5; the editor goes back to it, or fits
  const fitted = !kept || ds.scale !== kept.scale || ds.offset.some((value, i) => value !== kept.offset[i]);
  const panel = document.querySelector(PANEL)?.getBoundingClientRect();
  const boxes = graph.nodes.map((node) => node.boundingRect);
  if (fitted && panel?.width) placeBeside(panel, canvas.getBoundingClientRect(), boxes);
  requestAnimationFrame(() => openBeside(frames - 1));
}

// Moves the view where a box, in units of the graph, lies beneath the panel, at either side of the window.
/** @param {DOMRect} panel @param {DOMRect} whole @param {ArrayLike<number>[]} boxes */
function placeBeside(panel, whole, boxes) {
  const { ds } = app.canvas;
  const left = Math.min(...boxes.map((box) => box[0])), right = Math.max(...boxes.map((box) => box[0] + box[2]));
  const top = Math.min(...boxes.map((box) => box[1])), y = (top + ds.offset[1]) * ds.scale;
  const atLeft = panel.left + panel.right < whole.left + whole.right;
  const from = atLeft ? panel.right - whole.left : 0, to = atLeft ? whole.width : panel.left - whole.left;
  if ((left + ds.offset[0]) * ds.scale >= from && (right + ds.offset[0]) * ds.scale <= to) return;
  const map = document.querySelector(MINIMAP)?.getBoundingClientRect(), x = from + BESIDE;
  const [room, depth] = map ? [map.left - whole.left - x, map.top - whole.top - y] : [Infinity, Infinity];
  let scale = Math.min(ds.scale, (to - x - BESIDE) / (right - left));
  const reach = (/** @type {ArrayLike<number>} */ box) => // whether the minimap lies over it
    (box[0] + box[2] - left) * scale > room && (box[1] + box[3] - top) * scale > depth;
  while (scale > LEAST && boxes.some(reach)) scale *= 0.98;
  ds.scale = Math.max(LEAST, scale);
  ds.offset[0] = x / ds.scale - left;
  ds.offset[1] = y / ds.scale - top;
  app.canvas.setDirty(true, true);
}

app.registerExtension({
  name: "atelier.templates",
  afterConfigureGraph() {
    mark();
    openBeside();
  },
  setup() {
    document.head.append(make("style", "", STYLE));
    setInterval(mark, INTERVAL);
  },
});
