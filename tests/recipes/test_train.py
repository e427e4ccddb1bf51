"""The whole line: repeatable, exact under accumulation and checkpointing, safe when stopped."""

import hashlib
import json
import math
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from durable import Cut, apart, differ, equal
from lora_runs import metadata_in
from PIL import Image
from prepared import NeverLoaded, without_estimates
from safetensors.torch import load_file, save_file
from tiny_models import family_tensors, fill, model_of, network_in, tiny_text_encoder, tiny_unet
from tiny_runs import change, tiny_config

from lora_atelier.trainer_core.common.tensor_tree import load_state, pack
from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BeneathConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    DatasetConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    SampleConfig,
)
from lora_atelier.trainer_core.data import fit
from lora_atelier.trainer_core.data.scan import PLACE, Index
from lora_atelier.trainer_core.memory import WHOLE, Compiling, Programs, compile_blocks
from lora_atelier.trainer_core.memory.gradient_checkpointing import Recomputed
from lora_atelier.trainer_core.models import source_of
from lora_atelier.trainer_core.models.sd import load_base_model
from lora_atelier.trainer_core.models.sd.units import units
from lora_atelier.trainer_core.objective import objective
from lora_atelier.trainer_core.preflight.curation import last_fits, misfits
from lora_atelier.trainer_core.runs import open_run
from lora_atelier.trainer_core.training import guard, prepare
from lora_atelier.trainer_core.training.checkpoint import read_history

pytestmark = pytest.mark.usefixtures("one_cache")


@pytest.fixture
def config(checkpoint, pictures):
    return tiny_config(
        checkpoint,
        ConceptConfig(folder=str(pictures), flip=True, captions=CaptionConfig(dropout=0.2)),
        lora={"rank": 4, "alpha": 4, "preset": "attn-mlp"},
        memory={"checkpointing": "0"},
        objective={"min_snr_gamma": 5, "noise_offset": 0.05},
        train={"seed": 11, "save_dtype": "float32"},
    )


