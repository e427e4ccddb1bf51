"""Encode the pictures and masks of a plan, or of a few samples of it, into a cache; captions: encode_text."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch
from torch import Tensor

from ..common.axes import Shape, Size, size_text
from ..common.callbacks import Callbacks
from ..common.wording import count, names, say
from ..common.world import ALONE, World
from ..config import SamplePicture, setting
from ..data.cache import Cache, blank_key, latent_key, mask_key, painted_key, reference_key
from ..data.controls import Control, Reference, References
from ..data.crops import Crop
from ..data.masks import cut_mask, painting_masks
from ..data.plan import Plan, View
from ..data.scan import Picture
from ..memory import with_room
from ..models import BaseModel, ControlPictures, Inpainting
from .encode_text import encode_seen, encode_texts
from .encoded import REFERENCE, TOLD, Encoded, EncodingContext, EncodingNeeds, Seen, room
from .pixels import decoded, frames, mask_in_latents, mask_of, prepared_pixels

Coloured = tuple[Picture | Control, str]  # a file, and the colour behind it where it is transparent


class NoRoom(torch.OutOfMemoryError):
    """A picture or a clip that a VAE has no room for, in a sentence."""


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
    process's share is encoded. Raises ValueError for a picture or mask that changed or vanished since the scan, for one
    that a linked VAE has no room for, and for a full disk.
    """
    masked, blank = plan.masked_views() if base.inpainting else ((), ())
    drawn = drawn or {}
    needs = EncodingNeeds(
        views=plan.views(),
        masked=masked,
        blank=blank,
        references=plan.all_references().union(*drawn.values()),
        texts=None if prompts is None else plan.captions(alone=bool(base.text.seen_as)) | prompts,
        seen=seen,
    )
    work = EncodingContext(
        base=base, plan=plan, cache=cache, device=device, callbacks=callbacks, vae_dtype=vae_dtype, world=world
    )
    try:
        return dataclasses.replace(encode(work, needs), drawn=drawn)
    except NoRoom as error:  # a step would be repeated with less; before the first one nothing else holds memory
        raise ValueError(str(error)) from None


def encode(work: EncodingContext, needs: EncodingNeeds) -> Encoded:
    """Encode what the cache lacks; return the keys of all that is needed. Errors are those of `encode_plan`."""
    base, plan, cache, world = work.base, work.plan, work.cache, work.world
    pictures, concepts = plan.manifest.pictures, plan.concepts
    views = sorted(needs.views, key=lambda view: view.order)
    latent_keys: dict[View, str] = {}
    wanted: dict[str, tuple[Coloured, Crop]] = {}
    for view in views:
        file, background = plan.file(view), concepts[view.picture].background
        latent_keys[view] = latent_key(
            picture_digest=file.digest,
            crop=view.crop,
            background=background,
            vae_id=base.autoencoder.identity,
            dtype=work.vae_dtype,
        )
        wanted.setdefault(latent_keys[view], ((file, background), view.crop))
    mask_keys = {
        view: mask_key(
            mask_digest=pictures[view.picture].mask_digest,
            crop=view.crop,
            source=masks.source,
            invert=masks.invert,
            threshold=masks.threshold,
            moves=pictures[view.picture].mask_moves,
        )
        for view in views
        if plan.has_mask(view.picture) and (masks := concepts[view.picture].masks) is not None
    }
    missing = [key for key in wanted if not cache.has(key)]
    _check_space(base, cache, [wanted[key][1] for key in missing])
    if missing := world.mine(missing):
        _encode_pictures(work, {key: wanted[key] for key in missing})
    unmasked = {key: view for view, key in mask_keys.items() if not cache.has(key)}
    for key, view in world.mine(list(unmasked.items())):
        work.callbacks.check()
        cache.put(key, {"mask": mask_in_latents(plan, view, base.latents)})
    painted_keys = _encode_painted(work, base.inpainting, needs) if base.inpainting else {}
    reference_keys = _encode_references(work, base.controls, needs.references) if base.controls else {}
    text_keys = {} if needs.texts is None else encode_texts(work, needs.texts)
    seen_keys = encode_seen(work, needs.seen)
    cache.flush()
    return Encoded(
        cache=cache,
        latent_keys=latent_keys,
        mask_keys=mask_keys,
        text_keys=text_keys,
        painted_keys=painted_keys,
        reference_keys=reference_keys,
        seen_keys=seen_keys,
    )


