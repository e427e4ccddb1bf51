"""LoRA files of other trainers: their names, what continuing begins with, and merging several."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from lora_runs import LINEAR, SMALL, check, load_with, model_at, random, run_of
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint_tensors, fill, model_of, network_in

from lora_atelier.trainer_core.config import BaseModelConfig, BeneathConfig, LoraConfig
from lora_atelier.trainer_core.lora_files.continued import file_remarks, layer_weights, load_continued
from lora_atelier.trainer_core.lora_files.formats import FileLayer, group_tensors, layer_kind
from lora_atelier.trainer_core.lora_files.match import layers_by_name, match_layers
from lora_atelier.trainer_core.lora_files.merge import comfy_tensors
from lora_atelier.trainer_core.lora_files.read import load_lora, outline_lora
from lora_atelier.trainer_core.lora_files.write import delta_norms, peft_tensors
from lora_atelier.trainer_core.models.sd import Conditions, load_base_model, outline_base_model
from lora_atelier.trainer_core.models.sd.identify import made_for
from lora_atelier.trainer_core.networks.of_model import build_network
from lora_atelier.trainer_core.preflight.network import describe_network, measure_run
from lora_atelier.trainer_core.preflight.outline import outline_run

CLIP = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
SHAPES = json.loads((Path(__file__).parents[2] / "data" / "lora_shapes.json").read_text())


@pytest.fixture(scope="module")
def sd15():
    """Give the outline of Stable Diffusion 1.5 at full size, without its text encoder."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
    return model_of(unet)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """Give the toy of Stable Diffusion 1 in memory; it stays as it is."""
    return load_base_model(model_at(checkpoint))


@pytest.fixture(scope="module")
def sdxl(checkpoint_xl):
    """Give the toy of Stable Diffusion XL."""
    return model_at(checkpoint_xl)


@pytest.fixture(scope="module")
def outline(sdxl):
    """Give the outline of the toy of Stable Diffusion XL, and its layers."""
    base = outline_base_model(sdxl)
    return base, layers_by_name(base)


def trained(base, seed=0, **lora):
    """Return a network with something in it, for all of a base model."""
    return fill(network_in(base, LoraConfig(**lora), seed), std=0.1)


# --- names -------------------------------------------------------------------------------------------------


def test_our_files_of_peft_names_are_continued_with_their_text_encoders(sdxl, tmp_path):
    base = load_base_model(sdxl)
    network = trained(base, rank=2, alpha=6, preset="full")
    names = {trained.name: trained.comfy for trained in network.chosen}
    assert any(name.startswith("text_encoders.clip_g.transformer.text_model.") for name in names.values())
    save_file(peft_tensors(network.tensors(), names), tmp_path / "a.safetensors")
    layers = layer_weights(load_lora(tmp_path / "a.safetensors"), base, layers_by_name(base))
    assert set(layers) == set(network.layers)
    for name, layer in build_network(base, run_of(sdxl), {}, layers).layers.items():
        assert torch.allclose(layer.delta_weight(), network.layers[name].delta_weight(), atol=1e-6)


@pytest.mark.parametrize("setting", [{"algorithm": "loha"}, {"dora": True}, {"tucker": True}, {"train_norm": True}])
def test_peft_has_names_for_plain_lora_only(setting):
    with pytest.raises(
        ValueError, match="peft's names are for plain LoRA: algorithm lora without dora, tucker and train"
    ):
        LoraConfig(names="peft", preset="full", **setting)


def test_a_continued_file_that_peft_cannot_name_is_refused(sdxl, tmp_path):
    tensors = {f"{SMALL}.diff": random(128, 64, 1, 1), f"{CLIP}.lora_down.weight": random(2, 64)}
    save_file({**tensors, f"{CLIP}.lora_up.weight": random(128, 2)}, tmp_path / "a.safetensors")
    check(run_of(sdxl, start=str(tmp_path / "a.safetensors")))
    with pytest.raises(ValueError, match="holds layers of the kind full difference, which peft's names cannot say"):
        check(run_of(sdxl, start=str(tmp_path / "a.safetensors"), names="peft"))


