"""Whatever captions, tables and names strangers write: a result or a sentence, soon, in little memory, no excerpt."""

import csv
import json
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
from bounded import bounded
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from scan_folder import draw, read, table_folder

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, MaskConfig
from lora_atelier.trainer_core.data.buckets import parse_resolution
from lora_atelier.trainer_core.data.captions import (
    compose_caption,
    mentions_side,
    plain_caption,
    tags_of_lines,
    varies,
)
from lora_atelier.trainer_core.data.scan import folder_repeats, natural_order
from lora_atelier.trainer_core.data.scan.caption_files import LONGEST_LINE, caption_lines, decode, read_text
from lora_atelier.trainer_core.data.scan.caption_tables import MOST_DEPTH, find_table, read_table, table_captions

MIB = 2**20
SECRET = "sesame"  # what stands in a file and in no message
many = examples(300)


def row(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


# --- hostile files --------------------------------------------------------------------------------------------

HOSTILE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "an open quote": ("c.csv", lambda: b'a.png,"' + b"sesame, " * 400_000, "line 1 has more than 1,048,576 characters"),
    "an open quote before any delimiter": ("c.csv", lambda: b'"' + b"a, " * MIB, "line 1 has more than 1,048,576"),
    "nothing but quotes": ("c.csv", lambda: b'"' * 3 * MIB, "line 1 has more than 1,048,576 characters"),
    "an open quote over many lines": ("c.csv", lambda: b'a.png,"' + b"x\n" * MIB, "line 1: the row does not end"),
    "a long cell": ("c.csv", lambda: b"a.png," + b"x" * (LONGEST_LINE + 1), "line 1: the row does not end"),
    "commas": ("c.csv", lambda: b"file,text\n" + b"," * 3 * MIB, "line 2 has more than 1,048,576 characters"),
    "tabs": ("c.tsv", lambda: b"file\ttext\n" + b"\t" * 3 * MIB, "line 2 has more than 1,048,576 characters"),
    "a million empty lines": ("c.csv", lambda: b"\n" * (MIB + 1), "has more than 1,048,576 lines"),
    "a million empty lines of JSON": ("c.jsonl", lambda: b"\n" * (MIB + 1), "has more than 1,048,576 lines"),
    "a long line of JSON": ("c.jsonl", lambda: b'{"file": "a", "text": "' + b"x" * 3 * MIB, "line 1 has more than"),
    "many values": ("c.json", lambda: b'{"a": [' + b"0," * (2 * MIB) + b"0]}", "has more than 2,097,152 values"),
    "many lists": ("c.json", lambda: b"[" + b"[]," * MIB + b"[]]", "has more than 2,097,152 values"),
    "many objects": ("c.json", lambda: b"[" + b'{"":0},' * MIB + b"{}]", "has more than 2,097,152 values"),
    "deep lists": ("c.json", lambda: b"[" * MIB, "is nested too deeply"),
    "deep objects in a line": ("c.jsonl", lambda: b'{"a":' * 100_000, "line 1 is nested too deeply"),
    "an open text": ("c.json", lambda: b'{"a.png": "' + b"x" * 3 * MIB, "is not JSON from column 11 on"),
    "a long number": ("c.json", lambda: b'{"a.png": ' + b"9" * 3 * MIB + b"}", "entry 1: expected text, found a n"),
    "a long name": ("c.json", lambda: row(**{"x" * 1025: "a"}), "entry 1: the picture's name has more than 1,024"),
    "accents without end": ("c.json", lambda: row(**{"\u0301\u0316" * 100_000: "a"}), "entry 1: the picture's name"),
    "tags for many lines": (
        "c.jsonl",
        lambda: row(file="a", text=["b"] * 60_000, tags="c" * 100_000),
        "line 1: too many tags for so many lines",
    ),
    "many lines": ("c.json", lambda: row(**{"a.png": "ab\n" * 70_000}), "entry 1 holds more than 65,536 caption lines"),
    "a list of many lines": ("c.json", lambda: row(a=["ab"] * 70_000), "entry 1 holds more than 65,536 caption lines"),
    "a long caption line": ("c.json", lambda: row(a="x" * 200_000), "holds a caption line of more than 131,072"),
    "captions of a million lines": (
        "c.jsonl",
        lambda: b"".join(row(file=str(n), text="a\n" * 60_000) for n in range(18)),
        "line 18: the table has too many captions",
    ),
    "half characters": ("c.json", lambda: b'{"a.png": "\\udc00"}', "entry 1: the text contains NUL or half"),
    "half a character in a name": ("c.json", lambda: b'{"\\ud800": "a"}', "entry 1: the text contains NUL or half"),
    "another encoding": ("c.csv", lambda: b"a,b\n" * MIB + b"a.png,gr\xf6\xdfe\n", "in line 1048577; set .* to cp1252"),
    "zeros": ("c.csv", lambda: b"\0" * 3 * MIB, "is not UTF-8 text; no other encoding fits"),
    "escapes": ("c.csv", lambda: b"\x1b" * 3 * MIB, "is not UTF-8 text; no other encoding fits"),
}  # fmt: skip


