"""What steers a run and tells of it: the best weights, an early end, losses by concept, logs, exact accumulation."""

import csv
import itertools
import math
import sys
from dataclasses import fields, replace

import pytest
import torch
from durable import equal
from gradients import gradients as passes_of
from lora_runs import metadata_in
from PIL import Image
from prepared import NeverLoaded, prepared
from safetensors.torch import load_file
from tiny_models import fill
from tiny_runs import change, run, tiny_config

from lora_atelier.trainer_core.config import (
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    MaskConfig,
    ObjectiveConfig,
    SampleConfig,
    SavesConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.objective.path import Mix
from lora_atelier.trainer_core.objective.terms.prior import MaskedPrior
from lora_atelier.trainer_core.runs import open_run
from lora_atelier.trainer_core.runs.catalogue import describe_in_detail
from lora_atelier.trainer_core.training import state, validate
from lora_atelier.trainer_core.training.batch import read_batch
from lora_atelier.trainer_core.training.validate import without_improvement

pytestmark = pytest.mark.usefixtures("no_estimates")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Give two folders of pictures in one shape, with captions, the first with masks; and one of another shape."""
    noise = torch.Generator().manual_seed(5)
    made = []
    for name, count, height in (("cats", 3, 32), ("dogs", 2, 32), ("held", 1, 32)):
        folder = tmp_path_factory.mktemp("concepts") / name
        folder.mkdir()
        for i in range(count):
            values = torch.randint(0, 256, (height, 32, 3), generator=noise, dtype=torch.uint8)
            Image.fromarray(values.numpy()).save(folder / f"{i}.png")
            (folder / f"{i}.txt").write_text(f"{name} {i}", encoding="utf-8")
            if name == "cats":
                Image.new("L", (32, height), 90 * (i + 1) - 60).save(folder / f"{i}-masklabel.png")
        made.append(folder)
    return made


@pytest.fixture
def config(checkpoint, folders):
    cats, dogs, held = map(str, folders)
    return tiny_config(
        checkpoint,
        ConceptConfig(folder=cats),
        ConceptConfig(folder=dogs, loss_weight=0.5),
        ConceptConfig(folder=held, role="validation"),
        train={"steps": 6, "save_dtype": "float32"},
    )


def find(monkeypatch, *losses):
    """Let the next run's measurements find these losses: when real ones rise is the processor's luck."""
    found = iter(losses)
    monkeypatch.setattr(validate, "validation_loss", lambda *_: next(found))


def test_an_early_end_keeps_exactly_the_best_weights(config, tmp_path, cache, monkeypatch):
    notes = []
    find(monkeypatch, 0.9, 0.7, 0.5, 0.6, 0.55)
    stops = change(config, train={"steps": 50, "validate_every": 1, "early_stop_patience": 2})
    result = run(stops, tmp_path, cache, note=notes.append)
    step, loss = result.best
    ended = len(result.losses)
    measured = dict(result.validation)
    assert (step, loss, ended) == (2, 0.5, 4) and measured == dict(enumerate((0.9, 0.7, 0.5, 0.6, 0.55)))
    assert f"Ended early after step {ended} of 50" in notes[-2]
    assert f"lowest after step {step}: {loss:.4f}" in notes[-1] and "lora-last.safetensors" in notes[-1]

    # A run of so many steps ends with these weights; one that measures nothing takes the same steps.
    find(monkeypatch, 0.9, 0.5)
    assert equal(load_file(result.path), run(change(config, train={"steps": step}), tmp_path, cache).tensors)
    find(monkeypatch, 0.9, 0.55)
    plain = run(change(config, train={"steps": ended}), tmp_path, cache)
    assert equal(load_file(result.others[0]), plain.tensors) and plain.losses == result.losses and plain.best is None
    for path, steps in ((result.path, step), (result.others[0], ended)):
        metadata = metadata_in(path)
        assert metadata["ss_steps"] == str(steps)
        assert metadata["atelier.validation_loss"] == f"{measured[steps]:.6g}"


def test_the_rate_falls_by_plateaus_and_the_run_goes_on_from_its_best_weights(config, tmp_path, cache, monkeypatch):
    """Without momentum, and with a rate of 0 after the fall, the last weights are the ones that it went back to."""
    plain = {"name": "sgd", "options": {"momentum": 0.0, "nesterov": False}, "learning_rate": 0.1}
    curve = {"name": "points", "points": "0:1, 0.65:1, 0.65:0"}
    train = {"steps": 6, "validate_every": 1, "plateau_patience": 2, "plateau_factor": 0.25}
    config = change(config, train=train, optimizer=plain)
    losses = (0.9, 0.7, 0.5, 0.6, 0.5, 0.55, 0.9)  # of the best, after step 2, then none lower
    notes, rates = [], []
    find(monkeypatch, *losses)
    told = {"note": notes.append, "step": lambda report: rates.append(report.learning_rates["lora_unet"])}
    run(config, tmp_path / "a", cache, **told)
    assert rates == pytest.approx([0.1] * 4 + [0.025] * 2)
    assert any("After step 4 the validation loss had not fallen in 2 measurements" in note for note in notes)
    assert any("at 0.25 of the learning rate, from the weights of step 2." in note for note in notes)
    found = {}
    for back in (True, False):
        find(monkeypatch, *losses)
        result = run(change(config, train={"plateau_roll_back": back}, scheduler=curve), tmp_path / str(back), cache)
        found[back] = (load_file(result.path), load_file(result.others[0]))
    assert equal(*found[True]) and equal(found[True][0], found[False][0]) and not equal(*found[False])


def test_what_a_plateau_brings_back_of_a_text_encoder_is_read_anew(config, tmp_path, cache, monkeypatch):
    """It stopped after step 3, its best weights are those of step 2, and encoded captions were kept since the stop."""
    texts = {"text_encoder_learning_rate": 0.01, "text_encoder_stop": 3, "stop_unit": "steps"}
    train = {"steps": 6, "validate_every": 1, "plateau_patience": 2}
    find(monkeypatch, 0.9, 0.7, 0.5, 0.6, 0.5, 0.55, 0.9)
    calls, original = [], state.text_reader

    def reader(*args, training):
        calls.append(training)
        return original(*args, training=training)

    monkeypatch.setattr(state, "text_reader", reader)
    run(change(config, train=train, optimizer=texts), tmp_path, cache)
    assert calls.count(False) == 2  # once they stopped, and after the plateau


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ((9, 5, 5, 5, 5, 5), [3, 5]),  # the one before the first step does not count
        ((9, 5, 6, 4.9, 4.8, 4.7), [3, 5]),  # too little, by the share
        ((9, 5, 6, 4, 6, 3), []),
        ((9, math.nan, 5, math.nan, 5, 5), [4]),
    ],
)
def test_a_plateau_is_a_function_of_the_measurements(losses, steps):
    train = TrainConfig(plateau_patience=2, validate_every=1, early_stop_min_improvement=0.1)
    measured = list(enumerate(losses))
    assert validate.falls(train, measured) == steps
    assert validate.falls(TrainConfig(), measured) == []
    for end in range(len(losses)):  # what comes later changes nothing
        assert validate.falls(train, measured[:end]) == [step for step in steps if step < end]


def test_the_best_is_kept_without_an_early_end_and_when_a_run_is_stopped(config, tmp_path, cache, monkeypatch):
    kept = change(config, train={"steps": 4, "validate_every": 1, "keep_best": True})
    find(monkeypatch, 0.9, 0.7, 0.5, 0.6, 0.8)
    result = run(kept, tmp_path / "a", cache)
    assert len(result.losses) == 4 and result.best == (2, 0.5) and result.others[0].name == "lora-last.safetensors"

    def stop(report):
        if report.step == 4:
            raise KeyboardInterrupt

    find(monkeypatch, 0.9, 0.7, 0.5, 0.6)
    with pytest.raises(KeyboardInterrupt):
        run(kept, tmp_path / "b", cache, step=stop)
    names = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert names == ["lora-best-at-2.safetensors", "lora-stopped-at-4.safetensors"]
    assert equal(load_file(tmp_path / "b" / names[0]), load_file(result.path))


@pytest.mark.parametrize(
    ("losses", "share", "expected"),
    [
        ([9, 5, 4, 3], 0, 0),
        ([1, 5, 4, 4], 0, 1),  # what was measured before the first step is no aim
        ([9, 5, 6, math.nan, 7], 0, 3),
        ([9, 5, 4.9, 4.8, 4.7], 0.05, 0),  # falls little by little count together
        ([9, 5, 4.9, 4.8], 0.05, 2),
        ([9], 0, 0),
    ],
)
def test_measurements_without_improvement_are_counted(losses, share, expected):
    assert without_improvement(list(enumerate(losses)), share) == expected


def test_samples_are_reported_only_where_there_are_prompts(config, tmp_path, cache):
    config = config.replace(saves=SavesConfig(sample_every=1))
    for prompts, reported in (((), []), (("cat",), [1, 2])):
        drawn = {"prompts": prompts, "steps": 1, "width": 32, "height": 32}
        sampled = []
        wanted = change(config.replace(sample=SampleConfig(**drawn)), train={"steps": 2})
        result = run(
            wanted,
            tmp_path / f"{len(prompts)}",
            cache,
            samples=lambda step, paths, told=sampled: told.append((step, len(paths))),
        )
        assert sampled == [(step, len(prompts)) for step in reported] and len(result.samples) == len(prompts)
        events = [event["event"] for event in open_run(result.run).events()]
        assert events.count("sampled") == len(reported)


def test_what_cannot_be_kept_or_logged_is_refused_before_a_model_is_loaded(config, tmp_path, cache, monkeypatch):
    never = NeverLoaded(config.base_model)
    trained = config.replace(dataset=DatasetConfig(concepts=config.dataset.concepts[:2]))
    cases = {
        "plateau_patience 3 needs pictures that are not trained": dict(plateau_patience=3, validate_every=1),
        "early_stop_patience 3 needs pictures that are not trained": dict(early_stop_patience=3, validate_every=1),
        "keep_best needs pictures that are not trained": dict(keep_best=True, validate_every=1),
        "log is csv, but there is no folder for logs": dict(log="csv"),
    }
    for sentence, values in cases.items():
        with pytest.raises(ValueError, match=sentence):
            run(change(trained, train=values), tmp_path, cache, source=never)
    with pytest.raises(ValueError, match="keep_best needs validation losses during the run; set validate_every"):
        change(config, train={"keep_best": True})
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r"needs the package tensorboard; install it with ComfyUI's Python, or choose"):
        run(change(trained, train={"log": "both"}), tmp_path, cache, logs=tmp_path, source=never)


def test_the_log_holds_every_step_and_changes_none(config, tmp_path, cache):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reports = []
    written = change(config, train={"validate_every": 3, "log": "both", "accumulate": 2})
    result = run(written, tmp_path, cache, step=reports.append, logs=tmp_path / "logs")
    assert result.log == tmp_path / "logs" / result.run.name
    with (result.log / "log.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row["loss"]]
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "3", "4", "5", "6", "6"]
    assert [float(row["loss"]) for row in steps] == pytest.approx(result.losses, rel=1e-8)
    assert [(int(r["step"]), float(r["validation"])) for r in rows if r["validation"]] == [
        (step, pytest.approx(loss, rel=1e-8)) for step, loss in result.validation
    ]
    for row, report in zip(steps, reports, strict=True):
        assert (row["lr_lora_unet"], row["skipped"], row["peak_gb"]) == ("0.001", "0", "")
        assert float(row["grad_norm"]) == pytest.approx(report.grad_norm) and float(row["seconds"]) > 0
        assert float(row["epoch"]) == pytest.approx(report.epoch)
        for name in ("cats", "dogs"):
            assert float(row[f"loss_{name}"] or "nan") == pytest.approx(
                report.concepts.get(name, math.nan), nan_ok=True
            )

    events = EventAccumulator(str(result.log)).Reload()
    read = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read["loss/step"] == [(i, pytest.approx(loss)) for i, loss in enumerate(result.losses, 1)]
    assert read["loss/validation"] == [(step, pytest.approx(loss)) for step, loss in result.validation]
    assert {"concept/cats", "concept/dogs", "lr/lora_unet", "gradient/norm"} <= set(read)

    # The loss of a step is the mean over its samples, each of which is in the mean of its concept.
    for k, report in enumerate(reports):
        names = ["cats" if sample.picture < 3 else "dogs" for mb in result.plan.step(k) for sample in mb.samples]
        assert report.concepts.keys() == set(names)
        whole = sum(names.count(name) * loss for name, loss in report.concepts.items()) / len(names)
        assert whole == pytest.approx(report.loss, rel=1e-6)
        assert [result.concepts[name][k] for name in set(names)] == [report.concepts[name] for name in set(names)]
    plain = run(change(config, train={"accumulate": 2}), tmp_path, cache)
    assert plain.losses == result.losses and equal(plain.tensors, result.tensors) and plain.log is None


def test_the_validation_loss_is_measured_level_by_level_beside_its_mean(config, tmp_path, cache):
    """Five levels are those of the mean; others have curves of their own, and neither mean nor run changes."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    measured = []
    seen = {"validation_levels": lambda steps, losses: measured.append((steps, losses))}
    plain = run(change(config, train={"validate_every": 3}), tmp_path, cache)
    result = run(
        change(config, train={"validate_every": 3, "validation_levels": 5, "log": "both"}),
        tmp_path,
        cache,
        **seen,
        logs=tmp_path / "logs",
    )
    assert (result.losses, result.validation) == (plain.losses, plain.validation) and result.run.name != plain.run.name
    assert [steps for steps, _ in measured] == [0, 3, 6]
    assert all(list(losses) == [100, 300, 500, 700, 900] for _, losses in measured)
    assert [sum(losses.values()) / 5 for _, losses in measured] == pytest.approx([loss for _, loss in plain.validation])
    with (result.log / "log.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["validation_900"]]
    assert [(int(row["step"]), float(row["validation_900"])) for row in rows] == [
        (steps, pytest.approx(losses[900], rel=1e-8)) for steps, losses in measured
    ]
    events = EventAccumulator(str(result.log)).Reload()
    read = [(event.step, event.value) for event in events.Scalars("validation/level_100")]
    assert read == [(steps, pytest.approx(losses[100])) for steps, losses in measured]
    curves = describe_in_detail(result.run)["curves"]["levels"]
    assert curves == {str(level): [[steps, each[level]] for steps, each in measured] for level in measured[0][1]}
    three = change(config, train={"steps": 1, "validation_levels": 3})
    run(three, tmp_path, cache, **seen)
    assert list(measured[-1][1]) == [166, 500, 833]


def test_every_groups_rate_is_reported_and_logged_by_its_name(config, tmp_path, cache):
    """Of convolutions, of LoRA+, and of a text encoder that has stopped."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rates = {"text_encoder_learning_rate": 2e-4, "conv_learning_rate": 5e-4, "lora_plus_ratio": 4.0}
    config = change(
        config, lora={"preset": "full"}, optimizer={**rates, "text_encoder_stop": 2}, train={"log": "both", "steps": 3}
    )
    reports = []
    result = run(config, tmp_path, cache, step=reports.append, logs=tmp_path / "logs")
    unet = {"": 1e-3, "_plus": 4e-3, "_conv": 5e-4, "_conv_plus": 2e-3}
    expected = {f"lora_unet{name}": rate for name, rate in unet.items()}
    text = {"lora_te": 2e-4, "lora_te_plus": 8e-4}
    assert reports[0].learning_rates == pytest.approx(expected | text)
    assert reports[2].learning_rates == pytest.approx(expected | dict.fromkeys(text, 0.0))
    with (result.log / "log.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert {k: float(v) for k, v in rows[0].items() if k.startswith("lr_")} == pytest.approx(
        {f"lr_{name}": rate for name, rate in (expected | text).items()}
    )
    events = EventAccumulator(str(result.log)).Reload()
    assert {f"lr/{name}" for name in expected | text} <= set(events.Tags()["scalars"])


def test_what_was_logged_before_a_crash_is_on_the_disk(config, tmp_path, cache):
    seen = []

    def step(report):
        (path,) = (tmp_path / "logs").glob("lora-*/log.csv")
        with path.open(encoding="utf-8") as file:
            seen.append(len(file.readlines()))

    run(change(config, train={"steps": 2, "log": "csv"}), tmp_path, cache, step=step, logs=tmp_path / "logs")
    assert seen == [3, 4]  # the names, the measurement before the first step, and each step before the next


@pytest.mark.parametrize("text", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["unet", "text-encoder"])
def test_accumulated_gradients_are_those_of_the_large_batch(config, tmp_path, monkeypatch, text):
    """Cut into micro-batches of any sizes, five samples of two concepts give the same gradient, in double precision.

    With masks (normalised, and with prior preservation), loss weights, min-SNR weights and captions of their own.
    """
    masks = MaskConfig(unmasked_weight=0.2, normalize_masked_area=True, prior_weight=0.5, unmasked_probability=0)
    cats, dogs = config.dataset.concepts[:2]
    cats = cats.replace(masks=masks, captions=CaptionConfig(prefix="x, "))
    config = config.replace(
        dataset=DatasetConfig(concepts=(cats, dogs)),
        objective=ObjectiveConfig(min_snr_gamma=1, noise_offset=0.05, max_timestep=500),
        optimizer=config.optimizer.replace(text_encoder_learning_rate=1e-3 if text else 0.0),
    )
    run = prepared(change(config, train={"steps": 1, "batch_size": 5}), tmp_path)
    run.base.denoiser.module.double()
    run.base.dtype = torch.float64
    for each in run.base.text.encoders:
        each.model.double()
    run.network.double()
    fill(run.network)  # at the start all gradients of `down` are zero
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    (micro,) = run.plan.step(0)
    objective = run.objective
    whole = objective.draw(read_batch(run.encoded, micro, run.plan, run.config, run.objective.terms), run.device)
    assert whole.shares[MaskedPrior].any() and len(set(whole.weights.tolist())) > 2
    gradients, losses = {}, {}
    with run.network.attached():
        for sizes in ((5,), (4, 1), (1, 3, 1), (1, 1, 1, 1, 1)):
            ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
            cuts = [slice(*pair) for pair in itertools.pairwise(ends)]
            run.objective = Drawn(objective, [part(whole, c) for c in cuts])
            window = tuple(replace(micro, index=i, samples=micro.samples[c]) for i, c in enumerate(cuts))
            with monkeypatch.context() as patch:
                patch.setattr(type(run.plan), "step", lambda *_, window=window: window)
                passes = passes_of(run)
            gradients[sizes] = torch.cat([p.grad.flatten() for p in parameters])
            losses[sizes] = float(passes.loss)
            for p in parameters:
                p.grad = None
    whole = gradients[5,]
    assert whole.abs().min() < whole.abs().max() and gradients.keys() == losses.keys() and len(gradients) == 4
    for sizes, gradient in gradients.items():
        assert (gradient - whole).norm() < 1e-6 * whole.norm(), sizes
        assert losses[sizes] == pytest.approx(losses[5,], rel=1e-6)


class Drawn:
    """An objective whose noise is drawn already, in parts: a micro-batch's own numbers depend on its place."""

    def __init__(self, objective, parts):
        self.objective, self.parts = objective, iter(parts)

    def __getattr__(self, name):
        return getattr(self.objective, name)

    def draw(self, *_):
        return next(self.parts)


def part(draws, cut):
    """Return some of the samples of what was drawn for a batch."""
    values = {field.name: getattr(draws, field.name) for field in fields(draws)}
    mix = Mix(*(value[cut] if isinstance(value, torch.Tensor) else value for value in values.pop("mix")))
    shares = {kind: share[cut] for kind, share in values.pop("shares").items()}
    rest = {name: None if value is None else value[cut] for name, value in values.items()}
    return type(draws)(mix=mix, shares=shares, **rest)


def test_the_last_window_of_a_run_weighs_the_samples_it_has(config, tmp_path, cache):
    """Three batches of 2, 2 and 1 in windows of two: the last step has one picture, and its loss is that picture's."""
    reports = []
    config = change(config, train={"epochs": 1, "accumulate": 2}, optimizer={"learning_rate": 1e-12})
    result = run(config, tmp_path, cache, step=reports.append)
    assert [[len(mb.samples) for mb in result.plan.step(k)] for k in range(2)][1] in ([1], [2])
    single = run(change(config, train={"accumulate": 1}), tmp_path, cache)
    counts = [len(single.plan.step(k)[0].samples) for k in range(3)]
    whole = sum(n * loss for n, loss in zip(counts[:2], single.losses[:2], strict=True)) / sum(counts[:2])
    assert result.losses == [pytest.approx(whole, rel=1e-6), pytest.approx(single.losses[2], rel=1e-6)]
    assert [report.epoch for report in reports] == [pytest.approx(2 / 3), 1.0]
