"""The index reads and decodes nothing twice, notices every change, and no damage to it does any harm."""

import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from PIL import Image

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig
from lora_atelier.trainer_core.data.scan import File, Index, Manifest, fingerprint, list_files, scan
from lora_atelier.trainer_core.data.scan import index as module
from lora_atelier.trainer_core.data.scan import pictures as pictures_module

COUNT = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder of six captioned pictures."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(COUNT):
        draw(folder / f"{i}.png", i)
        (folder / f"{i}.txt").write_text(f"number {i}")
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Give the place of an index that is not there yet."""
    return tmp_path / "cache" / module.PLACE


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every file count as changed long ago: what tests write is as fresh as can be."""
    monkeypatch.setattr(module, "_FRESH", -(10**12))


class Work:
    """Counts which pictures are read from disk, and how many are decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.decoded = 0
        read_bytes, examine = Path.read_bytes, pictures_module.examine

        def count_read(file: Path) -> bytes:
            self.read.append(file.name)
            return read_bytes(file)

        def count_decoded(data: bytes) -> Any:
            self.decoded += 1
            return examine(data)

        monkeypatch.setattr(Path, "read_bytes", count_read)
        monkeypatch.setattr(pictures_module, "examine", count_decoded)

    def take(self) -> tuple[list[str], int]:
        """Return (names that were read, number of decoded pictures) since the last time."""
        done = sorted(self.read), self.decoded
        self.read, self.decoded = [], 0
        return done


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Count what is read and decoded."""
    return Work(monkeypatch)


def draw(path: Path, level: int, size: tuple[int, int] = (32, 24)) -> None:
    """Write a BMP, whose size on disk does not depend on what it shows, whatever its name."""
    Image.new("RGB", size, (level, 100, 200)).save(path, "BMP")


def tables(path: Path) -> dict[str, dict[str, list[Any]]]:
    """Read what an index holds."""
    return json.loads(path.read_bytes().partition(b"\n")[2])


