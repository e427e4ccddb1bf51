"""The inputs of Train LoRA and Dataset Preview: a public format, whose names and order stay."""

from __future__ import annotations

from ..trainer_core.workflow.settings import OPEN_TRAIN as DEFAULTS
from .sockets import (
    BaseModelSocket,
    BucketsSocket,
    DatasetSocket,
    LoraConfigSocket,
    MemorySocket,
    ObjectiveSocket,
    OptimizerSocket,
    SavesSocket,
    SchedulerSocket,
    ValidationSocket,
    io,
)


def batch_size() -> io.Input:
    """Build the input of the pictures per batch."""
    return io.Int.Input(
        "batch_size",
        default=DEFAULTS.batch_size,
        min=1,
        max=4096,
        tooltip="Pictures per batch. More is smoother and needs more memory.",
    )


def resolution() -> io.Input:
    """Build the input of the resolution."""
    return io.Int.Input(
        "resolution",
        default=DEFAULTS.resolution,
        min=0,
        max=8192,
        step=8,
        tooltip="Pixels, 64 or more: each picture is scaled to about resolution x resolution, in the shape nearest to "
        "its own. 0: as suits the model, 512 for Stable Diffusion 1, 1024 for XL.",
    )


def seed() -> io.Input:
    """Build the input of the seed."""
    return io.Int.Input(
        "seed",
        default=DEFAULTS.seed,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        control_after_generate=io.ControlAfterGenerate.fixed,
        tooltip="The seed of everything random in the run, 0 to 2^64 - 1. Another seed is another run.",
    )


def buckets() -> io.Input:
    """Build the input of the buckets."""
    return BucketsSocket.Input(
        "buckets",
        optional=True,
        tooltip="Optional, from Buckets: more resolutions, fixed sizes, limits.",
    )


def accumulate() -> io.Input:
    """Build the input of the gradient accumulation."""
    return io.Int.Input(
        "accumulate",
        default=DEFAULTS.accumulate,
        min=1,
        max=4096,
        optional=True,
        tooltip="Gradient accumulation: batches per optimizer step. Works like a larger batch_size without its memory.",
        advanced=True,
    )


def train_inputs() -> list[io.Input]:
    """List the inputs in their order; new ones come at the end."""
    return [
        BaseModelSocket.Input(
            "base_model", tooltip="The model to train on, from Load Base Model or Use Connected Model."
        ),
        DatasetSocket.Input(
            "dataset", tooltip="The pictures, from Concept Dataset, Concept from Images or Mask Loader."
        ),
        io.String.Input(
            "name",
            default="my_lora",
            tooltip="File name of the LoRA, without a folder: letters, digits, space and - _ . ( ). The file is "
            "models/loras/atelier/<name>.safetensors; a name in use gets a number.",
        ),
        io.Int.Input(
            "steps",
            default=DEFAULTS.steps,
            min=1,
            max=1_000_000,
            tooltip="Length of the run in optimizer steps; used when epochs is 0.",
        ),
        io.Int.Input(
            "epochs",
            default=DEFAULTS.epochs,
            min=0,
            max=100_000,
            tooltip="Length of the run in epochs. 0 = use steps.",
        ),
        batch_size(),
        resolution(),
        seed(),
        io.DynamicCombo.Input(
            "on_existing",
            options=[
                io.DynamicCombo.Option("resume", []),
                io.DynamicCombo.Option("reuse", []),
                io.DynamicCombo.Option("train again", []),
                io.DynamicCombo.Option(
                    "fork",
                    [
                        io.String.Input(
                            "run",
                            default="",
                            tooltip="The run's folder in output/atelier/runs, as the report of that run names it.",
                        ),
                        io.Int.Input(
                            "step",
                            default=0,
                            min=0,
                            max=100_000_000,
                            tooltip="The save to start from, by its step. 0 = the last one.",
                        ),
                    ],
                ),
            ],
            optional=True,
            tooltip="If a run with these settings, pictures and models exists. resume (default): reuse a finished "
            "run's result, resume an unfinished or shorter one. reuse: only reuse a finished one. train again: start "
            "a new run. fork: start a new run from the weights and state of any run's save, with these settings.",
        ),
        OptimizerSocket.Input(
            "optimizer",
            optional=True,
            tooltip="Optional, from Optimizer. Not linked = AdamW, at the learning rate that suits the model.",
        ),
        SchedulerSocket.Input(
            "scheduler",
            optional=True,
            tooltip="Optional, from Scheduler: the learning rate's curve. Not linked = cosine.",
        ),
        LoraConfigSocket.Input(
            "lora_config",
            optional=True,
            tooltip="Optional, from LoRA Config: algorithm, size and layers. Not linked = a LoRA of the rank that "
            "suits the model, in attention and the layers between.",
        ),
        ObjectiveSocket.Input(
            "objective",
            optional=True,
            tooltip="Optional, from Noise & Loss: noise, timesteps, loss and weighting. Not linked = as the model's "
            "family is trained.",
        ),
        buckets(),
        MemorySocket.Input(
            "memory",
            optional=True,
            tooltip="Optional, from Memory: fixes how to trade speed for memory. Not linked = the fastest that fits.",
        ),
        SavesSocket.Input(
            "saves",
            optional=True,
            tooltip="Optional, from Saves & Samples: sample pictures, how often the run is saved, and where the LoRA "
            "goes. Not linked = saved every 5 minutes, as models/loras/atelier/<name>.safetensors, without samples.",
        ),
        ValidationSocket.Input(
            "validation",
            optional=True,
            tooltip="Optional, from Validation: how often the validation loss is measured, and early stopping.",
        ),
        io.Model.Input(
            "model",
            optional=True,
            tooltip="Optional: the model that carries the LoRA in the output MODEL, also a relative of the base "
            "model or one with other LoRAs. Not linked = the base model, with the LoRAs beneath. It does not affect "
            "training.",
        ),
        io.Clip.Input(
            "clip",
            optional=True,
            tooltip="Optional: the text encoder that carries the LoRA in the output CLIP. Not linked = the base "
            "model's, with the LoRAs beneath.",
        ),
        accumulate(),
        io.Float.Input(
            "strength",
            default=1.0,
            min=-10.0,
            max=10.0,
            step=0.05,
            round=0.001,
            optional=True,
            tooltip="How strongly the outputs MODEL and CLIP apply the LoRA, -10 to 10; the file is not affected. To "
            "try several without training again, link LORA to Load LoRA Model.",
            advanced=True,
        ),
    ]
