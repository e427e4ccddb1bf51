"""Prompts that no editor sends: those of the workflows that come with the pack, each changed in one to three places."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prompts import DYNAMIC_COMBO, is_widget, to_prompt
from toy_workflows import on_toy_models
from train_graph import CHECKPOINT, node

from lora_atelier.dev import FLOW, ROOT, TOUR

Prompt = dict[str, Any]
WORKFLOWS = [*sorted((ROOT / "workflows").glob("*.json")), TOUR, FLOW]
SHORT: dict[str, dict[str, Any]] = {  # inputs that keep a prompt cheap
    "AtelierLoadBaseModel": {"checkpoint": CHECKPOINT},
    "AtelierLoraConfig": {"rank": 4},
    "AtelierScheduler": {"warmup_steps": 0},
    "AtelierTrain": {"steps": 1, "batch_size": 1, "resolution": 64},
    "AtelierDatasetPreview": {"resolution": 64, "limit": 2},
    "AtelierBuckets": {"bucket_step": 32},
    "AtelierSaves": {"sample_prompts": ""},
    "AtelierSample": {"width": 64, "height": 64, "steps": 1},
    "AtelierDrawnPictures": {"width": 64, "height": 64, "steps": 1, "pictures": 1},
    "EmptyImage": {"width": 64, "height": 64},
}
SLOW = ("compile",)  # inputs that stay as they are: an odd value counts as true there, and is right
PLACES = ("/etc/passwd", "../../../etc", "~root", "~", ".", "//server/share", r"\\?\C:\x", "C:\\x", "nul", "a/b/c")
TEXTS = ("", " ", "x", "\0", "a\0b", "\ud800", "\U0001f600", "\u202e\u0301", "-1", "1e400", "nan", "1,2", "{}", "{a|b")
TEXTS += ("(" * 500, "[" * 500, "%s{0}{name}", "a: b\nc: d", "\r\n\t", "__import__('os')", "0x10", "True", "None", ",")
LONG = ("x" * 100_001, "word " * 18_000, "1," * 40_000, "(a:1.1) " * 9_000, "9" * 5000)
NUMBERS = (0, 1, -1, 7, 0.5, -0.0, 1e-320, 2**31, 2**63, 2**64, -(2**64), 10**400, 1e300, float("nan"), float("inf"))
OTHERS = (None, True, False, [], {}, [1], ["1"], [1, 2, 3], [None, 0], {"a": 1}, {"__value__": [1, 2]}, [[]], [{}, 0])
WRAPPED = ({"__value__": None}, {"__value__": {}}, {"__type__": "x"}, {"__value__": 10**400}, {"__value__": [[]]})
SLOTS = (0, 1, 3, 6, 7, 99, -1, -99, 0.0, 1.5, True, "0", None, 10**30)
SMALL = [*PLACES, *TEXTS, *NUMBERS, *OTHERS, *WRAPPED]


def prompts(info: dict[str, Any], pictures: Path) -> dict[str, Prompt]:
    """Return short prompts by name: of each shipped workflow, of two more, and of one with the nodes that these lack.

    info: what /object_info answers. pictures: a folder.
    """
    made = {path.stem: to_prompt(on_toy_models(path), info) for path in WORKFLOWS}
    made["others"] = others(info)
    short = {**SHORT, "AtelierConceptDataset": {"folder": str(pictures), "trigger_word": "mossling"}}
    for prompt in made.values():
        for each in prompt.values():
            each["inputs"].update(short.get(each["class_type"], {}))
            each.pop("_meta", None)
    return made


def others(info: dict[str, Any]) -> Prompt:
    """Return a prompt with the nodes that no workflow of the pack has, at their defaults."""

    def plain(kind: str, **links: Any) -> Prompt:
        return node(kind, **{**defaults(info[kind]["input"]), **links})

    return {
        "base": plain("AtelierLoadBaseModel"),
        "image": plain("EmptyImage"),
        "folder": plain("AtelierConceptDataset"),
        "images": plain("AtelierImageConcept", images=["image", 0], dataset=["folder", 0]),
        "loaded": plain("CheckpointLoaderSimple", ckpt_name=CHECKPOINT),
        "drawn": plain(
            "AtelierDrawnPictures",
            **{name: ["loaded", number] for number, name in enumerate(("model", "clip", "vae"))},
            dataset=["images", 0],
            **{"of.prompt": "a circle"},
        ),
        "masks": plain("AtelierMaskLoader", dataset=["drawn", 0], missing="ones"),
        "augment": plain("AtelierAugment", dataset=["masks", 0]),
        "buckets": plain("AtelierBuckets"),
        "preview": plain("AtelierDatasetPreview", dataset=["augment", 0], buckets=["buckets", 0]),
        "optimizer": plain("AtelierOptimizer"),
        "scheduler": plain("AtelierScheduler"),
        "lora": plain("AtelierLoraConfig", base_model=["base", 0]),
        "word": plain("AtelierEmbedding", lora_config=["lora", 0], token="mossling"),
        "memory": plain("AtelierMemory"),
        "saves": plain("AtelierSaves"),
        "validation": plain("AtelierValidation"),
        "objective": plain("AtelierObjective"),
        "train": plain(
            "AtelierTrain",
            **{name: [name, 0] for name in ("optimizer", "scheduler", "memory", "saves", "objective", "validation")},
            base_model=["base", 0],
            dataset=["augment", 0],
            lora_config=["word", 0],
            buckets=["buckets", 0],
        ),
        "resized": plain("AtelierResizeLora", lora=["train", 2]),
        "existing": plain("AtelierExistingLora", lora_config=["lora", 0], lora=["resized", 0]),
        "again": plain(
            "AtelierTrain",
            **{name: [name, 0] for name in ("optimizer", "scheduler")},
            base_model=["base", 0],
            dataset=["masks", 0],
            lora_config=["existing", 0],
            name="again",
        ),
        "text": plain("PreviewAny", source=["resized", 1]),
        "path": plain("PreviewAny", source=["again", 5]),
        "number": plain("PrimitiveInt"),
        "words": plain("PrimitiveString"),
    }


def defaults(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the default of each widget, with the fields of the options that dynamic combos start with."""
    found: dict[str, Any] = {}
    for name, spec in [each for group in ("required", "optional") for each in (inputs.get(group) or {}).items()]:
        settings = spec[1] if len(spec) > 1 else {}
        if spec[0] == DYNAMIC_COMBO:
            found |= option(settings["options"][0], prefix + name)
        elif isinstance(spec[0], list):
            found[prefix + name] = spec[0][0]
        elif is_widget(spec):
            first = (settings.get("options") or [""])[0] if spec[0] == "COMBO" else ""
            found[prefix + name] = settings.get("default", first)
    return found


