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

app.registerExtension({
  name: "atelier.templates",
  afterConfigureGraph: mark,
  setup() {
    document.head.append(make("style", "", STYLE));
    setInterval(mark, INTERVAL);
  },
});
