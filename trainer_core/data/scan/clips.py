"""Choose which frames of each clip of a concept are trained, and say what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...common.wording import count, names
from ...config import ClipConfig, node, setting
from ..clips import Clip, clip_of, fate, is_short
from .folder import File
from .index import FileFacts
from .report import Report


def clips_among(folder: Path, facts: Mapping[File, FileFacts], report: Report) -> dict[str, Clip]:
    """Choose the frames of each clip, by its name; clips of a concept with control pictures are a problem."""
    found = {file.name: fact for file, fact in facts.items() if "rate" in fact}
    config = report.concept.clips
    if not found or config is None:
        return {}
    if report.concept.controls:
        some = count(found, "clip has", "clips have")
        sentence = f"{some} no control picture in {folder}: {names(found)}"
        report.problem(found, "a clip has no control picture", sentence, f"remove {node('controls')}")
        return {}
    return {name: clip_of(fact["frames"], fact["rate"], fact["times"], config) for name, fact in found.items()}


def tell_fates(folder: Path, clips: Mapping[str, Clip], facts: Mapping[File, FileFacts], report: Report) -> None:
    """Add what becomes of each clip to the report: short ones, cut ones, sound."""
    config = report.concept.clips
    if not clips or config is None:
        return
    report.outcomes |= {name: ("clip", fate(clip, config)) for name, clip in clips.items()}
    short = [f"{name} ({_frames(clip)})" for name, clip in clips.items() if is_short(clip, config)]
    if short:
        some = count(short, "clip has", "clips have")
        report.notes.append(
            f"{some} fewer frames than {_wanted(config)}, and as many of them are trained as the model takes: "
            f"{names(short)}. Set {setting('clips.frames')} lower to train all clips alike."
        )
    cut = [
        f"{name} ({len(clip.frames) - clip.unused} of {len(clip.frames)})"
        for name, clip in clips.items()
        if clip.unused and not is_short(clip, config)
    ]
    if cut:
        some = count(cut, "clip is", "clips are")
        report.notes.append(
            f"{some} longer than what is trained of them in {folder}, at {_rate(config)}: {names(cut)} frames. Set "
            f"{setting('clips.take')} to chunk to train all parts."
        )
    sound = [file.name for file, fact in facts.items() if fact.get("has_sound") and file.name in clips]
    if sound:
        some = count(sound, "clip has", "clips have")
        report.notes.append(f"{some} sound, which is not trained: {names(sound)}.")


def _frames(clip: Clip) -> str:
    return f"{clip.length} frames" if clip.length > 1 else "1, as a picture"


def _wanted(config: ClipConfig) -> str:
    return f"{min(config.frames)}"


def _rate(config: ClipConfig) -> str:
    return f"{config.rate:g} frames per second" if config.rate > 0 else "every frame of the files"
