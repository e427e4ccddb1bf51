import { beneath, BOTTOM, element, grid, HEIGHT, HELD_OUT, label, LEFT, LETTERS, RIGHT, showPicture, SMOOTH, TOP,
  WIDTH } from "./picture.js";
import { t, told } from "./words.js";

// Noise & Loss shows how often each timestep is trained: 1 = as often as if all were equally frequent.

const DECIDE = /^(timestep_|min_timestep|max_timestep)/;

/** @param {{shares: number[], levels: number, family?: string}} answer */
function draw({ shares, levels, family }) {
  const above = TOP + LETTERS, height = HEIGHT - above - BOTTOM; // whose distribution it is stands above it
  const width = WIDTH - LEFT - RIGHT, wide = width / shares.length;
  const top = Math.max(1, ...shares), y = (/** @type {number} */ share) => above + height * (1 - share / top);
  const parts = grid([0, 1, ...(top > 1.5 ? [top] : [])], y);
  parts.push(...shares.map((share, i) => element("rect", { x: (LEFT + wide * i).toFixed(2), y: y(share).toFixed(2),
    width: Math.max(wide - 1, 0.5).toFixed(2), height: (y(0) - y(share)).toFixed(2), fill: SMOOTH })));
  parts.push(...beneath([t("clean"), String(levels / 2), t("noise")]));
  if (family) parts.push(label(WIDTH - RIGHT, LETTERS, "end", told(family), HELD_OUT));
  return parts;
}

// Whether a Train LoRA that the node is linked to trains a model that ComfyUI has loaded.
/** @param {GraphNode} node */
function isConnected(node) {
  return (node.getOutputNodes(0) ?? []).some((train) => {
    const slot = train.inputs?.findIndex((input) => input.name === "base_model") ?? -1;
    return slot >= 0 && train.getInputNode(slot)?.comfyClass === "AtelierConnectModel";
  });
}

showPicture({
  comfyClass: "AtelierObjective",
  kind: "levels",
  address: "/atelier/levels",
  more: (node) => ({ connected: isConnected(node) }),
  draw,
  unknown: (name) => DECIDE.test(name) && t("{0} is linked, so the timesteps are unknown before the run.", name),
});
