"""Stable Diffusion 1, 2 and XL in memory: a UNet, CLIP text encoders and an autoencoder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...common.side_by_side import Awaited
from ...config import Defaults, SamplingDefaults
from ..base import LatentFormat, LevelDefaults, NoiseModel, Part, Prediction
from .autoencoder import PaintedInputs, ScaledAutoencoder
from .clip import ClipText
from .conditions import UNetConditions
from .denoiser import UNet
from .family import LATENT_CHANNELS, TOY, TOY_CFG, TOY_CHANNELS, V_RESOLUTION, Family
from .layers import StableDiffusionLayers
from .noise import noise_model
from .text import ClipEncoder

READ_MEANWHILE = Awaited()  # makes a field that may be set to the work that reads it
PIXELS = 8  # of a picture per latent pixel, along each side


@dataclass(kw_only=True)
class StableDiffusion:
    """A model of Stable Diffusion; implements `BaseModel`."""

    family: Family
    name: str  # file or folder name, for messages and metadata
    unet: Any = READ_MEANWHILE
    texts: tuple[ClipEncoder, ...]
    vae: Any
    tokenizer: Any
    identity: dict[str, str] = field(default_factory=dict)  # sha256 of the stored tensors of text encoders and vae
    short_hash: str = ""  # of a single file
    dtype: torch.dtype = torch.float32  # of frozen weights and activations
    prediction: Prediction = "epsilon"  # or "v_prediction"
    zero_terminal_snr: bool = False  # the last timestep is pure noise
    clip_skip: int = 1  # as configured
    prompt_weights: bool = False  # (word:1.2) in captions is a weight
    paints: bool = False  # the UNet also reads a mask and the picture with the masked region blanked
    levels: LevelDefaults = field(default_factory=LevelDefaults)
    controls: None = None  # the UNet reads no control pictures
    sampler: None = None  # the core's draws
    host: None = None  # this run holds the weights

    @property
    def title(self) -> str:
        """The family's name in messages; a toy has its own, since what suits it suits no other model."""
        return Path(self.name).stem if self._toy and self.name else self.family.title

    experts = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The UNet, then the text encoders."""
        several = len(self.family.texts) > 1
        texts = (
            Part(
                prefix=part.kohya,
                title=f"text encoder {part.comfy.upper().replace('_', '-')}",
                embedding=part.comfy if several else "emb_params",
            )
            for part in self.family.texts
        )
        return Part(prefix="lora_unet", title="UNet"), *texts

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the model for the metadata of LoRA files, in the terms of kohya and modelspec."""
        second, v = self.family.name == "sd2", self.prediction == "v_prediction"
        architecture = "stable-diffusion-v2-768-v" if second and v else self.family.architecture
        source = "https://github.com/Stability-AI/generative-models" if self.family.ldm_names else "diffusers"
        return {
            "v2": second,
            "base_model_version": self.family.base_version + ("_v" if second and v else ""),
            "zero_terminal_snr": self.zero_terminal_snr,
            "short_hash": self.short_hash,
            "architecture": architecture,
            "implementation": source,
            "prediction_type": "v" if v else "epsilon",
            "rate": "unet_lr",
            "encoder_layer": self._layer,
        }

    @property
    def _toy(self) -> bool:
        return self.unet.config.block_out_channels[0] < TOY_CHANNELS

    @property
    def defaults(self) -> Defaults:
        """What a run takes for this model where its settings are left open."""
        if self._toy:
            return TOY
        large = self.family.name == "sd2" and self.prediction == "v_prediction"
        return replace(self.family.defaults, resolution=V_RESOLUTION) if large else self.family.defaults

    @property
    def sampling(self) -> SamplingDefaults:
        """20 steps of Euler's sampler at CFG scale 7, and at 3 for a toy."""
        return SamplingDefaults(cfg=TOY_CFG) if self._toy else SamplingDefaults()

    @property
    def noise(self) -> NoiseModel:
        """The noise schedule, and the kind of prediction."""
        return noise_model(self.prediction, self.zero_terminal_snr)

    @property
    def latents(self) -> LatentFormat:
        """The format of latents: four channels, 8 pixels each way."""
        return LatentFormat(channels=LATENT_CHANNELS, pixels=PIXELS, step=PIXELS)

    @property
    def layers(self) -> StableDiffusionLayers:
        """The layers of the UNet and of the text encoders in memory."""
        return StableDiffusionLayers(self.unet, self.texts, self.family)

    @property
    def denoiser(self) -> UNet:
        """The UNet."""
        return UNet(self.unet, self.dtype)

    @property
    def conditions(self) -> UNetConditions:
        """Context, pooled embedding and sizes."""
        return UNetConditions(self.unet, self.texts, self.dtype, self.prompt_weights)

    @property
    def text(self) -> ClipText:
        """The text encoders, as ComfyUI uses them at inference."""
        return ClipText(
            tokenizer=self.tokenizer,
            weights=self.prompt_weights,
            encoders=self.texts,
            stored=self.identity,
            dtype=self.dtype,
            layer=self._layer,
        )

    @property
    def autoencoder(self) -> ScaledAutoencoder:
        """The autoencoder, in the UNet's scale."""
        return ScaledAutoencoder(self.vae, self.identity.get("vae", ""), self.family.latent_scale)

    @property
    def inpainting(self) -> PaintedInputs | None:
        """The further inputs of an inpainting model."""
        return PaintedInputs(self.family.latent_scale) if self.paints else None

    def free(self, *names: str) -> None:
        """Drop "text", "autoencoder" or "denoiser", or all of them."""
        if not names or "denoiser" in names:
            self.unet = None
        if not names or "text" in names:
            self.texts = ()
        if not names or "autoencoder" in names:
            self.vae = None

    @property
    def _layer(self) -> int:
        """The text encoders' layer in use, counted from the end."""
        return max(self.clip_skip, *(part.layer for part in self.family.texts))
