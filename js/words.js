import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The page's texts in the language of the editor. The English text is the key; other languages are in
// locales/<language>/main.json under "atelier". {0}, {1} … stand for values.

const known = await read();

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

const fill = (text, values) => text.replace(/\{(\d)\}/g, (place, i) => values[i] ?? place);

// A text of the page.
export const t = (text, ...values) => fill(known.page?.[text] ?? text, values);

// What the server says: a plain text, or {text, key, values}, whose template other languages know by its key.
export function told(said) {
  if (typeof said !== "object" || said === null) return said;
  const { text, key, values } = said, template = known.server?.[key];
  return template ? fill(template, values.map(told)) : text;
}
