"""Caption files are decoded exactly or refused by name; tables are read row by row and matched with pictures."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.data.scan.caption_files import TEXT_LIMIT, caption_lines, read_text
from lora_atelier.trainer_core.data.scan.caption_tables import TABLE_NAMES, find_table, read_table, table_captions

Write = Callable[..., Path]
several = examples(60)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Give `write(content, name)` -> the path of a file with that text or bytes."""

    def write(content: str | bytes, name: str = "odd.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


# --- encodings ------------------------------------------------------------------------------------------------


MARKED = ["utf-8-sig", "utf-16", "utf-32", "BOM utf-16-le", "BOM utf-16-be", "BOM utf-32-be"]


@pytest.mark.parametrize("encoding", ["utf-8", *MARKED])
def test_utf_8_and_marked_encodings_are_read(write: Write, encoding: str) -> None:
    text = "猫, größe, 🐈\r\nsecond\u2028line"
    data = ("\ufeff" * encoding.startswith("BOM ") + text).encode(encoding.removeprefix("BOM "))
    assert read_text(write(data)) == text
    if encoding in MARKED:  # the mark wins over the setting
        assert read_text(write(data), "cp1251") == text


@pytest.mark.parametrize("text", ["a cat", "größe, naïve café", "x", "1girl, solo — “hat”\nred 🐈 hair\n"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_recognised(write: Write, text: str, encoding: str) -> None:
    assert read_text(write(text.encode(encoding))) == text


@several
@given(st.text(st.characters(codec="latin-1", categories=("L", "N", "P", "S", "Zs")), min_size=1))
def test_latin_text_in_utf_16_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "latin.txt"
    for encoding in ("utf-16-le", "utf-16-be"):
        path.write_bytes(text.encode(encoding))
        assert read_text(path) == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "größe, ein Mädchen"),
        ("cp1252", "été à la plage, naïve"),
        ("cp1252", "a cat, she said “hello”, don’t"),
        ("cp1252", "don’t"),
        ("cp1252", "ÜBER, Ärger, 50°, €5"),
        ("cp1252", "word " * 400 + "größe " + "word " * 400),
        ("cp1250", "żółty kot, dziewczyna"),
        ("cp1250", "červený klobouk, řeka, dům"),
        ("cp1250", "nő piros kalapban, fűben"),
        ("cp1252", "¿qué hace la niña?"),
        ("cp1252", "jalapeño, crème brûlée"),
        ("cp1251", "рыжий кот на окне"),
        ("cp1251", "Девушка, 1girl, red hair"),
        ("shift_jis", "赤い髪の女の子"),
        ("shift_jis", "1girl, 白髪, 猫"),
        ("gb18030", "一只红色的猫"),
        ("big5", "一隻紅色的貓"),
        ("euc_kr", "빨간 머리 소녀, 1girl"),
        ("euc_jp", "赤い髪の女の子"),
        ("iso2022_jp", "赤い髪"),
        ("utf-16-le", "猫 が 好き"),
        ("utf-16-le", "aaaaaaĀ"),  # zeros on both sides are not the clear sign of Latin text
        ("utf-16-be", "猫 が 好き"),
        ("utf-32-le", "a cat"),
        ("utf-32-be", "größe"),
    ],
)
def test_other_encodings_are_proposed_and_not_guessed(write: Write, encoding: str, text: str) -> None:
    path = write(text.encode(encoding))
    with pytest.raises(
        ValueError,
        match=rf"odd\.txt is not UTF-8.*; set caption_encoding of Captions to {encoding}(?: or \w+)?, or",
    ) as e:
        read_text(path)
    assert text not in str(e.value)
    assert read_text(path, encoding) == text  # the remedy works


def test_two_encodings_are_proposed_where_neither_is_clearly_better(write: Write) -> None:
    with pytest.raises(ValueError, match=r"not UTF-8 text in line 2; set .* to euc_kr or gb18030, or save"):
        read_text(write("1girl\n女孩, 白发".encode("gb18030")))


