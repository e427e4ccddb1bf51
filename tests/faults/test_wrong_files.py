"""Wrong model files: one sentence each, from the header wherever it can be told there."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint_tensors, family_tensors, open_clip_tensors, tiny_clip, tiny_text_encoder

from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models.files.safetensors_file import opened, read_header
from lora_atelier.trainer_core.models.sd import check_base_model, load_base_model, outline_base_model, remarks

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def refusal(path: Path, **config) -> str:
    """Return the one sentence with which a model is refused."""
    with pytest.raises(ValueError) as caught:
        check_base_model(BaseModelConfig(path=str(path), **{"tokenizer": TOKENIZER, **config}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(folder: Path, header: object, size: int, length: int | None = None) -> Path:
    """Write a safetensors file of this header (JSON text or an object) and `size` bytes of data."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path = folder / "given.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(size))
    return path


LYING = {
    "length beyond the file": ({"a": F32}, 8, 10_000, "is not a whole safetensors file"),
    "length of a terabyte": ({"a": F32}, 8, 10**12, "is not a whole safetensors file"),
    "length of all bits": ({"a": F32}, 8, 2**64 - 1, "is not a whole safetensors file"),
    "no object": ([1, 2], 8, None, "broken safetensors header"),
    "brackets without end": ("[" * 100_000, 8, None, "broken safetensors header"),
    "a name twice": ('{"a": %s, "a": %s}' % ((json.dumps(F32),) * 2), 8, None, "broken safetensors header"),
    "metadata of lists": ({"__metadata__": {"a": []}, "a": F32}, 8, None, "broken safetensors header"),
    "an entry that is a list": ({"a": [0, 8]}, 8, None, "entry 'a' makes no sense"),
    "an entry without type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, None, "entry 'a' makes no sense"),
    "negative offsets": ({"a": {**F32, "data_offsets": [-8, 0]}}, 8, None, "entry 'a' makes no sense"),
    "offsets backwards": ({"a": {**F32, "data_offsets": [8, 0]}}, 8, None, "entry 'a' makes no sense"),
    "one offset": ({"a": {**F32, "data_offsets": [8]}}, 8, None, "entry 'a' makes no sense"),
    "a shape of text": ({"a": {**F32, "shape": ["2"]}}, 8, None, "entry 'a' makes no sense"),
    "an unknown type": ({"a": {**F32, "dtype": "F6"}}, 8, None, "stores a as F6, which is not read here"),
    "a shape too large": ({"a": {**F32, "shape": [3]}}, 8, None, "takes 8 bytes, its shape [3] in F32 12"),
    "offsets beyond the file": ({"a": {**F32, "data_offsets": [8, 16]}}, 8, None, "cut short or damaged"),
    "data that nobody owns": ({"a": F32}, 16, None, "cut short or damaged"),
    "a hole": (
        {"a": F32, "b": {**F32, "data_offsets": [12, 20]}},
        20,
        None,
        "b does not begin where the tensor before it ends",
    ),
    "two tensors in one place": (
        {"a": F32, "b": F32, "c": {**F32, "data_offsets": [8, 16]}},
        16,
        None,
        "does not begin where the tensor before it ends",
    ),
    "nothing": ({"__metadata__": {}}, 0, None, "holds no tensors"),
    "nothing at all": ({}, 0, None, "holds no tensors"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": F32}, 8, None, "broken safetensors header"),
    "metadata of nothing": ({"__metadata__": {"a": None}, "a": F32}, 8, None, "broken safetensors header"),
    "metadata of objects": ({"__metadata__": {"a": {"b": "c"}}, "a": F32}, 8, None, "broken safetensors header"),
    "metadata that is a list": ({"__metadata__": [], "a": F32}, 8, None, "broken safetensors header"),
    "metadata that is a number": ({"__metadata__": 0, "a": F32}, 8, None, "broken safetensors header"),
    "a header that is a number": ("9" * 5000, 8, None, "broken safetensors header"),
    "a shape of 4,000 digits": ({"a": {**F32, "shape": [10**4000]}}, 8, None, "entry 'a' makes no sense"),
    "an offset of 4,000 digits": ({"a": {**F32, "data_offsets": [0, 10**4000]}}, 8, None, "entry 'a' makes no sense"),
    "a shape of 5,000 digits": (
        '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 8]}}' % ("9" * 5000),
        8,
        None,
        "broken safetensors header",
    ),
    "a shape of truth": ({"a": {**F32, "shape": [2, True]}}, 8, None, "entry 'a' makes no sense"),
    "a shape of fractions": ({"a": {**F32, "shape": [2.0]}}, 8, None, "entry 'a' makes no sense"),
    "a shape below 0": ({"a": {**F32, "shape": [-1, -2]}}, 8, None, "entry 'a' makes no sense"),
    "offsets of truth": ({"a": {**F32, "shape": [], "data_offsets": [False, True]}}, 1, None, "makes no sense"),
    "offsets of fractions": ({"a": {**F32, "data_offsets": [0.0, 8.0]}}, 8, None, "entry 'a' makes no sense"),
    "offsets without end": (
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}',
        8,
        None,
        "entry 'a' makes no sense",
    ),
    "a type that is a list": ({"a": {**F32, "dtype": ["F32"]}}, 8, None, "entry 'a' makes no sense"),
    "a type of many letters": ({"a": {**F32, "dtype": "F32" * 999}}, 8, None, "entry 'a' makes no sense"),
    "many sides": ({"a": {**F32, "shape": [2, *[1] * 8]}}, 8, None, "the shape of a is too large"),
    "nothing of great length": (
        {"a": {"dtype": "F32", "shape": [0, 2**25, 2**25], "data_offsets": [0, 0]}},
        0,
        None,
        "the shape of a is too large",
    ),
    "a name of 301 letters": ({"a" * 301: F32}, 8, None, "longer than 300 characters"),
    "a name of two lines": ({"a\nb": F32}, 8, None, "a tensor whose name is unprintable"),
    "a name of half a character": ({"\ud800": F32}, 8, None, "a tensor whose name is unprintable"),
    "100,001 tensors": (
        {str(i): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_001)},
        0,
        None,
        "holds 100001 tensors; at most 100000 are read",
    ),
    "a header of 33 MiB": (" " * (33 << 20), 0, None, "has a header of 33 MiB; at most 32 are read"),
}


