"""Buckets and Augmentation: at which sizes pictures are trained, and how they vary from visit to visit."""

from __future__ import annotations

from typing import Any

from ..trainer_core.workflow.settings import read_augmentation, read_buckets
from .node import Node
from .sockets import CATEGORY, BucketsSocket, DatasetSocket, io, titled


class AtelierBuckets(Node):
    """The sizes of a run, beyond one resolution."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierBuckets",
            display_name=titled("Buckets"),
            category=CATEGORY,
            description="Optional: several resolutions at once, fixed sizes, limits, and how to train shapes that "
            "few pictures have. For Train LoRA and Dataset Preview.",
            search_aliases=["resolution", "aspect ratio", "multi resolution", "bucketing", "train lora", "atelier"],
            inputs=[
                io.String.Input(
                    "resolutions",
                    default="",
                    placeholder="512, 640, 768",
                    tooltip="Several sizes, separated by commas: 512 = about 512 x 512 pixels in the shape nearest "
                    "to each picture, 640x384 = exactly that. Empty = the resolution of Train LoRA.",
                ),
                io.Combo.Input(
                    "resolution_mode",
                    options=["draw", "all"],
                    default="draw",
                    tooltip="With several resolutions. draw: each visit uses the next one, all equally often. all: "
                    "each visit is repeated at every resolution, so epochs are longer.",
                ),
                io.Int.Input(
                    "min_side",
                    default=0,
                    min=0,
                    max=8192,
                    step=8,
                    tooltip="Pixels: shapes with a shorter side are not used. 0 = all. no_upscale ignores it.",
                    advanced=True,
                ),
                io.Int.Input(
                    "max_side",
                    default=0,
                    min=0,
                    max=8192,
                    step=8,
                    tooltip="Pixels: longer sides are clipped to it, so such shapes have fewer pixels. 0 = no limit. "
                    "no_upscale ignores it.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "no_upscale",
                    default=False,
                    tooltip="Train pictures smaller than the resolution at their own size instead of enlarging them.",
                ),
                io.Combo.Input(
                    "small_buckets",
                    options=["keep", "merge"],
                    default="keep",
                    tooltip="A shape with fewer pictures than a batch. keep: its batches are smaller, and weigh as "
                    "much as their pictures. merge: its pictures go to the nearest shape with enough of "
                    "them, cropped more.",
                ),
                io.Boolean.Input(
                    "mix_concepts",
                    default=True,
                    tooltip="On: a batch may hold pictures of several concepts. Off: every batch holds one concept.",
                    advanced=True,
                ),
                io.Int.Input(
                    "bucket_step",
                    default=0,
                    min=0,
                    max=512,
                    step=8,
                    tooltip="Pixels: the sides of all sizes are multiples of it, itself a multiple of 8. A smaller "
                    "value cuts off less of each picture and makes more sizes. 0: as suits the model, mostly 64.",
                    advanced=True,
                ),
            ],
            outputs=[BucketsSocket.Output(display_name="BUCKETS", tooltip="For Train LoRA and Dataset Preview.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Build the configuration."""
        return io.NodeOutput(read_buckets(**inputs))


def _share(name: str, tooltip: str, most: float = 1.0) -> io.Float.Input:
    return io.Float.Input(name, default=0.0, min=0.0, max=most, step=0.01, round=1e-4, tooltip=tooltip)


class AtelierAugment(Node):
    """How pictures vary from visit to visit."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return io.Schema(
            node_id="AtelierAugment",
            display_name=titled("Augmentation"),
            category=CATEGORY,
            description="Optional: crops, rotations and colours that vary from visit to visit. Applies to every linked "
            "concept that has none yet. Each picture gets a number of versions, which are encoded once and cached.",
            search_aliases=["random crop", "color jitter", "rotation", "augmentation", "train lora", "atelier"],
            inputs=[
                DatasetSocket.Input("dataset", tooltip="The concepts that vary."),
                io.Int.Input(
                    "variants",
                    default=4,
                    min=1,
                    max=1000,
                    tooltip="Versions of each picture, used in turn. More varies more and caches more.",
                ),
                _share("crop_jitter", "How far the crop may move off the centre: 0 = not at all, 1 = up to the edge."),
                _share(
                    "zoom",
                    "Enlarges by up to this share before the crop, so that the crop of a square picture can move.",
                ),
                io.Float.Input(
                    "rotation",
                    default=0.0,
                    min=0.0,
                    max=45.0,
                    step=0.5,
                    round=1e-3,
                    tooltip="Rotates by up to this many degrees either way. Corners are cropped off, nothing is "
                    "filled in.",
                ),
                _share("brightness", "Brightness varies by up to this share either way."),
                _share("contrast", "Contrast varies by up to this share either way."),
                _share("saturation", "Saturation varies by up to this share either way."),
                _share("hue", "Colours shift by up to this share of the colour circle either way.", 0.5),
            ],
            outputs=[DatasetSocket.Output(display_name="DATASET", tooltip="The concepts with their variations.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        """Set this augmentation on every concept that has none yet; without any variation none is set."""
        return io.NodeOutput(read_augmentation(**inputs))
