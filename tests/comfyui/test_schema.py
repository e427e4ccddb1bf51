"""The public format of our nodes: a snapshot that may only grow at its end, and a word of help for everything."""

import json
import os
import re
from pathlib import Path
from urllib.error import HTTPError

import pytest
from node_texts import inputs, tooltips, unescaped
from prompts import DYNAMIC_COMBO

from comfy_client import ComfyClient, ComfyServer
from lora_atelier.dev import PACK, ROOT

SNAPSHOT = Path(__file__).with_name("object_info.json")
NODES = sorted(json.loads(SNAPSHOT.read_text(encoding="utf-8")))
LISTS_OF_COMFYUI = (
    "checkpoint",
    "lora_name",
    "run",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "sampler_name",
    "scheduler",
    "tuned",
    "base",
)  # their options differ between machines and versions
WITHOUT_DEFAULT = ("checkpoint", "lora_name", "run", "tuned", "base")  # lists of files, which may be empty
PUBLIC = ("input", "input_order", "output", "output_name", "output_tooltips", "display_name", "description")
PUBLIC += ("category", "output_node")


def public_format(info: dict) -> dict:
    """Return what shared workflows and the editor depend on."""
    result = {}
    for name in sorted(n for n in info if n.startswith("Atelier")):
        result[name] = {key: info[name][key] for key in PUBLIC}
        drop_lists(result[name]["input"])
    return result


def drop_lists(groups: dict) -> None:
    """Leave out the options of lists that are ComfyUI's own, also inside of dynamic combos."""
    for group in groups.values():
        for key, spec in group.items():
            if key in LISTS_OF_COMFYUI and spec[0] == "COMBO":
                spec[1].pop("options")
            for option in spec[1]["options"] if spec[0] == DYNAMIC_COMBO else []:
                drop_lists(option["inputs"])


def test_the_schema_is_the_snapshot(any_server: ComfyServer) -> None:
    """After a deliberate change write the snapshot anew: ATELIER_WRITE_SNAPSHOT=1."""
    found = public_format(ComfyClient(any_server.url).object_info())
    if os.environ.get("ATELIER_WRITE_SNAPSHOT"):
        SNAPSHOT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


def test_every_node_input_and_output_explains_itself(comfy: ComfyClient) -> None:
    info = comfy.object_info()
    ours = sorted(name for name in info if name.startswith("Atelier"))
    assert ours == NODES
    for name in ours:
        schema = info[name]
        assert schema["description"] and schema["search_aliases"] and schema["category"] == "training/lora"
        silent = [key for key, spec in inputs(schema).items() if not spec[1].get("tooltip")]
        assert not silent, f"{name} does not explain {silent}"
        assert len(schema["output_tooltips"]) == len(schema["output"]) and all(schema["output_tooltips"])


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
@pytest.mark.parametrize("name", NODES)
def test_the_help_page_explains_every_input_and_output(comfy: ComfyClient, name: str, language: str) -> None:
    """The editor asks for a page in its language first."""
    page = comfy.request(f"/extensions/{PACK}/docs/{name}/{language}.md").decode()
    schema = comfy.get(f"/object_info/{name}")[name]
    assert page.startswith("# ")
    fields = [key.rpartition(".")[2] for key in inputs(schema)]
    assert [key for key in [*fields, *schema["output_name"]] if f"`{key}`" not in page] == []
    if language == "en":
        wanted = {tip for tips in tooltips(schema).values() for tip in tips} | set(schema["output_tooltips"])
    else:
        known = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))[name]
        given = [each["tooltip"].partition(": ")[2] for each in known["inputs"].values()]
        wanted = {unescaped(text) for text in [*given, *(each["tooltip"] for each in known["outputs"].values())]}
        english = re.search(
            r"^## (Inputs|Outputs)$|\| (whole number|number|choice|yes / no|text|on|off|empty) \|", page, re.M
        )
        assert not english, f"{english} is not translated"
    assert [text for text in wanted if text.replace("|", "\\|").replace("\n", " ") not in page] == []


def test_a_help_page_that_is_not_there_is_not_found(any_server: ComfyServer) -> None:
    comfy = ComfyClient(any_server.url)
    assert comfy.request(f"/extensions/{PACK}/docs/AtelierTrain.md") == comfy.request(
        f"/extensions/{PACK}/docs/AtelierTrain/en.md"
    )
    for page in ("AtelierNothing.md", "AtelierTrain/fr.md", "AtelierTrain/..%2F..%2Fzh.md", "..%2F..%2FREADME.md"):
        with pytest.raises(HTTPError, match="404"):
            comfy.request(f"/extensions/{PACK}/docs/{page}")


def test_every_number_has_a_range_and_every_choice_a_default(comfy: ComfyClient) -> None:
    info = comfy.object_info()
    for name in NODES:
        for key, (kind, options) in inputs(info[name]).items():
            if kind in ("INT", "FLOAT"):
                assert options["min"] <= options["default"] <= options["max"], f"{name}.{key}"
            elif kind == "COMBO" and ("default" in options or key.rpartition(".")[2] not in WITHOUT_DEFAULT):
                assert options["default"] in options["options"], f"{name}.{key}"
