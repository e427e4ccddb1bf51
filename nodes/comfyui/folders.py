"""Find ComfyUI's folders and files: the one place that says what a workflow may have read and written."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import comfy.diffusers_load
import comfy.lora
import comfy.model_detection
import comfy.model_management
import comfy.model_sampling
import comfy.samplers
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import folder_paths
from server import PromptServer

from ...trainer_core.common.access import Access, access_to, real_path
from ...trainer_core.common.callbacks import Callbacks
from ...trainer_core.common.values import is_number
from ...trainer_core.common.wording import say
from ...trainer_core.config import ConceptConfig, DatasetConfig
from ...trainer_core.config.saves import LONGEST, plain_name
from ...trainer_core.models.files.safetensors_file import is_readable
from ...trainer_core.workflow.settings import plain_path, slashed
from .allowed import allowed_folders

ASSETS = Path(__file__).resolve().parents[2] / "assets"
OURS = "Atelier"  # before the names of our classes of nodes
EXAMPLE = "atelier:concept_example"  # what a shared workflow writes for the pictures that come with the pack
DIFFUSERS = "diffusers/"  # in front of diffusers folders in the list of checkpoints
UPLOADS, UPLOADED = "loras", "uploaded: "  # folder of input/, and what stands before a name from there
KEPT_LIMIT = "Atelier.KeptLimit"  # the setting's id in js/atelier.js
USUAL_LIMIT = 20.0  # GB; the setting's default there
MOST_GIGABYTES = 1e9
MOST_LISTED, MOST_LOOKED = 500, 20_000  # folders in the list of datasets; entries of each that are looked at
NEW_FOLDER, MOST_ALIKE = "pictures", 1000  # for pictures that a page sends: usual name; folders of one name
DIFFUSION = "diffusion_models/"  # before names of models/diffusion_models in a list with checkpoints


def register_assets() -> None:
    """Add the pack's tiny models to the list of checkpoints."""
    folder_paths.add_model_folder_path("checkpoints", str(ASSETS))


def checkpoint_names() -> list[str]:
    """List checkpoint files, then diffusers folders, then the toys of this pack: a new node stands on the first."""
    folders = []
    for root in folder_paths.get_folder_paths("diffusers"):
        if os.path.isdir(root):
            found = [e.name for e in os.scandir(root) if os.path.isfile(os.path.join(e.path, "model_index.json"))]
            folders += [DIFFUSERS + name for name in sorted(found)]
    files = folder_paths.get_filename_list("checkpoints")
    toys = set(files) & {path.name for path in ASSETS.glob("*.safetensors")}
    base_first = sorted(toys, key=lambda name: (len(name), name))
    return [name for name in files if name not in toys] + folders + base_first


def accept_other_slashes() -> None:
    """Let prompts name model files as another system lists them; only while ComfyUI starts."""
    PromptServer.instance.add_on_prompt_handler(_with_our_slashes)


def _with_our_slashes(asked: dict[str, Any]) -> dict[str, Any]:
    """Name files as this machine lists them: Windows saves SDXL\\base.safetensors, others SDXL/base.safetensors."""
    prompt = asked.get("prompt")
    for node in prompt.values() if isinstance(prompt, dict) else ():
        if isinstance(node, dict) and str(node.get("class_type")).startswith(OURS):
            _rename_files(node.get("inputs"))
    return asked


def _rename_files(inputs: Any) -> None:
    for name, value in inputs.items() if isinstance(inputs, dict) else ():
        names = LISTS.get(name.rpartition(".")[2])
        if names is not None and isinstance(value, str):
            inputs[name] = as_listed(value, names())


def as_listed(name: str, names: Sequence[str]) -> str:
    """Find a name in a list, whichever slashes either has; give it back as it is where the list lacks it."""
    alike = (each for each in names if each.replace("\\", "/") == name.replace("\\", "/"))
    return name if name in names else next(alike, name)


def is_toy(file: Path) -> bool:
    """Tell whether a model file is one of the tiny models that come with the pack, or a copy of one."""
    own = ASSETS / file.name
    return own.is_file() and own.stat().st_size == file.stat().st_size


