"""Which layers a network trains and how large it is in each: presets, patterns, numbers of blocks, and the report."""

import json

import pytest
import torch
from clip_tokenizer import TOKENIZER
from diffusers import UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import family_tensors, model_of, network_on, targets_in, tiny_text_encoder, tiny_unet
from transformers import CLIPTextConfig, CLIPTextModel

from lora_atelier.trainer_core.config import (
    ALGORITHMS,
    BaseModelConfig,
    DatasetConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
)
from lora_atelier.trainer_core.lora_files.metadata import network_metadata
from lora_atelier.trainer_core.memory import keep_weights
from lora_atelier.trainer_core.models import source_of
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names
from lora_atelier.trainer_core.networks import LayerWeights, parse_numbers
from lora_atelier.trainer_core.networks.blocks import numbers_by_block
from lora_atelier.trainer_core.preflight.network import count_numbers, describe_network, measure_network, outline_size
from lora_atelier.trainer_core.preflight.outline import outline_run

XL = {
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@pytest.fixture(scope="module")
def unets():
    """Give the outlines of Stable Diffusion 1.5 and XL at full size."""
    with torch.device("meta"):
        sd15 = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        return {"sd1": sd15, "sdxl": UNet2DConditionModel(**XL)}


@pytest.fixture(scope="module")
def clip_l():
    with torch.device("meta"):
        return CLIPTextModel(
            CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        )


def choose(unet, texts=None, **lora):
    return targets_in(model_of(unet, texts), LoraConfig(**lora))


def sides(trained):
    return trained.module.weight.shape[0] + trained.module.weight[0].numel()


# --- presets -----------------------------------------------------------------------------------------------

# layers, in + out of linear layers and 1x1 convolutions, layers that are 3x3 convolutions, in * 9 + out of these
PRESETS = {
    ("sd1", "attn-only"): (128, 199_296, 0, 0),
    ("sd1", "attn-mlp"): (192, 423_936, 0, 0),
    ("sd1", "full-lin"): (230, 510_976, 0, 0),
    ("sd1", "full"): (282, 510_976, 52, 547_240),
    ("sd1", "unet-transformer-only"): (192, 423_936, 0, 0),
    ("sd1", "unet-convblock-only"): (88, 82_880, 52, 547_240),
    ("sdxl", "attn-only"): (560, 1_451_520, 0, 0),
    ("sdxl", "attn-mlp"): (722, 2_659_840, 0, 0),
    ("sdxl", "full-lin"): (752, 2_722_560, 0, 0),
    ("sdxl", "full"): (792, 2_722_560, 40, 359_080),
    ("sdxl", "unet-transformer-only"): (722, 2_659_840, 0, 0),
    ("sdxl", "unet-convblock-only"): (68, 58_560, 40, 359_080),
}


@pytest.mark.parametrize(("family", "preset"), PRESETS)
def test_presets_train_the_known_layers(unets, family, preset):
    chosen = choose(unets[family], preset=preset)
    spatial = [t for t in chosen if t.module.weight.ndim == 4 and t.module.kernel_size == (3, 3)]
    plain = sum(map(sides, chosen)) - sum(map(sides, spatial))
    assert (len(chosen), plain, len(spatial), sum(map(sides, spatial))) == PRESETS[family, preset]


@pytest.mark.parametrize(("family", "layers", "parameters"), [("sd1", 80, 99_840), ("sdxl", 350, 665_600)])
def test_ia3_has_layers_of_its_own(unets, clip_l, family, layers, parameters):
    chosen = choose(unets[family], algorithm="ia3")
    assert len(chosen) == layers
    assert sum(t.module.weight.shape[1 if t.path.endswith("ff.net.2") else 0] for t in chosen) == parameters
    text = choose(None, {"lora_te": (clip_l, 12)}, algorithm="ia3")
    assert {t.path.rpartition(".")[2] for t in text} == {"k_proj", "v_proj", "fc2"} and len(text) == 36


def test_text_encoders_go_with_every_preset_but_those_of_the_unet(unets, clip_l):
    texts = {"lora_te": (clip_l, 12)}
    text = [t for t in choose(unets["sd1"], texts, preset="attn-only") if not t.block]
    assert (len(text), sum(map(sides, text))) == (72, 165_888)
    for preset in ("unet-transformer-only", "unet-convblock-only"):
        with pytest.raises(ValueError, match=f"^The preset {preset} trains no text encoder; set their learning rates"):
            choose(unets["sd1"], texts, preset=preset)


@pytest.mark.parametrize(
    ("preset", "norms"),  # 16 transformers of a group norm and 3 layer norms; 22 resnets of two, and conv_norm_out
    [("attn-only", 64), ("attn-mlp", 64), ("unet-convblock-only", 45), ("full-lin", 109), ("full", 109)],
)
def test_norm_layers_are_trained_where_the_preset_trains(unets, preset, norms):
    with_norms, without = (choose(unets["sd1"], preset=preset, train_norm=value) for value in (True, False))
    assert len(with_norms) - len(without) == norms
    assert {t.module.weight.ndim for t in with_norms if t not in without} == {1}


# --- patterns ----------------------------------------------------------------------------------------------


def test_patterns_add_and_remove_layers_by_either_name(unets, clip_l):
    unet, texts = unets["sd1"], {"lora_te": (clip_l, 12)}
    only = {t.path for t in choose(unet, preset="attn-only")}
    more = {
        t.path for t in choose(unet, preset="attn-only", include=("time_embedding.*", "lora_unet_mid_block_*conv1"))
    }
    assert more - only == {
        *("time_embedding.linear_1", "time_embedding.linear_2"),
        *("mid_block.resnets.0.conv1", "mid_block.resnets.1.conv1"),
    }
    less = choose(unet, preset="attn-only", exclude=("*.attn2.*", "lora_unet_up_blocks_?_*"))
    assert {t.path for t in less} == {p for p in only if ".attn1." in p and not p.startswith("up_blocks")}
    both = choose(unet, texts, exclude=("lora_te_*_fc[12]",))
    assert sum(not t.block for t in both) == 48
    assert next(t.path for t in choose(unet, include=("conv_in",))) == "conv_in"  # in the model's order


WRONG_PATTERNS = {
    "include nothing": (
        {"include": ("*attn3*",)},
        r"^The pattern \*attn3\* of include matches no layer .*similar.* attn",
    ),
    "no wildcard": ({"include": ("attn2",)}, "pattern attn2 of include .*a whole name; [*] stands"),
    "no such block": (
        {"exclude": ("down_blocks.9.*",)},
        r"of exclude matches no layer that would be .*down_blocks\.[012]",
    ),
    "not trained anyway": ({"preset": "attn-only", "exclude": ("*.ff.*",)}, "matches no layer that would be trained"),
    "all": ({"exclude": ("*",)}, "^No layer of lora_unet_… is left to train with preset attn-mlp"),
    "all blocks": ({"block_weights": (0,) * 25}, "^No layer of lora_unet_… is left"),
}


@pytest.mark.parametrize("wrong", WRONG_PATTERNS)
def test_patterns_that_do_nothing_are_named(unets, wrong):
    lora, sentence = WRONG_PATTERNS[wrong]
    with pytest.raises(ValueError, match=sentence):
        choose(unets["sd1"], **lora)


# --- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_blocks_are_those_of_the_original_layout(unets, family):
    unet, xl = unets[family], family == "sdxl"
    base = model_of(unet)
    names, found = list(base.layers.blocks), {layer.path: layer.block for layer in base.layers.listed()}
    assert base.layers.layouts("block_ranks") == [names] and base.layers.layouts("block_weights")[0] == names
    assert len(names) == (23 if xl else 25) and len(set(names)) == len(names)
    outside = {"out": "LAST" if xl else "OUT11", "time_embed": "EMB" if xl else "IN00", "label_emb": "EMB"}
    for name, original in unet_ldm_names(unet.state_dict(), 2).items():
        part, number = original.split(".")[:2]
        inside = {"input_blocks": f"IN{number:>02}", "output_blocks": f"OUT{number:>02}"}
        inside["middle_block"] = f"MID{number}" if xl else "MID"
        assert found[name.rpartition(".")[0]] == {**inside, **outside}[part], name
    base_first, *attended = base.layers.layouts("block_weights")[1]
    assert base_first == "BASE"
    attended = [names.index(name) for name in attended]
    assert attended == ([5, 6, 8, 9, 11, *range(13, 19)] if xl else [1, 2, 4, 5, 7, 8, 12, *range(16, 25)])
    counts = {i: sum(t.block == names[i] for t in choose(unet)) for i in attended}
    assert sum(counts.values()) == len(choose(unet)) and (xl or set(counts.values()) == {12})


def by_block(unet, texts=None, **lora):
    """Return {block: (ranks, alphas, learning rates) of linear layers, the same of 3x3 convolutions}."""
    found = {}
    for t in choose(unet, texts, preset=lora.pop("preset", "full"), **lora):
        spatial = getattr(t.module, "kernel_size", (1, 1)) != (1, 1)
        found.setdefault((t.block, spatial), set()).add((t.rank, t.alpha, t.lr_factor))
    assert all(len(values) == 1 for values in found.values())
    return {key: values.pop() for key, values in found.items()}


def test_numbers_of_blocks_reach_their_layers(unets, clip_l):
    unet, texts = unets["sd1"], {"lora_te": (clip_l, 12)}
    ranks, alphas = (0, *range(1, 25)), (*range(1, 25), 0)
    found = by_block(unet, texts, rank=64, alpha=32, block_ranks=ranks, block_alphas=alphas)
    assert found["", False] == (64, 32, 1) and not {("IN00", True), ("IN00", False)} & set(found)
    assert found["IN01", False] == found["IN01", True] == (1, 2, 1) and found["IN03", True] == (3, 4, 1)
    assert found["MID", False] == (12, 13, 1) and found["OUT11", True] == (24, 24, 1)  # alpha 0 = the rank
    conv = by_block(unet, rank=8, alpha=4, conv_block_ranks=(2,) * 24 + (0,), conv_block_alphas=(0,) * 24 + (9,))
    assert conv["IN05", False] == (8, 4, 1) and conv["IN05", True] == (2, 2, 1)
    assert ("OUT11", True) not in conv and conv["OUT11", False] == (8, 4, 1)
    mixed = by_block(unet, rank=8, alpha=4, conv_rank=3, conv_alpha=6, block_ranks=(0,) * 12 + (5,) * 13)
    assert mixed["MID", False] == (5, 4, 1) and mixed["MID", True] == (3, 6, 1) and ("IN05", True) not in mixed


def test_weights_of_blocks_are_factors_of_the_learning_rate(unets, clip_l):
    texts, weights = {"lora_te": (clip_l, 12)}, tuple(i / 10 for i in range(25))
    found = by_block(unets["sd1"], texts, block_weights=weights)
    assert ("IN00", False) not in found and found["IN01", True] == (16, 16, 0.1) and found["OUT11", False][2] == 2.4
    assert found["", False][2] == 1
    short = by_block(unets["sd1"], texts, block_weights=(0.5, *(2,) * 6, 3, *(4,) * 9))  # 17: BASE and 16 blocks
    assert short["", False][2] == short["IN03", True][2] == short["OUT00", False][2] == 0.5
    assert (short["IN01", False][2], short["MID", True][2], short["OUT03", False][2]) == (2, 3, 4)
    xl = by_block(unets["sdxl"], block_weights=(0, *(1,) * 4, 7, *(1,) * 6))  # 12
    assert xl["MID1", False][2] == 7 and ("MID0", True) not in xl and ("EMB", False) not in xl
    network = network_on(tiny_unet(), LoraConfig(rank=2, block_weights=(3,) * 9))
    assert {layer.lr_factor for layer in network.layers.values()} == {3}


def test_a_kind_of_layer_has_a_rank_of_its_own(unets, clip_l):
    lora = {"rank": 8, "alpha": 4, "block_ranks": (0,) + (8,) * 23 + (2,)}
    kinds = ("attention = 6", "mlp=0", "modulation=2")  # the preset leaves the modulations out
    chosen = choose(unets["sd1"], {"lora_te": (clip_l, 12)}, preset="attn-mlp", kind_ranks=kinds, **lora)
    found = {t.path: (t.rank, t.alpha) for t in chosen}
    block = "down_blocks.0.attentions.0"
    assert found[f"{block}.transformer_blocks.0.attn2.to_q"] == (6, 3)  # alpha / rank stays
    assert found[f"{block}.proj_in"] == (8, 4)  # of no kind that is named
    assert found["up_blocks.3.attentions.2.transformer_blocks.0.attn1.to_v"] == (6, 12)  # its block: 4 / 2
    assert found["mid_block.resnets.1.time_emb_proj"] == (2, 1)
    assert found["text_model.encoder.layers.3.self_attn.q_proj"] == (6, 3)
    assert not [
        path for path in found if ".ff." in path or ".fc" in path or ".conv" in path or "time_embedding" in path
    ]
    convolutions = choose(unets["sd1"], kind_ranks=("convolution=3", "attention=0", "mlp=0", "other=0"))
    assert {(t.module.kernel_size, t.rank) for t in convolutions} == {((3, 3), 3)} and len(convolutions) == 52


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (("attn=4",), "kind_ranks of LoRA Config has 'attn=4'; give each kind once, with a rank of 0 to 4096"),
        (("mlp=4", "mlp=5"), "'mlp=5'"),
        (("mlp=4097",), "'mlp=4097'"),
        (("mlp",), "'mlp'"),
        (("mlp=-1",), "'mlp=-1'"),
    ],
)
def test_ranks_of_kinds_are_read_strictly(ranks, sentence):
    with pytest.raises(ValueError, match=sentence):
        LoraConfig(kind_ranks=ranks)


