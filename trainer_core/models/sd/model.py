"""Stable Diffusion 1, 2 and XL in memory: a UNet, CLIP text encoders and an autoencoder behind the model protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import Defaults, SamplePicture, SamplingDefaults
from ..base import Conditioning, LatentFormat, Layer, LevelDefaults, NoiseModel, Part, Prediction, Size, Slice, Unit
from ..words import Words
from . import autoencoder
from .family import LATENT_CHANNELS, SIZE_CHANNELS, TOY, TOY_CHANNELS, V_RESOLUTION, Family
from .identify import made_for
from .layers import block_layouts, block_names, list_layers
from .noise import noise_model
from .text import (
    CHUNK,
    MAX_CHUNKS,
    TextEncoder,
    batch_context,
    count_tokens,
    encode_caption,
    longest_context,
    token_ids,
    truncated_text,
    truncated_words,
)
from .units import UNQUANTIZED, units

PIXELS = 8  # of a picture per latent pixel, along each side


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """The UNet's inputs for a batch, besides noised latents and timesteps."""

    context: Tensor  # (B, L, D)
    mask: Tensor | None = None  # (B, L) bool, the context that is no padding; None without padding
    pooled: Tensor | None = None  # (B, P), of families that use one
    sizes: Tensor | None = None  # (B, 6): original height and width, crop top and left, trained height and width
    painted: Tensor | None = (
        None  # (B, 5, H, W), of inpainting models: mask, and latents of the picture without the masked region
    )

    def part(self, samples: slice) -> Conditions:
        """Select the conditions of some samples."""
        rest = {name: getattr(self, name) for name in ("mask", "pooled", "sizes", "painted")}
        chosen = {name: value[samples] for name, value in rest.items() if value is not None}
        return Conditions(context=self.context[samples], **chosen)


