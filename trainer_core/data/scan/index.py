"""Remember the digests and decoded facts of files on disk, so that no file is read or decoded twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextvars import copy_context
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from ...common.callbacks import Callbacks
from ...common.cancel import cancellable, look
from ...common.files import read_file, written_whole
from ...common.held import held
from ...common.json_files import parse_json
from ...common.leftovers import remove_leftovers
from ...common.wording import say
from .folder import File

PLACE = "scan/index"  # in the cache folder; the index is alone in its folder
FORMAT = 2  # of the file
CHUNK = 256  # files between two looks at the callbacks
LARGEST_FILE = 2**31  # bytes; more than a picture of the maximum size can have
LARGEST_INDEX = 2**27  # bytes; a larger index is neither read nor written
MOST = 300_000  # maximum entries of a table; the least recently used are deleted first
KEPT = 180  # days after which an unused entry is deleted
SAVE_SECONDS = 20.0  # between two saves while files are read: the work that a killed process loses
SAVE_WAITS = 20  # pause after a save, in durations of that save, at least
WAIT = 0.1  # seconds between two looks for a Cancel
LOCK_SECONDS = 10.0  # how long a save waits for another process
_FRESH = 2_000_000_000  # ns; a file changed more recently may change again within the resolution of its times
_WEEK = 7  # days; an older date of last use is updated

Result = TypeVar("Result")
FileFacts = dict[str, Any]  # properties of a file's content; {"problem": ...} if it is unusable
Table = dict[str, list[Any]]  # name -> [day of its last use, values …]


class Index:
    """File version (path, size, times) -> sha256 of its content, and (sha256, kind) -> facts about that content.

    A file that was only touched or renamed is hashed again but not decoded again. `path` is a file, alone in its
    folder, that is read and written as a whole; several processes may share it, and each adds its entries. With None,
    a damaged file or a disk error the index stays in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._today = int(time.time() // 86_400)
        self._version, self._tables = _load(path)
        self._new: dict[str, Table] = {"files": {}, "facts": {}}  # not in the file yet
        self._saved, self._pause = time.monotonic(), SAVE_SECONDS

    def close(self) -> None:
        """Save new entries; without a writable path they are lost."""
        if self._path is None or not any(self._new.values()):
            return
        with contextlib.suppress(OSError, NotImplementedError):  # a full disk, a lock held, no locks on this disk
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._path}.lock", timeout=LOCK_SECONDS):
                remove_leftovers(self._path.parent)
                if _version(self._path) != self._version:  # another process has saved
                    self._version, self._tables = _load(self._path)
                for name, table in self._tables.items():
                    self._tables[name] = _pruned({**table, **self._new[name]}, self._today)
                with written_whole(self._path) as temporary:
                    temporary.write_bytes(_written(self._tables))
                self._version = _version(self._path)
                self._new = {name: {} for name in self._new}

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def digests(
        self,
        files: Iterable[File],
        callbacks: Callbacks | None = None,
        *,
        large: Callable[[Path], str] | None = None,
    ) -> Iterator[str]:
        """Yield the sha256 of each file's content, "" if it cannot be read or is too large.

        large: computes the digest of a file of any size.
        """
        for digest, _ in self._each(list(files), "", None, lambda _: "", callbacks or Callbacks(), large=large):
            yield digest

    def examine(
        self,
        files: Sequence[File],
        kind: str,
        read: Callable[[bytes], FileFacts],
        refuse: Callable[[OSError], str],
        callbacks: Callbacks,
    ) -> Iterator[tuple[str, FileFacts]]:
        """Yield (sha256, facts) of each file; facts of a known content and `kind` come from the index.

        read: extracts facts from a content, called in threads. refuse: describes the error of an unreadable file, which
        is not remembered.
        """
        return self._each(files, kind, read, refuse, callbacks)

    def _each(
        self,
        files: Sequence[File],
        kind: str,
        read: Callable[[bytes], FileFacts] | None,
        refuse: Callable[[OSError], str],
        callbacks: Callbacks,
        *,
        large: Callable[[Path], str] | None = None,
    ) -> Iterator[tuple[str, FileFacts]]:
        def work(file: File, digest: str | None, facts: FileFacts | None) -> tuple[str, FileFacts]:
            if digest is not None and facts is not None:
                return digest, facts
            if file.size > LARGEST_FILE and large is None:
                return "", {"problem": f"{file.size / 2**30:.1f} GiB, too large for a picture"}
            if large is not None:
                try:
                    return large(file.path), {}
                except OSError as error:
                    return "", {"problem": refuse(error)}
            with held(file.size):
                return read_whole(file, digest, facts)

        def read_whole(file: File, digest: str | None, facts: FileFacts | None) -> tuple[str, FileFacts]:
            try:
                content = read_file(file.path)
            except OSError as error:
                return "", {"problem": refuse(error)}
            found = hashlib.sha256(content).hexdigest()
            if read is None:
                return found, {}
            if found != digest:  # new content, or a known one of a touched or renamed file
                facts = self.known_facts(found, kind)
            return found, read(content) if facts is None else facts

        done, remaining = 0, iter(files)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            while chunk := list(islice(remaining, CHUNK)):
                callbacks.check()
                digests = [self._known_digest(file) for file in chunk]
                facts = [{} if read is None else self.known_facts(digest, kind) for digest in digests]
                done += len(chunk)
                if None not in digests and None not in facts:
                    yield from map(work, chunk, digests, facts)
                    continue
                results = in_threads(pool, work, chunk, digests, facts, check=callbacks.check)
                self._remember(chunk, results, kind if read is not None else None)
                callbacks.phase(say("reading files"), done, len(files))
                yield from results

    def keep(self, digest: str, kind: str, facts: FileFacts) -> None:
        """Remember facts about a content that were found elsewhere; they replace earlier ones of this kind."""
        self._new["facts"][f"{digest} {kind}"] = [self._today, facts]

    def known_facts(self, digest: str | None, kind: str) -> FileFacts | None:
        """Look up the facts of a kind about a content, None if there are none."""
        match self._find("facts", f"{digest} {kind}"):
            case [int(), dict(facts)]:
                return facts
        return None

    def _known_digest(self, file: File) -> str | None:
        match self._find("files", os.path.abspath(file.path)):
            case [int(), file.size, file.mtime_ns, file.ctime_ns, str(digest)]:
                return digest
        return None

    def _find(self, table: str, name: str) -> list[Any] | None:
        """Look up an entry and update its last use; None if it is unknown."""
        entry = self._new[table].get(name) or self._tables[table].get(name)
        if entry is not None and 0 < _last_use(entry) < self._today - _WEEK:
            self._new[table][name] = [self._today, *entry[1:]]
        return entry

    def _remember(self, files: Sequence[File], results: Sequence[tuple[str, FileFacts]], kind: str | None) -> None:
        """Add the digests of files and the facts of their contents, and save from time to time."""
        settled = time.time_ns() - _FRESH
        for file, (digest, facts) in zip(files, results, strict=True):
            if digest and max(file.mtime_ns, file.ctime_ns) < settled:
                version = [file.size, file.mtime_ns, file.ctime_ns]
                self._new["files"][os.path.abspath(file.path)] = [self._today, *version, digest]
            if digest and kind is not None:
                self._new["facts"][f"{digest} {kind}"] = [self._today, facts]
        began = time.monotonic()
        if began - self._saved > self._pause:
            self.close()
            self._saved = time.monotonic()
            self._pause = max(SAVE_SECONDS, SAVE_WAITS * (self._saved - began))


