"""Count what a film of mp4 or mov says that it holds, before a decoder believes it.

A few bytes can name millions of samples or cuts, and the demuxer makes a list of all while nobody can stop it.
ISO/IEC 14496-12, 8.6.1 to 8.6.6 (stts to elst), 8.7.3 to 8.7.5 (stsz to stco), 8.8.8 (trun), 8.9.2 (sbgp).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from ..common.cancel import look

MOST_SAMPLES = 8_000_000  # of all tracks, again for each cut: hours of sound in packets, with twenty cuts
MOST_SAMPLES_IN_CHUNKS = 2**31  # of sound without packets, likewise: twelve hours
MOST_ENTRIES = 32_000_000  # of all tables together: a second, in which no Cancel is heard
MOST_BOXES = 200_000  # a fragment has a handful
_HOLD_OTHERS = frozenset((b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl", b"moof", b"traf"))
_COUNT_ENTRIES = frozenset((b"stts", b"ctts", b"stss", b"stps", b"stsc", b"stco", b"co64"))


@dataclass(slots=True)
class _Track:
    """What the tables of a track say."""

    is_sound: bool = False
    cuts: int = 0  # each of which may list every sample again
    samples: int = 0
    chunks: int = 0
    in_a_chunk: int = 0  # samples, at most
    even: bool = False  # each sample takes one tick, as those of plain sound do


@dataclass(slots=True)
class _Counted:
    in_fragments: int = 0
    entries: int = 0  # of tables, which the demuxer reads past their end where they claim more than they have
    tracks: list[_Track] = field(default_factory=lambda: [_Track()])  # the first: what is in none


def holds_too_much(file: IO[bytes]) -> bool:
    """Tell whether the tables of a film name more than any film has; what is damaged is left to the decoder."""
    found = _Counted()
    size = file.seek(0, 2)
    for boxes, (kind, start, end) in enumerate(_boxes(file, 0, size)):
        look()
        if boxes > MOST_BOXES:
            return True
        _count(file, kind, start, end, found)
    plain = [track for track in found.tracks if track.is_sound and track.even]
    others = [track for track in found.tracks if not (track.is_sound and track.even)]
    samples = found.in_fragments + sum(max(1, track.samples) * max(1, track.cuts) for track in others)
    in_chunks = sum(track.chunks * track.in_a_chunk * max(1, track.cuts) for track in plain)
    return samples > MOST_SAMPLES or in_chunks > MOST_SAMPLES_IN_CHUNKS or found.entries > MOST_ENTRIES


def _boxes(file: IO[bytes], start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each box, and where its content begins and ends; boxes that hold others come before those."""
    waiting = [(start, end)]
    while waiting:
        at, last = waiting.pop()
        if at + 8 > last:
            continue
        file.seek(at)
        head = file.read(16)
        if len(head) < 8:
            continue
        size, kind, begins = int.from_bytes(head[:4], "big"), head[4:8], at + 8
        if size == 1:
            size, begins = int.from_bytes(head[8:16], "big"), at + 16
        stop = min(at + size, last) if size else last  # 0: to the end
        if stop < begins:
            continue
        waiting.append((stop, last))
        yield kind, begins, stop
        if kind in _HOLD_OTHERS:
            waiting.append((begins, stop))


def _count(file: IO[bytes], kind: bytes, start: int, end: int, found: _Counted) -> None:
    """Add what a table says."""
    track = found.tracks[-1]
    if kind in _COUNT_ENTRIES:
        found.entries += _number(file, start + 4)
    elif kind == b"sbgp":  # it says its kind before, and from version 1 on more of it
        found.entries += _number(file, start + (12 if _number(file, start) >> 24 else 8))
    elif kind == b"sdtp":
        found.entries += end - start  # a byte each
    if kind == b"trak":
        found.tracks.append(_Track())
    elif kind == b"elst":
        track.cuts += _number(file, start + 4)
    elif kind == b"hdlr":
        file.seek(start + 8)
        # QuickTime has a second one in a track, of where its data lies.
        track.is_sound = track.is_sound or file.read(4) == b"soun"
    elif kind in (b"stsz", b"stz2"):
        track.samples += _number(file, start + 8)
    elif kind in (b"stco", b"co64"):
        track.chunks += _number(file, start + 4)
    elif kind == b"stsc":
        file.seek(start + 8)
        for first in range(start + 8, end - 11, 12 * 4096):
            look()
            file.seek(first)
            block = file.read(min(12 * 4096, end - first))
            chunks = struct.iter_unpack(">III", block[: len(block) // 12 * 12])
            track.in_a_chunk = max(track.in_a_chunk, max((each[1] for each in chunks), default=0))
    elif kind == b"stts":
        file.seek(start + 4)
        track.even = file.read(4) == b"\0\0\0\1" and _number(file, start + 12) == 1
    elif kind == b"trun":
        found.in_fragments += _number(file, start + 4)


def _number(file: IO[bytes], at: int) -> int:
    file.seek(at)
    return int.from_bytes(file.read(4), "big")
