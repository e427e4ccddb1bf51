"""Save LoRA File: a LORA as a file of models/loras, with metadata and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..trainer_core.common.cancel import look
from ..trainer_core.common.disk_errors import describe_disk_error
from ..trainer_core.common.files import unused_path
from ..trainer_core.common.side_by_side import cancelled_at_once
from ..trainer_core.config import plain_name
from ..trainer_core.config.saves import plain_folder
from ..trainer_core.lora_files.lora import layers_of, metadata_of
from ..trainer_core.lora_files.write import save_lora
from .comfyui import folders, models, server, tools
from .node import Node
from .sockets import CATEGORY, complaint, io, titled, ui

AS_IT_IS = "as it is"
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
EDITED = {  # input -> key of the metadata
    "title": "modelspec.title",
    "trigger_words": "modelspec.trigger_phrase",
    "description": "modelspec.description",
    "author": "modelspec.author",
}


class AtelierSaveLoraFile(Node):
    """Write a LoRA file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierSaveLoraFile",
            display_name=titled("Save LoRA File"),
            category=CATEGORY,
            description="Saves a LoRA in models/loras, where Load LoRA lists it at once. The metadata stay; ComfyUI's "
            "own loader checks the file before it gets its name.",
            search_aliases=["export lora", "write lora", "safetensors", "metadata", "thumbnail", "atelier"],
            is_output_node=True,
            inputs=[
                io.LoraModel.Input("lora", tooltip="The LoRA to save, of any node with a LORA output."),
                io.String.Input(
                    "file_name",
                    default="my_lora",
                    tooltip="Name of the file, with folders below models/loras if wanted: faces/my_lora. A taken name "
                    "gets a number.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=[AS_IT_IS, *DTYPES],
                    default=AS_IT_IS,
                    tooltip="Number format of the file. float16 suits most; float8 is half as large and coarse.",
                ),
                *(
                    io.String.Input(name, default="", advanced=name != "trigger_words", tooltip=tooltip)
                    for name, tooltip in (
                        ("title", "Title in the metadata. Empty = the file's name."),
                        ("trigger_words", "Trigger words in the metadata, for model browsers. Empty = as they are."),
                        ("description", "Description in the metadata. Empty = as it is."),
                        ("author", "Author in the metadata. Empty = as it is."),
                    )
                ),
                io.Image.Input("thumbnail", optional=True, tooltip="A picture that model browsers show for the file."),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Optional: the MODEL the LoRA is for. Every layer must then find its weight in it.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Its CLIP, where the LoRA changes text encoders as well."),
            ],
            outputs=[io.String.Output(display_name="PATH", tooltip="The full path of the file.")],
        )

    @classmethod
    def validate_inputs(cls, file_name: str = "") -> bool | str:
        """Check the name."""
        return complaint(file_name or None, split)

    @classmethod
    def execute(
        cls,
        lora: dict[str, torch.Tensor],
        file_name: str,
        dtype: str,
        title: str,
        trigger_words: str,
        description: str,
        author: str,
        thumbnail: torch.Tensor | None = None,
        model: Any = None,
        clip: Any = None,
    ) -> io.NodeOutput:
        """Write, verify and check the file; put the picture beside it."""
        folder, name = split(file_name)
        path = unused_path(folders.lora_file(name, folder, "set file_name of Save LoRA File to another folder"))
        edits = {"title": title, "trigger_words": trigger_words, "description": description, "author": author}
        metadata = {**metadata_of(lora), "modelspec.title": path.stem, "ss_output_name": path.stem}
        metadata |= {EDITED[key]: text.strip() for key, text in edits.items() if text.strip()}

        def check(file: Path) -> None:
            if model is None:
                models.check_loads(file)
            else:
                models.check_lora(file, model, clip)
            look()  # a file that nobody waits for any more gets no name

        def write() -> None:
            tensors = tools.owned(lora)
            layers_of(tensors, "The LoRA linked to Save LoRA File")
            save_lora(path, tensors, metadata, "" if dtype == AS_IT_IS else dtype, check)

        try:
            with tools.cancel_heard():
                cancelled_at_once(write)()
            if thumbnail is not None:
                from ..trainer_core.training.sample_files import save_picture  # here, so that ComfyUI starts fast

                save_picture(path.with_suffix(".png"), thumbnail[0, ..., :3].detach().float().cpu().clamp(0, 1))
        except OSError as error:
            needed = sum(tensor.numel() * tensor.element_size() for tensor in lora.values())
            raise ValueError(describe_disk_error(error, path.parent, needed, ", then run again")) from error
        server.announce_lora()
        return io.NodeOutput(str(path), ui=ui.PreviewText(f"Saved as {folder and f'{folder}/'}{path.name}."))


def split(file_name: str) -> tuple[str, str]:
    """Split a name into its folder below models/loras and the plain file name; raises ValueError."""
    folder, _, name = file_name.replace("\\", "/").rpartition("/")
    return plain_folder(folder), plain_name(name)
