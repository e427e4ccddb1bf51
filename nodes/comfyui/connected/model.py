"""A MODEL, CLIP and VAE that ComfyUI has loaded, as a base model of the core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....trainer_core.common.computed import Computed
from ....trainer_core.common.files import file_digest
from ....trainer_core.config import BaseModelConfig, Defaults, SamplingDefaults
from ....trainer_core.models import LatentFormat, LevelDefaults, NoiseModel, Part
from ....trainer_core.models.base import Expert
from . import beside, identity
from .architecture import begins, clip_rate, defaults_of, preset_of, remarks, sampling_of
from .beside import ConnectedInpainting
from .check import check_connected, check_partner, check_vision
from .encoding import ConnectedControls, ConnectedText, ConnectedVae
from .experts import EXPERTS, check_experts
from .fingerprint import fingerprint
from .host import ComfyUIHost, ComfyUISampler
from .live import LinkedModels
from .noise import noise_model
from .predicting import ConnectedConditions, ConnectedDenoiser, ConnectedLayers
from .sampling import SAMPLERS
from .vae import frames_per_step
from .wired import SINGLE, Wired

PREFIX = "lora_unet"  # of the denoiser's layers in our LoRA files, as sd-scripts names it for every architecture


class ConnectedModel:
    """Linked models; implements `BaseModel`."""

    def __init__(self, config: BaseModelConfig, live: LinkedModels) -> None:
        self.config, self.wired = config, (wired := Wired(config, live))
        self.name, self.architecture = wired.name, wired.architecture
        self._noise: NoiseModel | None = None  # once it was asked for
        self.layers, self.denoiser = ConnectedLayers(wired), ConnectedDenoiser(wired)
        self.conditions, self.text, self.autoencoder = (
            ConnectedConditions(wired),
            ConnectedText(wired),
            ConnectedVae(wired),
        )
        self.sampler, self.host = ComfyUISampler(wired), ComfyUIHost(wired)

    @property
    def title(self) -> str:
        """The architecture's name in messages."""
        return self.architecture.title

    @property
    def parts(self) -> tuple[Part, ...]:
        """The denoiser, and the text encoders of the CLIP that a LoRA can change."""
        texts = (Part(prefix=text.prefix, title=text.title) for text in self.wired.encoders)
        return (Part(prefix=PREFIX, title="diffusion model"), *texts)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the model for the metadata of LoRA files, in the terms of kohya and modelspec."""
        return {
            "v2": False,
            "base_model_version": self.architecture.base_version,
            "zero_terminal_snr": False,
            "short_hash": "",
            "architecture": self.architecture.modelspec,
            "implementation": "ComfyUI",
            "prediction_type": self.noise.kind,
            "rate": "unet_lr",
            "encoder_layer": 1,
        }

    @property
    def defaults(self) -> Defaults:
        """What a run takes for this model where its settings are left open."""
        own, keeps = defaults_of(self.architecture), beside.keeps(self.wired.model.model)
        return replace(
            own,
            preset=preset_of(self.wired.layers),
            clip_step=self.latents.frames,
            clip_begins=begins(self.wired.model),
            clip_keeps=keeps,
        )

    @property
    def sampling(self) -> SamplingDefaults:
        """The architecture's sampling; that of the partner, where one draws the samples."""
        drawing = self.wired.partner or self.wired.model
        own, rate = sampling_of(drawing), clip_rate(drawing)
        return SamplingDefaults(
            steps=own.steps,
            cfg=own.cfg,
            sampler=own.sampler,
            samplers=SAMPLERS,
            scheduler=own.scheduler,
            guidance=own.guidance,
            time=frames_per_step(self.wired.vae) if rate else 0,
            rate=rate,
            begins=begins(drawing) or beside.keeps(drawing.model),
            keeps=beside.keeps(drawing.model),
        )

    @property
    def noise(self) -> NoiseModel:
        """The levels and the kind of prediction of the MODEL's own sampling."""
        self._noise = self._noise or noise_model(self.wired.model)
        return self._noise

    @property
    def levels(self) -> LevelDefaults:
        """The architecture's distribution of levels, and those that the MODEL predicts."""
        assert self.config.connected is not None
        every = self.config.connected.switch_every if self.experts else 0
        return replace(self.architecture.levels, sides=self.wired.sides, switch_every=every)

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The two experts, where both are linked."""
        return EXPERTS if self.wired.high is not None else ()

    @property
    def latents(self) -> LatentFormat:
        """The format of latents."""
        return self.wired.latents

    @property
    def inpainting(self) -> ConnectedInpainting | None:
        """The further channels of an inpainting MODEL."""
        return ConnectedInpainting(self.wired.model.model) if self.wired.beside.paints else None

    @property
    def controls(self) -> ConnectedControls | None:
        """The control pictures that the MODEL reads: in channels of its own, or as ComfyUI's reference latents."""
        if own := self.wired.beside.controls:
            least = 0 if self.architecture.alone else 1
            return ConnectedControls(self.wired, own, least, begins=begins(self.wired.model))
        if beside.keeps(self.wired.model.model):
            return ConnectedControls(self.wired, 1, int(beside.continues(self.wired.model.model)), begins=True)
        most = min(self.architecture.references, 1) if self.wired.seen_as == SINGLE else self.architecture.references
        return ConnectedControls(self.wired, most) if most else None

    def free(self, *names: str) -> None:
        """Let go of the denoiser or the text encoders; the models stay ComfyUI's."""
        if not names or "denoiser" in names:
            self.wired.denoiser = self.wired.denoiser_high = self.wired.active = None
        if not names or "text" in names:
            self.wired.texts = ()


