import { app } from "../../scripts/app.js";
import { refuse } from "./failures.js";
import { ask, toast } from "./parts.js";
import { t, told } from "./words.js";

// Settings of other trainers become a workflow: dropped on the canvas, or chosen from the menu. What the server reads
// out of them stands in the workflow as a note, and what is still to be chosen stands on its nodes.

const KINDS = [".toml", ".yaml", ".yml", ".json", ".sh", ".bat", ".cmd", ".ps1", ".env", ".txt"];
const LARGEST = 2 ** 20; // bytes of a file
const READABLE = 0.85; // the scale at which the smallest letters of a node have ten pixels
const LEFT = 120, ABOVE = 190; // units around a graph: the editor's menus stand there, as over the templates

/** @param {File} file */
const isSettings = ({ name, size }) => size <= LARGEST && KINDS.some((kind) => name.toLowerCase().endsWith(kind));

// Whether a file is the editor's own: a workflow, a prompt, or a list of templates.
/** @param {File} file */
async function isOwn(file) {
  if (!file.name.toLowerCase().endsWith(".json")) return false;
  try {
    const values = JSON.parse(await file.text()), nodes = values?.nodes ?? Object.values(values ?? {});
    return Array.isArray(values?.nodes) || Array.isArray(values?.templates) ||
      nodes.some((/** @type {any} */ node) => node?.class_type !== undefined);
  } catch {
    return false; // the server says what is wrong with it
  }
}

/** @param {Blob} file @returns {Promise<string>} */
async function encoded(file) {
  const letters = Array.from(new Uint8Array(await file.arrayBuffer()), (byte) => String.fromCharCode(byte));
  return btoa(letters.join(""));
}

// files: the settings first, then what they name, such as a list of datasets.
/** @param {File[]} files */
async function bring(files) {
  const sent = await Promise.all(files.map(async (file) => ({ name: file.name, content: await encoded(file) })));
  const answer = await ask("/atelier/import", { files: sent });
  if (answer.error) return toast(answer);
  const view = viewOf(answer.workflow.nodes);
  // In the file, as the editor fits one without a view to the window by and by, and makes a large one illegible.
  const note = answer.workflow.nodes.find((/** @type {any} */ { type }) => type === "MarkdownNote");
  if (note) note.widgets_values = [written(answer.note)];
  const workflow = { ...answer.workflow, extra: { ...answer.workflow.extra, ds: view } };
  await app.loadGraphData(workflow, true, true, answer.name);
  Object.assign(app.canvas.ds, view); // where a setting keeps the editor from the view of a file
  app.canvas.setDirty(true, true);
  refuse(answer.open);
}

// The report as Markdown, as `markdown` of trainer_core/workflow/importing.py writes it in English.
/** @param {{ title: unknown, parts: { title: unknown, lead: unknown, lines: unknown[] }[], end: unknown }} report */
function written({ title, parts, end }) {
  const plain = (/** @type {unknown} */ line) => String(told(line)).replace(/[*<`]|\]\(/g, (mark) => mark.replace(/./g, "\\$&"));
  const shown = parts.map((part) => [`**${told(part.title)}**`, told(part.lead), part.lines.map((line) => `- ${plain(line)}`).join("\n")]);
  return [`**${told(title)}**`, ...shown.flat(), told(end)].filter(Boolean).join("\n\n");
}

// All of a graph, or of a large one what is readable from its upper left corner on, where the note stands.
/** @param {{ pos: number[], size: number[] }[]} nodes */
function viewOf(nodes) {
  const [left, top] = [0, 1].map((axis) => Math.min(...nodes.map(({ pos }) => pos[axis])));
  const sides = [0, 1].map((axis) => Math.max(...nodes.map(({ pos, size }) => pos[axis] + size[axis])));
  const fits = Math.min(innerWidth / (sides[0] - left + 2 * LEFT), innerHeight / (sides[1] - top + 2 * ABOVE));
  return { scale: Math.max(READABLE, Math.min(1, fits)), offset: [LEFT - left, ABOVE - top] };
}

function choose() {
  const field = Object.assign(document.createElement("input"), { type: "file", multiple: true, accept: KINDS.join(",") });
  field.addEventListener("change", () => {
    const files = [...field.files ?? []];
    const large = files.find((file) => !isSettings(file));
    if (large) toast({ error: t("{0} is no file of settings, or larger than 1 MiB; choose another.", large.name) });
    else if (files.length) bring(files);
  });
  field.click();
}

app.registerExtension({
  name: "atelier.import",
  commands: [{ id: "Atelier.Import", label: t("Import settings of another trainer…"), icon: "pi pi-file-import",
    function: choose }],
  menuCommands: [{ path: ["Extensions", "LoRA Atelier"], commands: ["Atelier.Import"] }],
  setup() {
    const handle = app.handleFile;
    if (!handle) return; // a later editor takes dropped files elsewhere; the menu stays
    /** @param {File} file @param {unknown[]} rest */
    app.handleFile = async function (file, ...rest) {
      return isSettings(file) && !(await isOwn(file)) ? bring([file]) : handle.call(this, file, ...rest);
    };
  },
});
