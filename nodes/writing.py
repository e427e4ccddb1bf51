"""Write Captions and Write Masks: what a model of the graph says of each picture, written beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..trainer_core.common.access import Access
from ..trainer_core.config import MASK_SUFFIX, DatasetConfig
from ..trainer_core.data.edits import Journal, flat_folders
from ..trainer_core.data.scan import Index, Picture
from ..trainer_core.data.written import (
    WritingState,
    WrittenFile,
    journal_of,
    masks_of,
    one_caption,
    open_files,
    pictures_to_see,
    put_text,
    texts_of,
    write_mask,
)
from .comfyui import folders, writing
from .comfyui.progress import scan_callbacks
from .node import Node
from .sockets import CATEGORY, DatasetSocket, io, titled, ui

CAPTIONS, MASKS, SHOW = "Write Captions", "Write Masks", "Dataset Pictures"
PICTURE, BESIDE = "picture", "before and after"
ALIASES = ["auto caption", "captioning", "dataset", "vision", "train lora", "atelier"]


class AtelierDatasetPictures(Node):
    """Hand out the pictures of a dataset."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id=writing.SOURCE,
            display_name=titled(SHOW),
            category=CATEGORY,
            description="The pictures of a dataset for a model that describes or masks them. Before Write Captions and "
            "Write Masks each picture is opened by itself, and only if it has no text or mask yet.",
            search_aliases=["load images from folder", "image list", *ALIASES],
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts whose pictures are handed out."),
                io.Int.Input(
                    "longest_side",
                    default=1024,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels: larger pictures are handed out smaller. The files stay as they are.",
                ),
                io.Combo.Input(
                    "show",
                    options=[PICTURE, BESIDE],
                    default=PICTURE,
                    tooltip="picture: as it is. before and after: its control picture at the left of it, for captions "
                    "that say what changes.",
                ),
            ],
            outputs=[
                io.Image.Output(
                    display_name="IMAGE",
                    is_output_list=True,
                    tooltip="The pictures, for a node that describes or masks them. Other nodes, such as Preview "
                    "Image, get all at once.",
                ),
                io.String.Output(
                    display_name="NAME", is_output_list=True, tooltip="The name of each picture in its folder."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, dataset: DatasetConfig, longest_side: int, show: str) -> io.NodeOutput:
        """Load all pictures."""
        callbacks = scan_callbacks(cls.hidden.unique_id)
        pictures = _pictures(dataset, cls.hidden.unique_id)
        loaded = []
        for number, picture in enumerate(pictures):
            callbacks.check()
            loaded.append(writing.pixels_of(picture, longest_side, show == BESIDE))
            callbacks.phase(SHOW, number + 1, len(pictures))
        return io.NodeOutput(loaded, [picture.name for picture in pictures])


def existing_input(of: str, choices: dict[str, str]) -> io.Input:
    """Build the input that says what happens to what is there. of: text or mask."""
    meanings = " ".join(f"{name}: {words}" for name, words in choices.items())
    return io.Combo.Input(
        "existing",
        options=list(choices),
        default="keep",
        tooltip=f"A picture that has a {of} already. {meanings} A Run that was cancelled goes on where it stopped.",
    )


def outputs() -> list[io.Output]:
    """Build the outputs of both nodes."""
    return [
        DatasetSocket.Output(display_name="DATASET", tooltip="The same concepts, once all is written; for Train LoRA."),
        io.String.Output(display_name="REPORT", tooltip="How many were written, kept, and what nothing came for."),
    ]


class AtelierWriteCaptions(Node):
    """Write what the graph says of each picture into a text beside it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierWriteCaptions",
            display_name=titled(CAPTIONS),
            category=CATEGORY,
            description="Writes what a model says of each picture into a text beside it. Link Dataset Pictures into a "
            "node that describes pictures, as Generate Text or a tagger, and its text into this node.",
            search_aliases=["tagger", "save text", *ALIASES],
            is_output_node=True,
            enable_expand=True,
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts whose pictures get texts."),
                io.String.Input(
                    "texts",
                    optional=True,
                    lazy=True,
                    force_input=True,
                    tooltip="The text of any node that sees the pictures of Dataset Pictures. It runs once for each "
                    "picture that is to be written, and each text is written as it comes.",
                ),
                io.String.Input(
                    "prefix",
                    default="",
                    placeholder="nothing",
                    tooltip="Put in front of each text, with a space. The trigger word does not belong here: Concept "
                    "Dataset adds it.",
                ),
                existing_input(
                    "text",
                    {
                        "keep": "it stays, and the model does not run.",
                        "append": "the new one is put after it.",
                        "replace": "the new one takes its place, also of one that you wrote.",
                    },
                ),
            ],
            outputs=outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(cls, dataset: DatasetConfig, prefix: str, existing: Any, texts: object = None) -> io.NodeOutput:
        """Let the graph answer for each picture that is open."""
        del texts  # of one picture at a time: see comfyui/writing.py
        places, journal, change = (
            [Path(each.folder) for each in dataset.concepts],
            Journal(folders.journal_folder(), flat_folders(dataset.concepts)),
            "",
        )

        def written(file: WrittenFile, answer: list[Any]) -> bool:
            nonlocal change
            text = one_caption(" ".join(map(str, answer)), prefix)
            if text:
                change = put_text(file, text, existing, journal, places, change)
            return bool(text)

        return ask(cls.hidden, CAPTIONS, "texts", dataset, existing, texts_of, written, prefix=prefix)


class AtelierWriteMasks(Node):
    """Write the mask that the graph makes of each picture beside it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierWriteMasks",
            display_name=titled(MASKS),
            category=CATEGORY,
            description=f"Writes the mask that a model makes of each picture beside it: cat{MASK_SUFFIX} of cat.jpg. "
            "Link Dataset Pictures into a node that makes masks, its MASK into this node, and Mask Loader after it.",
            search_aliases=["segment", "sam", "save mask", *ALIASES],
            is_output_node=True,
            enable_expand=True,
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts whose pictures get masks."),
                io.Mask.Input(
                    "masks",
                    optional=True,
                    lazy=True,
                    tooltip="The mask of any node that sees the pictures of Dataset Pictures; several become one. It "
                    "runs once for each picture that is to be written, and each mask is written as it comes.",
                ),
                existing_input(
                    "mask",
                    {
                        "keep": "it stays, and the model does not run.",
                        "replace": "the new one takes its place, also of one that you drew.",
                    },
                ),
            ],
            outputs=outputs(),
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(cls, dataset: DatasetConfig, existing: Any, masks: object = None) -> io.NodeOutput:
        """Let the graph answer for each picture that is open."""
        del masks

        def written(file: WrittenFile, answer: list[Any]) -> bool:
            mask = writing.mask_of(answer)
            if mask is not None:
                write_mask(file, mask)
            return mask is not None

        return ask(cls.hidden, MASKS, "masks", dataset, existing, masks_of, written)


