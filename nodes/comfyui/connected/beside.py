"""What a MODEL reads beside its latents, found by asking it: a mask and the rest of a picture, or other pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_base
import comfy.utils
import torch
from torch import Tensor

from ....trainer_core.common.axes import Size
from ....trainer_core.common.wording import names
from ....trainer_core.config import MOST_CONTROLS
from . import vae
from .gradients import WRONG

SIDE = 16  # in latent pixels, of what a MODEL is asked about


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """What a MODEL concatenates to its latents, by the values of a CONDITIONING that change it."""

    pictures: int = 0  # of concat_latent_image
    masked: bool = False  # whether concat_mask says which of them it has to paint itself
    video: bool = False  # whether that says so of frames

    @property
    def paints(self) -> bool:
        """Tell an inpainting model: it reads a mask, and the picture without the masked region."""
        return self.pictures > 0 and self.masked and not self.video

    @property
    def controls(self) -> int:
        """How many control pictures it reads so; the frame of a video is one."""
        return 0 if self.paints else self.pictures


@torch.no_grad()
def beside_of(model: Any) -> Beside:
    """Ask a MODEL for what it concatenates: of nothing, of pictures and of masks."""
    form = model.latent_format
    time = (1,) * (form.latent_dimensions - 2)
    axes, draws = (*time, SIDE, SIDE), torch.Generator().manual_seed(0)
    try:
        blank = _concatenated(model, axes)
    except WRONG:  # it wants what only a caption gives
        return Beside()
    for pictures in range(1, MOST_CONTROLS + 1) if blank is not None else ():
        shape = (1, pictures * form.latent_channels, *axes)
        one, other = (torch.randn(shape, generator=draws) for _ in range(2))
        black, white = (torch.full((1, 1, *axes), of) for of in (0.0, 1.0))
        # Some take a picture only with a mask.
        if _tells(model, axes, [{"concat_latent_image": each, "concat_mask": black} for each in (one, other)], blank):
            masks = [{"concat_latent_image": one, "concat_mask": each} for each in (black, white)]
            return Beside(pictures=pictures, masked=_tells(model, axes, masks, blank), video=bool(time))
    return Beside()


def _tells(model: Any, axes: Sequence[int], given: Sequence[dict[str, Tensor]], blank: Tensor | None) -> bool:
    """Tell whether a MODEL concatenates other tensors, each of the usual shape, for each of some values."""
    try:
        one, other = (_concatenated(model, axes, **each) for each in given)
    except WRONG:
        return False
    if one is None or other is None or blank is None or not one.shape == other.shape == blank.shape:
        return False
    return not torch.equal(one, other)


def _concatenated(model: Any, axes: Sequence[int], **given: Tensor) -> Tensor | None:
    """Compute what a MODEL concatenates to latents of some axes for values of a CONDITIONING."""
    latents = torch.zeros(1, model.latent_format.latent_channels, *axes)
    values = {"noise": latents, "latent_image": latents, "device": latents.device, "denoise_mask": None, "seed": 0}
    # Some scale the picture in place.
    return model.concat_cond(**values, **{name: tensor.clone() for name, tensor in given.items()})


@torch.no_grad()
def digest_of_painting(model: Any) -> str:
    """Compute the sha256 of what an inpainting MODEL makes of a picture and a mask."""
    draws = torch.Generator().manual_seed(0)
    picture = torch.randn(1, model.latent_format.latent_channels, SIDE, SIDE, generator=draws)
    mask = torch.rand(1, 1, SIDE, SIDE, generator=draws)
    made = _concatenated(model, (SIDE, SIDE), concat_latent_image=picture, concat_mask=mask)
    assert made is not None
    return hashlib.sha256(made.float().contiguous().numpy().tobytes()).hexdigest()


def shown(model: Any, beside: Beside, references: Sequence[Tensor]) -> dict[str, Any]:
    """Write control pictures, (C, h, w) in the VAE's scale, as ComfyUI's nodes add them to a CONDITIONING.

    In further channels where the MODEL has these, as InstructPixToPixConditioning, WanImageToVideo and
    WanFunControlToVideo do; else as ReferenceLatent does.
    """
    latents = [vae.with_time(model, each[None]) for each in references]
    if not beside.pictures or not latents:
        return {"reference_latents": latents} if latents else {}
    empty = model.process_latent_out(torch.zeros_like(latents[0]))
    slots = [*latents, *[empty] * (beside.pictures - len(latents))]
    height, width = slots[0].shape[-2:]
    found = {"concat_latent_image": torch.cat([_fitted(each, width, height) for each in slots], 1)}
    if beside.masked:  # of 1, where the model itself has to paint: a clip behind its first frame
        found["concat_mask"] = mask = torch.zeros_like(latents[0][:, :1])
        mask[:, :, 1:] = mask.ndim > 4
    return found


def begun(model: Any, held: Any, pixels: Tensor, frames: int) -> Tensor:
    """Encode the first frame of a clip, (1, 3, H, W) in -1..1, to latents of all its frames in the VAE's own scale.

    As the nodes of image to video: WanImageToVideo encodes grey behind it, and HunyuanVideo15ImageToVideo puts zeros
    there. What HunyuanImageToVideo leaves out, ComfyUI fills with zeros in the MODEL's scale.
    """
    if isinstance(model, comfy.model_base.WAN21):
        grey = torch.zeros_like(pixels).unsqueeze(2).expand(-1, -1, frames - 1, -1, -1)
        return vae.encode_plain(held, torch.cat([pixels.unsqueeze(2), grey], 2))
    first = vae.with_time(model, vae.encode_plain(held, pixels))
    empty = torch.zeros_like(first)
    if model.concat_keys:
        empty = model.process_latent_out(empty)
    return torch.cat([first, *[empty] * ((frames - 1) // vae.frames_per_step(held))], 2)


def _fitted(latents: Tensor, width: int, height: int) -> Tensor:
    if latents.shape[-2:] == (height, width):
        return latents.clone()
    return comfy.utils.common_upscale(latents, width, height, "bilinear", "center")


class ConnectedInpainting:
    """The further channels of a linked inpainting MODEL, as it makes them itself; implements `Inpainting`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def encode(self, held: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor) -> Tensor:
        """Encode (1, 3, H, W) pixels in -1..1 with the masked region grey, as InpaintModelConditioning does."""
        del mask  # the MODEL scales the large one in its own way
        rest = vae.encode_plain(held.vae, pixels * (1 - pixel_mask.round()))
        given = {"concat_latent_image": rest.cpu(), "concat_mask": pixel_mask.cpu()}
        made = _concatenated(self._model, rest.shape[2:], **given)
        assert made is not None
        return made.float()

    def blank(self, held: Any, size: Size) -> Tensor:
        """Encode a fully painted picture of (width, height)."""
        width, height = size
        everything = torch.ones(1, 1, height, width)
        return self.encode(held, torch.zeros(1, 3, height, width), everything, everything)


def empty_inputs(conditions: Iterable[tuple[str, Any]]) -> list[str]:
    """Say which of a sample's conditions are pictures without content, in a sentence."""
    empty = [name for name, cond in conditions if isinstance(cond.cond, Tensor) and _is_empty(cond.cond)]
    if not empty:
        return []
    said = f"This MODEL also reads pictures beside its latents ({names(empty)}), and the run has none for it."
    return [f"{said} They stay empty in training and in samples."]


def _is_empty(tensor: Tensor) -> bool:
    """Tell a picture, (B, C, ..., H, W), that is the same everywhere."""
    return tensor.ndim > 3 and tensor.is_floating_point() and bool((tensor == tensor[..., :1, :1]).all())
