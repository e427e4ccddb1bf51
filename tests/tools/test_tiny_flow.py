"""The tiny flow-matching model: small enough, loaded by ComfyUI's own loaders, and able to follow a caption."""

import json
import os
import subprocess
import sys
from pathlib import Path

import concept
import numpy as np
import pytest
import torch
from reading import read_picture
from safetensors import safe_open

from lora_atelier.dev import NEWEST, OLDEST, TINY_FLOW, comfyui_folder

WANTED = [("circle", "red", "blue"), ("square", "yellow", "purple"), ("heart", "pink", "green"),
          ("ring", "white", "red"), ("cross", "black", "orange"), ("star", "blue", "white")]  # fmt: skip
PROMPTS = [f"a {colour} {shape} on a {ground} background" for shape, colour, ground in WANTED]


def draw(version: str, folder: Path, prompts: list[str]) -> tuple[dict, np.ndarray]:
    """Draw with a ComfyUI version in a process of its own: what it found, and the pictures (N, 128, 128, 3) uint8."""
    output = folder / "pictures.npy"
    command = [sys.executable, concept.ASSETS / "from_comfyui.py", output, *prompts, "--steps", "12"]
    env = {**os.environ, "COMFYUI_PATH": str(comfyui_folder(version))}
    said = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said.splitlines()[-1]), np.load(output)


def right(pictures: np.ndarray) -> int:
    """Count the shapes, colours and grounds that are as WANTED."""
    read = [read_picture(picture) for picture in pictures]
    return sum(a == b for got, wanted in zip(read, WANTED, strict=True) for a, b in zip(got, wanted, strict=True))


def test_the_file_is_small_and_float16() -> None:
    assert TINY_FLOW.stat().st_size <= 20_000_000
    with safe_open(TINY_FLOW, "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys() if "vae_s" not in name}  # noqa: SIM118
    assert kinds == {"F16"}


# In every run the demo of test_flow_learning.py loads it, and the zoo shows that both versions know such models.
@pytest.mark.thorough
@pytest.mark.parametrize("version", [NEWEST, OLDEST])
def test_comfyui_loads_it_as_flux_and_it_follows_captions_but_does_not_know_the_motif(
    version: str, tmp_path: Path
) -> None:
    found, pictures = draw(version, tmp_path, [*PROMPTS, "a mossling on a blue background", ""])
    assert found == {"model": "Flux", "channels": 16}
    assert right(pictures[: len(WANTED)]) >= 0.8 * 3 * len(WANTED)
    assert concept.motif_score(torch.from_numpy(pictures[len(WANTED) :]) / 255).max() < 0.0
