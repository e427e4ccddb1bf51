"""Frozen weights that stay in the model's file: the same bits, less memory, and a file that changes is noticed."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from prepared import NeverLoaded
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint_tensors
from tiny_runs import change, run, run_with_notes, tiny_config

from lora_atelier.trainer_core.config import BeneathConfig, ConnectedConfig, MemoryConfig
from lora_atelier.trainer_core.memory import IN_FILE, rungs
from lora_atelier.trainer_core.models.files.safetensors_file import read_header, stored_part
from lora_atelier.trainer_core.preflight import memory as preflight
from lora_atelier.trainer_core.preflight.memory import check_in_file

pytestmark = pytest.mark.usefixtures("each_estimate_once")
FILE = {"checkpointing": "full", "offload_weights": IN_FILE}


@pytest.fixture
def config(tmp_path, pictures):
    """Give a run on a checkpoint of its own, in float16, whose layers are trained as DoRA."""
    path = tmp_path / "own.safetensors"
    save_file({name: tensor.half() for name, tensor in checkpoint_tensors().items()}, path)
    return tiny_config(path, pictures, lora={"dora": True}, train={"steps": 3, "save_dtype": "float32"})


def same(one, other):
    ours, theirs = load_file(one.path), load_file(other.path)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_reads_weights_from_the_file_bit_for_bit_and_says_how_fast(config, tmp_path):
    held = run(change(config, memory={"checkpointing": "full"}), tmp_path / "held", tmp_path / "cache")
    found, notes = run_with_notes(change(config, memory=FILE), tmp_path / "found", tmp_path / "cache")
    assert found.losses == held.losses and same(found, held)
    (before,) = (note for note in notes if "of frozen weights stay in own.safetensors" in note)
    assert "up to 3 times, as blocks are recomputed" in before and " a second. Each step" in before
    within, after = (note for note in notes if note.startswith("Each step read"))
    assert "of own.safetensors at" in after and "and waited" in within
    assert any("with gradient checkpointing full, the weights in their file." in note for note in notes)


def cut(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)


def replaced(path):
    """Put another file of the same size and time in its place."""
    stat = path.stat()
    shutil.copyfile(path, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    path.with_suffix(".new").replace(path)


def written_to(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\0\0\0")


@pytest.mark.parametrize("happens", [cut, replaced, written_to, Path.unlink])
def test_a_file_that_changes_is_read_no_further(happens, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(3, 5), "other": torch.zeros(2)}, path)
    stored = stored_part(read_header(path))["weight"]
    assert torch.equal(stored.read(), torch.ones(3, 5)) and stored.size == 60 == stored.file.bytes
    happens(path)
    with pytest.raises(ValueError, match=r"^model.safetensors changed while it was read; start again when nothing"):
        stored.read()


def test_a_run_ends_with_one_sentence_when_its_file_changes(config, tmp_path):
    path = Path(config.base_model.path)
    with pytest.raises(ValueError, match=r"^own.safetensors changed while it was read"):
        run(change(config, memory=FILE), tmp_path, step=lambda _: cut(path))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"base_model": {"weights": "float8"}}, "weights of Load Base Model asks for another"),
        ({"lora": {"beneath": (BeneathConfig(path="any.safetensors"),)}}, "a LoRA beneath changes the weights"),
        ({"base_model": {"connected": ConnectedConfig()}}, "ComfyUI reads the weights of a connected model itself"),
    ],
)
def test_what_the_file_does_not_have_is_refused(parts, words, config):
    with pytest.raises(ValueError, match=f"^Weights cannot stay in their file: .*{words}.*; set offload_weights of M"):
        check_in_file(change(config, memory=FILE, **parts))
    check_in_file(change(config, **parts))


def test_weights_that_ram_cannot_hold_stay_in_their_file(config, tmp_path, monkeypatch):
    """On a CPU after all that can be recomputed is; beside a card where RAM is too small for what waits there."""
    room = {"cpu": 2**40, "cuda": 2**40}
    monkeypatch.setattr(preflight, "free_bytes", lambda device: room[device.type])
    planned = run(config, tmp_path).plan

    def chosen(device, config=config):
        outline = preflight.outline_run(config)
        return preflight.fit_memory(config, planned, outline, torch.device(device))

    assert all(each.offload_weights != IN_FILE for each in chosen("cpu")[0])
    ladder = rungs(MemoryConfig(), torch.device("cpu"))
    assert [each.checkpointing for each in chosen("cpu")[0]] == [each.checkpointing for each in ladder]
    assert all(each.offload_weights != IN_FILE for each in chosen("cuda")[0])
    room["cpu"] = 1000
    assert {each.offload_weights for each in chosen("cuda")[0]} == {IN_FILE}
    outline = preflight.outline_run(config)
    shape = preflight.largest_micro_batch(config, planned, outline.base)
    least = preflight.estimate_run(config, outline, ladder[-1], shape, torch.device("cpu"))
    room["cpu"] = least.total - least.weights // 2
    (found,), said = chosen("cpu")
    assert (found.checkpointing, found.offload_weights) == (ladder[-1].checkpointing, IN_FILE)
    assert "segments of 4, the weights in their file." in said
    fixed = change(config, memory={"offload_weights": "none"})
    with pytest.raises(ValueError, match="set gradient checkpointing segments of 4, the weights in their file"):
        run(fixed, tmp_path, source=NeverLoaded(config.base_model))


@pytest.mark.thorough
def test_a_model_takes_less_memory_than_its_weights(tmp_path):
    """Counted by the system, in a process of its own: loading and three passes forward and back."""
    from diffusers import UNet2DConditionModel

    from lora_atelier.trainer_core.models.sd.names import unet_ldm_names

    with torch.device("meta"):
        wide = UNet2DConditionModel(
            block_out_channels=(256, 512, 1024),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=64,
            attention_head_dim=8,
        ).state_dict()
    names = unet_ldm_names(wide, 1)
    tensors = {name: tensor for name, tensor in checkpoint_tensors().items() if "diffusion_model" not in name}
    tensors |= {f"model.diffusion_model.{names[name]}": 0.01 * torch.randn(each.shape) for name, each in wide.items()}
    path = tmp_path / "wide.safetensors"
    save_file(tensors, path)
    script = textwrap.dedent(f"""
        import sys
        import torch
        from lora_atelier.trainer_core.config import BaseModelConfig, MemoryConfig
        from lora_atelier.trainer_core.memory import Stream, leave_in_file, prepare
        from lora_atelier.trainer_core.models.sd import load_base_model
        from clip_tokenizer import TOKENIZER
        import diffusers.models.unets.unet_2d_condition, transformers.models.clip.modeling_clip

        def status(name):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

        torch.ones(64, 64, requires_grad=True).square().sum().backward()
        before, in_file = status("VmRSS"), sys.argv[1] == "file"
        base = load_base_model(BaseModelConfig(path={str(path)!r}, tokenizer=TOKENIZER), in_file=in_file)
        left = leave_in_file(base.unet)
        assert bool(left) == in_file
        memory = MemoryConfig(checkpointing="full", offload_weights="file" if in_file else "none")
        prepare(base, memory, "auto", torch.device("cpu"), Stream(torch.device("cpu")))
        for _ in range(3):
            latents = torch.randn(1, 4, 16, 16, requires_grad=True)
            found = base.unet(latents, torch.tensor([5]), encoder_hidden_states=torch.randn(1, 8, 64)).sample
            found.sum().backward()
        print(status("VmHWM") - before)
    """)

    def peak(kind):
        search = os.pathsep.join(map(str, (Path(__file__).parents[1], *filter(None, sys.path))))
        done = subprocess.run(
            [sys.executable, "-c", script, kind],
            env={**os.environ, "PYTHONPATH": search},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    size = path.stat().st_size
    assert size > 800e6
    assert peak("file") < 0.7 * size < size < peak("none")
