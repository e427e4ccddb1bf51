"""What the help pages and the translations say of a node, from its schema as `/object_info` gives it."""

import re
from collections.abc import Mapping
from typing import Any

from prompts import DYNAMIC_COMBO

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
    """Return a help page whose tables give each input's and output's tooltip as its meaning."""
    tips = {key: spec[1]["tooltip"] for key, spec in inputs(schema).items()}
    told = dict(zip(schema["output_name"], schema["output_tooltips"], strict=True))
    lines, columns = page.split("\n"), 0
    for i, line in enumerate(lines):
        if line.startswith("## "):
            columns = {"## Inputs": 3, "## Outputs": 2}.get(line, 0)  # before the meaning
        if columns and (row := ROW.match(line)):
            options, name = row.groups()
            own = [rf".+\.{re.escape(option)}\.{name}" for option in (options or "").split(", ")] if options else [name]
            own = own if options or name in tips or columns == 2 else [rf".+\..+\.{name}"]  # the same for all options
            found = {tip for key, tip in tips.items() if any(re.fullmatch(one, key) for one in own)}
            (meaning,) = found if columns == 3 else {told[name]}
            meaning = meaning.replace("|", "\\|").replace("\n", " ")
            lines[i] = " | ".join([*line.split(" | ")[:columns], meaning]) + " |"
    return "\n".join(lines)


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
