"""Settings of the sample pictures: of all, and of each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal, get_args

from .base import LONGEST_TEXT, Config
from .prompt_lines import MOST_FRAMES, PromptLine, parse_line
from .rows import row

LISTED = 12  # samplers that a message names
CAPTION = "{caption}"  # in a prompt: a caption of the dataset
AUTO = "auto"
# ComfyUI's names, of those that every model can be drawn with.
SamplerName = Literal[
    "auto", "euler", "euler_ancestral", "heun", "dpm_2", "dpm_2_ancestral", "lms", "dpmpp_2s_ancestral", "dpmpp_2m",
    "lcm", "ipndm", "ddim",
]  # fmt: skip
SchedulerName = Literal["auto", "normal", "karras", "exponential", "sgm_uniform", "simple", "ddim_uniform"]
OWN_SAMPLERS, OWN_SCHEDULERS = get_args(SamplerName)[1:], get_args(SchedulerName)[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """How a family of base models is sampled where the settings leave it open."""

    steps: int = 20
    cfg: float = 7.0
    sampler: str = "euler"
    samplers: Collection[str] = OWN_SAMPLERS  # that can be chosen
    scheduler: str = "normal"
    guidance: float | None = None  # distilled guidance; None where the model takes none
    time: int = 0  # frames of a clip for each step of its latents behind the first; 0: the model draws no clips
    rate: int = 0  # frames a second of a clip
    begins: bool = False  # a control picture is the first frame of a clip
    keeps: bool = False  # and of nothing else

    def length(self, frames: int) -> int:
        """Round the frames of a clip down to a length that the model draws: one frame, and a multiple of `time`."""
        return 1 + (frames - 1) // self.time * self.time if self.time else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePicture(Config):
    """Everything that one sample picture is drawn with; nothing is left open."""

    prompt: str
    negative: str
    width: int  # pixels
    height: int
    steps: int
    cfg: float
    seed: int
    sampler: str
    scheduler: str
    guidance: float | None  # distilled guidance; None where the model takes none
    controls: tuple[str, ...] = ()  # control pictures, as the line names them
    frames: int = 1  # of a clip; 1: a picture
    rate: int = 0  # frames a second of a clip; 0: of a picture

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleConfig(Config):
    """Prompts and settings of the sample pictures that are drawn with the trained model."""

    SECTION: ClassVar = "sample"
    NODE: ClassVar = "Saves & Samples"

    prompts: tuple[str, ...] = row(
        (),
        "Prompts of the sample pictures, one per line, for the output SAMPLES of Train LoRA. Empty = none. A line "
        "may set its own values, as in sd-scripts: --n negative prompt, --w width, --h height, --s steps, --l CFG "
        "scale, --g distilled guidance, --d seed, --ss sampler, --f frames of a clip, --ci control picture (its full "
        "path, or its name in the folder of Control Pictures). {caption} stands for a caption of the dataset. Lines "
        "that begin with # are left out. With an EMA (ema_decay of Optimizer) all are drawn with it as well.",
        multiline=True,
        label="sample_prompts",
    )
    negative: str = row(
        "", "Negative prompt of the samples whose line has no --n.", advanced=True, label="sample_negative"
    )
    width: int = row(
        512,
        "Pixels: width of the samples whose line has no --w, 16 or more. 0 = the run's resolution.",
        span=(16, 8192, 8),
        unit="pixels",
        advanced=True,
        open=0,
        label="sample_width",
    )
    height: int = row(
        512,
        "Pixels: height of the samples whose line has no --h, 16 or more. 0 = the run's resolution.",
        span=(16, 8192, 8),
        unit="pixels",
        advanced=True,
        open=0,
        label="sample_height",
    )
    steps: int = row(
        0,
        "Sampling steps of the samples whose line has no --s. 0: as many as suit the model (20 for Stable Diffusion).",
        span=(0, 1000),
        advanced=True,
        label="sample_steps",
    )
    cfg: float = row(
        0.0,
        "CFG scale of the samples whose line has no --l. 0: as suits the model (7 for Stable Diffusion).",
        span=(0, 100, 0.1),
        round=0.01,
        advanced=True,
        label="sample_cfg",
    )
    seed: int = row(
        0,
        "Seed of the first sample; each next one uses the next seed. A line's --d sets its own.",
        span=(0, 2**64 - 1),
        advanced=True,
        label="sample_seed",
    )
    sampler: SamplerName = row(
        AUTO,
        "Sampler of the samples whose line has no --ss. auto: as suits the model (euler for Stable Diffusion).",
        advanced=True,
        optional=True,
        label="sample_sampler",
    )
    scheduler: SchedulerName = row(
        AUTO,
        "How the samples' steps are spaced. auto: as suits the model (normal for Stable Diffusion).",
        advanced=True,
        optional=True,
        label="sample_scheduler",
    )
    frames: int = row(
        1,
        "Frames of the samples whose line has no --f, for models of video. More than 1 draws a clip, kept as animated "
        "WebP, with as many frames as the model takes at most: 4n+1 for Wan. 1 (default) = a picture. 0 = as many as "
        "Clips trains.",
        span=(0, MOST_FRAMES),
        unit="frames",
        advanced=True,
        optional=True,
        label="sample_frames",
    )

    def check(self) -> None:
        """Refuse sides that no latents have."""
        for side in ("width", "height"):
            if getattr(self, side) % 8:
                raise ValueError(f"{self.named(side)} is {getattr(self, side)}; set it to a multiple of 8.")

    def lines(self) -> list[PromptLine]:
        """Read the prompts and their switches; raises ValueError for a wrong one."""
        return [
            parse_line(text, f"prompt {number} of {SampleConfig.named('prompts')}")
            for number, text in enumerate(self.prompts, 1)
        ]

    def with_caption(self, caption: str) -> SampleConfig:
        """Write a caption where a prompt asks for one; its words that look like switches are left out."""
        words = " ".join(word for word in caption.split() if not word.startswith("--"))
        room = [max(0, LONGEST_TEXT - len(text)) // max(1, text.count(CAPTION)) for text in self.prompts]
        filled = (text.replace(CAPTION, words[:most]) for text, most in zip(self.prompts, room, strict=True))
        return self.replace(prompts=tuple(filled))

    def texts(self) -> set[str]:
        """Collect the texts that are encoded: prompts and negative prompts, without their switches."""
        lines = self.lines()
        own = {line.negative for line in lines if line.negative is not None}
        return {self.negative} | {line.prompt for line in lines} | own

    def pictures(self, defaults: SamplingDefaults) -> list[SamplePicture]:
        """Describe each picture: what its line sets, then these settings, then the model's defaults.

        Without a seed of its own picture i has seed + i.
        """
        lengths = [defaults.length(line.frames or self.frames) for line in self.lines()]
        return [
            SamplePicture(
                prompt=line.prompt,
                negative=self.negative if line.negative is None else line.negative,
                width=line.width or self.width,
                height=line.height or self.height,
                steps=line.steps or self.steps or defaults.steps,
                cfg=line.cfg or self.cfg or defaults.cfg,
                seed=(self.seed + i) % 2**64 if line.seed is None else line.seed,
                sampler=line.sampler or (defaults.sampler if self.sampler == AUTO else self.sampler),
                scheduler=defaults.scheduler if self.scheduler == AUTO else self.scheduler,
                guidance=defaults.guidance if line.guidance is None else line.guidance,
                controls=line.controls or (),
                frames=lengths[i],
                rate=defaults.rate if lengths[i] > 1 else 0,
            )
            for i, line in enumerate(self.lines())
        ]


def check_samples(config: SampleConfig, defaults: SamplingDefaults, title: str) -> None:
    """Raise ValueError for prompts that cannot be read, or ask for what the model has not. title: the model's."""
    for number, line in enumerate(config.lines(), 1):
        if line.sampler is not None and line.sampler not in defaults.samplers:
            listed = ", ".join(islice(defaults.samplers, LISTED))
            choice = f"one of {listed}" if len(defaults.samplers) > 1 else listed
            more = " or another sampler of ComfyUI" if len(defaults.samplers) > LISTED else ""
            raise ValueError(
                f"Samples of {title} are not drawn by the sampler {line.sampler} of prompt {number}; set --ss in "
                f"{SampleConfig.named('prompts')} to {choice}{more}, or remove it."
            )
        if line.guidance is not None and defaults.guidance is None:
            raise ValueError(
                f"Prompt {number} sets --g, but {title} takes no distilled guidance; remove --g from "
                f"{SampleConfig.named('prompts')}, or set the CFG scale by --l."
            )
        frames = line.frames or config.frames
        if frames > 1 and (not defaults.time or (line.controls and not defaults.begins)):
            named = f"--f in {SampleConfig.named('prompts')}" if line.frames else SampleConfig.named("frames")
            pictures = "single pictures from a control picture" if defaults.time else "single pictures"
            raise ValueError(
                f"Prompt {number} asks for {frames} frames, but {title} draws {pictures}; set {named} to 1."
            )
        if line.controls and defaults.keeps and frames == 1:
            raise ValueError(
                f"Prompt {number} draws one picture, but {title} begins clips with a control picture; set --f in it to "
                f"{1 + defaults.time} or more, or remove --ci."
            )