def write(path: Path, content: object) -> None:
    """Write an index as a stranger might: its hash is right."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(module._head(body) + b"\n" + body)


def read(folder: Path, path: Path | None, **callbacks: Any) -> Manifest:
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    with Index(path) as index:
        return scan(dataset, index, Callbacks(**callbacks))


ALL = [f"{i}.png" for i in range(COUNT)]


# --- nothing twice --------------------------------------------------------------------------------------------


def test_a_second_scan_reads_and_decodes_no_picture(folder: Path, path: Path, work: Work, settled: None) -> None:
    first = read(folder, path)
    assert work.take() == (ALL, COUNT)
    assert read(folder, path) == first == read(folder, path)
    assert work.take() == ([], 0)
    assert read(folder, None) == first
    assert work.take() == (ALL, COUNT)


def test_a_scan_after_a_fingerprint_reads_each_picture_once_more_and_none_after(
    folder: Path, path: Path, work: Work, settled: None
) -> None:
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    with Index(path) as index:
        before = fingerprint(dataset, index)
    assert work.take()[1] == 0
    read(folder, path)
    assert work.take() == (ALL, COUNT)
    with Index(path) as index:
        assert fingerprint(dataset, index) == before
    read(folder, path)
    assert work.take() == ([], 0)


def test_a_touched_file_is_hashed_once_and_not_decoded(folder: Path, path: Path, work: Work, settled: None) -> None:
    first = read(folder, path)
    work.take()
    os.utime(folder / "2.png", (10**9, 10**9))
    assert read(folder, path) == first
    assert work.take() == (["2.png"], 0)
    assert read(folder, path) == first
    assert work.take() == ([], 0)


def test_a_renamed_or_copied_file_is_not_decoded(folder: Path, path: Path, work: Work, settled: None) -> None:
    read(folder, path)
    work.take()
    os.rename(folder / "2.png", folder / "9.png")
    os.rename(folder / "2.txt", folder / "9.txt")
    (folder / "8.png").write_bytes((folder / "3.png").read_bytes())
    (folder / "8.txt").write_text("copy")
    work.take()
    names = [picture.name for picture in read(folder, path).pictures]
    assert names == ["0.png", "1.png", "3.png", "4.png", "5.png", "8.png", "9.png"]
    assert work.take() == (["8.png", "9.png"], 0)


def test_a_moved_folder_is_not_decoded(folder: Path, path: Path, work: Work, settled: None) -> None:
    before = read(folder, path)
    work.take()
    moved = folder.rename(folder.with_name("moved"))
    assert [p.digest for p in read(moved, path).pictures] == [p.digest for p in before.pictures]
    assert work.take() == (ALL, 0)


def test_the_same_content_under_many_names_is_remembered_once(
    tmp_path: Path, path: Path, work: Work, settled: None
) -> None:
    for i in range(50):
        draw(tmp_path / f"{i}.png", 1)
        (tmp_path / f"{i}.txt").write_text("same")
    read(tmp_path, path)
    work.take()
    read(tmp_path, path)
    assert work.take() == ([], 0)
    assert {name: len(table) for name, table in tables(path).items()} == {"files": 50, "facts": 1}


def test_another_reader_or_another_way_of_reading_decodes_anew(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(folder, path)
    work.take()
    with monkeypatch.context() as patch:
        patch.setattr(pictures_module.PIL, "__version__", "99.0")
        read(folder, path)
        assert work.take() == (ALL, COUNT)
    monkeypatch.setattr(pictures_module, "FORMAT", 99)
    read(folder, path)
    assert work.take() == (ALL, COUNT)


def test_a_picture_that_cannot_be_read_is_remembered_as_such(
    folder: Path, path: Path, work: Work, settled: None
) -> None:
    (folder / "2.png").write_bytes(b"no picture")
    for expected in ((ALL, COUNT), ([], 0)):
        with pytest.raises(ValueError, match=r"2\.png \(not a picture\)"):
            read(folder, path)
        assert work.take() == expected
    draw(folder / "2.png", 2)
    read(folder, path)
    assert work.take() == (["2.png"], 1)


def test_what_could_not_be_opened_is_tried_again(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(ValueError, match=r"6 pictures .*0\.png \(no permission\)"):
            read(folder, path)
    assert len(read(folder, path).pictures) == COUNT
    assert work.take() == (ALL, COUNT)


# --- no change unnoticed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True], ids=["new time", "time put back"])
@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no time of change that programs cannot set")
def test_a_change_of_the_same_size_is_noticed(
    folder: Path, path: Path, work: Work, settled: None, restore: bool
) -> None:
    before = read(folder, path)
    work.take()
    status = (folder / "2.png").stat()
    draw(folder / "2.png", 222)
    if restore:
        os.utime(folder / "2.png", ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (folder / "2.png").stat().st_mtime_ns == status.st_mtime_ns
    assert (folder / "2.png").stat().st_size == status.st_size
    after = read(folder, path)
    assert work.take() == (["2.png"], 1)
    assert [i for i in range(COUNT) if after.pictures[i] != before.pictures[i]] == [2]


def test_two_files_that_exchange_their_names_are_noticed(folder: Path, path: Path, work: Work, settled: None) -> None:
    before = [picture.digest for picture in read(folder, path).pictures]
    work.take()
    os.rename(folder / "1.png", folder / "x")
    os.rename(folder / "2.png", folder / "1.png")
    os.rename(folder / "x", folder / "2.png")
    after = [picture.digest for picture in read(folder, path).pictures]
    assert after == [before[0], before[2], before[1], *before[3:]]
    assert work.take() == (["1.png", "2.png"], 0)


@pytest.mark.parametrize(
    ("age", "again"),
    [(0, True), (1, True), (1.9, True), (2.1, False), (100, False), (-5, True)],  # -5: the clock was put back
)
def test_a_file_changed_within_two_seconds_is_read_again(
    tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch, age: float, again: bool
) -> None:
    """Within the clock's step a file can change twice and keep its size and times."""
    now = 10**18
    monkeypatch.setattr(module.time, "time_ns", lambda: now)
    place = tmp_path / "a.png"
    file = File(path=place, name="a.png", size=3, mtime_ns=now - int(age * 1e9), ctime_ns=0)
    with Index(tmp_path / "index") as index:
        place.write_bytes(b"one")
        (first,) = index.digests([file])
        place.write_bytes(b"two")
        (second,) = index.digests([file])
    assert (second != first) == again
    assert len(work.take()[0]) == 1 + again


def test_the_time_of_change_counts_as_well_as_that_of_the_content(tmp_path: Path, monkeypatch) -> None:
    now = 10**18
    monkeypatch.setattr(module.time, "time_ns", lambda: now)
    place = tmp_path / "a.png"
    with Index(tmp_path / "index") as index:
        place.write_bytes(b"one")
        old = {"path": place, "name": "a.png", "size": 3, "mtime_ns": 5, "ctime_ns": 5}
        (first,) = index.digests([File(**old)])
        place.write_bytes(b"two")
        assert next(index.digests([File(**old)])) == first  # nothing tells the two apart
        for name in ("mtime_ns", "ctime_ns", "size"):
            assert next(index.digests([File(**{**old, name: 6})])) != first
        place.write_bytes(b"six")
        (third,) = index.digests([File(**{**old, "ctime_ns": now})])
        place.write_bytes(b"ten")
        assert next(index.digests([File(**{**old, "ctime_ns": now})])) != third


