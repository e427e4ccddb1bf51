"""What the tests of nodes in a real ComfyUI share; what hands them out needs no library that computes."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from zlib import crc32

import pytest

from comfy_client import ComfyServer

# Runs that go the same way in the oldest ComfyUI: test_train.py trains there, and remembers, in every run, and the zoo
# trains there on linked models.
ON_THE_NEWEST = (
    "test_a_failure_is_known_until_its_workflow_is_queued_again",
    "test_a_lora_is_trained_on_the_model_and_draws_as_its_file",
    "test_a_run_does_what_it_is_asked_and_resumes_when_queued_again",
    "test_each_line_of_prompts_draws_its_own_picture",
    "test_the_lora_goes_into_the_chosen_folder_and_not_out_of_it",
    "test_what_is_left_open_is_what_was_trained",
)


def pytest_itemcollected(item: pytest.Function) -> None:
    """Leave what the oldest ComfyUI proves again to --thorough."""
    if item.originalname in ON_THE_NEWEST and item.callspec.params["any_server"] == "oldest":
        item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def comfy_modules(comfyui: Path) -> Iterator[ModuleType]:
    """Make ComfyUI's modules importable in this process, on the CPU where there is no CUDA device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(comfyui)
        import comfy.cli_args
        import torch

        comfy.cli_args.args.cpu = not torch.cuda.is_available()
        import comfy.sd

        yield comfy


@pytest.fixture
def pictures(server: ComfyServer, tmp_path: Path) -> Iterator[Path]:
    """Return a folder of pictures inside ComfyUI's input folder, one of them like no other test's.

    A run of other pictures is another run: no test resumes or reuses one of a test before it on the same server.
    """
    from PIL import Image
    from train_graph import draw_pictures

    folder = draw_pictures(server.base / "input" / tmp_path.name)
    with Image.open(folder / "0.png") as picture:
        picture.putpixel((0, 0), tuple(crc32(tmp_path.name.encode()).to_bytes(4)[1:]))
        picture.save(folder / "0.png")
    yield folder
    shutil.rmtree(folder)
