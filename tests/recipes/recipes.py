"""The recipes: tiny runs of every kind, as data; and the only place here that imports the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.material import write_lora, write_model, write_pictures

from lora_atelier.trainer_core.common.callbacks import Callbacks
from lora_atelier.trainer_core.config import (
    AugmentConfig,
    BaseModelConfig,
    BeneathConfig,
    CaptionConfig,
    ConceptConfig,
    ControlConfig,
    DatasetConfig,
    EmbeddingConfig,
    LoraConfig,
    MaskConfig,
    MemoryConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    SavesConfig,
    SchedulerConfig,
    TrainConfig,
)
from lora_atelier.trainer_core.train import train_lora

Settings = dict[str, Any]
HELD = ConceptConfig(folder="held", role="validation")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run has other than the plain one: fields of its configurations, folders in the place of paths."""

    model: str = "sd1"
    base_model: Settings = field(default_factory=dict)
    concepts: tuple[ConceptConfig, ...] = ()
    held: ConceptConfig = HELD
    lora: Settings = field(default_factory=dict)
    optimizer: Settings = field(default_factory=dict)
    scheduler: Settings = field(default_factory=dict)
    objective: Settings = field(default_factory=dict)
    train: Settings = field(default_factory=dict)
    memory: Settings = field(default_factory=dict)
    stops: tuple[int, ...] = ()  # steps after which the run is stopped, and begun again
    undisturbed: str = ""  # recipe of the same run without these stops


# AdamW with an eps that is far above rounding errors: updates follow the gradient instead of its sign alone.
ADAMW = {"eps": 1e-3, "weight_decay": 0.01}

SQUARES = ConceptConfig(
    folder="squares", flip=True, captions=CaptionConfig(shuffle=True, keep=1, tag_dropout=0.3, dropout=0.2)
)
PLAIN = ConceptConfig(folder="squares")
TALL = ConceptConfig(folder="tall", resolutions=("64x96",), loss_weight=0.7)
CROPPED = ConceptConfig(folder="tall", augment=AugmentConfig(variants=3, crop_jitter=1.0), flip=True)
HALVED = ConceptConfig(folder="large", resolutions=("64", "128"), repeats=2)
LESS = ControlConfig(folders=("less",), use="slider")


def masked(**values: Any) -> ConceptConfig:
    """Return the squares with masks."""
    return PLAIN.replace(masks=MaskConfig(missing="ones", **values))


