"""Train the tiny base model from nothing: autoencoder, latents, then UNet and text encoder together.

    python assets/train_tiny_base.py all --work DIR --tokenizer COMFYUI/comfy/sd1_tokenizer

Each phase (autoencoder, latents, unet, export, refine) resumes from the state it left in DIR. Every random
choice of a step is a pure function of (seed, step), so a resumed run continues exactly where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import drawing
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny, UNet2DConditionModel
from diffusers.models.autoencoders.vae import AutoencoderTinyBlock
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer_core.models.sd.names import tiny_vae_names, unet_ldm_names

CREATURES = 2_000  # pictures of figures with faces, and as many scenes beside them, that refine the model
NARROW, WIDE = 32, 64  # channels of the autoencoder while training, and as shipped
TOKENS, BOS, EOS = 77, 49406, 49407
METADATA = {"modelspec.title": "LoRA Atelier tiny base", "modelspec.architecture": "stable-diffusion-v1",
            "modelspec.resolution": "128x128", "modelspec.license": "see the repository"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Set one stage of UNet training: picture side in pixels, which pictures, and how long."""

    size: int
    first: int  # index of the first picture
    pictures: int
    batch: int
    steps: int


STAGES = (  # small pictures cost a sixth and teach words, colours and shapes; full ones teach the final size
    Stage(size=64, first=1_000_000, pictures=20_000, batch=32, steps=1694),
    Stage(size=128, first=0, pictures=5_000, batch=16, steps=1000),
)


def build_autoencoder(width: int) -> AutoencoderTiny:
    """Build an autoencoder of TAESD's shape, pictures (B, 3, H, W) in [-1, 1] to latents (B, 4, H/8, W/8)."""
    widths = (width,) * 4
    model = AutoencoderTiny(encoder_block_out_channels=widths, decoder_block_out_channels=widths)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, AutoencoderTinyBlock):  # residual branches start at zero, as in Fixup (Zhang et al. 2019)
            torch.nn.init.zeros_(module.conv[-1].weight)
    _start_as_resampling(model)
    return model


def _start_as_resampling(model: AutoencoderTiny) -> None:
    """Let the first three channels start as an 8x box downscale in opponent colours and its inverse, in place.

    Without it the bottleneck passes nothing for hundreds of steps; with it training only adds detail.
    """
    opponent = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
    opponent = opponent / opponent.norm(dim=1, keepdim=True) * 2.5
    encoder, decoder = model.encoder.layers, model.decoder.layers
    with torch.no_grad():
        for layer in (encoder[-1], decoder[-1]):
            layer.weight.mul_(0.1)
        for layer in (*encoder, *decoder):
            if not isinstance(layer, torch.nn.Conv2d):
                continue
            layer.weight[:3] = 0
            if layer is encoder[-1]:
                layer.weight[:3, :3, 1, 1] = opponent
                layer.bias[:3] = -0.5 * opponent.sum(1)
            elif layer is decoder[0]:
                layer.weight[:3, :3, 1, 1] = torch.linalg.inv(opponent)
                layer.bias[:3] = 0.5
            elif layer.stride == (2, 2):
                for c in range(3):
                    layer.weight[c, c, 1:, 1:] = 0.25
            else:
                for c in range(3):
                    layer.weight[c, c, 1, 1] = 1


Optimizers = dict[str, torch.optim.Optimizer]  # by the name of their moments in a state file


def save_state(path: Path, modules: dict, optimizers: Optimizers, step: int) -> None:
    """Write modules (or dicts of tensors), moments of optimizers and the step atomically to one safetensors file."""
    tensors = {}
    for name, module in modules.items():
        values = module if isinstance(module, dict) else module.state_dict()
        tensors |= {f"{name}.{key}": value for key, value in values.items()}
    for name, optimizer in optimizers.items():
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{key}": value for key, value in moments.items()}
    write_tensors(path, tensors, {"step": str(step)})


def load_state(path: Path, modules: dict, optimizers: Optimizers) -> int:
    """Load a file of `save_state` into modules and optimizers and return the step, 0 without a file."""
    if not path.exists():
        return 0
    moments: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in optimizers}
    values: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
    with safe_open(path, "pt") as file:
        step = int(file.metadata()["step"])
        for full in file.keys():  # noqa: SIM118 - safe_open is no mapping
            name, key = full.split(".", 1)
            if name in moments:
                index, moment = key.split(".", 1)
                moments[name].setdefault(int(index), {})[moment] = file.get_tensor(full)
            elif name in values:
                values[name][key] = file.get_tensor(full)
    for name, module in modules.items():
        if isinstance(module, dict):
            module.update({key: value.to(module[key].device) for key, value in values[name].items()})
        else:
            module.load_state_dict(values[name])
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict({"state": moments[name], "param_groups": optimizer.state_dict()["param_groups"]})
    return step


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file so that the path holds either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, partial, metadata)
    os.replace(partial, path)


