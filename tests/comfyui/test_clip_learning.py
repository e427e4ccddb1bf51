"""The tiny clip model moves figures as its captions say, and a LoRA teaches it a motion that it does not know."""

from pathlib import Path
from types import ModuleType

import concept  # noqa: F401 - puts assets/ on the path
import numpy as np
import pytest
import torch

from lora_atelier.dev import TINY_CLIP

# Of a hop, in sides of the picture; the clips to learn hop by 0.2 and more, by 0.17 after the autoencoder.
LEAST, LEAST_MEAN, MOST_BEFORE = 0.06, 0.1, 0.05
STRAIGHT = {
    f"a {colour} {shape} on a {ground} background {said}": motion
    for (colour, shape, ground), (motion, said) in zip(
        (("red", "creature", "white"), ("blue", "circle", "yellow"), ("green", "creature", "pink"),
         ("yellow", "square", "blue"), ("black", "heart", "white"), ("white", "creature", "purple")),
        (("left", "drifts left"), ("right", "marches right"), ("up", "rises up"),
         ("down", "falls down"), ("grows", "grows large"), ("shrinks", "gets small")),
        strict=True,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def demo(comfy_modules: ModuleType, comfyui: Path) -> ModuleType:
    """Give the demo's module, on ComfyUI as the other tests use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMFYUI_PATH", str(comfyui))
        import clip_demo
    return clip_demo


@pytest.fixture(scope="module")
def loaded(demo: ModuleType):
    """Give MODEL and VAE of the clip model, and CLIP of the tiny base, by ComfyUI's own loaders."""
    return demo.from_comfyui.load(TINY_CLIP)


def test_the_score_tells_a_hop_from_all_other_motions() -> None:
    import moving

    for index in range(4):
        assert moving.read_motion(moving.hop(1, index)[0]) == moving.HOPS
        for motion in moving.MOTIONS:
            frames, _ = moving.draw(motion, 1, index)
            assert moving.hop_score(frames) < MOST_BEFORE / 2
            assert moving.read_motion(frames) == ("stands" if motion == "turns" else motion)


def test_the_autoencoder_keeps_the_motion(demo: ModuleType, loaded) -> None:
    import moving

    assert TINY_CLIP.stat().st_size < 6_000_000
    frames, _ = moving.hop(1, 0)
    with torch.inference_mode():
        latent = loaded.vae.encode(torch.from_numpy(frames).float() / 255)
        decoded = (loaded.vae.decode(latent)[0].clamp(0, 1).numpy() * 255).round().astype(np.uint8)
    assert latent.shape == (1, 16, 3, 8, 8) and decoded.shape == frames.shape
    assert moving.read_motion(decoded) == moving.HOPS
    assert moving.hop_score(decoded) > 0.5 * moving.hop_score(frames)


# In every run a few steps move the frames; with all of them the figures hop.
@pytest.mark.parametrize("steps", [6, pytest.param(None, marks=pytest.mark.thorough)])
def test_a_lora_teaches_a_hop(
    demo: ModuleType, loaded, steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dev.py demo --clip`, and with fewer steps and clips."""
    prompts = demo.HOPS if steps is None else demo.HOPS[:1]
    if steps is not None:
        monkeypatch.setitem(demo.DRAWN, "steps", 4)
    before = demo.draw(loaded, loaded.model, prompts)
    after = demo.draw(loaded, demo.learn(loaded, tmp_path, steps or demo.STEPS, 4 if steps else demo.CLIPS), prompts)
    assert before.shape == after.shape and not np.array_equal(before, after)
    assert max(demo.scores(before)) < MOST_BEFORE, demo.scores(before)
    if steps is None:
        found = demo.scores(after)
        assert min(found) > LEAST and sum(found) / len(found) > LEAST_MEAN, found


@pytest.mark.thorough
def test_a_caption_decides_the_motion(demo: ModuleType, loaded) -> None:
    import moving

    found = [moving.read_motion(frames) for frames in demo.draw(loaded, loaded.model, tuple(STRAIGHT))]
    assert sum(a == b for a, b in zip(found, STRAIGHT.values(), strict=True)) >= 5, found
