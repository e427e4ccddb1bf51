"""The layers of connected models: which there are, which presets train them, and the blocks they lie in."""

from itertools import pairwise
from types import SimpleNamespace

import comfy.ops
import comfy.supported_models
import pytest
import torch
from torch import nn
from zoo.passes import run_once
from zoo.zoo import ROWS, ZOO, build

from lora_atelier.nodes.comfyui.connected import layers, names
from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.config.algorithms import KEYS_AND_ENDS
from lora_atelier.trainer_core.memory.gradient_checkpointing import LEVELS
from lora_atelier.trainer_core.models import Part
from lora_atelier.trainer_core.networks import choose_layers
from lora_atelier.trainer_core.networks.layers.shape import is_linear, is_norm, weight_shape

# In a block: what attn-only trains, what attn-mlp adds, what both leave out; paths behind the block's.
INSIDE = {
    "flux_dev": {
        "double_blocks.0": (
            "img_attn.qkv img_attn.proj txt_attn.qkv txt_attn.proj",
            "img_mlp.0 img_mlp.2 txt_mlp.0 txt_mlp.2",
            "img_mod.lin txt_mod.lin",
        ),
        "single_blocks.1": ("linear1 linear2", "", "modulation.lin"),
    },
    "sd3": {
        "joint_blocks.1": (
            "context_block.attn.qkv x_block.attn.qkv x_block.attn.proj",
            "x_block.mlp.fc1 x_block.mlp.fc2",
            "context_block.adaLN_modulation.1 x_block.adaLN_modulation.1",
        )
    },
    "auraflow": {
        "single_layers.0": (
            "attn.w1q attn.w1k attn.w1v attn.w1o",
            "mlp.c_fc1 mlp.c_fc2 mlp.c_proj",
            "modCX.1",
        )
    },
    "z_image": {
        "layers.0": (
            "attention.qkv attention.out",
            "feed_forward.w1 feed_forward.w2 feed_forward.w3",
            "adaLN_modulation.0",
        )
    },
    "qwen_image": {
        "transformer_blocks.0": (
            "attn.to_q attn.to_k attn.to_v attn.to_out.0 attn.add_q_proj attn.add_k_proj attn.add_v_proj "
            "attn.to_add_out",
            "img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2",
            "img_mod.1 txt_mod.1",
        )
    },
    "wan21_t2v": {
        "blocks.0": (
            "self_attn.q self_attn.k self_attn.v self_attn.o cross_attn.q cross_attn.k cross_attn.v cross_attn.o",
            "ffn.0 ffn.2",
            "",
        )
    },
    "cosmos_predict2": {
        "blocks.0": (
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.output_proj "
            "cross_attn.q_proj cross_attn.k_proj cross_attn.v_proj cross_attn.output_proj",
            "mlp.layer1 mlp.layer2",
            "adaln_modulation_self_attn.1 adaln_modulation_self_attn.2 adaln_modulation_cross_attn.1 "
            "adaln_modulation_cross_attn.2 adaln_modulation_mlp.1 adaln_modulation_mlp.2",
        )
    },
    "cogvideox": {"blocks.0": ("q k v attn_out", "ff_proj ff_out", "norm1.linear norm2.linear")},
}
UNETS = ("sd15", "sdxl", "koala")
WITHOUT_PARTS = ("cosmos_t2v", "cogvideox", "odd_convolutions")  # blocks without feed-forward parts of that name
BESIDE = ("omnigen2", "boogu", "hidream_o1", "ltxav")  # such parts of references and of sound, which a picture has not
BLOCKS = {  # where they are not simply numbered from 0 in one list
    "flux_dev": "double_blocks.0 double_blocks.1 single_blocks.0 single_blocks.1",
    "hidream": "double_stream_blocks.0 single_stream_blocks.0",
    "cascade_c": "down_blocks.0 down_blocks.1 up_blocks.0 up_blocks.1",
    "cosmos_t2v": "blocks.block0 blocks.block1",
    "chroma": "double_blocks.0 double_blocks.1 single_blocks.0 single_blocks.1",
    "odd_convolutions": "blocks.0 blocks.1 blocks.2",
    "kandinsky5_image": "visual_transformer_blocks.0 visual_transformer_blocks.1",
}
UNET_COUNTS = {  # of Stable Diffusion 1.5, as for the UNet that this pack loads itself
    "attn-only": 128,
    "attn-mlp": 192,
    "full-lin": 230,
    "full": 282,
    "unet-transformer-only": 192,
    "unet-convblock-only": 88,
}


