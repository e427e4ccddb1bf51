"""Small models of random weights, built once, for tests that need a whole checkpoint."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_models import checkpoint_tensors

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Give the path of a whole random checkpoint."""
    path = tmp_path_factory.mktemp("models") / "random-tiny.safetensors"
    save_file(checkpoint_tensors(), path)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """Give a folder of six captioned pictures in two shapes, three of them with masks."""
    folder = tmp_path_factory.mktemp("pictures")
    noise = torch.Generator().manual_seed(7)
    for i in range(6):
        height = 64 + 32 * (i % 2)
        values = torch.randint(0, 256, (height, 64, 3), generator=noise, dtype=torch.uint8)
        Image.fromarray(values.numpy()).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"thing, number {i}", encoding="utf-8")
        if i < 3:
            Image.new("L", (64, height), 60 * (i + 1)).save(folder / f"{i}-masklabel.png")
    return folder
