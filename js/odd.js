import { openDataset } from "./dataset_page.js";
import { FONT, make, nodes, toast } from "./parts.js";
import { thumbnail } from "./thumbnails.js";
import { t } from "./words.js";

// The pictures that stood out in a run, small: each leads to its caption in the view of its dataset.

const SIDE = 64; // pixels

// The Concept Datasets of the open workflow whose folder has a name: a run's folder keeps no more of it.
/** @param {string} name */
function datasetsOf(name) {
  const known = [...nodes()].filter(({ node }) => node.comfyClass === "AtelierConceptDataset");
  return known.map(({ node }) => node).filter((node) => folderOf(node).split(/[\\/]/).pop() === name);
}

/** @param {GraphNode} node */
const folderOf = (node) => String(node.widgets.find((each) => each.name === "folder")?.value ?? "").trim()
  .replace(/[\\/]+$/, "");

/** @param {OddPicture} picture */
function open({ name, folder }) {
  const [node, other] = datasetsOf(folder);
  if (other) return toast({ error: t("Several Concept Datasets have a folder {0}. Press Open… at the right one.", folder) });
  if (node) return openDataset(node, () => {}, name).catch((problem) => toast({ error: problem.message }));
  toast({ error: t("No Concept Dataset here has the folder {0}. Open the workflow of this run first.", folder) });
}

/** @param {OddPicture[]} odd @returns {HTMLElement} */
export function oddPictures(odd) {
  const box = make("div", "display:flex;flex-wrap:wrap;gap:4px");
  box.className = "atelier-odd";
  for (const picture of odd) {
    const { name, folder, sha256 } = picture, button = make("button", "padding:2px;cursor:pointer;border-radius:4px;" +
      "border:1px solid var(--border-color);background:var(--comfy-input-bg)");
    const image = make("img", `display:block;width:${SIDE}px;height:${SIDE}px;object-fit:contain;${FONT};` +
      "color:var(--input-text)"), [node, other] = datasetsOf(folder);
    Object.assign(button, { type: "button", title: t("{0} stood out. Look at it, and write another caption.", name) });
    button.ariaLabel = button.title;
    image.alt = name;
    button.append(image);
    button.addEventListener("pointerdown", (event) => event.stopPropagation()); // no drag of the node
    button.addEventListener("click", () => open(picture));
    image.loading = "lazy"; // they are few, and the node may be in a subgraph that is not open
    const wanted = { folder: node ? folderOf(node) : folder, picture: name, v: sha256.slice(0, 16) };
    if (!other) image.src = thumbnail({ ...wanted, as: "small" });
    box.append(button);
  }
  return box;
}
