import { api } from "../../scripts/api.js";
import { ComfyApp } from "../../scripts/app.js";
import { t } from "./words.js";

// ComfyUI's own mask editor, for a picture that no node of the graph shows. It asks a node for its picture, and gives it
// the painted one; here something with what it needs of a node stands in for one.

const OPEN = 10_000, LOOK = 200; // milliseconds until it is open, and between two looks whether it is still
const EDITOR = "#maskEditorCanvasContainer"; // inside it, in every version

const open = () => document.querySelector(EDITOR) !== null;
const wait = () => new Promise((done) => setTimeout(done, LOOK));

// Let a person paint the mask of a picture; the painted area as PNG in base64, white on black; "" where it is left as it
// was. place: of a copy in ComfyUI's temp folder, whose alpha is what the mask leaves out.
/** @param {{ filename: string, subfolder: string, type: string }} place @returns {Promise<string>} */
export async function paintMask(place) {
  if (typeof ComfyApp?.open_maskeditor !== "function")
    throw new Error(t("This ComfyUI opens its mask editor only for nodes; paint the mask elsewhere."));
  const picture = new Image();
  picture.src = api.apiURL(`/view?${new URLSearchParams(place)}`);
  await picture.decode();
  /** @type {HTMLImageElement | null} */
  let painted = null;
  const node = {
    id: -1, images: [place], imageIndex: 0, previewMediaType: "image", widgets: [], inputs: [], properties: {},
    get imgs() { return [painted ?? picture]; },
    set imgs(given) { painted = given?.[0] ?? painted; },
  };
  const { fetchApi } = api, before = ComfyApp.clipspace_return_node;
  // The editor's layers of the painted picture are of no further use: not into input, but where ComfyUI clears up.
  api.fetchApi = function (route, options) {
    const body = options?.body;
    if (route === "/upload/image" && body instanceof FormData && open()) body.set("type", "temp");
    return fetchApi.call(this, route, options);
  };
  try {
    ComfyApp.clipspace_return_node = node;
    ComfyApp.open_maskeditor();
    for (let left = OPEN; left > 0 && !open(); left -= LOOK) await wait();
    if (!open()) throw new Error(t("ComfyUI's mask editor did not open; reload the page, and try again."));
    while (open()) await wait();
  } finally {
    ComfyApp.clipspace_return_node = before;
    api.fetchApi = fetchApi;
  }
  return painted ? maskOf(painted) : "";
}

// What is transparent in a picture, white on black.
/** @param {HTMLImageElement} painted */
function maskOf(painted) {
  const canvas = document.createElement("canvas");
  canvas.width = painted.naturalWidth;
  canvas.height = painted.naturalHeight;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.drawImage(painted, 0, 0);
  const pixels = context.getImageData(0, 0, canvas.width, canvas.height), { data } = pixels;
  for (let at = 0; at < data.length; at += 4) {
    data[at] = data[at + 1] = data[at + 2] = 255 - data[at + 3];
    data[at + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
  return canvas.toDataURL("image/png").split(",")[1];
}
