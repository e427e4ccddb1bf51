"""Changing captions: what an operation makes of a text; writing together, undoing, and files changed meanwhile."""

import json
from pathlib import Path

import pytest

from lora_atelier.trainer_core.config import CaptionConfig
from lora_atelier.trainer_core.data import edits
from lora_atelier.trainer_core.data.edits import (
    Journal,
    Meanwhile,
    Operation,
    Rewritten,
    content_of,
    edited,
    encoded,
    fingerprint_of,
)

TEXTS = ["cat, red hat, outdoors", "Cat sitting,outdoors\r\nsecond line\n", "", "a ||| Red hat, cat ||| z"]


def done(texts: list[str], **operation: object) -> list[str]:
    return edited(texts, Operation(**operation), CaptionConfig(keep=1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"kind": "text", "text": "new"}, ["new"] * 4),
        (
            {"kind": "find", "find": "cat", "text": r"\1dog"},
            [
                r"\1dog, red hat, outdoors",
                "\\1dog sitting,outdoors\r\nsecond line\n",
                "",
                r"a ||| Red hat, \1dog ||| z",
            ],
        ),
        ({"kind": "find", "find": "Cat", "text": "x", "case": True}, [TEXTS[0], "x sitting,outdoors\r\nsecond line\n"]),
        ({"kind": "find", "find": "out", "text": "in", "word": True}, TEXTS),
        (
            {"kind": "add", "text": "cat, soft"},
            ["cat, red hat, outdoors, soft", "Cat sitting, outdoors, cat, soft\r\nsecond line, cat, soft\n"],
        ),
        ({"kind": "add", "text": "soft", "first": True}, ["soft, cat, red hat, outdoors"]),
        ({"kind": "remove", "find": "RED HAT"}, ["cat, outdoors", TEXTS[1], "", "a ||| cat ||| z"]),
        ({"kind": "replace", "find": "red hat", "text": "cat"}, ["cat, outdoors", TEXTS[1], "", "a ||| cat ||| z"]),
        ({"kind": "sort"}, ["cat, outdoors, red hat", TEXTS[1], "", "a ||| cat, Red hat ||| z"]),
        ({"kind": "sort", "first": True}, ["cat, outdoors, red hat"]),
    ],
)
def test_an_operation_changes_what_it_names(operation: dict, expected: list[str]) -> None:
    assert done(TEXTS, **operation)[: len(expected)] == expected


def test_what_cannot_be_done_is_said() -> None:
    for wrong, words in (
        ({"kind": "shout"}, "kind is 'shout'"),
        ({"kind": "find"}, "Nothing is looked for"),
        ({"kind": "add", "text": " "}, "No tag is given"),
        ({"kind": "remove", "find": "x" * (edits.LONGEST_FIND + 1)}, "At most 1000 characters are looked for"),
        ({"kind": "text", "text": "x" * (edits.LARGEST_TEXT + 1)}, "at most"),
    ):
        with pytest.raises(ValueError, match=words):
            Operation(**wrong)
    with pytest.raises(ValueError, match=r"猫.txt cannot be written as cp1252"):
        encoded("猫", CaptionConfig(encoding="cp1252"), Path("猫.txt"))


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("a" * 2**20, {"kind": "find", "find": "a", "text": "b" * edits.LARGEST_TEXT}),  # would take 128 GB
        ("a, b\n" * 60_000, {"kind": "add", "text": ",".join(f"x{i}" for i in range(20_000))}),
        ("a, b\n" * 60_000, {"kind": "replace", "find": "a", "text": "y" * edits.LARGEST_TEXT}),
        ("a,\n" * 60_000, {"kind": "add", "text": "x" * 40, "first": True}),
    ],
)
def test_a_caption_that_would_grow_without_end_is_refused_before_it_does(text: str, operation: dict) -> None:
    with pytest.raises(ValueError, match="A caption would become longer than"):
        done([text], **operation)


