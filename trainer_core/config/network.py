"""Settings of the network: the LoRA or related layers that are attached to the base model and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .base import LARGEST, Config, check_choices, check_open, check_range
from .embedding import EmbeddingConfig

Algorithm = Literal["lora", "loha", "lokr", "glora", "ia3", "oft", "boft", "full"]
Preset = Literal["attn-only", "attn-mlp", "full-lin", "full", "unet-transformer-only", "unet-convblock-only"]
AUTO = "auto"  # the preset that suits the model
DENOISER_ONLY = ("unet-transformer-only", "unet-convblock-only")  # presets that train no text encoder
PLACES = ("include", "exclude", "train_norm", "block_ranks", "block_alphas", "block_weights")
MOST_PATTERNS, LONGEST_PATTERN = 200, 200  # of include and exclude; characters
MOST_NUMBERS = 1000  # of a list for each block
WITHOUT_RANK = ("ia3", "full")
WITHOUT_ALPHA = ("oft", "boft")
SPATIAL = ("full", "unet-convblock-only")  # presets that train 3x3 convolutions


@dataclass(frozen=True, kw_only=True, slots=True)
class BeneathConfig(Config):
    """A LoRA that is merged into the base model before training; the new LoRA is trained on top of it."""

    SECTION: ClassVar = "lora.beneath"
    NODE: ClassVar = "Existing LoRA"

    path: str  # a .safetensors file
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "strength", -10, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Config):
    """The trained network: its algorithm, ranks, layers and options."""

    SECTION: ClassVar = "lora"
    NODE: ClassVar = "LoRA Config"

    rank: int = 16  # 0 = as suits the model
    alpha: float = 16.0  # scale = alpha / rank; a constant, never trained; 0 = the rank
    preset: Literal["auto", Preset] = "attn-mlp"  # auto = as suits the model
    conv_rank: int = 0  # rank of 3x3 convolutions; 0 = as that of the block's other layers
    conv_alpha: float = 0.0  # 0 = as that of the block's other layers
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights; bfloat16 is rounded stochastically
    algorithm: Algorithm = "lora"  # full: a full-size delta of each weight
    dora: bool = False  # magnitude and direction apart, along the input axis (lora, loha, lokr)
    tucker: bool = False  # 3x3 convolutions in Tucker's form (lora, loha, lokr)
    factor: int = -1  # lokr: how the sides of a weight are split; -1 = as square as possible
    decompose_both: bool = False  # lokr: the small factor has the rank, too
    full_matrix: bool = False  # lokr: both factors whole, the rank does not count
    constraint: float = 0.0  # oft, boft: limit of the rotation, per output; 0 = none
    rs_lora: bool = False  # scale = alpha / sqrt(rank)
    init: Literal["default", "orthogonal", "pissa"] = "default"  # lora: the initial values of down and up
    dropout: float = 0.0  # chance to drop an element after `down`, 0..1; in training only, as the next two
    rank_dropout: float = 0.0  # chance to drop a rank, per sample
    module_dropout: float = 0.0  # chance to drop a layer, per sample
    rank_dropout_scale: bool = True  # scale up the remaining ranks, so that the mean stays
    timestep_rank: int = 0  # lora: least rank that is trained, at the noisiest timestep; 0 = the whole rank at all
    use_scalar: bool = False  # a trained factor per layer, which starts at 0 instead of `up`
    scale_weight_norms: float = 0.0  # maximum norm of a layer's delta; 0 = no limit
    train_norm: bool = False  # norm layers are trained, too
    include: tuple[str, ...] = ()  # patterns of layers that are trained besides the preset's
    exclude: tuple[str, ...] = ()  # patterns of layers that are not trained
    block_ranks: tuple[int, ...] = ()  # of each block of the UNet, 0 = not trained; () = rank
    block_alphas: tuple[float, ...] = ()  # () = alpha; 0 = as the block's rank
    conv_block_ranks: tuple[int, ...] = ()  # of 3x3 convolutions; () = as those of the block's other layers
    conv_block_alphas: tuple[float, ...] = ()  # () = as those of the block's other layers; 0 = as the rank
    block_weights: tuple[float, ...] = ()  # factors on the learning rate of each UNet block, 0 = not trained
    bake: bool = False  # dora, oft, boft, ia3: save the nearest plain LoRA
    start: str = ""  # a LoRA file to continue: layers, ranks and alphas are the file's
    beneath: tuple[BeneathConfig, ...] = ()
    embeddings: tuple[EmbeddingConfig, ...] = ()  # words whose embeddings are trained with the network
    names: Literal["comfy", "peft"] = "comfy"  # of layers in the file: lora_unet_…, or diffusion_model.….lora_A

    def __post_init__(self) -> None:
        check_choices(self)
        check_open(self, "rank", 0, 1, 4096)
        check_range(self, "conv_rank", 0, 4096)
        check_range(self, "conv_alpha", 0)
        check_range(self, "factor", -1)
        for name in ("dropout", "rank_dropout", "module_dropout"):
            check_range(self, name, 0, 0.99)
        check_range(self, "constraint", 0)
        check_range(self, "scale_weight_norms", 0)
        check_range(self, "timestep_rank", 0, 4096)
        if 0 < self.rank <= self.timestep_rank:
            raise ValueError(
                f"timestep_rank is {self.timestep_rank} and rank is {self.rank}; set timestep_rank of LoRA Config to "
                "half of the rank, or to 0."
            )
        if not 0 <= self.alpha < float("inf"):
            raise ValueError(f"alpha of LoRA Config is {self.alpha}; set it above 0, or to 0 for the rank.")
        tokens = [embedding.token.casefold() for embedding in self.embeddings]
        if twice := next((token for token in tokens if tokens.count(token) > 1), ""):
            raise ValueError(f"Two Embedding nodes have the token {twice}; change one token, or remove one node.")
        _check_options(self)
        _check_algorithm(self)
        _check_layers(self)


PRODUCTS = ("lora", "loha", "lokr")  # algorithms whose delta is a product of trained factors
GOES_WITH: dict[str, tuple[str, ...]] = {  # options that act on some algorithms only
    "dora": PRODUCTS,
    "tucker": PRODUCTS,
    "rs_lora": (*PRODUCTS, "glora"),
    "use_scalar": (*PRODUCTS, "glora"),
    "rank_dropout": PRODUCTS,
    "scale_weight_norms": PRODUCTS,
    "init": ("lora",),
    "dropout": ("lora",),
    "timestep_rank": ("lora",),
}
STARTS_AS = ("dora", "tucker", "rs_lora", "use_scalar", "init")  # options of a new network, not of a continued one


def _check_options(config: LoraConfig) -> None:
    """Raise ValueError for options that cannot be combined: an option has an effect or is refused."""
    chosen = {name for name in {*GOES_WITH, *STARTS_AS} if getattr(config, name) not in (False, 0, "default")}
    for name in sorted(chosen):
        if config.algorithm not in GOES_WITH[name]:
            raise ValueError(
                f"{name} works with {', '.join(GOES_WITH[name])} only, and the algorithm is {config.algorithm}; set "
                f"{name} of LoRA Config back to its default."
            )
    if config.init != "default" and (others := sorted(chosen & {"tucker", "use_scalar", "scale_weight_norms"})):
        raise ValueError(f"init {config.init} cannot be combined with {', '.join(others)}; choose one of them.")
    if config.bake and not config.dora and config.algorithm not in ("oft", "boft", "ia3"):
        raise ValueError(
            f"bake is for dora, oft, boft and ia3, and the algorithm is {config.algorithm}; set bake of LoRA Config to "
            "off."
        )
    if config.names == "peft" and (config.algorithm != "lora" or config.dora or config.tucker or config.train_norm):
        raise ValueError(
            "peft's names are for plain LoRA: algorithm lora without dora, tucker and train_norm. Set names of LoRA "
            "Config to comfy, or these back."
        )
    if config.start and (others := sorted(chosen & set(STARTS_AS))):
        raise ValueError(f"{', '.join(others)} works for a new LoRA only; set it back to continue an existing LoRA.")


def _check_algorithm(config: LoraConfig) -> None:
    """Raise ValueError for settings of another algorithm, and for settings that cancel each other."""
    owners = {"factor": ("lokr",), "decompose_both": ("lokr",), "full_matrix": ("lokr",), "constraint": ("oft", "boft")}
    for name, algorithms in owners.items():
        if config.algorithm not in algorithms and getattr(config, name) not in (False, 0, -1):
            raise ValueError(
                f"{name} is for {' and '.join(algorithms)}, and the algorithm is {config.algorithm}; set {name} of "
                "LoRA Config back to its default."
            )
    if config.factor == 0:
        raise ValueError("factor is 0; set factor of LoRA Config above 0, or to -1 for nearly equal factors.")
    if config.full_matrix and (config.decompose_both or config.tucker or config.rank_dropout):
        raise ValueError(
            "full_matrix gives LoKr no rank, so decompose_both, tucker and rank_dropout have no effect; set them or "
            "full_matrix of LoRA Config to off."
        )


def _check_layers(config: LoraConfig) -> None:
    """Raise ValueError for block numbers out of range, and for layer settings without effect."""
    for name in ("block_ranks", "conv_block_ranks"):
        if not all(isinstance(rank, int) and 0 <= rank <= 4096 for rank in getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; its numbers must be whole and between 0 and 4096.")
    for name in ("block_alphas", "conv_block_alphas", "block_weights"):
        if not all(0 <= number <= LARGEST for number in getattr(config, name)):
            raise ValueError(f"{name} is out of range; its numbers must be at least 0, and at most {LARGEST:g}.")
        object.__setattr__(config, name, tuple(map(float, getattr(config, name))))  # 4 and 4.0 are the same setting
    for name in ("block_ranks", "conv_block_ranks", "block_alphas", "conv_block_alphas", "block_weights"):
        if len(getattr(config, name)) > MOST_NUMBERS:
            raise ValueError(f"{name} of LoRA Config has more than {MOST_NUMBERS} numbers; give one for each block.")
    for name in ("include", "exclude"):
        patterns = getattr(config, name)
        if len(patterns) > MOST_PATTERNS or any(len(pattern) > LONGEST_PATTERN for pattern in patterns):
            raise ValueError(
                f"{name} of LoRA Config is too long; give at most {MOST_PATTERNS} patterns of {LONGEST_PATTERN} "
                "characters."
            )
    if not all(pattern.strip() for pattern in (*config.include, *config.exclude)):
        raise ValueError("include or exclude of LoRA Config has an empty pattern; remove it.")
    ranks, alphas = ("conv_rank", "conv_block_ranks"), ("conv_alpha", "conv_block_alphas")
    useless: list[tuple[bool, tuple[str, ...], str]] = [  # when, which settings have no effect, and why
        (bool(config.start), (*PLACES, *ranks, *alphas), "an existing LoRA has its own layers and ranks"),
        (
            config.preset not in (*SPATIAL, AUTO) and not config.include,
            (*ranks, *alphas),
            f"the preset {config.preset} trains no 3x3 convolution (full does)",
        ),
        (bool(config.conv_block_ranks), ranks[:1], "conv_block_ranks sets the rank of every 3x3 convolution"),
        (bool(config.conv_block_alphas), alphas[:1], "conv_block_alphas sets the alpha of every 3x3 convolution"),
        (
            config.algorithm in WITHOUT_RANK or config.full_matrix,
            (*ranks, *alphas, "block_ranks", "block_alphas"),
            f"{config.algorithm} has no rank here (a block_weights of 0 excludes a block)",
        ),
        (config.algorithm in WITHOUT_ALPHA, (*alphas, "block_alphas"), f"{config.algorithm} has no alpha"),
        (
            config.algorithm == "ia3" and config.preset not in ("attn-mlp", "unet-transformer-only", AUTO),
            ("preset",),
            "ia3 has its own layers (those of attn-mlp or unet-transformer-only)",
        ),
    ]
    for met, names, why in useless:
        if met and (found := [name for name in names if getattr(config, name)]):
            raise ValueError(f"{found[0]} has no effect: {why}. Set {found[0]} of LoRA Config back to its default.")
