import { api } from "../../scripts/api.js";
import { addressOf, ask, make, makeButton, toast } from "./parts.js";
import { openPopup, placePopup, closePopup } from "./popup.js";
import { t, told } from "./words.js";

// Services outside: who hears of runs, and where a LoRA is published. Tokens go to the server and never come back.

/** @typedef {{ name: string, tells: boolean, on: boolean, kept: boolean, secret: string, project: string | null,
 *   installed: boolean, problem: any }} Service */
/** @typedef {{ error?: any, services: Service[], events: string[], all_events: string[], pictures: boolean,
 *   may_change: boolean }} Outside */

/** @type {Record<string, string>} */
const TITLES = {
  apprise: t("Messages to chats, phones and mail (apprise)"),
  trackio: t("Curves on this machine (trackio)"),
  wandb: t("Curves at Weights & Biases (wandb)"),
  mlflow: t("Curves at mlflow"),
  huggingface_hub: t("Publishing at the Hugging Face Hub"),
};
/** @type {Record<string, string>} */
const SECRETS = { addresses: t("addresses, as discord://…"), token: t("token"), address: t("address of the server") };
/** @type {Record<string, string>} */
const EVENTS = {
  start: t("start"), save: t("each save"), sample: t("samples"), best: t("best validation loss"), error: t("error"),
  end: t("end"),
};
const LICENCES = ["apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc0-1.0", "openrail",
  "creativeml-openrail-m", "other"];
const FIELD = "padding:3px 6px;border-radius:4px;border:1px solid var(--border-color);min-width:0;" +
  "background:var(--comfy-input-bg);color:var(--input-text);font:13px sans-serif";

/** @param {string} name @param {boolean} on @param {(on: boolean) => void} act */
function makeCheck(name, on, act) {
  const label = make("label", "display:flex;gap:6px;align-items:center"), box = make("input");
  Object.assign(box, { type: "checkbox", checked: on });
  box.addEventListener("change", () => act(box.checked));
  label.append(box, name);
  return label;
}

/** @param {string} name @param {string} type */
function makeField(name, type) {
  const field = make("input", FIELD);
  Object.assign(field, { type, placeholder: name, autocomplete: type === "password" ? "new-password" : "off" });
  field.setAttribute("aria-label", name);
  return field;
}

export function showOutward() {
  const box = make("div", "display:flex;flex-direction:column;gap:10px;max-width:460px");
  box.className = "atelier-outward";
  /** @param {Outside} answer */
  const show = (answer) => {
    if (answer.error) return box.replaceChildren(make("div", "", told(answer.error)));
    const rows = answer.services.map((service) => row(service));
    if (!answer.may_change)
      rows.push(make("div", "opacity:0.8", t("Only a page at 127.0.0.1 on ComfyUI's machine may change this.")));
    const fields = make("fieldset", "border:0;padding:0;margin:0;min-width:0;display:contents");
    fields.disabled = !answer.may_change;
    fields.append(...rows, chosen(answer));
    box.replaceChildren(fields);
  };
  /** @param {object} question */
  const change = async (question) => {
    const answer = await ask("/atelier/outward/change", question);
    if (answer.error) toast(answer);
    show(answer.error ? await ask("/atelier/outward") : answer);
  };

  /** @param {Service} service */
  function row({ name, tells, on, kept, secret, project, installed, problem }) {
    const made = make("div", "display:flex;flex-direction:column;gap:4px"), title = TITLES[name] ?? name;
    made.dataset.service = name;
    made.append(tells ? makeCheck(title, on, (wanted) => change({ service: name, on: wanted })) : make("div", "", title));
    if (secret) {
      const line = make("div", "display:flex;gap:6px"), field = makeField(SECRETS[secret] ?? secret, "password");
      field.style.flex = "1";
      if (kept) field.placeholder = t("kept; write another one to replace it");
      field.addEventListener("change", () => field.value && change({ service: name, secret: field.value.trim() }));
      line.append(field);
      if (kept) line.append(makeButton(t("Forget"), "", () => change({ service: name, secret: "" })));
      if (kept && name === "apprise")
        line.append(makeButton(t("Try"), t("Deliver a message now"), async () => toast(await ask("/atelier/outward/try", {}))));
      made.append(line);
    }
    if (project !== null) {
      const field = makeField(t("project"), "text");
      field.value = project;
      field.addEventListener("change", () => change({ service: name, project: field.value.trim() }));
      made.append(field);
    }
    if (!installed) made.append(make("div", "opacity:0.8", t("The package {0} is not installed.", name)));
    if (problem) made.append(make("div", "overflow-wrap:anywhere;opacity:0.8", told(problem)));
    return made;
  }

  /** @param {Outside} answer */
  function chosen({ events, all_events: all, pictures }) {
    const made = make("div", "display:flex;flex-direction:column;gap:4px");
    made.append(make("div", "", t("Messages tell of")));
    for (const event of all) {
      made.append(makeCheck(EVENTS[event] ?? event, events.includes(event), (wanted) =>
        change({ events: wanted ? [...events, event] : events.filter((each) => each !== event) })));
    }
    made.append(makeCheck(t("Samples go along as pictures"), pictures, (wanted) => change({ pictures: wanted })));
    return made;
  }

  ask("/atelier/outward").then(show);
  return box;
}

// --- publishing ------------------------------------------------------------------------------------------

// Ask for the repository, the licence and who may see it, then publish the LoRA of a save.
/** @param {{ run: string, name: string | null }} run @param {number} step @param {HTMLElement} opener */
export function publish(run, step, opener) {
  const box = openPopup(t("Publish this LoRA"), opener), list = make("datalist");
  const repository = makeField(t("repository, as you/name"), "text"), licence = makeField(t("licence"), "text");
  const how = { public: false, samples: true };
  list.id = "atelier-licences";
  list.append(...LICENCES.map((name) => Object.assign(make("option"), { value: name })));
  licence.setAttribute("list", list.id);
  const go = makeButton(t("Publish"), "", async () => {
    const question = { run: run.run, step, repository: repository.value.trim(), licence: licence.value.trim(), ...how };
    if (!question.repository || !question.licence)
      return toast({ error: t("Write a repository and a licence; both are yours to choose.") });
    const answer = await ask("/atelier/runs/hub", question);
    toast(answer);
    if (!answer.error) closePopup();
  });
  box.append(
    make("div", "", t("The LoRA, its settings and a card go to the Hugging Face Hub, in your name.")),
    repository, licence, list,
    makeCheck(t("for all to see"), how.public, (on) => Object.assign(how, { public: on })),
    makeCheck(t("with its samples"), how.samples, (on) => Object.assign(how, { samples: on })),
    go,
  );
  placePopup(box, opener);
  repository.focus();
}

// What publishing a run came to, or that it goes on; null if nobody tried.
/** @param {string} run @returns {Promise<HTMLElement | null>} */
export async function publishedOf(run) {
  const { busy, said, error } = await ask(`${addressOf(run)}/published`);
  const text = busy ? t("It is being published.") : told(said ?? error ?? "");
  return text ? make("div", "overflow-wrap:anywhere", text) : null;
}

api.addEventListener("atelier.published", ({ detail }) => toast(/** @type {any} */ (detail)));
