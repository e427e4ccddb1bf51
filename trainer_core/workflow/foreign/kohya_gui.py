"""Read the JSON of kohya_ss, whose page builds a command of sd-scripts: empty and zero fields are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import setting
from .imported import Imported, on, real, without_counterpart
from .sd_scripts import LISTS, read_sd_scripts
from .texts import arguments

PROGRAM = "kohya_ss"
TYPES: dict[str, tuple[str, str]] = {  # LoRA_type -> network module and algo
    "Standard": ("networks.lora", ""),
    "LoCon": ("lycoris.kohya", "locon"),  # as it was called
    "Kohya LoCon": ("networks.lora", ""),
    "LoRA-FA": ("networks.lora_fa", ""),
    "Flux1": ("networks.lora_flux", ""),
    "HunyuanImage-2.1": ("networks.lora_hunyuan_image", ""),
    "Anima": ("networks.lora_anima", ""),
    "Lumina": ("networks.lora_lumina", ""),
    "Kohya LoHa": ("networks.loha", ""),
    "Kohya LoKr": ("networks.lokr", ""),
    "Kohya DyLoRA": ("networks.dylora", ""),
    "Flux1 OFT": ("networks.oft_flux", ""),
    "LyCORIS/LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoHa": ("lycoris.kohya", "loha"),
    "LyCORIS/LoKr": ("lycoris.kohya", "lokr"),
    "LyCORIS/iA3": ("lycoris.kohya", "ia3"),
    "LyCORIS/DyLoRA": ("lycoris.kohya", "dylora"),
    "LyCORIS/GLoRA": ("lycoris.kohya", "glora"),
    "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft"),
    "LyCORIS/BOFT": ("lycoris.kohya", "boft"),
    "LyCORIS/Native Fine-Tuning": ("lycoris.kohya", "full"),
}
DEFAULTS: dict[str, Any] = {  # of the page, where they are not those of sd-scripts
    "max_resolution": "512,512", "enable_bucket": True, "max_bucket_reso": 2048, "bucket_no_upscale": True,
    "caption_extension": ".txt", "mixed_precision": "fp16", "save_precision": "fp16", "clip_skip": 1,
    "save_every_n_epochs": 1, "lr_scheduler": "cosine", "lr_warmup": 10, "learning_rate": 1e-4,
}  # fmt: skip
OF_NETWORKS = {"network_dim": 8, "network_alpha": 1, "conv_dim": 1, "conv_alpha": 1} | {  # of its LoRA tab alone
    "text_encoder_lr": 1e-4, "unet_lr": 1e-4,
}  # fmt: skip
SCRIPTS = {  # switched on -> what the script is of; the first counts
    "sdxl": "sdxl",
    "flux1_checkbox": "flux",
    "sd3_checkbox": "sd3",
    "hunyuan_image_checkbox": "hunyuan_image",
    "anima_checkbox": "anima",
    "lumina_checkbox": "lumina",
}
OF_THE_NETWORK = {  # fields that become network_args, by their names there
    "rank_dropout": "rank_dropout",
    "module_dropout": "module_dropout",
    "block_dims": "block_dims",
    "block_alphas": "block_alphas",
    "conv_block_dims": "conv_block_dims",
    "conv_block_alphas": "conv_block_alphas",
    "down_lr_weight": "down_lr_weight",
    "mid_lr_weight": "mid_lr_weight",
    "up_lr_weight": "up_lr_weight",
}
OF_LYCORIS = {
    "LyCORIS_preset": "preset",
    "factor": "factor",
    "use_cp": "use_tucker",
    "use_tucker": "use_tucker",
    "use_scalar": "use_scalar",
    "train_norm": "train_norm",
    "decompose_both": "decompose_both",
    "dora_wd": "dora_wd",
    "constrain": "constraint",
    "rank_dropout_scale": "rank_dropout_scale",
    "bypass_mode": "bypass_mode",
    "rescaled": "rescaled",
}
RENAMED = {
    "optimizer": "optimizer_type",
    "max_resolution": "resolution",
    "lora_network_weights": "network_weights",
    "highvram": "",
}
OWN = (  # of the page and of the launcher: they train nothing
    "LoRA_type", "LyCORIS_preset", "additional_parameters", "caption_metadata_filename", "unit", "num_machines",
    "batch_size",  # of preparing latents
    "num_processes", "multi_gpu", "gpu_ids", "main_process_port", "extra_accelerate_launch_args", "model_list",
    "save_as_bool", "latent_metadata_filename", "noise_offset_type", "epoch", "lr_warmup", "flux1_checkbox",
    "sd3_checkbox", "sdxl", "conv_dim", "conv_alpha", "no_token_padding", "train_on_input", "lr_warmup_steps",
    "hunyuan_image_checkbox", "anima_checkbox", "lumina_checkbox",
    "stop_text_encoder_training", "stop_text_encoder_training_pct", "block_lr_zero_threshold", "gpu_id", "folders",
    "sdxl_cache_text_encoder_outputs", "sdxl_no_half_vae", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic",
    "train_data_dir_name", "LyCORIS_type", "log_tracker_name", "use_wandb", "wandb_run_name", "save_every_n_epochs_x",
    "full_path", "bucket_no_upscale_x",
    "t5xxl_lr", "train_t5xxl", "num_cpu_threads_per_process", "lora_unet_scale", "dataset_config_x",
)  # fmt: skip


OF_FLOW = re.compile(
    "flux1_.*|sd3_.*|t5xxl.*|clip_[lg].*|logit_.*|mode_scale|weighting_scheme|timestep_sampling|ae"
    "|discrete_flow_shift|model_prediction_type|guidance_scale|train_blocks|split_.*|.*_attn_mask|sigmoid_scale|pos_emb.*"
    "|single_.*|double_.*|cpu_offload_.*|in_dims|img_.*|txt_.*|enable_all_linear|learning_rate_te.*|blocks_to_swap"
    "|mem_eff_save|skip_cache_check|sdxl_.*"
)  # fields of other families, which the page leaves out


def recognises(values: Any) -> bool:
    """Tell whether a JSON is one of kohya_ss."""
    names = values.keys() if isinstance(values, Mapping) else set()
    return (
        "LoRA_type" in names
        or {"max_resolution", "learning_rate"} <= names
        or ({"max_resolution", "pretrained_model_name_or_path"} <= names)
    )


def read_kohya_gui(values: Mapping[str, Any], folder: Path) -> Imported:
    """Read a configuration of kohya_ss' page for LoRAs; folder: in which relative paths start."""
    if "token_string" in values:
        raise ValueError(
            f"it trains a textual inversion; set {setting('embeddings.token')} to its word and "
            f"{setting('optimizer.learning_rate')} to 0, or choose a file of its LoRA tab"
        )
    native = "LyCORIS/Native Fine-Tuning"  # what DreamBooth and fine-tuning come nearest to
    kind = str(values.get("LoRA_type") or ("Standard" if "network_dim" in values else native))
    usual = DEFAULTS | (OF_NETWORKS if "LoRA_type" in values else {})
    values = {**usual, **{name: value for name, value in values.items() if value is not None}}
    if kind not in TYPES:
        raise without_counterpart("LoRA_type", kind, "train it with kohya_ss")
    module, algorithm = TYPES[kind]
    lycoris = module.startswith("lycoris")
    args: dict[str, Any] = {"algo": algorithm} if algorithm else {}
    fields = {**OF_THE_NETWORK, **(OF_LYCORIS if lycoris else {})}
    args |= {theirs: values[name] for name, theirs in fields.items() if _set(values.get(name))}
    native = kind in ("Kohya LoHa", "Kohya LoKr")
    if native:
        args |= {name: values[name] for name in ("factor", "use_tucker") if _set(values.get(name))}
    if lycoris or native or kind == "Kohya LoCon":
        args |= {name: values[name] for name in ("conv_dim", "conv_alpha") if _set(values.get(name))}
    script = next((name for field, name in SCRIPTS.items() if on(values.get(field))), "")
    if script == "flux" and on(values.get("train_t5xxl")):
        args["train_t5xxl"] = True
    flow = script not in ("", "sdxl")
    given = {
        RENAMED.get(name, name): value
        for name, value in values.items()
        if _set(value)
        and name not in OWN
        and name not in OF_THE_NETWORK
        and name not in OF_LYCORIS
        and (flow or not OF_FLOW.fullmatch(name))
    }
    given.pop("", None)
    given |= {"network_module": module, "network_args": args}
    given |= _lengths(values) | _rates(values, flow=flow) | _noise(values)
    given |= {name: each.split() for name in ("lr_scheduler_args",) if (each := str(values.get(name) or "").strip())}
    more = str(values.get("additional_parameters") or "")
    extra, _ = arguments(more.replace('"', "").split(), LISTS)  # as the page splits them
    given |= {"sdxl": script == "sdxl"} | extra
    return read_sd_scripts(given, folder, script=script, program=PROGRAM)


