"""Buckets and Augmentation: at which sizes pictures are trained, and how they vary from visit to visit."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_augmentation, read_buckets
from .node import Node
from .schema import schema
from .sockets import BucketsSocket, DatasetSocket, io


class AtelierBuckets(Node):
    """The sizes of a run, beyond one resolution."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierBuckets",
            "Optional: several resolutions at once, fixed sizes, limits, and how to train shapes that "
            "few pictures have. For Train LoRA and Dataset Preview.",
            ["resolution", "aspect ratio", "multi resolution", "bucketing", "train lora", "atelier"],
            [BucketsSocket.Output(display_name="BUCKETS", tooltip="For Train LoRA and Dataset Preview.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_buckets(**inputs))


class AtelierAugment(Node):
    """How pictures vary from visit to visit."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierAugment",
            "Optional: crops, rotations and colours that vary from visit to visit. Applies to every linked "
            "concept that has none yet. Each picture gets a number of versions, which are encoded once and cached.",
            ["random crop", "color jitter", "rotation", "augmentation", "train lora", "atelier"],
            [DatasetSocket.Output(display_name="DATASET", tooltip="The concepts with their variations.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Set this augmentation on every concept that has none yet; without any variation none is set."""
        return io.NodeOutput(read_augmentation(**inputs))
