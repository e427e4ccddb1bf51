import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The page's texts in the language of the editor. The English text is the key; other languages are in
// locales/<language>/main.json under "atelier". {0}, {1} … stand for values.

const { page = {}, server = {} } = await read();
/** @type {[RegExp, string][]} */
const patterns = Object.keys(server) // the longest first, as the most special ones
  .sort((one, other) => other.length - one.length)
  .map((text) => [new RegExp(`^${asPattern(text)}$`, "s"), text]);

/** @returns {Promise<{page?: Record<string, string>, server?: Record<string, string>}>} */
async function read() {
  const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
  if (language === "en") return {};
  try {
    const languages = await (await api.fetchApi("/i18n")).json();
    return languages[language]?.atelier ?? {};
  } catch (problem) {
    console.warn("LoRA Atelier shows English texts:", problem);
    return {};
  }
}

/** @param {string} text */
function asPattern(text) {
  return text.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replace(/\{\d\}/g, "(.+)");
}

/** @param {string} text @param {unknown[]} values */
const fill = (text, values) => text.replace(/\{(\d)\}/g, (place, i) => String(values[i] ?? place));

// A text of the page.
/** @type {(text: string, ...values: unknown[]) => string} */
export const t = (text, ...values) => fill(page[text] ?? text, values);

// A text of the server, whose values are in it already.
/** @param {string} text */
export function told(text) {
  for (const [pattern, key] of patterns) {
    const found = pattern.exec(text);
    if (found) return fill(server[key], found.slice(1));
  }
  return text;
}
