"""The report says what would otherwise be found out too late."""

import os
from pathlib import Path

import pytest
from clip_tokenizer import TOKENIZER
from tiny_models import model_of

from lora_atelier.trainer_core.config import CaptionConfig, ConceptConfig, DatasetConfig, TrainConfig
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import Manifest, Picture
from lora_atelier.trainer_core.models.sd import load_tokenizer
from lora_atelier.trainer_core.preflight.report import long_captions, report


@pytest.fixture(scope="module")
def base():
    """Return a base model that can only count tokens."""
    base = model_of()
    base.tokenizer = load_tokenizer(Path(TOKENIZER))
    return base


def sentences(base, *texts: str, **captions) -> list[str]:
    """Return what is said of the lengths of some captions."""
    pictures = tuple(
        Picture(path=Path(n), name=n, concept=0, width=512, height=512, digest=n, lines=(text,))
        for n, text in ((f"{i}.png", text) for i, text in enumerate(texts))
    )
    dataset = DatasetConfig(concepts=(ConceptConfig(folder="x", captions=CaptionConfig(**captions)),))
    return long_captions(build_plan(Manifest(pictures=pictures), dataset, TrainConfig()), base.text, {})


def test_captions_within_the_window_are_not_mentioned(base) -> None:
    assert sentences(base, "", "a cat", "cat " * 75, "a" * 60) == []


def test_captions_beyond_the_window_are_named_with_their_tokens_and_what_would_be_cut(base) -> None:
    endless = "cat " * 2400 + "the end of the story"
    long, cut = sentences(base, "cat " * 76, "cat", endless, "cat " * 2400)
    assert (
        long
        == "2 captions are longer than 75 tokens and encoded in parts of 75: 0.png (76 tokens), 3.png (2400 tokens)."
    )
    assert cut == '1 caption is longer than 2400 tokens and cut: 2.png (2405 tokens, without "the end of the story").'
    assert base.text.count_tokens(endless, {}) == 2405 and base.text.cut(endless, {}) == ("the end of the story", [])


def test_prefix_and_every_line_count_and_a_caption_of_50_kilobytes_is_no_trouble(base) -> None:
    assert sentences(base, "cat " * 74) == []
    assert len(sentences(base, "cat " * 74, prefix="two words")) == 1
    (cut,) = sentences(base, "word, " * 8500)
    assert cut.startswith("1 caption is longer than 2400 tokens and cut: 0.png (17000 tokens") and cut.endswith(
        '...").'
    )
    assert len(sentences(base, "cat " * 80 + ", dog", shuffle=True, tag_dropout=0.5)) == 1


@pytest.mark.parametrize(("warming", "remarked"), [(0, False), (3, False), (4, True)])
def test_a_tag_warm_up_that_outlasts_the_run_is_remarked_on(warming: int, remarked: bool) -> None:
    picture = Picture(path=Path("a.png"), name="a.png", concept=0, width=512, height=512, digest="a", lines=("a, b",))
    captions = CaptionConfig(tag_warmup_steps=warming)
    dataset = DatasetConfig(concepts=(ConceptConfig(folder="x", captions=captions),))
    text = report(build_plan(Manifest(pictures=(picture,)), dataset, TrainConfig(steps=4)))
    sentence = "tag_warmup_steps of Captions is 4, which does not end within the 4 steps of this run"
    assert (sentence in text) is remarked


@pytest.mark.parametrize(("text", "prefix", "remarked"), [("", "", True), ("a cat", "", False), ("", "zwx", False)])
def test_nothing_captioned_is_remarked_on_with_the_input_to_change(text: str, prefix: str, remarked: bool) -> None:
    picture = Picture(path=Path("a.png"), name="a.png", concept=0, width=512, height=512, digest="a", lines=(text,))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder="x", captions=CaptionConfig(prefix=prefix)),))
    said = report(build_plan(Manifest(pictures=(picture,)), dataset, TrainConfig()))
    assert ("Write a made-up word into trigger_word of Concept Dataset" in said) == remarked


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat|dog", r"cat\|dog"),
        *([(r"cat\|dog", r"cat\\\|dog")] if os.sep == "/" else []),  # else a folder in another one
        ("cat\ndog", r"cat\\ndog"),
        ("cat\r\u2028dog", r"cat\\r\\u2028dog"),
        ("cat`dog", r"cat\`dog"),
        ("*cat* <b>[dog](x)", r"\*cat\* \<b>\[dog](x)"),
        ("my_cat", "my_cat"),
    ],
)
def test_a_folders_name_is_one_cell_of_the_table_as_it_is(name, shown) -> None:
    picture = Picture(path=Path("a"), name="a.png", concept=0, width=512, height=512, digest="a", lines=("cat",))
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=name),))
    lines = report(build_plan(Manifest(pictures=(picture,)), dataset, TrainConfig())).splitlines()
    (row,) = (line for line in lines if "cat" in line and line.startswith("|"))
    rule = next(line for line in lines if line.startswith("|") and set(line) <= set("|-: "))
    assert row.split(" | ")[0].removeprefix("|").strip() == shown
    assert row.replace(shown, "").count("|") == rule.count("|")