@pytest.mark.parametrize("trainer", SHAPES)
def test_every_tensor_of_files_that_trainers_wrote_has_its_place(sd15, tmp_path, trainer):
    down, up = "lora_down.weight", "lora_up.weight"
    if trainer == "diffusers_example":
        down, up = "lora.down.weight", "lora.up.weight"
    tensors = {f"{name}.{down}": torch.zeros(shape[0], dtype=torch.float16) for name, shape in SHAPES[trainer].items()}
    tensors |= {f"{name}.{up}": torch.zeros(shape[1], dtype=torch.float16) for name, shape in SHAPES[trainer].items()}
    if trainer != "diffusers_example":
        tensors |= {f"{name}.alpha": torch.tensor(4.0) for name in SHAPES[trainer]}
    save_file(tensors, tmp_path / "a.safetensors")
    own = layers_by_name(sd15)
    layers = layer_weights(load_lora(tmp_path / "a.safetensors"), sd15, own)
    wanted = {"diffusers_example": "onetrainer_full"}.get(trainer, trainer)
    assert len(layers) == len(SHAPES[trainer]) and set(layers) <= set(SHAPES[wanted])
    assert {layer.alpha for layer in layers.values()} == {8.0 if trainer == "diffusers_example" else 4.0}
    assert {layer.rank for layer in layers.values()} == {8}
    network = build_network(sd15, run_of(BaseModelConfig(path="sd15.safetensors"), rank=2), {}, layers)
    assert list(network.layers) == list(layers)
    assert all(network.layers[n].down.shape[1:] == own[n].module.weight.shape[1:] for n in layers)


UNET_NAME = "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_out.0"
LDM_NAME = "input_blocks.3.1.transformer_blocks.1.attn2.to_out.0"
TEXT_NAME = "text_model.encoder.layers.1.mlp.fc1"
KOHYA = f"lora_unet_{LDM_NAME}".replace(".", "_")
SPELLINGS = {
    f"{KOHYA}.lora_down.weight": KOHYA,
    f"lora_unet_{UNET_NAME}".replace(".", "_") + ".lora_down.weight": KOHYA,
    f"lora_unet.{UNET_NAME}.lora_down.weight": KOHYA,
    f"unet.{UNET_NAME}.lora_A.weight": KOHYA,
    f"unet.{UNET_NAME}.lora.down.weight": KOHYA,
    f"unet.{UNET_NAME}.lora_A.default.weight": KOHYA,
    f"base_model.model.{UNET_NAME}.lora_A.weight": KOHYA,
    f"unet.base_model.model.{UNET_NAME}.lora_A.weight": KOHYA,
    f"base_model.model.unet.{UNET_NAME}.lora_A.weight": KOHYA,
    f"{UNET_NAME}.lora_A.weight": KOHYA,
    f"unet.{UNET_NAME}".replace(".to_out.0", ".processor.to_out_lora") + ".down.weight": KOHYA,
    f"diffusion_model.{LDM_NAME}.lora_A.weight": KOHYA,
    f"model.diffusion_model.{LDM_NAME}.lora_down.weight": KOHYA,
    f"lycoris_{UNET_NAME}".replace(".", "_") + ".lora_down.weight": KOHYA,
    f"lora_te1_{TEXT_NAME}".replace(".", "_") + ".lora_down.weight": "lora_te1",
    f"lora_te_{TEXT_NAME}".replace(".", "_") + ".lora_down.weight": "lora_te1",
    f"text_encoder.{TEXT_NAME}.lora_A.weight": "lora_te1",
    f"text_encoder.{TEXT_NAME}.lora_linear_layer.down.weight": "lora_te1",
    f"text_encoders.clip_l.transformer.{TEXT_NAME}.lora_down.weight": "lora_te1",
    f"lora_te2_{TEXT_NAME}".replace(".", "_") + ".lora_down.weight": "lora_te2",
    f"text_encoder_2.{TEXT_NAME}.lora.down.weight": "lora_te2",
    f"text_encoder_2.{TEXT_NAME.removeprefix('text_model.')}.lora_A.weight": "lora_te2",
    f"text_encoders.clip_g.transformer.{TEXT_NAME}.lora_down.weight": "lora_te2",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_layer_is_understood(outline, tmp_path, name):
    kohya = SPELLINGS[name]
    if kohya != KOHYA:
        kohya += f"_{TEXT_NAME}".replace(".", "_")
    base, own = outline
    out, width = own[kohya].module.weight.shape
    up = name.replace("lora_A", "lora_B").replace("down.weight", "up.weight")
    assert up != name
    save_file({name: random(2, width), up: random(out, 2)}, tmp_path / "a.safetensors")
    assert list(match_layers(outline_lora(tmp_path / "a.safetensors"), base, own)) == [kohya]
    layer = layer_weights(load_lora(tmp_path / "a.safetensors"), base, own)[kohya]
    assert layer.alpha == 2.0 and torch.equal(layer.tensors["down"], random(2, width))
    assert torch.equal(layer.tensors["up"], random(out, 2))


def test_pefts_alpha_is_read_from_metadata_and_from_its_own_file(outline, tmp_path):
    base, own = outline
    other = UNET_NAME.replace("to_out.0", "to_q")

    def alphas(path):
        layers = layer_weights(load_lora(path), base, own)
        return [layers[key].alpha for key in (KOHYA, KOHYA.replace("to_out_0", "to_q"))]

    tensors = {f"{UNET_NAME}.lora_A.weight": random(4, 128), f"{UNET_NAME}.lora_B.weight": random(128, 4)}
    tensors |= {f"{other}.lora_A.weight": random(4, 128), f"{other}.lora_B.weight": random(128, 4)}
    unet = {f"unet.{name}": tensor for name, tensor in tensors.items()}
    settings = {"unet.lora_alpha": 2, "unet.alpha_pattern": {"attn2.to_q": 3}, "text_encoder.lora_alpha": 9}
    save_file(unet, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
    assert alphas(tmp_path / "a.safetensors") == [2, 3]
    wrapped = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "adapter_model.safetensors")
    assert alphas(tmp_path / "adapter_model.safetensors") == [4, 4]
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 6, "use_rslora": true}')
    assert alphas(tmp_path / "adapter_model.safetensors") == [12, 12]  # 6 * sqrt(4)


