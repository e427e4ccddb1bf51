"""How several programs name the layers of one model in LoRA files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ..models.base import NameForm, Slice
from .match import flat_name

Program = Literal["kohya", "comfyui", "diffusers", "ai-toolkit", "onetrainer"]
PROGRAMS: tuple[Program, ...] = get_args(Program)


class Named(NamedTuple):
    """A name for a weight of a model, or for some of its outputs."""

    name: str
    slice: Slice | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight of a model that a LoRA can change, and its names in files."""

    key: str  # in ComfyUI's state dict, without ".weight": diffusion_model.… or text_encoders.…
    rows: int  # outputs
    diffusers: tuple[Named, ...] = ()  # its path, or those of its slices, in diffusers' model; () where none is known
    text: int = 0  # number of its text encoder, from 1; 0: the denoiser's
    aliases: Mapping[str, Slice | None]  # names in files, with underscores for dots


OWN = NameForm("diffusion_model.")  # as ComfyUI's own nodes
DIFFUSERS = "transformer."  # start of transformers' names in files of diffusers
CONDITIONER = "text_conditioner."  # instead, of a model of diffusers that reads the text for a transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of all layers of a model in the files of several programs."""

    weights: Mapping[str, Weight]  # by key
    forms: Mapping[str, NameForm]  # by program
    without_alpha: frozenset[Program]  # whose files hold `lora_A` and `lora_B` without an alpha, and so plain LoRA only
    texts: int = 0  # text encoders
    unnamed: str = ""  # why diffusers' names of some layers are not known

    def weights_by_name(self) -> dict[str, tuple[Weight, Slice | None]]:
        """Map all names, with underscores for dots, to weights and slices."""
        return {name: (weight, piece) for weight in self.weights.values() for name, piece in weight.aliases.items()}

    def written(self, weight: Weight, program: Program) -> tuple[Named, ...]:
        """Give the names that a program writes for a weight: of the whole, or of its slices; () where none is known."""
        if not weight.text:
            form, own = self.forms[program], weight.key.partition(".")[2]
            unknown = not weight.diffusers and form.start == OWN.start  # then the program writes ComfyUI's own
            return _named(form, weight.diffusers if form.diffusers and not unknown else (Named(own),))
        if program == "comfyui" or not weight.diffusers:
            return (Named(weight.key),)
        if program == "diffusers":
            return _named(NameForm(f"text_encoder{f'_{weight.text}' if weight.text > 1 else ''}."), weight.diffusers)
        number = str(weight.text) if self.texts > 1 or program == "onetrainer" else ""
        named = _named(NameForm(f"lora_te{number}_", flat=True), weight.diffusers)
        return named if all(each.name in weight.aliases for each in named) else (Named(weight.key),)


def _named(form: NameForm, names: Sequence[Named]) -> tuple[Named, ...]:
    return tuple(Named(_started(form.start, flat_name(name) if form.flat else name), piece) for name, piece in names)


def _started(start: str, name: str) -> str:
    return name if start == DIFFUSERS and name.startswith(CONDITIONER) else start + name


def of_diffusers(starts: Sequence[str], names: Sequence[Named]) -> dict[str, Slice | None]:
    """Map names of diffusers' paths behind some starts, with underscores for dots, to slices."""
    return {flat_name(_started(start, each.name)): each.slice for start in starts for each in names}
