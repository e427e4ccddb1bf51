"""Headers are read once from a file that stays the same, and never from an earlier state of it; outlines likewise."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from safetensors.torch import save_file

from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models.files import safetensors_file
from lora_atelier.trainer_core.models.files.safetensors_file import read_header
from lora_atelier.trainer_core.models.sd import StableDiffusionFiles


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the headers that are parsed, by name of file; also those of files that have just been written are kept."""
    found, parse = Counter(), safetensors_file._parse_header

    def counted(path, *given):
        found[path.name] += 1
        return parse(path, *given)

    monkeypatch.setattr(safetensors_file, "_kept", safetensors_file.KeptHeaders())
    monkeypatch.setattr(safetensors_file, "_parse_header", counted)
    monkeypatch.setattr(safetensors_file, "FRESH", -(10**12))
    return found


def written(path: Path, name: str = "a") -> Path:
    """Write a file of one tensor with a name of one letter, always of the same size."""
    save_file({name: torch.ones(2)}, path)
    return path


def replaced(path: Path) -> None:
    written(path.with_suffix(".new.safetensors"), "b").replace(path)


def written_over(path: Path) -> None:
    """Write into the file itself, as a program that downloads does."""
    content = path.read_bytes().replace(b'"a"', b'"b"')
    with path.open("r+b") as file:
        file.write(content)


@pytest.fixture(
    params=[replaced, pytest.param(written_over, marks=pytest.mark.skipif(os.name == "nt", reason="ctime"))]
)
def change(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Give what puts another header into a file, of the same size and time."""

    def changed(path: Path) -> None:
        status = path.stat()
        request.param(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)

    return changed


def test_a_header_is_read_once_and_each_reader_has_its_own(parsed: Counter[str], tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors")
    first = read_header(path)
    first.shapes.clear()
    first.ranges.clear()
    first.metadata["x"] = "y"
    second = read_header(path)
    assert list(second.shapes) == list(second.ranges) == ["a"] and not second.metadata
    assert parsed == {"x.safetensors": 1}


def test_a_changed_file_is_read_anew(parsed: Counter[str], tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = written(tmp_path / "x.safetensors")
    assert list(read_header(path).shapes) == ["a"]
    change(path)
    assert list(read_header(path).shapes) == ["b"] and parsed["x.safetensors"] == 2
    path.unlink()
    with pytest.raises(ValueError, match="There is no model file"):
        read_header(path)


def test_what_was_written_just_now_is_not_kept(
    parsed: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written again within the resolution of a file's times."""
    monkeypatch.setattr(safetensors_file, "FRESH", 3600 * 10**9)
    path = written(tmp_path / "x.safetensors")
    assert read_header(path) == read_header(path) and parsed["x.safetensors"] == 2


def test_few_headers_are_kept_those_asked_for_last(
    parsed: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "KEPT_HEADERS", 2)
    one, two, three = (written(tmp_path / f"{number}.safetensors") for number in (1, 2, 3))
    for path in (one, two, one, three, one, two):
        read_header(path)
    assert parsed == {"1.safetensors": 1, "2.safetensors": 2, "3.safetensors": 1}
    monkeypatch.setattr(safetensors_file, "KEPT_TENSORS", 0)
    for _ in range(2):
        read_header(three)
    assert parsed["3.safetensors"] == 3


def test_threads_read_headers_at_once(parsed: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "KEPT_HEADERS", 2)
    paths = [written(tmp_path / f"{letter}.safetensors", letter) for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: read_header(paths[number % 4]), range(400)))
    assert [list(header.shapes) for header in found] == [["abcd"[number % 4]] for number in range(400)]


def test_an_outline_that_is_given_back_is_built_once(checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(checkpoint, tmp_path / "base.safetensors"))
    files = StableDiffusionFiles(BaseModelConfig(path=str(path), tokenizer=TOKENIZER))
    with torch.inference_mode():  # as in a node; the run trains on it
        first = files.outline()
    assert not any(parameter.is_inference() for parameter in first.unet.parameters())
    second = files.outline()
    assert second is not first  # who has it may change it
    files.take_back(second)
    assert files.outline() is second and files.outline() is not second
    files.take_back(second)
    assert files.outline(torch.bfloat16).unet.dtype == torch.bfloat16
    third = files.outline()
    files.take_back(third)
    shutil.copy(checkpoint, tmp_path / "new.safetensors").replace(path)
    assert files.outline() is not third
