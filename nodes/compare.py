"""Compare LoRAs: saves of a run or several LoRAs, at several strengths, with the same prompts and seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from ..trainer_core.common.wording import count
from ..trainer_core.config import DatasetConfig
from ..trainer_core.data.images import load_picture
from ..trainer_core.lora_files.lora import Lora, metadata_of, read_lora
from .comfyui import comparing, folders, models, sampling, tools
from .comfyui.comparing import Column, GridRow
from .comfyui.progress import scan_callbacks
from .comparison import best_column, describe, draw_comparison, write_table
from .node import Node
from .preview import to_image
from .sample import negative_input, pass_inputs, read_prompts, size_inputs
from .sockets import CATEGORY, DatasetSocket, complaint, io, titled, ui

MOST_CELLS, MOST_PIXELS = 1000, 300_000_000  # of a grid, which lies in memory
MOST_PICTURES = 32  # of a dataset, to compare with
LINKS = 4  # sockets for LoRAs
PROMPT, RUN_INPUT = "prompt of Compare LoRAs", "run of Compare LoRAs"
RUN, OWN_RUN, FILES, LINKED = "saves of a run", "saves of lora_1", "files", "linked LoRAs"
Loras = list[tuple[str, Callable[[], Lora]]]  # titles, and what reads each


def every() -> io.Input:
    """Build the input that leaves out saves."""
    return io.Int.Input(
        "every", default=1, min=1, max=1000, tooltip="Compares every n-th save, counted from the last one."
    )


class AtelierCompareLoras(Node):
    """Draw the same prompts with several LoRAs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierCompareLoras",
            display_name=titled("Compare LoRAs"),
            category=CATEGORY,
            description="Draws the same prompts and seeds with the saves of a run, or with several LoRAs, at several "
            "strengths: one grid, and a table. Pictures that were drawn before are not drawn again.",
            search_aliases=["xyz plot", "x/y/z", "grid", "checkpoints", "epochs", "best save", "evaluate", "atelier"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The MODEL without the LoRAs, for example of Load Base Model."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.DynamicCombo.Input(
                    "of",
                    tooltip="What is compared: the saves of one run, those of the run that trained lora_1, files of "
                    "models/loras, or the sockets lora_1 to lora_4.",
                    options=[
                        io.DynamicCombo.Option(
                            RUN,
                            [
                                io.Combo.Input(
                                    "run",
                                    options=folders.run_names(),
                                    tooltip="A run. keep_last and keep_every of Saves & Samples decide which saves it "
                                    "has. Press R to refresh the list.",
                                ),
                                every(),
                            ],
                        ),
                        io.DynamicCombo.Option(OWN_RUN, [every()]),
                        io.DynamicCombo.Option(
                            FILES,
                            [
                                io.String.Input(
                                    "files",
                                    default="",
                                    multiline=True,
                                    tooltip="Names of models/loras, one a line, as Load LoRA File lists them. "
                                    "* stands for any letters: atelier/moss*.",
                                )
                            ],
                        ),
                        io.DynamicCombo.Option(LINKED, []),
                    ],
                ),
                io.String.Input(
                    "strengths",
                    default="1",
                    tooltip="Strengths to draw each LoRA at, by commas: 0.6, 0.8, 1. 0 is the model alone, drawn once.",
                ),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    default="",
                    tooltip="One prompt a line, with sd-scripts' switches as in Sample. Each is a row of the grid for "
                    "every seed.",
                ),
                negative_input(),
                io.String.Input("seeds", default="0", tooltip="Seeds to draw each prompt with, by commas: 0, 1, 2."),
                *size_inputs("Pixels, in steps of 8."),
                *pass_inputs(),
                io.Int.Input(
                    "choose",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Number of the column whose LoRA goes to the outputs LORA and NAME. 0: the marked one, or "
                    "the last where none is marked.",
                ),
                *(
                    io.LoraModel.Input(f"lora_{number}", optional=True, tooltip="For linked LoRAs: one to compare.")
                    for number in range(1, LINKS + 1)
                ),
                io.ClipVision.Input(
                    "clip_vision",
                    optional=True,
                    tooltip="Optional, of Load CLIP Vision: measures likeness, and marks the best column. DINO and "
                    "SigLIP do, too.",
                ),
                io.Image.Input("pictures", optional=True, tooltip="Optional: pictures that the result should be like."),
                DatasetSocket.Input(
                    "dataset", optional=True, tooltip="Optional, instead: the training pictures, the first 32 of them."
                ),
                io.Clip.Input(
                    "clip_of_vision",
                    optional=True,
                    tooltip="Optional: the text encoder of the same CLIP as clip_vision, for likeness to the prompt.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="GRID", tooltip="All pictures, a column for each LoRA and strength."),
                io.Image.Output(display_name="IMAGES", tooltip="The single pictures.", is_output_list=True),
                io.String.Output(display_name="TABLE", tooltip="A line for each picture, as CSV."),
                io.LoraModel.Output(display_name="LORA", tooltip="The LoRA of the chosen column."),
                io.String.Output(display_name="NAME", tooltip="Its name."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, prompt: str | None = None, strengths: str | None = None, seeds: str | None = None, of: Any = None
    ) -> bool | str:
        """Check what is typed. ComfyUI passes every dynamic combo."""
        del of
        found = (
            complaint(prompt, lambda text: read_prompts(text, PROMPT)),
            complaint(strengths, lambda text: numbers(text, "strengths", -10, 10)),
            complaint(seeds, lambda text: numbers(text, "seeds", 0, 2**64 - 1)),
        )
        return " ".join(each for each in found if isinstance(each, str)) or True

    @classmethod
    def fingerprint_inputs(cls, of: dict[str, Any]) -> str:
        """Change with the saves of the run, and with files that were replaced."""
        if of["of"] == RUN:
            return " ".join(str(step) for step, _ in folders.saves_of(of["run"], RUN_INPUT))
        if of["of"] == FILES:
            return " ".join(folders.state_of(folders.lora_path(name, "files")) for name in names_of(of["files"]))
        return ""

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        of: dict[str, Any],
        strengths: str,
        prompt: str,
        negative: str,
        seeds: str,
        width: int,
        height: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        choose: int,
        clip_vision: Any = None,
        pictures: Tensor | None = None,
        dataset: DatasetConfig | None = None,
        clip_of_vision: Any = None,
        **links: Any,
    ) -> io.NodeOutput:
        """Draw what is not there yet, measure it, and choose a LoRA."""
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            loras, drawn = loras_of(of, links), numbers(strengths, "strengths", -10, 10)
            lines, begun = read_prompts(prompt, PROMPT), numbers(seeds, "seeds", 0, 2**64 - 1)
            check_count((0 in drawn) + len(loras) * sum(map(bool, drawn)), len(lines) * len(begun))
            columns = columns_of(loras, drawn)
            rows = [
                GridRow(
                    line,
                    first,
                    negative if line.negative is None else line.negative,
                    line.guidance,
                    (line.width or width, line.height or height),
                )
                for line in lines
                for first in (
                    sampling.SamplerPass(
                        int(seed) if line.seed is None else line.seed,
                        line.steps or steps,
                        line.cfg or cfg,
                        line.sampler or sampler_name,
                        scheduler,
                    )
                    for seed in begun
                )
            ]
            check(columns, rows, choose)
            cells = []
            for cell in comparing.draw_cells(
                sampling.Models(model, clip, vae), columns, rows, folders.comparisons_folder()
            ):
                cells.append(cell)
                progress(len(cells) / (len(columns) * len(rows)))
            scores: Any = [(None, None)] * len(cells)
            wordless = False
            if clip_vision is not None:
                wordless = clip_of_vision is not None and not comparing.has_text_side(clip_vision)
                known = like_what(pictures, dataset, cls.hidden.unique_id)
                scores = comparing.likeness(clip_vision, cells, known, clip_of_vision)
            best = best_column(columns, scores)
            chosen = columns[choose - 1 if choose else best[0] if best else len(columns) - 1]
            lora = chosen.load()
        grid = to_image(draw_comparison(cells, len(columns), None if best is None else best[0]))
        shown = {
            **ui.PreviewImage(grid, cls=cls).as_dict(),
            **ui.PreviewText(describe(cells, columns, scores, best, wordless=wordless)).as_dict(),
        }
        images = [cell.picture[None] for cell in cells]
        return io.NodeOutput(grid, images, write_table(cells, scores), lora, chosen.title, ui=shown)


