"""The weights of a model file by the names of their layers in LoRA files, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from .files.safetensors_file import FileHeader, TensorFile, opened, read_header

DENOISER = "diffusion_model."  # start of a denoiser's layers in LoRA files under ComfyUI's names
PREFIXES = ("model.diffusion_model.", DENOISER, "")  # of its tensors in files
WEIGHT = ".weight"
LEAST_SIDES = 2  # axes of a matrix

Weights = Mapping[str, Callable[[], Tensor]]


@contextmanager
def open_weights(path: Path) -> Iterator[Weights]:
    """Open a model file: its matrices and kernels by their layers' names in LoRA files, each read when it is called.

    Stable Diffusion's have kohya's names, text encoders included. Of other models only the denoiser is found, under
    ComfyUI's names. Raises ValueError for files that hold no weights, or change while they are open.
    """
    from .sd.weights import stable_diffusion_weights  # here, so that importing the protocols alone loads nothing

    header = read_header(path)
    with opened(header) as file:
        found = stable_diffusion_weights(header, file) or _denoiser(header, file)
        if not found:
            raise ValueError(f"{path.name} holds no weights of a model; choose another file.")
        yield found


def _denoiser(header: FileHeader, file: TensorFile) -> Weights:
    return {
        DENOISER + name.removesuffix(WEIGHT): lambda tensor=tensor: file.get_tensor(tensor)
        for name, tensor in denoiser_names(header).items()
        if name.endswith(WEIGHT) and len(header.shapes[tensor]) >= LEAST_SIDES
    }


def denoiser_names(header: FileHeader) -> dict[str, str]:
    """Map the names of a denoiser's tensors, without what files put before them, to those of a file."""
    prefix = next(start for start in PREFIXES if any(name.startswith(start) for name in header.shapes))
    return {name[len(prefix) :]: name for name in header.shapes if name.startswith(prefix)}
