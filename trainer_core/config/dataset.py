"""Settings of the pictures: concepts, captions, masks, augmentation, sizes."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Config, check_choices, check_open, check_path, check_range, check_text

MASK_SUFFIX = "-masklabel.png"  # of masks beside pictures; files with it are never trained as pictures

MOST_CONTROLS = 3  # control pictures of a picture
STAYING = ("regularisation", "prior_prediction")  # roles of pictures that are the same at both ends of a slider

CaptionSource = Literal["text_file", "one_file", "table", "file_name", "folder_name", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskConfig(Config):
    """Source of masks and their weight in the loss; white (1) is trained, black (0) is not."""

    SECTION: ClassVar = "dataset.concepts.masks"
    NODE: ClassVar = "Mask Loader"

    source: Literal["file", "alpha"] = "file"
    suffixes: tuple[str, ...] = (MASK_SUFFIX,)  # a mask is <picture name without extension><suffix>, first found
    folder: str = ""  # for source "file": masks lie here instead of beside the pictures
    invert: bool = False
    threshold: float = 0.0  # 0 keeps grey levels; else values of at least this become 1, others 0
    missing: Literal["error", "ones", "leave_out"] = "error"
    unmasked_weight: float = 0.1  # floor of the mask, 0..1
    unmasked_probability: float = 0.1  # share of visits trained without the mask, 0..1
    normalize_masked_area: bool = False  # divide the loss by the mean of the mask
    prior_weight: float = 0.0  # weight of the base model's prediction as the target outside the mask, >= 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_path(self, "folder")
        check_range(self, "threshold", 0, 1)
        check_range(self, "unmasked_weight", 0, 1)
        check_range(self, "unmasked_probability", 0, 1)
        check_range(self, "prior_weight", 0, 1000)
        if self.source == "file" and not (self.suffixes and all(self.suffixes)):
            raise ValueError(f"The mask suffix is empty; set suffix of Mask Loader, for example to {MASK_SUFFIX}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig(Config):
    """Folders of control pictures, found by the names of the pictures, and what they are for."""

    SECTION: ClassVar = "dataset.concepts.controls"
    NODE: ClassVar = "Control Pictures"

    folders: tuple[str, ...]  # one to MOST_CONTROLS, in the order in which the model sees them
    # as_picture: cut exactly as the picture, so of its shape. whole: any shape, uncut, of about the bucket's area
    fit: Literal["as_picture", "whole"] = "as_picture"
    # edit: an edit model sees them beside the caption. slider: each shows less of what its picture shows more of
    use: Literal["edit", "slider"] = "edit"

    def __post_init__(self) -> None:
        check_choices(self)
        if self.use == "slider" and len(self.folders) > 1:
            raise ValueError(
                f"A slider has one other end, and Control Pictures has {len(self.folders)} folders; leave folder_2 and "
                "folder_3 of Control Pictures empty."
            )
        if self.use == "slider" and self.fit == "whole":
            raise ValueError("Both ends of a slider are cut alike; set fit of Control Pictures to as_picture.")
        if not 1 <= len(self.folders) <= MOST_CONTROLS:
            raise ValueError(
                f"There are {len(self.folders)} folders of control pictures; set 1 to {MOST_CONTROLS} of them in "
                "Control Pictures."
            )
        for folder in self.folders:
            check_text(folder, "A folder of Control Pictures")
        if not all(map(str.strip, self.folders)):
            raise ValueError("A folder of Control Pictures is empty; set it to the folder of the control pictures.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionConfig(Config):
    """Source of captions, and the changes to them at each visit."""

    SECTION: ClassVar = "dataset.concepts.captions"
    NODE: ClassVar = "Concept Dataset"

    source: CaptionSource = "text_file"
    extensions: tuple[str, ...] = (".txt",)  # of files beside the pictures; tried in this order
    file: str = ""  # of sources one_file and table: absolute, or inside the concept's folder; "" finds the table
    encoding: str = "auto"  # of text files: auto is UTF-8 or what the byte order mark says, else a codec's name
    lines: Literal["draw", "first", "join"] = "draw"  # a text of several lines: one at each visit, the first, all
    missing: Literal["error", "empty", "class_prompt"] = "error"
    class_prompt: str = ""  # the caption of pictures that have none, for missing "class_prompt"
    prefix: str = ""  # put before every caption, after any shuffling (the trigger word)
    suffix: str = ""
    separator: str = ","  # between tags
    shuffle: bool = False  # shuffle the tags at each visit
    keep: int = 0  # number of first tags that stay in place; ||| in a caption overrides it
    tag_dropout: float = 0.0  # chance to leave out each other tag, 0..1
    tag_dropout_mode: Literal["uniform", "weighted"] = "uniform"  # weighted: later tags are left out more often
    protected: tuple[str, ...] = ()  # tags that are never left out
    tag_warmup_steps: int = 0  # the tags in use grow to all of them over so many first steps; 0 = all at once
    tag_warmup_min: int = 1  # tags in use at the first step, beside those that stay in place
    dropout: float = 0.0  # chance of an empty caption, 0..1; -1 = as suits the model
    dropout_every_n_epochs: int = 0  # in every n-th epoch all captions are empty; 0 = in none
    wildcards: bool = False  # {a|b} draws one at each visit; {{ and }} are braces
    # Orders and draws of each line, used in turn; 0: new ones at every visit; -1: VARIANTS where captions are encoded
    # before the training, else 0
    variants: int = -1

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "keep", 0)
        check_range(self, "tag_dropout", 0, 1)
        check_open(self, "dropout", -1, 0, 1)
        check_open(self, "variants", -1, 0, 10_000)
        for name in ("tag_warmup_steps", "tag_warmup_min", "dropout_every_n_epochs"):
            check_range(self, name, 0)
        check_path(self, "file")
        for extension in self.extensions or ("",):
            if not re.fullmatch(r"\.[^/\\]+", extension):
                raise ValueError(
                    f"caption_extension of Concept Dataset is {extension!r:.80}; it must start with a dot, as .txt."
                )
        if not self.separator.strip():
            raise ValueError(
                "tag_separator of Concept Dataset is empty; set it to the character between tags, as a comma."
            )
        if self.source == "one_file" and not self.file.strip():
            raise ValueError(
                "caption_source is one_file; set caption_file of Concept Dataset to the file with all captions."
            )
        if self.missing == "class_prompt" and not self.class_prompt.strip():
            raise ValueError(
                "missing_caption is class_prompt, and there is none; set class_prompt of Concept Dataset to the "
                "caption of pictures without one, for example to a cat."
            )
        if self.encoding != "auto":
            try:
                codecs.lookup(self.encoding)
            except (LookupError, ValueError) as error:
                raise ValueError(
                    f"caption_encoding is {self.encoding!r:.80}, an unknown encoding; set caption_encoding of Concept "
                    "Dataset to auto, or for example to cp1252, shift_jis or gb18030."
                ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig(Config):
    """Augmentation: each picture has `variants` cached versions, used in turn."""

    SECTION: ClassVar = "dataset.concepts.augment"
    NODE: ClassVar = "Augmentation"

    variants: int = 4
    crop_jitter: float = 0.0  # offset of the crop from the centre: 0 = none, 1 = up to the picture's edge
    zoom: float = 0.0  # enlarges by up to this share before the crop, 0..1
    rotation: float = 0.0  # turns by up to this many degrees either way, 0..45; corners are cropped, not filled
    brightness: float = 0.0  # each multiplies by 1 - x to 1 + x, 0..1
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # shifts by up to this share of a turn of the colour circle, 0..0.5

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "variants", 1, 1000)
        for name in ("crop_jitter", "zoom", "brightness", "contrast", "saturation"):
            check_range(self, name, 0, 1)
        check_range(self, "rotation", 0, 45)
        check_range(self, "hue", 0, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig(Config):
    """One folder of pictures: its role, repeats, captions and augmentation."""

    SECTION: ClassVar = "dataset.concepts"
    NODE: ClassVar = "Concept Dataset"

    folder: str
    recursive: bool = True
    role: Literal["train", "regularisation", "validation", "prior_prediction"] = "train"
    repeats: float = 1.0  # visits of each picture per epoch, > 0; 0.5 visits each in every other epoch
    samples: int = 0  # visits of the whole concept per epoch; 0 = from repeats
    folder_repeats: bool = True  # sub-folders named as 10_cat repeat 10 times more, as sd-scripts reads them
    loss_weight: float = 1.0  # multiplies the loss of these pictures, >= 0
    resolutions: tuple[str, ...] = ()  # "512": about that area, "640x384": that size; () = the run's
    flip: bool = False  # mirror left-right at half of the visits; not where the caption says left or right
    background: str = "white"  # colour behind transparent pictures: a name or #rrggbb
    min_side: int = 16  # pixels; a picture with a shorter side is a problem
    leave_out: tuple[str, ...] = ()  # names of pictures that are not used; * and ? stand for any text and character
    on_problem: Literal["stop", "leave_out"] = "stop"  # for unusable pictures: stop the run, or list and skip them
    captions: CaptionConfig = field(default_factory=CaptionConfig)
    augment: AugmentConfig | None = None
    masks: MaskConfig | None = None
    controls: ControlConfig | None = None

    @property
    def paired(self) -> bool:
        """Tell whether its pictures have others at the other end of a slider."""
        return self.controls is not None and self.controls.use == "slider"

    def __post_init__(self) -> None:
        check_choices(self)
        check_path(self, "folder")
        check_range(self, "repeats", 0.001, 1e6)
        check_range(self, "samples", 0)
        check_range(self, "loss_weight", 0)
        check_range(self, "min_side", 1)
        _check_resolutions(self.resolutions)
        from PIL import ImageColor  # here, so that runs are listed without it

        try:
            ImageColor.getrgb(self.background)
        except ValueError as error:
            raise ValueError(
                f"background is {self.background!r:.80}; set background of Concept Dataset to a colour, for example "
                "white or #808080."
            ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig(Config):
    """The concepts that are trained together."""

    concepts: tuple[ConceptConfig, ...] = ()

    @property
    def paired(self) -> bool:
        """Tell whether a slider is trained from pairs of pictures."""
        return any(concept.paired for concept in self.concepts)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig(Config):
    """The sizes that pictures are trained at, beyond one resolution and step."""

    SECTION: ClassVar = "train.buckets"
    NODE: ClassVar = "Buckets"

    resolutions: tuple[str, ...] = ()  # "512": buckets of about that area, "640x384": that size; () = the run's one
    resolution_mode: Literal["draw", "all"] = "draw"  # draw: a visit takes the next one; all: every one
    min_side: int = 0  # pixels; buckets with a shorter side are not used, 0 = all
    max_side: int = 0  # pixels; longer sides of buckets are clipped to it, 0 = none
    no_upscale: bool = False  # a picture smaller than the resolution is trained at its own size
    small_buckets: Literal["keep", "merge"] = "keep"  # merge: too few pictures for a batch go to the nearest bucket
    mix_concepts: bool = True  # a batch may hold pictures of several concepts

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "min_side", 0)
        check_range(self, "max_side", 0)
        _check_resolutions(self.resolutions)
        if 0 < self.max_side < self.min_side:
            raise ValueError(f"max_side {self.max_side} of Buckets is below min_side {self.min_side}; swap the two.")


def _check_resolutions(resolutions: tuple[str, ...]) -> None:
    """Refuse anything but "512" and "640x384" with sides of 64 to 8192 pixels, multiples of 8."""
    for resolution in resolutions:
        match = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", resolution)
        sides = [int(side) for side in match.groups() if side] if match else []
        if not sides or not all(64 <= side <= 8192 and side % 8 == 0 for side in sides):
            raise ValueError(
                f"The resolution {resolution[:50]!r} is invalid; write numbers as 512 or sizes as 640x384, separated "
                "by commas. Sides must be multiples of 8 between 64 and 8192."
            )
