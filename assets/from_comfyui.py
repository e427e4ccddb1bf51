"""Load the tiny flow-matching model and draw with it, by ComfyUI's own loaders and sampler.

COMFYUI_PATH=COMFYUI python assets/from_comfyui.py OUTPUT.npy PROMPT [PROMPT ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, os.environ.get("COMFYUI_PATH", "."))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # lora_atelier, this pack
import comfy.cli_args
import utils.install_util  # noqa: F401 - before ComfyUI's nodes put a module of the same name in front

comfy.cli_args.args.cpu = not torch.cuda.is_available()  # what follows reads them when it is imported
comfy.cli_args.args.use_pytorch_cross_attention = True
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402

from lora_atelier.nodes.comfyui.tiny import register_tiny_model  # noqa: E402

ASSETS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Loaded:
    """Hold MODEL, CLIP and VAE as ComfyUI's nodes hand them on."""

    model: Any
    clip: Any
    vae: Any


def load(flow: Path = ASSETS / "atelier-tiny-flow.safetensors", dtype: torch.dtype = torch.float32) -> Loaded:
    """Load MODEL and VAE from the flow checkpoint, and CLIP from the tiny base's."""
    register_tiny_model()
    options = {"dtype": dtype}
    model, _, vae, _ = comfy.sd.load_checkpoint_guess_config(str(flow), output_clip=False, model_options=options)
    _, clip, _, _ = comfy.sd.load_checkpoint_guess_config(
        str(ASSETS / "atelier-tiny.safetensors"), output_vae=False, output_model=False, te_model_options=options
    )
    return Loaded(model, clip, vae)


def draw(
    loaded: Loaded, prompts: Sequence[str], *, cfg: float, steps: int = 20, size: int = 128, seed: int = 0
) -> np.ndarray:
    """Draw a picture per prompt as KSampler does (euler, simple), (N, size, size, 3) uint8."""
    pictures = []
    with torch.inference_mode():
        negative = loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(""))
        for index, prompt in enumerate(prompts):
            positive = loaded.clip.encode_from_tokens_scheduled(loaded.clip.tokenize(prompt))
            empty = torch.zeros(1, 16, size // 8, size // 8)
            noise = comfy.sample.prepare_noise(empty, seed + index)
            latent = comfy.sample.sample(
                loaded.model, noise, steps, cfg, "euler", "simple", positive, negative, empty, disable_pbar=True
            )
            pictures.append(loaded.vae.decode(latent)[0])
    return (torch.stack(pictures).numpy() * 255).round().astype(np.uint8)


def main() -> None:
    """Save pictures of the prompts as one array, and print what ComfyUI found in the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the .npy file to write")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    loaded = load()
    network = loaded.model.model
    print(json.dumps({"model": type(network).__name__, "channels": network.latent_format.latent_channels}))
    np.save(args.output, draw(loaded, args.prompts, cfg=args.cfg, steps=args.steps))


if __name__ == "__main__":
    main()
