"""ComfyUI as the program that holds a linked MODEL's weights: it moves, casts and patches them, and draws samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....trainer_core.common.axes import Framing, Shape, size_text
from ....trainer_core.common.wording import count
from ....trainer_core.common.wording import names as listed_names
from ....trainer_core.config import RunConfig, SamplePicture, node, setting
from ....trainer_core.config.optimizer import RATES
from ....trainer_core.memory import releasing_rounded
from ....trainer_core.models import Conditioning
from ....trainer_core.models.base import NOTHING, Shown, Unit
from ....trainer_core.models.sd.layers import PREFIX
from . import gradients, names, vae
from .beside import empty_inputs
from .compiling import as_they_lie
from .denoiser import BatchConditions
from .experts import named_high, named_low
from .layers import unreachable
from .predicting import ConnectedConditions
from .sampling import draw
from .trial import TrainedClip, comfyui_runs, joint, try_out
from .wired import Wired

MEASURED = ("eva", "lora_ga")  # of init: layers that begin by the first batches


class ComfyUIHost:
    """ComfyUI, which holds the weights; implements `Host`."""

    def __init__(self, wired: Wired) -> None:
        self._wired = wired
        self._bare = False  # whether the MODEL without its training adapter draws the samples

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for settings that a connected model cannot have."""
        for number, name in enumerate(RATES[1:3]):
            if getattr(config.optimizer, name) and (why := self._untrained(number, config)):
                raise ValueError(f"{why}; set {setting(f'optimizer.{name}')} to 0.")
        self._check_experts(config)
        if config.lora.embeddings:
            raise ValueError(f"Words are not trained with a connected model; remove {node('embeddings')}.")
        if config.memory.offload_weights in ("half", "all", "file"):
            raise ValueError(
                "ComfyUI itself decides where the weights of a connected model lie; set "
                f"{setting('memory.offload_weights')} to auto."
            )
        if config.memory.compile and config.memory.compute != "exact":
            raise ValueError(
                f"Products in 8 bits of a connected model are not compiled; set {setting('memory.compile')} to off."
            )

    def _check_experts(self, config: RunConfig) -> None:
        """Raise ValueError for settings that two experts cannot have: what is measured or read for one MODEL alone."""
        if self._wired.high is None:
            return
        if config.lora.start or config.lora.beneath:
            raise ValueError(
                f"An existing LoRA is of one expert, and both are trained; remove {node('existing_lora')}, or load it "
                f"with ComfyUI's Load LoRA before {node('connected')}."
            )
        if config.lora.init in MEASURED or config.lora.channel_scaling:
            raise ValueError(
                "The first batches may all be one expert's, so layers of the other cannot begin by them; set "
                f"{setting('lora.init')} to default, and {setting('lora.channel_scaling')} to false."
            )
        if config.memory.compute != "exact":
            raise ValueError(
                "The first batch is of one expert, so how near the other one is in 8 bits cannot be measured; set "
                f"{setting('memory.compute')} to exact."
            )

    def _untrained(self, number: int, config: RunConfig) -> str:
        """Say why a text encoder of this number is not trained; "" if it can be."""
        wired = self._wired
        if wired.apart:
            devices = f"{wired.clip.patcher.load_device}, and the MODEL on {wired.model.load_device}"
            return f"The linked CLIP computes on {devices}, so its text encoders are not trained"
        if number >= len(wired.encoders):
            titles = [encoder.title.removeprefix("text encoder ") for encoder in wired.encoders]
            found = f"only {listed_names(titles)} of" if titles else "no text encoder of"
            return f"ComfyUI's loader knows names for LoRAs on {found} the linked CLIP"
        if wired.seen_as and any(concept.controls for concept in config.dataset.concepts):
            return (
                "The text encoder of the linked CLIP reads control pictures with captions, and is not trained on these"
            )
        return ""

    def remedy(self, kind: str) -> str:
        """Name the setting by which the MODEL is taken to predict another kind."""
        return f"sampling of ModelSamplingDiscrete, before {node('connected')}, to {kind.replace('epsilon', 'eps')}"

    @contextmanager
    def session(self, device: torch.device, *, texts: bool = False) -> Iterator[None]:
        """Make the denoiser trainable, and text encoders where these are trained, and leave them as they were."""
        del device  # ComfyUI's own, where it loads the MODEL
        wired = self._wired
        wired.live = texts and bool(wired.texts)
        try:
            # Loading may put other tensors into the MODEL, so it comes before they are exchanged.
            for denoiser in reversed(wired.denoisers):
                wired.take(denoiser)
            wired.load()
            beside = [] if wired.high is None else [wired.high]
            with gradients.session(wired.model, wired.clip if wired.live else None, *beside):
                yield
        finally:
            wired.live = False

    @contextmanager
    def compiling(self, blocks: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Let blocks be compiled inside a `with` block of a session; yields those that can be."""
        model = self._wired.model
        with as_they_lie(blocks, model.model.get_dtype_inference(), model.load_device) as chosen:
            yield chosen

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Let the linked VAE and CLIP compute as outside of a session, and load the MODEL again where it had to go."""
        with gradients.paused():
            try:
                yield
            finally:
                self._wired.load()

    def put_beneath(self, tensors: Mapping[str, Tensor], strength: float, *, training_only: bool = False) -> None:
        """Put a LoRA on the MODEL and the CLIP, as ComfyUI's own loader does; it is there when they are loaded next.

        training_only: samples go without it. Raises ValueError for one that changes captions, which samples share.
        """
        wired = self._wired
        on_text = any(name.startswith("text_encoders.") for name in tensors)
        if on_text and training_only:
            raise ValueError(
                "The LoRA for the training alone changes text encoders, which samples share; set "
                f"{setting('beneath.training_only')} to false."
            )
        if training_only and wired.partner is None:
            wired.partner, self._bare = wired.model, True
        elif self._bare and not training_only:
            wired.partner, _ = names.put_beneath(wired.partner, None, tensors, strength)
        wired.model, changed = names.put_beneath(wired.model, wired.clip if on_text else None, tensors, strength)
        if changed:
            wired.clip = changed
            wired.__dict__.pop("digests", None)  # computed anew, as encoded captions are kept by them
        assert wired.denoiser is not None
        # A clone has patches of its own, and shares the weights.
        wired.denoiser.patcher = wired.model

    def reserve(self, size: int) -> None:
        """Let ComfyUI keep so many bytes free when it loads the MODEL, of which it then may load a part."""
        self._wired.reserved = size

    @property
    def holds(self) -> int:
        """The bytes that layers may hold of their weights, rounded, beside these."""
        return self._wired.holds

    @holds.setter
    def holds(self, size: int) -> None:
        self._wired.holds = size

    @property
    def movable(self) -> int:
        """The bytes of the MODEL on the device, which ComfyUI can keep in RAM instead."""
        active = self._wired.active
        return 0 if active is None else active.patcher.loaded_size()

    def try_out(
        self,
        layers: Mapping[str, nn.Module],
        caption: Conditioning,
        size: Shape,
        shown: Shown = NOTHING,
        live: Callable[[], Conditioning] | None = None,
    ) -> list[str]:
        """Try passes with gradients on a picture of (width, height); leave out layers that cannot be trained.

        shown: control pictures of that size. live: encodes the caption anew, where text encoders are
        trained. Returns remarks for the person, a sentence each.
        """
        wired = self._wired
        assert wired.denoiser is not None
        what = f"{wired.name} with the linked CLIP, on pictures of {size_text(size)} pixels"
        device, form = wired.model.load_device, wired.latents
        shape = (1 + shown.count, form.channels, *form.axes(size))
        noised, *pictures = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).split(1)
        beside = [[*(each[0] for each in pictures), *shown.told]]
        levels = replace(wired.architecture.levels, sides=wired.sides)
        level = torch.full((1,), levels.at(0.5, len(wired.denoiser.sigmas)), device=device)

        def conditions(caption: Conditioning) -> BatchConditions:
            return ConnectedConditions(wired).batch([caption], [Framing.whole(size)], device, None, beside)

        with comfyui_runs(what):
            inputs = noised, level, conditions(caption)
        texts = [layer for text in wired.texts for layer in text.layers] if live else []
        modules = {layer.name: layer.module for layer in (*wired.layers, *texts) if layer.name in layers}
        tried = {name: layers[name] for name in modules}
        text = TrainedClip(wired.clip, lambda: conditions(live())) if live else None
        found = try_out(wired.denoiser, inputs, what, tried, modules, text)
        if wired.denoiser_high is not None:
            # Under the names of its own file, as ComfyUI's loader knows them.
            own = {named_low(layer.name): layer for layer in wired.layers_high if layer.name in layers}
            tried = {name: layers[layer.name] for name, layer in own.items()}
            modules = {name: layer.module for name, layer in own.items()}
            high = try_out(wired.take(wired.denoiser_high), inputs, f"model_high: {what}", tried, modules)
            found = joint(found, high._replace(left_out=frozenset(map(named_high, high.left_out))))
            wired.take(wired.denoiser)
        wired.left_out, wired.units, wired.drawn_as_trained = found[:3]
        if computed := unreachable(wired.layers):
            whose = count(computed, "layer has", "layers have")
            found.remarks.append(
                f"{whose} a weight that is computed, or complex, which no LoRA file changes: {listed_names(computed)}."
            )
        return found.remarks + ([] if wired.beside.paints else empty_inputs(inputs[2].samples[0].items()))


