"""LoRA files: atomic, verified, with metadata; and resizing them."""

import hashlib
from unittest import mock

import pytest
import torch
from lora_runs import metadata_in
from run_folders import LORA, WORD, make_run
from safetensors.torch import load_file, save_file
from tiny_models import fill, network_on, tiny_unet

from lora_atelier.trainer_core.config import LoraConfig
from lora_atelier.trainer_core.lora_files import write
from lora_atelier.trainer_core.lora_files.write import (
    delta_norms,
    file_hashes,
    peft_tensors,
    save_lora,
    unused_path,
    verify_lora,
)
from lora_atelier.trainer_core.runs.cli import main


@pytest.fixture(scope="module")
def network():
    return fill(network_on(tiny_unet(), LoraConfig(rank=8, alpha=4, preset="full")), std=0.1)


def test_norms_come_from_small_products(network):
    norms = delta_norms(network.tensors())
    assert len(norms) == len(network.layers)
    for name, layer in network.layers.items():
        assert norms[name] == pytest.approx(layer.delta_weight().norm().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_file_holds_what_was_trained(network, tmp_path, dtype):
    path = tmp_path / "new" / "a.safetensors"
    written = save_lora(path, network.tensors(), {"ss_seed": "1", "modelspec.title": "a"}, dtype)
    read = load_file(path)
    assert read.keys() == written.keys() == network.tensors().keys()
    assert all(torch.equal(read[k], written[k]) and read[k].dtype == getattr(torch, dtype) for k in read)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
    assert path.stat().st_mode & 0o666 == path.parent.stat().st_mode & 0o666
    metadata = metadata_in(path)
    assert metadata["ss_seed"] == "1" and metadata["modelspec.title"] == "a"
    content = path.read_bytes()
    body = content[8 + int.from_bytes(content[:8], "little") :]
    assert metadata["sshs_model_hash"] == hashlib.sha256(body).hexdigest()
    save_file(written, tmp_path / "plain.safetensors", {"ss_seed": "1"})
    assert metadata["sshs_legacy_hash"] == file_hashes(tmp_path / "plain.safetensors")["sshs_legacy_hash"]


def test_names_of_peft_hold_the_same_change_without_an_alpha(network, tmp_path):
    names = {trained.name: trained.comfy for trained in network.chosen}
    tensors = peft_tensors(network.tensors(), names)
    assert {key.split(".lora_")[1] for key in tensors} == {"A.weight", "B.weight"}
    assert all(key.startswith("diffusion_model.") for key in tensors)
    save_lora(tmp_path / "a.safetensors", tensors, {}, "float32")
    read = load_file(tmp_path / "a.safetensors")
    for name, layer in network.layers.items():
        down, up = (read[f"{names[name]}.lora_{side}.weight"].flatten(1) for side in "AB")
        assert torch.allclose((up @ down).view(layer.delta_weight().shape), layer.delta_weight(), atol=1e-6)


def test_an_alpha_of_the_rank_changes_no_bit_and_others_go_half_on_each_side():
    tensors = {"a.lora_down.weight": torch.rand(3, 5), "a.lora_up.weight": torch.rand(4, 3)}
    for alpha, factor, sign in ((3.0, 1.0, 1), (12.0, 2.0, 1), (0.75, 0.5, 1), (-12.0, 2.0, -1)):
        renamed = peft_tensors({**tensors, "a.alpha": torch.tensor(alpha)}, {"a": "b.c"})
        assert torch.equal(renamed["b.c.lora_A.weight"], factor * tensors["a.lora_down.weight"])
        assert torch.equal(renamed["b.c.lora_B.weight"], sign * factor * tensors["a.lora_up.weight"])


def test_a_refused_file_leaves_the_old_one_as_it_was(network, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"the old file")

    def refuse(file):
        assert load_file(file)
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        save_lora(path, network.tensors(), {}, verify=refuse)
    assert path.read_bytes() == b"the old file" and len(list(tmp_path.iterdir())) == 1


def test_overflow_and_differences_are_errors(network, tmp_path):
    tensors = dict(network.tensors())
    name = next(k for k in tensors if k.endswith("lora_up.weight"))
    with pytest.raises(ValueError, match=f"{name} overflows float16"):
        save_lora(tmp_path / "a.safetensors", {**tensors, name: tensors[name] * 1e7}, {})
    save_lora(tmp_path / "a.safetensors", tensors, {})
    with pytest.raises(ValueError, match="has delta norm"):
        verify_lora(tmp_path / "a.safetensors", {**tensors, name: tensors[name] * 1.1}, "float16")
    del tensors[name]
    with pytest.raises(ValueError, match="holds other tensors"):
        verify_lora(tmp_path / "a.safetensors", tensors, "float16")


def test_a_taken_name_gets_a_number(tmp_path):
    assert unused_path(tmp_path / "a.safetensors").name == "a.safetensors"
    (tmp_path / "a.safetensors").touch()
    (tmp_path / "a-2.safetensors").touch()
    assert unused_path(tmp_path / "a.safetensors").name == "a-3.safetensors"


def test_a_save_is_exported_with_its_words_and_overwrites_nothing(tmp_path, capsys):
    run = make_run(tmp_path / "runs", "done", saves=(2, 4, 8), finished=4)
    to = tmp_path / "out" / "mine.safetensors"
    command = ["export", "done", "--to", str(to), "--folder", str(run.path.parent)]
    assert main(command) == 0
    tensors = load_file(to)
    assert tensors.keys() == LORA.keys() and all(torch.equal(tensors[name], 4 * LORA[name]) for name in LORA)
    assert torch.equal(load_file(to.with_name("mine-moss.safetensors"))["emb_params"], WORD["emb_params"])
    del tensors  # which is the file itself, so that Windows would keep it
    assert metadata_in(to)["ss_output_name"] == "mine"
    before = to.read_bytes()
    assert main([*command, "--step", "8"]) == 2 and "exists already" in capsys.readouterr().err
    assert to.read_bytes() == before
    assert main([*command, "--step", "8", "--overwrite"]) == 0 and to.read_bytes() != before
    other = make_run(run.path.parent, "other", "b", saves=(4,), finished=4)
    whole = to.read_bytes()
    assert main(["export", "other", "--to", str(to), "--folder", str(run.path.parent), "--overwrite"]) == 2
    assert f"is not of the run {other.path.name}" in capsys.readouterr().err and to.read_bytes() == whole
    lora = run.path / "checkpoints" / "step-00000002" / "lora.safetensors"
    lora.write_bytes(lora.read_bytes()[:-1] + b"!")
    assert main([*command, "--step", "2", "--overwrite"]) == 2 and "is damaged" in capsys.readouterr().err


def test_a_copy_that_is_not_what_it_should_be_takes_no_other_files_place(tmp_path):
    source, path = tmp_path / "source.safetensors", tmp_path / "taken.safetensors"
    save_file(LORA, source, {"modelspec.title": "x"})
    path.write_bytes(b"the old one")

    def lossy(tensors, path, metadata):
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata)

    with mock.patch.object(write, "save_file", lossy), pytest.raises(OSError, match="differs from its source"):
        write.copy_lora(source, path)
    assert path.read_bytes() == b"the old one" and len(list(tmp_path.iterdir())) == 2
