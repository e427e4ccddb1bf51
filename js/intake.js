import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { whereSet } from "./failures.js";
import { ask, isLinked, make, makeButton, nodes, toast } from "./parts.js";
import { t, told } from "./words.js";
import { ZipError, entriesOf } from "./zip.js";

// Pictures of this computer go with their captions and masks into a new folder of ComfyUI's input, by ComfyUI's own
// route for uploads: dropped on Concept Dataset or chosen there, as files, as folders, or as zips.

const MOST_FILES = 20_000; // as nodes/routes.py takes
const MOST_BYTES = 20 * 2 ** 30, LARGEST = 2 ** 29; // of all files, and of one
const AT_ONCE = 3; // uploads
const HIDDEN = /(^|\/)(\.|__MACOSX\/)/; // what Macs and others put into every zip
const PICTURE = /^(image|video)\//, ZIP = /\.zip$/i;
/** @type {Record<string, (name: string) => string>} */
const ZIPPED = {
  unreadable: (name) => t("{0} is no zip that can be read, or it is cut off; unpack it and drop the folder.", name),
  encrypted: (name) => t("{0} is locked with a password; unpack it and drop the folder.", name),
  large: (name) => t("{0} has more than 4 GB or 65,535 files; unpack it and drop the folder.", name),
  outside: (name) => t("{0} holds a path or link that leads out of it, so nothing was taken; pack the pictures anew.", name),
  bomb: (name) => t("{0} would unpack to more than 20 times its size, so nothing was taken; pack the pictures anew.", name),
  damaged: (name) => t("{0} holds a damaged file, so it was not taken whole; pack the pictures anew.", name),
};

/** @typedef {import("./zip.js").Entry} Entry */

// Tells a drop of pictures from one of a workflow or of settings, which the editor opens.
/** @param {DataTransfer | null} transfer */
export function holdsPictures(transfer) {
  const files = [...(transfer?.files ?? [])], folders = entriesIn(transfer).filter((entry) => entry.isDirectory);
  return folders.length > 0 || files.some((file) => PICTURE.test(file.type) || ZIP.test(file.name));
}

/** @param {DataTransfer | null} transfer @returns {FileSystemEntry[]} */
const entriesIn = (transfer) => [...(transfer?.items ?? [])].flatMap((item) => item.webkitGetAsEntry?.() ?? []);

// What was dropped; it is asked for before anything is awaited, as the browser forgets it then.
/** @param {DataTransfer | null} transfer @returns {Promise<Entry[]>} */
export async function dropped(transfer) {
  const entries = entriesIn(transfer), plain = [...(transfer?.files ?? [])];
  if (!entries.length) return plain.map((file) => entryOf(file));
  /** @type {Entry[]} */
  const found = [];
  for (const entry of entries) await walk(entry, found);
  return found;
}

/** @param {FileSystemEntry} entry @param {Entry[]} found */
async function walk(entry, found) {
  if (found.length > MOST_FILES) return;
  if (entry.isFile) {
    const { file } = /** @type {FileSystemFileEntry} */ (entry);
    found.push(entryOf(await new Promise((done, failed) => file.call(entry, done, failed)), entry.fullPath));
    return;
  }
  const reader = /** @type {FileSystemDirectoryEntry} */ (entry).createReader();
  for (;;) { // it gives some at a time
    /** @type {FileSystemEntry[]} */
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) return;
    for (const each of some) await walk(each, found);
  }
}

/** @param {File} file @param {string} [path] @returns {Entry} */
const entryOf = (file, path = file.webkitRelativePath || file.name) =>
  ({ path: path.replace(/^\/+/, ""), size: file.size, read: async () => file });

// Send files into a new folder of input, and set a node to it.
/** @param {GraphNode} node @param {Promise<Entry[]> | Entry[]} files */
export async function takeIn(node, files) {
  const box = new Progress();
  try {
    const found = await unpacked(await files);
    const { folder, sent, left } = await send(named(found), box);
    if (!folder) return toast({ error: t("There is no picture or caption among these {0} files.", left) });
    setFolder(node, folder);
    const words = t("{0} files are in input/{1}.", sent, folder);
    toast({ said: left ? `${words} ${t("{0} others are none that a dataset reads, and were not taken.", left)}` : words });
  } catch (/** @type {any} */ problem) {
    toast({ error: problem.name !== "AbortError" ? problem.message : box.folder
      ? t("Cancelled. What had arrived is in input/{0}.", box.folder) : t("Cancelled. Nothing was taken.") });
  } finally {
    box.remove();
  }
}

// The files, with those in zips in their place.
/** @param {Entry[]} files @returns {Promise<Entry[]>} */
async function unpacked(files) {
  /** @type {Entry[]} */
  const found = [], several = files.length > 1;
  for (const file of files) {
    if (!ZIP.test(file.path)) {
      found.push(file);
      continue;
    }
    const inside = await entriesOf(await file.read()).catch((problem) => refuse(problem, file.path));
    const before = several || inside.some(({ path }) => !path.includes("/")) ? `${file.path.replace(ZIP, "")}/` : "";
    for (const { path, size, read } of inside.filter((each) => !HIDDEN.test(each.path)))
      found.push({ path: before + path, size, read: () => read().catch((problem) => refuse(problem, file.path)) });
  }
  if (found.length > MOST_FILES)
    throw new Error(t("These are {0} files; take at most {1} at once.", found.length, MOST_FILES));
  const huge = found.find(({ size }) => size > LARGEST), all = found.reduce((sum, { size }) => sum + size, 0);
  if (huge) throw new Error(t("{0} has more than 512 MB; make it smaller, or leave it out.", huge.path));
  if (all > MOST_BYTES) throw new Error(t("These are more than 20 GB; take fewer at once."));
  return found;
}

