import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// A new LoRA is missing from the lists that an open page has read already: read them again.
app.registerExtension({
  name: "atelier.lists",
  setup() {
    api.addEventListener("atelier.lora_saved", () => app.refreshComboInNodes());
  },
});
