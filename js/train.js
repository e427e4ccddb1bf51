import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { compareSaves, drawWithIt } from "./after.js";
import { RunGraph } from "./graph.js";
import { LARGE, failedEarly, failureOf, failureOfRun, isForm, linked, onFailures } from "./failures.js";
import { Filling } from "./filling.js";
import { FONT, ON_NODE, RED, WISHES, addressOf, ask, make, makeButton, makeMenu, nodes, onceRead, putFirst, takePlace, toast,
  widen } from "./parts.js";
import { oddPictures } from "./odd.js";
import { SampleStrip } from "./samples.js";
import { download } from "./saves.js";
import { openRuns } from "./tab.js";
import { t, told } from "./words.js";

// The run on Train LoRA: status, buttons, loss graph, samples, notes. What is shown comes from the run's folder, so
// that it outlives the page and the server; events tell what is new, and name the workflow and the node they are for.
// Of a run that another process trains no event tells: while the page is seen, it looks at that run's folder.

/** @typedef {import("./parts.js").Found} Found */

const MARGIN = 10; // pixels; a canvas node takes the margin off the height on every side
const FULL = 0.95; // share of the memory in use from which it is nearly full
const FRESH = 2000; // steps that events may add before the server is asked for a thinned curve again
const OFTEN = 1000, SELDOM = 60_000; // milliseconds between two looks into a run's folder: at most, and while it trains
const INTERVAL = 500; // milliseconds between two looks at which renderer is on
const FOLLOWED = 2000; // milliseconds between two looks at a run that another process trains, or that waits
const SOON = 100; // milliseconds until a change of ComfyUI's queue is looked at
const PARTS_SEEN = [0, 0.25, 0.5, 0.75, 1]; // of an element that stays in view: each change of these is looked at
const SOUGHT = 5000, PATIENCE = 600_000; // the same at whether a copied command runs yet, and how long it is looked for

const TABLE = "width:100%;border-collapse:collapse;margin:2px 0", CELL = "text-align:left;padding:1px 6px 1px 0;" +
  "vertical-align:top;border-bottom:1px solid var(--border-color);overflow-wrap:anywhere";

/** @type {WeakMap<GraphNode, View>} */
const views = new WeakMap(); // Train LoRA, or a node that stands for a subgraph with one -> its view
const root = () => app.graph; // none yet while the editor loads

// Bring an element into view, again and again, until a person acts.
/** @param {Element} element */
function keepInView(element) {
  element.scrollIntoView();
  const look = new IntersectionObserver(([seen]) => {
    if (seen.intersectionRatio < 1) element.scrollIntoView();
  }, { threshold: PARTS_SEEN });
  look.observe(element);
  for (const act of ["pointerdown", "wheel", "keydown"])
    addEventListener(act, () => look.disconnect(), { once: true, capture: true });
}

