"""A run that is cut off goes on to the last bit, whatever it trains, by whatever optimizer, wherever it is cut."""

from __future__ import annotations

import functools
import gc
import json
import math
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from durable import Cut, curves, cut_at, cut_inside, equal, same, state_files
from PIL import Image, ImageOps
from tiny_runs import change, run, run_with_notes, tiny_config

from lora_atelier.trainer_core.common.files import file_digest, remove_folder
from lora_atelier.trainer_core.common.tensor_tree import load_state, save_state
from lora_atelier.trainer_core.config import (
    ALGORITHMS,
    OPTIMIZERS,
    AugmentConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    MaskConfig,
    OptimizerConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data import fit
from lora_atelier.trainer_core.optim import noise_scale as gradient_noise
from lora_atelier.trainer_core.runs import PICTURES, describe_in_detail, find_runs
from lora_atelier.trainer_core.training import prepare, validate

DRAWN = SampleConfig(prompts=("a thing",), steps=1, width=32, height=32)
pytestmark = pytest.mark.usefixtures("no_estimates")
WORD = EmbeddingConfig(token="thing", vectors=2, learning_rate=1e-1, stop=2, keep_norm=True)


@pytest.fixture(scope="module", autouse=True)
def few_levels():
    """Validate at two noise levels: where a run goes on does not depend on their number."""
    with mock.patch.object(validate, "TIMES", (0.3, 0.7)):
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Let the garbage collection at the end of each run pass over what the imports have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def config(checkpoint, pictures, tmp_path_factory):
    kept = tmp_path_factory.mktemp("kept")
    for name in ("0.png", "0.txt"):
        shutil.copy(pictures / name, kept)
    for path in pictures.glob("[0-9].png"):
        (kept / "less").mkdir(exist_ok=True)
        ImageOps.invert(Image.open(path)).save(kept / "less" / path.name)
    varied = ConceptConfig(
        folder=str(pictures),
        flip=True,
        captions=CaptionConfig(dropout=0.2, shuffle=True, tag_dropout=0.2),
        masks=MaskConfig(missing="ones", unmasked_probability=0.2),
        augment=AugmentConfig(variants=2, crop_jitter=0.5),
    )
    return tiny_config(
        checkpoint,
        varied,
        ConceptConfig(folder=str(kept), role="validation", recursive=False),
        existing={"on_existing": "resume"},
        optimizer={"learning_rate": 1e-2},
        train={
            "steps": 3,
            "batch_size": 1,
            "accumulate": 2,
            "buckets": BucketConfig(resolutions=("64", "96")),
            "seed": 5,
            "validate_every": 2,
            "log": "csv",
        },
        saves={"save_every": 1, "save_unit": "steps", "sample_every": 2},
    )


def after(step):
    """Cut after a step."""
    return {"step": cut_at(step)}


def killed(step):
    """Cut after a step in such a way that its save is not there: as a power cut leaves a run."""
    return {"step": cut_at(step), "lost": True}


def inside(step, checks):
    """Cut when it is asked for the n-th time after a step: in validation, a picture, or a micro-batch."""
    return cut_inside(step, checks)


def measured(step):
    """Cut when a measurement is told."""

    def validation(at, loss):
        if at == step:
            raise Cut

    return {"validation": validation}


ADAPTING = {"name": "prodigy", "learning_rate": 1.0, "options": {"separate": True, "d0": 1e-3}}
FREE = {"name": "prodigy_plus_schedule_free", "learning_rate": 1.0, "options": {"d0": 1e-3}}
AVERAGE = {"ema_decay": 0.5, "ema_every": 2}
TEXT = {"text_encoder_learning_rate": 1e-2}

# name -> (LoRA, optimizer, the rest of the configuration, where it is cut)
CASES = {
    "adamw, lora, every dropout, average": (
        {"dropout": 0.2, "rank_dropout": 0.2, "module_dropout": 0.2},
        AVERAGE,
        {"sample": DRAWN.to_dict()},
        lambda: (inside(1, 2), inside(2, 1)),  # in the second micro-batch, in a validation
    ),
    "adamw8bit": (
        {"rank": 64, "alpha": 8, "preset": "attn-mlp"},
        {"name": "adamw8bit"},
        {},
        lambda: (after(2),),
    ),
    "adafactor, DoRA": ({"dora": True}, {"name": "adafactor", "options": {"beta1": 0.9}}, {}, lambda: (killed(2),)),
    "came, LoHa": ({"algorithm": "loha"}, {"name": "came"}, {}, lambda: (after(1),)),
    "prodigy, LoKr, text encoder that stops": (
        {"algorithm": "lokr", "decompose_both": True},
        {**ADAPTING, "text_encoder_learning_rate": 0.5, "text_encoder_stop": 1},
        {},
        lambda: (after(1), killed(2)),
    ),
    "prodigy_plus_schedule_free, GLoRA, bfloat16": (
        {"algorithm": "glora", "dtype": "bfloat16"},
        FREE,
        {},
        lambda: (inside(2, 1),),
    ),
    "schedulefree_adamw, lora in bfloat16, best": (
        {"dtype": "bfloat16"},
        {"name": "schedulefree_adamw"},
        {"train": {"validate_every": 1, "keep_best": True}},
        lambda: (measured(1), after(2)),
    ),
    "lion, (IA)^3": (
        {"algorithm": "ia3", "preset": "attn-mlp"},
        {"name": "lion"},
        {"train": {"accumulate": 1, "batch_size": 2}},
        lambda: (after(2),),
    ),
    "lion8bit, whole differences": (
        {"algorithm": "full"},
        {"name": "lion8bit"},
        {"scheduler": {"name": "cosine"}, "prior": True},
        lambda: (after(2),),
    ),
    "ademamix8bit, whole differences": ({"algorithm": "full"}, {"name": "ademamix8bit"}, {}, lambda: (after(2),)),
    "sgd8bit, whole differences": ({"algorithm": "full"}, {"name": "sgd8bit"}, {}, lambda: (after(2),)),
    "rmsprop8bit, whole differences": ({"algorithm": "full"}, {"name": "rmsprop8bit"}, {}, lambda: (after(2),)),
    "adagrad8bit, whole differences": ({"algorithm": "full"}, {"name": "adagrad8bit"}, {}, lambda: (after(2),)),
    "adopt, OFT": ({"algorithm": "oft", "rank": 4, "constraint": 0.1}, {"name": "adopt"}, {}, lambda: (after(1),)),
    "sgd, BOFT": ({"algorithm": "boft", "rank": 4}, {"name": "sgd"}, {}, lambda: (after(2),)),
    "rmsprop, PiSSA, LoRA+": (
        {"init": "pissa", "dtype": "bfloat16"},
        {"name": "rmsprop", "lora_plus_ratio": 4.0, "options": {"momentum": 0.9, "centered": True}},
        {},
        lambda: (after(1),),
    ),
    "radam, rs-LoRA, norms, weights in 4 and 8 bits": (
        {"rs_lora": True, "train_norm": True},
        {"name": "radam", **TEXT},
        {
            "base_model": {"weights": "nf4", "text_weights": "int8"},
            "memory": {"checkpointing": "full", "offload_weights": "all", "offload_activations": "on"},
        },
        lambda: (after(2),),
    ),
    "muon, Tucker": ({"preset": "full", "tucker": True}, {"name": "muon"}, {}, lambda: (after(2),)),
    "soap, convolutions": ({"preset": "full"}, {"name": "soap"}, {}, lambda: (after(3),)),
    "automagic, LoRA+": ({"dtype": "bfloat16"}, {"name": "automagic", "lora_plus_ratio": 4.0}, {}, lambda: (after(3),)),
    "custom, scalar": (
        {"use_scalar": True, "algorithm": "loha"},
        {"name": "custom", "options": {"optimizer": "AdEMAMix"}},
        {},
        lambda: (after(2),),
    ),
    "learned word that stops, bounded norms, plain and average, early end": (
        {"embeddings": (WORD,), "scale_weight_norms": 0.05},
        {**TEXT, **AVERAGE, "text_encoder_stop": 2, "ema_output": "plain"},
        {
            "train": {
                "steps": 6,
                "validate_every": 1,
                "early_stop_patience": 2,
                "early_stop_min_improvement": 0.9,
            }
        },
        lambda: (inside(1, 2), measured(3)),
    ),
    "a rate that falls by plateaus, average": (
        {},
        AVERAGE,
        {
            "train": {
                "steps": 6,
                "validate_every": 1,
                "plateau_patience": 1,
                "early_stop_min_improvement": 0.9,
            }
        },
        lambda: (inside(1, 2), measured(3)),
    ),
    "guidance, preservation, ranks by timestep, uncertainty": (
        {"dropout": 0.2, "timestep_rank": 1, "init": "eva"},
        {},
        {
            "objective": {
                "guidance_loss": 3.0,
                "differential_guidance": 2.0,
                "preservation": "blank",
                "uncertainty_rate": 0.05,
            }
        },
        lambda: (inside(1, 1), after(2)),
    ),
    "slider": (
        {"dropout": 0.2, "init": "lora_ga", "channel_scaling": True},
        {},
        {
            "objective": {"slider": "prompts", "slider_positive": "old", "slider_keep": ["man", "woman"]},
            "train": {"validate_every": 0},
            "validated": False,
        },
        lambda: (inside(1, 1), after(2)),
    ),
    "slider of pairs": (
        {"dropout": 0.2},
        TEXT,
        {
            "paired": True,
            "objective": {"noise_offset": 0.1, "preservation": "blank"},
            "train": {"keep_best": True},
            "sample": DRAWN.to_dict(),
        },
        lambda: (inside(1, 2), inside(2, 1)),  # between both ends of a pair, in a validation
    ),
    "best of the average, prior of masks, stratified": (
        {"init": "orthogonal"},
        {"ema_decay": 0.9, "max_grad_value": 1e-3},
        {
            "train": {"validate_every": 1, "keep_best": True},
            "masks": {"prior_weight": 0.5},
            "sample": DRAWN.to_dict(),
            "objective": {"stratified_timesteps": True, "noise_offset": 0.05, "input_perturbation": 0.1},
        },
        lambda: (inside(1, 1), inside(3, 1)),
    ),
}

FIRST = next(iter(CASES))


def test_every_optimizer_and_network_has_its_case():
    optimizers = {optimizer.get("name", "adamw") for _, optimizer, _, _ in CASES.values()}
    paged = {name for name in OPTIMIZERS if name.startswith("paged_")}  # which need a GPU, see below
    assert optimizers | paged == set(OPTIMIZERS)
    algorithms = {lora.get("algorithm", "lora") for lora, *_ in CASES.values()}
    assert algorithms == set(ALGORITHMS)


def configure(config, lora, optimizer, rest):
    rest = dict(rest)
    if masks := rest.pop("masks", None):
        varied, *others = config.dataset.concepts
        varied = change(varied, masks=masks)
        config = config.replace(dataset=DatasetConfig(concepts=(varied, *others)))
    if rest.pop("paired", False):
        less = ControlConfig(folders=(str(Path(config.dataset.concepts[1].folder) / "less"),), use="slider")
        concepts = tuple(concept.replace(controls=less) for concept in config.dataset.concepts)
        config = config.replace(dataset=DatasetConfig(concepts=concepts))
    if not rest.pop("validated", True):
        config = config.replace(dataset=DatasetConfig(concepts=config.dataset.concepts[:1]))
    optimizer = OptimizerConfig(**{"learning_rate": 1e-2, **optimizer})
    if rest.pop("prior", False):
        prior = ConceptConfig(folder=config.dataset.concepts[0].folder, role="prior_prediction")
        config = config.replace(dataset=DatasetConfig(concepts=(*config.dataset.concepts, prior)))
    return change(config.replace(optimizer=optimizer), lora=lora, **rest)


def cut_and_go_on(config, folder, cache, cuts, **options):
    """Train with cuts; each must happen. Return the result and the sentences of the last part."""
    for callbacks in cuts:
        callbacks = dict(callbacks)
        lost = callbacks.pop("lost", False)
        with pytest.raises(Cut):
            run(config, folder, cache, **callbacks, **options)
        if lost:
            (found,) = find_runs(folder / "runs")
            remove_folder(found.checkpoints()[0].path)
    result, notes = run_with_notes(config, folder, cache, **options)
    assert "Resumed after step" in result.origin
    return result, notes


# In every run: what has a state of its own beside the optimizer's, and an optimizer of each kind of state: tensors,
# those in 8 bits, an average of its own.
OFTEN = (
    FIRST,
    "adamw8bit",
    "schedulefree_adamw, lora in bfloat16, best",
    "learned word that stops, bounded norms, plain and average, early end",
    "guidance, preservation, ranks by timestep, uncertainty",
    "best of the average, prior of masks, stratified",
)


@pytest.mark.thorough
def test_a_run_of_pictures_with_roles_and_focus_of_their_own_resumes_to_the_last_bit(config, tmp_path, cache):
    """One of each role has masks and metadata like the others of its concept; one that is held out is trained."""
    config = change(config, train={"log": "none"})
    varied, held = config.dataset.concepts
    folder = tmp_path / "pictures"
    shutil.copytree(varied.folder, folder)
    own = {"0.png": {"focus": [0, 1]}, "1.png": {"role": "regularisation"}, "2.png": {"role": "validation"}}
    (folder / "lora_atelier.json").write_text(json.dumps({"pictures": own}), encoding="utf-8")
    back = tmp_path / "back"
    shutil.copytree(held.folder, back)
    moved = sorted(each.name for each in back.glob("*.png"))[0]
    (back / "lora_atelier.json").write_text(json.dumps({"pictures": {moved: {"role": "train"}}}), encoding="utf-8")
    concepts = (varied.replace(folder=str(folder)), held.replace(folder=str(back)))
    config = config.replace(dataset=DatasetConfig(concepts=concepts))
    whole = run(config, tmp_path / "whole", cache)
    result, notes = cut_and_go_on(config, tmp_path / "cut", cache, (after(1),))
    assert same(whole, result) and any("lora_atelier.json gives 1 picture the role" in note for note in notes)
    pictures, concepts = result.plan.manifest.pictures, result.plan.concepts
    (trained,) = [each.role for p, each in zip(pictures, concepts, strict=True) if p.name == moved and p.concept > 1]
    assert trained == "train"
    roles = [each.role for p, each in zip(pictures, concepts, strict=True) if each.folder == str(folder)]
    assert roles == ["train", "regularisation", "validation", "train", "train", "train"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in CASES]
)
def test_a_run_resumes_to_the_last_bit(name, config, tmp_path, cache, pytestconfig):
    lora, optimizer, rest, cuts = CASES[name]
    # Else only the first case is cut twice: one cut is enough for the state that each of the others has.
    first = 0 if name == FIRST or pytestconfig.getoption("thorough") else -1
    config = configure(config, lora, optimizer, rest)
    whole = run(config, tmp_path / "whole", cache, logs=tmp_path / "whole")
    result, _ = cut_and_go_on(config, tmp_path / "cut", cache, cuts()[first:], logs=tmp_path / "cut")
    assert same(whole, result) and result.finished
    assert not equal(whole.tensors, {k: torch.zeros_like(t) for k, t in whole.tensors.items()})
    if config.train.early_stop_patience:
        assert len(whole.losses) < config.train.steps