def test_a_fresh_folder_is_read_again_until_it_has_settled(folder: Path, path: Path, work: Work) -> None:
    read(folder, path)  # with the real clock: all was written a moment ago
    work.take()
    read(folder, path)
    assert work.take() == (ALL, 0)  # hashed, and known by its content
    for name in ALL:
        os.utime(folder / name, (10**9, 10**9))
    if os.name != "nt":  # which keeps no time of change that programs cannot set
        assert all(file.ctime_ns > 10**18 for file in list_files(folder, True))


# --- damage ---------------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes() if path.exists() else b""
    middle = len(data) // 2
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
        return
    path.write_bytes(
        {
            "empty": b"",
            "text": b"this is no database, and it is longer than its header would be " * 3,
            "header alone": data[:80],
            "cut short": data[:middle],
            "zeros": b"\0" * len(data),
            "zeros behind the header": data[:80] + b"\0" * (len(data) - 80),
            "garbage in the middle": data[: middle - 300] + random.Random(0).randbytes(600) + data[middle + 300 :],
            "another digit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "longer": data + random.Random(0).randbytes(5000),
            "upside down": data[::-1],
        }[how]
    )


DAMAGES = [
    *("empty", "text", "header alone", "cut short", "zeros", "zeros behind the header", "garbage in the middle"),
    *("another digit", "longer", "upside down", "folder"),
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_index_is_made_anew(folder: Path, path: Path, work: Work, settled: None, how: str) -> None:
    expected = read(folder, path)
    damage(path, how)
    assert read(folder, path) == expected
    work.take()
    assert read(folder, path) == expected
    assert work.take() == (([], 0) if how != "folder" else (ALL, COUNT))


@pytest.mark.parametrize("how", DAMAGES)
def test_an_index_that_is_damaged_while_it_is_open_does_no_harm(
    folder: Path, path: Path, settled: None, how: str
) -> None:
    expected = read(folder, path)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    with Index(path) as index:
        damage(path, how)
        assert scan(dataset, index) == expected
        assert scan(dataset, index) == expected
    assert read(folder, path) == expected


def test_damage_anywhere_gives_the_same_manifest_and_no_error(
    tmp_path: Path, path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sectors of the disk are lost one after the other."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for i in range(60):
        draw(pictures / f"{i}.png", i, (16, 16))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(pictures), captions=CaptionConfig(source="none")),))
    with Index(path) as index:
        expected = scan(dataset, index)
    sound, expected_tables = path.read_bytes(), tables(path)
    assert len(sound) > 20_000
    for start in range(0, len(sound), 512):
        lost = b"\0" * 512 if start % 1024 else random.Random(start).randbytes(512)
        path.write_bytes(sound[:start] + lost + sound[start + 512 :])
        with Index(path) as index:
            assert scan(dataset, index) == expected, start
        assert path.stat().st_size == len(sound)
        assert tables(path) == expected_tables


@pytest.mark.parametrize("entry", ["x", None, [], 3, {}, [1], ["x", {}], [1, "x"], [1, {}, 3], [99999, []]], ids=repr)
def test_facts_that_are_none_are_found_out_anew(
    folder: Path, path: Path, work: Work, settled: None, entry: object
) -> None:
    expected = read(folder, path)
    held = tables(path)
    write(path, {**held, "facts": dict.fromkeys(held["facts"], entry)})
    work.take()
    assert read(folder, path) == expected
    assert work.take() == (ALL, COUNT)
    read(folder, path)
    assert work.take() == ([], 0)


# --- places and others ----------------------------------------------------------------------------------------


def test_without_a_place_to_write_everything_is_read_and_nothing_is_wrong(
    folder: Path, tmp_path: Path, work: Work, settled: None
) -> None:
    (tmp_path / "file").write_bytes(b"")
    expected = read(folder, None)
    assert read(folder, tmp_path / "file" / "index") == expected
    assert work.take() == (sorted(ALL * 2), 2 * COUNT)
    with Index(tmp_path / "file" / "index") as index:  # within one index nothing is read twice
        dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
        assert scan(dataset, index) == scan(dataset, index) == expected
    assert work.take() == (ALL, COUNT)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "while it is open"])
