"""What `export` writes, ComfyUI takes: any settings within their rows, against the schemas by its own rules."""

import dataclasses
import json
import math
from typing import Any

from bounded import bounded
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as chance
from hypothesis import strategies as st

from lora_atelier.dev import ROOT
from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BucketConfig,
    CaptionConfig,
    ConceptConfig,
    Config,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SampleConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.config.forms import FORMS
from lora_atelier.trainer_core.config.rows import Row, rows_of
from lora_atelier.trainer_core.workflow.canvas import DYNAMIC_COMBO, prompt_of
from lora_atelier.trainer_core.workflow.run_file import OPEN, RunFile
from lora_atelier.trainer_core.workflow.write import workflow_of

SCHEMAS = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))
TEXTS = {  # of settings that take no other text
    "file_name": ["{name}", "{name}-{step}"],
    "folder": ["", "atelier", "a/b"],
    "encoding": ["auto", "cp1252"],
    "separator": [",", ";"],
    "background": ["white", "#808080"],
    "expression": ["1 - t", "0.5"],
    "points": ["0:1, 1:0"],
    "token": ["moss"],
    "resolutions": [("512",), ("512", "640x384")],
    "extensions": [(".txt",), (".caption", ".txt")],
    "suffixes": [("-masklabel.png",), ("-a.png", "-b.png")],
    "prompts": [(), ("a cat --s 4", "a dog")],
    "include": [(), ("*attn2.to_k",)],
    "exclude": [(), ("*attn1*",)],
}
CASTS = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}
FILES = ("path", "vae", "text_encoder", "text_encoder_2", "start", "file", "fork_run")  # names of files
KINDS: dict[str, type[Config]] = {
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "objective": ObjectiveConfig,
    "memory": MemoryConfig,
    "lora": LoraConfig,
    "train": TrainConfig,
    "saves": SavesConfig,
    "sample": SampleConfig,
}


def values(row: Row) -> st.SearchStrategy[Any]:
    """Draw a value that a row allows."""
    if row.choices:
        return st.sampled_from(row.choices)
    if row.name in TEXTS:
        return st.sampled_from(TEXTS[row.name])
    if row.kind is bool:
        return st.booleans()
    if row.kind in (int, float):
        low, high = max(row.low, -1e30), min(row.high, 1e30)
        inside = st.integers(int(low), int(high)) if row.kind is int else st.floats(low, high, allow_subnormal=False)
        return inside if row.open is None else st.one_of(st.just(row.open), inside)
    if row.kind is tuple and row.item is not str:
        return st.lists(st.integers(0, 8).map(row.item), max_size=3).map(tuple)
    words = st.text("abc xyz", max_size=8).map(str.strip)
    return words if row.kind is str else st.lists(words.filter(bool), max_size=3).map(tuple)


@st.composite
def settings(draw: st.DrawFn, kind: type[Config], **given: Any) -> Config:
    """Draw a configuration with a few settings other than their defaults; what does not go together is drawn again."""
    known = [each for each in rows_of(kind).values() if each.name not in (*FILES, *given)]
    chosen = draw(st.lists(st.sampled_from(known), max_size=4, unique_by=lambda each: each.name))
    changed = {each.name: draw(values(each)) for each in chosen}
    for each in chosen:  # a setting acts with its choice
        if each.acts_with and each.acts_with[0] in {row.name for row in known}:
            changed[each.acts_with[0]] = draw(st.sampled_from(each.acts_with[1]))
    try:
        return kind(**given, **changed)
    except ValueError:
        assume(False)
        raise


@st.composite
def runs(draw: st.DrawFn) -> RunFile:
    """Draw a run of one or two concepts."""
    concepts = []
    for folder in draw(st.sampled_from([("/cats",), ("/cats", "/dogs")])):
        parts = {"captions": draw(settings(CaptionConfig))}
        parts["masks"] = draw(st.none() | settings(MaskConfig))
        parts["augment"] = draw(st.none() | settings(AugmentConfig))
        concepts.append(draw(settings(ConceptConfig, folder=folder, **parts)))
    parts = {name: draw(settings(kind)) for name, kind in KINDS.items()}
    word = draw(st.none() | settings(EmbeddingConfig, token="moss"))
    parts["train"] = parts["train"].replace(buckets=draw(settings(BucketConfig)))  # type: ignore[union-attr]
    parts["lora"] = parts["lora"].replace(embeddings=(word,) if word else ())  # type: ignore[union-attr]
    try:
        config = OPEN.replace(
            base_model=draw(settings(BaseModelConfig, path="/m/checkpoints/base.safetensors")),
            dataset=DatasetConfig(concepts=tuple(concepts)),
            **parts,
        )
    except ValueError:
        assume(False)
        raise
    return RunFile(name="cat", config=config)


