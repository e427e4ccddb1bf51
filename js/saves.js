import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { addressOf, ask, nodes, toast } from "./parts.js";
import { t } from "./words.js";

// What can be done with a run and its saves, from its page and from each of its pictures.

/** @param {Pick<ListedRun, "title" | "name" | "run">} run */
export const titleOf = (run) => run.title || run.name || run.run;
/** @param {string} run @returns {Promise<Run | Failure>} */
export const readRun = (run) => ask(addressOf(run));

/** @type {Record<"lora" | "resumes", (save: Save) => boolean>} */
const HOLDS = { lora: (save) => save.lora, resumes: (save) => save.resumes && !save.problem };

// The save whose step is nearest to one, of those that hold what is wanted; the earlier one of two.
/** @param {Run} run @param {number} step @param {"lora" | "resumes"} what @returns {Save | undefined} */
export function nearestSave(run, step, what) {
  const found = run.saves.filter(HOLDS[what]);
  /** @param {Save} save */
  const far = (save) => Math.abs(save.step - step);
  return found.sort((one, other) => far(one) - far(other) || one.step - other.step)[0];
}

/** @param {Run} run */
export async function loadWorkflow(run) {
  const { workflow, error } = await ask(`${addressOf(run.run)}/workflow`);
  if (error) toast({ error });
  else await app.loadGraphData(workflow, true, true, titleOf(run));
  return !error;
}

// The Train LoRA of the open workflow that trains under a name, else its only one.
/** @param {string | null} name */
function findTrain(name) {
  const found = [...nodes()].map(({ node }) => node).filter((node) => node.comfyClass === "AtelierTrain");
  const named = found.filter((node) => node.widgets?.find((widget) => widget.name === "name")?.value === name);
  return named[0] ?? (found.length === 1 ? found[0] : null);
}

/** @param {GraphNode} node @param {string} name @param {string | number} value */
export function set(node, name, value) {
  const widget = /** @type {Widget} */ (node.widgets.find((each) => each.name === name));
  widget.value = value;
  widget.callback?.(value);
}

/** @param {Run} run */
export async function resume(run) {
  if (!run.workflow)
    return toast({ error: t("This run keeps no workflow. Open the one that trained it, then press Run.") });
  if (!(await loadWorkflow(run))) return;
  const node = findTrain(run.name), how = node?.widgets.find((widget) => widget.name === "on_existing")?.value;
  if (node && (how === "train again" || how === "reuse")) set(node, "on_existing", "resume");
  toast({ said: run.status === "finished"
    ? t("{0} is finished. Raise steps of Train LoRA, then press Run to train on.", titleOf(run))
    : t("Press Run to resume {0} after step {1} of {2}.", titleOf(run), run.step, run.steps) });
}

/** @param {Run} run @param {number} step */
export async function fork(run, step) {
  if (run.workflow && !(await loadWorkflow(run))) return;
  const node = findTrain(run.name);
  if (!node)
    return toast({ error: t("The open workflow has no Train LoRA, or several. Open another one, then fork again.") });
  set(node, "on_existing", "fork");
  set(node, "on_existing.run", run.run);
  set(node, "on_existing.step", step);
  app.canvas.centerOnNode(node);
  toast({ said: t("Train LoRA now forks from step {0}. Change the settings you like, then press Run.", step) });
}

// Copy the LoRA of a save into models/loras, under a name that is asked for; whether it was.
/** @param {Run} run @param {number} step */
export async function useLora(run, step) {
  const name = await app.extensionManager.dialog.prompt({
    title: t("Copy to models/loras"),
    message: t("The file's name; a / separates folders."),
    defaultValue: `atelier/${run.name}-step-${step}`,
  });
  if (!name) return false;
  const answer = await ask("/atelier/runs/publish", { run: run.run, step, name });
  toast(answer);
  return !answer.error;
}

/** @param {Run} run @param {number | string} [step] */
export async function download(run, step = "last") {
  const response = await api.fetchApi(`${addressOf(run.run)}/export/${step}`);
  if (!response.ok) return toast(await response.json());
  const link = document.createElement("a");
  const named = /filename="(.+)"/.exec(response.headers.get("Content-Disposition") ?? "");
  link.href = URL.createObjectURL(await response.blob());
  link.download = named?.[1] ?? "run.zip";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
