"""LoRA files of strangers: their header, metadata and adapter settings give a result or one sentence."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from bounded import bounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lora_atelier.trainer_core.lora_files.read import load_lora, outline_lora

LAYER = "unet.mid_block.attn2.to_q"


def lora(folder: Path, settings: str = "", **tensors: torch.Tensor) -> Path:
    """Write a LoRA of one layer with these adapter settings; tensors replace its own, by their endings."""
    own = {"lora_A.weight": torch.ones(4, 8), "lora_B.weight": torch.ones(8, 4)}
    path = folder / "a.safetensors"
    metadata = {"lora_adapter_metadata": settings} if settings else None
    save_file({f"{LAYER}.{ending}": tensor for ending, tensor in {**own, **tensors}.items()}, path, metadata)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught, bounded(10):
        load_lora(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


PATTERNS = [  # alpha_pattern of a model whose other layers have alpha 7, and the alpha of LAYER
    ({}, 7),
    ({"to_q": 2}, 2),
    ({"attn2.to_q": 2}, 2),
    ({r"attn2\.to_q": 2}, 2),
    ({"mid_block.attn2.to_q": 2}, 2),
    ({"^mid_block.attn2.to_q": 2}, 2),
    ({"^mid_block.attn2.to_q$": 2}, 2),
    ({"^attn2.to_q": 2}, 7),
    ({"o_q": 2}, 7),
    ({"to_k": 2, "to_q": 3, "attn2.to_q": 4}, 3),
    ({"attn2.to_q": 4, "to_q": 3, "^mid_block.attn2.to_q": 5}, 4),
]


@pytest.mark.parametrize(("patterns", "alpha"), PATTERNS)
def test_patterns_of_alphas_are_names_of_layers_or_their_ends(patterns, alpha, tmp_path):
    path = lora(tmp_path, json.dumps({"unet.lora_alpha": 7, "unet.alpha_pattern": patterns}))
    assert load_lora(path).layers[LAYER].alpha == alpha


def test_a_pattern_from_the_start_begins_behind_pefts_own_prefix(tmp_path):
    layer = "base_model.model.mid.to_q"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 8), f"{layer}.lora_B.weight": torch.ones(8, 4)}
    settings = {"lora_adapter_metadata": json.dumps({"alpha_pattern": {"^to_q": 1, "^mid.to_q": 2}})}
    save_file(tensors, tmp_path / "a.safetensors", settings)
    assert load_lora(tmp_path / "a.safetensors").layers[layer].alpha == 2


ENDLESS = "(a+)+$"


def test_an_expression_from_a_file_is_never_run(tmp_path):
    layer = "unet." + "a" * 60 + "!"
    tensors = {f"{layer}.lora_A.weight": torch.ones(4, 8), f"{layer}.lora_B.weight": torch.ones(8, 4)}
    for key in ("alpha_pattern", "unet.alpha_pattern"):
        settings = {"lora_adapter_metadata": json.dumps({key: {ENDLESS: 2}})}
        save_file(tensors, tmp_path / "a.safetensors", settings)
        assert "set alphas by regular expressions, which are not run here" in refusal(tmp_path / "a.safetensors")


def test_expressions_for_layers_that_have_their_own_alpha_do_not_matter(tmp_path):
    settings = json.dumps({"alpha_pattern": {ENDLESS: 2}, "text_encoder.alpha_pattern": {ENDLESS: 3}})
    assert load_lora(lora(tmp_path, settings, alpha=torch.tensor(3.0))).layers[LAYER].alpha == 3
    of_another_model = json.dumps({"unet.lora_alpha": 5, "text_encoder.alpha_pattern": {ENDLESS: 3}})
    assert load_lora(lora(tmp_path, of_another_model)).layers[LAYER].alpha == 5


WRONG_SETTINGS = {
    "[" * 100_000: "are broken: nested more than 64 levels deep",
    "[1]": "are broken: no JSON object",
    "{": "are broken: not JSON (line 1, column 2)",
    '{"lora_alpha": %s}' % ("9" * 4000): "are broken: an integer of more than 300 digits",
    '{"lora_alpha": %s}' % ("9" * 200): "an alpha that is no number",
    '{"lora_alpha": 1e999}': "an alpha that is no number",
    '{"lora_alpha": NaN}': "an alpha that is no number",
    '{"lora_alpha": "16"}': "an alpha that is no number",
    '{"lora_alpha": [16]}': "an alpha that is no number",
    '{"lora_alpha": true}': "an alpha that is no number",
    '{"alpha_pattern": ["to_q"]}': "are broken: alpha_pattern is no object",
    '{"alpha_pattern": {"to_q": null}}': "an alpha that is no number",
    '{"alpha_pattern": {"": 1}}': "set alphas by regular expressions",
}


@pytest.mark.parametrize("settings", WRONG_SETTINGS, ids=list(range(len(WRONG_SETTINGS))))
def test_wrong_adapter_settings_are_refused(settings, tmp_path):
    assert WRONG_SETTINGS[settings] in refusal(lora(tmp_path, settings))


def test_settings_beside_a_file_are_bounded(tmp_path):
    lora(tmp_path).rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"a": "%s"}' % ("x" * (16 << 20)))
    assert "are broken: larger than 16 MiB" in refusal(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(b"\xff\xff\xff")
    assert "are broken: not text in UTF-8" in refusal(tmp_path / "adapter_model.safetensors")


def test_many_patterns_for_many_layers_take_no_time(tmp_path):
    names = [f"unet.block.{number}" for number in range(3000)]
    tensors = {f"{name}.{part}.weight": torch.ones(1, 1) for name in names for part in ("lora_A", "lora_B")}
    settings = json.dumps({"alpha_pattern": {f"block.{number}": number + 1 for number in range(30_000)}})
    save_file(tensors, tmp_path / "a.safetensors", {"lora_adapter_metadata": settings})
    with bounded(10):
        assert load_lora(tmp_path / "a.safetensors").layers["unet.block.2999"].alpha == 3000


@pytest.mark.parametrize(
    ("ending", "shape"), [("lora_A.weight", (0, 8)), ("lora_B.weight", (8, 0)), ("alpha", (2,)), ("alpha", (0,))]
)
def test_tensors_without_numbers_and_alphas_of_several_are_refused(ending, shape, tmp_path):
    path = lora(tmp_path, **{ending: torch.ones(shape)})
    sentence = f"{LAYER}.{ending} in a.safetensors has an impossible shape; get the file again."
    assert refusal(path) == sentence
    with pytest.raises(ValueError, match="has an impossible shape"):
        outline_lora(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
SETTING = st.sampled_from(["lora_alpha", "alpha_pattern", "use_rslora", "unet.alpha_pattern", "unet.lora_alpha", "r"])
PATTERN = st.sampled_from(["to_q", "^mid_block.attn2.to_q", "attn2.to_q$", ".*", ENDLESS, "", r"\.", "("])


@given(settings=st.dictionaries(SETTING, JSON | st.dictionaries(PATTERN, JSON, max_size=3), max_size=4))
def test_any_adapter_settings_give_an_alpha_or_a_sentence(settings, tmp_path_factory):
    path = lora(tmp_path_factory.getbasetemp(), json.dumps(settings))
    try:
        alpha = outline_lora(path).layers[LAYER].alpha
    except ValueError as problem:
        assert "The adapter settings of a.safetensors" in str(problem)
    else:
        assert math.isfinite(alpha)


ENDINGS = ("lora_A.weight", "lora_B.weight", "alpha", "dora_scale", "lokr_w1", "lokr_w2", "hada_w1_a", "oft_blocks", "")


@given(
    shapes=st.dictionaries(
        st.tuples(st.sampled_from(["a", "a.b", "bundle_emb.x", ""]), st.sampled_from(ENDINGS)),
        st.lists(st.integers(0, 3), max_size=5),
        min_size=1,
        max_size=6,
    )
)
def test_tensors_of_any_names_and_shapes_give_layers_or_a_sentence(shapes, tmp_path_factory):
    header, end = {}, 0
    for (layer, ending), shape in shapes.items():
        size = math.prod(shape) * 4
        header[f"{layer}.{ending}"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path_factory.getbasetemp() / "b.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    for read in (outline_lora, load_lora):
        try:
            assert read(path).layers
        except ValueError as problem:
            assert "\n" not in str(problem)
