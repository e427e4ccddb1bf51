"""Merge LoRAs into one: the exact weighted sum, its nearest LoRA of a rank, TIES, DARE, or without overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..common.cancel import look
from ..common.rng import generator
from ..common.side_by_side import cancelled_at_once
from ..common.wording import count
from ..config import node, setting
from ..networks.layers.form import LowRank
from ..networks.layers.svd import largest_singular
from .formats import BIAS, PLAIN, FileLayer, delta_weight, layer_kind
from .match import flat_name
from .read import LoraFile, list_some
from .room import DECOMPOSED, MERGED, numbers_of, room_for
from .singular import Singular, low_rank, of_factors

Method = Literal["sum", "svd", "ties", "dare", "dare_ties", "orthogonal"]
METHODS: tuple[Method, ...] = get_args(Method)
PIECE = 2**22  # elements that are counted at once
RANKED = ("svd", "ties", "dare", "dare_ties")  # methods whose result has a rank that is asked for


class Summand(NamedTuple):
    """A LoRA, and how strongly it is merged."""

    lora: LoraFile
    strength: float


class Merged(NamedTuple):
    """The layers of a merged LoRA, and what of the merged change they hold."""

    layers: list[FileLayer]
    kept: float  # share of the Frobenius norm of the merged change, 0..1
    shared: int  # layers that more than one LoRA changes


class _Delta(NamedTuple):
    """The change of one layer by one LoRA, times its strength: up @ down, or whole. float32."""

    up: Tensor | None  # (out, r)
    down: Tensor  # (r, in * k); without `up` the change itself, (out, in * k)
    kernel: tuple[int, ...]

    def whole(self) -> Tensor:
        """Compute the change, (out, in * k)."""
        return self.down if self.up is None else self.up @ self.down


@cancelled_at_once
def merge_loras(
    summands: Sequence[Summand],
    method: Method = "sum",
    *,
    rank: int = 0,
    density: float = 0.5,
    seed: int = 0,
    same: Callable[[str], str] = flat_name,
) -> Merged:
    """Merge LoRAs layer by layer; the result is for strength 1.

    sum: factors side by side, exact; its rank is the sum of ranks. Where a layer is no plain LoRA, a whole difference.
    svd: the LoRA of `rank` nearest to that sum. ties (Yadav et al. 2023): of each change the share `density` of its
    largest elements, of these the ones with the sign of the larger mass, their mean. dare (Yu et al. 2024): elements
    kept with probability `density` and divided by it, then summed; dare_ties: then as ties. These three are cut to
    `rank`. orthogonal: each LoRA without what lies in the rows and columns that earlier ones use, so that it leaves
    them as they are: (1 - U U^T) D (1 - V V^T).
    same: writes a layer's name so that it is equal in all LoRAs. Raises ValueError for LoRAs that cannot be merged.
    """
    if len(summands) < 2:
        raise ValueError(f"{node('merge')} has one LoRA; give it at least two.")
    if method in RANKED and rank < 1:
        raise ValueError(f"{setting('merge.rank')} is {rank}; set it to 1 or more.")
    if not 0 < density <= 1:
        raise ValueError(f"{setting('merge.density')} is {density:g}; set it above 0, up to 1.")
    layers_by_name = _layers_by_name(summands, same)
    layers, kept, whole = [], 0.0, 0.0
    for name, found in layers_by_name.items():
        look()
        with room_for(name, _bytes_for([layer for layer, *_ in found], method)):
            layer, own, all_of_it = _merge_layer(
                [(each, strength) for each, strength, _ in found], method, rank, density, f"{seed}/{name}"
            )
        kept, whole = kept + own**2, whole + all_of_it**2
        layers += [layer] if layer else []
    if not layers:
        raise ValueError(f"The merged LoRA has no effect; set a {setting('merge.strength')} to another number than 0.")
    share = (kept / whole) ** 0.5 if whole else 1.0
    return Merged(layers, share, sum(len({number for *_, number in found}) > 1 for found in layers_by_name.values()))


def _layers_by_name(
    summands: Sequence[Summand], same: Callable[[str], str]
) -> dict[str, list[tuple[FileLayer, float, int]]]:
    """List the layers of all LoRAs by name, with strength and number of the LoRA; the first one's name stays."""
    layers_by_name: dict[str, list[tuple[FileLayer, float, int]]] = {}
    for number, (lora, strength) in enumerate(summands):
        for layer in lora.layers.values():
            if layer.of_weight:
                raise ValueError(
                    f"{lora.name} holds layers of {layer.kind}, whose effect depends on the model. Make it a "
                    f"plain LoRA first, by {node('resize')} with the model."
                )
            layers_by_name.setdefault(same(layer.source), []).append((layer, strength, number))
    several = [name for name, found in layers_by_name.items() if len({number for *_, number in found}) > 1]
    if not several:
        names = " and ".join(lora.name for lora, _ in summands[:2])
        raise ValueError(
            f"{names} share no layer. Choose LoRAs for the same model; if they are, merge them in the page with the "
            "MODEL linked, which knows all names of a layer."
        )
    unequal = [name for name in several if len({_sides(layer) for layer, *_ in layers_by_name[name]}) > 1]
    if unequal:
        raise ValueError(
            f"{count(unequal, 'layer has', 'layers have')} other shapes in these LoRAs ({list_some(unequal)}). "
            "Choose LoRAs for the same model."
        )
    return layers_by_name


