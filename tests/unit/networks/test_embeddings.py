"""Learned words: rows of ids below 0, gradients as of a whole table, chunks, and what the vectors begin with."""

import copy
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from tiny_models import tiny_clip

from lora_atelier.trainer_core.config import EmbeddingConfig, LoraConfig
from lora_atelier.trainer_core.models import mentions, word_ids
from lora_atelier.trainer_core.models.sd import load_tokenizer
from lora_atelier.trainer_core.models.sd.text import (
    CHUNK,
    MAX_CHUNKS,
    ClipEncoder,
    count_tokens,
    encode_caption,
    tokenize,
    truncated_words,
)
from lora_atelier.trainer_core.models.words import find_words
from lora_atelier.trainer_core.networks import Embeddings, Network

MOSS, PEBBLE = EmbeddingConfig(token="mossling", vectors=3), EmbeddingConfig(token="pebble", vectors=10)
WORDS = word_ids((MOSS, PEBBLE))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(TOKENIZER))


@pytest.fixture(scope="module")
def texts():
    options = {"layer": 2, "final_norm": False}
    small = tiny_clip(64, 2, open_clip=False, projected=False, seed=0).requires_grad_(False)
    large = tiny_clip(128, 2, open_clip=True, projected=True, seed=1).requires_grad_(False)
    large.config.eos_token_id = 2  # as configurations of old: the largest id is taken for the end
    getattr(large, "text_model", large).eos_token_id = 2
    return (
        ClipEncoder(model=small, **options, pooled=False, open_clip=False, prefix="lora_te1"),
        ClipEncoder(model=large, **options, pooled=True, open_clip=True, prefix="lora_te2"),
    )


def test_words_stand_alone_whatever_their_case():
    parts = list(find_words("A MOSSLING, mossling's moss mosslings pebble-mossling", WORDS))
    assert parts == [
        ("A ", "mossling"),
        (", ", "mossling"),
        ("'s moss mosslings ", "pebble"),
        ("-", "mossling"),
        ("", ""),
    ]
    assert not mentions("mosslings and pebbles", WORDS) and not mentions("mossling", {})


def test_a_word_becomes_its_ids_and_parts_are_chunked_as_a_prompt_is(tokenizer):
    plain = tokenize(tokenizer, "a cat, in grass")[0].tolist()
    row = tokenize(tokenizer, "a Mossling, in grass", words=WORDS)[0].tolist()
    assert row[:2] == plain[:2] and row[2:5] == [-1, -2, -3] and row[5:9] == plain[3:7] and len(row) == 77
    # 74 tokens leave room for one: three vectors begin the next chunk, ten are spread over both.
    small = tokenize(tokenizer, "cat " * 74 + "mossling", words=WORDS)
    assert small[0, 75].item() == 49407 and small[1, 1:4].tolist() == [-1, -2, -3]
    large = tokenize(tokenizer, "cat " * 74 + "pebble dog", words=WORDS)
    assert large[0, 75].item() == -4 and large[1, 1:10].tolist() == list(range(-5, -14, -1))
    assert count_tokens(tokenizer, "cat " * 74 + "mossling", WORDS) == 78
    almost = "cat " * (CHUNK * MAX_CHUNKS - 1)
    assert truncated_words(tokenizer, f"{almost}pebble", WORDS) == ["pebble"]
    assert truncated_words(tokenizer, f"{almost}dog", WORDS) == []


