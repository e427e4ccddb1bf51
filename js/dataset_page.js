import { app } from "../../scripts/app.js";
import { leadingTo } from "./filling.js";
import { Grid } from "./grid.js";
import { openPictures } from "./one_picture.js";
import { RED, ask, make, makeButton, nodes, showAlone, toast } from "./parts.js";
import { makeChoice } from "./popup.js";
import { fill, thumbnail } from "./thumbnails.js";
import { t, told } from "./words.js";

// A dataset in a full-size view: its pictures as they are trained, and their captions, which are written at once, for one
// picture or for many. The server computes every change and keeps the earlier texts, so that each can be undone.

/**
 * @typedef {object} Shown a picture, as trainer_core/preflight/pictures.py lists it
 * @property {number} concept
 * @property {string} name
 * @property {string} digest
 * @property {[number, number]} size
 * @property {[number, number]} bucket
 * @property {number} cut
 * @property {number} scale
 * @property {[number, number][]} corners
 * @property {number} repeats
 * @property {string} remark
 * @property {boolean} mask
 * @property {string[]} marks
 * @property {[number, number | null, number] | null} fit in the last run: losses as a multiple of others', trend, weight
 * @property {string} file of its caption; "" where it cannot be changed
 * @property {string} text
 * @property {string} seen its fingerprint
 * @property {string[]} [tags] split once
 * @property {string} [draft] what was typed and could not be written
 */
/** @typedef {{ folder: string, name: string, separator: string, elsewhere: string }} Concept */
/** @typedef {{ what: string, when: number, count: number, number: string }} Done */
/** @typedef {{ kind: string, find?: string, text?: string, case?: boolean, word?: boolean, first?: boolean }} Operation */
/** @typedef {[number, string, string, string, string]} Meanwhile concept, name, text there, text of ours, seen */

const PLANS = ["AtelierTrain", "AtelierDatasetPreview"]; // nodes whose plan says how pictures are trained
const MODELS = ["MODEL", "ATELIER_BASE_MODEL"];
const TILE = { width: 178, height: 236 }; // pixels, with the gap
const GAP = 8;
const SOON = 300; // milliseconds after the last letter
const MOST_CHIPS = 60;
const WAITING = "This takes long and goes on; ask again in a minute.";
const FIELD = "padding:4px 6px;border-radius:4px;border:1px solid var(--border-color);" +
  "background:var(--comfy-input-bg);color:var(--input-text);font:13px sans-serif;min-width:0;box-sizing:border-box";
const SMALL = "font:12px/16px sans-serif";
const DIM = `${SMALL};opacity:0.75`;
const BOX = "padding:0;border:1px solid var(--border-color);border-radius:8px;background:var(--comfy-menu-bg);" +
  "color:var(--input-text);font:13px sans-serif;outline:none";
/** @type {Record<string, string>} */
const KINDS = {
  uncaptioned: t("Without caption"), enlarged: t("Too small"), "near-duplicates": t("Near-duplicates"),
  blurred: t("Blurred"), borders: t("With borders"), text: t("With text in a corner"), fit: t("High loss in the last run"),
  odd: t("Odd in the last run"), rising: t("Rising loss in the last run"), easy: t("Easy in the last run"),
};
const FINE = "easy"; // of these nothing is wrong
/** @type {[string, string, Partial<Operation>][]} */
const OPERATIONS = [
  ["find", t("Find and replace"), {}], ["add", t("Add tags at the end"), {}],
  ["first", t("Add tags in front"), { kind: "add", first: true }], ["remove", t("Remove a tag"), {}],
  ["replace", t("Replace a tag"), {}], ["sort", t("Sort tags by name"), {}],
  ["frequent", t("Sort tags, the most frequent first"), { kind: "sort", first: true }],
  ["text", t("Write the same caption"), {}],
];
/** @type {Record<string, string>} */
const WHATS = { text: t("a caption"), find: t("find and replace"), add: t("added tags"), remove: t("a removed tag"),
  replace: t("a replaced tag"), sort: t("sorted tags"), written: t("what a model wrote") };

// Open the view for a Concept Dataset or a Dataset Preview; first: the name of a picture whose caption is to be written.
/** @param {GraphNode} node @param {() => void} [closed] @param {string} [first] */
export async function openDataset(node, closed = () => {}, first = "") {
  new View(await planned(node), node, closed, first);
}

