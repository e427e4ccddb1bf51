"""The difference of two models as a LoRA: exact where its rank suffices, by files as by weights in memory."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_atelier.trainer_core.lora_files.cli import main
from lora_atelier.trainer_core.lora_files.extract import extract
from lora_atelier.trainer_core.lora_files.formats import delta_weight
from lora_atelier.trainer_core.lora_files.lora import read_lora
from lora_atelier.trainer_core.lora_files.resize import RankRule

NORMAL = {"generator": torch.Generator().manual_seed(3)}


def readers(tensors):
    return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items()}


def models(rank, *shapes):
    """Build a random model, and one that differs from it by `rank` directions in each layer."""
    base = {f"layer.{i}": torch.randn(shape, **NORMAL) for i, shape in enumerate(shapes)}
    tuned = {}
    for name, weight in base.items():
        rows, columns = weight.flatten(1).shape
        change = torch.randn(rows, rank, **NORMAL) @ torch.randn(rank, columns, **NORMAL) / columns
        tuned[name] = weight + change.view_as(weight)
    return readers(tuned), readers(base)


@pytest.mark.parametrize(
    "rule", [RankRule(rank=3), RankRule(mode="sv_fro", value=0.99999), RankRule(mode="sv_ratio", value=1e3, rank=8)]
)
@pytest.mark.parametrize("shape", [(40, 30), (300, 220), (220, 300), (24, 16, 3, 3), (12, 20, 1, 1)])
def test_a_difference_of_low_rank_is_found_whole(rule, shape):
    tuned, base = models(3, shape)
    made = extract(tuned, base, rule, dtype=torch.float32)
    [layer] = made.layers
    difference = tuned["layer.0"]() - base["layer.0"]()
    torch.testing.assert_close(delta_weight(layer).view_as(difference), difference, rtol=1e-3, atol=1e-4)
    assert made.whole == pytest.approx(1, abs=1e-4) and 3 <= len(layer.tensors["down"]) <= 5
    assert layer.tensors["down"].shape[2:] == shape[2:]


def test_the_best_approximation_is_kept_and_its_share_said():
    tuned, base = models(200, (256, 300))
    difference = (tuned["layer.0"]() - base["layer.0"]()).double()
    sigma = torch.linalg.svdvals(difference)
    made = extract(tuned, base, RankRule(rank=8), dtype=torch.float32)
    best = float(sigma[:8].norm() / sigma.norm())
    assert made.kept["layer.0"] == pytest.approx(best, rel=0.01)
    left = (difference - delta_weight(made.layers[0]).double()).norm() / difference.norm()
    assert float(left) == pytest.approx((1 - best**2) ** 0.5, rel=0.01)
    wide = extract(tuned, base, RankRule(mode="sv_fro", value=0.9), dtype=torch.float32)
    rank = len(wide.layers[0].tensors["down"])
    assert float(sigma[: rank - 1].norm()) >= 0.9 * float(sigma.norm()) > float(sigma[: rank - 2].norm())
    assert f"layer.0: rank {rank}, {wide.kept['layer.0']:.2%} kept" in wide.describe()


def test_models_that_do_not_belong_together_are_named():
    tuned, base = models(1, (4, 4), (4, 4))
    with pytest.raises(ValueError, match=r"A has 1 layer that B lacks \(layer.1\)"):
        extract(tuned, {"layer.0": base["layer.0"]}, RankRule(rank=1), titles=("A", "B"))
    with pytest.raises(ValueError, match=r"layer.0 has the shape \(4, 4\) in A and \(4, 5\) in B"):
        extract(tuned, {**base, "layer.0": lambda: torch.ones(4, 5)}, RankRule(rank=1), titles=("A", "B"))
    with pytest.raises(ValueError, match="A and B have equal weights"):
        extract(base, base, RankRule(rank=1), titles=("A", "B"))
    with pytest.raises(ValueError, match=r"layer\.1 holds values that are not finite"):
        extract({**tuned, "layer.1": lambda: torch.full((4, 4), torch.nan)}, base, RankRule(rank=1))
    with pytest.raises(ValueError, match="rank of Extract LoRA is 0"):
        RankRule(tool="extract")


def test_files_are_read_layer_by_layer(tmp_path, capsys, checkpoint):
    tensors = load_file(checkpoint)
    unet = "model.diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q.weight"
    text = "cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.weight"
    for name in (unet, text):
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name] + torch.outer(torch.ones(rows), torch.ones(columns)) * 0.01
    save_file(tensors, tmp_path / "tuned.safetensors")
    call = ["extract", str(tmp_path / "tuned.safetensors"), "--base", str(checkpoint), "--rank", "2"]
    assert main([*call, "--to", str(tmp_path / "made"), "--dtype", "float32"]) == 0
    assert "2 layers differ and hold 100.00% of the difference" in capsys.readouterr().out
    lora, file = read_lora(tmp_path / "made.safetensors")
    assert file.layers.keys() == {
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q",
        "lora_te_text_model_encoder_layers_0_mlp_fc1",
    }
    for layer in file.layers.values():
        delta = delta_weight(layer)
        torch.testing.assert_close(delta, torch.full_like(delta, 0.01), rtol=1e-2, atol=1e-4)
    assert '"base": "random-tiny.safetensors"' in lora.metadata["atelier.history"]
    # The same file under other names, and back.
    convert = ["convert", str(tmp_path / "made.safetensors"), "--model", str(checkpoint)]
    assert main([*convert, "--for", "diffusers", "--to", str(tmp_path / "peft")]) == 0
    names = load_file(tmp_path / "peft.safetensors")
    assert "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_A.weight" in names and len(names) == 4
    call = ["convert", str(tmp_path / "peft.safetensors"), "--model", str(checkpoint), "--for", "kohya"]
    assert main([*call, "--to", str(tmp_path / "back")]) == 0
    back = read_lora(tmp_path / "back.safetensors")[1]
    assert back.layers.keys() == file.layers.keys()
    for name, layer in back.layers.items():
        torch.testing.assert_close(delta_weight(layer), delta_weight(file.layers[name]), rtol=1e-3, atol=1e-5)


def test_other_models_have_comfyui_s_names(tmp_path):
    weights = {"double_blocks.0.img_attn.qkv.weight": torch.randn(12, 4, **NORMAL), "norm.weight": torch.ones(4)}
    save_file(weights, tmp_path / "base.safetensors")
    weights = {f"model.diffusion_model.{name}": tensor + 1 for name, tensor in weights.items()}
    save_file(weights, tmp_path / "tuned.safetensors")
    call = ["extract", str(tmp_path / "tuned.safetensors"), "--base", str(tmp_path / "base.safetensors")]
    assert main([*call, "--rank", "1", "--to", str(tmp_path / "made")]) == 0
    assert read_lora(tmp_path / "made.safetensors")[1].layers.keys() == {"diffusion_model.double_blocks.0.img_attn.qkv"}


def test_a_shell_converts_the_lora_of_a_transformer_by_its_model_file(tmp_path, capsys):
    layers = ("self_attn.q", "cross_attn.o", "ffn.0")
    model = {f"blocks.0.{layer}.weight": torch.zeros(6, 4) for layer in layers} | {"blocks.0.norm3.bias": torch.ones(4)}
    save_file(model, tmp_path / "wan.safetensors")
    lora = {f"lora_unet_blocks_0_{layer.replace('.', '_')}": torch.randn(6, 4, **NORMAL) for layer in layers}
    save_file({f"{name}.diff": delta for name, delta in lora.items()}, tmp_path / "full.safetensors")

    def convert(name, program, to):
        call = ["convert", str(tmp_path / name), "--model", str(tmp_path / "wan.safetensors"), "--for", program]
        return main([*call, "--plain-rank", "4", "--to", str(tmp_path / to)])

    assert convert("full.safetensors", "diffusers", "peft") == 0
    found = {name.removesuffix(".lora_A.weight") for name in load_file(tmp_path / "peft.safetensors")}
    assert {f"transformer.blocks.0.{name}" for name in ("attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj")} <= found
    assert convert("peft.safetensors", "kohya", "back") == 0
    back = read_lora(tmp_path / "back.safetensors")[1]
    assert back.layers.keys() == lora.keys()
    for name, layer in back.layers.items():
        torch.testing.assert_close(delta_weight(layer), lora[name], rtol=1e-3, atol=1e-3)
    capsys.readouterr()
    assert convert("full.safetensors", "onetrainer", "no") == 2
    assert "The form of onetrainer depends on what ComfyUI knows of the model" in capsys.readouterr().err
    save_file({"joint_blocks.0.x.weight": torch.zeros(6, 4)}, tmp_path / "wan.safetensors")  # of another family
    save_file({"lora_unet_joint_blocks_0_x.diff": lora.popitem()[1]}, tmp_path / "full.safetensors")
    assert convert("full.safetensors", "diffusers", "no") == 2
    assert "does not tell them, and the page may know them, which asks ComfyUI" in capsys.readouterr().err
