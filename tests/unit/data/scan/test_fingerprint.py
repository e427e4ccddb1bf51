"""Digest and fingerprint change with what is trained, and with nothing else."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scan_folder import draw, mask, masked_folder, read, table_folder

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, MaskConfig
from lora_atelier.trainer_core.data import scan as scan_module
from lora_atelier.trainer_core.data.scan import Index, fingerprint, manifest_digest, scan


def test_the_digest_is_of_content_not_of_names_and_times(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        draw(tmp_path / folder / "1.png")
        draw(tmp_path / folder / "2.png", (1, 2, 3))
    os.rename(tmp_path / "y" / "2.png", tmp_path / "y" / "3.png")
    os.rename(tmp_path / "y" / "2.txt", tmp_path / "y" / "3.txt")
    os.utime(tmp_path / "y" / "1.png", (5, 5))
    digest = manifest_digest(read(tmp_path / "x"))
    assert manifest_digest(read(tmp_path / "y")) == digest
    (tmp_path / "x" / "1.txt").write_text("another")
    assert manifest_digest(read(tmp_path / "x")) != digest
    draw(tmp_path / "y" / "1.png", (200, 30, 41))
    assert manifest_digest(read(tmp_path / "y")) != digest


def test_the_digest_counts_masks_and_concepts(tmp_path: Path) -> None:
    draw(tmp_path / "x" / "a.png")
    draw(tmp_path / "y" / "a.png")
    mask(tmp_path / "x" / "a-masklabel.png", 100)
    digests = {manifest_digest(read(tmp_path / "x", masks=masks)) for masks in (None, MaskConfig())}
    mask(tmp_path / "x" / "a-masklabel.png", 101)
    digests.add(manifest_digest(read(tmp_path / "x", masks=MaskConfig())))
    both = tuple(ConceptConfig(folder=str(tmp_path / name)) for name in "xy")
    digests.add(manifest_digest(scan(DatasetConfig(concepts=both))))
    assert len(digests) == 4


def test_the_fingerprint_changes_with_whatever_a_scan_reads(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "other.log").write_text("x")
    masks = MaskConfig(folder=str(tmp_path / "m"), missing="ones")
    concept = ConceptConfig(folder=str(tmp_path), masks=masks)

    def now() -> str:
        return fingerprint(DatasetConfig(concepts=(concept,)))

    seen = [now()]
    assert now() == seen[0]
    (tmp_path / "other.log").write_text("changed, but of no concern")
    assert now() == seen[0]
    os.utime(tmp_path / "a.png", (7, 7))  # only touched
    assert now() == seen[0]
    for change in (
        lambda: (tmp_path / "a.txt").write_text("a longer caption"),
        lambda: draw(tmp_path / "b.png"),
        lambda: os.rename(tmp_path / "b.png", tmp_path / "c.png"),
        lambda: mask(tmp_path / "m" / "a-masklabel.png"),
    ):
        change()
        seen.append(now())
    concept = concept.replace(repeats=2)
    seen.append(now())
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_of_a_missing_folder_is_no_error(tmp_path: Path) -> None:
    def now(folder: str) -> str:
        return fingerprint(DatasetConfig(concepts=(ConceptConfig(folder=folder),)))

    missing = now(str(tmp_path / "gone"))
    assert now("") != missing
    draw(tmp_path / "gone" / "a.png")
    assert now(str(tmp_path / "gone")) != missing


CHANGES: dict[str, Callable[[Path], object]] = {
    "caption": lambda f: (f / "1.txt").write_text("another"),
    "caption of the same length": lambda f: (f / "1.txt").write_text("a dog"),
    "caption added": lambda f: (f / "new.txt").write_text("a cat"),
    "caption removed": lambda f: (f / "1.txt").unlink(),
    "picture": lambda f: draw(f / "1.png", (99, 0, 0)),
    "picture added": lambda f: draw(f / "5.png"),
    "picture removed": lambda f: (f / "sub" / "4.png").unlink(),
    "picture renamed": lambda f: os.rename(f / "1.png", f / "one.png"),
    "pictures exchanged": lambda f: (
        os.rename(f / "1.png", f / "x"),
        os.rename(f / "2.png", f / "1.png"),
        os.rename(f / "x", f / "2.png"),
    ),
    "folder renamed": lambda f: os.rename(f / "sub", f / "10_sub"),
    "mask": lambda f: mask(f / "1-masklabel.png", 200),
    "mask removed": lambda f: (f / "1-masklabel.png").unlink(),
    "table added": lambda f: (f / "metadata.jsonl").write_text("{}"),
    "a file that cannot be read": lambda f: (f / "a.heic").write_bytes(b"x"),
    "everything": shutil.rmtree,
}


@pytest.mark.parametrize("remembered", [True, False], ids=["with an index", "without"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_fingerprint_notices_every_change(
    tmp_path: Path, change: Callable[[Path], object], remembered: bool
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))
    with Index(tmp_path / "index") as file:
        index = file if remembered else None
        before = fingerprint(dataset, index)
        assert fingerprint(dataset, index) == before
        change(folder)
        assert fingerprint(dataset, index) != before


@pytest.mark.parametrize("name", ["other.log", "._1.png", ".DS_Store", "Thumbs.db", ".git/1.png"])
def test_the_fingerprint_does_not_mind_what_no_scan_reads(tmp_path: Path, name: str) -> None:
    folder = masked_folder(tmp_path)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    before = fingerprint(dataset)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert fingerprint(dataset) == before


@pytest.mark.parametrize("source", ["one_file", "table"])
def test_the_fingerprint_notices_a_caption_file_elsewhere(tmp_path: Path, source: Any) -> None:
    folder, table = table_folder(tmp_path), tmp_path / "elsewhere" / "captions.csv"
    captions = CaptionConfig(source=source, file=str(table))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), captions=captions),))
    seen = [fingerprint(dataset)]
    for text in ("a.png,a cat\n", "a.png,a dog\n"):
        table.parent.mkdir(exist_ok=True)
        table.write_text(text)
        seen.append(fingerprint(dataset))
    (table.parent / "other.csv").write_text("x")
    assert fingerprint(dataset) == seen[-1]
    table.unlink()
    assert fingerprint(dataset) not in seen[1:]
    assert len(set(seen)) == 3


class Counting:
    """Count the calls of functions of the scan by the bytes that they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for module, name in ((scan_module.pictures, "examine"), (scan_module.mask_files, "examine_mask")):
            monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            return function(*arguments)

        return call

    def take(self) -> Counter[str]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, Counter()
        return calls


