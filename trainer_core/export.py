"""The LoRA file: kohya names, metadata, written atomically, and read back before it counts."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .captions import tag_frequency
from .config import SPATIAL, LoraConfig, ObjectiveConfig, RunConfig
from .files import unused_path, written_whole
from .memory import DTYPES
from .models import BaseModel, Family
from .networks.files import OF_WEIGHT, FileLayer, delta_weight, group_tensors, layer_kind
from .networks.layer import pair_norm
from .optim import describe
from .plan import Plan
from .schedule import warmup_steps

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}  # relative, of a layer's delta norm
VERSION = "0.1.0"


def delta_norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Frobenius norm of what every layer of a LoRA file adds to its weight at strength 1, by layer.

    Of LoRA from rank x rank products alone. DoRA's magnitudes, differences of biases, and tensors of other forms have
    norms of their own, by their names.
    """
    grouped, unknown = group_tensors(tensors)
    norms = {}
    for name, parts in grouped.items():
        kind = layer_kind(parts)
        alone = {"dora_scale", "diff_b"} if kind and kind not in OF_WEIGHT else set(parts)
        unknown += [tensor for part, tensor in parts.items() if part in alone]
        found = {part: tensors[tensor] for part, tensor in parts.items() if part not in alone}
        alpha = float(found.pop("alpha", torch.tensor(0.0)))
        if found:
            layer = FileLayer(source=name, kind=kind, tensors=found, alpha=alpha)
            norms[name] = _lora_norm(layer) if "down" in found else float(delta_weight(layer).double().norm())
    return norms | {name: float(tensors[name].double().norm()) for name in unknown}


def _lora_norm(layer: FileLayer) -> float:
    """Return ||alpha/rank * up @ down||_F of a LoRA, with Tucker's core in down."""
    up, down = layer.tensors["up"].double().flatten(1), layer.tensors["down"].double()
    scale = layer.scale(len(down))
    if "mid" in layer.tensors:
        down = torch.einsum("m n x y, n i -> m i x y", layer.tensors["mid"].double(), down.flatten(1))
    return scale * float(pair_norm(up, down.flatten(1)))


def save_lora(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    dtype: str = "float16",
    verify: Callable[[Path], None] | None = None,
) -> dict[str, Tensor]:
    """Write a LoRA so that `path` either holds a whole, verified file or is as it was; return what was written.

    verify: called with the finished file before it gets its name; raises to refuse it.
    Raises ValueError when a value does not fit the dtype or the file read back differs from what was trained.
    """
    stored = {k: t.detach().cpu().to(DTYPES[dtype]).contiguous() for k, t in tensors.items()}
    if broken := [k for k, t in stored.items() if not t.isfinite().all()]:
        raise ValueError(f"{broken[0]} does not fit {dtype}; save as bfloat16 or float32.")
    with written_whole(path) as temporary:
        _write_lora(temporary, stored, metadata)
        verify_lora(temporary, tensors, dtype)
        if verify:
            verify(temporary)
    return stored