def option(chosen: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a dynamic combo at one of its options, with the option's fields at their defaults."""
    return {name: chosen["key"], **defaults(chosen["inputs"], f"{name}.")}


# --- changes --------------------------------------------------------------------------------------------------


def mutated(prompt: Prompt, info: dict[str, Any], number: int) -> tuple[Prompt, list[str]]:
    """Change one to three things of a prompt, the same for the same number; return it and what was done."""
    chance, prompt, done = random.Random(number), copy.deepcopy(prompt), []
    for _ in range(chance.choice((1, 1, 2, 3))):
        change = chance.choice([change for change, weight in CHANGES for _ in range(weight)])
        done.append(f"{change.__name__}: {change(prompt, info, chance)}")
    for each in prompt.values():  # what ComfyUI neither checks nor survives: its worker ends
        known = names(info[each["class_type"]]["input"], each["inputs"])
        for name, value in list(each["inputs"].items()):
            if name not in known and isinstance(value, list) and len(value) == 2 and value[0] not in [*prompt]:
                del each["inputs"][name]
    return prompt, done


def names(inputs: dict[str, Any], values: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the names of a node's inputs, with the fields of the options that `values` choose."""
    found = set()
    for name, spec in [each for group in ("required", "optional") for each in (inputs.get(group) or {}).items()]:
        found.add(prefix + name)
        for each in spec[1]["options"] if spec[0] == DYNAMIC_COMBO else []:
            if each["key"] == values.get(prefix + name):
                found |= names(each["inputs"], values, f"{prefix}{name}.")
    return found


def _input(prompt: Prompt, chance: random.Random, keep: Callable[[Any], bool]) -> tuple[str, str] | None:
    """Choose a node's input whose value is kept by `keep`; of our nodes three times as often."""
    found = [
        (key, name)
        for key, each in prompt.items()
        for name, value in each["inputs"].items()
        if name not in SLOW and keep(value)
        for _ in range(3 if each["class_type"].startswith("Atelier") else 1)
    ]
    return chance.choice(found) if found else None


def a_value(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Put an odd value into an input."""
    if (place := _input(prompt, chance, lambda value: True)) is None:
        return "none"
    value = chance.choice(LONG) if chance.random() < 0.1 else chance.choice(SMALL)
    prompt[place[0]]["inputs"][place[1]] = copy.deepcopy(value)
    return f"{place} = {ascii(value)[:60]}"


def a_choice(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Choose another option of a list, or a number at the end of its range where that is cheap."""
    found = [
        (key, name, spec[1]["options"])
        for key, each in prompt.items()
        for group in info[each["class_type"]]["input"].values()
        for name, spec in group.items()
        if len(spec) > 1 and spec[0] in ("COMBO", DYNAMIC_COMBO) and spec[1].get("options") and name not in SLOW
    ]
    if not found:
        return "none"
    key, name, options = chance.choice(found)
    chosen, inputs = chance.choice(options), prompt[key]["inputs"]
    if isinstance(chosen, dict):
        if chance.random() < 0.7:  # else the fields of the option before stay
            prompt[key]["inputs"] = inputs = {k: v for k, v in inputs.items() if not k.startswith(f"{name}.")}
        inputs.update(option(chosen, name) if chance.random() < 0.7 else {name: chosen["key"]})
        return f"{key}.{name} = {chosen['key']}"
    inputs[name] = chosen
    return f"{key}.{name} = {chosen}"


def an_input_left_out(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Leave out an input."""
    if (place := _input(prompt, chance, lambda value: True)) is None:
        return "none"
    del prompt[place[0]]["inputs"][place[1]]
    return f"{place}"


def an_unknown_input(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Add an input that the node does not have."""
    key = chance.choice(list(prompt))
    known = list(prompt[key]["inputs"]) or ["name"]
    made = (f"{chance.choice(known)}.x", f"{chance.choice(known)}.{chance.choice(known)}", "self", "cls", "", "\u0301")
    name = chance.choice(made)
    value = [chance.choice(list(prompt)), 0] if chance.random() < 0.5 else copy.deepcopy(chance.choice(SMALL))
    prompt[key]["inputs"][name] = value
    return f"{key}.{name!a} = {ascii(value)[:60]}"


def a_link(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Lead a link to another node or slot, or turn a value into a link."""
    linked = chance.random() < 0.7
    if (place := _input(prompt, chance, lambda value: isinstance(value, list) == linked)) is None:
        return "none"
    target = chance.choice([*prompt, *prompt, *prompt, "nowhere", ""])
    link = [target, chance.choice([0, 0, 0, 1, 2, *SLOTS])]
    if linked and chance.random() < 0.3:
        link[0] = prompt[place[0]]["inputs"][place[1]][0]
    prompt[place[0]]["inputs"][place[1]] = link
    return f"{place} = {link}"


def a_fitting_link(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Link an input to any output of a kind that it takes, also one that comes later in the prompt."""
    kinds = {(key, slot): kind for key, each in prompt.items() for slot, kind in enumerate(_outputs(each, info))}
    found = [
        (key, name, list(output))
        for key, each in prompt.items()
        for group in info[each["class_type"]]["input"].values()
        for name, spec in group.items()
        for output, kind in kinds.items()
        if kind in (spec[0], "*") and name not in SLOW
    ]
    if not found:
        return "none"
    key, name, link = chance.choice(found)
    prompt[key]["inputs"][name] = link
    return f"{key}.{name} = {link}"


def _outputs(each: Prompt, info: dict[str, Any]) -> list[str]:
    return info[each["class_type"]]["output"]


def a_node_removed(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Remove a node."""
    key = chance.choice(list(prompt))
    if len(prompt) > 1:
        del prompt[key]
    return key


def a_node_doubled(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Repeat a node under another name, and link something to it."""
    key = chance.choice(list(prompt))
    prompt["twin"] = copy.deepcopy(prompt[key])
    for each in prompt.values():
        for name, value in each["inputs"].items():
            if isinstance(value, list) and value[:1] == [key] and chance.random() < 0.5:
                each["inputs"][name] = ["twin", *value[1:]]
    return key


def a_class_swapped(prompt: Prompt, info: dict[str, Any], chance: random.Random) -> str:
    """Give a node the class of another."""
    key, other = chance.choice(list(prompt)), chance.choice(list(prompt))
    prompt[key]["class_type"] = prompt[other]["class_type"]
    return f"{key} = {prompt[key]['class_type']}"


CHANGES = (
    (a_value, 8),
    (a_choice, 3),
    (an_input_left_out, 2),
    (an_unknown_input, 2),
    (a_link, 2),
    (a_fitting_link, 3),
    (a_node_removed, 1),
    (a_node_doubled, 1),
    (a_class_swapped, 1),
)
