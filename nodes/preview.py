"""Dataset Preview: show the pictures as they will be trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..trainer_core.config import (
    DatasetConfig,
    Defaults,
    TrainConfig,
    fill_dataset,
    fill_train,
    resolution_remarks,
)
from ..trainer_core.models import Chosen
from ..trainer_core.workflow.settings import read_plan
from .comfyui import comparing, folders
from .comfyui.connected.text import escape
from .comfyui.progress import scan_callbacks
from .node import Node
from .schema import schema
from .sockets import (
    Sizes,
    TrainPart,
    io,
    ui,
)

if TYPE_CHECKING:
    from ..trainer_core.common.callbacks import Callbacks
    from ..trainer_core.data.plan import Plan
    from ..trainer_core.preflight.curation import Finding

SHARED = ("batch_size", "resolution", "seed", "buckets", "accumulate", "validation")  # inputs of the plan

MOST_COMPARED = 2000  # pictures that are compared with their captions


class AtelierDatasetPreview(Node):
    """Show the pictures as they will be trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Define the node's inputs and outputs."""
        return schema(
            "AtelierDatasetPreview",
            "Shows each picture as it will be trained: crop, mask (red is not trained), size and caption; and counts "
            "an epoch's batches. Link and set what Train LoRA has; the report names what differs.",
            ["dataset check", "buckets", "captions", "train lora", "atelier"],
            outputs=[
                io.Image.Output(display_name="SHEET", tooltip="The pictures as they will be trained, on one sheet."),
                io.String.Output(display_name="REPORT", tooltip="Counts, sizes, and remarks on pictures."),
                io.String.Output(display_name="MANIFEST", tooltip="CSV: every file, and what happened to it."),
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> str:
        """Run again after a run, which has compared the losses of pictures."""
        return folders.index_version()

    @classmethod
    def execute(
        cls,
        dataset: DatasetConfig,
        columns: int,
        limit: int,
        epoch: int,
        base_model: Chosen | None = None,
        buckets: Sizes | None = None,
        validation: TrainPart | None = None,
        clip_vision: Any = None,
        clip_of_vision: Any = None,
        **values: Any,
    ) -> io.NodeOutput:
        """Plan one epoch, draw its pictures and report on it."""
        from ..trainer_core.data.plan import build_plan
        from ..trainer_core.data.scan import Index, scan
        from ..trainer_core.models.sd import ClipLengths, load_tokenizer  # here, so that ComfyUI starts fast
        from ..trainer_core.preflight.curation import curate, describe_likeness, last_fits, misfits
        from ..trainer_core.preflight.preview import render_preview
        from ..trainer_core.preflight.report import long_captions, manifest_table, report

        check_vision(clip_vision, clip_of_vision)
        share = validation.values.get("validation_share", 0.0) if validation else 0.0
        train = read_plan(buckets, epochs=epoch + 1, validation_share=share, **values)
        base = base_model.source().outline() if base_model else None
        if base is None and not (train.resolution or train.buckets.resolutions):
            raise ValueError(
                "Dataset Preview does not know the model's resolution. Link BASE_MODEL into base_model, or set "
                "resolution of Dataset Preview, for example to 1024."
            )
        defaults = base.defaults if base else Defaults()
        train, dataset = fill_train(train, defaults), fill_dataset(dataset, defaults)
        callbacks = scan_callbacks(cls.hidden.unique_id)
        with Index(folders.index_file()) as index:
            manifest = scan(dataset, index, callbacks, folders.access())
            plan = build_plan(manifest, dataset, train)
            badly = misfits(plan, last_fits(plan, index))
        alike = {} if clip_vision is None else like_captions(plan, clip_vision, clip_of_vision, callbacks)
        sheet = to_image(render_preview(plan, epoch=epoch, columns=columns, limit=limit, alike=alike))
        remarks = long_captions(
            plan, base.text if base else ClipLengths(tokenizer=load_tokenizer(folders.tokenizer_path())), {}
        )
        remarks += resolution_remarks(train, dataset, base.defaults, base.title) if base else []
        remarks += [finding.sentence for finding in badly]
        remarks += describe_likeness(plan, alike, MOST_COMPARED)
        remarks += differences(cls.hidden.prompt or {}, cls.hidden.unique_id)
        text = "\n".join([report(plan), *(f"- {sentence}" for sentence in remarks)])
        nodes = concept_nodes(cls.hidden.prompt or {}, cls.hidden.unique_id)
        shown = {**ui.PreviewImage(sheet, cls=cls).as_dict(), **ui.PreviewText(text).as_dict()}
        shown["leave_out"] = (
            leave_out([*curate(plan), *badly], plan, nodes) if len(nodes) == len(dataset.concepts) else []
        )
        return io.NodeOutput(sheet, text, manifest_table(plan, alike), ui=shown)


def check_vision(vision: Any, text: Any) -> None:
    """Raise ValueError where only one of both models is linked, or no text can be compared with its pictures."""
    if (vision is None) != (text is None):
        missing = "clip_vision" if vision is None else "clip_of_vision"
        raise ValueError(
            f"Pictures and captions are compared by two models of one CLIP, and {missing} of Dataset Preview is not "
            "linked; link both, or none."
        )
    if vision is not None and not comparing.has_text_side(vision):
        raise ValueError(
            "clip_vision of Dataset Preview has no text side, as DINO and SigLIP have none in ComfyUI; link a CLIP "
            "model of Load CLIP Vision."
        )


def like_captions(plan: Plan, vision: Any, text: Any, callbacks: Callbacks) -> dict[int, float]:
    """Compute how alike the first MOST_COMPARED pictures, as they are trained, are to their captions, by cosines.

    Captions are those of the files, without the trigger word, which no CLIP knows; pictures without one are left out.
    """
    from ..trainer_core.data.captions import plain_caption
    from ..trainer_core.data.films import load_shown
    from ..trainer_core.data.images import cut

    found, pictures = {}, plan.manifest.pictures[:MOST_COMPARED]
    for i, picture in enumerate(pictures):
        callbacks.check()
        callbacks.phase("captions", i, len(pictures))
        concept = plan.concepts[i]
        caption = plain_caption(picture.lines, concept.captions.replace(prefix="", suffix=""))
        if caption.strip():
            crop = plan.first_crops(i)[0]
            trained = cut(load_shown(picture.path, crop.frames, background=concept.background)[0], crop)
            seen = comparing.embed(vision, [comparing.to_tensor(trained)])
            (found[i],) = comparing.like_texts(seen, text, [escape(caption)], "Dataset Preview")
    return found


def differences(prompt: Mapping[str, Any], own: str | None) -> list[str]:
    """List sentences on settings of Train LoRA nodes of the same dataset that the preview has otherwise."""
    inputs = {key: dict(node.get("inputs", {})) for key, node in prompt.items()}
    for each in inputs.values():  # without a share, Validation does not change the plan
        if isinstance(link := each.get("validation"), list) and not inputs.get(link[0], {}).get("validation_share"):
            del each["validation"]
    mine = inputs.get(own or "", {})
    trains = (inputs[key] for key, node in prompt.items() if node.get("class_type") == "AtelierTrain")
    found = dict.fromkeys(name for one in trains if _same_dataset(one, mine) for name in _differing(one, mine))
    if not found:
        return []
    return [
        f"Train LoRA has another {' and another '.join(found)}, and may train other batches or crops. Set "
        f"{' and '.join(found)} of Dataset Preview as there."
    ]


def concept_nodes(prompt: Mapping[str, Any], own: str | None) -> list[str]:
    """List the Concept Dataset node of each concept of a preview, by its id in the prompt.

    "" stands for a concept of the graph's own pictures. Nothing behind a node of other people is found.
    """
    found: list[str] = []
    link = prompt.get(own or "", {}).get("inputs", {}).get("dataset")
    while isinstance(link, list):
        node = prompt.get(str(link[0]), {})
        kind, inputs = node.get("class_type"), node.get("inputs", {})
        if kind == "AtelierConceptDataset":
            found.append(str(link[0]))
        elif kind in ("AtelierImageConcept", "AtelierDrawnPictures"):
            found.append("")
        link = inputs.get("dataset")
    return found[::-1]


def leave_out(findings: Sequence[Finding], plan: Plan, nodes: Sequence[str]) -> list[dict[str, Any]]:
    """List for the page, for each kind of finding, the pictures to leave out, by the node that reads them.

    A name with a comma gets a ? for it, as commas separate the entries of leave_out.
    """
    concepts = plan.dataset.concepts
    folders = {concept.folder: node for concept, node in zip(concepts, nodes, strict=False)}
    shown = []
    for finding in findings:
        names: dict[str, list[str]] = {}
        for i in finding.pictures:
            picture = plan.manifest.pictures[i]
            own = nodes[picture.concept] if picture.concept < len(nodes) else folders[concepts[picture.concept].folder]
            if own:
                names.setdefault(own, []).append(picture.name.replace(",", "?"))
        if names:
            shown.append({"kind": finding.kind, "nodes": names})
    return shown


def _same_dataset(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two nodes are linked to the same dataset."""
    return one.get("dataset") == other.get("dataset")


def _differing(train: Mapping[str, Any], preview: Mapping[str, Any]) -> Iterator[str]:
    """List the shared inputs whose values or links differ; one that is left out has its default."""
    usual = {"accumulate": TrainConfig().accumulate}
    for name in SHARED:
        if train.get(name, usual.get(name)) != preview.get(name, usual.get(name)):
            yield name


def to_image(picture: object) -> torch.Tensor:
    """Convert an RGB PIL picture to an IMAGE, (1, H, W, 3) in 0..1."""
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]
