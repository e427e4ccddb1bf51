import { api } from "../../scripts/api.js";
import { addressOf, ask, makeButton, toast } from "./parts.js";
import { titleOf } from "./saves.js";
import { openRuns } from "./tab.js";
import { t, told } from "./words.js";

// A notice of the browser when a run ends, for who asked for it. The browser asks for leave when the button is pressed
// for the first time, never by itself; the wish is remembered in this browser, and is for every run from then on.

const REMEMBERED = "Atelier.Notice"; // in the browser's storage
const OFTEN = 5000; // milliseconds between two looks at the runs at work: one of a shell sends no events
/** @type {Set<HTMLButtonElement>} */
const buttons = new Set();
/** @type {Map<string, string>} */
const atWork = new Map(); // runs whose end is told, and how people call them

// A page without https, of another machine, has none.
const canTell = () => "Notification" in window && window.isSecureContext;
const wanted = () => canTell() && Notification.permission === "granted" && localStorage.getItem(REMEMBERED) === "on";

function draw() {
  for (const button of buttons) button.setAttribute("aria-pressed", String(wanted()));
  for (const button of buttons) button.textContent = `${wanted() ? "✓ " : ""}${t("Tell me when it ends")}`;
}

async function turn() {
  if (wanted()) localStorage.setItem(REMEMBERED, "off");
  else if ((await Notification.requestPermission()) === "granted") {
    await look((run) => atWork.delete(run)); // what ended before the wish is not told
    localStorage.setItem(REMEMBERED, "on");
  } else
    toast({ error: t("The browser does not allow notices of this page. Allow them in its settings for this site.") });
  draw();
}

// The button that asks for it, and ends it; null where the browser has no notices for this page.
/** @returns {HTMLButtonElement | null} */
export function noticeButton() {
  if (!canTell()) return null;
  const help = t("A notice of the browser when a run ends, also of later runs. Press again to end it.");
  const made = makeButton("", help, turn);
  for (const old of buttons) if (!old.isConnected) buttons.delete(old);
  buttons.add(made);
  draw();
  return made;
}

// A run that is at work, as somebody saw: its end is told.
/** @param {string} run @param {string | null} title */
export function watch(run, title) {
  atWork.set(run, title || run);
}

/** @param {string} name */
async function end(name) {
  const called = atWork.get(name);
  if (called === undefined) return;
  /** @type {Run | Failure} */
  const run = await ask(addressOf(name));
  if (run.unanswered) return; // the next look asks again
  if (!atWork.delete(name) || !wanted()) return;
  const gone = run.error !== undefined;
  const notice = new Notification(gone ? `${called}` : titleOf(run), {
    body: gone ? t("It ended, and kept nothing.") : String(told(run.sentence)),
    tag: `atelier ${name}`, // the same of another tab takes its place
    ...(!gone && run.thumbnail && { icon: api.apiURL(`${addressOf(name)}/thumbnail`) }),
  });
  notice.onclick = () => {
    window.focus();
    notice.close();
    if (!gone) openRuns({ run: name });
  };
}

api.addEventListener("atelier.run", ({ detail }) => {
  if (!detail.run) return;
  if (detail.alive) watch(detail.run, detail.name);
  else end(detail.run);
});

/** @param {(run: string) => void} ended what to do with a run that is no longer at work */
async function look(ended) {
  for (const run of [...atWork.keys()]) {
    const { alive, error, unanswered } = await ask(`${addressOf(run)}/live`);
    if (!unanswered && (error || alive === false)) ended(run);
  }
}

setInterval(() => wanted() && look(end), OFTEN);
