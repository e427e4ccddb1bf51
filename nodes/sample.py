"""Sample: prompts to pictures in one node, with a hi-res second pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from psutil import virtual_memory

from ..trainer_core.config.prompt_lines import MOST_FRAMES, PromptLine, parse_prompts
from .comfyui import sampling
from .node import Node
from .sockets import CATEGORY, complaint, io, titled

GAP = 8  # white pixels between before and after
SMALLEST = 64  # pixels of a side
AS_FIRST = "as the first pass"
PROMPT = "prompt of Sample"
NO_PROMPT = PromptLine(text="", prompt="")


def pass_inputs() -> list[io.Input]:
    """Build the inputs of the first pass: what is left at 0 or auto comes from the model."""
    return [
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=1000,
            tooltip="Sampling steps. 0: as many as suit the model (20 for Stable Diffusion).",
        ),
        io.Float.Input(
            "cfg",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="CFG scale: how closely the prompt is followed, to 100. 0: as suits the model (7 for "
            "Stable Diffusion).",
        ),
        io.Combo.Input(
            "sampler_name",
            options=[sampling.AUTO, *sampling.sampler_names()],
            default=sampling.AUTO,
            tooltip="ComfyUI's sampling algorithm. auto: as suits the model.",
        ),
        io.Combo.Input(
            "scheduler",
            options=[sampling.AUTO, *sampling.scheduler_names()],
            default=sampling.AUTO,
            tooltip="ComfyUI's scheduler: how the noise levels are spread over the steps. auto: as suits the model.",
        ),
    ]


def negative_input() -> io.Input:
    """Build the input of the negative prompt."""
    return io.String.Input("negative", multiline=True, default="", tooltip="The negative prompt: what to avoid.")


def size_inputs(tooltip: str, *, open_: bool = False) -> list[io.Input]:
    """Build the inputs width and height of pictures, in pixels. open_: they may be 0, and are at first."""
    usual, least = (0, 0) if open_ else (512, SMALLEST)
    sides = ("width", "height")
    return [io.Int.Input(side, default=usual, min=least, max=8192, step=8, tooltip=tooltip) for side in sides]


def second_pass() -> list[io.Input]:
    """Build the inputs of the second pass, the same for every way to enlarge."""
    return [
        io.Float.Input(
            "denoise",
            default=0.55,
            min=0.05,
            max=1.0,
            step=0.01,
            round=0.001,
            tooltip="Denoise of the second pass, 0.05 to 1. 0.5 to 0.7 is usual for latents, 0.25 to 0.45 for pixels: "
            "less keeps what is there, more redraws it.",
        ),
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip="Steps of the second pass. 0 = as the first pass."),
        io.Float.Input(
            "cfg",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="CFG scale of the second pass. 0 = as the first pass.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=[AS_FIRST, *sampling.sampler_names()],
            default=AS_FIRST,
            tooltip="Sampling algorithm of the second pass.",
        ),
        io.Combo.Input(
            "scheduler",
            options=[AS_FIRST, *sampling.scheduler_names()],
            default=AS_FIRST,
            tooltip="Scheduler of the second pass.",
        ),
        io.Int.Input(
            "seed",
            default=-1,
            min=-1,
            max=0xFFFFFFFFFFFFFFFF,
            tooltip="Seed of the second pass's noise. -1 = as the first pass.",
        ),
    ]


def enlarging(way: str, usual: float, method: str, methods: list[str], note: str) -> io.DynamicCombo.Option:
    """Build one way of the second pass."""
    scale = io.Float.Input(
        "scale",
        default=usual,
        min=1.0,
        max=4.0,
        step=0.05,
        round=0.001,
        tooltip="The second pass draws this multiple of width and height, 1 to 4. 1.5 to 2 is usual.",
    )
    inputs = [scale, io.Combo.Input("method", options=methods, default=method, tooltip=note), *second_pass()]
    for each in inputs:  # the first pass has inputs of the same names
        each.display_name = f"{each.id} (2nd pass)"
    return io.DynamicCombo.Option(way, inputs)


class AtelierSample(Node):
    """Sample pictures, enlarge them and sample again."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSample",
            display_name=titled("Sample"),
            category=CATEGORY,
            description="Samples pictures with ComfyUI's own sampler, of any model. hires draws a second, larger pass "
            "for detail (hi-res fix). With before_model it draws before and after.",
            search_aliases=["ksampler", "txt2img", "hires fix", "highres fix", "upscale", "test lora", "atelier"],
            inputs=[
                io.Model.Input("model", tooltip="The model to sample with, for example MODEL of Train LoRA."),
                io.Clip.Input("clip", tooltip="The text encoder, for example CLIP of Train LoRA."),
                io.Vae.Input("vae", tooltip="The VAE, of Load Base Model."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    placeholder="a caption of the training pictures",
                    tooltip="One prompt a line; each draws its own pictures. Include your trigger word. Empty: a "
                    "caption of what was trained. Switches as in sd-scripts: --n negative --w --h size --d seed "
                    "--s steps --l cfg --g guidance --ss sampler --f frames. # begins a comment.",
                ),
                negative_input(),
                *size_inputs("Pixels before the second pass, in steps of 8. 0: as the LoRA was trained.", open_=True),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="How many pictures of each prompt."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="The seed of the noise, the same for every prompt: it gives the same picture again.",
                ),
                *pass_inputs(),
                io.DynamicCombo.Input(
                    "hires",
                    tooltip="The second, larger pass. latent: enlarges latents, the most new detail. pixels: enlarges "
                    "the picture by a filter, the most faithful. upscale model: by upscale_model.",
                    options=[
                        io.DynamicCombo.Option("off", []),
                        enlarging(
                            "latent",
                            1.5,
                            "bislerp",
                            sampling.LATENT_METHODS,
                            "How latents are enlarged. bislerp keeps their statistics.",
                        ),
                        enlarging("pixels", 1.5, "lanczos", sampling.FILTERS, "The filter that enlarges the picture."),
                        enlarging(
                            "upscale model",
                            2.0,
                            "lanczos",
                            sampling.FILTERS,
                            "The filter from the upscale model's size to that of scale.",
                        ),
                    ],
                ),
                io.Boolean.Input(
                    "tiled_vae",
                    default=False,
                    tooltip="On: the VAE works in tiles of 512 pixels, which takes less memory. Off: only when memory "
                    "runs out.",
                    advanced=True,
                ),
                io.Float.Input(
                    "guidance",
                    default=-1.0,
                    min=-1.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Distilled guidance, for models that take one (Flux.1 dev: 3.5). -1: as suits the model.",
                    advanced=True,
                ),
                io.UpscaleModel.Input(
                    "upscale_model",
                    optional=True,
                    tooltip="For hires upscale model: one of Load Upscale Model, such as ESRGAN.",
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
                io.Int.Input(
                    "frames",
                    default=1,
                    min=1,
                    max=MOST_FRAMES,
                    optional=True,
                    advanced=True,
                    tooltip="Frames of a clip at most, for models of video: as many as the model takes, 4n+1 for Wan. "
                    "1 (default) = pictures. A line's --f sets its own.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="IMAGE",
                    tooltip="A batch for each prompt, of the last pass, or for each clip, of its frames; with "
                    "before_model, before and after side by side.",
                    is_output_list=True,
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, prompt: str | None = None, hires: Any = None) -> bool | str:
        """Check the switches of the prompts; a linked one is not known yet. ComfyUI passes every dynamic combo."""
        del hires
        return complaint(prompt, read_prompts)

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
        hires: dict[str, Any],
        tiled_vae: bool,
        guidance: float,
        upscale_model: Any = None,
        before_model: Any = None,
        before_clip: Any = None,
        frames: int = 1,
    ) -> io.NodeOutput:
        """Draw each prompt; with a second model put its pictures at the left."""
        if hires["hires"] == "upscale model" and upscale_model is None:
            raise ValueError(
                "hires of Sample is upscale model, and none is linked. Link upscale_model, or set hires to pixels."
            )
        for side, pixels in (("width", width), ("height", height)):
            if 0 < pixels < SMALLEST:
                raise ValueError(f"{side} of Sample is {pixels}; set it to {SMALLEST} or more, or to 0.")
        after = sampling.Models(model, clip, vae, tiled_vae)
        before = after._replace(model=before_model, clip=clip if before_clip is None else before_clip)
        usual, trained = sampling.SamplerPass(seed, steps, cfg, sampler_name, scheduler), sampling.trained_on(model)
        lines = read_prompts(prompt) or (NO_PROMPT.replace(prompt=trained.prompt),)
        sizes = [(line.width or width or trained.width, line.height or height or trained.height) for line in lines]
        lengths = [length_of(line, frames, after, before) for line in lines]
        count = batch_size * (1 if before_model is None else 2)
        check_memory(
            [size for size, of in zip(sizes, lengths, strict=True) for _ in range(of)], count, hires.get("scale", 1.0)
        )
        drawn = []
        for line, size, length in zip(lines, sizes, lengths, strict=True):
            shown = sampling.Prompt(
                line.prompt,
                negative if line.negative is None else line.negative,
                next((each for each in (line.guidance, guidance) if each is not None and each >= 0), None),
            )
            first = first_pass(line, usual)
            rest = (
                size,
                batch_size,
                first,
                hires_of(hires, first, upscale_model),
                length,
            )
            pictures = sampling.draw(after, shown, *rest)
            if before_model is not None:
                gap = pictures.new_ones(*pictures.shape[:2], GAP, pictures.shape[3])
                pictures = torch.cat([sampling.draw(before, shown, *rest), gap, pictures], dim=2)
            drawn += [pictures] if length == 1 else pictures.split(length)
        return io.NodeOutput(drawn)


