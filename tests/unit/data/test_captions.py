"""Captions are composed in one order, and every draw depends on its own setting alone."""

import functools
import itertools
import math
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig
from lora_atelier.trainer_core.data.captions import (
    compose_caption,
    has_wildcards,
    is_dropped,
    leave_out_word,
    mentions_side,
    plain_caption,
    replace_word,
    split_tags,
    varies,
)
from lora_atelier.trainer_core.lora_files.metadata import tag_frequency

several = examples(60)


@functools.cache
def config(**settings: Any) -> CaptionConfig:
    return CaptionConfig(**settings)


def compose(text: str | list[str], visit: int = 0, picture: int = 0, seed: int = 0, /, **settings: Any) -> str:
    lines = [text] if isinstance(text, str) else text
    return compose_caption(lines, config(**settings), seed=seed, picture=picture, visit=visit)


def plain(text: str | list[str], /, **settings: Any) -> str:
    return plain_caption([text] if isinstance(text, str) else text, config(**settings))


# --- order and spelling ---------------------------------------------------------------------------------------


def test_the_vector_without_shuffle() -> None:
    assert compose("a, b, c;;;d, e", keep=1, suffix="photo") == "a, b, c,d, e photo"


def test_with_any_shuffle_the_head_stays_and_glued_tags_stay_together() -> None:
    orders = set()
    for visit in range(200):
        caption = compose("a, b, c;;;d, e", visit, keep=1, shuffle=True)
        assert caption.startswith("a, ")
        assert "c,d" in caption
        assert Counter(split_tags(caption.replace("c,d", "cd"))) == Counter(["a", "b", "cd", "e"])
        orders.add(caption)
    assert len(orders) == 6  # all orders of the three that move


def test_all_orders_of_a_shuffle_are_equally_frequent() -> None:
    counts = Counter(compose("a, b, c", visit, shuffle=True) for visit in range(3000))
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * (3000 * 1 / 6 * 5 / 6) ** 0.5 for count in counts.values())


def test_the_trigger_word_stays_in_front_of_shuffled_tags() -> None:
    for visit in range(50):
        assert compose("a, b, c", visit, shuffle=True, prefix="sks dog,").startswith("sks dog, ")


@pytest.mark.parametrize("text", ["A cat,sitting.  It has 3,000 hairs", "a ,, b  c ,", "a {b|c} d {{e}}"])
def test_a_caption_that_does_not_vary_keeps_its_spelling(text: str) -> None:
    assert compose(f"  {text} ") == text
    assert compose(text, prefix=" sks", suffix="photo ") == f"sks {text} photo"
    assert compose(text, dropout=1e-12) == text  # dropout of the whole caption is no reason to touch it


def test_tags_that_move_are_trimmed_and_empty_ones_vanish() -> None:
    assert sorted(split_tags(compose(" a ,, b  c ,", shuffle=True))) == ["a", "b  c"]
    assert compose(" a ,, b  c ,", tag_dropout=1e-12) == "a, b  c"


@pytest.mark.parametrize("settings", [{}, {"shuffle": True, "tag_dropout": 0.5, "wildcards": True, "lines": "join"}])
def test_no_text_is_an_empty_caption_with_prefix_and_suffix(settings: dict[str, Any]) -> None:
    for lines in ([], [""], ["  "]):
        assert compose(lines, **settings) == plain(lines, **settings) == ""
        assert compose(lines, prefix="sks", suffix="photo", **settings) == "sks photo"


@pytest.mark.parametrize(
    ("separator", "text", "expected"),
    [
        (",", "a,b;;;c,d", "a, b,c, d"),
        (", ", "a,b;;;c, d", "a, b, c, d"),
        (" | ", "a|b;;;c | d", "a | b | c | d"),
        (".", "One.Two;;;three.", "One. Two.three"),
        ("、", "赤、青;;;白", "赤、 青、白"),
    ],
)
def test_separators_are_joined_with_one_blank(separator: str, text: str, expected: str) -> None:
    assert compose(text, separator=separator) == expected


