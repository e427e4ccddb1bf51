import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { RunGraph } from "./graph.js";
import { WISHES, addressOf, ask, make, makeButton, toast } from "./parts.js";
import { SampleStrip } from "./samples.js";
import { t, told } from "./words.js";

// One run in the tab "LoRA runs": its graph, samples, saves, settings and files, and what can be done with it.

/** @param {ListedRun} run */
export const titleOf = (run) => run.title || run.name || run.run;
/** @param {number} seconds @param {Intl.DateTimeFormatOptions} [time] */
export const day = (seconds, time = { timeStyle: "short" }) =>
  new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", ...time });
/** @param {string} name */
export const setting = (name) => name.replaceAll(".", ".\u200b"); // lines may break after a dot
/** @param {string} run @returns {Promise<Run | Failure>} */
export const readRun = (run) => ask(addressOf(run));

/** @param {number} count */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  for (; count >= 1000 && unit < 3; unit++) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

// A value of a setting as people read it.
/** @param {unknown} value */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

// A table of rows of texts and elements; the first row is its head.
/** @param {(string | Node)[][]} rows */
export function table([head, ...rows]) {
  const made = make("table"), frame = make("div");
  /** @param {(string | Node)[]} cells @param {"th" | "td"} kind */
  const line = (cells, kind) => {
    const row = make("tr");
    row.append(...cells.map((cell, i) => {
      const place = make(i ? kind : "th");
      place.append(cell);
      return place;
    }));
    return row;
  };
  if (head.length) made.append(line(head, "th"));
  made.append(...rows.map((cells) => line(cells, "td")));
  frame.className = "scroll";
  frame.append(made);
  return frame;
}

/** @param {string} title @param {Node[]} content */
function fold(title, ...content) {
  const made = make("details");
  made.append(make("summary", "", title), ...content);
  return made;
}

// --- the workflow ----------------------------------------------------------------------------------------

/** @param {Run} run */
async function loadWorkflow(run) {
  const { workflow, error } = await ask(`${addressOf(run.run)}/workflow`);
  if (error) toast({ error });
  else await app.loadGraphData(workflow, true, true, titleOf(run));
  return !error;
}

// The Train LoRA of the open workflow that trains under a name, else its only one.
/** @param {string | null} name */
function findTrain(name) {
  const graphs = [app.rootGraph ?? app.graph], found = [];
  for (const graph of graphs)
    for (const node of graph?.nodes ?? []) {
      if (node.subgraph && !graphs.includes(node.subgraph)) graphs.push(node.subgraph);
      if (node.comfyClass === "AtelierTrain") found.push(node);
    }
  const named = found.filter((node) => node.widgets?.find((widget) => widget.name === "name")?.value === name);
  return named[0] ?? (found.length === 1 ? found[0] : null);
}

/** @param {GraphNode} node @param {string} name @param {string | number} value */
function set(node, name, value) {
  const widget = /** @type {Widget} */ (node.widgets.find((each) => each.name === name));
  widget.value = value;
  widget.callback?.(value);
}

/** @param {Run} run */
async function resume(run) {
  if (!run.workflow)
    return toast({ error: t("This run keeps no workflow. Open the one that trained it, then press Run.") });
  if (!(await loadWorkflow(run))) return;
  const node = findTrain(run.name), how = node?.widgets.find((widget) => widget.name === "on_existing")?.value;
  if (how === "train again" || how === "reuse") set(node, "on_existing", "resume");
  toast({ said: run.status === "finished"
    ? t("{0} is finished. Raise steps of Train LoRA, then press Run to train on.", titleOf(run))
    : t("Press Run to resume {0} after step {1} of {2}.", titleOf(run), run.step, run.steps) });
}