def run(config, folder, **options):
    """Train; estimate before only where that chooses the memory settings."""
    with without_estimates() if config.memory.checkpointing == "0" else nullcontext():
        return tiny_runs.run(config, folder, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Give `plain(config)` -> the result of a run, trained once for all tests that compare with it."""
    results = {}

    def of(config):
        key = repr(config)
        if key not in results:
            results[key] = run(config, tmp_path_factory.mktemp("plain"))
        return results[key]

    return of


def concept(config, **values):
    return config.replace(dataset=DatasetConfig(concepts=(config.dataset.concepts[0].replace(**values),)))


def same(a, b):
    return equal(a.tensors, b.tensors)


def test_two_runs_are_equal_to_the_last_bit_and_leave_the_global_generator_alone(config, plain, tmp_path):
    second = plain(config)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = run(config, tmp_path / "a", cache=tmp_path / "a" / "cache")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.losses == second.losses and same(first, second)
    again, other = (
        run(change(config, train={"seed": seed, "steps": 1}), tmp_path / "b", cache=tmp_path / "a" / "cache")
        for seed in (11, 12)
    )
    assert again.losses == first.losses[:1] and not same(again, other)  # a warm cache changes nothing, a seed does


def test_a_cancel_takes_effect_while_a_run_hashes_reads_plans_and_estimates(config, plain, tmp_path):
    """Long work looks for it by itself; nothing unfinished stays, and the next run is as if nothing had been."""
    long_work = {"folder", "caption_sources", "index", "tensors", "estimate"}
    estimated, source = change(config, memory={"checkpointing": "auto"}), source_of(config.base_model)

    def asks():
        names = (Path(frame.filename) for frame in reversed(traceback.extract_stack()))
        return next(name.stem for name in names if "trainer_core" in name.parts and name.stem != "cancel")

    for place in sorted(long_work):

        def check(place=place):
            if asks() == place:
                raise Cut

        with pytest.raises(Cut):
            run(estimated, tmp_path, source=source, check=check, cache=tmp_path / "cache")
        assert not list(tmp_path.rglob("run.json")), place
        assert not list(tmp_path.rglob(".*.tmp")), place
    assert same(run(config, tmp_path, source=source, cache=tmp_path / "cache"), plain(config))


def test_the_file_is_whole_named_and_described(config, tmp_path):
    result = run(concept(config, captions=CaptionConfig(prefix="mossling, ")), tmp_path)
    assert result.path == tmp_path / "lora.safetensors"
    read = load_file(result.path)
    assert all(torch.equal(read[k], t) for k, t in result.tensors.items())
    metadata = metadata_in(result.path)
    assert metadata["ss_base_model_version"] == "sd_v1" and metadata["ss_network_module"] == "networks.lora"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("4", "4.0")
    assert (metadata["ss_steps"], metadata["ss_seed"], metadata["ss_num_train_images"]) == ("4", "11", "6")
    assert metadata["modelspec.architecture"] == "stable-diffusion-v1/lora"
    assert metadata["modelspec.trigger_phrase"] == "mossling"
    assert str(tmp_path) not in str(metadata) and str(config.dataset.concepts[0].folder) not in str(metadata)
    config = change(config, train={"steps": 1})
    assert run(config, tmp_path).path.name == "lora-2.safetensors"
    encoder = tmp_path / "secret" / "encoder.safetensors"
    encoder.parent.mkdir()
    save_file({k: v.clone() for k, v in tiny_text_encoder().state_dict().items()}, encoder)
    other = run(change(config, base_model={"text_encoder": str(encoder)}), tmp_path)
    metadata = str(metadata_in(other.path))
    assert "encoder.safetensors" in metadata and "secret" not in metadata


@pytest.mark.thorough  # in every run test_learning.py sees what is learned
def test_training_lowers_the_loss(config, tmp_path):
    config = change(concept(config, flip=False, captions=CaptionConfig()), optimizer={"learning_rate": 5e-3})
    config = change(config, train={"steps": 60, "batch_size": 6}, objective={"noise_offset": 0, "min_snr_gamma": 0})
    losses = run(config, tmp_path).losses
    assert sum(losses[-15:]) < 0.8 * sum(losses[:15])


@pytest.mark.thorough  # in every run test_attention.py recomputes blocks of a run
def test_gradient_checkpointing_changes_no_number(config, plain, tmp_path):
    recomputed = run(change(config, memory={"checkpointing": "full"}), tmp_path)
    assert recomputed.losses == pytest.approx(plain(config).losses, rel=1e-5)


def out_of_memory_at(monkeypatch, times):
    """Let the backward pass run out of memory the first `times` times after the first step."""
    original, calls = torch.Tensor.backward, [0]

    def backward(self, *args, **kwargs):
        calls[0] += not self.is_meta  # the estimate's dry run
        if not self.is_meta and 1 < calls[0] <= 1 + times:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)


@pytest.mark.thorough  # in every run test_faults.py lets memory run out in each part of a step, once and twice
def test_a_step_for_which_memory_runs_out_is_taken_again_with_less_and_gives_the_same(
    config, plain, tmp_path, monkeypatch
):
    undisturbed = plain(config)
    notes = []
    out_of_memory_at(monkeypatch, 1)
    config = change(config, memory={"checkpointing": "auto"})
    again = run(config, tmp_path, note=notes.append)
    assert again.losses == pytest.approx(undisturbed.losses, rel=1e-5)
    said = [note for note in notes if "Out of memory" in note]
    assert said == ["Out of memory at step 2; the step is repeated with gradient checkpointing feed-forward."]


@pytest.mark.thorough
def test_memory_that_runs_out_twice_ends_the_run_and_keeps_the_lora_so_far(config, tmp_path, monkeypatch):
    out_of_memory_at(monkeypatch, 2)
    said = r"Out of memory at step 2 with gradient checkpointing feed-forward\. Lower batch_size"
    with pytest.raises(RuntimeError, match=said):
        run(change(config, memory={"checkpointing": "auto"}), tmp_path)
    assert (tmp_path / "lora-stopped-at-1.safetensors").is_file()


def test_fixed_memory_settings_are_not_changed_when_memory_runs_out(config, tmp_path, monkeypatch):
    out_of_memory_at(monkeypatch, 1)
    with pytest.raises(RuntimeError, match="Out of memory at step 2 with gradient checkpointing 0"):
        run(change(config, memory={"checkpointing": "0"}), tmp_path)


def test_where_only_the_backward_pass_cannot_be_compiled_the_run_continues_without(
    config, plain, tmp_path, monkeypatch
):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.exc import InductorError

    def cannot(graph, inputs):
        raise InductorError(RuntimeError("no kernel for this"), None)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=cannot)
    monkeypatch.setattr(prepare, "compile_blocks", lambda units, note: compile_blocks(units[1:2], note, backend))
    config, notes = change(config, lora={"preset": "attn-only"}), []
    found = run(change(config, memory={"compile": True}), tmp_path, note=notes.append)
    assert found.losses == pytest.approx(plain(config).losses, rel=1e-5)
    assert ["no kernel for this" in note for note in notes if note.startswith("torch.compile failed")] == [True]


def test_the_compiler_is_told_its_budget_and_the_run_why_no_kernels_are_recorded(config, tmp_path, monkeypatch):
    made, notes, calls = [], [], []

    def none(units, note):
        made.append(Programs(note))
        return made[0]

    for name in ("begin_step", "free"):
        monkeypatch.setattr(Programs, name, lambda self, name=name: calls.append(name))
    monkeypatch.setattr(prepare, "compile_blocks", none)
    memory = {"compile": True, "checkpointing": "budget 0.25", "cuda_graphs": True}
    config = change(config, train={"steps": 1})
    run(change(config, memory=memory), tmp_path, note=notes.append)
    assert made[0].kind == Compiling(0.25, graphs=False)
    assert calls == ["begin_step", "free"]  # of one step and of the run
    assert any("CUDA graphs are left out: they are for NVIDIA GPUs, and this run is on cpu." in note for note in notes)
    with pytest.raises(ValueError, match=r"budget 0\.25 is the compiler's, and the model is not compiled; set compile"):
        run(change(config, memory={**memory, "compile": False}), tmp_path)


def test_where_nothing_is_compiled_no_other_budget_is_tried(config, tmp_path, monkeypatch):
    def failed(units, note):
        programs = Programs(note)
        programs.in_use = False
        return programs

    out_of_memory_at(monkeypatch, 2)
    monkeypatch.setattr(prepare, "compile_blocks", failed)
    rungs = [MemoryConfig(compile=True, checkpointing=level) for level in ("budget 0.5", "budget 0.25", "full")]
    with without_estimates(rungs), pytest.raises(RuntimeError, match="at step 2 with gradient checkpointing full"):
        run(change(config, memory={"compile": True, "checkpointing": "auto"}), tmp_path)


def test_a_look_at_the_first_batches_recomputes_what_a_budget_would_keep():
    unet, seen = tiny_unet(), []
    blocks = [unit for unit, least in units(unet) if least >= WHOLE]
    looking = SimpleNamespace(base=model_of(unet), memory=MemoryConfig(compile=True, checkpointing="budget 0.5"))
    guard.looked_at(looking, [looking.memory], lambda _: seen.extend(isinstance(b.forward, Recomputed) for b in blocks))
    assert seen == [True] * len(blocks) and not any(isinstance(b.forward, Recomputed) for b in blocks)


AGAIN = [pytest.param(kind, marks=pytest.mark.thorough) for kind in ("float32", "bfloat16", "float8", "int8")]


@pytest.mark.parametrize("weights", ["nf4", *AGAIN])
def test_weights_kept_small_train_nearly_the_same(config, plain, tmp_path, weights):
    config = change(config, optimizer={"text_encoder_learning_rate": 1e-3})
    small = run(change(config, base_model={"weights": weights, "text_weights": weights}), tmp_path)
    losses = plain(config).losses
    assert small.losses == pytest.approx(losses, rel=0.0 if weights == "float32" else 0.1)
    assert differ(small.losses, losses) == (weights != "float32")


def test_texts_encoded_with_small_weights_are_not_taken_for_others(config, tmp_path):
    config = change(config, train={"steps": 1})
    first = run(change(config, base_model={"text_weights": "float8"}), tmp_path, cache=tmp_path / "cache")
    assert differ(first.losses, run(config, tmp_path, cache=tmp_path / "cache").losses)


def test_a_text_encoder_stops_after_a_step_or_an_epoch(config, plain, tmp_path):
    config = change(config, optimizer={"text_encoder_learning_rate": 1e-3}, train={"batch_size": 3})
    stopped = run(change(config, optimizer={"text_encoder_stop": 2}), tmp_path)
    two = plain(change(config, train={"steps": 2}))
    text = {k: t for k, t in stopped.tensors.items() if k.startswith("lora_te_")}
    assert text and all(torch.equal(t, two.tensors[k]) for k, t in text.items())
    unet = [k for k in stopped.tensors if k.startswith("lora_unet_") and k.endswith("lora_up.weight")]
    assert any(not torch.equal(stopped.tensors[k], two.tensors[k]) for k in unet)
    assert stopped.losses[:2] == two.losses
    assert stopped.plan.batches_in(0) == 2
    by_epoch = run(change(config, optimizer={"text_encoder_stop": 1, "stop_unit": "epochs"}), tmp_path)
    assert same(by_epoch, stopped)


def test_a_denoiser_stops_and_text_encoders_train_on(config, plain, tmp_path):
    config = change(config, optimizer={"text_encoder_learning_rate": 1e-3}, train={"batch_size": 3})
    stopped = run(change(config, optimizer={"denoiser_stop": 2}), tmp_path)
    two = plain(change(config, train={"steps": 2}))
    assert stopped.losses[:2] == two.losses
    for part, kept in {"lora_unet_": True, "lora_te_": False}.items():
        ups = [k for k in stopped.tensors if k.startswith(part) and k.endswith("lora_up.weight")]
        assert ups and all(torch.equal(stopped.tensors[k], two.tensors[k]) for k in ups) == kept
    with pytest.raises(ValueError, match=r"stops after step 2 of 4.* set denoiser_stop of Optimizer to 0"):
        run(change(config, optimizer={"denoiser_stop": 2, "text_encoder_learning_rate": 0}), tmp_path)


def test_a_run_whose_last_steps_train_nothing_is_refused(config, tmp_path):
    config = change(
        config, optimizer={"learning_rate": 0.0, "text_encoder_learning_rate": 1e-3, "text_encoder_stop": 2}
    )
    with pytest.raises(ValueError, match="stops after step 2 of 4, so the last steps would train nothing"):
        run(config, tmp_path)
    whole = run(change(config, optimizer={"text_encoder_stop": 1}, train={"steps": 1}), tmp_path)
    assert len(whole.losses) == 1


def test_a_lora_in_bfloat16_is_refused_with_float16(config, tmp_path):
    config = change(config, lora={"dtype": "bfloat16"}, base_model={"precision": "float16"})
    with pytest.raises(ValueError, match="does not work with precision float16; set dtype of LoRA Config to float32"):
        run(config, tmp_path)


@pytest.mark.thorough
def test_a_lora_with_text_layers_is_continued_on_small_text_encoders(config, plain, tmp_path):
    config = change(config, optimizer={"text_encoder_learning_rate": 1e-3})
    first = plain(config)
    config = change(config, base_model={"text_weights": "float8"}, lora={"start": str(first.path)})
    second = run(change(config, train={"steps": 1}), tmp_path)
    assert second.tensors.keys() == first.tensors.keys()
    assert any(not torch.equal(t, first.tensors[k]) for k, t in second.tensors.items() if k.startswith("lora_te_"))


@pytest.mark.thorough  # in every run test_recipes.py knows the losses of one in bfloat16
def test_a_lora_in_bfloat16_learns_what_one_in_float32_does(config, tmp_path):
    config = change(config, train={"steps": 6})
    plain, small = run(config, tmp_path), run(change(config, lora={"dtype": "bfloat16"}), tmp_path)
    ups = [k for k in plain.tensors if k.endswith("lora_up.weight")]
    whole = torch.cat([plain.tensors[k].flatten() for k in ups])
    rounded = torch.cat([small.tensors[k].flatten() for k in ups])
    assert torch.nn.functional.cosine_similarity(whole, rounded, dim=0) > 0.98
    assert rounded.norm() == pytest.approx(float(whole.norm()), rel=0.02)
    assert torch.equal(rounded, rounded.bfloat16().float())


# In every run test_recipes.py trains both at once.
@pytest.mark.parametrize("learning_rate", [pytest.param(1e-3, marks=pytest.mark.thorough), 0.0])
def test_the_text_encoder_is_trained_on_request(config, tmp_path, learning_rate):
    config = change(config, optimizer={"learning_rate": learning_rate, "text_encoder_learning_rate": 1e-3})
    result = run(change(config, sample={"prompts": ("thing",), "width": 64, "height": 64, "steps": 2}), tmp_path)
    ups = {k: t for k, t in result.tensors.items() if k.endswith("lora_up.weight")}
    text = [t for k, t in ups.items() if k.startswith("lora_te_")]
    assert len(text) == 12 and any(t.any() for t in text)
    assert (len(ups) > 12) == (learning_rate > 0)
    assert result.samples.shape == (1, 64, 64, 3)


def test_masks_act_and_full_probability_of_no_mask_equals_none(config, plain, tmp_path):
    masks = MaskConfig(missing="ones", unmasked_probability=0)
    masked = run(concept(config, masks=masks), tmp_path / "b")
    unmasked = run(concept(config, masks=masks.replace(unmasked_probability=1)), tmp_path / "c")
    assert differ(masked.losses, plain(config).losses)
    assert unmasked.losses == plain(config).losses and same(unmasked, plain(config))


@pytest.mark.thorough  # in every run test_recipes.py knows the losses of one, and test_preserved.py its gradient
def test_prior_preservation_holds_what_the_mask_leaves_out(config, tmp_path):
    masks = MaskConfig(missing="ones", unmasked_probability=0, unmasked_weight=0)
    config = change(concept(config, masks=masks, flip=False, captions=CaptionConfig()), train={"steps": 3})
    areas = []
    free = run(config, tmp_path / "free", step=lambda report: areas.append(report.masked_area))
    held = run(concept(config, masks=masks.replace(prior_weight=5.0)), tmp_path / "held")
    # A fresh network predicts what the frozen model does, so the first loss is the same, and the later ones are not.
    assert held.losses[0] == free.losses[0] and differ(held.losses[1:], free.losses[1:])
    assert all(area is None or 0 < area < 1 for area in areas) and any(areas)


def test_validation_is_measured_and_changes_nothing(config, plain, tmp_path, held):
    held = ConceptConfig(folder=str(held), role="validation", captions=CaptionConfig(dropout=1.0), flip=True)
    both = config.replace(dataset=DatasetConfig(concepts=(*config.dataset.concepts, held)))
    measured = []
    often = change(both, train={"validate_every": 2})
    with_it = run(often, tmp_path / "both", validation=lambda *pair: measured.append(pair))
    assert with_it.losses == plain(config).losses and same(with_it, plain(config))
    assert [step for step, _ in measured] == [0, 2, 4] and measured == with_it.validation
    assert apart(*(loss for _, loss in measured)) and all(math.isfinite(loss) for _, loss in measured)
    again = run(change(both, train={"batch_size": 3, "steps": 1}), tmp_path / "both")
    assert again.validation[0][1] == pytest.approx(measured[0][1], rel=1e-5)  # whatever the batch size


@pytest.mark.thorough  # in every run test_recipes.py trains several resolutions, test_resume.py variants
def test_several_resolutions_and_variants_train(config, tmp_path):
    config = change(config, train={"steps": 8, "buckets": BucketConfig(resolutions=("64", "96x64", "96"))})
    config = concept(config, augment=AugmentConfig(variants=3, crop_jitter=1, zoom=0.2, rotation=10, hue=0.1))
    result = run(config, tmp_path)
    assert all(map(math.isfinite, result.losses))
    sizes = {sample.crop.bucket for k in range(8) for mb in result.plan.step(k) for sample in mb.samples}
    assert (96, 64) in sizes and len(sizes) >= 3


@pytest.mark.thorough  # in every run test_build.py has its steps, and test_resume.py a run
def test_adamw_in_8_bits_trains(config, tmp_path):
    """With layers of 4096 numbers and more: bitsandbytes keeps the state of smaller ones in 32 bits."""
    config = change(config, lora={"rank": 64, "alpha": 64}, train={"steps": 2})
    plain = run(config, tmp_path / "plain")
    small = run(change(config, optimizer={"name": "adamw8bit"}), tmp_path / "small")
    assert small.losses[0] == plain.losses[0] and small.losses == pytest.approx(plain.losses, rel=0.05)
    saved = open_run(small.run).checkpoints()[0].path / "optimizer.safetensors"
    tensors, _ = pack(load_state(saved)["optimizer"])  # however bitsandbytes nests them
    in_8_bits = [tensor for tensor in tensors.values() if tensor.dtype == torch.uint8 and tensor.numel() >= 4096]
    assert in_8_bits and all(len(tensor.unique()) > 1 for tensor in in_8_bits)


@pytest.mark.thorough  # in every run test_recipes.py knows the losses of a model that predicts v
def test_v_prediction_trains_another_target(config, plain, tmp_path):
    v = run(change(config, base_model={"prediction": "v_prediction"}), tmp_path)
    assert differ(v.losses, plain(config).losses) and all(map(math.isfinite, v.losses))


@pytest.mark.parametrize("precision", ["float16", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_half_precision_trains_float32_weights(config, plain, tmp_path, precision):
    result = run(change(config, base_model={"precision": precision}), tmp_path)
    assert all(map(math.isfinite, result.losses)) and all(t.dtype == torch.float32 for t in result.tensors.values())
    assert result.losses == pytest.approx(plain(config).losses, rel=0.1)


class Stop(BaseException):
    """Stands for ComfyUI's interrupt, which is no Exception."""


@pytest.mark.thorough  # in every run test_faults.py cancels in each phase of a run
def test_a_stopped_run_keeps_the_lora_so_far(config, tmp_path):
    reports, notes = [], []

    def check():
        if len(reports) == 2:
            raise Stop

    with pytest.raises(Stop):
        run(config, tmp_path, step=reports.append, note=notes.append, check=check)
    stopped = tmp_path / "lora-stopped-at-2.safetensors"
    assert any(t.any() for k, t in load_file(stopped).items() if k.endswith("lora_up.weight"))
    assert str(stopped) in notes[-1]


def test_a_run_stopped_while_encoding_resumes_there(config, tmp_path):
    done = []

    def encoding(into):
        return lambda *phase: into.append(phase) if phase[0] == "encoding pictures" else None

    def check():
        if len(done) == 3:
            raise Stop

    notes = []
    with pytest.raises(Stop):
        run(config, tmp_path, phase=encoding(done), check=check, note=notes.append, cache=tmp_path / "cache")
    assert notes[-1].startswith("Stopped before the first step; encoded pictures and captions are kept;")
    rest = []
    run(config, tmp_path, phase=encoding(rest), cache=tmp_path / "cache")
    assert len(done) == 3 and rest[0][2] == done[0][2] - 3


@pytest.mark.thorough  # in every run test_faults.py leaves out such a step, and ends a run of many
def test_a_step_that_is_not_finite_moves_nothing_and_five_in_a_row_end_the_run(config, tmp_path, monkeypatch):
    losses = objective.sample_losses
    calls = iter(range(1000))
    monkeypatch.setattr(objective, "sample_losses", lambda *a: losses(*a) * (math.nan if next(calls) in (1, 2) else 1))
    reports = []
    result = run(config, tmp_path, step=reports.append)
    assert [r.updated for r in reports] == [True, False, False, True]
    assert all(t.isfinite().all() for t in result.tensors.values())
    monkeypatch.setattr(objective, "sample_losses", lambda *a: losses(*a) * math.nan)
    found = r"5 times in a row, so the run went back to step 0 and stopped: step 1 \(loss nan, gradient norm nan\) on "
    with pytest.raises(RuntimeError, match=rf"{found}\d.png, \d.png; step 2"):
        run(change(config, train={"steps": 9}), tmp_path)
    assert not list(tmp_path.glob("*stopped*"))


def test_a_run_in_float16_ends_after_more_steps_that_are_not_finite(config, tmp_path, monkeypatch):
    """There the scale that fits is found by trying."""
    losses = objective.sample_losses
    monkeypatch.setattr(objective, "sample_losses", lambda *a: losses(*a) * math.nan)
    monkeypatch.setattr(guard, "OVERFLOW_LIMIT", guard.NOT_FINITE_LIMIT + 2)
    half = change(config, train={"steps": 9, "batch_size": 1}, base_model={"precision": "float16"})
    with pytest.raises(RuntimeError, match=r"7 times in a row, so the run went back to step 0"):
        run(half, tmp_path)
    assert not list(tmp_path.glob("*stopped*"))


def test_wrong_input_is_refused_before_a_model_is_loaded(config, tmp_path):
    cases = {
        "warmup_steps is 4, and the run has 4 steps": change(config, scheduler={"warmup_steps": 4}),
        "There is no model file": change(config, base_model={"path": str(tmp_path / "no.safetensors")}),
        "nowhere": concept(config, folder=str(tmp_path / "nowhere")),
    }
    for sentence, wrong in cases.items():
        with pytest.raises(ValueError, match=sentence):
            run(wrong, tmp_path, source=NeverLoaded(wrong.base_model))


@pytest.mark.thorough  # in every run test_samples.py compares them with those of the start
def test_samples_show_the_trained_network(config, tmp_path):
    sample = SampleConfig(prompts=("thing", "number"), width=64, height=96, steps=2, cfg=2.0)
    config = change(config.replace(sample=sample), train={"steps": 1})
    few = run(config, tmp_path)
    assert few.samples.shape == (2, 96, 64, 3) and 0 <= few.samples.min() <= few.samples.max() <= 1
    more = run(change(config, train={"steps": 3}), tmp_path)
    assert not torch.equal(few.samples, more.samples)


def test_a_sample_lies_beside_the_lora_for_model_browsers(config, tmp_path):
    """Its name is the LoRA's; neither a stranger's picture nor that of another run is replaced."""
    sample = SampleConfig(prompts=("thing",), width=64, height=64, steps=1)
    config = change(config.replace(sample=sample), saves={"overwrite": True}, train={"steps": 1})
    result = run(config, tmp_path)
    preview = tmp_path / "lora.png"
    with Image.open(preview) as image, Image.open(next((result.run / "samples").iterdir())) as drawn:
        assert image.tobytes() == drawn.tobytes()

    preview.write_bytes(b"somebody's own")
    notes = []
    run(config, tmp_path, note=notes.append)
    assert preview.read_bytes() == b"somebody's own"
    assert any("has no preview picture" in note for note in notes)

    preview.unlink()
    (tmp_path / "lora.preview.webp").touch()
    run(config, tmp_path)
    assert not preview.exists()


# In every run both have a recipe, and test_embeddings.py trains words of both text encoders of XL.
XL = pytest.param("sdxl", {"lora_te1", "lora_te2"}, marks=pytest.mark.thorough)
SD2 = pytest.param("sd2", {"lora_te"}, marks=pytest.mark.thorough)


@pytest.mark.parametrize(("family", "prefixes"), [XL, SD2])
def test_other_families_train_their_unet_and_text_encoders(config, tmp_path, family, prefixes):
    marker = {"v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}
    save_file(family_tensors(family) | marker, tmp_path / "toy.safetensors")
    config = change(config, base_model={"path": str(tmp_path / "toy.safetensors")}, train={"steps": 1})
    sample = SampleConfig(prompts=("thing",), width=64, height=64, steps=2)
    cached = run(config.replace(sample=sample), tmp_path)
    assert all(map(math.isfinite, cached.losses)) and cached.samples.isfinite().all()
    names = {key.rsplit(".", 2)[0] for key in cached.tensors}
    assert any("input_blocks" in name for name in names) == (family == "sdxl")
    rates = {"text_encoder_learning_rate": 1e-3, "text_encoder_2_learning_rate": 1e-3}
    result = run(change(config, optimizer=rates), tmp_path)
    assert result.losses[0] == pytest.approx(cached.losses[0], rel=1e-4)  # cached or not, the same conditioning
    ups = {k: t for k, t in result.tensors.items() if k.endswith("lora_up.weight") and k.startswith("lora_te")}
    assert {key.split("_text_model")[0] for key in ups} == prefixes and all(t.any() for t in ups.values())
    metadata = metadata_in(result.path)
    assert metadata["ss_base_model_version"] == {"sd2": "sd_v2_v", "sdxl": "sdxl_base_v1-0"}[family]
    assert metadata["ss_zero_terminal_snr"] == "True" and metadata["modelspec.prediction_type"] == "v"
    first = run(change(config, optimizer={"text_encoder_learning_rate": 1e-3}), tmp_path)
    assert {key.split("_text_model")[0] for key in first.tensors if key.startswith("lora_te")} == {min(prefixes)}


def test_zero_terminal_snr_with_a_model_that_predicts_noise_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="zero_terminal_snr is on, but the model predicts epsilon"):
        run(change(config, base_model={"zero_terminal_snr": "on"}), tmp_path)


def start_file(config, folder):
    """Write a LoRA of UNet and text encoder that says something; return its path and tensors."""
    base = load_base_model(config.base_model)
    network = network_in(base, LoraConfig(rank=3, alpha=2, preset="attn-mlp"), 5)
    fill(network, std=0.2)
    folder.mkdir(exist_ok=True)
    save_file(network.tensors(), folder / "old.safetensors", {"ss_network_dim": "3"})
    return folder / "old.safetensors", {k: t.clone() for k, t in network.tensors().items()}


def test_a_lora_is_continued_from_what_it_was(config, tmp_path):
    """Continued or beneath, cached text or live, the first loss is the same: that of the base with the old LoRA."""
    path, old = start_file(config, tmp_path)
    config = change(concept(config, flip=False), train={"steps": 1})
    plain = run(config, tmp_path)
    continued = run(change(config, lora={"start": str(path)}), tmp_path)
    beneath = run(change(config, lora={"beneath": (BeneathConfig(path=str(path)),)}), tmp_path)
    live = change(config, lora={"start": str(path)}, optimizer={"text_encoder_learning_rate": 1e-3})
    live = run(live, tmp_path)
    assert continued.losses[0] == pytest.approx(beneath.losses[0], rel=1e-5)
    assert continued.losses[0] == pytest.approx(live.losses[0], rel=1e-5)
    assert continued.losses[0] != pytest.approx(plain.losses[0], rel=1e-3)
    assert plain.tensors.keys() == beneath.tensors.keys()

    # All of the file is in the new one, with its ranks and alphas; without a learning rate the very same numbers.
    assert continued.tensors.keys() == live.tensors.keys() == old.keys()
    for key, tensor in continued.tensors.items():
        kept = key.startswith("lora_te_") or key.endswith(".alpha")
        assert torch.equal(tensor, old[key]) == kept, key
    moved = next(key for key in old if key.startswith("lora_te_") and "lora_up" in key)
    assert not torch.equal(live.tensors[moved], old[moved])

    metadata = metadata_in(continued.path)
    with path.open("rb") as file:
        content = file.read()
    start = json.loads(metadata["atelier.start"])
    assert start["file"] == "old.safetensors" and (start["rank"], start["alpha"]) == (3, 2.0)
    body = content[8 + int.from_bytes(content[:8], "little") :]
    assert start["sshs_model_hash"] == hashlib.sha256(body).hexdigest()
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("3", "2.0")
    under = metadata_in(beneath.path)
    expected = {"path": "old.safetensors", "strength": 1.0, "training_only": False}
    assert json.loads(under["atelier.config"])["lora"]["beneath"] == [expected]
    assert "atelier.start" not in under and str(tmp_path) not in str(metadata) + str(under)


def test_a_lora_of_the_unet_can_stay_as_it_is_too(config, tmp_path):
    path, old = start_file(config, tmp_path)
    config = change(config, optimizer={"learning_rate": 0.0, "text_encoder_learning_rate": 1e-3})
    result = run(change(config, lora={"start": str(path)}, train={"steps": 1}), tmp_path)
    changed = {key for key, tensor in result.tensors.items() if not torch.equal(tensor, old[key])}
    assert result.tensors.keys() == old.keys() and changed and all(key.startswith("lora_te_") for key in changed)


def test_a_lora_that_does_not_fit_is_refused_before_the_pictures_are_looked_for(config, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"lora_unet_x.lora_up.weight": torch.ones(4, 2), "lora_unet_x.lora_down.weight": torch.ones(2, 4)}, path)
    nowhere = concept(config, folder=str(tmp_path / "nowhere"))
    for lora in ({"start": str(path)}, {"beneath": (BeneathConfig(path=str(path)),)}):
        with pytest.raises(ValueError, match=r"1 of 1 layers of x.safetensors have no place in random-tiny"):
            run(change(nowhere, lora=lora), tmp_path)


