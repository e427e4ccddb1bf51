"""What is trained is what ComfyUI later uses: text, prediction, sampling, decoding and LoRA against its own classes."""

import dataclasses
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from durable import close
from safetensors.torch import save_file
from tiny_models import fill, network_in, network_on

from lora_atelier.trainer_core.config import BaseModelConfig, EmbeddingConfig, LoraConfig, SampleConfig
from lora_atelier.trainer_core.lora_files.write import peft_tensors, save_embeddings
from lora_atelier.trainer_core.models import word_ids
from lora_atelier.trainer_core.models.sd import Conditions, load_base_model
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names, vae_ldm_names
from lora_atelier.trainer_core.models.sd.text import encode_caption
from lora_atelier.trainer_core.networks import Embeddings
from lora_atelier.trainer_core.objective import AffinePath
from lora_atelier.trainer_core.training.sample import sample_images, sample_latents
from lora_atelier.trainer_core.training.samplers import SAMPLERS, SCHEDULERS, Levels
from lora_atelier.trainer_core.workflow.foreign import read_foreign
from lora_atelier.trainer_core.workflow.places import Folders
from lora_atelier.trainer_core.workflow.run_file import read_open, read_run

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "assets" / "atelier-tiny.safetensors"
WEIGHTED = [
    "a (red:1.3) circle on ((a) blue:0.5) background",
    r"((moss)) \(not (a:x) weight\) (away:-1) (half) of (it",
    "(many words:1.2) " * 30 + "(" + "many words " * 60 + ":0.8) end",
]
PROMPTS = ["a red circle on a blue background", "", "mossling " + "many words " * 60, "many words " * 170]


@pytest.fixture(scope="module")
def loaded(comfy_modules):
    """Give the tiny base loaded by ComfyUI: (model, clip, vae), float32."""
    from lora_atelier.nodes.comfyui.tiny import register_tiny_model

    register_tiny_model()
    options = {"dtype": torch.float32}
    return comfy_modules.sd.load_checkpoint_guess_config(str(TINY), model_options=options, te_model_options=options)[:3]


@pytest.fixture(scope="module")
def base(comfyui):
    tokenizer = str(comfyui / "comfy" / "sd1_tokenizer")
    return load_base_model(BaseModelConfig(path=str(TINY), tokenizer=tokenizer))


def escape(prompt):
    return prompt.replace("(", r"\(").replace(")", r"\)")


def comfy_text(clip, prompt):
    return clip.encode_from_tokens(clip.tokenize(prompt))


def our_text(base, prompt, clip_skip=1, *, weights=False):
    with torch.no_grad():
        texts = [dataclasses.replace(text, layer=clip_skip) for text in base.texts]
        return encode_caption(texts, base.tokenizer, prompt, "cpu", weights=weights).context[None]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_conditioning_is_comfyuis(base, loaded, prompt):
    theirs = comfy_text(loaded[1], prompt)
    assert our_text(base, prompt).shape == theirs.shape
    assert close(our_text(base, prompt), theirs)


@pytest.mark.parametrize("prompt", [*PROMPTS, *WEIGHTED])
def test_weights_are_comfyuis(base, loaded, prompt):
    theirs = comfy_text(loaded[1], prompt)
    mine = our_text(base, prompt, weights=True)
    assert mine.shape == theirs.shape and close(mine, theirs)
    if prompt in WEIGHTED:
        plain = our_text(base, prompt)
        escaped = comfy_text(loaded[1], escape(prompt))
        assert plain.shape == escaped.shape and close(plain, escaped)
        assert plain.shape != mine.shape or not close(plain, mine, 1e-2)


def test_clip_skip_is_comfyuis(base, loaded):
    clip = loaded[1].clone()
    clip.clip_layer(-2)
    assert close(our_text(base, PROMPTS[0], 2), comfy_text(clip, PROMPTS[0]))
    assert not close(our_text(base, PROMPTS[0], 1), comfy_text(clip, PROMPTS[0]))


LONG = "many words " * 36  # 72 tokens


