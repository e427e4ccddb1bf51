"""LoRA files of every kind merged and continued by us, against what ComfyUI merges of them."""

import logging

import pytest
import torch
from lora_runs import LINEAR, SMALL, check, load_with, model_at, random, run_of
from safetensors.torch import load_file, save_file
from tiny_models import network_in

from lora_atelier.trainer_core.config import BeneathConfig, LoraConfig
from lora_atelier.trainer_core.lora_files.continued import load_continued
from lora_atelier.trainer_core.lora_files.merge import comfy_tensors
from lora_atelier.trainer_core.models.sd import Conditions, load_base_model, outline_base_model
from lora_atelier.trainer_core.models.sd.names import unet_ldm_names
from lora_atelier.trainer_core.networks.layers import dora, ia3
from lora_atelier.trainer_core.networks.layers import layer as layer_module
from lora_atelier.trainer_core.networks.of_model import build_network

CONV = "lora_unet_input_blocks_1_0_in_layers_2"
TEXT, TEXT_2 = "lora_te1_text_model_encoder_layers_0_mlp_fc1", "lora_te2_text_model_encoder_layers_1_self_attn_q_proj"
WHERE = (LINEAR, CONV, SMALL, TEXT, TEXT_2)


@pytest.fixture(scope="module")
def sdxl(checkpoint_xl):
    """Give the toy of Stable Diffusion XL."""
    return model_at(checkpoint_xl)


@pytest.fixture(scope="module")
def outline(sdxl):
    """Give its outline."""
    return outline_base_model(sdxl)


