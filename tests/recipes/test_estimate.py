"""The estimate of a step's memory against the training loop, and against torch's own profiler."""

import itertools
import shutil

import pytest
from estimates import estimate, meta_base
from PIL import Image
from prepared import CPU, estimated, prepared
from tiny_models import tiny_unet
from tiny_runs import tiny_config
from torch.profiler import ProfilerActivity, profile

from lora_atelier.trainer_core.config import (
    BucketConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    MaskConfig,
    ObjectiveConfig,
)
from lora_atelier.trainer_core.memory import recompute as recompute_blocks
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.preflight import memory as preflight
from lora_atelier.trainer_core.preflight.estimate import LiveBytes
from lora_atelier.trainer_core.train import train
from lora_atelier.trainer_core.training.prepare import apply_memory


@pytest.fixture
def folder(tmp_path):
    """Give a folder of four square pictures with captions."""
    for i in range(4):
        Image.new("RGB", (128, 128), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"thing {i}", encoding="utf-8")
    return tmp_path


def run_config(base, folder, masks=None, batch_size=1, checkpointing="0", **optimizer):
    buckets = BucketConfig(resolutions=("128x128",))
    return tiny_config(
        base,
        ConceptConfig(folder=str(folder), masks=masks),
        lora={"rank": 4, "alpha": 4, "preset": "full"},
        optimizer=optimizer,
        train={"steps": 2, "batch_size": batch_size, "resolution": 128, "bucket_step": 64, "buckets": buckets},
        memory={"checkpointing": checkpointing},
    )


