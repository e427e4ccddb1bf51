"""The interface of a base model, all that training uses of it. Stable Diffusion in `sd/` implements it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..common.axes import Framing, Shape, Size
from ..common.computed import Computed
from ..config import Defaults, RunConfig, SamplePicture, SamplingDefaults

Conditioning = dict[str, Tensor]  # an encoded caption; training only caches and moves it
Conditions = TypeVar("Conditions", bound="Sliceable")
Unit = tuple[nn.Module, int]  # a repeated block, and the lowest gradient checkpointing level that recomputes it
BASE = "BASE"  # in a list of blocks: layers of text encoders, and of blocks that the list does not name
Prediction = Literal["epsilon", "v_prediction", "flow", "x0", "affine"]


class Sliceable(Protocol):
    """The conditions of a batch; training can only take a slice."""

    def some(self, samples: slice) -> Any:
        """Select the conditions of some samples."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A network of a base model with its own learning rate."""

    prefix: str  # of its layers' names in LoRA files, without the last underscore
    title: str  # its name in messages
    embedding: str = ""  # a text encoder's key in files of trained embeddings


class Expert(NamedTuple):
    """One of several denoisers of a base model, each for its side of the noise; all are one part, with one rate."""

    name: str  # which ends the name of its LoRA file
    prefix: str  # of its layers' names in the network, without the last underscore; in its file they have the first's


class Slice(NamedTuple):
    """Some outputs of a layer, which LoRA files of other programs hold as a layer of its own."""

    comfy: str  # its name for ComfyUI's loader
    start: int
    length: int
    swapped: bool = False  # the file has its second half first, as diffusers has scale and shift of modulations


class NameForm(NamedTuple):
    """How a program names the layers of a denoiser in LoRA files."""

    start: str
    diffusers: bool = False  # by diffusers' paths; False: by those of ComfyUI's model
    flat: bool = False  # with underscores for dots


