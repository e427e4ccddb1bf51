"""Presets and guesses set what a run needs in one step to undo, and say what they set, in both renderers."""

import json

import pytest
from in_editor import BASE, CONCEPT, LORA, MASKS, part
from in_editor import TRAIN as TOURS

from lora_atelier.dev import QUICKSTART
from lora_atelier.trainer_core.config import MemoryConfig
from lora_atelier.trainer_core.config.presets import GOALS, RECIPES, memory_of, preset
from lora_atelier.trainer_core.config.rows import rows_of

pytestmark = pytest.mark.browser

TRAIN = 3  # its id there
VALUES = """() => Object.fromEntries(window.app.graph.nodes.flatMap(node => (node.widgets ?? [])
    .filter(widget => widget.serialize !== false && node.comfyClass?.startsWith("Atelier"))
    .map(widget => [`${node.comfyClass}.${widget.name}`, widget.value])))"""
KINDS = "() => window.app.graph.nodes.map(node => node.comfyClass ?? node.type).sort()"
SHOWS = "words => [...document.querySelectorAll('.atelier-guesses')].some(box => box.textContent.includes(words))"
LINKED = """() => window.app.graph.nodes.find(node => node.comfyClass === "AtelierTrain").inputs
    .filter(input => input.link != null).map(input => input.name)"""
BUSY = "detail => window.app.api.dispatchCustomEvent('atelier.run', detail)"
ID = "() => window.app.graph.id"


def choose(editor, goal: str, family: str, memory: int, network: str = "lora") -> None:
    """Open the presets, and choose one."""
    editor.page.get_by_role("button", name="Preset…").click()
    popup = editor.page.get_by_role("dialog", name="Preset")
    popup.get_by_label("Model").select_option(family)
    popup.get_by_label("Memory of the GPU").select_option(str(memory))
    popup.get_by_label("Network").select_option(network)
    popup.get_by_role("button", name=goal.capitalize()).click()


def test_a_preset_is_one_step_to_undo(editor) -> None:
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    editor.alone(TRAIN)
    before, kinds = editor.run(VALUES), editor.run(KINDS)
    choose(editor, "style", "sdxl", 12)
    editor.page.wait_for_function(SHOWS, arg="Preset: Style, Stable Diffusion XL, 12 GB")
    editor.settle()
    after = editor.run(VALUES)
    assert after["AtelierTrain.steps"] == 3000 and after["AtelierTrain.resolution"] == 1024
    assert after["AtelierLoraConfig.rank"] == 64 and after["AtelierOptimizer.name.learning_rate"] == 1e-4
    assert after["AtelierMemory.checkpointing"] == "full"
    assert {"lora_config", "optimizer", "memory"} <= set(editor.run(LINKED))
    same = ("AtelierConceptDataset.folder", "AtelierConceptDataset.trigger_word", "AtelierTrain.name")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    editor.screenshot(f"preset-{'vue' if editor.vue else 'litegraph'}-{editor.version}")

    editor.page.mouse.click(1400, 500)  # of the empty canvas: the editor then keeps a size that changed late, too
    editor.page.keyboard.press("Control+z")
    editor.page.wait_for_function(f"kinds => JSON.stringify(({KINDS})()) === JSON.stringify(kinds)", arg=kinds)
    assert editor.run(VALUES) == before


def test_the_button_undo_takes_a_preset_back(editor) -> None:
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    editor.alone(TRAIN)
    before, kinds = editor.run(VALUES), editor.run(KINDS)
    choose(editor, "character", "sdxl", 24, "lokr-8")
    editor.page.wait_for_function(SHOWS, arg="Preset: Character, Stable Diffusion XL, 24 GB")
    after = editor.run(VALUES)
    assert after["AtelierTrain.steps"] == 500
    assert (after["AtelierLoraConfig.algorithm"], after["AtelierLoraConfig.algorithm.factor"]) == ("lokr", 8)
    assert after["AtelierLoraConfig.algorithm.full_matrix"] is True
    editor.page.locator(".atelier-guesses").get_by_role("button", name="Undo").click()
    editor.page.wait_for_function(f"kinds => JSON.stringify(({KINDS})()) === JSON.stringify(kinds)", arg=kinds)
    assert editor.run(VALUES) == before


def test_every_preset_is_set_as_its_table_says(editor, pytestconfig) -> None:
    editor.load(part(BASE, CONCEPT, MASKS, LORA, TOURS))
    editor.alone(TOURS)
    nodes = {"train": "AtelierTrain.", "lora": "AtelierLoraConfig.", "memory": "AtelierMemory.", "base_model": ""}
    thorough = pytestconfig.getoption("thorough")
    for number, kind in enumerate(RECIPES if thorough else [*RECIPES][::2]):
        presets = [*zip(GOALS, memory_of(kind) * 3, strict=False)]
        for goal, memory in presets if thorough else [presets[number % len(presets)]]:  # each goal
            choose(editor, goal, kind, memory)
            editor.page.wait_for_function(SHOWS, arg=f"Preset: {goal.capitalize()}, ")
            found = editor.run(VALUES)
            for name, value in preset(kind, goal, memory).settings.items():
                section, _, field = name.partition(".")
                if section == "memory" and f"AtelierMemory.{field}" not in found:  # no node: as it is left alone
                    assert rows_of(MemoryConfig)[field].shown == value, (kind, goal, memory, name)
                elif nodes.get(section):
                    assert found[nodes[section] + field] == value, (kind, goal, memory, name)
            editor.page.locator(".atelier-guesses").get_by_role("button", name="Close").click()


def test_a_run_at_work_greys_what_sets_it(editor) -> None:
    editor.load(json.loads(QUICKSTART.read_text(encoding="utf-8")))
    editor.alone(TRAIN)
    state = {"workflow": editor.run(ID), "node": str(TRAIN), "alive": True, "step": 1, "steps": 4, "text": "Step 1"}
    editor.run(BUSY, state)
    for name in ("Guess settings", "Preset…"):
        button = editor.page.get_by_role("button", name=name)
        assert button.is_disabled()
        assert button.get_attribute("title") == "A LoRA is being trained here. Change the settings after it."
    editor.run(BUSY, {**state, "alive": False})
    assert editor.page.get_by_role("button", name="Guess settings").is_enabled()