def numbers(text: str, setting: str, low: float, high: float) -> list[float]:
    """Read numbers by commas or lines, each once; raises ValueError for anything else. Seeds stay whole."""
    found: dict[float, None] = {}
    for piece in text.replace("\n", ",").split(","):
        if not piece.strip():
            continue
        try:
            value = int(piece) if setting == "seeds" else float(piece)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(
                f"{piece.strip()[:40]!r} in {setting} of Compare LoRAs is no number from {low:g} to {high:g}; write "
                "numbers with commas between them, such as 0.6, 1."
            )
        found[value] = None
    if not found:
        raise ValueError(f"{setting} of Compare LoRAs is empty; set it to 1 or more numbers.")
    return list(found)


def names_of(text: str) -> list[str]:
    """Find the files of models/loras that a text names, one or a pattern a line; raises ValueError for none."""
    known, found = folders.lora_names(), dict[str, None]()
    for line in filter(None, (line.strip() for line in text.splitlines())):
        wanted = line.replace("\\", "/")
        fitting = [
            name
            for name in known
            if fnmatchcase(plain := name.replace("\\", "/"), wanted) or plain == f"{wanted}.safetensors"
        ]
        if not fitting:
            raise ValueError(
                f"No file of models/loras is called {line[:80]!r}; set files of Compare LoRAs to names of its list "
                "(press R to refresh it)."
            )
        found |= dict.fromkeys(fitting)
    if not found:
        raise ValueError("files of Compare LoRAs is empty; write names of models/loras, one a line.")
    return list(found)