@pytest.mark.parametrize(
    "caption",
    [
        "a mossling, on a pebble",
        f"{LONG} mossling (pebble) and a mossling",  # four vectors do not fit and begin the next chunk, ten are spread
        f"Mossling {LONG} pebble\nmossling pebble",
    ],
)
def test_a_trained_word_is_comfyuis_embedding(base, loaded, caption, monkeypatch, tmp_path):
    configs = (EmbeddingConfig(token="mossling", vectors=4), EmbeddingConfig(token="pebble", vectors=10))
    embeddings = Embeddings(base.texts, configs, word_ids(configs), {}, seed=3)
    metadata = {"modelspec.architecture": "stable-diffusion-v1/lora"}
    save_embeddings(tmp_path / "atelier", "my run", embeddings.tensors(), base.parts, metadata)
    monkeypatch.setattr(loaded[1].tokenizer.clip_l, "embedding_directory", [str(tmp_path)])
    prompt = re.sub(
        r"(?i)\W*(mossling|pebble)",
        lambda m: f" {m[0][: -len(m[1])]} embedding:atelier/my_run-{m[1].lower()} ",
        caption,
    )
    theirs = comfy_text(loaded[1], escape(prompt))
    embeddings.attach()
    try:
        mine = our_text(base, caption)
    finally:
        embeddings.detach()
    assert mine.shape == theirs.shape and close(mine, theirs)
    assert not close(mine, comfy_text(loaded[1], caption), 1e-2)


def test_a_trained_word_is_weighted_as_comfyui_weights_an_embedding(base, loaded, monkeypatch, tmp_path):
    configs = (EmbeddingConfig(token="mossling", vectors=4), EmbeddingConfig(token="pebble", vectors=10))
    embeddings = Embeddings(base.texts, configs, word_ids(configs), {}, seed=3)
    metadata = {"modelspec.architecture": "stable-diffusion-v1/lora"}
    save_embeddings(tmp_path / "atelier", "run", embeddings.tensors(), base.parts, metadata)
    monkeypatch.setattr(loaded[1].tokenizer.clip_l, "embedding_directory", [str(tmp_path)])
    caption = f"{LONG} (mossling:1.4) on a ( pebble :0.7) and (moss)"
    prompt = re.sub("(mossling|pebble)", r"embedding:atelier/run-\1", caption)
    theirs = comfy_text(loaded[1], prompt)
    embeddings.attach()
    try:
        mine, plain = our_text(base, caption, weights=True), our_text(base, caption)
    finally:
        embeddings.detach()
    assert mine.shape == theirs.shape and close(mine, theirs)
    assert plain.shape != mine.shape or not close(mine, plain, 1e-2)


def comfy_noise(model, x, timestep, context):
    """Return ComfyUI's own prediction of the noise, from its denoised latents."""
    inner = model.model
    sigma = inner.model_sampling.sigmas[timestep].view(1)
    noised = x * (1 + sigma**2).sqrt()  # apply_model takes the unscaled latents
    with torch.no_grad():
        denoised = inner.apply_model(noised, sigma, c_crossattn=context)
    return (noised - denoised) / sigma


@pytest.mark.parametrize("timestep", [0, 250, 999])
def test_prediction_is_comfyuis(base, loaded, timestep):
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(timestep))
    context = our_text(base, PROMPTS[0])
    with torch.no_grad():
        mine = base.unet(x, torch.tensor([timestep]), encoder_hidden_states=context).sample
    assert close(mine, comfy_noise(loaded[0], x, timestep, context))


def test_decoding_is_comfyuis(base, loaded):
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    raw = latents / 0.18215
    assert torch.allclose(base.autoencoder.decode(base.vae, latents), loaded[2].decode(raw), atol=2e-3)


@pytest.mark.parametrize(
    ("sampler", "scheduler"),
    [("euler", "normal"), ("dpm_2", "karras"), ("euler_ancestral", "ddim_uniform"), ("ddim", "simple")],
)
def test_sampling_is_comfyuis(base, loaded, comfy_modules, sampler, scheduler):
    import comfy.sample

    how = {"sampler": sampler, "scheduler": scheduler}
    settings = SampleConfig(prompts=(PROMPTS[0],), steps=5, cfg=4.0, seed=5, width=64, height=64, **how)
    contexts = torch.cat([our_text(base, PROMPTS[0]), our_text(base, "")])
    (picture,) = settings.pictures(base.sampling)
    mine = sample_latents(base, Conditions(context=contexts), picture, torch.device("cpu"), check=lambda: None)
    conditions = [loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(text)) for text in (PROMPTS[0], "")]
    empty = torch.zeros(1, 4, 8, 8)
    noise = comfy.sample.prepare_noise(empty, 5)
    theirs = comfy.sample.sample(loaded[0], noise, 5, 4.0, sampler, scheduler, *conditions, empty, seed=5)
    assert close(mine, theirs * 0.18215, 2e-3)