@pytest.mark.parametrize("case", LYING)
def test_a_header_that_lies_is_refused(case, tmp_path):
    header, size, length, sentence = LYING[case]
    said = refusal(written(tmp_path, header, size, length))
    assert sentence in said and len(said) < 200


def test_a_file_of_every_type_is_read_as_it_was_written(tmp_path):
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    tensors = {str(kind): torch.tensor([[0, 1, 1]]).to(kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "all.safetensors")
    header = read_header(tmp_path / "all.safetensors")
    with opened(header) as file:
        for name, tensor in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read, tensor)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def replace(path: Path) -> None:
    save_file({**checkpoint_tensors(), "v_pred": torch.zeros(1)}, path.with_name("new"))
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize("change", [truncate, replace, Path.unlink])
def test_a_file_that_changes_while_it_is_read_is_named(change, tmp_path):
    path = tmp_path / "given.safetensors"
    save_file(checkpoint_tensors(), path)
    header = read_header(path)
    last = max(header.ranges, key=lambda name: header.ranges[name].start)
    with (
        pytest.raises(ValueError, match=r"^given.safetensors changed while it was read; start again"),
        opened(header) as file,
    ):
        change(path)
        file.get_tensor(last)


def test_weights_in_use_do_not_change_with_their_file(comfyui, tmp_path):
    path = tmp_path / "given.safetensors"
    save_file(checkpoint_tensors(), path)
    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(path)))
    before = base.unet.conv_in.weight.clone()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(path.stat().st_size // 2))
    assert torch.equal(base.unet.conv_in.weight, before) and before.any()


UNET = "model.diffusion_model."
WHOLE = {  # a tensor's name and what its file is; signatures of ComfyUI's model_detection
    "joint_blocks.0.context_block.attn.qkv.weight": "a Stable Diffusion 3 model",
    f"{UNET}double_blocks.0.img_attn.norm.key_norm.scale": "a FLUX-like model",
    f"{UNET}double_stream_modulation_img.lin.weight": "a FLUX.2 model",
    "distilled_guidance_layer.norms.0.scale": "a Chroma model",
    f"{UNET}txt_norm.weight": "a Qwen-Image model",
    "cap_pad_token": "a Z-Image model",
    f"{UNET}noise_refiner.0.attention.k_norm.weight": "a Lumina or Z-Image model",
    f"{UNET}head.modulation": "a Wan video model",
    "txt_in.individual_token_refiner.blocks.0.norm1.weight": "a HunyuanVideo model",
    f"{UNET}patchify_proj.weight": "an LTX video model",
    "net.blocks.block0.blocks.0.block.attn.to_q.0.weight": "a Cosmos model",
    "net.blocks.0.mlp.layer1.weight": "a Cosmos or Anima model",
    "model.double_layers.0.attn.w1q.weight": "an AuraFlow model",
    "t_block.1.weight": "a PixArt model",
    "caption_projection.0.linear.weight": "a HiDream model",
    "clip_txt_mapper.weight": "a Stable Cascade model",
    "model.model.transformer.rotary_pos_emb.inv_freq": "a Stable Audio model",
    "mlp_t5.0.weight": "a Hunyuan DiT model",
}
KINDS = {
    **WHOLE,
    f"{UNET}input_blocks.1.1.time_stack.0.norm1.weight": "a Stable Video Diffusion model",
    f"{UNET}encoder_hid_proj.weight": "a Kolors model",
    "encoder.block.0.layer.0.SelfAttention.k.weight": "a T5 text encoder",
    "text_model.encoder.layers.0.mlp.fc1.weight": "a CLIP text encoder",
    "decoder.conv_in.weight": "an autoencoder (VAE)",
    "model_ema.diffusion_modelinput_blocks00weight": "a file of averaged (EMA) weights",
    "lora_unet_double_blocks_0_img_mlp_0.lora_up.weight": "a LoRA",
    "transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": "a LoRA",
    "lora_unet_mid_block_attentions_0_proj_in.on_input": "a file of a LoRA-like network",
    "lora_unet_mid_block_attentions_0_proj_in.dora_scale": "a LoRA",
    "clip_g": "a textual inversion embedding",
    "transformer.resblocks.0.attn.in_proj_weight": "an OpenCLIP text encoder",
    "vision_model.embeddings.class_embedding": "CLIP's encoder of pictures",
    "ip_adapter.1.to_k_ip.weight": "an IP-Adapter",
    "adapter.body.0.in_conv.weight": "a T2I-Adapter",
    "lora_controlnet": "a Control-LoRA",
    "conv_first.weight": "an upscaler",
    "model.1.sub.0.RDB1.conv1.0.weight": "an upscaler",
}


@pytest.mark.parametrize("name", KINDS)
def test_other_architectures_are_named(name, tmp_path):
    save_file({name: torch.zeros(2, 2)}, tmp_path / "given.safetensors")
    sentence = refusal(tmp_path / "given.safetensors")
    assert sentence.startswith(f"given.safetensors is {KINDS[name]}")
    remedy = (
        "link them into Use Connected Model in place of Load Base Model" if name in WHOLE else "choose a checkpoint of"
    )
    assert remedy in sentence


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl"])
def test_checkpoints_of_the_trained_families_are_none_of_those(family, comfyui, tmp_path):
    tensors = checkpoint_tensors() if family == "sd1" else family_tensors(family)
    tensors |= {"model_ema.diffusion_modelinput_blocks00weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "given.safetensors")
    check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "given.safetensors")))