RECIPES: dict[str, Recipe] = {
    # base models
    "sd1": Recipe(concepts=(SQUARES, TALL), lora={"preset": "full"}, scheduler={"name": "cosine", "warmup_steps": 2}),
    "sd2 that predicts v": Recipe(
        model="sd2",
        base_model={"prediction": "v_prediction", "zero_terminal_snr": "on"},
        objective={"weighting": "v_scaled"},
    ),
    "xl": Recipe(model="sdxl", concepts=(CROPPED, PLAIN)),
    "inpainting": Recipe(
        model="inpainting", concepts=(masked(unmasked_probability=0.4, threshold=0.4),), lora={"preset": "full"}
    ),
    "weights in 8 bits": Recipe(
        base_model={"weights": "float8", "text_weights": "float8", "clip_skip": 2},
        memory={"checkpointing": "full"},
    ),
    # what is trained beside the UNet
    "text encoders": Recipe(
        model="sdxl",
        optimizer={
            "text_encoder_learning_rate": 1e-2,
            "text_encoder_2_learning_rate": 5e-3,
            "text_encoder_2_stop": 3,
        },
    ),
    "embedding": Recipe(
        lora={
            "embeddings": (
                EmbeddingConfig(token="thing", vectors=2, init="creature", learning_rate=3e-2),
                EmbeddingConfig(token="number", vectors=1, learning_rate=3e-2, stop=3, keep_norm=True),
            )
        },
    ),
    "norms and whole differences": Recipe(lora={"algorithm": "full", "train_norm": True}),
    # algorithms
    "lokr": Recipe(lora={"algorithm": "lokr", "preset": "full", "factor": 4, "decompose_both": True}),
    "loha in tucker's form": Recipe(lora={"algorithm": "loha", "preset": "full", "tucker": True, "rs_lora": True}),
    "dora": Recipe(lora={"dora": True, "preset": "full"}),
    "oft": Recipe(lora={"algorithm": "oft", "constraint": 0.1}),
    "boft": Recipe(lora={"algorithm": "boft"}),
    "glora": Recipe(lora={"algorithm": "glora"}),
    "ia3": Recipe(lora={"algorithm": "ia3"}, optimizer={"learning_rate": 1e-1}),
    "bfloat16 rounded at random": Recipe(lora={"dtype": "bfloat16"}),
    "dropouts, bounded norms": Recipe(
        lora={"dropout": 0.2, "rank_dropout": 0.2, "module_dropout": 0.2, "scale_weight_norms": 0.2}
    ),
    "lora+, ranks and rates of blocks": Recipe(
        lora={"preset": "full", "conv_rank": 2, "block_ranks": (2, 3, 3, 4, 5, 4, 3, 3, 0), "exclude": ("*ff_net_2",)},
        optimizer={"lora_plus_ratio": 4.0, "conv_learning_rate": 5e-3, "max_grad_norm": 0.05},
    ),
    "sgd, cut gradients": Recipe(
        optimizer={"name": "sgd", "options": {}, "learning_rate": 1.0, "max_grad_norm": 0.2, "max_grad_value": 0.02}
    ),
    "continued": Recipe(lora={"start": "earlier"}),
    "one beneath": Recipe(lora={"beneath": (BeneathConfig(path="earlier", strength=0.8),)}),
    # the objective
    "masks with prior": Recipe(
        concepts=(masked(unmasked_weight=0.2, prior_weight=0.5, normalize_masked_area=True), TALL),
    ),
    "prior prediction": Recipe(
        concepts=(SQUARES, CROPPED.replace(role="prior_prediction", loss_weight=0.5)), train={"batch_size": 4}
    ),
    "slider of pairs": Recipe(
        concepts=(
            masked(unmasked_probability=0.3).replace(flip=True, controls=LESS),
            TALL.replace(role="regularisation"),
        ),
        held=HELD.replace(controls=LESS),
        optimizer={"text_encoder_learning_rate": 5e-3},
        train={"accumulate": 2, "validate_every": 2},
    ),
    "noise with offset and pyramid, min-snr, huber": Recipe(
        objective={
            "noise_offset": 0.1,
            "noise_offset_strength": "adaptive",
            "pyramid_iterations": 4,
            "min_snr_gamma": 5.0,
            "loss": "huber",
            "huber_schedule": "snr",
        },
    ),
    "stratified levels, perturbed input": Recipe(
        objective={
            "stratified_timesteps": True,
            "timestep_distribution": "logit_normal",
            "input_perturbation": 0.1,
            "weighting": "debiased",
            "min_timestep": 20,
            "loss": "smooth_l1",
        },
        train={"accumulate": 2},
    ),
    # the run
    "accumulated, several resolutions": Recipe(concepts=(HALVED, TALL), train={"accumulate": 3}),
    "average": Recipe(optimizer={"ema_decay": 0.8, "ema_every": 2}),
    "best by validation": Recipe(  # the last step is too long, so that the best weights are not the last ones
        train={"validate_every": 2, "keep_best": True}, scheduler={"name": "points", "points": "0:1, 0.6:1, 0.8:60"}
    ),
    "resumed": Recipe(
        concepts=(SQUARES, TALL),
        lora={"preset": "full"},
        scheduler={"name": "cosine", "warmup_steps": 2},
        stops=(2, 4),
        undisturbed="sd1",
    ),
}


