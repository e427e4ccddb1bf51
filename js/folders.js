import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ask, toast } from "./parts.js";
import { t } from "./words.js";

// A workflow may come from anybody, and names folders of this machine: those outside ComfyUI's are asked for once.

const NODES = new Set(["AtelierConceptDataset", "AtelierControlPictures", "AtelierMaskLoader"]);
const INPUTS = ["folder", "folder_2", "folder_3"];

// The folders that a prompt names, subgraphs included: a prompt is flat.
/** @param {Prompt} prompt @returns {string[]} */
function foldersOf(prompt) {
  const nodes = Object.values(prompt?.output ?? {}).filter((node) => NODES.has(node.class_type));
  const named = nodes.flatMap((node) => INPUTS.map((name) => node.inputs?.[name]));
  return [...new Set(named.filter((folder) => typeof folder === "string").filter(Boolean))];
}

/** @param {string[]} folders */
async function askFor(folders) {
  const [{ unknown }, { may_change: mayAsk }] = await Promise.all([
    ask("/atelier/folders/check", { folders }),
    ask("/atelier/folders"),
  ]);
  if (!mayAsk) return; // the server refuses the prompt, and says what to do
  for (const folder of unknown ?? []) {
    const agreed = await app.extensionManager.dialog.confirm({
      title: t("Allow this folder?"),
      message: t("This workflow wants to read the pictures and captions in {0}, which is outside ComfyUI's folders. " +
        "Allow it if the folder is yours and you trust the workflow. LoRA Atelier remembers your answer.", folder),
    });
    if (!agreed) continue;
    toast(await ask("/atelier/folders/allow", { folder }));
  }
}

app.registerExtension({
  name: "atelier.folders",
  setup() {
    const queue = api.queuePrompt;
    api.queuePrompt = async function (number, prompt, ...rest) {
      const folders = foldersOf(prompt);
      if (folders.length) await askFor(folders); // the server checks them all the same
      return queue.call(this, number, prompt, ...rest);
    };
  },
});
