"""Files of another computer get names that stand in a folder of any system, and captions stay with their pictures."""

import posixpath

from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config.saves import RESERVED
from lora_atelier.trainer_core.data.scan.sent import usable_names


def test_pictures_captions_and_masks_travel_along() -> None:
    sent = ["a.PNG", "a.txt", "a-masklabel.png", "sub\\b.jpeg", "./c.webp", "c.webp.txt", "metadata.jsonl"]
    assert usable_names(sent) == [
        *("a.png", "a.txt", "a-masklabel.png", "sub/b.jpeg", "c.webp", "c.webp.txt", "metadata.jsonl")
    ]


def test_what_no_dataset_reads_stays() -> None:
    sent = ["run.exe", "a", "", ".png", ".git/a.png", "__MACOSX/a.png", "../a.png", "a/../../b.png", "b.wav"]
    assert usable_names(sent) == [""] * len(sent)
    assert usable_names(["b.mp4", "b.txt"]) == ["b.mp4", "b.txt"]
    assert usable_names(["/".join("abcdefg") + ".png"]) == [""]


def test_names_that_a_system_refuses_are_changed_for_picture_and_caption_alike() -> None:
    sent = [
        "what?.png",
        "what?.txt",
        "what*.png",
        "what*.txt",
        "con.png",
        "a. .png",
        "x\u202egnp.png",
        "é.png",
        "e\u0301.png",
    ]
    assert usable_names(sent) == [
        *("what_.png", "what_.txt", "what_ 2.png", "what_ 2.txt", "_con.png", "a.png", "x_gnp.png", "é.png", "")
    ]
    assert usable_names(["Cat.png", "cat.png", "cat.txt"]) == ["Cat.png", "cat 2.png", "cat 2.txt"]
    assert usable_names(["cat.png", "Cat.txt"]) == ["cat.png", "Cat.txt"]


def test_many_files_of_one_name_are_named_at_once() -> None:
    names = usable_names([f"{chr(1) * (i % 7)}{chr(2) * (i % 11)}{chr(3) * (i % 260)}a.png" for i in range(20_000)])
    assert len(set(names) - {""}) == len([name for name in names if name])


@given(
    st.lists(st.text(st.sampled_from(list("ab/\\.:?*\0\ud800\u202e EÉ")), max_size=12).map(lambda name: name + ".png"))
)
def test_any_name_stays_below_the_folder(sent: list[str]) -> None:
    names = [name for name in usable_names(sent) if name]
    assert len({name.casefold() for name in names}) == len(names)
    for name in names:
        parts = name.split("/")
        assert posixpath.normpath(name) == name and not name.startswith("/") and "\\" not in name
        assert not any(part.startswith(".") or part.rstrip(" .") != part or RESERVED.fullmatch(part) for part in parts)
        assert all(len(part.encode()) < 255 and part.isprintable() for part in parts)