@pytest.mark.parametrize(
    ("text", "head", "flex", "tail"),
    [
        ("a, b ||| c, d, e ||| f, g", ["a", "b"], ["c", "d", "e"], ["f", "g"]),
        ("a, b ||| c, d", ["a", "b"], ["c", "d"], []),
        ("||| c, d ||| f", [], ["c", "d"], ["f"]),
        ("a ||| b ||| c ||| d", ["a"], ["b"], ["c", "d"]),
        ("a ||| ", ["a"], [], []),
    ],
)
def test_fixed_parts_of_the_text_override_keep(text: str, head: list[str], flex: list[str], tail: list[str]) -> None:
    assert compose(text, keep=4) == ", ".join(head + flex + tail)
    assert compose(text, tag_dropout=1.0, keep=4) == ", ".join(head + tail)
    for visit in range(20):
        tags = split_tags(compose(text, visit, shuffle=True))
        assert tags[: len(head)] == head
        assert tags[len(tags) - len(tail) :] == tail
        assert sorted(tags[len(head) : len(tags) - len(tail)]) == flex


# --- lines ----------------------------------------------------------------------------------------------------


@several
@given(count=st.integers(1, 6), cycle=st.integers(0, 5), picture=st.integers(0, 99), seed=st.integers(0, 2**63))
def test_each_line_comes_once_per_cycle(count: int, cycle: int, picture: int, seed: int) -> None:
    lines = [f"line {n}" for n in range(count)]
    visits = range(cycle * count, (cycle + 1) * count)
    assert sorted(compose(lines, visit, picture, seed) for visit in visits) == lines


def test_cycles_and_pictures_have_their_own_order_of_lines() -> None:
    lines = list("abcdef")
    orders = {tuple(compose(lines, 6 * cycle + n, picture) for n in range(6)) for cycle in (0, 1) for picture in (0, 1)}
    assert len(orders) == 4


def test_lines_may_be_joined_or_cut_to_the_first() -> None:
    assert {compose(["a", "b"], visit, lines="first") for visit in range(9)} == {"a"}
    assert {compose(["a", "b"], visit, lines="join") for visit in range(9)} == {"a b"}


# --- dropout --------------------------------------------------------------------------------------------------


def test_uniform_tag_dropout_leaves_out_the_given_share_but_never_the_head() -> None:
    kept = Counter()
    for visit in range(2000):
        kept.update(split_tags(compose("head, a, b, c", visit, keep=1, tag_dropout=0.3)))
    assert kept["head"] == 2000
    for tag in "abc":
        assert abs(kept[tag] / 2000 - 0.7) < 5 * (0.3 * 0.7 / 2000) ** 0.5


@pytest.mark.parametrize("shuffle", [False, True])
def test_weighted_tag_dropout_follows_the_place_in_the_text(shuffle: bool) -> None:
    visits, p, tags = 2000, 0.8, ["a", "b", "c", "d"]
    kept = Counter()
    for visit in range(visits):
        settings = {"tag_dropout": p, "tag_dropout_mode": "weighted", "shuffle": shuffle, "keep": 1}
        kept.update(split_tags(compose("head, a, b, c, d", visit, **settings)))
    for place, tag in enumerate(tags):
        chance = p * (place + 1) / 4
        assert abs(1 - kept[tag] / visits - chance) < 5 * (chance * (1 - chance) / visits) ** 0.5


def test_what_is_left_out_says_nothing_about_the_order() -> None:
    settings: dict[str, Any] = {"shuffle": True, "tag_dropout": 0.9, "tag_dropout_mode": "weighted"}
    found = [split_tags(compose("a, b, c", visit, **settings)) for visit in range(4000)]
    both = [tags.index("a") < tags.index("b") for tags in found if {"a", "b"} <= set(tags)]
    assert len(both) > 800
    assert abs(sum(both) / len(both) - 0.5) < 5 * 0.5 / len(both) ** 0.5


def test_protected_tags_are_never_left_out() -> None:
    protected = (" SKS ", "Straße")
    text = "a, Sks, b;;;sks, STRASSE, c"
    assert compose(text, tag_dropout=1.0, protected=protected) == "Sks, b,sks, STRASSE"
    assert compose("a, b", tag_dropout=1.0) == ""


def test_caption_dropout_empties_everything_prefix_included() -> None:
    captions = Counter(compose("a", visit, prefix="sks", dropout=0.25) for visit in range(2000))
    assert set(captions) == {"", "sks a"}
    assert abs(captions[""] / 2000 - 0.25) < 5 * (0.25 * 0.75 / 2000) ** 0.5
    assert compose("a", prefix="sks", dropout=1.0) == ""


