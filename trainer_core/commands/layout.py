"""Where a run without a page puts its files: where the page does, so that each finds the other's runs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

RUNS = ("atelier", "runs")  # in ComfyUI's output folder


class Layout(NamedTuple):
    """The folders that a run writes to."""

    runs: Path
    logs: Path
    loras: Path
    embeddings: Path
    cache: Path  # of encoded pictures and captions


def layout(output: Path | None, comfyui: Path | None, run: Path) -> Layout:
    """Choose the folders: those of ComfyUI, or of an output folder of the same inner form.

    output: as asked for; by default where the run's folder lies, then ComfyUI's, then ./output. comfyui: its folder.
    run: the run's folder or file.
    """
    own = run.absolute().parent if run.is_dir() else None  # a run's folder is continued where it lies
    if output is None and own is not None and own.parts[-2:] == RUNS:
        output = own.parents[1]
    usual = comfyui / "output" if comfyui else Path("output")
    chosen = (output or usual).absolute()
    atelier = chosen / "atelier"
    runs = own if own is not None and output is None else atelier / "runs"
    cache = comfyui / "user" / "__atelier" / "cache" if comfyui else atelier / "cache"
    if comfyui and chosen.resolve() == usual.resolve():
        models = comfyui / "models"
        return Layout(runs, atelier / "logs", models / "loras", models / "embeddings" / "atelier", cache)
    return Layout(runs, atelier / "logs", chosen / "loras", chosen / "embeddings" / "atelier", cache)
