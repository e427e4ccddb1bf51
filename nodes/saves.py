"""What is kept of a run while it goes on, and where the LoRA is saved."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import SavesConfig
from .sockets import CATEGORY, SavesSocket, complaint, io

UNITS = ["steps", "epochs", "minutes"]


class AtelierSaves(io.ComfyNode):
    """When a run is saved and draws samples, what stays, and the name of the LoRA's file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierSaves",
            display_name="Saves & Samples",
            category=CATEGORY,
            description="Optional: how often a run is saved and draws samples while it goes on, which saves stay, and "
            "where the LoRA is saved. Nothing of it changes what is learned.",
            search_aliases=["checkpoint", "save every", "preview", "output name", "train lora", "atelier"],
            inputs=[
                io.Int.Input(
                    "save_every",
                    default=5,
                    min=0,
                    max=1_000_000,
                    tooltip="From one save to the next, in save_unit: all that a run needs to go on, and the LoRA so "
                    "far. Cancel, errors and the end of ComfyUI save as well. 0 = those and the end only.",
                ),
                io.Combo.Input(
                    "save_unit",
                    options=UNITS,
                    default="minutes",
                    tooltip="What save_every counts: steps, epochs (visits of the whole dataset) or minutes.",
                ),
                io.Int.Input(
                    "keep_last",
                    default=2,
                    min=1,
                    max=1000,
                    tooltip="How many of the newest saves stay in the run's folder; older ones are deleted. A save "
                    "holds the optimizer's state, too: with AdamW it is about seven times as large as the LoRA.",
                ),
                io.Int.Input(
                    "keep_every",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="Each n-th save stays for good as well, to compare or to fork later. 0 = none.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "publish",
                    default=False,
                    tooltip="Puts the LoRA of every save that stays for good into the LoRA folder too, where loaders "
                    "find it at once.",
                    advanced=True,
                ),
                io.Int.Input(
                    "sample_every",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="From one set of samples to the next, in sample_unit: a picture for each line of "
                    "sample_prompts of Train LoRA, shown on it and kept in the run's folder. 0 = at the end only.",
                ),
                io.Combo.Input(
                    "sample_unit",
                    options=UNITS,
                    default="steps",
                    tooltip="What sample_every counts: steps, epochs (visits of the whole dataset) or minutes.",
                ),
                # Folder and name in one, so that what cannot be is refused once: ComfyUI repeats the sentence for every
                # input that validate_inputs names.
                io.String.Input(
                    "file_name",
                    default="atelier/{name}",
                    tooltip="Where the LoRA is saved inside models/loras: folders and a name with / between, for "
                    "example faces/{name}-{date}. {name} is that of Train LoRA; {date}, {time}, {step} and {epoch} are "
                    "those of the save.",
                ),
                io.Boolean.Input(
                    "overwrite",
                    default=False,
                    tooltip="A LoRA that this pack has written under this name before is replaced; one of others never "
                    "is. Off: the new one gets a number.",
                    advanced=True,
                ),
            ],
            outputs=[SavesSocket.Output(display_name="SAVES", tooltip="For Train LoRA's input saves.")],
        )

    @classmethod
    def validate_inputs(cls, file_name: str | None = None) -> bool | str:
        """Refuse a file name that leads out of the LoRA folder or cannot be one; a linked one is not known yet."""
        return complaint(lambda: file_name is None or SavesConfig(**split_name(file_name)))

    @classmethod
    def execute(cls, file_name: str, **values: Any) -> io.NodeOutput:
        """Return the configuration."""
        return io.NodeOutput(SavesConfig(**split_name(file_name), **values))


def split_name(file_name: str) -> dict[str, Any]:
    """Return the folder and the name in it, as SavesConfig has them."""
    folder, slash, name = file_name.strip().replace("\\", "/").rpartition("/")
    return {"folder": folder or slash, "file_name": name}
