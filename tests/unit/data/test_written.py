"""Where captions and masks belong that a model of the graph writes, and what is never written over."""

from pathlib import Path

import pytest
from PIL import Image

from lora_atelier.trainer_core.common.access import ANYWHERE
from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig
from lora_atelier.trainer_core.data.edits import Journal, Rewritten, content_of, fingerprint_of
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
    journal = Journal(folder / "journal")
    put_text(file, "Grün", "append", journal, [folder], "")
    assert (folder / "a.txt").read_bytes() == "Café. Grün\n".encode("cp1252")
    with pytest.raises(ValueError, match="cannot be written as cp1252; set"):
        put_text(file, "猫", "replace", journal, [folder], "")
    assert (folder / "a.txt").read_bytes() == "Café. Grün\n".encode("cp1252")


def test_what_a_job_wrote_is_undone_at_once_and_what_a_person_changed_between_stays(folder: Path) -> None:
    for name in "bc":
        Image.new("RGB", (64, 64), (20, ord(name), 160)).save(folder / f"{name}.png")
    (folder / "a.txt").write_text("mine", encoding="utf-8")
    files, journal, change = found_in(folder), Journal(folder / "journal"), ""
    for file in files[:2]:
        change = put_text(file, "a model's", "replace", journal, [folder], change)
    last = journal.last([folder])
    assert last and (last["what"], last["count"], last["number"]) == ("written", 2, change)
    journal.write([Rewritten(folder / "b.txt", b"a person's", fingerprint_of(b"a model's\n"))], "text", [folder])
    other = put_text(files[2], "a model's", "replace", journal, [folder], change)
    assert other > change  # the person's change is undone between
    with (folder / "journal" / f"{other}.jsonl").open("ab") as entry:
        entry.write(b'{"cut off')  # by a crash, before its file was changed
    for left in (b"a person's", b"a model's\n", None):
        last = journal.last([folder])
        assert last
        journal.undo([folder], last["number"], {})
        assert content_of(folder / "b.txt") == left
    assert (folder / "a.txt").read_text(encoding="utf-8") == "mine" and not (folder / "c.txt").exists()


def test_a_full_disk_changes_neither_a_text_nor_its_journal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (64, 64), (1, 2, 3)).save(folder / "b.png")
    first, second = found_in(folder)
    journal = Journal(folder / "journal")
    change = put_text(first, "one", "keep", journal, [folder], "")
    entry = folder / "journal" / f"{change}.jsonl"
    before = entry.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr("os.fsync", full)
        put_text(second, "two", "keep", journal, [folder], change)
    assert entry.read_bytes() == before and not second.path.exists()


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
