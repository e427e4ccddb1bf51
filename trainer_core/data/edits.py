"""Change caption files together: what an operation makes of a text, safe writing, and a journal for undo and redo."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from filelock import Timeout as LockTimeout

from ..common.files import BLOCK, read_file, write_together, written_whole
from ..common.json_files import parse_json
from ..common.leftovers import remove_leftovers
from ..common.values import is_count, is_object, is_text, is_texts, is_time, unfit
from ..common.wording import say
from ..config import CaptionConfig, ConceptConfig, setting
from .captions import FIXED_SEPARATOR, flexible, split_tags
from .scan.caption_files import TEXT_LIMIT, caption_lines, read_bytes

LARGEST_TEXT = 2**17  # characters of a caption, as of a line that is read
LONGEST_FIND = 1000  # characters that are looked for: a search takes their number times the text's
LARGEST_ENTRY = 2**27  # bytes of a change in the journal
MOST_BYTES, MOST_CHANGES = 2**28, 1000  # of the journal; the oldest changes are forgotten
LOCK_SECONDS = 20.0  # how long a change waits for another one
_LINES = re.compile(r"(\r\n|\r|\n)")
_ENTRY = re.compile(r"(\d{20})(\.undone)?\.jsonl")
_HEADER = {"what": is_text, "when": is_time, "count": is_count, "folders": is_texts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What is done to the captions of a selection."""

    kind: str  # text | find | add | remove | replace | sort
    find: str = ""  # the text or the tag that is looked for
    text: str = ""  # the new caption, the text or tag instead, or the tag that is added
    case: bool = False  # find: as it is written
    word: bool = False  # find: whole words alone
    first: bool = False  # add: in front; sort: the most frequent tags of the selection first

    def __post_init__(self) -> None:
        if self.kind not in ("text", "find", *_OF_TAGS):
            raise ValueError(f"kind is {self.kind!r:.80}; it must be text, find, {', '.join(_OF_TAGS)}.")
        if max(len(self.text), len(self.find)) > LARGEST_TEXT:
            raise ValueError(f"A caption holds at most {LARGEST_TEXT:,} characters; shorten it.")
        if len(self.find) > LONGEST_FIND:
            raise ValueError(say("At most {0} characters are looked for; write fewer.", LONGEST_FIND))
        if self.kind in ("find", "remove", "replace") and not self.find.strip():
            raise ValueError(say("Nothing is looked for; write a text or a tag."))
        if self.kind == "add" and not self.text.strip():
            raise ValueError(say("No tag is given; write one."))


def edited(texts: Sequence[str], operation: Operation, captions: CaptionConfig) -> list[str]:
    """Compute what an operation makes of the texts of caption files; lines that it does not concern stay as they are.

    Tags are those that a run shuffles: between separators, and around |||, whose sections stay apart. Raises ValueError
    before a text, or all that change, are longer than a run reads and the journal takes.
    """
    counts: Mapping[str, int] = {}
    if operation.kind == "sort":
        counts = Counter(tag.casefold() for text in texts for part in _sections(text) for tag in _tags(part, captions))
    found, left = list[str](), LARGEST_ENTRY
    for text in texts:
        if operation.kind == "text":
            found.append(operation.text)
        elif operation.kind == "find":
            found.append(_found(text, operation))
        else:
            found.append(_each_line(text, operation, captions, counts))
        left -= len(found[-1]) if found[-1] != text else 0
        if left < 0:
            raise ValueError(_too_long())
    return found


def _too_long() -> str:
    return say("These captions are too long to be changed at once; choose fewer pictures.")


