"""Measure how well a tiny model follows plain captions, combinations it never saw included.

python assets/evaluate_tiny_base.py --tokenizer FOLDER [--count N] [--sheet FILE.png]
COMFYUI_PATH=COMFYUI python assets/evaluate_tiny_base.py --flow [--count N] [--sheet FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import drawing
import numpy as np
import torch
from PIL import Image
from reading import read_picture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer_core.config import BaseModelConfig, SampleConfig
from trainer_core.models.sd import load_base_model
from trainer_core.training.sample import sample_images


def draw(prompts: tuple[str, ...], args: argparse.Namespace) -> np.ndarray:
    """Draw a picture per prompt, (N, 128, 128, 3) uint8."""
    if args.flow:
        import from_comfyui

        return from_comfyui.draw(from_comfyui.load(), prompts, cfg=args.cfg)
    base = load_base_model(BaseModelConfig(path=str(args.model), tokenizer=args.tokenizer))
    config = SampleConfig(prompts=prompts, negative="", width=128, height=128, steps=20, cfg=args.cfg, seed=0)
    pictures = torch.cat([image for _, image in sample_images(base, config)])
    return (pictures.numpy() * 255).round().astype(np.uint8)


def evaluate(combinations: list[tuple[str, str, str]], args: argparse.Namespace) -> tuple[dict, list]:
    """Draw each combination once and return the shares of right answers, and the pictures (H, W, 3) uint8."""
    prompts = tuple(
        f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape} on {'an' if ground[0] in 'aeiou' else 'a'} {ground} "
        "background"
        for shape, colour, ground in combinations
    )
    pictures = draw(prompts, args)
    right = np.array([
        [got == wanted for got, wanted in zip(read_picture(picture), combination, strict=True)]
        for picture, combination in zip(pictures, combinations, strict=True)
    ])  # fmt: skip
    shares = {name: round(float(right[:, k].mean()), 3) for k, name in enumerate(("shape", "colour", "background"))}
    return {"pictures": len(right), **shares, "all three": round(float(right.all(1).mean()), 3)}, list(pictures)


def main() -> None:
    """Print the results for held-out and for seen combinations as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).with_name("atelier-tiny.safetensors"))
    parser.add_argument("--tokenizer", help="folder of CLIP's, as ComfyUI's comfy/sd1_tokenizer")
    parser.add_argument("--flow", action="store_true", help="measure atelier-tiny-flow, drawn by ComfyUI")
    parser.add_argument("--count", type=int, default=46, help="combinations of each kind")
    parser.add_argument("--cfg", type=float, default=4.0)
    parser.add_argument("--sheet", type=Path, help="write the pictures to this file")
    args = parser.parse_args()
    if not (args.flow or args.tokenizer):
        parser.error("name the --tokenizer, or --flow")
    unseen = drawing.held_out_combinations()
    seen = [
        (s, c, g)
        for s in drawing.SHAPES for c in drawing.COLOURS for g in drawing.COLOURS
        if c != g and not drawing.held_out(s, c, g)
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    rows = []
    for name, pool in (("held out", unseen), ("seen", seen)):
        chosen = [pool[k] for k in rng.permutation(len(pool))[: args.count]]
        shares, pictures = evaluate(chosen, args)
        print(json.dumps({"combinations": name, "cfg": args.cfg, **shares}), flush=True)
        rows += pictures
    if args.sheet:
        wide = 12
        blank = np.zeros_like(rows[0])
        rows += [blank] * (-len(rows) % wide)
        lines = [np.concatenate(rows[k : k + wide], 1) for k in range(0, len(rows), wide)]
        Image.fromarray(np.concatenate(lines, 0)).save(args.sheet)


if __name__ == "__main__":
    main()