def test_kinds_of_layers_and_what_is_missing():
    layers, unknown = group_tensors(["a.lora_up.weight", "a.alpha", "b.c.lora_B.weight", "b.c.lora_A.weight", "d.oft"])
    assert layers == {
        "a": {"up": "a.lora_up.weight", "alpha": "a.alpha"},
        "b.c": {"up": "b.c.lora_B.weight", "down": "b.c.lora_A.weight"},
    }
    assert unknown == ["d.oft"]
    two = ["a.lora_A.one.weight", "a.lora_A.two.weight"]
    assert group_tensors(two) == ({"a": {"down": two[0]}}, two[1:])
    assert layer_kind(layers["a"]) == "" and layer_kind(layers["b.c"]) == "LoRA"
    assert layer_kind({"down", "up", "dora_scale"}) == "DoRA" and layer_kind({"down", "up", "mid"}) == "Tucker LoRA"
    assert layer_kind({"alpha"}) == layer_kind({"hada_w1_a", "hada_w1_b"}) == layer_kind({"diff", "dora_scale"}) == ""
    assert layer_kind({"down", "up", "diff"}) == "" and layer_kind({"diff_b"}) == "full difference"
    assert layer_kind({"lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2", "alpha"}) == "LoKr"


# --- files that are refused --------------------------------------------------------------------------------


def test_a_lora_for_another_model_is_named_before_anything_is_loaded(checkpoint, plain, tmp_path):
    width = {"lora_down": 2048, "lora_up": 8}
    foreign = {
        f"lora_unet_input_blocks_7_1_transformer_blocks_{i}_attn2_to_k.{end}.weight": torch.zeros(4, width[end])
        if end == "lora_down"
        else torch.zeros(640, 4)
        for i, end in product(range(5), width)
    }
    save_file(foreign, tmp_path / "xl.safetensors")
    with pytest.raises(ValueError, match=r"^5 of 5 layers of xl.safetensors have no place in random-tiny.safetensors"):
        check(run_of(model_at(checkpoint), start=str(tmp_path / "xl.safetensors")))
    said = r"_2_attn2_to_k, …\): it is a LoRA for Stable Diffusion XL, the base model is random-tiny; choose"
    with pytest.raises(ValueError, match=said):
        beneath = (BeneathConfig(path=str(tmp_path / "xl.safetensors")),)
        check(run_of(model_at(checkpoint), beneath=beneath))

    own = trained(plain, rank=2).tensors()
    name = next(key for key in own if key.endswith("attn2_to_k.lora_down.weight"))
    save_file({**own, name: torch.zeros(2, 768)}, tmp_path / "wide.safetensors")
    with pytest.raises(
        ValueError, match=r"^1 of \d+ layers of wide.* another shape .*to_k\): .* choose one for random-tiny"
    ):
        check(run_of(model_at(checkpoint), start=str(tmp_path / "wide.safetensors")))
    name = next(key for key in own if key.endswith("ff_net_2.lora_down.weight"))
    up = name.replace("lora_down", "lora_up")
    swapped = {**own, name: torch.zeros(2, own[up].shape[0]), up: torch.zeros(own[name].shape[1], 2)}
    save_file(swapped, tmp_path / "swapped.safetensors")
    with pytest.raises(ValueError, match=r"^1 of \d+ layers of swapped.* another shape"):
        check(run_of(model_at(checkpoint), start=str(tmp_path / "swapped.safetensors")))