@pytest.mark.parametrize(
    "data",
    [
        random.Random(1).randbytes(3000),
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x01\x00",
        b"caf\xe9 \x81\x8d \x9d",  # latin-1 with C1 controls
        b"\x00" * 64,
        b"\x00",
        b"a cat\x00",
        b"a\x00\x00cat\x00",
        b"\xc3",
        b"cat \xff\xfe\xfd",
        "cat".encode("utf-16-le") + b"a",
        b"\xed\xa0\x80",  # a surrogate in UTF-8
    ],
)
def test_what_reads_well_in_no_encoding_is_refused(write: Write, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"odd\.txt is not UTF-8.*save it as UTF-8"):
        read_text(write(data))


@pytest.mark.parametrize(
    "data", [b"\xff\xfea", b"\xfe\xff\xd8\x00", b"\xef\xbb\xbfgr\xf6\xdfe", b"\x00\x00\xfe\xff\xff"]
)
def test_a_mark_that_lies_is_named(write: Write, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"odd\.txt starts with the mark of utf-\d+, but the rest is not"):
        read_text(write(data))


@pytest.mark.parametrize(("data", "encoding"), [(b"\xff\xfea\0\0\0", "auto"), (b"a\0b", "cp1252"), (b"a\0", "latin-1")])
def test_nul_characters_are_refused(write: Write, data: bytes, encoding: str) -> None:
    with pytest.raises(ValueError, match=r"odd\.txt contains NUL"):
        read_text(write(data), encoding)


@pytest.mark.parametrize(
    ("data", "encoding", "remedy"),
    [
        ("größe".encode("cp1252"), "ascii", "set caption_encoding of Captions to cp1252"),
        ("größe".encode("cp1252"), "utf-8", "set caption_encoding of Captions to cp1252"),
        ("猫さん".encode(), "ascii", "set caption_encoding of Captions to auto"),
        (b"a cat", "utf-16", "set caption_encoding of Captions to auto"),
        (b"a cat", "rot13", "set caption_encoding of Captions to auto"),
        (b"caf\xe9 \x81\x8d \x9d", "cp1252", "save it as UTF-8"),
    ],
)
def test_an_encoding_that_does_not_fit_is_named(write: Write, data: bytes, encoding: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"odd\.txt cannot be read as {encoding} .*{remedy}"):
        read_text(write(data), encoding)


def test_utf_8_is_not_garbled_by_another_encoding(write: Write) -> None:
    with pytest.raises(
        ValueError,
        match=r"odd\.txt is UTF-8 text, but caption_encoding is cp1252; set caption_encoding of Captions to au",
    ):
        read_text(write("größe"), "cp1252")
    assert read_text(write("a cat"), "cp1252") == "a cat"


def test_empty_files_and_lone_marks_are_empty_texts(write: Write) -> None:
    for data in (b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xef\xbb\xbf\xef\xbb\xbf"):
        assert read_text(write(data)) == ""


def test_long_captions_are_read_and_huge_files_are_named(write: Write) -> None:
    for text in ("größe " * 8500, "猫" * 17000, "x" * TEXT_LIMIT):
        assert read_text(write(text)) == text
    with pytest.raises(ValueError, match=r"odd\.txt has 1\.5 MiB, and a caption file can have 1 at most"):
        read_text(write(b"x" * (TEXT_LIMIT * 3 // 2)))


def test_a_file_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "gone.txt")


# --- lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"), [("draw", ("a cat", "two\u2028lines\f\v.", "b")), ("first", ("a cat",)), ("join", None)]
)
def test_lines_end_at_line_feeds_alone(
    mode: Literal["draw", "first", "join"], expected: tuple[str, ...] | None
) -> None:
    expected = expected or ("a cat two\u2028lines\f\v. b",)
    assert caption_lines("\n a cat \r\n\r\n \rtwo\u2028lines\f\v.\n\tb\n", mode) == expected
    assert caption_lines(" \r\n\t\n", mode) == ()


# --- tables ---------------------------------------------------------------------------------------------------

CATS = {"a.png": ("a cat",), "sub/b.png": ("größe, red",)}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.jsonl", '{"file_name": "a.png", "text": "a cat"}\n\n{"text": "größe, red", "file_name": "sub/B.png"}\n'),
        ("m.JSONL", '\ufeff{"Image": "./a.png", "Text": " a cat "}\r\n{"path":"sub\\\\b.png","prompt":["größe, red"]}'),
        ("c.json", '{"A.png": "a cat", "sub/b.png": ["größe, red"]}'),
        ("c.json", '{"a.png": {"caption": "a cat", "n": 1e999}, "sub/b.png": {"tags": "größe, red", "size": [5]}}'),
        ("c.json", '{"a.png": {"caption": "a cat"}, "sub/b.png": {"caption": "größe", "tags": ["red"]}}'),
        ("c.json", '[{"file": "a.png", "text": "a cat"}, {"filename": "sub/b.png", "tags": ["größe", "red"]}]'),
        ("c.csv", 'file_name,text\na.png,a cat\nsub/b.png,"größe, red"\n'),
        ("c.csv", '\ufeffText;id;Image\r\na cat;1;a.png\r\ngröße, red;2;sub/b.png\r\n;;\r\n'),
        ("c.csv", 'a.png,a cat\n\nsub/b.png,"größe, red"'),
        ("c.csv", 'a.png;a cat\nsub/b.png;größe, red'),
        ("c.csv", 'sep=;\nfile;caption\na.png;a cat\nsub/b.png;größe, red'),
        ("c.csv", '"file", "prompt"\na.png, a cat\nsub/b.png, "größe, red"'),
        ("c.tsv", "file_name\ttext\na.png\ta cat\nsub/b.png\tgröße, red\n"),
        ("c.tsv", "a.png\ta cat\nsub/b.png\tgröße, red\n"),
        ("c.csv", "image,caption,tags\na.png,a cat,\nsub/b.png,größe,red"),
        ("c.csv", "file_name,text\na.png,a cat\na.png,a cat\nsub/b.png,\"größe, red\""),
    ],
)  # fmt: skip
def test_tables_are_read(write: Write, name: str, content: str) -> None:
    assert read_table(write(content, name), "auto") == CATS


