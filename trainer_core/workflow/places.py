"""Find the files and folders that a workflow names, in ComfyUI's folders and without it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from ..common.access import real_path
from .settings import plain_path, slashed

ASSETS = Path(__file__).resolve().parents[2] / "assets"
EXAMPLE = "atelier:concept_example"  # the pictures that come with the pack
DIFFUSERS = "diffusers/"  # in front of diffusers folders in the list of checkpoints
KINDS = {"text_encoders": ("text_encoders", "clip")}  # folders in models/; other kinds have one of their own name
TOKENIZER = Path("comfy") / "sd1_tokenizer"  # in ComfyUI's folder
CACHED = "openai/clip-vit-large-patch14"  # the same tokenizer, where transformers keeps what it has fetched


@dataclass(frozen=True, slots=True)
class Folders:
    """The places of this machine; implements `Places`.

    What is nowhere gets the path where it would belong: a later check names it, with the remedy.
    """

    comfyui: Path | None = None
    tokenizer: Path | None = None  # as a person names it

    def checkpoint_path(self, name: str) -> Path:
        """Find a checkpoint or a diffusers folder by its name in the list of checkpoints."""
        name = name.replace("\\", "/")  # as Windows saves it
        if name.startswith(DIFFUSERS):
            return self._found("diffusers", name.removeprefix(DIFFUSERS))
        if not (self._found("checkpoints", name)).exists() and (ASSETS / name).is_file():
            return ASSETS / name
        return self._found("checkpoints", name)

    def file_path(self, kind: str, name: str, setting: str) -> Path:
        """Find a file of a kind; of a LoRA that is missing raises ValueError, as its layers are needed at once."""
        path = self._found(kind, name)
        if kind == "loras" and not path.is_file():
            raise ValueError(f"{setting} is {name}, which is not at {path}; put it there")
        return path

    def find_folder(self, folder: str, node: str) -> Path:
        """Find a folder of pictures: a full path, one in input/ or datasets/, or the example."""
        text = slashed(plain_path(folder, f"folder of {node}"))
        if text == EXAMPLE:
            return real_path(ASSETS / "concept_example")
        path = Path(os.path.expanduser(text))
        base = self.comfyui or Path()
        roots = [base / "input", base / "datasets", *_extra_folders(self.comfyui, "datasets"), Path()]
        places = [path] if path.is_absolute() else [root / path for root in roots]
        found = next((place for place in places if place.is_dir()), places[0])
        return real_path(found)

    def tokenizer_path(self) -> Path | None:
        """Find CLIP's tokenizer: as named, ComfyUI's, or the one that transformers has fetched; None without any."""
        if self.tokenizer:
            return self.tokenizer.absolute()
        around = [self.comfyui, *(Path(path) for path in sys.path)]  # a ComfyUI that Python finds will do
        places = [place.absolute() / TOKENIZER for place in around if place]
        return next((place for place in (*places, *_cached()) if is_tokenizer(place)), None)

    def known(self, path: Path, kinds: tuple[str, ...]) -> Path | None:
        """Find a file of the same name in the folders of some kinds of models."""
        roots = [root for kind in kinds for root in self._roots(kind)]
        found = (each for root in roots if root.is_dir() for each in sorted(root.rglob(path.name)))
        return next(found, None)

    def _roots(self, kind: str) -> list[Path]:
        models = (self.comfyui or Path()).absolute() / "models"
        folders = KINDS.get(kind, (kind,))
        return [models / name for name in folders] + [
            root for name in folders for root in _extra_folders(self.comfyui, name)
        ]

    def _found(self, kind: str, name: str) -> Path:
        places = [root / name.replace("\\", "/") for root in self._roots(kind)]
        return next((place for place in places if place.exists()), places[0])


def listed(path: str, kinds: Iterable[str]) -> str:
    """Name a model file as ComfyUI lists it: below the folder of its kind, else by its name alone."""
    parts = PureWindowsPath(path).parts
    for kind in (*kinds, "diffusers"):
        if kind in parts[:-1]:
            last = len(parts) - 1 - parts[::-1].index(kind)
            return (DIFFUSERS if kind == "diffusers" else "") + "/".join(parts[last + 1 :])
    return parts[-1] if parts else ""


def _extra_folders(comfyui: Path | None, kind: str) -> list[Path]:
    """List the folders of a kind in ComfyUI's extra_model_paths.yaml; raises ValueError for one that is no YAML."""
    file = comfyui / "extra_model_paths.yaml" if comfyui else None
    if file is None or not file.is_file():
        return []
    import yaml  # imported here: few need it, and transformers brings it

    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read; repair it") from error
    found = []
    for section in sections.values() if isinstance(sections, dict) else ():
        if isinstance(section, dict) and isinstance(section.get(kind), str):
            base = file.parent / os.path.expandvars(os.path.expanduser(str(section.get("base_path") or "")))
            found += [base / line.strip() for line in section[kind].splitlines() if line.strip()]
    return found


def is_tokenizer(folder: Path) -> bool:
    """Tell whether a folder holds CLIP's tokenizer."""
    return (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()


def _cached() -> Iterator[Path]:
    from huggingface_hub import try_to_load_from_cache  # imported here: it takes a while, and few need it

    found = try_to_load_from_cache(CACHED, "vocab.json")
    if isinstance(found, str):
        yield Path(found).parent
