"""Every place where the nodes touch ComfyUI's insides is listed in docs/comfyui.md, and is there in this ComfyUI."""

import ast
import importlib
import inspect
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import comfy.clip_model
import comfy.clip_vision
import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import comfy.ops
import comfy.quant_ops
import comfy.sd
import comfy_execution.graph
import comfy_execution.progress
import execution
import pytest
import server
import torch
from zoo.comfy_here import VERSION
from zoo.zoo import ZOO, build

from lora_atelier.dev import ROOT
from lora_atelier.insides import missing_in_comfyui

PAGE = ROOT / "docs" / "comfyui.md"
NAMES = re.compile(r"<!-- names -->\n(.*?)<!-- /names -->", re.DOTALL)
IN_THE_PAGE = re.compile(r"<!-- page -->\n(.*?)<!-- /page -->", re.DOTALL)
HEAD = "| ComfyUI's | used in |\n|---|---|\n"
# Modules of ComfyUI whose names stand for themselves; `nodes` is ComfyUI's where the import has no dots.
ROOTS = (
    *("app", "comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths"),
    *("latent_preview", "node_helpers", "nodes", "server"),
)
INSTANCE = "server.PromptServer.instance."  # which only a server has; its class shows the methods alone
# What ComfyUI hands over, by the names that variables and attributes have for it, and what leads on from there.
HANDED = {"patcher": "MODEL", "clip": "CLIP", "vae": "VAE", "vision": "CLIP_VISION", "model_sampling": "its sampling"}
HANDED |= {"model_config": "its configuration", "latent_format": "its latent format"}
LEADS = {("MODEL", "model"): "its model", ("CLIP_VISION", "model"): "the model of a CLIP_VISION"}


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Parse our nodes: the names of their files, and what is in them."""
    paths = sorted((ROOT / "nodes").rglob("*.py"))
    return [(path.name, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@cache
def touched() -> dict[str, set[str]]:
    """List the dotted names of ComfyUI that our nodes read -> the files that do."""
    found: dict[str, set[str]] = {}
    for file, tree in modules():
        names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    if each.name.split(".")[0] in ROOTS:
                        local = each.asname or each.name.split(".")[0]
                        names[local] = each.name if each.asname else local
                        found.setdefault(each.name, set()).add(file)
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in ROOTS:
                for each in node.names:
                    names[each.asname or each.name] = f"{node.module}.{each.name}"
                    found.setdefault(f"{node.module}.{each.name}", set()).add(file)

        def dotted(node, names=names):
            if isinstance(node, ast.Name):
                return names.get(node.id)
            above = dotted(node.value) if isinstance(node, ast.Attribute) else None
            return above and f"{above}.{node.attr}"

        stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        assigned, meant = Counter(node.id for node in stored), {}
        for node in ast.walk(tree):  # management = comfy.model_management
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                one, other = node.targets[0], node.value
                several = isinstance(one, ast.Tuple) and isinstance(other, ast.Tuple)
                for target, value in zip(one.elts, other.elts, strict=True) if several else [(one, other)]:
                    if isinstance(target, ast.Name) and dotted(value):
                        meant.setdefault(target.id, []).append(dotted(value))
        for name, values in meant.items():  # a name that always means the same in its file
            if len(values) == assigned[name] and len(set(values)) == 1:
                names[name] = values[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := dotted(node)):
                found.setdefault(name, set()).add(file)
    return {name: files for name, files in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def find(name: str):
    """Find what a dotted name of ComfyUI stands for; raises AttributeError or ImportError that names what is gone."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_the_page_lists_every_name_that_is_touched():
    rows = "".join(f"| `{name}` | {', '.join(sorted(files))} |\n" for name, files in sorted(touched().items()))
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("ATELIER_WRITE_INSIDES"):
        text = NAMES.sub(lambda _: f"<!-- names -->\n{HEAD}{rows}<!-- /names -->", text)
        PAGE.write_text(text, encoding="utf-8")
    assert NAMES.search(text)[1] == HEAD + rows


def test_this_comfyui_has_what_the_page_lists():
    gone = []
    for name in touched():
        of_instance = name.removeprefix(INSTANCE)
        try:
            found = find(name) if of_instance == name else server.PromptServer
            if of_instance != name and hasattr(server.PromptServer, "__init__"):
                assert of_instance.split(".")[0] in own_parts()
        except (AttributeError, ImportError, AssertionError):
            found = None
            gone.append(name)
        assert found is not None or name in gone
    assert not gone, f"ComfyUI {VERSION} has no {', '.join(gone)}"


def own_parts() -> set[str]:
    """List the methods of ComfyUI's server, and what it gives itself when it starts."""
    source = Path(server.__file__).read_text(encoding="utf-8")
    return {*dir(server.PromptServer), *re.findall(r"\bself\.(\w+)\s*=", source)}


def test_the_page_lists_what_the_pages_own_modules_read():
    found = sorted({
        name.replace("?", "")
        for path in (ROOT / "js").glob("*.js")
        for name in re.findall(r"(?<![\w./])(?:app|api|ComfyApp)(?:\??\.[A-Za-z_]+)+", path.read_text(encoding="utf-8"))
        if name not in ("app.js", "api.js")
    })  # fmt: skip
    listed = IN_THE_PAGE.search(PAGE.read_text(encoding="utf-8"))[1]
    assert re.findall(r"`([\w.]+)`", listed) == found