def test_tables_of_other_encodings(write: Write) -> None:
    content = 'file_name,text\na.png,a cat\nsub/b.png,"größe, red"\n'
    for encoding in ("utf-16", "utf-16-le", "utf-8-sig"):
        assert read_table(write(content.encode(encoding), "c.csv"), "auto") == CATS
    with pytest.raises(
        ValueError, match=r"c\.csv is not UTF-8 text in line 3; set caption_encoding of Captions to cp1252"
    ):
        read_table(write(content.encode("cp1252"), "c.csv"), "auto")
    assert read_table(write(content.encode("cp1252"), "c.csv"), "cp1252") == CATS


def test_a_text_has_lines_and_an_item_of_a_list_is_one(write: Write) -> None:
    content = {
        "a": "one\ntwo\r\n",
        "b": ["one\ntwo", "three"],
        "c": "",
        "d": [],
        "e": {"text": ["x", "y"], "tags": "z, t"},
    }
    assert read_table(write(json.dumps(content), "c.json"), "auto") == {
        "a": ("one", "two"),
        "b": ("one two", "three"),
        "c": (),
        "d": (),
        "e": ("x, z, t", "y, z, t"),
    }
    assert read_table(write('a.png,"one\ntwo"\nb.png,x', "c.csv"), "auto") == {"a.png": ("one", "two"), "b.png": ("x",)}


def test_names_inside_the_folder_are_made_relative(write: Write, tmp_path: Path) -> None:
    content = {str(tmp_path / "Sub" / "A.png"): "a", "C:\\old\\b": "b", "é.png".encode().decode(): "c", "e\u0301": "d"}
    table = read_table(write(json.dumps(content), "meta_cap.json"), "auto")
    assert list(table) == ["sub/a.png", "c:/old/b", "é.png", "é"]


