"""The tiny base model: small enough, drawn from deterministic pictures, and able to follow a caption."""

from pathlib import Path

import concept  # puts assets/ on the path, where the other two lie
import draw_concept
import drawing
import numpy as np
import pytest
import torch
from reading import nearest_colour, read_picture

from lora_atelier.trainer_core.config import BaseModelConfig, SampleConfig
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.training.sample import sample_images

MODEL = concept.ASSETS / "atelier-tiny.safetensors"
PROMPT = "a red circle on a blue background"
SEEDS = 10


@pytest.fixture(scope="module")
def tiny_base(comfyui: Path):
    """Give the shipped model in memory."""
    tokenizer = str(comfyui / "comfy" / "sd1_tokenizer")
    return load_base_model(BaseModelConfig(path=str(MODEL), tokenizer=tokenizer))


def draw(base, prompts: tuple[str, ...], cfg: float) -> np.ndarray:
    """Sample one picture per prompt, (N, 128, 128, 3) uint8."""
    config = SampleConfig(prompts=prompts, width=128, height=128, steps=12, cfg=cfg, seed=0)
    pictures = torch.cat([image for _, image in sample_images(base, config)])
    return (pictures.numpy() * 255).round().astype(np.uint8)


def red_on_blue(picture: np.ndarray) -> bool:
    """Say whether the middle quarter's side is nearest to red and an outer frame of 1/16 nearest to blue."""
    middle = picture[48:80, 48:80].reshape(-1, 3)
    frame = picture.astype(float)
    frame[8:-8, 8:-8] = np.nan
    border = np.nanmedian(frame.reshape(-1, 3), axis=0)
    return nearest_colour(np.median(middle, axis=0)) == "red" and nearest_colour(border) == "blue"


def test_the_file_is_small_and_float16():
    from safetensors import safe_open

    assert MODEL.stat().st_size <= 20_000_000
    with safe_open(MODEL, "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys() if "vae_scale" not in name}  # noqa: SIM118
    assert kinds == {"F16"}


@pytest.mark.thorough  # in every run test_learning.py asks it, with a LoRA, for other figures and grounds
def test_a_caption_decides_figure_and_background(tiny_base):
    pictures = draw(tiny_base, (PROMPT,) * SEEDS, cfg=4.0)
    assert sum(map(red_on_blue, pictures)) >= 9


@pytest.mark.thorough
def test_guidance_raises_agreement_and_no_caption_differs(tiny_base):
    wanted = [("square", "yellow", "purple"), ("heart", "pink", "green"), ("ring", "white", "red"),
              ("cross", "black", "orange"), ("triangle", "green", "yellow"), ("star", "blue", "white")]  # fmt: skip
    prompts = tuple(f"a {colour} {shape} on a {ground} background" for shape, colour, ground in wanted)

    def right(cfg: float) -> int:
        pictures = draw(tiny_base, prompts, cfg)
        return sum(
            a == b for p, w in zip(pictures, wanted, strict=True) for a, b in zip(read_picture(p), w, strict=True)
        )

    guided, plain = right(4.0), right(1.0)
    assert guided >= plain and guided >= 0.75 * 3 * len(wanted)
    without = draw(tiny_base, ("",) * len(wanted), 1.0)
    assert sum(read_picture(p) == w for p, w in zip(without, wanted, strict=True)) <= 1


def test_pictures_are_a_function_of_seed_and_index():
    first, caption = drawing.picture(3, 5)
    again, same = drawing.picture(3, 5)
    other, _ = drawing.picture(3, 6)
    assert np.array_equal(np.asarray(first), np.asarray(again)) and caption == same
    assert not np.array_equal(np.asarray(first), np.asarray(other))
    assert np.array_equal(np.asarray(drawing.rich_picture(3, 5)), np.asarray(drawing.rich_picture(3, 5)))
    assert draw_concept.draw_picture(2)[0].tobytes() == draw_concept.draw_picture(2)[0].tobytes()


def test_held_out_combinations_are_never_drawn():
    """Look at every scene of a stretch of both training ranges; the rule itself is per figure."""
    held_out = set(drawing.held_out_combinations())
    assert 40 <= len(held_out) <= 60
    seen = set()
    for first in (0, 1_000_000):
        for index in range(first, first + 9_000):
            scene = drawing.scene_at(0, index)
            seen |= {(figure.shape, figure.colour, scene.ground) for figure in scene.figures}
    assert not seen & held_out
    everything = len(drawing.SHAPES) * len(drawing.COLOURS) * (len(drawing.COLOURS) - 1)
    assert len(seen) == everything - len(held_out)


def test_the_judges_are_right_about_true_pictures():
    examples = torch.stack([picture for picture in concept.load_pictures() if picture.shape[:2] == (128, 128)])
    scenes = torch.stack([torch.from_numpy(np.array(drawing.picture(0, index)[0])) for index in range(40)]) / 255
    assert concept.motif_score(examples).min() > 0.7 and concept.motif_score(scenes).max() < 0.0
    for index in range(60):
        scene = drawing.scene_at(0, index)
        plain = len(scene.figures) == 1 and not scene.ground_texture and scene.figures[0].texture == ""
        if plain and scene.figures[0].size != "small":
            figure = scene.figures[0]
            got = read_picture(np.asarray(drawing.draw(scene, 0, index)))
            assert got == (figure.shape, figure.colour, scene.ground)
