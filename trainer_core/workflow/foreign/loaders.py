"""Which of ComfyUI's own nodes load a family of models, and with which files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..places import listed


class Family(NamedTuple):
    """How ComfyUI loads the text encoders of a family of models."""

    encoders: int
    type: str = ""  # as Load CLIP and DualCLIPLoader name it; the loaders of three and four have none


FAMILIES: dict[str, Family] = {
    "chroma": Family(1, "chroma"),
    "cosmos": Family(1, "cosmos"),
    "flux": Family(2, "flux"),
    "flux2": Family(1, "flux2"),
    "hidream": Family(4),
    "hunyuan_image": Family(2, "hunyuan_image"),
    "hunyuan_video": Family(2, "hunyuan_video"),
    "ltxv": Family(1, "ltxv"),
    "lumina2": Family(1, "lumina2"),
    "omnigen2": Family(1, "omnigen2"),
    "pixart": Family(1, "pixart"),
    "qwen_image": Family(1, "qwen_image"),
    "sd3": Family(3),
    "stable_cascade": Family(1, "stable_cascade"),
    "wan": Family(1, "wan"),
    "z_image": Family(1, "lumina2"),
}
ROLES = ("text_encoder_1", "text_encoder_2", "text_encoder_3", "text_encoder_4")  # in the order of the loaders' inputs
ENCODER_LOADERS = {1: "CLIPLoader", 2: "DualCLIPLoader", 3: "TripleCLIPLoader", 4: "QuadrupleCLIPLoader"}


class Loader(NamedTuple):
    """A node of ComfyUI's that loads."""

    kind: str
    values: list[str]  # of its widgets
    outputs: tuple[str, ...]


OTHER = Family(1, "stable_diffusion")  # of a family that this table lacks: its type is to be chosen


def loaders_of(models: Mapping[str, str], family: str) -> list[Loader]:
    """List the loaders that give MODEL, CLIP and VAE, in this order; models: files by role, "" for one to choose."""

    def named(role: str, *kinds: str) -> str:
        return listed(models.get(role, ""), kinds)

    if models.get("checkpoint"):
        return [Loader("CheckpointLoaderSimple", [named("checkpoint", "checkpoints")], ("MODEL", "CLIP", "VAE"))]
    count, kind = FAMILIES.get(family, OTHER)
    encoders = [named(role, "text_encoders", "clip") for role in ROLES[:count]]
    more = [kind, "default"] if count < 3 else []
    return [
        Loader("UNETLoader", [named("diffusion_model", "diffusion_models", "unet"), "default"], ("MODEL",)),
        Loader(ENCODER_LOADERS[count], [*encoders, *more], ("CLIP",)),
        Loader("VAELoader", [named("vae", "vae")], ("VAE",)),
    ]
