"""Every picture gets its caption from wherever it stands, or is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from scan_folder import draw, read, table_folder

from lora_atelier.trainer_core.common.access import access_to
from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig
from lora_atelier.trainer_core.data.scan import glance, scan


def test_captions_have_their_lines_as_the_concept_says(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption="\n  \n a cat \nsecond line\n")
    manifest = read(tmp_path)
    assert manifest.pictures[0].lines == ("a cat", "second line")
    assert any("several lines" in note and "a.png" in note for note in manifest.notes)
    assert read(tmp_path, captions=CaptionConfig(lines="first")).pictures[0].lines == ("a cat",)
    assert read(tmp_path, captions=CaptionConfig(lines="join")).pictures[0].lines == ("a cat second line",)


def test_captions_froms(tmp_path: Path) -> None:
    draw(tmp_path / "cats" / "red cat.png", caption=None)
    for source, expected in [("file_name", "red cat"), ("folder_name", "cats"), ("none", "")]:
        assert read(tmp_path, captions=CaptionConfig(source=source)).pictures[0].lines == (
            (expected,) if expected else ()
        )


def test_caption_files_match_whatever_the_case(tmp_path: Path) -> None:
    draw(tmp_path / "A.png", caption=None)
    (tmp_path / "a.TXT").write_text("found")
    assert read(tmp_path).pictures[0].lines == ("found",)


def test_a_caption_may_have_the_whole_name_of_its_picture(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption="of both")
    draw(tmp_path / "a.jpg", (1, 0, 0), caption=None)
    (tmp_path / "A.JPG.txt").write_text("its own")
    manifest = read(tmp_path)
    assert {picture.name: picture.lines for picture in manifest.pictures} == {
        "a.jpg": ("its own",),
        "a.png": ("of both",),
    }
    assert all(file.outcome == "caption" for file in manifest.outcomes if file.name.endswith(".txt"))


@pytest.mark.parametrize("column", ["control_path", "control_path_0"])
def test_a_table_that_names_control_pictures_says_how_they_are_used(tmp_path: Path, column: str) -> None:
    draw(tmp_path / "a.png", caption=None)
    row = {"image_path": str(tmp_path / "a.png"), column: "/elsewhere/a.png", "caption": "a cat"}
    (tmp_path / "captions.jsonl").write_text(json.dumps(row))
    manifest = read(tmp_path, captions=CaptionConfig(source="table"))
    assert manifest.pictures[0].lines == ("a cat",)
    (note,) = manifest.notes
    assert note.startswith("captions.jsonl names control pictures") and note.endswith(f"Control Pictures to {column}.")


def test_missing_captions_are_named_and_counted(tmp_path: Path) -> None:
    for i in range(8):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
    with pytest.raises(
        ValueError, match=r"8 pictures have no \.txt caption in .*: 0\.png, .*4\.png and 3 more"
    ) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)
    manifest = read(tmp_path, captions=CaptionConfig(missing="empty"))
    assert [picture.lines for picture in manifest.pictures] == [()] * 8
    assert any(
        note.startswith("8 pictures have no caption and train with an empty one: 0.png") for note in manifest.notes
    )


def test_pictures_without_a_caption_may_have_the_class_prompt(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption="mine")
    draw(tmp_path / "b.png", (1, 0, 0), caption=None)
    draw(tmp_path / "c.png", (2, 0, 0), caption="")
    manifest = read(tmp_path, captions=CaptionConfig(missing="class_prompt", class_prompt=" a cat "))
    assert [picture.lines for picture in manifest.pictures] == [("mine",), ("a cat",), ()]
    assert "1 picture has no caption and trains with the class prompt: b.png." in manifest.notes


def test_pictures_without_a_caption_may_have_the_name_of_their_folder(tmp_path: Path) -> None:
    for name, caption in (("10_red cat/a.png", None), ("10_red cat/b.png", "mine"), ("plain/c.png", None)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        draw(tmp_path / name, caption=caption)
    manifest = read(tmp_path, captions=CaptionConfig(missing="folder_name"))
    assert [picture.lines for picture in manifest.pictures] == [("red cat",), ("mine",), ("plain",)]
    assert any(
        note.startswith("2 pictures have no caption and train with the name of the folder") for note in manifest.notes
    )


def test_other_text_files_are_pointed_out(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.caption").write_text("here")
    with pytest.raises(ValueError, match=r"1 \.caption file.*set caption_extension of Captions to \.caption"):
        read(tmp_path)
    assert read(tmp_path, captions=CaptionConfig(extensions=(".caption",))).pictures[0].lines == ("here",)


def test_a_json_file_beside_a_picture_is_read_as_a_row_of_a_table(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.json").write_text('{"caption": "a cat", "tags": ["red", "small"]}')
    with pytest.raises(ValueError, match=r"1 \.json file.*set caption_extension of Captions to \.json"):
        read(tmp_path)
    captions = CaptionConfig(extensions=(".json",))
    assert read(tmp_path, captions=captions).pictures[0].lines == ("a cat, red, small",)
    (tmp_path / "a.json").write_text('"a dog"')
    assert read(tmp_path, captions=captions).pictures[0].lines == ("a dog",)
    (tmp_path / "a.json").write_text("{a cat")
    with pytest.raises(ValueError, match=r"a\.json is not JSON from column 2 on"):
        read(tmp_path, captions=captions)
    (tmp_path / "a.json").write_text('{"score": 1}')
    with pytest.raises(ValueError, match=r"a\.json: no caption; add one of text"):
        read(tmp_path, captions=captions)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pictures.json", "captions_from of Concept Dataset to table and caption_file of Concept Dataset to pictures"),
        ("meta_cap.json", r"captions_from of Concept Dataset to table\)"),
    ],
)
def test_the_hint_leads_a_table_to_what_reads_it(tmp_path: Path, name: str, remedy: str) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / name).write_text('{"a": {"caption": "a cat"}}')
    with pytest.raises(ValueError, match=rf"but there is the table {name} \(set {remedy}"):
        read(tmp_path)
    file = name if name.startswith("pictures") else ""
    assert read(tmp_path, captions=CaptionConfig(source="table", file=file)).pictures[0].lines == ("a cat",)
    with pytest.raises(ValueError, match=rf"{name} is a table of captions; set captions_from .* to table\."):
        read(tmp_path, captions=CaptionConfig(source="one_file", file=name))


def test_an_empty_folder_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^The folder .* is empty; put pictures"):
        read(tmp_path)


def test_a_glance_counts_pictures_and_captions(tmp_path: Path) -> None:
    for i in range(3):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption="one" if i else None)
    concept = ConceptConfig(folder=str(tmp_path))
    assert glance(concept) == (3, 0, 1)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "text": "a"}\n')
    assert glance(concept.replace(captions=CaptionConfig(source="table"))) == (3, 0, 2)
    assert glance(concept.replace(captions=CaptionConfig(source="file_name"))) == (3, 0, 0)
    for wrong in (concept.replace(folder=str(tmp_path / "gone")), concept.replace(folder="")):
        with pytest.raises(ValueError) as seen:
            scan(DatasetConfig(concepts=(wrong,)))
        with pytest.raises(ValueError) as told:
            glance(wrong)
        assert str(told.value) == str(seen.value)
    with pytest.raises(ValueError, match="is empty"):
        (tmp_path / "new").mkdir()
        glance(concept.replace(folder=str(tmp_path / "new")))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(ValueError, match="outside the folders that may be read"):
        glance(concept, access_to([elsewhere]))


def test_a_glance_at_very_many_files_reads_none_of_them(tmp_path: Path, monkeypatch) -> None:
    for i in range(2000):
        (tmp_path / f"{i}.png").touch()
        (tmp_path / f"{i}.txt").touch()
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("a file is opened"))
    assert glance(ConceptConfig(folder=str(tmp_path))) == (2000, 0, 0)


def test_an_undecodable_caption_is_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    (tmp_path / "a.txt").write_bytes("größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text in line 1; set .* to cp1252, or save it as UTF-8"):
        read(tmp_path)


def test_an_empty_caption_file_is_noted(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=" \n")
    assert any("empty caption file: a.png" in note for note in read(tmp_path).notes)


ROWS = {"a.png": "a cat", "sub/b.png": "a dog"}
TABLES = {
    "metadata.jsonl": "".join(json.dumps({"file_name": n, "text": t}) + "\n" for n, t in ROWS.items()),
    "metadata.csv": "file_name,text\n" + "".join(f'{n},"{t}"\n' for n, t in ROWS.items()),
    "captions.tsv": "image\tcaption\n" + "".join(f"{n}\t{t}\n" for n, t in ROWS.items()),
    "captions.json": json.dumps(ROWS),
    "meta_cap.json": json.dumps({name.rsplit(".")[0]: {"caption": text} for name, text in ROWS.items()}),
}


@pytest.mark.parametrize("place", ["found", "named", "elsewhere", "above"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_gives_each_picture_its_caption_wherever_it_lies(tmp_path: Path, name: str, place: str) -> None:
    folder = table_folder(tmp_path)
    at = {"elsewhere": tmp_path / "tables" / name, "above": tmp_path / name}.get(place, folder / name)
    at.parent.mkdir(exist_ok=True)
    at.write_text(TABLES[name], encoding="utf-8")
    file = {"found": "", "named": name, "elsewhere": str(at), "above": f"../{name}"}[place]
    manifest = read(folder, captions=CaptionConfig(source="table", file=file))
    assert {p.name: p.lines for p in manifest.pictures} == {name: (text,) for name, text in ROWS.items()}
    outcomes = {file.name: (file.outcome, file.why) for file in manifest.outcomes}
    inside = {name: ("caption", "of all pictures")} if at.parent == folder else {}
    assert outcomes == {"a.png": ("picture", ""), "sub/b.png": ("picture", ""), **inside}


def test_what_a_table_lacks_and_what_it_names_in_vain_is_reported(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    (folder / "metadata.csv").write_text("file_name,text\na.png,a cat\nold/b.png,a dog\ngone.png,x\n")
    captions = CaptionConfig(source="table")
    manifest = read(folder, captions=captions)
    assert [p.lines for p in manifest.pictures] == [("a cat",), ("a dog",)]
    assert "1 entry names no picture in metadata.csv: number 3." in manifest.notes
    assert "1 picture was matched in metadata.csv by the file name alone: sub/b.png." in manifest.notes
    (folder / "metadata.csv").write_text("file_name,text\na.png,a cat\n")
    with pytest.raises(ValueError, match=r"^1 picture has no entry in metadata\.csv: sub/b\.png; write captions"):
        read(folder, captions=captions)
    manifest = read(folder, captions=captions, on_problem="leave_out")
    assert [p.name for p in manifest.pictures] == ["a.png"]
    assert {f.name: (f.outcome, f.why) for f in manifest.outcomes}["sub/b.png"] == ("left out", "without a caption")
    assert any(note.startswith("Left out: 1 picture has no entry in metadata.csv") for note in manifest.notes)
    assert read(folder, captions=captions.replace(missing="empty")).pictures[1].lines == ()


@pytest.mark.parametrize("source", ["one_file", "table"])
def test_a_caption_file_that_cannot_be_used_is_named(tmp_path: Path, source: Any) -> None:
    folder = table_folder(tmp_path)
    if source == "table":
        with pytest.raises(ValueError, match=r"There is no caption table in .*metadata\.jsonl"):
            read(folder, captions=CaptionConfig(source=source))
    captions = CaptionConfig(source=source, file="captions.csv")
    with pytest.raises(ValueError, match=r"The caption file .*captions\.csv does not exist; check caption_file"):
        read(folder, captions=captions)
    (folder / "captions.csv").mkdir()
    with pytest.raises(ValueError, match=r"The caption file .*captions\.csv does not exist"):
        read(folder, captions=captions)
    (folder / "captions.csv").rmdir()
    (folder / "captions.csv").write_bytes("größe,größe".encode("latin-1"))
    for on_problem in ("stop", "leave_out"):  # all captions are lost: nothing can be left out
        with pytest.raises(ValueError, match=r"captions\.csv is not UTF-8 text"):
            read(folder, captions=captions, on_problem=on_problem)
    (folder / "captions.csv").write_bytes(b"")
    with pytest.raises(ValueError, match=r"captions\.csv (has no captions|is empty)"):
        read(folder, captions=captions)


def test_one_file_holds_the_lines_of_all_pictures(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    (folder / "all.txt").write_text("a cat\n\na feline\n")
    manifest = read(folder, captions=CaptionConfig(source="one_file", file="all.txt"))
    assert [p.lines for p in manifest.pictures] == [("a cat", "a feline")] * 2
    assert {f.name: f.why for f in manifest.outcomes}["all.txt"] == "of all pictures"
    assert any("several lines, and each visit uses the next one: all.txt" in note for note in manifest.notes)


def test_several_endings_are_tried_in_order_and_counted(tmp_path: Path) -> None:
    for i, endings in enumerate([(".txt",), (".txt", ".caption"), (".caption",), (".TXT",)]):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
        for ending in endings:
            (tmp_path / f"{i}{ending}").write_text(ending)
    manifest = read(tmp_path, captions=CaptionConfig(extensions=(".txt", ".caption")))
    assert [p.lines for p in manifest.pictures] == [(".txt",), (".txt",), (".caption",), (".TXT",)]
    assert "Captions come from 3 .txt files, 1 .caption file." in manifest.notes
    assert {f.name: f.outcome for f in manifest.outcomes}["1.caption"] == "not used"
    turned = read(tmp_path, captions=CaptionConfig(extensions=(".caption", ".txt")))
    assert [p.lines for p in turned.pictures] == [(".txt",), (".caption",), (".caption",), (".TXT",)]


def test_if_all_captions_are_missing_the_sentence_says_so_and_where_they_are(tmp_path: Path) -> None:
    for i in range(3):
        draw(tmp_path / f"{i}.png", (i, 0, 0), caption=None)
        (tmp_path / f"{i}.caption").write_text("here")
    with pytest.raises(ValueError) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"None of the 3 pictures has a caption; 3 pictures have no .txt caption in {tmp_path}, but there are 3 "
        ".caption files (set caption_extension of Captions to .caption): 0.png, 1.png, 2.png; write captions, "
        "set captions_from of Concept Dataset to where they are, set missing_caption of Captions to empty, or set "
        "on_problem of Pictures to "
        "leave_out."
    )
    (tmp_path / "1.txt").write_text("one")
    with pytest.raises(ValueError, match=r"^2 pictures have no \.txt caption in .*, but there are 3 \.caption files"):
        read(tmp_path)
    notes = read(tmp_path, captions=CaptionConfig(missing="empty")).notes
    assert any(
        note.startswith("2 pictures have no caption and train with an empty one, but there are 3") for note in notes
    )


def test_braces_are_pointed_out_where_wildcards_are_off(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", (1, 0, 0), caption="a {red|blue} cat")
    draw(tmp_path / "b.png", (2, 0, 0), caption="a {plain} cat")
    sentence = "1 caption contains {a|b}, which is not replaced because wildcards is off: a.png."
    assert sentence in read(tmp_path).notes
    assert sentence not in read(tmp_path, captions=CaptionConfig(wildcards=True)).notes
