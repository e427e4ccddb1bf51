"""Embedding: train a new word together with the LoRA."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import EmbeddingConfig
from ..trainer_core.workflow.settings import read_embedding
from .node import Node
from .sockets import CATEGORY, LoraConfigSocket, complaint, io, titled, ui


class AtelierEmbedding(Node):
    """Add a word whose token embeddings are trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierEmbedding",
            display_name=titled("Embedding"),
            category=CATEGORY,
            description="Optional, between LoRA Config and Train LoRA: a word of your captions gets new token "
            "embeddings, which are trained together with the LoRA (pivotal tuning) and saved for ComfyUI's "
            "embedding: syntax. Chain several for several words.",
            search_aliases=["textual inversion", "pivotal tuning", "ti", "token", "trigger word", "train", "atelier"],
            inputs=[
                LoraConfigSocket.Input(
                    "lora_config",
                    optional=True,
                    tooltip="From LoRA Config, Existing LoRA, or another Embedding. Not linked = as suits the model.",
                ),
                io.String.Input(
                    "token",
                    default="",
                    placeholder="mossling",
                    tooltip="The word as it stands in the captions: one plain word of letters and digits, in upper "
                    "or lower case. Wherever it stands alone, the trained vectors replace it. Empty = this node "
                    "changes nothing.",
                ),
                io.Int.Input(
                    "vectors",
                    default=2,
                    min=1,
                    max=75,
                    tooltip="How many vectors the word gets, 1 to 75. More hold more detail and take as many of the "
                    "75 tokens of a prompt. 1 to 4 suits most.",
                ),
                io.String.Input(
                    "init_text",
                    default="",
                    tooltip="The initial meaning of the word, for example creature: one or two words that come near. "
                    "Empty = noise, which trains longer.",
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-3,
                    min=1e-8,
                    max=100.0,
                    step=1e-4,
                    round=1e-8,
                    tooltip="Learning rate of the vectors, above 0; usually about ten times that of the LoRA. The "
                    "scheduler acts on it too. With Prodigy 1.",
                ),
                io.Float.Input(
                    "stop",
                    default=0.0,
                    min=0.0,
                    max=1_000_000.0,
                    step=0.05,
                    round=0.001,
                    tooltip="Trains the vectors only up to here, in stop_unit; the LoRA trains on. 0 = to the end. "
                    "Half of the run is a good start.",
                ),
                io.Combo.Input(
                    "stop_unit",
                    options=["share", "steps", "epochs"],
                    default="share",
                    tooltip="The unit of stop. share: of the whole run, 0.5 is half. steps and epochs: whole numbers.",
                ),
                io.Boolean.Input(
                    "keep_norm",
                    default=False,
                    tooltip="On: keeps the length of each vector within that of nearly all other words' embeddings. "
                    "Helps if the word drowns out the rest of a prompt, or with a high learning rate.",
                    advanced=True,
                ),
            ],
            outputs=[LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
        )

    @classmethod
    def validate_inputs(cls, token: str | None = None) -> bool | str:
        """Refuse a token that is no plain word; a linked one is not known yet."""
        # ComfyUI repeats the sentence for every input that is named here, so there is one.
        return complaint(token, lambda text: text.strip() and EmbeddingConfig(token=text.strip()))

    @classmethod
    def execute(cls, token: str, **inputs: Any) -> io.NodeOutput:
        """Add the word to the configuration."""
        shown = None if token.strip() else ui.PreviewText("No token is set, so this node changes nothing.")
        return io.NodeOutput(read_embedding(token, **inputs), ui=shown)
