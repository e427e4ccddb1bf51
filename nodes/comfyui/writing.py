"""Ask a part of the graph for each picture by itself: each answer is written before the next picture is opened.

ComfyUI's own lists would run a model over all pictures first, with all of them in memory, and a Cancel would lose the
answers. So a node that writes puts copies of what lies between it and Dataset Pictures into the running prompt.
"""

from __future__ import annotations

import functools
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
import torch
from comfy_execution.progress import get_progress_state
from PIL import Image

from ...trainer_core.data.images import DECODER_ERRORS, decoder_error, load_picture, strict_decoding
from ...trainer_core.data.scan import Picture
from ...trainer_core.data.written import WritingJournal, WritingState, WrittenFile

SOURCE = "AtelierDatasetPictures"  # the node whose pictures are asked one by one
PICTURE, WRITE, NEXT = "LoraAtelierPicture", "LoraAtelierWrite", "LoraAtelierNext"  # what stands in for it, and us
AT_ONCE = 100  # pictures whose copies are in the prompt: ComfyUI looks through all of them at each step
REMEMBERED = 8  # nodes that write, in prompts that were cancelled


@dataclass(slots=True)
class Writing:
    """What one node writes in one prompt."""

    node: str  # its id
    title: str
    files: list[WrittenFile]
    journal: WritingJournal
    progress: WritingState
    write: Callable[[WrittenFile, list[Any]], bool]  # with what the graph gave; False if that is nothing
    words: tuple[str, str]  # what it writes, as one and as several
    copies: dict[str, dict[str, Any]]  # nodes between the pictures and this one, by id
    answer: tuple[str, int]  # the node among them that answers, and its output
    begun: int = 0  # files whose copies are in the prompt

    def report(self) -> str:
        """Say what became of the pictures."""
        return self.progress.report(*self.words)


_writings: dict[str, Writing] = {}  # by a number of their own: nothing in a prompt names a file


def writing_of(run: str) -> Writing:
    """Find a writing; raises ValueError for a prompt that people wrote by hand."""
    if run not in _writings:
        raise ValueError("This node only works inside of Write Captions and Write Masks; remove it.")
    return _writings[run]


def between(prompt: Any, link: tuple[str, int], node: str, title: str, name: str) -> dict[str, dict[str, Any]]:
    """Find the nodes that lie on the way from Dataset Pictures to an output; raises ValueError where none does.

    prompt: ComfyUI's DynamicPrompt. name: of the input that the output is linked into.
    """
    found: dict[str, bool] = {node: False}

    def depends(number: str) -> bool:
        if number not in found:
            about = prompt.get_node(number)
            sources = [depends(value[0]) for value in about["inputs"].values() if _is_link(value)]
            found[number] = about["class_type"] == SOURCE or any(sources)
        return found[number]

    if not depends(link[0]):
        raise ValueError(
            f"What is linked into {name} of {title} sees no picture of Dataset Pictures; link Dataset Pictures into "
            "the node that looks at them."
        )
    return {number: prompt.get_node(number) for number, on_the_way in found.items() if on_the_way}


def digest_of_way(prompt: Any, link: tuple[str, int], **more: Any) -> str:
    """Hash all that decides an answer beside the picture: nodes and values, whatever their ids."""

    @functools.cache  # else two ways to a node would be twice the work, at each fork
    def about(number: str) -> Any:
        node = prompt.get_node(number)
        dataset = node["class_type"] == SOURCE
        values = {
            name: [about(value[0]), value[1]] if _is_link(value) else value
            for name, value in sorted(node["inputs"].items())
            if not (dataset and name == "dataset")
        }
        return hashlib.sha256(json.dumps([node["class_type"], values], default=str).encode()).hexdigest()

    return hashlib.sha256(json.dumps([about(link[0]), link[1], more]).encode()).hexdigest()


def _is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def begin(writing: Writing) -> tuple[list[Any], dict[str, Any]]:
    """Start a writing: the link to its report, and the nodes that ComfyUI is to run."""
    run = uuid.uuid4().hex
    for old in [*_writings][: 1 - REMEMBERED]:
        del _writings[old]
    _writings[run] = writing
    return more(run)