def _write_lora(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors with metadata to which kohya's hashes are added: those are of a file with `ss_` metadata alone."""
    save_file(tensors, path, {k: v for k, v in metadata.items() if k.startswith("ss_")})
    _write_ordered(path, tensors, {**metadata, **file_hashes(path)})


def _write_ordered(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whose metadata are in order, so that the same content is the same bytes.

    safetensors itself writes them in an order that is another one in each process.
    """
    save_file(tensors, path, dict(metadata))
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "JSON has one shortest form"
        file.seek(8)
        file.write(text.ljust(length))


def copy_lora(source: Path, path: Path) -> None:
    """Write a LoRA, or a learned word, of ours under another name, by which its metadata call it then."""
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata["modelspec.title"] = path.stem
    with written_whole(path) as temporary:
        if "ss_output_name" in metadata:
            _write_lora(temporary, tensors, {**metadata, "ss_output_name": path.stem})
        else:
            _write_ordered(temporary, tensors, {**metadata, "modelspec.trigger_phrase": f"embedding:{path.stem}"})


def is_copy(source: Path, path: Path) -> bool:
    """Tell whether `path` is what `copy_lora` writes there."""
    called = ("modelspec.title", "modelspec.trigger_phrase", "ss_output_name", "sshs_legacy_hash", "sshs_model_hash")
    with safe_open(source, framework="pt") as ours:
        try:
            with safe_open(path, framework="pt") as other:
                about = [{k: v for k, v in (f.metadata() or {}).items() if k not in called} for f in (ours, other)]
                names = [set(file.keys()) for file in (ours, other)]
                return (
                    about[0] == about[1]
                    and names[0] == names[1]
                    and all(torch.equal(ours.get_tensor(name), other.get_tensor(name)) for name in names[0])
                )
        except (OSError, SafetensorError):
            return False


def is_ours(path: Path) -> bool:
    """Tell whether LoRA Atelier has written a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return "atelier.version" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def word_path(folder: Path, name: str, token: str) -> Path:
    """Return where a learned word of a LoRA is saved; what `embedding:` of a prompt could not hold becomes _."""
    plain = re.sub(r"[\s()]+", "_", f"{name}-{token}")
    return folder / f"{plain}.safetensors"


def save_embeddings(
    folder: Path,
    name: str,
    embeddings: Mapping[str, Mapping[str, Tensor]],
    family: Family,
    metadata: Mapping[str, str],
) -> dict[str, Path]:
    """Write the vectors of each token as <name>-<token>.safetensors that `embedding:` of a prompt finds.

    embeddings: by token, then by text encoder as in LoRA files. metadata: of the LoRA they were learned with. A number
    is added where the name is taken. Float32, as they are small.
    Raises ValueError when a value is not finite or the file read back differs.
    """
    paths = {}
    for token, vectors in embeddings.items():
        path = unused_path(word_path(folder, name, token))
        several = len(family.texts) > 1
        tensors = {p.comfy if several else "emb_params": vectors[p.kohya].contiguous() for p in family.texts}
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError(f"The embedding {token} holds values that are not finite; lower its learning_rate.")
        about = {key: text for key, text in metadata.items() if key.startswith(("modelspec.", "atelier."))}
        kind = {"architecture": metadata["modelspec.architecture"].replace("/lora", "/textual-inversion")}
        kind |= {"title": path.stem, "trigger_phrase": f"embedding:{path.stem}"}
        with written_whole(path) as temporary:
            _write_ordered(temporary, tensors, about | {f"modelspec.{key}": text for key, text in kind.items()})
            read = load_file(temporary)
            if read.keys() != tensors.keys() or not all(torch.equal(read[key], t) for key, t in tensors.items()):
                raise ValueError(f"{path.name} does not hold the vectors that were learned; nothing was kept.")
        paths[token] = path
    return paths


def verify_lora(path: Path, trained: Mapping[str, Tensor], dtype: str) -> None:
    """Read a LoRA back and compare names and every layer's delta norm with what was trained."""
    read = load_file(path)
    if set(read) != set(trained):
        raise ValueError(f"{path.name} holds other tensors than were trained; nothing was kept.")
    written = delta_norms(read)
    for name, norm in delta_norms(trained).items():
        if abs(written[name] - norm) > TOLERANCE[dtype] * norm + 1e-6:
            raise ValueError(
                f"{name} has delta norm {written[name]:.6g} in the file and {norm:.6g} in training; save as float32."
            )


def file_hashes(path: Path) -> dict[str, str]:
    """Return kohya's two hashes of a safetensors file that carries the `ss_` metadata only."""
    model, legacy = hashlib.sha256(), hashlib.sha256()
    with path.open("rb") as file:
        file.seek(0x100000)
        legacy.update(file.read(0x10000))
        file.seek(0)
        file.seek(8 + struct.unpack("<Q", file.read(8))[0])
        while block := file.read(1 << 20):
            model.update(block)
    return {"sshs_model_hash": model.hexdigest(), "sshs_legacy_hash": legacy.hexdigest()[:8]}


def build_metadata(
    config: RunConfig,
    plan: Plan,
    base: BaseModel,
    *,
    name: str,
    steps: int,
    started: float,
    run_key: str = "",
    start: Mapping[str, Any] | None = None,
    validation_loss: float | None = None,
) -> dict[str, str]:
    """Return the metadata other tools read (`ss_*`, `modelspec.*`) and the whole configuration (`atelier.*`).

    steps: after which the weights are, and validation_loss what was measured then. run_key: of the run. start: file,
    hash, rank and alpha of the LoRA that was continued.
    """
    lora, optimizer, train, objective = config.lora, config.optimizer, config.train, config.objective
    finished = datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc)
    family, predicts_v = base.family, base.prediction == "v_prediction"
    architecture = family.architecture
    if family.name == "sd2" and predicts_v:
        architecture = "stable-diffusion-v2-768-v"
    folders = {Path(c.folder).name: {"n_repeats": c.repeats, "img_count": 0} for c in config.dataset.concepts}
    for picture in plan.manifest.pictures:
        folders[Path(config.dataset.concepts[picture.concept].folder).name]["img_count"] += 1
    prefixes = (concept.captions.prefix.strip(" ,") for concept in config.dataset.concepts)
    triggers = dict.fromkeys(prefix for prefix in prefixes if prefix)
    roles = Counter(config.dataset.concepts[picture.concept].role for picture in plan.manifest.pictures)
    prior_weights = {concept.loss_weight for concept in config.dataset.concepts if concept.role == "regularisation"}
    kohya = {
        "v2": family.name == "sd2",
        "base_model_version": family.base_version + ("_v" if family.name == "sd2" and predicts_v else ""),
        "sd_model_name": base.name,
        **network_metadata(lora, start, optimizer.lora_plus_ratio),
        "output_name": name,
        "session_id": config.digest()[:16],
        "training_started_at": started,
        "training_finished_at": finished.timestamp(),
        "learning_rate": optimizer.learning_rate,
        "unet_lr": optimizer.learning_rate,
        "text_encoder_lr": optimizer.text_encoder_learning_rate or None,
        "zero_terminal_snr": base.zero_terminal_snr,
        "optimizer": describe(optimizer),
        "lr_scheduler": config.scheduler.name,
        "lr_warmup_steps": warmup_steps(plan.steps, config.scheduler),
        "max_grad_norm": optimizer.max_grad_norm,
        "gradient_accumulation_steps": train.accumulate,
        "gradient_checkpointing": config.memory.checkpointing not in ("auto", "0"),
        "mixed_precision": {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(base.dtype, "no"),
        "max_train_steps": plan.steps,
        "steps": steps,
        "num_epochs": plan.epochs,
        "num_batches_per_epoch": plan.batches_in(0),
        "seed": train.seed,
        "clip_skip": config.base_model.clip_skip,
        **_objective_metadata(objective),
        "num_train_images": roles["train"],
        "num_reg_images": roles["regularisation"],
        "prior_loss_weight": prior_weights.pop() if len(prior_weights) == 1 else None,
        "total_batch_size": train.batch_size,
        "resolution": f"({train.resolution}, {train.resolution})",
        "dataset_dirs": json.dumps(folders),
        "tag_frequency": json.dumps(tag_frequency(plan.manifest, config.dataset)),
        "new_sd_model_hash": base.identity["unet"],
    }
    spec = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{architecture}/lora",
        "implementation": "https://github.com/Stability-AI/generative-models",
        "title": name,
        "resolution": f"{train.resolution}x{train.resolution}",
        "date": finished.isoformat(timespec="seconds"),
        "prediction_type": "v" if predicts_v else "epsilon",
        "trigger_phrase": ", ".join(triggers),
        "timestep_range": f"{objective.min_timestep},{objective.max_timestep}",
        "encoder_layer": str(config.base_model.clip_skip),
    }
    public = config.to_dict()
    files = {name: Path(public["base_model"][name]).name for name in ("vae", "text_encoder", "text_encoder_2")}
    public["base_model"] |= {"path": base.name, "tokenizer": "", **files}
    public["lora"]["start"] = Path(config.lora.start).name
    for beneath in public["lora"]["beneath"]:
        beneath["path"] = Path(beneath["path"]).name
    for concept in public["dataset"]["concepts"]:  # folder names only, never a path of the person's machine
        for place, name in ((concept, "folder"), (concept["masks"] or {}, "folder"), (concept["captions"], "file")):
            if place.get(name):
                place[name] = Path(place[name]).name
    return {
        **{f"ss_{k}": str(v) for k, v in kohya.items()},
        **{f"modelspec.{k}": v for k, v in spec.items() if v},
        "atelier.version": VERSION,
        **({"atelier.run": run_key} if run_key else {}),
        **({"atelier.validation_loss": f"{validation_loss:.6g}"} if validation_loss is not None else {}),
        "atelier.config": json.dumps(public, sort_keys=True, ensure_ascii=False),
        **({"atelier.start": json.dumps(start, ensure_ascii=False)} if start is not None else {}),
    }


def _objective_metadata(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return what the objective is in kohya's terms; None for what is off, and nothing for what kohya does not know."""
    weighting, pyramid = objective.weighting, objective.pyramid_iterations
    huber = objective.loss in ("huber", "smooth_l1")
    strength = objective.noise_offset_strength
    return {
        "min_snr_gamma": (objective.min_snr_gamma or None) if weighting == "min_snr" else None,
        "debiased_estimation": weighting == "debiased",
        "noise_offset": objective.noise_offset or None,
        "noise_offset_random_strength": strength == "random",
        "adaptive_noise_scale": objective.offset_adaptation if strength == "adaptive" else None,
        "multires_noise_iterations": pyramid or None,
        "multires_noise_discount": objective.pyramid_discount if pyramid else None,
        "ip_noise_gamma": objective.input_perturbation or None,
        "loss_type": "l2" if objective.loss == "mse" else objective.loss,
        "huber_schedule": objective.huber_schedule if huber else None,
        "huber_c": objective.huber_c if huber else None,
        "huber_scale": objective.huber_scale if huber else None,
    }


def network_metadata(
    lora: LoraConfig, start: Mapping[str, Any] | None = None, lora_plus_ratio: float = 1.0
) -> dict[str, Any]:
    """Return what `ss_network_*` tell of a network, in the words of sd-scripts (its own LoRA) or LyCORIS (all else).

    start: as for `build_metadata`; its layers, ranks and alphas then take the place of the configuration's.
    """
    plain = lora.algorithm == "lora" and not (lora.dora or lora.tucker or lora.use_scalar or lora.train_norm)
    kinds = start["kinds"] if start is not None else ["LoRA" if plain else ""]
    module = "networks.lora" if kinds == ["LoRA"] else "lycoris.kohya"
    size = {"rank": lora.rank, "alpha": lora.alpha} if start is None else start
    args: dict[str, Any] = {"rank_dropout": lora.rank_dropout, "module_dropout": lora.module_dropout}
    args |= {"loraplus_lr_ratio": lora_plus_ratio} if lora_plus_ratio != 1 else {}
    if start is None:
        args |= {"preset": lora.preset, "rs_lora": lora.rs_lora, "include": lora.include, "exclude": lora.exclude}
        if lora.preset in SPATIAL:
            args |= {"conv_dim": lora.conv_rank or lora.rank, "conv_alpha": lora.conv_alpha or lora.alpha}
        args |= {
            "block_dims": _list(lora.block_ranks),
            "block_alphas": _list(lora.block_alphas),
            "conv_block_dims": _list(lora.conv_block_ranks),
            "conv_block_alphas": _list(lora.conv_block_alphas),
            "block_lr_weight": _list(lora.block_weights),
        }
        if module == "lycoris.kohya":
            args |= {
                "algo": "locon" if lora.algorithm == "lora" else lora.algorithm,
                "dora_wd": lora.dora,
                **({"wd_on_output": "False"} if lora.dora else {}),
                "use_tucker": lora.tucker,
                "use_scalar": lora.use_scalar,
                "train_norm": lora.train_norm,
                "constraint": lora.constraint,
            }
        if lora.algorithm == "lokr":
            args |= {
                "factor": lora.factor,
                "decompose_both": lora.decompose_both,
                "full_matrix": lora.full_matrix,
            }
    return {
        "network_module": module,
        "network_dim": size["rank"],
        "network_alpha": size["alpha"],
        "network_args": json.dumps({name: value for name, value in args.items() if value not in (0, "", ())}),
        "network_dropout": lora.dropout or None,
        "scale_weight_norms": lora.scale_weight_norms or None,
    }


def _list(numbers: Sequence[float]) -> str:
    """Write numbers as sd-scripts reads them."""
    return ",".join(f"{number:g}" for number in numbers)