def checkpoint_path(name: str) -> Path:
    """Find the file or folder of a name in the list of checkpoints."""
    kinds = ["checkpoints"]
    if name.startswith(DIFFUSERS):
        kinds.append("diffusers")
    for kind in kinds if name in checkpoint_names() else []:  # a linked name may be any text
        for root in folder_paths.get_folder_paths(kind):
            path = Path(root) / (name if kind == "checkpoints" else name.removeprefix(DIFFUSERS))
            if path.exists():
                return path
    raise ValueError(
        f"There is no checkpoint {name!r}; set checkpoint of Load Base Model to one of the list (press R "
        "to refresh it)."
    )


def file_names(kind: str) -> list[str]:
    """List the safetensors files of a kind that ComfyUI knows: "vae", "loras" or "text_encoders"."""
    return [name for name in folder_paths.get_filename_list(kind) if is_readable(name)]


def file_path(kind: str, name: str, setting: str) -> Path:
    """Find a file by its name in the list of a kind; setting: input and node that name it, for the message."""
    found = folder_paths.get_full_path(kind, name) if name in file_names(kind) else None
    if found is None:
        raise ValueError(f"There is no file {name!r}; set {setting} to one of the list (press R to refresh it).")
    return Path(found)


def model_names() -> list[str]:
    """List the safetensors files of models/checkpoints, then those of models/diffusion_models."""
    return [*file_names("checkpoints"), *(DIFFUSION + name for name in file_names("diffusion_models"))]


def model_path(name: str, setting: str) -> Path:
    """Find a file by its name in `model_names`; setting: input and node that name it, for the message."""
    if name.startswith(DIFFUSION) and name not in file_names("checkpoints"):
        return file_path("diffusion_models", name.removeprefix(DIFFUSION), setting)
    return file_path("checkpoints", name, setting)


def lora_names() -> list[str]:
    """List the LoRA files of models/loras, then those that were uploaded to input/loras."""
    uploads = Path(folder_paths.get_input_directory()) / UPLOADS
    found = sorted(path.name for path in uploads.iterdir() if is_readable(path.name)) if uploads.is_dir() else []
    return [*file_names("loras"), *(UPLOADED + name for name in found)]


def lora_path(name: str, setting: str) -> Path:
    """Find a LoRA file by its name in `lora_names`; setting: input and node that name it, for the message."""
    if not name.startswith(UPLOADED):
        return file_path("loras", name, setting)
    path = Path(folder_paths.get_input_directory()) / UPLOADS / name.removeprefix(UPLOADED)
    if name not in lora_names() or not access().allows(path):
        raise ValueError(f"There is no file {name!r}; set {setting} to one of the list (press R to refresh it).")
    return path


LISTS = {  # inputs of our nodes that name a file of a list -> what lists the files
    "checkpoint": checkpoint_names,
    "vae": functools.partial(file_names, "vae"),
    **dict.fromkeys(("text_encoder", "text_encoder_2"), functools.partial(file_names, "text_encoders")),
    "lora_name": lora_names,
    **dict.fromkeys(("tuned", "base"), model_names),
}


def state_of(path: Path) -> str:
    """Write sizes and times of change of a model file, or of all that a diffusers folder holds, as one text."""
    files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
    return " ".join(f"{status.st_size}:{status.st_mtime_ns}" for status in (file.stat() for file in files))


def tokenizer_path() -> Path:
    """The folder of ComfyUI's own CLIP tokenizer."""
    return Path(comfy.sd1_clip.__file__).parent / "sd1_tokenizer"


def access() -> Access:
    """The places that pictures, captions and masks may be read from: ComfyUI's folders, and those a person allowed."""
    own = [folder_paths.get_input_directory(), folder_paths.get_output_directory(), folder_paths.get_temp_directory()]
    kinds = [kind for kind in folder_paths.folder_names_and_paths if kind != "custom_nodes"]
    known = [root for kind in kinds for root in folder_paths.get_folder_paths(kind)]  # of extra_model_paths.yaml, too
    made = (pictures_folder(), drawn_folder())
    return access_to([*own, folder_paths.models_dir, *known, *_dataset_roots(), ASSETS, *made, *allowed_folders()])


