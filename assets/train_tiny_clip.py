"""Train the tiny clip model: a transformer of Wan's kind with a time axis, over the tiny base's text encoder.

    COMFYUI_PATH=COMFYUI python assets/train_tiny_clip.py all --work DIR

Each phase (clips, transformer, decoder, export) resumes from the state it left in DIR. Every random choice of a step is
a pure function of (seed, step), so a resumed run continues exactly where it stopped.

Nobody trains the encoder: it is written by hand and keeps, of each block of 8 x 8 pixels and four frames, the mean
colour of every frame and one slope of its brightness. So the transformer can be trained before the decoder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from multiprocessing import get_context
from pathlib import Path

import moving
import numpy as np
import torch
import train_tiny_base as base
from from_comfyui import comfy
from safetensors.torch import load_file
from train_tiny_flow import adamw, load_averaged, load_text_encoder
from transformers import CLIPTokenizer

import comfy.ldm.wan.vae  # isort: skip - after from_comfyui has found ComfyUI

WIDTH = 8  # of the autoencoder
TRANSFORMER = {"dim": 128, "ffn_dim": 512, "num_layers": 6, "num_heads": 2, "text_dim": 64}
READ_FROM_METADATA = ("num_heads", "text_dim")  # ComfyUI derives the other widths from the tensors
SHIFT = 4.0  # of the levels in training; ComfyUI samples Wan with 8, which leaves few steps to the details
CLIPS, DRAWN = 6000, 1000  # clips as latents, and those of them whose pixels the decoder learns
LATENTS = 1 + (moving.FRAMES - 1) // 4  # frames of a latent
FORMAT = comfy.latent_formats.Wan21()
COLOURS = torch.tensor([[0.299, 0.587, 0.114], [0.5, -0.5, 0.0], [-0.25, -0.25, 0.5]])  # brightness and two opponents
CONSTANT = 128.0  # a channel that keeps the norm before the encoder's last layer constant, and so that layer linear
SPREADS = (0.6, 0.25, 0.4, 0.06)  # of the three colours and of the slope over training clips


def features(clips: torch.Tensor) -> torch.Tensor:
    """Encode clips (N, 3, T, H, W) in -1..1 by hand: (N, 16, 1 + (T - 1) / 4, H / 8, W / 8).

    Channels 4 k to 4 k + 2 are the mean colours of frame k of four, 4 k + 3 the slope of its brightness: across where k
    is even, down where it is odd. The first latent holds the first frame alone, as k = 0.
    """
    colours = torch.einsum("ec,ncthw->nethw", COLOURS, clips)
    quarters = colours.unflatten(4, (-1, 2, 4)).mean(6).unflatten(3, (-1, 2, 4)).mean(5)  # (N, 3, T, h, 2, w, 2)
    means, bright = quarters.mean((4, 6)), quarters[:, :1]
    across, down = (bright[..., 0] - bright[..., 1]).mean(4), (bright[..., 0, :, :] - bright[..., 1, :, :]).mean(5)
    slopes = torch.where((torch.arange(clips.shape[2]) % 2 == 1).view(-1, 1, 1), across, down)
    slopes[:, :, 0] = across[:, :, 0]
    frames = torch.cat([means, slopes / 2], 1)  # (N, 4, T, h, w)
    first = torch.cat([frames[:, :, :1], torch.zeros(len(frames), 12, 1, *frames.shape[3:])], 1)
    later = frames[:, :, 1:].unflatten(2, (-1, 4)).permute(0, 3, 1, 2, 4, 5).flatten(1, 2)
    return torch.cat([first, later], 2) / torch.tensor(SPREADS * 4).view(-1, 1, 1, 1)


def build_autoencoder() -> comfy.ldm.wan.vae.WanVAE:
    """Build ComfyUI's Wan autoencoder, 8 wide, with the written encoder and a decoder that repeats what was kept."""
    model = comfy.ldm.wan.vae.WanVAE(
        dim=WIDTH, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            value.fill_(1.0) if name.endswith("gamma") else value.zero_()
        write_encoder(weights)
        start_decoder(weights)
    return model


def pixel_of(kernel: torch.Tensor) -> torch.Tensor:
    """Return the part of a kernel (O, I, ...) that reads the pixel itself, of its last frame: a view (O, I)."""
    while kernel.ndim > 2:
        last = kernel.shape[2] - 1 if kernel.ndim == 5 else kernel.shape[2] // 2
        kernel = kernel[:, :, last]
    return kernel


def copy(kernel: torch.Tensor, count: int, *, to: int = 0, begin: int = 0) -> None:
    """Let a layer hand `count` channels on, from channel `begin` on, as its channels from `to` on."""
    pixel_of(kernel)[range(to, to + count), range(begin, begin + count)] = 1.0


def write_encoder(weights: dict[str, torch.Tensor]) -> None:
    """Write the layers of the encoder, all zero before, so that they compute `features` in Wan's scale."""
    down = "encoder.downsamples."
    pixel_of(weights["encoder.conv1.weight"])[:3] = COLOURS
    for name, frames in (("2", 1), ("5", 1), ("8", 2)):  # means of 2 x 2, of one frame or of two behind each other
        kernel = weights[f"{down}{name}.resample.1.weight"]
        for frame in range(frames):
            for colour in range(3):
                kernel[(4 if name == "8" else 3) * frame + colour, 3 * frame + colour, :2, :2] = 0.25
    sign = torch.tensor([0.25, -0.25])
    slopes = weights[f"{down}8.resample.1.weight"]
    slopes[3, 0, :2, :2], slopes[7, 3, :2, :2] = sign[None, :], sign[:, None]
    weights[f"{down}8.resample.1.bias"][-1] = CONSTANT
    copy(weights[f"{down}3.shortcut.weight"], 3)
    copy(weights[f"{down}6.shortcut.weight"], 6)
    for name, count in (("5", 3), ("8", 8)):  # two frames, one after the other, become channels
        kernel = weights[f"{down}{name}.time_conv.weight"]
        kernel[range(count), range(count), 1] = 1.0
        kernel[range(count, 2 * count), range(count), 2] = 1.0
    weights[f"{down}8.time_conv.weight"][-1, -1, 2] = 1.0
    mean, std = FORMAT.latents_mean.flatten(), FORMAT.latents_std.flatten()
    scale = std / torch.tensor(SPREADS * 4)
    count = WIDTH * 4
    weights["encoder.head.2.weight"][range(16), range(16), 2, 1, 1] = 2 * CONSTANT / math.sqrt(count) * scale
    weights["encoder.head.2.bias"][:16] = mean
    copy(weights["conv1.weight"], 2 * 16)


def start_decoder(weights: dict[str, torch.Tensor]) -> None:
    """Start the decoder: layers that change the size copy what was kept, residual blocks add nothing yet."""
    generator = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        closed = name.endswith("residual.6.weight") or "proj" in name
        if name.startswith("decoder.") and value.ndim > 2 and not name.endswith("gamma") and not closed:
            spread = (0.3 if "residual" not in name and "head" not in name else 1.0) / math.sqrt(value[0].numel())
            value.copy_(spread * torch.randn(value.shape, generator=generator))
    std, mean = FORMAT.latents_std.flatten(), FORMAT.latents_mean.flatten()
    weights["conv2.weight"][range(16), range(16), 0, 0, 0] = 1 / std
    weights["conv2.bias"].copy_(-mean / std)
    up = "decoder.upsamples."
    copy(weights["decoder.conv1.weight"], 16)
    for name, count in (("3", 8), ("7", 4)):  # channels become two frames
        kernel = weights[f"{up}{name}.time_conv.weight"]
        copy(kernel, count)
        copy(kernel, count, to=WIDTH * 4, begin=count)
        copy(weights[f"{up}{name}.resample.1.weight"], count)
    copy(weights[f"{up}4.shortcut.weight"], 8)
    copy(weights[f"{up}11.resample.1.weight"], 4)


def build_transformer() -> comfy.ldm.wan.model.WanModel:
    """Build ComfyUI's Wan transformer; the last layer, all gates and what the caption adds are zero."""
    model = comfy.ldm.wan.model.WanModel(**TRANSFORMER, operations=comfy.ops.disable_weight_init, dtype=torch.float32)
    for name, value in model.named_parameters():
        closed = any(part in name for part in ("modulation", "time_projection", "head.", "cross_attn.o"))
        if value.ndim == 1:
            torch.nn.init.constant_(value, float("norm" in name and name.endswith("weight")))
        elif closed:
            torch.nn.init.zeros_(value)
        else:
            torch.nn.init.xavier_uniform_(value.flatten(1))
    return model


def draw_clips(args: argparse.Namespace) -> None:
    """Draw the clips and store their latents and token ids, and the pixels of the first of them."""
    path = args.work / "clips.safetensors"
    if path.exists():
        return
    tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    latents, captions, pixels = [], [], []
    tasks = ((args.seed, index) for index in range(CLIPS))
    with get_context("spawn").Pool(args.processes) as pool:
        for frames, caption in pool.imap(_clip, tasks, chunksize=32):
            clip = torch.from_numpy(frames).permute(3, 0, 1, 2)
            latents.append(features(clip[None].float() / 127.5 - 1).half())
            captions.append(caption)
            if len(pixels) < DRAWN:
                pixels.append(clip)
    tensors = {
        "latents": torch.cat(latents),
        "tokens": base.tokenize(tokenizer, captions),
        "pixels": torch.stack(pixels),
    }
    base.write_tensors(path, tensors, {"seed": str(args.seed)})


def _clip(task: tuple[int, int]) -> tuple[np.ndarray, str]:
    torch.set_num_threads(1)
    return moving.clip(*task)


def train_transformer(args: argparse.Namespace) -> None:
    """Train the transformer by flow matching, with Muon (Jordan et al. 2024) for the matrices of the blocks."""
    path = args.work / "transformer.safetensors"
    comfy.model_management.in_training = True  # plain formulas, which have gradients
    torch.manual_seed(args.seed)
    model, text = build_transformer(), load_text_encoder(args)
    data = load_file(args.work / "clips.safetensors")
    parameters = dict(model.named_parameters())
    average = {key: value.detach().clone() for key, value in parameters.items()}
    matrices = {n: p for n, p in parameters.items() if p.ndim == 2 and "blocks." in n}
    others = [p for n, p in parameters.items() if n not in matrices]
    muon = torch.optim.Muon(matrices.values(), lr=3 * args.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw",
                            ns_steps=3)  # fmt: skip
    optimizers = {"optimizer": adamw(others, args.lr), "muon": muon}
    run_phase(args, path, model, average, optimizers, args.steps, lambda step: flow_loss(model, text, data, args, step))


def flow_loss(model, text, data: dict[str, torch.Tensor], args: argparse.Namespace, step: int) -> torch.Tensor:
    """Return the mean squared error of the velocity on random clips, noises and levels."""
    generator = base.generator_at(args.seed, step)
    rows = torch.randint(len(data["latents"]), (args.batch,), generator=generator)
    clean = data["latents"][rows].float()
    ids = torch.stack([base.spoil(data["tokens"][row], generator) for row in rows.tolist()])
    noise = torch.randn(clean.shape, generator=generator)
    times = torch.rand(args.batch, generator=generator)
    levels = SHIFT * times / (1 + (SHIFT - 1) * times)
    with torch.no_grad():
        words = text(input_ids=ids).last_hidden_state
    sigma = levels.view(-1, 1, 1, 1, 1)
    noised = (1 - sigma) * clean + sigma * noise
    predicted = model(noised, 1000 * levels, words)
    return (predicted - (noise - clean)).square().mean()


def train_decoder(args: argparse.Namespace) -> None:
    """Train the decoder on crops of 32 pixels and five frames, the last tenth of the steps on whole clips."""
    path = args.work / "decoder.safetensors"
    comfy.model_management.in_training = True
    vae = build_autoencoder().requires_grad_(False)
    model = torch.nn.ModuleDict({"decoder": vae.decoder}).requires_grad_(True)
    data = load_file(args.work / "clips.safetensors")
    parameters = dict(model.named_parameters())
    average = {key: value.detach().clone() for key, value in parameters.items()}
    optimizers = {"optimizer": adamw(parameters.values(), 3 * args.lr)}
    run_phase(
        args, path, model, average, optimizers, args.decoder_steps, lambda step: pixel_loss(vae, data, args, step)
    )


def pixel_loss(vae, data: dict[str, torch.Tensor], args: argparse.Namespace, step: int) -> torch.Tensor:
    """Return the mean absolute error of decoded crops, or of a whole clip."""
    generator = base.generator_at(args.seed + 1, step)
    whole = step >= 0.9 * args.decoder_steps
    side, frames, batch = (8, LATENTS, 1) if whole else (4, 2, 4)
    tiles, wanted = [], []
    for _ in range(batch):
        row, top, left = (int(torch.randint(n, (), generator=generator)) for n in (DRAWN, 9 - side, 9 - side))
        tiles.append(data["latents"][row, :, :frames, top : top + side, left : left + side])
        rows, columns = (slice(8 * begin, 8 * (begin + side)) for begin in (top, left))
        wanted.append(data["pixels"][row, :, : 1 + 4 * (frames - 1), rows, columns])
    decoded = vae.decode(FORMAT.process_out(torch.stack(tiles).float()))
    return (decoded - (torch.stack(wanted).float() / 127.5 - 1)).abs().mean()


def run_phase(args, path: Path, model, average, optimizers: base.Optimizers, steps: int, loss_at) -> None:
    """Take the steps of a phase that its state in `path` lacks; the rate falls over the second half."""
    parameters = dict(model.named_parameters())
    peaks = [(group, group["lr"]) for optimizer in optimizers.values() for group in optimizer.param_groups]
    step = base.load_state(path, {"model": model, "average": average}, optimizers)
    began, saved, losses = time.process_time(), time.monotonic(), []
    while step < steps:
        for group, peak in peaks:
            group["lr"] = peak * base.rate(step, steps, 50, hold=0.5)
        loss = loss_at(step)
        loss.backward()
        step += 1
        base.update(optimizers, parameters, average, step, most=0.995)
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            seconds = round(time.process_time() - began)
            base.log(args.work, phase=path.stem, step=step, loss=round(float(np.mean(losses)), 5), seconds=seconds)
            losses = []
        if time.monotonic() - saved > 60 or step == steps:
            base.save_state(path, {"model": model, "average": average}, optimizers, step)
            saved = time.monotonic()


def export(args: argparse.Namespace) -> None:
    """Write the averaged transformer and the autoencoder as one fp16 checkpoint with Wan's names."""
    transformer, vae = build_transformer(), build_autoencoder()
    load_averaged(transformer, args.work / "transformer.safetensors")
    if (args.work / "decoder.safetensors").exists():
        load_averaged(torch.nn.ModuleDict({"decoder": vae.decoder}), args.work / "decoder.safetensors")
    tensors = {"model.diffusion_model." + key: value for key, value in transformer.state_dict().items()}
    tensors |= {"vae." + key: value for key, value in vae.state_dict().items()}
    config = {"transformer": {key: TRANSFORMER[key] for key in READ_FROM_METADATA}}
    metadata = {"config": json.dumps(config), "modelspec.title": "LoRA Atelier tiny clip",
                "modelspec.architecture": "wan2.1-t2v", "modelspec.resolution": f"{moving.SIZE}x{moving.SIZE}",
                "modelspec.license": "see the repository"}  # fmt: skip
    base.write_tensors(args.output, {key: value.half() for key, value in tensors.items()}, metadata)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are those of the shipped file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("all", *PHASES))
    parser.add_argument("--work", type=Path, default=Path("tiny_clip"), help="folder of states, latents and logs")
    parser.add_argument("--base", type=Path, default=Path(__file__).with_name("atelier-tiny.safetensors"))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("atelier-tiny-clip.safetensors"))
    comfyui = Path(os.environ.get("COMFYUI_PATH", "."))
    parser.add_argument("--tokenizer", type=Path, default=comfyui / "comfy" / "sd1_tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(device="cpu")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that draw clips")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--decoder-steps", type=int, default=800)
    return parser.parse_args(argv)


PHASES = {"clips": draw_clips, "transformer": train_transformer, "decoder": train_decoder, "export": export}

if __name__ == "__main__":
    options = parse()
    for name, run in PHASES.items():
        if options.phase in ("all", name):
            run(options)