FAMILY_NAMES = {  # layers' names and parts that have a width, what metadata say, and for which models that is
    "cross attention of 1": ({"unet.down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": 768}, {}, "1"),
    "of 2": ({"lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k": 1024}, {}, "2"),
    "of XL, whatever is said": (
        {"lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k": 2048},
        {"ss_base_model_version": "sd_v1"},
        "XL",
    ),
    "deep blocks in the original names": ({"lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q": 0}, {}, "XL"),
    "deep middle": ({"lora_unet_middle_block_1_transformer_blocks_9_ff_net_2": 0}, {}, "XL"),
    "deep blocks of diffusers": ({"unet.down_blocks.2.attentions.1.transformer_blocks.9.attn1.to_q": 0}, {}, "XL"),
    "outermost blocks": ({"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q": 0}, {}, "1 or 2"),
    "outermost in the original names": ({"lora_unet_output_blocks_11_1_proj_in": 0}, {}, "1 or 2"),
    "outermost, said": (
        {"lora_unet_up_blocks_3_attentions_2_proj_in": 0},
        {"ss_base_model_version": "sd_1.5"},
        "1",
    ),
    "said by sd-scripts": ({"lora_unet_mid_block_resnets_0_conv1": 0}, {"ss_base_model_version": "sd_v2_v"}, "2"),
    "said by modelspec": ({"x": 0}, {"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "XL"),
}


@pytest.mark.parametrize("case", FAMILY_NAMES)
def test_the_family_that_a_file_is_for_is_named(case):
    widths, metadata, wanted = FAMILY_NAMES[case]
    layers = {
        name: FileLayer(source=name, kind="LoRA", alpha=1.0, tensors={"down": torch.empty(2, width or 8)})
        for name, width in widths.items()
    }
    widths = {name: layer.inputs for name, layer in layers.items()}
    assert made_for(widths, metadata) == f"Stable Diffusion {wanted}"
    flux = {"transformer.single_transformer_blocks.9.attn.to_q": next(iter(widths.values()))}
    assert made_for(flux, {}) == "FLUX or a model like it" and made_for({"x": next(iter(widths.values()))}, {}) == ""


def test_a_lora_of_another_family_is_called_so(checkpoint, plain, sdxl, tmp_path):
    one = model_at(checkpoint)
    for name, own, other, family in (
        ("one", plain, sdxl, "Stable Diffusion 1 or 2"),
        ("xl", load_base_model(sdxl), one, "Stable Diffusion XL"),
    ):
        save_file(trained(own, rank=2).tensors(), tmp_path / f"{name}.safetensors")
        title = outline_base_model(other).title
        said = f"it is a LoRA for {family}, the base model is {title}; choose one for {title}."
        with pytest.raises(ValueError, match=rf"{name}.safetensors have no place in .*: {said}"):
            check(run_of(other, start=str(tmp_path / f"{name}.safetensors")))


def test_files_that_are_no_whole_lora_are_refused(checkpoint, tmp_path):
    def refusal(tensors, name="a.safetensors"):
        save_file(tensors, tmp_path / name)
        with pytest.raises(ValueError) as error:
            load_lora(tmp_path / name)
        return str(error.value)

    up, down = {"a.lora_up.weight": torch.ones(4, 2)}, {"a.lora_down.weight": torch.ones(2, 4)}
    assert "a.safetensors is no LoRA (first tensor: x.weight)" in refusal({"x.weight": torch.ones(1)})
    assert "a.safetensors is an OFT v2 LoRA" in refusal({"lora_unet_x.oft_R.weight": torch.zeros(2, 6)})
    assert "holds 1 tensor of an unknown kind (a.vera_lambda_d)" in refusal(
        {**up, **down, "a.vera_lambda_d": torch.ones(1)}
    )
    assert "a in a.safetensors has only up; the file is incomplete" in refusal(up)
    assert "a.lora_up.weight holds values that are not finite" in refusal(
        {"a.lora_up.weight": torch.full((4, 2), torch.nan), **down}
    )
    with pytest.raises(ValueError, match="is no LoRA"):
        load_lora(checkpoint)
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"short.safetensors is cut short or damaged"):
        outline_lora(tmp_path / "short.safetensors")
    (tmp_path / "a.pt").write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match=r"a.pt is a pickle"):
        outline_lora(tmp_path / "a.pt")


