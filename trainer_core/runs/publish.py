"""Copy the LoRA files of a save to ComfyUI's folders of LoRAs and embeddings."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.files import check_writable, file_digest, write_json
from ..common.leftovers import LONGEST_NAME, remove
from ..common.values import is_texts, read_object
from ..common.windows import who_holds
from ..config import SavesConfig, fill_name, plain_name, setting
from ..lora_files.write import copy_lora, embedding_path, has_layers, is_copy, run_of
from . import LORA, PUBLISHED, RunFolder
from .folder import CHECKPOINTS
from .key import SHOWN

_STOPPED = re.compile(r"(?P<stop>.*\|(?P<step>[0-9]+))-stopped-at-(?P=step)(-.*)?", re.DOTALL)  # keys of stops
EXPERTS = ("-low", "-high")  # endings of the files of a base model's experts
MOST_BYTES_OF_FILES = 250  # of a name in UTF-8; most file systems take 255


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """The files of one version of a LoRA: of the last, the best or the averaged weights."""

    path: Path
    embeddings: dict[str, Path]  # by token: the file of its trained embedding
    steps: int

    @property
    def files(self) -> tuple[Path, ...]:
        """List the LoRA's file and those of its embeddings."""
        return self.path, *self.embeddings.values()


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """The folders and the file name that LoRA files are copied to."""

    output: Path  # the folder of LoRAs, and the run's name as its stem
    embeddings: Path  # the folder of trained embeddings
    saves: SavesConfig

    def publish(
        self,
        run: RunFolder,
        saved: Sequence[Saved],
        step: int,
        epoch: float,
        kind: str = "",
        note: Callable[[str], None] = lambda _: None,
    ) -> list[Saved]:
        """Copy the LoRA files of a step's save to the destination; unchanged earlier copies are kept.

        kind: added to the names while the run is not finished. A taken name gets a number; `overwrite` replaces a file
        of the same run. A later stop, or the end of the run, deletes the copies of earlier stops. `note` gets a
        sentence for each file that a program holds, so that it stays.
        """
        try:
            made = self._published_or_copied(run, saved, step, epoch, kind)
        except PermissionError as error:
            if not self.saves.overwrite or not (held := who_holds(error)):
                raise
            note(f"The earlier LoRA of this name stays, and the new one gets a number. {held}.")
            beside = replace(self, saves=self.saves.replace(overwrite=False))
            made = beside._published_or_copied(run, saved, step, epoch, kind)
        if not kind or kind == f"-stopped-at-{step}":
            for path in self._remove_stopped(run, step if kind else None):
                note(f"{path.name} of an earlier stop is open elsewhere, so it stays; delete it when you like.")
        return made

    def _published_or_copied(
        self, run: RunFolder, saved: Sequence[Saved], step: int, epoch: float, kind: str
    ) -> list[Saved]:
        known = read_object(run.path / PUBLISHED) or {}
        endings = [self._ending(each, step, kind) for each in saved]
        keys = [f"{self.output}|{self.saves.file_name}|{step}{ending}" for ending in endings]
        copies = [_published(known.get(key), each) for key, each in zip(keys, saved, strict=True)]
        if all(copy is not None for copy in copies):
            return [copy for copy in copies if copy is not None]
        stems = [self._stem(each, epoch) for each in saved]
        number = self._free_number(run, saved, stems, endings)
        made = []
        for key, each, stem, ending in zip(keys, saved, stems, endings, strict=True):
            made.append(self._copy(run, each, f"{stem}{number}{ending}"))
            known[key] = [[str(file), file_digest(file)] for file in made[-1].files]
            write_json(run.path / PUBLISHED, known)
        return made

    def _remove_stopped(self, run: RunFolder, now: int | None) -> list[Path]:
        """Delete the copies of the stops of a run before the one after step `now`; changed and moved files stay.

        Returns those that could not be deleted: Windows keeps a file that a node has mapped.
        """
        held = []
        known = read_object(run.path / PUBLISHED) or {}
        matches = filter(None, map(_STOPPED.fullmatch, known))
        stops = {match["stop"] for match in matches if match["step"] != str(now)}
        starts = tuple(f"{stop}{kind}" for stop in stops for kind in ("-stopped-at-", "-best-at-"))
        old = [key for key in known if key.startswith(starts)]
        for key in old:
            for path, digest in _pairs(known.pop(key)):
                if path.parent in (self.output.parent, self.embeddings) and self._is_stop(run, path, digest):
                    try:
                        remove(path)
                    except PermissionError:
                        held.append(path)
        if old:
            write_json(run.path / PUBLISHED, known)
        return held

    @staticmethod
    def _is_stop(run: RunFolder, path: Path, digest: str) -> bool:
        """Tell whether a file is the unchanged copy of a stop of the run; its list may be a stranger's."""
        named = "-stopped-at-" in path.name or "-best-at-" in path.name
        return named and path.is_file() and run_of(path) == run.keys.run and file_digest(path) == digest

    def _ending(self, saved: Saved, step: int, kind: str) -> str:
        ending = saved.path.stem.removeprefix(LORA)
        if not kind:
            return ending
        expert = next((each for each in EXPERTS if ending.endswith(each)), "")
        ending = ending.removesuffix(expert)
        return (f"-best-at-{saved.steps}" if saved.steps < step else kind + ending.removeprefix("-last")) + expert

    def _stem(self, saved: Saved, epoch: float) -> str:
        now = time.localtime()
        values = {"name": self.output.stem, "step": f"{saved.steps:06}", "epoch": f"{int(epoch):04}"}
        values |= {"date": time.strftime("%Y-%m-%d", now), "time": time.strftime("%H-%M", now)}
        return fill_name(self.saves.file_name, values)

    def _free_number(self, run: RunFolder, saved: Sequence[Saved], stems: Sequence[str], endings: Sequence[str]) -> str:
        """Find the first of "", -2, -3 … that makes all names free when put between stem and ending."""
        numbers = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))

        def free(number: str) -> bool:
            paths = [self.output.with_name(f"{s}{number}{e}.safetensors") for s, e in zip(stems, endings, strict=True)]
            return all(self._is_free(run, path, each.path) for each, path in zip(saved, paths, strict=True))

        return next(filter(free, numbers))

    def check_names(self, tokens: Iterable[str]) -> None:
        """Raise ValueError if the LoRA or an embedding would get an invalid file name."""
        plain_name(self.output.stem)  # of the run's folder
        name = self._longest_name()
        for token in tokens:
            if len(embedding_path(self.embeddings, name, token).name.encode()) > MOST_BYTES_OF_FILES:
                raise ValueError(
                    f"The name {name[:30]} of the LoRA and the token {token} are too long for one file name; shorten "
                    f"{setting('run.name')}, or {setting('embeddings.token')}."
                )

    def _longest_name(self) -> str:
        """Give the longest name of a file, without ending; it is checked."""
        values = {"name": self.output.stem, "epoch": "1" * 6, "step": "1" * 7, "date": "2000-01-01", "time": "00-00"}
        return f"{fill_name(self.saves.file_name, values)}-stopped-at-1000000-last-high-99"

    def check_folders(self, runs: Path, tokens: Collection[str]) -> None:
        """Raise ValueError if a folder that the run writes to cannot be written, or takes no paths of that length."""
        name = self._longest_name()
        words = [embedding_path(self.embeddings, name, token).name for token in tokens]
        check_writable(self.output.parent, len(f"{name}.safetensors"))
        check_writable(self.embeddings, max(map(len, words), default=0))
        save = Path(f"{self.output.stem}-{'0' * SHOWN}-99", CHECKPOINTS, "0" * LONGEST_NAME, "words")
        files = ["0" * LONGEST_NAME, *(embedding_path(save, f"{LORA}-averaged", token).name for token in tokens)]
        check_writable(runs, max(len(str(save / file)) for file in files))

    def _copy(self, run: RunFolder, saved: Saved, stem: str) -> Saved:
        path = self.output.with_name(f"{stem}.safetensors")
        embeddings = {
            token: self._embedding(run, file, embedding_path(self.embeddings, stem, token))
            for token, file in saved.embeddings.items()
        }
        pairs = [*zip(saved.embeddings.values(), embeddings.values(), strict=True)]
        if has_layers(saved.path) or not pairs:
            pairs.insert(0, (saved.path, path))
        else:  # words were trained alone, and their first file stands for the LoRA
            path = pairs[0][1]
        copies = Saved(path=path, embeddings=embeddings, steps=saved.steps)
        for source, place in pairs:
            if not place.exists() or not is_copy(source, place):
                copy_lora(source, place)
        return copies

    def _embedding(self, run: RunFolder, source: Path, path: Path) -> Path:
        candidates = (path if number == 1 else path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
        return next(place for place in candidates if self._is_free(run, place, source))

    def _is_free(self, run: RunFolder, path: Path, source: Path) -> bool:
        """Tell whether a path may be written: unused, this very copy, or of the same run with `overwrite` on.

        So no stranger's workflow replaces a LoRA, whoever trained it.
        """
        return not path.exists() or is_copy(source, path) or (self.saves.overwrite and run_of(path) == run.keys.run)


def remember_copies(run: RunFolder, copies: Sequence[Path]) -> None:
    """Note the copies that a person made of a run's files; nothing while a process trains it, which notes its own."""
    if not run.busy():
        known = read_object(run.path / PUBLISHED) or {}
        known |= {f"by hand|{copy}": [[str(copy), file_digest(copy)]] for copy in copies}
        write_json(run.path / PUBLISHED, known)


def _published(files: Any, saved: Saved) -> Saved | None:
    """Find the earlier copies of a save's files; None if one is missing or changed."""
    pairs = _pairs(files)
    if len(pairs) != len(saved.files) or any(not path.is_file() or file_digest(path) != sha for path, sha in pairs):
        return None
    path, *embeddings = (path for path, _ in pairs)
    return Saved(path=path, embeddings=dict(zip(saved.embeddings, embeddings, strict=True)), steps=saved.steps)


def _pairs(files: Any) -> list[tuple[Path, str]]:
    """Read an entry of PUBLISHED: the paths of copies and their sha256; none if it is damaged."""
    pairs = files if isinstance(files, list) else []
    if not all(is_texts(pair) and len(pair) == 2 for pair in pairs):
        return []
    return [(Path(path), digest) for path, digest in pairs]