def more(run: str) -> tuple[list[Any], dict[str, Any]]:
    """Build the nodes of the next pictures, and the link to what comes after them."""
    writing = writing_of(run)
    graph: dict[str, Any] = {}
    first, last = writing.begun, min(writing.begun + AT_ONCE, len(writing.files))
    writing.begun = last
    ends = {}
    for number in range(first, last):
        before = f"{run}.{number}."
        for id_, about in writing.copies.items():
            graph[before + id_] = _copy(id_, about, writing.copies, before, run, number)
        sources = [id_ for id_, about in writing.copies.items() if about["class_type"] == SOURCE]
        inputs = {
            "run": run,
            "number": number,
            "answer": [before + writing.answer[0], writing.answer[1]],
            "picture": [before + sources[0], 0],
        }
        graph[f"{before}write"] = _node(WRITE, inputs, writing.node)
        ends[f"written_{number}"] = [f"{before}write", 0]
    end = f"{run}.{last}"
    graph[end] = _node(NEXT, {"run": run, **ends}, writing.node)
    return [end, 0], graph


def _copy(
    id_: str, about: Mapping[str, Any], copies: Mapping[str, Any], before: str, run: str, number: int
) -> dict[str, Any]:
    """Copy a node for one picture; links to nodes that see no picture stay as they are."""
    inputs = {
        name: [before + value[0], value[1]] if _is_link(value) and value[0] in copies else value
        for name, value in about["inputs"].items()
    }
    if about["class_type"] != SOURCE:
        return _node(about["class_type"], inputs, id_)
    del inputs["dataset"]
    return _node(PICTURE, {**inputs, "run": run, "number": number}, id_)


def _node(kind: str, inputs: dict[str, Any], shown_as: str) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs, "override_display_id": shown_as}


def write(run: str, number: int, answer: list[Any], picture: torch.Tensor) -> None:
    """Write what the graph answered for a picture, and let go of the picture."""
    comfy.model_management.throw_exception_if_processing_interrupted()
    writing = writing_of(run)
    file = writing.files[number]
    if writing.write(file, answer):
        writing.journal.add(file.path)
        writing.progress.written.append(file.picture.name)
    else:
        writing.progress.empty.append(file.picture.name)
    # ComfyUI keeps what each node gave until the next prompt: of a thousand pictures that would be 12 GB.
    picture.set_(torch.UntypedStorage(0))
    # Each event of ComfyUI's tells of all nodes that have run, at each word of a model.
    known = get_progress_state()
    for id_ in [each for each, state in known.nodes.items() if each.startswith(run) and state["value"] >= state["max"]]:
        del known.nodes[id_]
    comfy.utils.ProgressBar(len(writing.files), node_id=writing.node).update_absolute(number + 1)


def pixels_of(picture: Picture, longest_side: int, beside: bool) -> torch.Tensor:
    """Load a picture as IMAGE (1, H, W, 3), made smaller to a longest side in pixels.

    beside: its control picture stands at its left, at the same height. Raises ValueError.
    """
    sources = [picture.path]
    if beside:
        control = picture.other_end or next(iter(picture.controls), None)
        if control is None:
            raise ValueError(
                f"{picture.name} has no control picture; link Control Pictures, or set show of Dataset Pictures to "
                "picture."
            )
        sources.insert(0, control.path)
    images = []
    with strict_decoding():
        for path in sources:
            try:
                images.append(load_picture(path))
            except DECODER_ERRORS as error:
                raise ValueError(f"{path} cannot be read ({decoder_error(error)}); replace or remove it.") from error
    height = images[-1].height
    images = [each.resize((max(1, round(each.width * height / each.height)), height)) for each in images]
    whole = Image.new("RGB", (sum(each.width for each in images), height))
    for number, each in enumerate(images):
        whole.paste(each, (sum(before.width for before in images[:number]), 0))
    whole.thumbnail((longest_side, longest_side))
    pixels = np.asarray(whole)
    room = mmap(
        -1, 4 * pixels.size
    )  # of its own: what is let go of goes back to the system, however small the gaps are
    np.divide(pixels, np.float32(255), out=np.frombuffer(room, np.float32).reshape(pixels.shape))
    return torch.frombuffer(room, dtype=torch.float32).reshape(1, *pixels.shape)


def mask_of(answer: list[Any]) -> Image.Image | None:
    """Join masks (H, W) or (N, H, W) in 0..1 of one size to one in mode "L"; None if all is black."""
    layers = [layer for mask in answer for layer in mask.detach().cpu().float().reshape(-1, *mask.shape[-2:])]
    if not layers:
        return None
    whole = torch.stack(layers).amax(dim=0).clamp(0, 1).mul(255).round().to(torch.uint8)
    return Image.fromarray(whole.numpy()) if whole.any() else None
