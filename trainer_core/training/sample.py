"""Draw samples with the model in training, as ComfyUI's euler sampler with the normal scheduler does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..common.callbacks import Callbacks
from ..config import SampleConfig
from ..memory import in_parts, placed, with_room
from ..models import BaseModel
from ..objective import Path
from ..objective.path import LEAST_ALPHA
from .batch import Read

STEPS, CFG = 20, 7.0  # of samples whose settings leave them open


def sample_images(
    base: BaseModel,
    config: SampleConfig,
    device: torch.device | str = "cpu",
    *,
    encode: Read | None = None,
    callbacks: Callbacks | None = None,
) -> Tensor:
    """Draw one picture per prompt, (N, H, W, 3) float32 in 0..1 on the CPU.

    encode: turns a prompt into its conditioning, by default with the base model's text encoders. Prompt i uses the
    noise of seed + i. Moves the denoiser to the device.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    if not base.managed:
        base.denoiser.to(device)
    encode = encode or _encoder(base, device)
    pictures, painted = [], None
    if base.inpainting and config.prompts:
        with placed(base.autoencoder, device) as vae:
            painted = base.encode_blank(vae, (config.width, config.height)).expand(2, -1, -1, -1)
    with torch.no_grad():
        for i, prompt in enumerate(config.prompts):
            each = (encode(prompt), encode(config.negative))
            picture = base.draw(each[0], each[1], config, i, callbacks.check)
            if picture is None:
                both = base.batch(each, whole_pictures(config, 2), device, painted)
                latents = sample_latents(base, both, config, device, seed=config.seed + i, check=callbacks.check)
                with placed(base.autoencoder, device) as vae:
                    picture, _ = with_room(base.decode, vae, device, latents)
            pictures.append(picture.cpu())
            callbacks.phase("sampling", i + 1, len(config.prompts))
    return torch.cat(pictures) if pictures else torch.empty(0, config.height, config.width, 3)


def _encoder(base: BaseModel, device: torch.device) -> Read:
    for text in base.text_encoders:
        text.model.to(device)
    return lambda prompt: base.encode_text(prompt, device)


def whole_pictures(config: SampleConfig, count: int) -> Tensor:
    """Size and crop numbers of uncropped pictures, (count, 6), as ComfyUI sends them by default."""
    return torch.tensor([[config.height, config.width, 0, 0, config.height, config.width]] * count)


def sample_latents(
    base: BaseModel,
    conditions: object,
    config: SampleConfig,
    device: torch.device,
    *,
    seed: int,
    check: Callable[[], None],
) -> Tensor:
    """Integrate the probability flow ODE with Euler steps; (1, C, h, w) latents in model scale.

    conditions: of two samples, the prompt and the negative prompt. x is the noised latents over alpha_t, its noise
    level sigma = sigma_t / alpha_t (Karras et al. 2022, algorithm 1 without churn, on the model's own levels).
    """
    path, form = Path(base.noise), base.latents
    if path.kind not in ("epsilon", "v_prediction"):
        raise ValueError(f"No samples are drawn of a model that predicts {path.kind} without ComfyUI's own sampler.")
    levels, sigmas = noise_levels(path, config.steps or STEPS)
    shape = (1, form.channels, config.height // form.pixels, config.width // form.pixels)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = noise.to(device) * float((1 + sigmas[0] ** 2) ** 0.5)
    for i, level in enumerate(levels.tolist()):
        check()
        sigma, following = float(sigmas[i]), float(sigmas[i + 1])
        scaled = x / (1 + sigma**2) ** 0.5
        step, both = torch.full((2,), level, device=x.device), scaled.expand(2, -1, -1, -1)

        def guess(which: slice, both: Tensor = both, step: Tensor = step) -> Tensor:
            return base.predict(both[which], step[which], conditions.part(which)).float()  # type: ignore[attr-defined]

        output = in_parts(guess, 2, x.device)
        wanted, unwanted = output.chunk(2)
        guided = unwanted + (config.cfg or CFG) * (wanted - unwanted)
        if path.kind == "epsilon":
            direction = guided
        else:  # v: denoised = x / (1 + sigma^2) - v sigma / sqrt(1 + sigma^2)
            direction = (x * sigma / (1 + sigma**2)) + guided / (1 + sigma**2) ** 0.5
        x = x + direction * (following - sigma)
    return x


def noise_levels(path: Path, steps: int) -> tuple[Tensor, Tensor]:
    """Compute (steps,) levels for the model and (steps + 1,) sigmas falling to 0, evenly spaced in time."""
    least = LEAST_ALPHA / (1 - LEAST_ALPHA)
    log_sigmas = path.snr.double().clamp(min=least).rsqrt().log()
    times = torch.linspace(len(path) - 1, 0, steps, dtype=torch.float64)
    low = times.floor().long()
    high = times.ceil().long()
    exact = log_sigmas[low].lerp(log_sigmas[high], times.frac())
    nearest = (exact[:, None] - log_sigmas).abs().argmin(dim=1)
    return nearest, torch.cat([exact.exp(), exact.new_zeros(1)]).float()
