"""Noise & Loss: noise, timesteps, loss and weighting of a run."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_objective
from .node import Node
from .schema import schema
from .sockets import ObjectiveSocket, io

# Widgets whose choices have fields of their own.
CHOICES = ("loss", "weighting", "timestep_distribution", "noise_offset_strength", "pyramid_noise")
CHOICES += ("preservation", "slider")


class AtelierObjective(Node):
    """Choose noise, timesteps, loss and weighting."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierObjective",
            "Optional: noise, timesteps, the loss and its weighting. Without this node every timestep "
            "weighs the same, is drawn as the base model's family is trained, and the noise is plain.",
            ["min snr", "noise offset", "timestep", "loss", "train lora", "atelier"],
            [ObjectiveSocket.Output(display_name="OBJECTIVE", tooltip="For Train LoRA's input objective.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_objective(**values))