class Material:
    """The models, pictures and LoRA files of the recipes, each written when it is asked for."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        """Keep them in a folder; tokenizer: folder with CLIP's vocabulary."""
        self.folder, self.tokenizer = folder, tokenizer

    def model(self, kind: str) -> str:
        """Return the path of a checkpoint."""
        return self._file(f"tiny-{kind}", lambda path: write_model(kind, path))

    def lora(self, name: str) -> str:
        """Return the path of a LoRA file."""
        return self._file(name, lambda path: write_lora(name, path))

    def pictures(self, name: str) -> str:
        """Return a folder of pictures."""
        folder = self.folder / "pictures"
        if not folder.exists():
            write_pictures(folder)
        return str(folder / name)

    def _file(self, name: str, write: Callable[[Path], None]) -> str:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write(path)
        return str(path)


def configure(recipe: Recipe, material: Material) -> RunConfig:
    """Return the configuration of a recipe's run."""
    concepts = [c.replace(folder=material.pictures(c.folder)) for c in (*(recipe.concepts or (SQUARES,)), recipe.held)]
    concepts = [c.replace(controls=_placed(c.controls, material)) if c.controls else c for c in concepts]
    lora = {"rank": 4, "alpha": 4.0, "preset": "attn-mlp", **recipe.lora}
    if start := lora.get("start"):
        lora["start"] = material.lora(start)
    lora["beneath"] = tuple(each.replace(path=material.lora(each.path)) for each in lora.get("beneath", ()))
    train = {"steps": 5, "batch_size": 2, "resolution": 64, "bucket_step": 32, "seed": 11, "save_dtype": "float32"}
    base_model = {"path": material.model(recipe.model), "tokenizer": str(material.tokenizer), "precision": "float32"}
    return RunConfig(
        base_model=BaseModelConfig(**base_model, **recipe.base_model),
        dataset=DatasetConfig(concepts=tuple(concepts)),
        lora=LoraConfig(**lora),
        optimizer=OptimizerConfig(**{"name": "adamw", "learning_rate": 1e-2, "options": ADAMW, **recipe.optimizer}),
        scheduler=SchedulerConfig(**{"name": "constant", **recipe.scheduler}),
        objective=ObjectiveConfig(**recipe.objective),
        train=TrainConfig(**{**train, **recipe.train}),
        memory=MemoryConfig(**{"checkpointing": "0", **recipe.memory}),
        saves=SavesConfig(save_every=0),
    )


def _placed(controls: ControlConfig, material: Material) -> ControlConfig:
    """Return control pictures with the paths of their folders."""
    return controls.replace(folders=tuple(map(material.pictures, controls.folders)))


def carry_out(
    name: str,
    material: Material,
    folder: Path,
    source: Callable[[BaseModelConfig], Any] | None = None,
    device: Any = "cpu",
    **memory: Any,
) -> Any:
    """Train a recipe in an empty folder and return the result; one with stops is begun again after each.

    source: builds what loads the base model, by default from its file. device: where it trains. memory: settings other
    than the recipe's.
    """
    recipe = RECIPES[name]
    config = configure(recipe, material)
    config = config.replace(memory=config.memory.replace(**memory))

    def train(callbacks: Callbacks) -> Any:
        return train_lora(
            config,
            folder / "lora.safetensors",
            cache=folder / "cache",
            device=device,
            callbacks=callbacks,
            source=source(config.base_model) if source else None,
        )

    for stop in recipe.stops:
        seen: list[int] = []
        stopped = train(Callbacks(
            step=lambda report, seen=seen: seen.append(report.step),
            asked=lambda seen=seen, stop=stop: ("stop",) if seen[-1] == stop else (),
        ))  # fmt: skip
        assert not stopped.finished and len(stopped.losses) == stop and seen[-1] == stop
    result = train(Callbacks())
    assert result.finished
    return result