def rate(step: int, steps: int, warmup: int, hold: float = 0.0) -> float:
    """Return the learning-rate factor of a step: linear warm-up, flat up to `hold` of all steps, cosine down to 1 %."""
    ramp = min(1.0, (step + 1) / warmup)
    fall = max(0.0, step / steps - hold) / (1 - hold)
    return ramp * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * fall)))


def log(work: Path, **values: object) -> None:
    """Append one line to log.jsonl and show it."""
    line = json.dumps(values)
    with (work / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def generator_at(seed: int, step: int) -> torch.Generator:
    """Return the CPU generator of a step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _rich_pixels(task: tuple[int, int]) -> np.ndarray:
    return np.asarray(drawing.rich_picture(*task))


def train_autoencoder(args: argparse.Namespace) -> None:
    """Train the narrow autoencoder on 64 px crops of rich pictures."""
    path = args.work / "autoencoder.safetensors"
    torch.manual_seed(args.seed)
    model = build_autoencoder(NARROW).to(args.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.ae_lr, betas=(0.9, 0.99), weight_decay=0.0)
    start = load_state(path, {"model": model}, {"optimizer": optimizer})
    if start >= args.ae_stop:
        return
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        tasks = [(args.seed, index) for index in range(args.ae_pictures)]
        pixels = torch.from_numpy(np.stack(pool.map(_rich_pixels, tasks, chunksize=64)))
    began = saved = time.monotonic()
    losses = []
    for step in range(start, args.ae_stop):
        generator = generator_at(args.seed, step)
        images = _crops(pixels, args.ae_batch, generator).to(args.device, memory_format=torch.channels_last)
        for group in optimizer.param_groups:
            group["lr"] = args.ae_lr * rate(step, args.ae_steps, 200)
        latents = model.encoder(images)
        jitter = torch.randn(latents.shape, generator=generator).to(args.device) * 0.06
        decoded = model.decoder(latents + jitter)
        reconstruction = _picture_loss(decoded, images)
        loss = reconstruction + _latent_penalty(latents)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(reconstruction.item())
        if (step + 1) % 50 == 0:
            mse = F.mse_loss(decoded.detach(), images).item() / 4
            log(
                args.work,
                phase="autoencoder",
                step=step + 1,
                loss=round(float(np.mean(losses)), 5),
                psnr=round(-10 * math.log10(mse), 2),
                std=round(latents.std().item(), 3),
                peak=round(latents.abs().max().item(), 2),
                seconds=round(time.monotonic() - began),
            )
            losses = []
        if time.monotonic() - saved > 120 or step + 1 == args.ae_stop:
            save_state(path, {"model": model}, {"optimizer": optimizer}, step + 1)
            saved = time.monotonic()


def _crops(pixels: torch.Tensor, batch: int, generator: torch.Generator, side: int = 64) -> torch.Tensor:
    """Cut random crops (batch, 3, side, side) in [-1, 1] with flips and permuted colour channels."""
    rows = torch.randint(len(pixels), (batch,), generator=generator).tolist()
    corners = torch.randint(pixels.shape[1] - side + 1, (batch, 2), generator=generator).tolist()
    crops = []
    for row, (y, x) in zip(rows, corners, strict=True):
        crop = pixels[row, y : y + side, x : x + side]
        if torch.rand((), generator=generator) < 0.5:
            crop = crop.flip(1)
        if torch.rand((), generator=generator) < 0.3:
            crop = crop[..., torch.randperm(3, generator=generator)]
        crops.append(crop)
    return torch.stack(crops).permute(0, 3, 1, 2).float() / 127.5 - 1


def _picture_loss(decoded: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return mean absolute error + mean squared error + mean absolute error of the picture's gradients."""
    error = decoded - images
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean() + error.square().mean() + 0.5 * edges


def _latent_penalty(latents: torch.Tensor) -> torch.Tensor:
    """Pull each latent channel mildly to mean 0 and unit deviation, and values beyond 2.5 inwards."""
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    return 0.02 * (mean.square() + (std - 1).square()).mean() + 0.1 * F.relu(latents.abs() - 2.5).square().mean()


def widen(narrow: AutoencoderTiny) -> AutoencoderTiny:
    """Copy a narrow autoencoder into one of full width that computes the same; the new channels are all zero."""
    wide, source = build_autoencoder(WIDE), narrow.state_dict()
    for key, value in wide.state_dict().items():
        value.zero_()
        value[tuple(slice(0, n) for n in source[key].shape)] = source[key]
    return wide


def load_narrow(args: argparse.Namespace) -> AutoencoderTiny:
    """Load the trained narrow autoencoder, frozen."""
    model = build_autoencoder(NARROW)
    weights = load_file(args.work / "autoencoder.safetensors")
    model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")})
    return model.to(args.device, memory_format=torch.channels_last).eval().requires_grad_(False)


def _captioned_pixels(task: tuple[int, int, int]) -> np.ndarray:
    seed, index, size = task
    return np.asarray(drawing.draw(drawing.scene_at(seed, index), seed, index, size))


def encode_latents(args: argparse.Namespace) -> None:
    """Draw the captioned pictures of every stage and store their latents, 1000 per file."""
    model = load_narrow(args)
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        for stage in STAGES:
            store_latents(args, model, pool, stage.size, range(stage.first, stage.first + stage.pictures))


def update(
    optimizers: Optimizers, parameters: dict[str, torch.Tensor], average: dict[str, torch.Tensor], step: int,
    most: float = 0.999,
) -> None:  # fmt: skip
    """Clip the gradients, take step number `step`, clear the gradients, and move the average, whose decay is `most`."""
    torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    decay = min(most, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.values()), [p.detach() for p in parameters.values()], 1 - decay)


