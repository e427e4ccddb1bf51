import { make } from "./parts.js";

// A grid of very many tiles: only those in sight are in the page. Keys and the pointer choose tiles as in a file manager.

const EDGE = 2; // pixels, for the outline of the first tiles
const NEAR = 2; // rows that are kept beyond the edges
let grids = 0;

/**
 * @typedef {object} Way
 * @property {number} width pixels of a tile, with its gap
 * @property {number} height
 * @property {(index: number) => HTMLElement} draw a tile, which the grid places
 * @property {(index: number) => unknown} of what a place of the grid shows, which may move with a filter
 * @property {() => void} chosen another selection
 * @property {() => void} opened Enter, or a double click
 */

export class Grid {
  #way;
  #count = 0;
  #across = 1;
  #at = 0; // the tile of the keyboard
  #from = 0; // where a range begins
  #queued = false;
  #name = `atelier-grid-${++grids}`;
  /** @type {Map<number, HTMLElement>} */
  #tiles = new Map(); // in the page, by index
  #room = make("div", "position:relative;width:100%");
  /** @type {Set<unknown>} */
  selection = new Set();
  box = make("div", "flex:1;min-width:0;overflow-y:auto;outline:none;position:relative");

  /** @param {Way} way @param {string} label */
  constructor(way, label) {
    this.#way = way;
    this.box.className = "atelier-grid";
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "listbox");
    this.box.setAttribute("aria-label", label);
    this.box.ariaMultiSelectable = "true";
    this.box.append(this.#room);
    this.box.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.box.addEventListener("keydown", (event) => this.#key(event));
    this.box.addEventListener("click", (event) => this.#click(event));
    this.box.addEventListener("dblclick", () => this.#way.opened());
    new ResizeObserver(() => this.#lay()).observe(this.box);
  }

  get at() {
    return this.#at;
  }

  // Show another number of tiles from the top on; the selection stays.
  /** @param {number} count */
  show(count) {
    this.#count = count;
    this.#at = this.#from = Math.min(this.#at, Math.max(0, count - 1));
    this.redraw();
    this.box.scrollTop = 0;
    this.#lay();
  }

  // Draw the tiles anew whose things have changed.
  redraw() {
    for (const tile of this.#tiles.values()) tile.remove();
    this.#tiles.clear();
    this.#lay();
  }

  // Choose one tile and bring it into sight.
  /** @param {number} index */
  go(index) {
    if (!this.#count) return;
    this.#move(Math.max(0, Math.min(index, this.#count - 1)), false);
  }

  all() {
    for (let i = 0; i < this.#count; i++) this.selection.add(this.#way.of(i));
    this.#mark();
    this.#way.chosen();
  }

  /** @param {number} to @param {boolean} range */
  #move(to, range) {
    this.#at = to;
    if (!range) this.#from = to;
    this.selection.clear();
    for (let i = Math.min(this.#from, to); i <= Math.max(this.#from, to); i++) this.selection.add(this.#way.of(i));
    const top = Math.floor(to / this.#across) * this.#way.height, { scrollTop, clientHeight } = this.box;
    if (top < scrollTop) this.box.scrollTop = top;
    else if (top + this.#way.height > scrollTop + clientHeight)
      this.box.scrollTop = top + this.#way.height - clientHeight;
    this.#lay();
    this.#mark();
    this.#way.chosen();
  }

  /** @param {number} index */
  #toggle(index) {
    const thing = this.#way.of(index);
    this.#at = this.#from = index;
    if (!this.selection.delete(thing)) this.selection.add(thing);
    this.#mark();
    this.#way.chosen();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (!this.#count) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.#way.height)) * this.#across;
    const far = this.#count;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.#across, ArrowUp: -this.#across, PageDown: page,
      PageUp: -page, Home: -far, End: far }[event.key];
    if (step !== undefined)
      this.#move(Math.max(0, Math.min(this.#at + step, this.#count - 1)), event.shiftKey);
    else if (event.key === " ") this.#toggle(this.#at);
    else if (event.key === "Enter") this.#way.opened();
    else if (event.key.toLowerCase() === "a" && (event.ctrlKey || event.metaKey)) this.all();
    else return;
    event.preventDefault();
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const tile = /** @type {HTMLElement} */ (event.target).closest("[role=option]");
    const found = [...this.#tiles].find(([, each]) => each === tile);
    if (!found) return;
    if (event.ctrlKey || event.metaKey) this.#toggle(found[0]);
    else this.#move(found[0], event.shiftKey);
  }

  #soon() {
    if (this.#queued) return;
    this.#queued = true;
    requestAnimationFrame(() => {
      this.#queued = false;
      this.#lay();
    });
  }

  #lay() {
    const { width, height, draw } = this.#way, { clientWidth, clientHeight, scrollTop } = this.box;
    const across = Math.max(1, Math.floor(clientWidth / width));
    if (across !== this.#across) {
      this.#across = across;
      for (const [index, tile] of this.#tiles) this.#put(tile, index);
    }
    this.#room.style.height = `${Math.ceil(this.#count / across) * height}px`;
    const first = Math.max(0, (Math.floor(scrollTop / height) - NEAR) * across);
    const last = Math.min(this.#count, (Math.ceil((scrollTop + clientHeight) / height) + NEAR) * across);
    for (const [index, tile] of this.#tiles) {
      if (index >= first && index < last) continue;
      tile.remove();
      this.#tiles.delete(index);
    }
    /** @type {Map<number, HTMLElement>} */
    const made = new Map();
    for (let index = first; index < last; index++) {
      if (this.#tiles.has(index)) continue;
      const tile = draw(index);
      tile.id = `${this.#name}-${index}`;
      tile.setAttribute("role", "option");
      this.#put(tile, index);
      this.#tiles.set(index, tile);
      made.set(index, tile);
    }
    this.#room.append(...made.values());
    this.#mark(made);
  }

  /** @param {HTMLElement} tile @param {number} index */
  #put(tile, index) {
    const { width, height } = this.#way;
    Object.assign(tile.style, { position: "absolute", contain: "strict", left: `${(index % this.#across) * width + EDGE}px`,
      top: `${Math.floor(index / this.#across) * height + EDGE}px` });
  }

  #mark(tiles = this.#tiles) {
    for (const [index, tile] of tiles) {
      const chosen = this.selection.has(this.#way.of(index));
      tile.ariaSelected = String(chosen);
      tile.style.outline = chosen ? "2px solid var(--p-primary-color, #60a5fa)"
        : index === this.#at ? "2px dashed var(--input-text)" : "1px solid var(--border-color)";
    }
    this.box.setAttribute("aria-activedescendant", `${this.#name}-${this.#at}`);
  }
}