class View {
  #node;
  /** @type {RunState} */
  #state = {}; // of the run at work, as its events tell
  /** @type {Partial<Run> | null} */
  #detail = null; // of the run's folder, as the server describes it
  /** @type {Curves | null} */
  #curves = null; // of the folder, and what events added
  /** @type {StepPoint[]} */
  #fresh = []; // the steps that events added since the server was last asked
  #asked = -Infinity; // when
  #asking = false;
  #later = 0; // the timer of the next question
  #next = 0; // the timer of the next look at a run that another process trains
  #sought = -Infinity; // when the run's command was copied
  #height = 0;
  #tall = 0; // of the node, without what it shows of the run
  #grown = 0; // of the node, with it
  #failure = ""; // what went wrong
  #early = false; // before the node's run began
  #notes = ""; // as they are shown
  #odd = ""; // pictures, as they are shown
  #parts = {
    status: make("div", `font:${LARGE};overflow-wrap:anywhere`),
    details: make("div", `${FONT};opacity:0.75;overflow-wrap:anywhere`),
    done: make("div", "height:100%;width:0;border-radius:2px;background:var(--p-primary-color, #5b9bd5)"),
    bar: make("div", "height:4px;border-radius:2px;background:var(--border-color);display:none"),
    memory: make("div", `display:none;align-items:center;gap:8px;${FONT}`),
    used: make("div", "height:100%;border-radius:2px"),
    room: make("span", "opacity:0.75"),
    buttons: make("div", "display:flex;flex-wrap:wrap;gap:4px;width:100%"),
    command: make("div", `${FONT};display:none;overflow-wrap:anywhere`),
    graph: make("div", "display:none"),
    samples: make("div"),
    odd: make("div", FONT),
    notes: make("details", `${FONT};display:none`),
    text: make("div", "overflow:hidden auto;max-height:240px;user-select:text;cursor:text;padding:4px;border-radius:4px;" +
      "background:var(--comfy-input-bg);overflow-wrap:anywhere"),
  };
  #outer = make("div", `width:100%;overflow:hidden;box-sizing:border-box;${ON_NODE}`);
  #inner = make("div", "display:flex;flex-direction:column;gap:6px;width:100%;box-sizing:border-box;" +
    "color:var(--input-text)");
  /** @type {HTMLElement | null} */
  #home = null; // where the classic renderer has it
  /** @type {HTMLButtonElement[]} */
  #buttons = []; // of a run at work
  /** @type {HTMLButtonElement[]} */
  #after = []; // of one that ended
  #go = makeButton(t("Continue"), t("Queue this workflow again; the run goes on from its last save."), () =>
    app.queuePrompt(0, 1));
  #menu = makeMenu(() => this.#more());
  /** @type {RunGraph | null} */
  #graph = null;
  #samples = new SampleStrip(this.#parts.samples);
  #filling;

  /** @param {GraphNode} node */
  constructor(node) {
    this.#node = node;
    this.#filling = new Filling(node);
    const outer = this.#outer, inner = this.#inner;
    const { status, details, done, bar, memory, used, room, buttons, command, graph, samples, odd, notes } = this.#parts;
    outer.className = "atelier-train";
    status.className = "atelier-status";
    status.setAttribute("role", "status");
    notes.className = "atelier-notes";
    command.className = "atelier-command";
    command.setAttribute("role", "status");
    bar.append(done);
    memory.className = "atelier-memory";
    const whole = make("div", "flex:0 1 96px;height:8px;border-radius:2px;overflow:hidden;background:var(--border-color)");
    whole.append(used);
    memory.append(whole, room);
    for (const [what, name, help] of WISHES) {
      const button = makeButton(name, help, () => this.#ask(what));
      button.dataset.ask = what;
      this.#buttons.push(button);
    }
    for (const [name, help, act] of this.#atEnd()) this.#after.push(makeButton(name, help, act));
    const own = node.subgraph ? [] : [this.#filling.preset, this.#filling.guess]; // its inputs are those of several nodes
    const shown = [...this.#buttons, this.#go, ...this.#after, ...own];
    for (const button of shown) button.style.cssText += ";flex:1 1 auto;padding:3px 2px";
    buttons.append(...shown, this.#menu);
    this.#fillNotes();
    inner.append(status, details, bar, memory, buttons, command, this.#filling.box, graph, samples, odd, notes);
    outer.append(inner);
    if (node.subgraph) this.#addWidget(outer, inner); // its values are those of the nodes inside
    else onceRead(() => this.#addWidget(outer, inner));
    this.#draw();
  }

  // The node's state from an event or the server; without one the node shows no run.
  /** @param {RunState} [state] */
  update(state = {}) {
    const { points = [], note, changed, ...rest } = state;
    const other = rest.run !== this.#state.run, lost = this.#state.alive && !rest.alive; // ComfyUI was killed, maybe
    const before = rest.prompt_id === this.#state.prompt_id ? this.#state.notes ?? [] : []; // a run gets its name late
    const notes = rest.notes ?? [...before, ...(note === undefined ? [] : [note])];
    this.#state = { ...rest, notes };
    if (other) [this.#detail, this.#curves, this.#fresh] = [null, null, []];
    if (other) clearTimeout(this.#later); // a look at the run before, and the new one has no folder yet
    for (const point of points) this.#add(point);
    if (rest.run && (changed || other || lost || !this.#detail)) this.#look(OFTEN);
    else if (rest.run && (this.#fresh.length > FRESH || performance.now() - this.#asked > SELDOM)) this.#look(OFTEN);
    clearTimeout(this.#next);
    if (rest.alive && rest.followed) this.#next = setTimeout(() => this.#follow(), FOLLOWED);
    if (rest.alive) this.#say();
    this.#draw();
  }

  // Show what went wrong at the node, or within the subgraph that it stands for; "" takes it away.
  /** @param {string} failure @param {boolean} early before the node's run began */
  fail(failure, early) {
    if (failure === this.#failure && early === this.#early) return;
    [this.#failure, this.#early] = [failure, early];
    this.#draw();
    // In a form it is the last of all, and the editor takes room there to say that something failed.
    if (failure && isForm()) keepInView(this.#parts.status);
  }

  get waits() {
    return Boolean(this.#state.waiting);
  }

  get works() {
    return Boolean(this.#state.alive);
  }

  // Whether the run whose command was copied may begin soon.
  get seeks() {
    return performance.now() - this.#sought < PATIENCE;
  }

  remove() {
    clearTimeout(this.#later);
    clearTimeout(this.#next);
    this.#state = {}; // an answer that is on its way is for nobody
    this.#samples.close();
    this.#graph?.dispose();
  }

  // Nodes 2.0 shows only promoted widgets of a node that stands for a subgraph; so the view goes into its body there.
  place() {
    if (!outside.has(this.#node)) return takePlace(this.#node, this.#outer);
    const box = this.#outer, vue = window.LiteGraph?.vueNodesMode, id = CSS.escape(`node-body-${this.#node.id}`);
    const body = vue ? document.querySelector(`[data-testid="${id}"]`) : this.#home;
    if (!body || box.parentElement === body) return;
    this.#home ??= box.parentElement;
    box.style.padding = vue ? `0 ${MARGIN}px` : "";
    body.append(box);
  }

  /** @param {HTMLElement} outer @param {HTMLElement} inner */
  #addWidget(outer, inner) {
    const options = { serialize: false, hideOnZoom: false, margin: MARGIN };
    const widget = this.#node.addDOMWidget("run", "atelier_train", outer, options);
    widget.serialize = false; // neither the workflow's file nor the prompt knows of it
    widget.computeLayoutSize = undefined; // it takes what it needs, and no share of the room that is left
    widget.computeSize = (width) => [width ?? 0, this.#height + 2 * MARGIN];
    this.#listen(inner);
    app.canvas?.setDirty(true, true); // the editor gives it a place when it draws next
    if (this.#node.subgraph) {
      widen(this.#node);
      outside.get(this.#node)?.push(widget);
      return void this.#node.widgets; // Nodes 2.0 sees what is new when it is asked for
    }
    putFirst(this.#node);
  }

  /** @param {HTMLElement} inner */
  #listen(inner) {
    const onSerialize = this.#node.onSerialize;
    if (window.LiteGraph?.vueNodesMode) this.#tall = this.#node.size[1]; // it grows by itself there
    // A file keeps the node as somebody made it: what it shows of a run finds its room again where it is opened.
    this.#node.onSerialize = (file) => {
      onSerialize?.call(this.#node, file);
      const [width, height] = this.#node.size;
      if (this.#tall && (window.LiteGraph?.vueNodesMode || height === this.#grown)) file.size = [width, this.#tall];
    };
    const onRemoved = this.#node.onRemoved;
    this.#node.onRemoved = (...rest) => {
      this.remove();
      return onRemoved?.apply(this.#node, rest);
    };
    new ResizeObserver(() => this.#fit(inner)).observe(inner);
  }

  // Give the widget the height of what it holds.
  /** @param {HTMLElement} inner */
  #fit(inner) {
    const [width, height] = this.#node.size;
    const shown = inner.style.display !== "none";
    if ((shown && inner.offsetWidth < width / 2) || inner.offsetHeight === this.#height) return; // it has no place yet
    this.#height = inner.offsetHeight;
    // As somebody made it; Nodes 2.0 itself makes it as tall as what it holds, so that there the first height stays.
    if (height !== this.#grown && !(window.LiteGraph?.vueNodesMode && this.#tall)) this.#tall = height;
    const needed = Math.max(this.#tall, this.#node.computeSize()[1]);
    if (height < needed || !this.#state.alive) this.#node.setSize([width, needed]);
    this.#grown = this.#node.size[1];
    this.#node.graph?.setDirtyCanvas(true, true);
  }

  #fillNotes() {
    const { notes, text } = this.#parts, copy = makeButton(t("Copy"), t("Copy the notes"), (event) => {
      event.preventDefault(); // the summary stays as it is
      navigator.clipboard.writeText(this.#notes);
    });
    copy.style.cssText += ";position:absolute;right:0;top:0;padding:0 8px";
    const summary = make("summary", "cursor:pointer;position:relative;line-height:22px", t("Notes of the run"));
    summary.append(copy);
    notes.append(summary, text);
    notes.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
    text.addEventListener("keydown", (event) => event.stopPropagation());
    text.tabIndex = 0;
  }

  /** @param {string} words */
  #write(words) {
    if (words === this.#notes) return; // what somebody marked stays marked
    this.#notes = words;
    const { notes, text } = this.#parts;
    text.replaceChildren(...written(words.split("\n")));
    notes.style.display = words ? "" : "none";
  }

  /** @param {string} what */
  async #ask(what) {
    const { followed, run, node } = this.#state;
    toast(await (followed ? ask("/atelier/runs/ask", { run, what }) : ask("/atelier/ask", { what, node })),
      t("Train LoRA"));
  }

  async #follow() {
    const { run, seen } = this.#state;
    if (document.hidden) return; // `refresh` goes on once the page is seen
    const answer = await ask(`${addressOf(run ?? "")}/live?seen=${seen}`);
    if (this.#state.followed && run === this.#state.run) this.update(answer.alive ? answer : { run });
  }

  // The Train LoRA whose run is shown: the node itself, or one inside of the subgraph that the node stands for.
  get #train() {
    const found = [...trains()].filter(({ node, around }) => [node, ...around].includes(this.#node));
    return found.find(({ id }) => id === this.#state.node) ?? found[0];
  }

  // What can be done with a run that ended: what each is called, its help, and what it does.
  /** @returns {[string, string, () => void][]} */
  #atEnd() {
    const run = () => /** @type {Run} */ (this.#detail);
    return [
      [t("Draw with it"), t("Go to the Sample that is linked to this node; without one, add it."), () =>
        this.#train && drawWithIt(this.#train)],
      [t("Compare saves"), t("Go to a Compare LoRAs with the saves of this run; without one, add it."), () =>
        this.#train && compareSaves(this.#train, run())],
      [t("Open in LoRA runs"), t("Show this run in the sidebar: its saves, settings and files."), () =>
        openRuns({ run: run().run })],
      [t("Download"), t("Download LoRA, settings and samples as a zip"), () => download(run())],
    ];
  }

  // The entries of the menu.
  /** @returns {[string, string, () => void][]} */
  #more() {
    return [
      [t("Copy command"), t("Copy the line that trains this run in a shell; it then shows here."), () =>
        this.#copyCommand()],
    ];
  }

  async #copyCommand() {
    const { id } = this.#train ?? {};
    const { workflow } = await app.graphToPrompt();
    const { command, error } = await ask("/atelier/command", { workflow, node: id ?? "" });
    if (error) return this.#say(told(error));
    this.#sought = performance.now();
    seek();
    try {
      await navigator.clipboard.writeText(command);
      this.#say(t("Copied. Paste it into a shell on ComfyUI's machine; the run then shows here."));
    } catch { // refused, or a page that has none: not of this machine, and without https
      this.#say(t("The browser refuses the clipboard. Copy this line into a shell on ComfyUI's machine:"), command);
    }
  }

  // Show a sentence beneath the buttons, and a command to copy; without one nothing.
  #say(sentence = "", command = "") {
    if (this.#state.alive) this.#sought = -Infinity;
    const place = this.#parts.command;
    place.style.display = sentence ? "" : "none";
    place.replaceChildren(sentence);
    if (!command) return;
    const line = make("textarea", `display:block;width:100%;box-sizing:border-box;margin-top:4px;${FONT};` +
      "font-family:monospace;color:var(--input-text);background:var(--comfy-input-bg);border:1px solid var(--border-color)");
    Object.assign(line, { readOnly: true, rows: 5, value: command, ariaLabel: t("Command") });
    line.addEventListener("pointerdown", (event) => event.stopPropagation());
    line.addEventListener("keydown", (event) => event.stopPropagation());
    line.addEventListener("focus", () => line.select());
    place.append(line);
  }

  /** @param {StepPoint} point */
  #add({ step, loss, rate, concepts }) {
    this.#fresh.push({ step, loss, rate, concepts });
    if (this.#curves) append(this.#curves, { step, loss, rate, concepts });
  }

  // Read the run's folder, at most once in a while.
  /** @param {number} pause */
  #look(pause) {
    clearTimeout(this.#later);
    const wait = this.#asking ? pause : Math.max(0, this.#asked + pause - performance.now());
    this.#later = setTimeout(() => (this.#asking ? this.#look(pause) : this.#read()), wait);
  }

  async #read() {
    const { run } = this.#state;
    [this.#asking, this.#asked, this.#fresh] = [true, performance.now(), []];
    const detail = await ask(addressOf(run ?? ""));
    this.#asking = false;
    if (run !== this.#state.run) return;
    this.#detail = detail.error ? { sentence: detail.error } : detail;
    this.#curves = detail.curves ?? null;
    const last = this.#curves?.loss.at(-1)?.[0] ?? 0;
    if (this.#curves) for (const point of this.#fresh) if (point.step > last) append(this.#curves, point);
    this.#draw();
  }

  #draw() {
    const { status, details, done, bar, memory, used, room, graph } = this.#parts;
    const { alive = false, step = 0, steps = 0, run, text, memory: taken } = this.#state, detail = this.#detail;
    const waiting = alive ? null : this.#state.waiting;
    const ended = !alive && !waiting && detail?.status !== "running"; // an older answer calls it running still
    const failure = alive ? "" : this.#failure || (ended && detail?.failed ? String(told(detail.sentence)) : "");
    const before = run && (waiting || (failure && this.#early)) ? t("Below is the run before.") : "";
    const words = waiting ? `${told(waiting)} ${before}`.trim()
      : told((ended ? detail?.sentence : null) ?? text ?? "") || t("No run yet. Press Run to train.");
    status.replaceChildren(...(failure ? linked(failure, this.#node) : [words]));
    if (failure && before) status.append(make("div", `margin-top:4px;font-weight:400;color:var(--input-text)`, before));
    status.style.color = failure ? RED : "";
    // What stands for a subgraph has its view for the run inside, and for what goes wrong there before one begins.
    if (this.#node.subgraph) this.#inner.style.display = run || failure || text || waiting ? "flex" : "none";
    if (this.#node.subgraph) this.#parts.buttons.style.display = run ? "flex" : "none";
    const file = detail?.published?.at(-1);
    const facts = alive ? this.#state.details ?? [] : file ? [t("File: {0}", file)] : [];
    details.textContent = facts.map(told).join(" · ");
    details.style.minHeight = alive ? "40px" : ""; // two lines, so that what is beneath stays where it is
    bar.style.display = alive && steps ? "" : "none";
    done.style.width = `${(100 * step) / Math.max(1, steps)}%`;
    memory.style.display = alive && taken?.words ? "flex" : "none";
    room.textContent = told(taken?.words);
    const share = taken?.share ?? 0;
    used.style.width = `${100 * share}%`;
    used.style.background = share > FULL ? RED : "var(--p-primary-color, #5b9bd5)";
    this.#filling.update(alive);
    this.#drawButtons(Boolean(failure));
    const said = this.#state.notes?.length ? this.#state.notes : detail?.notes ?? [];
    this.#write(said.toReversed().join("\n\n")); // what came of the run stands in the last ones
    const drawn = this.#curves?.loss.length;
    graph.style.display = drawn ? "" : "none";
    if (this.#curves && drawn) {
      this.#graph ??= new RunGraph(graph);
      this.#graph.setRuns([graphOf(detail, this.#curves)]);
    }
    this.#samples.set(run ?? "", detail?.samples ?? [], detail?.prompts ?? []);
    this.#offer(ended ? detail?.odd ?? [] : []);
  }

  // Offer the pictures that stood out for another caption.
  /** @param {OddPicture[]} odd */
  #offer(odd) {
    const known = JSON.stringify(odd);
    if (known === this.#odd) return;
    this.#odd = known;
    this.#parts.odd.replaceChildren(...(odd.length
      ? [make("div", "margin-bottom:4px", t("These pictures stood out. Look at them and their captions:")), oddPictures(odd)]
      : []));
  }

  // Only what can be done now; what can be done in a while says why not yet.
  /** @param {boolean} failed */
  #drawButtons(failed) {
    const { alive, waiting, step } = this.#state, detail = this.#detail;
    const begun = Boolean(step), stopped = !alive && detail?.status === "stopped";
    const ended = !alive && (stopped || detail?.status === "finished");
    /** @param {HTMLElement} button @param {boolean} may */
    const show = (button, may) => void (button.style.display = may ? "" : "none");
    for (const [i, button] of this.#buttons.entries()) {
      const [what, , help] = WISHES[i];
      const early = !begun && (what === "save" || what === "sample");
      const why = early ? t("Possible after the first step.")
        : what === "sample" && detail?.prompts && !detail.prompts.length
          ? t("There is nothing to draw; set sample_prompts of Saves & Samples before the next run.") : "";
      show(button, Boolean(alive));
      button.disabled = Boolean(why);
      button.title = why || help;
      button.style.opacity = why ? "0.4" : "1";
      button.style.cursor = why ? "default" : "pointer";
    }
    show(this.#go, stopped && !failed && !waiting); // the same again would fail again
    show(this.#menu, !alive);
    const lora = detail?.saves?.some((save) => save.lora) ?? false;
    const may = [ended && lora && !stopped, ended && lora, ended, ended && lora]; // Run would train a stopped one on
    for (const [i, button] of this.#after.entries()) show(button, may[i]);
  }
}

// Lines of notes; neighbouring ones that begin with "|" are the rows of a table, the first with its headings.
/** @param {string[]} lines */
function written(lines) {
  /** @type {HTMLElement[]} */
  const parts = [];
  for (const line of lines) {
    if (!line.startsWith("|")) {
      parts.push(make("div", "min-height:6px", line));
      continue;
    }
    if (/^[|\s:-]+$/.test(line)) continue; // the line beneath the headings
    const before = parts.at(-1), table = before?.tagName === "TABLE" ? before : make("table", TABLE);
    if (table !== before) parts.push(table);
    const row = make("tr"), kind = table.childElementCount ? "td" : "th";
    row.append(...line.replace(/^\||\|\s*$/g, "").split("|").map((cell) => make(kind, CELL, cell.trim())));
    table.append(row);
  }
  return parts;
}

/** @param {Curves} curves @param {StepPoint} point */
function append(curves, { step, loss, rate, concepts }) {
  /** @param {ToldCurve} curve @param {number | null} value */
  const put = (curve, value) => {
    while ((curve.at(-1)?.[0] ?? -Infinity) >= step) curve.pop(); // the run went back to a save
    curve.push([step, value]);
  };
  put(curves.loss, loss);
  for (const [name, value] of Object.entries(rate)) put((curves.rate[name] ??= []), value);
  for (const [name, value] of Object.entries(concepts)) put((curves.concepts[name] ??= []), value);
}

// A run as RunGraph draws it.
/** @param {Partial<Run> | null} detail @param {Curves} curves @returns {GraphRun} */
function graphOf(detail, { loss, validation, rate, concepts, levels }) {
  const saves = (detail?.saves ?? []).map(({ step }) => ({ step, best: false }));
  if (detail?.best != null) saves.push({ step: detail.best, best: true });
  return { name: detail?.name, points: { loss, rate, validation }, saves, concepts, levels };
}

// --- which node shows what -----------------------------------------------------------------------------------

// Every Train LoRA of the open workflow.
/** @returns {Generator<Found>} */
function* trains() {
  for (const found of nodes()) if (found.node.comfyClass === "AtelierTrain") yield found;
}

/** @type {WeakMap<GraphNode, number>} */
const heard = new WeakMap(); // when an event last told of a Train LoRA

// A run of another workflow, also of one with the same numbers, is not shown.
/** @param {RunState} state */
function follow(state) {
  if (!state.workflow || state.workflow !== root()?.id) return;
  for (const found of trains())
    if (found.id === state.node) {
      heard.set(found.node, performance.now());
      show(found, state);
    }
}

// Ask what the open workflow's nodes show: after a reload, for a workflow that was opened, after the server came back.
// turns: only whose turn is to come or has come, as a node may tell what no folder does. An answer is older than what an
// event told meanwhile: it may call a run alive that has just failed. left: how often all is then asked again.
async function refresh(turns = false, left = 5) {
  const found = [...trains()], workflow = root()?.id, asked = performance.now();
  if (!found.length || !workflow) return;
  const answer = await ask("/atelier/shown", { workflow, nodes: found.map(({ id }) => id).slice(0, 100) });
  if (workflow !== root()?.id) return;
  const isOlder = (/** @type {Found} */ { node }) => (heard.get(node) ?? -Infinity) >= asked;
  if (!turns && left && [...trains()].some(isOlder)) setTimeout(() => refresh(turns, left - 1), SOON);
  const known = Object.entries(answer.shown ?? {}).sort(([, one], [, other]) => (one.alive ?? 0) - (other.alive ?? 0));
  for (const [id, state] of known)
    for (const each of trains()) {
      const { waits, works } = views.get(each.node) ?? {}, now = waits || state.alive || !turns;
      if (each.id === id && !isOlder(each) && (state.waiting ? !works : now)) show(each, state);
    }
  const waiting = () => [...trains()].filter(({ node }) => views.get(node)?.waits);
  if (!answer.error) for (const each of waiting()) if (!answer.shown[each.id]) show(each, {});
  if (waiting().length) refreshIn(FOLLOWED); // a turn may come without an event
}

// Ask soon, once for what changes at the same time.
let asking = 0;
/** @param {number} pause */
function refreshIn(pause) {
  clearTimeout(asking);
  asking = setTimeout(() => document.hidden || refresh(true), pause);
}

// Look for a run whose command was copied, until it begins or nobody expects it any more.
let seeking = 0;
function seek() {
  clearTimeout(seeking);
  seeking = setTimeout(async () => {
    if (!document.hidden) await refresh();
    if ([...trains()].some(({ node, around }) => [node, ...around].some((each) => views.get(each)?.seeks))) seek();
  }, SOUGHT);
}

// A node that stands for a subgraph shows the run of the Train LoRA inside, too. The editor makes the widgets of such a
// node anew each time it is asked for them, so ours is put behind them there: what a person sets stays in its place.
/** @type {WeakMap<GraphNode, Widget[]>} */
const outside = new WeakMap(); // such a node -> its widgets of ours

/** @param {GraphNode} node */
function makeRoom(node) {
  const own = Object.getOwnPropertyDescriptor(node, "widgets"), get = own?.get;
  if (!get || !own.configurable) return;
  /** @type {Widget[]} */
  const ours = [];
  outside.set(node, ours);
  /** @returns {Widget[]} */
  const all = () => get.call(node) ?? [];
  const others = () => all().filter((widget) => !ours.includes(widget));
  Object.defineProperty(node, "widgets", { ...own, get: () => [...others(), ...ours] });
}

/** @param {Found} found @param {RunState} state */
function show({ node, around }, state) {
  views.get(node)?.update(state);
  for (const outer of around) {
    const says = state.run || state.text || state.waiting;
    if (!views.has(outer) && says && outside.has(outer)) views.set(outer, new View(outer));
    views.get(outer)?.update(state);
  }
}

// Show what went wrong at each Train LoRA, and at whatever a subgraph holds on the node that stands for it.
onFailures(() => {
  for (const { id, node, around } of nodes()) {
    if (!node.comfyClass?.startsWith("Atelier")) continue;
    views.get(node)?.fail(failureOfRun(id), failedEarly(id));
    around.forEach((outer, depth) => {
      const place = id.split(":").slice(0, depth + 1).join(":"), failure = failureOf(place, true);
      if (!views.has(outer) && failure && outside.has(outer)) views.set(outer, new View(outer));
      views.get(outer)?.fail(failure, failedEarly(place, true));
    });
  }
});

// What ComfyUI knows from another copy of the workflow it does not train again, and no event of a run comes.
api.addEventListener("execution_cached", ({ detail }) => {
  if ([...trains()].some(({ id }) => detail.nodes.includes(id))) refresh();
});
api.addEventListener("status", () => refreshIn(SOON)); // ComfyUI's queue has changed
api.addEventListener("atelier.run", ({ detail }) => follow(detail)); // early: the editor warns of events without one

app.registerExtension({
  name: "atelier.train",
  nodeCreated(node) {
    if (node.comfyClass === "AtelierTrain") views.set(node, new View(node));
    else if (node.subgraph) makeRoom(node);
  },
  afterConfigureGraph: () => refresh(),
  setup() {
    api.addEventListener("reconnected", () => refresh());
    window.addEventListener("focus", () => refresh()); // a run may have begun in a shell
    document.addEventListener("visibilitychange", () => document.hidden || refresh());
    setInterval(() => {
      if (document.hidden) return;
      for (const node of app.canvas?.graph?.nodes ?? []) views.get(node)?.place();
    }, INTERVAL);
  },
});
