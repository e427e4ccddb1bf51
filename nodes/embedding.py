"""Embedding: train a new word together with the LoRA."""

from __future__ import annotations

from typing import Any

from ..trainer_core.config import EmbeddingConfig
from ..trainer_core.workflow.settings import read_embedding
from .node import Node
from .schema import schema
from .sockets import LoraConfigSocket, complaint, io, ui


class AtelierEmbedding(Node):
    """Add a word whose token embeddings are trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierEmbedding",
            "Optional, between LoRA Config and Train LoRA: a word of your captions gets new token embeddings, which "
            "are trained together with the LoRA (pivotal tuning) and saved for ComfyUI's embedding: syntax. Chain "
            "several for several words.",
            ["textual inversion", "pivotal tuning", "ti", "token", "trigger word", "train", "atelier"],
            [LoraConfigSocket.Output(display_name="LORA_CONFIG", tooltip="For Train LoRA.")],
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
        return io.NodeOutput(read_embedding(token=token, **inputs), ui=shown)
