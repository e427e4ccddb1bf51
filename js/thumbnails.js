import { api } from "../../scripts/api.js";

// Small pictures that the server draws: few at once, and none that went out of sight before its turn.

/** @typedef {{ folder: string, picture: string, v: string, as: "small" | "large" | "still" }} Wanted v: begins the content's sha256 */

const AT_ONCE = 6;
let running = 0;
/** @type {[HTMLImageElement, string][]} */
let waiting = [];
const known = new Set(); // addresses that the browser has

/** @param {Wanted} wanted */
export const thumbnail = (wanted) => api.apiURL(`/atelier/pictures/view?${new URLSearchParams(wanted)}`);

// Fill an element of the page with a picture, when it is its turn.
/** @param {HTMLImageElement} image @param {string} source */
export function fill(image, source) {
  if (known.has(source)) image.src = source;
  else if (waiting.push([image, source]) === 1) requestAnimationFrame(next); // by then it has its place
}

function next() {
  waiting = waiting.filter(([image]) => image.isConnected);
  for (const [image, source] of waiting.splice(0, AT_ONCE - running)) {
    running += 1;
    for (const kind of ["load", "error"])
      image.addEventListener(kind, () => {
        running -= 1;
        if (kind === "load") known.add(source);
        next();
      }, { once: true });
    image.src = source;
  }
}
