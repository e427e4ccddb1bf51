import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ask, make, makeButton, toast } from "./parts.js";
import { t } from "./words.js";

// Runs that were queued or at work when ComfyUI ended: offered when the page opens, and queued as they were.

const MOST_NAMED = 5;
/** @type {HTMLElement | null} */
let offer = null; // the element, while something is offered
let asked = 0; // how often; an answer that a later one has overtaken counts no more

/** @param {string[]} names */
function listed(names) {
  const shown = names.slice(0, MOST_NAMED).join(", ");
  return names.length > MOST_NAMED ? t("{0} and {1} more", shown, names.length - MOST_NAMED) : shown;
}

/** @returns {Promise<void>} */
async function refresh() {
  const number = ++asked;
  /** @type {{prompts?: {name: string, runs: string[], missing: string[]}[]}} */
  const { prompts = [] } = await ask("/atelier/pending");
  if (number !== asked) return;
  offer?.remove();
  offer = null;
  if (!prompts.length) return;
  const runs = prompts.flatMap((prompt) => prompt.runs), lost = prompts.filter((prompt) => prompt.missing.length);
  offer = make("div", "position:fixed;right:24px;bottom:72px;z-index:1100;max-width:min(420px,90vw);padding:12px;" +
    "border:1px solid var(--border-color);border-radius:8px;background:var(--comfy-menu-bg);color:var(--input-text);" +
    "font:13px sans-serif;box-shadow:0 2px 12px #0008;overflow-wrap:anywhere");
  offer.className = "atelier-pending";
  offer.setAttribute("role", "region");
  offer.setAttribute("aria-label", t("Runs that were not finished"));
  offer.append(make("div", "", runs.length === 1
    ? t("1 run was not finished: {0}.", runs[0]) : t("{0} runs were not finished: {1}.", runs.length, listed(runs))));
  for (const { runs: own, missing } of lost)
    offer.append(make("div", "margin-top:6px;opacity:0.75", t("{0} needs nodes that are not installed: {1}.",
      listed(own), listed(missing))));
  const bar = make("div", "display:flex;gap:8px;margin-top:10px;justify-content:flex-end");
  if (lost.length < prompts.length)
    bar.append(makeButton(t("Continue"), t("Put them into ComfyUI's queue again; each goes on from its last save."),
      queueAgain));
  bar.append(makeButton(t("Dismiss"), t("Do not offer them again. Their saves stay."), () =>
    ask("/atelier/pending/drop", { names: prompts.map((prompt) => prompt.name) }).then(refresh)));
  offer.append(bar);
  document.body.append(offer);
}

// The server gives each prompt to one page only. It forgets a prompt once that is in the queue.
async function queueAgain() {
  const { prompts, error } = await ask("/atelier/pending/take", {});
  await refresh();
  if (error) return toast({ error });
  for (const { name, prompt, workflow, outputs } of prompts) {
    try {
      await api.queuePrompt(0, { output: prompt, workflow }, { partialExecutionTargets: outputs });
      await ask("/atelier/pending/drop", { names: [name] });
    } catch (/** @type {any} */ problem) {
      // refused: a model or a folder is gone, maybe; it is offered again after the next restart
      toast({ error: t("ComfyUI refused a run: {0}.", problem.message) });
    }
  }
}

api.addEventListener("atelier.pending", refresh); // early: the editor warns of events without a listener

app.registerExtension({
  name: "atelier.pending",
  setup() {
    refresh();
    api.addEventListener("reconnected", refresh);
  },
});
