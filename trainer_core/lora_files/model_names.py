"""The names of a model file's layers in LoRA files of several programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..config import BaseModelConfig
from ..models.base import NameForm
from ..models.files.safetensors_file import FileHeader, read_header
from ..models.sd.names import KOHYA, PREFIXES
from ..models.weights_of_file import WEIGHT, denoiser_names, open_weights
from .diffusers_names import diffusers_paths, why_unnamed
from .match import flat_name
from .names import DIFFUSERS, OWN, Named, Names, Weight, of_diffusers

UNTOLD = "the model's file does not tell them, and the page may know them, which asks ComfyUI"


def names_of_file(path: Path) -> Names:
    """Collect the names of a model file: a checkpoint of Stable Diffusion, or a transformer under ComfyUI's names.

    Of a transformer the forms of kohya, ComfyUI and diffusers are known. Raises ValueError for a file without layers.
    """
    from ..models.sd.family import is_stable_diffusion  # here, as diffusers takes seconds to import

    header = read_header(path)
    return _stable_diffusion(path) if is_stable_diffusion(header.shapes) else _transformer(header)


@contextmanager
def open_reader(path: Path) -> Iterator[Callable[[str], Tensor]]:
    """Open a model file; what it gives reads the weight of a layer by any of its names in LoRA files, or a slice."""
    known = names_of_file(path).weights_by_name()
    with open_weights(path) as weights:
        readers = {known[name][0].key: read for key, read in weights.items() if (name := flat_name(key)) in known}

        def read(name: str) -> Tensor:
            weight, piece = known.get(flat_name(name), (None, None))
            if weight is None or weight.key not in readers:
                raise ValueError(f"{path.name} has no layer {name}; set --model to the model that the LoRA is for.")
            whole = readers[weight.key]()
            if piece is None:
                return whole
            rows = whole.narrow(0, piece.start, piece.length)
            return torch.cat(rows.chunk(2)[::-1]) if piece.swapped else rows

        yield read


def _stable_diffusion(path: Path) -> Names:
    from ..models.sd.names import file_forms
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
        for layer in base.layers.listed()
    }
    forms = file_forms(original=base.family.ldm_names)
    return Names(weights=weights, forms=forms, without_alpha=frozenset({"diffusers"}), texts=len(texts))


def _transformer(header: FileHeader) -> Names:
    tensors = denoiser_names(header)
    rows = {name: header.shapes[tensor][0] for name, tensor in tensors.items() if header.shapes[tensor]}
    theirs = diffusers_paths(rows)
    weights = {}
    for name, tensor in tensors.items():
        own = name.removesuffix(WEIGHT)
        if own != name and len(header.shapes[tensor]) > 1:
            found = tuple(theirs.get(own, ()))
            weights[OWN.start + own] = Weight(
                key=OWN.start + own,
                rows=rows[name],
                diffusers=found,
                aliases={
                    **of_diffusers((DIFFUSERS, OWN.start), found),
                    **dict.fromkeys(flat_name(prefix + own) for prefix in PREFIXES),
                },
            )
    if not weights:
        raise ValueError(f"{header.path.name} holds no layers of a model; choose another file.")
    forms = {"kohya": KOHYA, "comfyui": OWN, "diffusers": NameForm(DIFFUSERS, diffusers=True)}
    return Names(
        weights=weights,
        forms=forms,
        without_alpha=frozenset({"diffusers"}),
        unnamed="" if all(each.diffusers for each in weights.values()) else why_unnamed(rows, UNTOLD),
    )
