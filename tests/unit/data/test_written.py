"""Where captions and masks belong that a model of the graph writes, and what is never written over."""

from pathlib import Path

import pytest
from PIL import Image

from lora_atelier.trainer_core.common.access import ANYWHERE
from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig
from lora_atelier.trainer_core.data.scan import Index
from lora_atelier.trainer_core.data.written import WrittenFile, pictures_to_see, put_text, texts_of


def found_in(folder: Path, **concept: object) -> list[WrittenFile]:
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **concept),))
    with Index(None) as index:
        return texts_of(dataset, pictures_to_see(dataset, index, Callbacks(), ANYWHERE), ANYWHERE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (64, 64), (20, 90, 160)).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize("ending", [".png", ".PNG", ".json", ".safetensors"])
def test_no_caption_is_written_over_what_is_no_text(folder: Path, ending: str) -> None:
    with pytest.raises(ValueError, match=r"is no plain text, so no caption .* to \.txt\.$"):
        found_in(folder, captions=CaptionConfig(extensions=(ending,)))
    assert [file.path.name for file in found_in(folder, captions=CaptionConfig(extensions=(".tags",)))] == ["a.tags"]


def test_a_caption_is_written_in_the_encoding_in_which_it_is_read(folder: Path) -> None:
    (folder / "a.txt").write_bytes("Café.".encode("cp1252"))
    (file,) = found_in(folder, captions=CaptionConfig(encoding="cp1252"))
    put_text(file, "Grün", "append")
    assert (folder / "a.txt").read_bytes() == "Café. Grün\n".encode("cp1252")
    with pytest.raises(ValueError, match="cannot be written as cp1252; set"):
        put_text(file, "猫", "replace")
    assert (folder / "a.txt").read_bytes() == "Café. Grün\n".encode("cp1252")


@pytest.mark.parametrize(
    ("mask", "masks"),
    [("a_mask.png", MaskConfig(suffixes=("_mask.png",))), ("masks/a.png", MaskConfig(folder="masks"))],
)
def test_a_mask_gets_no_caption_and_is_not_read(folder: Path, mask: str, masks: MaskConfig) -> None:
    (folder / mask).parent.mkdir(exist_ok=True)
    Image.new("L", (64, 64), 255).save(folder / mask)
    Image.new("RGB", (64, 64), (90, 20, 160)).save(folder / "unmasked.png")
    found = found_in(folder, masks=masks, recursive=True)
    assert [file.path.name for file in found] == ["a.txt", "unmasked.txt"]
