"""Two processes that share the micro-batches of a step give what one gives: weights, optimizer state, losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import worlds
from recipes.recipes import Material
from safetensors.torch import load_file

from lora_atelier.trainer_core.common.files import remove_folder
from lora_atelier.trainer_core.common.tensor_tree import load_state, pack
from lora_atelier.trainer_core.config import EmbeddingConfig
from lora_atelier.trainer_core.runs import find_runs

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked: Unix only")

ROOT = Path(__file__).resolve().parents[2]
CLOSE = 1e-6  # relative: sums in another order
KILLED = 20  # sessions of a run by torchrun, with `--thorough`
CANCELLED = 1e-4  # the same of both ends of pairs, whose gradients nearly cancel while their rounding does not
TWO = {"accumulate": 2, "steps": 2}
WORDS = (
    EmbeddingConfig(token="thing", vectors=2, init="creature", learning_rate=3e-2).to_dict(),
    EmbeddingConfig(token="green", vectors=1, learning_rate=3e-2, stop=2, keep_norm=True).to_dict(),
)

# Of two micro-batches each process has one, and a sum of two numbers has no order: these are equal to the last bit.
EXACT = {
    "text encoders, embeddings, masks with prior, dropouts, average, pictures that weigh less": {
        "recipe": "masks with prior",
        "lora": {"embeddings": WORDS, "dropout": 0.2, "scale_weight_norms": 0.2},
        "optimizer": {"text_encoder_learning_rate": 1e-2, "ema_decay": 0.8},
        "objective": {"easy_weight": 0.125, "odd_pictures": "leave_out"},
        "train": {**TWO, "steps": 4},
        "watched": {"BINS": 1, "LOOK": 1, "KEPT": 2, "FEWEST": 2, "FENCE": 0.0},  # looks at each visit
    },
    "words of some captions": {  # of which a process may have no gradient
        "recipe": "sd1",
        "lora": {"preset": "attn-only", "embeddings": WORDS[1:]},
        "train": {**TWO, "batch_size": 1, "steps": 3},
    },
    "bfloat16, stratified levels, uncertainty, prior prediction": {
        "recipe": "prior prediction",
        "lora": {"dtype": "bfloat16"},
        "objective": {"stratified_timesteps": True, "uncertainty_rate": 0.05},
        "train": TWO,
    },
    "inpainting, best by validation, stratified levels, uncertainty": {
        "recipe": "inpainting",
        "objective": {"stratified_timesteps": True, "uncertainty_rate": 0.05},
        "train": {**TWO, "validate_every": 1, "keep_best": True},
        "own_cache": True,
    },
    "one micro-batch": {"recipe": "resumed", "train": {"steps": 3}},
    "frozen layers in 8 bits": {"recipe": "sd1", "memory": {"compute": "int8"}, "train": {"accumulate": 2, "steps": 3}},
    "nothing kept of encodings": {
        "recipe": "masks with prior",
        "optimizer": {"text_encoder_learning_rate": 0.0},
        "train": {**TWO, "validate_every": 1},
        "memory": {"encodings": "none"},
        "own_cache": True,
    },
}
FIRST, INPAINTING = (name for name in EXACT if name.startswith(("text encoders", "inpainting")))
# The same in another order, and shares of unequal size. A pair has two backward passes, so each process has a sum.
SUMMED = {
    "slider of pairs": {"recipe": "slider of pairs", "train": {"steps": 2}, "own_cache": True},
    "three of several resolutions": {"recipe": "accumulated, several resolutions", "train": {"steps": 3}},
    "three and one in the last step": {  # in which a process has none
        "recipe": "resumed",
        "train": {"accumulate": 3, "batch_size": 1, "epochs": 1, "steps": 1},
    },
}
PLAIN = {"recipe": "resumed", "scheduler": {"warmup_steps": 1}, "train": TWO}
# Shares of unequal size are those of three and one; each process encodes its own in two other cases. The first
# case has a word of some captions, too. A Cancel is an error in one process, and memory runs out in another part; a
# pause comes as a stop does.
AGAIN = (
    *("three of several resolutions", "nothing kept of encodings", "words of some captions", "frozen layers in 8 bits"),
    *("cancelled", "memory of an update", "slider of pairs", "one micro-batch"),
    *("bfloat16, stratified levels, uncertainty, prior prediction", "paused in a page", "leader failed"),
)


def fails(process, where, calls, kind="error"):
    """Return a job in which something fails in one process."""
    return {**PLAIN, "fails": {"process": process, "where": where, "calls": calls, "kind": kind}}


JOBS = {
    **EXACT,
    **SUMMED,
    "stopped": {**PLAIN, "in": "stopped", "asked": {"1": ["save", "stop"]}},
    "paused in a page": {**PLAIN, "wishes": {"1": "pause"}},
    "cancelled": {**PLAIN, "cancel": 1},
    "failed": fails(1, "read_batch", 2),
    "leader failed": fails(0, "save", 1),
    "other pictures": {**PLAIN, "other_pictures": 1},
    "memory of passes": fails(1, "read_batch", 1, "memory"),
    "memory of an update": fails(1, "step", 1, "memory"),
    "resumed by two": {**PLAIN, "in": "begun by one"},
    "killed": fails(1, "read_batch", 2, "killed"),
}


def in_every_run(names):
    """Leave the cases of AGAIN to --thorough."""
    return [pytest.param(name, marks=pytest.mark.thorough if name in AGAIN else ()) for name in names]


@pytest.fixture(scope="module")
def scene(tmp_path_factory, comfyui, pytestconfig):
    """Carry out all jobs by two processes, and meanwhile those to compare by this one."""
    left_out = () if pytestconfig.getoption("thorough") else AGAIN
    jobs = {name: job for name, job in JOBS.items() if name not in left_out}
    folder, tokenizer = tmp_path_factory.mktemp("world"), comfyui / "comfy" / "sd1_tokenizer"
    material, threads = Material(folder / "material", tokenizer), torch.get_num_threads()
    torch.set_num_threads(worlds.THREADS)
    for job in jobs.values():  # before two processes write the same files
        worlds.configure(worlds.recipe_of(job), material)
    worlds.carry_out({**PLAIN, "asked": {"1": ["stop"]}}, material, folder / "begun by one")
    (run,) = find_runs(folder / "begun by one" / "runs")
    command = ["train", str(run.path / "run.json"), "--output", str(folder / "command"), "--device", "cpu", "--json"]
    (folder / "command.json").write_text(json.dumps(command))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    processes = worlds.start(folder, tokenizer)
    for name in (jobs.keys() & {**EXACT, **SUMMED}.keys()) | {"plain"}:
        job = jobs.get(name, PLAIN)
        own = {
            key: value for key, value in job.get("memory", {}).items() if key != "encodings"
        }  # those are on the disk
        worlds.carry_out({**job, "memory": own}, material, folder / "alone" / name)
    assert processes.wait(timeout=300) == 0
    worlds.carry_out(PLAIN, material, folder / "stopped")
    torch.set_num_threads(threads)
    assert json.loads((folder / "codes.json").read_text()) == [0, -signal.SIGKILL]
    return folder


def told(scene, name, number=0):
    """Return the result of a job in one process."""
    return json.loads((scene / f"{name}-{number}.json").read_text())


def states(folder):
    """Return the tensors and the other values of the newest save by file, but for the number of saves."""
    (run,) = find_runs(folder / "runs")
    path = run.checkpoints()[0].path
    states = {name: load_state(path / f"{name}.safetensors") for name in ("weights", "optimizer", "history")}
    del states["weights"]["saves"]
    return {name: pack(state) for name, state in states.items()}


def equal(folder, other):
    """Tell whether two runs hold the same bits."""
    found, wanted = states(folder), states(other)
    return all(
        found[name][1] == values
        and found[name][0].keys() == tensors.keys()
        and all(torch.equal(found[name][0][key].nan_to_num(7.0), t.nan_to_num(7.0)) for key, t in tensors.items())
        for name, (tensors, values) in wanted.items()
    )


def learned(folder):
    """Return all that a run has learned, as one vector: the factors that begin with 0."""
    tensors = states(folder)["weights"][0]
    return torch.cat([tensor.double().flatten() for name, tensor in tensors.items() if name.endswith(".up")])


@pytest.mark.parametrize("name", in_every_run(EXACT))
def test_two_processes_give_the_bits_of_one(scene, name):
    assert told(scene, name)["error"] == told(scene, name, 1)["error"] == ""
    assert equal(scene / name, scene / "alone" / name)


def test_two_processes_leave_out_the_same_pictures(scene):
    history = states(scene / FIRST)["history"][0]
    assert (history[".fits.seen"][1] > 1).any() and "is left out after step" in str(told(scene, FIRST))


@pytest.mark.parametrize("name", in_every_run(SUMMED))
def test_sums_in_another_order_give_the_same_run(scene, name):
    found, wanted = learned(scene / name), learned(scene / "alone" / name)
    assert wanted.norm() > 0
    close = CANCELLED if name == "slider of pairs" else CLOSE
    assert (found - wanted).norm() <= close * wanted.norm()
    losses, others = told(scene, name)["losses"], states(scene / "alone" / name)["history"][0][".losses"].tolist()
    assert losses == pytest.approx(others, rel=close, abs=0)


def test_each_process_encodes_its_share(scene):
    counts = [told(scene, INPAINTING, number)["encoded"] for number in (0, 1)]
    assert min(counts) > 0 and abs(counts[0] - counts[1]) <= 1


def test_the_validation_loss_is_that_of_one_process(scene):
    assert len(told(scene, INPAINTING)["validation"]) == 3  # measured in halves, one picture each
    assert equal(scene / INPAINTING, scene / "alone" / INPAINTING)


def test_a_process_without_a_micro_batch_is_named(scene):
    (note,) = [note for note in told(scene, "three and one in the last step")["notes"] if "share" in note]
    assert "set accumulate of Train LoRA to a multiple of 2" in note
    assert not any("share" in note for note in told(scene, "stopped")["notes"])


@pytest.mark.thorough
def test_a_pause_through_the_folder_ends_both(scene):
    assert [told(scene, "paused in a page", number)["error"] for number in (0, 1)] == ["Paused: ", "Paused: "]
    (run,) = find_runs(scene / "paused in a page" / "runs")
    assert run.checkpoints()[0].step == 1


def test_stop_and_save_reach_both_and_one_resumes_to_the_same_bits(scene):
    assert told(scene, "stopped")["finished"] is False
    assert told(scene, "stopped", 1)["error"] == ""
    assert any("Saved after step 1" in note for note in told(scene, "stopped")["notes"])
    assert not told(scene, "stopped", 1)["notes"]
    assert equal(scene / "stopped", scene / "alone" / "plain")  # one process has resumed it


def test_two_resume_what_one_has_begun(scene):
    assert equal(scene / "begun by one", scene / "alone" / "plain")


@pytest.mark.parametrize(
    ("name", "number", "error", "other", "step"),
    [
        pytest.param(
            *("cancelled", 0, "Cut: Cancel", "ProcessFailed: Process 0 of 2 failed: Cancel", 1),
            marks=pytest.mark.thorough,
        ),
        ("failed", 1, "RuntimeError: the disk is gone", "ProcessFailed: Process 1 of 2 failed: the disk is gone", 1),
        pytest.param(
            *("leader failed", 0, "RuntimeError: the disk is gone"),
            *("ProcessFailed: Process 0 of 2 failed: the disk is gone", 2),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_error_in_one_process_ends_both_and_the_run_is_saved(scene, name, number, error, other, step):
    assert told(scene, name, number)["error"] == error
    assert told(scene, name, 1 - number)["error"] == other
    (run,) = find_runs(scene / name / "runs")
    assert [(c.step, c.problem()) for c in run.checkpoints()][:1] == [(step, "")]


def test_a_killed_process_ends_the_other_with_a_sentence_and_the_run_is_saved(scene):
    sentence = "ProcessFailed: Of the 2 processes of this run, process 1 was killed or has crashed."
    assert told(scene, "killed")["error"] == sentence
    (run,) = find_runs(scene / "killed" / "runs")
    assert [(c.step, c.problem()) for c in run.checkpoints()] == [(1, "")]


def test_processes_with_other_pictures_are_refused(scene):
    for number in (0, 1):
        error = told(scene, "other pictures", number)["error"]
        assert error.startswith("ValueError: Process 1 on ")
        assert "other captions, masks, pictures than process 0" in error or "other captions, pictures than" in error


@pytest.mark.parametrize("name", in_every_run(["memory of passes", "memory of an update"]))
def test_a_process_out_of_memory_repeats_the_step_with_less(scene, name):
    assert told(scene, name)["error"] == told(scene, name, 1)["error"] == ""
    found, wanted = learned(scene / name), learned(scene / "alone" / "plain")
    assert (found - wanted).norm() <= CLOSE * wanted.norm()


def talks_of_the_run(scene, printed):
    """Tell whether the lines of JSON that one of two processes has printed are of the run that one process trains."""
    events = [json.loads(line) for line in printed]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    (result,) = [event for event in events if event["event"] == "result"]
    found, wanted = load_file(result["lora"]), load_file(scene / "alone" / "plain" / "lora.safetensors")
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_the_command_trains_the_run_of_one_process_where_torchrun_starts_it(scene):
    (*printed, code), silent = ((scene / f"command-{number}.txt").read_text().splitlines() for number in (0, 1))
    assert code == "0" and silent == ["0"] and talks_of_the_run(scene, printed)


def torchrun(scene, folder):
    """Begin the run that one process has trained by a real torchrun, in two processes."""
    (run,) = find_runs(scene / "alone" / "plain" / "runs")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = [ROOT / "__main__.py", "train", run.path / "run.json", "--output", folder, "--device", "cpu", "--json"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(worlds.THREADS)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launch, *train], env=env, **pipes)


@pytest.mark.thorough  # in every run two processes have what torchrun would tell them
def test_torchrun_trains_by_the_command_the_run_of_one_process(scene, tmp_path):
    printed, said = (process := torchrun(scene, tmp_path)).communicate(timeout=300)
    assert process.returncode == 0, said
    assert talks_of_the_run(scene, printed.splitlines())


@pytest.mark.thorough
def test_torchrun_whose_processes_are_killed_at_any_moment_ends_with_the_same_lora(scene, tmp_path):
    """Each session goes on from what the killed one before has left, or begins again where that had ended."""
    alone = load_file(scene / "alone" / "plain" / "lora.safetensors")
    began, seconds, finished = time.monotonic(), 0.0, 0
    for number in range(KILLED + 2):
        process = torchrun(scene, tmp_path / "runs")
        while len(ranks := psutil.Process(process.pid).children()) < 2 and process.poll() is None:
            time.sleep(0.05)
        if 0 < number <= KILLED:
            time.sleep(seconds * number / KILLED)
            with suppress(psutil.NoSuchProcess):
                ranks[number % 2].kill()
        printed, said = process.communicate(timeout=300)
        results = [json.loads(line) for line in printed.splitlines() if '"event": "result"' in line]
        assert results or 0 < number <= KILLED, said
        seconds = seconds or time.monotonic() - began
        if results:
            finished += 1
            found = load_file(results[0]["lora"])
            assert found.keys() == alone.keys() and all(torch.equal(found[key], alone[key]) for key in alone)
            assert not [*tmp_path.rglob(".*.tmp")]
            remove_folder(tmp_path / "runs")
    assert finished < KILLED  # else nothing was killed
