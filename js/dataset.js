import { app } from "../../scripts/app.js";
import { chosenModels, openDataset, planned } from "./dataset_page.js";
import { pick, takeIn } from "./intake.js";
import { FONT, ON_NODE, RED, ask, isLinked, make, makeButton, onceRead, takePlace, toast,
  withoutHoles } from "./parts.js";
import { closePopup, openPopup, placePopup } from "./popup.js";
import { t, told } from "./words.js";

// Concept Dataset shows before a run what it would read: how many pictures the folder has, and how many of them lack a
// caption, or the sentence with which the run would refuse it. A list of ComfyUI's folders fills in the name.

const INTERVAL = 300; // milliseconds between two looks at whether something was changed
const MARGIN = 10; // pixels; a canvas node takes the margin off the height on every side
const HEIGHT = 66; // pixels: buttons and two lines. A height that follows the text would be a step of its own to undo
const SETTINGS = ["caption_settings", "picture_settings"]; // inputs whose nodes decide what is counted
/** @type {WeakMap<GraphNode, Look>} */
const looks = new WeakMap();

class Look {
  #node;
  #asked = ""; // what was asked last
  #waiting = ""; // what will be asked, if it stays so until the next look
  #said = make("span", "user-select:text");
  box = make("div", "overflow:auto;overflow-wrap:anywhere;width:100%;height:100%;box-sizing:border-box;" +
    `min-height:${HEIGHT}px;max-height:${HEIGHT}px;${ON_NODE};${FONT};color:var(--input-text)`);
  #choose = makeButton(t("Choose…"), t("List the folders of ComfyUI's input and datasets."), () => this.#offer());