# --- wildcards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("a {red|blue} cat", {"a red cat", "a blue cat"}),
        ("{a|{b|c}}", {"a", "b", "c"}),
        ("{{a|b}|c}", {"a", "b", "c"}),
        ("{a {x|y}|b}", {"a x", "a y", "b"}),
        ("{very |}big", {"very big", "big"}),
        ("{red|}, cat", {"red, cat", "cat"}),
        ("cat,{ red|},{ big|}", {"cat, red, big", "cat, red", "cat, big", "cat"}),
        ("{a|b}{1|2}", {"a1", "a2", "b1", "b2"}),
        ("{{ {a|b} }}", {"{ a }", "{ b }"}),
        ("{x{{a|b}}|y}", {"x{a|b}", "y"}),
        ("{a|b}}}", {"a}", "b}"}),
        ("{{{a|b}", {"{a", "{b"}),
        ("{a|b} }", {"a }", "b }"}),
        ("{ {a|b}", {"{ a", "{ b"}),
        ("{|}", {""}),
        ("{2$$a|b}", {"a, b", "b, a"}),
        ("{1-2$$a|b}", {"a", "b", "a, b", "b, a"}),
        ("{2-$$a|b|c}", {", ".join(some) for count in (2, 3) for some in itertools.permutations("abc", count)}),
        ("{2$$ and $$a|{b|c}}", {"a and b", "b and a", "a and c", "c and a"}),
        ("{9$$a|b}", {"a, b", "b, a"}),
        ("{a|2$$b}", {"a", "2$$b"}),
    ],
)
def test_wildcards_take_each_of_their_options(text: str, options: set[str]) -> None:
    assert has_wildcards(text)
    assert {compose(text, visit, wildcards=True) for visit in range(80)} == options
    assert {compose(text, visit) for visit in range(3)} == {text}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a} cat", "{a} cat"),
        ("{{a|b}}", "{a|b}"),
        ("{{{{a}}}}", "{{a}}"),
        ("a {{ b }} c", "a { b } c"),
        ("}} {{", "} {"),
        (":} {a|b", ":} {a|b"),
        ("a|b", "a|b"),
        ("} {", "} {"),
        ("{a {b}", "{a {b}"),
        ("{}", "{}"),
        ("a , b,c", "a , b,c"),
    ],
)
def test_other_braces_stay_and_double_ones_are_escapes(text: str, expected: str) -> None:
    assert not has_wildcards(text)
    assert not varies(config(wildcards=True), [text])
    assert compose(text, wildcards=True) == plain(text, wildcards=True) == expected


def test_options_are_equally_frequent() -> None:
    counts = Counter(compose("{a|b|c}", visit, wildcards=True) for visit in range(3000))
    assert all(abs(counts[option] - 1000) < 5 * (3000 * 1 / 3 * 2 / 3) ** 0.5 for option in "abc")


@pytest.mark.parametrize(
    "text", ["{" * 25000, "}" * 25000, "{a|" * 9000 + "}" * 9000, "{{a|b}" * 5000, "|" * 30000], ids=range(5)
)
def test_odd_braces_of_50_kb_end(text: str) -> None:
    caption = compose(text, wildcards=True)
    assert len(caption) <= len(text)
    assert compose(text) == (text if "|||" not in text else "")


@several
@given(st.text("ab{}|", max_size=24))
def test_wildcards_add_nothing_and_leave_plain_text_alone(text: str) -> None:
    expanded = compose(text, wildcards=True, separator="#")
    rest = iter(text)
    assert all(char in rest for char in expanded.replace("# ", ""))  # in order; "# " stands where ||| was
    if not has_wildcards(text) and "{{" not in text and "}}" not in text and "|||" not in text:
        assert expanded == text


# --- tag warm-up ----------------------------------------------------------------------------------------------


def use(step: int | None, text: str = "a, b, c, d, e", /, **settings: Any) -> list[str]:
    caption = compose_caption([text], config(**settings), seed=0, picture=0, visit=step or 0, step=step)
    return split_tags(caption)


@several
@given(count=st.integers(0, 12), least=st.integers(0, 14), steps=st.integers(1, 50))
def test_the_tags_in_use_follow_the_formula_and_are_the_first(count: int, least: int, steps: int) -> None:
    tags = [f"t{i}" for i in range(count)]
    for step in range(steps + 2):
        used = math.floor(Fraction(step * (count - least), steps)) + least if step < steps else count
        found = use(step, ", ".join(tags), tag_warmup_steps=steps, tag_warmup_min=least)
        assert found == tags[:used]


