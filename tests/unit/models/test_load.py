"""Loading: architecture from tensors, wrong files named as what they are, captions to conditioning."""

import itertools
import shutil
import struct
from pathlib import Path

import pytest
import torch
from clip_tokenizer import TOKENIZER
from diffusers import AutoencoderKL, AutoencoderTiny, UNet2DConditionModel
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from tiny_models import checkpoint_tensors, model_of, tiny_text_encoder, tiny_unet

from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.models.files.safetensors_file import is_readable, read_header
from lora_atelier.trainer_core.models.sd import check_base_model, load_base_model
from lora_atelier.trainer_core.models.sd.autoencoder import build_vae
from lora_atelier.trainer_core.models.sd.family import FAMILIES, _family_of_unet
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names, vae_ldm_names
from lora_atelier.trainer_core.models.sd.text import (
    ClipEncoder,
    batch_context,
    count_tokens,
    encode_caption,
    load_tokenizer,
    longest_context,
    tokenize,
)
from lora_atelier.trainer_core.models.sd.unet import unet_shape


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(TOKENIZER))


def test_a_single_file_gives_the_model_it_was_made_from(checkpoint):
    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    assert base.prediction == "epsilon" and base.family.name == "sd1"
    for part, reference in ((base.unet, tiny_unet()), (base.texts[0].model, tiny_text_encoder())):
        expected = reference.state_dict()
        assert part.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in part.state_dict().items())
        assert not any(p.requires_grad for p in part.parameters())
    assert type(base.vae) is AutoencoderTiny


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_files_may_be_stored_in_any_precision_and_with_averages_beside(dtype, tmp_path):
    stored = {k: v.to(dtype) for k, v in checkpoint_tensors().items()}
    averages = {f"model_ema.{k.replace('.', '')}": v.clone() for k, v in list(stored.items())[:5]}
    save_file(stored | averages, tmp_path / "stored.safetensors")
    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "stored.safetensors")))
    expected = tiny_unet().state_dict()
    assert all(torch.equal(v, expected[k].to(dtype).float()) for k, v in base.unet.state_dict().items())
    assert {p.dtype for part in (base.unet, base.vae, base.texts[0].model) for p in part.parameters()} == {
        torch.float32
    }


def test_weights_that_are_not_finite_are_named(tmp_path):
    tensors = checkpoint_tensors()
    tensors["model.diffusion_model.out.2.bias"][1] = float("nan")
    save_file(tensors, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=r"the UNet of broken.safetensors: out.2.bias holds values that are not"):
        _ = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "broken.safetensors"))).unet


def test_a_diffusers_folder_gives_the_same_model(checkpoint, tmp_path):
    base = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    tiny_unet().save_pretrained(tmp_path / "unet")
    tiny_text_encoder().save_pretrained(tmp_path / "text_encoder")
    base.vae.save_pretrained(tmp_path / "vae")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"prediction_type": "v_prediction"}')
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path)))
    other = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path)))
    assert other.prediction == "v_prediction"
    for mine, theirs in ((base.unet, other.unet), (base.texts[0].model, other.texts[0].model), (base.vae, other.vae)):
        state = theirs.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())


def test_the_architecture_of_sd15_is_read_from_its_shapes():
    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
    state = unet.state_dict()
    names = unet_ldm_names(state, 2)
    shape = unet_shape({names[k]: tuple(v.shape) for k, v in state.items()}, FAMILIES["sd1"])
    with torch.device("meta"):
        again = UNet2DConditionModel(**shape)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert names["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.1.conv.weight"
    assert names["up_blocks.1.upsamplers.0.conv.weight"] == "output_blocks.5.2.conv.weight"
    assert names["down_blocks.1.downsamplers.0.conv.bias"] == "input_blocks.6.0.op.bias"


def test_a_kl_autoencoder_is_built_from_its_tensors():
    vae = kl_autoencoder()
    state = vae.state_dict()
    names = vae_ldm_names(state, 2)
    stored = {
        names[k]: v[..., None, None] if ".mid.attn_1." in names[k] and v.ndim == 2 else v for k, v in state.items()
    }
    built = build_vae(stored, "test").eval()
    pictures = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(built.encode(pictures).latent_dist.mean, vae.encode(pictures).latent_dist.mean)


def kl_autoencoder():
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=2,
        latent_channels=4,
    ).eval()


