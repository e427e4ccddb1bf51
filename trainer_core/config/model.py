"""Settings of the base model, and those that trade speed for memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .base import Config
from .rows import Span, aside, needed, row

Precision = Literal["auto", "float32", "bfloat16", "float16"]
WeightPrecision = Literal["auto", "float32", "bfloat16", "float16", "float8", "int8", "nf4"]
PredictionChoice = Literal["auto", "epsilon", "v_prediction"]
MODEL_FILES = ("path", "vae", "text_encoder", "text_encoder_2")  # fields that name files of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectedConfig(Config):
    """Settings of a base model that is linked as MODEL, CLIP and VAE, and has no files of its own."""

    SECTION: ClassVar = "base_model.connected"
    NODE: ClassVar = "Use Connected Model"

    guidance: float = row(
        -1.0,
        "Distilled guidance that training gives the model, for models that take one (Flux.1 dev: 1). -1: as the "
        "model's family is trained.",
        span=(0, 100, 0.1),
        round=None,
        open=-1.0,
        advanced=True,
        optional=True,
    )
    edit_text: Literal["plus", "single"] = row(
        "plus",
        "For Qwen-Image-Edit with Control Pictures: how its text encoder sees them. plus: as "
        "TextEncodeQwenImageEditPlus, for the models 2509 and 2511. single: as TextEncodeQwenImageEdit, for the "
        "first model, with one control picture.",
        advanced=True,
        optional=True,
    )
    noise_range: Literal["all", "high", "low"] = row(
        "all",
        "Which noise the model is for. all: every level. high, low: it is that expert of a model of two files, as Wan "
        "2.2 14B, and only levels on its side of boundary are trained, as often among each other as otherwise.",
        advanced=True,
        optional=True,
    )
    boundary: float = row(
        0.0,
        "Where the noise of the high expert begins, as a share of all timesteps. 0 (default): as the model's authors "
        "set it, for Wan 2.2 14B 0.875 from text and 0.9 from a picture.",
        span=(0.01, 0.99, 0.005),
        open=0.0,
        advanced=True,
        optional=True,
    )
    switch_every: int = row(
        0,
        "With model_high: after how many steps it is the other expert's turn, so that each has half of the run. 0 "
        "(default): each as often as its noise is drawn. A turn loads the other model, where both do not fit.",
        span=(0, 10000),
        advanced=True,
        optional=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModelConfig(Config):
    """The base model's files or its connected models, and the precision of its frozen weights."""

    SECTION: ClassVar = "base_model"
    NODE: ClassVar = "Load Base Model"

    path: str = needed(
        "A checkpoint (.safetensors) of Stable Diffusion 1, 2 or XL from models/checkpoints, or a diffusers folder "
        "from models/diffusers. atelier-tiny is a toy model that comes with the pack.",
        socketless=True,
        label="checkpoint",
        listed=True,
        decides="nothing",
    )
    prediction: PredictionChoice = row(
        "auto",
        "What the model predicts. auto: read from the file; where the file does not say, epsilon (noise), which is "
        "right for nearly all models of Stable Diffusion 1 and XL.",
        advanced=True,
    )
    clip_skip: int = row(
        1,
        "Which layer of the text encoder is used, counted from the end: 1 = last, 2 = the one before (usual for "
        "anime models). Applies to training and to the CLIP output.",
        span=(1, 12),
    )
    precision: Precision = row(
        "auto",
        "Precision of the frozen weights while training; the LoRA itself stays float32. auto: bfloat16 on GPUs that"
        " have it, else float16, and float32 on the CPU.",
        advanced=True,
    )
    vae_precision: Precision = row(
        "auto",
        "Precision of the VAE while it encodes your pictures. auto: float32, exact. The others are faster on a GPU;"
        " a picture that overflows in float16 is encoded in float32, and the report names it.",
        advanced=True,
        optional=True,
    )
    zero_terminal_snr: Literal["auto", "on", "off"] = row(
        "auto",
        "Zero terminal SNR: the last timestep is pure noise, as in NoobAI v-pred. auto: read from the file. Needs "
        "v_prediction.",
        advanced=True,
        optional=True,
    )
    vae: str = row(
        "",
        "The VAE that encodes your pictures and goes to the output VAE. baked: the one in the checkpoint; else a "
        "file of models/vae, for checkpoints without a VAE or with a bad one.",
        socketless=True,
        advanced=True,
        optional=True,
        open="baked",
        listed=True,
        decides="nothing",
    )
    text_encoder: str = row(
        "",
        "The (first) text encoder, CLIP-L for Stable Diffusion 1 and XL, OpenCLIP-H for 2. baked: the one in the "
        "checkpoint; else a file of models/text_encoders, used in training and in CLIP.",
        socketless=True,
        advanced=True,
        optional=True,
        open="baked",
        listed=True,
        decides="nothing",
    )
    text_encoder_2: str = row(
        "",
        "The second text encoder, CLIP-G, of Stable Diffusion XL only. baked: the one in the checkpoint; else a "
        "file of models/text_encoders, used in training and in CLIP.",
        socketless=True,
        advanced=True,
        optional=True,
        open="baked",
        listed=True,
        decides="nothing",
    )
    weights: WeightPrecision = row(
        "auto",
        "Number format of the UNet's frozen weights while training; the computation uses `precision` either way. "
        "auto: as `precision`. float8 and int8 take half the memory of bfloat16, nf4 a quarter; int8 and nf4 need "
        "bitsandbytes. Smaller is less exact.",
        advanced=True,
        optional=True,
    )
    text_weights: WeightPrecision = row(
        "auto",
        "Number format of the text encoders' frozen weights while training; choices as for weights.",
        advanced=True,
        optional=True,
    )
    prompt_weights: bool = row(
        False,
        "Off: brackets in captions, such as (cat:1.3), are plain text. On: they are weights, as in ComfyUI's prompts.",
        advanced=True,
        optional=True,
    )
    tokenizer: str = aside(default="")  # folder with vocab.json and merges.txt; "" = tokenizer/ of a diffusers folder
    connected: ConnectedConfig | None = None