def test_a_kind_that_no_model_has_is_named(clip_l):
    with pytest.raises(ValueError, match="kind_ranks names modulation, and the models that are trained have no such"):
        choose(None, {"lora_te": (clip_l, 12)}, kind_ranks=("modulation=4",))


def test_a_list_of_another_length_prints_the_layout_unless_it_is_all_equal(unets):
    with pytest.raises(
        ValueError, match=r"^block_ranks has 25 numbers, and .* takes 23 numbers, in the order EMB IN00 .* L"
    ):
        choose(unets["sdxl"], block_ranks=(4,) * 24 + (5,))
    with pytest.raises(ValueError, match=r"17 numbers, in the order BASE IN01 IN02 IN04 .* OUT11\.$"):
        choose(unets["sd1"], block_weights=(1, 2))
    assert {t.rank for t in choose(unets["sdxl"], block_ranks=(4,) * 25)} == {4}
    assert set(
        numbers_by_block(model_of(unets["sdxl"]), LoraConfig(block_alphas=(4,) * 25), "block_alphas").values()
    ) == {4}


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("", int, ()),
        ("16*3, 32,0*2", int, (16, 16, 16, 32, 0, 0)),
        (" 1,\n.5 * 2 ", float, (1, 0.5, 0.5)),
        ("1,,2", int, "block_ranks has '', which is not understood; give whole numbers"),
        ("16x9", int, "'16x9'"),
        ("4*", int, r"'4\*'"),
        ("4*0", int, r"'4\*0'"),
        ("4*2*2", int, r"'4\*2\*2'"),
        ("1.5", int, "'1.5'"),
        ("1 2", float, "'1 2', .* give numbers separated by commas"),
        ("4*999999999", int, "not understood"),
    ],
)
def test_numbers_are_read_strictly(text, kind, numbers):
    if isinstance(numbers, tuple):
        assert parse_numbers(text, "block_ranks", kind) == numbers
    else:
        with pytest.raises(ValueError, match=numbers):
            parse_numbers(text, "block_ranks", kind)