def store_latents(args: argparse.Namespace, model: AutoencoderTiny, pool: Pool, size: int, indices: range) -> None:
    """Draw captioned pictures of `size` pixels and store their latents, 1000 per file; files that exist stay."""
    for begin in indices[::1000]:
        path = args.work / "latents" / f"{size}_{begin}.safetensors"
        if path.exists():
            continue
        tasks = [(args.seed, index, size) for index in range(begin, begin + 1000)]
        _store(path, model, pool.map(_captioned_pixels, tasks, chunksize=50))
    log(args.work, phase="latents", size=size, count=len(indices))


def _store(path: Path, model: AutoencoderTiny, pictures: list[np.ndarray]) -> None:
    """Encode pictures (height, width, 3) of 8 bits and write their latents as one file."""
    latents = []
    with torch.inference_mode():
        for batch in torch.from_numpy(np.stack(pictures)).split(25):
            pixels = batch.permute(0, 3, 1, 2).to(model.device).float() / 127.5 - 1
            latents.append(model.encoder(pixels.contiguous(memory_format=torch.channels_last)).cpu())
    write_tensors(path, {"latents": torch.cat(latents).half()}, {})


def build_unet() -> UNet2DConditionModel:
    """Build the noise predictor: SD 1's kinds of layers, two levels, eight heads everywhere."""
    return UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=64, attention_head_dim=8, norm_num_groups=32,
    )  # fmt: skip


def build_text_encoder() -> CLIPTextModel:
    """Build the text encoder: SD 1's CLIP with three layers of width 64 and one head."""
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=49408, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=1,
        projection_dim=64, max_position_embeddings=TOKENS, hidden_act="quick_gelu", bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=EOS,
    ))  # fmt: skip