# The same rule, met by another sign or in another format.
AGAIN = (
    *("an open quote before any delimiter", "nothing but quotes", "tabs", "a million empty lines of JSON"),
    *("many lists", "many objects", "a list of many lines", "escapes"),
    *("bars", "nested in the second option", "closing"),
)


def in_every_run(cases: Iterable[str]) -> list[Any]:
    """Leave the cases of AGAIN to --thorough."""
    return [pytest.param(case, marks=pytest.mark.thorough if case in AGAIN else ()) for case in cases]


@pytest.mark.parametrize("case", in_every_run(HOSTILE))
def test_a_hostile_table_is_refused_soon_and_in_little_memory(tmp_path: Path, case: str) -> None:
    name, content, message = HOSTILE[case]
    path = tmp_path / name
    path.write_bytes(content())
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with bounded(60), pytest.raises(ValueError, match=message) as error:
            read_table(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * size + 32 * MIB
    assert len(str(error.value)) < 300 + len(str(path))
    assert SECRET not in str(error.value)


def test_a_row_ends_in_time_even_if_other_code_lifted_the_csv_modules_limit(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_bytes(b'a.png,"' + b"x\n" * MIB)
    before = csv.field_size_limit(2**30)
    try:
        with pytest.raises(ValueError, match=r"line 1: the row does not end; look for an unclosed quote"):
            read_table(tmp_path / "c.csv")
    finally:
        csv.field_size_limit(before)


def test_what_is_nested_less_deeply_is_read_with_any_brackets_in_its_texts(tmp_path: Path) -> None:
    deep = "[" * (MOST_DEPTH - 2) + "]" * (MOST_DEPTH - 2)  # within two objects
    text = '\\"[{' * 200 + "\\\\"
    for inner, fits in ((deep, True), (f"[{deep}]", False)):
        (tmp_path / "c.json").write_text(f'{{"a.png": {{"text": "{text}", "size": {inner}}}}}')
        if fits:
            assert read_table(tmp_path / "c.json") == {"a.png": ('"[{' * 200 + "\\",)}
        else:
            with pytest.raises(ValueError, match=r"c\.json is nested too deeply"):
                read_table(tmp_path / "c.json")


def test_a_long_honest_table_is_read_whole(tmp_path: Path) -> None:
    rows = {f"{n}.png": (f"größe {n} 🐈 " + "x" * 500,) for n in range(3000)}  # more than one piece
    for encoding in ("utf-8", "utf-16", "utf-32"):
        text = "file_name,text\r\n" + "".join(f"{name},{line}\r\n" for name, (line,) in rows.items())
        (tmp_path / "c.csv").write_bytes(text.encode(encoding))
        assert read_table(tmp_path / "c.csv") == rows
    (tmp_path / "c.json").write_text(json.dumps({name: line for name, (line,) in rows.items()}))
    assert read_table(tmp_path / "c.json") == rows


# --- captions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ab\n" * 70_000, "draw", "The caption holds more than 65,536 caption lines; remove some"),
        ("x" * (LONGEST_LINE + 1), "first", "The caption holds a caption line of more than 131,072 characters"),
        ("abc\n" * 40_000, "join", "The caption holds a caption line of more than 131,072 characters"),
    ],
)
def test_captions_have_bounds(text: str, mode: Literal["draw", "first", "join"], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        caption_lines(text, mode)
    assert caption_lines("x" * LONGEST_LINE) == ("x" * LONGEST_LINE,)
    assert len(caption_lines("a\n" * 2**16)) == 2**16


@pytest.mark.parametrize("encoding", ["utf-7", "idna", "punycode", "unicode_escape", "raw_unicode_escape", "undefined"])
def test_codecs_that_are_no_encodings_of_files_are_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"+2AA- \\ud800")
    with pytest.raises(ValueError, match=rf"a\.txt cannot be read as {encoding} throughout; .* to auto"):
        read_text(tmp_path / "a.txt", encoding)


