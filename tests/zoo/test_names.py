"""LoRA files of connected models: ours load in ComfyUI; those of other trainers are continued, or go beneath."""

import json
import logging
from types import SimpleNamespace

import comfy.lora
import comfy.sd
import pytest
import torch
from safetensors.torch import save_file
from zoo.again import again
from zoo.passes import run_once
from zoo.zoo import ZOO, build, patcher_of

from lora_atelier.nodes.comfyui.connected import layers, names
from lora_atelier.nodes.comfyui.models import check_lora
from lora_atelier.trainer_core.config import BeneathConfig, LoraConfig
from lora_atelier.trainer_core.lora_files.continued import layer_weights
from lora_atelier.trainer_core.lora_files.match import layers_by_name, match_layers
from lora_atelier.trainer_core.lora_files.merge import comfy_tensors, merge_beneath
from lora_atelier.trainer_core.lora_files.read import load_lora, outline_lora
from lora_atelier.trainer_core.lora_files.write import peft_tensors, save_lora
from lora_atelier.trainer_core.models import Part
from lora_atelier.trainer_core.networks import Network, choose_layers
from lora_atelier.trainer_core.networks.choose import trained_layer_of

ROUNDING = 1e-5  # of the largest value: sums in another order

# Some layers of each architecture, as diffusers names them, or ComfyUI.
FLUX_DIFFUSERS = (
    "transformer_blocks.0.attn.to_q transformer_blocks.0.attn.to_k transformer_blocks.0.attn.to_v "
    "transformer_blocks.1.attn.add_q_proj transformer_blocks.1.attn.add_v_proj transformer_blocks.0.attn.to_out.0 "
    "transformer_blocks.0.ff.net.0.proj transformer_blocks.0.ff_context.net.2 transformer_blocks.1.norm1.linear "
    "single_transformer_blocks.0.attn.to_q single_transformer_blocks.0.attn.to_k single_transformer_blocks.0.attn.to_v "
    "single_transformer_blocks.0.proj_mlp single_transformer_blocks.0.proj_out norm_out.linear x_embedder"
)
FLUX_OWN = "double_blocks.0.img_attn.qkv double_blocks.1.txt_mlp.2 single_blocks.0.linear1 single_blocks.1.linear2"
SD3_DIFFUSERS = (
    "transformer_blocks.0.attn.to_q transformer_blocks.0.attn.to_k transformer_blocks.0.attn.add_v_proj "
    "transformer_blocks.0.attn2.to_v transformer_blocks.0.ff.net.2 norm_out.linear"
)
Z_IMAGE_DIFFUSERS = (
    "layers.0.attention.to_q layers.0.attention.to_k layers.0.attention.to_v layers.0.attention.to_out.0 "
    "layers.1.feed_forward.w2 context_refiner.0.attention.to_q noise_refiner.1.attention.to_v"
)
QWEN = "transformer_blocks.0.attn.to_q transformer_blocks.0.attn.add_k_proj transformer_blocks.1.img_mlp.net.0.proj"
WAN = "blocks.0.self_attn.q blocks.0.cross_attn.v blocks.1.ffn.2"
KREA_DIFFUSERS = "transformer_blocks.0.attn.to_q transformer_blocks.1.ff.down text_fusion.refiner_blocks.0.attn.to_k"
HUNYUAN = "double_blocks.0.img_attn.qkv double_blocks.0.txt_mod.lin single_blocks.0.linear2"
HUNYUAN_DIFFUSERS = (
    "transformer_blocks.0.attn.to_q transformer_blocks.0.attn.to_v transformer_blocks.0.attn.add_k_proj "
    "transformer_blocks.0.ff.net.2 single_transformer_blocks.0.attn.to_k single_transformer_blocks.0.proj_mlp "
    "single_transformer_blocks.0.proj_out"
)
WAN_DIFFUSERS = "blocks.0.attn1.to_q blocks.0.attn2.to_v blocks.1.ffn.net.2 blocks.1.attn1.to_out.0"
HIDREAM = "double_stream_blocks.0.block.attn1.to_q single_stream_blocks.0.block.attn1.to_v"
FILES = [  # (architecture, trainer, start of names, layers)
    ("flux_dev", "sd-scripts", "lora_unet_", FLUX_OWN),
    ("flux_dev", "ai-toolkit", "transformer.", FLUX_DIFFUSERS),
    ("flux_dev", "diffusers", "transformer.", FLUX_DIFFUSERS),
    ("flux_dev", "OneTrainer", "lora_transformer_", FLUX_DIFFUSERS),
    ("flux_dev", "peft", "base_model.model.", FLUX_DIFFUSERS),
    ("flux2_klein", "ai-toolkit", "diffusion_model.", "double_blocks.0.img_attn.qkv single_blocks.0.linear1"),
    (
        "flux2_klein",
        "diffusers",
        "transformer.",
        "transformer_blocks.0.attn.to_q single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    ),
    ("chroma", "sd-scripts", "lora_unet_", FLUX_OWN),
    ("chroma", "ai-toolkit", "diffusion_model.", FLUX_OWN),
    (
        "chroma",
        "OneTrainer",
        "lora_transformer_",
        "transformer_blocks.0.attn.to_q single_transformer_blocks.1.proj_mlp",
    ),
    ("sd3", "sd-scripts", "lora_unet_", "joint_blocks.0.x_block.attn.qkv joint_blocks.1.context_block.attn.qkv"),
    ("sd3", "diffusers", "transformer.", SD3_DIFFUSERS),
    ("sd3", "OneTrainer", "lora_transformer_", SD3_DIFFUSERS),
    ("z_image", "musubi", "lora_unet_", "layers.0.attention.qkv layers.1.feed_forward.w1"),
    ("z_image", "ai-toolkit", "diffusion_model.", Z_IMAGE_DIFFUSERS),
    ("z_image", "OneTrainer", "transformer.", Z_IMAGE_DIFFUSERS),
    ("z_image", "diffusers", "transformer.", Z_IMAGE_DIFFUSERS),
    ("lumina2", "sd-scripts", "lora_unet_", "layers.0.attention.qkv layers.1.feed_forward.w1"),
    ("qwen_image", "musubi", "lora_unet_", QWEN),
    ("qwen_image", "ai-toolkit", "diffusion_model.", QWEN),
    ("qwen_image", "OneTrainer", "transformer.", QWEN),
    ("qwen_image", "diffusers", "transformer.", QWEN),
    ("hunyuan_video", "musubi", "lora_unet_", HUNYUAN),
    ("hunyuan_video", "ai-toolkit", "diffusion_model.", HUNYUAN),
    ("hunyuan_image21", "musubi", "lora_unet_", HUNYUAN),
    ("wan21_t2v", "musubi", "lora_unet_", WAN),
    ("wan21_t2v", "ai-toolkit", "diffusion_model.", WAN),
    ("wan21_t2v", "Wan Fun", "lora_unet__", f"{WAN} blocks.0.cross_attn.k"),
    ("krea2", "diffusers", "transformer.", KREA_DIFFUSERS),
    ("krea2", "ai-toolkit", "diffusion_model.", KREA_DIFFUSERS),
    ("anima", "sd-scripts", "lora_unet_", "blocks.0.self_attn.q_proj blocks.1.mlp.layer2"),
    (
        "cascade_c",
        "OneTrainer",
        "lora_prior_unet_",
        "down_blocks.0.2.attention.attn.to_q down_blocks.0.0.channelwise.0",
    ),
    ("hidream", "ai-toolkit", "diffusion_model.", HIDREAM),
    ("hidream", "diffusers", "transformer.", HIDREAM),
    ("auraflow", "diffusers", "transformer.", "norm_out.linear joint_transformer_blocks.0.attn.to_q"),
    ("pixart_sigma", "diffusers", "transformer.", "transformer_blocks.0.attn1.to_q transformer_blocks.1.attn2.to_v"),
]
NAMED_BY_DIFFUSERS = [  # files whose names ComfyUI does not know, or not all of them
    ("hunyuan_video", "diffusers", "transformer.", HUNYUAN_DIFFUSERS),
    ("hunyuan_video", "OneTrainer", "lora_transformer_", HUNYUAN_DIFFUSERS),
    ("hunyuan_image21", "diffusers", "transformer.", HUNYUAN_DIFFUSERS),
    ("wan21_t2v", "diffusers", "transformer.", WAN_DIFFUSERS),
    ("wan21_t2v", "OneTrainer", "transformer.", WAN_DIFFUSERS),
    ("ltxv", "diffusers", "transformer.", "transformer_blocks.0.attn1.to_q transformer_blocks.1.ff.net.2 proj_in"),
    ("cosmos_predict2", "diffusers", "transformer.", "transformer_blocks.0.attn1.to_q transformer_blocks.1.ff.net.2"),
]
# In every run: each way to name a trainer's tensors, also where ComfyUI knows none, and each architecture once.
AS_OTHERS = [
    ("flux_dev", "diffusers"),
    ("flux2_klein", "ai-toolkit"),
    ("chroma", "sd-scripts"),
    ("chroma", "ai-toolkit"),
    ("sd3", "OneTrainer"),
    ("z_image", "OneTrainer"),
    ("z_image", "diffusers"),
    ("qwen_image", "ai-toolkit"),
    ("qwen_image", "OneTrainer"),
    ("hunyuan_video", "ai-toolkit"),
    ("wan21_t2v", "ai-toolkit"),
    ("wan21_t2v", "OneTrainer"),
    ("krea2", "ai-toolkit"),
    ("hidream", "ai-toolkit"),
]
HERE = [file for file in (*FILES, *NAMED_BY_DIFFUSERS) if file[0] in ZOO]
OF_OTHERS = [*(f for f in HERE if f[:2] not in AS_OTHERS), *again(*(f for f in HERE if f[:2] in AS_OTHERS))]
WITHOUT_ALPHA = ("ai-toolkit", "diffusers", "peft")


class Linked:
    """A connected model, of which only names and layers are asked."""

    name, title = "tiny", "Tiny"
    parts = (Part(prefix="lora_unet", title="diffusion model"),)

    def __init__(self, patcher):
        self.patcher = patcher
        self.found = layers.list_layers(patcher.model)
        self.layers = self.host = self

    def listed(self):
        return self.found

    def further_names(self):
        own = {layer.path: layer.name for layer in self.found}
        places = names.diffusers_layers(self.patcher.model)
        return {name: (own[path], piece) for name, (path, piece) in places.items()}

    def made_for(self, widths, metadata):
        return names.made_for(widths, metadata)

    def layouts(self, setting):
        return layers.block_layouts(self.patcher.model.diffusion_model, setting)

    blocks = ()

    def put_beneath(self, tensors, strength, *, training_only):
        self.patcher, _ = names.put_beneath(self.patcher, None, tensors, strength)


def base_of(row):
    return Linked(build(row)[1])


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(network):
    """Put values into a network whose deltas start at zero."""
    for seed, layer in enumerate(network.layers.values()):
        layer.up.data.copy_(0.05 * draw(seed, *layer.up.shape))
    return network


def patched(patcher, row):
    """Compute a prediction with a MODEL's patches in its weights; they are taken out again."""
    patcher.patch_model()
    found = run_once(patcher.model, row)
    patcher.unpatch_model()
    return found


def close(one, other):
    return float((one - other).abs().max() / other.abs().max()) < ROUNDING


def places_of(base):
    """Map the names in LoRA files to layers and their slices."""
    own = layers_by_name(base)
    places = {name: (own[layer], piece) for name, (layer, piece) in base.layers.further_names().items()}
    for layer in base.layers.listed():
        places |= dict.fromkeys(layer.aliases, (layer, None)) | {a: (layer, s) for a, s in layer.slices.items()}
    return places


def foreign(row, trainer, start, stems, base):
    """Build a LoRA file as a trainer names its tensors, with rank 3; alphas differ where the form has them."""
    places = places_of(base)
    flat = start.endswith("_")
    tensors = {}
    for seed, stem in enumerate(stems.split()):
        name = start + (stem.replace(".", "_") if flat else stem)
        layer, piece = places[name.replace(".", "_").replace("base_model_model_", "")]
        outputs, inputs = layer.module.weight.shape[:2]
        down, up = 0.2 * draw(seed, 3, inputs), 0.2 * draw(seed + 100, piece.length if piece else outputs, 3)
        if trainer in WITHOUT_ALPHA:
            tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        else:
            alpha = torch.tensor(1.5 + seed % 3)
            tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
    return tensors


PEFT = ("flux_dev", "cascade_b")  # linear layers, and convolutions
FORMS = [(name, "comfy") for name in ZOO] + [(name, "peft") for name in PEFT]


@pytest.mark.parametrize(("name", "form"), [*FORMS, *again(*((name, "peft") for name in ZOO if name not in PEFT))])
def test_a_trained_file_does_in_comfyui_what_it_did_in_training(tmp_path, caplog, name, form):
    base = base_of(name)
    model = base.patcher.model
    config = LoraConfig(rank=3, alpha=1.5, preset="full")
    network = filled(Network(choose_layers(base, config, ["lora_unet"]), config, seed=0))
    plain = run_once(model, name)
    with network.attached():
        trained = run_once(model, name)
        tensors = network.tensors()
    assert torch.equal(run_once(model, name), plain)
    assert not close(trained, plain)
    if form == "peft":
        tensors = peft_tensors(tensors, {trained.name: trained.comfy for trained in network.chosen})
        assert all(
            key.startswith("diffusion_model.") and key.endswith((".lora_A.weight", ".lora_B.weight")) for key in tensors
        )
    path = tmp_path / "a.safetensors"
    save_lora(path, tensors, {}, "float32", lambda file: check_lora(file, base.patcher, None))
    with caplog.at_level(logging.WARNING):
        loaded, _ = comfy.sd.load_lora_for_models(base.patcher, None, tensors, 1.0, 0.0)
    assert not [record for record in caplog.records if "not loaded" in record.message.lower()]
    assert set(loaded.patches) == {f"{trained.comfy}.weight" for trained in network.chosen}
    assert close(patched(loaded, name), trained)
    assert continued(base, path, name, len(network.chosen), trained)


def continued(base, path, row, count, wanted):
    """Tell whether a network that continues a file computes what is wanted."""
    own = layers_by_name(base)
    weights = layer_weights(load_lora(path), base, own)
    assert len(weights) == count
    chosen = [trained_layer_of(own[name], each.rank, each.alpha) for name, each in weights.items()]
    network = Network(chosen, LoraConfig(), 0, weights)
    with network.attached():
        return close(run_once(base.patcher.model, row), wanted)


@pytest.mark.parametrize(("row", "trainer", "start", "stems"), OF_OTHERS, ids=lambda value: value.split(" ")[0])
def test_files_of_other_trainers_are_continued_and_go_beneath(tmp_path, row, trainer, start, stems):
    base = base_of(row)
    tensors = foreign(row, trainer, start, stems, base)
    path = tmp_path / "a.safetensors"
    save_file(tensors, path)
    plain = run_once(base.patcher.model, row)
    if (row, trainer, start, stems) in NAMED_BY_DIFFUSERS:
        changed = changed_by_hand(base, tensors)
    else:
        given = {key.replace("base_model.model.", "transformer."): tensor for key, tensor in tensors.items()}
        changed = comfy.sd.load_lora_for_models(base.patcher, None, given, 1.0, 0.0)[0]
    wanted = patched(changed, row)
    assert not close(wanted, plain)
    own = layers_by_name(base)
    assert continued(base, path, row, len(match_layers(outline_lora(path), base, own)), wanted)
    merge_beneath(base, (BeneathConfig(path=str(path)),))
    assert close(patched(base.patcher, row), wanted)
    assert torch.equal(run_once(base.patcher.model, row), plain)


def changed_by_hand(base, tensors):
    """Clone a MODEL with the products of a file's factors added to its weights, each in its rows."""
    places, changes = places_of(base), {}
    ups = [key for key in tensors if key.endswith((".lora_B.weight", ".lora_up.weight"))]
    for key in ups:
        name = key.rsplit(".lora_", 1)[0]
        down = tensors[key.replace("lora_B", "lora_A").replace("lora_up", "lora_down")]
        scale = float(tensors.get(f"{name}.alpha", len(down))) / len(down)
        layer, piece = places[name.replace(".", "_")]
        change = changes.setdefault(f"{layer.comfy}.weight", torch.zeros_like(layer.module.weight))
        delta = (scale * tensors[key] @ down).view(-1, *change.shape[1:])
        if piece and piece.swapped:
            delta = torch.cat(delta.chunk(2)[::-1])
        rows = slice(piece.start, piece.start + piece.length) if piece else slice(None)
        change[rows] += delta
    clone = base.patcher.clone()
    clone.add_patches({key: ("diff", (change,)) for key, change in changes.items()}, 1.0)
    return clone


def test_what_slices_cannot_do_goes_beneath(tmp_path):
    """A LoKr of a part of a fused layer has no form of the whole one."""
    base = base_of("z_image")
    name = "lycoris_layers_0_attention_to_q"
    tensors = {f"{name}.lokr_w1": draw(1, 2, 2), f"{name}.lokr_w2": draw(2, 128, 128)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="is a LoKr of a part of a layer, which cannot be continued; set use of Exis"):
        layer_weights(load_lora(tmp_path / "a.safetensors"), base, layers_by_name(base))
    wanted = patched(comfy.sd.load_lora_for_models(base.patcher, None, tensors, 0.5, 0.0)[0], "z_image")
    merge_beneath(base, (BeneathConfig(path=str(tmp_path / "a.safetensors"), strength=0.5),))
    assert close(patched(base.patcher, "z_image"), wanted)
    assert not close(wanted, run_once(base.patcher.model, "z_image"))


def test_alphas_of_peft_settings_reach_comfyui(tmp_path):
    """ComfyUI reads no settings of peft, so that it gets alphas as tensors."""
    base = base_of("qwen_image")
    tensors = foreign("qwen_image", "diffusers", "transformer.", QWEN, base)
    about = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 6.0})}
    save_file(tensors, tmp_path / "a.safetensors", metadata=about)
    found = comfy_tensors(tmp_path / "a.safetensors", base)
    alphas = [float(tensor) for key, tensor in found.items() if key.endswith(".alpha")]
    assert alphas == [6.0] * len(QWEN.split())


