"""Averages of a run's saves."""

import numpy as np
import pytest
import torch
from run_folders import LORA, make_run
from safetensors.torch import load_file, save_file

from lora_atelier.trainer_core.lora_files.average import average_saves, average_weights, mean_of_seeds
from lora_atelier.trainer_core.runs.cli import main
from lora_atelier.trainer_core.runs.export import loras_of_seeds


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


def test_the_mean_of_seeds_is_that_of_their_changes(tmp_path):
    draws, files, changes = torch.Generator().manual_seed(1), [], []
    for seed in (7, 3, 5):
        up, down = (torch.randn(shape, generator=draws) for shape in ((6, 2), (2, 5)))
        tensors = {"a.lora_up.weight": up, "a.lora_down.weight": down, "a.alpha": torch.tensor(1.0)}
        save_file(tensors, tmp_path / f"{seed}.safetensors", {"ss_steps": "9"})
        files.append((seed, tmp_path / f"{seed}.safetensors"))
        changes.append(0.5 * up @ down)
    mean = sum(changes) / 3
    for rank in (0, 2):
        made, report = mean_of_seeds(files, rank)
        up, down, alpha = made["a.lora_up.weight"], made["a.lora_down.weight"], float(made["a.alpha"])
        assert len(down) == (rank or 6) and made.metadata["ss_network_dim"] == str(rank or 6)
        u, sigma, vt = torch.linalg.svd(mean)
        nearest = (u[:, :5] * sigma) @ vt if not rank else (u[:, :rank] * sigma[:rank]) @ vt[:rank]
        torch.testing.assert_close(alpha / len(down) * up @ down, nearest, rtol=1e-4, atol=1e-5)
        assert (
            f"3 seeds: 7, 3, 5. Kept {100 if not rank else float(sigma[:2].norm() / sigma.norm()) * 100:.1f}" in report
        )


def about(seed, **changes):
    inputs = {"lora": "1", "optimizer": "1", "train": str(seed), **changes.pop("inputs", {})}
    return {"config": {"train": {"seed": seed, "steps": 8, "log": "none", **changes}}, "inputs": inputs}


def test_runs_that_differ_by_their_seed_alone_are_found(tmp_path):
    made = {
        name: make_run(tmp_path, name, saves=saves, finished=finished, **about(seed, **changes))
        for name, seed, saves, finished, changes in (
            ("own", 4, (4, 8), 8, {}),
            ("log", 2, (8,), 8, {"log": "csv"}),
            ("again", 2, (8,), 8, {}),
            ("unfinished", 5, (4,), None, {}),
            ("longer", 6, (8,), 8, {"steps": 16}),
            ("rate", 7, (8,), 8, {"inputs": {"optimizer": "2"}}),
        )
    }
    older = make_run(tmp_path, "older", saves=(8,), finished=8)
    found = loras_of_seeds(made["own"], [made["log"], *made.values(), older])
    assert [(seed, path.parents[2]) for seed, path in found] == [(2, made["log"].path), (4, made["own"].path)]
    assert "8" in found[1][1].parent.name
    for alone in (made["rate"], made["longer"], older):
        with pytest.raises(ValueError, match=r"has [01] finished run of its settings; train it with another seed of"):
            loras_of_seeds(alone, [*made.values(), older])


def test_seeds_that_hold_out_other_pictures_are_refused_by_the_name_of_the_setting(tmp_path):
    def trained(name, seed, share, pictures, **inputs):
        changes = {"validation_share": share, "inputs": {"pictures": pictures, **inputs}}
        return make_run(tmp_path, name, saves=(8,), finished=8, **about(seed, **changes))

    held, plain, rate = 0.2, 0.0, {"optimizer": "2"}
    runs = [trained("a", 1, held, "x"), trained("b", 2, held, "y"), trained("c", 3, held, "z", **rate)]
    runs += [trained("d", 1, plain, "x"), trained("e", 2, plain, "y")]
    with pytest.raises(
        ValueError, match=r"a and .* as validation_share of Validation holds out .* role of .* is valid"
    ):
        loras_of_seeds(runs[0], runs)
    for other in runs[2:4]:  # one of other settings; pictures that the seed has not chosen
        with pytest.raises(ValueError, match="train it with another seed of"):
            loras_of_seeds(other, runs)


def test_seeds_are_averaged_by_a_command(tmp_path, capsys):
    for seed in (1, 2):
        make_run(tmp_path / "runs", f"seed{seed}", saves=(8,), finished=8, **about(seed))
    to = tmp_path / "mean.safetensors"
    assert main(["average", "seed1", "--seeds", "--folder", str(tmp_path / "runs"), "--to", str(to)]) == 0
    assert "The mean of 2 seeds: 1, 2. Kept 100.0% of it." in capsys.readouterr().out
    assert len(load_file(to)["lora_unet_a.lora_down.weight"]) == 2


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
