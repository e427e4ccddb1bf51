"""What a file of another trainer says in our words: the settings, what has no counterpart, and what is open."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...common.wording import say
from ...config import OPTIMIZERS
from ...config.naming import SECTIONS
from ...config.rows import without_effect

Convert = Callable[[Any], Any]
SECRET_NAME = re.compile(
    r"(?:api_?key|access_?key|secret_?key|private_?key|auth_?key|token|passw(?:or)?d|passphrase|secrets?|credentials?"
    r"|bearer|authorization|webhook(?:_url)?|cookie)(?:_env)?$|(?:^|[_ .])(?:key|pwd|pat)$"
)
SECRET_VALUE = re.compile(  # as services write their keys, and an address with a password
    r"\b(?:(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|r8_|rpa_|wandb_v1_)[\w-]{8,}|[0-9a-f]{32}|[0-9a-f]{40}"
    r"|eyJ[\w-]{8,}\.[\w.-]{8,}|\d{8,10}:[\w-]{30,})\b|://[^/\s:@]+:[^/\s@]+@|/api/webhooks/|hooks\.slack\.com/"
)
UNNAMED = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[\w-]{16,}")  # as a key stands by itself; files have a dot
TOO_LARGE = 2**63  # for a whole number, also for a seed


class Given:
    """The settings of a file over the defaults of its program; remembers which were read.

    defaults: of every setting that the program knows, by name. A value left out is the program's default, and a default
    is never reported: what is written of a setting without a counterpart counts only where it differs.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given, self._defaults = dict(given), defaults
        self._read: set[str] = set()

    def take(self, name: str) -> Any:
        """Read a setting; its default where the file has none, or null."""
        self._read.add(name)
        value = self._given.get(name)
        return self._defaults.get(name) if value is None else value

    def usual(self, name: str) -> float | None:
        """Return the number that the program takes where its file sets none; None for none."""
        value = self._defaults.get(name)
        return float(value) if isinstance(value, int | float) else None

    def ignore(self, names: Iterable[str]) -> None:
        """Skip settings that the program itself does not look at beside the others."""
        self._read.update(names)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings that nobody read, and whose value is not the default."""
        for name, value in self._given.items():
            if name not in self._read and not _same(value, self._defaults.get(name)):
                yield name, value


TEXT_ENCODERS: dict[str, tuple[int, ...]] = {
    # family -> where the rates of its text encoders stand in RATES, in the order of the other trainers; 0: nowhere
    "anima": (1,),
    "chroma": (1,),
    "flux": (1, 2),
    "hidream": (1, 2, 0, 0),
    "hunyuan_video": (0, 1),  # ComfyUI's loader has no names for a Llama beside others
    "lumina2": (1,),
    "pixart": (1,),
    "qwen_image": (1,),
    "sd3": (1, 2, 0),
    "stable_cascade": (1,),
}


def _same(value: Any, default: Any) -> bool:
    """Tell whether a value says no more than the default: off, empty and null are one."""
    empty = (None, "", False, [], {})
    return value == default or (value in empty and default in empty)


@dataclass(slots=True)
class Imported:
    """The settings that were found, and what was not."""

    program: str = ""  # and its version, where the file tells it
    name: str = "my_lora"
    values: dict[str, Any] = field(default_factory=dict)  # nested, as a TOML of ours has them
    left: list[str] = field(default_factory=list)  # settings without a counterpart, as `name = value`
    open: list[str] = field(default_factory=list)  # what a person still has to choose, a sentence each
    family: str = ""  # of a model that Load Base Model cannot load: as ComfyUI names it
    models: dict[str, str] = field(default_factory=dict)  # its files by role: diffusion_model, vae, text_encoder_1 …

    def put(self, setting: str, value: Any) -> None:
        """Set one of our settings by its full name."""
        *parts, last = setting.split(".")
        section = self.values
        for part in parts:
            section = section.setdefault(part, {})
        section[last] = value

    def leave(self, name: str, value: Any) -> None:
        """List a setting that has no counterpart; what is secret is named without its value."""
        self.left.append(name if is_secret(name, value) else f"{name} = {value!r:.80}")

    def not_pickled(self, name: str, value: Any) -> None:
        """List a form of the file that can run code when it is opened, and the one that is written."""
        self.left.append(f"{name} = {value!r:.80}: the file is written as .safetensors, which every program reads")

    def unreadable(self, name: str, value: Any) -> None:
        """Say that a setting holds no value that can be read, so that the program's default stands."""
        shown = "…" if is_secret(name, value) else f"{value!r:.60}"
        said = say(
            "{0} holds {1}, which is no such value; the default of {2} stands in its place.",
            name,
            shown,
            self.program,
        )
        self.open.append(said)

    def concept(self, **values: Any) -> None:
        """Add a concept."""
        self.values.setdefault("dataset", {}).setdefault("concepts", []).append(values)

    def drop_without_effect(self) -> None:
        """Drop settings that do not act beside the others: the programs ignore them in silence, ours refuses them."""
        _drop(self.values, "")