  #open = makeButton(t("Open…"), t("Look at the pictures as they are trained, and write their captions."), () =>
    openDataset(this.#node, () => this.forget()).catch((problem) => toast({ error: problem.message })));

  /** @param {GraphNode} node */
  constructor(node) {
    this.#node = node;
    this.box.className = "atelier-look";
    this.#said.setAttribute("role", "status");
    this.#said.addEventListener("pointerdown", (event) => event.stopPropagation()); // text can be marked
    const row = make("div", "display:flex;gap:4px");
    for (const button of [this.#choose, this.#open]) button.style.flex = "1";
    row.append(this.#choose, this.#open);
    this.box.append(row, this.#said);
    onceRead(() => this.#addWidget());
  }

  #addWidget() {
    const node = this.#node;
    const [getMinHeight, getMaxHeight] = [() => HEIGHT + 2 * MARGIN, () => HEIGHT + 2 * MARGIN];
    const options = { serialize: false, hideOnZoom: false, margin: MARGIN, getMinHeight, getMaxHeight };
    node.addDOMWidget("look", "atelier_look", this.box, options).serialize = false;
    const { widgets } = node, folder = widgets.findIndex((each) => each.name === "folder");
    widgets.splice(folder + 1, 0, ...widgets.splice(-1)); // beneath the folder
    withoutHoles(node);
    const [width, height] = node.size;
    node.setSize([width, Math.max(height, node.computeSize()[1])]);
  }

  // Ask again even where no setting was changed: files may have come and gone.
  forget() {
    this.#asked = "";
  }

  refresh() {
    takePlace(this.#node, this.box);
    const question = JSON.stringify({ ...questionOf(this.#node), models: chosenModels() });
    if (question === this.#asked) return;
    if (question !== this.#waiting) this.#waiting = question; // somebody is typing
    else this.#ask(question);
  }

  /** @param {string} question */
  async #ask(question) {
    this.#asked = question;
    if (isLinked(this.#node, "folder")) return this.#say(t("The folder is linked, so it is unknown before the run."));
    if (!String(valueIn(this.#node, "folder")).trim()) return this.#say(t("Choose a folder of pictures."));
    const trained = await planned(this.#node);
    const answer = await ask("/atelier/folders/look", { ...questionOf(this.#node), trained });
    if (question !== this.#asked) return; // something newer is being asked
    if (answer.error) this.#say(told(answer.error), RED);
    else if (answer.more)
      this.#say(t("More than {0} files. They are counted when it runs.", answer.more.toLocaleString()));
    else this.#say(counted(answer));
  }

  /** @param {string} words @param {string} [colour] */
  #say(words, colour = "") {
    this.#said.textContent = this.#said.title = words;
    this.#said.style.color = colour;
  }

  async #offer() {
    const answer = await ask("/atelier/folders/datasets");
    if (answer.error) return toast(answer);
    const popup = openPopup(t("Folders of pictures"), this.#choose);
    /** @type {{ folders: string[], example: string }} */
    const { folders, example } = answer;
    const rows = [...folders.map((name) => [name, name]), [example, t("Example pictures of LoRA Atelier")]];
    for (const [value, name] of rows) {
      const row = makeButton(name, value, () => {
        closePopup();
        this.#take(value);
      });
      row.style.cssText += ";text-align:left;white-space:normal;overflow-wrap:anywhere;padding:6px 10px;font-size:13px";
      popup.append(row);
    }
    for (const folder of [false, true]) {
      const name = folder ? t("Send a folder of this computer…") : t("Send pictures or a zip of this computer…");
      popup.append(makeButton(name, t("They go into a new folder of ComfyUI's input."), () => {
        closePopup();
        pick(folder, (files) => takeIn(this.#node, files));
      }));
    }
    popup.append(make("div", "font:12px/16px sans-serif", folders.length
      ? t("Any other folder: type its full path.")
      : t("No folder in input or datasets has pictures yet. Send one, drop it on the node, or type a full path.")));
    placePopup(popup, this.#choose);
    popup.querySelector("button")?.focus();
  }

  /** @param {string} folder */
  #take(folder) {
    const widget = this.#node.widgets.find((each) => each.name === "folder");
    if (!widget || isLinked(this.#node, "folder")) return;
    app.canvas.emitBeforeChange();
    widget.value = folder;
    widget.callback?.(folder);
    app.canvas.emitAfterChange();
    this.#node.setDirtyCanvas(true, true);
  }
}

/** @param {{ pictures: number, films: number, uncaptioned: number, left_out: boolean }} answer */
function counted({ pictures, films, uncaptioned, left_out }) {
  const some = pictures === 1 ? t("1 picture") : t("{0} pictures", pictures.toLocaleString());
  const moving = films === 1 ? t("1 film") : t("{0} films", films.toLocaleString());
  const trained = !films || left_out ? some : pictures ? t("{0} and {1}", some, moving) : moving;
  const told = uncaptioned ? t("{0}, {1} without caption", trained, uncaptioned.toLocaleString()) : trained;
  return films && left_out ? t("{0}. Left out: {1}, as the model takes pictures alone.", told, moving) : told;
}

/** @param {GraphNode} node @param {string} name */
const valueIn = (node, name) => node.widgets.find((each) => each.name === name)?.value;

// The node as a prompt has it, with the nodes that set its captions and pictures; what is linked is left out.
/** @param {GraphNode} node */
function questionOf(node) {
  /** @type {Record<string, unknown>} */
  const prompt = {}, links = /** @type {Record<string, unknown>} */ ({});
  for (const name of SETTINGS) {
    const slot = node.inputs?.findIndex((input) => input.name === name) ?? -1;
    const other = slot >= 0 ? node.getInputNode(slot) : null;
    if (!other?.comfyClass) continue;
    prompt[String(other.id)] = { class_type: other.comfyClass, inputs: inputsOf(other) };
    links[name] = [String(other.id), 0];
  }
  prompt[String(node.id)] = { class_type: node.comfyClass, inputs: { ...inputsOf(node), ...links } };
  return { prompt, node: String(node.id) };
}

/** @param {GraphNode} node */
const inputsOf = (node) => Object.fromEntries(node.widgets.filter((each) => each.serialize !== false &&
  !isLinked(node, each.name)).map((each) => [each.name, each.value]));

app.registerExtension({
  name: "atelier.dataset",
  nodeCreated(node) {
    if (node.comfyClass === "AtelierConceptDataset") looks.set(node, new Look(node));
  },
  setup() {
    // Widgets come and go with choices, links and other nodes' widgets in two renderers with different events: looking
    // is simpler than listening, and costs nothing when nothing changed.
    const shown = () => (app.canvas?.graph?.nodes ?? []).map((node) => looks.get(node));
    setInterval(() => {
      if (!document.hidden) for (const look of shown()) look?.refresh();
    }, INTERVAL);
    window.addEventListener("focus", () => {
      for (const look of shown()) look?.forget();
    });
  },
});