LONG = "9" * 100_000
BROKEN: list[tuple[str, str | bytes, str]] = [
    ("c.jsonl", '{"file_name": "a.png", "text": "a"}\n{"file_name": "b.png", ', r"line 2 is not JSON from column 24"),
    ("c.jsonl", '{"file_name": "a.png", "text": "a"}\n["b.png", "b"]', r"line 2: expected an object"),
    ("c.jsonl", '{"file_name": "a.png"}', r"line 1: no caption; add one of text, caption, prompt or tags"),
    ("c.jsonl", '\n{"name": "a.png", "text": "a"}', r"line 2: no picture name; add one of file_name, file"),
    ("c.jsonl", '{"file_name": "a.png", "text": null}', r"line 1: expected text, found null"),
    ("c.jsonl", '{"file_name": "a.png", "text": 5}', r"line 1: expected text, found a number"),
    ("c.jsonl", f'{{"file_name": "a.png", "text": {LONG}}}', r"line 1: expected text, found a number"),
    ("c.jsonl", '{"file_name": "a.png", "text": ["a", {"b": 1}]}', r"line 1: expected text, found an object"),
    ("c.jsonl", '{"file_name": ["a.png"], "text": "a"}', r"line 1: expected text, found a list"),
    ("c.jsonl", '{"file_name": "", "text": "a"}', r"line 1: the picture's name is empty"),
    ("c.jsonl", '{"file_name": "a.png", "text": "a\\u0000"}', r"line 1: the text contains NUL"),
    ("c.jsonl", '{"file_name": "a.png", "text": "\\ud83d"}', r"line 1: the text contains NUL or half"),
    ("c.jsonl", '{"file": "a.png", "text": "a"}\n{"file": "A.png", "text": "b"}', r"line 2: this picture has another"),
    ("c.jsonl", '{"file_name": "a.png", "text": "a", "text": "b"}', r"line 1: key 3 of an object repeats"),
    ("c.jsonl", "[" * 100_000, r"line 1 is nested too deeply"),
    ("c.jsonl", '{"a": ' * 100_000, r"line 1 is nested too deeply"),
    ("c.jsonl", '{"file_name": "a.png", "text": "a"} {"file_name": "b.png"}', r"line 1 is not JSON from column 37 on"),
    ("c.jsonl", "", r"has no captions"),
    ("c.json", "{}", r"has no captions"),
    ("c.json", '"a cat"', r"must hold an object"),
    ("c.json", '{"a.png": "a",\n "b.png": }', r"is not JSON from line 2, column 11 on"),
    ("c.json", '{"a.png": "a", "a.png": "b"}', r"key 2 of an object repeats"),
    ("c.json", '{"a.png": "a", "A.PNG": "b"}', r"entry 2: this picture has another caption"),
    ("c.json", '{"a.png": {"size": 4}}', r"entry 1: no caption"),
    ("c.json", '{"a.png": true}', r"entry 1: expected text, found true or false"),
    ("c.json", '{"a.png": "a"}{', r"is not JSON from column 15 on"),
    ("c.json", '[{"file": "a.png", "text": "a"}, "b"]', r"entry 2: expected an object"),
    ("c.json", "__import__('os').getcwd()", r"is not JSON"),
    ("c.csv", "a.png,a cat, red\n", r"line 1: no known column names"),
    ("c.csv", "a.png,a cat\nb.png,a cat, red\n", r"line 2: 3 columns instead of 2; put captions with ','"),
    ("c.csv", "file_name,text\na.png\n", r"line 2: 1 columns instead of 2"),
    ("c.csv", 'file_name,text\na.png,"one\ntwo"\nb.png,"open\nc.png,x\n', r"line 4: .*look for an unclosed quote"),
    ("c.csv", 'a.png,"a" cat\n', r"line 1: .*look for an unclosed quote"),
    ("c.csv", "file_name,label\na.png,a cat\n", r"line 1: no known column names"),
    ("c.csv", "file_name,text,text\na.png,a,b\n", r"line 1: duplicate columns \(text\)"),
    ("c.csv", "just words\n", r"line 1: no known column names"),
    ("c.csv", "file_name,text\n,a cat\n", r"line 2: the picture's name is empty"),
    ("c.csv", "a.png," + "x" * 200_000, r"line 1: the row does not end; .* cell of more than 131,072 characters"),
    ("c.csv", "file_name,text\n", r"has no captions"),
    ("c.tsv", "a.png,a cat\n", r"line 1: no known column names"),
    ("c.csv", b"\x80\x04\x95pickle\x00", r"is not UTF-8"),
    ("c.txt", "a.png a cat", r"is no caption table; its name must end in one of \.jsonl, \.json, \.csv, \.tsv"),
    ("c.parquet", b"PAR1", r"is no caption table"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=range(len(BROKEN)))
def test_broken_tables_are_named_with_the_place(write: Write, name: str, content: str | bytes, message: str) -> None:
    path = write(content, name)
    with pytest.raises(ValueError, match=re.escape(str(path)) + "[,:]? " + message) as error:
        read_table(path, "auto")
    assert len(str(error.value)) < 400 + len(str(path))


@several
@given(
    st.binary(max_size=200), st.sampled_from([".json", ".jsonl", ".csv", ".tsv"]), st.sampled_from([b"", b"a,", b"{"])
)
def test_any_bytes_are_a_table_or_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, extension: str, start: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{extension}"
    path.write_bytes(start + data)
    try:
        table = read_table(path, "auto")
    except ValueError as error:
        assert path.name in str(error)
    else:
        assert table
        "".join(map("".join, table.values())).encode()


@several
@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,4}(/[a-z]{1,4})?\.png", fullmatch=True), st.text(max_size=20), min_size=1)
)
def test_what_the_json_module_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, Any]
) -> None:
    texts = {name: text.replace("\0", "") for name, text in texts.items()}
    folder = tmp_path_factory.getbasetemp()
    (folder / "t.json").write_text(json.dumps(texts))
    rows = [json.dumps({"file_name": name, "text": text}, ensure_ascii=False) for name, text in texts.items()]
    (folder / "t.jsonl").write_bytes("\n".join(rows).encode())
    expected = {name: caption_lines(text, "draw") for name, text in texts.items()}
    assert read_table(folder / "t.json", "auto") == read_table(folder / "t.jsonl", "auto") == expected