def first(channels: int) -> dict[str, torch.Tensor]:
    return {f"{UNET}input_blocks.0.0.weight": torch.zeros(32, channels, 3, 3)}


ODD = {
    "takes 8 input channels, it is an edit model (as InstructPix2Pix)": lambda: checkpoint_tensors() | first(8),
    "takes 5 input channels, it is a depth model": lambda: checkpoint_tensors() | first(5),
    "is an unCLIP model": lambda: family_tensors("sd2") | {f"{UNET}label_emb.0.0.weight": torch.zeros(4, 4)},
    "is a Kolors model": lambda: family_tensors("sdxl") | {f"{UNET}label_emb.0.0.weight": torch.zeros(4, 5632)},
    "is a checkpoint of scaled weights": lambda: checkpoint_tensors() | {f"{UNET}out.2.scale_weight": torch.zeros(1)},
    "has attention of uneven depth, as the pruned SSD-1B": lambda: {
        k: v for k, v in family_tensors("sdxl").items() if "middle_block.1.transformer_blocks.1" not in k
    },
    "lacks the tensor out.2.weight": lambda: {k: v for k, v in checkpoint_tensors().items() if "out.2.w" not in k},
    "has 16 latent channels, Stable Diffusion 1 needs one of 4": lambda: (
        checkpoint_tensors() | {"first_stage_model.taesd_decoder.1.weight": torch.zeros(64, 16, 3, 3)}
    ),
    "has no text encoder; choose a full checkpoint, or another file": lambda: {
        k: v for k, v in checkpoint_tensors().items() if not k.startswith("cond_")
    },
    "The VAE of given.safetensors is incomplete": lambda: {
        k: v for k, v in checkpoint_tensors().items() if "taesd_decoder" not in k
    },
    "has no second text encoder": lambda: {
        k: v for k, v in family_tensors("sdxl").items() if not k.startswith("conditioner.embedders.1.")
    },
}