class ComfyUISampler:
    """ComfyUI's own sampler; implements `Sampler`."""

    def __init__(self, wired: Wired) -> None:
        self._wired = wired
        self._drawing: Any = None  # the partner that draws the samples, with the network's LoRA on it

    @contextmanager
    def drawing(self, network: Any) -> Iterator[None]:
        """Let `draw` see a network that is attached: a partner takes its tensors as ComfyUI's loader takes the file."""
        partner = self._wired.partner
        with ExitStack() as stack:
            as_trained = partner is None and self._wired.drawn_as_trained
            stack.enter_context(gradients.paused(in_training=as_trained))
            for denoiser in self._wired.denoisers:  # the measured room is a step's, not that of a larger sample
                stack.enter_context(releasing_rounded(denoiser.model))
            if partner is not None:
                # The partner may be the MODEL with other patches; prompts go through the trained text encoders.
                stack.enter_context(network.detached(PREFIX))
                own = {name: tensor for name, tensor in network.tensors().items() if name.startswith(f"{PREFIX}_")}
                self._drawing, _ = names.put_beneath(partner, None, own, 1.0)
            try:
                yield
            finally:
                self._drawing = None
                if self._wired.denoiser is not None:
                    self._wired.load()  # ComfyUI may have moved it, to make room

    def draw(
        self,
        prompt: Conditioning,
        negative: Conditioning,
        picture: SamplePicture,
        check: Callable[[], None],
        references: Sequence[Tensor] = (),
        painted: Tensor | None = None,
    ) -> Tensor:
        """Draw a sample, (T, H, W, 3) in 0..1: a picture, or the frames of a clip."""
        wired = self._wired
        time = vae.frames_per_step(wired.vae) if picture.frames > 1 else 1
        high = wired.denoiser_high and (wired.high, float(wired.denoiser_high.sigmas[wired.sides[1].first]))
        latents = draw(
            self._drawing or wired.model, (prompt, negative), picture, check, references, painted, time=time, high=high
        )
        return vae.decode(self._wired.vae, latents)
