"""Draw samples with the model in training, as ComfyUI's euler sampler with the normal scheduler does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..common.axes import Framing, Size
from ..common.callbacks import Callbacks
from ..common.wording import say
from ..config import SampleConfig, SamplePicture
from ..memory import in_parts, on_device, with_room
from ..models import BaseModel
from ..models.base import Sliceable
from ..objective import AffinePath
from ..objective.path import LEAST_ALPHA
from .batch import ReadConditioning
from .encoded import Encoded


@torch.no_grad()
def sample_images(
    base: BaseModel,
    config: SampleConfig,
    device: torch.device | str = "cpu",
    *,
    encode: ReadConditioning | None = None,
    encoded: Encoded | None = None,
    callbacks: Callbacks | None = None,
) -> Iterator[tuple[SamplePicture, Tensor]]:
    """Draw one picture per prompt, (H, W, 3) float32 in 0..1 on the CPU, and tell what it was drawn with.

    encode: turns a prompt into its conditioning, by default with the base model's text encoders. encoded: holds the
    control pictures of prompts that name some. Moves the denoiser to the device.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    if base.host is None:
        base.denoiser.module.to(device)
    encode = encode or _encoder(base, device)
    wanted = config.pictures(base.sampling)
    painted: dict[Size, Tensor] = {}
    if wanted and (inpainting := base.inpainting):
        with on_device(base.autoencoder.module, device) as vae:
            for size in {picture.size for picture in wanted}:
                painted[size] = inpainting.blank(vae, size).expand(2, -1, -1, -1)
    for done, picture in enumerate(wanted, 1):
        shown = encoded.drawn.get(picture, ()) if encoded else ()
        seen = (shown,) if shown and base.text.seen_as else ()
        each = (encode(picture.prompt, *seen), encode(picture.negative, *seen))
        references = encoded.references(shown) if encoded else []
        if base.sampler:
            image = base.sampler.draw(each[0], each[1], picture, callbacks.check, references)
        else:
            size = picture.size
            both = base.conditions.batch(each, [Framing.whole(size)] * 2, device, painted.get(size))
            latents = sample_latents(base, both, picture, device, check=callbacks.check)
            with on_device(base.autoencoder.module, device) as vae:
                image, _ = with_room(base.autoencoder.decode, vae, device, latents)
        callbacks.phase(say("sampling"), done, len(wanted))
        yield picture, image[0].cpu()


def _encoder(base: BaseModel, device: torch.device) -> ReadConditioning:
    for text in base.text.encoders:
        text.model.to(device)
    return lambda prompt: base.text.encode(prompt, device)


def sample_latents(
    base: BaseModel,
    conditions: Sliceable,
    picture: SamplePicture,
    device: torch.device,
    *,
    check: Callable[[], None],
) -> Tensor:
    """Integrate the probability flow ODE with Euler steps; (1, C, *axes) latents in model scale.

    conditions: of two samples, the prompt and the negative prompt. x is the noised latents over alpha_t, its noise
    level sigma = sigma_t / alpha_t (Karras et al. 2022, algorithm 1 without churn, on the model's own levels).
    """
    path, form = AffinePath(base.noise), base.latents
    if path.kind not in ("epsilon", "v_prediction"):
        raise ValueError(f"No samples are drawn of a model that predicts {path.kind} without ComfyUI's own sampler.")
    levels, sigmas = noise_levels(path, picture.steps)
    shape = (1, form.channels, *form.axes(picture.size))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(picture.seed))
    x = noise.to(device) * float((1 + sigmas[0] ** 2) ** 0.5)
    for i, level in enumerate(levels.tolist()):
        check()
        sigma, following = float(sigmas[i]), float(sigmas[i + 1])
        scaled = x / (1 + sigma**2) ** 0.5
        step, both = torch.full((2,), level, device=x.device), scaled.expand(2, *scaled.shape[1:])

        def guess(which: slice, both: Tensor = both, step: Tensor = step) -> Tensor:
            return base.denoiser.predict(both[which], step[which], conditions.some(which)).float()

        output = in_parts(guess, 2, x.device)
        wanted, unwanted = output.chunk(2)
        guided = unwanted + picture.cfg * (wanted - unwanted)
        if path.kind == "epsilon":
            direction = guided
        else:  # v: denoised = x / (1 + sigma^2) - v sigma / sqrt(1 + sigma^2)
            direction = (x * sigma / (1 + sigma**2)) + guided / (1 + sigma**2) ** 0.5
        x = x + direction * (following - sigma)
    return x


def noise_levels(path: AffinePath, steps: int) -> tuple[Tensor, Tensor]:
    """Compute (steps,) levels for the model and (steps + 1,) sigmas falling to 0, evenly spaced in time."""
    least = LEAST_ALPHA / (1 - LEAST_ALPHA)
    log_sigmas = path.snr.double().clamp(min=least).rsqrt().log()
    times = torch.linspace(len(path) - 1, 0, steps, dtype=torch.float64)
    low = times.floor().long()
    high = times.ceil().long()
    exact = log_sigmas[low].lerp(log_sigmas[high], times.frac())
    nearest = (exact[:, None] - log_sigmas).abs().argmin(dim=1)
    return nearest, torch.cat([exact.exp(), exact.new_zeros(1)]).float()