@given(text=st.lists(st.sampled_from([*"0123456789*,.- ", "1000", "nan", "1e9", "9" * 5000]), max_size=30).map("".join))
def test_any_block_numbers_are_read_or_refused_in_a_short_sentence(text):
    for kind in (int, float):
        try:
            numbers = parse_numbers(text, "block_ranks", kind)
        except ValueError as problem:
            assert str(problem).startswith("block_ranks has ") and len(str(problem)) < 200
        else:
            assert all(isinstance(number, kind) for number in numbers)


def test_endless_block_numbers_are_refused():
    with pytest.raises(ValueError, match="block_ranks has 600000 characters; give at most 10000"):
        parse_numbers("1*1000" * 100_000, "block_ranks", int)


def test_settings_of_the_unet_need_one(clip_l):
    for lora in ({"block_ranks": (1,) * 25}, {"train_norm": True}):
        with pytest.raises(ValueError, match=f"^{next(iter(lora))} applies to the UNet, whose learning rate is 0"):
            choose(None, {"lora_te": (clip_l, 12)}, **lora)


# --- report and metadata -----------------------------------------------------------------------------------


def test_the_report_counts_what_the_network_has_and_what_its_file_will_hold(tmp_path):
    save_file(family_tensors("sdxl"), tmp_path / "xl.safetensors")
    model = BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "xl.safetensors"))
    lora = LoraConfig(rank=4, preset="full", block_ranks=(3,) * 25)
    optimizer = OptimizerConfig(text_encoder_2_learning_rate=1e-3)
    run = RunConfig(base_model=model, dataset=DatasetConfig(concepts=()), lora=lora, optimizer=optimizer)
    outline = outline_run(run)
    base, network = outline.base, outline.network
    size = measure_network(base, network, lora)
    assert [part.name for part in size.models] == ["UNet", "text encoder CLIP-G"]
    assert sum(part.layers for part in size.models) == len(network.layers)
    assert sum(part.parameters for part in size.models) == sum(p.numel() for p in network.parameters())
    assert sum(part.numbers for part in size.models) == sum(t.numel() for t in network.tensors().values())
    assert sum(block.parameters for block in size.blocks) == size.models[0].parameters
    assert [block.name for block in size.blocks] == list(base.layers.blocks) and size.models[0].ranks == (3,)
    text = describe_network(size)
    assert (
        "total" in text
        and "block_ranks has 25 numbers where this model has 13 blocks; as they are all equal, 3 c" in text
    )
    whole = outline_size(source_of(model), LoraConfig(rank=4, preset="attn-only", exclude=("mid_block.*",)))
    assert [part.name for part in whole.models] == ["UNet", "text encoder CLIP-L", "text encoder CLIP-G"]
    assert "Blocks of the UNet without a trained layer: EMB, IN00, IN01, " in describe_network(whole)
    assert len(outline_size(source_of(model), LoraConfig(preset="unet-convblock-only")).models) == 1