def test_a_run_that_weighs_its_pictures_resumes_to_the_last_bit(config, tmp_path, cache, monkeypatch):
    """Looks at each visit, of which half of all pictures stand out: all happens within a few steps."""
    for name, value in {"BINS": 1, "LOOK": 1, "KEPT": 2, "FEWEST": 2, "FENCE": 0.0}.items():
        monkeypatch.setattr(fit, name, value)
    train = {"steps": 8, "batch_size": 2, "validate_every": 0, "log": "none"}
    saves = {"sample_every": 0, "save_every": 0}
    objective = {"easy_weight": 0.125, "odd_pictures": "leave_out"}
    concepts = config.dataset.concepts[:1]
    watched = change(config, train=train, saves=saves, objective=objective).replace(
        dataset=DatasetConfig(concepts=concepts)
    )
    whole, notes = run_with_notes(watched, tmp_path / "whole", cache)
    known = json.loads((whole.run / PICTURES).read_text())
    left_out = [each for each in known["pictures"] if not each["weight"]]
    assert known["step"] == 8 and left_out and all(each["odd"] and each["caption"] for each in left_out)
    assert any(0 < each["weight"] < 1 for each in known["pictures"])
    for each in left_out:
        assert sum(f"{each['name']} is left out after step" in note for note in notes) == 1
    assert {each["name"] for each in left_out} == {each["name"] for each in describe_in_detail(whole.run)["odd"]}
    result, _ = cut_and_go_on(watched, tmp_path / "cut", cache, (inside(5, 2),))
    assert same(whole, result) and json.loads((result.run / PICTURES).read_text()) == known