@pytest.mark.parametrize("sentence", ODD)
def test_odd_checkpoints_are_refused_from_their_header(sentence, comfyui, tmp_path):
    save_file(ODD[sentence](), tmp_path / "given.safetensors")
    assert sentence in refusal(tmp_path / "given.safetensors")


@pytest.mark.parametrize("part", ["first_stage_model.", "cond_stage_model."])
def test_values_that_are_not_finite_are_named_in_every_part(part, comfyui, tmp_path):
    tensors = checkpoint_tensors()
    name = next(k for k in tensors if k.startswith(part) and k.endswith("bias"))
    tensors[name][0] = float("inf")
    save_file(tensors, tmp_path / "given.safetensors")
    with pytest.raises(ValueError, match=r"of given.safetensors: .*bias holds values that are not finite"):
        load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "given.safetensors")))


def hugging_face(width: int, prefix: str = "text_model.") -> dict[str, torch.Tensor]:
    state = tiny_clip(width, 2, open_clip=False, projected=False, seed=9).state_dict()
    return {prefix + k.removeprefix("text_model."): v.clone() for k, v in state.items()}


WRONG_ENCODERS = {
    "is not a CLIP text encoder but a T5 text encoder": lambda: {"encoder.block.0.x": torch.zeros(1)},
    "is not a CLIP text encoder but a language model": lambda: {"model.layers.0.mlp.x": torch.zeros(1)},
    "is not a CLIP text encoder but an autoencoder (VAE)": lambda: {
        "decoder.conv_in.weight": torch.zeros(1),
        "encoder.conv_in.weight": torch.zeros(1),
    },
    "is not a CLIP text encoder but a checkpoint": checkpoint_tensors,
    "is not a CLIP text encoder but CLIP's encoder of pictures": lambda: {"vision_model.x": torch.zeros(1)},
    "is a text encoder 128 wide; the one of this Stable Diffusion 1 model is 64 wide": lambda: hugging_face(128),
    "takes 248 tokens in a row, ComfyUI uses 77": lambda: (
        hugging_face(64) | {"text_model.embeddings.position_embedding.weight": torch.zeros(248, 64)}
    ),
}


@pytest.mark.parametrize("sentence", WRONG_ENCODERS)
def test_a_wrong_text_encoder_is_refused_from_its_header(sentence, checkpoint, comfyui, tmp_path):
    save_file(WRONG_ENCODERS[sentence](), tmp_path / "encoder.safetensors")
    assert f"encoder.safetensors {sentence}" in refusal(checkpoint, text_encoder=str(tmp_path / "encoder.safetensors"))


