"""Counts in singular and plural, and texts that a spreadsheet would compute."""

import pytest

from lora_atelier.trainer_core.common.wording import count, table_cell, them, without_paths


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (count([0], "picture has", "pictures have"), "1 picture has"),
        (count([], "picture has", "pictures have"), "0 pictures have"),
        (count(1, "epoch"), "1 epoch"),
        (count(1.0, "epoch"), "1 epoch"),
        (count(0.55, "epoch"), "0.55 epochs"),
        (count(13 / 3, "visit"), "4.33 visits"),
        (count(0.999, "epoch"), "1 epoch"),
        (count(20.0, "epoch"), "20 epochs"),
        (count(1_000_000, "step"), "1000000 steps"),
        (count(2, "batch", "batches"), "2 batches"),
    ],
)
def test_a_count_agrees_with_its_noun(text: str, wanted: str) -> None:
    assert text == wanted


@pytest.mark.parametrize("text", ["=1+1", "+A1", "-A1", "@sum", "\t=1", "-1e5 cats"])
def test_no_text_of_a_table_is_computed(text: str) -> None:
    assert table_cell(text) == f"'{text}"
    assert [table_cell(each) for each in ("a=1", "", "-1.5", "+2e-4", -3)] == ["a=1", "", "-1.5", "+2e-4", -3]


def test_one_thing_and_several_have_their_pronoun() -> None:
    assert [them(["a"]), them(["a", "b"])] == ["it", "them"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"no file 'C:\Users\Ann B\x.bin' here", "no file '(a path)' here"),
        ("/home/ann/my dir/x.py, at 2 s/step", "x.py, at 2 s/step"),
        ("(~/a/b) or //nas/a/b", "((a path) or (a path)"),
        (r"D:\Ann Maria B\x: \\?\C:\a b\libc.so.6", "(a path): libc.so.6"),
        ("models/loras: 3/4/5", "models/loras: 3/4/5"),
    ],
)
def test_no_path_of_a_machine_is_left(text: str, wanted: str) -> None:
    assert without_paths(text) == wanted