def length_of(line: PromptLine, frames: int, after: sampling.Models, before: sampling.Models) -> int:
    """Find the frames that a prompt draws, of both models; raises ValueError for a clip of one that draws none."""
    frames = line.frames or frames
    if frames == 1:
        return 1
    lengths = [sampling.clip_length(each, frames) for each in (after, before) if each.model is not None]
    if not all(lengths):
        named = f"--f in {PROMPT}" if line.frames else "frames of Sample"
        raise ValueError(f"{named} is {frames}, and the linked MODEL draws single pictures; set it to 1.")
    return min(lengths)


def read_prompts(text: str, setting: str = PROMPT) -> tuple[PromptLine, ...]:
    """Read prompts line by line; raises ValueError for a wrong line, and for a sampler that ComfyUI lacks.

    Other nodes than Sample draw no clips.
    """
    lines = parse_prompts(text, setting)
    for line in lines:
        if line.frames is not None and setting != PROMPT:
            raise ValueError(f"--f in {setting} is {line.frames}, and only pictures are drawn here; remove it.")
        if line.sampler is not None and line.sampler not in sampling.sampler_names():
            raise ValueError(
                f"--ss in {setting} is {line.sampler}, which is no sampler of this ComfyUI; set it to a name in the "
                "list of sampler_name."
            )
    return lines