def test_encoders_in_each_others_place_and_one_too_many_are_refused(checkpoint, comfyui, tmp_path):
    save_file(family_tensors("sdxl"), tmp_path / "xl.safetensors")
    save_file(hugging_face(64), tmp_path / "small.safetensors")
    save_file(hugging_face(128), tmp_path / "large.safetensors")
    small, large = (str(tmp_path / f"{name}.safetensors") for name in ("small", "large"))
    assert "the first one of this Stable Diffusion XL model is 64 wide" in refusal(
        tmp_path / "xl.safetensors", text_encoder=large, text_encoder_2=small
    )
    assert "the second one of this Stable Diffusion XL model is 128 wide" in refusal(
        tmp_path / "xl.safetensors", text_encoder_2=small
    )
    assert "large.safetensors lacks its text_projection" in refusal(tmp_path / "xl.safetensors", text_encoder_2=large)
    assert "text_encoder_2 is set, but Stable Diffusion 1 has one" in refusal(checkpoint, text_encoder_2=small)
    assert "There is no model file" in refusal(checkpoint, text_encoder=str(tmp_path / "nowhere.safetensors"))


def same_text(mine, tensors) -> bool:
    state = {k.removeprefix("text_model."): v for k, v in mine.model.state_dict().items()}
    return all(torch.equal(v, tensors[k]) for k, v in state.items())


def plain(model) -> dict[str, torch.Tensor]:
    return {k.removeprefix("text_model."): v for k, v in model.state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "text_model."])
def test_a_text_encoder_from_a_file_of_its_own_takes_the_place_of_the_models(prefix, checkpoint, comfyui, tmp_path):
    """Under CLIP's names with and without prefix, beside CLIP's encoder of pictures, and in a UNet without encoders."""
    encoder = hugging_face(64, prefix) | {"vision_model.embeddings.class_embedding": torch.zeros(3)}
    encoder |= {"text_projection.weight": torch.zeros(64, 64), "logit_scale": torch.zeros(())}
    save_file(encoder, tmp_path / "encoder.safetensors")
    bare = {k: v for k, v in checkpoint_tensors().items() if not k.startswith("cond_stage_model.")}
    save_file(bare, tmp_path / "bare.safetensors")
    alone = {k.removeprefix(UNET): v for k, v in bare.items() if k.startswith(UNET)}
    save_file(alone, tmp_path / "alone.safetensors")
    torch.manual_seed(0)
    kl = AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    save_file({k: v.clone() for k, v in kl.state_dict().items()}, tmp_path / "vae.safetensors")
    own = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    for path, more in (
        (checkpoint, {}),
        (tmp_path / "bare.safetensors", {}),
        (tmp_path / "alone.safetensors", {"vae": str(tmp_path / "vae.safetensors")}),
    ):
        config = BaseModelConfig(
            tokenizer=TOKENIZER, path=str(path), text_encoder=str(tmp_path / "encoder.safetensors"), **more
        )
        check_base_model(config)
        base = load_base_model(config)
        assert base.family.name == "sd1" and same_text(base.texts[0], plain(tiny_clip_64()))
        assert base.identity["text_encoder"] != own.identity["text_encoder"]


def tiny_clip_64():
    return tiny_clip(64, 2, open_clip=False, projected=False, seed=9)


@pytest.mark.parametrize("family", ["sd2", "sdxl"])
@pytest.mark.parametrize("layout", ["open_clip", "transformers"])
def test_a_large_text_encoder_is_read_under_either_names(family, layout, comfyui, tmp_path):
    model = tiny_clip(128, 3, open_clip=True, projected=family == "sdxl", seed=8)
    tensors = open_clip_tensors(model) if layout == "open_clip" else dict(model.state_dict())
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, tmp_path / "large.safetensors")
    place = "cond_stage_model." if family == "sd2" else "conditioner.embedders.1."
    kept = {k: v for k, v in family_tensors(family).items() if not k.startswith(place)}
    save_file(kept, tmp_path / "rest.safetensors")
    name = "text_encoder" if family == "sd2" else "text_encoder_2"
    config = BaseModelConfig(
        tokenizer=TOKENIZER, path=str(tmp_path / "rest.safetensors"), **{name: str(tmp_path / "large.safetensors")}
    )
    check_base_model(config)
    base = load_base_model(config)
    assert base.family.name == family and same_text(base.texts[-1], plain(model))