def _bytes_for(layers: Sequence[FileLayer], method: Method) -> int:
    """Bound the memory that merging a layer takes, by the changes that are made whole."""
    whole = method not in ("sum", "svd", "orthogonal") or not all(layer.form.exact_rank for layer in layers)
    each = DECOMPOSED if method == "orthogonal" else MERGED
    return sum(each * (numbers_of(layer) or 0) for layer in layers) if whole else 0


def _sides(layer: FileLayer) -> tuple[int, int]:
    """Rows and columns of a layer's change; (0, 0) for a bias alone."""
    if layer.of_bias_alone:
        return 0, 0
    empty = {part: torch.empty(tensor.shape, device="meta") for part, tensor in layer.tensors.items()}
    delta = delta_weight(FileLayer(source=layer.source, kind=layer.kind, tensors=empty, alpha=0.0))
    return len(delta), delta[0].numel()


def _merge_layer(
    found: Sequence[tuple[FileLayer, float]], method: Method, rank: int, density: float, draw: str
) -> tuple[FileLayer | None, float, float]:
    """Merge one layer; return it (None: it changes nothing), the norm that it holds and that of the merged change."""
    source, tensors = found[0][0].source, {}
    dtype = max((t.dtype for layer, _ in found for t in layer.tensors.values()), key=lambda dtype: dtype.itemsize)
    dtype = dtype if dtype.itemsize > 1 else torch.float16
    biases = [strength * layer.tensors[BIAS].float() for layer, strength in found if BIAS in layer.tensors]
    if biases:
        tensors[BIAS] = torch.stack(biases).sum(0).to(dtype)
    deltas = [_delta(layer, strength) for layer, strength in found if strength and not layer.of_bias_alone]
    if not deltas:
        return (
            (FileLayer(source=source, kind=layer_kind(tensors), tensors=tensors, alpha=0.0) if tensors else None),
            0.0,
            0.0,
        )
    if method == "orthogonal":
        deltas = _without_overlap(deltas)
    kernel = max((delta.kernel for delta in deltas), key=len)
    if method in ("sum", "orthogonal"):
        layer = _side_by_side(deltas, kernel, source, dtype)
        return _with(layer, tensors), 1.0, 1.0
    if method == "svd" and all(delta.up is not None for delta in deltas):
        up, down = _stacked(deltas)
        singular = of_factors(up.double(), down.double(), kernel)
        whole = singular.norm
    else:
        change = torch.stack([delta.whole() for delta in deltas])
        if method.startswith("dare"):
            change = _dropped(change, density, draw)
        elif method == "ties":
            change = torch.stack([_largest(each, density) for each in change])
        change = _elected(change) if method.endswith("ties") else change.sum(0)
        u, sigma, vt = largest_singular(change, rank, generator(0, f"merge/{draw}"))
        singular, whole = (
            Singular(u=u.double(), sigma=sigma.double(), vt=vt.double(), kernel=kernel),
            float(change.norm()),
        )
    layer = low_rank(singular, min(rank, int((singular.sigma > 0).sum()) or 1), source=source, dtype=dtype)
    return _with(layer, tensors), float(singular.sigma[:rank].norm()), whole


def _with(layer: FileLayer, tensors: dict[str, Tensor]) -> FileLayer:
    return FileLayer(source=layer.source, kind=layer.kind, tensors={**layer.tensors, **tensors}, alpha=layer.alpha)


def _delta(layer: FileLayer, strength: float) -> _Delta:
    """Compute a layer's change, as a product where it is one of its own rank."""
    product = layer.form.product_of(layer.floats, layer.alpha) if layer.form.exact_rank else None
    if isinstance(product, LowRank):
        return _Delta(strength * product.scale * product.up, product.down, tuple(product.kernel))
    change = strength * delta_weight(layer)
    return _Delta(None, change.flatten(1), tuple(change.shape[2:]))