@pytest.mark.parametrize("layout", ["ldm", "checkpoint", "diffusers"])
def test_another_autoencoder_takes_the_place_of_the_models_own(layout, tmp_path):
    vae = kl_autoencoder()
    state = vae.state_dict()
    names = {k: k for k in state} if layout == "diffusers" else vae_ldm_names(state, 2)
    prefix = "first_stage_model." if layout == "checkpoint" else ""
    save_file({prefix + names[k]: v.clone() for k, v in state.items()}, tmp_path / "vae.safetensors")
    save_file(without("first_stage_model."), tmp_path / "bare.safetensors")
    config = BaseModelConfig(
        tokenizer=TOKENIZER, path=str(tmp_path / "bare.safetensors"), vae=str(tmp_path / "vae.safetensors")
    )
    check_base_model(config)
    base = load_base_model(config)
    assert all(torch.equal(v, base.vae.state_dict()[k]) for k, v in state.items())
    with pytest.raises(ValueError, match=r"bare\.safetensors has no VAE"):
        check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "bare.safetensors")))
    other = AutoencoderKL(latent_channels=16, use_quant_conv=False, use_post_quant_conv=False).state_dict()
    save_file(dict(other), tmp_path / "flux.safetensors")
    for name, sentence in (
        ("flux", "of 16 latent channels; .*needs one of 4"),
        ("bare", "is not a Stable Diffusion auto"),
    ):
        with pytest.raises(ValueError, match=sentence):
            check_base_model(config.replace(vae=str(tmp_path / f"{name}.safetensors")))


@pytest.mark.parametrize("declared", ["marker", "metadata"])
def test_v_prediction_is_read_from_the_file(declared, tmp_path):
    tensors, metadata = checkpoint_tensors(), {}
    if declared == "marker":
        tensors["v_pred"] = torch.zeros(0)
    else:
        metadata = {"modelspec.prediction_type": "v"}
    save_file(tensors, tmp_path / "v.safetensors", metadata)
    assert (
        load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "v.safetensors"))).prediction
        == "v_prediction"
    )
    overruled = BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "v.safetensors"), prediction="epsilon")
    assert load_base_model(overruled).prediction == "epsilon"


def without(part):
    return {k: v for k, v in checkpoint_tensors().items() if not k.startswith(part)}


WRONG_TENSORS = {
    "is a LoRA": lambda: {"lora_unet_mid.lora_down.weight": torch.zeros(1, 1)},
    "has no UNet and no second text encoder": lambda: {
        "conditioner.embedders.0.transformer.x": torch.zeros(1),
        "first_stage_model.x": torch.zeros(1),
    },
    "is the refiner of Stable Diffusion XL": lambda: {
        "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3),
        "conditioner.embedders.0.model.ln_final.weight": torch.zeros(1),
    },
    "is an EDM model": lambda: {**checkpoint_tensors(), "edm_mean": torch.zeros(4)},
    "is a Stable Diffusion 3 model": lambda: {"model.diffusion_model.joint_blocks.0.x": torch.zeros(1)},
    "is a FLUX-like model": lambda: {"double_blocks.0.img_mod.lin.weight": torch.zeros(1)},
    "has no VAE": lambda: without("first_stage_model."),
    "has no text encoder and no VAE": lambda: {
        k: v for k, v in checkpoint_tensors().items() if k.startswith("model.diffusion_model.")
    },
    "is not a checkpoint, and its kind is unknown": lambda: {"x": torch.zeros(1)},
}


@pytest.mark.parametrize("sentence", WRONG_TENSORS)
def test_other_files_are_named_as_what_they_are(sentence, tmp_path):
    save_file(WRONG_TENSORS[sentence](), tmp_path / "given.safetensors")
    with pytest.raises(ValueError, match=f"given.safetensors {sentence}"):
        check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "given.safetensors")))


