"""Average Saves: the saves of a run as one LoRA, an average that is chosen after the training."""

from __future__ import annotations

from ..trainer_core.config import setting
from .comfyui import folders, tools
from .node import Node
from .sockets import CATEGORY, io, titled, ui


class AtelierAverageSaves(Node):
    """Average the saves of a run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierAverageSaves",
            display_name=titled("Average Saves"),
            category=CATEGORY,
            description="Averages the saves of a run, or runs of several seeds, into one LoRA. Of saves it is an "
            "exponential moving average (EMA) whose width is chosen after the training, often steadier than the last "
            "save.",
            search_aliases=[
                "ema",
                "lora soup",
                "seeds",
                "post-hoc ema",
                "average checkpoints",
                "swa",
                "merge saves",
                "atelier",
            ],
            inputs=[
                io.Combo.Input(
                    "run",
                    options=folders.run_names(),
                    tooltip="A run with at least two saves. Set save_every of Saves & Samples to have more of them. "
                    "Press R to refresh the list.",
                ),
                io.Float.Input(
                    "width",
                    default=0.1,
                    min=0.01,
                    max=0.28,
                    step=0.01,
                    round=0.001,
                    tooltip="How far back the average reaches, as a share of the run: 0.05 to 0.15 is usual, 0.28 "
                    "takes all saves nearly alike.",
                ),
                io.Combo.Input(
                    "over",
                    options=["saves", "seeds"],
                    default="saves",
                    optional=True,
                    tooltip="saves: those of this run. seeds: the mean of the LoRAs of all finished runs that differ "
                    "from it by their seed alone; width has no effect.",
                ),
                io.Int.Input(
                    "rank",
                    default=0,
                    min=0,
                    max=4096,
                    optional=True,
                    tooltip="For seeds: 0 (default) = the exact mean, whose rank is the sum of theirs. Otherwise the "
                    "nearest LoRA of this rank, 1 to 4096.",
                ),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The averaged LoRA."),
                io.String.Output(display_name="REPORT", tooltip="How much of each save it takes."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, run: str, over: str = "saves") -> str:
        """Change with the saves of the run, or with the runs of other seeds."""
        if over == "seeds":
            found = folders.seeds_of(run, setting("average.run"))
            return " ".join(f"{seed} {path} {folders.state_of(path)}" for seed, path in found)
        return " ".join(str(step) for step, _ in folders.saves_of(run, setting("average.run")))

    @classmethod
    def execute(cls, run: str, width: float, over: str = "saves", rank: int = 0) -> io.NodeOutput:
        """Average the LoRA files of the saves, or of the seeds."""
        from ..trainer_core.lora_files.average import averaged_lora, mean_of_seeds  # here, so that ComfyUI starts fast

        with tools.tool_at_work(cls.hidden.unique_id):
            if over == "seeds":
                made, report = mean_of_seeds(folders.seeds_of(run, setting("average.run")), rank)
            else:
                made, report = averaged_lora(folders.saves_of(run, setting("average.run")), width)
        return io.NodeOutput(made, report, ui=ui.PreviewText(report))
