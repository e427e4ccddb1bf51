import { imageOf, lengthOf, openLarge, wordsOf } from "./large.js";
import { FONT, make, makeButton } from "./parts.js";
import { t } from "./words.js";

// The pictures that a run drew, step by prompt: a strip on the node, and a large view; arrow keys lead through both.

/** @typedef {{ name: string, step: number, prompt: number, weights: string }} Sample prompt: counted from 0 */

const NAME = /^step-(\d+)-(\d+)(-[a-z]+)?(?:\.png|-\d+f\.webp)$/; // as the run writes them: step, prompt, weights
const THUMB = 72, LARGE = 192, HIGH = 420; // pixels: a picture at least, at most; the strip at most
const MOST_STEPS = 60; // the newest
/** @type {Record<string, [number, number]>} */
const TURNS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** @param {string[]} files @returns {Sample[]} */
export function samplesOf(files) {
  const found = files.map((name) => NAME.exec(name)).filter((parts) => parts !== null);
  return found.map(([name, step, prompt, weights = ""]) =>
    ({ name, step: Number(step), prompt: Number(prompt) - 1, weights: weights.slice(1) }));
}

// Rows of prompts and columns of steps; a place without a picture is null.
/** @param {string[]} files @returns {(Sample | null)[][]} */
function table(files) {
  const found = samplesOf(files);
  const steps = [...new Set(found.map(({ step }) => step))].sort((a, b) => a - b).slice(-MOST_STEPS);
  /** @type {Map<string, (Sample | null)[]>} */
  const rows = new Map();
  for (const sample of found) {
    const column = steps.indexOf(sample.step), key = `${sample.weights}\n${String(sample.prompt).padStart(4, "0")}`;
    if (column < 0) continue;
    const row = rows.get(key) ?? steps.map(() => null);
    rows.set(key, row);
    row[column] = sample;
  }
  return [...rows].sort(([one], [other]) => (one < other ? -1 : 1)).map(([, row]) => row);
}

export class SampleStrip {
  #host;
  #run = "";
  /** @type {string[]} */
  #prompts = [];
  /** @type {(Sample | null)[][]} */
  #rows = [];
  #shown = ""; // names of the pictures in the strip
  /** @type {HTMLDialogElement | null} */
  #view = null; // the large view, while it is open

  /** @param {HTMLElement} host */
  constructor(host) {
    this.#host = host;
    host.className = "atelier-samples";
    host.style.cssText = `display:none;overflow:hidden auto;max-height:${HIGH}px;width:100%`;
    host.addEventListener("pointerdown", (event) => event.stopPropagation());
    host.addEventListener("keydown", (event) => {
      const { dataset } = /** @type {HTMLElement} */ (event.target);
      this.#turn(event, dataset, (...at) => this.#focus(...at));
    });
  }

  /** @param {string} run @param {string[]} files @param {string[]} prompts */
  set(run, files, prompts) {
    const shown = JSON.stringify([run, files]);
    if (shown === this.#shown) return;
    [this.#shown, this.#run, this.#prompts, this.#rows] = [shown, run, prompts, table(files)];
    this.#host.style.display = this.#rows.length ? "block" : "none";
    this.#host.replaceChildren(...this.#rows.map((row, i) => {
      const prompt = make("figure", "margin:0 0 4px"), line = make("div", "display:flex;gap:2px;overflow:auto hidden");
      line.append(...row.map((sample, j) => this.#thumb(sample, i, j)));
      const words = make("figcaption", `${FONT};overflow-wrap:anywhere`, this.#title(row));
      prompt.append(line, words);
      return prompt;
    }));
    for (const { firstElementChild: line } of this.#host.children) if (line) line.scrollLeft = line.scrollWidth; // newest
  }

  /** @param {number} row @param {number} column */
  #focus(row, column) {
    /** @type {HTMLElement | null} */
    const place = this.#host.querySelector(`[data-row="${row}"][data-column="${column}"]`);
    place?.focus();
  }

  close() {
    this.#view?.close();
  }

  // What stands beneath a row: its prompt, and the weights that drew it.
  /** @param {(Sample | null)[]} row */
  #title(row) {
    const sample = row.find((each) => each !== null);
    return sample ? this.#prompt(sample) + (sample.weights && ` (${sample.weights})`) : "";
  }

  /** @param {Sample} sample */
  #prompt({ prompt }) {
    return this.#prompts[prompt] ?? t("prompt {0}", prompt + 1);
  }

  /** @param {Sample} sample */
  #words(sample) {
    const of = sample.weights ? ` (${sample.weights})` : "";
    return wordsOf([t("step {0}", sample.step) + of, this.#prompt(sample)], sample.name);
  }

  /** @param {Sample | null} sample @param {number} row @param {number} column */
  #thumb(sample, row, column) {
    const style = `flex:1 0 ${THUMB}px;max-width:${LARGE}px;aspect-ratio:1;padding:0;border:0;background:none;position:relative`;
    if (!sample) return make("div", style);
    const button = makeButton("", this.#words(sample), () => this.#open(row, column));
    button.style.cssText = `${style};cursor:zoom-in`;
    Object.assign(button.dataset, { row, column });
    const fitted = "width:100%;height:100%;object-fit:contain;border-radius:3px";
    const ink = `position:absolute;left:2px;${FONT};color:#fff;text-shadow:0 0 2px #000,0 0 3px #000;`;
    button.append(imageOf(this.#run, sample.name, this.#words(sample), fitted, "webp;70"),
      make("span", `${ink}bottom:1px`, String(sample.step)));
    const length = lengthOf(sample.name);
    if (length) button.append(make("span", `${ink}top:1px`, length));
    return button;
  }

  // The next place with a picture in the direction of an arrow key.
  /**
   * @param {KeyboardEvent} event
   * @param {{row?: number | string, column?: number | string}} at
   * @param {(row: number, column: number) => void} act
   */
  #turn(event, { row, column }, act) {
    const turn = TURNS[event.key];
    if (!turn || row === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // else the editor moves nodes
    let [i, j] = [Number(row) + turn[0], Number(column) + turn[1]];
    while (this.#rows[i] && j in this.#rows[i] && !this.#rows[i][j]) [i, j] = [i + turn[0], j + turn[1]];
    if (this.#rows[i]?.[j]) act(i, j);
  }

  /** @param {number} row @param {number} column */
  #open(row, column) {
    let at = { row, column };
    /** @param {Sample | null} sample @returns {import("./large.js").Picture[]} */
    const shown = (sample) =>
      sample ? [{ run: this.#run, file: sample.name, step: sample.step, words: this.#words(sample) }] : [];
    this.close();
    this.#view = openLarge(shown(this.#rows[row][column]), {
      turn: (event) => {
        /** @type {import("./large.js").Picture[] | null} */
        let next = null;
        this.#turn(event, at, (i, j) => {
          at = { row: i, column: j };
          next = shown(this.#rows[i][j]);
        });
        return next;
      },
      closed: () => {
        this.#view = null;
        this.#focus(at.row, at.column);
      },
    });
  }
}