BRACES = {
    "opening": "{" * LONGEST_LINE,
    "closing": "}" * LONGEST_LINE,
    "bars": "{" + "|" * LONGEST_LINE + "}",
    "nested in the first option": "{" * 25_000 + "x" * 50_000 + "|}" * 25_000,
    "nested in the second option": "{a|" * 30_000 + "}" * 30_000,
    "side by side": "{a|b}," * 20_000,
    "double": "{{" * 30_000 + "}}" * 30_000,
    "double, half closed": "{{a|b}" * 20_000,
    "glue": ";;;" * 40_000,
    "fixed parts": "|||" * 40_000,
    "underscores": "__left__" * 16_000,
    "commas": "," * LONGEST_LINE,
}


@pytest.mark.parametrize("case", in_every_run(BRACES))
def test_a_caption_of_marks_alone_is_composed_soon(case: str) -> None:
    text = BRACES[case]
    assert len(text) <= LONGEST_LINE + 2
    config = CaptionConfig(wildcards=True, shuffle=True, tag_dropout=0.5, protected=("a",))
    with bounded(60):
        assert len(compose_caption([text], config, seed=1, picture=2, visit=3)) <= 2 * len(text)
        assert len(plain_caption([text], config)) <= 2 * len(text)
        tags_of_lines([text], config)
        varies(config, [text])
        mentions_side(text)


# --- any text, any bytes --------------------------------------------------------------------------------------

