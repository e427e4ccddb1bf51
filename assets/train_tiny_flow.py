"""Train the tiny flow-matching model: a transformer of Flux's kind over the tiny base's text encoder and autoencoder.

    COMFYUI_PATH=COMFYUI python assets/train_tiny_flow.py all --work DIR

Each phase (latents, transformer, refine, export) resumes from the state it left in DIR. Every random choice of a step
is a pure function of (seed, step), so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import drawing
import numpy as np
import torch
import train_tiny_base as base
from diffusers import AutoencoderTiny
from from_comfyui import comfy
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTokenizer

from lora_atelier.trainer_core.memory import copied_before_written

Flux = comfy.ldm.flux.model.Flux

CHANNELS = 16  # of Flux's latents: each of the autoencoder's four channels four times
COPIES = CHANNELS // 4
SCALE, SHIFT = 0.3611, 0.1159  # of Flux's latents in ComfyUI: the transformer sees (latent - SHIFT) * SCALE
FLUX_SHIFT = math.exp(1.15)
CLIP, VAE = "cond_stage_model.transformer.text_model.", "first_stage_model."


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage(base.Stage):
    """Set one stage of training; `tokens` is how much of the padded caption it reads."""

    tokens: int


SMALL = Stage(size=64, first=1_000_000, pictures=10_000, batch=32, steps=1000, tokens=24)
FULL = Stage(size=128, first=0, pictures=6_000, batch=16, steps=6579, tokens=24)
STAGES = (SMALL, FULL)  # small pictures and short captions cost a third and teach words, colours and shapes
REFINED = (replace(FULL, steps=7000), replace(FULL, steps=500, tokens=base.TOKENS))  # of single figures, no textures


def build_transformer() -> Flux:
    """Build ComfyUI's Flux with one double and three single blocks of width 256, the last layer and all gates zero."""
    model = Flux(
        image_model="flux", in_channels=CHANNELS, out_channels=CHANNELS, vec_in_dim=64, context_in_dim=64,
        hidden_size=256, mlp_ratio=4.0, num_heads=2, depth=1, depth_single_blocks=3, axes_dim=[16, 56, 56], theta=10000,
        patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[], dtype=torch.float32, device="cpu",
        operations=comfy.ops.disable_weight_init,
    )  # fmt: skip
    for name, value in model.named_parameters():
        closed = any(part in name for part in ("_mod.lin", "modulation", "final_layer"))
        if value.ndim == 1:
            torch.nn.init.constant_(value, float(name.endswith(("norm.weight", "norm.scale"))))
        elif closed:
            torch.nn.init.zeros_(value)
        else:
            torch.nn.init.xavier_uniform_(value)
    return model


def load_part(model: torch.nn.Module, prefix: str, names: dict[str, str], source: Path) -> torch.nn.Module:
    """Load a part of the tiny base, cut to the model's shapes, and freeze it; names: the model's -> the file's."""
    weights = load_file(source)
    for key, value in model.state_dict().items():
        value.copy_(weights[prefix + names[key]][tuple(slice(0, n) for n in value.shape)])
    return model.eval().requires_grad_(False)


def load_autoencoder(args: argparse.Namespace) -> AutoencoderTiny:
    """Load the tiny base's autoencoder in the width that it was trained in."""
    model = base.build_autoencoder(base.NARROW)
    load_part(model, VAE, base.tiny_vae_names(model.state_dict()), args.base)
    return model.to(args.device, memory_format=torch.channels_last)


def load_text_encoder(args: argparse.Namespace) -> CLIPTextModel:
    """Load the tiny base's text encoder."""
    model = base.build_text_encoder()
    names = {key: key.removeprefix("text_model.") for key in model.state_dict()}
    return load_part(model, CLIP, names, args.base).to(args.device)


