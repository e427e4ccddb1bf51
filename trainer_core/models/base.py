"""What training may know of a base model: protocols and plain data. Stable Diffusion in `sd/` implements them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

Size = tuple[int, int]  # width and height
Conditioning = dict[str, Tensor]  # a caption as the model reads it; opaque to training, which caches it and moves it
Conditions = TypeVar("Conditions", bound="Sliceable")
Unit = tuple[nn.Module, int]  # a block that repeats, and the level of checkpointing from which on it is recomputed
BASE = "BASE"  # in an order of blocks: the layers of all blocks that the order leaves out, and of text encoders
Prediction = Literal["epsilon", "v_prediction", "flow", "x0", "affine"]


class Sliceable(Protocol):
    """The conditions of a batch; opaque to training."""

    def part(self, which: slice) -> Any:
        """Return the conditions of some of the samples."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A network of a base model that has a learning rate of its own."""

    prefix: str  # of its layers' names in LoRA files, without the last underscore
    title: str  # in sentences
    embedding: str = ""  # what files of learned words call a text encoder's vectors


class Layer(NamedTuple):
    """A module of a base model that a LoRA can change."""

    name: str  # in the LoRA files that we write
    path: str  # in its own network
    module: Any
    part: str  # prefix of its part
    block: str  # one of the model's blocks, "" outside of them
    trainable: bool  # a preset or a pattern may choose it; else only a file that is merged or resumed may hold it
    presets: frozenset[str]  # of LoRA Config that train it, and algorithms with layers of their own
    comfy: str  # in ComfyUI's own state dict
    aliases: tuple[str, ...]  # in LoRA files of other programs, with underscores for dots


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentFormat:
    """The shape of latents, and what pictures must be like for it."""

    channels: int
    pixels: int  # of a picture for one latent pixel, along each side
    step: int  # sides of pictures are multiples of it, in pixels


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseModel:
    """How a model mixes clean latents and noise at each level, and what it predicts.

    Level t mixes alpha[t] x0 + sigma[t] noise; level 0 is the cleanest, the last one the noisiest. p and q, only for
    the kind "affine": the model predicts p[t] x0 + q[t] noise.
    """

    kind: Prediction
    alpha: Tensor  # (N,) float32
    sigma: Tensor  # (N,) float32
    snr: Tensor  # (N,) float32, (alpha / sigma)^2
    ratio: Tensor  # (N,) float32, sigma / alpha: the noise level as samplers count it
    p: Tensor | None = None  # (N,) float32
    q: Tensor | None = None  # (N,) float32


class TextEncoder(Protocol):
    """A text encoder in memory whose layers or token embeddings can be trained."""

    model: Any  # with get_input_embeddings()
    prefix: str  # of its part
    words: Mapping[str, Sequence[int]]  # learned words that its token embedding knows now, and their ids below 0


class CaptionLengths(Protocol):
    """How long captions may be: a part of `BaseModel` that needs only a tokenizer."""

    @property
    def window(self) -> int:
        """Return how many tokens are encoded together."""
        ...

    @property
    def most_tokens(self) -> int:
        """Return how many tokens of a caption are encoded; the rest is left out."""
        ...

    def count_tokens(self, caption: str, words: Mapping[str, Sequence[int]]) -> int:
        """Count the tokens of a caption."""
        ...

    def cut_text(self, caption: str, words: Mapping[str, Sequence[int]]) -> tuple[str, list[str]]:
        """Find the rest of a caption that is left out: its text, and the trained words in it; ("", []) for none."""
        ...