ENCODINGS = [
    "auto",
    "utf-8",
    "utf-16",
    "utf-32-be",
    "cp1252",
    "shift_jis",
    "gb18030",
    "iso2022_jp",
    "hz",
    "utf-7",
    "rot13",
]
LIKE_TEXT = st.one_of(
    st.binary(max_size=300),
    st.tuples(st.text(max_size=60), st.sampled_from(ENCODINGS[1:-1])).map(
        lambda pair: pair[0].encode(pair[1], "ignore")
    ),
    st.tuples(
        st.sampled_from([b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf", b"\0\0\xfe\xff"]), st.binary(max_size=60)
    ).map(b"".join),
)


@many
@given(LIKE_TEXT, st.sampled_from(ENCODINGS))
@example(b"+2AA-", "utf-7")
@example(b"\xef\xbb", "utf-8-sig")
@example(b"a" * (2**20 - 1) + "é".encode() * 3 + b"\xff", "auto")
def test_any_bytes_are_a_text_or_a_sentence(data: bytes, encoding: str) -> None:
    with bounded(20):
        try:
            text = decode(Path("odd.txt"), data, encoding).read()
        except ValueError as error:
            assert str(error).startswith("odd.txt ")
            assert str(error).endswith(".")
        else:
            assert "\0" not in text
            text.encode()


@many
@given(st.text("ab \n\r\t\v\f\u2028\ufeff\ud800é", max_size=80), st.sampled_from(["draw", "first", "join"]))
def test_any_text_has_clean_lines(text: str, mode: Literal["draw", "first", "join"]) -> None:
    lines = caption_lines(text, mode)
    assert all(line and line == line.strip() and not {"\n", "\r"} & {*line} for line in lines)
    assert len(lines) <= 1 or mode == "draw"


CSV = [
    ",",
    ";",
    "\t",
    '"',
    '""',
    "\n",
    "\r\n",
    "\r",
    " ",
    "file_name",
    "text",
    "tags",
    "sep=",
    "a.png",
    SECRET,
    "é",
    "\ufeff",
]
JSON = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "\\",
    "\n",
    '"file":',
    '"text":',
    '"tags":',
    '"a.png"',
    f'"{SECRET}"',
    "1",
    "NaN",
    "null",
]
JSON += ['{"file": "a.png", "text": ', '{"sesame": ', '"\\ud800"', "9" * 5000, "é", "true", '{"a.png": "b"}']


@many
@given(
    st.one_of(
        st.tuples(st.sampled_from([".csv", ".tsv"]), st.lists(st.sampled_from(CSV), max_size=25)),
        st.tuples(st.sampled_from([".json", ".jsonl"]), st.lists(st.sampled_from(JSON), max_size=25)),
    ),
    st.sampled_from(["utf-8", "utf-16", "cp1252"]),
)
def test_any_signs_are_a_table_or_a_sentence_without_an_excerpt(
    tmp_path_factory: pytest.TempPathFactory, parts: tuple[str, list[str]], encoding: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"signs{parts[0]}"
    path.write_bytes("".join(parts[1]).encode(encoding, "ignore"))
    with bounded(20):
        try:
            table = read_table(path)
        except ValueError as error:
            assert str(error).startswith(str(path))
            assert SECRET not in str(error)
        else:
            assert table


@many
@given(
    st.dictionaries(st.text(st.characters(exclude_characters="\0"), max_size=12), st.just(("x",)), max_size=12),
    st.lists(
        st.text(st.characters(exclude_characters="\0", categories=["L", "P", "N", "M", "Cs"]), max_size=12), unique=True
    ),
)
def test_any_names_are_matched_with_any_entries(table: dict[str, tuple[str, ...]], names: list[str]) -> None:
    with bounded(20):
        match = table_captions(table, names)
        find_table(names)
    assert sorted([*match.captions, *match.missing]) == sorted(names)


@many
@given(st.lists(st.text("0123456789٣²a_/.\ud800İß", max_size=20)))
@example(["1" * 5000, "2" + "0" * 4999, "9"])
def test_any_names_have_a_natural_order(names: list[str]) -> None:
    with bounded(20):
        ordered = sorted(names, key=natural_order)
        assert all(folder_repeats(f"{name}_cat/a.png") >= 1 for name in names)
    assert sorted(ordered) == sorted(names)


@many
@given(st.lists(st.integers(0, 10**30), min_size=1), st.sampled_from(["0123456789", "٠١٢٣٤٥٦٧٨٩"]))
def test_numbers_in_names_are_ordered_by_value(numbers: list[int], digits: str) -> None:
    names = ["a" + "".join(digits[int(digit)] for digit in f"{number:020}") for number in numbers]
    assert sorted(names, key=natural_order) == [name for _, name in sorted(zip(numbers, names, strict=True))]


@many
@given(st.text("ab{}|,;_ \n", max_size=60), st.booleans())
def test_any_marks_are_a_caption(text: str, shuffle: bool) -> None:
    config = CaptionConfig(wildcards=True, shuffle=shuffle, tag_dropout=0.3, protected=("b",))
    with bounded(20):
        varies(config, [text])
        captions = {compose_caption([text], config, seed=1, picture=2, visit=visit) for visit in range(4)}
        captions.add(plain_caption([text], config))
    assert all(set(caption) <= set(text) | {",", " "} for caption in captions)


@pytest.mark.parametrize("digits", ["9" * 5000, "٣٢", "0"])
def test_numbers_that_are_no_sizes_are_refused_in_words(digits: str) -> None:
    with pytest.raises(ValueError, match=r"^The resolution .* is invalid"):
        parse_resolution(digits)
    with pytest.raises(ValueError, match=r"^The resolution .* is invalid"):
        ConceptConfig(folder="x", resolutions=(digits,))


# --- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
def test_paths_that_no_system_has_are_refused_in_words(path: str) -> None:
    for build in (
        lambda: ConceptConfig(folder=path),
        lambda: MaskConfig(folder=path),
        lambda: CaptionConfig(source="one_file", file=path),
    ):
        with pytest.raises(ValueError, match=r"^(folder|caption_file) of [\w ]+ contains NUL or half characters"):
            build()


def test_names_of_files_that_are_too_long_are_refused_in_words(tmp_path: Path) -> None:
    folder = table_folder(tmp_path)
    for options in (
        {"captions": CaptionConfig(source="one_file", file="x" * 5000)},
        {"captions": CaptionConfig(source="none"), "masks": MaskConfig(folder="x" * 5000)},
    ):
        with pytest.raises(ValueError, match=r"does not exist; check (caption_file|folder) of"):
            read(folder, **options)


def test_neither_errors_nor_notes_repeat_the_words_of_a_caption_file(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", caption=None)
    for content in (f"{SECRET} größe\n".encode("cp1252"), SECRET.encode() + b"\0", SECRET.encode() * 30_000):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.txt ") as error:
            read(tmp_path)
        assert SECRET not in str(error.value)
    (tmp_path / "a.txt").write_text(f"{SECRET} {{a|b}}\n{SECRET}")
    assert SECRET not in " ".join(read(tmp_path).notes)
    (tmp_path / "metadata.csv").write_text(f"file,text\na.png,x\n{SECRET},y\nsub/{SECRET},y\n")
    notes = read(tmp_path, captions=CaptionConfig(source="table")).notes
    assert "2 entries name no picture in metadata.csv: number 2, 3." in notes
    assert SECRET not in " ".join(notes)