def writable() -> Access:
    """The places where texts and masks may be written beside pictures: ComfyUI's own folders of pictures."""
    return access_to([folder_paths.get_output_directory(), *_dataset_roots()])


def journal_folder() -> Path:
    """The folder that keeps the earlier texts of captions; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "captions"


def is_there(path: Path) -> bool:
    """Tell whether a file is there; for places that may be read."""
    return path.is_file()


def find_folder(folder: str, node: str) -> Path:
    """Find a folder: a full path, one inside input/ or datasets/, or the example.

    node: the display name of the node whose input `folder` names it. Raises ValueError for a folder that does not
    exist, with the places where it was looked for, and for one that nobody allowed; what lies there is not touched.
    """
    places, allowed = places_of(folder, node), access()
    for place in places:
        if not allowed.allows(place):
            raise ValueError(
                f"The folder {place} is outside ComfyUI's folders, and nobody allowed it yet. Press Run in the page on "
                "this machine to allow it, or add it to datasets in extra_model_paths.yaml."
            )
        if os.path.isdir(place):
            return real_path(place)
    if os.path.isfile(places[0]):
        raise ValueError(f"{places[0]} is a file; set folder of {node} to the folder that holds your pictures.")
    looked = " and ".join(map(str, places))
    raise ValueError(
        f"There is no folder {folder.strip()!r}; check its spelling, or set folder of {node} to the full path. It was "
        f"looked for in {looked}."
    )


def changeable_folder(folder: str) -> Path:
    """Find the folder of Concept Dataset in which a page changes files; ValueError for one that is only read."""
    place = find_folder(folder, "Concept Dataset")
    if not writable().allows(place):
        raise ValueError(only_read(place))
    return place


def only_read(place: Path | str) -> str:
    """Say that nothing is written into a folder."""
    return say(
        "Files in {0} are only read. Copy the folder into input, and set folder of Concept Dataset to the copy.",
        str(place),
    )


def earlier_folder() -> Path:
    """The folder of what the page's changes have replaced; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "earlier"


def unknown_place(folder: str) -> Path | None:
    """Find the place of a folder's name that nobody allowed yet; None for an allowed one, and for what can be none."""
    try:
        places = places_of(folder, "Concept Dataset")
    except ValueError:  # refused for another reason when it is used
        return None
    known = access()
    return next((place for place in places if not known.allows(place)), None)


def places_of(folder: str, node: str) -> list[Path]:
    """List the places that a folder's name may mean; nothing is touched. Raises ValueError for what can be none."""
    text = slashed(plain_path(folder, f"folder of {node}"))
    if not text:
        raise ValueError(f"folder of {node} is empty; set it to the folder of your pictures, or to {EXAMPLE}.")
    if text == EXAMPLE:
        return [ASSETS / "concept_example"]
    path = Path(os.path.expanduser(text))
    if path.is_absolute():
        return [path]
    if ".." in path.parts:
        raise ValueError(f"The folder {text!r} contains '..'; set folder of {node} to the full path.")
    return [root / path for root in _dataset_roots()]


def dataset_folders() -> list[str]:
    """List the folders of pictures in input/ and datasets/, and in their folders, as Concept Dataset may name them."""
    from ...trainer_core.data.films import trainable_extensions  # here, so that ComfyUI starts fast

    endings, known, found = tuple(trainable_extensions()), access(), dict[str, None]()
    rooms = [(root, root) for root in _dataset_roots()]
    for root, folder in rooms:  # also those that are added meanwhile
        if len(found) >= MOST_LISTED or not known.allows(folder) or not os.path.isdir(folder):
            continue
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in itertools.islice(entries, MOST_LOOKED):
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(endings) and folder != root:
                    found[folder.relative_to(root).as_posix()] = None
                elif root in (folder, folder.parent) and entry.is_dir():
                    rooms.append((root, folder / entry.name))
    return sorted(found)