def test_only_what_a_layer_can_begin_with_is_continued_and_only_where_there_is_a_rate(checkpoint, tmp_path):
    base = model_at(checkpoint)
    own = layers_by_name(outline_base_model(base))
    unet, text = (next(n for n in own if n.startswith(p) and n.endswith("to_q" if "unet" in p else "fc1"))
                  for p in ("lora_unet", "lora_te"))  # fmt: skip

    def begin(**tensors):
        save_file({name.replace("__", "."): t for name, t in tensors.items()}, tmp_path / "a.safetensors")
        run = run_of(base, start=str(tmp_path / "a.safetensors"))
        check(run)
        outline_run(run)

    def pair(name):
        out, width = own[name].module.weight.shape
        return {f"{name}.lora_down.weight": torch.ones(2, width), f"{name}.lora_up.weight": torch.ones(out, 2)}

    begin(**pair(unet), **pair(text))
    biased = "lora_unet_conv_in"
    small = {f"{biased}.lora_down.weight": torch.ones(2, 4, 3, 3), f"{biased}.lora_up.weight": torch.ones(32, 2, 1, 1)}
    with pytest.raises(
        ValueError, match=rf"{biased}: a layer of diff_b, down, up cannot be continued; set use of Existing LoRA to be"
    ):
        begin(**pair(unet), **pair(text), **small, **{f"{biased}.diff_b": torch.ones(32)})
    table = "lora_te_text_model_embeddings_token_embedding"
    with pytest.raises(
        ValueError, match=rf"{table} in a.safetensors changes a module of the kind Embedding, which cannot"
    ):
        begin(**pair(unet), **pair(text), **pair(table))
    with pytest.raises(
        ValueError, match=r"text_encoder_learning_rate of Optimizer is 0.001, but a.safetensors has no "
    ):
        begin(**pair(unet))
    with pytest.raises(
        ValueError, match=r"^learning_rate of Optimizer is 0.001, but a.safetensors has no layer .*lora_unet_"
    ):
        begin(**pair(text))
    twice = {name.replace("lora_te_", "lora_te1_"): t for name, t in pair(text).items()}
    with pytest.raises(ValueError, match=rf"has the layer {text} twice, as lora_te1?_.* and as lora_te1?_"):
        begin(**pair(unet), **pair(text), **twice)


