"""Publish files at the Hugging Face Hub, by its own library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

TAG = "lora-atelier"  # of every card of ours
_REPOSITORY = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{1,39}")
LONGEST = 96  # characters of a repository's name, as the hub takes them


def check_names(repository: str, licence: str) -> None:
    """Raise ValueError for what cannot be the name of a repository or of a licence there."""
    if not _REPOSITORY.fullmatch(repository) or len(repository) > LONGEST or ".." in repository or "--" in repository:
        raise ValueError(f"{repository[:LONGEST]!r} is no name of a repository; write it as you/name.")
    if not _LICENCE.fullmatch(licence):
        raise ValueError(f"{licence[:40]!r} is no licence of the hub; write its short name, as cc-by-4.0 or other.")


def upload(files: Mapping[str, Path | bytes], repository: str, *, public: bool, token: str, message: str) -> str:
    """Publish files in a repository of models, as one change; return its address.

    token: "" for the one that the library itself keeps. Raises ValueError where the library is missing, or where the
    repository exists and is somebody's work, or open to all against a person's wish; else what the library raises.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils import RepositoryNotFoundError
    except ImportError as error:
        raise ValueError("The package huggingface_hub is not installed; install it with ComfyUI's Python.") from error
    hub = HfApi(token=token or None)
    if "/" not in repository:
        repository = f"{hub.whoami()['name']}/{repository}"
    try:
        known = hub.model_info(repository)
    except RepositoryNotFoundError:
        known = None
    if known is not None:
        if not public and not known.private:
            raise ValueError(f"{repository} exists and is public; choose another name, or publish it for all.")
        if public and known.private:
            raise ValueError(f"{repository} exists and is private; choose another name, or change that at the hub.")
        names = {each.rfilename for each in known.siblings or ()}
        if "README.md" in names and TAG not in (known.tags or ()):
            raise ValueError(f"{repository} holds something that LoRA Atelier did not publish; choose another name.")
    made = hub.create_repo(repository, private=not public, exist_ok=True)
    added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=_given(each)) for name, each in files.items()]
    hub.create_commit(repository, added, commit_message=message)
    return str(made)


def _given(file: Path | bytes) -> str | bytes:
    return file if isinstance(file, bytes) else str(file)
