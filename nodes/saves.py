"""Saves & Samples: when a run is saved and draws samples, and where the LoRA goes."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import PROMPTS, SavesConfig, parse_prompts
from ..trainer_core.workflow.settings import read_saves, split_name
from .node import Node
from .sockets import CATEGORY, Outputs, SavesSocket, complaint, io, titled

UNITS = ["steps", "epochs", "minutes"]
DEFAULTS = Outputs()


class AtelierSaves(Node):
    """Set when a run is saved and draws samples, which saves are kept, and the LoRA's file name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSaves",
            display_name=titled("Saves & Samples"),
            category=CATEGORY,
            description="Optional: the sample pictures of a run, how often it draws them and is saved, which saves are "
            "kept, and the LoRA's file. Nothing here changes the trained weights.",
            search_aliases=["checkpoint", "save every", "preview", "output name", "train lora", "atelier"],
            inputs=[
                io.Int.Input(
                    "save_every",
                    default=5,
                    min=0,
                    max=1_000_000,
                    tooltip="Saves the run this often, in save_unit: everything needed to resume, and the LoRA so "
                    "far. Cancel, errors and closing ComfyUI save as well. 0 = only those and the end.",
                ),
                io.Combo.Input(
                    "save_unit",
                    options=UNITS,
                    default="minutes",
                    tooltip="The unit of save_every: steps, epochs or minutes.",
                ),
                io.Int.Input(
                    "keep_last",
                    default=2,
                    min=1,
                    max=1000,
                    tooltip="How many of the newest saves are kept in the run's folder; older ones are deleted. A "
                    "save holds the optimizer's state, too: with AdamW it is about seven times as large as the LoRA.",
                ),
                io.Int.Input(
                    "keep_every",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="Every n-th save is also kept for good, to compare or to fork later. 0 = none.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "publish",
                    default=False,
                    tooltip="On: the LoRA of every save that is kept for good also goes to the LoRA folder, where "
                    "loaders list it at once.",
                    advanced=True,
                ),
                io.String.Input(
                    "sample_prompts",
                    multiline=True,
                    default="",
                    tooltip="Prompts of the sample pictures, one per line, for the output SAMPLES of Train LoRA. Empty "
                    "= none. A line may set its own values, as in sd-scripts: --n negative prompt, --w width, "
                    "--h height, --s steps, --l CFG scale, --g distilled guidance, --d seed, --ss sampler, --ci "
                    "control picture (its full path, or its name in the folder of Control Pictures). Lines that begin "
                    "with # are left out. With an EMA (ema_decay of Optimizer) all are drawn with it as well.",
                ),
                io.Int.Input(
                    "sample_every",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="Draws samples this often, in sample_unit: a picture for each line of sample_prompts, "
                    "shown on Train LoRA and kept in the run's folder. 0 = at the end only.",
                ),
                io.Combo.Input(
                    "sample_unit",
                    options=UNITS,
                    default="steps",
                    tooltip="The unit of sample_every: steps, epochs or minutes.",
                ),
                io.String.Input(
                    "sample_negative",
                    default="",
                    tooltip="Negative prompt of the samples whose line has no --n.",
                    advanced=True,
                ),
                *(
                    io.Int.Input(
                        f"sample_{side}",
                        default=0,
                        min=0,
                        max=8192,
                        step=8,
                        tooltip=f"Pixels: {side} of the samples whose line has no --{side[0]}, 16 or more. 0 = the "
                        "run's resolution.",
                        advanced=True,
                    )
                    for side in ("width", "height")
                ),
                io.Int.Input(
                    "sample_steps",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Sampling steps of the samples whose line has no --s. 0: as many as suit the model (20 for "
                    "Stable Diffusion).",
                    advanced=True,
                ),
                io.Float.Input(
                    "sample_cfg",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="CFG scale of the samples whose line has no --l. 0: as suits the model (7 for Stable "
                    "Diffusion).",
                    advanced=True,
                ),
                io.Int.Input(
                    "sample_seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="Seed of the first sample; each next one uses the next seed. A line's --d sets its own.",
                    advanced=True,
                ),
                # Folder and name in one, so that what cannot be is refused in one sentence.
                io.String.Input(
                    "file_name",
                    default="atelier/{name}",
                    tooltip="Where the LoRA is saved inside models/loras: folders and a name, separated by /, for "
                    "example faces/{name}-{date}. {name} is that of Train LoRA; {date}, {time}, {step} and {epoch} "
                    "are those of the save.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    tooltip="On: replaces a LoRA of this name if it is of the same run: same settings, pictures and "
                    "models. Any other file stays, and the new one gets a number. Off: it always gets a number.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "save_dtype",
                    options=["float16", "bfloat16", "float32"],
                    default=DEFAULTS.save_dtype,
                    tooltip="Precision of the file. float16 is what other programs expect; float32 is twice as large.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "log",
                    options=["none", "csv", "tensorboard", "both"],
                    default=DEFAULTS.log,
                    tooltip="Logs losses, learning rates, gradient norm, time and memory of every step in "
                    "output/atelier/logs. csv: a table for any spreadsheet. tensorboard: event files for TensorBoard, "
                    "whose package must be installed; it shows the samples, too. both, or none.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "sample_at_start",
                    default=False,
                    tooltip="On: samples are also drawn before the first step, to compare with. A run that resumes "
                    "does not draw them again.",
                    advanced=True,
                ),
            ],
            outputs=[SavesSocket.Output(display_name="SAVES", tooltip="For Train LoRA's input saves.")],
        )

    @classmethod
    def validate_inputs(cls, sample_prompts: str | None = None, file_name: str | None = None) -> bool | str:
        """Refuse wrong prompts, and a file name that leads out of the LoRA folder; linked ones are not known yet."""
        # ComfyUI repeats what is returned for both inputs, so each sentence names its own.
        found = (
            complaint(sample_prompts, lambda text: parse_prompts(text, PROMPTS)),
            complaint(file_name, lambda text: SavesConfig(**split_name(text))),
        )
        return " ".join(each for each in found if isinstance(each, str)) or True

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_saves(**inputs))
