"""Headers of strangers' files: each gives a header or one sentence, and each header a model or one sentence."""

import json
import math
import struct
from pathlib import Path

import pytest
from bounded import bounded
from clip_tokenizer import TOKENIZER
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import checkpoint_tensors, family_tensors

from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models.files.safetensors_file import read_header
from lora_atelier.trainer_core.models.sd import check_base_model, outline_base_model

VALID = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [26, 26]},
    }
).encode()
DATA = bytes(26)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("headers") / "given.safetensors"


def read_or_refuse(path: Path, content: bytes) -> None:
    """Check that a file has a header that adds up, or is refused in one short sentence."""
    path.write_bytes(content)
    try:
        header = read_header(path)
    except ValueError as problem:
        assert "given.safetensors" in str(problem) and str(problem).isprintable() and len(str(problem)) < 500
    else:
        assert max(span.start + span.size for span in header.ranges.values()) == len(content)
        assert all(span.size == math.prod(header.shapes[n]) * span.dtype.itemsize for n, span in header.ranges.items())


@given(content=st.binary(max_size=200) | st.binary(max_size=60).map(lambda text: struct.pack("<Q", len(text)) + text))
@bounded(20)
def test_any_bytes_are_refused(content, place):
    read_or_refuse(place, content)


@given(at=st.integers(0, 7 + len(VALID)), new=st.binary(max_size=4), gone=st.integers(0, 4), more=st.binary(max_size=3))
@bounded(20)
def test_a_header_with_any_change_is_read_or_refused(at, new, gone, more, place):
    whole = struct.pack("<Q", len(VALID)) + VALID + DATA
    changed = whole[:at] + new + whole[at + gone :]
    read_or_refuse(place, changed + more)


NUMBER = st.integers(-2, 30) | st.sampled_from([2**31, 2**63, 10**400, True, None, 1.0, 1e308, "2", float("nan")])
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "F6", "", 3, None, ["F32"]]),
        "shape": st.lists(NUMBER | st.lists(NUMBER, max_size=2), max_size=9) | NUMBER,
        "data_offsets": st.lists(NUMBER, max_size=3) | NUMBER,
        "more": NUMBER,
    },
)
METADATA = st.dictionaries(st.text(max_size=3), st.text(max_size=3) | NUMBER | st.lists(NUMBER, max_size=2), max_size=2)


@given(
    header=st.dictionaries(st.text(max_size=4), ENTRY | NUMBER, max_size=3),
    metadata=st.none() | METADATA | NUMBER,
    size=st.integers(0, 30),
)
@bounded(20)
def test_a_header_of_odd_types_is_read_or_refused(header, metadata, size, place):
    text = json.dumps({"__metadata__": metadata} | header).encode()
    read_or_refuse(place, struct.pack("<Q", len(text)) + text + bytes(size))


@pytest.fixture(scope="module")
def families() -> list[dict[str, tuple[int, ...]]]:
    """Give the shapes of a whole checkpoint of each family."""
    whole = (checkpoint_tensors(), family_tensors("sd2"), family_tensors("sdxl"))
    return [{name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in whole]


DECIDING = (
    "input_blocks.0",
    "embedding.weight",
    "proj_in",
    "attn2.to_k",
    "label_emb",
    "decoder.1.",
    "out_layers.3",
    "fc1",
)
SIDE = st.integers(0, 9) | st.sampled_from([33, 768, 10**6])


@examples(120)
@given(
    family=st.integers(0, 2),
    part=st.sampled_from([*DECIDING, "positional", "in_proj", "resblocks", ""]),
    shape=st.lists(SIDE, max_size=5) | st.none(),
    number=st.sampled_from(["", "7", "99", "1" * 12, "1" * 200]),
    place_in_list=st.integers(0, 99),
)
@bounded(20)
def test_a_checkpoint_with_any_other_tensor_is_outlined_or_refused(
    family, part, shape, number, place_in_list, families, place
):
    shapes = dict(families[family])
    names = [name for name in shapes if part in name] or list(shapes)
    name = names[place_in_list % len(names)]
    old = shapes.pop(name)
    if shape is not None:
        name = name.replace(".0.", f".{number}.", 1) if number else name
        shapes[name] = old if number else (0, *shape) if math.prod(shape) > 10**6 else tuple(shape)
    header, end = {}, 0
    for name, each in shapes.items():
        header[name] = {"dtype": "U8", "shape": each, "data_offsets": [end, end + math.prod(each)]}
        end += math.prod(each)
    text = json.dumps(header).encode()
    with place.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config = BaseModelConfig(path=str(place), tokenizer=TOKENIZER)
    try:
        check_base_model(config)
        outline_base_model(config)
    except ValueError as problem:
        assert "given.safetensors" in str(problem) and str(problem).isprintable()
