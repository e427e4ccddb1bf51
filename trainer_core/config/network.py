"""What is attached to a base model and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range
from .embedding import EmbeddingConfig

Algorithm = Literal["lora", "loha", "lokr", "glora", "ia3", "oft", "boft", "full"]
Preset = Literal["attn-only", "attn-mlp", "full-lin", "full", "unet-transformer-only", "unet-convblock-only"]
UNET_ONLY = ("unet-transformer-only", "unet-convblock-only")  # presets that train no text encoder
PLACES = ("include", "exclude", "train_norm", "block_ranks", "block_alphas", "block_weights")
WITHOUT_RANK = ("ia3", "full")
WITHOUT_ALPHA = ("oft", "boft")
SPATIAL = ("full", "unet-convblock-only")  # presets that train 3x3 convolutions


@dataclass(frozen=True, kw_only=True, slots=True)
class BeneathConfig(Config):
    """A LoRA that is added to the base model's weights before another one is trained on it."""

    path: str  # a .safetensors file
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "strength", -10, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Config):
    """The network that is attached and trained."""

    rank: int = 16
    alpha: float = 16.0  # scale = alpha / rank; a constant, never trained
    preset: Preset = "attn-mlp"
    conv_rank: int = 0  # rank of 3x3 convolutions; 0 = as that of the block's other layers
    conv_alpha: float = 0.0  # 0 = as that of the block's other layers
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights; bfloat16 is rounded stochastically
    algorithm: Algorithm = "lora"  # full: the whole difference of each weight
    dora: bool = False  # magnitude and direction apart, along the input axis (lora, loha, lokr)
    tucker: bool = False  # 3x3 convolutions in Tucker's form (lora, loha, lokr)
    factor: int = -1  # lokr: how the sides of a weight are split; -1 = as square as possible
    decompose_both: bool = False  # lokr: the small factor has the rank, too
    full_matrix: bool = False  # lokr: both factors whole, the rank does not count
    constraint: float = 0.0  # oft, boft: how far the rotation may go, per output; 0 = as far as it likes
    rs_lora: bool = False  # scale = alpha / sqrt(rank)
    init: Literal["default", "orthogonal", "pissa"] = "default"  # lora: what down and up begin with
    dropout: float = 0.0  # chance that an element after `down` is left out, 0..1; training only, as the next two
    rank_dropout: float = 0.0  # chance that one of the ranks is left out, per sample
    module_dropout: float = 0.0  # chance that a layer is left out, per sample
    rank_dropout_scale: bool = True  # the ranks that stay act as much stronger as others are left out
    use_scalar: bool = False  # a trained number multiplies each layer, and begins with 0 in the place of `up`
    scale_weight_norms: float = 0.0  # norm that no layer's delta may exceed; 0 = any
    train_norm: bool = False  # norm layers are trained, too
    include: tuple[str, ...] = ()  # patterns of layers that are trained besides the preset's
    exclude: tuple[str, ...] = ()  # patterns of layers that are not trained
    block_ranks: tuple[int, ...] = ()  # of each block of the UNet, 0 = not trained; () = rank
    block_alphas: tuple[float, ...] = ()  # () = alpha; 0 = as the block's rank
    conv_block_ranks: tuple[int, ...] = ()  # of 3x3 convolutions; () = as those of the block's other layers
    conv_block_alphas: tuple[float, ...] = ()  # () = as those of the block's other layers; 0 = as the rank
    block_weights: tuple[float, ...] = ()  # multiply the learning rate of each block of the UNet, 0 = not trained
    bake: bool = False  # dora, oft, boft, ia3: the file holds a plain LoRA that comes nearest
    start: str = ""  # a LoRA file to continue: layers, ranks and alphas are the file's
    beneath: tuple[BeneathConfig, ...] = ()
    embeddings: tuple[EmbeddingConfig, ...] = ()  # words that are learned together with the network

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, "rank", 1, 4096)
        check_range(self, "conv_rank", 0, 4096)
        check_range(self, "conv_alpha", 0)
        check_range(self, "factor", -1)
        for name in ("dropout", "rank_dropout", "module_dropout"):
            check_range(self, name, 0, 0.99)
        check_range(self, "constraint", 0)
        check_range(self, "scale_weight_norms", 0)
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}; it must be above 0.")
        tokens = [embedding.token.casefold() for embedding in self.embeddings]
        if twice := next((token for token in tokens if tokens.count(token) > 1), ""):
            raise ValueError(f"Two embeddings have the token {twice}; give each one of its own, or remove one.")
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
}
STARTS_AS = ("dora", "tucker", "rs_lora", "use_scalar", "init")  # options of a new network, not of a continued one


