"""Convert a LoRA: the names and the form that another program reads, and plain LoRA of other kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.side_by_side import cancelled_at_once
from ..common.wording import count
from ..config import node, setting
from ..models.base import Slice
from .formats import BIAS, PLAIN, FileLayer
from .lora import tensors_of
from .match import Piece, flat_name, overlap, whole_layer
from .names import Named, Names, Program, Weight
from .read import LoraFile, list_some
from .singular import decompose, low_rank
from .write import peft_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A converted LoRA: its tensors and layers under their new names, and how much of other kinds was kept."""

    tensors: dict[str, Tensor]
    layers: list[FileLayer]
    kept: dict[str, float]  # share of the norm of each layer that was made a plain LoRA, by its old name
    unread: list[str]  # names that ComfyUI's loader does not know

    def describe(self, program: Program) -> str:
        """Say what was done."""
        lines = [f"{count(self.layers, 'layer')} under the names of {program}."]
        if self.kept:
            worst = min(self.kept, key=self.kept.__getitem__)
            lines.append(
                f"{count(self.kept, 'layer')} became plain LoRA. The largest error is "
                f"{(1 - min(1.0, self.kept[worst]) ** 2) ** 0.5:.2%} of the change, in {worst}."
            )
        if self.unread:
            lines.append(
                f"ComfyUI itself does not read {count(self.unread, 'name')} of these ({list_some(self.unread)})."
            )
        return "\n".join(lines)


@cancelled_at_once
def convert(
    lora: LoraFile,
    names: Names,
    program: Program,
    *,
    rank: int = 0,
    weight: Callable[[str], Tensor] | None = None,
    known: Callable[[str], bool] = lambda _: True,
    progress: Callable[[float], None] = lambda _: None,
) -> Converted:
    """Write a LoRA as another program does.

    rank: of plain LoRA that replace layers of other kinds; 0 keeps these. weight: reads the model's weight of a layer
    of the file, for layers `of_weight`. known: tells whether ComfyUI's loader takes a name. Alpha is multiplied in
    where a program's files have none. Raises ValueError for layers without a place in the model, and for what the
    program's files cannot hold.
    """
    kept: dict[str, float] = {}
    plain = program in names.without_alpha
    layers: list[FileLayer] = []
    by_weight = list(_pieces_by_weight(lora, names).items())
    for number, (key, pieces) in enumerate(by_weight):
        look()
        progress(number / len(by_weight))
        owner = names.weights[key]
        targets = names.written(owner, program)
        if not targets:
            raise ValueError(
                f"No names of {program} are known for {key}: {names.unnamed}. Set {setting('convert.program')} to "
                "comfyui, kohya or ai-toolkit."
            )
        cuts = _slices(targets) != {_rows(piece.slice) for piece in pieces}
        pieces = [
            Piece(
                _plain(piece.stored, rank, weight, kept, needed=_need(piece.stored, program, plain, cuts)), piece.slice
            )
            for piece in pieces
        ]
        layers += _renamed(pieces, targets, owner)
    if plain:
        layers = [_without_alpha(layer, program) for layer in layers]
        tensors = peft_tensors(tensors_of(layers), {layer.source: layer.source for layer in layers})
        layers = [replace(layer, alpha=float(len(layer.tensors["down"]))) for layer in layers]
    else:
        tensors = tensors_of(layers)
    return Converted(
        tensors=tensors, layers=layers, kept=kept, unread=[each.source for each in layers if not known(each.source)]
    )


def _pieces_by_weight(lora: LoraFile, names: Names) -> dict[str, list[Piece]]:
    """Find the weight, or the slice of one, that each layer of a file changes."""
    weights, found, lost = names.weights_by_name(), dict[str, list[Piece]](), []
    for source, stored in lora.layers.items():
        weight, piece = weights.get(flat_name(source), (None, None))
        if weight is None:
            lost.append(source)
            continue
        pieces = found.setdefault(weight.key, [])
        if other := next((each for each in pieces if overlap(each.slice, piece)), None):
            raise ValueError(
                f"{lora.name} changes the same layer twice, as {other.stored.source} and as {source}; use another file."
            )
        pieces.append(Piece(stored, piece))
    if lost:
        raise ValueError(
            f"{len(lost)} of {len(lora.layers)} layers of {lora.name} have no place in the model ({list_some(lost)}). "
            f"Link the MODEL that the LoRA is for to {node('convert')}, and its CLIP where the LoRA changes text "
            "encoders."
        )
    return found