def _stacked(deltas: Sequence[_Delta]) -> tuple[Tensor, Tensor]:
    ups = [delta.up for delta in deltas if delta.up is not None]
    return torch.cat(ups, 1), torch.cat([delta.down for delta in deltas])


def _side_by_side(deltas: Sequence[_Delta], kernel: tuple[int, ...], source: str, dtype: torch.dtype) -> FileLayer:
    """Write the sum of changes as one layer: the factors side by side, or the whole sum where one has none."""
    columns = deltas[0].down.shape[1]
    inputs, ones = columns // torch.Size(kernel).numel(), (1,) * len(kernel)
    if any(delta.up is None for delta in deltas):
        change = torch.stack([delta.whole() for delta in deltas]).sum(0)
        tensors = {"diff": change.reshape(len(change), inputs, *kernel).to(dtype)}
        return FileLayer(source=source, kind=layer_kind(tensors), tensors=tensors, alpha=0.0)
    up, down = _stacked(deltas)
    tensors = {
        "down": down.reshape(len(down), inputs, *kernel).to(dtype).contiguous(),
        "up": up.reshape(len(up), len(down), *ones).to(dtype).contiguous(),
    }
    return FileLayer(source=source, kind=PLAIN, tensors=tensors, alpha=float(len(down)))


def _without_overlap(deltas: Sequence[_Delta]) -> list[_Delta]:
    """Take out of each change what lies in the rows or columns that earlier ones use."""
    up, down = deltas[0].up, deltas[0].down
    left = down.new_zeros(len(down if up is None else up), 0)
    right = down.new_zeros(down.shape[1], 0)
    found = []
    for delta in deltas:
        if delta.up is None:
            change = delta.down - left @ (left.t() @ delta.down)
            change = change - (change @ right) @ right.t()
            u, sigma, vt = torch.linalg.svd(change, full_matrices=False)
            own = sigma > sigma[0] * 1e-5
            columns, rows = u[:, own], vt[own].t()
            found.append(delta._replace(down=change))
        else:
            up, down = delta.up - left @ (left.t() @ delta.up), delta.down - (delta.down @ right) @ right.t()
            columns, rows = torch.linalg.qr(up).Q, torch.linalg.qr(down.t()).Q
            found.append(delta._replace(up=up, down=down))
        left, right = torch.cat([left, columns], 1), torch.cat([right, rows], 1)
    return found


def _largest(change: Tensor, density: float) -> Tensor:
    """Keep the share `density` of elements with the largest magnitudes; the others become 0."""
    count = int(density * change.numel())
    if not count:
        return torch.zeros_like(change)
    limit, above = _limit(change, count)
    kept = change.abs() > limit
    equal = (change.abs() == limit).flatten().nonzero().flatten()[: count - above]
    kept.view(-1)[equal] = True
    return torch.where(kept, change, 0.0)


def _limit(change: Tensor, count: int) -> tuple[float, int]:
    """Find the magnitude that `count` elements of a matrix, float32, reach; also count those above it.

    By the numbers' bits, which grow with them: the upper half of all, then the lower half of those with that upper one.
    A sort of as many takes minutes, and no Cancel ends it.
    """
    upper, above = 0, 0
    for half in (16, 0):
        counts = torch.zeros(2**16, dtype=torch.int64)
        for piece in change.flatten().split(PIECE):
            bits = piece.abs().view(torch.int32)
            parts = bits >> 16 if half else (bits & 0xFFFF)[bits >> 16 == upper]
            counts += torch.bincount(parts, minlength=2**16)
        found = above + counts.flip(0).cumsum(0)
        index = int((found < count).sum())
        above = int(found[index - 1]) if index else above
        upper = (upper << 16) + 2**16 - 1 - index
    return float(torch.tensor(upper, dtype=torch.int32).view(torch.float32)), above


def _dropped(changes: Tensor, density: float, draw: str) -> Tensor:
    """Keep each element with probability `density`, divided by it; others become 0."""
    kept = torch.rand(changes.shape, generator=generator(0, f"dare/{draw}")) < density
    return changes * kept / density


def _elected(changes: Tensor) -> Tensor:
    """Average, of the changes (n, out, in), the elements other than 0 with the sign of their sum."""
    agrees = changes.sign() == torch.where(changes.sum(0) >= 0, 1.0, -1.0)
    return (changes * agrees).sum(0) / agrees.sum(0).clamp(min=1)
