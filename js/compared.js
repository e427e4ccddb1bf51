import { RunGraph } from "./graph.js";
import { imageOf, openLarge, swatch, wordsOf } from "./large.js";
import { make, makeButton } from "./parts.js";
import { shown } from "./run.js";
import { samplesOf } from "./samples.js";
import { readRun, titleOf } from "./saves.js";
import { inputWords, nodeTitle, t, told } from "./words.js";

// Several runs: their graphs over each other, their samples side by side, and what differs in their settings.

/** @typedef {{ run: Run, colour: string }} Coloured */
/** @typedef {import("./samples.js").Sample} Sample */
/** @typedef {{ words: string, cells: (Sample | null)[] }} SampleRow a cell for each run */

const COLOURS = ["rgb(255,176,66)", "rgb(96,180,255)", "rgb(126,211,120)", "rgb(240,120,150)",
  "rgb(190,150,255)", "rgb(90,210,200)", "rgb(220,220,110)", "rgb(235,130,90)"];
export const MOST_COMPARED = COLOURS.length;
const MOST_ROWS = 40; // of one prompt, the newest steps
const TURNS = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 };

export class ComparedPage {
  /** @type {RunGraph | null} */
  #graph = null;
  /** @type {HTMLDialogElement | null} */
  #view = null;

  /** @param {HTMLElement} host @param {string[]} names of the runs */
  constructor(host, names) {
    this.#read(host, names);
  }

  dispose() {
    this.#graph?.dispose();
    this.#view?.close();
  }

  /** @param {HTMLElement} host @param {string[]} names */
  async #read(host, names) {
    const wait = make("div", "", t("Reading the runs …"));
    host.append(wait);
    const answers = await Promise.all(names.map(readRun));
    if (!host.isConnected) return;
    wait.remove();
    const runs = answers.filter((run) => run.error === undefined);
    const refused = answers.filter((run) => run.error !== undefined);
    const coloured = runs.map((run, i) => ({ run, colour: COLOURS[i % COLOURS.length] }));
    const place = make("div");
    this.#graph = new RunGraph(place);
    this.#graph.setRuns(coloured.map(({ run, colour }) => ({
      name: titleOf(run), colour, points: run.curves ?? {}, saves: [],
    })));
    host.append(...refused.map(({ error }) => make("div", "", told(error))), place, ...this.#samples(coloured),
      make("h3", "", t("What differs")), ...differences(coloured));
  }

  /** @param {Coloured[]} runs @returns {HTMLElement[]} */
  #samples(runs) {
    const rows = sampleRows(runs.map(({ run }) => run));
    const title = make("h3", "", t("Samples side by side"));
    if (!rows.length) return [title, make("div", "", t("None of these runs has samples."))];
    return [title, ...rows.map(({ words, cells }, i) => {
      const row = make("div"), line = make("div");
      row.className = "samples";
      line.className = "side";
      line.append(...cells.map((sample, j) => this.#cell(runs, rows, i, j, sample)));
      row.append(make("div", "", words), line);
      return row;
    })];
  }

  /**
   * @param {Coloured[]} runs @param {SampleRow[]} rows @param {number} i @param {number} j
   * @param {Sample | null} sample
   */
  #cell(runs, rows, i, j, sample) {
    const { run, colour } = runs[j], name = make("div");
    name.className = "name";
    name.append(swatch(colour), titleOf(run));
    if (!sample) {
      const none = make("div"), box = make("div", "", t("no sample"));
      none.className = "cell";
      box.className = "none";
      none.append(box, name);
      return none;
    }
    const told = wordsOf([t("step {0}", sample.step)], sample.name), words = `${titleOf(run)} · ${told}`;
    const made = makeButton("", words, () => this.#open(runs, rows, i, made));
    made.className = "cell";
    made.style.cssText = "";
    name.append(` · ${told}`);
    made.append(imageOf(run.run, sample.name, words, "", "webp;70"), name);
    return made;
  }

  /** @param {Coloured[]} runs @param {SampleRow[]} rows @param {number} at @param {HTMLElement} from */
  #open(runs, rows, at, from) {
    /** @param {number} row */
    const pictures = (row) => rows[row].cells.flatMap((sample, j) => {
      const { run, colour } = runs[j];
      if (!sample) return [];
      const prompt = run.prompts[sample.prompt] ?? t("prompt {0}", sample.prompt + 1);
      return [{ run: run.run, file: sample.name, step: sample.step, colour,
        words: wordsOf([titleOf(run), t("step {0}", sample.step), prompt], sample.name) }];
    });
    this.#view = openLarge(pictures(at), {
      turn: (event) => {
        const next = at + (TURNS[/** @type {keyof typeof TURNS} */ (event.key)] ?? 0);
        if (next === at || !rows[next]) return null;
        event.preventDefault();
        at = next;
        return pictures(at);
      },
      closed: () => {
        this.#view = null;
        from.focus();
      },
    });
  }
}

