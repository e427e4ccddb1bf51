"""Every preset is a run that the pack would train, has its sources, and leaves alone what is the person's."""

from pathlib import Path

import pytest
from train_graph import changed, concept, untouched

from lora_atelier.trainer_core import config as c
from lora_atelier.trainer_core.config.presets import FITS, GOALS, NETWORKS, RECIPES, TOY, memory_of, preset
from lora_atelier.trainer_core.config.rows import rows_of
from lora_atelier.trainer_core.models.architectures import ARCHITECTURES
from lora_atelier.trainer_core.workflow.read import read_workflow

ALL = [(kind, goal, size) for kind in RECIPES for goal in GOALS for size in memory_of(kind)]
WHOLE = [("flux", "style", 24, network) for network in NETWORKS if network != "lora"]
CONFIGS = {
    "train": c.TrainConfig,
    "lora": c.LoraConfig,
    "optimizer": c.OptimizerConfig,
    "memory": c.MemoryConfig,
    "base_model": c.BaseModelConfig,
}
NODES = {"train": "train", "lora": "lora", "optimizer": "optimizer", "memory": "memory", "base_model": "base"}
GRAPH = {
    "base": untouched("AtelierLoadBaseModel", checkpoint="model.safetensors"),
    "data": concept("pictures"),
    "lora": untouched("AtelierLoraConfig"),
    "optimizer": untouched("AtelierOptimizer", **{"name": "adamw", "name.learning_rate": -1.0}),
    "memory": untouched("AtelierMemory"),
    "train": untouched(
        "AtelierTrain",
        base_model=["base", 0],
        dataset=["data", 0],
        lora_config=["lora", 0],
        optimizer=["optimizer", 0],
        memory=["memory", 0],
    ),
}


class Anywhere:
    """Places in which every file is."""

    def find_folder(self, folder: str, node: str) -> Path:
        return Path("/pictures")

    def tokenizer_path(self) -> Path:
        return Path("/tokenizer")

    def checkpoint_path(self, name: str) -> Path:
        return Path("/models") / name


def test_every_family_has_a_recipe_and_memory() -> None:
    assert {each.kind for each in FITS} == set(RECIPES)
    assert set(RECIPES) - {TOY} <= {each.kind for each in ARCHITECTURES}
    assert {"sd1", "sdxl", "flux", "z_image", "qwen_image", "wan"} <= set(RECIPES)
    assert list(GOALS) == ["character", "style", "thing"]
    assert all(memory_of(kind) == sorted(set(memory_of(kind))) for kind in RECIPES)


@pytest.mark.parametrize(("kind", "goal", "size", "network"), [*((*each, "lora") for each in ALL), *WHOLE])
def test_every_preset_is_a_valid_run(kind: str, goal: str, size: int, network: str) -> None:
    chosen, graph = preset(kind, goal, size, network), GRAPH
    assert len(chosen.sources) >= 2 and all(chosen.sources)
    for name, value in chosen.settings.items():
        section, _, field = name.partition(".")
        row = rows_of(CONFIGS[section])[field]
        assert value in row.choices if row.choices else row.allows(value), name
        widget = f"name.{field}" if section == "optimizer" and field != "name" else row.input
        widget = f"algorithm.{field}" if field in ("factor", "full_matrix") else widget
        graph = changed(graph, NODES[section], **{widget: value})
    config = read_workflow(graph, Anywhere(), "train", lambda *_: pytest.fail("no model is linked")).config
    filled = c.fill(config, c.Defaults())
    assert filled.train.steps * filled.train.batch_size == pytest.approx(GOALS[goal].visits, abs=200)
    found = {"train": filled.train, "lora": filled.lora, "optimizer": filled.optimizer, "memory": filled.memory}
    found |= {"base_model": filled.base_model}
    for name, value in chosen.settings.items():
        section, _, field = name.partition(".")
        assert getattr(found[section], field) == value, name


def test_a_preset_leaves_pictures_words_and_names() -> None:
    names = {name for kind, goal, size in ALL for name in preset(kind, goal, size).settings}
    assert {name.partition(".")[0] for name in names} == set(CONFIGS)
    assert {name for name in names if name.startswith("base_model")} == {"base_model.weights"}


def test_goals_differ_and_little_memory_limits_the_rank() -> None:
    ranks = {goal: preset("flux", goal, 24).settings["lora.rank"] for goal in GOALS}
    assert ranks == {"character": 16, "style": 32, "thing": 8}
    assert preset("sdxl", "style", 8).settings["lora.rank"] == 8 < preset("sdxl", "style", 12).settings["lora.rank"]
    assert preset("sdxl", "style", 8).settings["lora.alpha"] == 4
    assert preset("sdxl", "style", 24).settings["lora.preset"] == "full"
    assert preset("flux", "style", 24).settings["lora.preset"] == "attn-mlp"  # it has no convolutions


def test_whole_lokrs_have_a_factor_for_a_rank() -> None:
    found = {name: preset("flux", "thing", 24, name).settings for name in NETWORKS}
    assert list(found) == ["lora", "lokr-4", "lokr-8", "lokr-16"] and "lora.algorithm" not in found["lora"]
    for factor in (4, 8, 16):
        chosen = found[f"lokr-{factor}"]
        assert (chosen["lora.algorithm"], chosen["lora.factor"], chosen["lora.full_matrix"]) == ("lokr", factor, True)
        assert not {"lora.rank", "lora.alpha"} & set(chosen)
        weights = factor**2 + (1280 // factor) ** 2  # of a square layer, against 2 * 1280 of a rank
        assert round((weights - factor**2) / 2560) == NETWORKS[f"lokr-{factor}"].like_rank
    with pytest.raises(ValueError, match="factor 8 has as many weights as a LoRA of rank 10, and 8 GB hold rank 8;"):
        preset("sdxl", "style", 8, "lokr-8")
    assert preset("sdxl", "style", 8, "lokr-16").settings["lora.factor"] == 16


@pytest.mark.parametrize(
    "asked", [("sdxl", "pose", 8), ("sora", "style", 8), ("sdxl", "style", 9), ("sdxl", "style", 8, "lokr-5")]
)
def test_what_is_not_in_the_tables_is_refused(asked) -> None:
    with pytest.raises(ValueError, match="There is no preset"):
        preset(*asked)
