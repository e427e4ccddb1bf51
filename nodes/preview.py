"""Dataset Preview: see what will be trained, before training."""

from __future__ import annotations

import numpy as np
import torch

from ..trainer_core.config import BucketConfig, DatasetConfig, TrainConfig
from . import bridge
from .progress import NodeProgress
from .sockets import CATEGORY, BucketsSocket, DatasetSocket, io, ui


class AtelierDatasetPreview(io.ComfyNode):
    """Show what will be trained, before training."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's public format."""
        return io.Schema(
            node_id="AtelierDatasetPreview",
            display_name="Dataset Preview",
            category=CATEGORY,
            description="Shows each picture as it will be trained: cut, mask (red is left out), size and caption; and "
            "counts what an epoch holds. Use the same resolution, bucket_step and batch_size as in Train LoRA.",
            search_aliases=["dataset check", "buckets", "captions", "train lora", "atelier"],
            is_output_node=True,
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The dataset to show."),
                io.Int.Input(
                    "resolution",
                    default=512,
                    min=64,
                    max=8192,
                    step=8,
                    tooltip="Pixels, as in Train LoRA: pictures are scaled to about resolution x resolution.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=64,
                    min=8,
                    max=512,
                    step=8,
                    tooltip="Pixels, as in Train LoRA: the sides of all sizes are multiples of it.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Pictures per batch, as in Train LoRA; decides the number of batches in the report.",
                ),
                io.Int.Input("columns", default=4, min=1, max=16, tooltip="Pictures side by side on the sheet."),
                io.Int.Input("limit", default=24, min=1, max=500, tooltip="The most pictures on the sheet."),
                io.Int.Input(
                    "epoch",
                    default=0,
                    min=0,
                    max=100_000,
                    optional=True,
                    tooltip="Which epoch to show: captions, crops and mirroring as they will be then; 0 = the first.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    optional=True,
                    tooltip="As in Train LoRA: decides crops, caption draws and the order.",
                    advanced=True,
                ),
                BucketsSocket.Input("buckets", optional=True, tooltip="Optional, from Buckets, as for Train LoRA."),
            ],
            outputs=[
                io.Image.Output(display_name="SHEET", tooltip="The pictures as they will be trained, on one sheet."),
                io.String.Output(display_name="REPORT", tooltip="Counts, sizes, and what deserves a look."),
                io.String.Output(display_name="MANIFEST", tooltip="CSV: every file, and what became of it."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        dataset: DatasetConfig,
        resolution: int,
        bucket_step: int,
        batch_size: int,
        columns: int,
        limit: int,
        epoch: int = 0,
        seed: int = 0,
        buckets: BucketConfig | None = None,
    ) -> io.NodeOutput:
        """Plan one epoch, draw its pictures and say what it holds."""
        from ..trainer_core.models import load_tokenizer  # here, so that ComfyUI starts fast
        from ..trainer_core.plan import build_plan
        from ..trainer_core.preview import render_preview
        from ..trainer_core.report import long_captions, manifest_table, report
        from ..trainer_core.scan import Index, scan

        train = TrainConfig(
            epochs=epoch + 1,
            resolution=resolution,
            bucket_step=bucket_step,
            batch_size=batch_size,
            seed=seed,
            buckets=buckets or BucketConfig(),
        )
        progress = NodeProgress(cls.hidden.unique_id)
        with Index(bridge.index_file()) as index:
            manifest = scan(dataset, index, progress.callbacks())
        plan = build_plan(manifest, dataset, train)
        sheet = to_image(render_preview(plan, epoch=epoch, columns=columns, limit=limit))
        long = long_captions(plan, load_tokenizer(bridge.tokenizer_path()))
        text = "\n".join([report(plan), *(f"- {sentence}" for sentence in long)])
        progress.text(text)
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        return io.NodeOutput(sheet, text, manifest_table(plan), ui=shown)


def to_image(picture: object) -> torch.Tensor:
    """Return an RGB PIL picture as an IMAGE, (1, H, W, 3) in 0..1."""
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]