def test_the_best_weights_from_before_a_cut_are_those_of_the_run(config, tmp_path, cache, monkeypatch):
    """What is measured is given, so that nothing after the cut is as low."""
    found = {0: 0.9, 1: 0.5, 2: 0.7, 3: 0.8}
    monkeypatch.setattr(validate, "validation_loss", lambda run, *_: found[run.at])
    config = change(config, train={"validate_every": 1, "keep_best": True, "log": "none"})
    whole = run(config, tmp_path / "whole", cache)
    result, _ = cut_and_go_on(config, tmp_path / "cut", cache, (after(2),))
    assert same(whole, result) and result.best == (1, 0.5)


def test_a_save_whose_files_are_whole_but_hold_no_state_of_a_run_is_named(config, tmp_path, cache):
    """Somebody's run folder may hold anything, with the right sums beside it."""
    config = change(config, optimizer={"ema_decay": 0.5}, train={"log": "none"})
    with pytest.raises(Cut):
        run(config, tmp_path, cache, step=cut_at(2))
    (found,) = find_runs(tmp_path / "runs")
    save = found.checkpoints()[0]
    whole, file = load_state(save.path / "weights.safetensors"), save.path / "weights.safetensors"
    for odd in (
        {"network": whole["network"]},
        whole | {"at": 10**12},
        whole | {"network": 7},
        whole | {"network": dict.fromkeys(whole["network"], "text")},
        whole | {"ema": {name: torch.zeros(3, 3, 3) for name in whole["ema"]}},
    ):
        save_state(file, odd)
        about = json.loads((save.path / "checkpoint.json").read_text(encoding="utf-8"))
        about["files"]["weights.safetensors"] = {"size": file.stat().st_size, "sha256": file_digest(file)}
        (save.path / "checkpoint.json").write_text(json.dumps(about), encoding="utf-8")
        with pytest.raises(ValueError, match=f"The save {re.escape(str(save.path))} does not hold the state of a run"):
            run(config, tmp_path, cache)
    remove_folder(save.path)
    assert run(config, tmp_path, cache).finished