WHOLE = save({"a": torch.zeros(1)})
WRONG_BYTES = {
    "empty.safetensors": (b"", "is not a whole safetensors file"),
    "text.safetensors": (b"hello, this is a text file", "is not a whole safetensors file"),
    "html.safetensors": (struct.pack("<Q", 20) + b"<html>not here</html>", "broken safetensors header"),
    "old.ckpt": (b"PK\x03\x04 zip of pickles", "is a pickle"),
    "renamed.safetensors": (b"\x80\x02 pickle", "is a pickle"),
    "model.gguf": (b"GGUF\x03\x00\x00\x00", "is a GGUF file"),
    "page.safetensors": (
        b"<!DOCTYPE html><html>sign in",
        "is a short text or a web page that was saved in place",
    ),
    "no.safetensors": (b'{"error": "Unauthorized"}', "is a short text or a web page that was saved in place"),
    "lfs.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid", "is a short text or a web page"),
    "exported.pt2": (b"PK\x03\x04 zip of pickles", "is a pickle"),
    "loud.CKPT": (b"", "is a pickle"),
    "other.pt2": (WHOLE, "is a pickle"),
    "plain.onnx": (WHOLE, "does not end in .safetensors or .sft; choose another file"),
    "noname": (WHOLE, "does not end in .safetensors or .sft; choose another file"),
    "newer.safetensors": (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff", "is a pickle, which can run code"),
}


@pytest.mark.parametrize("name", WRONG_BYTES)
def test_broken_files_are_refused_in_one_sentence(name, tmp_path):
    content, sentence = WRONG_BYTES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as caught:
        check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / name)))
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", [".safetensors", ".SafeTensors", ".sft", ".SFT"])
def test_endings_count_in_any_case(ending, tmp_path):
    (tmp_path / f"a{ending}").write_bytes(WHOLE)
    assert read_header(tmp_path / f"a{ending}").shapes == {"a": (1,)} and is_readable(f"a{ending}")


def test_a_truncated_checkpoint_is_named(checkpoint, tmp_path):
    content = checkpoint.read_bytes()
    (tmp_path / "half.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"half.safetensors is cut short or damaged: it has \d+ bytes"):
        check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "half.safetensors")))


def test_a_missing_tensor_is_named(tmp_path):
    tensors = checkpoint_tensors()
    del tensors["model.diffusion_model.middle_block.0.in_layers.2.weight"]
    save_file(tensors, tmp_path / "gap.safetensors")
    with pytest.raises(ValueError, match=r"the UNet of gap.safetensors lacks the tensor middle_block.0.in_layers.2"):
        load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "gap.safetensors")))


def test_missing_file_and_tokenizer_are_named(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"There is no model file at .*nowhere.safetensors"):
        check_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(tmp_path / "nowhere.safetensors")))
    with pytest.raises(ValueError, match=r"No CLIP tokenizer .*, as a single file holds none; set tokenizer of the"):
        check_base_model(BaseModelConfig(path=str(checkpoint)))
    with pytest.raises(ValueError, match=r"No CLIP tokenizer .*, looked in .*; set tokenizer of the"):
        check_base_model(BaseModelConfig(path=str(checkpoint), tokenizer=str(tmp_path)))


def test_a_header_tells_shapes_without_reading_tensors(checkpoint):
    header = read_header(Path(checkpoint))
    assert header.shapes == {k: tuple(v.shape) for k, v in load_file(checkpoint).items()}


@pytest.mark.parametrize(("words", "rows"), [(0, 1), (1, 1), (75, 1), (76, 2), (150, 2), (400, 6), (2401, 32)])
def test_captions_become_rows_of_75_tokens(tokenizer, words, rows):
    tokens = tokenize(tokenizer, " ".join(["cat"] * words))
    assert tokens.shape == (rows, 77)
    assert (tokens[:, 0] == 49406).all()
    assert (tokens == tokenizer.convert_tokens_to_ids("cat</w>")).sum() == min(words, 2400)
    assert tokens[-1, -1] == 49407
    assert count_tokens(tokenizer, " ".join(["cat"] * words)) == words


def text_encoder(model, layer=1, **values):
    """Return a text encoder as a base model holds it."""
    plain = {"final_norm": True, "pooled": False, "open_clip": False, "prefix": "lora_te"}
    return ClipEncoder(model=model, layer=layer, **{**plain, **values})


def test_conditioning_is_normed_hidden_state_and_clip_skip_takes_an_earlier_one(tokenizer):
    encoder = tiny_text_encoder().eval()
    tokens = tokenize(tokenizer, "a red circle")
    with torch.no_grad():
        last = encode_caption([text_encoder(encoder)], tokenizer, "a red circle", "cpu").context
        assert torch.allclose(last, encoder(tokens).last_hidden_state[0])
        skipped = encode_caption([text_encoder(encoder, 2)], tokenizer, "a red circle", "cpu").context
        body = getattr(encoder, "text_model", encoder)
        body.encoder.layers = body.encoder.layers[:1]
        assert torch.allclose(skipped, encoder(tokens).last_hidden_state[0])
        # A file that leaves out the last layer, which is not used, counts from where it would be.
        shorter = encode_caption([text_encoder(encoder, 2, absent=1)], tokenizer, "a red circle", "cpu").context
        assert torch.allclose(skipped, shorter)