/** @param {Run} run @param {number} step */
async function fork(run, step) {
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

// --- the page --------------------------------------------------------------------------------------------

export class RunPage {
  /** @type {string} */
  #name;
  /** @type {() => void} called once the run is gone */
  #leave;
  /** @type {HTMLElement} */
  #host;
  #graph;
  #samples;
  /** @type {Run | null} */
  #run = null;
  #shown = ""; // what the parts below the graph show
  #head = make("div");
  #rest = make("div");
  /** @type {Set<number>} */
  #chosen = new Set(); // steps of saves to delete

  /** @param {HTMLElement} host @param {string} name @param {() => void} leave */
  constructor(host, name, leave) {
    this.#host = host;
    this.#name = name;
    this.#leave = leave;
    const place = make("div"), strip = make("div");
    this.#graph = new RunGraph(place);
    this.#samples = new SampleStrip(strip);
    host.append(this.#head, place, strip, this.#rest);
    this.refresh();
  }

  dispose() {
    this.#graph.dispose();
    this.#samples.close();
    this.#host.remove();
  }

  async refresh() {
    const idle = this.#run && this.#run.status !== "running";
    if (!idle || (await ask(`${addressOf(this.#name)}/live`)).alive) await this.#read();
  }

  async #read() {
    const run = await readRun(this.#name);
    if (!this.#host.isConnected) return;
    if (run.error !== undefined) return this.#head.replaceChildren(make("div", "", told(run.error)));
    this.#run = run;
    const best = run.best ?? null;
    this.#graph.setRuns([{ name: titleOf(run), points: run.curves ?? {}, concepts: run.curves?.concepts,
      levels: run.curves?.levels,
      saves: run.saves.map(({ step }) => ({ step, best: step === best })) }]);
    this.#samples.set(run.run, run.samples, run.prompts ?? []);
    const { curves, step, sentence, loss, changed, size, ...slow } = run, shows = JSON.stringify(slow);
    this.#drawHead(run);
    if (shows !== this.#shown) this.#drawRest(run);
    this.#shown = shows;
  }

  /** @param {string} address @param {object} question */
  async #act(address, question) {
    const answer = await ask(address, { run: this.#name, ...question });
    if (answer.error || answer.said) toast(answer);
    return answer;
  }

  /** @param {Run} run */
  #drawHead(run) {
    const title = make("h2", "", titleOf(run)), state = make("div", "", told(run.sentence)), bar = make("div");
    state.className = `wrap status ${run.status}`;
    bar.className = "bar";
    bar.style.marginTop = "8px";
    const sound = run.status !== "unreadable", idle = run.status !== "running";
    /** @param {HTMLButtonElement} button @param {boolean} may */
    const can = (button, may) => Object.assign(button, { disabled: !may });
    bar.append(
      can(makeButton(t("Continue"), t("Load the workflow of this run, and say what to press"), () => resume(run)),
        sound && idle),
      can(makeButton(t("Workflow"), t("Load the workflow of this run"), () => loadWorkflow(run)), run.workflow),
      can(makeButton(t("Export"), t("Download LoRA, settings and samples as a zip"), () => this.#export(run)),
        run.saves.some((save) => save.lora)),
      can(makeButton(t("Rename"), t("Give this run another title"), () => this.#rename(run)), sound),
      can(makeButton(t("Delete"), t("Delete this run from the disk"), () => this.#delete(null)), idle),
    );
    if (!idle) bar.prepend(...WISHES.map(([what, name, help]) =>
      makeButton(name, help, () => this.#act("/atelier/runs/ask", { what }))));
    /** @type {Element[]} */
    const before = [...this.#head.querySelectorAll("button")];
    const place = document.activeElement ? before.indexOf(document.activeElement) : -1;
    this.#head.replaceChildren(title, state, bar);
    if (place >= 0) bar.querySelectorAll("button")[place]?.focus();
  }

  /** @param {Run} run */
  #drawRest(run) {
    this.#rest.replaceChildren();
    if (run.status === "unreadable") return;
    const settings = Object.entries(run.settings).map(([name, value]) => [setting(name), shown(value)]);
    this.#rest.append(make("h3", "", t("Saves")), this.#saves(run), make("h3", "", t("Trained on")), this.#origin(run),
      fold(t("Settings"), table([[], ...settings])),
      fold(t("Files"), this.#files(run)));
  }

  /** @param {Run} run */
  #saves(run) {
    if (!run.saves.length) return make("div", "", t("Nothing is saved yet."));
    const idle = run.status !== "running", box = make("div");
    const remove = makeButton("", t("Delete the chosen saves from the disk"), () => this.#delete([...this.#chosen]));
    const count = () => {
      const chosen = run.saves.filter((save) => this.#chosen.has(save.step));
      remove.disabled = !chosen.length;
      const size = bytes(chosen.reduce((sum, save) => sum + save.size, 0));
      remove.textContent = chosen.length
        ? t("Delete {0} of {1} ({2})", chosen.length, run.saves.length, size) : t("Delete chosen");
    };
    count();
    const rows = [...run.saves].reverse().map((save) => {
      const acts = make("div"), choose = make("input"), notes = [];
      acts.className = "bar";
      acts.style.marginBottom = "0";
      Object.assign(choose, { type: "checkbox", disabled: !idle, checked: this.#chosen.has(save.step) });
      choose.setAttribute("aria-label", t("Choose the save of step {0}", save.step));
      choose.addEventListener("change", () => {
        this.#chosen[choose.checked ? "add" : "delete"](save.step);
        count();
      });
      const step = make("label", "white-space:nowrap");
      step.append(choose, ` ${save.step}`);
      if (save.step === run.best) notes.push(t("best"));
      if (save.stays) notes.push(t("stays"));
      if (save.problem) notes.push(save.problem);
      const forks = makeButton(t("Fork"), t("Start a new run from this save"), () => fork(run, save.step));
      const copies = makeButton(t("To LoRAs"), t("Copy the LoRA of this save into models/loras"),
        () => this.#publish(run, save.step));
      const zips = makeButton(t("Zip"), t("Download this save's LoRA with settings and samples"),
        () => this.#export(run, save.step));
      acts.append(forks, copies, zips);
      forks.disabled = Boolean(save.problem);
      copies.disabled = zips.disabled = !save.lora;
      const facts = [bytes(save.size), ...(save.written ? [day(save.written)] : []), ...notes], cell = make("div");
      cell.append(make("div", "", facts.join(" · ")), acts);
      return [step, cell];
    });
    box.append(table([[], ...rows]), remove);
    remove.style.marginTop = "6px";
    return box;
  }

  /** @param {Run} run */
  #origin(run) {
    const concepts = Object.entries(run.settings).filter(([name]) => /^dataset\.concepts\.\d+\.folder$/.test(name));
    const rows = [
      [t("base model"), run.base_model ?? "–"],
      [t("pictures"), String(run.pictures ?? "–")],
      ...concepts.map(([name, folder]) => {
        const repeats = run.settings[name.replace("folder", "repeats")];
        return [t("concept"), repeats ? t("{0}, {1} repeats", folder, repeats) : String(folder)];
      }),
      [t("begun"), day(run.created)],
      ...(run.begun_with
        ? [[t("started from"), t("step {0} of the run {1}", run.begun_with.step, run.begun_with.run)]] : []),
    ];
    return table([[], ...rows]);
  }

  /** @param {Run} run */
  #files(run) {
    const place = make("div", "", `output/atelier/runs/${run.run}`);
    place.className = "wrap dim";
    const box = make("div"), copies = run.published.map((name) => [t("copied to"), name]);
    box.append(place, table([[], ...copies, ...run.files.map(({ name, size }) => [name, bytes(size)])]));
    return box;
  }

  // --- what people do with it ----------------------------------------------------------------------------

  /** @param {Run} run */
  async #rename(run) {
    const title = await app.extensionManager.dialog.prompt({
      title: t("Rename this run"), message: t("Its title here; the folder keeps its name."), defaultValue: titleOf(run),
    });
    if (title === null || title === undefined) return;
    if (!(await this.#act("/atelier/runs/rename", { title })).error) await this.#read();
  }

  /** @param {Run} run @param {number} step */
  async #publish(run, step) {
    const name = await app.extensionManager.dialog.prompt({
      title: t("Copy to models/loras"),
      message: t("The file's name; a / separates folders."),
      defaultValue: `atelier/${run.name}-step-${step}`,
    });
    if (name && !(await this.#act("/atelier/runs/publish", { step, name })).error) await this.#read();
  }

  /** @param {Run} run @param {number | string} [step] */
  async #export(run, step = "last") {
    const response = await api.fetchApi(`${addressOf(run.run)}/export/${step}`);
    if (!response.ok) return toast(await response.json());
    const link = make("a"), named = /filename="(.+)"/.exec(response.headers.get("Content-Disposition") ?? "");
    link.href = URL.createObjectURL(await response.blob());
    link.download = named?.[1] ?? "run.zip";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  /** @param {number[] | null} steps */
  async #delete(steps) {
    const { question, bytes: agreed } = await this.#act("/atelier/runs/delete", { steps });
    if (!question) return;
    const yes = await app.extensionManager.dialog.confirm({
      title: steps ? t("Delete saves?") : t("Delete this run?"), message: told(question), type: "delete",
    });
    if (!yes) return;
    const answer = await this.#act("/atelier/runs/delete", { steps, agreed });
    if (answer.question) toast({ error: t("The run changed meanwhile. Press Delete again.") });
    if (!answer.said) return;
    this.#chosen.clear();
    if (steps === null) this.#leave();
    else await this.#read();
  }
}
