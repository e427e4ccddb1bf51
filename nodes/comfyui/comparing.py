"""Pictures that are drawn once and kept; for Compare LoRAs also of LoRAs, and how alike they are to others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ...trainer_core.config.prompt_lines import PromptLine
from ...trainer_core.data.images import DECODER_ERRORS, load_picture
from . import models, sampling
from .connected.identity import digest_of_clip, digest_of_model, digest_of_vae, stamp_of_files

KEY = "atelier_compare"  # text in a kept picture: what it was drawn from
NAME = 32  # characters of that in the file's name
LIKE = ("like pictures", "like prompt")  # columns of the table


class Column(NamedTuple):
    """A LoRA at a strength."""

    title: str
    strength: float
    digest: str  # of the LoRA's content; "" for none
    load: Callable[[], Mapping[str, Tensor]]


class GridRow(NamedTuple):
    """A prompt with a seed."""

    line: PromptLine
    first: sampling.SamplerPass
    negative: str
    guidance: float | None
    size: tuple[int, int]  # width and height


class Cell(NamedTuple):
    """A picture of the grid."""

    column: Column
    row: GridRow
    picture: Tensor  # (H, W, 3) in 0..1
    path: Path
    kept: bool  # it was there already


def digest_of_lora(lora: Mapping[str, Tensor]) -> str:
    """Compute the sha256 of a LoRA's tensors, in the order of their names."""
    whole = hashlib.sha256()
    for name in sorted(lora):
        tensor = lora[name].detach().cpu().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def digest_of_base(drawing: sampling.Models) -> str:
    """Compute the sha256 of MODEL, CLIP and VAE, by the files they come from where ComfyUI tells these."""
    parts = [digest_of_model(drawing.model), digest_of_clip(drawing.clip), digest_of_vae(drawing.vae)]
    parts += [stamp_of_files(patcher) for patcher in (drawing.model, drawing.clip.patcher)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def draw_cells(
    drawing: sampling.Models, columns: Sequence[Column], rows: Sequence[GridRow], folder: Path
) -> Iterator[Cell]:
    """Draw every picture that is not kept yet, column by column, and keep each at once: Cancel loses none.

    folder: of kept pictures, one PNG file each, named by what it was drawn from.
    """
    base = digest_of_base(drawing)
    folder.mkdir(parents=True, exist_ok=True)
    for column in columns:
        patched: sampling.Models | None = None
        for row in rows:
            about = about_of(base, column, row)
            path = folder / file_of(about)
            picture = read_kept(path, about)
            kept = picture is not None
            if picture is None:
                patched = patched or _patched(drawing, column)
                picture = draw_kept(patched, row, path, about)
            yield Cell(column, row, picture, path, kept)


def draw_kept(drawing: sampling.Models, row: GridRow, path: Path, about: Mapping[str, str]) -> Tensor:
    """Draw a picture and keep it in a file; return it as the file has it, in 8 bits, (H, W, 3) in 0..1."""
    from ...trainer_core.training.sample_files import save_picture  # here, so that ComfyUI starts fast

    prompt = sampling.Prompt(row.line.prompt, row.negative, row.guidance)
    picture = sampling.draw(drawing, prompt, row.size, 1, row.first, None)[0]
    save_picture(path, picture.detach().float().cpu().clamp(0, 1), about)
    kept = read_kept(path, about)
    if kept is None:
        raise RuntimeError(f"{path.name} of {path.parent.name} could not be read back; run again.")
    return kept


def _patched(drawing: sampling.Models, column: Column) -> sampling.Models:
    if not column.digest or not column.strength:
        return drawing
    lora = {name: models.own(tensor) for name, tensor in column.load().items()}
    model, clip = models.apply_lora(drawing.model, drawing.clip, lora, column.strength)
    return drawing._replace(model=model, clip=clip)


def about_of(base: str, column: Column, row: GridRow) -> dict[str, str]:
    """Describe a picture for its file: the key of everything it is drawn from, and what people read."""
    shown = {
        "lora": column.title,
        "strength": column.strength,
        "prompt": row.line.prompt,
        "negative": row.negative,
        "guidance": row.guidance,
        "size": list(row.size),
        **row.first._asdict(),
    }
    drawn = {**shown, "lora": column.digest, "base": base}
    key = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()
    return {KEY: key, "atelier_sample": json.dumps(shown, ensure_ascii=False)}


def file_of(about: Mapping[str, str]) -> str:
    """Name the file of a picture by what it is drawn from."""
    return f"{about[KEY][:NAME]}.png"


def read_kept(path: Path, about: Mapping[str, str]) -> Tensor | None:
    """Read a kept picture; None where it is missing, damaged, or another's."""
    if not path.is_file():
        return None
    try:
        with Image.open(path) as image:
            if image.info.get(KEY) != about[KEY]:
                return None
        return to_tensor(load_picture(path))
    except DECODER_ERRORS:
        return None


def to_tensor(picture: Image.Image) -> Tensor:
    """Convert an RGB picture to a tensor (H, W, 3) in 0..1."""
    data = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    return data.view(picture.height, picture.width, 3).float() / 255


@torch.no_grad()
def embed(vision: Any, pictures: Sequence[Tensor]) -> Tensor:
    """Compute unit vectors of pictures (H, W, 3) by a vision model, (N, D).

    Of models that give a vector for each patch, such as SigLIP in ComfyUI, the mean: their number may follow the shape.
    """
    found = [vision.encode_image(picture[None])["image_embeds"].float().cpu() for picture in pictures]
    vectors = [each.mean(1) if each.ndim > 2 else each for each in found]
    return torch.nn.functional.normalize(torch.cat(vectors), dim=1)


def has_text_side(vision: Any) -> bool:
    """Tell whether a vision model projects pictures to where a text encoder projects prompts: CLIP does."""
    return hasattr(getattr(vision.model, "visual_projection", None), "weight")  # of other models it is the identity


def embed_prompts(clip: Any, prompts: Sequence[str]) -> Tensor:
    """Compute unit vectors of prompts by the pooled output of a text encoder, (N, D)."""
    found = [clip.encode_from_tokens(clip.tokenize(text), return_pooled=True)[1].flatten(1) for text in prompts]
    return torch.nn.functional.normalize(torch.cat(found).float().cpu(), dim=1)


def likeness(
    vision: Any, cells: Sequence[Cell], pictures: Sequence[Tensor], text: Any
) -> list[tuple[float | None, float | None]]:
    """Measure each cell's likeness to pictures and to its prompt by cosines, None where nothing to compare is linked.

    To pictures: the mean over them. text: the text encoder that was trained with the vision model; without a text side
    nothing is alike to prompts. Raises ValueError for a text encoder of another width, or without its projection.
    """
    drawn = embed(vision, [cell.picture for cell in cells])
    to_pictures: list[float | None] = [None] * len(cells)
    to_prompt: list[float | None] = [None] * len(cells)
    if pictures:
        to_pictures = list((drawn @ embed(vision, pictures).t()).mean(dim=1).tolist())
    if text is not None and has_text_side(vision):
        to_prompt = like_texts(drawn, text, [cell.row.line.prompt for cell in cells], "Compare LoRAs")
    return list(zip(to_pictures, to_prompt, strict=True))


def like_texts(pictures: Tensor, text: Any, texts: Sequence[str], node: str) -> list[float | None]:
    """Compute the cosine of each picture's vector, (N, D), and its text; node: whose clip_of_vision the encoder is.

    Raises ValueError for a text encoder of another width, or without its projection.
    """
    _check_projected(text, node)
    words = embed_prompts(text, texts)
    if words.shape[1] != pictures.shape[1]:
        raise ValueError(
            f"clip_of_vision of {node} gives {words.shape[1]} numbers a prompt, the CLIP vision model "
            f"{pictures.shape[1]} a picture; link the text encoder of the same CLIP, or none."
        )
    return list((pictures * words).sum(dim=1).tolist())


def _check_projected(text: Any, node: str) -> None:
    """Raise ValueError for a text encoder whose pooled output is not projected to where the pictures are."""
    model = getattr(text, "cond_stage_model", None)
    encoder = getattr(model, getattr(model, "clip", None) or "", None)
    if not getattr(encoder, "return_projected_pooled", True):
        raise ValueError(
            f"clip_of_vision of {node} is the text encoder of a checkpoint of Stable Diffusion 1, which lacks "
            "CLIP's projection; link one of Load CLIP, or none."
        )
