"""Pictures from the training copy, drawn as ComfyUI's euler sampler with the normal scheduler draws them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .callbacks import Callbacks
from .config import SampleConfig
from .memory import in_parts, placed, with_room
from .models import BaseModel, Conditioning, Conditions, batch_context, encode_blank, encode_caption, predict
from .noise import LEAST_ALPHA, TIMESTEPS, alphas_cumprod


def sample_images(
    base: BaseModel,
    config: SampleConfig,
    device: torch.device | str = "cpu",
    *,
    encode: Callable[[str], Conditioning] | None = None,
    callbacks: Callbacks | None = None,
) -> Tensor:
    """Draw one picture per prompt, (N, H, W, 3) float32 in 0..1 on the CPU.

    encode: gives the conditioning of a prompt; by default the base model's own text encoders do.
    Prompt i starts from the noise of seed + i. The UNet must be on the device already or is moved there.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    base.unet.to(device)
    encode = encode or _encoder(base, device)
    decode = functools.partial(decode_latents, latent_scale=base.family.latent_scale)
    pictures, painted = [], None
    if base.inpainting and config.prompts:
        with placed(base.vae, device) as vae:
            painted = encode_blank(vae, (config.width, config.height), base.family.latent_scale).expand(2, -1, -1, -1)
    with torch.no_grad():
        for i, prompt in enumerate(config.prompts):
            each, sizes = [encode(prompt), encode(config.negative)], whole_pictures(config, 2)
            both = build_conditions(base, each, sizes, device, painted)
            latents = sample_latents(base, both, config, seed=config.seed + i, check=callbacks.check)
            with placed(base.vae, device) as vae:
                picture, _ = with_room(decode, vae, device, latents)
            pictures.append(picture.cpu())
            callbacks.phase("sampling", i + 1, len(config.prompts))
    return torch.cat(pictures) if pictures else torch.empty(0, config.height, config.width, 3)


def _encoder(base: BaseModel, device: torch.device) -> Callable[[str], Conditioning]:
    for text in base.texts:
        text.model.to(device)
    return lambda prompt: encode_caption(base.texts, base.tokenizer, prompt, device)


def whole_pictures(config: SampleConfig, count: int) -> Tensor:
    """Return the size and crop numbers of pictures that were not cut, (count, 6): what ComfyUI sends by default."""
    return torch.tensor([[config.height, config.width, 0, 0, config.height, config.width]] * count)


def build_conditions(
    base: BaseModel,
    conditionings: Sequence[Conditioning],
    sizes: Tensor,
    device: torch.device,
    painted: Tensor | None = None,
) -> Conditions:
    """Put the conditionings of a batch together on the device; sizes (B, 6), painted (B, 5, H, W) where inpainting."""
    context = batch_context([c.context for c in conditionings]).to(device, base.dtype)
    pooled = [c.pooled for c in conditionings if c.pooled is not None]
    painted = None if painted is None else painted.to(device)
    if not pooled:
        return Conditions(context=context, painted=painted)
    pooled = torch.stack(pooled).to(device, base.dtype)
    return Conditions(context=context, pooled=pooled, sizes=sizes.to(device), painted=painted)


def sample_latents(
    base: BaseModel, conditions: Conditions, config: SampleConfig, *, seed: int, check: Callable[[], None]
) -> Tensor:
    """Integrate the probability flow with Euler steps; (1, 4, H/8, W/8) latents in model scale.

    conditions: of two samples, the prompt and the negative prompt. Karras et al. 2022, algorithm 1
    without churn, on the discrete model's noise levels.
    """
    levels, sigmas = noise_levels(config.steps, base.zero_terminal_snr)
    shape = (1, base.unet.config.out_channels, config.height // 8, config.width // 8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = noise.to(conditions.context.device) * float((1 + sigmas[0] ** 2) ** 0.5)
    for i, level in enumerate(levels.tolist()):
        check()
        sigma, following = float(sigmas[i]), float(sigmas[i + 1])
        scaled = x / (1 + sigma**2) ** 0.5
        step, both = torch.full((2,), level, device=x.device), scaled.expand(2, -1, -1, -1)

        def guess(which: slice, both: Tensor = both, step: Tensor = step) -> Tensor:
            return predict(base, both[which], step[which], conditions.part(which)).float()

        output = in_parts(guess, 2, x.device)
        wanted, unwanted = output.chunk(2)
        guided = unwanted + config.cfg * (wanted - unwanted)
        if base.prediction == "epsilon":
            direction = guided
        else:  # v: denoised = x / (1 + sigma^2) - v sigma / sqrt(1 + sigma^2)
            direction = (x * sigma / (1 + sigma**2)) + guided / (1 + sigma**2) ** 0.5
        x = x + direction * (following - sigma)
    return x


def noise_levels(steps: int, zero_terminal_snr: bool = False) -> tuple[Tensor, Tensor]:
    """Return (steps,) timesteps for the model and (steps + 1,) sigmas falling to 0, evenly spaced in time."""
    alphas = alphas_cumprod(zero_terminal_snr=zero_terminal_snr).double()
    alphas = alphas.clamp(min=LEAST_ALPHA)
    log_sigmas = ((1 - alphas) / alphas).sqrt().log()
    times = torch.linspace(TIMESTEPS - 1, 0, steps, dtype=torch.float64)
    low = times.floor().long()
    high = times.ceil().long()
    exact = log_sigmas[low].lerp(log_sigmas[high], times.frac())
    nearest = (exact[:, None] - log_sigmas).abs().argmin(dim=1)
    return nearest, torch.cat([exact.exp(), exact.new_zeros(1)]).float()


def decode_latents(vae: Any, latents: Tensor, latent_scale: float) -> Tensor:
    """Decode latents in model scale to (N, H, W, 3) pictures in 0..1."""
    dtype = next(vae.parameters()).dtype
    scaled = latents if type(vae).__name__ == "AutoencoderTiny" else latents / latent_scale
    decoded = vae.decode(scaled.to(dtype)).sample.float()
    return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1)
