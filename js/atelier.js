import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The pack's settings, and what a page has to read again after a run.

const KINDS = { encoded: "encoded pictures and captions", pictures: "pictures of the graph", loras: "LoRAs of the graph" };

const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(bytes < 1e9 ? 2 : 1)} GB`;

async function ask(address, question) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) };
  try {
    return await (await api.fetchApi(address, question && post)).json();
  } catch (problem) {
    return { error: `The server did not answer: ${problem.message}.` };
  }
}

function line(text, name, act) {
  const made = document.createElement("div"), words = document.createElement("span");
  made.style.cssText = "display:flex;gap:8px;align-items:center;justify-content:space-between;margin:2px 0";
  words.style.overflowWrap = "anywhere";
  words.textContent = text;
  made.append(words);
  if (name) {
    const button = document.createElement("button");
    button.textContent = name;
    button.style.cssText = "padding:2px 10px;border-radius:4px;border:1px solid var(--border-color);" +
      "background:var(--comfy-input-bg);color:var(--input-text);cursor:pointer";
    button.addEventListener("click", act);
    made.append(button);
  }
  return made;
}

// What the pack keeps, with a button that deletes it.
function showKept() {
  const box = document.createElement("div");
  box.className = "atelier-kept";
  const show = (answer) => {
    if (answer.error) return box.replaceChildren(line(answer.error));
    const parts = Object.entries(answer.sizes);
    const total = parts.reduce((sum, [, size]) => sum + size, 0);
    const words = parts.map(([kind, size]) => `${KINDS[kind]} ${gigabytes(size)}`).join(", ");
    box.replaceChildren(line(`${gigabytes(total)}: ${words}`, "Clear", clear));
  };
  const clear = async () => show(await ask("/atelier/kept/clear", {}));
  ask("/atelier/kept").then(show);
  return box;
}

// The folders outside ComfyUI's that somebody allowed, each with a button that forgets it.
function showFolders() {
  const box = document.createElement("div");
  box.className = "atelier-folders";
  const refresh = async () => {
    const answer = await ask("/atelier/folders");
    if (answer.error) return box.replaceChildren(line(answer.error));
    const forget = (folder) => async () => {
      const { error } = await ask("/atelier/folders/forget", { folder });
      if (error) box.append(line(error));
      else refresh();
    };
    const rows = answer.folders.map((folder) => line(folder, answer.may_change && "Forget", forget(folder)));
    box.replaceChildren(...(rows.length ? rows : [line("none")]));
  };
  refresh();
  return box;
}

app.registerExtension({
  name: "atelier.settings",
  settings: [
    {
      id: "Atelier.Folders",
      category: ["LoRA Atelier", "Folders", "Allowed"],
      name: "Folders that workflows may read",
      tooltip: "Folders outside ComfyUI's own. The page asks when a workflow names another one.",
      type: showFolders,
      defaultValue: "",
    },
    {
      id: "Atelier.Kept",
      category: ["LoRA Atelier", "Kept files", "Kept"],
      name: "Kept now",
      tooltip: "Runs are not among them: they lie in output/atelier/runs.",
      type: showKept,
      defaultValue: "",
    },
    {
      id: "Atelier.KeptLimit", // nodes/comfyui/folders.py reads it at the beginning of a run
      category: ["LoRA Atelier", "Kept files", "Limit"],
      name: "Limit in gigabytes",
      tooltip: "All that is kept may take this much together; what was unused for longest goes first. 0 = no limit.",
      type: "number",
      attrs: { min: 0, step: 1 },
      defaultValue: 20,
    },
  ],
});

// A new LoRA is missing from the lists that an open page has read already: read them again.
app.registerExtension({
  name: "atelier.lists",
  setup() {
    api.addEventListener("atelier.lora_saved", () => app.refreshComboInNodes());
  },
});
