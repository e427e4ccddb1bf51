"""A control picture is cut as its picture, or shown whole; it is mirrored with it, and the plan says so in advance."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scan_folder import draw, read

from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    CaptionConfig,
    ConceptConfig,
    ConnectedConfig,
    ControlConfig,
    DatasetConfig,
    RunConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.data.cache import reference_key, text_key
from lora_atelier.trainer_core.data.controls import same_shape, whole_crop
from lora_atelier.trainer_core.data.crops import fit
from lora_atelier.trainer_core.data.images import cut
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.preflight.preview import render_preview
from lora_atelier.trainer_core.preflight.report import report
from lora_atelier.trainer_core.runs import build_keys

TRAIN = TrainConfig(epochs=4, resolution=64, seed=3, bucket_step=16)


def planned(tmp_path: Path, size=(96, 64), control=(96, 64), fit="as_picture", **options):
    """Plan two pictures; the first has a gradient, so that every crop of it differs."""
    for folder, sides in (("pictures", size), ("before", control)):
        for name, caption in (("a", "a cat"), ("b", "a dog")):
            draw(tmp_path / folder / f"{name}.png", size=sides, caption=caption)
        ramp = np.linspace(0, 255, sides[0], dtype=np.uint8)[None].repeat(sides[1], 0)
        Image.fromarray(np.stack([ramp] * 3, -1)).save(tmp_path / folder / "a.png")
    config = ControlConfig(folders=(str(tmp_path / "before"),), fit=fit)
    concept = ConceptConfig(folder=str(tmp_path / "pictures"), controls=config, **options)
    manifest = read(tmp_path / "pictures", controls=config, **options)
    return build_plan(manifest, DatasetConfig(concepts=(concept,)), TRAIN)


@pytest.mark.parametrize("control", [(96, 64), (192, 128), (48, 32)])
def test_a_control_picture_is_cut_as_its_picture_at_any_size(tmp_path: Path, control) -> None:
    augment = AugmentConfig(variants=3, crop_jitter=1.0, zoom=0.5, rotation=10, brightness=0.3)
    plan = planned(tmp_path, control=control, flip=True, augment=augment)
    crops = sorted(((i, crop) for i, crop, _ in plan.views() if i == 0), key=repr)
    assert {crop.flip for _, crop in crops} == {True, False} and len(crops) > 3
    picture, other = (Image.open(tmp_path / folder / "a.png").convert("RGB") for folder in ("pictures", "before"))
    for i, crop in crops:
        (reference,) = plan.references(i, crop)
        assert reference.crop == crop
        pixels = [np.asarray(cut(image, crop), np.int16) for image in (picture, other)]
        assert np.abs(pixels[0] - pixels[1]).max() <= (0 if control == (96, 64) else 12)


def test_a_whole_control_picture_keeps_its_shape_and_is_mirrored_with_its_picture(tmp_path: Path) -> None:
    plan = planned(tmp_path, control=(40, 160), fit="whole", flip=True)
    for i, crop, _ in plan.views():
        (reference,) = plan.references(i, crop)
        width, height = reference.crop.bucket
        assert (width % 16, height % 16, reference.crop.flip) == (0, 0, crop.flip)
        assert (width, height) == (32, 128) and crop.bucket != reference.crop.bucket


def test_a_picture_of_the_buckets_shape_gets_the_bucket() -> None:
    draws = random.Random(1)
    for _ in range(200):
        bucket = (16 * draws.randint(2, 90), 16 * draws.randint(2, 90))
        scale = draws.randint(1, 5)
        size = (bucket[0] * scale, bucket[1] * scale)
        assert whole_crop(size, bucket, 16) == fit(size, bucket)


def test_shapes_are_the_same_up_to_a_pixel_of_rounding() -> None:
    assert same_shape((1000, 667), (500, 334)) and same_shape((500, 334), (1000, 667))
    assert same_shape((1000, 667), (3000, 2001)) and not same_shape((1000, 667), (500, 336))
    assert not same_shape((512, 512), (512, 520))


def test_without_control_pictures_there_are_no_references(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    plain = build_plan(
        read(tmp_path / "pictures"), DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path / "pictures")),)), TRAIN
    )
    assert {plain.references(i, crop) for i, crop, _ in plain.views()} == {()}
    assert plan.views() == plain.views()  # the same buckets, orders and crops
    assert [plan.step(k) for k in range(plan.steps)] == [plain.step(k) for k in range(plain.steps)]


def test_captions_of_pictures_with_control_pictures_are_told_apart(tmp_path: Path) -> None:
    plan = planned(tmp_path, captions=CaptionConfig(source="file_name"))
    assert plan.captions() == {"a", "b"} and plan.captions(alone=True) == set()


def test_the_report_and_the_sheet_show_them(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert "controls" in report(plan)
    sheet = np.asarray(render_preview(plan, columns=1))
    bare = dataclasses.replace(plan.manifest.pictures[0], controls=())
    plan.manifest = dataclasses.replace(plan.manifest, pictures=(bare, plan.manifest.pictures[1]))
    other = np.asarray(render_preview(plan, columns=1))
    changed = np.argwhere((sheet != other).any(-1))
    assert len(changed) and changed[:, 0].max() < sheet.shape[0] // 2  # of the first cell alone


def test_the_run_key_counts_how_they_are_cut_and_not_where_they_lie() -> None:
    def key(controls: ControlConfig | None, **connected: Any) -> str:
        base = BaseModelConfig(path="flux", connected=ConnectedConfig(**connected))
        dataset = DatasetConfig(concepts=(ConceptConfig(folder="/a", controls=controls),))
        return build_keys(RunConfig(base_model=base, dataset=dataset), {}, "").run

    before = ControlConfig(folders=("/before",))
    assert key(before) == key(ControlConfig(folders=("/moved",)))
    assert len({key(None), key(before), key(before.replace(fit="whole")), key(before, edit_text="single")}) == 4


def test_the_keys_in_the_cache_tell_all_apart() -> None:
    base = {"picture_digest": "d", "crop": fit((64, 64), (32, 32)), "background": "white", "vae_id": "v"}
    changes = {"picture_digest": "e", "crop": fit((64, 64), (32, 48)), "background": "black", "vae_id": "w"}
    keys = {reference_key(**base), *(reference_key(**{**base, name: value}) for name, value in changes.items())}
    assert len(keys) == 5
    assert text_key(caption="a", encoder_id="x") != text_key(caption="a", encoder_id="x", pictures=[["d"]])