def test_a_diffusers_folder_takes_a_text_encoder_from_a_file(comfyui, tmp_path, checkpoint):
    from tiny_models import tiny_unet

    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    folder = tmp_path / "folder"
    tiny_unet().save_pretrained(folder / "unet")
    base.vae.save_pretrained(folder / "vae")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    save_file(hugging_face(64), tmp_path / "encoder.safetensors")
    config = BaseModelConfig(
        path=str(folder), text_encoder=str(tmp_path / "encoder.safetensors"), tokenizer=str(tokenizer(comfyui))
    )
    check_base_model(config)
    assert same_text(load_base_model(config).texts[0], plain(tiny_clip_64()))
    tiny_text_encoder().save_pretrained(folder / "text_encoder")
    truncate(folder / "text_encoder" / "model.safetensors")
    check_base_model(config)
    assert re.search("model.safetensors is cut short", refusal(folder, tokenizer=str(tokenizer(comfyui))))
    (folder / "scheduler" / "scheduler_config.json").write_text("[")
    assert "scheduler_config.json of a diffusers folder is broken: not JSON (line 1, column 2)" in refusal(
        folder, text_encoder=config.text_encoder
    )


def tokenizer(comfyui: Path) -> Path:
    return comfyui / "comfy" / "sd1_tokenizer"


@pytest.mark.parametrize(
    ("name", "metadata", "kind"),
    [
        ("sdxl_lightning_4step", {}, "Lightning"),
        ("DreamShaperXL_TurboV2", {}, "Turbo"),
        ("juggernaut-hyper", {}, "Hyper"),
        ("dreamshaper8LCM", {}, "LCM"),
        ("a", {"modelspec.title": "Photo DMD2"}, "DMD"),
        ("a", {"sd_merge_models": '{"x": {"name": "sdxl_turbo.safetensors"}}'}, "Turbo"),
        ("hyper-realistic", {"modelspec.title": "welcome to the hyperreal"}, None),
    ],
)
def test_distilled_models_are_remarked_on(name, metadata, kind, comfyui, tmp_path):
    save_file(checkpoint_tensors(), tmp_path / f"{name}.safetensors", metadata)
    found = remarks(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / f"{name}.safetensors")))
    assert bool(found) == (kind is not None)
    assert kind is None or (f"is a {kind} model by" in found[0] and "ordinary steps and cfg" in found[0])


def test_an_overrule_against_the_files_own_word_is_remarked_on(checkpoint, comfyui, tmp_path):
    markers = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    save_file(checkpoint_tensors() | markers, tmp_path / "v.safetensors")
    save_file(checkpoint_tensors(), tmp_path / "eps.safetensors", {"modelspec.prediction_type": "epsilon"})
    v, eps = (BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / f"{name}.safetensors")) for name in ("v", "eps"))
    assert remarks(v) == remarks(eps) == []
    (sentence,) = remarks(v.replace(prediction="epsilon"))
    assert "predicts v by a v_pred tensor, but prediction is set to epsilon" in sentence
    (sentence,) = remarks(eps.replace(prediction="v_prediction"))
    assert "predicts the noise (epsilon) by modelspec.prediction_type" in sentence
    (sentence,) = remarks(v.replace(zero_terminal_snr="off"))
    assert "zero_terminal_snr is off" in sentence
    assert (
        remarks(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint), prediction="v_prediction")) == []
    )  # the file says nothing


NO_VAE = {
    "but a checkpoint.": checkpoint_tensors,
    "but a LoRA.": lambda: {"lora_unet_x.lora_down.weight": torch.zeros(4, 4)},
    "but a CLIP text encoder.": lambda: hugging_face(64),
    "but another one, or incomplete (first tensor: decoder.conv_in.weight).": lambda: {
        "decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)
    },
}


@pytest.mark.parametrize("what", NO_VAE)
def test_a_file_that_is_no_autoencoder_is_named(what, checkpoint, tmp_path):
    save_file(NO_VAE[what](), tmp_path / "given.safetensors")
    sentence = refusal(checkpoint, vae=str(tmp_path / "given.safetensors"))
    start = "given.safetensors is not a Stable Diffusion autoencoder"
    assert sentence == f"{start} {what} Set vae of Load Base Model to another file."


@pytest.mark.parametrize("length", [0x0280, 0x4B50])
def test_a_header_whose_length_spells_the_beginning_of_a_pickle_is_read(length, tmp_path):
    header = json.dumps({"__metadata__": {"a": ""}, "a": F32})
    header = header.replace('"a": ""', f'"a": "{"x" * (length - len(header))}"')
    assert read_header(written(tmp_path, header, 8)).shapes == {"a": (2,)}


