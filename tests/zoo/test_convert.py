"""Converted LoRA files: under the names of every program and back, they change a MODEL by the same."""

import inspect
import re
from dataclasses import replace

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


refused = {name for name, row in ZOO.items() if " " in row.diffusers}


def numberless(names):
    """Collect names of layers with # for each number."""
    return {re.sub(r"\d+", "#", name) for name in names}


def layers_in_diffusers(row, kind):
    """Collect the names of layers of a class in diffusers with the parts of a tiny model."""
    key = kind, str(ZOO[row].parts)
    if key not in IN_DIFFUSERS:
        with torch.device("meta"):
            theirs = getattr(diffusers, kind)(**ZOO[row].parts)
        IN_DIFFUSERS[key] = numberless(name for name, _ in theirs.named_modules())
    return IN_DIFFUSERS[key]


IN_DIFFUSERS: dict[tuple[str, str], set[str]] = {}  # of each class with these parts


@pytest.mark.parametrize("row", ZOO)
def test_names_for_diffusers_are_layers_there_or_the_reason_is_said(row):
    names = names_of(build(row)[1], None)
    if row in refused:
        unnamed = [weight for weight in names.weights.values() if not names.written(weight, "diffusers")]
        assert unnamed and names.unnamed == ZOO[row].diffusers
        return
    assert not names.unnamed
    if row in ("sdxl", "koala"):
        (added,) = names.written(names.weights["diffusion_model.label_emb.0.0"], "diffusers")
        assert added.name == "unet.add_embedding.linear_1"
    written = [each.name for weight in names.weights.values() for each in names.written(weight, "diffusers")]
    if row == "anima":  # whose text adapter is a model of its own there
        adapter = [name for name in written if name.startswith("text_conditioner.")]
        assert len(adapter) > 10 and "text_conditioner.blocks.0.self_attn.q_proj" in adapter
        written = [name for name in written if name not in adapter]
    if ZOO[row].diffusers:
        start = "unet." if row in ("sd15", "sdxl", "koala") else "transformer."
        assert all(name.startswith(start) for name in written)
        assert numberless(name.removeprefix(start) for name in written) <= layers_in_diffusers(row, ZOO[row].diffusers)


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
            assert program in ("diffusers", "onetrainer") and row in refused
            with pytest.raises(ValueError, match=f"No names of {program} are known for .*: {ZOO[row].diffusers}. Set"):
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


# Architectures whose names come from diffusers' own conversion, or from a table.
FOUND = (
    "flux_dev",
    "flux2",
    "longcat",
    "chroma",
    "wan21_t2v",
    "wan21_i2v",
    "ltxv",
    "cosmos_t2v",
    "cosmos_predict2",
    "mochi",
    "lumina2",
    "hunyuan_video",
    "hunyuan_image21",
    "hunyuan_video15",
)
REAL = {"mochi": "MochiTransformer3DModel", "lumina2": "Lumina2Transformer2DModel"}  # converted at real sizes alone


def sizes_of(row):
    """Count the rows of a tiny model's tensors, in the real number where diffusers counts on it."""
    tensors = build(row)[1].model.diffusion_model.state_dict()
    rows = {name: len(each) for name, each in tensors.items() if each.ndim}
    if row == "lumina2":
        rows = {name: 3840 if ".qkv." in name else count for name, count in rows.items()}
    if row == "mochi":
        first = {name: count for name, count in rows.items() if name.startswith("blocks.0.")}
        last = {name.replace("blocks.1.", "blocks.47."): n for name, n in rows.items() if name.startswith("blocks.1.")}
        rows = {name: count for name, count in rows.items() if not name.startswith("blocks.")} | last
        rows |= {name.replace("blocks.0.", f"blocks.{i}."): n for name, n in first.items() for i in range(47)}
    return rows


@pytest.mark.parametrize("row", [row for row in FOUND if row in ZOO])
def test_names_cover_every_layer_of_diffusers(row):
    rows = sizes_of(row)
    found = diffusers_paths(rows)
    assert numberless(each.name for names in found.values() for each in names) <= layers_in_diffusers(
        row, REAL.get(row, ZOO[row].diffusers)
    )
    matrices = {n.removesuffix(".weight") for n, t in shapes_of(row).items() if n.endswith(".weight") and len(t) > 1}
    blocks = {path for path in matrices if "blocks." in path or "layers." in path}
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


def hunyuan_video(own, theirs):
    """Run both on 2 frames of 8x12 latent pixels."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 8, 12, generator=draws), torch.randn(1, 8, 48, generator=draws)
    pooled, time, whole = torch.randn(1, 32, generator=draws), torch.tensor([300.0]), torch.ones(1, 8)
    one = own(x, time, text, y=pooled, guidance=torch.tensor([6.0]))  # which diffusers takes times 1000
    return one, theirs(x, time, text, whole, pooled, torch.tensor([6000.0]), return_dict=False)[0]


def hunyuan_image(own, theirs):
    """Run both on 6x8 latent pixels, with glyphs."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 64, 6, 8, generator=draws), torch.randn(1, 8, 48, generator=draws)
    glyphs, time = torch.randn(1, 5, 1472, generator=draws), torch.tensor([300.0])
    beside = {"encoder_hidden_states_2": glyphs, "encoder_attention_mask_2": torch.ones(1, 5)}
    one = own(x, time, text, txt_byt5=glyphs)
    return one, theirs(x, time, text, torch.ones(1, 8), **beside, return_dict=False)[0]


