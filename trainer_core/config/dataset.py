"""Settings of the pictures: concepts, captions, masks, augmentation, sizes."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .base import Config, check_path, check_text
from .clips import ClipConfig
from .rows import for_reader, needed, row

MASK_SUFFIX = "-masklabel.png"  # of masks beside pictures; files with it are never trained as pictures

MOST_CONTROLS = 3  # control pictures of a picture
STAYING = ("regularisation", "prior_prediction")  # roles of pictures that are the same at both ends of a slider

FOLDER_RULE = (  # of every input that names a folder of pictures
    "A folder inside ComfyUI's input/ or datasets/ folder, or a full path. For "
    "a folder outside ComfyUI's own the page asks once. Nothing is ever written there."
)

CaptionSource = Literal["text_file", "one_file", "table", "file_name", "folder_name", "none"]
ONE_EACH: tuple[CaptionSource, ...] = ("text_file", "table")  # in which people write a caption for each picture


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskConfig(Config):
    """Source of masks and their weight in the loss; white (1) is trained, black (0) is not."""

    SECTION: ClassVar = "dataset.concepts.masks"
    NODE: ClassVar = "Mask Loader"

    source: Literal["file", "alpha"] = row(
        "file",
        "file: a mask picture for each picture. alpha: the transparency of the pictures themselves; opaque is trained.",
    )
    suffixes: tuple[str, ...] = row(
        (MASK_SUFFIX,),
        "With source file: the mask of cat.jpg is cat + this, for example cat-masklabel.png. Several, separated by "
        "commas, are tried in this order. Each must end like a picture file.",
        label="suffix",
    )
    folder: str = row(
        "",
        f"With source file: the folder that holds the masks. Empty = they lie beside the pictures. {FOLDER_RULE}",
        placeholder="beside the pictures",
        socketless=True,
        decides="nothing",
    )
    invert: bool = row(False, "On: black is trained, white is not.")
    missing: Literal["error", "ones", "leave_out"] = row(
        "error",
        "A picture without a mask. error: stop before training and name it. ones: train all of it. leave_out: train"
        " without that picture and list it.",
    )
    unmasked_weight: float = row(
        0.1,
        "How much the rest of the picture still counts, 0 to 1. A little keeps backgrounds intact.",
        span=(0, 1, 0.01),
    )
    unmasked_probability: float = row(
        0.1, "Share of visits that train the whole picture, 0 to 1.", span=(0, 1, 0.01), advanced=True
    )
    normalize_masked_area: bool = row(
        False,
        "On: small and large masks teach equally strongly; the loss is divided by the masked share of the picture.",
        advanced=True,
    )
    threshold: float = row(
        0.0,
        "0 = grey levels are weights. Above 0: pixels at least this bright are trained fully, the others not at all.",
        span=(0, 1, 0.05),
        advanced=True,
        optional=True,
    )
    prior_weight: float = row(
        0.0,
        "Weight of a loss that keeps the unmasked part as the base model draws it (masked prior preservation). 0 = "
        "off; above 0 each step takes about a third longer.",
        span=(0, 1000, 0.1),
        advanced=True,
        optional=True,
    )

    def check(self) -> None:
        """Refuse a folder that no system can have, and masks without an ending."""
        check_path(self, "folder")
        if self.source == "file" and not (self.suffixes and all(self.suffixes)):
            raise ValueError(f"The mask suffix is empty; set {self.named('suffixes')}, for example to {MASK_SUFFIX}.")


def is_column(folder: str) -> bool:
    """Tell whether a folder of control pictures is a column of a caption table instead, as musubi-tuner names it."""
    return re.fullmatch(r"control_path(_\d+)?", folder.strip()) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig(Config):
    """Folders of control pictures, found by the names of the pictures, and what they are for."""

    SECTION: ClassVar = "dataset.concepts.controls"
    NODE: ClassVar = "Control Pictures"

    folders: tuple[str, ...] = needed(
        "The folder of control pictures. That of cat.jpg is cat with any picture ending, in the same sub-folder or "
        f"directly in the folder. control_path takes the files that a column of a caption table names. {FOLDER_RULE}",
        placeholder="my_character_before",
        socketless=True,
        label="folder",
        decides="nothing",
    )
    fit: Literal["as_picture", "whole"] = row(
        "as_picture",
        "as_picture: control pictures are cut exactly as their pictures, so both need the same shape. whole: they "
        "may have any shape and are not cut; for references that show a subject elsewhere. Both are mirrored "
        "together with their pictures.",
        optional=True,
    )
    use: Literal["edit", "slider"] = row(
        "edit",
        "edit (default): an edit model sees the control pictures. slider: each shows less of what its picture shows"
        " more of, as a neutral face beside a smile; the LoRA draws more of it at strength 1 and less at -1, with "
        "any model. One folder, fit as_picture. Steps take about twice as long.",
        optional=True,
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """List the columns of a caption table among the folders."""
        return tuple(filter(is_column, self.folders))

    @property
    def paired(self) -> bool:
        """Tell whether each is the other end of a slider."""
        return self.use == "slider"

    @property
    def summary(self) -> str:
        """Say what the folders are, in few words: the other end of pairs, or how many a model sees."""
        return "other end" if self.paired else str(len(self.folders))

    def check(self) -> None:
        """Refuse a slider of several folders or of other cuts, and folders that are none."""
        if self.paired and len(self.folders) > 1:
            raise ValueError(
                f"A slider has one other end, and {self.NODE} has {len(self.folders)} folders; leave "
                + for_reader(f"folder_2 and folder_3 of {self.NODE} empty.", f"one in {self.named('folders')}.")
            )
        if self.paired and self.fit == "whole":
            raise ValueError(f"Both ends of a slider are cut alike; set {self.named('fit')} to as_picture.")
        if not 1 <= len(self.folders) <= MOST_CONTROLS:
            raise ValueError(
                f"There are {len(self.folders)} folders of control pictures; set 1 to {MOST_CONTROLS} of them in "
                f"{self.named('folders')}."
            )
        for folder in self.folders:
            check_text(folder, f"A {self.named('folders')}")
        if not all(map(str.strip, self.folders)):
            raise ValueError(f"A {self.named('folders')} is empty; set it to the folder of the control pictures.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionConfig(Config):
    """Source of captions, and the changes to them at each visit; new ones come at the end, as on the node."""

    SECTION: ClassVar = "dataset.concepts.captions"
    NODE: ClassVar = "Captions"

    prefix: str = row(
        "",
        "The trigger word for your prompts. It is put in front of every caption, with a space between. Stays in "
        "front when tags are shuffled. Empty = nothing.",
        placeholder="a made-up word",
        label="trigger_word",
        node="Concept Dataset",
    )
    source: CaptionSource = row(
        "text_file",
        "text_file: a text file of the same name beside each picture. one_file: caption_file holds the lines for "
        "all pictures. table: metadata.jsonl, CSV or JSON, with file names and captions. file_name, folder_name: "
        "the name is the caption. none: no captions but the trigger word.",
        label="captions_from",
        node="Concept Dataset",
    )
    shuffle: bool = row(False, "Shuffles the comma-separated tags of a caption at each visit.", label="shuffle_tags")
    keep: int = row(
        0,
        "How many tags at the beginning are never shuffled or dropped.",
        span=(0, 1000),
        label="keep_tags",
    )
    tag_dropout: float = row(
        0.0, "Chance that each of the other tags is dropped at a visit, 0 to 1.", span=(0, 1, 0.01)
    )
    dropout: float = row(
        0.0,
        "Chance that a visit has no caption at all, 0 to 1. -1: as suits the model, mostly 0.05; 0 for validation "
        "and prior_prediction.",
        span=(0, 1, 0.01),
        open=-1,
        label="caption_dropout",
    )
    suffix: str = row("", "Put after every caption. Empty = nothing.", label="caption_suffix")
    extensions: tuple[str, ...] = row(
        (".txt",),
        "Ending of the caption files: .txt, .caption, .tags. Several with commas between are tried in this order.",
        label="caption_extension",
    )
    missing: Literal["error", "empty", "class_prompt", "folder_name"] = row(
        "error",
        "A picture without a caption file. error: stop before training and name it. empty: train it with an empty "
        "caption. class_prompt: train it with the text of class_prompt. folder_name: train it with the name of its "
        "folder, without a number before it.",
        label="missing_caption",
    )
    file: str = row(
        "",
        "The file with the captions, in the folder, or a full path inside a folder that may be read. Empty with "
        "table = metadata.jsonl, metadata.csv and so on are searched for.",
        placeholder="captions.txt",
        socketless=True,
        acts_with=("source", ("one_file", "table")),
        label="caption_file",
        node="Concept Dataset",
        decides="nothing",
    )
    lines: Literal["draw", "first", "join"] = row(
        "draw",
        "A caption of several lines. draw: one line at each visit, all equally often. first: only the first line. "
        "join: all lines as one caption.",
        advanced=True,
        label="caption_lines",
    )
    encoding: str = row(
        "auto",
        "Encoding of the caption files. auto reads UTF-8 and UTF-16 and reports any other file by name. For old "
        "files choose theirs: cp1252, shift_jis, gb18030, cp1251 ...",
        advanced=True,
        label="caption_encoding",
    )
    wildcards: bool = row(
        False,
        "On: {red|blue} in a caption becomes one of the two at each visit; write {{ and }} for braces.",
        advanced=True,
    )
    separator: str = row(",", "The separator between the tags of a caption.", advanced=True, label="tag_separator")
    tag_dropout_mode: Literal["uniform", "weighted"] = row(
        "uniform",
        "uniform: each tag is dropped with the chance tag_dropout. weighted: the chance grows from tag to tag, up "
        "to tag_dropout for the last.",
        advanced=True,
    )
    protected: tuple[str, ...] = row(
        (), "Tags that are never dropped, separated by commas.", advanced=True, label="protected_tags"
    )
    variants: int = row(
        -1,
        "How many orders and draws of each caption are encoded and used in turn. 0: a new one at every visit. -1: "
        "8, or new ones where text encoders are trained.",
        span=(0, 10_000),
        open=-1,
        advanced=True,
        label="caption_variants",
    )
    class_prompt: str = row(
        "",
        "For missing_caption class_prompt: the caption of every picture without one. Trigger word and suffix are added "
        "as to any other.",
        placeholder="a cat",
    )
    tag_warmup_steps: int = row(
        0,
        "Token warm-up: over so many first steps of the run the tags in use grow from tag_warmup_min to all, in the"
        " caption's order. Tags of keep_tags and protected_tags are always there. 0 = off.",
        span=(0, 1_000_000),
        advanced=True,
    )
    tag_warmup_min: int = row(
        1,
        "For tag_warmup_steps: how many tags of a caption are in use at the first step.",
        span=(0, 1000),
        advanced=True,
    )
    dropout_every_n_epochs: int = row(
        0,
        "In every n-th epoch all captions of this concept are empty, beside caption_dropout. 0 = in none.",
        span=(0, 100_000),
        advanced=True,
        label="caption_dropout_every_n_epochs",
    )

    def check(self) -> None:
        """Refuse what no file, ending, separator or encoding is, and a source without its text."""
        check_path(self, "file")
        for extension in self.extensions or ("",):
            if not re.fullmatch(r"\.[^/\\]+", extension):
                raise ValueError(f"{self.named('extensions')} is {extension!r:.80}; it must start with a dot, as .txt.")
        if not self.separator.strip():
            raise ValueError(f"{self.named('separator')} is empty; set it to the character between tags, as a comma.")
        if self.source == "one_file" and not self.file.strip():
            raise ValueError(f"captions_from is one_file; set {self.named('file')} to the file with all captions.")
        if self.missing == "class_prompt" and not self.class_prompt.strip():
            raise ValueError(
                f"missing_caption is class_prompt, and there is none; set {self.named('class_prompt')} to the "
                "caption of pictures without one, for example to a cat."
            )
        if self.encoding != "auto":
            try:
                codecs.lookup(self.encoding)
            except (LookupError, ValueError) as error:
                raise ValueError(
                    f"caption_encoding is {self.encoding!r:.80}, an unknown encoding; set "
                    f"{self.named('encoding')} to auto, or for example to cp1252, shift_jis or gb18030."
                ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig(Config):
    """Augmentation: each picture has `variants` cached versions, used in turn."""

    SECTION: ClassVar = "dataset.concepts.augment"
    NODE: ClassVar = "Augmentation"

    variants: int = row(4, "Versions of each picture, used in turn. More varies more and caches more.", span=(1, 1000))
    crop_jitter: float = row(
        0.0, "How far the crop may move off the centre: 0 = not at all, 1 = up to the edge.", span=(0, 1, 0.01)
    )
    zoom: float = row(
        0.0,
        "Enlarges by up to this share before the crop, so that the crop of a square picture can move.",
        span=(0, 1, 0.01),
    )
    rotation: float = row(
        0.0,
        "Rotates by up to this many degrees either way. Corners are cropped off, nothing is filled in.",
        span=(0, 45, 0.5),
        round=0.001,
    )
    brightness: float = row(0.0, "Brightness varies by up to this share either way.", span=(0, 1, 0.01))
    contrast: float = row(0.0, "Contrast varies by up to this share either way.", span=(0, 1, 0.01))
    saturation: float = row(0.0, "Saturation varies by up to this share either way.", span=(0, 1, 0.01))
    hue: float = row(0.0, "Colours shift by up to this share of the colour circle either way.", span=(0, 0.5, 0.01))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConceptConfig(Config):
    """One folder of pictures: its role, repeats, captions and augmentation."""

    SECTION: ClassVar = "dataset.concepts"
    NODE: ClassVar = "Concept Dataset"

    folder: str = needed(
        f"The folder that holds your pictures. {FOLDER_RULE} atelier:concept_example is a small example that comes "
        "with the pack.",
        placeholder="my_character",
        socketless=True,
        open="",
        decides="nothing",
    )
    repeats: float = row(
        1.0,
        "How often each picture is trained in an epoch. Balances concepts of different size. 0.5 trains each "
        "picture in every other epoch.",
        span=(0.001, 100_000, 0.5),
        round=0.001,
    )
    flip: bool = row(
        False,
        "Mirrors pictures left to right at half of the visits. Not for faces, text or anything whose sides differ. "
        "Pictures whose caption says left or right are never mirrored.",
        node="Pictures",
    )
    loss_weight: float = row(
        1.0,
        "Multiplies the loss of these pictures; 1 = as it is, 0 = they teach nothing.",
        span=(0, 1000, 0.1),
        node="Pictures",
    )
    recursive: bool = row(True, "Also uses the pictures in sub-folders.", node="Pictures")
    role: Literal["train", "regularisation", "validation", "prior_prediction"] = row(
        "train",
        "train: these pictures teach the LoRA. regularisation: pictures of the general class that keep the model as"
        " it was (prior preservation); visited as often as all training pictures together, unless samples is set. "
        "validation: never trained, only their loss is measured. prior_prediction: with these captions the model "
        "keeps its old predictions; use the training pictures again, with captions of the general class.",
    )
    resolutions: tuple[str, ...] = row(
        (),
        "Sizes for this concept alone, separated by commas: 512 = about 512 x 512 pixels in the shape of each "
        "picture, 640x384 = exactly that. Empty = as in Train LoRA or Buckets.",
        placeholder="as in Train LoRA",
        node="Pictures",
    )
    samples: int = row(
        0,
        "Visits of this concept per epoch, spread over its pictures in turn. 0 = use repeats.",
        span=(0, 10_000_000),
        node="Pictures",
    )
    folder_repeats: bool = row(
        True,
        "Sub-folders named like 10_cat multiply the repeats of their pictures by 10, as in kohya's trainer (up to "
        "1000).",
        node="Pictures",
    )
    background: str = row("white", "Background of transparent pictures: a colour's name or #rrggbb.", node="Pictures")
    on_problem: Literal["stop", "leave_out"] = row(
        "stop",
        "A picture that cannot be used (broken, too small, caption or mask unreadable). stop: name all of them "
        "before training. leave_out: train the others and list them.",
        node="Pictures",
    )
    min_side: int = row(
        16,
        "Pixels: a picture with a shorter side cannot be used; on_problem decides.",
        span=(1, 8192),
        node="Pictures",
        label="min_picture_side",
    )
    batch_size: int = row(
        0,
        "Pictures per batch of this concept, 1 to 4096; its batches then hold no other concept. 0 (default) = that of "
        "Train LoRA.",
        span=(1, 4096),
        open=0,
        advanced=True,
        optional=True,
        node="Pictures",
    )
    leave_out: tuple[str, ...] = row(
        (),
        "Pictures that are not used: names within the folder, separated by commas. * stands for any text, ? for any"
        " character. The buttons of Dataset Preview fill it.",
        socketless=True,
        advanced=True,
        decides="nothing",
    )
    captions: CaptionConfig = field(default_factory=CaptionConfig)
    augment: AugmentConfig | None = None
    masks: MaskConfig | None = None
    controls: ControlConfig | None = None
    clips: ClipConfig | None = None  # None: clips are not taken, or as suits the model

    @property
    def keeps_prediction(self) -> bool:
        """Tell whether these captions keep the base model's prediction."""
        return self.role == "prior_prediction"

    @property
    def may_repeat(self) -> bool:
        """Tell whether its pictures may be those of another concept: they teach nothing, only their captions count."""
        return self.keeps_prediction

    @property
    def takes_clips(self) -> bool:
        """Tell whether the model is one of clips; False where the model is not known."""
        return self.clips is not None and self.clips.step > 0

    @property
    def paired(self) -> bool:
        """Tell whether its pictures have others at the other end of a slider."""
        return self.controls is not None and self.controls.paired

    @property
    def shown(self) -> ControlConfig | None:
        """The control pictures that an edit model sees; None: it has none, or they are the other end of a slider."""
        return None if self.paired else self.controls

    def with_controls(self, controls: ControlConfig) -> ConceptConfig:
        """Give it control pictures, unless it has some, or its pictures are the same at both ends of a slider."""
        stays = controls.paired and self.role in STAYING
        return self if self.controls or stays else self.replace(controls=controls)

    def check(self) -> None:
        """Refuse what no folder, resolution or colour is."""
        check_path(self, "folder")
        _check_resolutions(self.resolutions)
        from PIL import ImageColor  # here, so that runs are listed without it

        try:
            ImageColor.getrgb(self.background)
        except ValueError as error:
            raise ValueError(
                f"background is {self.background!r:.80}; set {self.named('background')} to a colour, for example "
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

    def check_own_roles(self, found: str) -> None:
        """Raise ValueError for single pictures with a role of their own if these are pairs; found: a sentence on it."""
        if self.paired:
            raise ValueError(f"{found[:-1]}; both ends of a pair need the role of their concept, so remove it there.")


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketConfig(Config):
    """The sizes that pictures are trained at, beyond one resolution and step."""

    SECTION: ClassVar = "train.buckets"
    NODE: ClassVar = "Buckets"

    resolutions: tuple[str, ...] = row(
        (),
        "Several sizes, separated by commas: 512 = about 512 x 512 pixels in the shape nearest to each picture, "
        "640x384 = exactly that. Empty = the resolution of Train LoRA.",
        placeholder="512, 640, 768",
    )
    resolution_mode: Literal["draw", "all"] = row(
        "draw",
        "With several resolutions. draw: each visit uses the next one, all equally often. all: each visit is "
        "repeated at every resolution, so epochs are longer.",
    )
    min_side: int = row(
        0,
        "Pixels: shapes with a shorter side are not used. 0 = all. no_upscale ignores it.",
        span=(0, 8192, 8),
        advanced=True,
    )
    max_side: int = row(
        0,
        "Pixels: longer sides are clipped to it, so such shapes have fewer pixels. 0 = no limit. no_upscale ignores"
        " it.",
        span=(0, 8192, 8),
        advanced=True,
    )
    no_upscale: bool = row(
        False, "Train pictures smaller than the resolution at their own size instead of enlarging them."
    )
    small_buckets: Literal["keep", "merge"] = row(
        "keep",
        "A shape with fewer pictures than a batch. keep: its batches are smaller, and weigh as much as their "
        "pictures. merge: its pictures go to the nearest shape with enough of them, cropped more.",
    )
    mix_concepts: bool = row(
        True, "On: a batch may hold pictures of several concepts. Off: every batch holds one concept.", advanced=True
    )
    shapes: Literal["atelier", "sd_scripts", "onetrainer", "ai_toolkit", "musubi", "simpletuner"] = row(
        "atelier",
        "Which shapes there are, and which one a picture gets. atelier (default): the nearest of many, the same for "
        "upright and lying pictures. The others: as that trainer cuts pictures, for runs that continue its work.",
        advanced=True,
        optional=True,
    )

    def check(self) -> None:
        """Refuse what no resolution is, and limits that leave no size."""
        _check_resolutions(self.resolutions)
        if 0 < self.max_side < self.min_side:
            raise ValueError(
                f"{self.named('max_side')} is {self.max_side}, below min_side {self.min_side}; swap the two."
            )


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
