"""Time the encoding of clips against ComfyUI's own nodes, on a causal VAE of random weights (`dev.py bench --clips`).

Both sides read the same files, in turn, in one process: *Load Video* and *VAE Encode*, and this pack's encoding into
its cache. The files have the size and the frames that are trained, so neither side resizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from lora_atelier.bench.report import build_ratio, ratios_head, verdict

ROW = "wan21_t2v"
SIZES = {  # width of the VAE, side in pixels, frames, clips, turns; Wan's own VAE is 96 wide
    "toy": (8, 64, 9, 2, 1),
    "middle": (16, 64, 17, 4, 4),
}
ENCODE_GOAL = 1.15  # ours over ComfyUI's own


def measure(size: str) -> dict[str, Any]:
    """Encode the clips by both sides in turn; return seconds of each per clip, the first turn left out.

    apart: the largest relative difference of a clip's latents.
    """
    import comfy.ldm.wan.vae
    import comfy.sd
    import torch
    from comfy_api.latest._input_impl import VideoFromFile
    from zoo.linked import DrawnClip
    from zoo.zoo import build, fill

    from lora_atelier.bench.measure import describe_machine
    from lora_atelier.nodes.comfyui.connected.live import LinkedModels
    from lora_atelier.nodes.comfyui.connected.model import ConnectedModel
    from lora_atelier.trainer_core.common.callbacks import Callbacks
    from lora_atelier.trainer_core.config import (
        BaseModelConfig,
        ClipConfig,
        ConceptConfig,
        ConnectedConfig,
        DatasetConfig,
        Defaults,
        TrainConfig,
        fill_dataset,
    )
    from lora_atelier.trainer_core.data.cache import Cache
    from lora_atelier.trainer_core.data.plan import build_plan
    from lora_atelier.trainer_core.data.scan import scan
    from lora_atelier.trainer_core.training.encode import encode_plan

    cpu, (width, side, frames, count, turns) = torch.device("cpu"), SIZES[size]
    own = comfy.ldm.wan.vae.WanVAE(dim=width, z_dim=16, temperal_downsample=[False, True, True])
    fill(own, 0)
    vae = comfy.sd.VAE(sd=own.state_dict(), device=cpu, dtype=torch.float32)
    model = ConnectedModel(
        BaseModelConfig(path=ROW, connected=ConnectedConfig()), LinkedModels(build(ROW)[1], DrawnClip(ROW), vae)
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="atelier-bench-") as name:
        folder = Path(name)
        files = write_clips(folder / "clips", side, frames, count)
        concept = ConceptConfig(folder=str(folder / "clips"), clips=ClipConfig(frames=(frames,), rate=0.0))
        dataset = fill_dataset(DatasetConfig(concepts=(concept,)), Defaults(clip_step=4, clip_rate=16.0))
        plan = build_plan(scan(dataset), dataset, TrainConfig(epochs=1, resolution=side))
        for turn in range(turns + 1):
            began = time.perf_counter()
            with torch.inference_mode():
                theirs = [vae.encode(VideoFromFile(str(file)).get_components().images) for file in files]
            stock = time.perf_counter() - began
            began = time.perf_counter()
            with Cache(folder / f"cache-{turn}") as cache:
                encoded = encode_plan(model, plan, cache, cpu, Callbacks(), prompts=None)
                ours = time.perf_counter() - began
                held = {view.picture: cache.get(key)["mean"] for view, key in encoded.latent_keys.items()}
            rows.append({"stock": stock / count, "ours": ours / count})
        scaled = [model.wired.model.model.process_latent_in(each)[0] for each in theirs]
        apart = max(float((held[number] - each).norm() / each.norm()) for number, each in enumerate(scaled))
    about = {"width": width, "side": side, "frames": frames, "clips": count}
    return {"rows": rows[1:], "apart": apart, "about": about, "machine": describe_machine(cpu)}


def write_clips(folder: Path, side: int, frames: int, count: int) -> list[Path]:
    """Write clips of coloured noise that moves by two pixels a frame, each with a caption."""
    import numpy as np
    from films import film

    folder.mkdir(parents=True)
    files = [folder / f"{number}.mp4" for number in range(count)]
    for number, file in enumerate(files):
        drawn = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        noise = drawn.repeat(8, 0).repeat(8, 1)
        content = film(
            frames,
            rate=16,
            size=(side, side),
            draw=lambda at, noise=noise: np.ascontiguousarray(np.roll(noise, 2 * at, 1)),
        )
        file.write_bytes(content)
        file.with_suffix(".txt").write_text("a thing that moves", encoding="utf-8")
    return files


def render(encoding: dict[str, Any], race: list[str], command: str, stamp: str) -> str:
    """Write the page's block: the encoding, and the lines of the race of steps."""
    about, machine = encoding["about"], encoding["machine"]
    seconds = {name: [row[name] for row in encoding["rows"]] for name in ("stock", "ours")}
    ratio = build_ratio(
        "seconds per clip, ours / ComfyUI's Load Video and VAE Encode",
        [row["ours"] / row["stock"] for row in encoding["rows"]],
        most=ENCODE_GOAL,
    )
    lines = [
        "### Clips against ComfyUI's own nodes, CPU",
        "",
        f"Random weights, float32, batch 1, rank 8 on every layer. {stamp}, {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}. "
        f"Load average before the start {machine['load']}. "
        f"Command: `{command}`.",
        "",
        f"**Encoding**, {about['clips']} clips of {about['frames']} frames, {about['side']} px, by a VAE of Wan 2.1's "
        f"kind, {about['width']} wide (Wan's own is 96). Both sides decode the files; ours also writes its cache. "
        f"Latents differ by {encoding['apart']:.1%} at most: ours come from pixels of 8 bits.",
        "",
        *ratios_head(),
        verdict(build_ratio("seconds per clip: ComfyUI's nodes", seconds["stock"]), False),
        verdict(build_ratio("seconds per clip: LoRA Atelier", seconds["ours"]), False),
        verdict(ratio, True),
        "",
        *race,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the encoding and write JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from lora_atelier.bench.connected_sides import comfy_first

    comfy_first()
    import zoo.zoo  # noqa: F401  # ComfyUI, on the CPU

    options.out.write_text(json.dumps(measure(options.size)))


if __name__ == "__main__":
    main()
