"""Write LoRA and embedding files: under kohya's or peft's names, atomically, and verified by reading them back."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..common.exact import exact
from ..common.files import short_hash, unused_path, written_whole
from ..config import setting
from ..models import Part
from ..models.base import Expert
from ..networks.layers.form import ALPHA, BIAS, MAGNITUDE
from .formats import PLAIN, form_of, group_tensors, layer_kind

TOLERANCE = {
    "": 1e-5,
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.13,
}  # relative, of a layer's delta norm

FLOAT8_POWER = 8  # float8_e4m3fn ends at 448: the largest value of a tensor comes between 128 and 256


def delta_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Compute the Frobenius norm of every layer's delta at strength 1, by layer.

    DoRA's magnitudes, differences of biases and tensors of layers without a delta of their own get their own norms, by
    tensor name.
    """
    grouped, unknown = group_tensors(tensors)
    norms = {}
    for name, parts in grouped.items():
        form = form_of(parts) if layer_kind(parts) else None
        alone = set(parts) if form is None or form.of_weight else {MAGNITUDE, BIAS}
        unknown += [tensor for part, tensor in parts.items() if part in alone]
        found = {part: tensors[tensor] for part, tensor in parts.items() if part not in alone}
        alpha = float(found.pop(ALPHA, torch.tensor(0.0)))
        if form and found:
            norms[name] = form.norm_of(found, alpha)
    return norms | {name: float(exact(tensors[name]).norm()) for name in unknown}


