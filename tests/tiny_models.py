"""Builders of small models of random weights in the shape of Stable Diffusion 1."""

import torch

from lora_atelier.trainer_core.models.names import tiny_vae_names, unet_ldm_names


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
    from diffusers import AutoencoderTiny

    unet, text, vae = tiny_unet().state_dict(), tiny_text_encoder().state_dict(), AutoencoderTiny().state_dict()
    unet_names, vae_names = unet_ldm_names(unet, 1), tiny_vae_names(vae)
    tensors = {f"model.diffusion_model.{unet_names[k]}": v for k, v in unet.items()}
    tensors |= {f"cond_stage_model.transformer.text_model.{k.removeprefix('text_model.')}": v for k, v in text.items()}
    tensors |= {f"first_stage_model.{vae_names[k]}": v for k, v in vae.items()}
    return {k: v.clone().contiguous() for k, v in tensors.items()}
