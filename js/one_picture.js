import { api } from "../../scripts/api.js";
import { paintMask } from "./mask_editor.js";
import { RED, ask, make, makeButton, showAlone, toast } from "./parts.js";
import { element } from "./picture.js";
import { makeChoice } from "./popup.js";
import { t, told } from "./words.js";

// What is set for one picture of a folder: the point that its crop keeps, leave out, role, repeats, and its mask. Each
// change is written at once, and can be undone. The server draws the picture and computes the crop, as a run does.

/** @typedef {{ leave_out?: boolean, role?: string, repeats?: number, focus?: [number, number] | null }} Entry */
/** @typedef {{ folder: string, picture: string, resolution: string }} Shown resolution: that of the plan; "" unknown */
/**
 * @typedef {{ own: Entry, before: Entry | null, read: string, width: number, height: number, frame: number[],
 *   mask: string, earlier: boolean }} Known
 */

const STEP = 0.01, STRIDE = 0.1; // of the picture's sides, for an arrow key, and with Shift
const MOST_REPEATS = 1000;
/** @type {Record<string, () => string>} */
const ROLES = {
  "": () => t("as the folder"), train: () => "train", regularisation: () => "regularisation",
  validation: () => "validation",
};
const LINE = "display:flex;align-items:center;gap:6px";
const INPUT = "padding:3px;border-radius:4px;border:1px solid var(--border-color);background:var(--comfy-input-bg);" +
  "color:var(--input-text);font:13px sans-serif";
let count = 0; // of tools, for ids

// A picture with its tools, in an element.
class Tools {
  #host; #shown;
  /** @type {Known | null} */
  #known = null;
  /** @type {(() => Promise<void>)[]} */
  #undo = [];
  #changes = 0; // written by this visit
  #waiting = 0; // changes that are not written yet
  #turn = Promise.resolve(); // one change after the other
  /** @type {any} */
  #wrong = ""; // what the last change met
  /** @type {[number, number] | null} */
  #aim = null; // where the focus will be once the server has answered
  #image = make("img", "display:block;max-width:100%;max-height:60vh");
  #over = element("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none" });
  #field = make("div", "position:relative;align-self:flex-start;cursor:crosshair;outline-offset:2px");
  #box = make("div", "display:flex;flex-wrap:wrap;gap:12px;color:var(--input-text)");
  #out = make("input");
  #role = make("select", INPUT);
  #repeats = make("input", `${INPUT};width:70px`);
  #said = make("div", "font:12px/16px sans-serif;min-height:16px;overflow-wrap:anywhere");
  #back; #earlier; #middle; #paint;

