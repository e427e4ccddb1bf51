"""A MODEL, CLIP and VAE that ComfyUI has loaded, behind the core's model protocol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import Tensor, nn

from ....trainer_core.common.files import file_digest
from ....trainer_core.config import BaseModelConfig, Defaults, SamplePicture, SamplingDefaults
from ....trainer_core.memory import Watched
from ....trainer_core.models import (
    Conditioning,
    LatentFormat,
    Layer,
    LevelDefaults,
    NoiseModel,
    Part,
    Words,
)
from ....trainer_core.models.base import Size, Slice, Unit
from . import gradients, identity, names, text, vae
from . import layers as layers_of
from .check import check_connected, check_partner
from .denoiser import Conditions, Denoiser
from .family import Family, defaults_of, family_of, preset_of, remarks
from .live import live_of
from .noise import noise_model, sigmas
from .sampling import SAMPLERS, draw
from .tried import comfyui_runs, tried

PREFIX = "lora_unet"  # of the denoiser's layers in our LoRA files, as sd-scripts names it for every architecture
SINGLE = "single"  # edit_text of Qwen-Image-Edit's first model
WINDOW = 2**31  # tokens; ComfyUI cuts captions into chunks of its own, without an upper limit


class ConnectedModel:
    """Linked models; implements `BaseModel`. They stay ComfyUI's: it moves, casts and patches their weights."""

    managed = True
    writes_inputs = True
    inpainting = False
    unquantized: tuple[str, ...] = ()
    text_encoders: tuple[Any, ...] = ()
    window = max_tokens = WINDOW

    def __init__(self, config: BaseModelConfig) -> None:
        assert config.connected is not None
        live = live_of(config)
        self.name, self.prompt_weights = config.path, config.prompt_weights
        self.model, self.clip, self.vae = live.model.clone(), live.clip, live.vae
        self._partner = live.sampled  # draws the samples instead of `model`
        self._drawing: Any = None  # that partner with the network's LoRA on it
        self.family: Family = family_of(self.model)
        self._edit_text = config.connected.edit_text
        guidance = config.connected.guidance
        guidance = self.family.guidance if guidance < 0 else guidance
        self._denoiser: Denoiser | None = Denoiser(self.model, sigmas(self.model), guidance)
        self._noise: NoiseModel | None = None  # once it was asked for
        self._reserved = 0  # bytes of the device for a step
        self._left_out: frozenset[str] = frozenset()  # names of layers that cannot be trained
        self._units: list[Unit] | None = None  # blocks that can be recomputed; None before they were tried
        self._written = Watched()

    # --- what it is ---

    @property
    def kind(self) -> str:
        """The family."""
        return self.family.kind

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return self.family.title

    @property
    def parts(self) -> tuple[Part, ...]:
        """The denoiser; text encoders are not trained through CLIP."""
        return (Part(prefix=PREFIX, title="diffusion model"),)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the model for the metadata of LoRA files, in the terms of kohya and modelspec."""
        return {
            "v2": False,
            "base_model_version": self.family.base_version,
            "zero_terminal_snr": False,
            "short_hash": "",
            "architecture": self.family.architecture,
            "implementation": "ComfyUI",
            "prediction_type": self.noise.kind,
            "rate": "unet_lr",
            "encoder_layer": 1,
        }

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess the family that a LoRA file was made for; "" if nothing tells."""
        return names.made_for(widths, metadata)

    # --- the denoiser ---

    @property
    def denoiser(self) -> Any:
        """The denoiser; None after `free`."""
        return None if self._denoiser is None else self.model.model.diffusion_model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.model.model.get_dtype_inference()

    @property
    def noise(self) -> NoiseModel:
        """The levels and the kind of prediction of the MODEL's own sampling."""
        self._noise = self._noise or noise_model(self.model)
        return self._noise

    @property
    def levels(self) -> LevelDefaults:
        """The family's distribution of levels."""
        return self.family.levels

    @property
    def defaults(self) -> Defaults:
        """What a run takes for this model where its settings are left open."""
        return replace(defaults_of(self.family), preset=preset_of(self._layers))

    @property
    def latents(self) -> LatentFormat:
        """The format of latents."""
        form = self.model.model.latent_format
        pixels = self.family.pixels or form.spacial_downscale_ratio
        return LatentFormat(channels=form.latent_channels, pixels=pixels, step=self.family.step)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the denoiser's blocks, in their order."""
        return tuple(layers_of.blocks(self.denoiser))

    def layers(self) -> list[Layer]:
        """List the denoiser's layers; those left out cannot be trained."""
        out = self._left_out
        return [layer._replace(trainable=False) if layer.name in out else layer for layer in self._layers]

    @property
    def references(self) -> int:
        """How many control pictures the architecture reads at most, as ComfyUI's reference latents."""
        return min(self.family.references, 1) if self.seen_as == SINGLE else self.family.references

    @property
    def seen_as(self) -> str:
        """Which of ComfyUI's nodes for Qwen-Image-Edit shows control pictures to the text encoder; "" for none."""
        return self._edit_text if self.family.seen else ""

    def further_names(self) -> Mapping[str, tuple[str, Slice | None]]:
        """Map diffusers' names of layers, which ComfyUI does not know for every architecture."""
        own = {layer.path: layer.name for layer in self._layers}
        return {name: (own[path], piece) for name, (path, piece) in names.diffusers_places(self.model.model).items()}

    def try_out(
        self, layers: Mapping[str, nn.Module], caption: Conditioning, size: Size, references: int = 0
    ) -> list[str]:
        """Try passes with gradients on a picture of (width, height); leave out layers that cannot be trained.

        references: as many control pictures of that size. Returns remarks for the person, a sentence each.
        """
        assert self._denoiser is not None
        what = f"{self.name} with the linked CLIP, on pictures of {size[0]} x {size[1]} pixels"
        with comfyui_runs(what):
            inputs = self._inputs(caption, size, references)
        modules = {layer.name: layer.module for layer in self._layers if layer.name in layers}
        found = tried(self._denoiser, inputs, what, layers, modules)
        self._left_out, self._units = found.left_out, found.units
        return found.remarks

    def _inputs(self, caption: Conditioning, size: Size, references: int) -> tuple[Tensor, Tensor, Conditions]:
        """Build the inputs of a pass on one picture of (width, height) in pixels, beside other pictures."""
        (width, height), device, pixels = size, self.model.load_device, self.latents.pixels
        shape = (1 + references, self.latents.channels, height // pixels, width // pixels)
        noised, *shown = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).split(1)
        sizes = torch.tensor([[height, width, 0, 0, height, width]])
        conditions = self.batch([caption], sizes, device, None, [[each[0] for each in shown]])
        return noised, torch.full((1,), len(self.noise.alpha) // 2, device=device), conditions

    def block_layouts(self, setting: str) -> list[list[str]]:
        """List the possible block orders of a list setting of LoRA Config."""
        return layers_of.block_layouts(self.denoiser, setting)

    def units(self, module: nn.Module) -> list[Unit]:
        """List the denoiser's repeated blocks; none where they cannot be recomputed."""
        return layers_of.units(module) if self._units is None else self._units

    def put_beneath(self, tensors: Mapping[str, Tensor], strength: float) -> None:
        """Put a LoRA on the MODEL, as ComfyUI's own loader does; it is there when the MODEL is loaded next."""
        self.model = names.put_beneath(self.model, tensors, strength)
        assert self._denoiser is not None
        self._denoiser.patcher = self.model

    def reserve(self, size: int) -> None:
        """Let ComfyUI keep so many bytes free when it loads the MODEL, of which it then may load a part."""
        self._reserved = size

    @property
    def movable(self) -> int:
        """The bytes of the MODEL on the device, which ComfyUI can keep in RAM instead."""
        return self.model.loaded_size()

    def load(self) -> None:
        """Let ComfyUI load the MODEL with its patches, wholly if it fits."""
        comfy.model_management.load_models_gpu([self.model], memory_required=self._reserved)

    @contextmanager
    def session(self, device: torch.device) -> Iterator[None]:
        """Make the denoiser trainable, and leave it as it was."""
        del device  # ComfyUI's own, where it loads the MODEL
        self.load()
        with gradients.session(self.model):
            yield

    def passes(self, shape: Sequence[int]) -> AbstractContextManager[None]:
        """Wrap a forward pass and its backward pass: models may write into what the backward pass needs."""
        return self._written.passes(tuple(shape))

    def batch(
        self,
        captions: Sequence[Conditioning],
        sizes: Tensor,
        device: torch.device,
        painted: Tensor | None = None,
        references: Sequence[Sequence[Tensor]] = (),
    ) -> Conditions:
        """Join the conditions of a batch on a device; captions of unequal lengths run one after another."""
        del painted
        assert self._denoiser is not None
        height, width = sizes[0, 4:].tolist()
        pixels = self.latents.pixels
        shape = (self.latents.channels, height // pixels, width // pixels)
        return self._denoiser.conditions(captions, sizes, shape, device, references)

    def predict(self, noised: Tensor, levels: Tensor, conditions: Conditions) -> Tensor:
        """Compute the denoiser's raw output."""
        assert self._denoiser is not None
        return self._denoiser.predict(noised, levels, conditions, gradients.options(self.model))

    def empty_conditions(self, count: int, latents: tuple[int, int], tokens: int) -> Any:
        """Never called: `managed` sends the estimate to `preflight/measured.py`, which runs real conditions."""
        raise NotImplementedError

    # --- text ---

    @property
    def text_identity(self) -> str:
        """A key of the CLIP as it is linked, and of how captions are read."""
        return f"{self._digests['clip']}/{identity.stamp_of_files(self.clip.patcher)}/{self.prompt_weights}"

    def mark_text(self, *changes: str) -> None:
        """Nothing: text encoders are not changed."""

    def encode_text(self, caption: str, device: torch.device | str, pictures: Sequence[Tensor] = ()) -> Conditioning:
        """Encode a caption by the linked CLIP, which ComfyUI moves."""
        del device
        if pictures:
            return text.encode_seen(self.clip, caption, pictures, single=self.seen_as == SINGLE)
        return text.encode(self.clip, caption, weights=self.prompt_weights)

    def count_tokens(self, caption: str, words: Words) -> int:
        """Count the tokens of a caption."""
        del words
        return text.count_tokens(self.clip, caption, weights=self.prompt_weights)

    def cut_text(self, caption: str, words: Words) -> tuple[str, list[str]]:
        """Nothing is cut."""
        del caption, words
        return "", []

    def longest_batch(self, captions: Iterable[str], count: int, words: Words) -> int:
        """Count the tokens of the longest caption."""
        del count
        return max((self.count_tokens(caption, words) for caption in captions), default=0)

    def token_ids(self, text: str) -> list[int]:
        """None: words are not trained through CLIP."""
        del text
        return []

    # --- the autoencoder ---

    @property
    def autoencoder(self) -> Any:
        """The linked VAE, which ComfyUI moves."""
        return vae.Held(self.vae)

    @property
    def autoencoder_identity(self) -> str:
        """A key of the VAE's weights, and of the MODEL's scale of latents."""
        return f"{self._digests['vae']}/{identity.digest_of_scale(self.model.model)}"

    def encode_pixels(self, held: Any, pixels: Tensor) -> tuple[Tensor, None]:
        """Encode (B, 3, H, W) pixels in -1..1 to latents in the MODEL's scale; the VAE gives no deviation."""
        return vae.encode(self.model.model, held.vae, pixels, self.family.pixels), None

    def encode_reference(self, held: Any, pixels: Tensor) -> Tensor:
        """Encode (1, 3, H, W) pixels in -1..1 in the VAE's own scale, as VAE Encode does for reference latents."""
        return vae.encode_plain(held.vae, pixels)

    def encode_painted(self, held: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor) -> Tensor:
        """Never called, as `inpainting` is False."""
        raise NotImplementedError

    def encode_blank(self, held: Any, size: tuple[int, int]) -> Tensor:
        """Never called, as `inpainting` is False."""
        raise NotImplementedError

    def decode(self, held: Any, latents: Tensor) -> Tensor:
        """Decode latents in the MODEL's scale to (B, H, W, 3) pictures in 0..1."""
        model = self.model.model
        return vae.decode(held.vae, model.process_latent_out(vae.with_time(model, latents.float())))

    @property
    def sampling(self) -> SamplingDefaults:
        """The family's sampling; that of the partner, where one draws the samples."""
        own = family_of(self._partner or self.model).sampling
        return SamplingDefaults(
            steps=own.steps, cfg=own.cfg, sampler=own.sampler, samplers=SAMPLERS, guidance=own.guidance
        )

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Let the linked VAE and CLIP compute as outside of a session, and load the MODEL again where it had to go."""
        with gradients.paused():
            try:
                yield
            finally:
                self.load()

    @contextmanager
    def drawing(self, network: Any) -> Iterator[None]:
        """Let `draw` see a network that is attached: a partner takes its tensors as ComfyUI's loader takes the file."""
        with ExitStack() as stack:
            stack.enter_context(gradients.paused())
            if self._partner is not None:
                stack.enter_context(network.detached())  # the partner may be the MODEL with other patches
                self._drawing = names.put_beneath(self._partner, network.tensors(), 1.0)
            try:
                yield
            finally:
                self._drawing = None
                if self._denoiser is not None:
                    self.load()  # ComfyUI may have moved it, to make room

    def draw(
        self,
        prompt: Conditioning,
        negative: Conditioning,
        picture: SamplePicture,
        check: Callable[[], None],
        references: Sequence[Tensor] = (),
    ) -> Tensor:
        """Draw a sample by ComfyUI's own sampler, (1, H, W, 3) in 0..1."""
        model = self._drawing or self.model
        latents = draw(model, family_of(model).sampling.scheduler, (prompt, negative), picture, check, references)
        return vae.decode(self.vae, latents)

    def free(self, *parts: str) -> None:
        """Let go of the denoiser; the models stay ComfyUI's."""
        if not parts or "denoiser" in parts:
            self._denoiser = None

    @functools.cached_property
    def _layers(self) -> list[Layer]:
        return layers_of.list_layers(self.model.model)

    @functools.cached_property
    def _digests(self) -> dict[str, str]:
        return {
            "model": identity.digest_of_model(self.model),
            "clip": identity.digest_of_clip(self.clip),
            "vae": identity.digest_of_vae(self.vae),
        }


class ConnectedSource:
    """Linked models before a run; implements `Source`."""

    cached_bytes = 0

    def __init__(self, config: BaseModelConfig) -> None:
        self.config = config
        self.name = config.path

    @functools.cached_property
    def _model(self) -> ConnectedModel:
        return ConnectedModel(self.config)

    def check(self) -> None:
        """Raise ValueError for models that cannot be trained."""
        live = live_of(self.config)
        check_connected(live.model, live.clip, live.vae)
        check_partner(live.sampled, live.model)

    def outline(self, dtype: torch.dtype = torch.float32) -> ConnectedModel:
        """Return the linked models: their shapes are all that is asked of an outline."""
        del dtype
        return self._model

    def outline_autoencoder(self) -> None:
        """None: ComfyUI moves the VAE."""

    def load(self, dtype: torch.dtype, amend: Callable[[Any], None] | None = None) -> ConnectedModel:
        """Let ComfyUI load the MODEL; amend: changes it."""
        del dtype
        if amend:
            amend(self._model)
        self._model.load()
        return self._model

    def remarks(self) -> list[str]:
        """List warnings about this model."""
        return remarks(self._model.model, self._model.clip)

    def digest(self, path: Path) -> str:
        """Compute the sha256 of a file that a model was loaded from."""
        return file_digest(path)

    def files(self) -> dict[str, Path]:
        """Map roles to the files that ComfyUI loaded the MODEL and the CLIP from, where it says so."""
        model = self._model
        named = {"model": model.model, "clip": model.clip.patcher}
        return {f"{role} {n}": path for role, p in named.items() for n, path in identity.files_of(p).items()}

    def identities(self) -> dict[str, str]:
        """Map roles to the sha256 of everything else that decides what the models compute."""
        return dict(self._model._digests)