def test_a_file_of_another_family_is_named(tmp_path):
    flux, wan = base_of("flux_dev"), base_of("wan21_t2v")
    tensors = foreign("wan21_t2v", "musubi", "lora_unet_", WAN, wan)
    save_file(tensors, tmp_path / "wan.safetensors")
    with pytest.raises(
        ValueError, match=r"3 of 3 layers of wan\.safetensors have no place in tiny .*is a LoRA for Wan"
    ):
        match_layers(outline_lora(tmp_path / "wan.safetensors"), flux, layers_by_name(flux))


def test_layers_of_text_encoders_are_refused(tmp_path):
    base = base_of("flux_dev")
    tensors = foreign("flux_dev", "sd-scripts", "lora_unet_", FLUX_OWN, base)
    tensors |= {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": draw(1, 2, 8)}
    tensors |= {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": draw(1, 8, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors also changes text encoders, which tiny is trained without"):
        match_layers(outline_lora(tmp_path / "a.safetensors"), base, layers_by_name(base))


@pytest.mark.parametrize("change", ["unknown", "shape"])
def test_a_file_that_comfyui_cannot_take_is_refused(tmp_path, change):
    base = base_of("z_image")
    name = "lora_unet_layers_0_attention_qkv" if change == "shape" else "lora_unet_layers_9_attention_qkv"
    tensors = {f"{name}.lora_down.weight": draw(1, 2, 255), f"{name}.lora_up.weight": draw(1, 768, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    sentence = "does not fit ComfyUI's weight" if change == "shape" else "ComfyUI finds no weight for 1 of 1 layers"
    with pytest.raises(ValueError, match=sentence):
        check_lora(tmp_path / "a.safetensors", base.patcher, None)


def test_slices_are_checked_by_their_own_shape(tmp_path):
    base = base_of("z_image")
    for rows, fits in ((256, True), (768, False)):
        name = "diffusion_model.layers.0.attention.to_q"
        save_file(
            {f"{name}.lora_A.weight": draw(1, 2, 256), f"{name}.lora_B.weight": draw(1, rows, 2)},
            tmp_path / "a.safetensors",
        )
        if fits:
            check_lora(tmp_path / "a.safetensors", base.patcher, None)
        else:
            with pytest.raises(ValueError, match="does not fit"):
                check_lora(tmp_path / "a.safetensors", base.patcher, None)


def test_weights_need_not_be_in_memory(tmp_path):
    """Shapes are those that layers have, not those of bytes that are loaded or not."""
    base = base_of("z_image")
    model = base.patcher.model
    module = model.diffusion_model.layers[0].attention.qkv
    module.weight = torch.nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
    name = "diffusion_model.layers.0.attention.qkv"
    save_file(
        {f"{name}.lora_A.weight": draw(1, 2, 256), f"{name}.lora_B.weight": draw(1, 768, 2)}, tmp_path / "a.safetensors"
    )
    check_lora(tmp_path / "a.safetensors", patcher_of(model), None)
    match_layers(outline_lora(tmp_path / "a.safetensors"), base, layers_by_name(base))


def test_a_name_of_several_places_is_left_out(monkeypatch):
    base = base_of("z_image")
    real = comfy.lora.model_lora_keys_unet(base.patcher.model, {})
    first, second = (f"diffusion_model.layers.{number}.attention.qkv.weight" for number in (0, 1))
    odd = {"a.b": first, "a_b": second, "rows": (first, (1, 0, 4)), "turned": (first, None, lambda weight: -weight)}
    monkeypatch.setattr(names.comfy, "lora", SimpleNamespace(model_lora_keys_unet=lambda *_: real | odd))
    whole, slices = names.aliases(base.patcher.model)
    found = {alias for each in (*whole.values(), *slices.values()) for alias in each}
    assert not found & {"a_b", "rows", "turned"}
    assert "diffusion_model_layers_0_attention_to_q" in found