def _encode_pictures(work: EncodingContext, missing: Mapping[str, tuple[Coloured, Crop]]) -> None:
    """Encode pictures one by one, by their keys; encode again in float32 where vae_dtype overflows, and report it."""
    base, device, dtype = work.base, work.device, work.vae_dtype
    overflowed: list[str] = []
    on_cpu = 0
    with ExitStack() as stack:
        vae = stack.enter_context(work.on_device(base.autoencoder.module, device))
        small = vae
        if dtype != torch.float32:
            small = stack.enter_context(work.on_device(work.copy_in(dtype, vae), device))
        items = list(missing.values())
        prepared = prepared_pixels(items, lambda file: decoded(*file), lambda file, of: frames(*file, of))
        for done, (key, (((picture, _), crop), pixels)) in enumerate(zip(missing, prepared, strict=True)):
            work.callbacks.check()
            with _room_for(base, picture, crop.shape):
                (mean, std), no_room = with_room(base.autoencoder.encode, small, device, pixels)
                if small is not vae and not _finite(mean, std):
                    (mean, std), no_room = with_room(base.autoencoder.encode, vae, device, pixels)
                    overflowed.append(picture.name)
            if not _finite(mean, std):
                raise _not_finite(base, picture)
            on_cpu += no_room
            entry = {"mean": mean} | ({} if std is None else {"std": std})
            work.cache.put(key, {name: tensor[0].cpu() for name, tensor in entry.items()})
            work.callbacks.phase(say("encoding pictures"), done + 1, len(missing))
    if on_cpu:
        work.note_once(
            "room",
            f"{count(on_cpu, 'picture was', 'pictures were')} encoded on the CPU, as the GPU had no room for the VAE's "
            f"work. To halve that memory set {setting('base_model.vae_precision')} to bfloat16.",
        )
    if overflowed:
        some = count(overflowed, "picture", "pictures")
        short = str(dtype).removeprefix("torch.")
        sentence = f"The VAE overflows in {short} on {some}, encoded in float32 instead: {names(overflowed)}."
        work.note_once("overflow", sentence)


def _encode_painted(work: EncodingContext, inputs: Inpainting, needs: EncodingNeeds) -> dict[View | Size, str]:
    """Encode masked pictures for an inpainting model, in float32, and return their keys."""
    base, plan, cache, device = work.base, work.plan, work.cache, work.device
    pictures, concepts = plan.manifest.pictures, plan.concepts
    views, vae_id = sorted(needs.masked, key=lambda view: view.order), base.autoencoder.identity
    keys: dict[View | Size, str] = {size: blank_key(size=size, vae_id=vae_id) for size in sorted(needs.blank)}
    for view in views:
        masks = concepts[view.picture].masks
        assert masks is not None, "the plan has found a mask"
        keys[view] = painted_key(
            picture_digest=plan.file(view).digest,
            mask_digest=pictures[view.picture].mask_digest,
            crop=view.crop,
            background=concepts[view.picture].background,
            masks={"source": masks.source, "invert": masks.invert, "threshold": masks.threshold},
            vae_id=vae_id,
        )
    missing = list({keys[view]: view for view in views if not cache.has(keys[view])}.values())
    _check_space(base, cache, [view.crop for view in missing])
    missing = work.world.mine(missing)
    sizes = work.world.mine([size for size in sorted(needs.blank) if not cache.has(keys[size])])
    if not missing and not sizes:
        return keys
    with work.on_device(base.autoencoder.module, device) as vae:
        for size in sizes:
            cache.put(keys[size], {"painted": inputs.blank(vae, size)[0].cpu()})
        items = [((plan.file(view), concepts[view.picture].background), view.crop) for view in missing]
        prepared = prepared_pixels(items, lambda file: decoded(*file))
        for done, (view, (_, picture)) in enumerate(zip(missing, prepared, strict=True)):
            work.callbacks.check()
            mask = cut_mask(mask_of(plan, view.picture), view.crop)
            pixel_mask, small = (each[None] for each in painting_masks(mask, base.latents.pixels))
            with _room_for(base, plan.file(view), view.crop.shape):
                painted, _ = with_room(inputs.encode, vae, device, picture, pixel_mask, small)
            if not _finite(painted):
                raise _not_finite(base, plan.file(view))
            cache.put(keys[view], {"painted": painted[0].cpu()})
            work.callbacks.phase(say("encoding masked pictures"), done + 1, len(missing))
    return keys


