import { app } from "../../scripts/app.js";

// Opens the tab "LoRA runs" from elsewhere, at a run, or with a run chosen to be compared.

/** @typedef {{ run: string, compare?: boolean }} Wish */

/** @type {Wish | null} */
let wished = null;
let tell = () => {};

/** @param {Wish} wish */
export async function openRuns(wish) {
  wished = wish;
  if (document.querySelector(".atelier-runs")) tell();
  else await app.extensionManager.command.execute("Workspace.ToggleSidebarTab.atelier-runs");
}

// What somebody wishes to see, once.
export function takeWish() {
  const wish = wished;
  wished = null;
  return wish;
}

/** @param {() => void} listen called when somebody wishes to see something while the tab is open */
export function onWish(listen) {
  tell = listen;
}