def test_tags_in_their_place_protected_ones_and_the_trigger_word_need_no_warm_up() -> None:
    warming: dict[str, Any] = {"tag_warmup_steps": 10, "tag_warmup_min": 0, "prefix": "sks"}
    assert use(0, keep=1, protected=("D",), **warming) == ["sks a", "d"]
    assert use(0, "a ||| b, c ||| d", **warming) == ["sks a", "d"]
    assert use(9, **warming) == ["sks a", "b", "c", "d"]
    assert use(10, **warming) == use(None, **warming) == ["sks a", "b", "c", "d", "e"]


@several
@given(step=st.integers(0, 30), p=st.sampled_from([0.0, 0.5]))
def test_a_warm_up_leaves_what_other_settings_draw(step: int, p: float) -> None:
    tags = ", ".join("abcdefghijklmnopqrst")
    drawn = {"shuffle": True, "tag_dropout": p}
    (cut, whole), first = (use(step, tags, **drawn, **more) for more in ({"tag_warmup_steps": 20}, {})), step * 19 // 20
    assert cut == [tag for tag in whole if step >= 20 or ord(tag) - ord("a") <= first]


def test_captions_vary_over_a_warm_up_only_if_tags_can_be_missing() -> None:
    warming = config(tag_warmup_steps=5, keep=1)
    assert varies(warming, ["a, b"]) and not varies(warming, ["a"])
    assert not varies(warming.replace(protected=("b",)), ["a, b"])


def test_every_nth_epoch_is_empty() -> None:
    assert [is_dropped(config(dropout_every_n_epochs=3), epoch) for epoch in range(7)] == [False, False, True] * 2 + [
        False
    ]
    assert all(is_dropped(config(dropout_every_n_epochs=1), epoch) for epoch in range(3))
    assert not any(is_dropped(config(), epoch) for epoch in range(3))


def test_a_class_prompt_has_to_be_written() -> None:
    with pytest.raises(ValueError, match=r"set class_prompt of Captions to the caption of pictures without one"):
        CaptionConfig(missing="class_prompt", class_prompt=" ")


# --- properties -----------------------------------------------------------------------------------------------

TAGS = st.lists(st.from_regex(r"[a-z]{1,5}", fullmatch=True), max_size=8, unique=True)
SETTINGS = st.fixed_dictionaries(
    {
        "shuffle": st.booleans(),
        "keep": st.integers(0, 4),
        "tag_dropout": st.sampled_from([0.0, 0.3, 1.0]),
        "tag_dropout_mode": st.sampled_from(["uniform", "weighted"]),
        "dropout": st.sampled_from([0.0, 0.3]),
        "wildcards": st.booleans(),
        "lines": st.sampled_from(["draw", "first", "join"]),
    }
)
INDEX = {"visit": st.integers(0, 999), "picture": st.integers(0, 99), "seed": st.integers(0, 2**63)}


@several
@given(tags=TAGS, settings=SETTINGS, protected=st.integers(0, 255), **INDEX)
def test_kept_and_protected_tags_are_never_lost_and_none_is_added(
    tags: list[str], settings: dict[str, Any], protected: int, visit: int, picture: int, seed: int
) -> None:
    safe = tuple(tag.upper() for place, tag in enumerate(tags) if protected >> place & 1)
    settings = {**settings, "dropout": 0.0, "protected": safe}
    result = split_tags(compose(", ".join(tags), visit, picture, seed, **settings))
    keep = settings["keep"]
    assert result[:keep] == tags[:keep]
    assert {tag.lower() for tag in safe} <= set(result) <= set(tags)
    assert len(result) == len(set(result))
    if settings["tag_dropout"] == 0:
        assert sorted(result) == sorted(tags)
    if not settings["shuffle"]:
        assert result == [tag for tag in tags if tag in result]


@several
@given(tags=TAGS, lines=st.integers(1, 3), settings=SETTINGS, braces=st.booleans(), seed=INDEX["seed"])
def test_captions_that_do_not_vary_are_the_same_at_every_visit(
    tags: list[str], lines: int, settings: dict[str, Any], braces: bool, seed: int
) -> None:
    texts = [", ".join([*tags, f"line {n}", "{x|y}" if braces else "z"]) for n in range(lines)]
    found = {compose(texts, visit, 0, seed, **settings) for visit in range(12)}
    assert len(found) == 1 or varies(config(**settings), texts)
    assert compose(texts, 5, 0, seed, **settings) == compose(texts, 5, 0, seed, **settings)


