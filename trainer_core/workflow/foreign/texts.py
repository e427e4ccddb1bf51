"""Read the texts of strangers: their encodings, and the command in a script of bash, cmd or PowerShell."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.json_files import DEEPEST
from ...common.wording import say
from ...data.scan.caption_files import likely_codec
from .conditions import Blocks, apart, holds

MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
LARGEST = 2**20  # bytes of a file
MOST_WORDS = 10_000  # of a command
MOST_ALIASES, MOST_EVENTS = 20, 20_000  # of a YAML, which takes a second for so many
PROGRAM = re.compile(r"(?:^|[\\/])([\w.-]*(?:train|fine_tune)[\w.-]*\.py)$", re.IGNORECASE)
SET = {  # how a shell sets a variable, or adds to it
    "sh": re.compile(
        r"^\s*(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL
    ),
    "bat": re.compile(r'^\s*@?set\s+(?=[^/])"?([^=\s"]+)()=(.*?)\s*$', re.IGNORECASE),
    "ps1": re.compile(
        r"^\s*(?:\[[\w.]+\]\s*)?\$(?:env:)?([A-Za-z_]\w*)(?:(\.Add)\(|\s*(\+?)=\s*)(.*?)\)?\s*;?\s*$",
        re.IGNORECASE | re.DOTALL,
    ),
}
USED = {  # how it names one
    "sh": re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|(\w+)|\([^()]*\))|`[^`]*`"),
    "bat": re.compile(r"[%!]([A-Za-z_]\w*)()[%!]()|%~?[1-9]"),
    "ps1": re.compile(r"\$(?:\{(?:env:)?(\w+)()\}|(?:env:)?([A-Za-z_]\w*))", re.IGNORECASE),
}
REPLACED = re.compile(r"(\S+)\s+-[ic]?replace\s+[\"']([^\"']+)[\"']\s*,\s*[\"']([^\"']*)[\"']", re.IGNORECASE)
LONGEST_CHOICE = 300  # characters: a longer one takes time by their cube
EITHER = re.compile(r"if\s*\((.*?)\)\s*\{\s*(.*?)\s*\}\s*else\s*\{\s*(.*?)\s*\}", re.IGNORECASE)
SKIPPED = {
    "sh": re.compile(r"^\s*(?:#|echo\b|printf\b|$)"),
    "bat": re.compile(r"^\s*@?(?:rem\b|::|echo\b|title\b|$)", re.IGNORECASE),
    "ps1": re.compile(r"^\s*(?:#|echo\b|write-(?:host|output)\b|$)", re.IGNORECASE),
}
CONTINUED = {"sh": "\\", "bat": "^", "ps1": "`"}
ESCAPE = {"sh": "\\", "bat": "", "ps1": "`"}
QUOTES = {"sh": "\"'", "bat": '"', "ps1": "\"'"}
WRITTEN = {  # what another command writes
    "sh": re.compile(r"\$\([^()]*\)|`[^`]*`"),
    "bat": re.compile(r"(?!)"),
    "ps1": re.compile(r"\$\([^()]*\)"),
}
HERE = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")  # bash: lines for a program, up to that word
NOTHING = ("$@", "$*", "${@}", "%*", "@args")  # what a script is called with: nothing, where it is started by itself
ENDS = re.compile(r"(?:\|\|?|&&?|;|\d?>>?(?:&\d)?|[&\d]?>+\S+|<\S*)$")  # where a command ends, or where its texts go


def decode(content: bytes, told: list[str] | None = None) -> str:
    """Decode a file: by its mark, else UTF-8, else the code page of Windows that fits; raises ValueError for binaries.

    told: gets a sentence where a code page was chosen.
    """
    for mark, name in MARKS:
        if content.startswith(mark):
            try:
                return content.decode(name)
            except UnicodeDecodeError as error:
                raise ValueError(f"it begins as {name} and is no such text; save it as UTF-8") from error
    codec, line = likely_codec(content)
    if not codec and b"\0" in content:
        raise ValueError("it is no text; choose the file with the settings")
    if line and told is not None:
        told.append(
            say("The file is no UTF-8 from line {0} on; it was read as {1}. Check its names.", line, codec or "cp1252")
        )
    return content.decode(codec or "cp1252", "replace")


def read_yaml(text: str) -> Any:
    """Read YAML; raises ValueError with the line at fault, and for one that stands for more than it writes."""
    import yaml  # imported here: few need it, and transformers brings it

    try:
        depth = aliases = 0
        for number, event in enumerate(yaml.parse(text)):  # reads on only as far as it is asked
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > MOST_ALIASES:
                raise ValueError("it repeats itself by too many aliases; write its values out")
            if depth > DEEPEST or number > MOST_EVENTS:
                raise ValueError(f"it has more than {DEEPEST} levels, or {MOST_EVENTS} values; write it shorter")
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"it is no YAML: {error.problem!s:.60}{line}; correct it there") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError("it is no YAML that can be read; save it as UTF-8 text") from error


@dataclass(slots=True)
class Command:
    """The command of a script that trains."""

    program: str = ""  # such as train_network.py; "" where only arguments are given
    words: list[str] = field(default_factory=list)  # behind it
    open: list[str] = field(default_factory=list)  # variables that the script does not set
    others: int = 0  # commands that train beside it
    unsure: list[str] = field(default_factory=list)  # arguments that the script adds under a condition


def kind_of(suffix: str, text: str) -> str:
    """Tell the shell of a script, by the ending of its name, else by what it holds."""
    if suffix in (".bat", ".cmd"):
        return "bat"
    if suffix == ".ps1":
        return "ps1"
    if suffix in (".sh", ".bash") or text.startswith("#!"):
        return "sh"
    windows = re.search(r"\^\s*$|^\s*@?(?:rem|set)\b|[ =\"'][A-Za-z]:\\", text, re.IGNORECASE | re.MULTILINE)
    return "bat" if windows and not re.search(r"\\\s*$", text, re.MULTILINE) else "sh"


def read_script(text: str, suffix: str) -> Command:
    """Find the command that trains in a script; raises ValueError where there is none, and no arguments either."""
    kind = kind_of(suffix, text)
    known: dict[str, list[str]] = {}
    found: list[tuple[str, list[str], list[str]]] = []
    plain: list[str] = []
    blocks = Blocks(kind)
    unsure: list[str] = []
    calls = False
    for line in (part for whole in _lines(text, kind) for part in apart(whole, kind)):
        if SKIPPED[kind].match(line) or blocks.follow(line, known) or blocks.skipped:
            continue
        set_here = _set_in(line, kind)
        if set_here:
            name, adds, value = set_here
            if kind == "bat":  # which puts texts in, and splits them where they stand
                words = [_replaced(value, kind, known, [])]
            else:
                words = _joined(value, known) if kind == "ps1" else _expanded(value, kind, known, [])
            if blocks.unsure:
                unsure += [word.strip() for word in words if word.strip().startswith("--")]
            else:
                known[name] = [*(known.get(name, ()) if adds else ()), *words][:MOST_WORDS]
            continue
        left: list[str] = []
        words = _expanded(line, kind, known, left)
        start = next((i for i, word in enumerate(words) if PROGRAM.search(word)), -1)
        if start >= 0:
            match = PROGRAM.search(words[start])
            found.append((match.group(1) if match else "", _own(words[start + 1 :]), left))
        elif any(word.endswith(".py") for word in words):
            calls = True
        else:
            first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
            plain += words[first:]
    if found:
        program, words, left = found[0]
        return Command(program, words, list(dict.fromkeys(left)), len(found) - 1, list(dict.fromkeys(unsure)))
    if plain and not calls:  # arguments alone, not of something that does not train
        return Command("", plain)
    raise ValueError("it holds no command that trains; choose the script that calls train_network.py")


def _own(words: list[str]) -> list[str]:
    """Cut what follows a command in its line, and where its texts go."""
    end = next((i for i, word in enumerate(words) if ENDS.match(word)), len(words))
    kept = [word for word in words[:end] if word not in NOTHING]
    return [*kept[:-1], kept[-1].removesuffix(";")] if kept else []


def _set_in(line: str, kind: str) -> tuple[str, bool, str] | None:
    """Read (name, whether it adds, value) of a line that sets a variable and does nothing else."""
    match = SET[kind].match(line)
    if not match:
        return None
    name, value = match.group(1), match.groups()[-1].strip()
    adds = any(part in ("+", ".Add") for part in match.groups()[1:-1] if part)
    if kind == "sh" and not value.startswith("(") and len([*_split(line.replace("export ", ""), kind)]) > 1:
        return None  # a variable of one command
    if kind == "bat":
        whole = line.partition("=")[0].count('"') % 2  # set "NAME=value"
        return name.lower(), False, value.removesuffix('"') if whole else value
    value = value.removeprefix("@").strip()
    inner = value[1:].removesuffix(")") if value.startswith("(") else value
    return (name if kind == "sh" else name.lower()), adds, "" if inner.startswith("[") and kind == "ps1" else inner


def _lines(text: str, kind: str) -> Iterator[str]:
    """Yield the lines of a script; those that go on are one, and a bracket of an array is closed."""
    joined = here = ""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if here:  # it runs nothing
            here = "" if line.strip() == here else here
            continue
        if joined and SKIPPED[kind].match(line) and line.strip():  # a comment between the parts of a command
            continue
        if kind == "sh" and not SKIPPED[kind].match(line) and (begun := HERE.search(line)):
            here = begun.group(1)
        joined += line
        bare = joined.rstrip()
        if bare.endswith(CONTINUED[kind]):
            joined = bare[:-1] + " "
        elif kind != "bat" and re.match(r"^[\s\w$:]*=\s*@?\(", joined) and ")" not in joined:
            joined = re.sub(r"\s#.*$", "", joined) + " "
        else:
            yield joined
            joined = ""
    if joined:
        yield joined


def _expanded(line: str, kind: str, known: dict[str, list[str]], left: list[str]) -> list[str]:
    """Split a line into words, with the variables that are known; left: gets the others."""
    words: list[str] = []
    if kind == "bat":
        return [raw for raw, _ in _split(_replaced(line, kind, known, left), kind)]
    for raw, quote in _split(line, kind):
        if quote == "'" or len(words) > MOST_WORDS:
            words.append(raw)
            continue
        whole = USED[kind].fullmatch(raw)
        name = (whole.group(1) or whole.group(3)) if whole else ""
        key = name.lower() if kind != "sh" else name
        if whole and key in known:  # bash splits what stands without quotes
            words += [part for each in known[key] for part in (each.split() if kind == "sh" and not quote else [each])]
            continue
        words.append(_replaced(raw, kind, known, left))
    return words


def _used(text: str, kind: str) -> Iterator[str]:
    """Yield the names of the variables in a text."""
    for match in USED[kind].finditer(text):
        name = match.group(1) or match.group(3) or ""
        yield name if kind == "sh" else name.lower()


def _replaced(text: str, kind: str, known: dict[str, list[str]], left: list[str]) -> str:
    """Put the values of the variables that are known into a text; left: gets the others."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(3)
        if name is None:  # what a command writes
            left.append(match.group())
            return match.group()
        key = name.lower() if kind != "sh" else name
        if key in known:
            return " ".join(known[key])
        if match.group(2):
            return match.group(2)
        left.append(match.group())
        return match.group()

    if sum(len(" ".join(known.get(name, ()))) for name in _used(text, kind)) > LARGEST:
        raise ValueError("its variables stand for more than 1 MiB of text; write their values out")
    return USED[kind].sub(value, re.sub(r"%~dp0\\?", r".\\", text, flags=re.IGNORECASE) if kind == "bat" else text)


