"""Stable Diffusion 2 and XL: conditioning, prediction and LoRA against ComfyUI's own classes, at toy size."""

import functools
import logging

import pytest
import torch
from diffusers import UNet2DConditionModel
from durable import close
from safetensors.torch import load_file, save_file
from tiny_models import family_tensors, fill, network_in

from lora_atelier.trainer_core.config import BaseModelConfig, EmbeddingConfig, LoraConfig
from lora_atelier.trainer_core.lora_files.write import peft_tensors, save_embeddings
from lora_atelier.trainer_core.models import word_ids
from lora_atelier.trainer_core.models.sd import Conditions, StableDiffusion, load_base_model
from lora_atelier.trainer_core.models.sd.family import FAMILIES
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names
from lora_atelier.trainer_core.models.sd.text import encode_caption
from lora_atelier.trainer_core.models.sd.unet import unet_shape
from lora_atelier.trainer_core.networks import Embeddings

UNET = "model.diffusion_model."
PROMPTS = ["a red circle on a blue background", "", "mossling " + "many words " * 60]


@pytest.fixture(scope="module", params=["sd2", "sdxl"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    """Give a toy checkpoint; the one of Stable Diffusion 2 says that it predicts v."""
    path = tmp_path_factory.mktemp(family) / f"toy-{family}.safetensors"
    save_file(family_tensors(family) | ({"v_pred": torch.zeros(1)} if family == "sd2" else {}), path)
    return path


@pytest.fixture(scope="module")
def base(path, comfyui):
    return load_base_model(BaseModelConfig(path=str(path), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer")))


@pytest.fixture(scope="module")
def theirs(path, family, comfy_modules):
    """Give ComfyUI's model and text encoders of the same tensors: (model, [text encoders], v or not)."""
    tensors = load_file(path)
    comfy = comfy_modules
    kind = {"sd2": comfy.supported_models.SD20, "sdxl": comfy.supported_models.SDXL}[family]
    config = kind(comfy.model_detection.detect_unet_config(tensors, UNET))
    config.set_inference_dtype(torch.float32, None)
    if family == "sd2":  # ComfyUI tells v models of this family by a layer that the toy does not have
        config.model_type = lambda *_: comfy.model_base.ModelType.V_PREDICTION
    model = config.get_model(tensors, UNET, device="cpu").float().eval()
    model.load_model_weights(dict(tensors), UNET)
    stored = config.process_clip_state_dict({k: v for k, v in tensors.items() if not k.startswith((UNET, "first_"))})
    return model, text_models(comfy, family, stored), comfy


def text_models(comfy, family, stored):
    """Build ComfyUI's text encoders at toy size and load them."""

    def shape(width, act, pad):
        values = {"num_hidden_layers": 3, "intermediate_size": 2 * width, "num_attention_heads": width // 64}
        values |= {"max_position_embeddings": 77, "projection_dim": width, "eos_token_id": 49407}
        return {**values, "hidden_size": width, "hidden_act": act}

    special = {"start": 49406, "end": 49407, "pad": 0}
    plain = {"device": "cpu", "dtype": torch.float32, "textmodel_json_config": shape(128, "gelu", 0)}
    large = comfy.sd1_clip.SDClipModel(
        **plain,
        layer="hidden",
        layer_idx=-2,
        special_tokens=special,
        layer_norm_hidden_state=family == "sd2",
        return_projected_pooled=True,
    )
    models = {"clip_g." if family == "sdxl" else "clip_h.": large}
    if family == "sdxl":
        plain["textmodel_json_config"] = shape(64, "quick_gelu", 49407)
        models["clip_l."] = comfy.sd1_clip.SDClipModel(
            **plain, layer="hidden", layer_idx=-2, layer_norm_hidden_state=False
        )
    for prefix, model in models.items():
        missing, _ = model.load_state_dict(
            {k[len(prefix) :]: v for k, v in stored.items() if k.startswith(prefix)}, strict=False
        )
        assert not [name for name in missing if "logit_scale" not in name and "text_projection" not in name]
        model.eval()
    return models


@functools.cache  # each reads its vocabulary anew
def comfy_tokenizer(comfy, **options):
    """Build ComfyUI's tokenizer."""
    return comfy.sd1_clip.SDTokenizer(embedding_size=8, **options)


def comfy_text(models, comfy, prompt, embeddings=None):
    """Return (context, pooled) as ComfyUI's text encoders of the family give them side by side."""
    contexts, pooled = [], None
    for prefix in sorted(models, reverse=True):  # clip_l before clip_g
        pad = {"pad_with_end": False} if prefix != "clip_l." else {}
        pad |= {"embedding_key": prefix.rstrip(".")} if len(models) > 1 else {}
        tokenizer = comfy_tokenizer(comfy, embedding_directory=embeddings, **pad)
        with torch.no_grad():
            context, pool = models[prefix].encode_token_weights(tokenizer.tokenize_with_weights(prompt))
        contexts.append(context)
        pooled = pool if prefix == "clip_g." else pooled
    return torch.cat(contexts, dim=-1), pooled


def our_conditions(base, prompt, size=None, *, weights=False):
    with torch.no_grad():
        context, pooled = encode_caption(base.texts, base.tokenizer, prompt, "cpu", weights=weights)
    sizes = None if pooled is None else torch.tensor([size or [64, 96, 4, 8, 64, 64]])
    return Conditions(context=context[None], pooled=None if pooled is None else pooled[None], sizes=sizes)


EDGES = [" ".join(["cat"] * count) for count in (75, 76, 150, 151)]  # the last token of a chunk, the first of the next
ODD = ["naïve café 日本語 😀", "two   spaces\nand a line", "1girl, tag_b,MASTERPIECE!!!"]


@pytest.mark.parametrize("clip_skip", [1, 2, 3])
def test_conditioning_is_comfyuis(path, comfyui, theirs, family, clip_skip):
    config = BaseModelConfig(path=str(path), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer"), clip_skip=clip_skip)
    base, (_, models, comfy) = load_base_model(config), theirs
    if clip_skip > 1:  # what the node CLIP Set Last Layer does
        for model in models.values():
            model.set_clip_options({"layer": -clip_skip})
    try:
        for prompt in (*PROMPTS, *EDGES, *ODD):
            context, pooled = comfy_text(models, comfy, prompt)
            mine = our_conditions(base, prompt)
            assert mine.context.shape == context.shape and close(mine.context, context), prompt
            assert (mine.pooled is None) == (family == "sd2")
            if family == "sdxl":
                assert close(mine.pooled, pooled), prompt
    finally:
        for model in models.values():
            model.reset_clip_options()


@pytest.mark.parametrize(
    "prompt",
    [
        "a red circle",
        "a (red:1.3) circle on ((a) blue:0.5) background",
        r"((moss)) \(not (a:x) weight\) (away:-1) (half) of (it",
        "(many words:1.2) " * 30 + "(" + "many words " * 60 + ":0.8) end",
    ],
)
def test_weights_are_comfyuis(base, theirs, family, prompt):
    _, models, comfy = theirs
    context, pooled = comfy_text(models, comfy, prompt)
    mine, plain = our_conditions(base, prompt, weights=True), our_conditions(base, prompt)
    assert mine.context.shape == context.shape and close(mine.context, context)
    if family == "sdxl":
        assert close(mine.pooled, pooled)
    if "(" in prompt:
        assert plain.context.shape != context.shape or not close(plain.context, context, 1e-2)
    else:
        assert torch.equal(plain.context, mine.context)


def test_a_trained_word_is_comfyuis_embedding(base, theirs, family, tmp_path):
    _, models, comfy = theirs
    configs = (EmbeddingConfig(token="mossling", vectors=4), EmbeddingConfig(token="pebble", vectors=10))
    embeddings = Embeddings(base.texts, configs, word_ids(configs), {}, seed=3)
    metadata = {"modelspec.architecture": f"{base.family.architecture}/lora"}
    save_embeddings(tmp_path / "atelier", "run", embeddings.tensors(), base.parts, metadata)
    caption = "a mossling, " + "many words " * 36 + "pebble and mossling"
    prompt = caption.replace("mossling", "embedding:atelier/run-mossling").replace("pebble", "embedding:run-pebble")
    context, pooled = comfy_text(models, comfy, prompt, str(tmp_path))
    plain = our_conditions(base, caption)
    embeddings.attach()
    try:
        mine = our_conditions(base, caption)
    finally:
        embeddings.detach()
    assert mine.context.shape == context.shape and close(mine.context, context)
    assert not close(mine.context, plain.context, 1e-2)
    if family == "sdxl":
        assert close(mine.pooled, pooled) and not close(mine.pooled, plain.pooled, 1e-3)


def comfy_prediction(model, x, timestep, conditions, size=(64, 96, 4, 8, 64, 64)):
    """Return what the network inside ComfyUI's model gives, recovered from its denoised latents."""
    sigma = model.model_sampling.sigmas[timestep].view(1)
    noised = x * (1 + sigma**2).sqrt()  # apply_model takes the unscaled latents
    more = {}
    if conditions.pooled is not None:
        names = ("height", "width", "crop_h", "crop_w", "target_height", "target_width")
        more["y"] = model.encode_adm(
            pooled_output=conditions.pooled, device="cpu", **dict(zip(names, size, strict=True))
        )
    with torch.no_grad():
        denoised = model.apply_model(noised, sigma, c_crossattn=conditions.context, **more)
    if any(kind.__name__ == "V_PREDICTION" for kind in type(model.model_sampling).__mro__):
        return (noised / (1 + sigma**2) - denoised) * (1 + sigma**2).sqrt() / sigma
    return (noised - denoised) / sigma


@pytest.mark.parametrize("timestep", [0, 250, 999])
def test_prediction_is_comfyuis(base, theirs, family, timestep):
    assert base.prediction == ("v_prediction" if family == "sd2" else "epsilon")
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(timestep))
    conditions = our_conditions(base, PROMPTS[0])
    with torch.no_grad():
        mine = base.denoiser.predict(x, torch.tensor([timestep]), conditions)
    # At timestep 0 sigma is 0.03, and the way back from denoised latents costs digits.
    assert close(mine, comfy_prediction(theirs[0], x, timestep, conditions), 1e-4 if timestep else 1e-3)
    if family == "sdxl":
        other = our_conditions(base, PROMPTS[0], [96, 64, 4, 8, 64, 64])
        with torch.no_grad():
            assert not close(mine, base.denoiser.predict(x, torch.tensor([timestep]), other), 1e-4)


@pytest.mark.parametrize(("preset", "names"), [("attn-mlp", "comfy"), ("full", "comfy"), ("full", "peft")])
def test_a_saved_lora_does_in_comfyui_what_it_did_in_training(base, theirs, family, preset, names, caplog, tmp_path):
    model, models, comfy = theirs
    network = network_in(base, LoraConfig(rank=4, alpha=2, preset=preset))
    fill(network)
    tensors = network.tensors()
    if names == "peft":
        tensors = peft_tensors(tensors, {trained.name: trained.comfy for trained in network.chosen})
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "a.safetensors")
    lora = comfy.utils.load_torch_file(str(tmp_path / "a.safetensors"))
    texts = torch.nn.ModuleDict({prefix.rstrip("."): text for prefix, text in models.items()})
    keys = comfy.lora.model_lora_keys_clip(texts, comfy.lora.model_lora_keys_unet(model, {}))
    with caplog.at_level(logging.WARNING):
        patches = comfy.lora.load_lora(lora, keys)
    assert "not loaded" not in caplog.text and len(patches) == len(network.layers)
    last = [name for name in network.layers if "_layers_2_" in name]  # of three: only the pooled embedding sees it
    assert {name[:8] for name in last} == (set() if family == "sd2" else {"lora_te2"})

    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = our_conditions(base, PROMPTS[0])
    with network.attached():
        conditions = our_conditions(base, PROMPTS[0])
        with torch.no_grad():
            mine = base.denoiser.predict(x, torch.tensor([400]), conditions)
    assert not close(conditions.context, plain.context, 1e-2)
    kept = {}
    weights = {**model.state_dict(), **texts.state_dict()}
    with torch.no_grad():
        for key, patch in patches.items():
            kept[key] = weights[key].clone()
            weights[key].copy_(comfy.lora.calculate_weight([(1.0, patch, 1.0, None, None)], weights[key].clone(), key))
    try:
        context, pooled = comfy_text(models, comfy, PROMPTS[0])
        assert close(conditions.context, context) and (
            pooled is None or family == "sd2" or close(conditions.pooled, pooled)
        )
        assert close(mine, comfy_prediction(model, x, 400, conditions))
    finally:
        with torch.no_grad():
            for key, value in kept.items():
                weights[key].copy_(value)


FULL = {  # a full-size model of each family: the shape of its UNet, and how many layers a LoRA has
    "sd2": (
        {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
        {"attn-mlp": 192, "full": 282},
    ),
    "sdxl": (
        {
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "cross_attention_dim": 2048,
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
        {"attn-mlp": 722, "full": 792},
    ),
}


def test_every_layer_of_a_full_size_unet_has_its_weight_in_comfyui(family, comfy_modules):
    shape, counts = FULL[family]
    with torch.device("meta"):
        unet = UNet2DConditionModel(**shape)
        state = unet.state_dict()
        names = unet_ldm_names(state, 2)
        stored = {UNET + names[k]: v for k, v in state.items()}
        config = comfy_modules.model_detection.model_config_from_unet(stored, UNET)
        expected = {"sd2": comfy_modules.supported_models.SD20, "sdxl": comfy_modules.supported_models.SDXL}
        assert type(config) is expected[family]
        config.set_inference_dtype(torch.float32, None)
        config.model_type = lambda *_: comfy_modules.model_base.ModelType.EPS
        model = config.get_model(stored, UNET, device="meta")
        # The architecture is read from the shapes of a file alone.
        read = UNet2DConditionModel(
            **unet_shape({names[k]: tuple(v.shape) for k, v in state.items()}, FAMILIES[family])
        )
    assert {k: v.shape for k, v in read.state_dict().items()} == {k: v.shape for k, v in state.items()}
    theirs = {k.removeprefix("diffusion_model."): v.numel() for k, v in model.state_dict().items()}
    assert {names[k]: v.numel() for k, v in state.items()}.items() <= theirs.items()
    keys, weights = comfy_modules.lora.model_lora_keys_unet(model, {}), model.state_dict()
    base = StableDiffusion(family=FAMILIES[family], name="", unet=unet, texts=(), vae=None, tokenizer=None)
    for preset, count in counts.items():
        network = network_in(base, LoraConfig(rank=1, preset=preset))
        assert len(network.layers) == count
        for name, layer in network.layers.items():
            assert weights[keys[name]].numel() == layer.up.shape[0] * layer.down[0].numel(), name
    if family == "sdxl":
        assert "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q" in network.layers
        assert "lora_unet_output_blocks_2_2_conv" in network.layers
        assert not any("label_emb" in name for name in network.layers)  # as other trainers leave it