def test_gradients_are_those_of_rows_in_a_whole_table_and_nothing_else_has_any(texts, tokenizer):
    embeddings = Embeddings(texts, (MOSS, PEBBLE), WORDS, {}, seed=1)
    caption = "a mossling on a pebble"
    embeddings.attach()
    try:
        mine = encode_caption(texts, tokenizer, caption, "cpu")
        (mine.context.square().sum() + mine.pooled.sum()).backward()
    finally:
        embeddings.detach()
    assert not any(p.grad is not None for text in texts for p in text.model.parameters())
    assert all(type(text.model.get_input_embeddings()) is torch.nn.Embedding and not text.words for text in texts)

    whole = copy.deepcopy(texts)
    for text in whole:  # the vectors behind the table's own rows, whose ids are above all others
        rows = torch.cat([embeddings.tensors()[c.token][text.prefix] for c in (MOSS, PEBBLE)])
        table = text.model.get_input_embeddings()
        table.weight = torch.nn.Parameter(torch.cat([table.weight, rows]))
        getattr(text.model, "text_model", text.model).eos_token_id = 49407
        text.words = {word: [49407 - i for i in ids] for word, ids in WORDS.items()}
    theirs = encode_caption(whole, tokenizer, caption, "cpu")
    (theirs.context.square().sum() + theirs.pooled.sum()).backward()
    assert torch.equal(mine.context, theirs.context) and torch.equal(mine.pooled, theirs.pooled)
    for text in whole:
        wanted = text.model.get_input_embeddings().weight.grad[49408:]
        found = torch.cat([vectors.grad for vectors in embeddings.vectors[text.prefix]])
        assert wanted.any() and torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_vectors_begin_as_words_repeated_or_averaged_or_as_noise_of_their_length(texts):
    table = texts[0].model.get_input_embeddings().weight
    init = {"mossling": [320, 1125], "pebble": []}
    begun = Embeddings(texts, (MOSS, PEBBLE), WORDS, init, seed=1).tensors()
    assert torch.equal(begun["mossling"]["lora_te1"], table[[320, 1125, 320]])
    noise, mean = begun["pebble"]["lora_te1"], table.norm(dim=1).mean()
    assert torch.allclose(noise.norm(dim=1), mean.expand(10))
    assert torch.equal(noise, Embeddings(texts, (PEBBLE,), WORDS, init, seed=1).tensors()["pebble"]["lora_te1"])
    one = MOSS.replace(vectors=1)
    averaged = Embeddings(texts, (one,), word_ids((one,)), init, seed=1).tensors()["mossling"]["lora_te2"]
    assert torch.allclose(averaged, texts[1].model.get_input_embeddings().weight[[320, 1125]].mean(0, keepdim=True))


def test_norms_are_kept_where_asked_and_groups_and_freezing_are_by_token(texts):
    configs = (MOSS.replace(keep_norm=True, learning_rate=0.5), PEBBLE)
    embeddings = Embeddings(texts, configs, WORDS, {}, seed=1)
    first, second = embeddings.groups()
    assert (first["lr"], first["decays"], len(first["params"])) == (0.5, False, 2)
    before = copy.deepcopy(embeddings.tensors())
    with torch.no_grad():
        for group in (first, second):
            for parameter, factor in zip(group["params"], (100, 0.01), strict=True):
                parameter.mul_(factor)
    embeddings.keep_norms()
    for i, text in enumerate(texts):
        norms = text.model.get_input_embeddings().weight.norm(dim=1)
        edge = norms.quantile(0.05 if i else 0.95)
        assert torch.allclose(first["params"][i].norm(dim=1), edge.expand(3), rtol=1e-4)
        assert torch.equal(second["params"][i], before["pebble"][text.prefix] * (0.01 if i else 100))
    embeddings.freeze("mossling")
    assert [p.requires_grad for p in embeddings.parameters()] == [False, True, False, True] and embeddings.trainable
    embeddings.freeze("pebble")
    assert not embeddings.trainable


def test_a_network_attaches_them_and_lets_them_go(texts):
    network = Network([], LoraConfig(), seed=0)
    network.embeddings = Embeddings(texts, (MOSS,), WORDS, {}, seed=1)
    with network.attached():
        assert all(text.words == WORDS for text in texts)
        with network.detached():
            assert not any(text.words for text in texts)
    network.release()
    network.attach()
    assert not any(text.words for text in texts)
    assert [group["lr"] for group in network.groups({})] == [1e-3]
