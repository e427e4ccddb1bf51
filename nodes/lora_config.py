"""LoRA Config: algorithm, size and layers of the network."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import ALGORITHMS
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.settings import read_lora
from .comfyui import models
from .node import Node, described
from .schema import schema
from .sockets import LoraConfigSocket, io, ui


class AtelierLoraConfig(Node):
    """Choose algorithm, size and layers of the network."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierLoraConfig",
            "Algorithm, size and layers of the LoRA. With a linked base model the node shows layers, parameters, file "
            "size and blocks.",
            [
                *("rank", "network dim", "alpha", "lora network", "train lora", "kohya", "lycoris", "locon", "dora"),
                *ALGORITHMS,
                *("full finetune", "block weights", "atelier"),
            ],
            [
                LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA."),
                io.String.Output(
                    display_name="REPORT",
                    tooltip="Layers, parameters and file size. Without a base model, nodes linked here are skipped.",
                ),
                io.Image.Output(
                    display_name="PICTURE",
                    tooltip="Each block's rank and parameters. Without a base model, nodes linked here are skipped.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        algorithm: dict[str, Any] | None = None,
        base_model: Chosen | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        """Build the configuration, and show its network on the base model."""
        asked = (cls.hidden.prompt or {}).get(cls.hidden.unique_id, {}).get("inputs", {}).get("algorithm", "lora")
        if algorithm is None and asked != "lora":  # ComfyUI leaves out what is linked or no option
            raise ValueError(
                f"algorithm of LoRA Config is {described(asked)}; set it to one of "
                f"{', '.join(ALGORITHMS)}, without a link."
            )
        config = read_lora(algorithm=algorithm, **values)
        if base_model is None:
            return io.NodeOutput(config, models.NOTHING, models.NOTHING)
        from ..trainer_core.preflight.network import describe_network, outline_size  # here, so that ComfyUI starts fast
        from .network_picture import draw_network
        from .preview import to_image

        size = outline_size(base_model.source(), config)
        report = "\n\n".join([describe_network(size), TEXT_NOTE]) if len(size.models) > 1 else describe_network(size)
        picture = to_image(draw_network(size, f"{config.algorithm}, {config.preset}"))
        shown = {**ui.PreviewImage(picture, cls=cls).as_dict(), **ui.PreviewText(report).as_dict()}
        return io.NodeOutput(config, report, picture, ui=shown)


TEXT_NOTE = "Text encoders are trained and saved if Optimizer sets a learning rate for them."
