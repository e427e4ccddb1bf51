"""Converted LoRA files: under the names of every program and back, they change a MODEL by the same."""

import inspect
import re

import comfy.lora
import diffusers
import pytest
import torch
from zoo.zoo import ZOO, build

from lora_atelier.nodes.comfyui.connected.names import names_of
from lora_atelier.trainer_core.lora_files.convert import convert
from lora_atelier.trainer_core.lora_files.diffusers_names import diffusers_paths
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.lora import layers_of
from lora_atelier.trainer_core.lora_files.names import PROGRAMS

# What files of these programs are called: (architecture, program, a name that they hold).
EXAMPLES = [
    ("flux_dev", "kohya", "lora_unet_double_blocks_0_img_attn_qkv"),
    ("flux_dev", "ai-toolkit", "transformer.single_transformer_blocks.0.attn.to_q"),
    ("flux_dev", "diffusers", "transformer.transformer_blocks.0.attn.add_q_proj"),
    ("flux_dev", "onetrainer", "lora_transformer_transformer_blocks_0_attn_to_v"),
    ("flux2_klein", "ai-toolkit", "diffusion_model.double_blocks.0.img_attn.qkv"),
    ("flux2_klein", "diffusers", "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj"),
    ("chroma", "ai-toolkit", "diffusion_model.double_blocks.0.img_attn.qkv"),
    ("chroma", "onetrainer", "lora_transformer_transformer_blocks_0_attn_to_q"),
    ("sd3", "diffusers", "transformer.transformer_blocks.0.attn.add_v_proj"),
    ("z_image", "kohya", "lora_unet_layers_0_attention_qkv"),
    ("z_image", "ai-toolkit", "diffusion_model.layers.0.attention.to_q"),
    ("z_image", "onetrainer", "transformer.layers.0.attention.to_v"),
    ("qwen_image", "ai-toolkit", "diffusion_model.transformer_blocks.0.attn.to_q"),
    ("qwen_image", "diffusers", "transformer.transformer_blocks.0.attn.to_q"),
    ("wan21_t2v", "ai-toolkit", "diffusion_model.blocks.0.self_attn.q"),
    ("wan21_t2v", "diffusers", "transformer.blocks.0.attn1.to_q"),
    ("wan21_i2v", "diffusers", "transformer.blocks.0.attn2.add_k_proj"),
    ("ltxv", "diffusers", "transformer.proj_in"),
    ("cosmos_predict2", "diffusers", "transformer.transformer_blocks.0.attn1.to_out.0"),
    ("cascade_c", "kohya", "lora_prior_unet_down_blocks_0_0_channelwise_0"),
]


def lora_of(names, rank=2):
    """Build a random LoRA on all matrices of a MODEL, under ComfyUI's own names."""
    tensors = {}
    for seed, (key, weight) in enumerate(names.weights.items()):
        shape = SHAPES[key]
        if len(shape) < 2:
            continue
        draws = torch.Generator().manual_seed(seed)
        tensors[f"{key}.lora_down.weight"] = torch.randn(rank, *shape[1:], generator=draws)
        tensors[f"{key}.lora_up.weight"] = torch.randn(weight.rows, rank, *(1,) * len(shape[2:]), generator=draws)
        tensors[f"{key}.alpha"] = torch.tensor(1.0 + seed % 3)
    return tensors


SHAPES: dict[str, torch.Size] = {}


def changes(model, tensors):
    """Compute what ComfyUI's loader does to each weight of a MODEL."""
    keys = comfy.lora.model_lora_keys_unet(model.model, {})
    patches = comfy.lora.load_lora(tensors, keys, log_missing=False)
    found = {}
    for target, adapter in patches.items():
        key, *part = (target,) if isinstance(target, str) else target
        weight = found.setdefault(key, torch.zeros(SHAPES[key.removesuffix(".weight")]))
        patch = [(1.0, adapter, 1.0, part[0] if part else None, part[1] if len(part) > 1 else None)]
        found[key] = comfy.lora.calculate_weight(patch, weight.clone(), key)
    return found


@pytest.mark.parametrize("row", ZOO)
def test_every_program_s_file_changes_a_model_by_the_same(row):
    _, patcher = build(row)
    names = names_of(patcher, None)
    SHAPES.update({key: patcher.model.get_submodule(key).weight.shape for key in names.weights})
    tensors = lora_of(names)
    given = layers_of(tensors, "a LoRA")
    wanted = changes(patcher, tensors)
    assert len(wanted) == len(given.layers)
    tried = 0
    for program in PROGRAMS:
        named = [names.written(names.weights[key], program) for key in given.layers]
        if not all(named):
            with pytest.raises(ValueError, match=f"No names of {program} are known"):
                convert(given, names, program)
            continue
        tried += 1
        made = convert(given, names, program)
        back = convert(layers_of(made.tensors, "a LoRA"), names, "comfyui")
        assert {layer.source for layer in back.layers} == given.layers.keys()
        for layer in back.layers:
            torch.testing.assert_close(
                delta_weight(layer), delta_weight(given.layers[layer.source]), rtol=1e-4, atol=1e-4
            )
        assert any(key.endswith(".alpha") for key in made.tensors) is (program not in names.without_alpha)
        known = comfy.lora.model_lora_keys_unet(patcher.model, {})
        if {layer.source for layer in made.layers} <= known.keys():
            found = changes(patcher, made.tensors)
            assert found.keys() == wanted.keys()
            for key, change in found.items():
                torch.testing.assert_close(change, wanted[key], rtol=1e-3, atol=1e-3)
    assert tried >= 3  # kohya, comfyui, ai-toolkit


