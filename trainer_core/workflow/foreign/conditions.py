"""Follow the conditions of a script: which of its lines run, as far as its own variables tell."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

Known = Mapping[str, list[str]]  # variables of the script, in PowerShell by their names in lower case
TEXT = re.compile(r"\"(?:[^\"`\\]|[`\\].)*\"|'[^']*'")
IF_OF_SH = re.compile(r"^\s*(?:el)?if\s+\[+\s*(.*?)\s*\]+\s*;?\s*(?:then)?\s*$")
BRANCH = re.compile(r"^\s*(\})?\s*(if|elseif|else)\b\s*(.*?)\s*\{\s*$", re.IGNORECASE)
ONE_LINE = re.compile(
    r"^(\s*(?:\}\s*)?(?:if|elseif|else|foreach)\b[^{]*\{)\s*([^{}\s](?:[^{}]|\{\w+\})*?)\s*\}\s*$", re.IGNORECASE
)
COMPARED = re.compile(
    r"^(\S+|\"[^\"]*\"|'[^']*')\s+(==|=|!=|-[ic]?(?:eq|ne|like|notlike|gt|ge|lt|le))\s+(\S+|\"[^\"]*\"|'[^']*')$",
    re.IGNORECASE,
)
SIDE_OF_BAT = r"(?:\"[^\"]*\"|[^\s=\"]+)"  # of a comparison; each letter has one place in it, so that it takes no time
ASKED_OF_BAT = rf"@?if\s+(?:/i\s+)?(?:not\s+)?(?:(?:defined|exist|errorlevel)\s+{SIDE_OF_BAT}"
ASKED_OF_BAT += rf"|{SIDE_OF_BAT}\s*==\s*{SIDE_OF_BAT}|{SIDE_OF_BAT}\s+[a-z]{{3}}\s+{SIDE_OF_BAT})"
OF_BAT = re.compile(rf"^(?P<ends>\s*\)\s*)?(?P<else>else\s*)?(?P<if>{ASKED_OF_BAT})?\s*(?P<opens>\()?$", re.IGNORECASE)
IF_OF_BAT = re.compile(rf"^\s*({ASKED_OF_BAT})\s+(?!\s*\($)(.+)$", re.IGNORECASE)
TWO_OF_BAT = re.compile(r"^\((.*?)\)\s*else\b(.*)$", re.IGNORECASE)
NAMED = re.compile(r"^\"?\$\{?(\w+)\}?\"?$")
NEVER = ("function", "catch")  # blocks that do not run where they stand
SOMETIMES = ("foreach", "for", "while", "switch")
NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "gt": lambda one, other: one > other,
    "ge": lambda one, other: one >= other,
    "lt": lambda one, other: one < other,
    "le": lambda one, other: one <= other,
}


class Block(NamedTuple):
    """A block of lines: whether it runs, and whether a branch of its condition has run; None where nobody knows."""

    runs: bool | None
    over: bool | None


class Blocks:
    """The blocks around a line of a script."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: list[Block] = []
        self._ended = Block(None, None)  # the last one, which an else continues

    @property
    def skipped(self) -> bool:
        """Tell whether the line does not run."""
        return any(each.runs is False for each in self._open)

    @property
    def unsure(self) -> bool:
        """Tell whether nobody knows if the line runs."""
        return any(each.runs is None for each in self._open)

    def follow(self, line: str, known: Known) -> bool:
        """Open and close blocks; tell whether a line does nothing else."""
        return {"sh": self._follow_sh, "ps1": self._follow_ps1, "bat": self._follow_bat}[self._kind](line, known)

    def _follow_sh(self, line: str, known: Known) -> bool:
        asks = re.match(r"^\s*(if|elif|else)\b", line)
        if asks and asks.group(1) == "if":
            if not re.search(r"\bfi\s*;?\s*$", line):
                self._branch("if", _asked_in_sh(line, known))
            return True
        if asks and self._open:
            self._ended = self._open.pop()
            self._branch(asks.group(1), _asked_in_sh(line, known))
            return True
        if line.strip() in ("fi", "fi;") and self._open:
            self._open.pop()
            return True
        return bool(asks)

    def _follow_ps1(self, line: str, known: Known) -> bool:
        bare = re.sub(r"#.*$", "", TEXT.sub("''", line))
        if branch := BRANCH.match(re.sub(r"\s#[^\"']*$", "", line)):
            if branch.group(1) and self._open:
                self._ended = self._open.pop()
            self._branch(branch.group(2).lower(), holds(branch.group(3), known) if branch.group(3) else True)
            return True
        opened, closed = bare.count("{"), bare.count("}")
        if opened > closed:
            word = re.match(r"[\s}]*(\w*)", bare)
            first = word.group(1).lower() if word else ""
            if bare.lstrip().startswith("}") and self._open:
                self._open.pop()
            runs = False if first in NEVER else None if first in SOMETIMES else True
            self._open.append(Block(runs, runs))
            return True
        if closed > opened and self._open:
            self._ended = self._open.pop()
        return closed > opened

    def _follow_bat(self, line: str, known: Known) -> bool:
        if re.match(r"\s*@?for\b.*\($", line.rstrip(), re.IGNORECASE):
            self._open.append(Block(None, None))
            return True
        found = OF_BAT.match(line.strip())
        if not found or not any(found.groups()):
            return False
        if found["ends"] and self._open:
            self._ended = self._open.pop()
        if found["opens"]:
            word = ("else if" if found["if"] else "else") if found["else"] else "if"
            self._branch(word, _asked_in_bat(found["if"] or "", known))
        return True

    def _branch(self, word: str, asked: bool | None) -> None:
        """Open a branch of a condition; one after another that has run does not run."""
        over = False if word == "if" else self._ended.over
        asked = True if word == "else" else asked
        runs = False if over or asked is False else None if over is None or asked is None else True
        self._open.append(Block(runs, True if over or runs else None if over is None or runs is None else False))


