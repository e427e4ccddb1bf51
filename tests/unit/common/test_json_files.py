"""JSON of strangers: read within bounds, or refused in a few words that repeat nothing of it."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.common.json_files import finite, parse_json, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)
SECRET = "swordfish"


@given(VALUES)
def test_what_json_can_hold_is_read_as_it_was_written(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{{"a": "{SECRET}"\n\n  b', "not JSON (line 3, column 3)"),
        (b'\xff\xfe\xfa"' + SECRET.encode(), "not text in UTF-8"),
        (b"", "not JSON (line 1, column 1)"),
        ("[" * 65 + "]" * 65, "nested more than 64 levels deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
        ("[" * 1_000_000, "nested more than 64 levels deep"),
        ('{"a":[' * 500_000, "nested more than 64 levels deep"),
        (f"[{'9' * 301}]", "an integer of more than 300 digits"),
        (f"-{'9' * 1_000_000}", "an integer of more than 300 digits"),
    ],
)
def test_what_is_refused_is_refused_in_a_few_words(text, reason):
    with pytest.raises(ValueError) as raised:
        parse_json(text)
    assert str(raised.value) == reason and raised.value.__cause__ is None


def test_what_just_fits_is_read():
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json("9" * 300) == 10**300 - 1
    assert parse_json(f'"{"9" * 400}"') == "9" * 400
    assert parse_json("[1e400, NaN]")[0] == float("inf")


def test_a_file_is_read_up_to_a_size(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('"' + "x" * (2**20 - 2) + '"', encoding="utf-8")
    assert len(read_json(path, 2**20)) == 2**20 - 2
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"^larger than 1 MiB$"):
        read_json(path, 2**20)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError, match=r"^not a file$"):
        read_json(tmp_path / "folder.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=r"^not a file$"):
        read_json(tmp_path / "pipe.json")


def test_what_json_has_no_word_for_becomes_null():
    given = {"loss": float("nan"), "rate": {"unet": 1e-4, "te": float("inf")}, "step": 3, "text": "a", "none": None}
    wanted = {"loss": None, "rate": {"unet": 1e-4, "te": None}, "step": 3, "text": "a", "none": None}
    assert finite(given) == wanted and finite(-float("inf")) is None