def test_many_captions_that_would_grow_together_are_refused_before_they_do() -> None:
    with pytest.raises(ValueError, match="too long to be changed at once"):
        done(["a"] * 20_000, kind="text", text="x" * edits.LARGEST_TEXT)
    assert done(["same"] * 20_000, kind="text", text="same") == ["same"] * 20_000


def test_tags_by_the_ten_thousand_are_compared_once() -> None:
    tags = ",".join(f"x{i}" for i in range(20_000))  # compared with one another they would take minutes
    assert done([tags], kind="add", text=tags) == [tags]
    assert done(["a," * 20_000], kind="replace", find="a", text=tags) == [tags.replace(",", ", ")]


def test_no_caption_is_written_that_a_run_would_not_read() -> None:
    for text, words in (
        ("x\n" * 70_000, "a.txt holds more than 65,536 caption lines"),
        ("x" * 140_000, "a.txt holds a caption line of more than"),
        (("猫" * 9_000 + "\n") * 50, "longer than 1 MiB"),
    ):
        with pytest.raises(ValueError, match=words):
            encoded(text, CaptionConfig(), Path("a.txt"))


def test_a_huge_file_is_not_read_to_be_replaced(tmp_path: Path, folder: Path) -> None:
    with (folder / "a.txt").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"a\.txt has .* MiB, and a caption file can have 1 at most"):
        Journal(tmp_path / "journal").write([Rewritten(folder / "a.txt", b"x", "")], "text", [folder])