def in_threads(
    pool: Executor, work: Callable[..., Result], *items: Sequence[Any], check: Callable[[], None]
) -> list[Result]:
    """Call `work` with each item of the sequences, in threads; `check` is called ten times a second and may cancel."""
    with cancellable(check):
        futures = [pool.submit(copy_context().run, work, *each) for each in zip(*items, strict=True)]
        try:
            while wait(futures, timeout=WAIT).not_done:
                look()
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]


def _load(path: Path | None) -> tuple[tuple[int, ...], dict[str, Table]]:
    """Read the version of a file and its tables, which are empty if it is missing, damaged or of another format."""
    nothing: dict[str, Table] = {"files": {}, "facts": {}}
    if path is None:
        return (), nothing
    version = _version(path)  # taken before reading, so that a file written meanwhile counts as changed
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_INDEX + 1)
    except OSError:
        return version, nothing
    head, _, body = content.partition(b"\n")
    if len(content) > LARGEST_INDEX or head != _head(body):
        return version, nothing
    try:
        tables = parse_json(body)
    except ValueError:  # not ours, although its hash is right
        return version, nothing
    known = isinstance(tables, dict) and all(isinstance(tables.get(name), dict) for name in nothing)
    return version, {name: tables[name] for name in nothing} if known else nothing


def _version(path: Path) -> tuple[int, ...]:
    """Identify the version of a file by inode, size and time; () without the file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _head(body: bytes) -> bytes:
    return f"atelier index {FORMAT} {hashlib.sha256(body).hexdigest()}".encode()


def _written(tables: dict[str, Table]) -> bytes:
    """Build the content of the file: a line with the hash of the rest, and the tables as JSON."""
    most = MOST
    while True:
        body = json.dumps(tables, separators=(",", ":")).encode()
        if len(body) < LARGEST_INDEX - 1024:
            return _head(body) + b"\n" + body
        most //= 2
        tables = {name: dict(list(table.items())[-most:]) for name, table in tables.items()}


def _pruned(table: Table, today: int) -> Table:
    """Remove entries that were unused for long, and the oldest of too many."""
    kept = {name: entry for name, entry in table.items() if _last_use(entry) >= today - KEPT}
    if len(kept) <= MOST:
        return kept
    return dict(sorted(kept.items(), key=lambda item: _last_use(item[1]))[-MOST:])


def _last_use(entry: object) -> int:
    """Read the day of an entry's last use; an invalid entry counts as old."""
    match entry:
        case [int(day), *_]:
            return day
    return 0
