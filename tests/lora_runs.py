"""What the tests of LoRA files share: runs that continue or merge one, and the models that result."""

import torch
from clip_tokenizer import TOKENIZER
from safetensors import safe_open

from lora_atelier.trainer_core.config import BaseModelConfig, LoraConfig, OptimizerConfig, RunConfig
from lora_atelier.trainer_core.lora_files.continued import check_lora_files
from lora_atelier.trainer_core.lora_files.merge import merge_beneath
from lora_atelier.trainer_core.models.sd import load_base_model, outline_base_model

TEXT_RATE = OptimizerConfig(learning_rate=1e-3, text_encoder_learning_rate=1e-3)
# Layers of the toy of Stable Diffusion XL.
LINEAR = "lora_unet_middle_block_1_transformer_blocks_1_ff_net_2"
SMALL = "lora_unet_input_blocks_3_0_skip_connection"


def model_at(path):
    """Configure a base model with the tests' tokenizer."""
    return BaseModelConfig(tokenizer=TOKENIZER, path=str(path))


def run_of(base, **lora):
    return RunConfig(base_model=base, dataset={"concepts": ()}, lora=LoraConfig(**lora), optimizer=TEXT_RATE)


def check(run):
    """Check the files of a run as it does itself, before anything is loaded."""
    check_lora_files(run, outline_base_model(run.base_model))


def load_with(config, *beneath, dtype=torch.float32):
    """Load a base model with LoRAs beneath."""
    return load_base_model(config, dtype, amend=lambda base: merge_beneath(base, beneath))


def metadata_in(path):
    """Read the metadata of a LoRA file: {name: text}."""
    with safe_open(path, "pt") as file:
        return file.metadata()


def random(*shape, seed=0, scale=0.3):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
