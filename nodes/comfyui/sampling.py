"""Draw pictures with ComfyUI's samplers: prompts, latents, and the second pass of a hi-res fix."""

from __future__ import annotations

from typing import Any, NamedTuple

import comfy.model_management
import comfy.samplers
import comfy.utils
import node_helpers
import torch
from torch import Tensor

import nodes as comfy_nodes

from .connected.architecture import clip_rate, resolution_of, sampling_of
from .connected.vae import frames_per_step
from .models import own

AUTO = "auto"  # sampler or scheduler: as the model's family is sampled
LATENT_METHODS = ["bislerp", "bicubic", "bilinear", "nearest-exact", "area"]
FILTERS = ["lanczos", "bicubic", "bilinear", "area", "nearest-exact"]
TILE, OVERLAP = 512, 64  # pixels, of a tiled VAE
VIDEO = 3  # dimensions of the latents of VAEs of video


class Models(NamedTuple):
    """What draws a picture."""

    model: Any
    clip: Any
    vae: Any
    tiled: bool = False  # decode and encode in tiles


class SamplerPass(NamedTuple):
    """One pass of the sampler; 0 and AUTO: as the model's family is sampled."""

    seed: int
    steps: int = 0
    cfg: float = 0.0
    sampler_name: str = AUTO
    scheduler: str = AUTO
    denoise: float = 1.0


class Hires(NamedTuple):
    """The second pass: how much larger, enlarged how, drawn how."""

    scale: float
    second: SamplerPass
    method: str = "bislerp"  # of LATENT_METHODS, or of FILTERS for pixels
    pixels: bool = False
    upscale_model: Any = None  # enlarges the pixels first


class Trained(NamedTuple):
    """What a LoRA was trained on, for settings of Sample that are open."""

    width: int  # pixels
    height: int
    prompt: str


TRAINED = "atelier_trained"  # the key of a MODEL's attachment


def remember_trained(model: Any, trained: Trained) -> None:
    """Write on a MODEL what its LoRA was trained on; clones keep it."""
    model.set_attachments(TRAINED, trained)


def trained_on(model: Any) -> Trained:
    """Read what a MODEL's LoRA was trained on; of another MODEL the size that suits it, and no prompt."""
    known = model.get_attachment(TRAINED)
    if isinstance(known, Trained):
        return known
    side = resolution_of(model)
    return Trained(side, side, "")


class Prompt(NamedTuple):
    """What a picture shows."""

    text: str
    negative: str
    guidance: float | None = None  # distilled guidance; None: as the model's family is sampled


def sampler_names() -> list[str]:
    """List the samplers of this ComfyUI."""
    return comfy.samplers.KSampler.SAMPLERS


def scheduler_names() -> list[str]:
    """List the schedulers of this ComfyUI."""
    return comfy.samplers.KSampler.SCHEDULERS


def draw(
    models: Models,
    prompt: Prompt,
    size: tuple[int, int],
    count: int,
    first: SamplerPass,
    hires: Hires | None,
    frames: int = 1,
) -> Tensor:
    """Draw pictures of one prompt, (count, H, W, 3) in 0..1; size: width and height before the second pass.

    frames: of clips, as `clip_length` tells; they follow one another, (count * frames, H, W, 3). The second pass starts
    from the first one's latents, enlarged, or from its pixels, enlarged and encoded.
    """
    guidance = sampling_of(models.model).guidance if prompt.guidance is None else prompt.guidance
    conditioning = tuple(encode_prompt(models.clip, text, guidance) for text in (prompt.text, prompt.negative))
    steps = (frames - 1) // frames_per_step(models.vae) + 1 if frames > 1 else 1
    latents = sample_latents(models.model, conditioning, empty_latents(models.model, size, count, steps), first)
    if hires is not None:
        latents = _enlarged(models, latents, hires, frames)
        latents = sample_latents(models.model, conditioning, latents, hires.second)
    return decode_latents(models, latents)