def recorded_peak(step):
    """Return the peak of what torch's CPU allocator gives out during a step, as its profiler records it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        step()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure_loop(config, folder, record=False):
    """Take the steps of a run on the CPU; return their peak with the network but without frozen weights, in bytes.

    Counted by LiveBytes, or recorded by torch's profiler, which also sees what kernels take for themselves.
    """
    run = prepared(config, folder)
    with run.network.attached():
        apply_memory(run, config.memory)
        live = LiveBytes()
        parameters = live.count(run.network.parameters())
        if record:
            return parameters + recorded_peak(lambda: train(run, [config.memory]))
        with live:
            train(run, [config.memory])
        return live.peak


@pytest.mark.parametrize("checkpointing", ["0", pytest.param("full", marks=pytest.mark.thorough)])
def test_the_dry_run_takes_what_the_training_loop_takes(checkpointing, checkpoint, folder):
    config = run_config(checkpoint, folder, batch_size=2, checkpointing=checkpointing)
    found = estimate(meta_base(checkpointing == "full"), shape={"samples": 2})
    assert found.network + found.activations == pytest.approx(measure_loop(config, folder), rel=0.005)
    assert found.weights == sum(t.nbytes for t in tiny_unet().state_dict().values())


@pytest.mark.usefixtures("each_estimate_once")
@pytest.mark.parametrize("level", ["2", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("0", "full"))])
def test_what_other_programs_keep_stays_free(level, checkpoint, folder, monkeypatch):
    """Without the budget nothing would be recomputed; with it the bytes of the loop stay in the rest."""
    config = run_config(checkpoint, folder, batch_size=2, checkpointing="auto")
    needed = {each: estimated(config, each, samples=2) for each in {"0", level}}
    free, room = 2 * needed["0"].total, needed[level].total + 1
    budget = config.replace(memory=config.memory.replace(keep_free=(free - room) / 1e9))
    monkeypatch.setattr(preflight, "free_bytes", lambda _: free)
    plan = prepared(config, folder).plan

    def chosen(config):
        return preflight.fit_memory(config, plan, preflight.outline_run(config), CPU)

    assert chosen(config)[0][0].checkpointing == "0"
    (memory, *_), said = chosen(budget)
    assert f"with gradient checkpointing {level}." in said and "GB for other programs" in said
    taken = measure_loop(budget.replace(memory=memory), folder) + needed[level].weights
    assert 0.95 * room < taken <= 1.05 * room


def test_text_encoders_that_are_trained_are_part_of_it(folder, checkpoint_xl):
    rates = {"text_encoder_learning_rate": 1e-4, "text_encoder_2_learning_rate": 1e-4}
    config = run_config(checkpoint_xl, folder, batch_size=2, checkpointing="full", **rates)
    base = load_base_model(config.base_model)
    models = [base.unet, *(text.model for text in base.texts)]
    for model in models:
        model.to("meta")
    for model in models:
        recompute_blocks(units(model), "full")
    found = estimate(base, shape={"samples": 2}, trained=("lora_unet", "lora_te1", "lora_te2"))
    assert found.network + found.activations == pytest.approx(measure_loop(config, folder), rel=0.005)
    assert found.weights == sum(t.nbytes for model in models for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("checkpointing", ["0", pytest.param("full", marks=pytest.mark.thorough)])
def test_torch_itself_records_the_same_peak(checkpointing, checkpoint, folder):
    config = run_config(checkpoint, folder, batch_size=2, checkpointing=checkpointing)
    found = estimate(meta_base(checkpointing == "full"), shape={"samples": 2})
    recorded = measure_loop(config, folder, record=True)
    assert found.network + found.activations == pytest.approx(recorded, rel=0.02)


def masked(concept, folder):
    for i in range(4):
        Image.new("L", (128, 128)).save(folder / f"{i}-masklabel.png")
    return concept.replace(masks=MaskConfig(prior_weight=1.0, unmasked_probability=0.0))


def paired(concept, folder):
    less = folder.with_name(f"{folder.name}-less")
    shutil.copytree(folder, less)
    return concept.replace(controls=ControlConfig(folders=(str(less),), use="slider"))


# What each term is set by: of Noise & Loss, and of the concept.
TERMS = {
    "none": ({}, None),
    "masked prior": ({}, masked),
    "prior prediction": ({}, "prior_prediction"),
    "preservation, blank": ({"preservation": "blank"}, None),
    "preservation, class": (
        {"preservation": "class", "preservation_trigger": "thing", "preservation_class": "cat"},
        None,
    ),
    "guidance": ({"guidance_loss": 2.0, "differential_guidance": 3.0}, None),
    "uncertainty": ({"uncertainty_rate": 0.01}, None),
    "slider of prompts": ({"slider": "prompts", "slider_positive": "old", "slider_negative": "young"}, None),
    "slider of pairs": ({}, paired),
}
OFTEN = (("prior prediction", 4),)  # the other terms in every run: those of TELLING
ALONE = [
    pytest.param(name, "none", rank, checkpointing, marks=() if (name, rank) in OFTEN else pytest.mark.thorough)
    for name in TERMS
    for rank, checkpointing in ((4, "0"), (64, "full"))
]
REFUSED = ({"slider of prompts", "guidance"}, {"preservation, blank", "preservation, class"})
REFUSED += ({"slider of prompts", "slider of pairs"}, {"slider of pairs", "prior prediction"})
NAMES = [name for name in TERMS if name != "none"]
# Those that share what only one of them counts alone: passes without gradients, gradients beside a pass.
TELLING = (
    {"masked prior", "slider of pairs"},
    {"preservation, class", "guidance"},
    {"uncertainty", "slider of prompts"},
)
PAIRS = [
    pytest.param(
        *(one, other, (4, 64)[i % 2], ("0", "full")[i // 2 % 2]),
        marks=() if {one, other} in TELLING else pytest.mark.thorough,
    )
    for i, (one, other) in enumerate(itertools.combinations(NAMES, 2))
    if {one, other} not in REFUSED
]


@pytest.mark.parametrize(("one", "other", "rank", "checkpointing"), [*ALONE, *PAIRS])
def test_the_dry_run_knows_each_term_alone_and_in_pairs(one, other, rank, checkpointing, checkpoint, folder):
    """Within half a per cent of what the loop allocates: both ask the same pass."""
    config = run_config(checkpoint, folder, checkpointing=checkpointing)
    concept, role = config.dataset.concepts[0], "train"
    for _, of_concept in (TERMS[one], TERMS[other]):
        if isinstance(of_concept, str):
            role = of_concept
        elif of_concept:
            concept = of_concept(concept, folder)
    # Nearly every sample is held: a few of the others make the run one that can be.
    concepts = (concept,) if role == "train" else (concept, concept.replace(role=role, repeats=100))
    config = config.replace(
        dataset=DatasetConfig(concepts=concepts),
        objective=ObjectiveConfig(**TERMS[one][0], **TERMS[other][0]),
        lora=config.lora.replace(rank=rank, alpha=rank),
    )
    shape = {"caption": "thing 0", "masked": concept.masks is not None, "accumulates": config.dataset.paired}
    found = estimate(meta_base(checkpointing == "full"), rank=rank, run=config, shape=shape)
    assert found.network + found.activations == pytest.approx(measure_loop(config, folder), rel=0.005)