def hunyuan_video15(own, theirs):
    """Run both on 2 frames of 4x6 latent pixels, with glyphs and a picture."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 65, 2, 4, 6, generator=draws), torch.randn(1, 8, 48, generator=draws)
    glyphs, picture = torch.randn(1, 5, 1472, generator=draws), torch.randn(1, 3, 24, generator=draws)
    beside = {"encoder_hidden_states_2": glyphs, "encoder_attention_mask_2": torch.ones(1, 5), "image_embeds": picture}
    one = own(x, torch.tensor([300.0]), text, txt_byt5=glyphs, clip_fea=picture)
    return one, theirs(x, torch.tensor([300.0]), text, torch.ones(1, 8), **beside, return_dict=False)[0]


def cosmos(own, theirs):
    """Run both on 2 frames of 8x12 latent pixels."""
    draws = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 16, 2, 8, 12, generator=draws), torch.randn(1, 8, 48, generator=draws)
    time, padding = torch.tensor([0.3]), torch.zeros(1, 1, 8, 12)
    return own(x, time, text), theirs(x, time, text, padding_mask=padding, return_dict=False)[0]


BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 1, "text_embed_dim": 48}
TABLED = {  # class in diffusers, its settings beside those of the tiny model, both models' outputs
    # All axes have the same places, so that their shares, of which ComfyUI takes more, do not matter.
    "ideogram4": ("Ideogram4Transformer2DModel", {"mrope_section": (6, 5, 5)}, ideogram4),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {"max_text_seq_length": 8, "use_rotary_positional_embeddings": True},
        cogvideox,
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        BLOCKS | {"num_single_layers": 1, "rope_axes_dim": (8, 12, 12), "patch_size": 2, "pooled_projection_dim": 32},
        hunyuan_video,
    ),
    "cosmos_t2v": ("CosmosTransformer3DModel", BLOCKS | {"num_layers": 2, "adaln_lora_dim": 16}, cosmos),
    "hunyuan_image21": (
        "HunyuanImageTransformer2DModel",
        BLOCKS | {"num_single_layers": 1, "rope_axes_dim": (16, 16), "text_embed_2_dim": 1472},
        hunyuan_image,
    ),
    "hunyuan_video15": (
        "HunyuanVideo15Transformer3DModel",
        BLOCKS | {"rope_axes_dim": (8, 12, 12), "patch_size": 1, "text_embed_2_dim": 1472, "image_embed_dim": 24},
        hunyuan_video15,
    ),
}
GLYPHS = {"hunyuan_image21", "hunyuan_video15"}  # whose text encoder of glyphs the tiny models leave out


def with_glyphs(row):
    """Build a tiny model with the layers that read glyphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ZOO, row, replace(ZOO[row], config={**ZOO[row].config, "byt5": True}))
        return build(row)[1].model.diffusion_model


def test_models_under_the_names_of_a_table_compute_the_same_in_diffusers():
    for row in TABLED.keys() & ZOO.keys():  # the oldest ComfyUI has neither
        compare_with_diffusers(row)


def compare_with_diffusers(row):
    kind, more, outputs = TABLED[row]
    kind = getattr(diffusers, kind)
    model = with_glyphs(row) if row in GLYPHS else build(row)[1].model.diffusion_model
    known = inspect.signature(kind.__init__).parameters
    theirs = kind(**{key: value for key, value in ZOO[row].config.items() if key in known} | more).eval()
    own = {re.sub(r"\.scale$", ".weight", name): each for name, each in model.state_dict().items()}
    paths = diffusers_paths({name: len(each) for name, each in own.items() if each.ndim})
    places = {name: each for name, each in own.items() if name.startswith("extra_pos_embedder.")}  # of Cosmos 1
    named = {name.replace("extra_pos_embedder", "learnable_pos_embed"): each for name, each in places.items()}
    for name, tensor in own.items():
        path, _, part = name.rpartition(".")
        for each in paths.get(path, []):
            rows = tensor if each.slice is None else tensor.narrow(0, each.slice.start, each.slice.length)
            swapped = each.slice is not None and each.slice.swapped
            named[f"{each.name}.{part}"] = torch.cat(rows.chunk(2)[::-1]) if swapped else rows
    missing, unknown = theirs.load_state_dict(named, strict=False)
    assert not unknown and all(name.endswith("pos_embedding") for name in missing)
    with torch.no_grad():
        one, other = outputs(model, theirs)
    assert one.abs().max() > 0
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