def _rows(piece: Slice | None) -> tuple[int, int, bool] | None:
    return None if piece is None else (piece.start, piece.length, piece.swapped)


def _slices(targets: Iterable[Named]) -> set[tuple[int, int, bool] | None]:
    return {_rows(target.slice) for target in targets}


def _need(layer: FileLayer, program: Program, plain: bool, cuts: bool) -> str:
    """Say why a layer must be a plain LoRA; "" if it need not."""
    if layer.kind == PLAIN:
        return ""
    if plain:
        return f"which files of {program} cannot hold"
    return "which cannot be cut or joined as the names need" if cuts else ""


def _plain(
    layer: FileLayer, rank: int, weight: Callable[[str], Tensor] | None, kept: dict[str, float], *, needed: str
) -> FileLayer:
    """Make a plain LoRA of a layer of another kind where that is asked for; note how much of it is kept."""
    if layer.kind == PLAIN or not (rank or needed):
        return layer
    if layer.flat:
        if needed:
            raise ValueError(
                f"{layer.source} is a change of a norm or bias, {needed}; drop it by {node('blocks')} first."
            )
        return layer
    if not rank:
        raise ValueError(
            f"{layer.source} is a layer of {layer.kind}, {needed}. Set {setting('convert.plain_rank')}, such as 16."
        )
    found = decompose(layer, weight(layer.source) if weight and layer.of_weight else None)
    dtype = next(tensor.dtype for tensor in layer.tensors.values())
    made = low_rank(found, rank, source=layer.source, dtype=dtype if dtype.itemsize > 1 else torch.float16)
    kept[layer.source] = float(found.sigma[:rank].norm()) / found.norm if found.norm else 1.0
    bias = {part: tensor for part, tensor in layer.tensors.items() if part == BIAS}
    return replace(made, tensors={**made.tensors, **bias})


def _renamed(pieces: Sequence[Piece], targets: Sequence[Named], owner: Weight) -> Iterator[FileLayer]:
    """Give the layers of one weight their new names: cut into slices, or joined, where these need it."""
    by_rows = {_rows(piece.slice): piece.stored for piece in pieces}
    rows = _slices(targets)
    if by_rows.keys() <= rows:
        for target in targets:
            if _rows(target.slice) in by_rows:
                yield replace(by_rows[_rows(target.slice)], source=target.name)
        return
    whole = whole_layer(pieces, owner.rows)
    for target in targets:
        if target.slice is None:
            yield replace(whole, source=target.name)
        elif (cut := _cut(whole, target.slice)) is not None:
            yield replace(cut, source=target.name)


def _cut(layer: FileLayer, piece: Slice) -> FileLayer | None:
    """Take some outputs of a plain LoRA; directions without effect there are left out. None where none is left."""
    if BIAS in layer.tensors:
        raise ValueError(
            f"{layer.source} changes a bias, which no names of slices hold; set {setting('convert.program')} to "
            "comfyui or kohya."
        )
    up = layer.tensors["up"].narrow(0, piece.start, piece.length)
    if piece.swapped:
        up = torch.cat(up.chunk(2)[::-1])
    used = up.flatten(1).any(dim=0)
    if not used.any():
        return None
    rank, scale = int(used.sum()), layer.scale(len(layer.tensors["down"]))
    tensors = {"up": up[:, used].contiguous(), "down": layer.tensors["down"][used].contiguous()}
    return FileLayer(source=layer.source, kind=PLAIN, tensors=tensors, alpha=scale * rank)


def _without_alpha(layer: FileLayer, program: Program) -> FileLayer:
    """Prepare a plain LoRA for a file without alphas; raises ValueError for a change of the bias."""
    if BIAS in layer.tensors:
        raise ValueError(
            f"{layer.source} changes a bias, which files of {program} cannot hold; set {setting('convert.program')} to "
            "comfyui or kohya."
        )
    return replace(layer, alpha=layer.alpha or float(len(layer.tensors["down"])))