def ask(
    hidden: Any,
    title: str,
    name: str,
    dataset: DatasetConfig,
    existing: Any,
    files_of: Callable[[DatasetConfig, list[Picture], Access], list[WrittenFile]],
    write: Callable[[WrittenFile, list[Any]], bool],
    **values: Any,
) -> io.NodeOutput:
    """Put the nodes that answer for each open picture into the prompt. name: of the input that takes the answers."""
    node = hidden.unique_id
    link = hidden.dynprompt.get_node(node)["inputs"].get(name)
    if not isinstance(link, list):
        raise ValueError(f"Nothing is linked into {name} of {title}; link a node that sees the pictures.")
    answer = (link[0], link[1])
    copies = writing.between(hidden.dynprompt, answer, node, title, name)
    files = files_of(dataset, _pictures(dataset, node), folders.access())
    allowed = folders.writable()
    if outside := next((file.path for file in files if not allowed.allows(file.path)), None):
        raise ValueError(folders.only_read(outside.parent))
    job = writing.digest_of_way(hidden.dynprompt, answer, existing=existing, **values)
    journal = journal_of(folders.written_folder(), dataset, job)
    journal.shorten()
    progress = WritingState()
    opened = open_files(files, existing, journal, progress)
    words = (name.removesuffix("s"), name)
    work = writing.Writing(node, title, opened, journal, progress, write, words, copies, answer)
    if not opened:
        return io.NodeOutput(dataset, work.report(), ui=ui.PreviewText(work.report()))
    report, graph = writing.begin(work)
    return io.NodeOutput(dataset, report, expand=graph)


def _pictures(dataset: DatasetConfig, node: str) -> list[Picture]:
    with Index(folders.index_file()) as index:
        return pictures_to_see(dataset, index, scan_callbacks(node), folders.access())


# --- what stands in the prompt while one of them writes; nobody places these nodes ----------------------------------

RUN = io.String.Input("run", tooltip="Which writing.")
NUMBER = io.Int.Input("number", min=0, max=2**31, tooltip="Which of its pictures.")


class OnePicture(Node):
    """Hand out one picture in the place of Dataset Pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        given = AtelierDatasetPictures.define_schema()
        return io.Schema(
            node_id=writing.PICTURE,
            display_name=titled(SHOW),
            category=CATEGORY,
            is_dev_only=True,
            not_idempotent=True,  # a picture is let go of once it is written: no later prompt may get it
            inputs=[RUN, NUMBER, *given.inputs[1:]],
            outputs=[io.Image.Output(display_name="IMAGE"), io.String.Output(display_name="NAME")],
        )

    @classmethod
    def execute(cls, run: str, number: int, longest_side: int, show: str) -> io.NodeOutput:
        """Load the picture."""
        picture = writing.writing_of(run).files[number].picture
        return io.NodeOutput(writing.pixels_of(picture, longest_side, show == BESIDE), picture.name)


class OneAnswer(Node):
    """Write what the graph answered for one picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id=writing.WRITE,
            display_name=titled("Write"),
            category=CATEGORY,
            is_dev_only=True,
            is_output_node=True,  # ComfyUI runs what leads to such a node before it begins with another picture
            is_input_list=True,
            not_idempotent=True,
            inputs=[RUN, NUMBER, io.AnyType.Input("answer"), io.Image.Input("picture")],
            outputs=[io.Boolean.Output(display_name="DONE")],
        )

    @classmethod
    def execute(cls, run: list[str], number: list[int], answer: list[Any], picture: list[Any]) -> io.NodeOutput:
        """Write it."""
        writing.write(run[0], number[0], answer, picture[0])
        return io.NodeOutput(True)


class NextPictures(Node):
    """Go on with the next pictures, or report."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id=writing.NEXT,
            display_name=titled("Next"),
            category=CATEGORY,
            is_dev_only=True,
            not_idempotent=True,
            enable_expand=True,
            inputs=[RUN],
            outputs=[io.String.Output(display_name="REPORT")],
        )

    @classmethod
    def execute(cls, run: str) -> io.NodeOutput:
        """Build what comes next."""
        work = writing.writing_of(run)
        if work.begun < len(work.files):
            report, graph = writing.more(run)
            return io.NodeOutput(report, expand=graph)
        return io.NodeOutput(work.report(), ui=ui.PreviewText(work.report()))


INNER = [OnePicture, OneAnswer, NextPictures]