@several
@given(tags=TAGS, p=st.sampled_from([0.2, 0.7]), **INDEX)
def test_one_setting_does_not_change_what_another_draws(
    tags: list[str], p: float, visit: int, picture: int, seed: int
) -> None:
    lines = [", ".join([*tags, "{X|Y}", end]) for end in ("ONE", "TWO", "THREE")]

    def tags_with(**settings: Any) -> list[str]:
        return split_tags(compose(lines, visit, picture, seed, wildcards=True, **settings))

    whole, order, left = tags_with(), tags_with(shuffle=True), tags_with(tag_dropout=p)
    assert sorted(whole) == sorted(order)  # the same line and options
    assert left == [tag for tag in whole if tag in left]
    assert tags_with(shuffle=True, tag_dropout=p) == [tag for tag in order if tag in left]
    assert tags_with(shuffle=True, dropout=p) in ([], order)
    empty = not compose("a", visit, picture, seed, dropout=p)
    assert empty == (not tags_with(dropout=p, shuffle=True, tag_dropout=0.01, protected=("one", "two", "three")))


@several
@given(tags=TAGS, **INDEX)
def test_more_kept_tags_leave_the_order_of_the_others(tags: list[str], visit: int, picture: int, seed: int) -> None:
    for keep in range(len(tags)):
        now, more = (
            split_tags(compose(", ".join(tags), visit, picture, seed, shuffle=True, keep=k)) for k in (keep, keep + 1)
        )
        moving = set(tags[keep + 1 :])
        assert [tag for tag in now if tag in moving] == [tag for tag in more if tag in moving]


def test_a_caption_is_a_function_of_seed_picture_and_visit() -> None:
    settings: dict[str, Any] = {"shuffle": True, "tag_dropout": 0.2}
    text = ", ".join("abcdefghij")
    assert compose(text, 3, 4, 5, **settings) == compose(text, 3, 4, 5, **settings)
    others = {compose(text, *index, **settings) for index in [(3, 4, 5), (4, 4, 5), (3, 5, 5), (3, 4, 6)]}
    assert len(others) == 4


# --- varies, plain, sides -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "lines", "expected"),
    [
        ({"keep": 2, "prefix": "a"}, ["a, b, c"], False),
        ({}, ["a", "b"], True),
        ({"lines": "first"}, ["a", "b"], False),
        ({"lines": "join"}, ["a", "b"], False),
        ({"lines": "join", "shuffle": True}, ["a,", "b"], True),
        ({"lines": "first", "wildcards": True}, ["a", "{b|c}"], False),
        ({"shuffle": True}, ["a, b"], True),
        ({"shuffle": True}, ["a"], False),
        ({"shuffle": True, "keep": 1}, ["a, b"], False),
        ({"shuffle": True}, ["a ||| b ||| c"], False),
        ({"shuffle": True}, ["a;;;b"], False),
        ({"tag_dropout": 0.1}, ["a"], True),
        ({"tag_dropout": 0.1, "keep": 1}, ["a"], False),
        ({"tag_dropout": 0.1, "protected": ("A",)}, ["a, a;;;b"], False),
        ({"tag_dropout": 0.1}, [], False),
        ({"dropout": 0.1}, ["a"], True),
        ({"wildcards": True}, ["{a|b}"], True),
        ({"wildcards": True}, ["{a}"], False),
        ({}, ["{a|b}"], False),
        ({}, [], False),
    ],
)
def test_varies_tells_whether_visits_differ(settings: dict[str, Any], lines: list[str], expected: bool) -> None:
    assert varies(config(**settings), lines) is expected
    assert (len({compose(lines, visit, **settings) for visit in range(60)}) > 1) is expected


def test_the_plain_caption_draws_nothing() -> None:
    settings: dict[str, Any] = {"shuffle": True, "tag_dropout": 1.0, "dropout": 1.0, "wildcards": True, "prefix": "sks"}
    assert plain(["z, {b|a} ||| c;;;d", "other"], **settings) == "sks z, b, c,d"
    assert plain(["a,b", "c"], lines="join") == "a,b c"
    assert plain("3,000 {a|b}") == "3,000 {a|b}"