def by_node(folder, prompt, sampler, scheduler):
    from lora_atelier.nodes.saves import AtelierSaves

    given = {each.id: each.default for each in AtelierSaves.define_schema().inputs}
    given |= {"sample_prompts": prompt, "sample_sampler": sampler, "sample_scheduler": scheduler}
    (outputs,) = AtelierSaves.execute(**given).result
    return outputs.sample


def by_toml(folder, prompt, sampler, scheduler):
    asked = f'prompts = ["{prompt}"]\nsampler = "{sampler}"\nscheduler = "{scheduler}"\n'
    (folder / "run.toml").write_text(f'name = "a"\n[base_model]\npath = "m"\n[sample]\n{asked}')
    return read_run(folder / "run.toml", Folders()).config.sample


def by_import(folder, prompt, sampler, scheduler):
    (folder / "prompts.txt").write_text(prompt)
    asked = f'sample_prompts = "prompts.txt"\nsample_sampler = "{sampler}"\n'
    (folder / "theirs.toml").write_text(f'pretrained_model_name_or_path = "m"\n{asked}')
    return read_open(read_foreign(folder / "theirs.toml").values).sample


@pytest.mark.parametrize(
    ("chosen", "asked", "scheduler"),
    [(by_node, "heun", "exponential"), (by_toml, "dpm_2", "sgm_uniform"), (by_import, "heun", "auto")],
)
def test_samples_are_drawn_by_the_sampler_that_is_chosen(
    base, loaded, comfy_modules, chosen, asked, scheduler, tmp_path
):
    import comfy.sample

    config = chosen(tmp_path, PROMPTS[0], asked, scheduler)
    size = {"steps": 4, "cfg": 4.0, "seed": 5, "width": 64, "height": 64}
    ((_, mine),) = sample_images(base, config.replace(**size))
    texts = [loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(text)) for text in (PROMPTS[0], "")]
    empty = torch.zeros(1, 4, 8, 8)

    def drawn(sampler, scheduler):
        noise = comfy.sample.prepare_noise(empty, 5)
        how = (4, 4.0, sampler, "normal" if scheduler == "auto" else scheduler, *texts, empty)
        return loaded[2].decode(comfy.sample.sample(loaded[0], noise, *how, disable_pbar=True, seed=5))

    own = drawn(asked, scheduler)
    assert (mine - own).abs().max() <= 1.5 / 255
    others = [drawn("euler", scheduler), *([drawn(asked, "karras")] if scheduler != "auto" else [])]
    assert all((own - other).abs().max() > 3 / 255 for other in others)


class Analytic:
    """A denoiser in closed form, as ComfyUI's samplers call one."""

    def __init__(self) -> None:
        import comfy.model_sampling

        sampling = comfy.model_sampling.EPS()
        own = SimpleNamespace(model_sampling=sampling)
        patcher = SimpleNamespace(get_model_object=lambda _: sampling)
        self.inner_model = SimpleNamespace(inner_model=own, model_patcher=patcher)

    def __call__(self, x, sigma, **_):
        return torch.tanh(x) / (1 + sigma)


@pytest.mark.parametrize("name", [*SAMPLERS])
def test_each_sampler_steps_as_comfyuis(comfy_modules, name):
    import comfy.k_diffusion.sampling as theirs

    sigmas = torch.tensor([14.6, 6.0, 3.1, 1.4, 0.6, 0.1, 0.0])
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)) * 14.6
    noise = torch.Generator().manual_seed(6)
    model = Analytic()
    mine = SAMPLERS[name](model, x, sigmas.tolist(), lambda: torch.randn(x.shape, generator=noise))
    sample = getattr(theirs, f"sample_{'euler' if name == 'ddim' else name}")
    assert close(mine, sample(model, x, sigmas, extra_args={"seed": 5}, disable=True), 1e-4)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [1, 7, 20])