class ConnectedSource:
    """Linked models before a run; implements `Source`."""

    cached_bytes = 0

    def __init__(self, config: BaseModelConfig, live: LinkedModels) -> None:
        self.config, self.live = config, live
        self.name = config.path

    @functools.cached_property
    def _model(self) -> ConnectedModel:
        return ConnectedModel(self.config, self.live)

    def check(self) -> None:
        """Raise ValueError for models that cannot be trained."""
        check_connected(self.live.model, self.live.clip, self.live.vae)
        check_partner(self.live.sampled, self.live.model)
        check_vision(self.live.vision, self.live.model)
        if self.live.high is not None:
            check_connected(self.live.high, self.live.clip, self.live.vae)
        check_experts(self.live.high, self.live.model, self.live.sampled)

    def outline(self, dtype: torch.dtype = torch.float32) -> ConnectedModel:
        """Return the linked models: their shapes are all that is asked of an outline."""
        del dtype
        return self._model

    def take_back(self, outline: Any) -> None:
        """Nothing: there is one model."""

    def outline_autoencoder(self) -> None:
        """None: ComfyUI moves the VAE."""

    def load(
        self, dtype: torch.dtype, amend: Callable[[Any], None] | None = None, *, in_file: bool = False
    ) -> ConnectedModel:
        """Let ComfyUI load the MODEL; amend: changes it."""
        del dtype, in_file  # refused by the host, which puts the weights where it wants
        if amend:
            amend(self._model)
        self._model.wired.load()
        return self._model

    def remarks(self) -> list[str]:
        """List warnings about this model."""
        assert self.config.connected is not None
        wired = self._model.wired
        whose = "low" if wired.high is not None else self.config.connected.noise_range
        return remarks(wired.model, wired.clip, whose, sees=wired.sight is not None)

    def digest(self, path: Path) -> str:
        """Compute the sha256 of a file that a model was loaded from."""
        return file_digest(path)

    def files(self) -> dict[str, Path]:
        """Map roles to the files that ComfyUI loaded the MODEL and the CLIP from, where it says so."""
        wired = self._model.wired
        named = {"model": wired.model, "clip": wired.clip.patcher}
        named |= {} if wired.high is None else {"model high": wired.high}
        return {f"{role} {n}": path for role, p in named.items() for n, path in identity.files_of(p).items()}

    def identities(self) -> dict[str, str]:
        """Map roles to the sha256 of everything else that decides what the models compute."""
        return dict(self._model.wired.digests)

    def computes(self) -> Computed:
        """Compute numbers of what the linked models draw, where code of others runs in them."""
        return fingerprint(self._model.wired)
