"""Train LoRA: train, save and output a LoRA."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..trainer_core.common.callbacks import Callbacks
from ..trainer_core.common.wording import count, say
from ..trainer_core.config import (
    RunConfig,
    SampleConfig,
    check_samples,
    fill,
    plain_name,
)
from ..trainer_core.lora_files.continued import check_lora_files
from ..trainer_core.lora_files.merge import comfy_tensors
from ..trainer_core.models import Chosen, Source
from ..trainer_core.models.sd import detect_noise
from ..trainer_core.preflight.outline import outline_run
from ..trainer_core.workflow.settings import read_train
from .comfyui import folders, kept, models, outward, server, session
from .comfyui.progress import NodeProgress, address_of
from .comfyui.sampling import Trained, remember_trained
from .node import Node
from .plot import draw_losses
from .preview import to_image
from .schema import schema
from .sockets import complaint, io, ui


class AtelierTrain(Node):
    """Train a LoRA on a dataset; output it as a file and applied to MODEL and CLIP."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierTrain",
            "Trains a LoRA, saves it in models/loras/atelier and applies it to MODEL and CLIP, ready for a sampler. "
            "ComfyUI's queue waits while it trains; Cancel stops within a step and keeps the LoRA so far.",
            ["lora trainer", "finetune", "dreambooth", "kohya", "sd-scripts", "training", "atelier"],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="The model with the LoRA on it, for KSampler or Sample."),
                io.Clip.Output(display_name="CLIP", tooltip="The text encoder with the LoRA on it."),
                io.LoraModel.Output(
                    display_name="LORA", tooltip="The LoRA itself, for Resize LoRA, Save LoRA File, Load LoRA Model."
                ),
                io.LossMap.Output(display_name="LOSS_MAP", tooltip="The loss of each step, for Plot Loss Graph."),
                io.Image.Output(
                    display_name="SAMPLES",
                    tooltip="One picture per line of sample_prompts of Saves & Samples, as one batch, of a clip all "
                    "frames in order: where sizes differ, smaller pictures are centred on black. Without prompts, "
                    "nodes linked here are skipped.",
                ),
                io.String.Output(display_name="LORA_PATH", tooltip="Full path of the saved file."),
                io.Image.Output(display_name="LOSS_PLOT", tooltip="The loss over the run as a picture."),
                io.Model.Output(
                    display_name="MODEL_HIGH",
                    tooltip="With model_high of Use Connected Model: that expert with its own LoRA on it, for the "
                    "first steps of sampling; MODEL is the other one. Else nodes linked here are skipped.",
                ),
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def validate_inputs(cls, name: str | None = None, *, on_existing: object = None) -> bool | str:
        """Refuse a bad file name; a linked one is not known yet."""
        # ComfyUI shows the message once for each positional parameter, so `name` is the only one. It passes the dynamic
        # combo in any case, without its values.
        del on_existing
        return complaint(name, plain_name)

    @classmethod
    def fingerprint_inputs(cls, name: str | None = None, **_: object) -> str:
        """Run again after "Stop and keep", so that the run resumes; the count only ever rises."""
        return f"kept:{session.kept(name)}"

    @classmethod
    def execute(
        cls,
        name: str,
        base_model: Chosen,
        model: Any = None,
        clip: Any = None,
        strength: float = 1.0,
        **inputs: Any,
    ) -> io.NodeOutput:
        """Train, verify and save the LoRA, and apply it to MODEL and CLIP."""
        config = read_train(base_model.config, **inputs)
        used = [concept.folder for concept in config.dataset.concepts]
        used += [config.lora.start, *(beneath.path for beneath in config.lora.beneath)]
        kept.mark_used(map(Path, used))
        kept.make_room()
        another = "set file_name of Saves & Samples to another folder"
        output = folders.lora_file(plain_name(name), config.saves.folder, another)
        embeddings = folders.embeddings_folder() if config.lora.embeddings else None
        began, draws = time.monotonic(), bool(config.sample.prompts)
        address = address_of(cls.hidden)
        with NodeProgress(address, output.stem) as progress:
            with (
                session.buttons_enabled(address.node, draws=draws) as buttons,
                kept.in_use(),
                outward.telling(progress.callbacks(buttons), output.stem) as callbacks,
            ):
                from ..trainer_core.train import train_lora  # here, so that ComfyUI starts fast
                from ..trainer_core.training.result import describe_result
                from .comfyui.connected.model import ConnectedSource

                source = base_model.source()
                model, clip, sample = output_models(config, source, model, clip, callbacks)
                with session.training_session() as device, session.saved_when_comfyui_ends():
                    result = train_lora(
                        config,
                        output,
                        folders.cache_folder(),
                        device,
                        callbacks,
                        lambda path: models.check_lora(path, model, clip),
                        cache_limit=kept.room_for_cache(),
                        logs=folders.logs_folder(),
                        embeddings=embeddings,
                        runs=folders.runs_folder(),
                        source=source,
                        access=folders.access(),
                        workflow=server.workflow_of(cls.hidden.extra_pnginfo),
                    )
            assert result is not None  # this process is alone, so it leads
            if not result.finished:
                session.count_kept(name)
            report = describe_result(result, time.monotonic() - began)
            progress.report(report)
        high = models.NOTHING
        if isinstance(source, ConnectedSource) and result.high is not None:
            high, _ = models.apply_lora(source.live.high, None, result.high[1], strength)
        model, clip = models.apply_lora(model, clip, result.tensors, strength)
        remember_trained(model, Trained(sample.width, sample.height, result.plan.usual_prompt()))
        return io.NodeOutput(
            model,
            clip,
            result.tensors,
            {"loss": plottable(result.losses)},
            result.samples if len(result.samples) else models.NOTHING,
            str(result.path),
            to_image(
                draw_losses(
                    result.losses,
                    f"{result.path.stem}: loss over {count(result.losses, 'step')}",
                    result.validation,
                    result.concepts,
                    best=result.best[0] if result.best else None,
                )
            ),
            high,
            ui=ui.PreviewText("\n\n".join([report, *(note for note in progress.notes if note != result.origin)])),
        )


