import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { ComparedPage, MOST_COMPARED } from "./compared.js";
import { watch } from "./notice.js";
import { addressOf, ask, make, makeButton } from "./parts.js";
import { RunPage, validationOf } from "./run.js";
import { titleOf } from "./saves.js";
import { onWish, takeWish } from "./tab.js";
import { bytes, clock, day, t, told } from "./words.js";

// The tab "LoRA runs": every run of this ComfyUI, one of them, or several over each other.

const INTERVAL = 5000; // milliseconds from one look at the runs to the next, while the tab is open
/** @param {number | null | undefined} value */
const last = (value) => (value === null || value === undefined ? Infinity : value);
/** @param {ListedRun} run @returns {keyof typeof STATUS} */
const stateOf = (run) => (run.failed ? "failed" : run.paused ? "paused" : run.status);
const STATUS = {
  failed: t("failed"), paused: t("paused"),
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

class RunsTab {
  #box = make("div");
  #rows = make("div");
  #total = make("div");
  #hint = make("div", "margin-bottom:6px"); // on what is chosen to be compared
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
    this.#hint.setAttribute("role", "status");
    this.#rows.setAttribute("role", "list");
    this.#rows.addEventListener("keydown", (event) => this.#walk(event));
    Object.assign(this.#search, { type: "search", placeholder: t("Search runs"), ariaLabel: t("Search runs") });
    this.#search.addEventListener("input", () => this.#draw());
    this.#order.setAttribute("aria-label", t("Order"));
    this.#order.append(...Object.entries(ORDERS).map(([name, [words]]) => new Option(words, name)));
    this.#order.addEventListener("change", () => this.#draw());
    host.append(this.#box);
    if (!this.#follow()) this.#showList();
    onWish(() => this.#follow());
  }

  // Show what somebody wishes to see, from elsewhere in the page.
  #follow() {
    const wish = takeWish();
    if (!wish) return false;
    if (!wish.compare) this.#showRun(wish.run);
    else {
      this.#chosen.add(wish.run);
      this.#showList();
    }
    return true;
  }

  dispose() {
    clearInterval(this.#timer);
    onWish(() => {});
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
    this.#box.replaceChildren(bar, this.#total, this.#hint, this.#rows);
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
      for (const run of this.#runs) if (run.status === "running") watch(run.run, titleOf(run));
      this.#draw();
    }
  }

  #draw() {
    const words = this.#search.value.toLowerCase().split(/\s+/);
    /** @param {ListedRun} run */
    const text = (run) =>
      [run.run, run.title, run.name, stateOf(run), STATUS[stateOf(run)], run.base_model].join(" ").toLowerCase();
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
    const [first] = this.#runs.filter((run) => this.#chosen.has(run.run));
    this.#hint.textContent = this.#chosen.size === 1 && first
      ? t("Choose another run to compare with {0}.", titleOf(first))
      : this.#chosen.size > MOST_COMPARED ? t("Choose at most {0} runs to compare.", MOST_COMPARED) : "";
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
    const state = make("div", "", [STATUS[stateOf(run)], ...at].join(" · "));
    state.className = `status ${stateOf(run)}`;
    const sound = run.status !== "unreadable";
    const model = [run.base_model, run.rank === null ? null : t("rank {0}", run.rank), bytes(run.size)];
    const took = run.seconds === null ? null : t("took {0}", clock(run.seconds));
    const times = [sound ? day(run.created) : day(run.changed), took];
    const losses = [told(run.loss_words), validationOf(run)];
    const facts = [losses, model, times].map((each) => each.filter(Boolean).join(" · "));
    if (!facts[0]) facts[0] = told(run.sentence);
    words.append(make("b", "", titleOf(run)), state, ...facts.filter(Boolean).map((text, i) => {
      const line = make("div", "", text);
      line.className = i ? "dim" : "";
      return line;
    }));
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
    const none = make("div", "", [...titleOf(run)][0]?.toUpperCase() ?? ""), image = make("img");
    none.className = "none";
    none.setAttribute("aria-hidden", "true");
    if (!run.thumbnail) return none;
    const src = api.apiURL(`${addressOf(run.run)}/thumbnail?of=${run.thumbnail}`); // another one has another address
    Object.assign(image, { alt: "", loading: "lazy", src });
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

  #showCompared() {
    const names = this.#runs.map((run) => run.run).filter((run) => this.#chosen.has(run)), host = make("div");
    const page = new ComparedPage(host, names);
    this.#cover(page, host);
  }
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
