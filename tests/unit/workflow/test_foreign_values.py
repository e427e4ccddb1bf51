"""Odd values in files of diffusion-pipe, SimpleTuner and OneTrainer: how each is read, and what the report tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_atelier.trainer_core.workflow.foreign import Imported, read_foreign

NONE = object()  # the setting is not set


def pipe(top: str = "", model: str = "", adapter: str = "", optimizer: str = "", kind: str = "wan") -> str:
    """Write a main file of diffusion-pipe."""
    model, adapter = f'[model]\ntype = "{kind}"\n{model}', f'[adapter]\ntype = "lora"\n{adapter}'
    return f"{top}\n{model}\n{adapter}\n[optimizer]\n{optimizer}\n"


def tuner(family: str = "sdxl", **values: Any) -> str:
    return json.dumps({"model_family": family, **values})


def one(model: str = "STABLE_DIFFUSION_15", **values: Any) -> str:
    return json.dumps({"training_method": "LORA", "model_type": model, "base_model_name": "m", **values})


def one_concept(**values: Any) -> str:
    return json.dumps([{"path": "/d", **values}])


def value_of(found: Imported, name: str) -> Any:
    """Return a setting by its full name, `concept` being the first one, or NONE."""
    if name in ("name", "family", "models"):
        return getattr(found, name)
    value: Any = found.values
    for part in name.split("."):
        value = found.values["dataset"]["concepts"][0] if part == "concept" else value
        value = value if part == "concept" else value.get(part, NONE)
        if value is NONE:
            break
    return value


DIRECTORY = '[[directory]]\npath = "/d"\n'
CASES: tuple[tuple[str, dict[str, Any], list[str]], ...] = (
    # --- diffusion-pipe ---
    (pipe(), {"name": "my_lora", "lora.rank": 32, "lora.alpha": 32, "lora.dropout": NONE, "train.epochs": 1000}
     | {"optimizer.learning_rate": 1e-4, "objective.timestep_distribution": "logit_normal", "saves": NONE}
     | {"objective.timestep_shift": 1, "objective.logit_scale": 1, "memory": NONE, "scheduler.min_lr_ratio": NONE}
     | {"objective.min_snr_gamma": NONE, "objective.weighting": NONE, "base_model.prediction": NONE}, []),
    (pipe('output_dir = "/"\nepochs = 0\nmicro_batch_size_per_gpu = 0\ngradient_accumulation_steps = 0\n'
          'gradient_clipping = ""\nlr_scheduler = "polynomial"\nactivation_checkpointing = "no"'),
     {"name": "my_lora", "train.epochs": 1000, "train.batch_size": 1, "train.accumulate": 1, "memory": NONE}
     | {"optimizer.max_grad_norm": 0, "scheduler.name": "constant"}, ["lr_scheduler = 'polynomial'"]),
    (pipe('lr_scheduler = "cosine"\nsave_every_n_epochs = 3\nactivation_checkpointing = true', optimizer="lr = 1e-7",
          adapter='rank = 8\nalpha = 4\ndropout = 0.2\ninit_from_existing = "/m/a"\nodd = 1'),
     {"scheduler.min_lr_ratio": 1, "saves.save_every": 3, "saves.save_unit": "epochs", "lora.rank": 8}
     | {"memory.checkpointing": "full", "lora.alpha": 4, "lora.dropout": 0.2}, ["adapter.odd = 1", "continues"]),
    (pipe('lr_scheduler = "cosine"', optimizer="lr = 0"), {"scheduler.min_lr_ratio": NONE}, []),
    (pipe('epochs = "many"', 'text_encoders = ["a", {path = "1"}, {paths = ["2", "3", "4", "5"]}]\n'
          'merge_adapters = "/m/b"\ndtype = "float8"\ntimestep_sample_method = "odd"\nsigmoid_scale = 2', "rank = 0"),
     {"train.epochs": 1000, "models": {f"text_encoder_{n}": str(n) for n in range(1, 5)}, "lora.rank": 32}
     | {"base_model.precision": NONE, "objective": NONE}, ["model.sigmoid_scale = 2", "on top", "epochs"]),
    (pipe(model="shift = 3\nimage_shift = 2\nsigmoid_scale = 0"), {"objective.timestep_shift": 2}
     | {"objective.logit_scale": NONE}, []),
    (pipe(model="shift = 3\nflux_shift = true"), {"objective.timestep_shift": NONE}, []),
    (pipe(model='checkpoint_path = "c"\nvae_path = "v"\nunet_lr = 0\ntext_encoder_1_lr = 0.1\n'
          "debiased_estimation_loss = true\nv_pred = true", kind="sdxl"),
     {"base_model.path": "c", "models": {}, "optimizer.learning_rate": 0, "optimizer.text_encoder_learning_rate": 0.1}
     | {"optimizer.text_encoder_2_learning_rate": 0, "objective.weighting": "debiased"}
     | {"base_model.prediction": "v_prediction", "objective.timestep_distribution": NONE}, []),
    (pipe(model="min_snr_gamma = 5", kind="sdxl"), {"objective.min_snr_gamma": 5}, []),
    (pipe(optimizer='type = "Odd"\nbetas = [0.9, 0.8]\nweight_decay = 0.5\neps = 1'),
     {"optimizer.name": "custom", "optimizer.options": {"optimizer": "Odd"}}, []),
    (pipe(optimizer='type = "AdamW"\nbetas = 0.5\nweight_decay = 0'), {"optimizer.name": "adamw"}
     | {"optimizer.options.beta2": NONE, "optimizer.options.weight_decay": 0}, []),
    (DIRECTORY + "resolutions = [512, [640, 480]]\nnum_repeats = 0\nmask_path = '/m'\ncaption_prefix = 'a '\n"
     "shuffle_tags = true", {"concept.resolutions": ["512x512"], "concept.repeats": NONE}
     | {"concept.captions.prefix": "a ", "concept.captions.shuffle": True, "concept.clips": NONE}
     | {"concept.masks": {"folder": "/m", "missing": "ones", "unmasked_weight": 0}}, []),
    ("resolutions = 640\nenable_ar_bucket = true\nmin_ar = 0.5\n" + DIRECTORY + DIRECTORY + "enable_ar_bucket = false",
     {"concept.resolutions": ["640"], "concept.masks": NONE, "concept.captions": {"dropout": 0, "missing": "empty"}},
     ["min_ar = 0.5"]),
    (DIRECTORY, {"concept.resolutions": NONE}, []),
    # --- SimpleTuner ---
    (tuner(), {"name": "my_lora", "train.epochs": 1, "train.steps": NONE, "train.batch_size": 4, "lora.rank": 16}
     | {"lora.alpha": 16, "lora.preset": "attn-mlp", "optimizer.max_grad_norm": 0, "optimizer.ema_decay": NONE}
     | {"saves.save_every": 500, "saves.save_unit": "steps", "sample": NONE, "train.resolution": 1024, "memory": NONE}
     | {"train.bucket_step": 64, "objective.loss": "mse", "concept.folder": "", "objective.huber_c": NONE}
     | {"objective.timestep_shift": NONE, "scheduler.min_lr_ratio": NONE, "base_model.precision": "bfloat16"}, []),
    (tuner(output_dir="/", num_train_epochs=-3, seed=-5, train_batch_size="x", learning_rate="", lora_rank=0,
           mixed_precision="fp8", lora_dropout=0, offset_noise=True, checkpoint_step_interval=0, lora_alpha=0),
     {"name": "my_lora", "train.epochs": 1, "train.seed": 0, "train.batch_size": NONE, "optimizer.learning_rate": 0}
     | {"lora.rank": 16, "lora.alpha": 0, "base_model.precision": NONE, "lora.dropout": NONE, "saves": NONE},
     ["offset_noise = 0.1", "train_batch_size"]),
    (tuner(optimizer="optimi-adamw", mixed_precision="no", gradient_checkpointing="true", use_ema=True, resolution="",
           ema_update_interval=7, checkpointing_steps=20, validation_prompt=" a  cat ", validation_steps=0),
     {"optimizer.name": "adamw", "optimizer.options.eps": NONE, "base_model.precision": "float32"}
     | {"memory.checkpointing": "full", "optimizer.ema_decay": 0.995, "optimizer.ema_every": 7}
     | {"saves.save_every": 20, "sample.prompts": ["a cat"], "saves.sample_every": 100, "train.resolution": 1024}, []),
    (tuner(use_ema=True, ema_decay=0.9, validation_prompt="a", validation_steps=0, validation_step_interval=0,
           max_train_steps=9, num_train_epochs=3),
     {"optimizer.ema_decay": 0.9, "saves.sample_every": 100, "train.steps": 9, "train.epochs": NONE}, []),
    (tuner(loss_type="odd", snr_gamma=0), {"objective.loss": NONE, "objective.min_snr_gamma": NONE},
     ["loss_type = 'odd'"]),
    (tuner(loss_type="smooth_l1", huber_c=0.3), {"objective.loss": "smooth_l1", "objective.huber_c": 0.3}
     | {"objective.huber_schedule": "snr"}, []),
    (tuner("flux", mixflow_enabled=True, mixflow_gamma=0, flow_use_uniform_schedule=True),
     {"objective.mixflow": 0, "objective.timestep_distribution": "beta"}, []),
    (tuner("flux", flow_use_uniform_schedule=True, flow_schedule_shift=0),
     {"objective.timestep_distribution": "uniform", "objective.timestep_shift": 1, "objective.logit_scale": NONE}, []),
    (tuner("flux", flow_use_beta_schedule=True, flow_beta_schedule_alpha=0, flow_beta_schedule_beta=3,
           flow_schedule_shift=0, flow_schedule_auto_shift=True), {"objective.timestep_distribution": "beta"}
     | {"objective.beta_a": 2, "objective.beta_b": 3, "objective.timestep_shift": NONE, "lora.preset": "auto"}, []),
    (tuner("flux", flow_sigmoid_scale=0, pretrained_model_name_or_path="a", resolution_type="pixel", resolution=8,
           pretrained_transformer_model_name_or_path="b", aspect_bucket_alignment=0),
     {"objective.logit_scale": 1, "models": {"diffusion_model": "b"}, "train.resolution": 64, "train.bucket_step": 64},
     ["resolution_type = 'pixel'"]),
    (tuner("wan", model_type="full", lora_rank=8, lora_dropout=0.5, aspect_bucket_alignment=16),
     {"lora.preset": "auto", "lora.rank": NONE, "lora.dropout": NONE, "train.bucket_step": 32}, []),
    (tuner(model_type="full", aspect_bucket_alignment=16), {"lora.preset": "full", "train.bucket_step": 16}, []),
    (tuner(lora_type="lycoris"), {"lora.rank": 16}, ["The network is described in"]),
    (tuner(data_backend_config="gone.json"), {"concept.folder": ""}, ["The pictures are listed in"]),
    (tuner(lr_scheduler="sine", lr_end=1, learning_rate=0.1), {"scheduler.min_lr_ratio": 1}
     | {"scheduler.expression": "0.5 * (1 + sin(pi * step / 1))"}, []),
    (tuner(lr_scheduler="polynomial", lr_end=0, lr_power=2, learning_rate=0.1),
     {"scheduler.min_lr_ratio": NONE, "scheduler.power": 2}, []),
    (tuner(lr_scheduler="polynomial", learning_rate=0), {"scheduler.min_lr_ratio": NONE}, []),
    (tuner(lr_scheduler="linear", lr_warmup_steps=5), {"scheduler.warmup_steps": 5, "scheduler.power": NONE}
     | {"scheduler.min_lr_ratio": NONE}, []),
    (tuner(lr_scheduler="constant", lr_warmup_steps=5), {"scheduler.warmup_steps": NONE}, []),
    (json.dumps([{"id": "t", "dataset_type": "text_embeds"}, {"id": "o", "dataset_type": "image", "disabled": "true"},
                 {"id": "a", "dataset_type": "video", "instance_data_dir": "/d", "caption_strategy": "filename",
                  "instance_prompt": "x", "resolution_type": "pixel", "crop": True, "crop_aspect": "preserve",
                  "resolution": 500, "repeats": 0, "is_regularisation_data": True},
                 {"id": "b", "dataset_type": "image", "resolution_type": "pixel"}]),
     {"concept.folder": str(Path("/d")), "concept.captions": {"source": "file_name", "dropout": 0.1}}
     | {"concept.resolutions": ["496"], "concept.repeats": NONE, "concept.role": "regularisation"}
     | {"concept.clips": NONE, "train.resolution": NONE}, ["resolution_type = 'pixel'"]),
    # --- OneTrainer ---
    (one(), {"lora.rank": 16, "lora.alpha": 1, "lora.dora": NONE, "lora.dropout": NONE, "lora.preset": "full"}
     | {"base_model.clip_skip": NONE, "base_model.vae": NONE, "base_model.prediction": NONE, "lora.embeddings": NONE}
     | {"base_model.zero_terminal_snr": NONE, "optimizer.ema_decay": NONE, "saves": NONE, "sample": NONE}
     | {"scheduler.warmup_steps": 200, "scheduler.min_lr_ratio": NONE, "objective.loss": "mse", "concept.masks": NONE}
     | {"objective.timestep_shift": NONE, "objective.loss_reduction": NONE, "memory.checkpointing": "full"}
     | {"objective.min_timestep": NONE, "objective.max_timestep": NONE, "base_model.weights": NONE}, []),
    (one(lora_rank=0, lora_alpha=0, seed=-2, lora_decompose=True, dropout_probability=0.3, layer_filter="a,b",
         layer_filter_preset="custom", text_encoder_layer_skip=1, force_v_prediction=True, train_dtype="FLOAT_8",
         rescale_noise_scheduler_to_zero_terminal_snr=True, vae={"model_name": "v"}, lora_model_name="/m/a"),
     {"lora.rank": 16, "lora.alpha": 1, "train.seed": 0, "lora.dora": True, "lora.dropout": 0.3, "lora.preset": "full"}
     | {"base_model.clip_skip": 2, "base_model.prediction": "v_prediction", "base_model.zero_terminal_snr": "on"}
     | {"base_model.vae": "v", "base_model.precision": NONE},
     ["layer_filter = 'a,b'", "train_dtype = 'FLOAT_8'", "continues"]),
    (one("STABLE_DIFFUSION_XL_10_BASE", text_encoder_layer_skip=1, force_epsilon_prediction=True,
         layer_filter_preset="attn-only"), {"base_model.clip_skip": NONE, "base_model.prediction": "epsilon"}
     | {"lora.preset": "attn-only"}, ["text_encoder_layer_skip = 1"]),
    (one("FLUX_DEV_1", transformer={"model_name": "t"}, vae={"model_name": "v"}, timestep_shift=1,
         layer_filter_preset="blocks", text_encoder_layer_skip=1),
     {"models": {"diffusion_model": "t", "vae": "v"}, "objective.timestep_shift": 1, "lora.preset": "auto"},
     ["text_encoder_layer_skip = 1", "layer_filter = 'blocks'"]),
    (one("FLUX_DEV_1", timestep_shift=2, dynamic_timestep_shifting=True, layer_filter_preset="custom"),
     {"models": {"diffusion_model": "m"}, "objective.timestep_shift": NONE, "lora.preset": "auto"}, []),
    (one(timestep_shift=2), {"objective.timestep_shift": 2}, []),
    (one(peft_type="OFT_2", oft_block_size=16), {"lora.algorithm": "oft", "lora.rank": NONE}, ["oft_block_size = 16"]),
    (one(peft_type="LOKR", lokr_dim=4, lokr_decompose_factor=8, lokr_full_matrix=True, lora_rank=9, lora_decompose=True,
         dropout_probability=0.3), {"lora.rank": 4, "lora.factor": 8, "lora.full_matrix": True, "lora.tucker": NONE}
     | {"lora.dora": NONE, "lora.dropout": NONE}, []),
    (json.dumps({"training_method": "FINE_TUNE", "peft_type": "OFT_2"}), {"lora.algorithm": "full", "lora.rank": NONE},
     []),
    (one(resolution="", aspect_ratio_bucketing=False), {"train.buckets": NONE, "train.resolution": NONE}, []),
    (one(resolution="512, 640x480,", aspect_ratio_bucketing=False), {"train.buckets.shapes": NONE}
     | {"train.buckets.resolutions": ["512x512", "640x480"]}, []),
    (one(resolution="512x640"), {"train.buckets.resolutions": ["512x640"], "train.resolution": NONE}, []),
    (one("PIXART_ALPHA", resolution="640"), {"train.resolution": 640, "train.bucket_step": 16}, []),
    (one("ODD_MODEL"), {"family": "odd_model", "train.bucket_step": 64}, []),
    (one(learning_rate_scheduler="COSINE_WITH_HARD_RESTARTS", learning_rate_cycles=0.4, learning_rate_min_factor=0.2,
         learning_rate_warmup_steps=1), {"scheduler.cycles": 1, "scheduler.min_lr_ratio": 0.2}
     | {"scheduler.warmup_steps": NONE}, ["learning_rate_cycles = 0.4", "learning_rate_warmup_steps = 1.0"]),
    (one(learning_rate_min_factor=0.2, learning_rate_warmup_steps=-5), {"scheduler.min_lr_ratio": NONE}
     | {"scheduler.warmup_steps": NONE}, []),
    (one(learning_rate_warmup_steps=0.25, gradient_accumulation_steps=0), {"scheduler.warmup_steps": 25}
     | {"scheduler.warmup_unit": "percent"}, []),
    (one(learning_rate_scheduler="COSINE_WITH_RESTARTS", learning_rate_cycles=0),
     {"scheduler.expression": "0.5 * (1 + cos(2 * pi * t))"}, []),
    (one(mse_strength=0.5, huber_strength=0.5), {"objective.loss": NONE},
     ["mse_strength = 0.5", "huber_strength = 0.5"]),
    (one(mse_strength=0.5), {"objective.loss": NONE}, ["mse_strength = 0.5"]),
    (one(mse_strength=0, huber_strength=1, huber_delta=0), {"objective.loss": "huber_true", "objective.huber_c": 1},
     []),
    (one(mse_strength=0, mae_strength=1), {"objective.loss": "l1", "objective.huber_c": NONE}, []),
    (one(loss_weight_fn="MIN_SNR_GAMMA", loss_weight_strength=0, loss_scaler="GLOBAL_BATCH"),
     {"objective.min_snr_gamma": 5, "objective.loss_reduction": "sum_batch"}, []),
    (one(loss_weight_fn="P2", loss_weight_strength=0, loss_scaler="ODD"), {"objective.p2_gamma": 1}
     | {"objective.loss_reduction": NONE}, ["loss_scaler = 'ODD'"]),
    (one(loss_weight_fn="DEBIASED_ESTIMATION", force_v_prediction=True), {"objective.weighting": NONE},
     ["loss_weight_fn = 'DEBIASED_ESTIMATION'"]),
    (one("STABLE_DIFFUSION_21", loss_weight_fn="DEBIASED_ESTIMATION"), {"objective.weighting": NONE},
     ["loss_weight_fn = 'DEBIASED_ESTIMATION'"]),
    (one(min_noising_strength=-1, max_noising_strength=0, offset_noise_weight=0.1, generalized_offset_noise=True),
     {"objective.min_timestep": 0, "objective.max_timestep": 0, "objective.noise_offset": 0.1}
     | {"objective.noise_offset_strength": "by_timestep"}, []),
    (one(min_noising_strength=3, max_noising_strength=0.5, timestep_distribution="ODD"),
     {"objective.min_timestep": 999, "objective.max_timestep": 499, "objective.timestep_distribution": NONE},
     ["timestep_distribution = 'ODD'"]),
    (one(learning_rate="", text_encoder={"train": "true", "stop_training_after": 0, "weight_dtype": "NFLOAT_4"},
         unet={"weight_dtype": "BFLOAT_16", "gradient_checkpointing": False}, learning_rate_scaler="ODD"),
     {"optimizer.learning_rate": 0, "optimizer.text_encoder_learning_rate": 0, "optimizer.text_encoder_stop": NONE}
     | {"base_model.weights": "bfloat16", "base_model.text_weights": "nf4", "memory": NONE}, []),
    (one(gradient_checkpointing="OFF", learning_rate=2, learning_rate_scaler="BATCH", batch_size=-4,
         text_encoder={"train": False}), {"memory": NONE, "optimizer.learning_rate": 0}, []),
    (one("FLUX_DEV_1", transformer={"weight_dtype": "FLOAT_8"}), {"base_model": {"precision": "float16"}}, []),
    (one(optimizer={"optimizer": None, "weight_decay": None, "odd": 3, "eps": 1, "decouple": 2, "fused": True}),
     {"optimizer.name": "adamw", "optimizer.options": {"eps": 1}}, ["optimizer.odd = 3"]),
    (one(optimizer={"optimizer": "ADAM", "weight_decay": 0.1}), {"optimizer.options.weight_decay": 0},
     ["optimizer.weight_decay = 0.1"]),
    (one(optimizer={"optimizer": "TIGER", "odd": 3}), {"optimizer.name": "custom"}
     | {"optimizer.options.optimizer": "Tiger"}, []),
    (one(optimizer=None), {"optimizer.name": "adamw"}, []),
    (one(ema="CPU", ema_update_step_interval=9), {"optimizer.ema_device": "cpu", "optimizer.ema_every": 9}, []),
    (one(ema="GPU", ema_decay=0.5), {"optimizer.ema_device": "same", "optimizer.ema_decay": 0.5}, []),
    (one(additional_embeddings=[{"placeholder": "<>", "token_count": 0, "initial_embedding_text": "*a, b*"},
                                {"train": False}, "x"], preserve_embedding_norm=True, learning_rate=2),
     {"lora.embeddings": [{"token": "embedding", "vectors": 1, "init": "a b", "learning_rate": 2, "keep_norm": True}]},
     []),
    (one(additional_embeddings={"a": 1}), {"lora.embeddings": NONE}, []),
    (one(additional_embeddings=[{"placeholder": "cat"}], embedding_learning_rate=3),
     {"lora.embeddings": [{"token": "cat", "vectors": 1, "init": "", "learning_rate": 3}]}, []),
    (one(samples=[{"prompt": "a\ncat", "width": 8, "seed": 0}, {"prompt": ""}, {"prompt": "b", "enabled": False}, "x"],
         sample_after=0, sample_after_unit="HOUR", save_every=0.5, save_every_unit="EPOCH"),
     {"sample.prompts": ["a cat --w 8"], "saves.sample_every": 600, "saves.sample_unit": "minutes"}
     | {"saves.save_every": 1, "saves.save_unit": "epochs", "saves.publish": True}, []),
    (one(samples=[{"prompt": "a"}], sample_after_unit="NEVER", save_every=0, save_every_unit="STEP"), {"saves": NONE}
     | {"sample.prompts": ["a"]}, []),
    (one(samples={"prompt": "a"}, sample_after=5), {"sample": NONE, "saves": NONE}, []),
    (one(concepts={"path": "/d"}, concept_file_name="gone.json"), {"concept.folder": ""},
     ["The pictures are listed in"]),
    (one(concepts=["/d", {"path": "/e"}], masked_training=True, unmasked_weight=0.5, normalize_masked_area_loss=True,
         masked_prior_preservation_weight=None), {"concept.folder": str(Path("/e"))}
     | {"concept.masks.unmasked_weight": 0.5, "concept.masks.normalize_masked_area": True}
     | {"concept.masks.prior_weight": 0}, []),
    (one_concept(loss_weight=0.5, validation_concept=True, balancing=0.4, balancing_strategy="SAMPLES", text="x"),
     {"concept.loss_weight": 0.5, "concept.role": "validation", "concept.samples": 1, "concept.repeats": NONE}, []),
    (one_concept(type="PRIOR_PREDICTION", repeats=None, image_variations=0, image={"enable_crop_jitter": False}),
     {"concept.role": "prior_prediction", "concept.repeats": NONE, "concept.augment": NONE, "concept.flip": NONE}
     | {"concept.samples": NONE, "concept.loss_weight": NONE, "concept.resolutions": NONE}, []),
    (one_concept(type="ODD", balancing=2.5, image={
        "enable_random_brightness": True, "random_brightness_max_strength": 7, "enable_random_hue": True,
        "random_contrast_max_strength": 0.5, "enable_random_rotate": True, "random_rotate_max_angle": 4,
        "enable_random_flip": True, "enable_fixed_flip": True, "enable_random_circular_mask_shrink": True,
        "enable_resolution_override": True, "resolution_override": "256, 512"}, image_variations=-3),
     {"concept.role": NONE, "concept.repeats": 2.5, "concept.flip": True, "concept.resolutions": ["256", "512"]}
     | {"concept.augment": {"crop_jitter": 1, "brightness": 1, "rotation": 4, "variants": 1}},
     ["enable_fixed_flip = True", "enable_random_circular_mask_shrink = True"]),
    (one_concept(image={"enable_random_rotate": True, "enable_resolution_override": True}),
     {"concept.augment": {"crop_jitter": 1, "variants": 1}, "concept.resolutions": ["512"]}, []),
    (one_concept(text={"prompt_source": "odd", "tag_delimiter": ";", "enable_tag_shuffling": True,
                       "keep_tags_count": 0}),
     {"concept.captions": {"source": "text_file", "dropout": 0, "missing": "empty", "shuffle": True, "keep": 0}
      | {"separator": ";"}}, []),
    (one_concept(text={"prompt_source": "concept", "prompt_path": "/p", "tag_delimiter": ";", "keep_tags_count": 3}),
     {"concept.captions": {"source": "one_file", "dropout": 0, "file": "/p"}}, []),
    (one_concept(text={"prompt_source": "filename", "tag_dropout_enable": True, "tag_dropout_probability": 0.5,
                       "caps_randomize_enable": True, "tag_dropout_special_tags": "a",
                       "tag_dropout_special_tags_mode": "BLACKLIST"}),
     {"concept.captions": {"source": "file_name", "dropout": 0, "shuffle": False, "keep": 1}},
     ["tag_dropout_mode = 'FULL'", "caps_randomize_enable = True", "tag_dropout_special_tags = 'a'"]),
    (one_concept(text={"tag_dropout_enable": True, "tag_dropout_mode": "RANDOM", "tag_dropout_special_tags": "a, ,b",
                       "tag_dropout_special_tags_mode": "WHITELIST"}),
     {"concept.captions.tag_dropout": NONE, "concept.captions.protected": ["a", "b"]}, []),
    (one_concept(text={"tag_dropout_probability": 0.5, "tag_dropout_special_tags": "a",
                       "tag_dropout_special_tags_mode": "WHITELIST"}),
     {"concept.captions": {"source": "text_file", "dropout": 0, "missing": "empty"}}, []),
    (one_concept(text={"tag_dropout_enable": True, "tag_dropout_special_tags": "a.*",
                       "tag_dropout_special_tags_regex": True, "tag_dropout_special_tags_mode": "WHITELIST"}),
     {"concept.captions.protected": NONE}, ["tag_dropout_special_tags = 'a.*'"]),
)  # fmt: skip


@pytest.mark.parametrize(("text", "expected", "told"), CASES, ids=range(len(CASES)))
def test_an_odd_value_is_read_as_its_program_takes_it_and_told(
    tmp_path: Path, text: str, expected: dict[str, Any], told: list[str]
) -> None:
    path = tmp_path / ("a.json" if text[0] in "[{" and not text.startswith("[[") else "a.toml")
    path.write_text(text, encoding="utf-8")
    found = read_foreign(path)
    assert {name: value_of(found, name) for name in expected} == expected
    said = [*found.left, *map(str, found.open)]
    assert len(said) == len(told) and all(part in line for part, line in zip(told, said, strict=True)), said


@pytest.mark.parametrize(
    ("text", "sentence"),
    (
        (pipe().replace('"lora"', '"lokr"'), "it has no adapter of type lora"),
        ("directory = [1]\n", "where a list of tables belongs"),
        (tuner(model_type="controlnet"), "its model_type is controlnet, and here LoRAs are trained"),
        (tuner(lr_scheduler="odd"), "its lr_scheduler odd has no counterpart here"),
        (one(learning_rate_scheduler="CUSTOM"), "its learning_rate_scheduler CUSTOM has no counterpart here"),
        (one(optimizer={"optimizer": "ODD"}), "its optimizer ODD has no counterpart here"),
        (one(peft_type="ODD"), "its peft_type ODD has no counterpart here; train it with OneTrainer"),
    ),
)
def test_what_has_no_counterpart_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / ("a.json" if text[0] == "{" else "a.toml")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        read_foreign(path)
