"""Captions are read without loss and composed in the order of maths.md, section 2."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lora_atelier.trainer_core.captions import compose_caption, read_text, split_tags, tag_frequency, varies
from lora_atelier.trainer_core.config import ConceptConfig, DatasetConfig
from lora_atelier.trainer_core.scan import Manifest, Picture


@functools.cache
def concept(**settings: Any) -> ConceptConfig:
    return ConceptConfig(folder="x", **settings)


def compose(text: str, visit: int = 0, picture: int = 0, seed: int = 0, **settings: Any) -> str:
    return compose_caption(text, concept(**settings), seed=seed, picture=picture, visit=visit)


def test_the_vector_without_shuffle() -> None:
    assert compose("a, b, c;;;d, e", keep_tags=1, caption_suffix="photo") == "a, b, c,d, e photo"


def test_with_any_shuffle_the_head_stays_and_glued_tags_stay_together() -> None:
    orders = set()
    for visit in range(200):
        caption = compose("a, b, c;;;d, e", visit, keep_tags=1, shuffle_tags=True)
        assert caption.startswith("a, ")
        assert "c,d" in caption
        assert Counter(split_tags(caption.replace("c,d", "cd"))) == Counter(["a", "b", "cd", "e"])
        orders.add(caption)
    assert len(orders) == 6  # all orders of the three that move


def test_the_trigger_word_stays_in_front_of_shuffled_tags() -> None:
    for visit in range(50):
        assert compose("a, b, c", visit, shuffle_tags=True, caption_prefix="sks dog,").startswith("sks dog, ")


def test_empty_tags_vanish_and_blanks_are_trimmed() -> None:
    assert compose(" a ,, b  c ,") == "a, b  c"
    assert compose("", caption_prefix="sks") == "sks"
    assert compose("") == ""
    assert compose("a cat on a mat") == "a cat on a mat"


def test_tag_dropout_leaves_out_the_given_share_but_never_the_head() -> None:
    kept = Counter()
    for visit in range(2000):
        kept.update(split_tags(compose("head, a, b, c", visit, keep_tags=1, tag_dropout=0.3)))
    assert kept["head"] == 2000
    for tag in "abc":
        assert abs(kept[tag] / 2000 - 0.7) < 0.05
    assert compose("head, a, b", keep_tags=1, tag_dropout=1.0) == "head"


def test_caption_dropout_empties_everything_prefix_included() -> None:
    captions = Counter(compose("a", visit, caption_prefix="sks", caption_dropout=0.25) for visit in range(2000))
    assert set(captions) == {"", "sks a"}
    assert abs(captions[""] / 2000 - 0.25) < 0.04
    assert compose("a", caption_prefix="sks", caption_dropout=1.0) == ""


def test_a_caption_is_a_function_of_seed_picture_and_visit() -> None:
    settings: dict[str, Any] = {"shuffle_tags": True, "tag_dropout": 0.2}
    text = ", ".join("abcdefghij")
    assert compose(text, 3, 4, 5, **settings) == compose(text, 3, 4, 5, **settings)
    others = {compose(text, *index, **settings) for index in [(3, 4, 5), (4, 4, 5), (3, 5, 5), (3, 4, 6)]}
    assert len(others) == 4


def test_dropout_does_not_change_the_order_of_the_shuffle() -> None:
    text = ", ".join("abcdefgh")
    plain = split_tags(compose(text, 7, shuffle_tags=True))
    thinned = split_tags(compose(text, 7, shuffle_tags=True, tag_dropout=0.4))
    assert thinned == [tag for tag in plain if tag in thinned]
    assert len(thinned) < 8


def test_varies_tells_whether_visits_differ() -> None:
    assert not varies(ConceptConfig(folder="x", keep_tags=2, caption_prefix="a"))
    assert all(
        varies(ConceptConfig(folder="x", **{name: value}))
        for name, value in [("shuffle_tags", True), ("tag_dropout", 0.1), ("caption_dropout", 0.1)]
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marked_encodings_are_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("猫, größe, 🐈".encode(encoding))
    assert read_text(tmp_path / "a.txt") == "猫, größe, 🐈"


@pytest.mark.parametrize("data", ["größe".encode("latin-1"), "cat".encode("utf-16-le"), b"\xff\xfea"])
def test_other_encodings_are_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "odd.txt").write_bytes(data)
    with pytest.raises(ValueError, match=r"odd\.txt.*save it as UTF-8"):
        read_text(tmp_path / "odd.txt")


def test_tag_frequency_is_counted_by_folder_name() -> None:
    def picture(concept: int, caption: str) -> Picture:
        return Picture(path=Path("x"), name="x", concept=concept, width=1, height=1, digest="", caption=caption)

    manifest = Manifest(pictures=(picture(0, "Cat, red"), picture(0, "cat, a;;;b"), picture(1, "dog")))
    dataset = DatasetConfig(
        concepts=(ConceptConfig(folder="/data/cats", caption_prefix="sks"), ConceptConfig(folder="/data/dogs/"))
    )
    assert tag_frequency(manifest, dataset) == {
        "cats": {"sks": 2, "cat": 2, "red": 1, "a": 1, "b": 1},
        "dogs": {"dog": 1},
    }