def test_file_sizes_are_those_of_other_trainers(unets):
    network = network_on(unets["sd1"], LoraConfig(rank=32))  # rank 32, float16: 27.1 MB
    assert sum(t.numel() for t in network.tensors().values() if t.ndim) * 2 == 27_131_904
    assert [count_numbers(n) for n in (12, 17_400, 6_782_976)] == ["12", "17.4 K", "6.78 M"]


METADATA = {
    "lora": ({}, "networks.lora", {"preset": "attn-mlp"}),
    "locon": (
        {"preset": "full", "conv_rank": 4, "block_ranks": (1, 2), "conv_block_alphas": (1, 0.5)},
        "networks.lora",
        {"preset": "full", "conv_dim": 4, "conv_alpha": 16.0, "block_dims": "1,2", "conv_block_alphas": "1,0.5"},
    ),
    "dora": (
        {"dora": True},
        "lycoris.kohya",
        {"preset": "attn-mlp", "algo": "locon", "dora_wd": True, "wd_on_output": "False"},
    ),
    "lokr": (
        {"algorithm": "lokr", "factor": 8, "decompose_both": True},
        "lycoris.kohya",
        {"preset": "attn-mlp", "algo": "lokr", "factor": 8, "decompose_both": True},
    ),
}


@pytest.mark.parametrize("kind", METADATA)
def test_metadata_tells_the_network_in_the_words_of_other_trainers(kind):
    lora, module, args = METADATA[kind]
    found = network_metadata(LoraConfig(**lora))
    assert (found["network_module"], json.loads(found["network_args"])) == (
        module,
        {k: str(v) for k, v in args.items()},
    )
    assert (found["network_dim"], found["network_alpha"]) == (16, 16.0)