def _check_length(length: int) -> None:
    if length > TEXT_LIMIT:
        raise ValueError(say("A caption would become longer than {0} MiB; write a shorter text.", TEXT_LIMIT // 2**20))


def _found(text: str, operation: Operation) -> str:
    """Put another text in the place of each that is found."""
    pattern = re.escape(operation.find)
    if operation.word:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    length = len(text)

    def instead(found: re.Match[str]) -> str:
        nonlocal length
        length += len(operation.text) - len(found[0])
        _check_length(length)
        return operation.text

    return re.sub(pattern, instead, text, flags=0 if operation.case else re.IGNORECASE)


def _sections(text: str) -> list[str]:
    return [part for line in _LINES.split(text)[::2] for part in line.split(FIXED_SEPARATOR)]


def _tags(part: str, captions: CaptionConfig) -> list[str]:
    return split_tags(part, captions.separator)


def _each_line(text: str, operation: Operation, captions: CaptionConfig, counts: Mapping[str, int]) -> str:
    """Change the tags of each line that has any; a text without any gets the tag that is added."""
    pieces = _LINES.split(text)
    if operation.kind == "add" and not text.strip():
        return operation.text.strip()
    length = len(text)
    for number in range(0, len(pieces), 2):  # the others are line ends
        if pieces[number].strip():
            sections = [_tags(part, captions) for part in pieces[number].split(FIXED_SEPARATOR)]
            changed = _OF_TAGS[operation.kind](sections, operation, captions, counts)
            if changed != sections:
                line = f" {FIXED_SEPARATOR} ".join(_joined(part, captions) for part in changed).strip()
                length += len(line) - len(pieces[number])
                _check_length(length)
                pieces[number] = line
    return "".join(pieces)


def _joined(tags: Iterable[str], captions: CaptionConfig) -> str:
    separator = captions.separator
    return (separator if separator[-1].isspace() else separator + " ").join(tags)


def _plain(tag: str) -> str:
    """Write a tag as every tag that counts as the same."""
    return tag.strip().casefold()


def _add(sections: list[list[str]], operation: Operation, captions: CaptionConfig, _: object) -> list[list[str]]:
    there = {_plain(tag) for part in sections for tag in part}
    new = [tag for tag in _tags(operation.text, captions) if _plain(tag) not in there]
    if operation.first:
        return [new + sections[0], *sections[1:]]
    return [*sections[:-1], sections[-1] + new]


def _remove(sections: list[list[str]], operation: Operation, captions: CaptionConfig, _: object) -> list[list[str]]:
    del captions
    wanted = _plain(operation.find)
    return [[tag for tag in part if _plain(tag) != wanted] for part in sections]


def _replace(sections: list[list[str]], operation: Operation, captions: CaptionConfig, _: object) -> list[list[str]]:
    """Put tags in the place of one; what a line has already is not there twice."""
    wanted = _plain(operation.find)
    if not any(_plain(tag) == wanted for part in sections for tag in part):
        return sections
    new, seen, changed = _tags(operation.text, captions), set[str](), []
    for part in sections:
        tags = list[str]()
        for tag in part:
            if _plain(tag) == wanted:
                tags += new
                new = []  # which are there from now on
            else:
                tags.append(tag)
        changed.append([tag for tag in tags if not (tag.casefold() in seen or seen.add(tag.casefold()))])
    return changed


def _sort(
    sections: list[list[str]], operation: Operation, captions: CaptionConfig, counts: Mapping[str, int]
) -> list[list[str]]:
    """Sort the tags that a run would shuffle; what it keeps in front, and the sections around |||, stay."""
    at, first, end = flexible(sections, captions)
    tags = sections[at]

    def order(tag: str) -> tuple[int, str]:
        return -counts[tag.casefold()] if operation.first else 0, tag.casefold()

    moved = [*tags[:first], *sorted(tags[first:end], key=order), *tags[end:]]
    return [*sections[:at], moved, *sections[at + 1 :]]


_OF_TAGS: dict[str, Callable[..., list[list[str]]]] = {
    "add": _add,
    "remove": _remove,
    "replace": _replace,
    "sort": _sort,
}


class Rewritten(NamedTuple):
    """A caption file, its new content (None: none), and the fingerprint of what a person saw there."""

    file: Path
    content: bytes | None
    seen: str


class Meanwhile(Exception):
    """Other programs have changed files since a person saw them; nothing was written."""

    def __init__(self, files: Mapping[Path, tuple[bytes | None, bytes | None]]) -> None:
        super().__init__(f"{len(files)} files were changed by another program")
        self.files = dict(files)  # what is there now, and what would have been written


def fingerprint_of(content: bytes | None) -> str:
    """Compute what tells one content of a file from another; "" without a file."""
    return "" if content is None else hashlib.sha256(content).hexdigest()[:32]


def content_of(file: Path) -> bytes | None:
    """Read a caption file, None where there is none; raises OSError, and ValueError for one that no run reads."""
    try:
        return read_bytes(file, TEXT_LIMIT, "caption file")
    except FileNotFoundError:
        return None


def encoded(text: str, captions: CaptionConfig, file: Path) -> bytes:
    """Encode a caption so that a run reads it: as UTF-8, or in the encoding of the settings; raises ValueError."""
    caption_lines(text, where=file.name)  # raises for too many, and too long ones
    codec = "utf-8" if captions.encoding == "auto" else captions.encoding
    try:
        content = text.encode(codec)
    except (UnicodeEncodeError, LookupError) as error:
        raise ValueError(
            f"{file.name} cannot be written as {codec}; set {setting('captions.encoding')} to auto, or leave out what "
            "that encoding has no letters for."
        ) from error
    _check_length(len(content))
    return content


class Journal:
    """Changes of caption files, each with the earlier contents of its files, so that it can be undone on another day.

    A change is one file: a line says what it was, and others hold contents before and after. A job that writes one
    caption after another adds a line for each. Each line is on the disk before its captions are touched, so that a
    crash between two captions loses no text. A change that was undone stays under another name, and can be done again
    until a new one is made there.

    flat: folders of which the view that asks shows no picture in those inside them, so that it turns no change there.
    """

    def __init__(self, folder: Path, flat: Collection[Path] = ()) -> None:
        self._folder = folder
        self._flat = frozenset(flat)

    def write(self, changes: Sequence[Rewritten], what: str, folders: Collection[Path]) -> int:
        """Write files together and remember what was there; return how many differ from before.

        folders: where they lie. Raises Meanwhile, and then writes nothing, where one is no longer what a person saw;
        OSError; ValueError while another change is being written.
        """
        with self._locked():
            now = {each.file: content_of(each.file) for each in changes}
            _check({each.file: (now[each.file], each.content, {each.seen}) for each in changes})
            new = {each.file: each.content for each in changes if each.content != now[each.file]}
            if new:
                contents = {file: (now[file], content) for file, content in new.items()}
                deep = any(file.parent != _innermost(file, folders) for file in new)
                place = self._remember(what, contents, folders, deep=deep)
                try:
                    write_together(new)
                except OSError:
                    if all(content_of(file) == now[file] for file in new):  # a full disk, before the first one
                        place.unlink()
                    raise
            return len(new)

    def add(
        self, file: Path, compose: Callable[[bytes | None], bytes], what: str, folders: Collection[Path], onto: str = ""
    ) -> str:
        """Write one file of a job, and remember it with the job's files before; return the number of the change.

        compose: makes the new content of the one that is there. onto: number of the job's change; where another one is
        the newest by now, a new one begins. Raises OSError, and ValueError while another change is being written.
        """
        with self._locked():
            before = content_of(file)
            content, place = compose(before), self._folder / f"{onto}.jsonl"
            if content == before:
                return onto
            own = [folder for folder in (_innermost(file, folders),) if folder]
            last = self.last(own) if onto else None
            if last is None or last["number"] != onto or place.stat().st_size > LARGEST_ENTRY:
                deep = not self._flat.issuperset(own)  # a line that comes later may be
                place = self._remember(what, {file: (before, content)}, own, deep=deep)
            else:
                _append(place, _line({file: (before, content)}))
            write_together({file: content})
            return place.stem

    def last(self, folders: Collection[Path]) -> dict[str, Any] | None:
        """Describe the newest change in some folders: {what, when, count, number}; None without any."""
        return self._first_in(folders, reversed(self._places()))

    def next(self, folders: Collection[Path]) -> dict[str, Any] | None:
        """Describe the change in some folders that was undone last, as `last` does; None without any."""
        return self._first_in(folders, self._places(undone=True))

    def _first_in(self, folders: Collection[Path], places: Iterable[Path]) -> dict[str, Any] | None:
        for place in places:
            header = _header(place)
            if header is not None and self._shows(header, folders):
                return {name: header[name] for name in ("what", "when", "count")} | {"number": _number(place)}
        return None

    def _shows(self, header: Mapping[str, Any], folders: Collection[Path]) -> bool:
        """Tell whether a view of some folders shows all files of a change."""
        whole = set(folders) - self._flat
        flat = set() if header.get("deep", True) else self._flat.intersection(folders)
        return all(Path(each) in flat or _is_in(Path(each), whole) for each in header["folders"])

    def undo(
        self, folders: Collection[Path], number: str, seen: Mapping[Path, str], *, leave: bool = False
    ) -> dict[str, Any]:
        """Put the texts back that were there before the newest change in some folders; describe it.

        number: of the change that a person saw as the newest. seen: fingerprints of files that they put back although
        another program changed them. leave: all such files stay as they are; files that are gone stay gone. Raises
        Meanwhile, ValueError and OSError as `write` does.
        """
        with self._locked():
            last = _as_seen(self.last(folders), number)
            place = self._folder / f"{number}.jsonl"
            new = _to_put(_contents(place, folders), seen, leave=leave)
            write_together(new)
            place.replace(self._folder / f"{number}.undone.jsonl")
            return last | {"files": list(new), "count": len(new)}

    def redo(
        self, folders: Collection[Path], number: str, seen: Mapping[Path, str], *, leave: bool = False
    ) -> dict[str, Any]:
        """Make the change in some folders again that was undone last; all else is as in `undo`."""
        with self._locked():
            undone = _as_seen(self.next(folders), number)
            place, done = self._folder / f"{number}.undone.jsonl", self._folder / f"{number}.jsonl"
            contents = {file: (after, before) for file, (before, after) in _contents(place, folders).items()}
            new = _to_put(contents, seen, leave=leave)
            place.replace(done)  # first, so that a crash between two captions can be undone
            try:
                write_together(new)
            except OSError:
                if all(content_of(file) != content for file, content in new.items()):  # before the first one
                    done.replace(place)
                raise
            return undone | {"files": list(new), "count": len(new)}

    def _locked(self) -> _Lock:
        return _Lock(self._folder)

    def _places(self, *, undone: bool = False) -> list[Path]:
        """List the files of the changes, or of those that were undone, the oldest first."""
        if not self._folder.is_dir():
            return []
        found = ((path, _ENTRY.fullmatch(path.name)) for path in self._folder.iterdir())
        return sorted(path for path, entry in found if entry and bool(entry[2]) == undone)

    def _remember(
        self,
        what: str,
        contents: Mapping[Path, tuple[bytes | None, bytes | None]],
        folders: Collection[Path],
        *,
        deep: bool,
    ) -> Path:
        """Put a change on the disk, and forget the oldest ones, and those there that were undone.

        deep: whether it may hold files in folders inside those, which a flat view does not show.
        Raises ValueError for a change that is too large.
        """
        places = sorted((*self._places(), *self._places(undone=True)), key=_number)
        newest = int(_number(places[-1])) if places else 0
        number = max(newest + 1, time.time_ns() // 1000)  # never again that of one that was undone
        own = {folder for file in contents if (folder := _innermost(file, folders))}
        header = {"what": what, "when": time.time(), "count": len(contents), "folders": sorted(map(str, own))}
        header["deep"] = deep
        data = f"{json.dumps(header)}\n".encode("ascii") + _line(contents)
        if len(data) > LARGEST_ENTRY:
            raise ValueError(_too_long())
        new = self._folder / f"{number:020}.jsonl"
        with written_whole(new) as temporary:
            temporary.write_bytes(data)
        for place in self._places(undone=True):
            if _concerns(place, own):
                place.unlink()
                places.remove(place)
        left = MOST_BYTES - len(data)
        for older, place in enumerate(reversed(places), 1):
            left -= place.stat().st_size
            if left < 0 or older >= MOST_CHANGES:
                place.unlink()
        return new


def flat_folders(concepts: Iterable[ConceptConfig]) -> set[Path]:
    """List the folders of concepts of which none shows the pictures in folders inside them."""
    concepts = list(concepts)
    whole = {each.folder for each in concepts if each.recursive}
    return {Path(each.folder) for each in concepts if each.folder not in whole}


class _Lock:
    """Keeps other changes away for the length of a `with` block; raises ValueError where one takes long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(str(folder / "lock"), timeout=LOCK_SECONDS)

    def __enter__(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except LockTimeout as error:
            raise ValueError(say("Other captions are being written; try again after that.")) from error
        remove_leftovers(self._folder)

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


def _number(place: Path) -> str:
    """Read the number of a change, done or undone, from its file's name."""
    return place.name.partition(".")[0]


def _is_in(place: Path, folders: Iterable[Path]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def _innermost(file: Path, folders: Iterable[Path]) -> Path | None:
    """Find the folder of a file among some that may lie in one another: whoever sees one of them sees its changes."""
    return max((each for each in folders if file.is_relative_to(each)), key=lambda each: len(each.parts), default=None)


def _concerns(place: Path, folders: Collection[Path]) -> bool:
    """Tell whether a change lies in one of some folders or around it; one whose file is damaged does."""
    header = _header(place)
    own = [Path(each) for each in header["folders"]] if header else []
    return header is None or any(_is_in(each, folders) for each in own) or any(_is_in(each, own) for each in folders)


def _as_seen(change: dict[str, Any] | None, number: str) -> dict[str, Any]:
    """Return the change that stands next; raises ValueError where it is not the one that a person saw."""
    if change is None or change["number"] != number:
        raise ValueError(say("The captions were changed elsewhere; open the pictures again first."))
    return change


def _to_put(
    contents: Mapping[Path, tuple[bytes | None, bytes | None]], seen: Mapping[Path, str], *, leave: bool
) -> dict[Path, bytes | None]:
    """Choose what is written to turn a change around: each file's content, which is that of the change or gone.

    contents: those to be put, and those that are there unless another program was faster. Raises Meanwhile.
    """
    new: dict[Path, bytes | None] = {}
    strange: dict[Path, tuple[bytes | None, bytes | None]] = {}
    for file, (content, there) in contents.items():
        now = content_of(file)
        fits = {fingerprint_of(content), fingerprint_of(there), seen.get(file)}
        if now is None and there is not None:
            continue  # gone
        if fingerprint_of(now) in fits:
            new[file] = content
        elif not leave:
            strange[file] = now, content
    if strange:
        raise Meanwhile(strange)
    return new


def _check(files: Mapping[Path, tuple[bytes | None, bytes | None, Collection[str | None]]]) -> None:
    """Raise Meanwhile for the files whose content is none that may be replaced."""
    strange = {file: (now, new) for file, (now, new, known) in files.items() if fingerprint_of(now) not in known}
    if strange:
        raise Meanwhile(strange)


def _as_text(content: bytes | None) -> str | None:
    """Write any bytes as a text that JSON holds; those that are no UTF-8 become half characters."""
    return None if content is None else content.decode("utf-8", "surrogateescape")


def _line(contents: Mapping[Path, tuple[bytes | None, bytes | None]]) -> bytes:
    """Write the contents before and after as a line of a change."""
    files = {str(file): [_as_text(before), _as_text(after)] for file, (before, after) in contents.items()}
    return f"{json.dumps(files)}\n".encode("ascii")


def _append(place: Path, line: bytes) -> None:
    """Put a line on the disk at the end of a file, whole or not at all."""
    with place.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "no space left on the disk", str(place))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def _header(place: Path) -> dict[str, Any] | None:
    """Read what a change was, None where its file is damaged; count: of the files, with those that a job added."""
    with suppress(OSError, ValueError), place.open("rb") as file:
        header = parse_json(file.readline(2**16))
        if is_object(header) and not unfit(header, _HEADER):
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))
            return header | {"count": header["count"] + max(lines - 1, 0)}
    return None


def _contents(place: Path, folders: Collection[Path]) -> dict[Path, tuple[bytes | None, bytes | None]]:
    """Read the contents before and after a change; raises ValueError for a damaged file, and for files elsewhere."""
    try:
        lines = read_file(place).split(b"\n")[1:-1]  # a last one without an end was cut off before its file changed
        found: dict[Path, tuple[bytes | None, bytes | None]] = {}
        for line in lines or [b""]:
            for name, (before, after) in parse_json(line).items():  # raises what a damaged file leads to
                first = found.get(Path(name))
                found[Path(name)] = (first[0] if first else _as_bytes(before), _as_bytes(after))
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"The record of this change is damaged; delete {place}.") from error
    if not _lie_in(found, folders):
        raise ValueError(f"The record of this change names files outside its folders; delete {place}.")
    return found


def _lie_in(files: Collection[Path], folders: Collection[Path]) -> bool:
    """Tell whether all files lie in some folders; links are followed, once for the files of a folder."""
    roots = [os.path.realpath(folder) for folder in folders]
    places = {file.parent for file in files} | {file for file in files if os.path.islink(file)}
    return all(any(Path(os.path.realpath(place)).is_relative_to(root) for root in roots) for place in places)


def _as_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
