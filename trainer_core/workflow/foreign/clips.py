"""Read what other trainers say of clips, and of the two experts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...common.wording import say
from ...config import OPEN_RATE
from ...config import setting as named
from ...config.clips import MOST_TAKEN
from .imported import Given, Imported, listing, number, on, real, whole

HIGH = "diffusion_model_high"  # the role of the expert for high noise
VISION = "clip_vision"  # the role of what a model sees first frames by
SEEING = {"wan": ("i2v-14B", "clip"), "hunyuan_video_15": ("i2v", "image_encoder")}  # of musubi-tuner: task, its file
TAKES = ("head", "chunk", "slide", "uniform", "full")
MUSUBI = {"target_frames": [1], "frame_extraction": "head", "frame_stride": 1, "frame_sample": 1, "max_frames": 129}


def frames_of(value: Any) -> list[int]:
    """Read numbers of frames, as a list or separated by commas; those of single pictures are none."""
    given = value.split(",") if isinstance(value, str) else listing(value)
    return sorted({min(MOST_TAKEN, each) for each in map(whole, given) if each > 1})


def musubi_clips(found: Imported, values: Mapping[str, Any]) -> dict[str, Any]:
    """Read how musubi-tuner takes clips of a dataset. Source: its dataset/config_utils.py, VideoDatasetParams."""
    given = Given(values, MUSUBI)
    taken = str(given.take("frame_extraction"))
    if taken not in TAKES:
        found.unreadable("frame_extraction", taken)
        taken = "head"
    frames = frames_of(given.take("target_frames"))
    clips: dict[str, Any] = {"frames": frames or [1], "take": taken}
    clips["rate"] = OPEN_RATE if given.take("source_fps") else 0.0  # without it, every frame is used there
    if taken == "slide":
        clips["slide_frames"] = max(1, whole(given.take("frame_stride")))
    if taken == "uniform":
        clips["parts"] = max(1, whole(given.take("frame_sample")))
    if taken == "full":
        clips["most_frames"] = min(MOST_TAKEN, max(1, whole(given.take("max_frames"))))
    if len(frames) > 1 and taken != "full":
        said = say(
            "musubi-tuner trains each video at every number of target_frames; here each clip gets the most of {0}.",
            named("clips.frames"),
        )
        if said not in found.open:
            found.open.append(said)
    return clips


def ai_toolkit_clips(found: Imported, given: Given) -> dict[str, Any]:
    """Read how ai-toolkit takes clips of a dataset; {} for pictures. Source: its load_and_process_video, and
    DatasetConfig of its config_modules.py.
    """
    frames, rate = whole(number(found, given, "num_frames") or 1), number(found, given, "fps") or 24.0
    rate = min(240.0, max(1.0, rate))
    # Of models that draw from captions or from a picture, it trains the second alone.
    clips: dict[str, Any] = {"first_frame": 1.0} if on(given.take("do_i2v")) else {}
    if on(given.take("auto_frame_count")):
        return clips | {"take": "full", "rate": rate, "most_frames": MOST_TAKEN}
    if frames < 2:
        return {}
    clips |= {"frames": frames_of(frames)}
    squeezed = str(given.take("shrink_video_to_frames")).lower() not in ("false", "0", "no")
    if squeezed:
        said = say(
            "ai-toolkit spreads num_frames over each whole video; here frames keep {0}. Cut videos to the length that "
            "is trained.",
            named("clips.rate"),
        )
    else:
        clips |= {"rate": rate, "take": "chunk"}
        said = say("ai-toolkit draws the first frame anew at each visit; here the parts of each clip take turns.")
    if said not in found.open:
        found.open.append(said)
    return clips


def put_experts(found: Imported, *, high: bool, low: bool, path: str = "") -> None:
    """Set which experts of a model of two files are trained; path: the file of the one for high noise."""
    if high and low:
        found.models[HIGH] = path
    else:
        found.put("base_model.connected.noise_range", "high" if high else "low")


def put_vision(found: Imported, given: Given, family: str) -> None:
    """Name the file by which a model sees first frames in musubi-tuner; its caching may have been the one told."""
    task, name = SEEING.get(family, ("", ""))
    if not task or str(given.take("task")) != task:
        return
    found.models[VISION] = str(given.take(name) or "")
    if not found.models[VISION]:
        found.open.append(
            say("musubi-tuner shows this model first frames by CLIP vision; choose its file in the last loader.")
        )


def put_boundary(found: Imported, value: Any) -> None:
    """Set where the noise of the high expert begins, which is a share of all timesteps or one of a thousand."""
    boundary = real(value)
    boundary = boundary / 1000 if boundary > 1 else boundary
    if 0.01 <= boundary <= 0.99:
        found.put("base_model.connected.boundary", boundary)
    else:
        found.unreadable("timestep_boundary", value)
