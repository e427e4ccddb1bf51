"""Extract LoRA: the difference of two models as a LoRA."""

from __future__ import annotations

from typing import Any

from ..trainer_core.lora_files.extract import extract
from ..trainer_core.lora_files.lora import Lora, remade
from ..trainer_core.models.weights_of_file import open_weights
from .comfyui import folders, models, tools
from .node import Node
from .resize import rule_of, rules
from .sockets import CATEGORY, io, titled, ui

LINKED = "linked models"


class AtelierExtractLora(Node):
    """Make a LoRA of what turns one model into another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierExtractLora",
            display_name=titled("Extract LoRA"),
            category=CATEGORY,
            description="Makes a LoRA of the difference of two models: a fine-tuned one, and the one it was made from. "
            "Files are read layer by layer, so that both need not fit into memory.",
            search_aliases=["difference lora", "svd", "lora from checkpoint", "fine-tune to lora", "atelier"],
            inputs=[
                io.DynamicCombo.Input(
                    "source",
                    tooltip="files: two model files, which are streamed. linked models: the MODEL and CLIP sockets, "
                    "with all that is patched onto them.",
                    options=[
                        io.DynamicCombo.Option(
                            "files",
                            [
                                io.Combo.Input(
                                    "tuned",
                                    options=folders.model_names(),
                                    tooltip="The fine-tuned model, of models/checkpoints or models/diffusion_models.",
                                ),
                                io.Combo.Input(
                                    "base",
                                    options=folders.model_names(),
                                    tooltip="The model that it was made from.",
                                ),
                                io.Boolean.Input(
                                    "text_encoders",
                                    default=True,
                                    tooltip="On: changes of text encoders too, where both files of Stable Diffusion "
                                    "have them.",
                                ),
                            ],
                        ),
                        io.DynamicCombo.Option(LINKED, []),
                    ],
                ),
                io.DynamicCombo.Input(
                    "mode",
                    tooltip="How the ranks are chosen. rank: the same for all layers, the fastest. sv_ratio, "
                    "sv_cumulative, sv_fro: for each layer by its singular values, as sd-scripts.",
                    options=rules(),
                ),
                io.Model.Input("tuned_model", optional=True, tooltip="For linked models: the fine-tuned MODEL."),
                io.Clip.Input("tuned_clip", optional=True, tooltip="Optional, for linked models: the fine-tuned CLIP."),
                io.Model.Input("base_model", optional=True, tooltip="For linked models: the MODEL it was made from."),
                io.Clip.Input("base_clip", optional=True, tooltip="Optional, for linked models: its CLIP."),
            ],
            outputs=[
                io.LoraModel.Output(display_name="LORA", tooltip="The difference, for Save LoRA File and the tools."),
                io.String.Output(display_name="REPORT", tooltip="Each layer's rank, and how much of it is kept."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, source: dict[str, Any]) -> str:
        """Change when a file was replaced under the same name."""
        names = [source[key] for key in ("tuned", "base") if key in source]
        return " ".join(folders.state_of(folders.model_path(name, "source of Extract LoRA")) for name in names)

    @classmethod
    def execute(
        cls,
        source: dict[str, Any],
        mode: dict[str, Any],
        tuned_model: Any = None,
        tuned_clip: Any = None,
        base_model: Any = None,
        base_clip: Any = None,
    ) -> io.NodeOutput:
        """Read both models layer by layer."""
        rule = rule_of(mode, "extract")
        settings = rule.settings()
        with tools.tool_at_work(cls.hidden.unique_id) as progress:
            if source["source"] == LINKED:
                if tuned_model is None or base_model is None:
                    raise ValueError("Extract LoRA needs two models; link tuned_model and base_model, or choose files.")
                both_clips = tuned_clip is not None and base_clip is not None
                tuned, base = (
                    models.weights_of(model, clip if both_clips else None)
                    for model, clip in ((tuned_model, tuned_clip), (base_model, base_clip))
                )
                made = extract(tuned, base, rule, progress=progress)
            else:
                names = source["tuned"], source["base"]
                paths = [folders.model_path(name, "source of Extract LoRA") for name in names]
                with open_weights(paths[0]) as tuned, open_weights(paths[1]) as base:
                    if not source["text_encoders"]:
                        tuned = {name: read for name, read in tuned.items() if not name.startswith("lora_te")}
                    made = extract(tuned, base, rule, titles=(paths[0].name, paths[1].name), progress=progress)
                settings |= {"tuned": paths[0].name, "base": paths[1].name}
        report = made.describe()
        lora = remade(Lora({}, {}), made.layers, "extract", settings)
        return io.NodeOutput(lora, report, ui=ui.PreviewText(report.partition("\n")[0]))