def peft_tensors(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename a plain LoRA's tensors to `<name>.lora_A.weight` and `lora_B.weight`, as peft and ai-toolkit write them.

    names: for ComfyUI, by those of kohya. These files have no alpha: alpha / rank is multiplied in, half on each side.
    """
    renamed = {}
    for key in (key for key in tensors if key.endswith(".alpha")):
        name = key.removesuffix(".alpha")
        down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        scale = float(tensors[key]) / len(down)
        root = math.sqrt(abs(scale))
        renamed[f"{names[name]}.lora_A.weight"] = down * root
        renamed[f"{names[name]}.lora_B.weight"] = up * math.copysign(root, scale)
    return renamed


def of_experts(tensors: Mapping[str, Tensor], experts: Sequence[Expert]) -> list[dict[str, Tensor]]:
    """Sort a network's tensors into a file for each expert of its model, where each has the names of the first one.

    What no expert has, as layers of text encoders, goes to the first one.
    """
    files: list[dict[str, Tensor]] = [{} for _ in experts]
    first, *others = (f"{expert.prefix}_" for expert in experts)
    for name, tensor in tensors.items():
        # Others first: their names begin with that of the first one.
        whose, start = next(((n, each) for n, each in enumerate(others, 1) if name.startswith(each)), (0, ""))
        files[whose][first + name.removeprefix(start) if whose else name] = tensor
    return files


def save_lora(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    dtype: str = "float16",
    verify: Callable[[Path], None] | None = None,
) -> dict[str, Tensor]:
    """Write a LoRA file and return its tensors; on an error `path` is as it was before.

    dtype: "" for that of each tensor. verify: called with the finished file before it gets its name; raises to refuse
    it; not of a file without tensors. Raises ValueError when a value overflows the dtype, or the file differs from the
    trained tensors.
    """
    if dtype.startswith("float8"):
        tensors = spread_for_float8(tensors)
    stored = {k: _converted(t.detach().cpu(), dtype).contiguous() for k, t in tensors.items()}
    if broken := [k for k, t in stored.items() if not (t.half() if t.element_size() == 1 else t).isfinite().all()]:
        raise ValueError(f"{broken[0]} overflows {dtype or 'its number format'}; save the LoRA as bfloat16 or float32.")
    with written_whole(path, apart=True) as temporary:
        _write_lora(temporary, stored, metadata)
        verify_lora(temporary, tensors, dtype)
        if verify and tensors:
            verify(temporary)
    return stored


def _converted(tensor: Tensor, dtype: str) -> Tensor:
    """Convert a tensor to a dtype; an alpha, which is one number, stays exact where that has 8 bits."""
    if not dtype or (dtype.startswith("float8") and not tensor.ndim):
        return tensor
    return tensor.to(getattr(torch, dtype))


def spread_for_float8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply both factors of each plain LoRA by powers of 2, and its alpha by their inverse: nothing changes.

    float8 then holds them with all its digits, where small values would become 0. Other kinds stay as they are.
    """
    spread = dict(tensors)
    for parts in group_tensors(tensors)[0].values():
        if layer_kind(parts) != PLAIN:
            continue
        product = 1.0
        for part in ("down", "up"):
            largest = float(tensors[parts[part]].float().abs().max())
            factor = 2.0 ** (FLOAT8_POWER - math.ceil(math.log2(largest))) if largest else 1.0
            spread[parts[part]], product = tensors[parts[part]].float() * factor, product * factor
        name = parts.get("alpha") or re.sub(r"\.[^.]+\.weight$|\.lora_[AB]$", "", parts["down"]) + ".alpha"
        alpha = float(tensors[name]) if name in tensors else float(len(tensors[parts["down"]]))
        spread[name] = torch.tensor(alpha / product)
    return spread


def _write_lora(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata and kohya's hashes, which are of the file with its `ss_` metadata only."""
    save_file(tensors, path, {k: v for k, v in metadata.items() if k.startswith("ss_")})
    _write_ordered(path, tensors, {**metadata, **file_hashes(path)})


def _write_ordered(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with sorted metadata, so that the same content is the same bytes.

    safetensors itself writes them in an order that differs from process to process.
    """
    save_file(tensors, path, dict(metadata))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:  # it would run into the tensors; JSON has one shortest form
            raise ValueError(f"{path.name} holds metadata that cannot be put in order; it was not saved.")
        file.seek(8)
        file.write(text.ljust(length))


def copy_lora(source: Path, path: Path) -> None:
    """Copy a LoRA or embedding file of ours under another name, which its metadata then hold.

    A file of that name is replaced once the copy is on the disk and verified. Raises OSError or SafetensorError.
    """
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata["modelspec.title"] = path.stem
    with written_whole(path, apart=True) as temporary:
        if "ss_output_name" in metadata:
            _write_lora(temporary, tensors, {**metadata, "ss_output_name": path.stem})
        else:
            _write_ordered(temporary, tensors, {**metadata, "modelspec.trigger_phrase": f"embedding:{path.stem}"})
        if not is_copy(source, temporary):
            raise OSError(errno.EIO, "the copy differs from its source", str(path))


def is_copy(source: Path, path: Path) -> bool:
    """Tell whether `path` is a copy of source by `copy_lora`."""
    named = ("modelspec.title", "modelspec.trigger_phrase", "ss_output_name", "sshs_legacy_hash", "sshs_model_hash")
    with safe_open(source, framework="pt") as ours:
        try:
            with safe_open(path, framework="pt") as other:
                about = [{k: v for k, v in (f.metadata() or {}).items() if k not in named} for f in (ours, other)]
                names = [set(file.keys()) for file in (ours, other)]
                return (
                    about[0] == about[1]
                    and names[0] == names[1]
                    and all(torch.equal(ours.get_tensor(name), other.get_tensor(name)) for name in names[0])
                )
        except (OSError, SafetensorError):
            return False


def has_layers(path: Path) -> bool:
    """Tell whether a LoRA file holds layers; that of a run which trained only words holds none."""
    with safe_open(path, framework="pt") as file:
        return bool(file.keys())


def run_of(path: Path) -> str:
    """Read the key of the run that a LoRA or embedding file is of, "" if it names none."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("atelier.run", "")
    except (OSError, SafetensorError):
        return ""


def embedding_path(folder: Path, name: str, token: str) -> Path:
    """Path for a LoRA's embedding; characters that `embedding:` in a prompt cannot hold become _."""
    plain = re.sub(r"[\s()]+", "_", f"{name}-{token}")
    return folder / f"{plain}.safetensors"


def save_embeddings(
    folder: Path,
    name: str,
    embeddings: Mapping[str, Mapping[str, Tensor]],
    parts: Sequence[Part],
    metadata: Mapping[str, str],
) -> dict[str, Path]:
    """Write the vectors of each token as <name>-<token>.safetensors, for `embedding:` in prompts.

    embeddings: by token, then by the prefix of a text encoder's part. parts: of the base model. metadata: of the LoRA
    trained with them. A name that is taken gets a number. Float32, as they are small.
    Raises ValueError when a value is not finite or the file read back differs.
    """
    paths = {}
    for token, vectors in embeddings.items():
        path = unused_path(embedding_path(folder, name, token))
        tensors = {part.embedding: vectors[part.prefix].contiguous() for part in parts if part.embedding}
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError(
                f"The embedding {token} holds values that are not finite; set {setting('embeddings.learning_rate')} "
                "lower."
            )
        about = {key: text for key, text in metadata.items() if key.startswith(("modelspec.", "atelier."))}
        kind = {"architecture": metadata["modelspec.architecture"].replace("/lora", "/textual-inversion")}
        kind |= {"title": path.stem, "trigger_phrase": f"embedding:{path.stem}"}
        with written_whole(path, apart=True) as temporary:
            _write_ordered(temporary, tensors, about | {f"modelspec.{key}": text for key, text in kind.items()})
            read = load_file(temporary)
            if read.keys() != tensors.keys() or not all(torch.equal(read[key], t) for key, t in tensors.items()):
                raise ValueError(f"{path.name} differs from the trained vectors; it was not saved. Check the disk.")
        paths[token] = path
    return paths


def verify_lora(path: Path, trained: Mapping[str, Tensor], dtype: str) -> None:
    """Raise ValueError unless a LoRA file has the names and every layer's delta norm of the trained tensors."""
    read = load_file(path)
    if set(read) != set(trained):
        raise ValueError(f"{path.name} holds other tensors than were trained; it was not saved. Check the disk.")
    written = delta_norms(read)
    for name, norm in delta_norms(trained).items():
        if abs(written[name] - norm) > TOLERANCE[dtype] * norm + 1e-6:
            raise ValueError(
                f"{name} has delta norm {written[name]:.6g} in the file and {norm:.6g} before; save the LoRA as "
                "float32."
            )


def file_hashes(path: Path) -> dict[str, str]:
    """Compute kohya's two hashes of a safetensors file with `ss_` metadata only."""
    model = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(8 + struct.unpack("<Q", file.read(8))[0])
        while block := file.read(1 << 20):
            model.update(block)
    return {"sshs_model_hash": model.hexdigest(), "sshs_legacy_hash": short_hash(path)}