// The nodes that lead to a dataset and to what trains it; plan: the id of that, "" where nothing does.
/** @param {GraphNode} node */
export async function planned(node) {
  const id = [...nodes()].find((each) => each.node === node)?.id ?? "";
  const { output } = await app.graphToPrompt();
  const plans = Object.keys(output).filter((key) => PLANS.includes(output[key].class_type));
  const plan = PLANS.includes(output[id]?.class_type) ? id
    : plans.sort((one, other) => PLANS.indexOf(output[one].class_type) - PLANS.indexOf(output[other].class_type))
      .find((key) => leadingTo(key, output)[id]) ?? "";
  return { prompt: leadingTo(plan || id, output), node: id, plan };
}

// What decides which model trains a dataset: how these nodes are linked, which are muted, and the files of loaders.
export const chosenModels = () => [...nodes()].filter(({ node }) => PLANS.includes(String(node.comfyClass)) ||
  node.outputs?.some(({ type }) => MODELS.includes(String(type)))).map(({ id, node }) => [id, node.mode,
  node.inputs?.map((_, slot) => fromOf(node, slot)),
  PLANS.includes(String(node.comfyClass)) ? [] : node.widgets?.map(({ value }) => value)]);

/** @param {GraphNode} node @param {number} slot */
function fromOf(node, slot) {
  const link = node.getInputLink(slot);
  return link && [link.origin_id, link.origin_slot];
}

// A caption as a field shows it; the line end at its end, and those of Windows, are put back when it is written.
/** @param {string} text */
const bare = (text) => text.replaceAll("\r\n", "\n").replace(/[\r\n]+$/, "");

