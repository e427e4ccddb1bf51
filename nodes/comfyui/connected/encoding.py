"""What the linked CLIP and VAE encode for a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....trainer_core.models import Conditioning, Words
from . import identity, text, vae
from .beside import begun, ends, keeps
from .clip_layers import ConnectedEncoder
from .wired import SINGLE, Wired

WINDOW = 2**31  # tokens; ComfyUI cuts captions into chunks of its own, without an upper limit


class ConnectedText:
    """The linked CLIP, which ComfyUI moves; implements `Text` and `TrainableText`."""

    cut = None
    window = max_tokens = WINDOW

    def __init__(self, wired: Wired) -> None:
        self._wired, self.seen_as = wired, wired.seen_as

    @property
    def encoders(self) -> tuple[ConnectedEncoder, ...]:
        """The text encoders that a LoRA can change; () once they were let go, and captions are encoded all the same."""
        return self._wired.texts

    @property
    def trainable(self) -> ConnectedText | None:
        """Itself, where a LoRA can change text encoders."""
        return self if self._wired.encoders else None

    @property
    def identity(self) -> str:
        """A key of the CLIP as it is linked, and of how captions are read."""
        clip, marks = self._wired.clip, "".join(f"+{mark}" for mark in self._wired.marks)
        stamp = identity.stamp_of_files(clip.patcher)
        return f"{self._wired.digests['clip']}{marks}/{stamp}/{self._wired.prompt_weights}"

    def mark(self, *changes: str) -> None:
        """Add changes of the text encoders' weights to `identity`."""
        self._wired.marks += changes

    def token_ids(self, text: str) -> list[int]:
        """List none: no words are trained with a linked CLIP."""
        del text
        return []

    def encode(self, caption: str, device: torch.device | str, pictures: Sequence[Tensor] = ()) -> Conditioning:
        """Encode a caption by the linked CLIP."""
        del device
        if pictures:
            return text.encode_seen(self._wired.clip, caption, pictures, single=self.seen_as == SINGLE)
        wired = self._wired
        return text.encode(wired.clip, caption, weights=wired.prompt_weights, live=wired.live)

    def count_tokens(self, caption: str, words: Words) -> int:
        """Count the tokens of a caption."""
        del words
        return text.count_tokens(self._wired.clip, caption, weights=self._wired.prompt_weights)

    def longest_batch(self, captions: Iterable[str], count: int, words: Words) -> int:
        """Count the tokens of the longest caption."""
        del count
        return max((self.count_tokens(caption, words) for caption in captions), default=0)


class ConnectedVae:
    """The linked VAE, which ComfyUI moves, in the MODEL's scale; implements `Autoencoder`."""

    def __init__(self, wired: Wired) -> None:
        self._wired = wired

    @property
    def module(self) -> vae.VaeHandle:
        """The linked VAE as a module."""
        return vae.VaeHandle(self._wired.vae)

    @property
    def identity(self) -> str:
        """A key of the VAE's weights, and of the MODEL's scale of latents and form of masks."""
        scale, masks = identity.digest_of_scale(self._wired.model.model), self._wired.form_of_masks
        return "/".join(filter(None, (self._wired.digests["vae"], scale, masks)))

    def encode(self, held: Any, pixels: Tensor) -> tuple[Tensor, None]:
        """Encode (B, 3, H, W) pixels in -1..1, or (1, 3, T, H, W), to latents; the VAE gives no deviation."""
        return vae.encode(self._wired.model.model, held.vae, pixels, self._wired.architecture.pixels), None

    def decode(self, held: Any, latents: Tensor) -> Tensor:
        """Decode latents to (B, H, W, 3) pictures in 0..1."""
        model = self._wired.model.model
        return vae.decode(held.vae, model.process_latent_out(vae.with_time(model, latents.float())))


class ConnectedControls:
    """Control pictures in the VAE's own scale; implements `ControlPictures`."""

    def __init__(self, wired: Wired, most: int, least: int = 0, *, begins: bool = False) -> None:
        self._model, self._sight = wired.model.model, wired.sight
        self.most, self.least, self.begins = most, least, begins
        self.keeps = keeps(self._model)
        self.ends = begins and ends(self._model)
        self.identity = wired.digests["clip vision"] if wired.sight else ""

    def encode(self, held: Any, pixels: Tensor, length: int = 0) -> Tensor:
        """Encode (1, 3, H, W) pixels in -1..1 in the VAE's own scale, as VAE Encode does.

        length: frames of the clip that they begin, as the nodes of image to video encode it. Then also (1, 3, 2, H, W),
        the first and the last.
        """
        return begun(self._model, held.vae, pixels, length) if length else vae.encode_plain(held.vae, pixels)

    def told(self, pixels: Tensor) -> Tensor | None:
        """Encode pixels as `encode` takes them by the linked CLIP vision, (tokens, width); None without one."""
        return None if self._sight is None else self._sight.states(pixels)
