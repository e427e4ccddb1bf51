"""Builders of small models of random weights in the shape of Stable Diffusion 1."""

import functools
from collections.abc import Callable

import torch

from lora_atelier.bench.checkpoints import open_clip_tensors
from lora_atelier.trainer_core.models.sd import StableDiffusion
from lora_atelier.trainer_core.models.sd.family import FAMILIES
from lora_atelier.trainer_core.models.sd.layers import PREFIX
from lora_atelier.trainer_core.models.sd.names import tiny_vae_names, unet_ldm_names, vae_ldm_names
from lora_atelier.trainer_core.models.sd.text import ClipEncoder
from lora_atelier.trainer_core.networks import Network, choose_layers


def tiny_unet():
    """Build a UNet of SD1's shape with two narrow levels, seeded."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
    )


def tiny_text_encoder():
    """Build a CLIP text encoder of two narrow layers, seeded."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(1)
    return CLIPTextModel(
        CLIPTextConfig(
            hidden_size=64,
            num_attention_heads=1,
            num_hidden_layers=2,
            intermediate_size=128,
            bos_token_id=49406,
            eos_token_id=49407,
            pad_token_id=49407,
        )
    )


def checkpoint_tensors() -> dict[str, torch.Tensor]:
    """Return a whole SD1-shaped checkpoint of random weights under the original names."""
    return _once(_checkpoint_tensors)


@functools.cache
def _built(
    build: Callable[..., dict[str, torch.Tensor]], *arguments: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return build(*arguments), torch.get_rng_state()


def _once(build: Callable[..., dict[str, torch.Tensor]], *arguments: str) -> dict[str, torch.Tensor]:
    """Copy what is built the first time; torch's generator is left where building leaves it."""
    tensors, state = _built(build, *arguments)
    torch.set_rng_state(state)
    return {k: v.clone() for k, v in tensors.items()}


def _checkpoint_tensors() -> dict[str, torch.Tensor]:
    from diffusers import AutoencoderTiny

    unet, text, vae = tiny_unet().state_dict(), tiny_text_encoder().state_dict(), AutoencoderTiny().state_dict()
    unet_names, vae_names = unet_ldm_names(unet, 1), tiny_vae_names(vae)
    tensors = {f"model.diffusion_model.{unet_names[k]}": v for k, v in unet.items()}
    tensors |= {f"cond_stage_model.transformer.text_model.{k.removeprefix('text_model.')}": v for k, v in text.items()}
    tensors |= {f"first_stage_model.{vae_names[k]}": v for k, v in vae.items()}
    return {k: v.contiguous() for k, v in tensors.items()}


def tiny_clip(width: int, layers: int, *, open_clip: bool, projected: bool, seed: int):
    """Build a CLIP or OpenCLIP text encoder of heads 64 wide, seeded."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(seed)
    config = CLIPTextConfig(
        hidden_size=width,
        num_attention_heads=width // 64,
        num_hidden_layers=layers,
        intermediate_size=2 * width,
        hidden_act="gelu" if open_clip else "quick_gelu",
        projection_dim=width,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=0 if open_clip else 49407,
    )
    model = (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)
    with torch.no_grad():  # their own initial values are so small that layers hardly differ
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.eval()


def family_tensors(family: str) -> dict[str, torch.Tensor]:
    """Return a whole checkpoint of random weights in the shape of "sd2" or "sdxl" under the original names."""
    return _once(_family_tensors, family)


def _family_tensors(family: str) -> dict[str, torch.Tensor]:
    from diffusers import AutoencoderTiny, UNet2DConditionModel

    sdxl = family == "sdxl"
    torch.manual_seed(2)
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 256} if sdxl else {}
    more |= {"projection_class_embeddings_input_dim": 128 + 6 * 256} if sdxl else {}
    unet = UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D" if sdxl else "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D" if sdxl else "CrossAttnUpBlock2D"),
        transformer_layers_per_block=(1, 2) if sdxl else (1, 1),
        cross_attention_dim=64 + 128 if sdxl else 128,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        **more,
    )
    state, vae = unet.state_dict(), AutoencoderTiny().state_dict()
    names, vae_names = unet_ldm_names(state, 1), tiny_vae_names(vae)
    tensors = {f"model.diffusion_model.{names[k]}": v for k, v in state.items()}
    tensors |= {f"first_stage_model.{vae_names[k]}": v for k, v in vae.items()}
    large = tiny_clip(128, 3, open_clip=True, projected=sdxl, seed=3)
    prefix = "conditioner.embedders.1.model." if sdxl else "cond_stage_model.model."
    tensors |= {prefix + k: v for k, v in open_clip_tensors(large).items()}
    if sdxl:
        small = tiny_clip(64, 3, open_clip=False, projected=False, seed=4).state_dict()
        place = "conditioner.embedders.0.transformer.text_model."
        tensors |= {place + k.removeprefix("text_model."): v for k, v in small.items()}
    return {k: v.detach().clone().contiguous() for k, v in tensors.items()}


def model_of(unet=None, texts=None):
    """Build a base model of a UNet and of text encoders, {prefix: (model, its layers in use)}, of SD1's names."""
    encoders = tuple(
        ClipEncoder(
            model=model,
            layer=model.config.num_hidden_layers - depth + 1,
            final_norm=True,
            pooled=False,
            open_clip=False,
            prefix=prefix,
        )
        for prefix, (model, depth) in (texts or {}).items()
    )
    return StableDiffusion(family=FAMILIES["sd1"], name="", unet=unet, texts=encoders, vae=None, tokenizer=None)


def targets_in(base, config):
    """Choose the layers that a configuration trains in all of a base model that is in memory."""
    parts = [*([] if base.unet is None else [PREFIX]), *(text.prefix for text in base.texts)]
    return choose_layers(base, config, parts)


def network_in(base, config, seed=0):
    """Build a new network in all of a base model that is in memory."""
    return Network(targets_in(base, config), config, seed)


def network_on(unet, config, seed=0, texts=None):
    """Build a new network on a UNet and on text encoders, as `model_of` takes them."""
    return network_in(model_of(unet, texts), config, seed)


def fill(network, std=0.05):
    """Draw the factors that begin with 0, so that a network is no fresh one; return it."""
    for i, layer in enumerate(network.layers.values()):
        torch.nn.init.normal_(layer.up, std=std, generator=torch.Generator().manual_seed(i))
    return network


def kl_autoencoder_tensors() -> dict[str, torch.Tensor]:
    """Return a narrow KL autoencoder of random weights, which gives latents a spread, under the original names."""
    from diffusers import AutoencoderKL

    torch.manual_seed(5)
    levels = 4
    state = AutoencoderKL(
        block_out_channels=(32,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=4,
    ).state_dict()
    names = vae_ldm_names(state, levels)
    wide = {k for k, tensor in state.items() if "attentions" in k and tensor.ndim == 2}  # 1x1 convolutions there
    return {names[k]: (t[..., None, None] if k in wide else t).clone().contiguous() for k, t in state.items()}
