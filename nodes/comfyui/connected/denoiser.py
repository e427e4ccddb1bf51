"""The raw predictions of a connected MODEL, for batches of captions of any length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.conds
import comfy.samplers
import torch
from torch import Tensor, nn

from ....trainer_core.common.axes import Framing
from ....trainer_core.common.subset import Subset, computing
from ....trainer_core.models import Conditioning
from .beside import KEPT, Beside, kept, shown
from .gradients import WRONG
from .text import conditioning
from .vae import with_time, without_time

SampleConditions = Mapping[str, Any]  # a sample's conditions by name, as ComfyUI's COND objects
# Of the largest value: a batch may differ from its samples by rounding, in float32 also that of a GPU's TensorFloat-32.
TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.02}
EXACT = 0.002


class Raw(nn.Module):
    """A MODEL's own sampling, which hands through what the network says instead of making clean latents of it."""

    def __init__(self, sampling: nn.Module) -> None:
        super().__init__()
        # Past nn.Module, which would make it a part of this one.
        self.__dict__["own"] = sampling

    def __getattr__(self, name: str) -> Any:
        """Everything else is the own sampling's."""
        return getattr(self.__dict__["own"], name)

    def calculate_denoised(self, sigma: Tensor, model_output: Tensor, model_input: Tensor) -> Tensor:
        """Return the network's output."""
        del sigma, model_input
        return model_output