def refused(prompt: dict[str, Any]) -> list[str]:
    """List what ComfyUI's execution refuses in a prompt, by its rules: missing inputs, types, ranges and lists."""
    return [each for node in prompt.values() for each in refused_inputs(SCHEMAS[node["class_type"]], node["inputs"])]


def refused_inputs(schema: dict[str, Any], given: dict[str, Any], prefix: str = "") -> list[str]:
    """List the inputs of a node that are refused; those of the option that a dynamic combo stands at as well."""
    found = []
    for group, specs in schema["input"].items():
        for name, spec in specs.items() if group in ("required", "optional") else ():
            kind, about, value = spec[0], spec[1], given.get(prefix + name)
            if value is None:
                found += [f"{prefix}{name} is missing"] if group == "required" else []
            elif kind == DYNAMIC_COMBO:
                options = {each["key"]: each for each in about["options"]}
                found += [f"{prefix}{name} is {value!r}"] if value not in options else []
                inner = {"input": options[value]["inputs"]} if value in options else {"input": {}}
                found += refused_inputs(inner, given, f"{prefix}{name}.")
            elif not isinstance(value, list):
                number = CASTS[kind](value) if kind in CASTS else value
                low, high = about.get("min", -math.inf), about.get("max", math.inf)
                if kind in ("INT", "FLOAT") and not low <= number <= high:
                    found.append(f"{prefix}{name} is {value}, not between {low} and {high}")
                if kind == "COMBO" and "options" in about and value not in about["options"]:
                    found.append(f"{prefix}{name} is {value!r}, none of {about['options']}")
    return found


@chance(suppress_health_check=[HealthCheck.filter_too_much])  # many settings do not go together
@given(run=runs())
@bounded(120)
def test_comfyui_takes_what_is_written(run: RunFile) -> None:
    """What no nodes can make is refused by the writer itself, in a sentence; it compares what is read back."""
    try:
        document = workflow_of(run)
    except ValueError as error:
        assert str(error).startswith("No workflow has the setting") or "has the setting" in str(error)
        assume(False)
        raise
    assert refused(prompt_of(document, FORMS)) == []


def test_comfyui_takes_both_ends_of_every_range() -> None:
    """Settings that do not go together are left out."""
    base = BaseModelConfig(path="/m/checkpoints/base.safetensors")
    plain = OPEN.replace(base_model=base, dataset=DatasetConfig(concepts=(ConceptConfig(folder="/cats"),)))
    taken = set()
    for part, kind in KINDS.items():
        rows = rows_of(kind)
        for each in rows.values():
            ends = (each.low, each.high) if each.kind in (int, float) else ()
            acts = each.acts_with if each.acts_with and each.acts_with[0] in rows else None
            choice = {acts[0]: acts[1][0]} if acts else {}
            for end in [end for end in ends if abs(end) < 1e30]:
                try:
                    document = workflow_of(
                        RunFile(
                            name="cat", config=plain.replace(**{part: kind(**choice, **{each.name: each.kind(end)})})
                        )
                    )
                except ValueError:
                    continue
                assert refused(prompt_of(document, FORMS)) == [], each.name
                taken.add(each.name)
    assert {"noise_offset", "rank", "batch_size", "huber_c"} <= taken and len(taken) > 60


def test_the_rules_see_what_is_refused() -> None:
    run = RunFile(name="cat", config=OPEN.replace(dataset=DatasetConfig(concepts=(ConceptConfig(folder="/cats"),))))
    prompt = prompt_of(
        workflow_of(
            dataclasses.replace(
                run,
                config=run.config.replace(
                    base_model=BaseModelConfig(path="/m/checkpoints/base.safetensors"),
                    objective=ObjectiveConfig(noise_offset=0.5, loss="huber", huber_c=0.3),
                ),
            )
        ),
        FORMS,
    )
    (key,) = [key for key, node in prompt.items() if node["class_type"] == "AtelierObjective"]
    for name, value in (("noise_offset", 1.5), ("loss.huber_c", 0.0), ("loss", "l3"), ("latent_sampling", "x")):
        inputs = {**prompt[key]["inputs"], name: value}
        assert len(refused({key: {**prompt[key], "inputs": inputs}})) == 1, name
    del prompt[key]["inputs"]["min_timestep"]
    assert refused(prompt) == ["min_timestep is missing"]
