"""Write pictures, captions and masks to a folder, and scan it."""

from pathlib import Path
from typing import Any

from PIL import Image

from lora_atelier.trainer_core.config import ConceptConfig, DatasetConfig
from lora_atelier.trainer_core.data.scan import Manifest, scan


def draw(
    path: Path, colour: Any = (200, 30, 40), size: tuple[int, int] = (24, 16), caption: str | None = "a cat"
) -> Path:
    """Write a picture and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def read(folder: Path | str, **options: Any) -> Manifest:
    return scan(DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **options),)))


def mask(path: Path, value: int = 255, size: tuple[int, int] = (24, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path)


def table_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    draw(folder / "a.png", (1, 0, 0), caption=None)
    draw(folder / "sub" / "b.png", (2, 0, 0), caption=None)
    return folder


def masked_folder(folder: Path) -> Path:
    """Write four pictures in two folders, with captions and masks."""
    for i, name in enumerate(("1", "2", "sub/3", "sub/4")):
        draw(folder / f"{name}.png", (i, 0, 0), size=(96, 64))
        mask(folder / f"{name}-masklabel.png", 50 + i, size=(96, 64))
    return folder
