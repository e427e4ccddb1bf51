"""Dataset Preview: show the pictures as they will be trained."""

from __future__ import annotations

import numpy as np
import torch

from ..trainer_core.config import BucketConfig, DatasetConfig, TrainConfig
from .comfyui import folders
from .comfyui.progress import NodeProgress
from .node import Node
from .sockets import CATEGORY, BucketsSocket, DatasetSocket, io, ui


class AtelierDatasetPreview(Node):
    """Show the pictures as they will be trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierDatasetPreview",
            display_name="Dataset Preview",
            category=CATEGORY,
            description="Shows each picture as it will be trained: crop, mask (red is not trained), size and "
            "caption; and counts an epoch's batches. Use the same resolution, bucket_step and batch_size as in Train "
            "LoRA.",
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
                    tooltip="Pictures per batch, as in Train LoRA; sets the number of batches in the report.",
                ),
                io.Int.Input("columns", default=4, min=1, max=16, tooltip="Pictures side by side on the sheet."),
                io.Int.Input("limit", default=24, min=1, max=500, tooltip="The most pictures on the sheet."),
                io.Int.Input(
                    "epoch",
                    default=0,
                    min=0,
                    max=100_000,
                    optional=True,
                    tooltip="Which epoch to show: its captions, crops and mirroring; 0 = the first.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=io.ControlAfterGenerate.fixed,
                    optional=True,
                    tooltip="As in Train LoRA: the seed of crops, captions and order.",
                    advanced=True,
                ),
                BucketsSocket.Input("buckets", optional=True, tooltip="Optional, from Buckets, as for Train LoRA."),
            ],
            outputs=[
                io.Image.Output(display_name="SHEET", tooltip="The pictures as they will be trained, on one sheet."),
                io.String.Output(display_name="REPORT", tooltip="Counts, sizes, and remarks on pictures."),
                io.String.Output(display_name="MANIFEST", tooltip="CSV: every file, and what happened to it."),
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
        """Plan one epoch, draw its pictures and report on it."""
        from ..trainer_core.data.plan import build_plan
        from ..trainer_core.data.scan import Index, scan
        from ..trainer_core.models.sd import ClipLengths, load_tokenizer  # here, so that ComfyUI starts fast
        from ..trainer_core.preflight.preview import render_preview
        from ..trainer_core.preflight.report import long_captions, manifest_table, report

        train = TrainConfig(
            epochs=epoch + 1,
            resolution=resolution,
            bucket_step=bucket_step,
            batch_size=batch_size,
            seed=seed,
            buckets=buckets or BucketConfig(),
        )
        progress = NodeProgress(cls.hidden.unique_id)
        with Index(folders.index_file()) as index:
            manifest = scan(dataset, index, progress.callbacks(), folders.access())
        plan = build_plan(manifest, dataset, train)
        sheet = to_image(render_preview(plan, epoch=epoch, columns=columns, limit=limit))
        long = long_captions(plan, ClipLengths(load_tokenizer(folders.tokenizer_path())), {})
        text = "\n".join([report(plan), *(f"- {sentence}" for sentence in long)])
        progress.text(text)
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        return io.NodeOutput(sheet, text, manifest_table(plan), ui=shown)


def to_image(picture: object) -> torch.Tensor:
    """Convert an RGB PIL picture to an IMAGE, (1, H, W, 3) in 0..1."""
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]
