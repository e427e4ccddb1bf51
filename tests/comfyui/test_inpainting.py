"""Inpainting models: what they are told, and what they make of it, against ComfyUI's own classes at toy size."""

import importlib.util

import numpy as np
import pytest
import torch
from durable import close
from PIL import Image, ImageDraw, ImageFilter
from safetensors.torch import save_file
from tiny_models import checkpoint_tensors, family_tensors

from lora_atelier.trainer_core.config import BaseModelConfig
from lora_atelier.trainer_core.data.masks import painting_masks
from lora_atelier.trainer_core.models.sd import Conditions, load_base_model
from lora_atelier.trainer_core.models.sd.autoencoder import encode_blank, encode_painted
from lora_atelier.trainer_core.models.sd.family import FAMILIES
from lora_atelier.trainer_core.training.pixels import pixels

UNET = "model.diffusion_model."
SIZE = (64, 96, 4, 8, 64, 64)


@pytest.fixture(scope="module")
def comfy_nodes(comfyui, comfy_modules):
    """Give ComfyUI's nodes, by path: in pytest the name `nodes` is the pack's folder."""
    spec = importlib.util.spec_from_file_location("comfyui_nodes", comfyui / "nodes.py")
    nodes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nodes)
    return nodes


@pytest.fixture(scope="module", params=["sd1", "sd2", "sdxl"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tensors(family):
    """Return a toy checkpoint whose UNet takes nine channels."""
    made = checkpoint_tensors() if family == "sd1" else family_tensors(family)
    first = f"{UNET}input_blocks.0.0.weight"
    width = made[first].shape[0]
    made[first] = torch.randn(width, 9, 3, 3, generator=torch.Generator().manual_seed(4)) / 9
    # a small autoencoder gives latents in model scale, which ComfyUI wants to be told
    made["first_stage_model.vae_scale"] = torch.tensor(FAMILIES[family].latent_scale)
    made["first_stage_model.vae_shift"] = torch.tensor(0.0)
    return made


@pytest.fixture(scope="module")
def base(tensors, family, comfyui, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / f"{family}-inpainting.safetensors"
    save_file(tensors, path)
    return load_base_model(BaseModelConfig(path=str(path), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer")))


@pytest.fixture(scope="module")
def theirs(tensors, family, comfy_modules):
    """Give ComfyUI's model and VAE of the same tensors."""
    comfy = comfy_modules
    kinds = {
        "sd1": comfy.supported_models.SD15,
        "sd2": comfy.supported_models.SD20,
        "sdxl": comfy.supported_models.SDXL,
    }
    config = kinds[family](comfy.model_detection.detect_unet_config(tensors, UNET))
    config.unet_config |= config.unet_extra_config
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(tensors, UNET, device="cpu").float().eval()
    model.load_model_weights(dict(tensors), UNET)
    place = "first_stage_model."
    vae = comfy.sd.VAE(sd={k.removeprefix(place): v for k, v in tensors.items() if k.startswith(place)})
    return model, vae


def picture_and_mask():
    """Return an RGB picture and a mask with soft edges, 64 x 96."""
    noise = np.random.default_rng(3).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    mask = Image.new("L", (64, 96))
    ImageDraw.Draw(mask).ellipse((11, 17, 50, 70), fill=255)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3)), mask.filter(ImageFilter.GaussianBlur(5))


def told_by_comfyui(comfy_nodes, theirs, whole):
    """Return c_concat as ComfyUI's conditioning node and model make it; whole: all of the picture is painted."""
    model, vae = theirs
    picture, mask = picture_and_mask()
    image = torch.from_numpy(np.array(picture)).float()[None] / 255
    painted = torch.from_numpy(np.array(mask)).float()[None] / 255
    painted = torch.ones_like(painted) if whole else painted
    positive, _, _ = comfy_nodes.InpaintModelConditioning().encode([[None, {}]], [[None, {}]], image, vae, painted)
    values = positive[0][1]
    return model.concat_cond(noise=torch.zeros(1, 4, 12, 8), device="cpu", **values)


def test_the_conditions_of_the_model_are_comfyuis(base, theirs, comfy_nodes):
    assert base.inpainting
    picture, mask = picture_and_mask()
    pixel_mask, small = (m[None] for m in painting_masks(mask, 8))
    assert 0 < small.mean() < 1 and set(small.unique().tolist()) == {0.0, 1.0}
    scale = base.family.latent_scale
    mine = encode_painted(base.vae, pixels(picture)[None], pixel_mask, small, scale)
    other = told_by_comfyui(comfy_nodes, theirs, whole=False)
    assert mine.shape == other.shape == (1, 5, 12, 8)
    assert torch.equal(mine[:, :1], other[:, :1]) and close(mine, other)
    assert close(encode_blank(base.vae, (64, 96), scale), told_by_comfyui(comfy_nodes, theirs, whole=True))


@pytest.mark.parametrize("timestep", [100, 999])
def test_prediction_is_comfyuis(base, theirs, family, comfy_nodes, timestep):
    model, _ = theirs
    draw = torch.Generator().manual_seed(timestep)
    x = torch.randn(1, 4, 12, 8, generator=draw)
    context = torch.randn(1, 77, base.unet.config.cross_attention_dim, generator=draw)
    told = told_by_comfyui(comfy_nodes, theirs, whole=False)
    more, pooled = {}, None
    if family == "sdxl":
        pooled = torch.randn(1, 128, generator=draw)
        names = ("height", "width", "crop_h", "crop_w", "target_height", "target_width")
        more["y"] = model.encode_adm(pooled_output=pooled, device="cpu", **dict(zip(names, SIZE, strict=True)))
    conditions = Conditions(
        context=context, pooled=pooled, sizes=None if pooled is None else torch.tensor([SIZE]), painted=told
    )
    sigma = model.model_sampling.sigmas[timestep].view(1)
    noised = x * (1 + sigma**2).sqrt()  # apply_model takes the unscaled latents
    with torch.no_grad():
        mine = base.denoiser.predict(x, torch.tensor([timestep]), conditions)
        denoised = model.apply_model(noised, sigma, c_concat=told, c_crossattn=context, **more)
        other = base.denoiser.predict(
            x, torch.tensor([timestep]), Conditions(**{**fields(conditions), "painted": told * 0})
        )
    assert mine.shape == x.shape and close(mine, (noised - denoised) / sigma)
    assert not close(mine, other, 1e-2)


def fields(conditions):
    return {name: getattr(conditions, name) for name in conditions.__dataclass_fields__}