/** @param {unknown} problem @param {string} path @returns {never} */
function refuse(problem, path) {
  if (!(problem instanceof ZipError)) throw problem;
  throw new Error(ZIPPED[problem.kind](path.split("/").at(-1) || path));
}

// The files without the folder that all of them are in, which gives the new one its name.
/** @param {Entry[]} files */
function named(files) {
  const tops = new Set(files.map(({ path }) => path.split("/")[0])), [top] = tops;
  const one = tops.size === 1 && files.every(({ path }) => path.includes("/"));
  return { name: one ? top : "pictures", files, cut: one ? top.length + 1 : 0 };
}

/** @param {{ name: string, files: Entry[], cut: number }} list @param {Progress} box */
async function send({ name, files, cut }, box) {
  box.signal.throwIfAborted(); // while the files were looked at: no folder is made
  const answer = await ask("/atelier/folders/new", { name, files: files.map(({ path }) => path.slice(cut)) });
  if (answer.error) throw new Error(told(answer.error));
  /** @type {{ folder: string, files: string[] }} */
  const { folder, files: names } = answer;
  const wanted = files.flatMap((file, i) => (names[i] ? [{ file, to: `${folder}/${names[i]}` }] : []));
  box.begin(folder, wanted.length);
  let next = 0;
  const work = async () => {
    while (next < wanted.length) {
      const { file, to } = wanted[next++];
      await upload(to, await file.read(), box.signal);
      box.count();
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, () => work().catch((problem) => {
    next = wanted.length; // the others end, too
    throw problem;
  })));
  return { folder, sent: wanted.length, left: files.length - wanted.length };
}

/** @param {string} to @param {Blob} content @param {AbortSignal} signal */
async function upload(to, content, signal) {
  const at = to.lastIndexOf("/"), body = new FormData();
  body.append("image", content, to.slice(at + 1)); // the server's name for any file
  body.append("type", "input");
  body.append("subfolder", to.slice(0, at));
  const response = await api.fetchApi("/upload/image", { method: "POST", body, signal }).catch((problem) => {
    if (problem.name === "AbortError") throw problem;
    return null; // the server has gone, or the file cannot be read any more
  });
  if (response?.ok) return;
  throw new Error(response?.status === 413
    ? t("{0} is larger than this ComfyUI takes; start it with a higher --max-upload-size, or leave the file out.", to)
    : t("{0} could not be uploaded: {1}. Its folder is not whole: delete it, and drop the files again.", to,
      response?.statusText ?? t("the connection broke")));
}

// Set the folder where it is set: at the node, or at the subgraph that holds it.
/** @param {GraphNode} node @param {string} folder */
function setFolder(node, folder) {
  const widget = node.widgets.find((each) => each.name === folderOf(node));
  if (!widget || isLinked(node, widget.name)) return;
  app.canvas.emitBeforeChange();
  widget.value = folder;
  widget.callback?.(folder);
  app.canvas.emitAfterChange();
  node.setDirtyCanvas(true, true);
}

// What a node calls the folder of pictures: Concept Dataset, or one that stands for a subgraph with it; "" for others.
/** @param {GraphNode} node */
function folderOf(node) {
  if (node.comfyClass === "AtelierConceptDataset") return "folder";
  for (const found of node.subgraph ? nodes(node.subgraph, "", [node]) : []) {
    if (found.node.comfyClass !== "AtelierConceptDataset") continue;
    const [owner, name] = whereSet(found, "folder");
    if (owner === node) return name;
  }
  return "";
}

// How many files have arrived, with a button that ends it.
class Progress {
  #abort = new AbortController();
  #words = make("span");
  #box = make("div", "position:fixed;left:50%;bottom:24px;transform:translateX(-50%);z-index:1000;padding:8px 12px;" +
    "border:1px solid var(--border-color);border-radius:6px;background:var(--comfy-menu-bg);color:var(--input-text);" +
    "font:14px sans-serif;display:flex;gap:12px;align-items:center");
  #all = 0;
  #done = 0;
  folder = "";

  constructor() {
    this.#box.className = "atelier-intake";
    this.#words.setAttribute("role", "status");
    this.#words.textContent = t("Looking at the files …");
    this.#box.append(this.#words, makeButton(t("Cancel"), t("Send no more files."), () => this.#abort.abort()));
    document.body.append(this.#box);
  }

  get signal() {
    return this.#abort.signal;
  }

  /** @param {string} folder @param {number} all */
  begin(folder, all) {
    [this.folder, this.#all] = [folder, all];
    this.#show();
  }

  count() {
    this.#done++;
    this.#show();
  }

  #show() {
    this.#words.textContent = t("{0} of {1} files are in input/{2}", this.#done, this.#all, this.folder);
  }

  remove() {
    this.#box.remove();
  }
}

/** @param {boolean} folder @param {(files: Entry[]) => void} take */
export function pick(folder, take) {
  const picker = document.createElement("input");
  Object.assign(picker, { type: "file", multiple: true, webkitdirectory: folder });
  picker.onchange = () => take([...(picker.files ?? [])].map((file) => entryOf(file)));
  picker.click();
}

app.registerExtension({
  name: "atelier.intake",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierConceptDataset" && !node.subgraph) return;
    const { onDragOver, onDragDrop } = node;
    node.onDragOver = function (event) {
      const files = [...(event.dataTransfer?.items ?? [])].some((item) => item.kind === "file");
      return (files && folderOf(node) !== "") || Boolean(onDragOver?.call(this, event));
    };
    node.onDragDrop = function (event) {
      if (!folderOf(node) || !holdsPictures(event.dataTransfer)) return onDragDrop?.call(this, event) ?? false;
      takeIn(node, dropped(event.dataTransfer));
      return true;
    };
  },
});
