"""What is encoded for a run: what it needs, by what it is encoded, and the keys by which it is read from the cache."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.axes import Size
from ..common.callbacks import Callbacks
from ..common.world import ALONE, World
from ..config import SamplePicture, run_again
from ..data.cache import Cache
from ..data.controls import Reference, References
from ..data.plan import Plan, Sample, View
from ..memory import free_bytes, on_device
from ..models import BaseModel, Conditioning

REFERENCE, TOLD = "reference", "told"  # of a control picture's entry in the cache
Seen = tuple[str, References]  # a caption, and the control pictures that the text encoders read with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The encoded samples and captions of a plan, read from the cache."""

    cache: Cache
    latent_keys: dict[View, str] = field(default_factory=dict)
    mask_keys: dict[View, str] = field(default_factory=dict)
    text_keys: dict[str, str] = field(default_factory=dict)
    painted_keys: dict[View | Size, str] = field(default_factory=dict)  # of inpainting models; by size without a mask
    reference_keys: dict[Reference, str] = field(default_factory=dict)
    seen_keys: dict[Seen, str] = field(default_factory=dict)
    drawn: Mapping[SamplePicture, References] = field(default_factory=dict)  # of samples with control pictures

    def latents(self, sample: Sample) -> tuple[Tensor, Tensor | None]:
        """Read mean and standard deviation, if any, of a sample's latents in model scale, (C, *axes) each."""
        entry = self._read(self.latent_keys[sample.view])
        return entry["mean"], entry.get("std")

    def mask(self, sample: Sample) -> Tensor | None:
        """Read a sample's mask at latent size in 0..1, as `spread` takes it; None when its picture has no mask."""
        key = self.mask_keys.get(sample.view)
        return None if key is None else self._read(key)["mask"]

    def painted(self, sample: Sample) -> Tensor | None:
        """Read the mask and picture latents for an inpainting model, (C, *axes); None for other models.

        Without a mask, or on a visit that does not use it, the model paints the whole picture.
        """
        if not self.painted_keys:
            return None
        return self._read(self.painted_keys[sample.view if sample.use_mask else sample.crop.bucket])["painted"]

    def references(self, references: References) -> list[Tensor]:
        """Read what `ControlPictures` made of each: latents, (C, *axes) in the VAE's scale, and what it told."""
        entries = [self._read(self.reference_keys[reference]) for reference in references]
        return [entry[name] for entry in entries for name in (REFERENCE, TOLD) if name in entry]

    def conditioning(self, caption: str, seen: References = ()) -> Conditioning:
        """Read the conditioning of a caption; seen: control pictures that the text encoders read with it."""
        return self._read(self.seen_keys[caption, seen] if seen else self.text_keys[caption])

    def _read(self, key: str) -> dict[str, Tensor]:
        entry = self.cache.get(key)
        if entry is None:
            raise RuntimeError(f"The cache entry {key[:12]} vanished during the run; {run_again()} to rebuild it.")
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingNeeds:
    """The pictures, masks and captions to encode: for a whole run, or for a few of its samples."""

    views: Collection[View] = ()
    masked: Collection[View] = ()  # that an inpainting model paints where their masks are
    blank: Collection[Size] = ()  # buckets of samples that it paints wholly
    references: Collection[Reference] = ()
    texts: Collection[str] | None = ()  # None: no text, as the text encoders are trained
    seen: Collection[Seen] = ()


@dataclass(kw_only=True, slots=True)
class EncodingContext:
    """The model, device and cache that encode; each kind of remark is noted once."""

    base: BaseModel
    plan: Plan
    cache: Cache
    device: torch.device
    callbacks: Callbacks
    vae_dtype: torch.dtype = torch.float32
    world: World = ALONE  # only this process's share is encoded
    on_device: Callable[[Any, torch.device], AbstractContextManager[Any]] = on_device  # puts a model on the device
    small: Any = None  # a copy of the autoencoder in vae_dtype, once one was needed
    noted: set[str] = field(default_factory=set)  # kinds of remarks

    def note_once(self, kind: str, sentence: str) -> None:
        """Note the first remark of each kind."""
        if kind not in self.noted:
            self.callbacks.note(sentence)
        self.noted.add(kind)

    def copy_in(self, dtype: torch.dtype, vae: Any) -> Any:
        """Copy the autoencoder into another dtype, once."""
        if self.small is None:
            self.small = copy.deepcopy(vae).to(dtype)
        return self.small


def room(cache: Cache) -> tuple[int, Path | str, int]:
    """Measure the free bytes for new entries, name their place, and its limit in bytes, 0 = none."""
    if cache.in_ram:
        return free_bytes(torch.device("cpu")), "RAM", 0
    folder = next(path for path in (cache.folder, *cache.folder.parents) if path.exists())
    return shutil.disk_usage(folder).free, cache.folder, cache.limit