def test_touching_changes_nothing_and_decodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    folder = masked_folder(tmp_path / "pictures")
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), masks=MaskConfig()),))
    with Index(tmp_path / "index") as index:
        manifest, before = scan(dataset, index), fingerprint(dataset, index)
        assert counting.take() == {"examine": 4, "examine_mask": 4}
        for path in folder.rglob("*.*"):
            os.utime(path, (10**9, 10**9))
        assert fingerprint(dataset, index) == before
        assert scan(dataset, index) == manifest
        os.rename(folder / "1.png", folder / "9.png")
        os.rename(folder / "1.txt", folder / "9.txt")
        os.rename(folder / "1-masklabel.png", folder / "9-masklabel.png")
        assert len(scan(dataset, index).pictures) == 4
        assert not counting.take()
        draw(folder / "2.png", (77, 0, 0), size=(96, 64))
        assert scan(dataset, index) != manifest
        assert counting.take() == {"examine": 1}


def test_reading_can_be_stopped_and_resumes_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting, told = Counting(monkeypatch), []
    monkeypatch.setattr(scan_module.index, "CHUNK", 3)
    for i in range(10):
        draw(tmp_path / "pictures" / f"{i}.png", (i, 0, 0))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(tmp_path / "pictures")),))

    class Stop(BaseException):
        """Stands for ComfyUI's interrupt."""

    def check() -> None:
        if len(told) == 2:
            raise Stop

    with pytest.raises(Stop), Index(tmp_path / "index") as index:
        scan(dataset, index, Callbacks(check=check, phase=lambda *phase: told.append(phase)))
    assert told == [("reading files", 3, 10), ("reading files", 6, 10)]
    assert counting.take() == {"examine": 6}
    with Index(tmp_path / "index") as index:
        assert len(scan(dataset, index).pictures) == 10
    assert counting.take() == {"examine": 4}


@pytest.mark.parametrize("moment", ["list_files", "examine_pictures", "read_captions", "read_masks"])
@pytest.mark.parametrize("on_problem", ["stop", "leave_out"])
def test_a_folder_that_vanishes_during_the_scan_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, on_problem: Any
) -> None:
    folder = masked_folder(tmp_path / "pictures")
    original = getattr(scan_module, moment)

    def vanish(*arguments: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(scan_module, moment, vanish)
    with pytest.raises(ValueError, match=re.escape(str(folder))) as error:
        read(folder, masks=MaskConfig(), on_problem=on_problem)
    assert type(error.value) is ValueError
