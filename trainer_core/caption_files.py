"""Read caption files; what cannot be read without a guess is an error that names the remedy."""

from __future__ import annotations

import codecs
import re
import unicodedata
from pathlib import Path
from typing import Literal

TEXT_LIMIT = 2**20  # bytes of a caption file; a larger one is something else
_BOMS = (  # the long ones first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# What a text that is not UTF-8 may be: codec -> the scripts its languages use.
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
_FREQUENT = {  # where the frequent characters of each standard lie: the codec that has just these, first bytes
    "shift_jis": ("shift_jis", 0x88, 0x97),
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
    "euc_jp": ("euc_jp", 0xB0, 0xCF),
}
_SIGNS = frozenset("“”‘’„‚‹›«»–—…•·¿¡°€£©®™§½¼¾×、。，．！？：；（）「」『』【】〜～・％")
LINE_END = re.compile(r"\r\n|\r|\n")  # not U+2028 and form feeds, which stand inside captions


def read_text(path: Path, encoding: str = "auto") -> str:
    """Read a caption file; raises ValueError naming the file, OSError if it cannot be opened.

    A byte order mark decides. Without one, "auto" reads UTF-8, and UTF-16 where every other byte shows it; anything
    else is not guessed but refused, with the encoding in which it would read well. Another encoding is followed
    strictly, and UTF-8 text is refused under it, since it would come out garbled without an error.
    """
    return decode(path, read_bytes(path, TEXT_LIMIT, "caption file"), encoding)


def caption_lines(text: str, mode: Literal["draw", "first", "join"] = "draw") -> tuple[str, ...]:
    """Return the lines that are not empty, stripped: all of them, the first one, or one joined by blanks."""
    lines = tuple(line for part in LINE_END.split(text) if (line := part.strip()))
    if mode == "first":
        return lines[:1]
    return (" ".join(lines),) if mode == "join" and lines else lines


def read_bytes(path: Path, limit: int, kind: str) -> bytes:
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        size = path.stat().st_size / 2**20
        raise ValueError(
            f"{path} has {size:.1f} MiB, and a {kind} at most {limit / 2**20:g}; shorten it or take it away."
        )
    return data


def decode(path: Path, data: bytes, encoding: str) -> str:
    marked = next((name for bom, name in _BOMS if data.startswith(bom)), None)
    if marked:
        text = _decode_marked(path, data, marked)
    elif encoding == "auto":
        text = _decode_unmarked(path, data)
    else:
        text = _decode_as(path, data, encoding)
    if "\0" in text:
        raise ValueError(f"{path} holds NUL characters, as files that are no text do; save it as UTF-8 without them.")
    return text.lstrip("\ufeff")


def _decode_marked(path: Path, data: bytes, codec: str) -> str:
    try:
        return data.decode(codec)
    except UnicodeDecodeError as error:
        name = codec.removesuffix("-sig")
        raise ValueError(
            f"{path} begins with the mark of {name} and goes on otherwise ({error.reason}); save it as UTF-8."
        ) from error


def _decode_as(path: Path, data: bytes, encoding: str) -> str:
    """Decode by the encoding that was asked for, or raise ValueError."""
    try:
        text = data.decode(encoding)
    except (LookupError, ValueError) as error:  # LookupError: a codec that is not of text, as rot13
        raise ValueError(f"{path} cannot be read as {encoding} ({error}); {_remedy(data)}.") from error
    if not data.isascii() and not encoding.lower().startswith("utf") and _is_utf8(data):
        raise ValueError(
            f"{path} is UTF-8 text and caption_encoding is {encoding}; set it to auto, and save captions that are "
            f"{encoding} as UTF-8."
        )
    return text


def _decode_unmarked(path: Path, data: bytes) -> str:
    """Read UTF-8 or UTF-16 without a mark, or raise ValueError with a proposal."""
    # NUL and escape characters are in no UTF-8 caption: they show UTF-16 or 32, and ISO-2022.
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
    """Decode UTF-16 without a mark if it can be nothing else: Latin text, so that every other byte is mostly zero."""
    zeros = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 or min(zeros) or 4 * max(zeros) < len(data):
        return None
    return _decode_clean(data, "utf-16-le" if zeros[1] else "utf-16-be")


def _decode_clean(data: bytes, codec: str) -> str | None:
    """Decode strictly; None also if control, private or unassigned characters come out."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError:
        return None
    odd = (unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") for char in set(text) - set("\t\n\v\f\r"))
    return None if any(odd) else text


def _remedy(data: bytes) -> str:
    """Say as what a text would read, the two best if none is clearly better, and what to do."""
    codecs_here: tuple[str, ...] = tuple(_CODECS)
    if b"\0" in data:
        little = data[1::2].count(0) > data[0::2].count(0)  # blanks and other ASCII tell the order of bytes
        codecs_here = ("utf-32-le", "utf-32-be", "utf-16-le" if little else "utf-16-be")
    elif b"\x1b" in data:
        codecs_here = ("iso2022_jp", "iso2022_kr")
    elif _is_utf8(data):
        return "it is UTF-8 text: set caption_encoding to auto"
    found: dict[str, tuple[float, str]] = {}  # text -> how well it reads, and by which codec first
    for codec in codecs_here:
        if (text := _decode_clean(data, codec)) is not None:
            found.setdefault(text, (_plausibility(text, codec), codec))
    best = max((score for score, _ in found.values()), default=0.0)
    if best <= 0.5:
        return "in no other encoding does it read well; save it as UTF-8"
    ranked = sorted(found.items(), key=lambda item: -item[1][0])  # of equals the first
    close = [(codec, text) for text, (score, codec) in ranked if score > best - 0.05][:2]
    readings = " and ".join(f'as {codec} it would read "{_excerpt(text)}"' for codec, text in close)
    return f"{readings}; set caption_encoding to {' or '.join(codec for codec, _ in close)}, or save it as UTF-8"


def _excerpt(text: str) -> str:
    """Return a few words around the first character that is not ASCII."""
    first = _beyond_ascii(text)
    start = max(text.rfind(" ", 0, max(first - 12, 0)) + 1, first - 24, 0)
    words = " ".join(text[start : start + 60].split())
    return words + (" ..." if len(text) > start + 60 else "")


def _beyond_ascii(text: str) -> int:
    """Return the place of the first character that is not ASCII, 0 if there is none."""
    found = re.search(r"[^\x00-\x7f]", text)
    return found.start() if found else 0


def _plausibility(text: str, codec: str) -> float:
    """Return which share of the characters beyond ASCII stands as the codec's languages write them, 0..1.

    Looked at is a stretch from the first of them on. Codecs that are not in the table are known by other signs.
    """
    if codec not in _CODECS:
        return 1.0
    start = max(_beyond_ascii(text) - 40, 0)
    scores: list[float] = []
    for part in re.findall(r"[^\W\d_]+|[^\x00-\x7f]", text[start : start + 4000]):
        beyond = [char for char in part if not char.isascii()]
        if not part[0].isalpha():
            scores += [0.8 * (char in _SIGNS) for char in beyond]  # signs are a weaker evidence than words
        elif codec in ("cp1252", "cp1250", "cp1251"):
            scores += [float(_is_word(part, codec))] * len(beyond)
        else:  # an ideograph within a Latin word is more likely an accent misread
            weight = 1.0 if len(beyond) == len(part) else 0.4
            scores += [weight * _is_frequent(char, codec) for char in beyond]
    return sum(scores) / len(scores) if scores else 0.0


def _script(char: str) -> str:
    return re.split("[ -]", unicodedata.name(char, ""))[0]


def _is_frequent(char: str, codec: str) -> bool:
    """Tell whether a character is of the codec's language, and of the frequent half if it is an ideograph."""
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