def test_a_lora_in_the_weights_cannot_be_there_in_training_alone(config, tmp_path):
    beneath = BeneathConfig(path=str(start_file(config, tmp_path)[0]), training_only=True)
    with pytest.raises(ValueError, match="set training_only of Existing LoRA to false, or link the model to Use Conn"):
        run(change(config, lora={"beneath": (beneath,)}), tmp_path)


def test_dropouts_bounded_norms_and_baking_act_in_a_run_and_repeat(config, tmp_path):
    options = {"dora": True, "preset": "attn-only", "scale_weight_norms": 0.002, "bake": True}
    options |= {"dropout": 0.1, "rank_dropout": 0.1, "module_dropout": 0.1}
    reports, notes = [], []
    config = change(config, lora=options, train={"steps": 2})
    first = run(config, tmp_path, step=reports.append, note=notes.append)
    assert same(first, run(config, tmp_path))
    assert [0 < report.norms.largest <= 0.002001 for report in reports] == [True, True]
    assert any("Baked into plain LoRA: the file lacks" in note for note in notes)
    assert {name.partition(".")[2] for name in first.tensors} == {"lora_down.weight", "lora_up.weight", "alpha"}


def test_losses_of_pictures_are_counted_once_and_kept_by_content(config, tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr(fit, "SURE", -1e9)  # so few visits are chance
    result = run(change(config, train={"accumulate": 2}), tmp_path, note=notes.append, cache=tmp_path / "cache")
    visits = read_history(open_run(result.run).checkpoints()[0])["fits"]["visits"]
    plan = result.plan
    samples = [sample for step in range(plan.steps) for mb in plan.step(step) for sample in mb.samples]
    assert visits.sum(1).tolist() == [sum(s.picture == i for s in samples) for i in range(len(plan.manifest.pictures))]
    with Index(tmp_path / "cache" / PLACE) as index:
        (finding,) = misfits(plan, last_fits(plan, index))
    (said,) = (note for note in notes if "higher losses than the others" in note)
    assert finding.sentence == f"In the last run: {said}" and set(finding.pictures) == {s.picture for s in samples}


def test_encodings_in_ram_are_the_same_and_none_is_written(config, plain, tmp_path):
    result = run(change(config, memory={"encodings": "RAM"}), tmp_path, cache=tmp_path / "cache")
    assert result.losses == plain(config).losses and same(result, plain(config))
    assert not list((tmp_path / "cache").rglob("shard-*"))


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_weights_of_captions_and_prompts_count_where_they_are_asked_for(config, tmp_path, rate):
    """In losses, from the cache and from text encoders that are trained, and in samples."""
    (concept,) = config.dataset.concepts

    def trained(text, *, weights):
        captions = CaptionConfig(prefix=text)
        changed = config.replace(
            base_model=config.base_model.replace(prompt_weights=weights),
            dataset=DatasetConfig(concepts=(concept.replace(captions=captions),)),
            lora=config.lora.replace(preset="attn-only"),
            optimizer=config.optimizer.replace(text_encoder_learning_rate=rate),
            train=config.train.replace(steps=1),
            sample=SampleConfig(prompts=(text,), width=64, height=64, steps=1),
        )
        return run(changed, tmp_path)

    plain, weighted = trained("(sky:9)", weights=False), trained("(sky:9)", weights=True)
    assert plain.losses != weighted.losses and not torch.equal(plain.samples, weighted.samples)
    if rate:
        return
    off, on = trained(r"a sky", weights=False), trained(r"a sky", weights=True)
    assert off.losses == on.losses and torch.equal(off.samples, on.samples)
    with pytest.raises(ValueError, match=r'The text "\(sky:9e9\)" has a weight of 9e\+09'):
        run(
            config.replace(
                base_model=config.base_model.replace(prompt_weights=True), sample=SampleConfig(prompts=("(sky:9e9)",))
            ),
            tmp_path,
            source=NeverLoaded(config.base_model),
        )
