"""Load Base Model: choose the model that a LoRA is trained on."""

from __future__ import annotations

from typing import Any, get_args

from ..trainer_core.config import Weights
from ..trainer_core.models.sd import check_base_model, detect_noise, remarks
from ..trainer_core.workflow.settings import BAKED, other_files, read_base_model
from .comfyui import folders, models
from .node import Node
from .sockets import CATEGORY, BaseModelSocket, io, titled, ui

TEXT_TOOLTIPS = {
    "text_encoder": "The (first) text encoder, CLIP-L for Stable Diffusion 1 and XL, OpenCLIP-H for 2. baked: the "
    "one in the checkpoint; else a file of models/text_encoders, used in training and in CLIP.",
    "text_encoder_2": "The second text encoder, CLIP-G, of Stable Diffusion XL only. baked: the one in the "
    "checkpoint; else a file of models/text_encoders, used in training and in CLIP.",
}
WEIGHTS_TOOLTIPS = {
    "weights": "Number format of the UNet's frozen weights while training; the computation uses `precision` either "
    "way. auto: as `precision`. float8 and int8 take half the memory of bfloat16, nf4 a quarter; int8 and nf4 need "
    "bitsandbytes. Smaller is less exact.",
    "text_weights": "Number format of the text encoders' frozen weights while training; choices as for weights.",
}


def prompt_weights_input() -> io.Input:
    """Build the input that decides how captions are read."""
    return io.Boolean.Input(
        "prompt_weights",
        default=False,
        optional=True,
        tooltip="Off: brackets in captions, such as (cat:1.3), are plain text. On: they are weights, as in ComfyUI's "
        "prompts.",
        advanced=True,
    )


class AtelierLoadBaseModel(Node):
    """Choose the base model once, for training and for ComfyUI's own nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierLoadBaseModel",
            display_name=titled("Load Base Model"),
            category=CATEGORY,
            description="The model that the LoRA is trained on. BASE_MODEL goes to Train LoRA, which loads its own "
            "copy; ComfyUI loads MODEL, CLIP and VAE as usual.",
            search_aliases=["checkpoint", "train lora", "finetune", "dreambooth", "sd15", "sdxl", "pony", "atelier"],
            inputs=[
                io.Combo.Input(
                    "checkpoint",
                    options=folders.checkpoint_names(),
                    socketless=True,
                    tooltip="A checkpoint (.safetensors) of Stable Diffusion 1, 2 or XL from models/checkpoints, or "
                    "a diffusers folder from models/diffusers. atelier-tiny is a toy model that comes with the pack.",
                ),
                io.Combo.Input(
                    "prediction",
                    options=["auto", "epsilon", "v_prediction"],
                    default="auto",
                    tooltip="What the model predicts. auto: read from the file; where the file does not say, epsilon "
                    "(noise), which is right for nearly all models of Stable Diffusion 1 and XL.",
                    advanced=True,
                ),
                io.Int.Input(
                    "clip_skip",
                    default=1,
                    min=1,
                    max=12,
                    tooltip="Which layer of the text encoder is used, counted from the end: 1 = last, 2 = the one "
                    "before (usual for anime models). Applies to training and to the CLIP output.",
                ),
                io.Combo.Input(
                    "precision",
                    options=["auto", "float32", "bfloat16", "float16"],
                    default="auto",
                    tooltip="Precision of the frozen weights while training; the LoRA itself stays float32. auto: "
                    "bfloat16 on GPUs that have it, else float16, and float32 on the CPU.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "vae_precision",
                    options=["auto", "float32", "bfloat16", "float16"],
                    default="auto",
                    optional=True,
                    tooltip="Precision of the VAE while it encodes your pictures. auto: float32, exact. The others "
                    "are faster on a GPU; a picture that overflows in float16 is encoded in float32, and the report "
                    "names it.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "zero_terminal_snr",
                    options=["auto", "on", "off"],
                    default="auto",
                    optional=True,
                    tooltip="Zero terminal SNR: the last timestep is pure noise, as in NoobAI v-pred. auto: read "
                    "from the file. Needs v_prediction.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "vae",
                    options=[BAKED, *folders.file_names("vae")],
                    default=BAKED,
                    optional=True,
                    socketless=True,
                    tooltip="The VAE that encodes your pictures and goes to the output VAE. baked: the one in the "
                    "checkpoint; else a file of models/vae, for checkpoints without a VAE or with a bad one.",
                    advanced=True,
                ),
                *(
                    io.Combo.Input(
                        name,
                        options=[BAKED, *folders.file_names("text_encoders")],
                        default=BAKED,
                        optional=True,
                        socketless=True,
                        tooltip=tooltip,
                        advanced=True,
                    )
                    for name, tooltip in TEXT_TOOLTIPS.items()
                ),
                *(
                    io.Combo.Input(
                        name,
                        options=list(get_args(Weights)),
                        default="auto",
                        optional=True,
                        tooltip=tooltip,
                        advanced=True,
                    )
                    for name, tooltip in WEIGHTS_TOOLTIPS.items()
                ),
                prompt_weights_input(),
            ],
            outputs=[
                BaseModelSocket.Output(display_name="BASE_MODEL", tooltip="The model to train on, for Train LoRA."),
                io.Model.Output(display_name="MODEL", tooltip="The diffusion model, loaded by ComfyUI."),
                io.Clip.Output(display_name="CLIP", tooltip="The text encoder, with clip_skip applied."),
                io.Vae.Output(display_name="VAE", tooltip="The VAE, for Sample and VAE Decode."),
            ],
        )

    @classmethod
    def fingerprint_inputs(
        cls,
        checkpoint: str = "",
        vae: str = BAKED,
        text_encoder: str = BAKED,
        text_encoder_2: str = BAKED,
        **_: object,
    ) -> str:
        """Change when a file was replaced under the same name."""
        chosen = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
        files = [folders.checkpoint_path(checkpoint), *other_files(folders, chosen).values()]
        return " ".join(map(folders.state_of, files))

    @classmethod
    def execute(
        cls,
        **inputs: Any,
    ) -> io.NodeOutput:
        """Check the file, then load it through ComfyUI."""
        config = read_base_model(folders, **inputs)
        check_base_model(config)
        loaded = models.load_models(config, *detect_noise(config))
        sentences = remarks(config)
        return io.NodeOutput(config, *loaded, ui=ui.PreviewText("\n".join(sentences)) if sentences else None)
