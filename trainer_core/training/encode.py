"""Encode the pictures, masks and captions of a plan, or of a few samples of it, into a cache."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..common.callbacks import Callbacks
from ..common.wording import count, names
from ..common.world import ALONE, World
from ..config import MOST_CONTROLS, SamplePicture
from ..data.buckets import Size
from ..data.cache import Cache, blank_key, latent_key, mask_key, painted_key, reference_key, text_key
from ..data.controls import Control, Reference, References
from ..data.crops import Crop
from ..data.images import DECODER_ERRORS, cut, decoder_error, load_picture, strict_decoding
from ..data.masks import cut_mask, latent_mask, painting_masks, read_mask
from ..data.plan import Plan, Sample
from ..data.scan import Picture
from ..memory import free_bytes, placed, with_room
from ..models import BaseModel, Conditioning, mentions

AHEAD = 4  # pictures that are decoded in advance, while the autoencoder works
Item = tuple[int, Crop]  # (index of the picture, its crop)
Seen = tuple[str, References]  # a caption, and the control pictures that the text encoders read with it
Coloured = tuple[Picture | Control, str]  # a file, and the colour behind it where it is transparent
File = TypeVar("File")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The encoded samples and captions of a plan, read from the cache."""

    cache: Cache
    latent_keys: dict[Item, str] = field(default_factory=dict)
    mask_keys: dict[Item, str] = field(default_factory=dict)
    text_keys: dict[str, str] = field(default_factory=dict)
    opposite_keys: dict[Item, str] = field(default_factory=dict)  # latents at the other end of a slider
    painted_keys: dict[Item | Size, str] = field(default_factory=dict)  # of inpainting models; by size without a mask
    opposite_painted_keys: dict[Item | Size, str] = field(default_factory=dict)
    reference_keys: dict[Reference, str] = field(default_factory=dict)
    seen_keys: dict[Seen, str] = field(default_factory=dict)
    drawn: Mapping[SamplePicture, References] = field(default_factory=dict)  # of samples with control pictures

    def latents(self, sample: Sample) -> tuple[Tensor, Tensor | None]:
        """Read mean and standard deviation, if any, of a sample's latents in model scale, (C, H, W) each."""
        keys = self.opposite_keys if sample.opposite else self.latent_keys
        entry = self._read(keys[sample.picture, sample.crop])
        return entry["mean"], entry.get("std")

    def mask(self, sample: Sample) -> Tensor | None:
        """Read a sample's mask at latent size, (1, H, W) in 0..1; None when its picture has no mask."""
        key = self.mask_keys.get((sample.picture, sample.crop))
        return None if key is None else self._read(key)["mask"]

    def painted(self, sample: Sample) -> Tensor | None:
        """Read the mask and picture latents for an inpainting model, (C, H, W); None for other models.

        Without a mask, or on a visit that does not use it, the model paints the whole picture.
        """
        if not self.painted_keys:
            return None
        keys = self.opposite_painted_keys if sample.opposite else self.painted_keys
        return self._read(keys[(sample.picture, sample.crop) if sample.use_mask else sample.crop.bucket])["painted"]

    def references(self, references: References) -> list[Tensor]:
        """Read the latents of control pictures in the autoencoder's scale, (C, h, w) each."""
        return [self._read(self.reference_keys[reference])["reference"] for reference in references]

    def conditioning(self, caption: str, seen: References = ()) -> Conditioning:
        """Read the conditioning of a caption; seen: control pictures that the text encoders read with it."""
        return self._read(self.seen_keys[caption, seen] if seen else self.text_keys[caption])

    def _read(self, key: str) -> dict[str, Tensor]:
        entry = self.cache.get(key)
        if entry is None:
            raise RuntimeError(f"The cache entry {key[:12]} vanished during the run; press Run again to rebuild it.")
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What is encoded: for a whole run, or for a few of its samples."""

    crops: Collection[Item] = ()
    ends: Collection[bool] = (False,)  # of a slider of pairs; True: the pictures at the other end
    masked: Collection[Item] = ()  # that an inpainting model paints where their masks are
    blank: Collection[Size] = ()  # buckets of samples that it paints wholly
    references: Collection[Reference] = ()
    texts: Collection[str] | None = ()  # None: no text, as the text encoders are trained
    seen: Collection[Seen] = ()


@dataclass(kw_only=True, slots=True)
class Work:
    """By what is encoded, where, and into which cache; each kind of remark is noted once."""

    base: BaseModel
    plan: Plan
    cache: Cache
    device: torch.device
    callbacks: Callbacks
    vae_dtype: torch.dtype = torch.float32
    world: World = ALONE  # only this process's share is encoded
    place: Callable[[Any, torch.device], AbstractContextManager[Any]] = placed  # puts a model on the device
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


def encode_together(world: World, cache: Cache, encode: Callable[[World], Encoded]) -> Encoded:
    """Let each process of a world encode its share of what the cache lacks, then whatever it still does not find there.

    encode: `encode_plan` for a world. Processes without a common folder for the cache then encode all themselves.
    """
    if world.size > 1:
        world.meet()  # all have opened the cache, so that all find the same entries missing
        cache.refresh()
        encode(world)
        world.meet()
        cache.refresh()
    encoded = encode(ALONE)
    world.meet()  # before anybody prunes the cache
    return encoded


def encode_plan(
    base: BaseModel,
    plan: Plan,
    cache: Cache,
    device: torch.device,
    callbacks: Callbacks,
    *,
    prompts: set[str] | None,
    seen: Collection[Seen] = (),
    drawn: Mapping[SamplePicture, References] | None = None,
    vae_dtype: torch.dtype = torch.float32,
    world: World = ALONE,
) -> Encoded:
    """Encode the samples and captions that the cache lacks; return the keys of all.

    prompts: texts to encode beside the plan's captions; None encodes no text, as the text encoder is trained. seen:
    captions that the text encoders read with control pictures. drawn: the control pictures of samples. world: only this
    process's share is encoded. Raises ValueError for a picture or mask that changed or vanished since the scan, and for
    a full disk.
    """
    masked, blank = plan.masked_crops() if base.inpainting else ((), ())
    drawn = drawn or {}
    needs = Needs(
        crops=plan.crops(),
        ends=(False, True) if plan.dataset.paired else (False,),
        masked=masked,
        blank=blank,
        references=plan.all_references().union(*drawn.values()),
        texts=None if prompts is None else plan.captions(alone=bool(base.seen_as)) | prompts,
        seen=seen,
    )
    work = Work(base=base, plan=plan, cache=cache, device=device, callbacks=callbacks, vae_dtype=vae_dtype, world=world)
    return dataclasses.replace(encode(work, needs), drawn=drawn)


def encode(work: Work, needs: Needs) -> Encoded:
    """Encode what the cache lacks; return the keys of all that is needed. Errors are those of `encode_plan`."""
    base, plan, cache, world = work.base, work.plan, work.cache, work.world
    pictures, concepts = plan.manifest.pictures, plan.concepts
    items = _in_order(needs.crops)
    wanted: dict[str, tuple[Coloured, Crop]] = {}

    def keys_of(opposite: bool) -> dict[Item, str]:
        keys: dict[Item, str] = {}
        for i, crop in items if opposite in needs.ends else ():
            file, background = plan.file(i, opposite), concepts[i].background
            keys[i, crop] = latent_key(
                picture_digest=file.digest,
                crop=crop,
                background=background,
                vae_id=base.autoencoder_identity,
                dtype=work.vae_dtype,
            )
            wanted.setdefault(keys[i, crop], ((file, background), crop))
        return keys

    latent_keys, opposite_keys = keys_of(False), keys_of(True)
    mask_keys = {
        (i, crop): mask_key(
            mask_digest=pictures[i].mask_digest,
            crop=crop,
            source=masks.source,
            invert=masks.invert,
            threshold=masks.threshold,
        )
        for i, crop in items
        if plan.has_mask(i) and (masks := concepts[i].masks) is not None
    }
    missing = [key for key in wanted if not cache.has(key)]
    _check_space(base, cache, [wanted[key][1] for key in missing])
    if missing := world.mine(missing):
        _encode_pictures(work, {key: wanted[key] for key in missing})
    for i, crop in world.mine([item for item, key in mask_keys.items() if not cache.has(key)]):
        work.callbacks.check()
        mask = latent_mask(cut_mask(_mask(plan, i), crop), base.latents.pixels)
        cache.put(mask_keys[i, crop], {"mask": mask})
    painted_keys, opposite_painted_keys = (
        _encode_painted(work, needs, opposite) if base.inpainting and opposite in needs.ends else {}
        for opposite in (False, True)
    )
    reference_keys = _encode_references(work, needs.references)
    text_keys = {} if needs.texts is None else _encode_texts(work, needs.texts)
    seen_keys = _encode_seen(work, needs.seen)
    cache.flush()
    return Encoded(
        cache=cache,
        latent_keys=latent_keys,
        mask_keys=mask_keys,
        text_keys=text_keys,
        opposite_keys=opposite_keys,
        painted_keys=painted_keys,
        opposite_painted_keys=opposite_painted_keys,
        reference_keys=reference_keys,
        seen_keys=seen_keys,
    )


def _in_order(items: Collection[Item]) -> list[Item]:
    """Sort crops by their pictures, so that each picture is decoded once."""
    return sorted(items, key=lambda item: (item[0], repr(item[1])))


def _encode_pictures(work: Work, missing: Mapping[str, tuple[Coloured, Crop]]) -> None:
    """Encode pictures one by one, by their keys; encode again in float32 where vae_dtype overflows, and report it."""
    base, device, dtype = work.base, work.device, work.vae_dtype
    overflowed: list[str] = []
    on_cpu = 0
    with ExitStack() as stack:
        vae = stack.enter_context(work.place(base.autoencoder, device))
        small = vae
        if dtype != torch.float32:
            small = stack.enter_context(work.place(work.copy_in(dtype, vae), device))
        prepared = _prepared(list(missing.values()), lambda file: _decoded(*file))
        for done, (key, (((picture, _), _), pixels)) in enumerate(zip(missing, prepared, strict=True)):
            work.callbacks.check()
            (mean, std), no_room = with_room(base.encode_pixels, small, device, pixels)
            if small is not vae and not _finite(mean, std):
                (mean, std), no_room = with_room(base.encode_pixels, vae, device, pixels)
                overflowed.append(picture.name)
            if not _finite(mean, std):
                raise _not_finite(base, picture)
            on_cpu += no_room
            entry = {"mean": mean} | ({} if std is None else {"std": std})
            work.cache.put(key, {name: tensor[0].cpu() for name, tensor in entry.items()})
            work.callbacks.phase("encoding pictures", done + 1, len(missing))
    if on_cpu:
        work.note_once(
            "room",
            f"{on_cpu} of {len(missing)} pictures were encoded on the CPU, as the GPU had no room for the VAE's work. "
            "To halve that memory set vae_precision of Load Base Model to bfloat16.",
        )
    if overflowed:
        some = count(overflowed, "picture", "pictures")
        short = str(dtype).removeprefix("torch.")
        sentence = f"The VAE overflows in {short} on {some}, encoded in float32 instead: {names(overflowed)}."
        work.note_once("overflow", sentence)


def _encode_painted(work: Work, needs: Needs, opposite: bool) -> dict[Item | Size, str]:
    """Encode masked pictures for an inpainting model, in float32, and return their keys.

    opposite: those at the other end of a slider, with the same masks.
    """
    base, plan, cache, device = work.base, work.plan, work.cache, work.device
    pictures, concepts = plan.manifest.pictures, plan.concepts
    items, vae_id = _in_order(needs.masked), base.autoencoder_identity
    keys: dict[Item | Size, str] = {size: blank_key(size=size, vae_id=vae_id) for size in sorted(needs.blank)}
    for i, crop in items:
        masks = concepts[i].masks
        assert masks is not None, "the plan has found a mask"
        keys[i, crop] = painted_key(
            picture_digest=plan.file(i, opposite).digest,
            mask_digest=pictures[i].mask_digest,
            crop=crop,
            background=concepts[i].background,
            masks={"source": masks.source, "invert": masks.invert, "threshold": masks.threshold},
            vae_id=vae_id,
        )
    missing = [item for item in items if not cache.has(keys[item])]
    _check_space(base, cache, [crop for _, crop in missing])
    missing = work.world.mine(missing)
    sizes = work.world.mine([size for size in sorted(needs.blank) if not cache.has(keys[size])])
    if not missing and not sizes:
        return keys
    with work.place(base.autoencoder, device) as vae:
        for size in sizes:
            cache.put(keys[size], {"painted": base.encode_blank(vae, size)[0].cpu()})
        for done, (item, picture) in enumerate(_prepared(missing, lambda i: _picture(plan, i, opposite))):
            work.callbacks.check()
            pixel_mask, mask = (
                m[None] for m in painting_masks(cut_mask(_mask(plan, item[0]), item[1]), base.latents.pixels)
            )
            painted, _ = with_room(base.encode_painted, vae, device, picture, pixel_mask, mask)
            if not _finite(painted):
                raise _not_finite(base, plan.file(item[0], opposite))
            cache.put(keys[item], {"painted": painted[0].cpu()})
            work.callbacks.phase("encoding masked pictures", done + 1, len(missing))
    return keys


def _encode_references(work: Work, references: Collection[Reference]) -> dict[Reference, str]:
    """Encode control pictures, in float32, and return their keys."""
    base, cache, device = work.base, work.cache, work.device
    keys = {
        each: reference_key(
            picture_digest=each.control.digest,
            crop=each.crop,
            background=each.background,
            vae_id=base.autoencoder_identity,
        )
        for each in sorted(references, key=repr)
    }
    missing = [each for each, key in keys.items() if not cache.has(key)]
    _check_space(base, cache, [each.crop for each in missing])
    if missing := work.world.mine(missing):
        with work.place(base.autoencoder, device) as vae:
            items = [((each.control, each.background), each.crop) for each in missing]
            for done, (each, (_, pixels)) in enumerate(
                zip(missing, _prepared(items, lambda f: _decoded(*f)), strict=True)
            ):
                work.callbacks.check()
                reference, _ = with_room(base.encode_reference, vae, device, pixels)
                if not _finite(reference):
                    raise _not_finite(base, each.control)
                cache.put(keys[each], {"reference": reference[0].cpu()})
                work.callbacks.phase("encoding control pictures", done + 1, len(missing))
    return keys


def _not_finite(base: BaseModel, picture: Picture | Control) -> ValueError:
    return ValueError(f"The VAE of {base.name} gives values that are not finite for {picture.name}; use another VAE.")


def _prepared(
    items: Sequence[tuple[File, Crop]], read: Callable[[File], Image.Image]
) -> Iterator[tuple[tuple[File, Crop], Tensor]]:
    """Yield each (file, crop) with its pixels, (1, 3, H, W) in -1..1; threads read the next files meanwhile."""
    groups = ((file, [crop for _, crop in group]) for file, group in groupby(items, key=lambda item: item[0]))
    with ThreadPoolExecutor(max_workers=2) as pool, strict_decoding():
        waiting: deque[tuple[File, list[Crop], Future[Image.Image]]] = deque()
        try:
            while True:
                for file, crops in islice(groups, AHEAD - len(waiting)):
                    waiting.append((file, crops, pool.submit(read, file)))
                if not waiting:
                    return
                file, crops, future = waiting.popleft()
                image = future.result()
                for crop in crops:
                    yield (file, crop), pixels(cut(image, crop))[None]
        finally:
            for _, _, future in waiting:
                future.cancel()


def _picture(plan: Plan, i: int, opposite: bool) -> Image.Image:
    """Read a picture, or that at the other end of a slider, as RGB; ValueError if it changed since the scan."""
    return _decoded(plan.file(i, opposite), plan.concepts[i].background)


def _decoded(picture: Picture | Control, background: str) -> Image.Image:
    """Read a picture or control picture as RGB; ValueError if it changed since the scan."""
    data = _bytes(picture.path, picture.digest, picture.name)
    try:
        return load_picture(data, background)
    except DECODER_ERRORS as error:  # the scan could decode it: out of memory, or a decoder was unloaded
        raise ValueError(f"{picture.name} cannot be decoded any more ({decoder_error(error)}); start again.") from error


def _mask(plan: Plan, i: int) -> Image.Image:
    """Read a picture's mask; ValueError if it changed since the scan."""
    picture, config = plan.manifest.pictures[i], plan.concepts[i].masks
    assert picture.mask is not None
    assert config is not None
    mask = read_mask(_bytes(picture.mask, picture.mask_digest, picture.mask.name), config)
    assert mask is not None, "the scan has found it"
    return mask