def test_metadata_names_what_lycoris_knows_and_calls_all_else_a_lora(monkeypatch):
    def told(name):
        found = network_metadata(LoraConfig(algorithm=name, preset="attn-mlp"))
        return found["network_module"], json.loads(found["network_args"]).get("algo")

    others = [name for name in ALGORITHMS if name != "lora"]
    assert {name: told(name) for name in others} == {name: ("lycoris.kohya", name) for name in others}
    monkeypatch.setitem(ALGORITHMS, "glora", ALGORITHMS["glora"]._replace(lycoris=""))
    assert told("glora") == ("networks.lora", None)


def test_metadata_of_a_continued_file_tells_what_the_file_is():
    found = network_metadata(LoraConfig(), {"rank": 3, "alpha": 1.0, "kinds": ["DoRA", "LoRA"]})
    assert found["network_module"] == "lycoris.kohya" and (found["network_dim"], found["network_alpha"]) == (3, 1.0)
    assert json.loads(found["network_args"]) == {}


def test_text_encoders_are_chosen_as_deep_as_they_are_in_use():
    assert len(choose(None, {"lora_te": (tiny_text_encoder(), 1)})) == 6


def test_layers_are_the_same_however_weights_are_kept():
    base = model_of(tiny_unet(), {"lora_te": (tiny_text_encoder(), 2)})
    layers = [layer._replace(module=None) for layer in base.layers.listed()]
    assert len({layer.name for layer in layers}) == len(layers)
    assert {layer.part for layer in layers} == {part.prefix for part in base.parts}
    keep_weights(base.unet, "bfloat16", torch.float32, torch.device("cpu"))
    assert [layer._replace(module=None) for layer in base.layers.listed()] == layers