def encode_latents(args: argparse.Namespace) -> None:
    """Draw the captioned pictures of every stage and store their latents, 1000 per file."""
    model = load_autoencoder(args)
    with get_context("spawn").Pool(args.processes) as pool:
        for size, first, count in dict.fromkeys((s.size, s.first, s.pictures) for s in STAGES + REFINED):
            base.store_latents(args, model, pool, size, range(first, first + count))


def sigmas(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw noise levels (count,) as ComfyUI samples Flux: uniform times, shifted by exp(1.15) towards noise."""
    times = torch.rand(count, generator=generator)
    return FLUX_SHIFT * times / (1 + (FLUX_SHIFT - 1) * times)


def train_transformer(args: argparse.Namespace) -> None:
    """Train the transformer on all pictures with AdamW, small pictures first, then full ones."""
    model = build_transformer()
    optimizers = {"optimizer": adamw(model.parameters(), args.lr)}
    train(args, "transformer", model, optimizers, STAGES, scheduled=8500, hold=0.6)


def refine_transformer(args: argparse.Namespace) -> None:
    """Train it on pictures of one plain figure, with Muon (Jordan et al. 2024) for the matrices of the blocks."""
    model = build_transformer()
    load_averaged(model, args.work / "transformer.safetensors")
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "blocks." in n and "mod" not in n}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    muon = torch.optim.Muon(matrices.values(), lr=3 * args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw",
                            ns_steps=3)  # fmt: skip
    optimizers = {"optimizer": adamw(others, args.lr), "muon": muon}
    train(args, "refine", model, optimizers, REFINED, scheduled=sum(stage.steps for stage in REFINED), hold=0.4)


def adamw(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Build AdamW as all phases use it."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)


def load_averaged(model: Flux, path: Path) -> None:
    """Load the averaged weights of a phase's state."""
    state = load_file(path)
    model.load_state_dict({k.removeprefix("average."): v for k, v in state.items() if k.startswith("average.")})


def train(
    args: argparse.Namespace,
    phase: str,
    model: Flux,
    optimizers: base.Optimizers,
    stages: Sequence[Stage],
    *,
    scheduled: int,
    hold: float,
) -> None:
    """Train a phase on the stored latents by flow matching; its rate falls as for `scheduled` steps, from `hold` on."""
    path, device = args.work / f"{phase}.safetensors", torch.device(args.device)
    comfy.model_management.in_training = True  # plain formulas, which have gradients
    torch.manual_seed(args.seed)
    model, text = model.to(device), load_text_encoder(args)
    parameters = dict(model.named_parameters())
    average = {key: value.detach().clone() for key, value in parameters.items()}
    peaks = [(group, group["lr"]) for optimizer in optimizers.values() for group in optimizer.param_groups]
    step = base.load_state(path, {"model": model, "average": average}, optimizers)
    tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    total = sum(stage.steps for stage in stages)
    began, saved, losses = time.monotonic(), time.monotonic(), []
    for stage, stage_end in zip(stages, np.cumsum([stage.steps for stage in stages]).tolist(), strict=True):
        if step >= stage_end:
            continue
        latents, tokens = base.stage_data(args, stage, tokenizer)
        if stages is REFINED:
            kept = [row for row in range(len(latents)) if is_plain(drawing.scene_at(args.seed, stage.first + row))]
            latents, tokens = latents[kept], tokens[kept]
        while step < stage_end:
            for group, peak in peaks:
                group["lr"] = peak * base.rate(step, scheduled, 300, hold=hold)
            with copied_before_written():  # the blocks write into their input
                loss = loss_of(model, text, latents, tokens, stage, base.generator_at(args.seed, step))
                loss.backward()
            step += 1
            base.update(optimizers, parameters, average, step)
            losses.append(loss.item())
            if step % 50 == 0:
                seconds = round(time.monotonic() - began)
                base.log(args.work, phase=phase, size=stage.size, tokens=stage.tokens, step=step,
                         loss=round(float(np.mean(losses)), 5), seconds=seconds)  # fmt: skip
                losses = []
            if time.monotonic() - saved > 180 or step == total:
                base.save_state(path, {"model": model, "average": average}, optimizers, step)
                export(args)
                saved = time.monotonic()


def is_plain(scene: drawing.Scene) -> bool:
    """Return whether a picture shows one figure and no texture."""
    return len(scene.figures) == 1 and not scene.ground_texture and not scene.figures[0].texture


def loss_of(
    model: Flux,
    text: CLIPTextModel,
    latents: torch.Tensor,
    tokens: torch.Tensor,
    stage: Stage,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the mean squared error of the velocity on random pictures, noises and levels."""
    device = next(model.parameters()).device
    rows = torch.randint(len(latents), (stage.batch,), generator=generator)
    ids = torch.stack([base.spoil(tokens[row], generator) for row in rows.tolist()]).to(device)
    clean = latents[rows].float().repeat(1, COPIES, 1, 1).to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)
    levels = sigmas(stage.batch, generator).to(device)
    guidance = (5 * torch.rand(stage.batch, generator=generator)).to(device)  # any number: it comes to mean nothing
    with torch.no_grad():
        words = text(input_ids=ids)
    sigma = levels.view(-1, 1, 1, 1)
    noised = (1 - sigma) * clean + sigma * noise
    with torch.autocast(device.type, torch.bfloat16):
        predicted = model(noised, levels, words.last_hidden_state[:, : stage.tokens], words.pooler_output, guidance)
    return (predicted.float() - (noise - clean)).square().mean()


def widened(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give the tiny base's autoencoder Flux's channels and scale, under the names of Flux checkpoints."""
    tensors = {"vae." + key.removeprefix(VAE): value for key, value in values.items() if key.startswith(VAE)}
    last = max(int(key.split(".")[2]) for key in tensors if key.startswith("vae.taesd_encoder."))
    for kind in ("weight", "bias"):
        key = f"vae.taesd_encoder.{last}.{kind}"
        tensors[key] = torch.cat([tensors[key]] * COPIES)
    first = "vae.taesd_decoder.1.weight"
    tensors[first] = torch.cat([tensors[first] / COPIES] * COPIES, 1)
    return tensors | {"vae.vae_scale": torch.tensor(SCALE), "vae.vae_shift": torch.tensor(SHIFT)}


def export(args: argparse.Namespace) -> None:
    """Write the averaged transformer and the autoencoder as one fp16 checkpoint with Flux's names."""
    last = next(path for name in ("refine", "transformer") if (path := args.work / f"{name}.safetensors").exists())
    tensors = {"model.diffusion_model." + key.removeprefix("average."): value for key, value in load_file(last).items()
               if key.startswith("average.")}  # fmt: skip
    tensors |= widened(load_file(args.base))
    halves = {key: value.half() if value.ndim else value for key, value in tensors.items()}
    metadata = {"modelspec.title": "LoRA Atelier tiny flow", "modelspec.architecture": "flux-1-dev",
                "modelspec.resolution": "128x128", "modelspec.license": "see the repository"}  # fmt: skip
    base.write_tensors(args.output, halves, metadata)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are those of the shipped file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("all", *PHASES))
    parser.add_argument("--work", type=Path, default=Path("tiny_flow"), help="folder of states, latents and logs")
    parser.add_argument("--base", type=Path, default=Path(__file__).with_name("atelier-tiny.safetensors"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("atelier-tiny-flow.safetensors"))
    comfyui = Path(os.environ.get("COMFYUI_PATH", "."))
    parser.add_argument("--tokenizer", type=Path, default=comfyui / "comfy" / "sd1_tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that draw pictures")
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args(argv)


PHASES = {"latents": encode_latents, "transformer": train_transformer, "refine": refine_transformer, "export": export}

if __name__ == "__main__":
    options = parse()
    for name, run in PHASES.items():
        if options.phase in ("all", name):
            run(options)
