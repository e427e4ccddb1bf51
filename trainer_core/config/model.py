"""Settings of the base model, and those that trade speed for memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import Config, check_choices, check_range

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "float32", "bfloat16", "float16", "float8", "int8", "nf4"]
Prediction = Literal["auto", "epsilon", "v_prediction"]
MODEL_FILES = ("path", "vae", "text_encoder", "text_encoder_2")  # fields that name files of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedConfig(Config):
    """Settings of a base model that is linked as MODEL, CLIP and VAE, and has no files of its own."""

    SECTION: ClassVar = "base_model.connected"
    NODE: ClassVar = "Use Connected Model"

    key: str  # finds the linked models in memory; no part of a run's identity, which is that of their weights
    guidance: float = -1.0  # distilled guidance that training gives the denoiser; -1 = the family's
    # How Qwen-Image-Edit's text encoder sees control pictures: up to three, as from 2509 on, or the first model's one
    edit_text: Literal["plus", "single"] = "plus"

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "guidance", -1, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelConfig(Config):
    """The base model's files or its connected models, and the precision of its frozen weights."""

    SECTION: ClassVar = "base_model"
    NODE: ClassVar = "Load Base Model"

    path: str  # a .safetensors file in the original layout, or a diffusers folder; a connected model's name
    connected: ConnectedConfig | None = None
    vae: str = ""  # a .safetensors file of an autoencoder to use instead of the model's own
    text_encoder: str = ""  # a .safetensors file of a text encoder to use instead of the model's (first) one
    text_encoder_2: str = ""  # the same for the second one, in models that have two
    tokenizer: str = ""  # folder with vocab.json and merges.txt; "" = tokenizer/ of a diffusers folder
    prediction: Prediction = "auto"
    prompt_weights: bool = False  # (word:1.2) in captions is a weight, as in ComfyUI's prompts; otherwise plain text
    clip_skip: int = 1  # 1 = last layer, 2 = the one before (ComfyUI's stop_at_clip_layer -2)
    precision: Precision = "auto"  # of activations, and of frozen weights left at auto; the loss is always float32
    weights: Weights = "auto"  # stored format of frozen weights; auto = `precision`, in which all are computed
    text_weights: Weights = "auto"
    vae_precision: Precision = "auto"  # of the autoencoder while pictures are encoded; auto = float32
    zero_terminal_snr: Literal["auto", "on", "off"] = "auto"  # the last timestep is pure noise; auto = as the file says

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "clip_skip", 1, 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Config):
    """Settings that trade speed for memory; the trained weights differ by rounding at most. auto fits the device."""

    SECTION: ClassVar = "memory"
    NODE: ClassVar = "Memory"

    checkpointing: Literal["auto", "0", "1", "2", "3", "4", "full"] = "auto"  # of gradients
    offload_weights: Literal["auto", "none", "half", "all"] = "auto"  # frozen UNet weights kept in RAM, streamed
    offload_activations: Literal["auto", "off", "on"] = "auto"  # kept in RAM until the backward pass
    # Kernel of scaled dot product attention: one of torch's, or that of the package xformers
    attention: Literal["auto", "flash", "efficient", "cudnn", "math", "xformers"] = "auto"
    channels_last: Literal["auto", "off", "on"] = "auto"  # memory order of convolutions
    compile: bool = False  # torch.compile of the UNet's repeated blocks
    # Where encoded pictures and captions are kept. RAM writes nothing; none encodes them anew at each micro-batch.
    encodings: Literal["disk", "RAM", "none"] = "disk"

    def __post_init__(self) -> None:
        check_choices(self)