class Layer(NamedTuple):
    """A module of a base model that a LoRA can change."""

    name: str  # in our LoRA files
    path: str  # in its own network
    module: Any
    part: str  # prefix of its part
    block: str  # one of the model's blocks, "" outside of them
    trainable: bool  # a preset or a pattern may choose it; others occur only in merged or continued files
    presets: frozenset[str]  # of LoRA Config that train it, and algorithms' own choices of layers
    comfy: str  # in ComfyUI's state dict
    aliases: tuple[str, ...]  # in LoRA files of other programs, with underscores for dots
    slices: Mapping[str, Slice] = MappingProxyType({})  # by such names
    kind: str = ""  # one of LAYER_KINDS of config/network.py; "" for norms


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentFormat:
    """The shape of latents, and the picture sizes that fit it."""

    channels: int
    pixels: int | Fraction  # of a picture per latent pixel, along each side
    step: int  # in pixels; sides of pictures are multiples of it
    frames: int = 0  # of a clip per latent frame after the first; 0: single pictures only

    def axes(self, size: Shape) -> tuple[int, ...]:
        """Compute the axes of latents, behind the channels, from a picture's or clip's shape."""
        width, height, *frames = size
        return (
            *((each - 1) // self.frames + 1 for each in frames),
            int(height // self.pixels),
            int(width // self.pixels),
        )

    def scaled(self, size: Shape, share: float) -> Shape:
        """Scale the sides of a picture, to multiples of the step; a clip keeps its frames."""
        return *(max(self.step, round(side * share / self.step) * self.step) for side in size[:2]), *size[2:]

    def at_most(self, size: Shape, side: int) -> Shape:
        """Scale a picture whose shorter side is longer than this down to it."""
        return self.scaled(size, min(1.0, side / min(size[:2])))


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseModel:
    """How a model mixes clean latents and noise at each level, and what it predicts.

    Level t is alpha[t] x0 + sigma[t] noise; level 0 is the cleanest, the last one the noisiest. p and q are only for
    the kind "affine", which predicts p[t] x0 + q[t] noise.
    """

    kind: Prediction
    alpha: Tensor  # (N,) float32
    sigma: Tensor  # (N,) float32
    snr: Tensor  # (N,) float32, (alpha / sigma)^2
    ratio: Tensor  # (N,) float32, sigma / alpha: the sigma of samplers
    p: Tensor | None = None  # (N,) float32
    q: Tensor | None = None  # (N,) float32


class Side(NamedTuple):
    """The levels of noise at which one expert of a model predicts."""

    first: int
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelDefaults:
    """What a family's trainers draw levels from, where Noise & Loss is left at auto."""

    distribution: str = "uniform"  # a timestep_distribution of ObjectiveConfig
    shift: float = 1.0  # of times towards noise: t -> shift t / (1 + (shift - 1) t)
    by_tokens: tuple[float, float, int, int] | None = None  # instead: mu at so few and so many tokens; shift = exp(mu)
    token: int = 1  # sides of a picture's token in latent pixels, for by_tokens
    source: str = ""  # whose values these are, for people
    sides: tuple[Side, ...] = ()  # of each expert of the model, from clean to noisy; () where it has one for all levels
    switch_every: int = 0  # steps after which it is another expert's turn; 0: as often as its levels are drawn

    def at(self, share: float, count: int) -> int:
        """Find the level at a share of those that the model predicts, of so many in all."""
        first, last = (self.sides[0].first, self.sides[-1].last) if self.sides else (0, count - 1)
        return first + min(int(share * (last - first + 1)), last - first)


class TextEncoder(Protocol):
    """A text encoder in memory whose layers or token embeddings can be trained."""

    model: Any  # with get_input_embeddings()
    prefix: str  # of its part
    words: Mapping[str, Sequence[int]]  # trained words in its token embedding, and their ids below 0

    def units(self) -> list[Unit]:
        """List its repeated blocks."""
        ...


class CaptionLengths(Protocol):
    """The limits of caption length: all of `Text` that needs only a tokenizer."""

    @property
    def window(self) -> int:
        """Tokens in a chunk, which is encoded as one sequence."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of a caption that are encoded; the rest is cut."""
        ...

    def count_tokens(self, caption: str, words: Mapping[str, Sequence[int]]) -> int:
        """Count the tokens of a caption."""
        ...

    @property
    def cut(self) -> Callable[[str, Mapping[str, Sequence[int]]], tuple[str, list[str]]] | None:
        """Find the part of a caption that is cut: its text, and the trained words in it; ("", []) for none.

        Takes the caption, and trained words with their ids. None where captions of any length are encoded whole.
        """
        ...


class TrainableText(Protocol):
    """What a run needs to change the text encoders."""

    def token_ids(self, text: str) -> list[int]:
        """List the ids of a text's tokens; [] without a tokenizer."""
        ...

    def mark(self, *changes: str) -> None:
        """Add changes of the text encoders' weights to `identity`."""
        ...


class Text(CaptionLengths, Protocol):
    """How captions become conditioning."""

    @property
    def encoders(self) -> tuple[Any, ...]:
        """The text encoders in memory, each a `TextEncoder`; () after `free`."""
        ...

    @property
    def trainable(self) -> TrainableText | None:
        """What a run needs to change them; None where they only encode."""
        ...

    @property
    def identity(self) -> str:
        """A key of the text encoders' state; another key means that cached captions are invalid."""
        ...

    @property
    def seen_as(self) -> str:
        """A key of how the text encoders read control pictures with a caption; "" if they do not."""
        ...

    def encode(self, caption: str, device: torch.device | str, pictures: Sequence[Tensor] = ()) -> Conditioning:
        """Encode a caption with the text encoders in their current state.

        pictures: control pictures (3, H, W) in -1..1, for text encoders that read them.
        """
        ...

    def longest_batch(self, captions: Iterable[str], count: int, words: Mapping[str, Sequence[int]]) -> int:
        """Count the tokens of the longest possible batch of `count` of these captions."""
        ...


class WrittenInputs(Protocol):
    """The care that blocks take which may write into their inputs; recomputing them also takes copies."""

    needless: Callable[[], bool]  # whether passes need no care now

    def passes(self, kind: Hashable, /) -> AbstractContextManager[None]:
        """Wrap a forward and a backward pass of latents of a shape, so that gradients are right."""
        ...


class Denoiser(Protocol):
    """What predicts."""

    @property
    def module(self) -> Any:
        """The denoiser itself, an nn.Module; None after `free`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of frozen weights and activations."""
        ...

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Give the prefixes of its small, sensitive layers; their weights are never quantized."""
        ...

    @property
    def written(self) -> WrittenInputs | None:
        """The care for blocks that may write into their inputs; None where none does."""
        ...

    def units(self) -> list[Unit]:
        """List its repeated blocks."""
        ...

    def predict(self, noised: Tensor, levels: Tensor, conditions: Any) -> Tensor:
        """Compute the raw output for (B, C, *axes) noised latents at (B,) levels; same shape."""
        ...


class Layers(Protocol):
    """What a LoRA can change, and how LoRA files name it."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the denoiser's blocks, in the order of LoRA Config's lists."""
        ...

    def listed(self) -> list[Layer]:
        """List the layers of all networks in memory, in each network's order."""
        ...

    def layouts(self, setting: str) -> list[list[str]]:
        """List the possible block orders of a list setting of LoRA Config."""
        ...

    @property
    def further_names(self) -> Callable[[], Mapping[str, tuple[str, Slice | None]]] | None:
        """Map names in LoRA files that are looked up last to layers: (name in our files, slice); costs a moment.

        A slice has no name of ComfyUI's there. None where every layer lists all of its names.
        """
        ...

    def made_for(self, widths: Mapping[str, int], metadata: Mapping[str, str]) -> str:
        """Guess the family that a LoRA file was made for; "" if nothing tells.

        widths: inputs of each layer by its name in the file, 0 if unknown. metadata: of the file.
        """
        ...


class ConditionsOfBatch(Protocol):
    """What the denoiser reads beside noised latents."""

    def batch(
        self,
        captions: Sequence[Conditioning],
        framings: Sequence[Framing],
        device: torch.device,
        painted: Tensor | None = None,
        references: Sequence[Sequence[Tensor]] = (),
    ) -> Any:
        """Join the conditions of a batch on a device.

        framings: of each sample; all of a batch are trained at one size. painted: (B, C, *axes) from
        `Inpainting.encode`. references: of each sample, from `ControlPictures.encode`, (C, *axes) each, and from its
        `told`; () is none at all.
        """
        ...

    @property
    def without_data(self) -> Callable[[int, Sequence[int], int], Any] | None:
        """Build a batch's conditions on the meta device, where text encoders in memory run.

        Takes the number of samples, the axes of their latents behind the channels, and the tokens from `longest_batch`.
        None for a model that cannot run there.
        """
        ...


class Autoencoder(Protocol):
    """Pictures to latents and back. `autoencoder` is the module or a copy of it."""

    @property
    def module(self) -> Any:
        """The autoencoder itself, an nn.Module in float32; None after `free`."""
        ...

    @property
    def identity(self) -> str:
        """A key of the autoencoder's weights; another key means other weights."""
        ...

    def encode(self, autoencoder: Any, pixels: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Encode (B, 3, H, W) pixels in -1..1: mean and standard deviation, if any."""
        ...

    def decode(self, autoencoder: Any, latents: Tensor, /) -> Tensor:
        """Decode (B, C, *axes) latents to (B, height, width, 3) pictures in 0..1."""
        ...


class Inpainting(Protocol):
    """The further inputs of a denoiser that also reads a mask and the picture with the masked region blanked."""

    def encode(self, autoencoder: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor, /) -> Tensor:
        """Encode them for (1, 3, H, W) pixels in -1..1; pixel_mask (B, 1, H, W) in 0..1, mask at latent size."""
        ...

    def blank(self, autoencoder: Any, size: Size, /) -> Tensor:
        """Encode them for a fully painted picture of (width, height)."""
        ...


class Shown(NamedTuple):
    """How many control pictures a sample has where a model is tried, and what `ControlPictures.told` says of them."""

    count: int = 0
    told: tuple[Tensor, ...] = ()


NOTHING = Shown()


class ControlPictures(Protocol):
    """The control pictures that a denoiser reads beside a caption."""

    @property
    def most(self) -> int:
        """How many it reads at most, from 1 on."""
        ...

    @property
    def least(self) -> int:
        """How many it reads at least; 0 for one that also draws from a caption alone."""
        ...

    @property
    def begins(self) -> bool:
        """Tell whether one is the first frame of a clip."""
        ...

    @property
    def ends(self) -> bool:
        """Tell whether another may be the last frame of that clip."""
        ...

    @property
    def keeps(self) -> bool:
        """Tell whether it is only the first frame of clips, which is then a part of the latents without noise."""
        ...

    @property
    def identity(self) -> str:
        """A key of what `told` reads them by; "" where it says nothing."""
        ...

    def told(self, pixels: Tensor, /) -> Tensor | None:
        """Describe pixels as `encode` takes them, (tokens, width); None for a denoiser that reads the latents alone."""
        ...

    def encode(self, autoencoder: Any, pixels: Tensor, /, length: int = 0) -> Tensor:
        """Encode (1, 3, H, W) pixels of one in -1..1, (1, C, *axes), in the autoencoder's own scale.

        length: frames of the clip that it begins; 0: it lies beside a picture. Then the pixels may be (1, 3, 2, H, W),
        of the first and the last frame, and further channels say which latents the model has to paint.
        """
        ...


class Sampler(Protocol):
    """A sampler that the model brings along."""

    def drawing(self, network: Any) -> AbstractContextManager[None]:
        """Wrap calls of `draw` while a network is attached; afterwards training can go on."""
        ...

    def draw(
        self,
        prompt: Conditioning,
        negative: Conditioning,
        picture: SamplePicture,
        check: Callable[[], None],
        references: Sequence[Tensor] = (),
        painted: Tensor | None = None,
    ) -> Tensor:
        """Draw a sample, (T, H, W, 3) in 0..1: a picture, or the frames of a clip.

        references: its control pictures, as `ConditionsOfBatch.batch` gets them. painted: (1, C, *axes) from
        `Inpainting.blank`.
        """
        ...


class Host(Protocol):
    """The program that holds a model's weights: it alone moves, stores and patches them."""

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for settings of a run that its models cannot have."""
        ...

    def remedy(self, kind: str) -> str:
        """Name the setting by which the model is taken to predict another kind, and its value: "prediction to …"."""
        ...

    def session(self, device: torch.device, *, texts: bool = False) -> AbstractContextManager[None]:
        """Make the denoiser trainable on a device inside a `with` block, and leave it as it was.

        texts: the text encoders as well, which then run in each step.
        """
        ...

    def compiling(self, blocks: Sequence[Unit]) -> AbstractContextManager[list[Unit]]:
        """Let blocks be compiled inside a `with` block of a session; yields those that can be."""
        ...

    def encoding(self) -> AbstractContextManager[None]:
        """Wrap the encoding of pictures and captions inside a session; afterwards training can go on."""
        ...

    def put_beneath(self, tensors: Mapping[str, Tensor], strength: float, *, training_only: bool) -> None:
        """Put a LoRA, by ComfyUI's names, under the network; training_only: samples go without it."""
        ...

    def reserve(self, size: int) -> None:
        """Keep so many bytes of the device free beside the weights, from the next session on."""
        ...

    @property
    def holds(self) -> int:
        """The bytes that layers may hold of their weights, rounded, beside these."""
        ...

    @holds.setter
    def holds(self, size: int) -> None: ...

    @property
    def movable(self) -> int:
        """The bytes of weights on the device that `reserve` can make room of."""
        ...

    def try_out(
        self,
        layers: Mapping[str, nn.Module],
        caption: Conditioning,
        size: Shape,
        shown: Shown = NOTHING,
        live: Callable[[], Conditioning] | None = None,
    ) -> list[str]:
        """Try passes with gradients on a picture of (width, height); leave out layers that cannot be trained.

        shown: control pictures of that size beside the caption. live: encodes the caption anew, where text
        encoders are trained. Returns remarks for the person, a sentence each. Raises ValueError for a model that cannot
        be trained so.
        """
        ...


class BaseModel(Protocol):
    """A base model in memory, or its outline on the meta device: what it is, and what it is made of.

    Training uses nothing else of it. What a model does not have is None.
    """

    @property
    def name(self) -> str:
        """The file or folder name, for messages and metadata."""
        ...

    @property
    def title(self) -> str:
        """The family's name in messages."""
        ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The networks that can be trained: the denoiser, then the text encoders in their order."""
        ...

    @property
    def experts(self) -> tuple[Expert, ...]:
        """The denoisers in the order of the sides of `levels`, where there are several; () for one."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the model for the metadata of LoRA files, by the names in `lora_files/metadata.py`."""
        ...

    @property
    def defaults(self) -> Defaults:
        """What a run takes for this model where its settings are left open."""
        ...

    @property
    def sampling(self) -> SamplingDefaults:
        """How samples are drawn where the settings leave it open, and by which samplers they can be."""
        ...

    @property
    def noise(self) -> NoiseModel:
        """The noise at each level, and the kind of prediction."""
        ...

    @property
    def levels(self) -> LevelDefaults:
        """The distribution of levels that this family is trained with."""
        ...

    @property
    def latents(self) -> LatentFormat:
        """The format of latents."""
        ...

    @property
    def layers(self) -> Layers:
        """What a LoRA can change."""
        ...

    @property
    def denoiser(self) -> Denoiser:
        """What predicts."""
        ...

    @property
    def conditions(self) -> ConditionsOfBatch:
        """What the denoiser reads."""
        ...

    @property
    def text(self) -> Text:
        """How captions are encoded."""
        ...

    @property
    def autoencoder(self) -> Autoencoder:
        """How pictures are encoded."""
        ...

    @property
    def inpainting(self) -> Inpainting | None:
        """What an inpainting model reads beside."""
        ...

    @property
    def controls(self) -> ControlPictures | None:
        """The control pictures that an edit model reads."""
        ...

    @property
    def sampler(self) -> Sampler | None:
        """Its own sampler; None: the core's draws."""
        ...

    @property
    def host(self) -> Host | None:
        """Who holds and moves its weights; None: this run does, by the settings of Memory."""
        ...

    def free(self, *names: str) -> None:
        """Drop "text", "autoencoder" or "denoiser", or all of them, to free their memory."""
        ...


def differentiable(base: BaseModel, shape: Sequence[int]) -> AbstractContextManager[None]:
    """Wrap the forward and backward pass of latents of a shape, (B, C, *axes), so that gradients are right."""
    written = base.denoiser.written
    return written.passes(tuple(shape)) if written else nullcontext()


def session(base: BaseModel, device: torch.device) -> AbstractContextManager[None]:
    """Make a denoiser trainable on a device inside a `with` block, wherever its weights are held.

    Text encoders in memory are trained as well.
    """
    return base.host.session(device, texts=bool(base.text.encoders)) if base.host else nullcontext()


def encoding(base: BaseModel) -> AbstractContextManager[None]:
    """Wrap the encoding of pictures and captions inside a session."""
    return base.host.encoding() if base.host else nullcontext()


class Source(Protocol):
    """The files of a base model. Nothing is loaded before `load`."""

    @property
    def name(self) -> str:
        """The model's name in messages."""
        ...

    def check(self) -> None:
        """Raise ValueError for a model that cannot be trained, from headers alone."""
        ...

    def outline(self, dtype: torch.dtype = torch.float32) -> BaseModel:
        """Build the model without weights: shapes on the meta device, tokenizer, noise. The caller may change it."""
        ...

    def take_back(self, outline: Any) -> None:
        """Take back an outline that was not changed: who asks next gets it, as long as the files stay what they are."""
        ...

    def outline_autoencoder(self) -> Any:
        """Build the autoencoder without weights, in float32; None for one that the run does not move itself."""
        ...

    def load(
        self, dtype: torch.dtype, amend: Callable[[Any], None] | None = None, *, in_file: bool = False
    ) -> BaseModel:
        """Load the model to the CPU, frozen; amend: called to change the weights before the cast to dtype.

        in_file: weights of the denoiser's matrices stay in their files, and such a layer's `stored` reads its own.
        """
        ...

    def remarks(self) -> list[str]:
        """List warnings about this model."""
        ...

    def digest(self, path: Path) -> str:
        """Compute the sha256 of one of the files; its content may stay in memory for `load`."""
        ...

    @property
    def cached_bytes(self) -> int:
        """Bytes of file content in memory for `load`."""
        ...

    def files(self) -> dict[str, Path]:
        """Map roles to the files and folders that determine the model's results."""
        ...

    def identities(self) -> dict[str, str]:
        """Map roles to the sha256 of weights in memory that determine the model's results, where no file does."""
        ...

    def computes(self) -> Computed:
        """Compute numbers of what the model computes, where files and hashes cannot tell it."""
        ...
