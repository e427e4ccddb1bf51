"""Read caption files of any encoding; an uncertain encoding is an error that proposes the right one."""

from __future__ import annotations

import codecs
import re
import unicodedata
from pathlib import Path
from typing import Literal

TEXT_LIMIT = 2**20  # maximum bytes of a caption file
_BOMS = (  # the long ones first: UTF-32's starts with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Encodings to propose for text that is not UTF-8: codec -> the scripts of its languages.
_CODECS = {
    "cp1252": {"LATIN"},
    "cp1250": {"LATIN"},
    "cp1251": {"CYRILLIC"},
    "shift_jis": {"HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"},
    "euc_kr": {"HANGUL"},
    "gb18030": {"CJK"},
    "big5": {"CJK"},
    "euc_jp": {"HIRAGANA", "KATAKANA", "CJK", "IDEOGRAPHIC"},
}
_FREQUENT = {  # the range of each standard's frequent characters: codec with just these, lowest and highest first byte
    "shift_jis": ("shift_jis", 0x88, 0x97),
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
    "euc_jp": ("euc_jp", 0xB0, 0xCF),
}
_SIGNS = frozenset("“”‘’„‚‹›«»–—…•·¿¡°€£©®™§½¼¾×、。，．！？：；（）「」『』【】〜～・％")
LINE_END = re.compile(r"\r\n|\r|\n")  # not U+2028 and form feeds, which occur inside captions


def read_text(path: Path, encoding: str = "auto") -> str:
    """Read a caption file; raises ValueError that names the file, OSError if it cannot be opened.

    A byte order mark decides. Without one, "auto" reads UTF-8, and UTF-16 that is recognized by its zero bytes; any
    other text is refused with a proposed encoding. A named encoding is used strictly; UTF-8 text is refused under
    another one, since it would be garbled without an error.
    """
    return decode(path, read_bytes(path, TEXT_LIMIT, "caption file"), encoding)


def caption_lines(text: str, mode: Literal["draw", "first", "join"] = "draw") -> tuple[str, ...]:
    """Split a text into stripped, non-empty lines: all of them, the first one, or all joined by blanks."""
    lines = tuple(line for part in LINE_END.split(text) if (line := part.strip()))
    if mode == "first":
        return lines[:1]
    return (" ".join(lines),) if mode == "join" and lines else lines


def read_bytes(path: Path, limit: int, kind: str) -> bytes:
    """Read a whole file; raises ValueError above `limit` bytes. kind: the file's kind, for the message."""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        size = path.stat().st_size / 2**20
        raise ValueError(
            f"{path} has {size:.1f} MiB, and a {kind} can have {limit / 2**20:g} at most; shorten or remove it."
        )
    return data


def decode(path: Path, data: bytes, encoding: str) -> str:
    """Decode a file's bytes as `read_text` does; raises ValueError that names the file."""
    marked = next((name for bom, name in _BOMS if data.startswith(bom)), None)
    if marked:
        text = _decode_marked(path, data, marked)
    elif encoding == "auto":
        text = _decode_unmarked(path, data)
    else:
        text = _decode_as(path, data, encoding)
    if "\0" in text:
        raise ValueError(f"{path} contains NUL characters, so it is no text; save it as UTF-8 without them.")
    return text.lstrip("\ufeff")


def _decode_marked(path: Path, data: bytes, codec: str) -> str:
    try:
        return data.decode(codec)
    except UnicodeDecodeError as error:
        name = codec.removesuffix("-sig")
        raise ValueError(
            f"{path} starts with the mark of {name}, but the rest is not {name} ({error.reason}); save it as UTF-8."
        ) from error


def _decode_as(path: Path, data: bytes, encoding: str) -> str:
    """Decode strictly by the encoding of the settings, or raise ValueError."""
    try:
        text = data.decode(encoding)
    except (LookupError, ValueError) as error:  # LookupError: a codec for bytes, as rot13
        raise ValueError(f"{path} cannot be read as {encoding} ({error}); {_remedy(data)}.") from error
    if not data.isascii() and not encoding.lower().startswith("utf") and _is_utf8(data):
        raise ValueError(
            f"{path} is UTF-8 text, but caption_encoding is {encoding}; set caption_encoding of Concept Dataset to "
            "auto, and save other captions as UTF-8."
        )
    return text


def _decode_unmarked(path: Path, data: bytes) -> str:
    """Decode UTF-8 or UTF-16 without a mark, or raise ValueError that proposes an encoding."""
    # No UTF-8 caption has NUL or escape characters: they mean UTF-16 or 32, and ISO-2022.
    if b"\0" not in data and b"\x1b" not in data and _is_utf8(data):
        return data.decode("utf-8")
    if (text := _decode_utf16(data)) is not None:
        return text
    raise ValueError(f"{path} is not UTF-8 text; {_remedy(data)}.")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decode_utf16(data: bytes) -> str | None:
    """Decode UTF-16 without a mark if it is certain: Latin text, in which every other byte is mostly zero."""
    zeros = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 or min(zeros) or 4 * max(zeros) < len(data):
        return None
    return _decode_clean(data, "utf-16-le" if zeros[1] else "utf-16-be")


def _decode_clean(data: bytes, codec: str) -> str | None:
    """Decode strictly; None if that fails or gives control, private or unassigned characters."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError:
        return None
    odd = (unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") for char in set(text) - set("\t\n\v\f\r"))
    return None if any(odd) else text


def _remedy(data: bytes) -> str:
    """Propose an encoding, or the two best if none is clearly better, with a sample of the decoded text."""
    codecs_here: tuple[str, ...] = tuple(_CODECS)
    if b"\0" in data:
        little = data[1::2].count(0) > data[0::2].count(0)  # blanks and other ASCII show the byte order
        codecs_here = ("utf-32-le", "utf-32-be", "utf-16-le" if little else "utf-16-be")
    elif b"\x1b" in data:
        codecs_here = ("iso2022_jp", "iso2022_kr")
    elif _is_utf8(data):
        return "it is UTF-8 text: set caption_encoding of Concept Dataset to auto"
    found: dict[str, tuple[float, str]] = {}  # text -> how well it reads, and by which codec first
    for codec in codecs_here:
        if (text := _decode_clean(data, codec)) is not None:
            found.setdefault(text, (_plausibility(text, codec), codec))
    best = max((score for score, _ in found.values()), default=0.0)
    if best <= 0.5:
        return "no other encoding fits; save it as UTF-8"
    ranked = sorted(found.items(), key=lambda item: -item[1][0])  # of equals the first
    close = [(codec, text) for text, (score, codec) in ranked if score > best - 0.05][:2]
    readings = " and ".join(f'as {codec} it would read "{_excerpt(text)}"' for codec, text in close)
    choice = " or ".join(codec for codec, _ in close)
    return f"{readings}; set caption_encoding of Concept Dataset to {choice}, or save it as UTF-8"


def _excerpt(text: str) -> str:
    """Quote a few words around the first character that is not ASCII."""
    first = _beyond_ascii(text)
    start = max(text.rfind(" ", 0, max(first - 12, 0)) + 1, first - 24, 0)
    words = " ".join(text[start : start + 60].split())
    return words + (" ..." if len(text) > start + 60 else "")


def _beyond_ascii(text: str) -> int:
    """Find the first character that is not ASCII; 0 without one."""
    found = re.search(r"[^\x00-\x7f]", text)
    return found.start() if found else 0


def _plausibility(text: str, codec: str) -> float:
    """Estimate the share, 0..1, of the characters beyond ASCII that fit the codec's languages.

    Only the part from the first of them on is examined. Codecs outside the table are recognized by other signs.
    """
    if codec not in _CODECS:
        return 1.0
    start = max(_beyond_ascii(text) - 40, 0)
    scores: list[float] = []
    for part in re.findall(r"[^\W\d_]+|[^\x00-\x7f]", text[start : start + 4000]):
        beyond = [char for char in part if not char.isascii()]
        if not part[0].isalpha():
            scores += [0.8 * (char in _SIGNS) for char in beyond]  # signs are weaker evidence than words
        elif codec in ("cp1252", "cp1250", "cp1251"):
            scores += [float(_is_word(part, codec))] * len(beyond)
        else:  # an ideograph within a Latin word is more likely an accent misread
            weight = 1.0 if len(beyond) == len(part) else 0.4
            scores += [weight * _is_frequent(char, codec) for char in beyond]
    return sum(scores) / len(scores) if scores else 0.0


def _script(char: str) -> str:
    return re.split("[ -]", unicodedata.name(char, ""))[0]


def _is_frequent(char: str, codec: str) -> bool:
    """Tell whether a character belongs to the codec's languages, and for an ideograph, to the frequent half."""
    script = _script(char)
    if script != "CJK" or codec not in _FREQUENT:
        return script in _CODECS[codec] and not "\u3131" <= char <= "\u318e"  # single Korean letters write no words
    standard, low, high = _FREQUENT[codec]
    return bytes([low]) <= char.encode(standard, "ignore")[:1] <= bytes([high])


def _is_word(word: str, codec: str) -> bool:
    """Tell whether letters look like a word: one script, sensible capitals, Latin accents among plain letters."""
    beyond = [char for char in word if not char.isascii()]
    latin = codec != "cp1251"
    return (
        all(_script(char) in _CODECS[codec] for char in beyond)
        and word in (word.lower(), word.upper(), word[0] + word[1:].lower())
        and (len(word) == 1 or latin == (len(beyond) < len(word)))
        and (not latin or re.search(r"[^\x00-\x7f]{4}", word) is None)
    )
