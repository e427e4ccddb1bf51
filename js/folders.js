import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// A workflow may come from anybody, and names folders of this machine: those outside ComfyUI's are asked for once.

const NODES = new Set(["AtelierConceptDataset", "AtelierMaskLoader"]);

async function post(address, question) {
  const response = await api.fetchApi(address, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
  });
  return response.json();
}

function toast(severity, detail) {
  app.extensionManager.toast.add({ severity, summary: "LoRA Atelier", detail, life: 10000 });
}

// The folders that a prompt names, subgraphs included: a prompt is flat.
function foldersOf(prompt) {
  const nodes = Object.values(prompt?.output ?? {}).filter((node) => NODES.has(node.class_type));
  return [...new Set(nodes.map((node) => node.inputs?.folder).filter((folder) => typeof folder === "string"))];
}

async function askFor(folders) {
  const [{ unknown }, { may_change: mayAsk }] = await Promise.all([
    post("/atelier/folders/check", { folders }),
    api.fetchApi("/atelier/folders").then((response) => response.json()),
  ]);
  if (!mayAsk) return; // the server refuses the prompt, and says what to do
  for (const folder of unknown ?? []) {
    const agreed = await app.extensionManager.dialog.confirm({
      title: "Allow this folder?",
      message: `This workflow wants to read the pictures and captions in ${folder}, which is outside ComfyUI's ` +
        "folders. Allow it if the folder is yours and you trust the workflow. LoRA Atelier remembers your answer.",
    });
    if (!agreed) continue;
    const answer = await post("/atelier/folders/allow", { folder });
    toast(answer.error ? "warn" : "success", answer.error ?? answer.said);
  }
}

app.registerExtension({
  name: "atelier.folders",
  setup() {
    const queue = api.queuePrompt;
    api.queuePrompt = async function (number, prompt, ...rest) {
      const folders = foldersOf(prompt);
      try {
        if (folders.length) await askFor(folders);
      } catch (problem) {
        console.warn("LoRA Atelier could not ask for folders:", problem); // the server checks them all the same
      }
      return queue.call(this, number, prompt, ...rest);
    };
  },
});
