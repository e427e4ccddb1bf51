"""Averages of a run's saves."""

import numpy as np
import pytest
import torch
from run_folders import LORA, make_run
from safetensors.torch import load_file, save_file

from lora_atelier.trainer_core.lora_files.average import average_saves, average_weights
from lora_atelier.trainer_core.runs.cli import main


@pytest.mark.parametrize("width", [0.05, 0.1, 0.2, 0.28])
def test_shares_are_those_of_a_profile_of_this_width(width):
    steps = list(range(1, 2001))
    shares = np.array(average_weights(steps, width))
    at = np.array(steps) / steps[-1]
    mean = (shares * at).sum()
    assert shares.sum() == pytest.approx(1)
    assert np.sqrt((shares * (at - mean) ** 2).sum()) == pytest.approx(width, rel=0.01)
    assert (np.diff(shares[1:-1]) >= 0).all()


def test_the_widest_average_takes_all_steps_alike_and_the_narrowest_the_last_save():
    assert average_weights([10, 20, 30], 0.28867)[0] == pytest.approx(15 / 30, rel=0.01)
    assert average_weights([10, 20, 30], 0.001)[-1] == pytest.approx(1)
    for width in (0, 0.3, -1, float("nan")):
        with pytest.raises(ValueError, match="width of Average Saves"):
            average_weights([1, 2], width)


def write(folder, step, rank=2):
    path = folder / f"{step}.safetensors"
    tensors = {"a.lora_down.weight": torch.full((rank, 4), float(step)), "a.lora_up.weight": torch.ones(3, rank).half()}
    save_file({**tensors, "a.alpha": torch.tensor(1.0)}, path, {"ss_steps": str(step)})
    return step, path


def test_factors_are_averaged_and_the_last_save_s_metadata_stay(tmp_path):
    saves = [write(tmp_path, step) for step in (30, 10, 20)]
    averaged, shares = average_saves(saves, 0.2)
    assert shares == average_weights([10, 20, 30], 0.2)
    expected = sum(share * step for share, step in zip(shares, (10, 20, 30), strict=True))
    layer = averaged.layers["a"]
    torch.testing.assert_close(layer.tensors["down"], torch.full((2, 4), float(expected)))
    assert layer.tensors["up"].dtype == torch.float16 and layer.alpha == 1 and averaged.metadata == {"ss_steps": "30"}


def test_one_save_or_saves_of_several_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs two saves or more; the run has 1 save"):
        average_saves([write(tmp_path, 1)], 0.1)
    with pytest.raises(ValueError, match="average saves of one run"):
        average_saves([write(tmp_path, 1), write(tmp_path, 2, rank=3)], 0.1)


def test_a_run_is_averaged_by_a_command(tmp_path, capsys):
    make_run(tmp_path / "runs", "done", saves=(2, 4, 8), finished=8)
    command = ["average", "done", "--folder", str(tmp_path / "runs"), "--to", str(tmp_path / "mean.safetensors")]
    assert main([*command, "--width", "0.2"]) == 0
    assert "step 8: " in capsys.readouterr().out
    shares = average_weights([2, 4, 8], 0.2)
    expected = sum(share * step for share, step in zip(shares, (2, 4, 8), strict=True))
    read = load_file(tmp_path / "mean.safetensors")
    for name, tensor in LORA.items():
        torch.testing.assert_close(read[name], expected * tensor)
    assert main(command) == 2 and "exists already" in capsys.readouterr().err
