"""Train a LoRA on clips that hop, and score clips before and after (for `dev.py demo --clip`).

python tests/clip_demo.py FOLDER [--steps N]

FOLDER gets the clips to learn, the LoRA, and each prompt's clip before and after, side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

import lora_atelier

sys.path.append(str(Path(lora_atelier.__path__[0]) / "assets"))
import from_comfyui
import moving
import torch

from lora_atelier.nodes.comfyui.connected.live import LinkedModels
from lora_atelier.nodes.comfyui.connected.model import ConnectedSource
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ClipConfig,
    ConceptConfig,
    ConnectedConfig,
    DatasetConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.train import train_lora

MODEL = from_comfyui.ASSETS / "atelier-tiny-clip.safetensors"
STEPS, CLIPS, SEED = 600, 24, 7  # of the training, the clips to learn, and what they show
DRAWN = {"steps": 12, "cfg": 3.0}
RATE = 8  # frames per second of the files
GROUNDS = (("red", "blue"), ("green", "white"), ("yellow", "purple"), ("orange", "gray"))  # figure, background
HOPS = tuple(f"a {colour} creature on a {ground} background {moving.HOPS}" for colour, ground in GROUNDS)


def write_hops(folder: Path, count: int) -> None:
    """Write clips of figures that hop, animated and lossless, each with its caption in a text file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        frames, caption = moving.hop(SEED, number)
        save(frames, folder / f"hop_{number:02}.webp")
        (folder / f"hop_{number:02}.txt").write_text(caption, encoding="utf-8")


def save(frames: np.ndarray, path: Path) -> None:
    """Write frames (T, H, W, 3) uint8 as an animated webp without loss."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=1000 // RATE, loop=0, lossless=True)


def draw(loaded: from_comfyui.Loaded, model, prompts: tuple[str, ...]) -> np.ndarray:
    """Draw a clip per prompt as KSampler does, (N, T, H, W, 3) uint8; clip n has the seed n."""
    clips, shape = [], (1, 16, 1 + (moving.FRAMES - 1) // 4, moving.SIZE // 8, moving.SIZE // 8)
    with torch.inference_mode():
        negative = loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(""))
        for seed, prompt in enumerate(prompts):
            positive = loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(prompt))
            empty = torch.zeros(shape)
            noise = from_comfyui.comfy.sample.prepare_noise(empty, seed)
            latent = from_comfyui.comfy.sample.sample(
                model, noise, DRAWN["steps"], DRAWN["cfg"], "euler", "simple", positive, negative, empty,
                disable_pbar=True, seed=seed,
            )  # fmt: skip
            clips.append(loaded.vae.decode(latent)[0])
    return (torch.stack(clips).clamp(0, 1).numpy() * 255).round().astype(np.uint8)


def describe_run(folder: Path, steps: int) -> RunConfig:
    """Describe the run that learns the clips of a folder."""
    clips = ClipConfig(frames=(moving.FRAMES,), rate=0.0)
    return RunConfig(
        base_model=BaseModelConfig(path=MODEL.stem, connected=ConnectedConfig()),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder=str(folder), clips=clips),)),
        lora=LoraConfig(rank=16, alpha=16, preset="full"),
        optimizer=OptimizerConfig(learning_rate=4e-3),
        scheduler=SchedulerConfig(name="cosine", warmup_steps=5),
        train=TrainConfig(steps=steps, batch_size=4, resolution=moving.SIZE, bucket_step=32),
    )


def learn(loaded: from_comfyui.Loaded, folder: Path, steps: int, count: int = CLIPS):
    """Train a LoRA on so many hopping clips in a folder; return the model with it, as Load LoRA gives it."""
    write_hops(folder / "clips", count)
    config = describe_run(folder / "clips", steps)
    source = ConnectedSource(config.base_model, LinkedModels(loaded.model, loaded.clip, loaded.vae))
    result = train_lora(config, folder / "hops.safetensors", folder / "cache", source=source)
    weights = from_comfyui.comfy.utils.load_torch_file(str(result.path))
    return from_comfyui.comfy.sd.load_lora_for_models(loaded.model, None, weights, 1.0, 0.0)[0]


def scores(clips: np.ndarray) -> list[float]:
    """Return the hop of each clip, as a fraction of its side."""
    return [round(moving.hop_score(frames), 3) for frames in clips]


def main() -> int:
    """Draw, train, draw again, and print the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    loaded = from_comfyui.load(MODEL)
    before = draw(loaded, loaded.model, HOPS)
    print(f"Before: the figures rise and fall by {scores(before)} of the side.", flush=True)
    began = time.monotonic()
    model = learn(loaded, options.folder, options.steps)
    print(f"Trained {options.steps} steps in {time.monotonic() - began:.0f} s.", flush=True)
    after = draw(loaded, model, HOPS)
    least, most = moving.HEIGHT
    print(f"After: {scores(after)}. The clips to learn hop by about {least} to {most}.")
    for prompt, pair in zip(HOPS, np.concatenate([before, after], axis=3), strict=True):
        path = options.folder / f"{prompt.replace(' ', '_')}.webp"
        save(pair, path)
        print(f"  Before | After: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
