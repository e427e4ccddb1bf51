"""What the help pages and the translations say of a node, from its schema as `/object_info` gives it."""

import re
from collections.abc import Mapping
from typing import Any

from prompts import DYNAMIC_COMBO

KIND = {DYNAMIC_COMBO: "choice", "COMBO": "choice", "BOOLEAN": "yes / no", "STRING": "text"}
KIND |= {"INT": "whole number", "FLOAT": "number"}
ROW = re.compile(r"\| (?:([^`|]+): )?`([^`]+)` \| ")  # of a help page's tables: options of a choice, then a name


def inputs(schema: dict) -> dict:
    """Return the inputs of a node, required and optional; those of a dynamic combo's options as combo.option.field."""
    found = {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}
    for name, (kind, details) in list(found.items()):
        for option in details["options"] if kind == DYNAMIC_COMBO else []:
            own = inputs({"input": option["inputs"]})
            found |= {f"{name}.{option['key']}.{field}": spec for field, spec in own.items()}
    return found


def explained(page: str, schema: dict) -> str:
    """Return a help page with the tables of inputs and outputs, in the node's order; its prose stays."""
    prose = page.partition("\n## Inputs\n")[0].partition("\n## Outputs\n")[0].rstrip("\n")
    given = _rows(schema["input"])
    outputs = zip(schema["output_name"], schema["output"], schema["output_tooltips"], strict=True)
    made = [[f"`{name}`", _plain(kind), tip] for name, kind, tip in outputs]
    tables = [
        ("Inputs", ["Input", "Kind", "Default", "Meaning"], given),
        ("Outputs", ["Output", "Kind", "Meaning"], made),
    ]
    return "\n\n".join([prose, *(_table(*table) for table in tables if table[2])]) + "\n"


def _rows(given: Mapping[str, Any]) -> list[list[str]]:
    """List the cells of each input; fields that several options of a choice share stand once."""
    found = []
    for name, (kind, details) in {**given.get("required", {}), **given.get("optional", {})}.items():
        found.append([f"`{name}`", _plain(kind), _default(kind, details), details["tooltip"]])
        shared: dict[tuple[str, ...], list[str]] = {}  # the options with a field
        for option in details["options"] if kind == DYNAMIC_COMBO else ():
            for cells in _rows(option["inputs"]):
                shared.setdefault(tuple(cells), []).append(option["key"])
        found += [[f"{', '.join(keys)}: {name}", *rest] for (name, *rest), keys in shared.items()]
    return found


def _default(kind: str, details: Mapping[str, Any]) -> str:
    default = details.get("default", "")
    if kind in ("COMBO", DYNAMIC_COMBO):
        words = [each["key"] if isinstance(each, dict) else each for each in details.get("options", ())]
        return str(default if "default" in details or not words else words[0])
    if kind == "BOOLEAN":
        return "on" if default else "off"
    if kind == "FLOAT":
        return f"{default:.10g}"
    return str(default) if kind != "STRING" else default or "empty"


def _plain(kind: str) -> str:
    """Name a type for people."""
    return KIND.get(kind, kind.removeprefix("ATELIER_"))


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    lines = [" | ".join(each.replace("|", "\\|").replace("\n", " ") for each in row) for row in cells]
    return "\n".join([f"## {title}", "", *(f"| {line} |" for line in lines)])


def tooltips(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the tooltips of each input by its name in the editor: combo.field for all options of a dynamic combo."""
    found: dict[str, set[str]] = {}
    for key, (_, details) in inputs(dict(schema)).items():
        found.setdefault(".".join(key.split(".")[::2]), set()).add(details["tooltip"])
    return found


def texts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of a node in the form of ComfyUI's file nodeDefs.json.

    It has one tooltip for an input: one that differs between the options of a combo is left to the node itself.
    """
    known: dict[str, Any] = {}
    for name, tips in tooltips(schema).items():
        known[name.replace(".", "_")] = {"name": name.rpartition(".")[2]}
        if len(tips) == 1:
            known[name.replace(".", "_")]["tooltip"] = escaped(*tips)
    told = zip(schema["output_name"], schema["output_tooltips"], strict=True)
    return {
        "display_name": escaped(schema["display_name"]),
        "description": escaped(schema["description"]),
        "inputs": known,
        "outputs": {str(i): {"name": name, "tooltip": escaped(tip)} for i, (name, tip) in enumerate(told)},
    }


def escaped(text: str) -> str:
    """Write a text for vue-i18n, which reads braces, @ and | as its own."""
    return re.sub(r"[{}@|]", lambda found: f"{{'{found[0]}'}}", text)


def unescaped(text: str) -> str:
    """Read a text as vue-i18n shows it."""
    return re.sub(r"\{'([{}@|])'\}", r"\1", text)


KINDS = {  # the words of a help page's tables
    "zh": {
        "Inputs": "输入", "Outputs": "输出", "Input": "输入", "Output": "输出", "Kind": "类型", "Default": "默认值",
        "Meaning": "含义", "number": "数字", "whole number": "整数", "choice": "选项", "yes / no": "开关",
        "text": "文本", "empty": "空", "on": "开", "off": "关",
    }
}  # fmt: skip


def translated(page: str, english: str, schema: Mapping[str, Any], known: Mapping[str, Any], language: str) -> str:
    """Return a help page in another language: its prose as it is, its tables made of the English page's.

    known: the texts of the node in that language. The tables come last.
    """
    words, own = KINDS[language], texts(schema)["inputs"]
    lines = [page.partition(f"\n## {words['Inputs']}\n")[0].rstrip("\n"), ""]
    tables = "## Inputs" + english.partition("\n## Inputs")[2]
    outputs = {name: known["outputs"][str(i)]["tooltip"] for i, name in enumerate(schema["output_name"])}
    inside = ""
    for line in tables.split("\n"):
        cells = line.strip("| ").split(" | ")
        if line.startswith("## "):
            inside = line.removeprefix("## ")
            lines.append(f"## {words[inside]}")
        elif row := ROW.match(line):
            name, first = row[2], cells[0]
            if inside == "Inputs":
                fields = [key for key, text in own.items() if key != name and text["name"] == name]
                (key, *_) = fields if row[1] or name not in own else [name]
                meaning = known["inputs"][key]["tooltip"].partition(": ")[2]
                first = first.replace(f"`{name}`", f"`{name}` {known['inputs'][key]['name']}")
            else:
                meaning = outputs[name]
            meaning = unescaped(meaning).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {' | '.join([first, *(words.get(cell, cell) for cell in cells[1:-1]), meaning])} |")
        elif line.startswith("| ---"):
            lines.append(line)
        elif line.startswith("| "):
            lines.append(f"| {' | '.join(words[cell] for cell in cells)} |")
        else:
            lines.append(line)
    return "\n".join(lines)