def _bytes(path: Path, digest: str, name: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{name} has vanished since the scan ({error.strerror}: {path}); put it back, or start again without it."
        ) from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(f"{name} has changed since the scan; start again to train it as it is now.")
    return data


def pixels(image: Image.Image) -> Tensor:
    """Convert an RGB picture to (3, H, W) float32 values in -1..1."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 127.5 - 1


def _finite(*tensors: Tensor | None) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def _check_space(base: BaseModel, cache: Cache, missing: Sequence[Crop]) -> None:
    """Raise ValueError when the latents, mean and deviation in float32, do not fit on the disk or into RAM."""
    form, numbers = base.latents, 2 * torch.float32.itemsize
    each = (crop.bucket[0] // form.pixels * (crop.bucket[1] // form.pixels) for crop in missing)
    needed = form.channels * numbers * sum(each)
    free, place, _ = _room(cache)
    if needed > free:
        other = "disk" if cache.in_ram else "RAM, where there is more"
        raise ValueError(
            f"Encoded pictures need {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free in {place}; make room, or "
            f"set encodings of Memory to {other}."
        )


def _room(cache: Cache) -> tuple[int, Path | str, int]:
    """Measure the free bytes for new entries, name their place, and its limit in bytes, 0 = none."""
    if cache.in_ram:
        return free_bytes(torch.device("cpu")), "RAM", 0
    folder = next(path for path in (cache.folder, *cache.folder.parents) if path.exists())
    return shutil.disk_usage(folder).free, cache.folder, cache.limit


def _check_text_space(work: Work, each: int, texts: int) -> None:
    """Raise ValueError if captions do not fit on the disk or into RAM; note those that exceed the limit of the cache.

    each: bytes of the first caption; others have about as many.
    """
    needed, more = each * texts, "set caption_variants of Concept Dataset lower"
    free, place, limit = _room(work.cache)
    if needed > free:
        raise ValueError(
            f"{texts} encoded captions need {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free in {place}; make "
            f"room, or {more}."
        )
    if 0 < limit < needed:
        work.callbacks.note(
            f"{texts} encoded captions take about {needed / 1e9:.1f} GB, more than the limit of what the pack keeps, "
            f"{limit / 1e9:.1f} GB. They stay until this run ends; to have fewer, {more}."
        )


@torch.no_grad()
def _encode_texts(work: Work, texts: Collection[str]) -> dict[str, str]:
    """Encode texts that the cache lacks and return the key of each; texts with a trained embedding are left out."""
    base, cache = work.base, work.cache
    words = base.text_encoders[0].words if base.text_encoders else {}  # training changes what these captions encode to
    keys = {t: text_key(caption=t, encoder_id=base.text_identity) for t in sorted(texts) if not mentions(t, words)}
    missing = work.world.mine([text for text, key in keys.items() if not cache.has(key)])
    if missing:
        with ExitStack() as stack:
            for encoder in base.text_encoders:
                stack.enter_context(work.place(encoder.model, work.device))
            for done, text in enumerate(missing):
                work.callbacks.check()
                encoded = base.encode_text(text, work.device)
                if not done:
                    _check_text_space(work, sum(tensor.nbytes for tensor in encoded.values()), len(missing))
                cache.put(keys[text], encoded)
                work.callbacks.phase("encoding captions", done + 1, len(missing))
    return keys


@torch.no_grad()
def _encode_seen(work: Work, seen: Collection[Seen]) -> dict[Seen, str]:
    """Encode captions that the text encoders read with control pictures, and return their keys."""
    base, cache = work.base, work.cache
    keys: dict[Seen, str] = {}
    for caption, references in sorted(seen, key=lambda each: (repr(each[1]), each[0])):
        shown = [(each.control.digest, each.background, dataclasses.asdict(each.crop)) for each in references]
        identity = f"{base.text_identity}/{base.seen_as}"
        keys[caption, references] = text_key(caption=caption, encoder_id=identity, pictures=shown)
    missing = work.world.mine([each for each, key in keys.items() if not cache.has(key)])
    read = functools.lru_cache(maxsize=MOST_CONTROLS)(_pixels)  # of one picture after another
    for done, (caption, references) in enumerate(missing):
        work.callbacks.check()
        encoded = base.encode_text(caption, work.device, [read(each) for each in references])
        if not done:
            _check_text_space(work, sum(tensor.nbytes for tensor in encoded.values()), len(missing))
        cache.put(keys[caption, references], encoded)
        work.callbacks.phase("encoding captions with control pictures", done + 1, len(missing))
    return keys


def _pixels(reference: Reference) -> Tensor:
    """Read a control picture as a model sees it, (3, H, W) in -1..1."""
    return pixels(cut(_decoded(reference.control, reference.background), reference.crop))
