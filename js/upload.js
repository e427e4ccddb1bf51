import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { toast } from "./parts.js";
import { t } from "./words.js";

// A button on Load LoRA File that takes a LoRA from this computer; a file dropped on the node does the same.

const FOLDER = "loras"; // of ComfyUI's input folder
const MARK = "uploaded: "; // before the names of such files in the list

/** @param {GraphNode} node @param {File} file */
async function upload(node, file) {
  if (!/\.(safetensors|sft)$/i.test(file.name)) {
    toast({ error: t("{0} is no .safetensors file; choose another one.", file.name) });
    return;
  }
  const body = new FormData();
  body.append("image", file); // the server's name for any file
  body.append("type", "input");
  body.append("subfolder", FOLDER);
  const response = await api.fetchApi("/upload/image", { method: "POST", body }).catch(() => null); // it has gone
  if (!response?.ok) {
    toast({ error: response?.status === 413
      ? t("{0} is too large to upload; copy it into models/loras instead.", file.name)
      : t("{0} could not be uploaded: {1}.", file.name, response?.statusText ?? t("the connection broke")) });
    return;
  }
  const { name } = await response.json();
  const widget = /** @type {Widget} */ (node.widgets.find((each) => each.name === "lora_name"));
  if (!widget.options.values.includes(MARK + name)) widget.options.values.push(MARK + name);
  widget.value = MARK + name;
  widget.callback?.(widget.value);
  node.setDirtyCanvas(true, true);
}

app.registerExtension({
  name: "atelier.upload",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierLoadLoraFile") return;
    const button = node.addWidget("button", t("Upload a LoRA"), null, () => {
      const picker = document.createElement("input");
      picker.type = "file";
      picker.accept = ".safetensors,.sft";
      picker.onchange = () => {
        const file = picker.files?.[0];
        if (file) upload(node, file);
      };
      picker.click();
    }, { serialize: false }); // in the prompt
    button.serialize = false; // in the workflow's file
    node.onDragOver = (event) => Boolean(event.dataTransfer?.items?.length);
    node.onDragDrop = (event) => {
      const [file] = event.dataTransfer?.files ?? [];
      if (file) upload(node, file);
      return Boolean(file);
    };
  },
});