def _set(value: Any) -> bool:
    """Tell whether the page puts a field into the command."""
    return value not in (None, "", 0, False, [], "0", "None", "none") and value != 0.0


def _lengths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read the length of the run and of the warm-up, which is a share in percent."""
    found: dict[str, Any] = {}
    lengths = ("max_train_epochs", "max_train_steps", *(() if values.get("dataset_config") else ("epoch",)))
    if name := next((each for each in lengths if _set(values.get(each))), ""):
        found = {name.replace("epoch", "max_train_epochs") if name == "epoch" else name: values[name]}
    percent, warmup = values.get("lr_warmup"), values.get("lr_warmup_steps")
    if _set(warmup):
        return {**found, "lr_warmup_steps": warmup}
    share = real(str(percent)) / 100 if _set(percent) else 0.0
    return {**found, "lr_warmup_steps": share} if 0 < share < 1 else found


def _rates(values: Mapping[str, Any], *, flow: bool) -> dict[str, Any]:
    """Read the learning rates: one of the two alone trains that part alone; T5 may have its own."""
    unet, text, t5 = (real(values.get(name) or 0) for name in ("unet_lr", "text_encoder_lr", "t5xxl_lr"))
    if not unet and not text:
        return {}
    texts = [text, t5] if flow and text and t5 else text
    return {"unet_lr": unet, "text_encoder_lr": texts, "network_train_unet_only": not text}


def _noise(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields of the other kind of noise offset."""
    if values.get("noise_offset_type") == "Multires":
        return {"noise_offset": None, "adaptive_noise_scale": None}
    if values.get("noise_offset_type") == "Original":
        return {"multires_noise_iterations": None}
    return {}
