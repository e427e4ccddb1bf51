"""Say which folders may be read for a workflow, which may come from a stranger."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Access:
    """The folders that may be read, with all that lies in them; roots None: any file, for people's own scripts."""

    roots: tuple[str, ...] | None = None  # absolute; a folder behind links is there under both of its names

    def allows(self, path: Path | str) -> bool:
        """Tell whether a file or folder may be read; of a link, the place that it leads to counts as well.

        Nothing outside the folders is touched to find out: the name is compared first.
        """
        if self.roots is None:
            return True
        return self._holds(os.path.abspath(path)) and self._holds(os.path.realpath(path))

    def _holds(self, path: str) -> bool:
        return any(Path(path).is_relative_to(root) for root in self.roots or ())


def access_to(folders: Iterable[Path | str]) -> Access:
    """Build the access to some folders."""
    names = [str(folder) for folder in folders]
    return Access(tuple(dict.fromkeys([*map(os.path.abspath, names), *map(os.path.realpath, names)])))


ANYWHERE = Access()


def real_path(path: Path | str) -> Path:
    """Follow the links of a path; one that leads to a network address, as a mapped drive of Windows, stays as it is.

    No setting takes such an address, so a run that held it could not be trained again. By os.path, as Path raises
    RuntimeError for a link to itself and for an unknown user's home.
    """
    real = os.path.realpath(path)
    return Path(os.path.abspath(path) if real.startswith("\\\\") else real)
