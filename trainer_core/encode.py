"""Fill the store with exactly what the plan will ask for: latents, masks, text."""

from __future__ import annotations

import copy
import functools
import hashlib
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .buckets import Crop, Size
from .callbacks import Callbacks
from .images import DECODER_ERRORS, cut, load_picture, reason, strict_decoding
from .masks import cut_mask, latent_mask, painting_masks, read_mask
from .memory import placed, with_room
from .models import (
    MAX_CHUNKS,
    BaseModel,
    Conditioning,
    encode_blank,
    encode_caption,
    encode_painted,
    encode_pixels,
    mentions,
)
from .plan import Plan, Sample
from .scan import count, names
from .store import Store, blank_key, latent_key, mask_key, painted_key, text_key

AHEAD = 4  # pictures that are decoded while the autoencoder works on the one before
Item = tuple[int, Crop]  # (index of the picture, how it is cut)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What the plan asks for, by the plan's own names, read from the store."""

    store: Store
    latent_keys: dict[Item, str]
    mask_keys: dict[Item, str]
    text_keys: dict[str, str]
    painted_keys: dict[Item | Size, str] = field(default_factory=dict)  # of inpainting models; by size where all is

    def latents(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a sample's latents in model scale, (C, H, W) each."""
        entry = self._read(self.latent_keys[sample.picture, sample.crop])
        return entry["mean"], entry["std"]

    def mask(self, sample: Sample) -> Tensor | None:
        """Return a sample's mask at latent size, (1, H, W) in 0..1, or None when its picture has no mask."""
        key = self.mask_keys.get((sample.picture, sample.crop))
        return None if key is None else self._read(key)["mask"]

    def painted(self, sample: Sample) -> Tensor | None:
        """Return what an inpainting model is told of a sample, (5, H, W): mask and latents of the rest; else None.

        Without a mask, or on a visit that does not use it, all of the picture is painted.
        """
        if not self.painted_keys:
            return None
        key = (sample.picture, sample.crop) if sample.use_mask else sample.crop.bucket
        return self._read(self.painted_keys[key])["painted"]

    def conditioning(self, caption: str) -> Conditioning:
        """Return what a caption has become."""
        entry = self._read(self.text_keys[caption])
        return Conditioning(entry["context"], entry.get("pooled"))

    def _read(self, key: str) -> dict[str, Tensor]:
        entry = self.store.get(key)
        if entry is None:
            raise RuntimeError(f"The cache entry {key[:12]} has vanished during the run; start again to rebuild it.")
        return entry


def encode_plan(
    base: BaseModel,
    plan: Plan,
    store: Store,
    device: torch.device,
    callbacks: Callbacks,
    *,
    prompts: set[str] | None,
    vae_dtype: torch.dtype = torch.float32,
) -> Encoded:
    """Encode what the store lacks and return the keys of everything.

    prompts: texts wanted beside the plan's captions; None encodes no text (the text encoder is trained).
    Raises ValueError for a picture or mask that has changed or vanished since the scan, and for a full disk.
    """
    pictures, concepts = plan.manifest.pictures, plan.concepts
    items = sorted(plan.crops(), key=lambda item: (item[0], repr(item[1])))
    latent_keys = {
        (i, crop): latent_key(
            picture_digest=pictures[i].digest,
            crop=crop,
            background=concepts[i].background,
            vae_id=base.identity["vae"],
            dtype=vae_dtype,
        )
        for i, crop in items
    }
    mask_keys = {
        (i, crop): mask_key(
            mask_digest=pictures[i].mask_digest,
            crop=crop,
            source=masks.source,
            invert=masks.invert,
            threshold=masks.threshold,
        )
        for i, crop in items
        if (masks := concepts[i].masks) is not None and pictures[i].mask is not None
    }
    missing = [item for item in items if not store.has(latent_keys[item])]
    _check_space(store, missing)
    if missing:
        _encode_pictures(base, plan, missing, latent_keys, store, device, callbacks, vae_dtype)
    for (i, crop), key in mask_keys.items():
        if not store.has(key):
            callbacks.check()
            store.put(key, {"mask": latent_mask(cut_mask(_mask(plan, i), crop))})
    painted_keys = _encode_painted(base, plan, store, device, callbacks) if base.inpainting else {}
    text_keys: dict[str, str] = {}
    if prompts is not None:
        text_keys = _encode_texts(base, plan.captions() | prompts, store, device, callbacks)
    store.flush()
    return Encoded(
        store=store, latent_keys=latent_keys, mask_keys=mask_keys, text_keys=text_keys, painted_keys=painted_keys
    )


def _encode_pictures(
    base: BaseModel,
    plan: Plan,
    missing: list[Item],
    keys: dict[Item, str],
    store: Store,
    device: torch.device,
    callbacks: Callbacks,
    dtype: torch.dtype,
) -> None:
    """Encode pictures one by one; what a smaller dtype cannot hold is done again in float32, and said."""
    again: list[str] = []
    no_room = 0
    encode = functools.partial(encode_pixels, latent_scale=base.family.latent_scale)
    with ExitStack() as stack:
        vae = stack.enter_context(placed(base.vae, device))
        small = copy.deepcopy(vae).to(dtype) if dtype != torch.float32 else vae
        for done, (item, pixels) in enumerate(_prepared(plan, missing)):
            callbacks.check()
            (mean, std), slow = with_room(encode, small, device, pixels)
            if small is not vae and not _finite(mean, std):
                (mean, std), slow = with_room(encode, vae, device, pixels)
                again.append(plan.manifest.pictures[item[0]].name)
            if not _finite(mean, std):
                raise _not_finite(base, plan, item)
            no_room += slow
            store.put(keys[item], {"mean": mean[0].cpu(), "std": std[0].cpu()})
            callbacks.phase("encoding pictures", done + 1, len(missing))
    if no_room:
        callbacks.note(
            f"{no_room} of {len(missing)} pictures were encoded on the CPU, as the GPU had no room for the VAE's work; "
            "vae_precision bfloat16 needs half of it."
        )
    if again:
        some = count(again, "picture", "pictures")
        short = str(dtype).removeprefix("torch.")
        callbacks.note(f"The VAE overflows in {short} on {some}, encoded in float32 instead: {names(again)}.")


def _encode_painted(
    base: BaseModel, plan: Plan, store: Store, device: torch.device, callbacks: Callbacks
) -> dict[Item | Size, str]:
    """Encode what an inpainting model is told of the plan's samples, in float32, and return the keys."""
    pictures, concepts = plan.manifest.pictures, plan.concepts
    masked, blank = plan.masked_crops()
    items, scale, vae_id = (
        sorted(masked, key=lambda i: (i[0], repr(i[1]))),
        base.family.latent_scale,
        base.identity["vae"],
    )
    keys: dict[Item | Size, str] = {size: blank_key(size=size, vae_id=vae_id) for size in sorted(blank)}
    for i, crop in items:
        masks = concepts[i].masks
        assert masks is not None, "the plan has found a mask"
        keys[i, crop] = painted_key(
            picture_digest=pictures[i].digest,
            mask_digest=pictures[i].mask_digest,
            crop=crop,
            background=concepts[i].background,
            masks={"source": masks.source, "invert": masks.invert, "threshold": masks.threshold},
            vae_id=vae_id,
        )
    missing = [item for item in items if not store.has(keys[item])]
    sizes = [size for size in sorted(blank) if not store.has(keys[size])]
    if not missing and not sizes:
        return keys
    _check_space(store, missing)
    encode = functools.partial(encode_painted, latent_scale=scale)
    with placed(base.vae, device) as vae:
        for size in sizes:
            store.put(keys[size], {"painted": encode_blank(vae, size, scale)[0].cpu()})
        for done, (item, picture) in enumerate(_prepared(plan, missing)):
            callbacks.check()
            pixel_mask, mask = (m[None] for m in painting_masks(cut_mask(_mask(plan, item[0]), item[1])))
            told, _ = with_room(encode, vae, device, picture, pixel_mask, mask)
            if not _finite(told):
                raise _not_finite(base, plan, item)
            store.put(keys[item], {"painted": told[0].cpu()})
            callbacks.phase("encoding masked pictures", done + 1, len(missing))
    return keys


def _not_finite(base: BaseModel, plan: Plan, item: Item) -> ValueError:
    return ValueError(
        f"The VAE of {base.name} gives values that are not finite for {plan.manifest.pictures[item[0]].name}; use "
        "another VAE."
    )


def _prepared(plan: Plan, items: list[Item]) -> Iterator[tuple[Item, Tensor]]:
    """Yield each item with its pixels, (1, 3, H, W) in -1..1; the next pictures are decoded in threads meanwhile."""
    groups = ((i, [crop for _, crop in group]) for i, group in groupby(items, key=lambda item: item[0]))
    with ThreadPoolExecutor(max_workers=2) as pool, strict_decoding():
        waiting: deque[tuple[int, list[Crop], Future[Image.Image]]] = deque()
        try:
            while True:
                for i, crops in islice(groups, AHEAD - len(waiting)):
                    waiting.append((i, crops, pool.submit(_picture, plan, i)))
                if not waiting:
                    return
                i, crops, future = waiting.popleft()
                image = future.result()
                for crop in crops:
                    yield (i, crop), pixels(cut(image, crop))[None]
        finally:
            for _, _, future in waiting:
                future.cancel()


def _picture(plan: Plan, i: int) -> Image.Image:
    """Read a picture as RGB and make sure that it is the one that was scanned."""
    picture = plan.manifest.pictures[i]
    data = _bytes(picture.path, picture.digest, picture.name)
    try:
        return load_picture(data, plan.concepts[i].background)
    except DECODER_ERRORS as error:  # it was read once already: memory, or a decoder that was unloaded meanwhile
        raise ValueError(f"{picture.name} cannot be decoded any more ({reason(error)}); start again.") from error


def _mask(plan: Plan, i: int) -> Image.Image:
    """Read a picture's mask and make sure that it is the one that was scanned."""
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
    """Turn an RGB picture into (3, H, W) float32 values in -1..1."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 127.5 - 1


def _finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _check_space(store: Store, missing: list[Item]) -> None:
    """Refuse to begin what the disk cannot hold: mean and deviation, 4 channels of float32 for 8 x 8 pixels."""
    needed = sum(crop.bucket[0] * crop.bucket[1] // 64 * 4 * 4 * 2 for _, crop in missing)
    free = shutil.disk_usage(next(p for p in (store.folder, *store.folder.parents) if p.exists())).free
    if needed > free:
        raise ValueError(
            f"The cache needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free in {store.folder}; make room."
        )


@torch.no_grad()
def _encode_texts(
    base: BaseModel, texts: set[str], store: Store, device: torch.device, callbacks: Callbacks
) -> dict[str, str]:
    """Encode texts that the store lacks and return the key of each; those with words that are learned are left out."""
    encoder_id = f"{base.identity['text_encoder']}/{base.dtype}"
    layer = max(text.layer for text in base.texts)
    words = base.texts[0].words  # what they become changes while they are learned
    keys = {
        t: text_key(caption=t, encoder_id=encoder_id, clip_skip=layer, max_chunks=MAX_CHUNKS)
        for t in sorted(texts)
        if not mentions(t, words)
    }
    missing = [text for text, key in keys.items() if not store.has(key)]
    if missing:
        with ExitStack() as stack:
            for encoder in base.texts:
                stack.enter_context(placed(encoder.model, device))
            for done, text in enumerate(missing):
                callbacks.check()
                context, pooled = encode_caption(base.texts, base.tokenizer, text, device)
                store.put(keys[text], {"context": context} | ({} if pooled is None else {"pooled": pooled}))
                callbacks.phase("encoding captions", done + 1, len(missing))
    return keys
