"""How several programs name the layers of one model in LoRA files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from ..config import BaseModelConfig
from ..models.base import Form, Slice
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


OWN = Form("diffusion_model.")  # as ComfyUI's own nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names of all layers of a model in the files of several programs."""

    weights: Mapping[str, Weight]  # by key
    forms: Mapping[str, Form]  # by program
    without_alpha: frozenset[Program]  # whose files hold `lora_A` and `lora_B` without an alpha, and so plain LoRA only
    texts: int = 0  # text encoders

    def places(self) -> dict[str, tuple[Weight, Slice | None]]:
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
            return _named(Form(f"text_encoder{f'_{weight.text}' if weight.text > 1 else ''}."), weight.diffusers)
        number = str(weight.text) if self.texts > 1 or program == "onetrainer" else ""
        named = _named(Form(f"lora_te{number}_", flat=True), weight.diffusers)
        return named if all(each.name in weight.aliases for each in named) else (Named(weight.key),)


def _named(form: Form, names: Sequence[Named]) -> tuple[Named, ...]:
    return tuple(Named(form.start + (flat_name(name) if form.flat else name), piece) for name, piece in names)


def names_of_file(path: Path) -> Names:
    """Collect the names of a checkpoint of Stable Diffusion; raises ValueError for another file."""
    from ..models.sd.names import file_forms  # here, as diffusers takes seconds to import
    from ..models.sd.outline import outline_base_model

    base = outline_base_model(BaseModelConfig(path=str(path)))
    texts = [part.prefix for part in base.parts[1:]]
    weights = {
        layer.comfy: Weight(
            key=layer.comfy,
            rows=layer.module.weight.shape[0],
            diffusers=(Named(layer.path),),
            text=texts.index(layer.part) + 1 if layer.part in texts else 0,
            aliases={**dict.fromkeys((flat_name(layer.name), *layer.aliases)), **layer.slices},
        )
        for layer in base.layers()
    }
    forms = file_forms(original=base.family.ldm_names)
    return Names(weights=weights, forms=forms, without_alpha=frozenset({"diffusers"}), texts=len(texts))
