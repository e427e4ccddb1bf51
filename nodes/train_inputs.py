"""The inputs of Train LoRA: a public format, whose names and order stay."""

from __future__ import annotations

from ..trainer_core.config import TrainConfig
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
    io,
)

DEFAULTS = TrainConfig()


def train_inputs() -> list[io.Input]:
    """List the inputs in their order; new ones come at the end."""
    return [
        BaseModelSocket.Input(
            "base_model", tooltip="The model to train on, from Load Base Model or Use Connected Model."
        ),
        DatasetSocket.Input(
            "dataset", tooltip="The pictures, from Concept Dataset, Concept from Images or Mask Loader."
        ),
        OptimizerSocket.Input("optimizer", tooltip="The optimizer and its learning rates, from Optimizer."),
        SchedulerSocket.Input("scheduler", tooltip="The learning rate's curve, from Scheduler."),
        LoraConfigSocket.Input("lora_config", tooltip="Algorithm, size and layers of the LoRA, from LoRA Config."),
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
        io.Int.Input(
            "batch_size",
            default=DEFAULTS.batch_size,
            min=1,
            max=4096,
            tooltip="Pictures per batch. More is smoother and needs more memory.",
        ),
        io.Int.Input(
            "accumulate",
            default=DEFAULTS.accumulate,
            min=1,
            max=4096,
            tooltip="Gradient accumulation: batches per optimizer step. Works like a larger batch_size without its "
            "memory.",
            advanced=True,
        ),
        io.Int.Input(
            "resolution",
            default=DEFAULTS.resolution,
            min=64,
            max=8192,
            step=8,
            tooltip="Pixels: each picture is scaled to about resolution x resolution, in the shape nearest to its "
            "own. 512 suits Stable Diffusion 1, 1024 suits XL.",
        ),
        io.Int.Input(
            "bucket_step",
            default=DEFAULTS.bucket_step,
            min=8,
            max=512,
            step=8,
            tooltip="Pixels: the sides of all sizes are multiples of it, itself a multiple of 8. A smaller "
            "value cuts off less of each picture and makes more sizes.",
            advanced=True,
        ),
        io.Int.Input(
            "seed",
            default=DEFAULTS.seed,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=io.ControlAfterGenerate.fixed,
            tooltip="The seed of everything random in the run, 0 to 2^64 - 1. Another seed is another run.",
        ),
        io.Boolean.Input(
            "gradient_checkpointing",
            default=False,
            tooltip="Gradient checkpointing: needs much less memory and takes about a third longer; the result is "
            "the same. Off: used only as far as the run would not fit otherwise. A linked Memory node decides "
            "instead.",
        ),
        io.Combo.Input(
            "latent_sampling",
            options=["sample", "mean"],
            default=DEFAULTS.latent_sampling,
            tooltip="How pictures become latents. sample: drawn from the VAE's distribution, new at each visit. "
            "mean: always its middle.",
            advanced=True,
        ),
        io.Combo.Input(
            "save_dtype",
            options=["float16", "bfloat16", "float32"],
            default=DEFAULTS.save_dtype,
            tooltip="Precision of the file. float16 is what other programs expect; float32 is twice as large.",
            advanced=True,
        ),
        io.Float.Input(
            "strength",
            default=1.0,
            min=-10.0,
            max=10.0,
            step=0.05,
            round=0.001,
            tooltip="How strongly the outputs MODEL and CLIP apply the LoRA, -10 to 10; the file is not affected. To "
            "try several without training again, link LORA to Load LoRA Model.",
            advanced=True,
        ),
        io.String.Input(
            "sample_prompts",
            multiline=True,
            default="",
            tooltip="Prompts of the pictures drawn at the end, one per line, for the output SAMPLES. Empty = none. "
            "With an EMA (ema_decay of Optimizer) all are drawn with it as well.",
        ),
        io.String.Input("sample_negative", default="", tooltip="Negative prompt of these pictures.", advanced=True),
        io.Int.Input(
            "sample_steps",
            default=0,
            min=0,
            max=1000,
            tooltip="Sampling steps of these pictures. 0: as many as suit the model (20 for Stable Diffusion).",
            advanced=True,
        ),
        io.Float.Input(
            "sample_cfg",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="CFG scale of these pictures. 0: as suits the model (7 for Stable Diffusion).",
            advanced=True,
        ),
        io.Int.Input(
            "sample_seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            tooltip="Seed of the first picture; each next one uses the next seed.",
            advanced=True,
        ),
        ObjectiveSocket.Input(
            "objective", optional=True, tooltip="Optional, from Noise & Loss: noise, timesteps, loss and weighting."
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
        BucketsSocket.Input(
            "buckets",
            optional=True,
            tooltip="Optional, from Buckets: more resolutions, fixed sizes, limits.",
        ),
        io.Int.Input(
            "validate_every",
            default=DEFAULTS.validate_every,
            min=0,
            max=1_000_000,
            optional=True,
            tooltip="Steps between two measurements of the validation loss, with a concept of the role validation. 0 "
            "= at the start and the end only.",
            advanced=True,
        ),
        MemorySocket.Input(
            "memory",
            optional=True,
            tooltip="Optional, from Memory: fixes how to trade speed for memory. Replaces gradient_checkpointing.",
        ),
        io.Int.Input(
            "early_stop_patience",
            default=DEFAULTS.early_stop_patience,
            min=0,
            max=1000,
            optional=True,
            tooltip="Early stopping: ends the run after this many measurements in a row without a lower validation "
            "loss, and keeps the best LoRA. 3 to 5 suit most. Needs validate_every and a concept of the role "
            "validation. 0 = off.",
            advanced=True,
        ),
        io.Float.Input(
            "early_stop_min_improvement",
            default=DEFAULTS.early_stop_min_improvement,
            min=0.0,
            max=0.9,
            step=0.001,
            round=0.0001,
            optional=True,
            tooltip="For early_stop_patience: the share by which the validation loss must fall, 0 to 0.9: 0.01 = one "
            "per cent below the lowest so far. 0 = any fall counts.",
            advanced=True,
        ),
        io.Boolean.Input(
            "keep_best",
            default=DEFAULTS.keep_best,
            optional=True,
            tooltip="On: the LoRA is the one of the lowest validation loss instead of the last; the last one is "
            "saved beside it as <name>-last. Needs validate_every and a concept of the role validation. "
            "early_stop_patience turns it on.",
            advanced=True,
        ),
        io.Combo.Input(
            "log",
            options=["none", "csv", "tensorboard", "both"],
            default="csv",
            optional=True,
            tooltip="Logs losses, learning rates, gradient norm, time and memory of every step in "
            "output/atelier/logs. csv: a table for any spreadsheet. tensorboard: event files for TensorBoard, whose "
            "package must be installed. both, or none.",
            advanced=True,
        ),
        SavesSocket.Input(
            "saves",
            optional=True,
            tooltip="Optional, from Saves & Samples: how often the run is saved and draws samples, and where "
            "the LoRA goes. Not linked = saved every 5 minutes, as models/loras/atelier/<name>.safetensors.",
        ),
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
    ]