  /** @param {HTMLElement} host @param {Shown} shown */
  constructor(host, shown) {
    this.#host = host;
    this.#shown = shown;
    const name = `atelier-picture-${++count}`;
    this.#over.setAttribute("style", "position:absolute;inset:0;width:100%;height:100%;pointer-events:none");
    this.#field.append(this.#image, this.#over);
    this.#field.tabIndex = 0;
    this.#field.className = "atelier-focus";
    this.#field.setAttribute("role", "group");
    this.#field.setAttribute("aria-label", t("Focus of the crop: click the point to keep, or move it by arrow keys"));
    this.#field.addEventListener("click", (event) => this.#point(event));
    this.#field.addEventListener("keydown", (event) => this.#press(event));
    this.#out.type = "checkbox";
    this.#out.addEventListener("change", () => this.#set({ leave_out: this.#out.checked }));
    this.#role.append(...Object.entries(ROLES).map(([value, words]) => makeChoice(value, words())));
    this.#role.addEventListener("change", () => this.#set({ role: this.#role.value }));
    Object.assign(this.#repeats, { type: "number", min: "1", max: String(MOST_REPEATS), step: "1" });
    this.#repeats.addEventListener("change", () => this.#set({ repeats: Number(this.#repeats.value) }));
    this.#said.setAttribute("role", "status");
    this.#paint = makeButton(t("Paint the mask"), t("Opens ComfyUI's mask editor. Paint what is trained; nothing painted " +
      "is no mask."), () => this.#paintIt());
    this.#middle = makeButton(t("No focus"), t("Cut at the middle again"), () => this.#set({ focus: null }));
    this.#back = makeButton(t("Undo"), t("Take back the last change of this picture"), () => this.#takeBack());
    this.#earlier = makeButton(t("Earlier mask"), t("Bring back the mask that was replaced last; again brings back the " +
      "newer one."), () => this.#change(() => this.#swapMask()));
    const side = make("div", "display:flex;flex-direction:column;gap:10px;min-width:190px;flex:1;font:13px sans-serif");
    for (const [id, words, input, help] of /** @type {[string, string, HTMLElement, string][]} */ ([
      ["out", t("Leave out"), this.#out, t("The picture is not used; the file stays as it is.")],
      ["role", t("Role"), this.#role, t("As role of Concept Dataset, for this picture alone.")],
      ["repeats", t("Repeats"), this.#repeats, t("How often it is trained, times repeats of Concept Dataset.")],
    ])) {
      const line = make("div", LINE), label = make("label", "", words);
      input.id = label.htmlFor = `${name}-${id}`;
      line.title = help;
      line.append(...(id === "out" ? [input, label] : [label, input]));
      side.append(line);
    }
    const acts = make("div", "display:flex;flex-wrap:wrap;gap:4px");
    acts.append(this.#paint, this.#earlier, this.#middle, this.#back);
    side.append(acts, this.#said);
    const box = this.#box;
    box.className = "atelier-one-picture";
    box.append(this.#field, side);
    for (const kind of ["keydown", "keyup", "wheel", "paste", "copy"])
      box.addEventListener(kind, (event) => event.stopPropagation()); // the canvas has keys and a wheel of its own
    host.replaceChildren(box);
    this.#show({});
  }

  // What was set before a change of an earlier visit to this picture, unless this one has changed something.
  get #yesterday() {
    return this.#changes ? null : this.#known?.before;
  }

  // Read what is set for the picture, and how it looks.
  async load() {
    const { folder, picture, resolution } = this.#shown;
    const answer = await this.#ask("one", { resolution });
    if (answer.error) return this.#say(answer.error);
    this.#known = answer;
    const asked = new URLSearchParams({ folder, picture, of: answer.mask });
    this.#image.src = api.apiURL(`/atelier/pictures/view?${asked}`);
    this.#image.alt = picture;
    this.#show(answer.own);
  }

  /** @param {string} what @param {object} question @returns {Promise<any>} */
  #ask(what, question) {
    const { folder, picture } = this.#shown;
    return ask(`/atelier/pictures/${what}`, { folder, picture, ...question });
  }

  /** @param {any} words */
  #say(words) {
    this.#said.textContent = told(words);
    this.#said.style.color = RED;
  }

  /** @param {Entry} own */
  #show(own) {
    const known = this.#known;
    this.#out.checked = Boolean(own.leave_out);
    this.#role.value = own.role ?? "";
    if (document.activeElement !== this.#repeats || !known) // else somebody is typing
      this.#repeats.value = String(own.repeats ?? 1);
    for (const each of [this.#out, this.#role, this.#repeats, this.#paint]) each.disabled = !known;
    this.#middle.disabled = !own.focus;
    this.#back.disabled = !this.#undo.length && !this.#yesterday;
    this.#earlier.hidden = !known?.earlier;
    this.#field.style.opacity = own.leave_out ? "0.4" : "";
    this.#over.replaceChildren();
    if (!known) return;
    const [left, top, right, bottom] = known.frame;
    const dark = { fill: "rgba(0,0,0,0.5)", "fill-rule": "evenodd" };
    const crop = `M${left} ${top}H${right}V${bottom}H${left}Z`;
    this.#over.append(element("path", { ...dark, d: `M0 0H1V1H0Z${crop}`, class: "cut" }));
    this.#line(crop, "white");
    if (own.focus) {
      const [x, y] = own.focus, long = 12 / Math.max(this.#image.clientWidth, 200), high = long * known.width / known.height;
      this.#line(`M${x - long} ${y}H${x + long}M${x} ${y - high}V${y + high}`, "rgb(255,176,66)", "focus");
    }
    this.#said.style.color = "";
    const size = `${known.width} × ${known.height}`;
    this.#said.textContent = known.mask ? t("{0} pixels; its mask leaves out what is red.", size) : t("{0} pixels", size);
  }

  /** @param {string} d @param {string} stroke @param {string} [kind] */
  #line(d, stroke, kind = "frame") {
    const pen = { d, fill: "none", "vector-effect": "non-scaling-stroke" };
    this.#over.append(element("path", { ...pen, stroke: "black", "stroke-width": 4 }));
    this.#over.append(element("path", { ...pen, stroke, "stroke-width": 2, class: kind }));
  }

  // One change after the other, each with what the one before has left.
  /** @param {() => Promise<void>} act */
  #change(act) {
    this.#box.ariaBusy = String(++this.#waiting > 0);
    this.#turn = this.#turn.then(async () => {
      this.#wrong = "";
      await act();
      await this.load();
      if (this.#wrong) this.#say(this.#wrong); // here, as a toast would lie beneath a modal dialog
      this.#box.ariaBusy = String(--this.#waiting > 0);
    });
    return this.#turn;
  }

  /** @param {Entry} part */
  #set(part) {
    return this.#change(async () => {
      if (!this.#known) return;
      const before = await this.#write({ ...this.#known.own, ...part });
      if (before) this.#undo.push(async () => void await this.#write(before));
    });
  }

