import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { RunGraph } from "./graph.js";
import { addressOf, ask, make, makeButton } from "./parts.js";
import { RunPage, bytes, day, readRun, setting, shown, table, titleOf } from "./run.js";
import { t, told } from "./words.js";

// The tab "LoRA runs": every run of this ComfyUI, one of them, or several over each other.

const INTERVAL = 5000; // milliseconds from one look at the runs to the next, while the tab is open
const MOST_COMPARED = 8;
const COLOURS = ["rgb(255,176,66)", "rgb(96,180,255)", "rgb(126,211,120)", "rgb(240,120,150)",
  "rgb(190,150,255)", "rgb(90,210,200)", "rgb(220,220,110)", "rgb(235,130,90)"];
/** @param {number | null | undefined} value */
const last = (value) => (value === null || value === undefined ? Infinity : value);
/** @type {Record<ListedRun["status"], string>} */
const STATUS = {
  running: t("running"), finished: t("finished"), stopped: t("stopped"), empty: t("empty"), unreadable: t("unreadable"),
};
/** @type {Record<string, [string, (one: ListedRun, other: ListedRun) => number]>} */
const ORDERS = {
  changed: [t("newest"), (one, other) => other.changed - one.changed],
  title: [t("name"), (one, other) => titleOf(one).localeCompare(titleOf(other))],
  status: [t("status"), (one, other) => one.status.localeCompare(other.status)],
  loss: [t("lowest loss"), (one, other) => last(one.loss) - last(other.loss)],
  validation: [t("lowest validation"), (one, other) => last(one.validation?.loss) - last(other.validation?.loss)],
  steps: [t("most steps"), (one, other) => (other.step ?? 0) - (one.step ?? 0)],
  size: [t("largest"), (one, other) => other.size - one.size],
};

/** @param {ListedRun} run */
function losses(run) {
  const parts = [];
  if (run.loss !== null) parts.push(t("loss {0}", run.loss.toPrecision(3)));
  if (run.validation) parts.push(t("validation {0}", run.validation.loss?.toPrecision(3) ?? t("not finite")));
  return parts.join(" · ");
}

class RunsTab {
  #box = make("div");
  #rows = make("div");
  #total = make("div");
  #search = make("input");
  #order = make("select");
  #compare = makeButton(t("Compare"), t("Show the chosen runs over each other, and what differs in their settings"),
    () => this.#showCompared());
  /** @type {ListedRun[]} */
  #runs = [];
  #more = 0; // runs that the server leaves out
  /** @type {Map<string, [string, HTMLElement]>} */
  #drawn = new Map(); // by run: [what its row shows, the row]
  /** @type {Set<string>} */
  #chosen = new Set();
  /** @type {{ dispose(): void, refresh?(): void } | null} */
  #page = null; // what covers the list: a run, or several
  #timer = setInterval(() => this.#look(), INTERVAL);

