import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { showOutward } from "./outward.js";
import { ask, make, makeButton } from "./parts.js";
import { bytes, t, told } from "./words.js";

// The pack's settings, and what a page has to read again after a run.

/** @type {Record<string, string>} */
const KINDS = {
  encoded: t("encoded pictures and captions"),
  pictures: t("pictures of the graph"),
  loras: t("LoRAs of the graph"),
  undo: t("for undo, which Clear ends"),
};

/** @param {string} text @param {string | false} [name] @param {() => void} [act] */
function line(text, name, act) {
  const made = make("div", "display:flex;gap:8px;align-items:center;justify-content:space-between;margin:2px 0");
  made.append(make("span", "overflow-wrap:anywhere", told(text)), ...(name && act ? [makeButton(name, "", act)] : []));
  return made;
}

// What the pack keeps, with a button that deletes it.
function showKept() {
  const box = document.createElement("div");
  box.className = "atelier-kept";
  /** @param {{error?: string, sizes: Record<string, number>}} answer */
  const show = (answer) => {
    if (answer.error) return box.replaceChildren(line(answer.error));
    const parts = Object.entries(answer.sizes);
    const total = parts.reduce((sum, [, size]) => sum + size, 0);
    const words = parts.map(([kind, size]) => `${KINDS[kind]} ${bytes(size)}`).join(", ");
    box.replaceChildren(line(`${bytes(total)}: ${words}`, t("Clear"), clear));
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
    /** @param {string} folder */
    const forget = (folder) => async () => {
      const { error } = await ask("/atelier/folders/forget", { folder });
      if (error) box.append(line(error));
      else refresh();
    };
    /** @type {string[]} */
    const folders = answer.folders;
    const rows = folders.map((folder) => line(folder, answer.may_change && t("Forget"), forget(folder)));
    box.replaceChildren(...(rows.length ? rows : [line(t("none"))]));
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
      id: "Atelier.Outward",
      category: ["LoRA Atelier", "Services outside", "Outward"],
      name: "Who hears of runs",
      tooltip: "Nothing goes out unless you switch it on here. Libraries that you install yourself carry it.",
      type: showOutward,
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

// A new LoRA is missing from the lists that an open page has read already: read them again, without the editor's toast.
api.addEventListener("atelier.lora_saved", () => app.graph && app.reloadNodeDefs());