@pytest.mark.parametrize("fault", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_an_index_that_cannot_be_written_is_left_alone(
    folder: Path,
    path: Path,
    work: Work,
    settled: None,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    fault: OSError,
) -> None:
    expected = read(folder, path)
    draw(folder / "2.png", 222)
    sound = path.read_bytes()
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))

    def refuse(*_: object) -> None:
        raise fault

    work.take()
    with Index(path) as index:
        if not late:
            monkeypatch.setattr(module, "written_whole", refuse)
        assert scan(dataset, index) == scan(dataset, index) != expected  # within one index nothing is read twice
        monkeypatch.setattr(module, "written_whole", refuse)
    assert work.take() == (["2.png"], 1)
    assert path.read_bytes() == sound
    monkeypatch.undo()
    assert read(folder, path) != expected
    assert {p.name for p in path.parent.iterdir()} - {"index.lock"} == {"index"}  # the lock goes where files can


def test_a_disk_without_locks_costs_the_memory_alone(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(module, "FileLock", no_locks)
    assert read(folder, path) == read(folder, path)
    assert work.take() == (sorted(ALL * 2), 2 * COUNT)
    assert not path.exists()


def test_a_lock_that_another_process_holds_is_waited_for_and_then_done_without(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(folder, None)
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.05)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    path.parent.mkdir(parents=True)
    work.take()
    with Index(path) as early:
        with FileLock(f"{path}.lock"):
            assert scan(dataset, early) == expected
            early.close()
            assert read(folder, path) == expected
        assert not path.exists()
        assert work.take() == (sorted(ALL * 2), 2 * COUNT)
    assert read(folder, path) == expected  # saved when the lock was free
    assert work.take() == ([], 0)


def scan_in_process(folder: str, path: str, queue: Any) -> None:
    """Scan again and again with a shared index, and report what was found."""
    module._FRESH = -(10**12)
    module.CHUNK = 3
    queue.put([[p.digest for p in read(Path(folder), Path(path)).pictures] for _ in range(5)])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork to be quick")
def test_two_processes_at_once_share_an_index(folder: Path, path: Path, work: Work, settled: None) -> None:
    for i in range(COUNT, 40):
        draw(folder / f"{i}.png", i)
        (folder / f"{i}.txt").write_text("more")
    expected = [picture.digest for picture in read(folder, None).pictures]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    others = [context.Process(target=scan_in_process, args=(str(folder), str(path), queue)) for _ in range(3)]
    for other in others:
        other.start()
    found = [queue.get() for _ in others]
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    assert found == [[expected] * 5] * 3
    work.take()
    assert [picture.digest for picture in read(folder, path).pictures] == expected
    assert work.take() == ([], 0)


def test_two_indexes_in_threads_share_a_file(folder: Path, path: Path, settled: None) -> None:
    expected = read(folder, None)
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(lambda _: read(folder, path), range(12))) == [expected] * 12


def test_what_another_process_found_meanwhile_is_kept(
    folder: Path, tmp_path: Path, path: Path, work: Work, settled: None
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for i in range(COUNT):
        draw(other / f"{i}.png", 100 + i)
        (other / f"{i}.txt").write_text("x")
    with Index(path) as index:
        scan(DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),)), index)
        read(other, path)  # saved while the first is open
    work.take()
    read(folder, path)
    read(other, path)
    assert work.take() == ([], 0)