def test_a_log_for_tensorboard_and_the_gradient_noise_go_on_as_well(config, tmp_path, cache, monkeypatch):
    """Cut before the first save, so that the run begins anew, then so that a save is lost."""
    monkeypatch.setattr(prepare, "NoiseScale", functools.partial(gradient_noise.NoiseScale, every=2))
    monkeypatch.setattr(gradient_noise, "FEWEST", 3)
    config = change(config, train={"steps": 5, "accumulate": 1, "log": "both"})
    whole, said = run_with_notes(config, tmp_path / "whole", cache, logs=tmp_path / "whole")
    begun = {"validation": lambda at, loss: (_ for _ in ()).throw(Cut)}
    with pytest.raises(Cut):
        run(config, tmp_path / "cut", cache, logs=tmp_path / "cut", **begun)
    result, notes = cut_and_go_on(config, tmp_path / "cut", cache, (killed(3),), logs=tmp_path / "cut")
    assert same(whole, result)
    assert curves(whole.log) == curves(result.log)
    assert [step for step, _ in curves(result.log)["loss/step"]] == [1, 2, 3, 4, 5]
    (sentence,) = (note for note in said if "gradient noise" in note)
    assert sentence in notes


@pytest.mark.thorough  # in every run test_control.py has each of them apart
def test_saves_samples_and_measurements_in_between_change_nothing(config, tmp_path, cache):
    config = configure(
        config,
        {"dropout": 0.2},
        {"text_encoder_learning_rate": 1e-3},
        {"train": {"log": "none"}, "sample": DRAWN.to_dict()},
    )
    often = run(change(config, train={"validate_every": 1}, saves={"sample_every": 1}), tmp_path / "often", cache)
    never = run(
        change(config, train={"validate_every": 0}, saves={"save_every": 0, "sample_every": 0}, sample={"prompts": ()}),
        tmp_path / "never",
        cache,
    )
    assert equal(often.tensors, never.tensors) and often.losses == never.losses
    ours, theirs = state_files(often), state_files(never)
    assert ours["weights"] == theirs["weights"] and ours["optimizer"] == theirs["optimizer"]
    assert len(list((often.run / "samples").iterdir())) == 3 and not (never.run / "samples").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "paged_adamw8bit", "prodigy_plus_schedule_free"])
def test_on_a_gpu_a_break_costs_no_more_than_two_runs_differ_anyway(name, config, tmp_path, cache):
    optimizer = {"name": name, "learning_rate": 1.0 if OPTIMIZERS[name].estimates else 1e-3}
    config = configure(config, {"rank": 64, "preset": "full"}, optimizer, {"train": {"steps": 8, "log": "none"}})
    first, second, third = (run(config, tmp_path / str(n), cache, device="cuda") for n in range(3))
    result, _ = cut_and_go_on(config, tmp_path / "cut", cache, (after(2), after(5)), device="cuda")
    noise = max(distance(a, b) for a, b in ((first, second), (first, third), (second, third)))
    assert min(distance(each, result) for each in (first, second, third)) <= noise


def distance(a, b):
    """Return how far the weights of two results lie apart, over all of them."""
    return math.sqrt(sum(float((a.tensors[k].double() - b.tensors[k].double()).square().sum()) for k in a.tensors))