def alpha_bars() -> torch.Tensor:
    """Return SD's cumulative products of alpha, (1000,), float64 (scaled-linear betas 0.00085 to 0.012)."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return torch.cumprod(1 - betas, 0)


def train_unet(args: argparse.Namespace) -> None:
    """Train UNet and text encoder together on the stored latents, small pictures first, then full ones."""
    path, device = args.work / "unet.safetensors", torch.device(args.device)
    torch.manual_seed(args.seed)
    models = {
        "unet": build_unet().to(device, memory_format=torch.channels_last),
        "text": build_text_encoder().to(device),
    }
    parameters = {f"{n}.{k}": v for n, m in models.items() for k, v in m.named_parameters()}
    average = {key: value.detach().clone() for key, value in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    step = load_state(path, {**models, "average": average}, {"optimizer": optimizer})
    tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    alpha_bar, total = alpha_bars().to(device), sum(stage.steps for stage in STAGES)
    began, saved, losses = time.monotonic(), time.monotonic(), []
    for stage, stage_end in zip(STAGES, np.cumsum([stage.steps for stage in STAGES]).tolist(), strict=True):
        if step >= stage_end:
            continue
        latents, tokens = stage_data(args, stage, tokenizer)
        while step < stage_end:
            generator = generator_at(args.seed, step)
            loss, error = _denoise(models, latents, tokens, alpha_bar, generator, stage.batch)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(step, total, 300, hold=0.75)
            loss.backward()
            step += 1
            update({"optimizer": optimizer}, parameters, average, step)
            losses.append((loss.item(), error.mean().item()))
            if step % 50 == 0:
                weighted, plain = np.mean(losses, 0)
                log(args.work, phase="unet", size=stage.size, step=step, loss=round(weighted, 5), mse=round(plain, 5),
                    seconds=round(time.monotonic() - began))  # fmt: skip
                losses = []
            if time.monotonic() - saved > 240 or step == total:
                save_state(path, {**models, "average": average}, {"optimizer": optimizer}, step)
                export(args)
                saved = time.monotonic()


def stage_data(args: argparse.Namespace, stage: Stage, tokenizer: CLIPTokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Load a stage's latents (N, 4, h, w) and its captions' token ids (N, 77)."""
    begins = range(stage.first, stage.first + stage.pictures, 1000)
    files = [args.work / "latents" / f"{stage.size}_{begin}.safetensors" for begin in begins]
    latents = torch.cat([load_file(file)["latents"] for file in files])
    indices = range(stage.first, stage.first + stage.pictures)
    return latents, tokenize(tokenizer, [drawing.scene_at(args.seed, index).caption for index in indices])


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Return token ids (N, 77): start, caption, then end tokens to the end, as ComfyUI pads SD 1."""
    rows = [tokenizer(caption, add_special_tokens=False).input_ids[: TOKENS - 2] for caption in captions]
    return torch.tensor([[BOS, *row] + [EOS] * (TOKENS - 1 - len(row)) for row in rows])


def spoil(ids: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Empty a caption's ids (77,) with chance 0.1, or put 1 or 2 random words of the vocabulary in with chance 0.1."""
    chance = torch.rand((), generator=generator).item()
    if chance < 0.1:
        return torch.tensor([BOS] + [EOS] * (TOKENS - 1))
    if chance > 0.2:
        return ids
    row = ids.tolist()
    for _ in range(1 + int(torch.randint(2, (), generator=generator))):
        length = row.index(EOS)
        place, word = (int(torch.randint(high, (), generator=generator)) for high in (length, BOS))
        row.insert(1 + place, word)
    return torch.tensor([*row[: TOKENS - 1], EOS])


def refine(args: argparse.Namespace) -> None:
    """Teach the exported model figures with eyes, mouth and limbs, beside the scenes that it knows, in place."""
    path, device = args.work / "refined.safetensors", torch.device(args.device)
    weights = load_file(args.output)
    unet, text, autoencoder = build_unet(), build_text_encoder(), build_autoencoder(WIDE)
    parts = (
        (unet, "model.diffusion_model.", unet_ldm_names(unet.state_dict(), layers_per_block=1)),
        (text, "cond_stage_model.transformer.text_model.", {key: key for key in text.state_dict()}),
        (autoencoder, "first_stage_model.", tiny_vae_names(autoencoder.state_dict())),
    )
    for module, prefix, names in parts:
        module.load_state_dict({key: weights[prefix + name].float() for key, name in names.items()})
    unet.to(device, memory_format=torch.channels_last)
    text.to(device)
    autoencoder.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)
    latents, tokens = _refining(args, autoencoder)
    models = {"unet": unet, "text": text}
    parameters = {f"{n}.{k}": v for n, m in models.items() for k, v in m.named_parameters()}
    average = {key: value.detach().clone() for key, value in parameters.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=args.refine_lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )
    step = load_state(path, {**models, "average": average}, {"optimizer": optimizer})
    alpha_bar, began, saved, losses = alpha_bars().to(device), time.monotonic(), time.monotonic(), []
    while step < args.refine_steps:
        loss, error = _denoise(models, latents, tokens, alpha_bar, generator_at(args.seed + 1, step), 16)
        for group in optimizer.param_groups:
            group["lr"] = args.refine_lr * rate(step, args.refine_steps, 50)
        loss.backward()
        step += 1
        update({"optimizer": optimizer}, parameters, average, step, most=0.99)
        losses.append((loss.item(), error.mean().item()))
        if step % 50 == 0:
            weighted, plain = np.mean(losses, 0)
            log(args.work, phase="refine", step=step, loss=round(weighted, 5), mse=round(plain, 5),
                seconds=round(time.monotonic() - began))  # fmt: skip
            losses = []
        if time.monotonic() - saved > 120 or step == args.refine_steps:
            save_state(path, {**models, "average": average}, {"optimizer": optimizer}, step)
            saved = time.monotonic()
    for part, (_, prefix, names) in zip(models, parts[: len(models)], strict=True):  # the autoencoder stays
        weights |= {prefix + name: average[f"{part}.{key}"].half() for key, name in names.items()}
    write_tensors(args.output, weights, METADATA)