def test_a_killed_process_has_saved_now_and_then(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    monkeypatch.setattr(module, "SAVE_SECONDS", -1.0)
    monkeypatch.setattr(module, "SAVE_WAITS", 0)
    index = Index(path)  # never closed
    files = [file for file in list_files(folder, True) if file.extension == ".png"]
    steps = index.digests(files)
    for _ in range(3):  # two of three chunks are read
        next(steps)
    work.take()
    with Index(path) as second:
        assert len(list(second.digests(files))) == COUNT
    assert work.take() == (ALL[4:], 0)


def test_what_a_killed_process_was_writing_is_removed(folder: Path, path: Path, settled: None) -> None:
    path.parent.mkdir(parents=True)
    (path.parent / ".0123.tmp").write_bytes(b"half an index")
    read(folder, path)
    assert {entry.name for entry in path.parent.iterdir()} - {"index.lock"} == {"index"}


def test_nothing_is_written_where_nothing_is_new(folder: Path, path: Path, settled: None) -> None:
    read(folder, path)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    read(folder, path)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_an_index_of_another_format_is_emptied(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(folder, path)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    work.take()
    assert read(folder, path) == expected
    assert work.take() == (ALL, COUNT)
    assert read(folder, path) == expected
    assert work.take() == ([], 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"3", b"null", b"{}", b'{"files": {}, "facts": []}', b'{"files": 3}'],
    ids=range(10),
)
def test_what_is_no_index_though_its_hash_is_right_is_made_anew(
    folder: Path, path: Path, settled: None, content: bytes
) -> None:
    write(path, content)
    assert read(folder, path) == read(folder, None)
    assert len(tables(path)["facts"]) == COUNT


def test_a_file_that_is_too_large_is_neither_read_nor_written(
    folder: Path, path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(folder, path)
    size = path.stat().st_size
    monkeypatch.setattr(module, "LARGEST_INDEX", size - 1)
    assert read(folder, path) == expected
    held = tables(path)
    assert path.stat().st_size < size - 1
    assert 0 < len(held["files"]) < COUNT


# --- what nobody uses goes ------------------------------------------------------------------------------------


def later(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Let some days pass."""
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + days * 86_400)


def test_what_was_not_used_for_long_goes(
    folder: Path, tmp_path: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(folder, path)
    (tmp_path / "other").mkdir()
    for days, left in ((module.KEPT, COUNT + 1), (module.KEPT + 1, 2)):
        with monkeypatch.context() as patch:
            later(patch, days)
            draw(tmp_path / "other" / f"{days}.png", days)
            with Index(path) as index:
                list(index.digests(list_files(tmp_path / "other", True)))
        assert len(tables(path)["files"]) == left


def test_what_is_used_stays(
    folder: Path, path: Path, work: Work, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(folder, path)
    work.take()
    for days in range(0, 3 * module.KEPT, module.KEPT // 2):
        with monkeypatch.context() as patch:
            later(patch, days)
            read(folder, path)
    assert work.take() == ([], 0)


def test_of_too_many_those_unused_for_longest_go(
    folder: Path, path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", COUNT)
    read(folder, path)
    later(monkeypatch, 1)
    for i in range(2):
        draw(folder / f"new{i}.png", 200 + i)
    with Index(path) as index:
        list(index.digests([file for file in list_files(folder, True) if file.name.startswith("new")]))
    names = {Path(name).name for name in tables(path)["files"]}
    assert len(names) == COUNT
    assert {"new0.png", "new1.png"} <= names


# --- the rest -------------------------------------------------------------------------------------------------


def test_a_closed_index_can_be_closed_again_and_used(folder: Path, path: Path, work: Work, settled: None) -> None:
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder)),))
    with pytest.raises(KeyError), Index(path) as index:
        scan(dataset, index)
        raise KeyError
    index.close()
    work.take()
    scan(dataset, index)
    read(folder, path)  # what was found is kept, whatever the block ended in
    assert work.take() == ([], 0)


def test_progress_is_reported_only_where_something_is_read(
    folder: Path, path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    told: list[tuple[str, int, int]] = []
    looks: Counter[str] = Counter()
    options: dict[str, Callable[..., None]] = {
        "phase": lambda *phase: told.append(phase),
        "check": lambda: looks.update(["check"]),
    }
    read(folder, path, **options)
    assert told == [("reading files", 4, 6), ("reading files", 6, 6)]
    assert looks["check"] >= 2  # more where it waits for a slow disk
    read(folder, path, **options)
    assert len(told) == 2
    draw(folder / "5.png", 55)
    read(folder, path, **options)
    assert told[2:] == [("reading files", 6, 6)]


def test_files_come_in_their_order_however_long_each_takes(tmp_path: Path, settled: None) -> None:
    files = []
    for i in range(30):
        (tmp_path / f"{i}").write_bytes(bytes([i]) * (200_000 if i % 7 == 0 else 1))
        files.append(tmp_path / f"{i}")
    listed = list_files(tmp_path, True)
    with Index(None) as index:
        read_by = {file.name: digest for file, digest in zip(listed, index.digests(listed), strict=True)}
        results = list(index.examine(listed, "length", lambda data: {"n": len(data), "of": data[0]}, str, Callbacks()))
    assert [fact["of"] for _, fact in results] == list(range(30))
    assert [digest for digest, _ in results] == [read_by[str(i)] for i in range(30)]
    assert len(set(read_by.values())) == 30


def test_huge_files_are_never_read(tmp_path: Path, work: Work) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(module.LARGEST_FILE + 1)
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(10)
    listed = list_files(tmp_path, True)
    with Index(None) as index:
        assert [bool(digest) for digest in index.digests(listed)] == [False, True]
        results = list(index.examine(listed, "x", lambda data: {"n": len(data)}, str, Callbacks()))
    assert results[0] == ("", {"problem": "2.0 GiB, too large for a picture"})
    assert results[1][1] == {"n": 10}
    assert work.take()[0] == ["b.png", "b.png"]
