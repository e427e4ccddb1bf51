"""Captions with weights: what is a weight and what is text, counted, cut and encoded alike, and an end to all of it."""

from pathlib import Path

import pytest
import torch
from bounded import bounded
from clip_tokenizer import TOKENIZER
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import model_of, tiny_clip

from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    ConnectedConfig,
    DatasetConfig,
    EmbeddingConfig,
    RunConfig,
)
from lora_atelier.trainer_core.models import check_weighted, word_ids
from lora_atelier.trainer_core.models.sd import load_tokenizer
from lora_atelier.trainer_core.models.sd.text import ClipEncoder, encode_caption, tokenize
from lora_atelier.trainer_core.models.weights import DEEPEST, LARGEST, weighted_parts
from lora_atelier.trainer_core.runs import build_keys

MARKS = st.lists(st.sampled_from(["(", ")", "\\", ":", "1.3", "-2", " ", "a", "inf", "\n", "猫"]), max_size=40)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(TOKENIZER))


@pytest.mark.parametrize(
    ("caption", "parts"),
    [
        ("", []),
        ("()", []),
        ("a cat:1.3", [("a cat:1.3", 1)]),
        ("a (cat) here", [("a ", 1), ("cat", 1.1), (" here", 1)]),
        ("(cat:1.3)", [("cat", 1.3)]),
        ("(cat: -.5 )", [("cat", -0.5)]),
        ("((cat))", [("cat", 1.1 * 1.1)]),
        ("((cat:1.3) dog:0.5)", [("cat", 1.3), (" dog", 0.5)]),
        ("((cat) dog:2)", [("cat", 2 * 1.1), (" dog", 2)]),
        ("(cat:dog)", [("cat:dog", 1.1)]),
        ("(a:b:1.2)", [("a:b", 1.2)]),
        ("(:1.2)", [(":1.2", 1.1)]),
        (r"\(cat\)", [("(cat)", 1)]),
        (r"(a \(cat\):1.2)", [("a (cat)", 1.2)]),
        (r"(cat\)", [("(cat)", 1)]),
        ("(cat", [("(cat", 1)]),
        ("cat) (dog)", [("cat) (dog)", 1)]),
        ("((cat)", [("(cat", 1.1)]),
        ("[cat] {dog}", [("[cat] {dog}", 1)]),
    ],
)
def test_brackets_are_weights_and_their_escapes_are_brackets(caption, parts):
    assert weighted_parts(caption) == [(text, pytest.approx(weight)) for text, weight in parts]


@examples(300)
@given(MARKS)
def test_a_caption_is_split_or_refused_and_escapes_are_text(marks):
    caption = "".join(marks)
    plain = caption.replace("(", r"\(").replace(")", r"\)")
    assert weighted_parts(plain) == ([(caption, 1.0)] if caption else [])
    try:
        parts = weighted_parts(caption)
    except ValueError as error:
        assert "a weight of" in str(error) and "inf" in caption
        return
    assert all(text and abs(weight) <= LARGEST for text, weight in parts)
    rest = iter(caption)
    assert all(mark in rest for mark in "".join(text for text, _ in parts)), "in the caption's order"


@pytest.mark.parametrize(
    ("caption", "sentence"),
    [
        (
            "(" * 10_000 + ")" * 10_000,
            r'The text "\({60}\.\.\." has more than 100 brackets in each other; change it, or',
        ),
        (
            "(cat:1e9)",
            r'The text "\(cat:1e9\)" has a weight of 1e\+09, beyond 1000; .* turn prompt_weights of the base',
        ),
        ("(cat:nan)", "a weight of nan"),
        ("(cat:-inf)", "a weight of -inf"),
        ("(" * 99 + "cat" + ")" * 99, "a weight of 1252"),
    ],
)
def test_what_no_number_can_hold_is_refused(caption, sentence):
    with bounded(10), pytest.raises(ValueError, match=sentence):
        check_weighted(["fine", caption])