def loras_of(of: Mapping[str, Any], links: Mapping[str, Any]) -> Loras:
    """List what is compared, with titles; files are read when they are drawn."""
    if of["of"] in (RUN, OWN_RUN):
        run = of["run"] if of["of"] == RUN else run_of(links.get("lora_1"))
        saves = folders.saves_of(run, RUN_INPUT)[:: -of["every"]][::-1]
        if not saves:
            raise ValueError(f"The run {run} has no save with a LoRA yet; set run of Compare LoRAs to another.")
        return [(f"step {step}", lambda path=path: read_lora(path)[0]) for step, path in saves]
    if of["of"] == FILES:
        return [
            (name.rpartition(".")[0], lambda path=path: read_lora(path)[0])
            for name in names_of(of["files"])
            for path in [folders.lora_path(name, "files of Compare LoRAs")]
        ]
    given = {key: lora for key, lora in links.items() if lora is not None}
    if not given:
        raise ValueError("Compare LoRAs has no LoRA; link lora_1, or set of to saves of a run or files.")
    return [
        (metadata_of(lora).get("ss_output_name", "")[:100] or key, lambda lora=lora: tools.owned(lora))
        for key, lora in given.items()
    ]


def run_of(lora: Mapping[str, Tensor] | None) -> str:
    """Find the run that trained a LoRA by its metadata; raises ValueError for none."""
    if lora is None:
        raise ValueError("of of Compare LoRAs is saves of lora_1, and none is linked; link LORA of Train LoRA.")
    run = folders.run_of_key(metadata_of(lora).get("atelier.run", ""))
    if not run:
        raise ValueError(
            "The LoRA linked to lora_1 of Compare LoRAs names no run of output/atelier/runs; set of to files or to "
            "linked LoRAs."
        )
    return run


def columns_of(loras: Loras, strengths: list[float]) -> list[Column]:
    """Build the columns, the model alone first where a strength is 0."""
    found = []
    if 0 in strengths:
        found.append(Column("without LoRA", 0.0, "", loras[-1][1]))
    for title, load in loras:
        digest = comparing.digest_of_lora(load())
        found += [Column(title, strength, digest, load) for strength in strengths if strength]
    return found


def check_count(columns: int, rows: int) -> None:
    """Raise ValueError for an empty grid and for too many pictures, before a file is read or a row is built."""
    if not rows:
        raise ValueError("prompt of Compare LoRAs is empty; write at least one prompt.")
    if columns * rows > MOST_CELLS:
        raise ValueError(
            f"Compare LoRAs would draw {columns * rows} pictures, and draws {MOST_CELLS} at most; set fewer "
            "strengths, seeds or prompts, or every higher."
        )


def check(columns: list[Column], rows: list[GridRow], choose: int) -> None:
    """Raise ValueError for a grid that cannot be drawn."""
    pixels = len(columns) * sum(row.size[0] * row.size[1] for row in rows)
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"The pictures of Compare LoRAs would have {pixels / 1e6:,.0f} million pixels, and "
            f"{MOST_PIXELS / 1e6:,.0f} fit; set fewer strengths, seeds or prompts, or a smaller width and height."
        )
    if choose > len(columns):
        raise ValueError(
            f"choose of Compare LoRAs is {choose}, and Compare LoRAs has {count(columns, 'column')}; set it lower."
        )


def like_what(pictures: Tensor | None, dataset: DatasetConfig | None, node: str) -> list[Tensor]:
    """List the pictures (H, W, 3) that results are compared with: those linked, else the first of the dataset."""
    if pictures is not None:
        return [models.own(picture) for picture in pictures[..., :3].float().cpu()]
    if dataset is None:
        return []
    from ..trainer_core.data.scan import Index, scan  # here, so that ComfyUI starts fast

    with Index(folders.index_file()) as index:
        manifest = scan(dataset, index, scan_callbacks(node), folders.access())
    return [comparing.to_tensor(load_picture(picture.path)) for picture in manifest.pictures[:MOST_PICTURES]]