def output_models(
    config: RunConfig, source: Source, model: Any, clip: Any, callbacks: Callbacks
) -> tuple[Any, Any, SampleConfig]:
    """Choose the MODEL and CLIP that get the LoRA: linked ones, else the base model's with the LoRAs beneath.

    The samples' settings come with them, filled in. Raises ValueError if they do not fit.
    """
    from .comfyui.connected.model import ConnectedSource  # here, so that ComfyUI starts fast

    path = Path(config.base_model.path)
    live = source.live if isinstance(source, ConnectedSource) else None
    source.check()
    base = source.outline()
    config = fill(config, base.defaults)
    check_lora_files(config, base)
    check_samples(config.sample, base.sampling, base.title)
    outline_run(config, base)  # refuses impossible layers before anything is loaded
    if model is None or clip is None:
        callbacks.phase(say("loading the model"), 0, 1)
        folders.check_pictures(config.dataset, callbacks)  # names what is wrong before anything is loaded
        if live:
            own_model, own_clip = live.model, live.clip
        else:
            own_model, own_clip, _ = models.load_models(config.base_model, *detect_noise(config.base_model))
        for beneath in (each for each in config.lora.beneath if not each.training_only):
            tensors = comfy_tensors(Path(beneath.path), base)
            own_model, own_clip = models.apply_lora(own_model, own_clip, tensors, beneath.strength)
        model, clip = model or own_model, clip or own_clip
    if live:
        models.check_same_kind(live.model, model)
    elif path.is_file():
        rates = (config.optimizer.text_encoder_learning_rate, config.optimizer.text_encoder_2_learning_rate)
        models.check_models(config.base_model, model, clip, trains_text=any(rates) or bool(config.lora.embeddings))
    source.take_back(base)  # for the run
    return model, clip, config.sample


def plottable(losses: Sequence[float]) -> list[float]:
    """Replace each loss that is not finite by the one before, for other people's plots."""
    result: list[float] = []
    for loss in losses:
        result.append(loss if math.isfinite(loss) else (result[-1] if result else 0.0))
    return result