def new_folder(name: str) -> str:
    """Make a folder of input/ and return its name: the wanted one as far as it can be one, or that with a number.

    Raises OSError, and ValueError where too many have the name already.
    """
    try:
        plain = plain_name(re.sub(r"[^\w .()-]+", "_", name[:LONGEST]).strip(" ."))
    except ValueError:  # nothing is left of it, or it is a device of Windows
        plain = NEW_FOLDER
    root = Path(folder_paths.get_input_directory())
    for number in range(1, MOST_ALIKE + 1):
        found = plain if number == 1 else f"{plain} {number}"
        with suppress(FileExistsError):
            (root / found).mkdir(parents=True)
            return found
    raise ValueError(f"input has {MOST_ALIKE} folders named {plain} already; give the pictures' folder another name.")


def refuse_many(folder: Path | str, most: int) -> None:
    """Raise ValueError for an allowed folder with more than `most` files in it and in those inside it."""
    if holds_more(folder, most):
        raise ValueError(say("The folder holds more than {0} files; divide it into several.", most))


def holds_more(folder: Path | str, most: int) -> bool:
    """Tell whether an allowed folder and those inside it hold more than `most` files; looks at no more than that."""
    names = (name for _, _, files in os.walk(folder) for name in files)
    return next(itertools.islice(names, most, None), None) is not None


def _dataset_roots() -> list[Path]:
    """List where relative dataset folders start: ComfyUI's input folder, then its datasets folders."""
    roots = [folder_paths.get_input_directory()]
    if "datasets" in folder_paths.folder_names_and_paths:
        roots += folder_paths.get_folder_paths("datasets")
    else:  # before 0.30
        roots.append(os.path.join(folder_paths.base_path, "datasets"))
    return [Path(root) for root in roots]


def lora_file(name: str, folder: str, remedy: str) -> Path:
    """Choose the file of a new LoRA below ComfyUI's first LoRA folder, and make its folder.

    remedy: what to do, as the end of a sentence, where the folder leads out of there. Raises ValueError for such a
    folder, and for one that cannot be used.
    """
    root = Path(folder_paths.get_folder_paths("loras")[0]).resolve()
    place = root / folder
    if not place.resolve().is_relative_to(root):
        raise ValueError(f"{place} leads to {place.resolve()}, outside the LoRA folder; {remedy}.")
    return _writable(place, "the LoRA is saved there") / f"{name}.safetensors"


def embeddings_folder() -> Path:
    """Make the folder of trained words in ComfyUI's first folder of embeddings."""
    return _writable(Path(folder_paths.get_folder_paths("embeddings")[0]) / "atelier", "embeddings are saved there")


def _writable(folder: Path, use: str) -> Path:
    """Make a folder and check that it can be written; raises ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be created ({error.strerror}); remove the file that is in its way, {use}."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{folder} cannot be written to; change its permissions, {use}.")
    return folder


def cache_folder() -> Path:
    """The folder of encoded pictures and captions; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "cache"


def index_file() -> Path:
    """The file that remembers what scans have read."""
    from ...trainer_core.data.scan import PLACE  # here, so that ComfyUI starts fast

    return cache_folder() / PLACE


def index_version() -> str:
    """Identify the state of that file, which scans of new files and finished runs change; "" without it."""
    try:
        status = index_file().stat()
    except OSError:
        return ""
    return f"{status.st_mtime_ns}/{status.st_size}"


def kept_limit() -> int:
    """The most bytes that the pack keeps, 0 for any: the setting of ComfyUI, of several users the largest.

    ValueError for a setting that is no number of gigabytes.
    """
    limits = [_gigabytes(_settings(user).get(KEPT_LIMIT)) for user in PromptServer.instance.user_manager.users]
    most = max((limit or math.inf for limit in limits), default=USUAL_LIMIT)
    return 0 if most == math.inf else int(most * 1e9)


def _settings(user: str) -> dict[str, Any]:
    """The settings of a user as the editor saved them; {} without any, or where the file is damaged."""
    folder = folder_paths.get_public_user_directory(user)
    try:
        with open(os.path.join(folder or "", "comfy.settings.json"), encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError, RecursionError):  # ComfyUI itself then begins anew
        return {}
    return settings if isinstance(settings, dict) else {}


