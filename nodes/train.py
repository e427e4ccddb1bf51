"""Train LoRA: the node that does the work."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..trainer_core.config import (
    BaseModelConfig,
    BucketConfig,
    DatasetConfig,
    ExistingConfig,
    LoraConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
    plain_name,
)
from ..trainer_core.existing import check_lora_files, comfy_tensors, outline_network
from ..trainer_core.models import check_base_model, noise_model
from . import bridge, session
from .plot import draw_losses
from .preview import to_image
from .progress import NodeProgress, announce_lora, clock
from .sockets import (
    CATEGORY,
    BaseModelSocket,
    BucketsSocket,
    DatasetSocket,
    LoraConfigSocket,
    MemorySocket,
    ObjectiveSocket,
    OptimizerSocket,
    SavesSocket,
    SchedulerSocket,
    complaint,
    io,
    ui,
)

TRAIN_FIELDS = (
    "steps",
    "epochs",
    "batch_size",
    "accumulate",
    "resolution",
    "bucket_step",
    "seed",
    "latent_sampling",
    "save_dtype",
)
LATER_FIELDS = (
    "validate_every",
    "early_stop_patience",
    "early_stop_min_improvement",
    "keep_best",
    "log",
)  # inputs that a workflow from before may lack


class AtelierTrain(io.ComfyNode):
    """Train a LoRA on a dataset and hand it on, applied and as a file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierTrain",
            display_name="Train LoRA",
            category=CATEGORY,
            description="Trains a LoRA, saves it in models/loras/atelier and puts it on MODEL and CLIP, ready for a "
            "sampler. ComfyUI's queue waits while it works; Cancel stops within a step and keeps what was learned.",
            search_aliases=["lora trainer", "finetune", "dreambooth", "kohya", "sd-scripts", "training", "atelier"],
            is_output_node=True,
            inputs=[
                BaseModelSocket.Input("base_model", tooltip="The model to train on, from Load Base Model."),
                DatasetSocket.Input("dataset", tooltip="The pictures, from Concept Dataset or Mask Loader."),
                OptimizerSocket.Input("optimizer", tooltip="How the weights move, from Optimizer."),
                SchedulerSocket.Input("scheduler", tooltip="The learning rate's shape, from Scheduler."),
                LoraConfigSocket.Input("lora_config", tooltip="Size and layers of the LoRA, from LoRA Config."),
                io.String.Input(
                    "name",
                    default="my_lora",
                    tooltip="File name of the LoRA, without a folder: letters, digits, space and - _ . ( ). It is "
                    "saved as models/loras/atelier/<name>.safetensors; a number is added when the name is taken.",
                ),
                io.Int.Input(
                    "steps",
                    default=1000,
                    min=1,
                    max=1_000_000,
                    tooltip="Length of the run in optimizer steps; used when epochs is 0.",
                ),
                io.Int.Input(
                    "epochs",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="Length of the run in visits of the whole dataset. 0 = use steps.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Pictures trained at once. More is smoother and needs more memory.",
                ),
                io.Int.Input(
                    "accumulate",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Batches gathered for one step: works like a larger batch_size without its memory.",
                    advanced=True,
                ),
                io.Int.Input(
                    "resolution",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels: each picture is scaled to about resolution x resolution, in the shape nearest to "
                    "its own. 512 suits Stable Diffusion 1, 1024 suits XL.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=64,
                    min=8,
                    max=512,
                    step=8,
                    tooltip="Pixels: the sides of all sizes are multiples of it, itself a multiple of 8. Smaller crops "
                    "less and makes more sizes.",
                    advanced=True,
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    tooltip="Decides everything random in the run, 0 to 2^64 - 1. Any change trains again.",
                ),
                io.Boolean.Input(
                    "gradient_checkpointing",
                    default=False,
                    tooltip="Needs much less memory and takes about a third longer; the result is the same. Off: only "
                    "as far as the run would not fit otherwise. A linked Memory node decides instead.",
                ),
                io.Combo.Input(
                    "latent_sampling",
                    options=["sample", "mean"],
                    default="sample",
                    tooltip="sample: draw from what the autoencoder says about a picture, new at each visit. mean: "
                    "always the middle of it.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "save_dtype",
                    options=["float16", "bfloat16", "float32"],
                    default="float16",
                    tooltip="Precision of the numbers in the file. float16 is what other programs expect; float32 is "
                    "twice as large.",
                    advanced=True,
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.05,
                    round=0.001,
                    tooltip="How strongly the LoRA acts on the outputs MODEL and CLIP, -10 to 10; the file is not "
                    "affected. To try several without training again, link LORA to Load LoRA Model.",
                    advanced=True,
                ),
                io.String.Input(
                    "sample_prompts",
                    multiline=True,
                    default="",
                    tooltip="Prompts to draw at the end, one per line, for the output SAMPLES. Empty = none. With a "
                    "running average of the weights (ema_decay of Optimizer) all are drawn again with that.",
                ),
                io.String.Input(
                    "sample_negative", default="", tooltip="What these pictures should avoid.", advanced=True
                ),
                io.Int.Input(
                    "sample_steps",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Sampling steps of these pictures (euler).",
                    advanced=True,
                ),
                io.Float.Input(
                    "sample_cfg",
                    default=7.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely these pictures follow their prompt, 0 to 100.",
                    advanced=True,
                ),
                io.Int.Input(
                    "sample_seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    tooltip="Seed of the first picture; each next one takes the next seed.",
                    advanced=True,
                ),
                ObjectiveSocket.Input(
                    "objective", optional=True, tooltip="Optional, from Noise & Loss: weighting of noise levels."
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Optional: what the LoRA is put on for the output MODEL, also a relative of the base model "
                    "or one with other LoRAs. Not linked = the base model, with the LoRAs beneath. A linked one is "
                    "taken as it is. Training does not depend on it.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="Optional: what the LoRA is put on for the output CLIP. Not linked = the base model's, "
                    "with the LoRAs beneath. A linked one is taken as it is.",
                ),
                BucketsSocket.Input(
                    "buckets",
                    optional=True,
                    tooltip="Optional, from Buckets: more resolutions, fixed sizes, limits.",
                ),
                io.Int.Input(
                    "validate_every",
                    default=0,
                    min=0,
                    max=1_000_000,
                    optional=True,
                    tooltip="With a concept of the role validation: steps between two measurements of the loss on its "
                    "pictures. 0 = at the start and the end only.",
                    advanced=True,
                ),
                MemorySocket.Input(
                    "memory",
                    optional=True,
                    tooltip="Optional, from Memory: fixes what is given up for memory or speed. Takes the place of "
                    "gradient_checkpointing.",
                ),
                io.Int.Input(
                    "early_stop_patience",
                    default=0,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="Ends the run when so many measurements in a row bring no lower validation loss, and keeps "
                    "the best LoRA. 3 to 5 suit most. Needs validate_every and a concept of the role validation. 0 = "
                    "the run takes all its steps.",
                    advanced=True,
                ),
                io.Float.Input(
                    "early_stop_min_improvement",
                    default=0.0,
                    min=0.0,
                    max=0.9,
                    step=0.001,
                    round=0.0001,
                    optional=True,
                    tooltip="By what share the validation loss must fall to count for early_stop_patience, 0 to 0.9: "
                    "0.01 = one per cent below the lowest so far. 0 = any fall counts.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "keep_best",
                    default=False,
                    optional=True,
                    tooltip="The LoRA is the one of the lowest validation loss instead of the last; the last one is "
                    "saved beside it as <name>-last. Needs validate_every and a concept of the role validation. "
                    "early_stop_patience does it anyway.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "log",
                    options=["none", "csv", "tensorboard", "both"],
                    default="csv",
                    optional=True,
                    tooltip="Writes losses, learning rates, gradient norm, time and memory of every step to "
                    "output/atelier/logs. csv: a table for any spreadsheet. tensorboard: event files for "
                    "TensorBoard, whose package must be installed. both, or none.",
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
                                    tooltip="Name of the run's folder in output/atelier/runs, as the note of that run "
                                    "says it.",
                                ),
                                io.Int.Input(
                                    "step",
                                    default=0,
                                    min=0,
                                    max=100_000_000,
                                    tooltip="The save to begin with, by its steps, as the run's folder lists them. "
                                    "0 = the last one.",
                                ),
                            ],
                        ),
                    ],
                    optional=True,
                    tooltip="When there is a run with these settings, pictures and models already. resume (default): a "
                    "finished one gives its result at once, one that was cut off or was shorter goes on. reuse: only a "
                    "finished one is used. train again: from the start. fork: begin with the weights and state of any "
                    "run's save, under these settings.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="The model with the LoRA on it, for KSampler or Sample."),
                io.Clip.Output(display_name="CLIP", tooltip="The text encoder with the LoRA on it."),
                io.LoraModel.Output(
                    display_name="LORA", tooltip="The LoRA itself, for Resize LoRA, Load LoRA Model, Save LoRA Weights."
                ),
                io.LossMap.Output(display_name="LOSS_MAP", tooltip="The loss of each step, for Plot Loss Graph."),
                io.Image.Output(
                    display_name="SAMPLES",
                    tooltip="One picture per line of sample_prompts. Without any, nodes linked here are skipped.",
                ),
                io.String.Output(display_name="LORA_PATH", tooltip="Full path of the saved file."),
                io.Image.Output(display_name="LOSS_PLOT", tooltip="The loss over the run as a picture."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, name: str | None = None, *, on_existing: object = None) -> bool | str:
        """Refuse a bad file name; a linked one is not known yet."""
        # ComfyUI repeats the sentence for every input that is named here, so there is one: those after the * do not
        # count. It hands over the dynamic combo in any case, and without its values.
        del on_existing
        return complaint(lambda: name is None or plain_name(name))

    @classmethod
    def fingerprint_inputs(cls, name: str | None = None, **_: object) -> str:
        """Run again after "stop and keep", so that the run goes on; it only ever counts up, and is never undone."""
        return f"kept:{session.kept(name)}"

    @classmethod
    def execute(
        cls,
        base_model: BaseModelConfig,
        dataset: DatasetConfig,
        optimizer: OptimizerConfig,
        scheduler: SchedulerConfig,
        lora_config: LoraConfig,
        name: str,
        strength: float,
        sample_prompts: str,
        sample_negative: str,
        sample_steps: int,
        sample_cfg: float,
        sample_seed: int,
        objective: ObjectiveConfig | None = None,
        model: Any = None,
        clip: Any = None,
        buckets: BucketConfig | None = None,
        memory: MemoryConfig | None = None,
        saves: SavesConfig | None = None,
        on_existing: dict[str, Any] | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        """Train, verify, save, and put the LoRA on MODEL and CLIP."""
        fields = {field: values[field] for field in TRAIN_FIELDS}
        fields |= {field: values[field] for field in LATER_FIELDS if field in values}
        train = TrainConfig(buckets=buckets or BucketConfig(), **fields)
        side = max(64, train.resolution // 64 * 64)
        config = RunConfig(
            base_model=base_model,
            dataset=dataset,
            lora=lora_config,
            optimizer=optimizer,
            scheduler=scheduler,
            objective=objective or ObjectiveConfig(),
            train=train,
            memory=memory or MemoryConfig(checkpointing="full" if values["gradient_checkpointing"] else "auto"),
            sample=SampleConfig(
                prompts=tuple(line.strip() for line in sample_prompts.splitlines() if line.strip()),
                negative=sample_negative,
                steps=sample_steps,
                cfg=sample_cfg,
                seed=sample_seed,
                width=side,
                height=side,
            ),
            saves=saves or SavesConfig(),
            existing=read_existing(on_existing or {}),
        )
        output = bridge.lora_file(plain_name(name), config.saves.folder)
        embeddings = bridge.embeddings_folder() if lora_config.embeddings else None
        progress, began = NodeProgress(cls.hidden.unique_id, output.stem), time.monotonic()
        try:
            with session.open_to_requests(cls.hidden.unique_id, draws=bool(config.sample.prompts)) as asked:
                from ..trainer_core.train import train_lora  # here, so that ComfyUI starts fast

                model, clip = output_models(config, model, clip)
                with session.training_session() as device, session.saved_when_comfyui_ends():
                    result = train_lora(
                        config,
                        output,
                        bridge.cache_folder(),
                        device,
                        progress.callbacks(asked),
                        lambda path: bridge.check_lora(path, model, clip),
                        cache_limit=bridge.cache_limit(),
                        logs=bridge.logs_folder(),
                        embeddings=embeddings,
                        runs=bridge.runs_folder(),
                    )
        finally:
            announce_lora()  # a run that is cancelled leaves a file too
        if not result.finished:
            session.count_kept(name)
        report = summary(result, time.monotonic() - began)
        progress.text(report)
        return io.NodeOutput(
            *bridge.apply_lora(model, clip, result.tensors, strength),
            result.tensors,
            {"loss": plottable(result.losses)},
            result.samples if len(result.samples) else bridge.NOTHING,
            str(result.path),
            to_image(
                draw_losses(
                    result.losses,
                    f"{result.path.stem}: loss over {len(result.losses)} steps",
                    result.validation,
                    result.concepts,
                    best=result.best[0] if result.best else None,
                )
            ),
            ui=ui.PreviewText("\n\n".join([report, *(note for note in progress.notes if note != result.how)])),
        )


def read_existing(on_existing: dict[str, Any]) -> ExistingConfig:
    """Return the configuration of the choice on_existing and its fields; old prompts have none."""
    fields = {"on_existing": "on_existing", "run": "fork_run", "step": "fork_step"}
    chosen = {fields[name]: value for name, value in on_existing.items() if value is not None}
    if "fork_run" in chosen:
        chosen["fork_run"] = chosen["fork_run"].strip()
    return ExistingConfig(**chosen)


def output_models(config: RunConfig, model: Any, clip: Any) -> tuple[Any, Any]:
    """Return MODEL and CLIP that get the LoRA: those linked, else the base model's with the LoRAs beneath it.

    Raises ValueError if they do not fit.
    """
    path = Path(config.base_model.path)
    check_base_model(config.base_model)
    check_lora_files(config)
    outline_network(config)  # a choice of layers that cannot be is refused before anything is loaded
    if model is None or clip is None:
        bridge.check_pictures(config.dataset)  # so that what is wrong with them is said before anything is loaded
        own_model, own_clip, _ = bridge.load_models(config.base_model, *noise_model(config.base_model))
        for beneath in config.lora.beneath:
            tensors = comfy_tensors(Path(beneath.path), config.base_model)
            own_model, own_clip = bridge.apply_lora(own_model, own_clip, tensors, beneath.strength)
        model, clip = model or own_model, clip or own_clip
    if path.is_file():
        rates = (config.optimizer.text_encoder_learning_rate, config.optimizer.text_encoder_2_learning_rate)
        bridge.check_models(config.base_model, model, clip, trains_text=any(rates) or bool(config.lora.embeddings))
    return model, clip


def plottable(losses: Sequence[float]) -> list[float]:
    """Return the losses for other people's plots: a step that was not finite repeats the one before."""
    result: list[float] = []
    for loss in losses:
        result.append(loss if math.isfinite(loss) else (result[-1] if result else 0.0))
    return result


def summary(result: Any, seconds: float) -> str:
    """Say in a few lines what a run left behind (a Result), and how each learned word is written in a prompt."""
    path, losses = result.path, result.losses
    finite = [loss for loss in losses[-max(1, len(losses) // 10) :] if math.isfinite(loss)]
    end = f"{sum(finite) / len(finite):.4f}" if finite else "not finite"
    skipped = sum(not math.isfinite(loss) for loss in losses)
    left_out = f", {skipped} of them without an update" if skipped else ""
    lines = [
        result.how,
        f"Saved as {path}",
        f"{len(losses)} steps{left_out}, mean loss at the end {end}; it took {clock(seconds)} this time",
    ]
    if result.others:
        lines.append(f"Saved beside it, not in the outputs: {', '.join(other.name for other in result.others)}")
    for word, file in result.embeddings.items():
        lines.append(f"For {word} write embedding:{file.parent.name}/{file.stem} in prompts")
    if result.log:
        lines.append(f"Log in {result.log}")
    lines.append(f"Run in {result.run}")
    return "\n".join(lines)