class View {
  #question; #node; #closed; #first;
  /** @type {Shown[]} */
  #pictures = [];
  /** @type {Shown[]} */
  #shown = [];
  /** @type {Record<number, Concept>} */
  #concepts = {};
  /** @type {Done | null} */
  #last = null;
  /** @type {Done | null} */
  #next = null; // that was undone last
  #tag = ""; // that the shown ones have
  /** @type {Promise<unknown>} */
  #turn = Promise.resolve(); // one change after the other
  #asked = 0; // number of the newest question about a text
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  /** @type {{ picture: Shown, field: HTMLTextAreaElement } | null} */
  #open = null; // the caption beside the grid
  #view = make("dialog", `${BOX};margin:auto;width:96vw;height:95vh;max-width:none;max-height:none;overflow:hidden`);
  #title = make("span", "font:600 15px sans-serif;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;max-width:40%");
  #status = make("span", "flex:1;min-width:0;overflow:hidden;text-overflow:ellipsis;white-space:nowrap");
  #undo = makeButton(t("Undo"), "", () => this.#turnTo("undo"));
  #redo = makeButton(t("Redo"), "", () => this.#turnTo("redo"));
  #single = makeButton(t("Focus, mask…"), t("Set focus, mask, role and repeats of single pictures, or leave them out."),
    () => this.#openSingle());
  #search = make("input", `${FIELD};width:200px`);
  #kind = make("select", FIELD);
  #count = make("span", DIM);
  #note = make("div", `${DIM};padding:0 12px;max-height:48px;overflow:auto;overflow-wrap:anywhere`);
  #side = make("div", "width:360px;flex:none;overflow-y:auto;padding:0 12px 12px;display:flex;flex-direction:column;" +
    "gap:8px;box-sizing:border-box;border-left:1px solid var(--border-color)");
  #one = make("div", "display:flex;flex-direction:column;gap:6px");
  #chips = make("div", "display:flex;flex-wrap:wrap;gap:4px;align-content:start;flex:none;" +
    "max-height:128px;overflow-y:auto");
  #many = make("div", "display:flex;flex-direction:column;gap:6px");
  #grid = new Grid({ ...TILE, draw: (i) => this.#tile(this.#shown[i]), of: (i) => this.#shown[i],
    chosen: () => this.#choose(), opened: () => this.#open?.field.focus() }, t("Pictures"));

  /**
   * @param {{ prompt: object, node: string, plan: string }} question @param {GraphNode} node @param {() => void} closed
   * @param {string} first
   */
  constructor(question, node, closed, first) {
    this.#question = question;
    this.#node = node;
    this.#closed = closed;
    this.#first = first;
    const all = make("div", "display:flex;flex-direction:column;height:100%;gap:8px");
    const head = make("div", "display:flex;gap:10px;align-items:center;padding:10px 12px 0");
    const bar = make("div", "display:flex;gap:8px;align-items:center;padding:0 12px;flex-wrap:wrap");
    const body = make("div", "display:flex;flex:1;min-height:0;padding-left:12px");
    this.#view.className = "atelier-dataset";
    this.#view.ariaLabel = t("Pictures and captions");
    this.#status.setAttribute("role", "status");
    Object.assign(this.#search, { type: "search", placeholder: t("Text or name"), ariaLabel: t("Text or name") });
    this.#kind.ariaLabel = t("Which pictures are shown");
    const clear = makeButton(t("All"), t("Show all pictures again"), () => this.#reset());
    head.append(this.#title, this.#status, this.#single, this.#undo, this.#redo, makeButton(t("Close"), "", () => this.#view.close()));
    bar.append(this.#search, this.#kind, clear,
      makeButton(t("Select all"), t("All that are shown; also Ctrl+A"), () => this.#grid.all()), this.#count);
    this.#side.append(this.#one, this.#chips, this.#many);
    body.append(this.#grid.box, this.#side);
    all.append(head, bar, this.#note, body);
    this.#view.append(all);
    this.#search.addEventListener("input", () => this.#later(() => this.#filter()));
    this.#kind.addEventListener("change", () => this.#filter());
    for (const kind of ["keydown", "keyup", "paste", "copy", "cut", "wheel", "pointerdown"])
      this.#view.addEventListener(kind, (event) => event.stopPropagation()); // the editor has keys of its own
    this.#view.addEventListener("keydown", (event) => this.#key(event));
    this.#view.addEventListener("close", () => {
      this.#view.remove();
      closed();
    });
    document.body.append(this.#view);
    showAlone(this.#view);
    this.#showUndo();
    this.#load();
  }

  async #load() {
    this.#say(t("Looking at the pictures …"));
    let answer = await this.#ask("open");
    while (this.#view.open && answer.error?.key === WAITING) answer = await this.#ask("open");
    if (answer.error) return this.#say(told(answer.error), RED);
    /** @type {{ pictures: Shown[], concepts: Record<number, Concept>, remark: any, left_out: string[], last: Done | null,
     *   next: Done | null }} */
    const { pictures, concepts, remark, left_out: left, last, next } = answer;
    [this.#pictures, this.#concepts, this.#last, this.#next] = [pictures, concepts, last, next];
    const all = Object.values(concepts);
    this.#title.textContent = this.#title.title = all.map(({ name }) => name).join(", ");
    const notes = [remark && told(remark), ...new Set(all.map(({ elsewhere }) => elsewhere && told(elsewhere)))];
    if (left.length) notes.push(t("Left out: {0}", left.slice(0, 5).join("; ") + (left.length > 5 ? " …" : "")));
    this.#note.replaceChildren(...notes.filter(Boolean).map((each) => make("div", "", each)));
    this.#say("");
    this.#showUndo();
    this.#many.append(...this.#operations());
    this.#filter();
    this.#grid.box.focus();
    const at = this.#first ? this.#shown.findIndex(({ name }) => name === this.#first) : 0;
    this.#grid.go(Math.max(at, 0));
    if (at < 0) this.#say(t("{0} is not in this dataset.", this.#first), RED);
    else if (this.#first) this.#open?.field.focus();
  }

  /** @param {string} name @param {object} [more] */
  #ask = (name, more = {}) => ask(`/atelier/dataset/${name}`, { ...this.#question, ...more });

  /** @param {string} words @param {string} [colour] */
  #say(words, colour = "") {
    this.#status.textContent = this.#status.title = words;
    this.#status.style.color = colour;
  }

  /** @param {() => void} act */
  #later(act) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(act, SOON);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const typing = /** @type {HTMLElement} */ (event.target).matches("input, textarea, select");
    const pressed = event.key.toLowerCase();
    if ((pressed === "z" || pressed === "y") && (event.ctrlKey || event.metaKey) && !typing) {
      event.preventDefault();
      this.#turnTo(pressed === "y" || event.shiftKey ? "redo" : "undo");
    }
    if (event.key === "Escape" && typing) {
      event.preventDefault(); // the view stays open
      this.#grid.box.focus();
    }
  }

  // ComfyUI's mask editor opens beneath a modal view: this one closes, and opens anew afterwards.
  #openSingle() {
    const picture = this.#shown[this.#grid.at], concept = this.#concepts[picture?.concept] ?? Object.values(this.#concepts)[0];
    const folder = concept?.folder ?? this.#node.widgets?.find((each) => each.name === "folder")?.value;
    if (!folder || concept?.elsewhere) return this.#say(concept ? told(concept.elsewhere) : t("Choose a folder of pictures."), RED);
    this.#view.close();
    const sizes = new Map(this.#pictures.map((each) => [each.name, each.bucket.join("x")]));
    openPictures(String(folder), picture?.name, sizes, () => openDataset(this.#node, this.#closed));
  }

  // --- what is shown ----------------------------------------------------------------------------------------------

  #reset() {
    this.#search.value = this.#kind.value = this.#tag = "";
    this.#filter();
  }

  #filter() {
    const words = this.#search.value.trim().toLowerCase(), kind = this.#kind.value;
    this.#shown = this.#pictures.filter((each) => isOf(each, kind) && (!this.#tag || this.#tags(each).includes(this.#tag)) &&
      (!words || each.text.toLowerCase().includes(words) || each.name.toLowerCase().includes(words)));
    for (const each of this.#grid.selection)
      if (!this.#shown.includes(/** @type {Shown} */ (each))) this.#grid.selection.delete(each);
    this.#grid.show(this.#shown.length);
    this.#choose();
    this.#showKinds();
  }

  #showKinds() {
    const chosen = this.#kind.value;
    const counts = Object.keys(KINDS).map((kind) => [kind, this.#pictures.filter((each) => isOf(each, kind)).length]);
    this.#kind.replaceChildren(makeChoice("", t("All pictures")), ...counts.filter(([kind, count]) => count ||
      kind === chosen).map(([kind, count]) => makeChoice(String(kind), `${KINDS[kind]} (${count.toLocaleString()})`)));
    this.#kind.value = chosen;
  }

  /** @param {Shown} picture */
  #tags(picture) {
    const { separator } = this.#concepts[picture.concept];
    picture.tags ??= [...new Set(picture.text.split(/\r\n|\r|\n|\|\|\|/).flatMap((part) =>
      part.split(separator.trim() || separator)).map((tag) => tag.trim().toLowerCase()).filter(Boolean))];
    return picture.tags;
  }

  /** @param {Shown} picture @param {"small" | "large" | "still"} as */
  #address({ concept, name, digest }, as) {
    return thumbnail({ folder: this.#concepts[concept].folder, picture: name, v: digest, as });
  }

  /** @param {Shown} picture */
  #tile(picture) {
    const { name, bucket, cut, scale, repeats, remark, text, marks } = picture;
    const tile = make("div", `width:${TILE.width - GAP}px;height:${TILE.height - GAP}px;box-sizing:border-box;` +
      "border-radius:6px;padding:5px;overflow:hidden;cursor:pointer;background:var(--comfy-input-bg)");
    const times = repeats === 1 || repeats === 0 ? "" : ` ×${Number(repeats.toFixed(2))}`;
    const facts = [t("{0} % cut", Math.round(cut * 100)), `${scale.toFixed(2)}x`, remark].filter(Boolean).join(", ");
    const first = make("div", "display:flex;justify-content:space-between;color:var(--p-orange-400, #ffb042)",
      `${bucket[0]} × ${bucket[1]}${times}`);
    const warned = marks.filter((kind) => KINDS[kind] && kind !== FINE).map((kind) => KINDS[kind]);
    if (warned.length) first.append(make("span", "", "⚠"));
    const line = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap";
    const words = make("div", `${SMALL};height:32px;overflow:hidden;overflow-wrap:anywhere;display:-webkit-box;` +
      `-webkit-line-clamp:2;-webkit-box-orient:vertical${text.trim() ? "" : ";opacity:0.6"}`,
    text.trim() || t("(no caption)"));
    const below = make("div", `${SMALL};display:flex;flex-direction:column`);
    below.append(first, make("div", `${line};opacity:0.75`, facts), words);
    tile.append(this.#drawn(picture, TILE.height - GAP - 10 - 68, this.#address(picture, "small")), below);
    tile.ariaLabel = `${name}: ${text.trim() || t("(no caption)")}`;
    tile.title = [name, ...warned, text].join("\n");
    return tile;
  }

  // The whole picture, dark where it is cut off.
  /** @param {Shown} picture @param {number} height @param {string} source */
  #drawn({ size: [width, tall], corners, name }, height, source) {
    const frame = make("div", `position:relative;height:${height}px;margin-bottom:4px`);
    const image = make("img", "position:absolute;inset:0;width:100%;height:100%;object-fit:contain");
    Object.assign(image, { alt: name, decoding: "async", draggable: false });
    fill(image, source);
    const veil = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    veil.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    veil.setAttribute("style", "position:absolute;inset:0;width:100%;height:100%");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const inner = corners.map(([x, y]) => `${x * width} ${y * tall}`).join("L");
    path.setAttribute("d", `M0 0H${width}V${tall}H0ZM${inner}Z`);
    path.setAttribute("fill", "rgba(0,0,0,0.6)");
    path.setAttribute("fill-rule", "evenodd");
    veil.append(path);
    frame.append(image, veil);
    return frame;
  }

  // --- the selection ----------------------------------------------------------------------------------------------

  #selected() {
    return this.#shown.filter((each) => this.#grid.selection.has(each));
  }

  #choose() {
    this.#leave();
    const chosen = this.#selected();
    this.#count.textContent = t("{0} of {1} shown, {2} selected", this.#shown.length.toLocaleString(),
      this.#pictures.length.toLocaleString(), chosen.length.toLocaleString());
    if (chosen.length === 1) this.#showOne(chosen[0]);
    else {
      this.#open = null;
      this.#one.replaceChildren(make("div", "font:600 13px sans-serif", chosen.length
        ? t("{0} pictures are selected", chosen.length.toLocaleString()) : t("Select pictures to change their captions.")));
    }
    this.#showChips(chosen);
  }

  /** @param {Shown} picture */
  #showOne(picture) {
    const { name, size, file } = picture, field = make("textarea", `${FIELD};width:100%;height:92px;resize:vertical`);
    const composed = make("div", `${SMALL};overflow-wrap:anywhere;max-height:96px;overflow:auto`);
    Object.assign(field, { value: picture.draft ?? bare(picture.text), readOnly: !file, ariaLabel: t("Caption of {0}", name),
      placeholder: file ? t("Write the caption of {0}", name) : "" });
    field.dataset.shown = bare(picture.text);
    field.addEventListener("input", () => this.#later(() => this.#compose(picture, field.value, composed)));
    field.addEventListener("blur", () => this.#leave());
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.#grid.go(this.#grid.at + 1); // which writes this one
      this.#open?.field.focus();
    });
    const height = Math.min(190, Math.round(336 * size[1] / size[0]));
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches; // else a clip plays
    this.#one.replaceChildren(
      make("div", "font:600 13px sans-serif;overflow-wrap:anywhere", `${name} · ${size[0]} × ${size[1]}`),
      this.#drawn(picture, height, this.#address(picture, still ? "still" : "large")), ...this.#watched(picture), field,
      composed);
    this.#open = { picture, field };
    this.#compose(picture, picture.text, composed);
  }

  // What the watch of the last run found about a picture.
  /** @param {Shown} picture */
  #watched({ fit, marks }) {
    if (!fit) return [];
    const [ratio, trend, weight] = fit, found = marks.filter((kind) => ["odd", "rising", "easy"].includes(kind));
    return [make("div", DIM, [...found.map((kind) => KINDS[kind]), t("{0} times the loss of others", ratio.toFixed(2)),
      ...(trend === null ? [] : [t("trend {0}", trend.toFixed(2))]), ...(weight === 1 ? [] : [t("weight {0}", weight)])]
      .join(", "))];
  }

  // Show the caption as it is trained: the trigger word where it stands, grey what is cut, and how long it is.
  /** @param {Shown} picture @param {string} text @param {HTMLElement} composed */
  async #compose({ concept }, text, composed) {
    const number = ++this.#asked, answer = await this.#ask("caption", { concept, text });
    if (number !== this.#asked) return;
    if (answer.error) return composed.replaceChildren(make("span", `color:${RED}`, told(answer.error)));
    const { caption, prefix, suffix, tokens, window: most, cut, remark } = answer;
    const kept = cut && caption.endsWith(cut) ? caption.slice(0, -cut.length) : caption;
    const lead = prefix && kept.startsWith(prefix) ? prefix : "", rest = kept.slice(lead.length);
    const end = suffix && rest.endsWith(suffix) ? suffix : "";
    const mark = "color:var(--p-orange-400, #ffb042)", long = tokens > most;
    composed.replaceChildren(make("span", mark, lead), rest.slice(0, rest.length - end.length), make("span", mark, end),
      make("span", "opacity:0.4;text-decoration:line-through", cut),
      make("div", DIM, [cut ? t("{0} tokens, the end is cut", tokens) : long
        ? t("{0} tokens, encoded in parts of {1}", tokens, most) : t("{0} of {1} tokens", tokens, most),
      remark && told(remark)].filter(Boolean).join(". ")));
  }

  // Write the open caption where it was changed.
  #leave() {
    const open = this.#open;
    if (!open?.picture.file || open.field.dataset.shown === open.field.value) return;
    const { picture, field } = open, [end] = picture.text.match(/[\r\n]*$/) ?? [""];
    picture.draft = field.dataset.shown = field.value; // once; the draft stays where it cannot be written
    const text = picture.text.includes("\r\n") ? field.value.replaceAll("\n", "\r\n") : field.value;
    this.#edit([picture], { kind: "text", text: text + end });
  }

  /** @param {Shown[]} chosen */
  #showChips(chosen) {
    /** @type {Map<string, number>} */
    const counts = new Map();
    for (const each of this.#pictures) for (const tag of this.#tags(each)) counts.set(tag, (counts.get(tag) ?? 0) + 1);
    const own = new Set(chosen.flatMap((each) => this.#tags(each)));
    const listed = [...(chosen.length ? own : counts.keys())];
    if (chosen.length !== 1) listed.sort((one, other) => (counts.get(other) ?? 0) - (counts.get(one) ?? 0));
    this.#chips.replaceChildren(...listed.slice(0, MOST_CHIPS).map((tag) => {
      const chip = make("span", "display:inline-flex;max-width:100%");
      const name = makeButton(`${tag} ${counts.get(tag)}`, t("Show the pictures with this tag"), () => {
        this.#tag = this.#tag === tag ? "" : tag;
        this.#filter();
      });
      name.style.cssText += ";overflow:hidden;text-overflow:ellipsis;border-radius:10px" +
        (tag === this.#tag ? ";border-color:var(--p-primary-color, #60a5fa)" : "");
      name.ariaPressed = String(tag === this.#tag);
      chip.append(name);
      if (chosen.some(({ file }) => file)) {
        const remove = makeButton("×", t("Remove {0} from the selection", tag),
          () => this.#edit(chosen, { kind: "remove", find: tag }));
        remove.ariaLabel = remove.title;
        remove.style.cssText += ";padding:2px 5px;border:0;background:none";
        chip.append(remove);
      }
      return chip;
    }), ...(listed.length > MOST_CHIPS ? [make("span", DIM, t("and {0} more", listed.length - MOST_CHIPS))] : []));
  }

  // --- changes ----------------------------------------------------------------------------------------------------

  #operations() {
    const kind = make("select", `${FIELD};width:100%`), find = make("input", FIELD), text = make("input", FIELD);
    const flags = make("div", "display:flex;gap:12px"), seen = make("div", SMALL);
    const [exact, exactly] = this.#flag(t("Match case")), [word, whole] = this.#flag(t("Whole words"));
    kind.ariaLabel = t("What to do with the selection");
    kind.append(...OPERATIONS.map(([value, name]) => makeChoice(value, name)));
    find.setAttribute("aria-label", t("What is looked for"));
    text.setAttribute("aria-label", t("New text"));
    flags.append(exact, word);
    /** @returns {Operation} */
    const operation = () => {
      const [value, , more] = OPERATIONS.find(([each]) => each === kind.value) ?? OPERATIONS[0];
      return { kind: value, find: find.value, text: text.value, case: exactly.checked, word: whole.checked, ...more };
    };
    const show = () => {
      const { kind: wanted } = operation();
      for (const [field, used] of /** @type {[HTMLElement, boolean][]} */ ([
        [find, ["find", "remove", "replace"].includes(wanted)], [text, !["remove", "sort"].includes(wanted)],
        [flags, wanted === "find"]])) field.style.display = used ? field === flags ? "flex" : "" : "none";
      find.placeholder = wanted === "find" ? t("Find") : t("Tag");
      text.placeholder = wanted === "find" || wanted === "replace" ? t("Replace with") : wanted === "text" ? t("Caption")
        : t("Tags");
      seen.replaceChildren();
    };
    kind.addEventListener("change", show);
    const preview = makeButton(t("Preview"), t("Show what would change. Nothing is written yet."),
      () => this.#preview(operation(), seen));
    for (const field of [find, text]) {
      field.addEventListener("input", () => seen.replaceChildren());
      field.addEventListener("keydown", ({ key }) => key === "Enter" && preview.click());
    }
    show();
    return [make("div", "font:600 13px sans-serif;border-top:1px solid var(--border-color);padding-top:8px",
      t("Change the captions of the selection")), kind, find, text, flags, preview, seen];
  }

  /** @param {string} name @returns {[HTMLLabelElement, HTMLInputElement]} */
  #flag(name) {
    const label = make("label", `${SMALL};display:flex;gap:4px;align-items:center`), box = make("input");
    box.type = "checkbox";
    label.append(box, name);
    return [label, box];
  }

  /** @param {Operation} operation @param {HTMLElement} seen */
  async #preview(operation, seen) {
    const chosen = this.#selected().filter(({ file }) => file);
    if (!chosen.length) return seen.replaceChildren(t("Select pictures first; Ctrl+A selects all that are shown."));
    const answer = await this.#ask("edit", { pictures: keys(chosen), operation, dry: true });
    if (answer.error) return seen.replaceChildren(make("span", `color:${RED}`, told(answer.error)));
    /** @type {{ count: number, of: number, shown: [number, string, string, string][] }} */
    const { count, of, shown } = answer;
    if (!count) return seen.replaceChildren(t("Nothing changes in {0} captions.", of.toLocaleString()));
    const apply = makeButton(t("Change {0} captions", count.toLocaleString()), "", async () => {
      seen.replaceChildren();
      await this.#edit(chosen, operation);
    });
    apply.style.marginBottom = "6px";
    const list = make("div", "display:flex;flex-direction:column;gap:6px;overflow-wrap:anywhere");
    list.className = "atelier-changes";
    for (const [, name, before, after] of shown) {
      const [start, old, now, end] = apart(before, after), line = make("div");
      line.append(make("span", "opacity:0.7", `${name}: `), start,
        make("span", `color:${RED};text-decoration:line-through`, old),
        make("span", "color:var(--p-green-400, #4ade80)", now), end);
      list.append(line);
    }
    if (count > shown.length) list.append(make("div", DIM, t("and {0} more", (count - shown.length).toLocaleString())));
    seen.replaceChildren(apply, list);
    apply.focus();
  }

  // Write at once; where another program was faster, a person decides.
  /** @param {Shown[]} chosen @param {Operation} operation */
  #edit(chosen, operation) {
    this.#turn = this.#turn.then(() => this.#editNow(chosen, operation)); // it names what the change before has written
    return this.#turn;
  }

  /** @param {Shown[]} chosen @param {Operation} operation @returns {Promise<unknown>} */
  async #editNow(chosen, operation) {
    const pictures = chosen.filter(({ file }) => file);
    if (!pictures.length) return;
    return this.#change("edit", { pictures: keys(pictures), operation }, (list) => {
      const theirs = new Set(list.map(([concept, name]) => key({ concept, name })));
      return this.#editNow(pictures.filter((each) => !theirs.has(key(each))), operation);
    });
  }

  /** @param {"undo" | "redo"} way */
  #turnTo(way) {
    this.#turn = this.#turn.then(() => {
      const change = way === "undo" ? this.#last : this.#next;
      if (!change) return;
      const more = { number: change.number, pictures: [] };
      return this.#change(way, more, () => this.#change(way, { ...more, leave: true }, () => {}));
    });
  }

  /** @param {string} name @param {{ pictures: [number, string, string][], operation?: Operation, number?: string,
   *   leave?: boolean }} more
   * @param {(list: Meanwhile[]) => unknown} others does what is left without these
   * @returns {Promise<unknown>} */
  async #change(name, more, others) {
    this.#say(t("Writing …"));
    const answer = await this.#ask(name, more);
    if (answer.meanwhile) {
      this.#say(told(answer.error), RED);
      const write = await this.#decide(answer.meanwhile);
      const known = new Map(more.pictures.map((each) => [key({ concept: each[0], name: each[1] }), each]));
      for (const [concept, file, theirs, , seen] of answer.meanwhile) {
        known.set(key({ concept, name: file }), [concept, file, seen]);
        if (!write) this.#take([[concept, file, theirs, seen]]);
      }
      if (write) return this.#change(name, { ...more, pictures: [...known.values()] }, others);
      this.#say("");
      this.#refresh();
      return others(answer.meanwhile);
    }
    if (answer.error) return this.#say(told(answer.error), RED);
    this.#take(answer.now);
    [this.#last, this.#next] = [answer.last, answer.next];
    this.#say(name === "undo" ? answer.count === 1 ? t("1 caption is as before")
      : t("{0} captions are as before", answer.count.toLocaleString())
      : answer.count === 1 ? t("1 caption is written") : t("{0} captions are written", answer.count.toLocaleString()));
    this.#refresh();
  }

  /** @param {[number, string, string, string][]} now */
  #take(now) {
    const known = new Map(this.#pictures.map((each) => [key(each), each]));
    for (const [concept, name, text, seen] of now) {
      const picture = known.get(key({ concept, name }));
      if (picture) Object.assign(picture, { text, seen, tags: undefined, draft: undefined });
    }
  }

  #refresh() {
    const chosen = this.#selected(), open = this.#open;
    this.#grid.redraw();
    this.#showKinds();
    this.#showUndo();
    this.#showChips(chosen);
    if (!open || document.activeElement === open.field) return;
    open.field.value = open.picture.draft ?? bare(open.picture.text);
    open.field.dataset.shown = bare(open.picture.text);
    open.field.dispatchEvent(new Event("input"));
  }

  #showUndo() {
    const [last, next] = [this.#last, this.#next], words = (/** @type {Done} */ { what, count, when }) =>
      [WHATS[what] ?? what, count.toLocaleString(), new Date(1000 * when).toLocaleString()];
    this.#undo.title = last ? t("Take back {0} in {1} files, of {2}; also Ctrl+Z", ...words(last))
      : t("No caption was changed here yet.");
    this.#redo.title = next ? t("Do {0} in {1} files again, of {2}; also Ctrl+Shift+Z", ...words(next))
      : t("Nothing was undone here.");
    for (const [button, change] of /** @type {[HTMLButtonElement, Done | null][]} */ ([[this.#undo, last],
      [this.#redo, next]])) {
      button.disabled = !change;
      button.style.opacity = change ? "1" : "0.4";
    }
  }

  // Ask whether to write over what another program wrote; Escape leaves it.
  /** @param {Meanwhile[]} list @returns {Promise<boolean>} */
  #decide(list) {
    const box = make("dialog", `${BOX};margin:auto;padding:14px;width:min(680px,90vw);max-height:80vh;overflow:auto`);
    box.setAttribute("role", "alertdialog");
    box.ariaLabel = t("Changed by another program");
    box.append(make("div", "font:600 14px sans-serif;margin-bottom:8px",
      t("Another program has changed {0} of these captions since they were opened.", list.length.toLocaleString())));
    for (const [, name, theirs, mine] of list.slice(0, 20)) {
      const each = make("div", `${SMALL};margin-bottom:8px;overflow-wrap:anywhere`);
      each.append(make("b", "", name), make("div", "", t("There now: {0}", theirs || t("(no caption)"))),
        make("div", "", t("Yours: {0}", mine || t("(no caption)"))));
      box.append(each);
    }
    const row = make("div", "display:flex;gap:8px;justify-content:flex-end");
    const keep = makeButton(t("Keep what is there"), "", () => box.close(""));
    row.append(keep, makeButton(t("Write mine"), "", () => box.close("mine")));
    box.append(row);
    document.body.append(box);
    box.addEventListener("keydown", (event) => event.stopPropagation());
    box.showModal();
    keep.focus();
    return new Promise((done) => box.addEventListener("close", () => {
      box.remove();
      this.#grid.box.focus();
      done(box.returnValue === "mine");
    }));
  }
}

/** @param {{ concept: number, name: string }} picture */
const key = ({ concept, name }) => `${concept}/${name}`;

/** @param {Shown[]} pictures @returns {[number, string, string][]} */
const keys = (pictures) => pictures.map(({ concept, name, seen }) => [concept, name, seen]);

/** @param {Shown} picture @param {string} kind */
const isOf = (picture, kind) =>
  !kind || (kind === "uncaptioned" ? !picture.text.trim() : picture.marks.includes(kind));

// What two texts begin and end with in common, and what is between.
/** @param {string} before @param {string} after */
function apart(before, after) {
  const most = Math.min(before.length, after.length);
  let start = 0, end = 0;
  while (start < most && before[start] === after[start]) start++;
  while (end < most - start && before.at(-1 - end) === after.at(-1 - end)) end++;
  return [before.slice(0, start), before.slice(start, before.length - end), after.slice(start, after.length - end),
    before.slice(before.length - end)];
}

app.registerExtension({
  name: "atelier.dataset_page",
  nodeCreated(node) {
    if (node.comfyClass !== "AtelierDatasetPreview") return;
    const button = node.addWidget("button", t("Open pictures and captions"), null, () => void openDataset(node)
      .catch((problem) => toast({ error: problem.message })), { serialize: false }); // in the prompt
    button.serialize = false; // in the workflow's file
  },
});