def _beside(default: Any, words: str, span: Span = (), **more: Any) -> Any:
    """Declare the row of a setting that changes rounding at most."""
    return row(default, words, span, decides="nothing", **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig(Config):
    """Settings that trade speed for memory. auto fits the device.

    The trained weights differ by the last bits at most, but for tf32 and compute, which are part of the run's key.
    """

    SECTION: ClassVar = "memory"
    NODE: ClassVar = "Memory"

    checkpointing: Literal[
        "auto",
        "0",
        "feed-forward",
        "1",
        "2",
        "3",
        "4",
        "full",
        "segments of 2",
        "segments of 4",
        "budget 0.75",
        "budget 0.5",
        "budget 0.25",
        "budget 0.1",
    ] = _beside(
        "auto",
        "Gradient checkpointing: how much is computed twice instead of kept. 0 = nothing: fastest. full = every "
        "block: least memory, about a third slower. The levels between save most for the least time first. "
        "feed-forward: only the feed-forward parts of blocks; for a linked model auto never takes it. segments of 2, "
        "of 4: as full, but of so many blocks in a row only the first one's input is kept; slower by an eighth, a "
        "fifth. budget 0.75 to 0.1: with compile, the share of what blocks keep that the compiler may keep; it "
        "recomputes what costs least.",
    )
    offload_weights: Literal["auto", "none", "half", "all", "file"] = _beside(
        "auto",
        "How many of the base model's frozen weights wait in RAM and move to the GPU ahead of their use. No effect "
        "on the CPU. file: none wait; each is read from the model's file at every use, also for the CPU. Needs the "
        "least RAM, and a fast disk.",
    )
    offload_activations: Literal["auto", "off", "on"] = _beside(
        "auto",
        "on: activations wait in RAM until the backward pass. Slow unless blocks are recomputed, as then little waits.",
        advanced=True,
    )
    attention: Literal["auto", "flash", "efficient", "cudnn", "math", "xformers"] = _beside(
        "auto",
        "Which attention kernel a GPU uses: one of torch's, or that of the package xformers where it is installed. "
        "auto: flash where it runs, else efficient, which is xformers' own in torch. A kernel of torch that cannot "
        "run on your card ends the run with torch's own message.",
        advanced=True,
    )
    channels_last: Literal["auto", "off", "on"] = _beside(
        "auto", "Memory format of convolutions. auto: on for 16-bit numbers on a GPU.", advanced=True
    )
    compile: bool = _beside(
        False,
        "torch.compile of the model's blocks: a minute or more at the start, faster steps after. Needs a C++ "
        "compiler, on GPUs Triton; where it fails the run continues without it, and the report says so.",
    )
    encodings: Literal["disk", "RAM", "none"] = _beside(
        "disk",
        "Where encoded pictures and captions are kept. disk: in the pack's cache, where the next run finds them. "
        "RAM: nothing is written, and every run encodes them anew; for small disks. none: nothing is kept, and each"
        " step encodes what it trains; slower, with the same numbers.",
        advanced=True,
        optional=True,
    )
    tf32: Literal["auto", "off", "on"] = row(
        "auto",
        "How an NVIDIA GPU since Ampere multiplies float32. on: rounds factors to TF32 (10 bits), which is faster. "
        "off: never. auto (default): as PyTorch and ComfyUI do, with TF32 in convolutions alone. No effect where "
        "precision is of 16 bits.",
        advanced=True,
        optional=True,
    )
    keep_free: float = _beside(
        0.0,
        "GB of the device's memory that the steps leave to other programs, as 2. Settings at auto are chosen to fit "
        "into the rest. 0 (default): the run may take all that is free.",
        (0, 1000, 0.5),
        unit="GB",
        advanced=True,
        optional=True,
    )
    compute: Literal["exact", "int8", "float8", "auto"] = row(
        "exact",
        "How the frozen linear layers of the model's blocks multiply. int8, float8: in 8 bits, each row of a weight "
        "and each token by a scale of its own; blocks that differ too much on the first batch stay exact. auto: int8 "
        "on a CPU that is faster by it, else exact.",
        advanced=True,
        optional=True,
    )
    cuda_graphs: bool = _beside(
        False,
        "With compile, on NVIDIA GPUs: records the kernels of a block once and starts them together, which helps where "
        "kernels are small, as with one picture a step. Left off, with a sentence before the run, where a step is more "
        "than one picture, or where weights or activations are moved or blocks recomputed. Not measured on a card yet.",
        advanced=True,
        optional=True,
    )

    second_card: str = _beside(
        "",
        "A second card for the same model, by its number, as 1: the last blocks lie and compute there, with their "
        "LoRA. The cards share the memory and wait for each other, so no step is faster. For Load Base Model. "
        "Empty = one card.",
        placeholder="one card",
        socketless=True,
        advanced=True,
        optional=True,
    )
    second_card_share: float = _beside(
        0.0,
        "The share of the blocks, by their bytes, that the second card holds. 0 (default): as its free memory to that "
        "of both.",
        (0, 0.95, 0.05),
        advanced=True,
        optional=True,
    )

    @property
    def kept_free(self) -> int:
        """The bytes that the steps leave to other programs."""
        return round(self.keep_free * 1e9)
