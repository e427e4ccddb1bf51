"""Concept Dataset: a folder of pictures, what it is for, and how it is captioned."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import OPEN, CaptionConfig
from ..trainer_core.workflow.settings import extensions, plain_path, read_concept
from .comfyui import folders
from .node import Node
from .sockets import CATEGORY, DatasetSocket, complaint, io, titled

# Inputs that say which files to watch have no socket: fingerprint_inputs sees no linked values.

NODE = "Concept Dataset"
FOLDER_RULE = (
    "A folder inside ComfyUI's input/ or datasets/ folder, or a full path. For a folder outside ComfyUI's own the page "
    "asks once. Nothing is ever written there."
)


class AtelierConceptDataset(Node):
    """One folder of pictures; several of these are chained by their DATASET sockets."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierConceptDataset",
            display_name=titled(NODE),
            category=CATEGORY,
            description="A folder of pictures of one character, style or thing, each with a caption. Link another "
            "Concept Dataset into dataset to train several together.",
            search_aliases=["training images", "captions", "folder", "trigger word", "train lora", "atelier"],
            inputs=[
                io.String.Input(
                    "folder",
                    default="",
                    socketless=True,
                    placeholder="my_character",
                    tooltip=f"The folder that holds your pictures. {FOLDER_RULE} {folders.EXAMPLE} is a small example "
                    "that comes with the pack.",
                ),
                io.String.Input(
                    "caption_prefix",
                    default="",
                    placeholder="trigger word",
                    tooltip="The trigger word for your prompts. It is put in front of every caption, with a space "
                    "between. Stays in front when tags are shuffled. Empty = nothing.",
                ),
                io.Combo.Input(
                    "caption_source",
                    options=["text_file", "one_file", "table", "file_name", "folder_name", "none"],
                    default="text_file",
                    tooltip="text_file: a text file of the same name beside each picture. one_file: caption_file "
                    "holds the lines for all pictures. table: metadata.jsonl, CSV or JSON, with file names "
                    "and captions. file_name, folder_name: the name is the caption. none: empty captions, "
                    "with prefix and suffix only.",
                ),
                io.Float.Input(
                    "repeats",
                    default=1.0,
                    min=0.001,
                    max=100_000.0,
                    step=0.5,
                    round=0.001,
                    tooltip="How often each picture is trained in an epoch. Balances concepts of different size. "
                    "0.5 trains each picture in every other epoch.",
                ),
                io.Boolean.Input(
                    "flip",
                    default=False,
                    tooltip="Mirrors pictures left to right at half of the visits. Not for faces, text or anything "
                    "whose sides differ. Pictures whose caption says left or right are never mirrored.",
                ),
                io.Boolean.Input(
                    "shuffle_tags",
                    default=False,
                    tooltip="Shuffles the comma-separated tags of a caption at each visit.",
                ),
                io.Int.Input(
                    "keep_tags",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="How many tags at the beginning are never shuffled or dropped.",
                    advanced=True,
                ),
                io.Float.Input(
                    "tag_dropout",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Chance that each of the other tags is dropped at a visit, 0 to 1.",
                    advanced=True,
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=OPEN,
                    min=OPEN,
                    max=1.0,
                    step=0.01,
                    round=1e-4,
                    tooltip="Chance that a visit has no caption at all, 0 to 1. -1: as suits the model, mostly 0.05; "
                    "0 for validation and prior_prediction.",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_suffix",
                    default="",
                    tooltip="Put after every caption. Empty = nothing.",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_extension",
                    default=".txt",
                    socketless=True,
                    tooltip="Ending of the caption files: .txt, .caption, .tags. Several with commas between are tried "
                    "in this order.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "missing_caption",
                    options=["error", "empty", "class_prompt"],
                    default="error",
                    tooltip="A picture without a caption file. error: stop before training and name it. empty: "
                    "train it with an empty caption. class_prompt: train it with the text of class_prompt.",
                    advanced=True,
                ),
                io.Float.Input(
                    "loss_weight",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-4,
                    tooltip="Multiplies the loss of these pictures; 1 = as it is, 0 = they teach nothing.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "recursive",
                    default=True,
                    socketless=True,
                    tooltip="Also uses the pictures in sub-folders.",
                    advanced=True,
                ),
                DatasetSocket.Input(
                    "dataset",
                    optional=True,
                    tooltip="Another Concept Dataset (or Mask Loader) to train together with this one.",
                ),
                io.Combo.Input(
                    "role",
                    options=["train", "regularisation", "validation", "prior_prediction"],
                    default="train",
                    optional=True,
                    tooltip="train: these pictures teach the LoRA. regularisation: pictures of the general class "
                    "that keep the model as it was (prior preservation); visited as often as all training "
                    "pictures together, unless samples is set. validation: never trained, only their loss "
                    "is measured. prior_prediction: with these captions the model keeps its old "
                    "predictions; use the training pictures again, with captions of the general class.",
                ),
                io.Boolean.Input(
                    "enabled",
                    default=True,
                    optional=True,
                    tooltip="Off: this concept is not used, as if the node were not there.",
                ),
                io.String.Input(
                    "resolutions",
                    default="",
                    placeholder="as in Train LoRA",
                    optional=True,
                    tooltip="Sizes for this concept alone, separated by commas: 512 = about 512 x 512 pixels in the "
                    "shape of each picture, 640x384 = exactly that. Empty = as in Train LoRA or Buckets.",
                    advanced=True,
                ),
                io.Int.Input(
                    "samples",
                    default=0,
                    min=0,
                    max=10_000_000,
                    optional=True,
                    tooltip="Visits of this concept per epoch, spread over its pictures in turn. 0 = use repeats.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "folder_repeats",
                    default=True,
                    optional=True,
                    tooltip="Sub-folders named like 10_cat multiply the repeats of their pictures by 10, as in "
                    "kohya's trainer (up to 1000).",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_file",
                    default="",
                    socketless=True,
                    placeholder="captions.txt",
                    optional=True,
                    tooltip="For caption_source one_file and table: the file with the captions, in the folder, or "
                    "a full path inside a folder that may be read. Empty with table = metadata.jsonl, metadata.csv and "
                    "so on are searched for.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "caption_lines",
                    options=["draw", "first", "join"],
                    default="draw",
                    optional=True,
                    tooltip="A caption of several lines. draw: one line at each visit, all equally often. first: "
                    "only the first line. join: all lines as one caption.",
                    advanced=True,
                ),
                io.String.Input(
                    "caption_encoding",
                    default="auto",
                    optional=True,
                    tooltip="Encoding of the caption files. auto reads UTF-8 and UTF-16 and reports any other file "
                    "by name. For old files choose theirs: cp1252, shift_jis, gb18030, cp1251 ...",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "wildcards",
                    default=False,
                    optional=True,
                    tooltip="On: {red|blue} in a caption becomes one of the two at each visit; write {{ and }} for "
                    "braces.",
                    advanced=True,
                ),
                io.String.Input(
                    "tag_separator",
                    default=",",
                    optional=True,
                    tooltip="The separator between the tags of a caption.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "tag_dropout_mode",
                    options=["uniform", "weighted"],
                    default="uniform",
                    optional=True,
                    tooltip="uniform: each tag is dropped with the chance tag_dropout. weighted: the chance grows "
                    "from tag to tag, up to tag_dropout for the last.",
                    advanced=True,
                ),
                io.String.Input(
                    "protected_tags",
                    default="",
                    optional=True,
                    tooltip="Tags that are never dropped, separated by commas.",
                    advanced=True,
                ),
                io.String.Input(
                    "background",
                    default="white",
                    optional=True,
                    tooltip="Background of transparent pictures: a colour's name or #rrggbb.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "on_problem",
                    options=["stop", "leave_out"],
                    default="stop",
                    optional=True,
                    tooltip="A picture that cannot be used (broken, too small, caption or mask unreadable). stop: "
                    "name all of them before training. leave_out: train the others and list them.",
                ),
                io.Int.Input(
                    "min_picture_side",
                    default=16,
                    min=1,
                    max=8192,
                    optional=True,
                    tooltip="Pixels: a picture with a shorter side cannot be used; on_problem decides.",
                    advanced=True,
                ),
                io.Int.Input(
                    "caption_variants",
                    default=-1,
                    min=-1,
                    max=10_000,
                    optional=True,
                    tooltip="How many orders and draws of each caption are encoded and used in turn. 0: a new one at "
                    "every visit. -1: 8, or new ones where text encoders are trained.",
                    advanced=True,
                ),
                io.String.Input(
                    "class_prompt",
                    default="",
                    placeholder="a cat",
                    optional=True,
                    tooltip="For missing_caption class_prompt: the caption of every picture without one. Prefix and "
                    "suffix are added as to any other.",
                    advanced=True,
                ),
                io.Int.Input(
                    "tag_warmup_steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip="Token warm-up: over so many first steps of the run the tags in use grow from "
                    "tag_warmup_min to all, in the caption's order. Tags of keep_tags and protected_tags are always "
                    "there. 0 = off.",
                    advanced=True,
                ),
                io.Int.Input(
                    "tag_warmup_min",
                    default=1,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="For tag_warmup_steps: how many tags of a caption are in use at the first step.",
                    advanced=True,
                ),
                io.Int.Input(
                    "caption_dropout_every_n_epochs",
                    default=0,
                    min=0,
                    max=100_000,
                    optional=True,
                    tooltip="In every n-th epoch all captions of this concept are empty, beside caption_dropout. 0 = "
                    "in none.",
                    advanced=True,
                ),
                io.String.Input(
                    "leave_out",
                    default="",
                    socketless=True,
                    optional=True,
                    tooltip="Pictures that are not used: names within the folder, separated by commas. * stands for "
                    "any text, ? for any character. The buttons of Dataset Preview fill it.",
                    advanced=True,
                ),
            ],
            outputs=[
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="All concepts so far, for Train LoRA and Dataset Preview."
                )
            ],
        )

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        """Refuse a folder that does not exist before anything runs; a linked value is not known yet."""
        # ComfyUI repeats the sentence for every input that is named here, so there is one: what is switched off is
        # refused, too.
        return complaint(folder, lambda text: folders.find_folder(text, NODE))

    @classmethod
    def fingerprint_inputs(
        cls,
        folder: str = "",
        caption_extension: str = "",
        recursive: bool = True,
        caption_file: str = "",
        enabled: bool = True,
        **_: object,
    ) -> str:
        """Hash the pictures, captions and masks of the folder, so that a changed file runs the node again."""
        if not enabled:
            return ""
        captions = CaptionConfig(
            source="table" if caption_file.strip() else "text_file",
            file=plain_path(caption_file, f"caption_file of {NODE}"),
            extensions=extensions(caption_extension),
        )
        return folders.fingerprint(folders.find_folder(folder, NODE), recursive=recursive, captions=captions)

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Return the concepts so far and this one."""
        return io.NodeOutput(read_concept(folders, **inputs))
