"""Draw samples with the model in training, as ComfyUI's samplers and schedulers of the same names do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..common.axes import Framing, Size
from ..common.callbacks import Callbacks
from ..common.wording import say
from ..config import SampleConfig, SamplePicture
from ..memory import in_parts, on_device, to_devices, with_room
from ..models import BaseModel
from ..models.base import Sliceable
from ..objective import AffinePath
from .batch import ReadConditioning
from .encoded import Encoded
from .samplers import SAMPLERS, SHORTENED, Levels


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
    """Draw a picture or clip per prompt, (T, H, W, 3) float32 in 0..1 on the CPU, and tell what it was drawn with.

    encode: turns a prompt into its conditioning, by default with the base model's text encoders. encoded: holds the
    control pictures of prompts that name some. Moves the denoiser to the device.
    """
    device, callbacks = torch.device(device), callbacks or Callbacks()
    if base.host is None:
        to_devices(base.denoiser.module, device)
    encode = encode or _encoder(base, device)
    wanted = config.pictures(base.sampling)
    painted: dict[Size, Tensor] = {}
    if wanted and (inpainting := base.inpainting):
        with on_device(base.autoencoder.module, device) as vae:
            for size in {picture.size for picture in wanted}:
                painted[size] = inpainting.blank(vae, size)
    for done, picture in enumerate(wanted, 1):
        shown = encoded.drawn.get(picture, ()) if encoded else ()
        seen = (shown,) if shown and base.text.seen_as else ()
        each = (encode(picture.prompt, *seen), encode(picture.negative, *seen))
        references = encoded.references(shown) if encoded else []
        if base.sampler:
            image = base.sampler.draw(each[0], each[1], picture, callbacks.check, references, painted.get(picture.size))
        else:
            size = picture.size
            whole = torch.cat([painted[size]] * 2) if painted else None
            both = base.conditions.batch(each, [Framing.whole(size)] * 2, device, whole)
            latents = sample_latents(base, both, picture, device, check=callbacks.check)
            with on_device(base.autoencoder.module, device) as vae:
                image, _ = with_room(base.autoencoder.decode, vae, device, latents)
        callbacks.phase(say("sampling"), done, len(wanted))
        yield picture, image[: picture.frames].cpu()


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
    """Go from noise to latents by the picture's sampler; (1, C, *axes) in model scale.

    conditions: of two samples, the prompt and the negative prompt. check: raises where the run was cancelled.
    """
    path, form = AffinePath(base.noise), base.latents
    if path.kind not in ("epsilon", "v_prediction"):
        raise ValueError(f"No samples are drawn of a model that predicts {path.kind} without ComfyUI's own sampler.")
    levels, shortened = Levels(path), picture.sampler in SHORTENED
    sigmas = levels.spaced(picture.scheduler, picture.steps + shortened)
    if shortened:
        del sigmas[-2]
    shape = (1, form.channels, *form.axes(picture.size))

    def denoise(x: Tensor, sigma: float) -> Tensor:
        check()
        length = (1 + sigma**2) ** 0.5
        level, both = torch.full((2,), levels.nearest(sigma), device=x.device), (x / length).expand(2, *x.shape[1:])

        def guess(which: slice) -> Tensor:
            return base.denoiser.predict(both[which], level[which], conditions.some(which)).float()

        wanted, unwanted = in_parts(guess, 2, x.device).chunk(2)
        guided = unwanted + picture.cfg * (wanted - unwanted)
        if path.kind == "epsilon":
            return x - sigma * guided
        return x / length**2 - guided * sigma / length

    @functools.cache
    def own() -> torch.Generator:  # built where a sampler asks for noise: not each device has generators
        # On a CPU, where the first noise has the picture's seed, what a sampler adds has the next one.
        return torch.Generator(device).manual_seed((picture.seed + (device.type == "cpu")) % 2**64)

    def noise() -> Tensor:
        return torch.randn(shape, generator=own(), device=device)

    first = torch.randn(shape, generator=torch.Generator().manual_seed(picture.seed)).to(device)
    return SAMPLERS[picture.sampler](denoise, levels.noised(first, sigmas[0]), sigmas, noise)
