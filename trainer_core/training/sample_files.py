"""Write a run's samples as PNG files into its folder, and read them back."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ..common.disk_errors import describe_disk_error, reason
from ..common.files import written_whole
from ..common.tensor_tree import DISK_ERRORS
from ..data.images import DECODER_ERRORS
from ..runs import SAMPLES
from .sample import sample_images
from .state import Run
from .weights import versions

PREVIEWS = {f"{kind}{ending}" for kind in ("", ".preview") for ending in (".png", ".jpg", ".jpeg", ".webp", ".gif")}
RUN_OF_PREVIEW = "atelier_run"  # a text in the PNG file: the key of its run


def draw_samples(run: Run) -> list[Path]:
    """Draw the samples with the current weights into PNG files; report a failure once.

    The plain or best weights come first, then those of an average.
    """
    if not run.config.sample.prompts:
        return []
    paths = []
    try:
        for version in versions(run):
            if version.ending != "-last":
                with version.weights(), run.base.drawing(run.network):
                    read = run.reader(training=False)
                    images = sample_images(
                        run.base, run.config.sample, run.device, encode=read, callbacks=run.callbacks
                    )
                for number, image in enumerate(images, 1):
                    name = f"step-{run.at:08}-{number}{version.ending}.png"
                    paths.append(run.folder.path / SAMPLES / name)
                    save_picture(paths[-1], image)
    except DISK_ERRORS as error:
        why = describe_disk_error(error, run.folder.path / SAMPLES)
        run.note_once("samples", f"Samples could not be saved after step {run.at}: {why}")
        return []
    except (RuntimeError, ValueError, ArithmeticError) as error:
        run.note_once("samples", f"Samples could not be drawn after step {run.at}: {reason(error)}")
        return []
    run.record("sampled", step=run.at, files=[path.name for path in paths])
    run.callbacks.samples(run.at, paths)
    return paths


def save_picture(path: Path, image: Tensor) -> None:
    """Write a picture (H, W, 3) in 0..1 as PNG."""
    with written_whole(path) as temporary:
        Image.fromarray((image * 255).round().to(torch.uint8).numpy()).save(temporary, format="PNG")


def put_preview(run: Run, lora: Path, picture: Path) -> None:
    """Put a sample beside a LoRA file, as `<name>.png`, where model browsers look for it; report a failure.

    A picture of another run, or of somebody else, stays.
    """
    path, key = lora.with_suffix(".png"), run.folder.keys.run
    try:
        others = {each.name.removeprefix(lora.stem) for each in lora.parent.glob(f"{glob.escape(lora.stem)}.*")}
        if others & PREVIEWS - {".png"} or (path.exists() and _run_of_preview(path) != key):
            return
        text = PngInfo()
        text.add_text(RUN_OF_PREVIEW, key)
        with Image.open(picture) as sample, written_whole(path) as temporary:
            sample.save(temporary, format="PNG", pnginfo=text)
    except DECODER_ERRORS as error:
        run.callbacks.note(f"The LoRA has no preview picture: {describe_disk_error(error, path.parent)}")


def _run_of_preview(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info.get(RUN_OF_PREVIEW, ""))


def are_pictures(paths: Sequence[Path]) -> bool:
    """Tell whether all files exist and can be decoded."""
    try:
        read_pictures(paths)
    except DECODER_ERRORS:
        return False
    return True


def read_pictures(paths: Sequence[Path]) -> Tensor:
    """Read PNG files of one size as (N, H, W, 3) in 0..1; OSError or ValueError for damaged ones."""
    pictures = []
    for path in paths:
        with Image.open(path) as image:
            pictures.append(torch.from_numpy(np.array(image.convert("RGB"))).float() / 255)
    return torch.stack(pictures)
