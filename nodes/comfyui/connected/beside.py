"""What a MODEL reads beside its latents, found by asking it: a mask and the rest of a picture, or other pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.clip_vision
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
# Classes that see frames without noise among the others, each at a level of its own.
KEEP = (comfy.model_base.WAN22, comfy.model_base.LTXV, comfy.model_base.LTXAV)
OF_VISION = 2  # axes of what CLIP vision says of a picture; latents have more
KEPT = "kept"  # the condition that holds latents of these frames, in the MODEL's scale


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
    WanFunControlToVideo do; else as ReferenceLatent does. Tensors of two axes, (tokens, width), are what CLIP vision
    says of the pictures.
    """
    latents, painted = _parts(model, references)
    if not latents or keeps(model):
        return {}
    if not beside.pictures:
        return {"reference_latents": latents}
    empty = model.process_latent_out(torch.zeros_like(latents[0]))
    slots = [*latents, *[empty] * (beside.pictures - len(latents))]
    height, width = slots[0].shape[-2:]
    found: dict[str, Any] = {"concat_latent_image": torch.cat([_fitted(each, width, height) for each in slots], 1)}
    if beside.masked:
        found["concat_mask"] = painted
    for states in (each for each in references if each.ndim == OF_VISION):
        found["clip_vision_output"] = output = comfy.clip_vision.Output()
        output["penultimate_hidden_states"] = output["last_hidden_state"] = states[None]  # each MODEL reads its own
    return found


def kept(model: Any, references: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Read the frames that a MODEL sees without noise among the others; None without any.

    Returns latents (1, C, t, h, w) in the VAE's scale, and a mask of their shape that is 1 where it paints, as
    Wan22ImageToVideoLatent and its like write both into a LATENT.
    """
    latents, painted = _parts(model, references)
    return (latents[0], painted.expand_as(latents[0])) if latents and keeps(model) else None


def keeps(model: Any) -> bool:
    """Tell whether a MODEL may see the first frame of a clip in its place, without noise."""
    return isinstance(model, KEEP) or continues(model)


def continues(model: Any) -> bool:
    """Tell whether a MODEL sees the first frame of every clip so, as it draws from nothing else."""
    return isinstance(model, comfy.model_base.CosmosPredict2) and model.image_to_video


def ends(model: Any) -> bool:
    """Tell whether a MODEL of image to video may see the last frame of a clip, too."""
    return isinstance(model, comfy.model_base.WAN21) and beside_of(model).masked


def _parts(model: Any, references: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Split control pictures into latents and the mask of what the MODEL has to paint, 1 there.

    Without one of its own that is nothing of a picture, and of a clip all but its first frame.
    """
    channels = model.latent_format.latent_channels
    latents = [vae.with_time(model, each[None, :channels]) for each in references if each.ndim > OF_VISION]
    painted = [each[None, channels:] for each in references if each.ndim > OF_VISION and len(each) > channels]
    if painted or not latents:
        return latents, painted[0] if painted else torch.empty(0)
    mask = torch.zeros_like(latents[0][:, :1])
    mask[:, :, 1:] = mask.ndim > 4
    return latents, mask


def begun(model: Any, held: Any, pixels: Tensor, frames: int) -> Tensor:
    """Encode the first frame of a clip to latents of all its frames in the VAE's own scale, and a mask behind them.

    pixels: (1, 3, H, W) in -1..1, or (1, 3, 2, H, W) of the first and the last frame. The mask is 1 where the MODEL has
    to paint. As the nodes of image to video: WanImageToVideo and WanFirstLastFrameToVideo encode grey between them, and
    HunyuanVideo15ImageToVideo puts zeros there. What HunyuanImageToVideo leaves out, ComfyUI fills with zeros in the
    MODEL's scale.
    """
    pixels = pixels.unsqueeze(2) if pixels.ndim < 5 else pixels
    if isinstance(model, comfy.model_base.WAN21) and not keeps(model):
        return _amid_grey(held, pixels, frames)
    first = vae.with_time(model, vae.encode_plain(held, pixels))
    empty = torch.zeros_like(first)
    if model.concat_keys or isinstance(model, comfy.model_base.WAN22):
        empty = model.process_latent_out(empty)
    latents = torch.cat([first, *[empty] * ((frames - 1) // vae.frames_per_step(held))], 2)
    painted = torch.ones_like(latents[:, :1])
    painted[:, :, 0] = 0
    return torch.cat([latents, painted], 1)


def _amid_grey(held: Any, pixels: Tensor, frames: int) -> Tensor:
    """Encode grey frames with the first and perhaps the last of them; four channels of the mask hold frames each."""
    first, last = pixels[:, :, :1], pixels[:, :, 1:]
    grey = torch.zeros_like(first).expand(-1, -1, frames - pixels.shape[2], -1, -1)
    latents = vae.encode_plain(held, torch.cat([first, grey, last], 2))
    painted = torch.ones_like(latents[:, :1]).repeat(1, time := vae.frames_per_step(held), 1, 1, 1)
    painted[:, :, 0] = 0
    painted[:, time - last.shape[2] :, -1] = 0
    return torch.cat([latents, painted], 1)


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
    read = [(name, cond.cond) for name, cond in conditions if name != "denoise_mask"]
    empty = [name for name, value in read if isinstance(value, Tensor) and _is_empty(value)]
    if not empty:
        return []
    said = f"This MODEL also reads pictures beside its latents ({names(empty)}), and the run has none for it."
    return [f"{said} They stay empty in training and in samples."]


def _is_empty(tensor: Tensor) -> bool:
    """Tell a picture or clip, (B, C, ..., H, W), that is the same everywhere."""
    flat = tensor.flatten(2) if tensor.ndim > 3 and tensor.is_floating_point() else None
    return flat is not None and bool((flat == flat[..., :1]).all())
