"""Settings of the network: the LoRA or related layers that are attached to the base model and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .algorithms import ALGORITHMS, with_setting
from .base import Config
from .embedding import EmbeddingConfig
from .rows import aside, described, row, rows_of

Preset = Literal["attn-only", "attn-mlp", "full", "full-lin", "unet-transformer-only", "unet-convblock-only"]
AUTO = "auto"  # the preset that suits the model
DENOISER_ONLY = ("unet-transformer-only", "unet-convblock-only")  # presets that train no text encoder
LAYER_FIELDS = ("include", "exclude", "train_norm", "block_ranks", "block_alphas", "block_weights", "kind_ranks")
LAYER_KINDS = ("attention", "mlp", "modulation", "convolution", "other")
NUMBERS = ("block_ranks", "block_alphas", "conv_block_ranks", "conv_block_alphas", "block_weights")  # of each block
MOST_PATTERNS, LONGEST_PATTERN = 200, 200  # of include and exclude; characters
MOST_NUMBERS = 1000  # of a list for each block
SPATIAL = ("full", "unet-convblock-only")  # presets that train 3x3 convolutions
STARTS_AS = ("dora", "tucker", "rs_lora", "use_scalar", "init")  # options of a new network, not of a continued one
FORM = (*STARTS_AS, "factor", "decompose_both", "full_matrix")  # which tensors a layer has
AGAINST = "Against overfitting; 0.1 to 0.3 is usual, 0 = never. 0 to 0.99."  # a chance to drop something


@dataclass(frozen=True, kw_only=True, slots=True)
class BeneathConfig(Config):
    """A LoRA that is merged into the base model before training; the new LoRA is trained on top of it."""

    SECTION: ClassVar = "lora.beneath"
    NODE: ClassVar = "Existing LoRA"

    path: str = aside()  # a .safetensors file
    strength: float = row(
        1.0,
        "With beneath: how strongly the LoRA is added, -10 to 10. Use the same strength when you sample. A "
        "continued LoRA always starts as it is.",
        span=(-10, 10, 0.05),
        round=0.001,
    )
    training_only: bool = row(
        False,
        "With beneath, for a training adapter of a distilled model: the LoRA is on the model in training alone. "
        "Samples and MODEL of Train LoRA go without it. For Use Connected Model only.",
        optional=True,
        decides="nothing",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Config):
    """The trained network: its algorithm, ranks, layers and options."""

    SECTION: ClassVar = "lora"
    NODE: ClassVar = "LoRA Config"

    rank: int = row(
        16,
        "Rank of each layer (network dim). 8 to 32 suits a character or a style; the file grows with it. LoHa needs "
        "only its square root. 0: as suits the model, 16 for Stable Diffusion.",
        span=(1, 4096),
        open=0,
    )
    alpha: float = row(  # scale = alpha / rank; a constant, never trained
        16.0,
        "The LoRA is scaled by alpha / rank. Equal to the rank = full strength; lower acts like a lower learning "
        "rate. 0 = the rank.",
        span=(0, 65536, 0.5),
        open=0.0,
    )
    preset: Literal["auto", Preset] = row(
        "attn-mlp",
        "Which layers are trained. auto: attn-mlp, and full for the toy model. attn-only: attention. attn-mlp: "
        "attention and the layers between (what most LoRAs train). full: all of these and the convolutions; best "
        "for styles. full-lin: full without 3x3 convolutions. unet-transformer-only: attn-mlp, never the text "
        "encoders. unet-convblock-only: the layers outside attention, never the text encoders. The last two are for "
        "UNets.",
        open=AUTO,
    )
    conv_rank: int = row(
        0,
        "Rank of the 3x3 convolutions with the presets full and unet-convblock-only; 0 = the same as rank.",
        span=(0, 4096),
        advanced=True,
    )
    conv_alpha: float = row(
        0.0,
        "Alpha of the 3x3 convolutions with the presets full and unet-convblock-only; 0 = the same as alpha.",
        span=(0, 65536, 0.5),
        advanced=True,
    )
    dtype: Literal["float32", "bfloat16"] = row(
        "float32",
        "Precision of the LoRA's own weights while training. bfloat16 halves their memory; stochastic rounding "
        "keeps small steps. float32 is exact.",
        advanced=True,
        optional=True,
    )
    algorithm: str = row(
        "lora",
        described({name: each.words for name, each in ALGORITHMS.items()}),
        choices=tuple(ALGORITHMS),
        optional=True,
    )
    factor: int = row(
        -1,
        "How the sides of a weight are split: a larger factor, up to the square root of the side, makes a smaller "
        "file. -1 = as square as possible, the smallest. -1 to 1024.",
        span=(1, 1024),
        open=-1,
        optional=True,
        acts_with=("algorithm", with_setting("factor")),
    )
    decompose_both: bool = row(
        False,
        "Decomposes the small factor to the rank, too, where the rank is smaller. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("decompose_both")),
    )
    full_matrix: bool = row(
        False,
        "Trains both factors whole: rank and alpha have no effect, and the file is larger. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("full_matrix")),
    )
    dora: bool = row(
        False,
        "DoRA: trains direction and magnitude of the weights apart, along the input axis, as ComfyUI applies it. "
        "Closer to full training at the same rank; slower. Off by default.",
        optional=True,
        acts_with=("algorithm", with_setting("dora")),
    )
    tucker: bool = row(
        False,
        "Splits 3x3 convolutions into three factors (Tucker), for a smaller file. Only with a preset that trains "
        "them. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("tucker")),
    )
    init: Literal["default", "orthogonal", "pissa", "svd_down", "eva", "lora_ga"] = row(
        "default",
        "Initial weights. default: random, without effect on the model. orthogonal: the same with orthogonal rows. "
        "pissa: the main directions of the model's own weights, which trains faster; the start takes longer. svd_down:"
        " as default, with down along those directions. eva: with down along the main directions of the layers' "
        "inputs. lora_ga: along those of the first gradients. The last two look at the first batches before step 1.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("init")),
    )
    dropout: float = row(
        0.0,
        f"Dropout: chance that a value between down and up is set to 0 in training. {AGAINST}",
        span=(0, 0.99, 0.05),
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("dropout")),
    )
    rs_lora: bool = row(
        False,
        "rsLoRA: scale alpha / sqrt(rank) instead of alpha / rank, so that high ranks (64 and more) do not train "
        "too slowly. The file's alpha makes every program apply it. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("rs_lora")),
    )
    rank_dropout: float = row(
        0.0,
        f"Chance that each rank is dropped, drawn for each picture. {AGAINST}",
        span=(0, 0.99, 0.05),
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("rank_dropout")),
    )
    rank_dropout_scale: bool = row(
        True,
        "With rank_dropout: scales the remaining ranks up to make up for the dropped ones. On by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("rank_dropout_scale")),
    )
    use_scalar: bool = row(
        False,
        "Multiplies each layer by a trained number that begins at 0; it is merged into the weights when saved. Off "
        "by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("use_scalar")),
    )
    scale_weight_norms: float = row(
        0.0,
        "Max norm: after each step a larger change of a layer is scaled down to this norm, against overfitting; 1 "
        "is usual, 0 = no limit. 0 to 1000.",
        span=(0, 1000, 0.1),
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("scale_weight_norms")),
    )
    constraint: float = row(
        0.0,
        "The largest rotation; 0 = no limit. 0 to 1000.",
        span=(0, 1000, 0.001),
        round=1e-6,
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("constraint")),
    )
    bake: bool = row(
        False,
        "Saves the nearest plain LoRA, for programs that do not know this algorithm. Less exact. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("bake")),
        decides="result",  # another file of the same weights
    )
    module_dropout: float = row(
        0.0,
        f"Chance that a layer's change is dropped, drawn for each picture. {AGAINST}",
        span=(0, 0.99, 0.05),
        advanced=True,
        optional=True,
    )
    train_norm: bool = row(
        False,
        "Also trains the UNet's norm layers among those of the preset. Off by default.",
        advanced=True,
        optional=True,
    )
    include: tuple[str, ...] = row(
        (),
        "Layers to train besides the preset's: patterns separated by commas or one per line. * stands for any "
        "letters, ? for one. A pattern must match a whole name in diffusers' or LoRA files' form: mid_block.*, "
        "*attn2.to_k, lora_te1_*_fc1; linked models have ComfyUI's names. A pattern that matches no layer is an "
        "error. Empty = none.",
        multiline=True,
        advanced=True,
        optional=True,
    )
    exclude: tuple[str, ...] = row(
        (),
        "Layers not to train; patterns as for include. Each must match a layer that would be trained otherwise. "
        "Empty = none.",
        multiline=True,
        advanced=True,
        optional=True,
    )
    block_ranks: tuple[int, ...] = row(
        (),
        "Rank of each block of the UNet, in the order of kohya's block_dims: 25 numbers for Stable Diffusion 1 and "
        "2, 23 for XL, one for each block of other models, separated by commas; 16*9 means nine times 16. 0 = the "
        "block is not trained. Empty = rank everywhere.",
        span=(0, 4096),
        advanced=True,
        optional=True,
    )
    block_alphas: tuple[float, ...] = row(
        (),
        "Alpha of each block, as many numbers as block_ranks; 0 = the block's rank. Empty = alpha everywhere.",
        low=0,
        advanced=True,
        optional=True,
    )
    conv_block_ranks: tuple[int, ...] = row(
        (),
        "Rank of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = those of the block are not "
        "trained. Empty = conv_rank, or the rank of the block.",
        span=(0, 4096),
        advanced=True,
        optional=True,
    )
    conv_block_alphas: tuple[float, ...] = row(
        (),
        "Alpha of the 3x3 convolutions of each block, as many numbers as block_ranks; 0 = their rank. Empty = "
        "conv_alpha, or the alpha of the block.",
        low=0,
        advanced=True,
        optional=True,
    )
    block_weights: tuple[float, ...] = row(
        (),
        "Multiplies the learning rate of each block, 0 or more: as many numbers as block_ranks, or the 17 (XL: 12) "
        "of block-weight extensions, where the first is for the text encoders and for blocks without attention. 0 = "
        "not trained. Empty = 1 everywhere.",
        low=0,
        advanced=True,
        optional=True,
    )
    names: Literal["comfy", "peft"] = row(
        "comfy",
        "Names of the layers in the file. comfy: kohya's, as sd-scripts and musubi write. peft: lora_A and lora_B, "
        "as ai-toolkit and diffusers write, for plain LoRA only. ComfyUI reads both.",
        advanced=True,
        optional=True,
        decides="result",
    )
    timestep_rank: int = row(
        0,
        "T-LoRA, against overfitting on few pictures: noisy timesteps, which decide the composition, train only "
        "this many ranks, clean ones nearly all. Half of the rank is usual; 0 (default) = off. In training only: "
        "ComfyUI applies every rank at every timestep. For the algorithm lora.",
        span=(0, 4096),
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("timestep_rank")),
        beside=True,
    )
    kind_ranks: tuple[str, ...] = row(
        (),
        "Rank of kinds of layers, as attention=16, mlp=8, modulation=4; further kinds are convolution (3x3) and other. "
        "A kind named here is trained even where the preset leaves it out; 0 = not trained. alpha / rank stays. Empty "
        "(default) = rank everywhere.",
        advanced=True,
        optional=True,
    )
    channel_scaling: bool = row(
        False,
        "Trains inputs that are large, measured on the first batches, more slowly than small ones, so that a few do "
        "not outweigh the rest. Merged into the weights when saved. Acts with AdamW and its kin. Off by default.",
        advanced=True,
        optional=True,
        acts_with=("algorithm", with_setting("channel_scaling")),
        beside=True,
    )
    start: str = aside(default="")  # a LoRA file to continue: layers, ranks and alphas are the file's
    beneath: tuple[BeneathConfig, ...] = ()
    embeddings: tuple[EmbeddingConfig, ...] = ()  # words whose embeddings are trained with the network

    @property
    def ranked(self) -> bool:
        """Whether its layers have a rank that is set."""
        return ALGORITHMS[self.algorithm].rank and not self.full_matrix

    @property
    def ranks_of_kinds(self) -> dict[str, int]:
        """Read kind_ranks; raises ValueError for a kind or a rank that there is not."""
        found: dict[str, int] = {}
        most = int(rows_of(LoraConfig)["rank"].high)
        for text in self.kind_ranks:
            kind, _, rank = (piece.strip() for piece in text.partition("="))
            is_rank = rank.isascii() and rank.isdecimal() and len(rank) <= len(str(most)) and int(rank) <= most
            if kind not in LAYER_KINDS or kind in found or not is_rank:
                raise ValueError(
                    f"{self.named('kind_ranks')} has {text[:50]!r}; give each kind once, with a rank of 0 to {most}, "
                    f"as attention=16. The kinds: {', '.join(LAYER_KINDS)}."
                )
            found[kind] = int(rank)
        return found

    def check(self) -> None:
        """Raise ValueError for settings that do not go together."""
        if 0 < self.rank <= self.timestep_rank:
            raise ValueError(
                f"timestep_rank is {self.timestep_rank} and rank is {self.rank}; set {self.named('timestep_rank')} to "
                "half of the rank, or to 0."
            )
        tokens = [embedding.token.casefold() for embedding in self.embeddings]
        if twice := next((token for token in tokens if tokens.count(token) > 1), ""):
            raise ValueError(
                f"Two embeddings have the token {twice}; change {EmbeddingConfig.named('token')} of one, or remove one."
            )
        _check_options(self)
        _check_layers(self)


def _check_options(config: LoraConfig) -> None:
    """Raise ValueError for options that cannot be combined: an option has an effect or is refused."""
    rows = rows_of(LoraConfig)
    chosen = {name for name in (*STARTS_AS, "scale_weight_norms") if getattr(config, name) != rows[name].default}
    if config.init != "default" and (others := sorted(chosen & {"tucker", "use_scalar", "scale_weight_norms"})):
        raise ValueError(f"init {config.init} cannot be combined with {', '.join(others)}; choose one of them.")
    if config.bake and config.algorithm in with_setting("dora") and not config.dora:
        others = ", ".join(name for name in with_setting("bake") if name not in with_setting("dora"))
        raise ValueError(
            f"bake is for dora, or for {others}, and the algorithm is {config.algorithm}; set {config.named('bake')} "
            "to off."
        )
    if config.names == "peft" and (config.algorithm != "lora" or config.dora or config.tucker or config.train_norm):
        raise ValueError(
            "peft's names are for plain LoRA: algorithm lora without dora, tucker and train_norm. Set "
            f"{config.named('names')} to comfy, or these back."
        )
    if config.start and (others := sorted(chosen & set(STARTS_AS))):
        raise ValueError(f"{', '.join(others)} works for a new LoRA only; set it back to continue an existing LoRA.")
    if config.full_matrix and (config.decompose_both or config.tucker or config.rank_dropout):
        raise ValueError(
            "full_matrix gives LoKr no rank, so decompose_both, tucker and rank_dropout have no effect; set them or "
            f"{config.named('full_matrix')} to off."
        )


def _check_layers(config: LoraConfig) -> None:
    """Raise ValueError for lists that are too long, and for layer settings without effect."""
    for name in NUMBERS:
        if len(getattr(config, name)) > MOST_NUMBERS:
            raise ValueError(f"{config.named(name)} has more than {MOST_NUMBERS} numbers; give one for each block.")
    for name in ("include", "exclude"):
        patterns = getattr(config, name)
        if len(patterns) > MOST_PATTERNS or any(len(pattern) > LONGEST_PATTERN for pattern in patterns):
            raise ValueError(
                f"{config.named(name)} is too long; give at most {MOST_PATTERNS} patterns of {LONGEST_PATTERN} "
                "characters."
            )
        if not all(pattern.strip() for pattern in patterns):
            raise ValueError(f"{config.named(name)} has an empty pattern; remove it.")
    algorithm = ALGORITHMS[config.algorithm]
    ranks, alphas = ("conv_rank", "conv_block_ranks"), ("conv_alpha", "conv_block_alphas")
    useless: list[tuple[bool, tuple[str, ...], str]] = [  # when, which settings have no effect, and why
        (bool(config.start), (*LAYER_FIELDS, *ranks, *alphas), "an existing LoRA has its own layers and ranks"),
        (
            config.preset not in (*SPATIAL, AUTO) and not config.include and "convolution" not in config.ranks_of_kinds,
            (*ranks, *alphas),
            f"the preset {config.preset} trains no 3x3 convolution (full does)",
        ),
        (bool(config.conv_block_ranks), ranks[:1], "conv_block_ranks sets the rank of every 3x3 convolution"),
        (
            "convolution" in config.ranks_of_kinds,
            ranks,
            "kind_ranks sets the rank of every 3x3 convolution",
        ),
        (bool(config.conv_block_alphas), alphas[:1], "conv_block_alphas sets the alpha of every 3x3 convolution"),
        (
            not config.ranked,
            (*ranks, *alphas, "block_ranks", "block_alphas", "kind_ranks"),
            f"{config.algorithm} has no rank here (a block_weights of 0 excludes a block)",
        ),
        (not algorithm.alpha, (*alphas, "block_alphas"), f"{config.algorithm} has no alpha"),
        (
            bool(algorithm.layers) and config.preset not in ("attn-mlp", "unet-transformer-only", AUTO),
            ("preset",),
            f"{config.algorithm} has its own layers (those of attn-mlp or unet-transformer-only)",
        ),
    ]
    for met, names, why in useless:
        if met and (found := [name for name in names if getattr(config, name)]):
            raise ValueError(f"{found[0]} has no effect: {why}. Set {config.named(found[0])} back to its default.")