def _joined(value: str, known: dict[str, list[str]]) -> list[str]:
    """Expand a value of PowerShell; texts with + between them are one, and -replace changes one."""
    if len(value) < LONGEST_CHOICE and (found := EITHER.fullmatch(value)):
        asked, one, other = found.groups()
        return _joined(other if holds(asked, known) is False else one, known)
    if found := REPLACED.fullmatch(value):
        return [word.replace(found.group(2), found.group(3)) for word in _expanded(found.group(1), "ps1", known, [])]
    parts = re.split(r"(?<=[\w\"'})])\s+\+\s+(?=[\"'$])", value)
    words = [_expanded(part, "ps1", known, []) for part in parts]
    return ["".join(" ".join(each) for each in words)] if len(parts) > 1 else words[0]


def _split(line: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield (word, the quote around all of it or "") of a line as its shell splits it."""
    word, quote, around, started = list[str](), "", "", False
    escape = ESCAPE[kind]
    at = 0
    while at < len(line):
        letter = line[at]
        if quote:
            if letter == quote:
                quote = ""
            elif letter == escape and quote == '"' and at + 1 < len(line) and line[at + 1] in '"\\$`':
                at += 1
                word.append(line[at])
            else:
                word.append(letter)
        elif letter in QUOTES[kind]:
            quote, started, around = letter, True, letter if not word else ""
        elif letter in "$`" and (written := WRITTEN[kind].match(line, at)):
            word.append(written.group())
            at = written.end() - 1
        elif letter == escape and at + 1 < len(line):
            at += 1
            word.append(line[at])
            started = True
        elif letter.isspace() or (kind == "ps1" and letter == "," and (not word or word[0] != "-")):
            if started or word:
                yield "".join(word), around
            word, around, started = [], "", False
        elif letter == "#" and _ends(line[max(0, at - 1) : at], kind, begun=bool(word) or started):
            break
        else:
            word.append(letter)
        at += 1
    if started or word:
        yield "".join(word), around


def _ends(before: str, kind: str, *, begun: bool) -> bool:
    """Tell whether # begins a comment; in PowerShell also behind a quote, which ends its text."""
    return (kind != "bat" and not begun) or (kind == "ps1" and before.endswith(("'", '"')))


def arguments(words: list[str], lists: frozenset[str]) -> tuple[dict[str, object], list[str]]:
    """Read --name value, --name=value and --flag; lists: names that take several values. Also returns what is left."""
    found: dict[str, object] = {}
    left: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = ([value] if name in lists else value) if equals else True
            if equals and name not in lists:
                name = ""
        elif name:
            before = found[name]
            if name in lists:
                found[name] = [*(before if isinstance(before, list) else []), word]
            else:
                found[name], name = word, ""
        else:
            left.append(word)
    return found, left


def beside(folder: Path, name: str) -> str | None:
    """Read a text that a file names, where it lies in the file's own folder or below; None if it does not."""
    moved = re.split(r"[\\/]", name)[-1]  # beside it from another machine
    for path in (folder / name.replace("\\", "/"), folder / moved):
        if _is_text_in(folder, path):
            return decode(path.read_bytes())
    return None


def placed(folder: Path, path: str) -> str:
    """Write a path of a file's folder in full; one from the root of a disk or of a home stays, of whatever system."""
    from_root = path.startswith(("/", "\\", "~")) or path[1:2] == ":"
    return path if from_root or not path else str(folder / path)


def _is_text_in(folder: Path, path: Path) -> bool:
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and not path.is_symlink()
        return inside and path.is_file() and path.stat().st_size <= LARGEST
    except (OSError, ValueError):  # no disk has such a name
        return False
