"""Write a run's samples into its folder, pictures as PNG and clips as animated WebP, and read them back."""

from __future__ import annotations

import bisect
import glob
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from ..common.disk_errors import describe_disk_error, reason
from ..common.files import written_whole
from ..common.sample_names import FORMATS, SampleName, sample_name
from ..common.tensor_tree import DISK_ERRORS
from ..config import SamplePicture
from ..data.images import DECODER_ERRORS
from ..runs import SAMPLES
from .sample import sample_images
from .state import Run
from .weights import Version, versions

PREVIEWS = {f"{kind}{ending}" for kind in ("", ".preview") for ending in (".png", ".jpg", ".jpeg", ".webp", ".gif")}
# Names of texts in files of samples.
MOST_NUMBERS = 2**29  # of all samples of a run that SAMPLES holds: 2 GB
RUN_OF_PREVIEW = "atelier_run"  # the key of its run
PARAMETERS, TOLD = "parameters", "atelier_sample"  # what a sample was drawn with
# Their places in a clip's Exif: there ComfyUI's page looks for `name:text`, and other programs for the parameters.
DESCRIPTION, INNER, COMMENT, UNICODE = 0x010E, 0x8769, 0x9286, b"UNICODE\0"


def draw_samples(run: Run, keep: Callable[[Run], None] = lambda _: None) -> list[Path]:
    """Draw the samples with the current weights into files; report a failure once.

    The plain or best weights come first, then those of an average. keep: called before a page shows them.
    """
    if not run.config.sample.prompts:
        return []
    try:
        paths = [path for version in versions(run) if version.ending != "-last" for path in _draw(run, version)]
    except DISK_ERRORS as error:
        why = describe_disk_error(error, run.folder.path / SAMPLES)
        run.note_once("samples", f"Samples could not be saved after step {run.at}: {why}")
        return []
    except (RuntimeError, ValueError, ArithmeticError) as error:
        run.note_once("samples", f"Samples could not be drawn after step {run.at}: {reason(error)}")
        return []
    keep(run)
    run.record("sampled", step=run.at, files=[path.name for path in paths])
    run.callbacks.samples(run.at, paths)
    return paths


def _draw(run: Run, version: Version) -> list[Path]:
    """Draw each prompt with a version's weights, and write each sample before the next one is drawn."""
    paths: list[Path] = []
    run.encode_prompts()
    sampler = run.base.sampler
    # Another program's sampler runs its own code in blocks, which would be compiled anew.
    uncompiled = run.programs.asleep() if run.base.host else nullcontext()
    with uncompiled, version.weights(), sampler.drawing(run.network) if sampler else nullcontext():
        read = run.reader(training=False)
        images = sample_images(
            run.base, run.config.sample, run.device, encode=read, encoded=run.encoded, callbacks=run.callbacks
        )
        for number, (picture, frames) in enumerate(images, 1):
            name = SampleName(run.at, number, version.ending, len(frames))
            paths.append(run.folder.path / SAMPLES / name.file)
            texts = texts_of(picture, frames[0], version.steps, run.folder.about["name"])
            if len(frames) > 1:
                save_clip(paths[-1], frames, picture.rate, texts)
            else:
                save_picture(paths[-1], frames[0], texts)
    return paths


def texts_of(picture: SamplePicture, image: Tensor, step: int, run: str) -> dict[str, str]:
    """Write the texts of a sample's file; image: (H, W, 3). step: of the weights. run: the run's name.

    PARAMETERS has the form of AUTOMATIC1111's WebUI, which ComfyUI and others read, and TOLD is JSON.
    """
    height, width = image.shape[:2]
    told = {
        "prompt": picture.prompt,
        "negative": picture.negative,
        "step": step,
        "seed": picture.seed,
        "width": width,
        "height": height,
        "steps": picture.steps,
        "cfg": picture.cfg,
        "sampler": picture.sampler,
        "scheduler": picture.scheduler,
        "guidance": picture.guidance,
        "run": run,
    }
    if picture.frames > 1:
        told |= {"frames": picture.frames, "rate": picture.rate}
    settings = {
        "Steps": picture.steps,
        "Sampler": picture.sampler,
        "Schedule type": picture.scheduler,
        "CFG scale": f"{picture.cfg:g}",
        "Distilled CFG Scale": None if picture.guidance is None else f"{picture.guidance:g}",
        "Seed": picture.seed,
        "Size": f"{width}x{height}",
        "Frames": f"{picture.frames} at {picture.rate} fps" if picture.frames > 1 else None,
        "Control": ", ".join(Path(name).name for name in picture.controls) or None,
        "Training step": step,
        "Run": run,
    }
    lines = [picture.prompt, *([f"Negative prompt: {picture.negative}"] if picture.negative else ())]
    lines.append(", ".join(f"{name}: {value}" for name, value in settings.items() if value is not None))
    return {PARAMETERS: "\n".join(lines), TOLD: json.dumps(told)}


def save_picture(path: Path, image: Tensor, texts: Mapping[str, str] | None = None) -> None:
    """Write a picture (H, W, 3) in 0..1 as PNG, with texts by name."""
    with written_whole(path) as temporary:
        _pixels(image).save(temporary, format="PNG", pnginfo=_written(texts or {}))


