"""Report a run before it starts: tables of concepts and buckets, remarks, and the outcome of each file."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..common.axes import size_text
from ..common.wording import short, table_cell
from ..config import node, setting
from ..data.buckets import buckets_of, parse_resolution
from ..data.plan import Plan, Sample
from ..data.scan import count, names, printable
from ..models import CaptionLengths, Words
from .curation import curate

MOST_CROPPED = 0.2  # a picture that loses more of its area gets a remark

_MARKS = re.compile(r"[\\`|*<\[]")  # Markdown's marks; not underlines, as those of names are inside a word

COLUMNS = (
    *("concept", "file", "outcome", "why", "width", "height", "bucket", "left", "top", "cropped", "scale"),
    *("visits_per_epoch", "mask", "caption"),
)


def report(plan: Plan) -> str:
    """Write the report before the run: length, concepts, buckets, remarks."""
    remarks = "\n".join(f"- {remark}" for remark in (*_remarks(plan), *plan.manifest.notes))
    parts = ["\n".join(_describe_length(plan)), _concept_table(plan), _bucket_table(plan), remarks]
    return _replace_bad_bytes("\n\n".join(part for part in parts if part))


def long_captions(plan: Plan, limits: CaptionLengths, words: Words) -> list[str]:
    """List sentences on captions longer than the text encoder's window, with the part that would be cut.

    words: the tokens of trained embeddings.
    """
    long: list[str] = []
    cut: list[str] = []
    for i, picture in enumerate(plan.manifest.pictures):
        texts = sorted(plan.captions_of(i), key=len, reverse=True)[:4]  # long texts have many tokens
        tokens = [
            limits.count_tokens(text, words) if words or len(text.encode(errors="replace")) > limits.window else 0
            for text in texts
        ]
        most = max(tokens, default=0)
        if limits.cut and most > limits.max_tokens:
            rest = limits.cut(texts[tokens.index(most)], words)[0]
            cut.append(f'{picture.name} ({most} tokens, without "{rest[:60]}{"..." if len(rest) > 60 else ""}")')
        elif most > limits.window:
            long.append(f"{picture.name} ({most} tokens)")
    sentences = []
    if long:
        some = count(long, "caption is", "captions are")
        sentences.append(
            f"{some} longer than {limits.window} tokens and encoded in parts of {limits.window}: {names(long)}."
        )
    if cut:
        some = count(cut, "caption is", "captions are")
        sentences.append(f"{some} longer than {limits.max_tokens} tokens and cut: {names(cut)}.")
    return sentences


def manifest_table(plan: Plan, alike: Mapping[int, float] | None = None) -> str:
    """Write CSV with a row for every scanned file: its outcome, and the crop and caption of a picture.

    Sizes in pixels. left and top: the crop's corner in the resized picture, as SDXL is conditioned on it. alike: how
    alike pictures are to their captions, in a column of its own.
    """
    columns = (*COLUMNS, "likeness") if alike else COLUMNS
    manifest, text = plan.manifest, io.StringIO()
    index = {(p.concept, p.name): i for i, p in enumerate(manifest.pictures)}
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    for file in manifest.outcomes:
        row: list[object] = [plan.dataset.concepts[file.concept].folder, file.name, file.outcome, file.why]
        if (i := index.get((file.concept, file.name))) is not None:
            picture, sample = manifest.pictures[i], _sample_for_table(plan, i)
            size, framing = picture.size, sample.crop.framing(picture.size)
            visits = float(plan.rates[i]) if plan.concepts[i].role != "validation" else 0
            row += [picture.width, picture.height, size_text(framing.size), framing.left, framing.top]
            row += [
                f"{sample.crop.crop_share(size):.3f}",
                f"{sample.crop.scale(size):.3f}",
                f"{visits:g}",
                picture.mask is not None,
                sample.caption,
            ]
            row += [f"{alike[i]:.4f}"] if alike and i in alike else []
        table.writerow(map(table_cell, [*row, *[""] * (len(columns) - len(row))]))
    return _replace_bad_bytes(text.getvalue())


def _describe_length(plan: Plan) -> Iterator[str]:
    """Describe the length of the run."""
    train = plan.train
    visits = float(sum(plan.rates[i] for i in plan.trained))
    held = f" (and {len(plan.validation)} for validation)" if plan.validation else ""
    each = "" if plan.same_every_epoch else " about"
    yield (
        f"{count(plan.trained, 'picture')}{held},{each} {count(visits, 'visit')} and "
        f"{count(plan.batches_in(0), 'batch', 'batches')} per epoch."
    )
    own = sorted({plan.batch_size(i) for i in plan.trained}) or [train.batch_size]
    size = (
        "batch " + " or ".join(map(str, own)) + (f" x {train.accumulate} accumulated" if train.accumulate > 1 else "")
    )
    yield f"{count(plan.steps, 'step')} of {size} = {count(round(plan.epochs, 2), 'epoch')}."


def _concept_table(plan: Plan) -> str:
    """Describe each concept."""
    rows: list[Sequence[object]] = []
    controls = any(concept.controls for concept in plan.dataset.concepts)
    for number, concept in enumerate(plan.dataset.concepts):
        members = [i for i, p in enumerate(plan.manifest.pictures) if p.concept == number]
        pictures = [plan.manifest.pictures[i] for i in members]
        visits = float(sum(plan.rates[i] for i in members)) if concept.role != "validation" else 0
        empty = sum(not any(p.lines) for p in pictures)
        several = sum(len(p.lines) for p in pictures)
        captions = f"{len(pictures) - empty}" + (f" of {several} lines" if several > len(pictures) else "")
        captions += f", {empty} empty" if empty else ""
        masked = f"{sum(p.mask is not None for p in pictures)} of {len(pictures)}" if concept.masks else "none"
        folders = {p.repeats for p in pictures}
        repeats = f"{concept.repeats:g}" if folders <= {1} else f"{concept.repeats:g} x {min(folders)}-{max(folders)}"
        rows.append(
            (
                Path(concept.folder).name,
                concept.role,
                len(pictures),
                count(concept.samples, "visit") if concept.samples else repeats,
                short(visits),
                f"{concept.loss_weight:g}",
                captions,
                masked,
                *([concept.controls.summary if concept.controls else "none"] if controls else []),
            )
        )
    head = ("concept", "role", "pictures", "repeats", "visits/epoch", "weight", "captions", "masks")
    return table((*head, *(["controls"] if controls else [])), rows)


def _bucket_table(plan: Plan) -> str:
    """Describe each bucket of the training pictures."""
    rows: list[Sequence[object]] = []
    batches = plan.batch_sizes(0)
    for bucket, members in plan.buckets().items():
        crops = [(plan.crop_in(i, bucket), plan.size(i)) for i in members]
        cropped = [crop.crop_share(size) for crop, size in crops]
        scale = max(crop.scale(size) for crop, size in crops)
        sizes = batches.get(bucket, [])
        smaller = plan.smaller_batches(0)[bucket]
        rows.append(
            (
                size_text(bucket),
                len(members),
                f"{len(sizes)}" + (f" ({smaller} smaller)" if smaller else ""),
                f"{sum(cropped) / len(cropped):.1%}",
                f"{max(cropped):.1%}",
                f"{scale:.2f}x" if scale > 1 else "none",
            )
        )
    return table(("bucket", "pictures", "batches", "mean crop", "largest crop", "largest upscale"), rows)


def _replace_bad_bytes(text: str) -> str:
    """Replace bytes of names that are no text by \\udcff, which every file and screen accepts."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Write a Markdown table in columns of equal width, legible as plain text, too."""
    cells = [[_MARKS.sub(r"\\\g<0>", printable(str(cell))) for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = [f"{'-' * (width - 1)}:" for width in widths]
    lines = (
        [cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in (cells[0], rule, *cells[1:])
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _remarks(plan: Plan) -> Iterator[str]:
    """Yield remarks on limits of buckets, and on pictures that stand out."""
    yield from _remarks_on_limits(plan)
    pictures = plan.manifest.pictures
    if not any(text.strip() for i in plan.trained for text in plan.captions_of(i)):
        yield (
            "Nothing is captioned, so no word of a prompt calls what is learnt. Write a made-up word into "
            f"{setting('captions.prefix')}."
        )
    warming = max(plan.concepts[i].captions.tag_warmup_steps for i in plan.trained)
    if warming >= plan.steps:
        yield (
            f"{setting('captions.tag_warmup_steps')} is {warming}, which does not end within the "
            f"{count(plan.steps, 'step')} of this run, so that captions never have all their tags. Set it lower."
        )
    variants = {i: plan.concepts[i].captions.variants for i in plan.trained}
    often = [i for i, each in variants.items() if 0 < each * plan.caption_lines(i) < plan.visits_of(i)]
    # More texts than lines, apart from dropped ones: tags are shuffled or left out, or wildcards drawn.
    bounded = [i for i in often if len(plan.captions_of(i) - {""}) > plan.caption_lines(i)]
    if bounded:
        most = variants[bounded[0]]
        yield (
            f"Captions of {count(bounded, 'picture')} change from visit to visit: each line has "
            f"{count(most, 'variant')}, used in turn. Set {setting('captions.variants')} to 0 for new ones at "
            "every visit, which take more space where they are kept."
        )
    shares = [(i, max(crop.crop_share(plan.size(i)) for crop in plan.first_crops(i))) for i in range(len(pictures))]
    cropped = [f"{pictures[i].name} ({share:.0%})" for i, share in shares if share > MOST_CROPPED]
    guarded = [pictures[i].name for i in range(len(pictures)) if plan.guarded[i]]
    if cropped:
        some = count(cropped, "picture loses", "pictures lose")
        yield f"{some} more than {MOST_CROPPED:.0%} of the area: {names(cropped)}."
    yield from (finding.sentence for finding in curate(plan))
    if guarded:
        some = count(guarded, "picture is", "pictures are")
        yield f"{some} never mirrored, as the caption says left or right: {names(guarded)}."


def _remarks_on_limits(plan: Plan) -> Iterator[str]:
    """Yield a remark on side limits that no_upscale ignores, and on each resolution whose buckets are clipped."""
    options, step = plan.train.buckets, plan.train.bucket_step
    if options.no_upscale:
        if options.min_side or options.max_side:
            yield f"{setting('buckets.no_upscale')} is on, so its min_side and max_side are ignored."
        return
    for text in sorted({text for each in plan.resolutions for text in each}):
        resolution = parse_resolution(text)
        longest = max(map(max, buckets_of(resolution, step)))
        if not resolution.fixed and 0 < options.max_side < longest:
            yield (
                f"{setting('buckets.max_side')} is {options.max_side}, which clips long shapes of the resolution "
                f"{text}, which lose pixels. Set it to {longest} to keep them."
            )


def _sample_for_table(plan: Plan, picture: int) -> Sample:
    """Choose the sample that stands for a picture in tables."""
    return next((s for s in plan.validation if s.picture == picture), None) or plan.sample(picture, 0)


def painting_remarks(plan: Plan, title: str) -> list[str]:
    """Say that an inpainting model gets no mask; title: of the model."""
    if plan.masked_views()[0]:
        return []
    return [
        f"{title} paints the white region of a mask, and no picture here has one, so it learns to paint whole "
        f"pictures. To train it for regions, link {node('masks')} to the dataset."
    ]