def test_a_layer_that_the_original_code_does_not_have_keeps_its_name():
    """A consistency model's UNet has a projection of the guidance beside its time embedding."""
    config = {name: value for name, value in tiny_unet().config.items() if not name.startswith("_")}
    with torch.device("meta"):
        unet = UNet2DConditionModel(**{**config, "time_cond_proj_dim": 8})
    layers = {layer.path: layer for layer in model_of(unet).layers.listed()}
    layer = layers["time_embedding.cond_proj"]
    assert layer.name == "lora_unet_time_embedding_cond_proj" and layer.comfy == f"diffusion_model.{layer.path}"
    assert layers["time_embedding.linear_1"].comfy == "diffusion_model.time_embed.0"


PARTS = {  # of a file's layer, and what a new layer has to be to begin with them
    "lora": (("down", "up"), {"algorithm": "lora", "tucker": False, "dora": False}),
    "tucker": (("down", "up", "mid"), {"algorithm": "lora", "tucker": True}),
    "dora": (("down", "up", "dora_scale"), {"algorithm": "lora", "dora": True}),
    "loha": (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"), {"tucker": True}),
    "lokr": (("lokr_w1", "lokr_w2_a", "lokr_w2_b"), {"algorithm": "lokr", "full_matrix": False}),
    "lokr of full factors": (("lokr_w1", "lokr_w2"), {"algorithm": "lokr", "full_matrix": True}),
    "lokr, both decomposed": (("lokr_w1_a", "lokr_w1_b", "lokr_w2"), {"decompose_both": True, "full_matrix": False}),
    "full": (("diff", "diff_b"), {"algorithm": "full"}),
    "oft": (("oft_blocks",), {"algorithm": "oft"}),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_continued_layer_is_what_its_file_holds(kind):
    parts, wanted = PARTS[kind]
    start = LayerWeights(kind=kind, tensors={part: torch.empty(3, 3, 3) for part in parts}, alpha=2)
    config = start.config(LoraConfig(rank=64, start="a.safetensors"))
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert start.rank == (1 if kind in ("full", "lokr of full factors") else 3)
