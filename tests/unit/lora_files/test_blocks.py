"""Parts of a LoRA: blocks by name, rules, scaled and dropped layers."""

import pytest
import torch

from lora_atelier.trainer_core.lora_files.blocks import block_of, blocks_of, parse_rules, scale_blocks
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.read import parse_lora

NAMES = {
    "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q": "down_blocks.1",
    "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q": "input_blocks.4",
    "lora_unet_mid_block_attentions_0_proj_in": "middle_block",
    "lora_unet_middle_block_1_proj_in": "middle_block",
    "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q": "middle_block",
    "lora_unet_conv_in": "other",
    "lora_te1_text_model_encoder_layers_3_mlp_fc1": "te1.layers.3",
    "lora_te_text_model_encoder_layers_3_mlp_fc1": "te.layers.3",
    "text_encoder_2.text_model.encoder.layers.11.mlp.fc1": "te2.layers.11",
    "transformer.single_transformer_blocks.17.attn.to_q": "single_transformer_blocks.17",
    "diffusion_model.double_blocks.3.img_attn.qkv": "double_blocks.3",
    "diffusion_model.layers.9.attention.qkv": "layers.9",
    "diffusion_model.blocks.20.self_attn.q": "blocks.20",
}


def lora(
    names, kind=lambda name: {f"{name}.lora_down.weight": torch.ones(2, 4), f"{name}.lora_up.weight": torch.ones(3, 2)}
):
    return parse_lora({key: tensor for name in names for key, tensor in kind(name).items()}, "x.safetensors", {})


@pytest.mark.parametrize(("name", "block"), NAMES.items())
def test_a_layer_is_of_a_block_whoever_named_it(name, block):
    assert block_of(name) == block


def test_blocks_are_listed_in_order():
    names = [f"diffusion_model.blocks.{number}.q" for number in (10, 2, 1)]
    assert blocks_of(lora([*names, "lora_te_text_model_encoder_layers_3_mlp_fc1"])) == [
        "te.layers.3",
        "blocks.1",
        "blocks.2",
        "blocks.10",
    ]


def test_the_last_rule_decides_and_zero_drops():
    found = lora(
        [
            "diffusion_model.blocks.1.q",
            "diffusion_model.blocks.1.k",
            "diffusion_model.blocks.2.q",
            "diffusion_model.conv",
        ]
    )
    kept, factors = scale_blocks(found, parse_rules("blocks.*=0.5  # all\nblocks.2=0, *.k = -2"), rest=3)
    assert factors == {
        "diffusion_model.blocks.1.q": 0.5,
        "diffusion_model.blocks.1.k": -2,
        "diffusion_model.blocks.2.q": 0,
        "diffusion_model.conv": 3,
    }
    assert list(kept.layers) == [name for name, factor in factors.items() if factor]
    for name, layer in kept.layers.items():
        torch.testing.assert_close(delta_weight(layer), factors[name] * delta_weight(found.layers[name]))
    assert scale_blocks(found, [])[0] == found


@pytest.mark.parametrize(
    "parts",
    [
        {"diff": (3, 4), "diff_b": (3,)},
        {"hada_w1_a": (3, 2), "hada_w1_b": (2, 4), "hada_w2_a": (3, 2), "hada_w2_b": (2, 4)},
        {"lokr_w1": (1, 2), "lokr_w2": (3, 2)},
        {"lokr_w1_a": (1, 1), "lokr_w1_b": (1, 2), "lokr_w2": (3, 2)},
    ],
)
def test_layers_of_every_linear_kind_are_scaled(parts):
    tensors = {part: torch.randn(shape) for part, shape in parts.items()}
    found = lora(["a"], lambda name: {f"{name}.{part}": tensor for part, tensor in tensors.items()})
    scaled = scale_blocks(found, [("a", -1.5)])[0].layers["a"]
    torch.testing.assert_close(delta_weight(scaled), -1.5 * delta_weight(found.layers["a"]))
    if "diff_b" in parts:
        torch.testing.assert_close(scaled.tensors["diff_b"], -1.5 * tensors["diff_b"])


def test_wrong_rules_are_named():
    found = lora(["diffusion_model.blocks.1.q"])
    for text in ("blocks.1", "=1", "blocks.1=x", "blocks.1=nan", "blocks.1=1e9"):
        with pytest.raises(ValueError, match="is no rule"):
            parse_rules(text)
    with pytest.raises(ValueError, match=r"blocks.9 of LoRA Blocks matches no layer.*blocks\.1"):
        scale_blocks(found, parse_rules("blocks.9=1"))
    with pytest.raises(ValueError, match=r"Nothing of x\.safetensors is left"):
        scale_blocks(found, parse_rules("*=0"))
    turned = lora(["a"], lambda name: {f"{name}.oft_blocks": torch.zeros(2, 2, 2)})
    assert scale_blocks(turned, parse_rules("a=1"))[0] == turned
    with pytest.raises(ValueError, match="layer of OFT, which can be kept or dropped"):
        scale_blocks(turned, parse_rules("a=0.5"))