def without_counterpart(name: str, value: Any, remedy: str = "choose another one there") -> ValueError:
    """Say that a setting's value has no counterpart, for the reader to raise."""
    return ValueError(f"its {name} {value!s:.60} has no counterpart here; {remedy}")


def real(value: Any) -> float:
    """Read a number of a stranger's file; raises ValueError in words for what is none, or has no end."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"it holds {value!r:.60} where a number belongs; correct it there")
    return number


def whole(value: Any) -> int:
    """Read a whole number, as `real` does; what follows the point is cut off."""
    number = real(value)
    if abs(number) >= TOO_LARGE:
        raise ValueError(f"it holds {value!r:.60}, which is too large; correct it there")
    return int(number)


def table(value: Any) -> Mapping[str, Any]:
    """Read a table; anything else stands for an empty one."""
    return value if isinstance(value, Mapping) else {}


def tables(value: Any) -> list[Mapping[str, Any]]:
    """Read a list of tables; raises ValueError in words for anything else, but for nothing."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(f"it holds {value!r:.60} where a list of tables belongs; correct it there")
    return value


def listing(value: Any) -> list[Any]:
    """Read a list; one value stands for a list of one, and nothing for an empty one."""
    return [] if value is None else value if isinstance(value, list) else [value]


def is_secret(name: str, value: Any = None) -> bool:
    """Tell whether a setting holds a key or a token of a person, by its name or by how its value looks."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    if SECRET_NAME.search(words):
        return True
    if isinstance(value, Mapping):
        return any(is_secret(str(key), each) for key, each in value.items())
    if isinstance(value, list):
        return any(is_secret("", each) for each in value)
    return isinstance(value, str) and (SECRET_VALUE.search(value) is not None or is_secret_word(value))


def is_secret_word(word: str) -> bool:
    """Tell whether a word of a command, --name=value or name=value, gives a secret."""
    name, equals, value = word.lstrip("-").partition("=")
    return bool(equals and value) and SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def told_word(word: str) -> str:
    """Return a word of a command as a note may tell it: of a secret the name before its =, or three points."""
    name, equals, _ = word.partition("=")
    if equals:
        return name if is_secret("", word) else word
    return "…" if is_secret("", word) or UNNAMED.fullmatch(word) else word


def _drop(values: Any, section: str) -> None:
    for each in values if isinstance(values, list) else [values]:
        if isinstance(each, dict):
            for name in without_effect(SECTIONS[section], each) if section in SECTIONS else ():
                each.pop(name)
            for name, inner in each.items():
                _drop(inner, name)


def optimizer_named(kind: str) -> str | None:
    """Find our name of an optimizer by theirs; None for one that the table lacks."""
    plain = kind.rpartition(".")[2].lower().replace("_", "")
    ours = {name.replace("_", ""): name for name in OPTIMIZERS}
    others = {"sgdnesterov": "sgd", "sgdnesterov8bit": "sgd8bit", "adamwschedulefree": "schedulefree_adamw"}
    return others.get(plain) or ours.get(plain)


def take(found: Imported, given: Given, name: str, setting: str, convert: Convert) -> None:
    """Move one value over; list one that cannot be read."""
    value = given.take(name)
    if value is None or value == "":
        return
    try:
        found.put(setting, convert(value))
    except ValueError:
        found.unreadable(name, value)


def on(value: Any) -> bool:
    """Tell whether a switch is on."""
    return value is True or str(value).lower() in ("true", "1", "yes")


def number(found: Imported, given: Given, name: str) -> float | None:
    """Read a number; None for nothing. For what is no number, list it and take the program's default."""
    value = given.take(name)
    if value is None or value == "":
        return None
    try:
        return real(value)
    except ValueError:
        found.unreadable(name, value)
        return given.usual(name)


def put_number(found: Imported, given: Given, name: str, setting: str) -> None:
    """Move a number over; 0 means none there, as here."""
    if value := number(found, given, name):
        found.put(setting, value)


def put_prompts(found: Imported, lines: list[str]) -> None:
    """Set the prompts of the samples; flags that ours have not are listed and left out."""

    def known(match: re.Match[str]) -> str:
        flag = {"ctrl_img": "ci", "ctrl_img_1": "ci"}.get(match.group(1), match.group(1))
        if flag in ("n", "w", "h", "d", "s", "l", "g", "ss", "f", "ci"):
            return f" --{flag} {match.group(2).strip()}"
        found.leave(f"sample prompt --{flag}", match.group(2).strip())
        return ""

    if lines:
        cleaned = [re.sub(r"\s--(\w+)((?:(?!\s--\w).)*)", known, line).strip() for line in lines[:1000]]
        found.put("sample.prompts", [line for line in cleaned if line])