def _encode_references(
    work: EncodingContext, controls: ControlPictures, references: Collection[Reference]
) -> dict[Reference, str]:
    """Encode control pictures, in float32, and return their keys."""
    base, cache, device = work.base, work.cache, work.device
    keys = {
        each: reference_key(
            picture_digest=each.control.digest,
            crop=each.crop,
            background=each.background,
            vae_id="/".join(filter(None, (base.autoencoder.identity, controls.identity))),
            length=each.length,
            last=(each.last[0].digest, each.last[1]) if each.last else None,
        )
        for each in sorted(references, key=repr)
    }
    missing = [each for each, key in keys.items() if not cache.has(key)]
    _check_space(base, cache, [each.crop for each in missing])
    if missing := work.world.mine(missing):
        with work.on_device(base.autoencoder.module, device) as vae:
            items = [((file, each.background), crop) for each in missing for file, crop in each.files]
            prepared = prepared_pixels(items, lambda file: decoded(*file), lambda file, of: frames(*file, of))
            for done, each in enumerate(missing):
                work.callbacks.check()
                first, *last = (found for _, found in islice(prepared, len(each.files)))
                pixels = torch.stack([first, *last], 2) if last else first
                encode_one = functools.partial(controls.encode, length=each.length)
                shape = (*each.crop.bucket, each.length) if each.length else each.crop.bucket
                with _room_for(base, each.control, shape):
                    reference, _ = with_room(encode_one, vae, device, pixels)
                if not _finite(reference):
                    raise _not_finite(base, each.control)
                told = controls.told(pixels)
                cache.put(keys[each], {REFERENCE: reference[0].cpu()} | ({} if told is None else {TOLD: told}))
                work.callbacks.phase(say("encoding control pictures"), done + 1, len(missing))
    return keys


@contextmanager
def _room_for(base: BaseModel, picture: Picture | Control, shape: Shape) -> Iterator[None]:
    """Raise NoRoom where memory runs out for a picture or clip of a shape."""
    try:
        yield
    except torch.OutOfMemoryError:
        full = True
    else:
        full = False
    if full:  # outside of the handler nothing holds the tensors of the failed work
        less = f" or {setting('clips.frames')}" if len(shape) > 2 else ""
        raise NoRoom(
            f"Out of memory while the VAE of {base.name} encodes {picture.name} at {size_text(shape)}; set "
            f"{setting('train.resolution')}{less} lower."
        )


def _not_finite(base: BaseModel, picture: Picture | Control) -> ValueError:
    return ValueError(f"The VAE of {base.name} gives values that are not finite for {picture.name}; use another VAE.")


def _finite(*tensors: Tensor | None) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


def _check_space(base: BaseModel, cache: Cache, missing: Sequence[Crop]) -> None:
    """Raise ValueError when the latents, mean and deviation in float32, do not fit on the disk or into RAM."""
    form, numbers = base.latents, 2 * torch.float32.itemsize
    needed = form.channels * numbers * sum(math.prod(form.axes(crop.shape)) for crop in missing)
    free, place, _ = room(cache)
    if needed > free:
        other = "disk" if cache.in_ram else "RAM, where there is more"
        raise ValueError(
            f"Encoded pictures need {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free in {place}; make room, or "
            f"set {setting('memory.encodings')} to {other}."
        )