@pytest.fixture(scope="module")
def models():
    """Give each tiny model, built once."""
    built = {}
    return lambda row: built.setdefault(row, build(row)[0])


def linked(model):
    """Stand for a connected model."""
    found = layers.list_layers(model)
    return SimpleNamespace(
        parts=(Part(prefix="lora_unet", title="diffusion model"),),
        layers=SimpleNamespace(
            listed=lambda: found,
            blocks=layers.blocks(model.diffusion_model),
            layouts=lambda setting: layers.block_layouts(model.diffusion_model, setting),
        ),
        title="Tiny",
    )


def matrices(found, preset):
    return {layer.path for layer in found if preset in layer.presets and not is_norm(layer.module)}


def test_presets_are_nested_and_stay_inside_blocks(models, name):
    found = layers.list_layers(models(name))
    attention, blocks, linear, full = (matrices(found, p) for p in ("attn-only", "attn-mlp", "full-lin", "full"))
    if name == "odd_convolutions":
        assert not blocks and linear < full
        return
    assert attention
    assert attention < blocks < linear <= full
    assert full == {layer.path for layer in found if layer.trainable and not is_norm(layer.module)} or name in UNETS
    assert matrices(found, KEYS_AND_ENDS) and matrices(found, KEYS_AND_ENDS) <= blocks
    if name not in UNETS:
        assert all(layer.block for layer in found if layer.path in blocks)
        inside = [layer.path.removeprefix(layer.block).lower() for layer in found if layer.path in blocks]
        assert not [path for path in inside if any(word in path for word in ("modul", "_mod", "adaln", "norm"))]


@pytest.mark.parametrize("row", [row for row in INSIDE if row in ZOO])
def test_presets_choose_layers_by_role(models, row):
    found = layers.list_layers(models(row))
    for block, wanted in INSIDE[row].items():
        own = {layer.path: layer for layer in found if layer.block == block and not is_norm(layer.module)}
        trainable = {path for path, layer in own.items() if layer.trainable}
        attention, within = (trainable & matrices(found, preset) for preset in ("attn-only", "attn-mlp"))
        chosen = (attention, within - attention, trainable - within)
        assert [{path[len(block) + 1 :] for path in each} for each in chosen] == [set(w.split()) for w in wanted]


def test_every_block_is_found_and_runs(models, name):
    """With its feed-forward parts, if these are modules of their own."""
    model = models(name)
    found = layers.blocks(model.diffusion_model)
    assert found and len(set(found)) == len(found)
    assert name not in BLOCKS or found == BLOCKS[name].split()
    ran = set()
    units = layers.units(model.diffusion_model)
    parts = {part for part, _ in layers.feed_forward(units)}
    hooks = [each.register_forward_pre_hook(lambda module, _: ran.add(module)) for each in (*dict(units), *parts)]
    run_once(model, name)
    for hook in hooks:
        hook.remove()
    for block in found:  # a level of checkpointing acts on modules whose forward runs
        inside = {unit for unit, _ in units} & set(model.diffusion_model.get_submodule(block).modules())
        assert inside <= ran
        assert inside or name in UNETS
    beside = len(units) - len(ran - parts)
    assert beside <= 2, "few are beside the picture's way: adapters of text, refiners of references"
    assert bool(parts) == (name not in WITHOUT_PARTS)
    assert len(parts - ran) <= (4 if name in BESIDE else 0)