def encode_prompt(clip: Any, text: str, guidance: float | None = None) -> Any:
    """Encode a prompt as CONDITIONING, with distilled guidance where the model takes one."""
    encoded = clip.encode_from_tokens_scheduled(clip.tokenize(text))
    return encoded if guidance is None else node_helpers.conditioning_set_values(encoded, {"guidance": guidance})


def clip_length(models: Models, frames: int) -> int:
    """Round the frames of a clip down to what the models draw; 0 where they draw single pictures."""
    time = frames_per_step(models.vae)
    return 1 + (frames - 1) // time * time if clip_rate(models.model) else 0


def empty_latents(model: Any, size: tuple[int, int], count: int, steps: int = 1) -> Tensor:
    """Make empty latents of a MODEL's format to start from: (count, C[, steps in time], h, w)."""
    form = model.get_model_object("latent_format")
    width, height = (side // form.spacial_downscale_ratio for side in size)
    time = (steps,) if form.latent_dimensions == VIDEO else ()
    device = comfy.model_management.intermediate_device()
    return torch.zeros(count, form.latent_channels, *time, height, width, device=device)


def sample_latents(model: Any, conditioning: Any, latents: Tensor, each: SamplerPass) -> Tensor:
    """Sample with ComfyUI's own sampler; conditioning: of the prompt and the negative prompt."""
    usual, (positive, negative) = sampling_of(model), conditioning
    (result,) = comfy_nodes.common_ksampler(
        model,
        seed=each.seed,
        steps=each.steps or usual.steps,
        cfg=each.cfg or usual.cfg,
        sampler_name=usual.sampler if each.sampler_name == AUTO else each.sampler_name,
        scheduler=usual.scheduler if each.scheduler == AUTO else each.scheduler,
        positive=positive,
        negative=negative,
        latent={"samples": latents},
        denoise=each.denoise,
    )
    return result["samples"]


def decode_latents(models: Models, latents: Tensor) -> Tensor:
    """Decode latents to pictures (B, H, W, 3) in 0..1."""
    vae = models.vae
    if models.tiled:
        pixels = vae.spacial_compression_decode()
        pictures = vae.decode_tiled(latents, tile_x=TILE // pixels, tile_y=TILE // pixels, overlap=OVERLAP // pixels)
    else:
        pictures = vae.decode(latents)
    # ComfyUI's tiled decoding, which it falls back to when memory is short, gives inference tensors. VAEs of video
    # give frames on an axis of their own.
    return own(pictures.reshape(-1, *pictures.shape[-3:]))


def _enlarged(models: Models, latents: Tensor, hires: Hires, frames: int) -> Tensor:
    """Enlarge the latents of the first pass; the sides stay whole latent pixels."""
    width, height = (round(side * hires.scale) for side in (latents.shape[-1], latents.shape[-2]))
    if not hires.pixels:
        return comfy.utils.common_upscale(latents, width, height, hires.method, "disabled")
    pictures = decode_latents(models, latents)
    if hires.upscale_model is not None:
        from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel  # ComfyUI loads it after custom nodes

        pictures = ImageUpscaleWithModel.execute(hires.upscale_model, pictures).args[0]
    pixels = models.model.get_model_object("latent_format").spacial_downscale_ratio
    enlarged = comfy.utils.common_upscale(
        pictures.movedim(-1, 1), width * pixels, height * pixels, hires.method, "disabled"
    )
    return _encoded(models, enlarged.movedim(1, -1), frames)


def _encoded(models: Models, pictures: Tensor, frames: int) -> Tensor:
    """Encode pictures; clip by clip for VAEs of video, of which a picture is one of a single frame."""
    vae, latents = models.vae, []
    for picture in pictures.split(frames if vae.latent_dim == VIDEO else len(pictures)):
        if models.tiled:
            latents.append(vae.encode_tiled(picture, tile_x=TILE, tile_y=TILE, overlap=OVERLAP))
        else:
            latents.append(vae.encode(picture))
    return own(torch.cat(latents))