def rewritten(folder: Path, texts: dict[str, str]) -> list[Rewritten]:
    """Return changes of files as they are now."""
    files = {folder / name: text.encode() for name, text in texts.items()}
    return [Rewritten(file, text, fingerprint_of(content_of(file))) for file, text in files.items()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    for name, content in {"a.txt": b"one", "b.txt": b"\xff\xfet\0w\0o\0"}.items():
        (place / name).write_bytes(content)
    return place


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def number(journal: Journal, folder: Path) -> str:
    """The number of the newest change."""
    last = journal.last([folder])
    assert last is not None
    return last["number"]


def test_an_undo_leaves_what_is_gone_and_what_it_may_not_touch(tmp_path: Path, folder: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(rewritten(folder, {"a.txt": "1", "b.txt": "2", "c.txt": "3"}), "find", [folder])
    first = number(journal, folder)
    (folder / "a.txt").unlink()
    (folder / "b.txt").write_text("theirs")
    with pytest.raises(Meanwhile) as told:
        journal.undo([folder], first, {})
    assert list(told.value.files) == [folder / "b.txt"]
    assert journal.undo([folder], first, {}, leave=True)["count"] == 1
    assert contents(folder) == {"b.txt": b"theirs"}
    journal.write(rewritten(folder, {"b.txt": "4"}), "text", [folder])
    assert number(journal, folder) > first


def test_changes_are_undone_one_by_one_also_by_another_journal(tmp_path: Path, folder: Path) -> None:
    before, journal = contents(folder), Journal(tmp_path / "journal")
    assert journal.last([folder]) is None
    assert journal.write(rewritten(folder, {"a.txt": "1", "b.txt": "2", "c.txt": "3"}), "find", [folder]) == 3
    assert journal.write(rewritten(folder, {"a.txt": "1"}), "nothing", [folder]) == 0
    assert journal.write(rewritten(folder, {"a.txt": "first"}), "text", [folder]) == 1
    again = Journal(tmp_path / "journal")
    assert again.last([tmp_path / "elsewhere"]) is None
    for what, left in (("text", {"a.txt": b"1", "b.txt": b"2", "c.txt": b"3"}), ("find", before)):
        last = again.last([folder, tmp_path / "more"])
        assert last and last["what"] == what
        again.undo([folder], last["number"], {})
        assert contents(folder) == left
    with pytest.raises(ValueError, match="changed elsewhere"):
        again.undo([folder], "0000000001", {})


def test_what_was_undone_is_done_again_until_something_else_is_done(tmp_path: Path, folder: Path) -> None:
    journal, other = Journal(tmp_path / "journal"), tmp_path / "other"
    other.mkdir()
    before = contents(folder)
    journal.write(rewritten(folder, {"a.txt": "1", "c.txt": "3"}), "find", [folder])
    journal.write(rewritten(folder, {"a.txt": "first"}), "text", [folder])
    after = contents(folder)
    for what in ("text", "find"):
        assert journal.undo([folder], number(journal, folder), {})["what"] == what
    assert contents(folder) == before and journal.last([folder]) is None
    journal.write(rewritten(other, {"a.txt": "elsewhere"}), "text", [other])  # concerns nothing here
    for what in ("find", "text"):
        undone = Journal(tmp_path / "journal").next([folder])
        assert undone and undone["what"] == what
        journal.redo([folder], undone["number"], {})
    assert contents(folder) == after and journal.next([folder]) is None
    journal.undo([folder], number(journal, folder), {})
    undone = journal.next([folder])
    assert undone
    (folder / "a.txt").write_text("theirs")
    with pytest.raises(Meanwhile):
        journal.redo([folder], undone["number"], {})
    assert journal.next([folder]) == undone and (folder / "a.txt").read_text() == "theirs"
    journal.write(rewritten(folder, {"c.txt": "4"}), "text", [folder])
    assert journal.next([folder]) is None
    with pytest.raises(ValueError, match="changed elsewhere"):
        journal.redo([folder], undone["number"], {})


def test_a_full_disk_leaves_what_was_undone_to_be_done_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(rewritten(folder, {"a.txt": "1"}), "text", [folder])
    journal.undo([folder], number(journal, folder), {})
    before, undone = contents(folder), journal.next([folder])
    assert undone

    def full(_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no space"):
        patched.setattr(edits, "write_together", full)
        journal.redo([folder], undone["number"], {})
    assert contents(folder) == before and journal.next([folder]) == undone and journal.last([folder]) is None


def test_a_change_in_a_folder_inside_another_is_seen_from_both(tmp_path: Path, folder: Path) -> None:
    inner, journal = folder / "inner", Journal(tmp_path / "journal")
    inner.mkdir()
    journal.add(inner / "a.txt", lambda _: b"a model's", "written", [folder, inner])
    for view in ([folder], [inner], [folder, inner]):
        last = journal.last(view)
        assert last and last["what"] == "written"
        journal.undo(view, last["number"], {})
        assert not (inner / "a.txt").exists()
        undone = journal.next(view)
        assert undone
        journal.redo(view, undone["number"], {})
        assert (inner / "a.txt").read_bytes() == b"a model's"
    assert journal.last([tmp_path / "other"]) is None


def test_a_view_turns_no_change_in_a_folder_inside_it_that_it_does_not_show(tmp_path: Path, folder: Path) -> None:
    """As with `recursive` off; what other views changed of it alone, it can turn."""
    inner, whole = folder / "inner", Journal(tmp_path / "journal")
    flat = Journal(tmp_path / "journal", {folder})
    inner.mkdir()
    whole.write(rewritten(folder, {"a.txt": "outer"}), "text", [folder])
    assert flat.last([folder]) == whole.last([folder])
    for view in ([folder], [inner]):
        whole.write(rewritten(inner, {"c.txt": f"of {len(view[0].parts)}"}), "find", view)
        last, seen = whole.last(view), flat.last([folder])
        assert last and seen and (last["what"], seen["what"]) == ("find", "text")
        with pytest.raises(ValueError, match="changed elsewhere"):
            flat.undo([folder], last["number"], {})
    assert flat.last([folder, inner]) == whole.last([inner])  # the other concept shows it
    job = whole.add(folder / "b.txt", lambda _: b"1", "written", [folder])
    whole.add(inner / "c.txt", lambda _: b"2", "written", [folder], job)
    assert flat.last([folder]) == seen
    own = flat.add(folder / "b.txt", lambda _: b"3", "written", [folder])
    assert number(flat, folder) == own != job
    flat.undo([folder], own, {})
    assert flat.next([folder]) and (folder / "b.txt").read_bytes() == b"1" and (inner / "c.txt").read_bytes() == b"2"


def test_what_another_program_wrote_is_neither_overwritten_nor_undone_unasked(tmp_path: Path, folder: Path) -> None:
    journal, changes = Journal(tmp_path / "journal"), rewritten(folder, {"a.txt": "1", "b.txt": "2"})
    (folder / "a.txt").write_text("theirs")
    with pytest.raises(Meanwhile) as told:
        journal.write(changes, "find", [folder])
    assert told.value.files == {folder / "a.txt": (b"theirs", b"1")}
    assert (folder / "b.txt").read_bytes() == b"\xff\xfet\0w\0o\0" and journal.last([folder]) is None
    changes[0] = changes[0]._replace(seen=fingerprint_of(b"theirs"))
    assert journal.write(changes, "find", [folder]) == 2
    (folder / "b.txt").write_text("again")
    with pytest.raises(Meanwhile):
        journal.undo([folder], number(journal, folder), {})
    assert (folder / "a.txt").read_text() == "1"
    journal.undo([folder], number(journal, folder), {folder / "b.txt": fingerprint_of(b"again")})
    assert (folder / "a.txt").read_text() == "theirs" and (folder / "b.txt").read_bytes() == b"\xff\xfet\0w\0o\0"


def test_a_change_that_a_crash_cut_off_is_undone(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, journal = contents(folder), Journal(tmp_path / "journal")

    def half(new: dict[Path, bytes]) -> None:
        file = next(iter(new))
        file.write_bytes(new[file])
        raise OSError("the power is gone")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="power"):
        patched.setattr(edits, "write_together", half)
        journal.write(rewritten(folder, {"a.txt": "1", "b.txt": "2"}), "find", [folder])
    assert contents(folder) != before
    journal.undo([folder], number(journal, folder), {})
    assert contents(folder) == before


def test_the_journal_forgets_the_oldest_and_reads_no_damage(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "journal"
    journal = Journal(place)
    monkeypatch.setattr(edits, "MOST_CHANGES", 2)
    for text in "123":
        journal.write(rewritten(folder, {"a.txt": text}), text, [folder])
    _, newest = sorted(place.glob("*.jsonl"))
    assert newest.stem == number(journal, folder)
    head, _, body = newest.read_text().partition("\n")
    written, other = (json.dumps(str(each))[1:-1] for each in (folder, tmp_path))  # Windows' paths are escaped
    newest.write_text(f"{head}\n{body.replace(written, other)}")
    with pytest.raises(ValueError, match="outside its folders"):
        journal.undo([folder], newest.stem, {})
    newest.write_text(f"{head}\n[1]")
    with pytest.raises(ValueError, match="damaged"):
        journal.undo([folder], newest.stem, {})
    newest.write_text("{")
    last = journal.last([folder])
    assert last and last["what"] == "2"
    monkeypatch.setattr(edits, "LARGEST_ENTRY", 10)
    with pytest.raises(ValueError, match="too long"):
        journal.write(rewritten(folder, {"a.txt": "4"}), "4", [folder])
    assert (folder / "a.txt").read_text() == "3"


def test_nothing_is_written_where_one_file_cannot_be(tmp_path: Path, folder: Path) -> None:
    before, journal = contents(folder), Journal(tmp_path / "journal")
    changes = [*rewritten(folder, {"a.txt": "1"}), Rewritten(folder / "gone" / "c.txt", b"3", "")]
    with pytest.raises(OSError, match="No such"):
        journal.write(changes, "text", [folder])
    assert contents(folder) == before and journal.last([folder]) is None