@pytest.mark.parametrize(
    "text",
    [
        *("left", "a cat on the LEFT", "Right hand", "left-handed", "lefthanded girl", "from_left", "looking right."),
        *("leftmost", "rightwards", "left2right", "righty"),
    ],
)
def test_sides_are_noticed(text: str) -> None:
    assert mentions_side(text)


@pytest.mark.parametrize(
    "text", ["", "bright light", "copyright", "upright", "leftover", "cleft", "righteous", "éleft"]
)
def test_words_that_only_hold_a_side_are_none(text: str) -> None:
    assert not mentions_side(text)


# --- tag frequency --------------------------------------------------------------------------------------------


def frequency(pictures: list[tuple[int, tuple[str, ...]]], *concepts: ConceptConfig) -> dict[str, dict[str, int]]:
    manifest = SimpleNamespace(pictures=[SimpleNamespace(concept=n, lines=lines) for n, lines in pictures])
    return tag_frequency(cast(Any, manifest), DatasetConfig(concepts=concepts))


def test_tag_frequency_is_counted_by_folder_name() -> None:
    cats = ConceptConfig(folder="/data/cats", captions=CaptionConfig(prefix="sks"))
    dogs = ConceptConfig(folder="/data/dogs/", captions=CaptionConfig(separator=".", wildcards=True))
    counts = frequency(
        [(0, ("Cat, red, cat",)), (0, ("cat, a;;;b", "cat ||| two")), (0, ()), (1, ("dog. {Big. old|small}",))],
        cats,
        dogs,
    )
    assert counts == {
        "cats": {"sks": 4, "cat": 3, "red": 1, "a": 1, "b": 1, "two": 1},
        "dogs": {"dog": 1, "big": 1, "old": 1},
    }
    assert all(first >= second for first, second in pairwise(counts["cats"].values()))


def test_tag_frequency_counts_the_lines_that_are_used() -> None:
    first = ConceptConfig(folder="a", captions=CaptionConfig(lines="first"))
    joined = ConceptConfig(folder="b", captions=CaptionConfig(lines="join"))
    assert frequency([(0, ("x", "y")), (1, ("x", "y"))], first, joined) == {"a": {"x": 1}, "b": {"x y": 1}}


@several
@given(st.lists(TAGS, min_size=1, max_size=4))
def test_tag_frequency_adds_up(lines: list[list[str]]) -> None:
    counts = frequency([(0, tuple(", ".join(tags) for tags in lines))], ConceptConfig(folder="a"))["a"]
    assert sum(counts.values()) == sum(map(len, lines))
    assert all(re.fullmatch("[a-z]+", tag) for tag in counts)


def test_a_caption_has_so_many_variants_and_they_come_in_turn() -> None:
    tags = ", ".join(f"tag {number}" for number in range(12))
    free = [compose(tags, visit, shuffle=True, tag_dropout=0.2) for visit in range(40)]
    bounded = [compose(tags, visit, shuffle=True, tag_dropout=0.2, variants=5) for visit in range(40)]
    assert len(set(free)) == 40 and bounded == free[:5] * 8
    assert compose("{a|b|c} x", 7, wildcards=True, variants=3) == compose("{a|b|c} x", 1, wildcards=True)


def test_each_line_has_its_own_variants() -> None:
    lines = ["a, b, c, d, e, f", "g, h, i, j, k, l", "m, n, o, p, q, r"]
    found = [compose(lines, visit, shuffle=True, variants=4) for visit in range(300)]
    assert len(set(found)) == 12
    for first in "agm":
        own = [text for text in found if first in text]
        assert len(own) == 100 and len(set(own)) == 4 and max(map(own.count, own)) == 25


def test_a_bound_does_not_bound_the_dropout_of_captions() -> None:
    dropped = [compose("a, b, c", visit, shuffle=True, dropout=0.5, variants=2) == "" for visit in range(400)]
    assert 140 < sum(dropped) < 260 and len({tuple(dropped[at : at + 2]) for at in range(0, 400, 2)}) == 4


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a mossling on a rock", "a on a rock"),
        ("Mossling, forest, a mossling's hat", "forest, a 's hat"),
        ("mosslings , two  spaces", "mosslings , two  spaces"),  # another word: nothing changes
        ("mossling", ""),
    ],
)
def test_a_word_is_left_out_of_a_caption_with_what_it_leaves_behind(text: str, left: str) -> None:
    assert leave_out_word(text, " mossling ") == left
    assert replace_word(text, "mossling", r"\1").count(r"\1") == len(re.findall(r"(?i)mossling\b", text))
