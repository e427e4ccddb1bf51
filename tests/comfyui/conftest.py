"""What the tests of nodes in a real ComfyUI share."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_graph import draw_pictures

from comfy_client import ComfyServer


@pytest.fixture
def pictures(server: ComfyServer, tmp_path: Path) -> Iterator[Path]:
    """Return a folder of pictures inside ComfyUI's input folder."""
    folder = draw_pictures(server.base / "input" / tmp_path.name)
    yield folder
    shutil.rmtree(folder)
