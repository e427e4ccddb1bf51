"""Give single pictures another role than their concept's: they move to a concept like it, after all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..common.wording import count, names
from ..config import DatasetConfig
from .scan import OWN_FILE, Manifest


def give_roles(manifest: Manifest, dataset: DatasetConfig) -> tuple[Manifest, DatasetConfig]:
    """Give the pictures whose folder's own file sets it another role; ValueError for those of pairs."""
    roles = {
        (picture.concept, picture.name): picture.own.role
        for picture in manifest.pictures
        if picture.own.role not in ("", dataset.concepts[picture.concept].role)
    }
    if not roles:
        return manifest, dataset
    of_role = {role: [name for (_, name), each in roles.items() if each == role] for role in sorted({*roles.values()})}
    notes = [
        f"{OWN_FILE} gives {count(each, 'picture')} the role {role}: {names(each)}." for role, each in of_role.items()
    ]
    dataset.check_own_roles(notes[0])
    return with_roles(replace(manifest, notes=(*manifest.notes, *notes)), dataset, roles)


def with_roles(
    manifest: Manifest, dataset: DatasetConfig, roles: Mapping[tuple[int, str], str], *, why: str = ""
) -> tuple[Manifest, DatasetConfig]:
    """Move pictures, named by concept and name, to concepts like theirs of another role; order stays. why: told."""
    concepts, own = [*dataset.concepts], dict[tuple[int, str], int]()
    for (concept, _), role in roles.items():
        if (concept, role) not in own:
            own[concept, role] = len(concepts)
            # The visits that `samples` asks for are those of the concept that stays.
            concepts.append(dataset.concepts[concept].replace(role=role, samples=0))
    moved = {picture: own[picture[0], role] for picture, role in roles.items()}
    return replace(
        manifest,
        pictures=tuple(
            replace(picture, concept=moved.get((picture.concept, picture.name), picture.concept))
            for picture in manifest.pictures
        ),
        outcomes=tuple(
            replace(file, concept=moved[file.concept, file.name], why=why or file.why)
            if (file.concept, file.name) in moved
            else file
            for file in manifest.outcomes
        ),
    ), dataset.replace(concepts=tuple(concepts))
