"""Which of ComfyUI's own nodes load a family of models, and with which files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..places import listed


class Encoders(NamedTuple):
    """How ComfyUI loads the text encoders of a family of models."""

    encoders: int
    type: str = ""  # as Load CLIP and DualCLIPLoader name it; the loaders of three and four have none


FAMILIES: dict[str, Encoders] = {
    "chroma": Encoders(1, "chroma"),
    "cosmos": Encoders(1, "cosmos"),
    "flux": Encoders(2, "flux"),
    "flux2": Encoders(1, "flux2"),
    "hidream": Encoders(4),
    "hunyuan_image": Encoders(2, "hunyuan_image"),
    "hunyuan_video": Encoders(2, "hunyuan_video"),
    "ltxv": Encoders(1, "ltxv"),
    "lumina2": Encoders(1, "lumina2"),
    "omnigen2": Encoders(1, "omnigen2"),
    "pixart": Encoders(1, "pixart"),
    "qwen_image": Encoders(1, "qwen_image"),
    "sd3": Encoders(3),
    "stable_cascade": Encoders(1, "stable_cascade"),
    "wan": Encoders(1, "wan"),
    "z_image": Encoders(1, "lumina2"),
}
ROLES = ("text_encoder_1", "text_encoder_2", "text_encoder_3", "text_encoder_4")  # in the order of the loaders' inputs
ENCODER_LOADERS = {1: "CLIPLoader", 2: "DualCLIPLoader", 3: "TripleCLIPLoader", 4: "QuadrupleCLIPLoader"}


class LoadingNode(NamedTuple):
    """A node of ComfyUI's that loads."""

    kind: str
    values: list[str]  # of its widgets
    outputs: tuple[str, ...]


def vision_loader(path: str) -> LoadingNode:
    """Build the loader of a CLIP vision; path: its file, "" for one to choose."""
    return LoadingNode("CLIPVisionLoader", [listed(path, ("clip_vision",))], ("CLIP_VISION",))


OTHER = Encoders(1, "stable_diffusion")  # of a family that this table lacks: its type is to be chosen


def loaders_of(models: Mapping[str, str], family: str) -> list[LoadingNode]:
    """List the loaders that give MODEL, CLIP and VAE, in this order; models: files by role, "" for one to choose."""

    def named(role: str, *kinds: str) -> str:
        return listed(models.get(role, ""), kinds)

    if models.get("checkpoint"):
        return [LoadingNode("CheckpointLoaderSimple", [named("checkpoint", "checkpoints")], ("MODEL", "CLIP", "VAE"))]
    count, kind = FAMILIES.get(family, OTHER)
    encoders = [named(role, "text_encoders", "clip") for role in ROLES[:count]]
    more = [kind, "default"] if count < 3 else []
    return [
        LoadingNode("UNETLoader", [named("diffusion_model", "diffusion_models", "unet"), "default"], ("MODEL",)),
        LoadingNode(ENCODER_LOADERS[count], [*encoders, *more], ("CLIP",)),
        LoadingNode("VAELoader", [named("vae", "vae")], ("VAE",)),
    ]