def save_clip(path: Path, frames: Tensor, rate: int, texts: Mapping[str, str]) -> None:
    """Write frames (T, H, W, 3) in 0..1 as animated WebP without loss, for ever at `rate` a second, with their texts.

    The file keeps frames that are equal as one, which is shown for longer.
    """
    ends = [round(number * 1000 / rate) for number in range(len(frames) + 1)]  # whole milliseconds, which do not drift
    first, *others = map(_pixels, frames)
    exif = Image.Exif()
    exif[DESCRIPTION] = f"{TOLD}:{texts[TOLD]}"
    exif.get_ifd(INNER)[COMMENT] = UNICODE + texts[PARAMETERS].encode("utf-16-be", "replace")
    fast = {"lossless": True, "quality": 0, "method": 0}
    with written_whole(path) as temporary:
        lengths = [end - start for start, end in pairwise(ends)]
        more = {"save_all": True, "append_images": others, "duration": lengths, "loop": 0, "exif": exif.tobytes()}
        first.save(temporary, format="WEBP", **fast, **more)


def _pixels(image: Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().to(torch.uint8).numpy())


def texts_in(image: Image.Image) -> dict[str, str]:
    """Read the texts that a sample's file was written with."""
    if image.format == "PNG":
        return {name: str(image.info[name]) for name in (PARAMETERS, TOLD) if name in image.info}
    exif = image.getexif()
    told, comment = str(exif.get(DESCRIPTION, "")), exif.get_ifd(INNER).get(COMMENT, b"")
    found = {TOLD: told.removeprefix(f"{TOLD}:")} if told.startswith(f"{TOLD}:") else {}
    if isinstance(comment, bytes) and comment.startswith(UNICODE):
        found[PARAMETERS] = comment.removeprefix(UNICODE).decode("utf-16-be", "replace")
    return found


def _written(texts: Mapping[str, str]) -> PngInfo:
    """Write texts for a PNG file; half characters become question marks."""
    written = PngInfo()
    for name, text in texts.items():
        written.add_text(name, text.encode(errors="replace").decode())
    return written


def put_preview(run: Run, lora: Path, picture: Path) -> None:
    """Put a sample beside a LoRA file, as `<name>.png`, where model browsers look for it; report a failure.

    Of a clip its first frame. A picture of another run, or of somebody else, stays.
    """
    path, key = lora.with_suffix(".png"), run.folder.keys.run
    try:
        others = {each.name.removeprefix(lora.stem) for each in lora.parent.glob(f"{glob.escape(lora.stem)}.*")}
        if others & PREVIEWS - {".png"} or (path.exists() and _run_of_preview(path) != key):
            return
        with Image.open(picture) as sample, written_whole(path) as temporary:
            texts = {RUN_OF_PREVIEW: key, **texts_in(sample)}
            sample.save(temporary, format="PNG", pnginfo=_written(texts))
    except DECODER_ERRORS as error:
        run.callbacks.note(f"The LoRA has no preview picture: {describe_disk_error(error, path.parent)}")


def _run_of_preview(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info.get(RUN_OF_PREVIEW, ""))


def are_pictures(paths: Sequence[Path]) -> bool:
    """Tell whether all files exist and can be decoded."""
    try:
        for path in paths:
            _frames(path)
    except DECODER_ERRORS:
        return False
    return True


def read_pictures(paths: Sequence[Path]) -> Tensor:
    """Read samples as (N, H, W, 3) in 0..1, clips with all frames; OSError or ValueError for damaged ones.

    Smaller pictures get black edges, alike on both sides, up to the largest width and height. Where all frames are more
    than MOST_NUMBERS, a clip gives its first one.
    """
    whole = sum(map(_numbers, paths)) <= MOST_NUMBERS
    pictures = [frame for path in paths for frame in _frames(path)[: None if whole else 1]]
    height, width = (max(picture.shape[side] for picture in pictures) for side in (0, 1))
    sheet = torch.zeros(len(pictures), height, width, 3)
    for page, picture in zip(sheet, pictures, strict=True):
        top, left = (height - picture.shape[0]) // 2, (width - picture.shape[1]) // 2
        page[top : top + picture.shape[0], left : left + picture.shape[1]] = torch.from_numpy(picture).float() / 255
    return sheet


def _numbers(path: Path) -> int:
    """Count the numbers of a sample's frames."""
    name = sample_name(path.name)
    with Image.open(path, formats=FORMATS) as image:
        return image.width * image.height * 3 * (name.frames if name else 1)


def _frames(path: Path) -> list[np.ndarray[Any, Any]]:
    """Read a file's frames (H, W, 3), as many as its name tells; those that it keeps as one are several again."""
    name = sample_name(path.name)
    count = name.frames if name else 1
    with Image.open(path, formats=FORMATS) as image:
        kept, lengths = [], []
        for number in range(min(count, getattr(image, "n_frames", 1))):
            image.seek(number)
            kept.append(np.array(image.convert("RGB")))
            lengths.append(image.info.get("duration", 0) or 1)
    ends = list(accumulate(lengths))
    middles = ((number + 0.5) * ends[-1] / count for number in range(count))
    return [kept[bisect.bisect(ends, middle)] for middle in middles]
