"""Drawn Pictures: what the model itself draws of prompts, as a concept; mostly to keep the general class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

from ..trainer_core.common.rng import generator
from ..trainer_core.common.wording import count
from ..trainer_core.config import OPEN, CaptionConfig, ConceptConfig, DatasetConfig
from ..trainer_core.config.prompt_lines import PromptLine
from .comfyui import folders, sampling, tools
from .comfyui.comparing import GridRow
from .comfyui.connected.text import escape
from .comfyui.drawn import draw_set
from .comfyui.progress import scan_callbacks
from .node import Node
from .sample import first_pass, negative_input, pass_inputs, read_prompts, size_inputs
from .sockets import CATEGORY, DatasetSocket, io, titled, ui

NODE = "Drawn Pictures"
PROMPT = f"prompt of {NODE}"
PROMPTS, CAPTIONS = "prompts", "captions of dataset"
MOST = 10_000  # pictures of a set


class AtelierDrawnPictures(Node):
    """Draw the pictures of a concept with the model as it is."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierDrawnPictures",
            display_name=titled(NODE),
            category=CATEGORY,
            description="Optional: the model itself draws pictures of the general class, which are trained beside "
            "yours, so that the class stays as it was. Each picture is drawn once and kept.",
            search_aliases=["regularisation", "regularization", "class images", "prior", "dreambooth", "atelier"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL that is trained, without a LoRA on it."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.DynamicCombo.Input(
                    "of",
                    tooltip="What is drawn. prompts: those you write. captions of dataset: each caption of the "
                    "pictures to be trained, without the trigger word.",
                    options=[
                        io.DynamicCombo.Option(
                            PROMPTS,
                            [
                                io.String.Input(
                                    "prompt",
                                    multiline=True,
                                    default="",
                                    placeholder="a cat",
                                    tooltip="Prompts of the general class, one a line, with sd-scripts' switches as in "
                                    "Sample. They become the captions. Brackets are plain text.",
                                )
                            ],
                        ),
                        io.DynamicCombo.Option(
                            CAPTIONS,
                            [
                                io.String.Input(
                                    "trigger",
                                    default="",
                                    placeholder="trigger word",
                                    tooltip="The word in the captions of dataset that is left out.",
                                ),
                                io.String.Input(
                                    "class_word",
                                    default="",
                                    placeholder="cat",
                                    tooltip="What stands in the place of trigger: the kind of subject. Empty: nothing.",
                                ),
                            ],
                        ),
                    ],
                ),
                io.Int.Input(
                    "pictures",
                    default=10,
                    min=1,
                    max=1000,
                    tooltip="How many pictures of each prompt or caption. As many in all as you train, or more, suit.",
                ),
                negative_input(),
                *size_inputs("Pixels, in steps of 8. Use the size that you train at."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Each picture gets a seed of its own, from this one, its prompt and its number.",
                ),
                *pass_inputs(),
                io.Float.Input(
                    "loss_weight",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    round=1e-4,
                    tooltip="Multiplies the loss of these pictures; 1 = as it is. Lower keeps less of the class.",
                ),
                io.Combo.Input(
                    "role",
                    options=["regularisation", "prior_prediction", "train"],
                    default="regularisation",
                    tooltip="regularisation: they keep the model as it was; visited as often as all training pictures "
                    "together. prior_prediction: with their captions the model keeps its old predictions. train: they "
                    "teach the LoRA.",
                ),
                DatasetSocket.Input(
                    "dataset",
                    optional=True,
                    tooltip="The pictures to be trained, whose captions can be drawn. They go on to DATASET.",
                ),
            ],
            outputs=[
                DatasetSocket.Output(
                    display_name="DATASET", tooltip="All concepts so far, for Train LoRA and Dataset Preview."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        of: dict[str, Any],
        pictures: int,
        negative: str,
        width: int,
        height: int,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        loss_weight: float,
        role: Any,
        dataset: DatasetConfig | None = None,
    ) -> io.NodeOutput:
        """Draw what is not there yet; output all of it as a concept after those of dataset."""
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            lines = lines_of(of, dataset, cls.hidden.unique_id)
            if len(lines) * pictures > MOST:
                raise ValueError(
                    f"{NODE} would draw {len(lines) * pictures} pictures, and draws {MOST} at most; set pictures of "
                    f"{NODE} lower."
                )
            usual = sampling.SamplerPass(seed, steps, cfg, sampler_name, scheduler)
            size = (width, height)
            wanted = [(line.prompt, row) for line in lines for row in rows_of(line, usual, negative, size, pictures)]
            folder, drawn = draw_set(sampling.Models(model, clip, vae), wanted, progress)
        concept = ConceptConfig(
            folder=str(folder),
            role=role,
            loss_weight=loss_weight,
            captions=CaptionConfig(lines="join", dropout=OPEN),
        )
        said = f"{count(len(wanted), 'picture')}: {drawn} drawn, {len(wanted) - drawn} there already."
        concepts = (*(dataset.concepts if dataset else ()), concept)
        return io.NodeOutput(DatasetConfig(concepts=concepts), ui=ui.PreviewText(said))


def rows_of(
    line: PromptLine, usual: sampling.SamplerPass, negative: str, size: tuple[int, int], pictures: int
) -> Iterator[GridRow]:
    """Describe the pictures of a prompt, which is text as captions are. A seed depends on no other prompt."""
    first = first_pass(line, usual)
    text = line.replace(prompt=escape(line.prompt))
    for number in range(pictures):
        seed = generator(first.seed, "drawn", crc32(line.prompt.encode()), number).initial_seed()
        yield GridRow(
            text,
            first._replace(seed=seed),
            negative if line.negative is None else line.negative,
            line.guidance,
            (line.width or size[0], line.height or size[1]),
        )


def lines_of(of: Mapping[str, Any], dataset: DatasetConfig | None, node: str) -> list[PromptLine]:
    """List what is drawn, each once; raises ValueError for nothing."""
    if of["of"] == PROMPTS:
        lines = list(dict.fromkeys(read_prompts(of["prompt"], PROMPT)))
        if not lines:
            raise ValueError(f"{PROMPT} is empty; write a prompt of the general class, such as a cat.")
        return lines
    if dataset is None:
        raise ValueError(f"of of {NODE} is captions of dataset, and none is linked; link Concept Dataset into dataset.")
    if not of["trigger"].strip():
        raise ValueError(f"trigger of {NODE} is empty; set it to the word of your captions that is trained.")
    captions = captions_of(dataset, of["trigger"], of["class_word"], node)
    return [PromptLine(text=caption, prompt=caption) for caption in captions]


def captions_of(dataset: DatasetConfig, trigger: str, class_word: str, node: str) -> list[str]:
    """List the captions of the pictures that are trained, each once, without the trigger word; raises ValueError."""
    from ..trainer_core.data.captions import leave_out_word, plain_caption, replace_word
    from ..trainer_core.data.scan import Index, scan  # here, so that ComfyUI starts fast

    trained = DatasetConfig(concepts=tuple(each for each in dataset.concepts if each.role == "train"))
    with Index(folders.index_file()) as index:
        manifest = scan(trained, index, scan_callbacks(node), folders.access())
    found: dict[str, None] = {}
    changed = False
    for picture in manifest.pictures:
        captions = trained.concepts[picture.concept].captions
        caption = plain_caption(picture.lines, captions)
        if class_word.strip():
            other = replace_word(caption, trigger, class_word)
        else:
            other = leave_out_word(caption, trigger, captions.separator)
        changed |= other != caption
        found[other] = None
    if not changed:
        raise ValueError(
            f"No caption of dataset contains {trigger.strip()[:80]!r}; set trigger of {NODE} to a word of the captions."
        )
    if "" in found:
        raise ValueError(
            f"A caption of dataset is empty without {trigger.strip()[:80]!r}; set class_word of {NODE} to the kind of "
            "subject, such as a cat."
        )
    return list(found)
