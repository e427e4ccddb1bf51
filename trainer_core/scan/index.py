"""Remember on disk what files hold and what their contents are, so that nothing is read or decoded twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from ..callbacks import Callbacks
from ..files import file_digest
from .folder import File

FORMAT = 1
CHUNK = 256  # files between two commits, two looks at the callbacks, and in memory at a time
LARGEST_FILE = 2**31  # bytes; above what a picture of the most pixels that are read can take
_FRESH = 2_000_000_000  # ns; a file changed later than this may change again without showing it

Facts = dict[str, Any]  # what a reader found out about a content; {"problem": ...} when it cannot be used


class Index:
    """File version (path, size, times) -> sha256 of its content, and (sha256, kind) -> facts about that content.

    A file that was only touched or renamed is hashed again but not decoded again. `path` is an SQLite file that
    several processes may share; None, a damaged file or a disk that cannot be written keep the index in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._connection = _open(path)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def digests(
        self, files: Iterable[File], callbacks: Callbacks | None = None, *, any_size: bool = False
    ) -> Iterator[str]:
        """Yield the sha256 of each file's content, "" where it cannot be read or, but for any_size, is too large."""
        for digest, _ in self._each(list(files), "", None, lambda _: "", callbacks or Callbacks(), any_size=any_size):
            yield digest

    def examine(
        self,
        files: Sequence[File],
        kind: str,
        read: Callable[[bytes], Facts],
        refuse: Callable[[OSError], str],
        callbacks: Callbacks,
    ) -> Iterator[tuple[str, Facts]]:
        """Yield (sha256, facts) of each file, from memory where its content has been read as this `kind` before.

        read: turns a content into facts, called in threads. refuse: words for a file that cannot be opened, which is
        not remembered.
        """
        return self._each(files, kind, read, refuse, callbacks)

    def _each(
        self,
        files: Sequence[File],
        kind: str,
        read: Callable[[bytes], Facts] | None,
        refuse: Callable[[OSError], str],
        callbacks: Callbacks,
        *,
        any_size: bool = False,
    ) -> Iterator[tuple[str, Facts]]:
        def work(file: File, digest: str | None, facts: Facts | None) -> tuple[str, Facts]:
            if digest is not None and facts is not None:
                return digest, facts
            if file.size > LARGEST_FILE and not any_size:
                return "", {"problem": f"{file.size / 2**30:.1f} GiB, too large for a picture"}
            try:
                if any_size:
                    return file_digest(file.path), {}
                content = file.path.read_bytes()
            except OSError as error:
                return "", {"problem": refuse(error)}
            found = hashlib.sha256(content).hexdigest()
            if read is None:
                return found, {}
            if found != digest:  # another content, or the one of a file that was touched or renamed
                with self._lock:
                    (facts,) = self._known_facts([found], kind)
            return found, read(content) if facts is None else facts

        done, remaining = 0, iter(files)
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            while chunk := list(islice(remaining, CHUNK)):
                callbacks.check()
                digests = self._known_digests(chunk)
                facts = self._known_facts(digests, kind) if read is not None else [{}] * len(chunk)
                results = list(pool.map(work, chunk, digests, facts))
                self._remember(chunk, results, digests, facts, kind if read is not None else None)
                done += len(chunk)
                if any(known is None for known in (*digests, *facts)):
                    callbacks.phase("reading files", done, len(files))
                yield from results

    def _known_digests(self, files: Sequence[File]) -> list[str | None]:
        rows = self._select("SELECT path, size, mtime, ctime, digest FROM files WHERE path IN", map(_name, files))
        known = {row[:4]: row[4] for row in rows}
        return [known.get((_name(file), file.size, file.mtime_ns, file.ctime_ns)) for file in files]

    def _known_facts(self, digests: Sequence[str | None], kind: str) -> list[Facts | None]:
        rows = self._select("SELECT digest, facts FROM facts WHERE kind = ? AND digest IN", digests, kind)
        known = {digest: _facts(text) for digest, text in rows}
        return [known.get(digest) for digest in digests]

    def _select(self, query: str, values: Iterable[object], *first: object) -> list[tuple]:
        wanted = [value for value in values if value is not None]
        marks = ",".join("?" * len(wanted))
        try:
            return self._connection.execute(f"{query} ({marks})", (*first, *wanted)).fetchall()
        except sqlite3.DatabaseError as error:
            self._renew(error)
            return []

    def _remember(
        self,
        files: Sequence[File],
        results: Sequence[tuple[str, Facts]],
        digests: Sequence[str | None],
        facts: Sequence[Facts | None],
        kind: str | None,
    ) -> None:
        settled = time.time_ns() - _FRESH
        versions = [
            (_name(file), file.size, file.mtime_ns, file.ctime_ns, digest)
            for file, (digest, _), known in zip(files, results, digests, strict=True)
            if digest and digest != known and max(file.mtime_ns, file.ctime_ns) < settled
        ]
        contents = [
            (digest, kind, json.dumps(found))
            for (digest, found), known in zip(results, facts, strict=True)
            if kind is not None and digest and known is not found
        ]
        if versions or contents:
            try:
                with self._connection:
                    self._connection.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", versions)
                    self._connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", contents)
            except sqlite3.DatabaseError as error:
                self._renew(error)

    def _renew(self, error: sqlite3.DatabaseError) -> None:
        """Begin anew where the file is damaged inside.

        A full disk, or a file that another process holds, is an OperationalError: that is read again next time.
        """
        if isinstance(error, sqlite3.ProgrammingError):  # a closed index: a mistake of the caller's
            raise error
        if not isinstance(error, sqlite3.OperationalError):
            self._connection.close()
            if self._path is not None:
                with contextlib.suppress(OSError):  # Windows deletes no file that another process has open
                    self._path.unlink(missing_ok=True)
            self._connection = _open(self._path)


def _facts(text: str) -> Facts | None:
    """Read facts back; None where a damaged file holds something else."""
    try:
        facts = json.loads(text)
    except (TypeError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def _name(file: File) -> bytes:
    return os.fsencode(os.path.abspath(file.path))


def _open(path: Path | None) -> sqlite3.Connection:
    """Open or make the index; a damaged one is made anew, one that cannot be written is replaced by memory."""
    if path is None:
        return _prepare(":memory:")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _prepare(str(path))
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            path.unlink(missing_ok=True)
            return _prepare(str(path))
    except (OSError, sqlite3.OperationalError):
        return _prepare(":memory:")


def _prepare(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, timeout=20, check_same_thread=False)
    try:
        with connection:
            if connection.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
                connection.execute("DROP TABLE IF EXISTS files")
                connection.execute("DROP TABLE IF EXISTS facts")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS files (path BLOB PRIMARY KEY, size INTEGER, mtime INTEGER, ctime INTEGER, "
                "digest TEXT) WITHOUT ROWID"
            )
            connection.execute(
                "CREATE TABLE IF NOT EXISTS facts (digest TEXT, kind TEXT, facts TEXT, PRIMARY KEY (digest, kind)) "
                "WITHOUT ROWID"
            )
    except sqlite3.Error:
        connection.close()
        raise
    return connection