@pytest.mark.parametrize(
    "caption",
    [
        "(" * 100_000,
        ")" * 100_000,
        "(a)" * 30_000,
        "(" * 50 + "a" * 100_000 + ":1" + ")" * 50,
        ("(" * DEEPEST + "a:1" + ")" * DEEPEST) * 500,
    ],
)
def test_endless_brackets_end_soon(caption):
    with bounded(20):
        weighted_parts(caption)


def test_counting_cutting_and_encoding_agree(tokenizer):
    base = model_of()
    base.tokenizer = tokenizer
    words = word_ids((EmbeddingConfig(token="mossling", vectors=3),))
    caption = "(cat:1.2) " * 600
    assert base.text.count_tokens(caption, {}) > 2400 and "cat" in base.text.cut(caption, {})[0]
    base.prompt_weights = True
    assert base.text.count_tokens(caption, {}) == 600 and base.text.cut(caption, {}) == ("", [])
    assert base.text.longest_batch([caption], 1, {}) == 8 * 77
    assert tokenize(tokenizer, caption, weights=True).shape == (8, 77)
    edge = "cat " * 74 + "(mossling:1.2)"  # three vectors do not fit and begin the next chunk
    assert base.text.count_tokens(edge, words) == 78 and base.text.longest_batch([edge], 1, words) == 154
    assert base.text.cut("cat " * 2399 + "(mossling:1.2)", words)[1] == ["mossling"]
    short = "(cat dog:1.2) " * 38  # 37 pairs fit, the last begins the next chunk
    assert base.text.count_tokens(short, {}) == 77 and tokenize(tokenizer, short, weights=True).shape == (2, 77)


def test_a_weight_moves_a_token_from_the_empty_prompt_and_reaches_the_gradients(tokenizer):
    model = tiny_clip(64, 2, open_clip=False, projected=False, seed=0)
    texts = [ClipEncoder(model=model, layer=1, final_norm=True, pooled=False, open_clip=False, prefix="lora_te")]

    def encode(caption, weights=True):
        return encode_caption(texts, tokenizer, caption, "cpu", weights=weights).context

    plain, empty, double = encode("a cat sat", weights=False), encode(""), encode("a (cat:2) sat")
    assert torch.equal(encode("a cat sat"), plain)  # bitwise: without weights nothing differs
    others = [i for i in range(77) if i != 2]
    assert torch.allclose(double[others], plain[others], atol=1e-5)
    assert torch.allclose(double[2], empty[2] + 2 * (plain[2] - empty[2]), atol=1e-4)
    assert torch.allclose(encode("a (cat:0) sat")[2], empty[2], atol=1e-5)
    assert encode("a (cat:2) sat", weights=False).shape == plain.shape and encode("a (cat:2) sat").requires_grad
    table = model.get_input_embeddings().weight
    (one,) = torch.autograd.grad(plain[2].sum(), table)
    (two,) = torch.autograd.grad(double[2].sum(), table)
    (rest,) = torch.autograd.grad(empty[2].sum(), table)
    assert torch.allclose(two, 2 * one - rest, atol=1e-3)


def key_of(**settings):
    config = RunConfig(
        base_model=BaseModelConfig(path="model.safetensors", **settings),
        dataset=DatasetConfig(concepts=(ConceptConfig(folder="pictures"),)),
    )
    return build_keys(config, {"path": "0" * 64}, "1" * 64)


def test_runs_and_encoded_captions_are_others_with_weights():
    assert key_of().run == key_of(prompt_weights=False, clip_skip=1).run
    linked = ConnectedConfig()
    keys = [key_of(), key_of(prompt_weights=True), key_of(connected=linked)]
    keys += [key_of(connected=linked, prompt_weights=True)]
    assert len({key.course for key in keys}) == 4
    texts = {"lora_te": (tiny_clip(64, 2, open_clip=False, projected=False, seed=0), 2)}
    base = model_of(texts=texts)
    base.identity = {"text_encoder": "abc", "vae": ""}
    assert base.text.identity == "abc/torch.float32/1/32"
    base.prompt_weights = True
    assert base.text.identity == "abc/torch.float32/1/32/prompt weights"
