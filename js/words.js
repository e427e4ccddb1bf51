import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

// The page's texts in the language of the editor. The English text is the key; other languages are in
// locales/<language>/main.json under "atelier". {0}, {1} … stand for values, in any order.

const NUMBER = /\d+(?:\.\d+)?/g;
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

export const t = (text, ...values) => fill(known[text] ?? text, values);

// A text of the server, whose numbers stand for themselves: "step 3 of 20" is looked up as "step {0} of {1}".
export function told(text) {
  const numbers = text.match(NUMBER) ?? [];
  let count = 0;
  const key = text.replace(NUMBER, () => `{${count++}}`);
  return key in known ? fill(known[key], numbers) : text;
}
