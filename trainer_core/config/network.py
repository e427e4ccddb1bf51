"""What is attached to a base model and trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import Config, check_choices, check_range

Algorithm = Literal["lora", "loha", "lokr", "glora", "ia3", "oft", "boft", "full"]
Preset = Literal["attn-only", "attn-mlp", "full-lin", "full", "unet-transformer-only", "unet-convblock-only"]


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
    conv_rank: int = 0  # rank of 3x3 convolutions (preset full); 0 = rank
    conv_alpha: float = 0.0  # 0 = alpha
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights; bfloat16 is rounded stochastically
    algorithm: Algorithm = "lora"  # full: the whole difference of each weight
    dora: bool = False  # magnitude and direction apart, along the input axis (lora, loha, lokr)
    tucker: bool = False  # 3x3 convolutions in Tucker's form (lora, loha, lokr)
    factor: int = -1  # lokr: how the sides of a weight are split; -1 = as square as possible
    decompose_both: bool = False  # lokr: the small factor has the rank, too
    full_matrix: bool = False  # lokr: both factors whole, the rank does not count
    constraint: float = 0.0  # oft, boft: how far the rotation may go; 0 = as far as it likes
    rs_lora: bool = False  # scale = alpha / sqrt(rank)
    init: Literal["default", "orthogonal", "pissa"] = "default"  # lora: what down and up begin with
    dropout: float = 0.0  # chance that an element after `down` is left out, 0..1; training only, as the next two
    rank_dropout: float = 0.0  # chance that one of the ranks is left out, per sample
    module_dropout: float = 0.0  # chance that a layer is left out, per sample
    rank_dropout_scale: bool = True  # the ranks that stay act as much stronger as others are left out
    use_scalar: bool = False  # a trained number multiplies each layer, and begins with 0 in the place of `up`
    scale_weight_norms: float = 0.0  # norm that no layer's delta may exceed; 0 = any
    train_norm: bool = False  # norm layers are trained, too
    include: tuple[str, ...] = ()  # patterns of layers that are trained besides or instead of the preset's
    exclude: tuple[str, ...] = ()  # patterns of layers that are not trained
    block_ranks: tuple[int, ...] = ()  # of each block of the UNet, 0 = not trained; () = rank
    block_alphas: tuple[float, ...] = ()  # () = alpha
    conv_block_ranks: tuple[int, ...] = ()  # of 3x3 convolutions; () = as those of the block's other layers
    conv_block_alphas: tuple[float, ...] = ()
    block_weights: tuple[float, ...] = ()  # multiply the learning rate of each block of the UNet, 0 = not trained
    bake: bool = False  # dora, oft, boft, ia3: the file holds a plain LoRA that comes nearest
    start: str = ""  # a LoRA file to continue: layers, ranks and alphas are the file's
    beneath: tuple[BeneathConfig, ...] = ()

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
        _check_options(self)


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
