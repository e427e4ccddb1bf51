"""The control pictures that edit models see: whether a model takes them, those of samples, captions read with them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.access import Access
from ..common.callbacks import Callbacks
from ..common.wording import count, names
from ..config import DatasetConfig, RunConfig, SamplePicture, node, setting
from ..data.controls import Control, Reference, References, control_folders, whole_crop
from ..data.crops import Crop, fit
from ..data.images import decoder_error
from ..data.plan import Plan
from ..data.scan import Index, file_at, resolve_folder
from ..data.scan.pictures import facts_of, reading
from ..models import BaseModel
from ..objective import Term, prompts, texts_beside
from ..workflow.settings import plain_path, slashed
from .encoded import Seen


def check_references(config: RunConfig, base: BaseModel) -> None:
    """Raise ValueError for control pictures that the model does not take."""
    controls = base.controls
    _check_ends(config, base)
    most = controls.most if controls else 0
    given = [
        (setting("controls.folders"), len(each.shown.folders), most) for each in config.dataset.concepts if each.shown
    ]
    for number, line in enumerate(config.sample.lines(), 1):
        of_clip = controls is not None and controls.ends and (line.frames or config.sample.frames) > 1
        named = f"--ci of prompt {number} in {setting('sample.prompts')}"
        given.append((named, len(line.controls or ()), most + of_clip))
    if controls and controls.least:
        _check_given(config, base)
    for named, number, most in given:
        if number and not most:
            raise ValueError(
                f"{base.title} takes no control pictures; remove {named}, or train on an edit model, such as FLUX.1 "
                f"Kontext or FLUX.2, by {node('connected')}."
            )
        if number > most:
            taken = count(most, "control picture")
            if not base.text.seen_as:
                raise ValueError(f"{base.title} takes {taken}; set {named} to as many.")
            raise ValueError(
                f"{base.title} takes {taken} with edit_text single; set {named} to as many, or "
                f"{setting('connected.edit_text')} to plus."
            )


def _check_ends(config: RunConfig, base: BaseModel) -> None:
    """Raise ValueError for frames of clips that the model does not see beside its latents."""
    ends, keeps = (base.controls.ends, base.controls.keeps) if base.controls else (False, False)
    for concept in config.dataset.concepts:
        if concept.clips and concept.clips.last_frame and not ends:
            raise ValueError(
                f"{base.title} sees no last frame of a clip; set {setting('clips.last_frame')} to 0, or train an "
                "image-to-video model of Wan."
            )
        if concept.shown and keeps:
            raise ValueError(
                f"{base.title} takes no control pictures beside pictures; remove {setting('controls.folders')}, and "
                f"set {setting('clips.first_frame')}, by which it keeps the first frames of clips."
            )


def _check_given(config: RunConfig, base: BaseModel) -> None:
    """Raise ValueError for concepts and prompts without the control picture that each picture is made from."""
    start = f"{base.title} makes each picture from a control picture"
    for concept in config.dataset.concepts:
        if concept.controls is None and base.controls and base.controls.begins:
            continue  # clips begin with theirs, and the scan knows which files are clips
        if concept.controls is None:
            raise ValueError(
                f"{start}, and {concept.folder} has none; set {setting('controls.folders')} to the folder of them."
            )
        if concept.shown is None:
            raise ValueError(
                f"{start}, and those of {concept.folder} are for a slider; set {setting('controls.use')} to edit."
            )
    for number, line in enumerate(config.sample.lines(), 1):
        if not line.controls:
            raise ValueError(
                f"{start}, and prompt {number} has none; set --ci in it, of {setting('sample.prompts')}, to a picture."
            )


def check_first_frames(plan: Plan, base: BaseModel) -> None:
    """Raise ValueError for pictures without the control picture that each picture is made from; clips have theirs."""
    if not base.controls or not base.controls.least:
        return
    every = enumerate(plan.manifest.pictures)
    without = [each.name for i, each in every if not plan.references(i, plan.first_crops(i)[0])]
    if without and base.controls.keeps:
        are = count(without, "file here is a single picture", "files here are single pictures")
        raise ValueError(
            f"{base.title} draws each clip from its first frame, and {are}: {names(without)}; set "
            f"{setting('concepts.leave_out')} to leave them out."
        )
    if without:
        have = count(without, "picture here has", "pictures here have")
        raise ValueError(
            f"{base.title} makes each picture from a control picture, and {have} none: {names(without)}; set "
            f"{setting('controls.folders')} to the folder of them. A clip has its own first frame."
        )


def sample_references(
    config: RunConfig, base: BaseModel, index: Index, access: Access
) -> dict[SamplePicture, References]:
    """Read the control pictures that prompts of samples name: in full, or by their names in the folders of concepts.

    Each is seen whole, in about the area of the sample; the first and the last frame of a clip are cut to its size.
    Raises ValueError for a file that cannot be read.
    """
    found: dict[SamplePicture, References] = {}
    folders = _folders(config.dataset)
    for picture in config.sample.pictures(base.sampling):
        files: list[tuple[Control, Crop]] = []
        for number, name in enumerate(picture.controls):
            control = _control(_find(name, [*folders[number:], *folders[:number]], access), index)
            whole = whole_crop(control.size, picture.size, base.latents.step)
            files.append((control, fit(control.size, picture.size) if picture.frames > 1 else whole))
        if files and picture.frames > 1:
            (control, crop), last = files[0], files[1] if len(files) > 1 else None
            one = Reference(control=control, background="white", crop=crop, length=picture.frames, last=last)
            found[picture] = (one,)
        elif files:
            found[picture] = tuple(Reference(control=each, background="white", crop=crop) for each, crop in files)
    return found


def _folders(dataset: DatasetConfig) -> list[Path]:
    """List the folders of control pictures of the first concept that has some."""
    concept = next((concept for concept in dataset.concepts if concept.shown), None)
    return control_folders(resolve_folder(concept.folder), concept.shown) if concept and concept.shown else []


def _switch() -> str:
    return f"--ci in {setting('sample.prompts')}"


def _find(name: str, folders: Sequence[Path], access: Access) -> Path:
    """Find a control picture by its full path, or by its name in the first of some folders that has it."""
    named = Path(os.path.expanduser(slashed(plain_path(name, _switch()))))
    places = [named] if named.is_absolute() else [folder / named for folder in folders]
    if not places:
        raise ValueError(f"{_switch()} is {name!r:.200}, and no concept has control pictures; write the full path.")
    for place in places:
        if not access.allows(place):
            raise ValueError(
                f"{place} lies outside the folders that may be read; set {_switch()} to a picture inside them."
            )
        if os.path.isfile(place):
            return place
    looked = " and ".join(map(str, places))
    raise ValueError(f"There is no file {looked}; set {_switch()} to a picture that exists.")


def _control(path: Path, index: Index) -> Control:
    """Decode a control picture to check it; raises ValueError for one that cannot be read."""
    file = file_at(path)
    ((digest, fact),) = index.examine([file], reading("picture"), facts_of, decoder_error, Callbacks())
    if "problem" in fact:
        raise ValueError(f"{path} cannot be read ({fact['problem']}); set {_switch()} to another picture.")
    return Control(path=path, name=path.name, digest=digest, width=fact["width"], height=fact["height"])


def seen_captions(
    plan: Plan, base: BaseModel, terms: Sequence[Term], drawn: Mapping[SamplePicture, References]
) -> set[Seen]:
    """List the captions that the text encoders read with control pictures, for each way in which these are cut."""
    if not base.text.seen_as:
        return set()
    with_controls = [i for i, picture in enumerate(plan.manifest.pictures) if picture.controls]
    visits = plan.visits()
    samples = [plan.sample(i, visit) for i in with_controls for visit in visits.get(i, ())]
    samples += [sample for sample in plan.validation if sample.picture in set(with_controls)]
    found: set[Seen] = set()
    for sample in samples:
        references = plan.shown(sample)
        texts = {sample.caption, *texts_beside(terms, sample.caption), *prompts(terms)}
        found |= {(text, references) for text in texts}
    for picture, references in drawn.items():
        found |= {(picture.prompt, references), (picture.negative, references)}
    return found
