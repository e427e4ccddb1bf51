import { make } from "./parts.js";

// A small dialog beside a button: on the page, so that it is read at any zoom of the canvas, in both renderers.

const EDGE = 8; // pixels to the edges of the page
const BOX = "position:fixed;z-index:2000;width:300px;max-height:70vh;overflow:auto;box-sizing:border-box;padding:12px;" +
  "display:flex;flex-direction:column;gap:10px;border-radius:8px;border:1px solid var(--border-color);" +
  "background:var(--comfy-menu-bg);color:var(--input-text);font:13px sans-serif;box-shadow:0 4px 16px rgba(0,0,0,0.5)";
/** @type {(() => void) | null} */
let close = null; // of the one that is open

// Open a dialog; a click elsewhere or Escape closes it.
/** @param {string} title @param {HTMLElement} opener gets the focus back */
export function openPopup(title, opener) {
  close?.();
  const box = make("div", BOX);
  box.className = "atelier-popup";
  box.setAttribute("role", "dialog");
  box.setAttribute("aria-label", title);
  box.append(make("div", "font:600 14px sans-serif", title));
  /** @param {Event} event */
  const away = (event) => box.contains(/** @type {Node} */ (event.target)) || close?.();
  close = () => {
    box.remove();
    document.removeEventListener("pointerdown", away, true);
    close = null;
  };
  for (const kind of ["pointerdown", "keydown", "keyup", "wheel", "paste", "copy"])
    box.addEventListener(kind, (event) => event.stopPropagation()); // the canvas has keys and a wheel of its own
  box.addEventListener("keydown", ({ key }) => {
    if (key !== "Escape") return;
    close?.();
    opener.focus();
  });
  document.addEventListener("pointerdown", away, true);
  document.body.append(box);
  return box;
}

// Put the dialog beside its button, all of it on the page; in its middle where the button is not on screen.
/** @param {HTMLElement} box @param {HTMLElement} opener */
export function placePopup(box, opener) {
  const at = opener.getBoundingClientRect(), { innerWidth: wide, innerHeight: high } = window;
  const seen = at.width > 0 && at.right > 0 && at.left < wide && at.bottom > 0 && at.top < high;
  const [x, y] = seen ? [at.left, at.bottom + 4] : [(wide - box.offsetWidth) / 2, (high - box.offsetHeight) / 2];
  box.style.left = `${Math.max(EDGE, Math.min(x, wide - box.offsetWidth - EDGE))}px`;
  box.style.top = `${Math.max(EDGE, Math.min(y, high - box.offsetHeight - EDGE))}px`;
}

export const closePopup = () => close?.();

const SELECT = "width:100%;padding:4px;border-radius:4px;border:1px solid var(--border-color);" +
  "background:var(--comfy-input-bg);color:var(--input-text);font:13px sans-serif";

// A list to choose from, with its name above.
/** @param {string} name @returns {[HTMLLabelElement, HTMLSelectElement]} */
export function makeChooser(name) {
  const line = make("label", "display:flex;flex-direction:column;gap:3px", name), list = make("select", SELECT);
  line.append(list);
  return [line, list];
}

/** @param {string} value @param {string} name */
export function makeChoice(value, name) {
  const made = make("option", "background:var(--comfy-input-bg);color:var(--input-text)", name);
  made.value = value;
  return made;
}