def test_the_table_is_found_in_a_fixed_order() -> None:
    for place, name in enumerate(TABLE_NAMES):
        assert find_table(["a.png", "sub/metadata.jsonl", *TABLE_NAMES[place:][::-1]]) == name
    assert find_table(["x.json", "Captions.CSV", "metadata.txt"]) == "Captions.CSV"
    assert find_table(["a.png", "sub/metadata.jsonl"]) is None


def test_entries_match_by_full_name_then_without_extension_then_by_file_name() -> None:
    table = {
        "a.png": ("full",),
        "sub/b": ("stem",),
        "c.png": ("bare",),
        "/data/old/d.png": ("path",),
        "e": ("bare stem",),
        "gone.png": ("gone",),
        "twice.png": ("which",),
        "x/both.png": ("one",),
        "y/both.png": ("other",),
    }
    names = [
        "A.PNG",
        "sub/b.webp",
        "deep/er/C.png",
        "d.png",
        "sub/e.jpg",
        "p/twice.png",
        "q/twice.png",
        "both.png",
        "f.png",
    ]
    match = table_captions(table, names)
    assert match.captions == {
        "A.PNG": ("full",),
        "sub/b.webp": ("stem",),
        "deep/er/C.png": ("bare",),
        "d.png": ("path",),
        "sub/e.jpg": ("bare stem",),
    }
    assert match.missing == ("p/twice.png", "q/twice.png", "both.png", "f.png")
    assert match.unmatched == (6, 7, 8, 9)
    assert match.by_file_name == ("d.png",)


def test_a_better_match_is_taken_first() -> None:
    table = {"a.png": ("file",), "a": ("stem",), "sub/a.png": ("sub",)}
    match = table_captions(table, ["a.png", "sub/a.png", "a.jpg"])
    assert match.captions == {"a.png": ("file",), "sub/a.png": ("sub",), "a.jpg": ("stem",)}
    assert match.missing == match.unmatched == match.by_file_name == ()


def test_names_match_whatever_the_form_of_their_accents() -> None:
    assert table_captions({"é.png": ("x",)}, ["E\u0301.png"]).captions == {"E\u0301.png": ("x",)}


@several
@given(
    st.dictionaries(st.from_regex(r"([ab]/)?[a-c](\.png)?", fullmatch=True), st.just(("x",))),
    st.lists(st.from_regex(r"([ab]/)?[a-c]\.(png|jpg)", fullmatch=True), unique=True),
)
def test_every_picture_and_every_entry_is_accounted_for(table: dict[str, tuple[str, ...]], names: list[str]) -> None:
    match = table_captions(table, names)
    assert sorted([*match.captions, *match.missing]) == sorted(names)
    assert set(match.unmatched) <= set(range(1, len(table) + 1))
    assert len(table) - len(match.unmatched) <= len(match.captions)
    assert set(match.by_file_name) <= set(match.captions)
    for name in names:
        assert (name in match.captions) or name not in table
        assert (name in match.captions) or os.path.splitext(name)[0] not in table
