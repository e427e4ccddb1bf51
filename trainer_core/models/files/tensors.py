"""Load stored tensors into modules, check them, and hash them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...common.cancel import look
from .safetensors_file import Stored

Value = TypeVar("Value")
SHAPE_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)  # of code for ordinary shapes


class Complete(dict[str, Value]):
    """Tensors or shapes by name; a missing one raises a ValueError with `what`, their source."""

    def __init__(self, values: Mapping[str, Value], what: str) -> None:
        super().__init__(values)
        self.what = what

    def __missing__(self, key: str) -> Value:
        raise ValueError(f"{self.what} lacks the tensor {key}; the file is incomplete.")


@contextmanager
def of_possible_shapes(what: str, *more: type[Exception]) -> Iterator[None]:
    """Turn the errors that impossible shapes or sizes cause in a block into a ValueError that names `what`.

    Only for blocks that compute without data. more: further errors, where the block raises none of our own.
    """
    try:
        yield
    except (*SHAPE_ERRORS, *more) as error:
        raise ValueError(f"{what} has tensors of impossible sizes; get the file again.") from error


def empty_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Build tensors without values, on the meta device."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def fill(module: nn.Module, names: dict[str, str], tensors: dict[str, Tensor], what: str) -> nn.Module:
    """Load tensors by mapped names into a meta-device module.

    Raises ValueError for missing tensors, wrong shapes and values that are not finite. what: the module's name.
    """
    wanted, tensors = module.state_dict(), Complete(tensors, what)
    state = {name: _fitted(tensors[source], wanted[name].shape, source, what) for name, source in names.items()}
    module.load_state_dict(state, assign=True)
    return module


def fill_from(module: nn.Module, names: dict[str, str], tensors: dict[str, Stored], what: str) -> nn.Module:
    """Do as `fill`, but leave the weights of linear layers and convolutions in their file, each read and checked once.

    Such a layer's `stored` is its tensor in the file; its weight stays on the meta device.
    """
    wanted, tensors = module.state_dict(), Complete(tensors, what)
    matrices = {
        f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)
    }
    state = {}
    for name, source in names.items():
        tensor = _fitted(tensors[source].read(), wanted[name].shape, source, what)
        if name in matrices:
            matrices[name].__dict__["stored"] = tensors[source]
        else:
            state[name] = tensor
    module.load_state_dict(state, strict=False, assign=True)
    return module


def _fitted(tensor: Tensor, shape: torch.Size, source: str, what: str) -> Tensor:
    """Give a file's tensor its module's shape; raises ValueError where it has another size or is not finite."""
    if tensor.numel() != shape.numel():  # same count, other shape: a 1x1 conv stored for a linear layer
        raise ValueError(f"{what}: {source} has shape {tuple(tensor.shape)}, expected {tuple(shape)}; get it again.")
    check_finite({source: tensor}, what)
    return tensor.reshape(shape)


def check_finite(tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError for the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        look()
        if not tensor.is_meta and not (tensor.half() if tensor.element_size() == 1 else tensor).isfinite().all():
            raise ValueError(f"{what}: {name} holds values that are not finite; get the file again.")


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """Compute the sha256 of tensors: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        look()
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_folder(folder: Path) -> str:
    """Compute the sha256 of the safetensors files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                look()
                digest.update(block)
    return digest.hexdigest()
