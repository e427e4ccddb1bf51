"""Read caption files of any encoding; an uncertain encoding is an error that proposes the right one."""

from __future__ import annotations

import codecs
import io
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

from ...common.files import open_file
from ...config import setting

LineChoice = Literal["draw", "first", "join"]  # lines of a caption: all, the first one, all as one

TEXT_LIMIT = 2**20  # maximum bytes of a caption file
MOST_LINES = 2**16  # of a caption
LONGEST_LINE = 2**17  # characters; also the csv module's limit of a field
_BOMS = (  # the long ones first: UTF-32's starts with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32", "-le"),
    (codecs.BOM_UTF32_BE, "utf-32", "-be"),
    (codecs.BOM_UTF8, "utf-8", ""),
    (codecs.BOM_UTF16_LE, "utf-16", "-le"),
    (codecs.BOM_UTF16_BE, "utf-16", "-be"),
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
# Of the two for Latin letters: those beyond ASCII of each language, whose texts mix with no other's.
_ALPHABETS = {
    "cp1252": (
        "äöüß", "åäöé", "æøåé", "àâæçèéêëîïôœùûüÿ", "áéíñóúüªº", "àáâãçéêíóôõúüªº", "àèéìíîòóùúªº", "àçèéíïòóúü",
        "áèéêëíïóöúü", "áðéíóúýþæö", "äõöüšž",
    ),
    "cp1250": ("ąćęłńóśźż", "áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîşţ", "čćđšž"),
}  # fmt: skip
MIXED = 0.85  # as well as a text reads whose letters no language has together
# Codecs for other purposes, and those that wait for the end of a sequence as long as the file.
_NO_CHARSETS = frozenset(("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"))
_FREQUENT = {  # the range of each standard's frequent characters: codec with just these, lowest and highest first byte
    "shift_jis": ("shift_jis", 0x88, 0x97),
    "gb18030": ("gb2312", 0xB0, 0xD7),
    "big5": ("big5", 0xA4, 0xC6),
    "euc_jp": ("euc_jp", 0xB0, 0xCF),
}
_SIGNS = frozenset("“”‘’„‚‹›«»–—…•·¿¡°€£©®™§½¼¾×、。，．！？：；（）「」『』【】〜～・％")
LINE_END = re.compile(r"\r\n|\r|\n")  # not U+2028 and form feeds, which occur inside captions
NO_TEXT = re.compile("[\0\ud800-\udfff]")
_LINE_FEED = b"\n"
_PIECE = 2**20  # characters or bytes that are looked at together


def read_text(path: Path, encoding: str = "auto") -> str:
    """Read a caption file; raises ValueError that names the file, OSError if it cannot be opened.

    A byte order mark decides. Without one, "auto" reads UTF-8, and UTF-16 that is recognized by its zero bytes; any
    other text is refused with a proposed encoding. A named encoding is used strictly; UTF-8 text is refused under
    another one, since it would be garbled without an error.
    """
    return decode(path, read_bytes(path, TEXT_LIMIT, "caption file"), encoding).read()


def caption_lines(text: str, mode: LineChoice = "draw", where: object = "The caption") -> tuple[str, ...]:
    """Split a text into stripped, non-empty lines: all of them, the first one, or all joined by blanks.

    where: file and line, for the message of the ValueError raised above MOST_LINES or LONGEST_LINE.
    """
    return choose_lines(tuple(line for part in LINE_END.split(text) if (line := part.strip())), mode, where)


def choose_lines(lines: tuple[str, ...], mode: LineChoice, where: object) -> tuple[str, ...]:
    """Choose among the lines of a caption as `caption_lines` does; raises ValueError for too many or too long ones."""
    if mode != "draw":
        lines = lines[:1] if mode == "first" else (" ".join(lines),) if lines else ()
    if len(lines) > MOST_LINES:
        raise ValueError(f"{where} holds more than {MOST_LINES:,} caption lines; remove some.")
    if any(len(line) > LONGEST_LINE for line in lines):
        raise ValueError(f"{where} holds a caption line of more than {LONGEST_LINE:,} characters; shorten it.")
    return lines


def read_bytes(path: Path, limit: int, kind: str) -> bytes:
    """Read a whole file; raises ValueError above `limit` bytes. kind: the file's kind, for the message."""
    with open_file(path) as file:
        expected = min(os.fstat(file.fileno()).st_size, limit)  # a read takes the memory that it is asked for
        data = file.read(expected + 1)
        if len(data) > expected:
            data += file.read(limit - expected)
    if len(data) > limit:
        size = path.stat().st_size / 2**20
        raise ValueError(
            f"{path} has {size:.1f} MiB, and a {kind} can have {limit / 2**20:g} at most; shorten or remove it."
        )
    return data


def decode(path: Path, data: bytes, encoding: str) -> TextIO:
    """Decode a file's bytes as `read_text` does, into a stream with unchanged line ends; raises ValueError.

    The whole text is checked beforehand, so that reading raises nothing.
    """
    codec, start = _codec(path, data, encoding)
    if any(map(NO_TEXT.search, _pieces(data, codec, start))):
        raise ValueError(
            f"{path} contains NUL characters or half characters, so it is no text; save it as UTF-8 without them."
        )
    return _stream(data, codec, start)


def _stream(data: bytes, codec: str, start: int = 0) -> TextIO:
    """Open bytes as text from a position on; raises LookupError for a codec of bytes, as rot13."""
    binary = io.BytesIO(data)
    binary.seek(start)
    return io.TextIOWrapper(binary, codec, newline="")


def _pieces(data: bytes, codec: str, start: int = 0) -> Iterator[str]:
    """Decode bytes piece by piece; raises UnicodeError."""
    text = _stream(data, codec, start)
    return iter(lambda: text.read(_PIECE), "")


def _fits(data: bytes, codec: str, start: int = 0) -> bool:
    """Tell whether a codec decodes all bytes; raises LookupError as _stream does."""
    try:
        for _ in _pieces(data, codec, start):
            pass
    except UnicodeError:
        return False
    return True


def _codec(path: Path, data: bytes, encoding: str) -> tuple[str, int]:
    """Find the codec of a text, and where the text begins behind its marks; raises ValueError."""
    for mark, name, order in _BOMS:
        if data.startswith(mark):
            start = len(mark)
            while data.startswith(mark, start):
                start += len(mark)
            if not _fits(data, name + order, start):
                raise ValueError(
                    f"{path} starts with the mark of {name}, but the rest is not {name}; save it as UTF-8."
                )
            return name + order, start
    return (_unmarked(path, data) if encoding == "auto" else _named(path, data, encoding)), 0


def _named(path: Path, data: bytes, encoding: str) -> str:
    """Return the codec for the encoding of the settings, if all bytes fit it; raises ValueError."""
    # There is no mark, so a stream must neither look for one nor learn the order of bytes from it.
    unmarked = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
    try:
        name = codecs.lookup(encoding).name
        codec = unmarked.get(name, encoding)
        fits = name not in _NO_CHARSETS and _fits(data, codec)
    except LookupError:  # an unknown one, or one of bytes
        name, codec, fits = "", "", False
    if not fits:
        raise ValueError(f"{path} cannot be read as {encoding} throughout; {_remedy(data)}.")
    if not data.isascii() and not name.startswith("utf") and _utf8_until(data) == len(data):
        raise ValueError(
            f"{path} is UTF-8 text, but caption_encoding is {encoding}; set {setting('captions.encoding')} to "
            "auto, and save other captions as UTF-8."
        )
    return codec


def _unmarked(path: Path, data: bytes) -> str:
    """Recognize UTF-8 or UTF-16 without a mark, or raise ValueError that proposes an encoding."""
    # No UTF-8 caption has NUL or escape characters: they mean UTF-16 or 32, and ISO-2022.
    binary = b"\0" in data or b"\x1b" in data
    until = _utf8_until(data)
    if not binary and until == len(data):
        return "utf-8"
    if codec := _utf16(data):
        return codec
    where = "" if binary else f" in line {data.count(_LINE_FEED, 0, until) + 1}"
    raise ValueError(f"{path} is not UTF-8 text{where}; {_remedy(data)}.")


def _utf8_until(data: bytes) -> int:
    """Count the first bytes that are UTF-8 text; all of them if the whole is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(data), _PIECE):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(data[at : at + _PIECE], at + _PIECE >= len(data))
        except UnicodeDecodeError as error:
            return at - pending + error.start
    return len(data)


def _utf16(data: bytes) -> str | None:
    """Recognize UTF-16 without a mark if it is certain: Latin text, in which every other byte is mostly zero."""
    zeros = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 or min(zeros) or 4 * max(zeros) < len(data):
        return None
    codec = "utf-16-le" if zeros[1] else "utf-16-be"
    try:
        return codec if all(map(_is_clean, _pieces(data, codec))) else None
    except UnicodeError:
        return None


def _is_clean(text: str) -> bool:
    """Tell whether a text has no control, private or unassigned characters."""
    odd = (unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") for char in set(text) - set("\t\n\v\f\r"))
    return not any(odd)


def _remedy(data: bytes) -> str:
    """Propose an encoding, or the two best if none is clearly better."""
    codecs_here: tuple[str, ...] = tuple(_CODECS)
    if b"\0" in data:
        little = data[1::2].count(0) > data[0::2].count(0)  # blanks and other ASCII show the byte order
        codecs_here = ("utf-32-le", "utf-32-be", "utf-16-le" if little else "utf-16-be")
    elif b"\x1b" in data:
        codecs_here = ("iso2022_jp", "iso2022_kr")
    elif _utf8_until(data) == len(data):
        return f"it is UTF-8 text: set {setting('captions.encoding')} to auto"
    ranked = _ranked(data, codecs_here)
    best = ranked[0][0] if ranked else 0.0
    if best <= 0.5:
        return "no other encoding fits; save it as UTF-8"
    choice = " or ".join([codec for score, codec in ranked if score > best - 0.05][:2])
    return f"set {setting('captions.encoding')} to {choice}, or save it as UTF-8"


def likely_codec(data: bytes) -> tuple[str, int]:
    """Find the codec that a text without a mark most likely has, "" for none; and its first line that is not UTF-8."""
    until = _utf8_until(data)
    if b"\0" in data:
        return _utf16(data) or "", 0
    if until == len(data):
        return "utf-8", 0
    ranked = _ranked(data, tuple(_CODECS))
    return (ranked[0][1] if ranked and ranked[0][0] > 0.5 else ""), data.count(_LINE_FEED, 0, until) + 1


def _ranked(data: bytes, codecs_here: tuple[str, ...]) -> list[tuple[float, str]]:
    """List how well a text reads by each of the codecs that fit, the best first; of equals the first."""
    found: dict[str, tuple[float, str]] = {}  # text -> how well it reads, and by which codec first
    sample = _sample(data)
    for codec in codecs_here:
        if _fits(sample, codec) and _is_clean(text := sample.decode(codec)):
            found.setdefault(text, (_plausibility(text, codec), codec))
    return sorted(found.values(), key=lambda item: -item[0])


def _sample(data: bytes) -> bytes:
    """Cut the part of a long text that tells its encoding: whole lines from the first one that is not UTF-8."""
    if len(data) <= TEXT_LIMIT:
        return data
    if b"\0" in data or b"\x1b" in data:  # characters of 4 bytes; a state that begins at the first one
        return data[:TEXT_LIMIT]
    start = data.rfind(_LINE_FEED, 0, _utf8_until(data)) + 1
    end = data.rfind(_LINE_FEED, start, start + TEXT_LIMIT)
    return data[start : end if end > start else start + TEXT_LIMIT]


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
    text = text[start : start + 4000]
    for part in re.findall(r"[^\W\d_]+|[^\x00-\x7f]", text):
        beyond = [char for char in part if not char.isascii()]
        if not part[0].isalpha():
            scores += [0.8 * (char in _SIGNS) for char in beyond]  # signs are weaker evidence than words
        elif codec in ("cp1252", "cp1250", "cp1251"):
            scores += [float(_is_word(part, codec))] * len(beyond)
        else:  # an ideograph within a Latin word is more likely an accent misread
            weight = 1.0 if len(beyond) == len(part) else 0.4
            scores += [weight * _is_frequent(char, codec) for char in beyond]
    return (1.0 if _of_one_language(text, codec) else MIXED) * sum(scores) / len(scores) if scores else 0.0


def _of_one_language(text: str, codec: str) -> bool:
    """Tell whether some language has all letters of a text; of codecs for more than Latin letters nobody asks."""
    letters = {char.lower() for char in text if not char.isascii() and char.isalpha()}
    return codec not in _ALPHABETS or any(letters <= {*alphabet} for alphabet in _ALPHABETS[codec])


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