@pytest.fixture(scope="module")
def theirs(sdxl, comfy_modules):
    """Give ComfyUI's UNet and text encoders of the toy: {weight's name: weight}, {name in files: weight's name}."""
    tensors = load_file(sdxl.path)
    unet = "model.diffusion_model."
    config = comfy_modules.supported_models.SDXL(comfy_modules.model_detection.detect_unet_config(tensors, unet))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(tensors, unet, device="cpu").float()
    model.load_model_weights(dict(tensors), unet)
    stored = config.process_clip_state_dict({k: v for k, v in tensors.items() if k.startswith("conditioner.")})

    def text(width, act):
        shape = {"num_hidden_layers": 3, "intermediate_size": 2 * width, "num_attention_heads": width // 64}
        shape |= {"hidden_size": width, "hidden_act": act, "max_position_embeddings": 77, "projection_dim": width}
        shape |= {"eos_token_id": 49407}
        built = comfy_modules.clip_model.CLIPTextModel(
            shape, torch.float32, "cpu", comfy_modules.ops.disable_weight_init
        )
        return torch.nn.ModuleDict({"transformer": built})

    texts = torch.nn.ModuleDict({"clip_l": text(64, "quick_gelu"), "clip_g": text(128, "gelu")})
    missing, _ = texts.load_state_dict(stored, strict=False)
    assert missing in ([], ["clip_l.transformer.text_projection.weight"])
    keys = comfy_modules.lora.model_lora_keys_clip(texts, comfy_modules.lora.model_lora_keys_unet(model, {}))
    return {**model.state_dict(), **texts.state_dict()}, keys


def parts(kind, out, width, kernel):
    """Return the tensors of a layer of each kind for a weight (out, width, *kernel), and its DoRA magnitudes."""
    flat, ones = width * kernel[0] * kernel[1] if kernel else width, (1,) * len(kernel)
    low, high = {"lokr_w1_a": random(4, 2), "lokr_w1_b": random(2, 8, seed=2)}, {"lokr_w1": random(4, 8, seed=1)}
    right = out // 4, width // 8
    low_right = {"lokr_w2_a": random(right[0], 3, seed=5), "lokr_w2_b": random(3, flat // 8, seed=6)}
    lora = {"lora_up.weight": random(out, 3, *ones), "lora_down.weight": random(3, width, *kernel, seed=1)}
    loha = {"hada_w1_a": random(out, 3), "hada_w1_b": random(3, flat, seed=1)}
    loha |= {"hada_w2_a": random(out, 3, seed=2), "hada_w2_b": random(3, flat, seed=3)}
    found = {
        "lora": lora,
        "lora without alpha": lora,
        "dora input": {**lora, "dora_scale": random(1, width, *ones, seed=4).abs() + 0.1},
        "dora output": {**lora, "dora_scale": random(out, 1, *ones, seed=4).abs() + 0.1},
        "loha": loha,
        "loha dora": {**loha, "dora_scale": random(1, width, *ones, seed=4).abs() + 0.1},
        "loha dora output": {**loha, "dora_scale": random(out, 1, *ones, seed=4).abs() + 0.1},
        "lokr": {**high, "lokr_w2": random(*right, *kernel, seed=2)},
        "lokr low left": {**low, "lokr_w2": random(*right, *kernel, seed=3)},
        "lokr low right": {**high, **low_right},
        "lokr low both": {**low, **low_right},
        "diff": {"diff": random(out, width, *kernel), "diff_b": random(out, seed=1)},
    }
    found["lokr dora output"] = {**found["lokr"], "dora_scale": random(out, 1, *ones, seed=4).abs() + 0.1}
    if kernel:
        small = {"lora_up.weight": random(out, 3, 1, 1), "lora_down.weight": random(3, width, 1, 1, seed=1)}
        core = random(3, 3, *kernel, seed=7)
        sides = {"hada_w1_a": random(3, out), "hada_w2_a": random(3, out, seed=2)}
        sides |= {"hada_w1_b": random(3, width, seed=1), "hada_w2_b": random(3, width, seed=3)}
        found["lora tucker"] = {**small, "lora_mid.weight": core}
        found["loha tucker"] = {**sides, "hada_t1": core, "hada_t2": random(3, 3, *kernel, seed=8)}
        found["lokr tucker"] = {**high, "lokr_t2": core, "lokr_w2_a": random(3, right[0])}
        found["lokr tucker"]["lokr_w2_b"] = random(3, right[1], seed=9)
    return found.get(kind)


KINDS = (
    *("lora", "lora without alpha", "lora tucker", "dora input", "dora output", "loha", "loha tucker", "loha dora"),
    *("lokr", "lokr low left", "lokr low right", "lokr low both", "lokr tucker", "diff"),
)


@pytest.mark.parametrize(
    ("kind", "strength"), [*((kind, -0.7) for kind in KINDS), ("lora", 1.0), ("dora input", 1.0), ("dora output", 1.0)]
)
def test_merged_weights_are_comfyuis(sdxl, outline, theirs, comfy_modules, tmp_path, caplog, kind, strength):
    weights, keys = theirs
    tensors = {}
    for name in WHERE:
        shape = weights[keys[name]].shape
        found = parts(kind, shape[0], shape[1], tuple(shape[2:]))
        tensors |= {f"{name}.{end}": tensor for end, tensor in (found or {}).items()}
        if found and kind not in ("lora without alpha", "diff"):
            tensors[f"{name}.alpha"] = torch.tensor(1.5)
    if kind == "diff":  # norms, and text encoders' under the names that ComfyUI knows
        tensors["lora_unet_out_0.w_norm"] = random(64)
        tensors["lora_unet_out_0.b_norm"] = random(64, seed=1)
        tensors["text_encoders.clip_g.transformer.text_model.final_layer_norm.diff"] = random(128)
    path = tmp_path / "lora.safetensors"
    save_file(tensors, path)

    base = load_with(sdxl, BeneathConfig(path=str(path), strength=strength))
    names = unet_ldm_names(base.unet.state_dict(), 1)
    mine = {f"diffusion_model.{names[k]}": v for k, v in base.unet.state_dict().items()}
    for comfy_name, text in zip(("clip_l", "clip_g"), base.texts, strict=True):
        state = {k.removeprefix("text_model."): v for k, v in text.model.state_dict().items()}
        mine |= {
            f"{comfy_name}.transformer.{'' if k.startswith('text_projection') else 'text_model.'}{k}": v
            for k, v in state.items()
        }

    # ComfyUI fails on the core of a LoKr and leaves such layers as they are; what we hand it has none.
    for source in (comfy_tensors(path, outline), *([] if kind == "lokr tucker" else [tensors])):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            patches = comfy_modules.lora.load_lora(source, keys)
        assert not caplog.records, "ComfyUI did not understand the file"
        for key, patch in patches.items():
            wanted = comfy_modules.lora.calculate_weight(
                [(strength, patch, 1.0, None, None)], weights[key].clone(), key
            )
            assert not torch.allclose(wanted, weights[key], atol=1e-2), key
            assert (mine[key] - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), key
    untouched = set(mine) & set(weights) - set(patches)
    assert len(patches) >= (3 if "tucker" not in kind else 2) and len(untouched) > 200
    assert all(torch.equal(mine[key], weights[key].reshape(mine[key].shape)) for key in untouched)


# --- continuing --------------------------------------------------------------------------------------------


@pytest.fixture
def fine_eps(monkeypatch):
    """Let DoRA add the epsilon of float32 to norms, as ComfyUI does where it merges in float32."""
    for module in (dora, ia3, layer_module):
        monkeypatch.setattr(module, "EPS", torch.finfo(torch.float32).eps)


def dora_files(base, weights, keys):
    """Return files of DoRAs and of our (IA)^3, for all of the toy of Stable Diffusion XL or a few of its layers."""
    shapes = {name: weights[keys[name]].shape for name in WHERE}
    files = {}
    for kind in ("dora input", "dora output", "loha dora output", "lokr dora output"):
        files[kind] = {
            f"{name}.{end}": tensor
            for name, (out, width, *kernel) in shapes.items()
            for end, tensor in parts(kind, out, width, tuple(kernel)).items()
        } | {f"{name}.alpha": torch.tensor(1.5) for name in WHERE}
    network = network_in(base, LoraConfig(algorithm="ia3"))
    for i, each in enumerate(network.layers.values()):
        torch.nn.init.normal_(each.ia3, std=0.3, generator=torch.Generator().manual_seed(i))
    with network.attached():
        files["ia3"] = network.tensors()
    return files


def test_a_dora_is_continued_along_its_own_axis_as_comfyui_merges_it(sdxl, theirs, comfy_modules, fine_eps, tmp_path):
    weights, keys = theirs
    base = load_base_model(sdxl)
    for kind, stored in dora_files(base, weights, keys).items():
        path = tmp_path / f"{kind}.safetensors"
        save_file(stored, path)
        run = run_of(sdxl, start=str(path))
        check(run)
        start = load_continued(run, base).layers
        network = build_network(base, run, {"lora_unet": 1e-3, "lora_te1": 1e-3, "lora_te2": 1e-3}, start)
        again = network.tensors()
        assert {name: t.shape for name, t in again.items()} == {name: t.shape for name, t in stored.items()}
        assert all(torch.allclose(again[name], t, rtol=1e-6, atol=1e-6) for name, t in stored.items()), kind

        patches = comfy_modules.lora.load_lora(dict(stored), keys)
        count = 0
        for name, change, _ in network.changes():
            before = weights[keys[name]]
            wanted = comfy_modules.lora.calculate_weight(
                [(1.0, patches[keys[name]], 1.0, None, None)], before.clone(), name
            )
            made = before.reshape(change.shape) + change
            assert (made - wanted.reshape(change.shape)).abs().max() <= 1e-5 * max(1.0, wanted.abs().max()), name
            count += 1
        assert count == len(start) >= len(WHERE)

        # What runs beside the frozen layers is what is merged, and the magnitudes learn.
        merged = load_with(sdxl, BeneathConfig(path=str(path)))
        noise = random(1, 4, 8, 8, scale=1)
        pooled = {"pooled": random(1, 128), "sizes": torch.tensor([[64, 64, 0, 0, 64, 64]])}
        conditions = Conditions(context=random(1, 7, base.unet.config.cross_attention_dim, seed=1, scale=1), **pooled)
        with torch.no_grad():
            plain = base.denoiser.predict(noise, torch.tensor([500]), conditions)
            other = merged.denoiser.predict(noise, torch.tensor([500]), conditions)
        with network.attached():
            mine = base.denoiser.predict(noise, torch.tensor([500]), conditions)
            mine.square().sum().backward()
        scale = float(other.abs().max())
        assert (mine - other).abs().max() < 2e-5 * scale and (mine - plain).abs().max() > 1e-3 * scale, kind
        learning = network.layers[LINEAR]
        assert learning.by_output == ("output" in kind) and learning.magnitude.grad.any()
        if kind == "ia3":  # the LoRA of zeros in the file of (IA)^3 stays so
            assert not learning.up.any() and not learning.up.grad.any() and not learning.down.grad.any()