@dataclass(kw_only=True)
class StableDiffusion:
    """A model of Stable Diffusion; implements `BaseModel`."""

    family: Family
    name: str  # file or folder name, for messages and metadata
    unet: Any
    texts: tuple[TextEncoder, ...]
    vae: Any
    tokenizer: Any
    identity: dict[str, str] = field(default_factory=dict)  # sha256 of the stored tensors of text encoders and vae
    short_hash: str = ""  # of a single file
    dtype: torch.dtype = torch.float32  # of frozen weights and activations
    prediction: Prediction = "epsilon"  # or "v_prediction"
    zero_terminal_snr: bool = False  # the last timestep is pure noise
    clip_skip: int = 1  # as configured
    prompt_weights: bool = False  # (word:1.2) in captions is a weight
    inpainting: bool = False  # the UNet also reads a mask and the picture with the masked region blanked
    window: int = CHUNK  # tokens in a chunk
    max_tokens: int = CHUNK * MAX_CHUNKS  # of a caption; the rest is cut
    levels: LevelDefaults = field(default_factory=LevelDefaults)
    references: int = 0
    seen_as: str = ""
    managed: bool = False
    writes_inputs: bool = False

    @property
    def kind(self) -> str:
        """The family."""
        return self.family.name

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return self.family.title

    @property
    def defaults(self) -> Defaults:
        """What a run takes for this model where its settings are left open."""
        if self.unet.config.block_out_channels[0] < TOY_CHANNELS:
            return TOY
        large = self.family.name == "sd2" and self.prediction == "v_prediction"
        return replace(self.family.defaults, resolution=V_RESOLUTION) if large else self.family.defaults

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
            "encoder_layer": max(self.clip_skip, *(part.layer for part in self.family.texts)),
        }

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess the family that a LoRA file was made for; "" if nothing tells."""
        return made_for(widths, metadata)

    # --- the UNet ---

    @property
    def denoiser(self) -> Any:
        """The UNet."""
        return self.unet

    @property
    def noise(self) -> NoiseModel:
        """The noise schedule, and the kind of prediction."""
        return noise_model(self.prediction, self.zero_terminal_snr)

    @property
    def latents(self) -> LatentFormat:
        """The format of latents: four channels, 8 pixels each way."""
        return LatentFormat(channels=LATENT_CHANNELS, pixels=PIXELS, step=PIXELS)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the UNet's blocks in the order of kohya's lists."""
        return tuple(block_names(self.unet))

    def layers(self) -> list[Layer]:
        """List the layers of the UNet and of the text encoders in memory."""
        return list_layers(self.unet, self.texts, self.family)

    def further_names(self) -> Mapping[str, tuple[str, Slice | None]]:
        """None: every layer lists all of its names."""
        return {}

    def try_out(
        self, layers: Mapping[str, nn.Module], caption: Conditioning, size: Size, references: int = 0
    ) -> list[str]:
        """Leave nothing out: every layer of Stable Diffusion gets a gradient."""
        del layers, caption, size, references
        return []

    def block_layouts(self, setting: str) -> list[list[str]]:
        """List the possible block orders of a list setting of LoRA Config."""
        return block_layouts(self.unet, setting)

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Give the prefixes of the UNet's outermost layers."""
        return UNQUANTIZED

    def units(self, module: nn.Module) -> list[Unit]:
        """List the repeated blocks of the UNet or of a text encoder."""
        return units(module)

    def batch(
        self,
        captions: Sequence[Conditioning],
        sizes: Tensor,
        device: torch.device,
        painted: Tensor | None = None,
        references: Sequence[Sequence[Tensor]] = (),
    ) -> Conditions:
        """Join the conditions of a batch on a device; sizes (B, 6), painted (B, 5, H, W) for inpainting models."""
        del references  # the UNet reads none
        context, mask = batch_context([c["context"] for c in captions])
        context, mask = context.to(device, self.dtype), None if mask is None else mask.to(device)
        pooled = [c["pooled"] for c in captions if "pooled" in c]
        painted = None if painted is None else painted.to(device)
        if not pooled:
            return Conditions(context=context, mask=mask, painted=painted)
        joined = torch.stack(pooled).to(device, self.dtype)
        return Conditions(context=context, mask=mask, pooled=joined, sizes=sizes.to(device), painted=painted)

    def predict(self, noised: Tensor, levels: Tensor, conditions: Conditions) -> Tensor:
        """Run the UNet on (B, 4, H, W) noised latents at (B,) timesteps."""
        extra: dict[str, Any] = {}
        if conditions.mask is not None:
            extra["encoder_attention_mask"] = conditions.mask
        if conditions.pooled is not None:
            extra["added_cond_kwargs"] = {"text_embeds": conditions.pooled, "time_ids": conditions.sizes}
        if conditions.painted is not None:
            noised = torch.cat([noised, conditions.painted], dim=1)
        return self.unet(noised.to(self.dtype), levels, encoder_hidden_states=conditions.context, **extra).sample

    def empty_conditions(self, count: int, latents: tuple[int, int], tokens: int) -> Conditions:
        """Build a batch's conditions on the meta device; text encoders in memory run there."""
        config = self.unet.config
        context = torch.empty(count, tokens, config.cross_attention_dim, dtype=self.dtype, device="meta")
        pooled = sizes = painted = None
        if config.addition_embed_type == "text_time":
            sizes = torch.empty(count, 6, dtype=torch.int64, device="meta")
            width = config.projection_class_embeddings_input_dim - 6 * SIZE_CHANNELS
            pooled = context.new_empty(count, width)
        if self.texts:
            rows = tokens // (CHUNK + 2)
            caption = _WholeChunks(min(rows, MAX_CHUNKS))
            text, weights = "(any:2)", self.prompt_weights  # a weight takes one more row of the text encoder
            each = [encode_caption(self.texts, caption, text, "meta", weights=weights) for _ in range(count)]
            context = torch.stack([c.context.repeat(tokens // len(c.context), 1) for c in each]).to(self.dtype)
            pooled = None if pooled is None else torch.stack([c.pooled for c in each if c.pooled is not None])
        if self.inpainting:
            painted = torch.empty(count, config.in_channels - config.out_channels, *latents, device="meta")
        return Conditions(context=context, pooled=pooled, sizes=sizes, painted=painted)

    def put_beneath(self, tensors: Mapping[str, Tensor], strength: float) -> None:
        """Never called: `merge_beneath` merges into the weights of a model that is not managed."""
        raise NotImplementedError

    @property
    def movable(self) -> int:
        """None: this pack's own memory settings move weights."""
        return 0

    def reserve(self, size: int) -> None:
        """Reserve nothing: the memory settings place the weights."""
        del size

    def session(self, device: torch.device) -> AbstractContextManager[None]:
        """Change nothing: the UNet is this run's own."""
        del device
        return nullcontext()

    def passes(self, shape: Sequence[int]) -> AbstractContextManager[None]:
        """Change nothing: no block of the UNet writes into its inputs."""
        del shape
        return nullcontext()

    # --- text ---

    @property
    def text_encoders(self) -> tuple[TextEncoder, ...]:
        """The text encoders in memory."""
        return self.texts

    @property
    def text_identity(self) -> str:
        """A key of the text encoders' state: stored weights, dtype, layer in use, chunks, and how captions are read."""
        layer = max(self.clip_skip, *(part.layer for part in self.family.texts))
        reading = "/prompt weights" if self.prompt_weights else ""
        return f"{self.identity['text_encoder']}/{self.dtype}/{layer}/{MAX_CHUNKS}{reading}"

    def mark_text(self, *changes: str) -> None:
        """Add changes of the text encoders' weights to `text_identity`."""
        self.identity["text_encoder"] = "+".join([self.identity["text_encoder"], *changes])

    def encode_text(self, caption: str, device: torch.device | str, pictures: Sequence[Tensor] = ()) -> Conditioning:
        """Encode a caption as ComfyUI does at inference: "context" (L, D), for XL also "pooled" (P,)."""
        del pictures  # CLIP's text encoders read none
        context, pooled = encode_caption(self.texts, self.tokenizer, caption, device, weights=self.prompt_weights)
        return {"context": context} | ({} if pooled is None else {"pooled": pooled})

    def count_tokens(self, caption: str, words: Words) -> int:
        """Count the tokens of a caption, including unused places at the ends of chunks."""
        return count_tokens(self.tokenizer, caption, words, weights=self.prompt_weights)

    def cut_text(self, caption: str, words: Words) -> tuple[str, list[str]]:
        """Find the part of a caption after the last chunk: its text, and the trained words in it."""
        return (
            truncated_text(self.tokenizer, caption, words=words, weights=self.prompt_weights),
            truncated_words(self.tokenizer, caption, words, weights=self.prompt_weights),
        )

    def longest_batch(self, captions: Iterable[str], count: int, words: Words) -> int:
        """Count the tokens, with BOS and EOS of chunks, of the longest possible batch of `count` captions."""
        lengths = (self.count_tokens(caption, words) for caption in captions)
        chunks = {min(MAX_CHUNKS, max(1, -(-length // CHUNK))) for length in lengths}
        return (CHUNK + 2) * longest_context(chunks, count)

    def token_ids(self, text: str) -> list[int]:
        """List the ids of a text's tokens; [] without a tokenizer."""
        return token_ids(self.tokenizer, text) if self.tokenizer else []

    # --- the autoencoder ---

    @property
    def autoencoder(self) -> Any:
        """The autoencoder."""
        return self.vae

    @property
    def autoencoder_identity(self) -> str:
        """The hash of the autoencoder's stored weights."""
        return self.identity["vae"]

    def encode_pixels(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (B, 3, H, W) pixels in -1..1: mean and standard deviation in model scale, float32."""
        return autoencoder.encode_pixels(vae, pixels, self.family.latent_scale)

    def encode_reference(self, vae: Any, pixels: Tensor) -> Tensor:
        """Never called, as `references` is 0."""
        raise NotImplementedError

    def encode_painted(self, vae: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor) -> Tensor:
        """Encode the mask, and the latents with the masked region mid-grey, (B, 5, h, w)."""
        return autoencoder.encode_painted(vae, pixels, pixel_mask, mask, self.family.latent_scale)

    def encode_blank(self, vae: Any, size: tuple[int, int]) -> Tensor:
        """Encode a fully painted picture of (width, height), (1, 5, h, w)."""
        return autoencoder.encode_blank(vae, size, self.family.latent_scale)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode latents in model scale to (N, H, W, 3) pictures in 0..1."""
        return autoencoder.decode(vae, latents, self.family.latent_scale)

    @property
    def sampling(self) -> SamplingDefaults:
        """20 steps of the core's Euler sampler at CFG scale 7."""
        return SamplingDefaults(steps=20, cfg=7.0, sampler="euler", samplers=("euler",))

    def encoding(self) -> AbstractContextManager[None]:
        """Nothing: the encoders are models beside the UNet."""
        return nullcontext()

    def drawing(self, network: Any) -> AbstractContextManager[None]:
        """Nothing: the core's sampler draws with the denoiser as it is."""
        del network
        return nullcontext()

    def draw(
        self,
        prompt: Conditioning,
        negative: Conditioning,
        picture: SamplePicture,
        check: Callable[[], None],
        references: Sequence[Tensor] = (),
    ) -> Tensor | None:
        """Leave samples to the core's sampler."""
        del prompt, negative, picture, check, references
        return None

    def free(self, *parts: str) -> None:
        """Drop "text", "autoencoder" or "denoiser", or all of them."""
        if not parts or "denoiser" in parts:
            self.unet = None
        if not parts or "text" in parts:
            self.texts = ()
        if not parts or "autoencoder" in parts:
            self.vae = None


class _WholeChunks:
    """A stand-in for the tokenizer that makes any caption fill a number of chunks."""

    bos_token_id, eos_token_id = 0, 1

    def __init__(self, chunks: int) -> None:
        self.ids = [2] * (CHUNK * chunks)

    def __call__(self, *_: Any, **__: Any) -> dict[str, list[int]]:
        return {"input_ids": self.ids}