@pytest.mark.parametrize("kept", [[7] * 20, [30] * 4 + [10] * 8, [100, 1, 1, 1, 1], [3], []], ids=str)
def test_blocks_are_shared_out_by_what_they_keep(kept):
    units = [(nn.Identity(), 1) for _ in kept]
    shared = layers.shared_out(units, kept)
    assert [unit for unit, _ in shared] == [unit for unit, _ in units]
    levels = [[size for size, (_, level) in zip(kept, shared, strict=True) if level == each] for each in range(2, 7)]
    assert sum(map(sum, levels)) == sum(kept)
    least = min(map(sum, levels))  # which the last block of no level, a smallest one, could have joined for the better
    assert all(sum(sizes) - min(sizes, default=0) <= least for sizes in levels)


def test_each_level_recomputes_more_blocks(models, name):
    units = layers.units(models(name).diffusion_model)
    counts = [sum(least <= level for _, least in units) for level in range(len(LEVELS))]
    assert counts[0] == counts[1] == 0 and counts[-1] == len(units)
    assert all(after - before in (len(units) // 5, len(units) // 5 + 1) for before, after in pairwise(counts[1:]))


def test_names_are_unique_and_in_comfyuis_map(models, name):
    model = models(name)
    found = layers.list_layers(model)
    keys, weights = comfy.lora.model_lora_keys_unet(model, {}), model.state_dict()
    assert len({layer.name for layer in found}) == len(found)
    aliases = [alias for layer in found for alias in (*layer.aliases, *layer.slices)]
    assert len(set(aliases)) == len(aliases)
    for layer in found:
        if layer.trainable:
            assert keys[layer.name] == keys[layer.comfy] == f"{layer.comfy}.weight"
        stored = weights.get(f"{layer.comfy}.weight")
        assert not layer.trainable if stored is None else weight_shape(layer.module) == stored.shape


def test_what_no_network_can_change_is_listed_but_never_chosen(models):
    left_out = {
        "cascade_c": ("down_blocks.0.0.depthwise", "Conv2d"),  # grouped
        "cascade_b": ("up_upscalers.0.1", "ConvTranspose2d"),
        "hidream": ("double_stream_blocks.0.block.ff_i.gate", "MoEGate"),
        "anima": ("llm_adapter.embed", "Embedding"),
    }
    for row, (path, kind) in left_out.items():
        layer = next(layer for layer in layers.list_layers(models(row)) if layer.path == path)
        assert type(layer.module).__name__ == kind
        assert not layer.trainable and not layer.presets


def test_a_convolution_of_three_axes_is_trained_by_the_preset_full(models):
    found = {layer.path: layer for layer in layers.list_layers(models("wan21_t2v"))}
    assert type(found["patch_embedding"].module).__name__ == "Conv3d"
    assert found["patch_embedding"].trainable and found["patch_embedding"].presets == {"full"}


def test_weights_that_are_computed_are_no_layer(models):
    found = {layer.path: layer for layer in layers.list_layers(models("odd_weights"))}
    assert not found["normed"].trainable and not found["normed"].presets
    assert "blocks.2.attn_q" not in found  # the same module as in the first block


def test_experts_in_one_weight_are_no_layer():
    experts = nn.Module()
    experts.in_features, experts.out_features = 4, 8
    experts.weight = nn.Parameter(torch.zeros(3, 8, 4))
    assert not is_linear(experts)


@pytest.mark.parametrize("preset", ["unet-transformer-only", "unet-convblock-only"])
def test_presets_of_unets_are_refused_for_transformers(models, preset):
    with pytest.raises(
        ValueError, match=rf"The preset {preset} is for UNets, and Tiny is none; set preset of LoRA Conf"
    ):
        choose_layers(linked(models("z_image")), LoraConfig(preset=preset), ["lora_unet"])
    assert choose_layers(linked(models("sd15")), LoraConfig(preset=preset), ["lora_unet"])


def test_a_unet_has_the_presets_of_our_own():
    config = ROWS["sd15"].config | {
        "model_channels": 320,
        "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4],
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        "num_heads": 8,
        "context_dim": 768,
    }
    with torch.device("meta"):
        model = comfy.supported_models.SD15(config).get_model({}, "", device="meta")
    found = layers.list_layers(model)
    assert {preset: len(matrices(found, preset)) for preset in UNET_COUNTS} == UNET_COUNTS


def test_numbers_for_blocks_follow_the_blocks(models):
    base = linked(models("flux_dev"))
    chosen = choose_layers(base, LoraConfig(block_ranks=(8, 0, 4, 2), block_weights=(0.5, 1, 1, 1, 2)), ["lora_unet"])
    ranks = {trained.block: (trained.rank, trained.lr_factor) for trained in chosen}
    assert ranks == {"double_blocks.0": (8, 1), "single_blocks.0": (4, 1), "single_blocks.1": (2, 2)}
    with pytest.raises(ValueError, match=r"takes 4 numbers, in the order double_blocks\.0 double_blocks\.1 single_blo"):
        choose_layers(base, LoraConfig(block_ranks=(8, 4)), ["lora_unet"])


def test_modulations_have_a_rank_of_their_own(models):
    chosen = choose_layers(linked(models("flux_dev")), LoraConfig(kind_ranks=("modulation=2", "mlp=0")), ["lora_unet"])
    ranks = {trained.path: trained.rank for trained in chosen}
    assert ranks["double_blocks.0.img_mod.lin"] == ranks["single_blocks.0.modulation.lin"] == 2
    assert ranks["double_blocks.0.img_attn.qkv"] == 16 and "double_blocks.0.img_mlp.0" not in ranks
    assert not [path for path in ranks if "blocks" not in path]


@pytest.mark.parametrize("how", ["mixed", "packed"])
def test_quantized_linears_are_layers(how):
    """ComfyUI's mixed precision has linears that are no nn.Linear; others keep bytes of another shape."""
    model = build("wan21_t2v")[0]
    path = "blocks.0.ffn.0"
    plain = model.diffusion_model.get_submodule(path)
    if how == "mixed":
        ops = comfy.ops.mixed_precision_ops({"mixed_ops": True}, torch.float32)
        linear = ops.Linear(plain.in_features, plain.out_features)
        linear.weight = plain.weight
        assert not isinstance(linear, nn.Linear)
    else:
        linear = PackedLinear(plain)
    model.diffusion_model.get_submodule("blocks.0.ffn")[0] = linear
    layer = next(layer for layer in layers.list_layers(model) if layer.path == path)
    assert layer.module is linear and layer.trainable and "attn-mlp" in layer.presets
    assert weight_shape(linear) == (plain.out_features, plain.in_features)
    assert "diffusion_model_blocks_0_ffn_0" in layer.aliases


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored as bytes, as GGUF's are."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.detach().view(torch.uint8).flatten(), requires_grad=False)
        self.bias = linear.bias


def test_a_family_is_told_by_names():
    told = {
        "transformer.single_transformer_blocks.0.attn.to_q": "FLUX",
        "diffusion_model.layers.3.attention.to_q": "Z-Image or Lumina 2",
        "lora_unet_blocks_2_self_attn_q": "Wan",
        "diffusion_model.transformer_blocks.0.img_mlp.net.2": "Qwen-Image",
        "lora_unet_joint_blocks_0_x_block_attn_qkv": "Stable Diffusion 3",
        "lora_unet_down_blocks_2_attentions_1_transformer_blocks_4_attn1_to_q": "Stable Diffusion XL",
        "x.y": "",
    }
    assert {name: names.made_for({name: 0}, {}) for name in told} == told