def test_each_scheduler_spaces_levels_as_comfyuis(base, loaded, comfy_modules, name, steps):
    import comfy.samplers

    wanted = comfy.samplers.calculate_sigmas(loaded[0].get_model_object("model_sampling"), name, steps)
    assert Levels(AffinePath(base.noise)).spaced(name, steps) == pytest.approx(wanted.tolist(), rel=1e-4)


@pytest.mark.parametrize(("preset", "names"), [("attn-only", "comfy"), ("full", "comfy"), ("full", "peft")])
def test_a_saved_lora_does_in_comfyui_what_it_did_in_training(
    base, loaded, comfy_modules, preset, names, caplog, tmp_path
):
    network = network_in(base, LoraConfig(rank=4, alpha=2, preset=preset))
    fill(network)
    tensors = network.tensors()
    if names == "peft":
        tensors = peft_tensors(tensors, {trained.name: trained.comfy for trained in network.chosen})
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "a.safetensors")
    lora = comfy_modules.utils.load_torch_file(str(tmp_path / "a.safetensors"))
    with caplog.at_level(logging.WARNING):
        model, clip = comfy_modules.sd.load_lora_for_models(loaded[0], loaded[1], lora, 1.0, 1.0)
    assert "not loaded" not in caplog.text
    assert len(model.patches) + len(clip.patcher.patches) == len(network.layers)
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    plain = our_text(base, PROMPTS[0])
    with network.attached(), torch.no_grad():
        text = our_text(base, PROMPTS[0])
        mine = base.unet(x, torch.tensor([400]), encoder_hidden_states=text).sample
    assert not close(text, plain, 1e-2)
    theirs_text = comfy_text(clip, PROMPTS[0])
    assert close(text, theirs_text)
    comfy_modules.model_management.load_models_gpu([model])
    try:
        assert close(mine, comfy_noise(model, x, 400, theirs_text))
    finally:
        comfy_modules.model_management.unload_all_models()


def test_every_layer_of_a_full_size_sd15_has_its_weight_in_comfyui(comfy_modules):
    import comfy.lora
    import comfy.sd1_clip
    import comfy.supported_models
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        text = CLIPTextModel(CLIPTextConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072))
        shape = {k: tuple(v.shape) for k, v in unet.state_dict().items()}
        ldm = unet_ldm_names(shape, 2)
        stored = {f"model.diffusion_model.{ldm[k]}": torch.empty(v) for k, v in shape.items()}
        config = comfy_modules.model_detection.model_config_from_unet(stored, "model.diffusion_model.")
        assert type(config) is comfy.supported_models.SD15
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(stored, "model.diffusion_model.", device="meta")
        clip = comfy.sd1_clip.SD1ClipModel(device="meta", dtype=torch.float32)
    assert {f"diffusion_model.{ldm[k]}": v for k, v in shape.items()} == {
        k: tuple(v.shape) for k, v in model.state_dict().items() if k.startswith("diffusion_model.")
    }
    keys = comfy.lora.model_lora_keys_clip(clip, comfy.lora.model_lora_keys_unet(model, {}))
    network = network_on(unet, LoraConfig(rank=2, preset="full"), texts={"lora_te": (text, 12)})
    assert len(network.layers) == 282 + 72
    weights = {**model.state_dict(), **clip.state_dict()}
    for name, layer in network.layers.items():
        assert name in keys, name
        assert weights[keys[name]].numel() == layer.up.shape[0] * layer.down[0].numel(), name
    assert len({keys[name] for name in network.layers}) == len(network.layers)


def test_the_autoencoder_of_sd15_has_comfyuis_names_and_sizes(comfy_modules):
    from comfy.ldm.models.autoencoder import AutoencoderKL as ComfyAutoencoder

    with torch.device("meta"):
        ours = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            latent_channels=4,
        ).state_dict()
        shape = {"ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_channels": 4, "resolution": 256}
        fixed = {"in_channels": 3, "out_ch": 3, "attn_resolutions": [], "dropout": 0.0, "double_z": True}
        theirs = ComfyAutoencoder(ddconfig=shape | fixed, embed_dim=4).state_dict()
    names = vae_ldm_names(ours, 4)
    assert {names[k]: v.numel() for k, v in ours.items()} == {k: v.numel() for k, v in theirs.items()}