  // Write what is set. The result is what was set before; null where nothing was written.
  /** @param {Entry} own @returns {Promise<Entry | null>} */
  async #write(own) {
    const { picture } = this.#shown, known = /** @type {Known} */ (this.#known);
    const answer = await this.#ask("own", { pictures: { [picture]: own }, read: known.read });
    if (answer.error) {
      this.#wrong = answer.error;
      return null;
    }
    this.#changes += 1;
    return answer.before[picture];
  }

  #takeBack() {
    return this.#change(async () => {
      const before = this.#yesterday;
      if (before) await this.#write(before);
      else await this.#undo.pop()?.();
    });
  }

  /** @param {MouseEvent} event */
  #point(event) {
    const { left, top, width, height } = this.#image.getBoundingClientRect();
    this.#focus((event.clientX - left) / width, (event.clientY - top) / height);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const [x, y] = this.#aim ?? this.#known?.own.focus ?? [0.5, 0.5], step = event.shiftKey ? STRIDE : STEP;
    const to = { ArrowLeft: [x - step, y], ArrowRight: [x + step, y], ArrowUp: [x, y - step], ArrowDown: [x, y + step] };
    const [across, down] = to[/** @type {keyof typeof to} */ (event.key)] ?? [];
    if (across === undefined || down === undefined) return;
    event.preventDefault();
    this.#focus(across, down);
  }

  /** @param {number} x @param {number} y */
  #focus(x, y) {
    const [across, down] = [x, y].map((share) => Math.round(1000 * Math.min(1, Math.max(0, share))) / 1000);
    /** @type {[number, number]} */
    const aim = [across, down];
    this.#aim = aim;
    this.#set({ focus: aim }).then(() => {
      if (this.#aim === aim) this.#aim = null;
    });
  }

  #paintIt() {
    return this.#change(async () => {
      const place = await this.#ask("paint", {});
      if (place.error) {
        this.#wrong = place.error;
        return;
      }
      const { was, ...copy } = place, shown = hidden(this.#host);
      let mask = "";
      try {
        mask = await paintMask(copy);
      } catch (/** @type {any} */ problem) {
        this.#wrong = problem.message;
      } finally {
        shown();
      }
      if (!mask) return;
      const answer = await this.#ask("mask", { mask, was });
      if (answer.error) {
        this.#wrong = answer.error;
        return;
      }
      this.#changes += 1;
      this.#undo.push(() => this.#swapMask());
    });
  }

  async #swapMask() {
    const answer = await this.#ask("mask/undo", { was: this.#known?.mask ?? "" });
    if (answer.error) this.#wrong = answer.error;
  }
}

// Hide a modal dialog around an element, as the editor's own dialogs open beneath one; the result shows it again.
/** @param {HTMLElement} host */
function hidden(host) {
  const dialog = /** @type {HTMLDialogElement | null} */ (host.closest("dialog"));
  if (!dialog?.matches(":modal")) return () => {};
  dialog.addEventListener("close", (event) => event.stopImmediatePropagation(), { capture: true, once: true });
  dialog.close();
  return () => dialog.showModal();
}

// --- a dialog of all pictures of a folder, one at a time -----------------------------------------------------

// sizes: the bucket of each picture as the plan has it, by name.
/** @param {string} folder @param {string | undefined} first @param {Map<string, string>} sizes @param {() => void} closed */
export async function openPictures(folder, first, sizes, closed) {
  /** @type {{ names: string[], error?: string }} */
  const { names = [], error } = await ask("/atelier/pictures/names", { folder });
  if (error || !names.length) {
    toast({ error: error ?? t("There is no picture in {0}.", folder) });
    return closed();
  }
  const view = make("dialog", "margin:auto;padding:12px;border:1px solid var(--border-color);border-radius:8px;" +
    "background:var(--comfy-menu-bg);color:var(--input-text);max-width:95vw;max-height:95vh;width:900px;outline:none");
  view.className = "atelier-pictures";
  view.setAttribute("aria-label", t("Pictures of {0}", folder.split(/[\\/]/).pop()));
  const top = make("div", `${LINE};margin-bottom:10px`), host = make("div"), list = make("select", `${INPUT};flex:1;min-width:0`);
  list.setAttribute("aria-label", t("Picture"));
  list.append(...names.map((name) => makeChoice(name, name)));
  if (first !== undefined && names.includes(first)) list.value = first;
  const show = () => void new Tools(host, { folder, picture: list.value, resolution: sizes.get(list.value) ?? "" })
    .load();
  /** @param {number} by */
  const turn = (by) => {
    list.selectedIndex = (list.selectedIndex + by + names.length) % names.length;
    show();
  };
  list.addEventListener("change", show);
  const close = makeButton(t("Close"), t("Close the pictures"), () => view.close());
  const before = makeButton("◀", t("Picture before"), () => turn(-1));
  const next = makeButton("▶", t("Next picture"), () => turn(1));
  for (const button of [before, next]) button.ariaLabel = button.title;
  top.append(before, list, next, close);
  view.append(top, host);
  view.addEventListener("keydown", (event) => event.stopPropagation()); // no shortcuts of the editor
  view.addEventListener("click", (event) => event.target === view && view.close());
  view.addEventListener("close", () => {
    view.remove();
    closed();
  });
  document.body.append(view);
  showAlone(view);
  show();
}
