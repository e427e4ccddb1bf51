import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The page's texts in the language of the editor. The English text is the key; other languages are in
// locales/<language>/main.json under "atelier". {0}, {1} … stand for values.

/** @typedef {{ display_name?: string, inputs?: Record<string, { name?: string, tooltip?: string }> }} NodeWords */

const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
const { atelier: { page = {}, server = {} } = {}, nodeDefs = {} } = await read();

/**
 * @returns {Promise<{
 *   atelier?: { page?: Record<string, string>, server?: Record<string, string> },
 *   nodeDefs?: Record<string, NodeWords>,
 * }>}
 */
async function read() {
  if (language === "en") return {};
  try {
    const languages = await (await api.fetchApi("/i18n")).json();
    return languages[language] ?? {};
  } catch (problem) {
    console.warn("LoRA Atelier shows English texts:", problem);
    return {};
  }
}

/** @param {string} text @param {unknown[]} values */
const fill = (text, values) => text.replace(/\{(\d)\}/g, (place, i) => String(values[i] ?? place));

// A text of the page.
/** @type {(text: string, ...values: unknown[]) => string} */
export const t = (text, ...values) => fill(page[text] ?? text, values);

// What the server says: a plain text, or {text, key, values}, whose template other languages know by its key.
/** @param {any} said @returns {any} */
export function told(said) {
  if (typeof said !== "object" || said === null) return said;
  const template = server[said.key];
  return template ? fill(template, said.values.map(told)) : said.text;
}

// The words that a node shows: its title, and the name and the tooltip of an input, `on_existing.run`.
/** @param {string} node its id @param {string} title in English */
export const nodeTitle = (node, title) => (nodeDefs[node]?.display_name ?? title).replace(/ \(Atelier\)$/, "");
/** @param {string} node @param {string} input @param {string} words the English tooltip */
export function inputWords(node, input, words) {
  const known = nodeDefs[node]?.inputs?.[input.replaceAll(".", "_")];
  return { name: known?.name ?? input.split(".").at(-1) ?? input, tooltip: known?.tooltip ?? words };
}

// --- numbers and times, as the reader writes them -----------------------------------------------------------

// The reader's own kind of the editor's language: en-GB where the editor speaks en.
const near = navigator.languages?.find((each) => each.split("-")[0] === language.split("-")[0]);
const LOCALE = near ?? language;

/** @param {number} seconds since 1970 @param {Intl.DateTimeFormatOptions} [time] */
export const day = (seconds, time = { timeStyle: "short" }) =>
  new Date(1000 * seconds).toLocaleString(LOCALE, { dateStyle: "medium", ...time });

/** @param {number} count */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  for (; count >= 1000 && unit < 3; unit++) count /= 1000;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

// 0:25, 12:05 or 3:00:10.
/** @param {number} seconds */
export function clock(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  /** @param {number} part */
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}
