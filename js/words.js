import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The page's texts in the language of the editor. The English text is the key; other languages are in
// locales/<language>/main.json under "atelier". {0}, {1} … stand for values.

const { page = {}, server = {} } = await read();

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
