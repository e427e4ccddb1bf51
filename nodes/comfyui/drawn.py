"""Sets of pictures that a model draws of prompts, kept by content: what is there already is not drawn again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ...trainer_core.common.files import written_whole
from . import folders, kept, sampling
from .comparing import KEY, NAME, Column, GridRow, about_of, digest_of_base, draw_kept, file_of, read_kept

ALONE = Column("without LoRA", 0.0, "", dict)


def draw_set(
    drawing: sampling.Models, pictures: Sequence[tuple[str, GridRow]], progress: Callable[[float], None]
) -> tuple[Path, int]:
    """Draw captioned pictures into a folder of their own; return it, and how many were drawn.

    A picture that another set has is copied. Each is kept as soon as it is drawn, so that a Cancel loses none.
    """
    base, root = digest_of_base(drawing), folders.drawn_folder()
    abouts = [about_of(base, ALONE, row) for _, row in pictures]
    names = [f"{about[KEY]} {caption}" for about, (caption, _) in zip(abouts, pictures, strict=True)]
    folder = root / hashlib.sha256("\n".join(names).encode()).hexdigest()[:NAME]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = 0
    for done, (about, (caption, row)) in enumerate(zip(abouts, pictures, strict=True), 1):
        path = folder / file_of(about)
        if read_kept(path, about) is None:
            known = (each for each in root.glob(f"*/{path.name}") if read_kept(each, about) is not None)
            if (other := next(known, None)) is not None:
                with written_whole(path) as new:
                    shutil.copyfile(other, new)
            else:
                draw_kept(drawing, row, path, about)
                drawn += 1
        if not (text := path.with_suffix(".txt")).is_file():
            with written_whole(text) as temporary:  # what a killed process has begun would count as whole
                temporary.write_text(caption, encoding="utf-8")
        progress(done / len(pictures))
    kept.mark_used([folder])
    kept.make_room()
    return folder, drawn
