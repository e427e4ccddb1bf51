import { api } from "../../scripts/api.js";
import { make, makeButton } from "./parts.js";
import { fork, nearestSave, readRun, useLora } from "./saves.js";
import { openRuns } from "./tab.js";
import { t, told } from "./words.js";

// Pictures of runs in a large view, one alone or several side by side, with what can be done with the LoRA that drew
// each. Arrow keys lead on.

/** @typedef {{ run: string, file: string, step: number, words: string, colour?: string }} Picture */
/** @typedef {{ turn(event: KeyboardEvent): Picture[] | null, closed(): void }} Way */

// ComfyUI's own route for pictures of its output folder, where runs lie.
/** @param {string} run @param {string} filename @param {string} [preview] */
function address(run, filename, preview) {
  const asked = { filename, subfolder: `atelier/runs/${run}/samples`, type: "output", ...(preview && { preview }) };
  return api.apiURL(`/view?${new URLSearchParams(asked)}`);
}

const CLIP = /-(\d+)f\.webp$/; // as a run names it, with its frames

// How long a clip is, "17 frames"; "" of a picture.
/** @param {string} file */
export function lengthOf(file) {
  const frames = CLIP.exec(file)?.[1];
  return frames ? t("{0} frames", frames) : "";
}

// Words for a sample, with the length of a clip.
/** @param {string[]} words @param {string} file */
export const wordsOf = (words, file) => [...words, lengthOf(file)].filter(Boolean).join(" · ");

// The image of a sample. A clip plays by itself; who asked for less motion gets its first frame, from the same route.
/** @param {string} run @param {string} file @param {string} words @param {string} style @param {string} [preview] */
export function imageOf(run, file, words, style, preview) {
  const image = make("img", style), whole = make("picture", "display:contents"), still = make("source");
  const clip = lengthOf(file) !== "";
  if (clip) {
    Object.assign(still, { media: "(prefers-reduced-motion: reduce)", srcset: address(run, file, "webp;90") });
    whole.append(still, image);
  }
  Object.assign(image, { alt: words, loading: "lazy", src: address(run, file, clip ? undefined : preview) });
  return clip ? whole : image;
}

// A coloured square that stands for a run; without a colour nothing.
/** @param {string} [colour] */
export const swatch = (colour) =>
  make("span", colour && `display:inline-block;width:9px;height:9px;margin-right:4px;border-radius:2px;` +
    `background:${colour}`);

// turn: which pictures a key leads to; null: it leads nowhere.
/** @param {Picture[]} pictures @param {Way} way @returns {HTMLDialogElement} */
export function openLarge(pictures, way) {
  const view = make("dialog", "margin:auto;padding:12px;border:1px solid var(--border-color);border-radius:8px;" +
    "background:var(--comfy-menu-bg);color:var(--input-text);max-width:95vw;max-height:95vh;outline:none");
  const place = make("div", "display:flex;flex-wrap:wrap;gap:12px;justify-content:center");
  view.className = "atelier-large";
  /** @param {Picture[]} shown */
  const show = (shown) => place.replaceChildren(...shown.map((each) => figure(each, shown.length, view)));
  show(pictures);
  const close = makeButton(t("Close"), t("Close the large view"), () => view.close());
  close.style.marginTop = "8px";
  view.append(place, close);
  view.addEventListener("keydown", (event) => {
    event.stopPropagation(); // no shortcuts of the editor
    const next = way.turn(event);
    if (!next) return;
    const within = place.contains(document.activeElement);
    show(next);
    if (within) close.focus(); // what had the focus is gone
  });
  view.addEventListener("click", (event) => event.target === view && view.close());
  view.addEventListener("close", () => {
    view.remove();
    way.closed();
  });
  document.body.append(view);
  view.showModal();
  close.focus();
  return view;
}

/** @param {Picture} picture @param {number} count of pictures side by side @param {HTMLDialogElement} view */
function figure({ run, file, step, words, colour }, count, view) {
  const made = make("figure", "margin:0;display:flex;flex-direction:column;gap:6px;min-width:0;" +
    `width:min(${90 / count}vw,max(512px,72vh))`);
  const image = imageOf(run, file, words, "display:block;width:100%;max-height:72vh;object-fit:contain");
  const caption = make("figcaption", "font:13px sans-serif;overflow-wrap:anywhere");
  const acts = make("div", "display:flex;flex-wrap:wrap;gap:4px;align-items:center;font:12px sans-serif;" +
    "min-height:26px");
  caption.append(swatch(colour), words);
  made.append(image, caption, acts);
  readRun(run).then((found) => {
    if (found.error === undefined) acts.append(...taken(found, step, count, view));
    else acts.textContent = told(found.error);
  });
  return made;
}

// What can be done with the LoRA that drew a picture, or with the nearest one that is left.
/** @param {Run} run @param {number} step @param {number} count @param {HTMLDialogElement} view */
function taken(run, step, count, view) {
  const lora = nearestSave(run, step, "lora"), start = nearestSave(run, step, "resumes");
  /** @type {HTMLElement[]} */
  const made = [];
  /** @param {string} name @param {string} help @param {() => void} act */
  const add = (name, help, act) => made.push(makeButton(name, help, () => {
    view.close(); // the editor's dialogs open beneath a modal one
    act();
  }));
  if (lora)
    add(lora.step === step ? t("Use this LoRA") : t("Use the LoRA of step {0}", lora.step),
      t("Copy the LoRA of this save into models/loras"), () => useLora(run, lora.step));
  if (start)
    add(start.step === step ? t("Fork") : t("Fork from step {0}", start.step), t("Start a new run from this save"),
      () => fork(run, start.step));
  if (count === 1)
    add(t("Compare"), t("Choose other runs, and see their pictures beside this one's"),
      () => openRuns({ run: run.run, compare: true }));
  const missing = lora && lora.step !== step
    ? t("No LoRA of step {0} is left; the nearest one is of step {1}.", step, lora.step)
    : lora ? "" : t("No LoRA of this run is left.");
  if (missing) made.push(make("span", "flex-basis:100%", missing));
  return made;
}
