"""Sample: prompt to picture in one node, with a hi-res second pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .comfyui import sampling
from .node import Node
from .sockets import CATEGORY, io, titled

GAP = 8  # white pixels between before and after


class AtelierSample(Node):
    """Sample a picture, enlarge it and sample again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSample",
            display_name=titled("Sample"),
            category=CATEGORY,
            description="Samples pictures with ComfyUI's own sampler. With hires_scale above 1 it enlarges the "
            "latents and samples a second time for detail (hi-res fix). With before_model it draws before and after.",
            search_aliases=["ksampler", "txt2img", "hires fix", "highres fix", "test lora", "atelier"],
            inputs=[
                io.Model.Input("model", tooltip="The model to sample with, for example MODEL of Train LoRA."),
                io.Clip.Input("clip", tooltip="The text encoder, for example CLIP of Train LoRA."),
                io.Vae.Input("vae", tooltip="The VAE, of Load Base Model."),
                io.String.Input("prompt", multiline=True, default="", tooltip="The prompt. Include your trigger word."),
                io.String.Input("negative", multiline=True, default="", tooltip="The negative prompt: what to avoid."),
                io.Int.Input(
                    "width",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels before the second pass, in steps of 8.",
                ),
                io.Int.Input(
                    "height",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels before the second pass, in steps of 8.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="How many pictures."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="The seed of the noise: the same seed gives the same picture, 0 to 2^64 - 1.",
                ),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Sampling steps of the first pass."),
                io.Float.Input(
                    "cfg",
                    default=7.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="CFG scale: how closely the prompt is followed, 0 to 100. 5 to 8 is usual.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=sampling.sampler_names(),
                    default="euler",
                    tooltip="ComfyUI's sampling algorithm.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=sampling.scheduler_names(),
                    default="normal",
                    tooltip="ComfyUI's scheduler: how the noise levels are spread over the steps.",
                ),
                io.Float.Input(
                    "hires_scale",
                    default=1.0,
                    min=1.0,
                    max=4.0,
                    step=0.05,
                    round=0.001,
                    tooltip="Second pass at this multiple of width and height, 1 to 4. 1 = no second pass, 1.5 to 2 is "
                    "usual, less than 1.25 shows little.",
                ),
                io.Float.Input(
                    "hires_denoise",
                    default=0.55,
                    min=0.05,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="Denoise of the second pass, 0.05 to 1. 0.5 to 0.7 is usual for latents: less stays "
                    "blurry, more redraws the picture.",
                ),
                io.Int.Input("hires_steps", default=15, min=1, max=1000, tooltip="Sampling steps of the second pass."),
                io.Combo.Input(
                    "upscale_method",
                    options=sampling.UPSCALE_METHODS,
                    default="bislerp",
                    tooltip="How the latents are enlarged before the second pass. bislerp keeps their statistics.",
                    advanced=True,
                ),
                io.Model.Input(
                    "before_model",
                    optional=True,
                    tooltip="Optional, to compare: a second MODEL, for example of Load Base Model, draws the same "
                    "pictures at the left.",
                ),
                io.Clip.Input(
                    "before_clip",
                    optional=True,
                    tooltip="Optional: the text encoder of before_model. Not linked = clip.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="IMAGE",
                    tooltip="The pictures of the last pass; with before_model, before and after side by side.",
                )
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        prompt: str,
        negative: str,
        width: int,
        height: int,
        batch_size: int,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        hires_scale: float,
        hires_denoise: float,
        hires_steps: int,
        upscale_method: str,
        before_model: Any = None,
        before_clip: Any = None,
    ) -> io.NodeOutput:
        """Sample, enlarge and sample again, decode; with a second model put its pictures at the left."""
        settings = {"seed": seed, "cfg": cfg, "sampler_name": sampler_name, "scheduler": scheduler}

        def draw(model: Any, clip: Any) -> Tensor:
            conditioning = sampling.encode_prompt(clip, prompt), sampling.encode_prompt(clip, negative)
            latents = sampling.empty_latents(width, height, batch_size)
            latents = sampling.sample_latents(model, *conditioning, latents, steps=steps, denoise=1.0, **settings)
            if hires_scale > 1:
                latents = sampling.upscale_latents(latents, hires_scale, upscale_method)
                second = {**settings, "steps": hires_steps, "denoise": hires_denoise}
                latents = sampling.sample_latents(model, *conditioning, latents, **second)
            return sampling.decode_latents(vae, latents)

        after = draw(model, clip)
        if before_model is None:
            return io.NodeOutput(after)
        before = draw(before_model, clip if before_clip is None else before_clip)
        gap = after.new_ones(*after.shape[:2], GAP, after.shape[3])
        return io.NodeOutput(torch.cat([before, gap, after], dim=2))