def check_memory(sizes: Sequence[tuple[int, int]], count: int, scale: float) -> None:
    """Raise ValueError for more pictures than the free memory holds, before the first is drawn.

    sizes: width and height for each prompt; count: pictures of a prompt; scale: of the second pass.
    """
    needed, free = sum(width * height for width, height in sizes) * count * scale**2 * 12, virtual_memory().available
    if needed > free:
        raise ValueError(
            f"The pictures of Sample take {needed / 1e9:.1f} GB of RAM, and {free / 1e9:.1f} GB are free; set fewer "
            "prompts, a smaller width and height, or batch_size lower."
        )


def first_pass(line: PromptLine, usual: sampling.SamplerPass) -> sampling.SamplerPass:
    """Read the first pass of a prompt: its own switches, then the node's settings."""
    own = {"seed": line.seed, "steps": line.steps, "cfg": line.cfg, "sampler_name": line.sampler}
    return usual._replace(**{name: value for name, value in own.items() if value is not None})


def hires_of(chosen: dict[str, Any], first: sampling.SamplerPass, upscale_model: Any) -> sampling.Hires | None:
    """Read the second pass; what it leaves open is as in the first."""
    way = chosen["hires"]
    if way == "off":
        return None
    second = sampling.SamplerPass(
        seed=first.seed if chosen["seed"] < 0 else chosen["seed"],
        steps=chosen["steps"] or first.steps,
        cfg=chosen["cfg"] or first.cfg,
        sampler_name=first.sampler_name if chosen["sampler_name"] == AS_FIRST else chosen["sampler_name"],
        scheduler=first.scheduler if chosen["scheduler"] == AS_FIRST else chosen["scheduler"],
        denoise=chosen["denoise"],
    )
    return sampling.Hires(
        chosen["scale"], second, chosen["method"], way != "latent", upscale_model if way == "upscale model" else None
    )