def test_a_part_of_a_model_in_several_files_is_named(tmp_path):
    save_file(checkpoint_tensors(), tmp_path / "model-00001-of-00002.safetensors")
    assert "is one part of a model in several files" in refusal(tmp_path / "model-00001-of-00002.safetensors")


@pytest.fixture
def folder(whole_folder, tmp_path):
    """Give a diffusers folder of the test's own."""
    return Path(shutil.copytree(whole_folder, tmp_path / "folder"))


@pytest.fixture(scope="module")
def whole_folder(checkpoint, tmp_path_factory):
    """Write a diffusers folder whose text encoder and UNet are of float16 alone."""
    from tiny_models import tiny_unet

    folder = tmp_path_factory.mktemp("whole") / "folder"
    tiny_unet().half().save_pretrained(folder / "unet", variant="fp16")
    load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint))).vae.save_pretrained(folder / "vae")
    tiny_text_encoder().save_pretrained(folder / "text_encoder")
    text = folder / "text_encoder" / "model.safetensors"
    text.rename(text.with_name("model.fp16.safetensors"))
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    return folder


def test_a_diffusers_folder_of_float16_alone_is_read(folder, comfyui):
    base = load_base_model(BaseModelConfig(path=str(folder), tokenizer=str(tokenizer(comfyui))))
    assert base.unet.conv_in.weight.any() and same_text(base.texts[0], plain(tiny_text_encoder()))


def outlined(path: Path, **config) -> str:
    """Return the sentence with which a model is refused when its outline is built."""
    with pytest.raises(ValueError) as caught:
        outline_base_model(BaseModelConfig(path=str(path), **config))
    return str(caught.value)


def test_an_index_of_weights_leads_nowhere(folder, comfyui, tmp_path):
    """The parts are found by their names; what an index beside them names is not opened."""
    whole = next((folder / "unet").glob("*.safetensors"))
    tensors = load_file(whole)
    whole.rename(whole.with_name("unused"))  # Windows deletes nothing that is mapped
    names = sorted(tensors)
    for number, part in enumerate((names[:20], names[20:]), 1):
        save_file(
            {n: tensors[n] for n in part}, whole.with_name(f"diffusion_pytorch_model-{number:05}-of-00002.safetensors")
        )
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../../outside.safetensors")}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, tmp_path / "outside.safetensors")
    base = load_base_model(BaseModelConfig(path=str(folder), tokenizer=str(tokenizer(comfyui))))
    assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in base.unet.state_dict().items())