def _creature(task: tuple[int, int]) -> tuple[np.ndarray, str]:
    picture, caption = drawing.creature(*task)
    return np.asarray(picture), caption


def _scene(task: tuple[int, int]) -> tuple[np.ndarray, str]:
    picture, caption = drawing.picture(*task)
    return np.asarray(picture), caption


def _refining(args: argparse.Namespace, model: AutoencoderTiny) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw creatures and scenes and return latents (N, 4, 16, 16) and token ids (N, 77)."""
    path = args.work / "latents" / f"refine_{CREATURES}.safetensors"
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        tasks = [(args.seed, index) for index in range(CREATURES)]
        drawn = [*pool.map(_creature, tasks, chunksize=50), *pool.map(_scene, tasks, chunksize=50)]
    if not path.exists():
        _store(path, model, [picture for picture, _ in drawn])
    tokenizer = CLIPTokenizer.from_pretrained(args.tokenizer)
    return load_file(path)["latents"], tokenize(tokenizer, [caption for _, caption in drawn])


def _denoise(
    models: dict[str, Any], latents: torch.Tensor, tokens: torch.Tensor, alpha_bar: torch.Tensor,
    generator: torch.Generator, batch: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the loss of a step, min-SNR-5 (Hang et al. 2023), and the squared error of each picture (B,)."""
    device = alpha_bar.device
    rows = torch.randint(len(latents), (batch,), generator=generator)
    ids = torch.stack([spoil(tokens[row], generator) for row in rows.tolist()]).to(device)
    clean = latents[rows].float().to(device)
    noise = torch.randn(clean.shape, generator=generator).to(device)
    timesteps = torch.randint(1000, (batch,), generator=generator).to(device)
    a = alpha_bar[timesteps].float().view(-1, 1, 1, 1)
    noised = (a.sqrt() * clean + (1 - a).sqrt() * noise).contiguous(memory_format=torch.channels_last)
    prediction = models["unet"](noised, timesteps, models["text"](input_ids=ids).last_hidden_state).sample
    error = (prediction - noise).square().mean((1, 2, 3))
    snr = (a / (1 - a)).flatten()
    return (error * snr.clamp(max=5) / snr).mean(), error


def export(args: argparse.Namespace) -> None:
    """Write the averaged weights and the widened autoencoder as one fp16 checkpoint with SD 1's names."""
    state = load_file(args.work / "unet.safetensors")
    unet, text = ({k.removeprefix(p): v for k, v in state.items() if k.startswith(p)}
                  for p in ("average.unet.", "average.text."))  # fmt: skip
    autoencoder = widen(load_narrow(args).cpu()).state_dict()
    names = unet_ldm_names(unet, layers_per_block=1)
    tensors = {"model.diffusion_model." + names[key]: value for key, value in unet.items()}
    tensors |= {"cond_stage_model.transformer.text_model." + key: value for key, value in text.items()}
    names = tiny_vae_names(autoencoder)
    tensors |= {"first_stage_model." + names[key]: value for key, value in autoencoder.items()}
    tensors["first_stage_model.vae_scale"] = torch.tensor(0.18215)
    tensors["first_stage_model.vae_shift"] = torch.tensor(0.0)
    halves = {key: value.half() if key != "first_stage_model.vae_scale" else value for key, value in tensors.items()}
    write_tensors(args.output, halves, METADATA)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; the defaults are those of the shipped file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("all", *PHASES))
    parser.add_argument("--work", type=Path, default=Path("tiny_base"), help="folder of states, latents and logs")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("atelier-tiny.safetensors"))
    comfyui = Path(os.environ.get("COMFYUI_PATH", "."))
    parser.add_argument("--tokenizer", type=Path, default=comfyui / "comfy" / "sd1_tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ae-pictures", type=int, default=6000)
    parser.add_argument("--ae-batch", type=int, default=8)
    parser.add_argument("--ae-steps", type=int, default=2400)
    parser.add_argument("--ae-stop", type=int, default=1806, help="where training ends within a schedule of --ae-steps")
    parser.add_argument("--ae-lr", type=float, default=8e-4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--refine-steps", type=int, default=1500)
    parser.add_argument("--refine-lr", type=float, default=8e-4)
    return parser.parse_args(argv)


PHASES = {
    "autoencoder": train_autoencoder,
    "latents": encode_latents,
    "unet": train_unet,
    "export": export,
    "refine": refine,
}

if __name__ == "__main__":
    arguments = parse()
    for name, run in PHASES.items():
        if arguments.phase in ("all", name):
            run(arguments)
