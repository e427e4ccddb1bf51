import { app } from "../../scripts/app.js";
import { t } from "./words.js";

// A button on Dataset Preview that runs this node and what it needs, nothing else of the workflow.

app.registerExtension({
  name: "atelier.preview",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierDatasetPreview") return;
    const button = node.addWidget("button", t("Show what will be trained"), null, () => {
      app.canvas.selectItems([node]);
      requestAnimationFrame(() => app.extensionManager.command.execute("Comfy.QueueSelectedOutputNodes"));
    }, { serialize: false }); // in the prompt
    button.serialize = false; // in the workflow's file
  },
});
