"""Read and build the autoencoder, encode pixels and decode latents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.axes import Size
from ..files.kept import KeptFiles
from ..files.safetensors_file import Shapes, highest_number, opened, read_header, read_part
from ..files.tensors import Complete, fill, of_possible_shapes
from .family import Family, check_vae
from .names import tiny_vae_names, vae_ldm_names

MOST_LAYERS = 10  # of a block; those of Stable Diffusion have 2


def read_vae(path: Path, family: Family, kept: KeptFiles | None = None) -> dict[str, Tensor]:
    """Read an autoencoder's file, of original or diffusers' names, under the original names. kept: files in memory."""
    header = read_header(path)
    check_vae(header, family)
    with opened(header, kept and kept.take(header)) as file:
        return original_names(read_part(file, header.shapes, vae_prefix(header.shapes)))


def vae_prefix(shapes: Shapes) -> str:
    """Find what the names in an autoencoder's file begin with."""
    first = "encoder.conv_in.weight"
    return next(key.removesuffix(first) for key in shapes if key.endswith(first))


def original_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename an autoencoder's tensors from diffusers' names, if they have these, to the original ones."""
    if any(".down_blocks." in name for name in tensors):
        tensors = newer_names(tensors)
        levels = 1 + highest_number(tensors, r"encoder\.down_blocks\.(\d)\.")
        names = vae_ldm_names(tensors, levels)
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
    return tensors


def newer_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename the attention of an autoencoder from diffusers' first names."""
    for old, new in (("query", "to_q"), ("key", "to_k"), ("value", "to_v"), ("proj_attn", "to_out.0")):
        tensors = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in tensors.items()}
    return tensors


def build_vae(tensors: dict[str, Tensor], source: str) -> nn.Module:
    """Build the autoencoder, TAESD or the original KL one, depending on the tensors."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny

    what = f"the VAE of {source}"
    if "taesd_decoder.1.weight" in tensors:
        with torch.device("meta"), of_possible_shapes(what, ValueError):
            tiny = AutoencoderTiny(latent_channels=tensors["taesd_decoder.1.weight"].shape[1])
        return fill(tiny, tiny_vae_names(tiny.state_dict()), tensors, what)
    tensors = Complete(tensors, what)
    levels = 1 + highest_number(tensors, r"encoder\.down\.(\d)\.")
    shape: dict[str, Any] = {
        "block_out_channels": tuple(tensors[f"encoder.down.{i}.block.0.conv1.weight"].shape[0] for i in range(levels)),
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "layers_per_block": sum(k.startswith("encoder.down.0.block.") and "conv1.w" in k for k in tensors),
        "latent_channels": tensors["quant_conv.weight"].shape[0] // 2,
    }
    if shape["layers_per_block"] > MOST_LAYERS:
        raise ValueError(f"{what} has {shape['layers_per_block']} layers in a block; choose an ordinary one.")
    with torch.device("meta"), of_possible_shapes(what, ValueError):
        vae = AutoencoderKL(**shape)
    names = vae_ldm_names(vae.state_dict(), levels)
    return fill(vae, names, tensors, what)


@dataclass(frozen=True)
class ScaledAutoencoder:
    """An autoencoder of latents in model scale; implements `Autoencoder`."""

    module: Any
    identity: str  # hash of its stored weights
    scale: float  # of latents

    def encode(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (B, 3, H, W) pixels in -1..1: mean and standard deviation in model scale, float32."""
        return encode_pixels(vae, pixels, self.scale)

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode latents in model scale to (N, H, W, 3) pictures in 0..1."""
        return decode(vae, latents, self.scale)


@dataclass(frozen=True)
class PaintedInputs:
    """The further inputs of Stable Diffusion's inpainting models; implements `Inpainting`."""

    scale: float  # of latents

    def encode(self, vae: Any, pixels: Tensor, pixel_mask: Tensor, mask: Tensor) -> Tensor:
        """Encode the mask, and the latents with the masked region mid-grey, (B, 5, h, w)."""
        return encode_painted(vae, pixels, pixel_mask, mask, self.scale)

    def blank(self, vae: Any, size: Size) -> Tensor:
        """Encode a fully painted picture of (width, height), (1, 5, h, w)."""
        return encode_blank(vae, size, self.scale)


@torch.no_grad()
def encode_pixels(vae: Any, batch: Tensor, latent_scale: float) -> tuple[Tensor, Tensor]:
    """Encode (B, 3, H, W) pixels: mean and standard deviation of latents in model scale, float32."""
    encoded = vae.encode(batch.to(vae.dtype))
    if hasattr(encoded, "latent_dist"):
        latents = encoded.latent_dist
        return latents.mean.float() * latent_scale, latents.std.float() * latent_scale
    # TAESD gives scaled latents and no distribution
    return encoded.latents.float(), torch.zeros_like(encoded.latents, dtype=torch.float32)


@torch.no_grad()
def encode_painted(vae: Any, batch: Tensor, pixel_mask: Tensor, mask: Tensor, latent_scale: float) -> Tensor:
    """Encode an inpainting model's further inputs, (B, 5, h, w): the mask, and latents with the masked region mid-grey.

    pixel_mask (B, 1, H, W) and mask (B, 1, h, w), 1 = painted.
    """
    mean, _ = encode_pixels(vae, batch * (1 - pixel_mask.round()), latent_scale)
    return torch.cat([mask.to(mean), mean], dim=1)


def encode_blank(vae: Any, size: Size, latent_scale: float) -> Tensor:
    """Encode an inpainting model's further inputs for a fully painted picture of (W, H) pixels: (1, 5, h, w)."""
    width, height = size
    device = next(vae.parameters()).device
    everything = torch.ones(1, 1, height, width, device=device)
    grey = torch.zeros(1, 3, height, width, device=device)
    return encode_painted(vae, grey, everything, everything[:, :, : height // 8, : width // 8], latent_scale)


def decode(vae: Any, latents: Tensor, latent_scale: float) -> Tensor:
    """Decode latents in model scale to (N, H, W, 3) pictures in 0..1."""
    dtype = next(vae.parameters()).dtype
    scaled = latents if type(vae).__name__ == "AutoencoderTiny" else latents / latent_scale
    decoded = vae.decode(scaled.to(dtype)).sample.float()
    return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1)