# --- continuing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["sd1", "sdxl"])
def test_a_continued_network_is_the_file_and_changes_nothing_at_first(checkpoint, sdxl, tmp_path, family):
    config = model_at(checkpoint) if family == "sd1" else sdxl
    base = load_base_model(config)
    stored = trained(base, rank=3, alpha=2, preset="full", conv_rank=2, conv_alpha=5).tensors()
    last = "lora_te_text_model_encoder_layers_1_mlp_fc2"
    deep = {f"{last}.alpha", f"{last}.lora_down.weight", f"{last}.lora_up.weight"}
    assert family != "sd1" or deep <= set(stored)
    save_file(stored, tmp_path / "old.safetensors")
    run = run_of(config, start=str(tmp_path / "old.safetensors"), rank=64, preset="attn-only")
    check(run)
    start = load_continued(run, base)
    assert start.describe() == {
        "file": "old.safetensors",
        "rank": 3,
        "alpha": 2.0,
        "kinds": ["LoRA"],
        "sshs_model_hash": start.model_hash,
    }
    rates = {"lora_unet": 1e-3, **{text.prefix: 0.0 for text in base.texts}}
    identity = base.text.identity
    base.text.mark(start.digest)
    assert start.changes_text and base.text.identity != identity and f"+{start.digest}" in base.text.identity
    alone = {name: tensor for name, tensor in stored.items() if name.startswith("lora_unet_")}
    save_file(alone, tmp_path / "alone.safetensors")
    assert not load_continued(run_of(config, start=str(tmp_path / "alone.safetensors")), base).changes_text
    network = build_network(base, run, rates, start.layers)
    again = network.tensors()
    assert again.keys() == stored.keys() and all(torch.equal(again[key], t) for key, t in stored.items())
    assert delta_norms(again) == delta_norms(stored)
    (group,) = network.groups(rates)
    assert len(group["params"]) == 2 * sum(name.startswith("lora_unet_") for name in network.layers)
    frozen = [p for name, p in network.named_parameters() if "lora_te" in name]
    assert frozen and not any(p.requires_grad for p in frozen) and all(p.requires_grad for p in group["params"])

    merged = load_with(config, BeneathConfig(path=run.lora.start))
    noise, width = random(1, 4, 8, 8, scale=1), base.unet.config.cross_attention_dim
    pooled = {} if family == "sd1" else {"pooled": random(1, 128), "sizes": torch.tensor([[64, 64, 0, 0, 64, 64]])}
    conditions = Conditions(context=random(1, 7, width, seed=1, scale=1), **pooled)
    ids = torch.tensor([[49406, 320, 1125, 49407]])
    with torch.no_grad():
        plain = base.denoiser.predict(noise, torch.tensor([500]), conditions)
        with network.attached():
            mine = base.denoiser.predict(noise, torch.tensor([500]), conditions)
            texts = [text.model(ids).last_hidden_state for text in base.texts]
        theirs = merged.denoiser.predict(noise, torch.tensor([500]), conditions)
        assert (mine - theirs).abs().max() < 1e-5 < (mine - plain).abs().max()
        for attached, text, other in zip(texts, merged.texts, base.texts, strict=True):
            assert torch.allclose(attached, text.model(ids).last_hidden_state, atol=2e-5)
            assert not torch.allclose(attached, other.model(ids).last_hidden_state, atol=1e-3)


def test_a_magnitude_is_taken_in_the_shape_of_a_matrix_and_refused_without_an_axis(sdxl, outline, tmp_path):
    shapes = {name: outline[1][name].module.weight.shape for name in (LINEAR, SMALL)}

    def start(name, magnitude):
        out, width, *kernel = shapes[name]
        pair = {"lora_up.weight": random(out, 3, *kernel), "lora_down.weight": random(3, width, *kernel, seed=1)}
        tensors = {f"{name}.{end}": tensor for end, tensor in pair.items()}
        save_file({**tensors, f"{name}.dora_scale": magnitude}, tmp_path / "a.safetensors")
        return run_of(sdxl, start=str(tmp_path / "a.safetensors"))

    width = shapes[LINEAR][1]
    with pytest.raises(ValueError, match=rf"{LINEAR}: a DoRA magnitude of shape \({width},\) is neither along the inp"):
        outline_run(start(LINEAR, torch.ones(width)))
    out = shapes[SMALL][0]
    run, base = start(SMALL, random(out, 1)), load_base_model(sdxl)
    rates = {"lora_unet": 1e-3, "lora_te1": 0, "lora_te2": 0}
    again = build_network(base, run, rates, load_continued(run, base).layers).tensors()
    assert torch.allclose(again[f"{SMALL}.dora_scale"], random(out, 1)[:, :, None, None], atol=1e-6)


