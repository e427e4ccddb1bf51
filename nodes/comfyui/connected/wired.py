"""Linked models of a run, and what the run finds out about them."""

from __future__ import annotations

import functools

import comfy.model_management

from ....trainer_core.config import BaseModelConfig
from ....trainer_core.memory import Watched
from ....trainer_core.models import LatentFormat, Layer
from ....trainer_core.models.base import Unit
from . import identity
from .architecture import Architecture, architecture_of
from .beside import beside_of, digest_of_painting
from .clip_layers import ConnectedEncoder, text_encoders
from .denoiser import RawDenoiser
from .experts import named_high, sides_of
from .layers import list_layers
from .live import LinkedModels
from .noise import sigmas
from .vision import Sight, reads_of

SINGLE = "single"  # edit_text of Qwen-Image-Edit's first model


class Wired:
    """A MODEL, CLIP and VAE as all that a `ConnectedModel` is made of shares them. They stay ComfyUI's."""

    def __init__(self, config: BaseModelConfig, live: LinkedModels) -> None:
        assert config.connected is not None
        self.name, self.prompt_weights = config.path, config.prompt_weights
        self.model, self.clip, self.vae = live.model.clone(), live.clip, live.vae
        self.partner = live.sampled  # draws the samples instead of `model`
        self.apart = self.clip.patcher.load_device != self.model.load_device
        # What a LoRA adds to their layers lies where the MODEL computes.
        self.encoders: tuple[ConnectedEncoder, ...] = () if self.apart else text_encoders(self.clip)
        self.texts = self.encoders  # those in memory for training: none once they were let go
        self.live = False  # whether they run in the steps of a session, with gradients
        self.marks: list[str] = []  # changes of their weights that `digests` does not have
        self.architecture: Architecture = architecture_of(self.model)
        both = live.high is not None
        self.sides = sides_of(self.model, self.architecture.halves, config.connected, both=both)
        self.beside = beside_of(self.model.model)
        self.seen_as = config.connected.edit_text if self.architecture.seen else ""
        guidance = config.connected.guidance
        guidance = self.architecture.guidance if guidance < 0 else guidance
        self.denoiser: RawDenoiser | None = RawDenoiser(self.model, sigmas(self.model), guidance, self.beside)
        reads = reads_of(self.model.model, self.beside)
        self.sight = None if live.vision is None or reads is None else Sight(live.vision, reads)
        self.high = None if live.high is None else live.high.clone()
        self.denoiser_high: RawDenoiser | None = (
            None if self.high is None else RawDenoiser(self.high, sigmas(self.high), guidance, self.beside)
        )
        self.active: RawDenoiser | None = self.denoiser  # which predicts; the other one waits
        self.reserved = 0  # bytes of the device for a step
        self.holds = 0  # bytes of the device that rounded weights may take beside them
        self.left_out: frozenset[str] = frozenset()  # names of layers that cannot be trained
        self.drawn_as_trained = False  # whether only code for training calls all layers, so that samples need it
        self.units: list[Unit] | None = None  # blocks that can be recomputed; None before they were tried
        self.written = Watched()

    @property
    def latents(self) -> LatentFormat:
        """The format of latents."""
        form = self.model.model.latent_format
        pixels = self.architecture.pixels or form.spacial_downscale_ratio
        row = self.architecture
        frames = row.frames if form.latent_dimensions > 2 else 0  # a row may hold a model of pictures, too
        return LatentFormat(channels=form.latent_channels, pixels=pixels, step=row.step, frames=frames)

    @functools.cached_property
    def form_of_masks(self) -> str:
        """The sha256 of how an inpainting MODEL writes masks; "" for others."""
        return digest_of_painting(self.model.model) if self.beside.paints else ""

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """All layers of the MODEL's denoiser."""
        return list_layers(self.model.model)

    @functools.cached_property
    def layers_high(self) -> list[Layer]:
        """All layers of the denoiser for high noise, where there is one; other programs' files are for one alone."""
        found = [] if self.high is None else list_layers(self.high.model)
        return [layer._replace(name=named_high(layer.name), aliases=(), slices={}) for layer in found]

    @property
    def listed(self) -> list[Layer]:
        """All layers of the MODEL's denoiser, and of the text encoders in memory."""
        return [*self.layers, *self.layers_high, *(layer for text in self.texts for layer in text.layers)]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """The sha256, by role, of all but files that decides what the models compute."""
        return {
            "model": identity.digest_of_model(self.model),
            **({"model high": identity.digest_of_model(self.high)} if self.high is not None else {}),
            "clip": identity.digest_of_clip(self.clip),
            "vae": identity.digest_of_vae(self.vae),
            **({"clip vision": identity.digest_of_vision(self.sight.linked)} if self.sight else {}),
        }

    @property
    def denoisers(self) -> tuple[RawDenoiser, ...]:
        """The denoisers in memory, in the order of their sides."""
        return tuple(each for each in (self.denoiser, self.denoiser_high) if each is not None)

    def take(self, denoiser: RawDenoiser) -> RawDenoiser:
        """Let a denoiser predict from now on; ComfyUI loads it where it was not its turn."""
        if denoiser is not self.active:
            self.active = denoiser
            self.load()
        return denoiser

    def load(self) -> None:
        """Let ComfyUI load the MODEL with its patches, wholly if it fits, and the CLIP where it is trained."""
        patchers = [self.active.patcher if self.active else self.model, *([self.clip.patcher] if self.live else [])]
        comfy.model_management.load_models_gpu(patchers, memory_required=self.reserved)