def rewrite(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_text_encoder_is_built_from_its_tensors_whatever_its_configuration_names(folder, comfyui):
    rewrite(folder / "text_encoder" / "config.json", num_hidden_layers=10**9, attn_implementation="someone/kernel")
    base = load_base_model(BaseModelConfig(path=str(folder), tokenizer=str(tokenizer(comfyui))))
    assert same_text(base.texts[0], plain(tiny_text_encoder()))


# what is wrong with a folder -> (how it becomes so, the sentence, where it can be told: from headers or not)
BROKEN_FOLDERS = {
    "a UNet as pickle": (
        lambda f: (f / "unet" / "diffusion_pytorch_model.fp16.safetensors").rename(f / "unet" / "model.bin"),
        "folder has no .safetensors file in unet/, and pickles (.bin) are not read",
        refusal,
    ),
    "an XL UNet, one text encoder": (
        lambda f: rewrite(f / "unet" / "config.json", addition_embed_type="text_time"),
        "folder has no .safetensors file in text_encoder_2/",
        refusal,
    ),
    "no text encoder": (
        lambda f: (f / "text_encoder").rename(f / "text"),
        "text_encoder/ with its config .json is missing",
        refusal,
    ),
    "a configuration without width": (
        lambda f: (f / "unet" / "config.json").write_text("{}"),
        "unet/config.json of folder has no cross_attention_dim",
        refusal,
    ),
    "an autoencoder of 16 channels": (
        lambda f: rewrite(f / "vae" / "config.json", latent_channels=16),
        "The VAE of folder has other than 4 latent channels",
        refusal,
    ),
    "another architecture": (
        lambda f: (
            (f / "unet").rename(f / "transformer") and (f / "model_index.json").write_text('{"_class_name": "X"}')
        ),
        "folder is a model for diffusers' X; load it with ComfyUI's own loaders and link them into Use Connected Model",
        refusal,
    ),
    "weights of another width": (
        lambda f: rewrite(f / "unet" / "config.json", cross_attention_dim=32),
        "unet/ of folder: down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight has shape (32, 64)",
        None,
    ),
    "weights of fewer layers": (
        lambda f: rewrite(f / "unet" / "config.json", layers_per_block=2),
        "unet/ of folder lacks the tensor down_blocks.0.attentions.1.norm.weight",
        None,
    ),
    "a configuration that is endless": (
        lambda f: (f / "unet" / "config.json").write_text("[" * 100_000),
        "folder/unet/config.json of a diffusers folder is broken: nested more than 64 levels deep",
        refusal,
    ),
    "a configuration that is large": (
        lambda f: rewrite(f / "unet" / "config.json", a="x" * 2**20),
        "folder/unet/config.json of a diffusers folder is broken: larger than 1 MiB",
        refusal,
    ),
    "a width that is text": (
        lambda f: rewrite(f / "unet" / "config.json", cross_attention_dim="64"),
        "unet/config.json of folder has no cross_attention_dim",
        refusal,
    ),
    "channels that are a list": (
        lambda f: rewrite(f / "unet" / "config.json", in_channels=[4]),
        "folder takes 0 input channels",
        refusal,
    ),
    "a billion layers": (
        lambda f: rewrite(f / "unet" / "config.json", layers_per_block=10**9),
        "unet/config.json of folder describes a model of impossible sizes",
        outlined,
    ),
    "a billion layers in one level": (
        lambda f: rewrite(f / "unet" / "config.json", transformer_layers_per_block=[1, [10**9]]),
        "unet/config.json of folder describes a model of impossible sizes",
        outlined,
    ),
    "a width of a million digits": (
        lambda f: rewrite(f / "unet" / "config.json", block_out_channels=[32, 10**30]),
        "unet/config.json of folder describes a model of impossible sizes",
        outlined,
    ),
    "widths of text": (
        lambda f: rewrite(f / "unet" / "config.json", block_out_channels="wide"),
        "unet/config.json of folder has tensors of impossible sizes",
        outlined,
    ),
}


@pytest.mark.parametrize("what", BROKEN_FOLDERS)
def test_a_broken_diffusers_folder_is_refused(what, folder, comfyui):
    spoil, sentence, told = BROKEN_FOLDERS[what]
    spoil(folder)
    if told:
        assert sentence in told(folder, tokenizer=str(tokenizer(comfyui)))
        return
    config = BaseModelConfig(path=str(folder), tokenizer=str(tokenizer(comfyui)))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load_base_model(config)


@pytest.mark.parametrize(
    ("family", "vae", "metadata", "found"),
    [
        ("sd1", "sdxl_vae", {}, True),
        ("sd1", "mine", {"modelspec.architecture": "stable-diffusion-xl-v1-base/vae"}, True),
        ("sd1", "vae-ft-mse-840000-ema-pruned", {}, False),
        ("sdxl", "vae-ft-mse-840000-ema-pruned", {}, True),
        ("sdxl", "sdxl_vae", {}, False),
        ("sdxl", "mine", {}, False),
    ],
)
def test_an_autoencoder_of_other_latents_is_remarked_on(family, vae, metadata, found, comfyui, tmp_path):
    save_file(checkpoint_tensors() if family == "sd1" else family_tensors(family), tmp_path / "given.safetensors")
    kl = AutoencoderKL(block_out_channels=(32,), latent_channels=4)
    save_file({k: v.clone() for k, v in kl.state_dict().items()}, tmp_path / f"{vae}.safetensors", metadata)
    config = BaseModelConfig(
        tokenizer=TOKENIZER, path=str(tmp_path / "given.safetensors"), vae=str(tmp_path / f"{vae}.safetensors")
    )
    sentences = remarks(config)
    assert len(sentences) == found and (not found or "whose latents are others" in sentences[0])