def test_embeddings_in_files_of_onetrainer_are_left_out_and_reported(checkpoint, plain, tmp_path):
    config = model_at(checkpoint)
    own = trained(plain, rank=2).tensors()
    words = {f"bundle_emb.{word}.clip_l": random(2, 64) for word in ("moss", "<fern>")}
    save_file({**own, **words}, tmp_path / "bundle.safetensors")
    lora = load_lora(tmp_path / "bundle.safetensors")
    assert lora.tokens == ("<fern>", "moss") and len(lora.layers) == sum(name.endswith(".alpha") for name in own)
    said = "bundle.safetensors holds embeddings beside its layers (<fern>, moss); they are left out."
    path = str(tmp_path / "bundle.safetensors")
    for use in ({"start": path}, {"beneath": (BeneathConfig(path=path),)}):
        run = run_of(config, **use)
        check(run)
        report = describe_network(measure_run(run, outline_run(run)))
        assert file_remarks(run) == [said] and said in report
        own = "bundle.safetensors is continued with its own rank, 2; rank of LoRA Config has no effect."
        assert (own in report) == ("start" in use)
    outline = outline_base_model(config)
    assert not any("bundle" in name for name in comfy_tensors(tmp_path / "bundle.safetensors", outline))
    assert file_remarks(run_of(config)) == []
    save_file(words, tmp_path / "words.safetensors")
    with pytest.raises(ValueError, match=r"words.safetensors is no LoRA"):
        load_lora(tmp_path / "words.safetensors")


# --- merging ----------------------------------------------------------------------------------------------


def test_several_loras_are_added_in_their_order_and_rounded_once(checkpoint, plain, tmp_path):
    config = model_at(checkpoint)
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.safetensors")
        save_file(trained(plain, rank=2, seed=seed, preset="full").tensors(), paths[-1])
    beneath = tuple(BeneathConfig(path=str(path), strength=s) for path, s in zip(paths, (0.5, -2), strict=True))
    exact, half = load_with(config, *beneath), load_with(config, *beneath, dtype=torch.bfloat16)
    layers = [trained(plain, rank=2, seed=seed, preset="full").layers for seed in (1, 2)]
    unchanged = layers_by_name(plain)
    for name, layer in layers_by_name(exact).items():
        if name in layers[0]:
            weight = unchanged[name].module.weight + 0.5 * layers[0][name].delta_weight().detach()
            weight = weight - 2 * layers[1][name].delta_weight()
            assert torch.allclose(layer.module.weight, weight, atol=1e-5), name
            break
    else:
        pytest.fail("no layer was compared")
    assert torch.equal(half.unet.conv_in.weight, exact.unet.conv_in.weight.bfloat16())
    assert half.dtype == half.unet.conv_out.bias.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in half.unet.parameters())

    # Captions encoded with other weights are other captions: strength, order and file count.
    identities = {plain.identity["text_encoder"], exact.identity["text_encoder"]}
    for changed in (beneath[:1], beneath[::-1], (beneath[0].replace(strength=0.6), beneath[1])):
        identities.add(load_with(config, *changed).identity["text_encoder"])
    assert len(identities) == 5

    loud = trained(plain, rank=2, preset="full").tensors()
    save_file({k: t * 1e6 if k.endswith("up.weight") else t for k, t in loud.items()}, tmp_path / "loud.safetensors")
    with pytest.raises(ValueError, match=r"overflows torch.float16 with 1 LoRAs beneath added"):
        load_with(config, BeneathConfig(path=str(tmp_path / "loud.safetensors"), strength=10), dtype=torch.float16)


def test_the_outline_is_the_model_without_its_weights(checkpoint, sdxl, tmp_path):
    assert checkpoint_tensors().keys() == load_file(checkpoint).keys()
    for config in (model_at(checkpoint), sdxl):
        outline, base = outline_base_model(config), load_base_model(config)
        mine, loaded = layers_by_name(outline), layers_by_name(base)
        assert list(mine) == list(loaded)
        for name, layer in mine.items():
            assert layer.module.weight.is_meta and layer.module.weight.shape == loaded[name].module.weight.shape
            assert layer._replace(module=None) == loaded[name]._replace(module=None)
        folder = tmp_path / f"{base.family.name}"
        base.unet.save_pretrained(folder / "unet")
        for text, part in zip(base.texts, base.family.texts, strict=True):
            text.model.save_pretrained(folder / part.folder)
        base.vae.save_pretrained(folder / "vae")
        (folder / "scheduler").mkdir()
        (folder / "scheduler" / "scheduler_config.json").write_text("{}")
        in_folder = layers_by_name(outline_base_model(model_at(folder)))
        assert {k: layer.module.weight.shape for k, layer in in_folder.items()} == {
            k: layer.module.weight.shape for k, layer in mine.items()
        }
