"""The keys of runs: a setting's row says what it decides, and a key stays what it was."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BeneathConfig,
    CaptionConfig,
    ConceptConfig,
    Config,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.config.rows import row
from lora_atelier.trainer_core.runs import Keys, build_keys, key

CONCEPT = ConceptConfig(
    folder="/pictures",
    repeats=2,
    leave_out=("a.png",),
    captions=CaptionConfig(source="table", file="captions.json", shuffle=True),
    augment=AugmentConfig(zoom=0.1),
    masks=MaskConfig(folder="/masks", invert=True),
    controls=ControlConfig(folders=("/controls",), fit="whole"),
)
WHOLE = RunConfig(
    base_model=BaseModelConfig(path="/model.safetensors", vae="/vae.safetensors", tokenizer="/tokens", clip_skip=2),
    dataset=DatasetConfig(concepts=(CONCEPT,)),
    lora=LoraConfig(
        rank=8,
        names="peft",
        start="/lora.safetensors",
        beneath=(BeneathConfig(path="/beneath.safetensors", strength=0.5),),
        embeddings=(EmbeddingConfig(token="mossling", vectors=3),),
    ),
    optimizer=OptimizerConfig(name="adafactor", options={"beta1": 0.9}),
    scheduler=SchedulerConfig(name="rex", warmup_steps=5, planned_steps=90),
    objective=ObjectiveConfig(noise_offset=0.1, timestep_shift=2),
    train=TrainConfig(steps=70, seed=4, save_dtype="float32", validate_every=5, log="csv", validation_levels=8),
    memory=MemoryConfig(checkpointing="full"),
    sample=SampleConfig(prompts=("a mossling",)),
    saves=SavesConfig(keep_last=3),
)


def keys_of(config: RunConfig) -> Keys:
    return build_keys(config, {"path": "0" * 64}, "1" * 64)


def changed(section: str, **values: Any) -> RunConfig:
    return WHOLE.replace(**{section: getattr(WHOLE, section).replace(**values)})


def of_concept(change: Callable[[ConceptConfig], ConceptConfig]) -> RunConfig:
    return changed("dataset", concepts=(change(CONCEPT),))


def test_a_key_is_what_it_was() -> None:
    """Else nobody's finished run is found again; what trains other weights raises FORMAT, and is recorded anew."""
    keys = keys_of(WHOLE)
    assert (keys.run[:12], keys.course[:12]) == ("ed123d4cba9c", "af3fc62c288f")


@pytest.mark.parametrize(
    "same",
    [
        changed("base_model", path="/other.safetensors", vae="", tokenizer=""),
        changed("lora", start="/other.safetensors", beneath=(WHOLE.lora.beneath[0].replace(path="/other"),)),
        changed("train", log="none", validation_levels=0, validate_every=9),
        of_concept(lambda concept: concept.replace(folder="/other", leave_out=())),
        of_concept(lambda concept: concept.replace(captions=concept.captions.replace(file="other.json"))),
        of_concept(lambda concept: concept.replace(masks=MaskConfig(invert=True))),
        of_concept(lambda concept: concept.replace(controls=ControlConfig(folders=("/other",), fit="whole"))),
        WHOLE.replace(memory=MemoryConfig(), sample=SampleConfig(), saves=SavesConfig()),
    ],
)
def test_names_of_files_and_what_is_beside_the_weights_change_no_key(same: RunConfig) -> None:
    assert keys_of(same) == keys_of(WHOLE)


@pytest.mark.parametrize(
    "other",
    [
        changed("lora", names="comfy"),
        changed("scheduler", planned_steps=0),
        changed("train", steps=80),
        changed("train", epochs=2),
        changed("train", save_dtype="float16"),
    ],
)
def test_another_length_or_form_is_another_result_of_the_same_course(other: RunConfig) -> None:
    assert keys_of(other).run != keys_of(WHOLE).run and keys_of(other).course == keys_of(WHOLE).course


@pytest.mark.parametrize(
    "other",
    [
        changed("base_model", clip_skip=1),
        changed("lora", beneath=(WHOLE.lora.beneath[0].replace(strength=1),)),
        changed("objective", timestep_shift=3),
        changed("train", validate_every=5, keep_best=True),
        of_concept(lambda concept: concept.replace(captions=concept.captions.replace(shuffle=False))),
    ],
)
def test_all_else_is_another_course(other: RunConfig) -> None:
    assert keys_of(other).course != keys_of(WHOLE).course


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterSection(Config):
    width: float = row(0.0, "What decides weights.")
    shown: bool = row(False, "What does not.", decides="nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterRun(RunConfig):
    later: LaterSection = field(default_factory=LaterSection)


def test_a_section_that_comes_later_changes_no_key_until_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys_of(WHOLE)
    monkeypatch.setattr(key, "PARTS", (*key.PARTS, "later"))
    run = LaterRun(**{each.name: getattr(WHOLE, each.name) for each in fields(WHOLE)})
    assert keys_of(run) == keys_of(run.replace(later=LaterSection(shown=True))) == before
    assert keys_of(run.replace(later=LaterSection(width=1))).course != before.course


def test_tf32_changes_numbers_and_so_the_key() -> None:
    found = {choice: keys_of(changed("memory", tf32=choice)) for choice in ("auto", "on", "off")}
    assert found["auto"] == keys_of(WHOLE) and len({keys.course for keys in found.values()}) == 3