def apart(line: str, kind: str) -> list[str]:
    """Split a condition whose block is in its own line into lines of their own."""
    if kind == "bat" and (found := IF_OF_BAT.match(line)):
        asked, then = found.groups()
        both = TWO_OF_BAT.match(then.strip())
        yes, no = (each.strip().removeprefix("(").removesuffix(")") for each in (both.groups() if both else (then, "")))
        return [f"{asked} (", yes, *([") else (", no] if no else []), ")"]
    found = ONE_LINE.match(line) if kind == "ps1" else None
    return [found.group(1), found.group(2), "}"] if found else [line]


def _asked_in_sh(line: str, known: Known) -> bool | None:
    found = IF_OF_SH.match(line)
    if not found:
        return None
    empty = re.fullmatch(r"-([nz])\s+(\S+)", found.group(1))
    if empty:
        value = _value(empty.group(2), known, lower=False)
        return None if value is None else bool(value) == (empty.group(1) == "n")
    return _compared(found.group(1), known, lower=False)


def _asked_in_bat(asked: str, known: Known) -> bool | None:
    """Evaluate what an if of cmd asks: whether two texts are the same, or a variable has a value."""
    words = re.sub(r"^@?if\s+(/i\s+)?", "", asked.strip(), flags=re.IGNORECASE)
    denied = re.match(r"not\s+", words, re.IGNORECASE)
    words = words[denied.end() :] if denied else words
    if defined := re.fullmatch(r"defined\s+(\w+)", words, re.IGNORECASE):
        value = known.get(defined.group(1).lower())
        answer = None if value is None else bool("".join(value))
    elif "==" in words:
        texts = [re.sub(r"[%!](\w+)[%!]", lambda match: _text(match, known), each) for each in words.split("==", 1)]
        same = [each.strip().lower() if re.search(r"/i", asked, re.IGNORECASE) else each.strip() for each in texts]
        answer = None if any(re.search(r"[%!]", each) for each in same) else same[0] == same[1]
    else:
        answer = None
    return None if answer is None else answer != bool(denied)


def _text(match: re.Match[str], known: Known) -> str:
    return " ".join(known[match.group(1).lower()]) if match.group(1).lower() in known else match.group()


def holds(text: str, known: Known) -> bool | None:
    """Evaluate a condition of PowerShell; None where the script does not tell."""
    text = text.strip()
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    for word in ("or", "and"):
        parts = _parts(text, word)
        if len(parts) > 1:
            found = [holds(part, known) for part in parts]
            decides = word == "or"
            return decides if decides in found else None if None in found else not decides
    if match := re.match(r"(?:-not\b|!)\s*(.+)$", text, re.IGNORECASE):
        inner = holds(match.group(1), known)
        return None if inner is None else not inner
    if COMPARED.match(text):
        return _compared(text, known, lower=True)
    value = _value(text, known, lower=True)
    return None if value is None else value.lower() not in ("", "0", "$false", "$null")


def _closing(text: str) -> int:
    """Find the bracket that closes the first one; -1 if none does."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return at
    return -1


def _parts(text: str, word: str) -> list[str]:
    """Split a condition at -and or -or, outside of brackets."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(rf"[()]|\s-{word}\s", text, re.IGNORECASE):
        if mark.group() in "()":
            depth += 1 if mark.group() == "(" else -1
        elif not depth:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [*parts, text[start:]]


def _value(text: str, known: Known, *, lower: bool) -> str | None:
    """Read a text, a number or a variable; None for what the script does not set, or anything else."""
    if named := NAMED.match(text):
        name = named.group(1).lower() if lower else named.group(1)
        if name in ("true", "false", "null"):
            return "" if name == "null" else f"${name}"
        return " ".join(known[name]) if name in known else None
    if TEXT.fullmatch(text):
        return None if "$" in text else text[1:-1]
    return text if re.fullmatch(r"[\w.+-]+", text) else None


def _compared(text: str, known: Known, *, lower: bool) -> bool | None:
    found = COMPARED.match(text)
    one, other = (_value(found.group(place), known, lower=lower) if found else None for place in (1, 3))
    if not found or one is None or other is None:
        return None
    word = found.group(2).lower()
    plain = {"==": "eq", "=": "eq", "!=": "ne"}.get(word, re.sub(r"^-(?:[ic](?=\w\w))?", "", word))
    one, other = (one.lower(), other.lower()) if lower else (one, other)
    if plain in ("eq", "ne"):
        return (one == other) == (plain == "eq")
    if plain in ("like", "notlike"):
        return fnmatch.fnmatchcase(one, other) == (plain == "like")
    try:
        return NUMBERS[plain](float(one or 0), float(other or 0))
    except ValueError:
        return None
