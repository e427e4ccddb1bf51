"""Pictures from the training copy, drawn as ComfyUI's euler sampler with the normal scheduler draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .callbacks import Callbacks
from .config import SampleConfig
from .memory import placed
from .models import BaseModel, batch_context, encode_tokens, tokenize
from .models.sd import LATENT_SCALE
from .noise import TIMESTEPS, alphas_cumprod


def sample_images(
    base: BaseModel,
    config: SampleConfig,
    device: torch.device | str = "cpu",
    *,
    encode: Callable[[str], Tensor] | None = None,
    callbacks: Callbacks | None = None,
) -> Tensor:
    """Draw one picture per prompt, (N, H, W, 3) float32 in 0..1 on the CPU.

    encode: gives the (L, D) conditioning of a prompt; by default the base model's own text encoder does.
    Prompt i starts from the noise of seed + i. The UNet must be on the device already or is moved there.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    base.unet.to(device)
    encode = encode or _encoder(base, device)
    pictures = []
    with torch.no_grad():
        for i, prompt in enumerate(config.prompts):
            latents = sample_latents(
                base.unet,
                batch_context([encode(prompt), encode(config.negative)]).to(device, base.dtype),
                config,
                seed=config.seed + i,
                prediction=base.prediction,
                check=callbacks.check,
            )
            with placed(base.vae, device) as vae:
                pictures.append(decode_latents(vae, latents).cpu())
            callbacks.phase("sampling", i + 1, len(config.prompts))
    return torch.cat(pictures) if pictures else torch.empty(0, config.height, config.width, 3)


def _encoder(base: BaseModel, device: torch.device) -> Callable[[str], Tensor]:
    base.text_encoder.to(device)
    return lambda prompt: encode_tokens(base.text_encoder, tokenize(base.tokenizer, prompt).to(device), base.clip_skip)


def sample_latents(
    unet: Any,
    contexts: Tensor,
    config: SampleConfig,
    *,
    seed: int,
    prediction: str,
    check: Callable[[], None],
) -> Tensor:
    """Integrate the probability flow with Euler steps; (1, 4, H/8, W/8) latents in model scale.

    contexts: (2, L, D), the prompt's and the negative prompt's conditioning. Karras et al. 2022, algorithm 1
    without churn, on the discrete model's noise levels.
    """
    levels, sigmas = noise_levels(config.steps)
    shape = (1, unet.config.in_channels, config.height // 8, config.width // 8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = noise.to(contexts.device) * float((1 + sigmas[0] ** 2) ** 0.5)
    for i, level in enumerate(levels.tolist()):
        check()
        sigma, following = float(sigmas[i]), float(sigmas[i + 1])
        scaled = (x / (1 + sigma**2) ** 0.5).to(contexts.dtype)
        step = torch.full((2,), level, device=x.device)
        output = unet(scaled.expand(2, -1, -1, -1), step, encoder_hidden_states=contexts).sample.float()
        wanted, unwanted = output.chunk(2)
        guided = unwanted + config.cfg * (wanted - unwanted)
        if prediction == "epsilon":
            direction = guided
        else:  # v: denoised = x / (1 + sigma^2) - v sigma / sqrt(1 + sigma^2)
            direction = (x * sigma / (1 + sigma**2)) + guided / (1 + sigma**2) ** 0.5
        x = x + direction * (following - sigma)
    return x


def noise_levels(steps: int) -> tuple[Tensor, Tensor]:
    """Return (steps,) timesteps for the model and (steps + 1,) sigmas falling to 0, evenly spaced in time."""
    alphas = alphas_cumprod().double()
    log_sigmas = ((1 - alphas) / alphas).sqrt().log()
    times = torch.linspace(TIMESTEPS - 1, 0, steps, dtype=torch.float64)
    low = times.floor().long()
    high = times.ceil().long()
    exact = log_sigmas[low].lerp(log_sigmas[high], times.frac())
    nearest = (exact[:, None] - log_sigmas).abs().argmin(dim=1)
    return nearest, torch.cat([exact.exp(), exact.new_zeros(1)]).float()


def decode_latents(vae: Any, latents: Tensor) -> Tensor:
    """Decode latents in model scale to (N, H, W, 3) pictures in 0..1."""
    dtype = next(vae.parameters()).dtype
    scaled = latents if type(vae).__name__ == "AutoencoderTiny" else latents / LATENT_SCALE
    decoded = vae.decode(scaled.to(dtype)).sample.float()
    return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1)


def image_grid(images: Sequence[Tensor] | Tensor) -> Tensor:
    """Put (H, W, 3) pictures side by side, (H, N * W, 3)."""
    return torch.cat(list(images), dim=1)
