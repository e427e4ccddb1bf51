"""Fill the store with exactly what the plan will ask for: latents, masks, text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .buckets import Crop, cut
from .callbacks import Callbacks
from .config import DatasetConfig
from .masks import cut_mask, latent_mask, load_mask
from .memory import placed
from .models import BaseModel, encode_tokens, tokenize
from .models.sd import LATENT_SCALE
from .plan import Plan, Sample
from .scan import Picture, load_picture
from .store import Store, latent_key, mask_key, text_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """What the plan asks for, by the plan's own names, read from the store."""

    store: Store
    latent_keys: dict[tuple[int, Crop], str]
    mask_keys: dict[tuple[int, Crop], str]
    text_keys: dict[str, str]

    def latents(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of a sample's latents in model scale, (C, H, W) each."""
        entry = self._read(self.latent_keys[sample.picture, sample.crop])
        return entry["mean"], entry["std"]

    def mask(self, sample: Sample) -> Tensor | None:
        """Return a sample's mask at latent size, (1, H, W) in 0..1, or None when its concept has no masks."""
        key = self.mask_keys.get((sample.picture, sample.crop))
        return None if key is None else self._read(key)["mask"]

    def context(self, caption: str) -> Tensor:
        """Return the conditioning of a caption, (L, D)."""
        return self._read(self.text_keys[caption])["context"]

    def _read(self, key: str) -> dict[str, Tensor]:
        entry = self.store.get(key)
        if entry is None:
            raise RuntimeError(f"The cache entry {key[:12]} has vanished during the run; start again to rebuild it.")
        return entry


def encode_plan(
    base: BaseModel,
    plan: Plan,
    dataset: DatasetConfig,
    store: Store,
    device: torch.device,
    callbacks: Callbacks,
    *,
    prompts: set[str] | None,
) -> Encoded:
    """Encode what the store lacks and return the keys of everything.

    prompts: texts wanted beside the plan's captions; None encodes no text (the text encoder is trained).
    """
    pictures = plan.manifest.pictures
    crops = sorted(plan.crops(), key=lambda item: (item[0], item[1].bucket, item[1].flip))
    latent_keys = {
        (i, crop): latent_key(
            picture_digest=pictures[i].digest, crop=crop, vae_id=base.identity["vae"], dtype="float32"
        )
        for i, crop in crops
    }
    mask_keys = {
        (i, crop): mask_key(mask_digest=pictures[i].mask_digest, crop=crop, invert=masks.invert)
        for i, crop in crops
        if (masks := dataset.concepts[pictures[i].concept].masks)
    }
    missing = [item for item in crops if not store.has(latent_keys[item])]
    if missing:
        with placed(base.vae, device):
            for done, item in enumerate(missing):
                callbacks.check()
                mean, std = encode_picture(base, pictures[item[0]], item[1], device)
                store.put(latent_keys[item], {"mean": mean, "std": std})
                callbacks.phase("encoding pictures", done + 1, len(missing))
    for item, key in mask_keys.items():
        if not store.has(key):
            masks = dataset.concepts[pictures[item[0]].concept].masks
            assert masks is not None
            store.put(key, {"mask": latent_mask(cut_mask(load_mask(pictures[item[0]], masks), item[1]))})
    text_keys: dict[str, str] = {}
    if prompts is not None:
        text_keys = _encode_texts(base, plan.captions() | prompts, store, device, callbacks)
    return Encoded(store=store, latent_keys=latent_keys, mask_keys=mask_keys, text_keys=text_keys)


def pixels(image: Image.Image) -> Tensor:
    """Turn an RGB picture into (3, H, W) float32 values in -1..1."""
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 127.5 - 1


@torch.no_grad()
def encode_picture(base: BaseModel, picture: Picture, crop: Crop, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of a picture's latents in model scale, (C, H, W) float32 on the CPU.

    Raises ValueError that names the picture when the VAE gives values that are not finite.
    """
    batch = pixels(cut(load_picture(picture.path), crop))[None].to(device)
    encoded = base.vae.encode(batch)
    if hasattr(encoded, "latent_dist"):
        mean, std = encoded.latent_dist.mean * LATENT_SCALE, encoded.latent_dist.std * LATENT_SCALE
    else:  # a TAESD-shaped autoencoder gives scaled latents and no distribution
        mean, std = encoded.latents, torch.zeros_like(encoded.latents)
    if not (mean.isfinite().all() and std.isfinite().all()):
        raise ValueError(
            f"The VAE of {base.name} gives values that are not finite for {picture.name}; use another VAE."
        )
    return mean[0].cpu(), std[0].cpu()


@torch.no_grad()
def _encode_texts(
    base: BaseModel, texts: set[str], store: Store, device: torch.device, callbacks: Callbacks
) -> dict[str, str]:
    """Encode texts that the store lacks and return the key of each."""
    encoder_id = f"{base.identity['text_encoder']}/{base.dtype}"
    keys = {t: text_key(caption=t, encoder_id=encoder_id, clip_skip=base.clip_skip) for t in sorted(texts)}
    missing = [text for text, key in keys.items() if not store.has(key)]
    if missing:
        with placed(base.text_encoder, device):
            for done, text in enumerate(missing):
                callbacks.check()
                tokens = tokenize(base.tokenizer, text).to(device)
                context = encode_tokens(base.text_encoder, tokens, base.clip_skip)
                store.put(keys[text], {"context": context.cpu()})
                callbacks.phase("encoding captions", done + 1, len(missing))
    return keys
