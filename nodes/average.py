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
            description="Averages the saves of a run into one LoRA: an exponential moving average (EMA) whose width is "
            "chosen after the training. It is often steadier than the last save.",
            search_aliases=["ema", "post-hoc ema", "average checkpoints", "swa", "merge saves", "atelier"],
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
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The averaged LoRA."),
                io.String.Output(display_name="REPORT", tooltip="How much of each save it takes."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, run: str) -> str:
        """Change with the saves of the run."""
        return " ".join(str(step) for step, _ in folders.saves_of(run, setting("average.run")))

    @classmethod
    def execute(cls, run: str, width: float) -> io.NodeOutput:
        """Average the LoRA files of the saves."""
        from ..trainer_core.lora_files.average import averaged_lora  # here, so that ComfyUI starts fast

        with tools.tool_at_work(cls.hidden.unique_id):
            made, report = averaged_lora(folders.saves_of(run, setting("average.run")), width)
        return io.NodeOutput(made, report, ui=ui.PreviewText(report))