@pytest.mark.parametrize(("row", "program", "name"), [each for each in EXAMPLES if each[0] in ZOO])
def test_names_are_those_of_the_program(row, program, name):
    names = names_of(build(row)[1], None)
    assert name in {each.name for weight in names.weights.values() for each in names.written(weight, program)}


# Architectures that ComfyUI's map of names does not know under diffusers' names, and their classes there.
CLASSES = {
    "wan21_t2v": "WanTransformer3DModel",
    "wan21_i2v": "WanTransformer3DModel",
    "ltxv": "LTXVideoTransformer3DModel",
    "cosmos_predict2": "CosmosTransformer3DModel",
    "mochi": "MochiTransformer3DModel",
    "hunyuan_video": "HunyuanVideoTransformer3DModel",
}
REAL = {"hunyuan_video": 3072}  # width for which diffusers' conversion is written
OPTIONAL = {"wan21_i2v": {"image_dim": 1280, "added_kv_proj_dim": 5120}}  # parts that a class has on request


def sizes_of(row):
    """Count the rows of a tiny model's tensors, at the real width or number of blocks where diffusers counts on it."""
    tensors = build(row)[1].model.diffusion_model.state_dict()
    rows = {name: len(each) for name, each in tensors.items() if each.ndim}
    if row in REAL:
        factor = REAL[row] // rows["img_in.proj.weight"]
        rows = {name: factor * count for name, count in rows.items()}
    if row == "mochi":
        first = {name: count for name, count in rows.items() if name.startswith("blocks.0.")}
        last = {name.replace("blocks.1.", "blocks.47."): n for name, n in rows.items() if name.startswith("blocks.1.")}
        rows = {name: count for name, count in rows.items() if not name.startswith("blocks.")} | last
        rows |= {name.replace("blocks.0.", f"blocks.{i}."): n for name, n in first.items() for i in range(47)}
    return rows


@pytest.mark.parametrize("row", [row for row in CLASSES if row in ZOO])
def test_names_are_those_of_layers_in_diffusers(row):
    rows = sizes_of(row)
    found = diffusers_paths(rows)
    with torch.device("meta"):
        theirs = getattr(diffusers, CLASSES[row])(**OPTIONAL.get(row, {}))
    known = {re.sub(r"\d+", "#", name) for name, _ in theirs.named_modules()}
    named = [each for names in found.values() for each in names]
    assert {each.name for each in named if re.sub(r"\d+", "#", each.name) not in known} == set()
    matrices = {n.removesuffix(".weight") for n, t in shapes_of(row).items() if n.endswith(".weight") and len(t) > 1}
    blocks = {path for path in matrices if "blocks" in path}
    assert blocks and (row == "mochi" or blocks <= found.keys())
    for path, names in found.items():
        pieces = [each.slice for each in names if each.slice]
        covered = sum(piece.length for piece in pieces) if pieces else rows[f"{path}.weight"]
        assert covered == rows[f"{path}.weight"]


def shapes_of(row):
    return {name: each.shape for name, each in build(row)[1].model.diffusion_model.state_dict().items()}


def ideogram4(own, theirs):
    """Run both on a packed sequence of 4 tokens of text and 6 of a picture."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 10, 128, generator=draws), torch.randn(1, 10, 48, generator=draws)
    places = torch.arange(10)[None, :, None].expand(1, 10, 3)
    kinds = torch.tensor([[3] * 4 + [2] * 6])
    time, whole = torch.tensor([0.3]), torch.ones(1, 10, dtype=torch.long)
    one = own._backbone(text, x, time, places, None, kinds)
    return one[:, 4:], theirs(x, time, text, places, whole, kinds, return_dict=False)[0][:, 4:]


def cogvideox(own, theirs):
    """Run both on 2 frames of 4x6 latent pixels."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 4, 6, generator=draws), torch.randn(1, 8, 48, generator=draws)
    turned = own._get_rotary_emb(2, 3, 2, device=x.device)
    one = own(x, torch.tensor([300.0]), text)
    frames = x.permute(0, 2, 1, 3, 4)
    other = theirs(frames, text, torch.tensor([300.0]), image_rotary_emb=turned, return_dict=False)[0]
    return one, other.permute(0, 2, 1, 3, 4)


TABLED = {  # class in diffusers, its settings beside those of the tiny model, both models' outputs
    # All axes have the same places, so that their shares, of which ComfyUI takes more, do not matter.
    "ideogram4": ("Ideogram4Transformer2DModel", {"mrope_section": (6, 5, 5)}, ideogram4),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {"max_text_seq_length": 8, "use_rotary_positional_embeddings": True},
        cogvideox,
    ),
}


def test_models_under_the_names_of_a_table_compute_the_same_in_diffusers():
    for row in TABLED.keys() & ZOO.keys():  # the oldest ComfyUI has neither
        compare_with_diffusers(row)


def compare_with_diffusers(row):
    kind, more, outputs = TABLED[row]
    kind = getattr(diffusers, kind)
    model = build(row)[1].model.diffusion_model
    known = inspect.signature(kind.__init__).parameters
    theirs = kind(**{key: value for key, value in ZOO[row].config.items() if key in known} | more).eval()
    own = model.state_dict()
    paths = diffusers_paths({name: len(each) for name, each in own.items() if each.ndim})
    named = {}
    for name, tensor in own.items():
        path, _, part = name.rpartition(".")
        for each in paths.get(path, []):
            rows = slice(None) if each.slice is None else slice(each.slice.start, each.slice.start + each.slice.length)
            named[f"{each.name}.{part}"] = tensor[rows]
    missing, unknown = theirs.load_state_dict(named, strict=False)
    assert not unknown and all(name.endswith("pos_embedding") for name in missing)
    with torch.no_grad():
        one, other = outputs(model, theirs)
    assert one.abs().max() > 0
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