def _check_options(config: LoraConfig) -> None:
    """Raise ValueError for options that do not go together: each does something, or is refused."""
    chosen = {name for name in {*GOES_WITH, *STARTS_AS} if getattr(config, name) not in (False, 0, "default")}
    for name in sorted(chosen):
        if config.algorithm not in GOES_WITH[name]:
            raise ValueError(
                f"{name} does not go with the algorithm {config.algorithm}, only with {', '.join(GOES_WITH[name])}; "
                "leave it as it was."
            )
    if config.init != "default" and (others := sorted(chosen & {"tucker", "use_scalar", "scale_weight_norms"})):
        raise ValueError(f"init {config.init} does not go with {', '.join(others)}; choose one of them.")
    if config.bake and not config.dora and config.algorithm not in ("oft", "boft", "ia3"):
        raise ValueError(
            f"bake is for dora, oft, boft and ia3: a file of {config.algorithm} is exact as it is; switch bake off."
        )
    if config.start and (others := sorted(chosen & set(STARTS_AS))):
        raise ValueError(f"{', '.join(others)} can only be chosen for a new LoRA; switch it off to continue one.")


def _check_algorithm(config: LoraConfig) -> None:
    """Raise ValueError for settings that only another algorithm has, or that leave each other nothing to do."""
    owners = {"factor": ("lokr",), "decompose_both": ("lokr",), "full_matrix": ("lokr",), "constraint": ("oft", "boft")}
    for name, algorithms in owners.items():
        if config.algorithm not in algorithms and getattr(config, name) not in (False, 0, -1):
            raise ValueError(
                f"{name} is for {' and '.join(algorithms)}, and the algorithm is {config.algorithm}; set it back to "
                "its default."
            )
    if config.factor == 0:
        raise ValueError("factor is 0; it must be above 0, or -1 for factors as near to each other as possible.")
    if config.full_matrix and (config.decompose_both or config.tucker or config.rank_dropout):
        raise ValueError(
            "full_matrix leaves LoKr no rank, so decompose_both, tucker and rank_dropout would do nothing; switch them "
            "or full_matrix off."
        )


def _check_layers(config: LoraConfig) -> None:
    """Refuse numbers of blocks that are out of range, and settings of layers that would do nothing."""
    for name in ("block_ranks", "conv_block_ranks"):
        if not all(isinstance(rank, int) and 0 <= rank <= 4096 for rank in getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; its numbers must be whole and between 0 and 4096.")
    for name in ("block_alphas", "conv_block_alphas", "block_weights"):
        object.__setattr__(config, name, tuple(map(float, getattr(config, name))))  # 4 and 4.0 are the same setting
        if not all(0 <= number < float("inf") for number in getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; its numbers must be at least 0.")
    if not all(pattern.strip() for pattern in (*config.include, *config.exclude)):
        raise ValueError("include or exclude has an empty pattern; leave it out.")
    ranks, alphas = ("conv_rank", "conv_block_ranks"), ("conv_alpha", "conv_block_alphas")
    useless: list[tuple[bool, tuple[str, ...], str]] = [  # settings, and where they do nothing
        (bool(config.start), (*PLACES, *ranks, *alphas), "a LoRA that is continued has layers and ranks of its own"),
        (
            config.preset not in SPATIAL and not config.include,
            (*ranks, *alphas),
            f"the preset {config.preset} trains no 3x3 convolution; choose full",
        ),
        (bool(config.conv_block_ranks), ranks[:1], "conv_block_ranks says the rank of every 3x3 convolution"),
        (bool(config.conv_block_alphas), alphas[:1], "conv_block_alphas says the alpha of every 3x3 convolution"),
        (
            config.algorithm in WITHOUT_RANK or config.full_matrix,
            (*ranks, *alphas, "block_ranks", "block_alphas"),
            f"{config.algorithm} has no rank here; leave blocks out by a block_weights of 0",
        ),
        (config.algorithm in WITHOUT_ALPHA, (*alphas, "block_alphas"), f"{config.algorithm} has no alpha"),
        (
            config.algorithm == "ia3" and config.preset not in ("attn-mlp", "unet-transformer-only"),
            ("preset",),
            "ia3 has layers of its own (keys, values, MLP); choose attn-mlp or unet-transformer-only",
        ),
    ]
    for met, names, why in useless:
        if met and (found := [name for name in names if getattr(config, name)]):
            raise ValueError(f"{found[0]} would do nothing: {why}, or set {found[0]} back to its default.")
