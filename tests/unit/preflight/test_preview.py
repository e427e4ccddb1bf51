"""The preview shows what is trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from films import film, grey
from PIL import Image, ImageChops

from lora_atelier.trainer_core.config import (
    CaptionConfig,
    ClipConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.films import load_shown
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.data.plan import Plan, build_plan
from lora_atelier.trainer_core.data.scan import scan
from lora_atelier.trainer_core.preflight.preview import _shorten, render_preview


def prepare(folder: Path, sizes: list[tuple[int, int]], masked: bool = False, **options) -> tuple[Plan, DatasetConfig]:
    """Plan a run over random pictures at 128 pixels."""
    folder.mkdir(exist_ok=True)
    for i, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"picture number {i}, " + "a long caption " * (i * 5))
        if masked:
            Image.new("L", (width, height), 0).save(folder / f"{i}-masklabel.png")
    concept = ConceptConfig(folder=str(folder), masks=MaskConfig() if masked else None, **options)
    dataset = DatasetConfig(concepts=(concept,))
    return build_plan(scan(dataset), dataset, TrainConfig(resolution=128, bucket_step=32, steps=4)), dataset


def contains(sheet: Image.Image, part: Image.Image) -> bool:
    """Tell whether a picture lies somewhere on the sheet, pixel by pixel."""
    whole, small = np.asarray(sheet), np.asarray(part)
    rows = np.lib.stride_tricks.sliding_window_view(whole, (1, small.shape[1], 3))[:, :, 0, 0]
    places = np.argwhere((rows == small[0]).all(axis=(2, 3)))
    return any(np.array_equal(whole[y : y + small.shape[0], x : x + small.shape[1]], small) for y, x in places)


@pytest.mark.parametrize("flip", [False, True])
def test_the_pixels_on_the_sheet_are_the_trained_ones(tmp_path: Path, flip: bool) -> None:
    plan, _ = prepare(tmp_path, [(200, 190), (128, 128)], flip=flip)
    sheet = render_preview(plan, tile=128)
    for i, picture in enumerate(plan.manifest.pictures):
        assert contains(sheet, cut(load_picture(picture.path), plan.sample(i, 0).crop))


def test_a_clip_is_shown_by_frames_of_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(film(12))
    (tmp_path / "a.txt").write_text("a film")
    concept = ConceptConfig(folder=str(tmp_path), min_side=16, clips=ClipConfig(frames=(9,), rate=0, step=4))
    dataset = DatasetConfig(concepts=(concept,))
    plan = build_plan(scan(dataset), dataset, TrainConfig(resolution=64, bucket_step=16, steps=2))
    sheet = np.asarray(render_preview(plan, tile=192).convert("L"), dtype=int)
    for number in (0, 4, 8):
        assert (abs(sheet - grey(number)) < 2).sum() > 400, number
    (page,) = load_shown(tmp_path / "a.mp4", ())
    assert abs(np.asarray(page, dtype=int) - grey(0)).max() < 4


def test_the_mask_of_each_shown_frame_is_laid_over_it(tmp_path: Path) -> None:
    def right_half(number: int) -> np.ndarray:
        levels = np.full((48, 64, 3), 255, np.uint8)
        levels[:, 32:] = 0 if number == 4 else 255
        return levels

    (tmp_path / "a.mp4").write_bytes(film(9))
    (tmp_path / "a-masklabel.mkv").write_bytes(film(9, format="matroska", codec="ffv1", pixels="bgr0", draw=right_half))
    (tmp_path / "a.txt").write_text("a film")
    masks = MaskConfig(unmasked_probability=0.0)
    concept = ConceptConfig(
        folder=str(tmp_path), min_side=16, clips=ClipConfig(frames=(9,), rate=0, step=4), masks=masks
    )
    dataset = DatasetConfig(concepts=(concept,))
    plan = build_plan(scan(dataset), dataset, TrainConfig(resolution=64, bucket_step=16, steps=2))
    sheet = np.asarray(render_preview(plan, tile=192), dtype=int)
    across = np.flatnonzero((sheet[..., 0] - sheet[..., 1] > 40).sum(0) > 10)  # where red lies in more than a line
    across = across[across > 80]  # beside the outline of the cut in the thumbnail
    assert len(across) in range(28, 36) and across[-1] - across[0] == len(across) - 1, across


def test_masks_are_laid_over(tmp_path: Path) -> None:
    plan, dataset = prepare(tmp_path, [(128, 128)], masked=True)
    bare = dataset.replace(concepts=(dataset.concepts[0].replace(masks=None),))
    unmasked = build_plan(scan(bare), bare, plan.train)
    difference = ImageChops.difference(render_preview(plan), render_preview(unmasked))
    assert difference.getbbox() is not None


def test_the_grid_holds_at_most_the_limit_in_at_most_the_columns(tmp_path: Path) -> None:
    plan, _ = prepare(tmp_path, [(64, 64)] * 5, min_side=1)
    one = render_preview(plan, limit=1)
    wide = render_preview(plan, columns=4, limit=4)
    grid = render_preview(plan, columns=4)
    assert one.mode == "RGB"
    assert wide.height == one.height
    assert one.width < wide.width == grid.width
    assert grid.height > wide.height


def test_odd_pictures_and_captions_are_shown(tmp_path: Path) -> None:
    odd = CaptionConfig(prefix="猫 ünïcode " + "x" * 300)
    plan, _ = prepare(tmp_path, [(1, 3000), (3000, 1), (1, 1)], captions=odd, min_side=1)
    assert render_preview(plan, tile=10).size[0] > 0
    plan, _ = prepare(tmp_path / "more", [(40, 40)], captions=CaptionConfig(dropout=1.0))
    assert render_preview(plan, columns=1).size[1] > 0


def test_a_long_word_is_cut_without_measuring_it_again_and_again() -> None:
    class Font:
        measured = 0

        def getlength(self, text: str) -> float:
            self.measured += len(text)
            return 7.0 * len(text)

    font: Any = Font()
    assert _shorten("x" * 100_000, font, 70) == "x" * 7 + "..."
    assert _shorten("x" * 10, font, 70) == "x" * 10
    assert font.measured < 10_000