def _gigabytes(value: Any) -> float:
    """The number that the setting of the cache's limit holds; the usual one where it holds none."""
    if value is None:
        return USUAL_LIMIT
    if not is_number(value) or not 0 <= value <= MOST_GIGABYTES:
        raise ValueError(
            f"The limit is {value!r}; set LoRA Atelier > Kept files > Limit in ComfyUI's settings to a number of "
            "gigabytes, 0 for no limit."
        )
    return value


def fingerprint(folder: Path, **concept: Any) -> str:
    """Hash names and contents of the pictures, masks and captions in a folder, whatever their ending."""
    from ...trainer_core.data.scan import Index, fingerprint  # here, so that ComfyUI starts fast

    with Index(index_file()) as index:
        dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(folder), **concept),))
        return fingerprint(dataset, index, access(), any_ending=True)


def logs_folder() -> Path:
    """The folder in which each run's log gets a folder of its own."""
    return Path(folder_paths.get_output_directory()) / "atelier" / "logs"


def comparisons_folder() -> Path:
    """The folder of pictures that Compare LoRAs has drawn."""
    return Path(folder_paths.get_output_directory()) / "atelier" / "compare"


def check_pictures(dataset: DatasetConfig, callbacks: Callbacks) -> None:
    """Raise ValueError with every picture, caption and mask that cannot be used."""
    from ...trainer_core.data.scan import Index, scan  # here, so that ComfyUI starts fast

    with Index(index_file()) as index:
        scan(dataset, index, callbacks, access())


def runs_folder() -> Path:
    """The folder in which each run gets a folder of its own."""
    return Path(folder_paths.get_output_directory()) / "atelier" / "runs"


def run_names() -> list[str]:
    """List the folders of runs, the newest first."""
    folder = runs_folder()
    if not folder.is_dir():
        return []
    found = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    return [entry.name for entry in sorted(found, key=lambda entry: entry.stat().st_mtime, reverse=True)]


def run_of_key(key: str) -> str:
    """Find the folder's name of the newest run with a key, "" for none; damaged runs are passed over."""
    from ...trainer_core.runs.folder import open_run  # here, so that ComfyUI starts fast

    for name in run_names() if key else []:
        try:
            if open_run(runs_folder() / name).keys.run == key:
                return name
        except (ValueError, OSError):  # the tab of runs names it
            continue
    return ""


def saves_of(name: str, setting: str) -> list[tuple[int, Path]]:
    """List the LoRA files of a run's saves with their steps, oldest first.

    name: of the run's folder. setting: input and node that name it, for the message.

    Raises ValueError for a name that is none of `run_names`, and for a damaged run or save.
    """
    from ...trainer_core.runs.export import lora_of_each_save  # here, so that ComfyUI starts fast

    return lora_of_each_save(_run_of_name(name, setting))


def seeds_of(name: str, setting: str) -> list[tuple[int, Path]]:
    """List the LoRA files of a run and of those that differ by their seed alone, with the seeds; as `saves_of`."""
    from ...trainer_core.runs.export import loras_of_seeds  # here, so that ComfyUI starts fast
    from ...trainer_core.runs.folder import find_runs

    return loras_of_seeds(_run_of_name(name, setting), find_runs(runs_folder()))


def _run_of_name(name: str, setting: str) -> Any:
    from ...trainer_core.runs.folder import open_run  # here, so that ComfyUI starts fast

    if name not in run_names():
        raise ValueError(f"There is no run {name[:80]!r}; set {setting} to one of the list.")
    return open_run(runs_folder() / name)


def temp_folder() -> Path:
    """Make ComfyUI's folder of temporary files."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def shelves() -> list[Path]:
    """List the folders of LoRAs and of embeddings, below which their files have their names."""
    return [Path(folder) for kind in ("loras", "embeddings") for folder in folder_paths.get_folder_paths(kind)]


def pictures_folder() -> Path:
    """The folder of pictures that the graph made; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "pictures"


def drawn_folder() -> Path:
    """The folder of the sets that Drawn Pictures has drawn; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "drawn"


def written_folder() -> Path:
    """The folder that remembers which texts and masks a model of the graph wrote; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "written"


def loras_folder() -> Path:
    """The folder of LoRAs that the graph made; ComfyUI serves nothing from there."""
    return Path(folder_paths.get_system_user_directory("atelier")) / "loras"