def test_open_clip_rows_end_in_zeros_and_two_encoders_lie_side_by_side(tokenizer):
    tokens = tokenize(tokenizer, "a red circle", pad=0)
    assert tokens[0, :5].tolist() == [49406, *tokenize(tokenizer, "a red circle")[0, 1:4].tolist(), 49407]
    assert not tokens[0, 5:].any()
    assert torch.equal(tokenize(tokenizer, "cat " * 75, pad=0), tokenize(tokenizer, "cat " * 75))
    one, other = text_encoder(tiny_text_encoder().eval()), text_encoder(tiny_text_encoder().eval(), open_clip=True)
    with torch.no_grad():
        both = encode_caption([one, other], tokenizer, "cat " * 80, "cpu")
        alone = encode_caption([other], tokenizer, "cat " * 80, "cpu")
    assert both.context.shape == (154, 128) and both.pooled is None
    assert torch.equal(both.context[:, 64:], alone.context)


def test_clip_skip_beyond_the_encoder_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"clip_skip is 3, but a text encoder of random-tiny.safetensors has 2"):
        load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint), clip_skip=3))


def test_captions_have_another_identity_wherever_they_become_something_else(checkpoint):
    base, skipping = (
        load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint), clip_skip=skip)) for skip in (1, 2)
    )
    half = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)), torch.bfloat16)
    marked = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    marked.text.mark("another LoRA")
    again = load_base_model(BaseModelConfig(tokenizer=TOKENIZER, path=str(checkpoint)))
    assert len({each.text.identity for each in (base, skipping, half, marked)}) == 4
    assert again.text.identity == base.text.identity


def test_contexts_of_different_length_repeat_and_attention_does_not_notice():
    short, long = torch.randn(77, 64), torch.randn(154, 64)
    batch, mask = batch_context([short, long])
    assert batch.shape == (2, 154, 64) and mask is None
    unet = tiny_unet().eval()
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([5])
    with torch.no_grad():
        alone = unet(x, t, encoder_hidden_states=short[None]).sample
        repeated = unet(x, t, encoder_hidden_states=batch[:1]).sample
    assert torch.allclose(alone, repeated, atol=1e-5)


def test_contexts_whose_common_multiple_is_far_are_padded_and_the_padding_is_not_attended_to():
    base, captions = model_of(tiny_unet().eval()), [{"context": torch.randn(77 * chunks, 64)} for chunks in (3, 4)]
    framings = [Framing.whole((64, 64))] * 2
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([5, 700])
    both = base.conditions.batch(captions, framings, torch.device("cpu"))
    assert both.context.shape == (2, 308, 64) and both.mask is not None and both.mask.sum(1).tolist() == [231, 308]
    with torch.no_grad():
        together = base.denoiser.predict(x, t, both)
        for i, caption in enumerate(captions):
            alone = base.denoiser.predict(
                x[i : i + 1], t[i : i + 1], base.conditions.batch([caption], framings[:1], torch.device("cpu"))
            )
            assert torch.allclose(alone, together[i : i + 1], atol=1e-5)
            part = base.denoiser.predict(x[i : i + 1], t[i : i + 1], both.some(slice(i, i + 1)))
            assert torch.allclose(part, together[i : i + 1], atol=1e-5)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_the_longest_context_is_that_of_the_worst_batch(chunks):
    batches = itertools.chain.from_iterable(itertools.combinations(chunks, n) for n in (1, 2, 3))
    longest = max(batch_context([torch.zeros(n, 1) for n in batch])[0].shape[1] for batch in batches)
    assert longest_context(set(chunks), len(chunks)) == longest


@pytest.mark.parametrize(
    ("width", "linear", "name"),
    [(768, True, "sd1"), (1024, False, "sd2"), (32, True, "sd2"), (32, False, "sd1")],  # of toys the projections tell
)
def test_a_unet_alone_is_told_by_the_width_of_its_captions(width, linear, name):
    block = "input_blocks.1.1."
    shapes = {
        f"{block}transformer_blocks.0.attn2.to_k.weight": (64, width),
        f"{block}proj_in.weight": (64, 64) if linear else (64, 64, 1, 1),
    }
    assert _family_of_unet(shapes).name == name
