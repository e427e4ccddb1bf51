import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// A new LoRA is missing from the lists that an open page has read already: read them again.
app.registerExtension({
  name: "atelier.settings",
  settings: [
    {
      id: "Atelier.CacheLimit", // nodes/bridge.py reads it at the beginning of a run
      category: ["LoRA Atelier", "Cache", "Limit"],
      name: "Limit in gigabytes",
      tooltip: "Encoded pictures and captions may take this much; those unused for longest go first. 0 = no limit.",
      type: "number",
      attrs: { min: 0, step: 1 },
      defaultValue: 20,
    },
  ],
});

app.registerExtension({
  name: "atelier.lists",
  setup() {
    api.addEventListener("atelier.lora_saved", () => app.refreshComboInNodes());
  },
});