  /** @param {HTMLElement} host */
  constructor(host) {
    this.#box.className = "atelier-runs";
    this.#total.className = "dim";
    this.#rows.setAttribute("role", "list");
    this.#rows.addEventListener("keydown", (event) => this.#walk(event));
    Object.assign(this.#search, { type: "search", placeholder: t("Search runs"), ariaLabel: t("Search runs") });
    this.#search.addEventListener("input", () => this.#draw());
    this.#order.setAttribute("aria-label", t("Order"));
    this.#order.append(...Object.entries(ORDERS).map(([name, [words]]) => new Option(words, name)));
    this.#order.addEventListener("change", () => this.#draw());
    host.append(this.#box);
    this.#showList();
  }

  dispose() {
    clearInterval(this.#timer);
    this.#page?.dispose();
    this.#box.remove();
  }

  #look() {
    if (document.hidden || !this.#box.isConnected) return;
    if (this.#page) this.#page.refresh?.();
    else this.#refresh();
  }

  // --- the list ------------------------------------------------------------------------------------------

  /** @param {string} [run] */
  #showList(run) {
    this.#page?.dispose();
    this.#page = null;
    const bar = make("div"), head = make("div");
    bar.className = head.className = "bar";
    const again = makeButton("⟳", t("Read the runs again"), () => this.#refresh());
    again.setAttribute("aria-label", t("Read the runs again"));
    bar.append(this.#search, this.#order, again, this.#compare);
    this.#box.replaceChildren(bar, this.#total, this.#rows);
    this.#refresh().then(() => {
      if (!run || this.#box.contains(document.activeElement)) return; // a person types in the search already
      this.#drawn.get(run)?.[1].querySelector("button")?.focus();
    });
  }

  async #refresh() {
    const answer = await ask("/atelier/runs");
    if (answer.error) this.#total.textContent = told(answer.error);
    else {
      this.#runs = answer.runs;
      this.#more = answer.more;
      this.#draw();
    }
  }

  #draw() {
    const words = this.#search.value.toLowerCase().split(/\s+/);
    /** @param {ListedRun} run */
    const text = (run) => [run.run, run.title, run.name, run.status, run.base_model].join(" ").toLowerCase();
    const found = this.#runs.filter((run) => words.every((word) => text(run).includes(word)));
    const rows = found.sort(ORDERS[this.#order.value][1]).map((run) => this.#row(run));
    // To move an element takes the focus from it, so nothing moves that is in its place already.
    if (rows.length !== this.#rows.children.length || rows.some((row, i) => row !== this.#rows.children[i]))
      this.#rows.replaceChildren(...rows);
    const known = new Set(this.#runs.map((run) => run.run));
    for (const run of this.#drawn.keys()) if (!known.has(run)) this.#drawn.delete(run);
    for (const run of this.#chosen) if (!known.has(run)) this.#chosen.delete(run);
    this.#count(found);
  }

  /** @param {ListedRun[]} found */
  #count(found) {
    const size = bytes(found.reduce((sum, run) => sum + run.size, 0)), all = this.#runs.length;
    const more = this.#more ? t("; {0} more are not shown", this.#more) : "";
    this.#total.textContent = all
      ? (all === 1 ? t("1 run, {0}", size) : t("{0} of {1} runs, {2}", found.length, all, size)) + more
      : t("There is no run yet. Press Run in a workflow with Train LoRA; its run appears here.");
    this.#total.style.marginBottom = "6px";
    this.#compare.disabled = this.#chosen.size < 2 || this.#chosen.size > MOST_COMPARED;
    this.#compare.textContent = this.#chosen.size > 1 ? t("Compare {0}", this.#chosen.size) : t("Compare");
  }

  /** @param {ListedRun} run */
  #row(run) {
    const shows = JSON.stringify(run), [before, old] = this.#drawn.get(run.run) ?? [];
    if (old && before === shows) return old;
    const row = make("div"), choose = make("input"), words = make("div"), open = document.createElement("button");
    row.className = "run";
    row.setAttribute("role", "listitem");
    Object.assign(choose, { type: "checkbox", checked: this.#chosen.has(run.run), title: t("Choose to compare") });
    choose.disabled = run.status === "unreadable";
    choose.setAttribute("aria-label", t("Choose {0} to compare", titleOf(run)));
    choose.addEventListener("change", () => {
      this.#chosen[choose.checked ? "add" : "delete"](run.run);
      this.#draw();
    });
    words.className = "words";
    const at = run.steps === null ? [] : [t("step {0} of {1}", run.step, run.steps)];
    const state = make("div", "", [STATUS[run.status], ...at].join(" · "));
    const rest = make("div", "", `${bytes(run.size)} · ${day(run.changed, {})}`);
    state.className = `status ${run.status}`;
    rest.className = "dim";
    words.append(make("b", "", titleOf(run)), state, make("div", "", losses(run) || told(run.sentence)), rest);
    Object.assign(open, { type: "button", title: `${run.run}\n${told(run.sentence)}` });
    open.append(this.#picture(run), words);
    open.addEventListener("click", () => this.#showRun(run.run));
    row.append(choose, open);
    if (old?.contains(document.activeElement)) requestAnimationFrame(() => open.focus());
    this.#drawn.set(run.run, [shows, row]);
    return row;
  }

  /** @param {ListedRun} run */
  #picture(run) {
    const none = make("div");
    none.className = "none";
    if (!run.thumbnail) return none;
    const image = make("img");
    Object.assign(image, { alt: "", loading: "lazy", src: api.apiURL(`${addressOf(run.run)}/thumbnail`) });
    image.addEventListener("error", () => image.replaceWith(none));
    return image;
  }

  /** @param {KeyboardEvent} event */
  #walk(event) {
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const from = /** @type {HTMLButtonElement} */ (event.target);
    if (!turn || from.matches("[type=checkbox]")) return;
    /** @type {NodeListOf<HTMLButtonElement>} */
    const found = this.#rows.querySelectorAll(".run > button"), buttons = [...found];
    buttons[buttons.indexOf(from) + turn]?.focus();
    event.preventDefault();
  }

  // --- what covers it ------------------------------------------------------------------------------------

  /** @param {{ dispose(): void, refresh?(): void }} page @param {HTMLElement} element @param {string} [run] */
  #cover(page, element, run) {
    this.#page = page;
    const back = makeButton(`‹ ${t("All runs")}`, t("Show the list again (Escape)"), () => this.#showList(run));
    const bar = make("div"), whole = make("div");
    bar.className = "bar";
    bar.append(back);
    whole.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      event.stopPropagation();
      this.#showList(run);
    });
    whole.append(bar, element);
    this.#box.replaceChildren(whole);
    this.#box.scrollTop = 0;
    back.focus();
  }

  /** @param {string} name */
  #showRun(name) {
    const host = make("div");
    this.#cover(new RunPage(host, name, () => this.#showList()), host, name);
  }

  async #showCompared() {
    const names = this.#runs.map((run) => run.run).filter((run) => this.#chosen.has(run));
    const answers = await Promise.all(names.map(readRun));
    const runs = answers.filter((run) => run.error === undefined);
    if (this.#page) return; // another one was opened meanwhile
    const host = make("div"), place = make("div"), graph = new RunGraph(place);
    this.#cover({ dispose: () => graph.dispose() }, host);
    graph.setRuns(runs.map((run, i) => ({
      name: titleOf(run), colour: COLOURS[i % COLOURS.length], points: run.curves ?? {}, saves: [],
    })));
    host.append(place, make("h3", "", t("What differs")), differences(runs));
  }
}

// A table of the settings that are not the same in all runs.
/** @param {Run[]} runs */
function differences(runs) {
  /** @type {Record<string, unknown>[]} */
  const facts = runs.map((run) => ({ steps: run.steps, pictures: run.pictures, ...run.settings }));
  const names = [...new Set(facts.flatMap(Object.keys))];
  const differ = names.filter((name) => new Set(facts.map((fact) => JSON.stringify(fact[name] ?? null))).size > 1);
  if (!differ.length) return make("div", "", t("Nothing: these runs have the same settings."));
  const heads = runs.map((run, i) => {
    const head = make("span", "", ""), swatch = make("span", `background:${COLOURS[i % COLOURS.length]}`);
    swatch.className = "swatch";
    head.append(swatch, titleOf(run));
    return head;
  });
  return table([["", ...heads], ...differ.map((name) => [setting(name), ...facts.map((fact) => shown(fact[name]))])]);
}

app.registerExtension({
  name: "atelier.runs",
  setup() {
    const style = document.createElement("link");
    Object.assign(style, { rel: "stylesheet", href: new URL("./runs.css", import.meta.url).href });
    document.head.append(style);
    /** @type {RunsTab | null} */
    let tab = null;
    app.extensionManager.registerSidebarTab({
      id: "atelier-runs",
      icon: "pi pi-chart-line",
      title: t("LoRA runs"),
      tooltip: t("LoRA runs: what was trained, its graph, samples and saves"),
      type: "custom",
      render(host) {
        if (host.querySelector(".atelier-runs")) return; // the editor renders a tab again when it likes
        tab?.dispose();
        tab = new RunsTab(host);
      },
      destroy() {
        tab?.dispose();
        tab = null;
      },
    });
  },
});
