"""Training inpainting models: what is stored and what each visit is told, and runs from start to file."""

import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint_tensors, tiny_unet
from tiny_runs import change, run, tiny_config

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    BaseModelConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data.cache import Cache
from lora_atelier.trainer_core.data.images import cut, load_picture
from lora_atelier.trainer_core.data.masks import cut_mask, load_mask
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import scan
from lora_atelier.trainer_core.models.sd import check_base_model, load_base_model
from lora_atelier.trainer_core.models.sd.autoencoder import encode_blank, encode_pixels
from lora_atelier.trainer_core.training.batch import build_conditions
from lora_atelier.trainer_core.training.encode import encode_plan
from lora_atelier.trainer_core.training.pixels import pixels

pytestmark = pytest.mark.usefixtures("no_estimates")
CPU = torch.device("cpu")
FIRST = "model.diffusion_model.input_blocks.0.0.weight"


@pytest.fixture(scope="module")
def inpainting(tmp_path_factory):
    """Give the path of a toy checkpoint whose UNet takes nine channels."""
    tensors = checkpoint_tensors()
    tensors[FIRST] = torch.randn(32, 9, 3, 3, generator=torch.Generator().manual_seed(1)) / 9
    path = tmp_path_factory.mktemp("models") / "toy-inpainting.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture
def config(inpainting, pictures):
    masks = MaskConfig(missing="ones", unmasked_probability=0.4, threshold=0.4)  # of the three masks one is below
    return tiny_config(
        inpainting,
        ConceptConfig(folder=str(pictures), flip=True, masks=masks),
        lora={"preset": "full"},
        scheduler={"name": "cosine"},
        train={"steps": 6, "seed": 2, "save_dtype": "float32"},
    )


def test_each_visit_gets_its_mask_and_the_rest_of_its_picture(config, pictures, tmp_path):
    """White is painted: mid-grey before the autoencoder. Without a mask, or on visits without, all of it is."""
    shutil.copytree(pictures, tmp_path / "half")
    half = Image.new("L", (64, 64))
    half.paste(255, (0, 0, 32, 64))  # so that a mirrored mask is another one
    half.save(tmp_path / "half" / "2-masklabel.png")
    concept = config.dataset.concepts[0].replace(folder=str(tmp_path / "half"))
    config = config.replace(dataset=DatasetConfig(concepts=(concept,)))
    plan = build_plan(scan(config.dataset), config.dataset, config.train)
    base = load_base_model(config.base_model)
    with Cache(tmp_path) as cache:
        encoded = encode_plan(base, plan, cache, CPU, Callbacks(), prompts=set())
    warm = encode_plan(base, plan, Cache(tmp_path), CPU, Callbacks(phase=pytest.fail), prompts=set())
    base.texts, seen = (), set()
    samples = [sample for k in range(plan.steps) for batch in plan.step(k) for sample in batch.samples]
    for sample in samples:
        picture = plan.manifest.pictures[sample.picture]
        told = build_conditions(base, warm, warm.conditioning, plan, [sample], CPU).painted
        assert torch.equal(told[0], encoded.painted(sample))
        width, height = sample.crop.bucket
        if sample.use_mask:
            masks = config.dataset.concepts[0].masks
            whole = load_mask(picture.mask, (picture.width, picture.height), masks)
            white = torch.from_numpy(np.array(cut_mask(whole, sample.crop)))[None] > 127
            rest = pixels(cut(load_picture(picture.path), sample.crop)).masked_fill(white, 0.0)
            mean, _ = encode_pixels(base.vae, rest[None], base.family.latent_scale)
            assert torch.equal(told[:, 1:], mean) and torch.equal(told[0, 0], white[0, ::8, ::8].float())
            mirrored = sample.crop.flip and 0 < told[0, 0].mean() < 1
            seen.add(f"mask {float(told[0, 0].mean())}{', mirrored' if mirrored else ''}")
        else:
            assert torch.equal(told, encode_blank(base.vae, (width, height), base.family.latent_scale))
            assert (told[:, 0] == 1).all()
            seen.add("no mask" if picture.mask is None else "visit without")
    assert seen == {"mask 0.0", "mask 1.0", "mask 0.5, mirrored", "no mask", "visit without"}
    asked = {s.view if s.use_mask else s.crop.bucket for s in samples}
    assert set(encoded.painted_keys) == asked  # and nothing that is not asked for


def test_masks_in_use_change_the_keys(config, tmp_path):
    base = load_base_model(config.base_model)
    keys = set()
    for masks in (MaskConfig(missing="ones"), MaskConfig(missing="ones", invert=True)):
        dataset = DatasetConfig(concepts=(config.dataset.concepts[0].replace(masks=masks, flip=False),))
        plan = build_plan(scan(dataset), dataset, config.train)
        with Cache(tmp_path) as cache:
            found = encode_plan(base, plan, cache, CPU, Callbacks(), prompts=None).painted_keys
        keys |= {key for item, key in found.items() if not isinstance(item[1], int)}
    assert len(keys) == 6


def test_a_run_trains_validates_samples_and_exports_as_ever(config, held, tmp_path):
    held = ConceptConfig(folder=str(held), role="validation")
    config = change(config, train={"steps": 2})
    config = config.replace(
        dataset=DatasetConfig(concepts=(*config.dataset.concepts, held)),
        sample=SampleConfig(prompts=("thing", "thing --w 96 --d 1"), width=64, height=96, steps=2),
    )
    result = run(config, tmp_path)
    assert all(map(math.isfinite, result.losses)) and len(result.validation) == 2
    assert result.samples.shape == (2, 96, 96, 3) and result.samples.isfinite().all()
    tensors = load_file(result.path)
    assert tensors["lora_unet_conv_in.lora_down.weight"].shape == (2, 9, 3, 3)
    assert any(t.any() for k, t in tensors.items() if k.endswith("lora_up.weight"))
    first = change(config, train={"steps": 1}, sample={"prompts": ()})
    assert run(first, tmp_path).losses == result.losses[:1]
    text = run(change(first, optimizer={"text_encoder_learning_rate": 1e-3}), tmp_path)
    assert text.losses[0] == pytest.approx(result.losses[0], rel=1e-4)


def test_a_diffusers_folder_of_nine_channels_is_one_too(inpainting, comfyui, tmp_path):
    from diffusers import UNet2DConditionModel

    base = load_base_model(BaseModelConfig(path=str(inpainting), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer")))
    unet = UNet2DConditionModel(**{**tiny_unet().config, "in_channels": 9})
    unet.load_state_dict(base.unet.state_dict())
    unet.save_pretrained(tmp_path / "unet")
    base.texts[0].model.save_pretrained(tmp_path / "text_encoder")
    base.vae.save_pretrained(tmp_path / "vae")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    folder = BaseModelConfig(path=str(tmp_path), tokenizer=str(comfyui / "comfy" / "sd1_tokenizer"))
    check_base_model(folder)
    other = load_base_model(folder)
    assert other.paints and torch.equal(other.unet.conv_in.weight, base.unet.conv_in.weight)
    config = (tmp_path / "unet" / "config.json").read_text()
    (tmp_path / "unet" / "config.json").write_text(config.replace('"in_channels": 9', '"in_channels": 8'))
    with pytest.raises(ValueError, match="takes 8 input channels, it is an edit model"):
        check_base_model(folder)