def test_the_page_lists_the_elements_and_events_of_comfyui_that_ours_look_for():
    text, listed = "", PAGE.read_text(encoding="utf-8").partition("Elements:")[2]
    for path in sorted((ROOT / "js").glob("*.js")):
        text += path.read_text(encoding="utf-8")
    elements = {*re.findall(r'"(#\w+)"', text), *re.findall(r"\[([a-z]+-[a-z-]+)=", text)} - {"data-row", "data-column"}
    events = {*re.findall(r'api\.addEventListener\(\s*"([\w.]+)"', text)}
    assert "#maskEditorCanvasContainer" in elements and "reconnected" in events
    for name in elements | {event for event in events if not event.startswith("atelier.")}:
        assert f"`{name}`" in listed


def attributes() -> dict[str, list[str]]:
    """Read the page's table of attributes: whose -> which."""
    table = PAGE.read_text(encoding="utf-8").partition("| of | attributes |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {whose: re.findall(r"`(\w+)`", names) for whose, names in rows}


def test_what_comfyui_hands_over_has_what_we_read_of_it():
    name = "flux_dev"
    assert name in ZOO
    _, model = build(name)
    things = {"MODEL": model, "its model": model.model, "CLIP": comfy.sd.CLIP, "VAE": comfy.sd.VAE}
    things["its configuration"], things["its latent format"] = model.model.model_config, model.model.latent_format
    things["its sampling"] = model.model.model_sampling
    things["a layer of it"] = comfy.ops.manual_cast.Linear
    things["a layer of it in 8 bits"] = comfy.ops.mixed_precision_ops().Linear
    things["a weight in 8 bits"] = comfy.quant_ops.QuantizedTensor
    things["a model that is loaded"] = comfy.model_management.LoadedModel
    things["its prompt"] = comfy_execution.graph.DynamicPrompt
    things["its progress"] = comfy_execution.progress.ProgressRegistry
    things["CLIP_VISION"] = comfy.clip_vision.ClipVisionModel
    things["the model of a CLIP_VISION"] = comfy.clip_model.CLIPVisionModelProjection
    assert attributes().keys() == things.keys()
    gone = {
        f"{whose}.{each}"
        for whose, listed in attributes().items()
        for each in listed
        if not hasattr(things[whose], each) and not re.search(rf"self\.{each}\b.* = ", source_of_class(things[whose]))
    }
    assert not gone, f"ComfyUI {VERSION} has no {', '.join(sorted(gone))}"


def test_a_node_of_a_running_prompt_may_stand_for_another_one():
    """Write Captions adds nodes to the prompt that runs; each is shown as the node that it is a copy of."""
    assert "`override_display_id`" in PAGE.read_text(encoding="utf-8")
    assert "override_display_id" in Path(execution.__file__).read_text(encoding="utf-8")
    state = comfy_execution.progress.NodeProgressState.__annotations__
    assert {"value", "max"} <= state.keys()


def read_of_what_is_handed_over() -> dict[str, set[str]]:
    """List the attributes that our nodes read of what ComfyUI hands over, as far as a name tells it: whose -> which."""
    found: dict[str, set[str]] = {}
    for _, tree in modules():
        imports = (node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)))
        imported = {each.asname or each.name for node in imports for each in node.names}

        def whose(node, imported=imported):
            if isinstance(node, ast.Name):
                return None if node.id in imported else {**HANDED, "sampling": "its sampling"}.get(node.id)
            if isinstance(node, ast.Attribute):
                above = whose(node.value)
                return LEADS.get((above, node.attr)) or HANDED.get(node.attr)
            named = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get_model_object") and node.args
            return HANDED.get(ast.literal_eval(node.args[0])) if named else None

        for node in ast.walk(tree):
            asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
            if isinstance(node, ast.Attribute) and (owner := whose(node.value)):
                found.setdefault(owner, set()).add(node.attr)
            elif asked and isinstance(node.args[1], ast.Constant) and (owner := whose(node.args[0])):
                found.setdefault(owner, set()).add(node.args[1].value)
    return found


def test_the_page_lists_every_attribute_that_is_read_of_what_comfyui_hands_over():
    listed, found = attributes(), read_of_what_is_handed_over()
    assert {"MODEL", "its model", "its sampling", "CLIP", "VAE", "CLIP_VISION"} <= found.keys()
    torchs = {*dir(torch.nn.Module), *(name for name in dir(comfy.model_sampling) if name[:1].isupper())}
    lacking = {
        f"{whose}.{each}" for whose, read in found.items() for each in read if each not in (*listed[whose], *torchs)
    }
    assert not lacking, f"docs/comfyui.md lacks {', '.join(sorted(lacking))}"


def source_of_class(thing) -> str:
    """Read the source of a class, for what its instances get when they are made."""
    return inspect.getsource(thing) if isinstance(thing, type) else ""


def test_what_is_gone_is_named_with_what_to_do(monkeypatch):
    monkeypatch.delattr(comfy.model_base, "SDXLRefiner")
    with pytest.raises(AttributeError) as gone:
        _ = comfy.model_base.SDXLRefiner
    assert missing_in_comfyui(gone.value) == (
        f"ComfyUI {VERSION} has no comfy.model_base.SDXLRefiner, which LoRA Atelier uses. Update LoRA Atelier; until "
        "then use an older ComfyUI."
    )
    with pytest.raises(ImportError) as gone:
        from comfy.model_base import SDXLRefiner  # noqa: F401
    assert "has no comfy.model_base.SDXLRefiner, which" in missing_in_comfyui(gone.value)
    with pytest.raises(ImportError) as gone:
        import comfy.nothing as _  # noqa: F401
    assert "has no comfy.nothing, which" in missing_in_comfyui(gone.value)
    for other in (AttributeError("x"), ImportError("No module named 'diffusers'", name="diffusers"), ValueError("x")):
        assert missing_in_comfyui(other) == ""