class BaseModel(Protocol):
    """A base model in memory, or its outline on the meta device. Training knows nothing else of it."""

    # --- what it is ---
    @property
    def name(self) -> str:
        """Name the file or folder, for people and metadata."""
        ...

    @property
    def kind(self) -> str:
        """Name the family: "sd1", "sdxl" …"""
        ...

    @property
    def title(self) -> str:
        """Name the family in sentences."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """List the networks that can be trained: the denoiser's first, then the text encoders' in their order."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Collect the facts that LoRA files hold about the model, by the names in `lora_files/metadata.py`."""
        ...

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess for which models a LoRA file was made; "" when nothing tells.

        widths: inputs of each layer by its name in the file, 0 where that is not known. metadata: of the file.
        """
        ...

    # --- the denoiser ---
    @property
    def denoiser(self) -> Any:
        """Return the denoiser, an nn.Module; None when it is freed."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of frozen weights and activations."""
        ...

    @property
    def noise(self) -> NoiseModel:
        """Describe the noise at each level, and what the denoiser predicts."""
        ...

    @property
    def latents(self) -> LatentFormat:
        """Describe the latents."""
        ...

    @property
    def blocks(self) -> tuple[str, ...]:
        """Name the denoiser's blocks, in the order of lists of numbers."""
        ...

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Give the prefixes of the denoiser's small, sensitive layers; their weights are never quantized."""
        ...

    @property
    def inpainting(self) -> bool:
        """Tell whether the denoiser also reads a mask and the picture without what the mask covers."""
        ...

    def layers(self) -> list[Layer]:
        """List the layers of all networks in memory, each network's in its own order."""
        ...

    def block_layouts(self, setting: str) -> list[list[str]]:
        """List the orders of blocks that the numbers of a setting of LoRA Config may follow."""
        ...

    def units(self, module: nn.Module) -> list[Unit]:
        """List the blocks that repeat in the denoiser or in a text encoder."""
        ...

    def batch(
        self, captions: Sequence[Conditioning], sizes: Tensor, device: torch.device, painted: Tensor | None = None
    ) -> Any:
        """Join the conditions of a batch on a device.

        sizes: (B, 6) original height and width, top and left of the crop, trained height and width, in pixels.
        painted: (B, C, H, W), of inpainting models: what `encode_painted` gives.
        """
        ...

    def predict(self, noised: Tensor, levels: Tensor, conditions: Any) -> Tensor:
        """Predict for (B, C, H, W) noised latents at (B,) levels; the raw output of the network, same shape."""
        ...

    def empty_conditions(self, count: int, latents: Size, tokens: int) -> Any:
        """Build the conditions of a batch on the meta device; text encoders in memory run there.

        latents: (height, width) in latent pixels. tokens: as `longest` gives them.
        """
        ...

    # --- text ---
    @property
    def text_encoders(self) -> tuple[Any, ...]:
        """Return the text encoders in memory; () when they are freed."""
        ...

    @property
    def text_identity(self) -> str:
        """Name the text encoders' state; another name means that captions are encoded otherwise."""
        ...

    @property
    def window(self) -> int:
        """Return how many tokens are encoded together."""
        ...

    @property
    def most_tokens(self) -> int:
        """Return how many tokens of a caption are encoded; the rest is left out."""
        ...

    def mark_text(self, *changes: str) -> None:
        """Let the text encoders' identity tell of changes to their weights."""
        ...

    def encode_text(self, caption: str, device: torch.device | str) -> Conditioning:
        """Encode a caption with the text encoders as they are now."""
        ...

    def count_tokens(self, caption: str, words: Mapping[str, Sequence[int]]) -> int:
        """Count the tokens of a caption."""
        ...

    def cut_text(self, caption: str, words: Mapping[str, Sequence[int]]) -> tuple[str, list[str]]:
        """Find what of a caption the text encoders leave out: the text, and learned words in it; ("", []) for none."""
        ...

    def longest(self, captions: Iterable[str], count: int, words: Mapping[str, Sequence[int]]) -> int:
        """Count the tokens of a batch of `count` of these captions when it is longest."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """Return the ids of a text's tokens; [] where no tokenizer is there."""
        ...

    # --- the autoencoder ---
    @property
    def autoencoder(self) -> Any:
        """Return the autoencoder, an nn.Module in float32; None when it is freed."""
        ...

    @property
    def autoencoder_identity(self) -> str:
        """Name the autoencoder's weights; another name means other weights."""
        ...

    def encode_pixels(self, autoencoder: Any, pixels: Tensor, /) -> tuple[Tensor, Tensor]:
        """Encode (B, 3, H, W) pixels in -1..1 with the autoencoder or a copy of it: mean and standard deviation."""
        ...

    def encode_painted(self, autoencoder: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor, /) -> Tensor:
        """Encode what an inpainting model reads beside the noised latents; pixel_mask (B, 1, H, W), mask at latents."""
        ...

    def encode_blank(self, autoencoder: Any, size: Size, /) -> Tensor:
        """Encode what an inpainting model reads where all of a picture of (width, height) is painted."""
        ...

    def decode(self, autoencoder: Any, latents: Tensor, /) -> Tensor:
        """Decode (B, C, H, W) latents to (B, height, width, 3) pictures in 0..1."""
        ...

    def free(self, *parts: str) -> None:
        """Forget "text", "autoencoder" or "denoiser", or everything, so that its memory can be freed."""
        ...


class Source(Protocol):
    """Where a base model comes from. Nothing is loaded before `load`."""

    @property
    def name(self) -> str:
        """Name the model, for people."""
        ...

    def check(self) -> None:
        """Raise ValueError for a model that cannot be trained, from headers alone."""
        ...

    def outline(self, dtype: torch.dtype = torch.float32) -> BaseModel:
        """Build the model without weights: shapes on the meta device, its tokenizer, its noise."""
        ...

    def load(self, dtype: torch.dtype, amend: Callable[[Any], None] | None = None) -> BaseModel:
        """Load the model to the CPU, frozen; amend: changes the weights before they are cast to dtype."""
        ...

    def remarks(self) -> list[str]:
        """Return sentences on what may surprise about this model."""
        ...

    def digest(self, path: Path) -> str:
        """Compute the sha256 of one of the files; its content may be kept in memory for `load`."""
        ...

    @property
    def held(self) -> int:
        """Return the bytes in memory that `load` will use."""
        ...

    def files(self) -> dict[str, Path]:
        """Return the files and folders that decide what the model computes, by role."""
        ...