// The rows of samples of several runs: of each prompt the last one of each run, then those of the same step. Prompts of
// the same words belong together, and those that no other run has by their order.
/** @param {Run[]} runs @returns {SampleRow[]} */
export function sampleRows(runs) {
  /** @type {Map<string, number>} */
  const owners = new Map(); // how many runs have a prompt of these words
  for (const run of runs) for (const text of new Set(run.prompts)) owners.set(text, (owners.get(text) ?? 0) + 1);
  /** @type {Map<string, { words: Set<string>, of: Sample[][] }>} */
  const groups = new Map();
  for (const [i, run] of runs.entries()) {
    const alone = run.prompts.filter((text) => owners.get(text) === 1);
    for (const sample of samplesOf(run.samples)) {
      const text = run.prompts[sample.prompt] ?? t("prompt {0}", sample.prompt + 1), own = alone.indexOf(text);
      const key = JSON.stringify([sample.weights, own < 0 ? text : own]);
      const group = groups.get(key) ?? { words: new Set(), of: runs.map(() => []) };
      groups.set(key, group);
      group.words.add(sample.weights ? `${text} (${sample.weights})` : text);
      group.of[i].push(sample);
    }
  }
  return [...groups.values()].flatMap(({ words: texts, of }) => {
    const words = [...texts].join(" / ");
    const ends = of.map((samples) => samples.reduce((/** @type {Sample | null} */ last, each) =>
      (last && last.step > each.step ? last : each), null));
    const steps = [...new Set(of.flat().map(({ step }) => step))].sort((one, other) => one - other);
    const rows = steps.map((step) => of.map((samples) => samples.find((each) => each.step === step) ?? null));
    const shared = rows.filter((cells) =>
      cells.filter(Boolean).length > 1 && cells.some((each, i) => each !== ends[i]));
    return [
      { words: `${t("last samples")} · ${words}`, cells: ends },
      ...shared.slice(-MOST_ROWS).map((cells) =>
        ({ words: `${t("step {0}", cells.find(Boolean)?.step)} · ${words}`, cells })),
    ];
  });
}

// The settings that are not the same in all runs, by their node: each value with the runs that have it.
/** @param {Coloured[]} runs @returns {HTMLElement[]} */
export function differences(runs) {
  /** @type {Map<string, { title: string, settings: Map<string, { words: string, values: string[] }> }>} */
  const groups = new Map();
  /**
   * @param {string} key @param {string} title @param {string} name @param {string} words
   * @param {number} i @param {unknown} value
   */
  const put = (key, title, name, words, i, value) => {
    const group = groups.get(key) ?? { title, settings: new Map() };
    groups.set(key, group);
    const setting = group.settings.get(name) ?? { words, values: runs.map(() => "") };
    group.settings.set(name, setting);
    setting.values[i] = [setting.values[i], shown(value)].filter(Boolean).join(", ");
  };
  // Of runs that all went to their end, Train LoRA's own setting says the same.
  const cut = runs.some(({ run }) => run.steps !== run.settings["train.steps"]);
  for (const [i, { run }] of runs.entries()) {
    if (cut) put("", t("Run"), t("steps"), "", i, run.steps);
    put("", t("Run"), t("pictures"), "", i, run.pictures);
    for (const { node, title, number, settings } of run.nodes)
      for (const { name, input, words } of settings) {
        const { name: called, tooltip } = inputWords(node, input, words);
        put(`${title} ${number}`, `${nodeTitle(node, title)} ${number}`, called, tooltip, i, run.settings[name]);
      }
  }
  const made = [...groups.values()].flatMap(({ title, settings }) => {
    const differ = [...settings].filter(([, { values }]) => new Set(values).size > 1);
    if (!differ.length) return [];
    const list = make("dl");
    for (const [name, { words, values }] of differ) {
      const term = make("dt", "", name);
      term.title = words;
      list.append(term, ...[...new Set(values)].map((value) => {
        const line = make("dd");
        for (const [i, { run, colour }] of runs.entries())
          if (values[i] === value) {
            const of = make("span", "margin-right:6px");
            of.append(swatch(colour), titleOf(run));
            line.append(of);
          }
        line.append(make("b", "", value || "–"));
        return line;
      }));
    }
    return [make("h4", "", title), list];
  });
  return made.length ? made : [make("div", "", t("Nothing: these runs have the same settings."))];
}
