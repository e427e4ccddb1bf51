import { app } from "../../scripts/app.js";
import { RunGraph } from "./graph.js";
import { noticeButton, watch } from "./notice.js";
import { oddPictures } from "./odd.js";
import { publish, publishedOf } from "./outward.js";
import { WISHES, addressOf, ask, make, makeButton, toast } from "./parts.js";
import { SampleStrip } from "./samples.js";
import { download, fork, loadWorkflow, readRun, resume, titleOf, useLora } from "./saves.js";
import { bytes, clock, day, inputWords, nodeTitle, t, told } from "./words.js";

// One run in the tab "LoRA runs": its graph, samples, saves, settings and files, and what can be done with it.

// A value of a setting as people read it.
/** @param {unknown} value */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? t("on") : t("off");
  return typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
}

// A table of rows of texts and elements.
/** @param {(string | Node)[][]} rows */
function table(rows) {
  const made = make("table");
  /** @param {(string | Node)[]} cells */
  const line = (cells) => {
    const row = make("tr");
    row.append(...cells.map((cell, i) => {
      const place = make(i ? "td" : "th");
      place.append(cell);
      return place;
    }));
    return row;
  };
  made.append(...rows.map(line));
  return made;
}

/** @param {string} title @param {Node[]} content */
function fold(title, ...content) {
  const made = make("details");
  made.append(make("summary", "", title), ...content);
  return made;
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
  #all = false; // whether settings with their default are shown

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
    const { curves, step, sentence, loss, loss_words: _, seconds, changed, size, ...slow } = run;
    const shows = JSON.stringify(slow);
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
    const facts = make("div", "", [told(run.loss_words), validationOf(run)].filter(Boolean).join(" · "));
    state.className = `wrap status ${run.failed ? "failed" : run.status}`;
    facts.className = "wrap";
    bar.className = "bar";
    bar.style.marginTop = "8px";
    const sound = run.status !== "unreadable", idle = run.status !== "running";
    /** @param {HTMLButtonElement} button @param {boolean} may */
    const can = (button, may) => Object.assign(button, { disabled: !may });
    bar.append(
      can(makeButton(t("Continue"), t("Load the workflow of this run, and say what to press"), () => resume(run)),
        sound && idle),
      can(makeButton(t("Workflow"), t("Load the workflow of this run"), () => loadWorkflow(run)), run.workflow),
      can(makeButton(t("Export"), t("Download LoRA, settings and samples as a zip"), () => download(run)),
        run.saves.some((save) => save.lora)),
      can(makeButton(t("Rename"), t("Give this run another title"), () => this.#rename(run)), sound),
      can(makeButton(t("Delete"), t("Delete this run from the disk"), () => this.#delete(null)), idle),
    );
    if (!idle) {
      watch(run.run, titleOf(run));
      const tell = noticeButton();
      bar.prepend(...WISHES.map(([what, name, help]) =>
        makeButton(name, help, () => this.#act("/atelier/runs/ask", { what }))), ...(tell ? [tell] : []));
    }
    /** @type {Element[]} */
    const before = [...this.#head.querySelectorAll("button")];
    const place = document.activeElement ? before.indexOf(document.activeElement) : -1;
    this.#head.replaceChildren(title, state, facts, bar);
    if (place >= 0) bar.querySelectorAll("button")[place]?.focus();
  }

  /** @param {Run} run */
  #drawRest(run) {
    this.#rest.replaceChildren();
    if (run.status === "unreadable") return;
    this.#rest.append(make("h3", "", t("Saves")), this.#saves(run), make("h3", "", t("Trained on")), this.#origin(run),
      fold(t("Settings"), this.#settings(run)),
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
      if (save.stays) notes.push(t("is kept"));
      if (save.problem) notes.push(save.problem);
      const forks = makeButton(t("Fork"), t("Start a new run from this save"), () => fork(run, save.step));
      const copies = makeButton(t("Use this LoRA"), t("Copy the LoRA of this save into models/loras"),
        async () => (await useLora(run, save.step)) && this.#read());
      const zips = makeButton(t("Zip"), t("Download this save's LoRA with settings and samples"),
        () => download(run, save.step));
      const shares = makeButton(t("Publish…"), t("Publish this LoRA at the Hugging Face Hub, with a card"),
        () => publish(run, save.step, shares));
      acts.append(forks, copies, zips, shares);
      forks.disabled = Boolean(save.problem) || !save.resumes;
      copies.disabled = zips.disabled = shares.disabled = !save.lora;
      const facts = [bytes(save.size), ...(save.written ? [day(save.written)] : []), ...notes], cell = make("div");
      cell.append(make("div", "", facts.join(" · ")), acts);
      return [step, cell];
    });
    box.append(table(rows), remove);
    publishedOf(run.run).then((told) => told && box.append(told));
    remove.style.marginTop = "6px";
    return box;
  }

  /** @param {Run} run */
  #origin(run) {
    const concepts = Object.entries(run.settings).filter(([name]) => /^dataset\.concepts\.\d+\.folder$/.test(name));
    const rows = [
      [t("base model"), run.base_model ?? "–"],
      [t("pictures"), String(run.pictures ?? "–")],
      ...(run.odd.length ? [[t("odd pictures"), oddPictures(run.odd)]] : []),
      ...concepts.map(([name, folder]) => {
        const repeats = run.settings[name.replace("folder", "repeats")];
        return [t("concept"), Number(repeats) > 1 ? t("{0}, {1} repeats", folder, repeats) : String(folder)];
      }),
      [t("rank"), String(run.rank ?? "–")],
      [t("begun"), day(run.created)],
      ...(run.seconds === null ? [] : [[t("duration"), clock(run.seconds)]]),
      ...(run.begun_with
        ? [[t("started from"), t("step {0} of the run {1}", run.begun_with.step, run.begun_with.run)]] : []),
    ];
    return table(rows);
  }

  // By their node, in its words; what has its default comes on request.
  /** @param {Run} run */
  #settings(run) {
    const box = make("div"), label = make("label"), all = make("input");
    Object.assign(all, { type: "checkbox", checked: this.#all });
    label.append(all, ` ${t("also those with their default")}`);
    const draw = () => {
      const groups = run.nodes.flatMap(({ node, title, number, settings }) => {
        /** @type {Map<string, [string, string]>} */
        const lines = new Map(); // by the input: its tooltip, its value
        for (const { name, input, words, changed } of settings) {
          if (!changed && !this.#all) continue;
          const { name: called, tooltip } = inputWords(node, input, words), before = lines.get(called);
          lines.set(called, [tooltip, `${before ? `${before[1]}\n` : ""}${shown(run.settings[name])}`]);
        }
        const rows = [...lines].map(([name, [tooltip, value]]) => {
          const term = make("span", "", name.replaceAll("_", "_\u200b")); // lines may break after it
          term.title = tooltip;
          return [term, make("span", "white-space:pre-wrap", value)];
        });
        return rows.length ? [make("h4", "", `${nodeTitle(node, title)} ${number}`), table(rows)] : [];
      });
      box.replaceChildren(label, ...(groups.length ? groups : [make("div", "", t("Every setting has its default."))]));
    };
    all.addEventListener("change", () => {
      this.#all = all.checked;
      draw();
      all.focus();
    });
    draw();
    return box;
  }

  /** @param {Run} run */
  #files(run) {
    const place = make("div", "", `output/atelier/runs/${run.run}`);
    place.className = "wrap dim";
    const box = make("div"), copies = run.published.map((name) => [t("copied to"), name]);
    box.append(place, table([...copies, ...run.files.map(({ name, size }) => [name, bytes(size)])]));
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

  /** @param {number[] | null} steps */
  async #delete(steps) {
    const asked = await this.#act("/atelier/runs/delete", { steps }), run = this.#run;
    if (asked.bytes === undefined || !run) return;
    const yes = await app.extensionManager.dialog.confirm({
      title: steps ? t("Delete saves?") : t("Delete this run?"), message: question(run, steps, asked), type: "delete",
    });
    if (!yes) return;
    const answer = await this.#act("/atelier/runs/delete", { steps, agreed: asked.bytes });
    if (answer.bytes !== undefined) toast({ error: t("The run changed meanwhile. Press Delete again.") });
    if (!answer.said) return;
    this.#chosen.clear();
    if (steps === null) this.#leave();
    else await this.#read();
  }
}

/** @param {ListedRun} run */
export const validationOf = ({ validation }) =>
  validation && t("validation {0} after step {1}", validation.loss?.toFixed(4) ?? t("not finite"), validation.step);

// Whether to delete a run, or some of its saves, and what becomes of the rest.
/**
 * @param {Run} run @param {number[] | null} steps
 * @param {{ bytes: number, kept: string[], newest: boolean, left: number | null }} asked
 */
function question(run, steps, { bytes: size, kept, newest, left }) {
  const parts = [];
  if (!steps)
    parts.push(t("Delete the run {0}, begun {1}? That frees {2}.", titleOf(run), day(run.created), bytes(size)));
  else if (steps.length === 1)
    parts.push(t("Delete the save of step {0} of {1}? That frees {2}.", steps[0], titleOf(run), bytes(size)));
  else parts.push(t("Delete {0} saves of {1}? That frees {2}.", steps.length, titleOf(run), bytes(size)));
  if (steps && newest)
    parts.push(left === null
      ? t("The run can then no longer be resumed.") : t("The run then resumes after step {0}.", left));
  if (kept.length) parts.push(t("Its copies in ComfyUI's models folder are kept: {0}.", kept.join(", ")));
  else if (!steps) parts.push(t("Its LoRA is in no other folder, and is lost."));
  return parts.join(" ");
}