@dataclass(frozen=True, slots=True)
class BatchConditions:
    """The conditions of a batch, sample by sample."""

    samples: tuple[SampleConditions, ...]

    def some(self, samples: slice) -> BatchConditions:
        """Select the conditions of some samples."""
        return BatchConditions(self.samples[samples])

    def groups(self, *, joined: bool) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Yield the numbers of samples that can be one batch, and their joint conditions.

        Captions of unequal lengths cannot: padding would change what most models compute.
        """
        groups: list[list[int]] = []
        for number, sample in enumerate(self.samples):
            group = next((g for g in groups if joined and _join(self.samples[g[0]], sample)), None)
            if group is None:
                groups.append([number])
            else:
                group.append(number)
        for group in groups:
            yield group, comfy.samplers.cond_cat([self.samples[number] for number in group])


def _join(one: SampleConditions, other: SampleConditions) -> bool:
    """Tell whether two samples can be one batch without changing either: same names, shapes and constants."""
    if one.keys() != other.keys():
        return False
    return all(one[name].can_concat(other[name]) and _shape(one[name]) == _shape(other[name]) for name in one)


def _shape(cond: Any) -> Any:
    """The shape of a condition; ComfyUI would repeat shorter ones of cross-attention."""
    return tuple(cond.cond.shape) if isinstance(cond.cond, Tensor) else None


class RawDenoiser:
    """A MODEL that is trained on: how noised latents, levels and captions become a prediction."""

    def __init__(self, patcher: Any, sigmas: Tensor, guidance: float | None, beside: Beside | None = None) -> None:
        self.patcher, self.model, self.sigmas, self.guidance = patcher, patcher.model, sigmas, guidance
        self.beside = beside or Beside()  # what it reads in further channels
        self.sampling = Raw(patcher.get_model_object("model_sampling"))
        self._joins: bool | None = None  # whether batches act like single samples; tried once

    def conditions(
        self,
        captions: Sequence[Conditioning],
        framings: Sequence[Framing],
        shape: Sequence[int],
        device: Any,
        references: Sequence[Sequence[Tensor]] = (),
        painted: Tensor | None = None,
    ) -> BatchConditions:
        """Build the conditions of a batch on a device.

        framings: of each sample. shape: of one sample's latents, (C, *axes). references: of each sample, latents
        (C, *axes) in the VAE's scale. painted: (B, C, *axes), in place of what an inpainting MODEL makes of nothing.
        """
        each = references or [()] * len(captions)
        given = [None] * len(captions) if painted is None else painted.to(device)
        # Some MODELs put captions through layers of their own here.
        live = any(tensor.requires_grad for caption in captions for tensor in caption.values())
        with torch.set_grad_enabled(live):
            return BatchConditions(
                tuple(
                    self._sample(*of_one, shape, device) for of_one in zip(captions, framings, each, given, strict=True)
                )
            )

    def _sample(
        self,
        caption: Conditioning,
        framing: Framing,
        references: Sequence[Tensor],
        painted: Tensor | None,
        shape: Sequence[int],
        device: Any,
    ) -> SampleConditions:
        """Ask the MODEL for the conditions of one sample; sizes and guidance enter here."""
        cross, given = conditioning({name: tensor.to(device) for name, tensor in caption.items()})
        height, width, top, left, trained_height, trained_width = framing.numbers
        latents = with_time(self.model, torch.zeros(1, *shape, device=device))
        given |= {"width": trained_width, "height": trained_height, "crop_h": top, "crop_w": left}
        given |= {"target_width": trained_width, "target_height": trained_height}
        if self.model.adm_channels:  # models of the kind of Stable Diffusion XL: the size before scaling and cutting
            given |= {"width": width, "height": height}
        given |= {
            "noise": latents,
            "latent_image": torch.zeros_like(latents),
            "latent_shapes": [latents.shape],  # some models take further latents beside the picture's
            "device": device,
            "prompt_type": "positive",
            "seed": 0,  # and the next: what ComfyUI's sampler always gives
            "denoise_mask": None,
        }
        if self.guidance is not None:
            given["guidance"] = self.guidance
        if cross is not None:
            given["cross_attn"] = cross
        beside = [each.to(device) for each in references]
        given |= shown(self.model, self.beside, beside)
        clean = kept(self.model, beside)
        if clean is not None:
            given["denoise_mask"] = clean[1]
        if painted is not None:
            given["noise_concat"] = painted[None]
        found = self.model.extra_conds(**given)
        if clean is not None:
            found[KEPT] = comfy.conds.CONDRegular(self.model.process_latent_in(clean[0]))
        # ComfyUI's sampler does the same to conditions before a pass.
        return {name: cond.process_cond(batch_size=1, area=None) for name, cond in found.items()}

    def predict(
        self, noised: Tensor, levels: Tensor, conditions: BatchConditions, options: Mapping[str, Any]
    ) -> Tensor:
        """Compute the raw output for (B, C, *axes) noised latents at (B,) levels, float32, same shape.

        options: ComfyUI's transformer_options.
        """
        sigmas = self.sigmas.to(noised.device)[levels].to(noised.dtype)
        if self._joins is None and len(noised) > 1:
            self._joins = self._acts_alike(noised, conditions, options)
        parts: list[Tensor] = [noised] * len(noised)
        for numbers, joint in conditions.groups(joined=bool(self._joins)):
            output = self._run(noised, sigmas, numbers, joint, options)
            for number, part in zip(numbers, output, strict=True):
                parts[number] = part
        return torch.stack(parts)

    def _run(
        self, noised: Tensor, sigmas: Tensor, numbers: list[int], joint: dict[str, Any], options: Mapping[str, Any]
    ) -> Tensor:
        """Compute the raw output for some samples of a batch, which have joint conditions."""
        levels = sigmas[numbers]
        x, joint = self._with_kept(noised[numbers], levels, joint)
        # Layers draw dropout by places in the micro-batch, of which these samples are a part.
        with self.raw(), computing(Subset(numbers, len(noised))):
            output = self.model.apply_model(x, levels, **joint, transformer_options=self._sampled(options, levels))
        return without_time(output).float()

    def _with_kept(self, noised: Tensor, sigmas: Tensor, joint: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Put the frames that the MODEL sees without noise among the others, as ComfyUI's sampler does."""
        x, given = with_time(self.model, noised), dict(joint)
        clean = given.pop(KEPT, None)
        if clean is None:
            return x, given
        # Some scale them, as their sampling scales its input.
        clean = self.model.scale_latent_inpaint(x=x, sigma=sigmas, noise=x, latent_image=clean.to(x))
        return torch.where(given["denoise_mask"] > 0, x, clean), given

    def _sampled(self, options: Mapping[str, Any], levels: Tensor) -> dict[str, Any]:
        """Add to transformer_options what ComfyUI's sampler adds; levels: the samples' sigmas."""
        of_each = {"cond_or_uncond": [0] * len(levels), "uuids": [0] * len(levels), "sigmas": levels}
        # ComfyUI's steps go from noise to picture, levels the other way: hence the flip.
        return {**options, **of_each, "sample_sigmas": self.sigmas.flip(0).to(levels)}

    @property
    def bound(self) -> float:
        """How far predictions may be apart by rounding alone, as a share of the largest value."""
        return TOLERANCE.get(self.model.get_dtype_inference(), EXACT)

    @torch.no_grad()
    def follows_sampling(
        self, noised: Tensor, levels: Tensor, conditions: BatchConditions, options: Mapping[str, Any]
    ) -> bool:
        """Tell whether the MODEL makes of what its network says what its sampling does, and nothing else."""
        sigmas = self.sigmas.to(noised.device)[levels].to(noised.dtype)
        # Two copies: code may write into its conditions.
        (numbers, joint), (_, again) = (next(conditions.groups(joined=False)) for _ in range(2))
        said = with_time(self.model, self._run(noised, sigmas, numbers, joint, options))
        (x, joint), own = self._with_kept(noised[numbers], sigmas[numbers], joint), self.sampling.own
        expected = own.calculate_denoised(sigmas[numbers], said, x)
        given = self._sampled(options, sigmas[numbers])
        found = self.model.apply_model(x, sigmas[numbers], **again, transformer_options=given)
        return bool((found - expected).abs().max() <= self.bound * expected.abs().max())

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Lend the MODEL its own sampling as `Raw`."""
        own, self.model.model_sampling = self.model.model_sampling, self.sampling
        try:
            yield
        finally:
            self.model.model_sampling = own

    @torch.no_grad()
    def _acts_alike(self, noised: Tensor, conditions: BatchConditions, options: Mapping[str, Any]) -> bool | None:
        """Tell whether a batch gives what its samples give one by one; None if these cannot be one batch.

        They are tried on noise, levels and captions of their own: equal ones would say nothing.
        """
        apart = BatchConditions(tuple(_differing(sample, number) for number, sample in enumerate(conditions.samples)))
        groups = [group for group in apart.groups(joined=True) if len(group[0]) > 1]
        if not groups:
            return None
        numbers, joint = groups[0]
        noise = torch.randn(noised.shape, generator=torch.Generator().manual_seed(0)).to(noised)
        indices = torch.linspace(0.3, 0.7, len(noised), dtype=torch.float64).mul(len(self.sigmas)).long()
        sigmas = self.sigmas[indices].to(noised)
        try:
            both = self._run(noise, sigmas, numbers, joint, options)
        except torch.OutOfMemoryError:
            raise
        except WRONG:  # a model that takes no batch
            return False
        for number, part in zip(numbers, both, strict=True):
            alone = comfy.samplers.cond_cat([apart.samples[number]])
            single = self._run(noise, sigmas, [number], alone, options)[0]
            if not (part - single).abs().max() <= self.bound * single.abs().max():
                return False
        return True


def _differing(sample: SampleConditions, number: int) -> SampleConditions:
    """Scale the tensors of a sample's conditions by a number of its own; masks stay."""
    return {name: _scaled(cond, 1 - number / 16) for name, cond in sample.items()}


def _scaled(cond: Any, factor: float) -> Any:
    value = cond.cond
    if not isinstance(cond, comfy.conds.CONDRegular) or isinstance(cond, comfy.conds.CONDConstant):
        return cond
    if not isinstance(value, Tensor) or not value.is_floating_point() or ((value == 0) | (value == 1)).all():
        return cond
    return cond._copy_with(value * factor)
