"""Settings files of our own, in the forms of eight programs: each trains by the numbers that its program computes.

The numbers are what the programs' own functions returned: schedulers, bucket managers, loss weights, draws of noise
levels, captions. Those were run from the repositories of SOURCES, of which nothing is kept here.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from foreign_numbers import SHARES, buckets, captions, opened, schedule, shares, weights

from lora_atelier.trainer_core.config import BucketConfig, RunConfig
from lora_atelier.trainer_core.data.buckets import parse_resolution
from lora_atelier.trainer_core.data.shapes import shape_of
from lora_atelier.trainer_core.optim.build import arguments
from lora_atelier.trainer_core.workflow.foreign import Imported, read_foreign

SOURCES = """
kohya-ss/sd-scripts 48d368fa557731ad0488c07304dfeba8c07910eb: library/train_util.py (get_scheduler_fix, BucketManager,
    process_caption), custom_train_functions.py, sd3_train_utils.py, flux_train_utils.py, lumina_train_util.py
derrian-distro/LoRA_Easy_Training_scripts_Backend 162e56de18e4d4ab96b066380606d657a68c66fa:
    custom_scheduler/LoraEasyCustomOptimizer, utils/validation.py
bmaltais/kohya_ss 45088f04af78e11cec5407ff4652ea3ed2c14422: kohya_gui/lora_gui.py (train_model)
kohya-ss/musubi-tuner 30c658c4f4b0bf05038b3346eff9670259b10fc7: dataset/bucket.py, training/parser_common.py
Nerogar/OneTrainer 23df3832e8f213d64c337e39f9365ba46e99fed0: lr_scheduler_util.py, create.py, the mixins of modelSetup
Nerogar/mgds 3a6994ad18a490acc4f3876658167525b7d88da7: AspectBucketing.py, ShuffleTags.py, DropTags.py
ostris/ai-toolkit 27a03a91f23eb1b757d5ec2e80ee3e129cfcc350: toolkit/scheduler.py, buckets.py, optimizer.py
tdrussell/diffusion-pipe 8f83dbf25d03219df705570ec03e62be04bc402f: train.py
bghira/SimpleTuner bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb: its documentation of options
"""
LENGTH = 100  # steps of each run; the rate is compared at every tenth
LINES = ("a, b, c",)

FLAT = [1.0] * 10
RISEN = [0.0, 0.5, *[1.0] * 8]
COSINE = [1.0, 0.975528, 0.904508, 0.793893, 0.654508, 0.5, 0.345492, 0.206107, 0.095492, 0.024472]
COSINE_FROM_10 = [0.0, 1.0, 0.969846, 0.883022, 0.75, 0.586824, 0.413176, 0.25, 0.116978, 0.030154]
LINEAR_FROM_10 = [0.0, 1.0, 0.888889, 0.777778, 0.666667, 0.555556, 0.444444, 0.333333, 0.222222, 0.111111]
RESTARTS = [1.0, 0.793893, 0.345492, 0.024472, 0.904508, 0.5, 0.095492, 0.975528, 0.654508, 0.206107]
TO_A_TENTH = [1.0, 0.977975, 0.914058, 0.814503, 0.689058, 0.55, 0.410942, 0.285497, 0.185942, 0.122025]
MIN_SNR = [0.00425372, 0.254437, 0.591446, *[1.0] * 7]
MIN_SNR_V = [0.00425011, 0.242117, 0.528884, 0.753692, 0.590501, 0.424483, 0.276332, 0.0825208, 0.0141511, 0.00466009]
DEBIASED = [0.0316228, 0.225583, 0.343932, 0.571666, 0.832753, 1.16439, 1.61828, 3.33439, 8.3466, 14.6146]
ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MOVED = ["a, b, c", "a, c, b"]  # the first tag is kept
ALL_MOVED = [", ".join(order) for order in itertools.permutations("abc")]
LOSING = ["a", "a, b", "a, b, c", "a, c"]


class Form(NamedTuple):
    """A file, and what its program computes of it."""

    name: str  # of the file
    text: str
    expected: dict[str, Any]
    beside: tuple[str, str] = ("", "")  # the name and text of a file that it names


def sized(sizes: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, size.split("x"))) for size in sizes.split()]


BASE = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "/d"\nmax_train_steps = 100\n'
XL = "--pretrained_model_name_or_path m --train_data_dir /d --max_train_steps 100 --network_module networks.lora"
FLUX = "python flux_train_network.py --pretrained_model_name_or_path m --max_train_steps 100 --network_dim 4"
RAW = "--model_prediction_type raw"
WAN = "python src/musubi_tuner/wan_train_network.py --dit w.safetensors --max_train_steps 100 --dataset_config d.toml"
AREA_512 = "512x512 576x448 448x576 704x320 640x384 384x640 832x256 576x448 320x768 640x384"
SD_SCRIPTS = (
    Form("defaults.toml", BASE, {"rank": 4, "alpha": 1, "rates": (2e-6, 2e-6, 0), "schedule": FLAT, "options": ADAMW}
         | {"captions": ["a, b, c"], "weights": FLAT}),
    Form("restarts.toml", BASE + 'lr_scheduler = "cosine_with_restarts"\nlr_scheduler_num_cycles = 3\n'
         'min_snr_gamma = 5\nnetwork_dim = 32\nnetwork_alpha = 16\nunet_lr = 1e-4\ntext_encoder_lr = 0.0\n',
         {"rank": 32, "alpha": 16, "rates": (1e-4, 0, 0), "schedule": RESTARTS, "weights": MIN_SNR}),
    Form("polynomial.toml", BASE + 'lr_scheduler = "polynomial"\nlr_scheduler_power = 2\nlearning_rate = 1e-4\n'
         'debiased_estimation_loss = true\n', {"weights": DEBIASED, "schedule":
         [1.0, 0.81019, 0.64036, 0.49051, 0.36064, 0.25075, 0.16084, 0.09091, 0.04096, 0.01099]}),
    Form("floor.toml", BASE + 'lr_scheduler = "cosine_with_min_lr"\nlr_scheduler_min_lr_ratio = 0.1\n'
         'v_parameterization = true\nmin_snr_gamma = 5\n', {"schedule": TO_A_TENTH, "weights": MIN_SNR_V}),
    Form("waves.toml", BASE + 'lr_scheduler = "cosine_with_min_lr"\nlr_scheduler_min_lr_ratio = 0.1\n'
         'lr_scheduler_num_cycles = 2\nv_parameterization = true\ndebiased_estimation_loss = true\n', {"schedule":
         [1.0, 0.914058, 0.689058, 0.410942, 0.185942, 0.1, 0.185942, 0.410942, 0.689058, 0.914058], "weights":
         [0.000999001, 0.0484233, 0.105777, 0.246308, 0.409499, 0.575517, 0.723668, 0.917479, 0.985849, 0.99534]}),
    Form("decay.toml", BASE + 'lr_scheduler = "warmup_stable_decay"\nlr_warmup_steps = 10\nlr_decay_steps = 0.4\n'
         'lr_scheduler_min_lr_ratio = 0.2\nv_parameterization = true\nscale_v_pred_loss_like_noise_pred = true\n',
         {"schedule": [0.0, *[1.0] * 6, 0.882843, 0.6, 0.317157], "weights":
         [0.999001, 0.951577, 0.894223, 0.753692, 0.590501, 0.424483, 0.276332, 0.0825208, 0.0141511, 0.00466009]}),
    Form("never.toml", BASE + 'lr_scheduler = "warmup_stable_decay"\nv_pred_like_loss = 0.5\n', {"schedule": FLAT,
         "weights": [1.5005, 1.52544, 1.55914, 1.6634, 1.84674, 2.1779, 2.80941, 7.05908, 36.3329, 108.294]}),
    Form("root.sh", f"python train_network.py {XL} --lr_scheduler inverse_sqrt --lr_warmup_steps 10", {"schedule":
         [0.0, 1.0, 0.707107, 0.57735, 0.5, 0.447214, 0.408248, 0.377964, 0.353553, 0.333333]}),
    Form("xl.sh", f"accelerate launch sdxl_train_network.py {XL} \\\n --lr_scheduler=linear --lr_warmup_steps 10% \\\n"
         " --learning_rate 1e-4 --text_encoder_lr 1e-5 2e-5 --resolution 1024 --enable_bucket --min_bucket_reso 320 "
         "--max_bucket_reso 2048 --bucket_reso_steps 32 # slow\n", {"schedule": LINEAR_FROM_10, "rates":
         (1e-4, 1e-5, 2e-5), "buckets": sized("1024x1024 1184x864 864x1184 1440x704 1344x768 768x1344 1728x576 "
         "1184x864 672x1536 1248x832")}),
    Form("free.sh", f"python train_network.py {XL} --optimizer_type ProdigyPlusScheduleFree --lr_scheduler cosine "
         "--lr_warmup_steps 10 --learning_rate 1", {"schedule": FLAT, "rates": (1, 1, 0)}),
    Form("shuffle.bat", f"@echo off\nset RANK=8\npython train_network.py {XL} ^\n --network_dim %RANK% "
         "--shuffle_caption --keep_tokens 1 --optimizer_type AdamW8bit --optimizer_args weight_decay=0.1 betas=.9,.99",
         {"rank": 8, "captions": MOVED, "options": {"betas": (0.9, 0.99), "weight_decay": 0.1, "eps": 1e-8}}),
    Form("prefix.bat", f"python train_network.py {XL} --shuffle_caption --keep_tokens 1 --caption_prefix \"x,\"",
         {"captions": [f"x, {each}" for each in ALL_MOVED], "open": []}),
    Form("glued.ps1", "$keep = 1\naccelerate launch `\n  ./train_network.py " + XL + " `\n  --shuffle_caption "
         "--keep_tokens=$keep --caption_prefix x --caption_tag_dropout_rate 0.0", {"captions":
         [f"x {each}" for each in MOVED], "open": []}),
    Form("drop.ps1", f"python train_network.py {XL} `\n --keep_tokens 1 --caption_tag_dropout_rate 0.5 "
         "--caption_suffix y", {"captions": [f"{each} y" for each in LOSING], "told": "caption_suffix moves"}),
    Form("nowhere.toml", BASE.replace('train_data_dir = "/d"\n', "shuffle_caption = true\nkeep_tokens = 1\n"),
         {"captions": MOVED}),
    Form("parts.toml", BASE + 'shuffle_caption = true\nkeep_tokens_separator = "|||"\nsecondary_separator = ";;;"\n',
         {"lines": ("x ||| a, b;;;c ||| y",), "captions": ["x, a, b,c, y", "x, b,c, a, y"], "left": []}),
    Form("lines.toml", BASE + "enable_wildcard = true\n", {"lines": ("{a|b} c", "d"), "captions": ["a c", "b c", "d"]}),
    Form("sets.toml", BASE + 'dataset_config = "sets-data.toml"\n', {"buckets": sized(AREA_512), "batch": 2},
         ("sets-data.toml", '[general]\nenable_bucket = true\n[[datasets]]\nresolution = 512\nbatch_size = 2\n'
          '[[datasets.subsets]]\nimage_dir = "/d"\n')),
    Form("sets.json", json.dumps({"general": {"enable_bucket": True, "bucket_no_upscale": True}, "datasets": [
         {"resolution": 768, "subsets": [{"image_dir": "/d", "keep_tokens": 1, "shuffle_caption": True}]}]}),
         {"captions": MOVED, "buckets": sized("512x512 640x448 448x640 1024x512 1024x576 576x1024 1152x384 640x448 "
         "320x768 832x576")}),
    Form("exact.toml", BASE + 'resolution = "512,768"\n', {"buckets": [(512, 768)] * 10}),
    Form("relative.toml", BASE + 'optimizer_type = "AdaFactor"\nlr_scheduler = "cosine"\nlr_warmup_steps = 10\n',
         {"schedule": FLAT, "options": {"relative_step": True, "scale_parameter": True}}),
    Form("lycoris.toml", BASE + 'network_module = "lycoris.kohya"\nnetwork_dim = 8\nnetwork_args = ["algo=loha"]\n'
         'optimizer_type = "Lion"\n', {"rank": 8, "alpha": 1, "options": {"betas": (0.9, 0.99), "weight_decay": 0.0}}),
)  # fmt: skip
FLOWS = (
    Form("flux.sh", FLUX + " --model_prediction_type raw", {"family": "flux", "guidance": 3.5, "left": [], "levels":
         [0.1364, 0.3462, 0.5, 0.6176, 0.7105, 0.7857, 0.8478, 0.9, 0.9444, 0.9828]}),
    Form("unweighed.sh", FLUX + f" {RAW} --min_snr_gamma 7 --debiased_estimation_loss", {"weights": FLAT, "left": []}),
    Form("shift.sh", FLUX + " --timestep_sampling shift --discrete_flow_shift 3.1582 --guidance_scale 1", {
         "guidance": 1, "levels": [0.3788, 0.5284, 0.6167, 0.6824, 0.7358, 0.7817, 0.8228, 0.8611, 0.899, 0.9424],
         "left": ["model_prediction_type = 'sigma_scaled'"]}),
    Form("wide.sh", FLUX + " --timestep_sampling sigmoid --sigmoid_scale 2", {"levels":
         [0.0359, 0.1118, 0.206, 0.3163, 0.4375, 0.5625, 0.6837, 0.794, 0.8882, 0.9641]}),
    Form("places.sh", FLUX + " --weighting_scheme logit_normal --logit_mean 0.5 --logit_std 0.8", {"levels":
         [0.3281, 0.4437, 0.5157, 0.5729, 0.6228, 0.6685, 0.713, 0.7574, 0.8068, 0.8719]}),
    Form("mode.sh", FLUX + " --weighting_scheme mode", {"levels":
         [0.2644, 0.531, 0.6516, 0.7105, 0.7401, 0.7604, 0.7864, 0.8286, 0.8888, 0.962]}),
    Form("lumina.bat", FLUX.replace("flux", "lumina"), {"family": "lumina2", "levels":
         [0.5367, 0.6803, 0.7535, 0.8032, 0.8411, 0.8719, 0.8982, 0.9217, 0.9442, 0.9688]}),
    Form("sd3.sh", FLUX.replace("flux", "sd3") + " --weighting_scheme logit_normal --logit_mean 0.5 --training_shift 3",
         {"levels": [0.488, 0.636, 0.715, 0.77, 0.813, 0.848, 0.879, 0.906, 0.933, 0.962], "loss_on": "x0"}),
    Form("hunyuan.sh", FLUX.replace("flux", "hunyuan_image"), {"levels":
         [0.2083, 0.4688, 0.625, 0.7292, 0.8036, 0.8594, 0.9028, 0.9375, 0.9659, 0.9896]}),
    *(
        Form(f"texts{number}.sh", f"{FLUX.replace('flux', kind)} {RAW if kind == 'flux' else ''} --learning_rate 1e-4 "
             + given, {"rates": rates, "left": left})
        for number, (kind, given, rates, left) in enumerate((
            ("flux", "", (1e-4, 1e-4, 0), []),
            ("flux", "--text_encoder_lr 1e-5 2e-5 --cache_text_encoder_outputs", (1e-4, 1e-5, 0), []),
            ("flux", "--text_encoder_lr 1e-5 2e-5 --network_args train_t5xxl=True", (1e-4, 1e-5, 2e-5), []),
            ("flux", "--text_encoder_lr 1e-5 --network_args train_t5xxl=True", (1e-4, 1e-5, 1e-5), []),
            ("flux", "--text_encoder_lr 1e-5 --network_train_unet_only", (1e-4, 0, 0), []),
            ("flux", "--text_encoder_lr 1e-5 --model_type chroma", (1e-4, 0, 0), []),
            ("sd3", "--text_encoder_lr 1e-5 2e-5 3e-5", (1e-4, 1e-5, 2e-5), []),
            ("sd3", "--text_encoder_lr 1e-5 --network_args train_t5xxl=True", (1e-4, 1e-5, 1e-5),
             ["network_args train_t5xxl = 'True'"]),
            ("lumina", "--text_encoder_lr 1e-5", (1e-4, 1e-5, 0), []),
            ("anima", "--text_encoder_lr 1e-5 --cache_text_encoder_outputs", (1e-4, 0, 0), []),
            ("hunyuan_image", "--text_encoder_lr 1e-5", (1e-4, 0, 0), []),
        ))
    ),
    Form("wan.sh", WAN + " --network_module networks.lora_wan --network_dim 32 --learning_rate 2e-4 "
         "--timestep_sampling shift --discrete_flow_shift 5 --optimizer_type adamw8bit", {"family": "wan", "rank": 32,
         "alpha": 1, "rates": (2e-4, 0, 0), "levels":
         [0.4911, 0.6395, 0.7181, 0.7728, 0.8151, 0.8501, 0.8802, 0.9075, 0.9338, 0.9628],
         "buckets": sized("512x512 592x432 432x592 704x368 672x384 384x672 896x288 592x432 336x768 624x416")},
         ("d.toml", '[general]\nresolution = 512\nenable_bucket = true\n[[datasets]]\nimage_directory = "/d"\n')),
    Form("listed.toml", '[general]\nresolution = 512\nenable_bucket = true\n[[datasets]]\nvideo_jsonl_file = "v"\n',
         {"buckets": sized("512x512 592x432 432x592 704x368 672x384 384x672 896x288 592x432 336x768 624x416")}),
    Form("weighed.bat", WAN + " ^\n --weighting_scheme cosmap", {"levels": list(SHARES), "weights":
         [0.703447, 0.776366, 0.936206, 1.09762, 1.22427, 1.27324, 1.22427, 1.09762, 0.776366, 0.637894], "buckets":
         sized("512x512 640x480 480x640 1024x512 1360x768 768x1360 1760x592 688x496 320x768 1248x832")},
         ("d.toml", '[[datasets]]\nimage_directory = "/d"\nresolution = 1024\nenable_bucket = true\n'
          "bucket_no_upscale = true\n")),
    Form("qwen.ps1", WAN.replace("wan_", "qwen_image_") + " `\n --weighting_scheme sigma_sqrt --compile "
         "--compile_mode default --flash_attn", {"family": "qwen_image", "left": [], "controls": ("/c",),
         "weights": [400.0, 100.0, 25.0, 11.1111, 6.25, 4.0, 2.77778, 2.04082, 1.23457, 1.002]},
         ("d.toml", '[[datasets]]\nimage_directory = "/d"\ncontrol_directory = "/c"\n')),
)  # fmt: skip
GUI = {"LoRA_type": "Standard", "pretrained_model_name_or_path": "m", "train_data_dir": "/d",
       "max_resolution": "512,512", "network_dim": 16, "network_alpha": 8, "learning_rate": 1e-4,
       "epoch": 10, "max_train_steps": 100, "lr_scheduler": "cosine", "lr_warmup": 10,
       "caption_extension": ".txt"}  # fmt: skip
EASY = """
[[subsets]]
image_dir = "/d"
shuffle_caption = true
keep_tokens = 1
[general_args.args]
pretrained_model_name_or_path = "m"
max_train_steps = 100
[general_args.dataset_args]
resolution = 512
[bucket_args.dataset_args]
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 1024
bucket_reso_steps = 64
[network_args.args]
network_dim = 12
network_alpha = 6
[optimizer_args.args]
learning_rate = 1e-4
unet_lr = 1e-4
text_encoder_lr = 5e-5
lr_scheduler = "cosine"
lr_scheduler_num_cycles = 4
min_snr_gamma = 5
[optimizer_args.args.optimizer_args]
weight_decay = 0.1
"""
EASY_REX = """
[general_args.args]
pretrained_model_name_or_path = "m"
max_train_steps = 100
[optimizer_args.args]
learning_rate = 1e-4
lr_scheduler_type = "LoraEasyCustomOptimizer.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts"
{}[optimizer_args.args.lr_scheduler_args]
{}
"""
PAGES = (
    Form("gui.json", json.dumps(GUI), {"rank": 16, "alpha": 8, "rates": (1e-4, 1e-4, 0), "schedule": COSINE_FROM_10,
         "steps": 100}),
    Form("gui_text.json", json.dumps(GUI | {"text_encoder_lr": 5e-5, "unet_lr": 0, "bucket_no_upscale": False}
         | {"min_bucket_reso": 256, "max_bucket_reso": 1024, "bucket_reso_steps": 64}),
         {"rates": (0, 5e-5, 0), "buckets": sized(AREA_512)}),
    Form("gui_little.json", json.dumps({"LoRA_type": "Standard", "pretrained_model_name_or_path": "m", "epoch": 2}), {
         "rank": 8, "alpha": 1, "rates": (1e-4, 1e-4, 0), "epochs": 2, "buckets": sized("512x512 512x384 384x512 "
         "640x320 640x384 384x640 768x256 512x384 320x768 576x384")}),
    Form("gui_added.json", json.dumps(GUI | {"lr_warmup": 0, "additional_parameters":
         '--lr_scheduler_type "CosineAnnealingLR" --lr_scheduler_args "T_max=30"'}), {"left": [], "schedule":
         [1.0, 0.75, 0.25, 0.0, 0.25, 0.75, 1.0, 0.75, 0.25, 0.0]}),
    Form("gui_epochs.json", json.dumps(GUI | {"max_train_epochs": 3, "stop_text_encoder_training": 50}),
         {"epochs": 3, "left": []}),
    Form("gui_loha.json", json.dumps(GUI | {"LoRA_type": "Kohya LoHa", "optimizer": "Prodigy", "learning_rate": 1}
         | {"optimizer_args": "d_coef=2 decouple=True"}), {"rank": 16, "algorithm": "loha", "options": {"d_coef": 2.0,
         "weight_decay": 0.0, "use_bias_correction": False, "safeguard_warmup": False, "slice_p": 1}}),
    Form("gui_anima.json", json.dumps(GUI | {"LoRA_type": "Anima", "anima_checkbox": True}), {"family": "anima",
         "levels": [0.1618, 0.2619, 0.3375, 0.4048, 0.4686, 0.5314, 0.5952, 0.6625, 0.7381, 0.8382]}),
    Form("gui_flux.json", json.dumps(GUI | {"LoRA_type": "Flux1", "flux1_checkbox": True, "text_encoder_lr": 5e-5}
         | {"t5xxl_lr": 2e-5, "unet_lr": 1e-4, "model_prediction_type": "raw", "train_t5xxl": True}),
         {"rates": (1e-4, 5e-5, 2e-5), "left": []}),
    Form("gui_clip.json", json.dumps(GUI | {"LoRA_type": "Flux1", "flux1_checkbox": True, "text_encoder_lr": 5e-5}
         | {"t5xxl_lr": 2e-5, "unet_lr": 1e-4, "model_prediction_type": "raw"}),
         {"rates": (1e-4, 5e-5, 0), "left": []}),
    Form("easy.toml", EASY, {"rank": 12, "alpha": 6, "rates": (1e-4, 5e-5, 0), "schedule": COSINE, "weights": MIN_SNR,
         "buckets": sized(AREA_512), "options": ADAMW | {"weight_decay": 0.1}, "captions": MOVED, "left": []}),
    Form("easy_rex.toml", EASY_REX.format('lr_scheduler_num_cycles = 1\nwarmup_ratio = 0.1\n', "gamma = 0.9"), {
         "left": [], "schedule": [0.0, 1.0, 0.987778, 0.9725, 0.952857, 0.926667, 0.89, 0.835, 0.743333, 0.56]}),
    Form("easy_again.toml", EASY_REX.format("lr_scheduler_num_cycles = 2\n", "gamma = 0.5\nd = 0.8"), {"schedule":
         [1.0, 0.952857, 0.883529, 0.771538, 0.56, 0.5, 0.476667, 0.442353, 0.386923, 0.282222]}),
    Form("easy_cosine.toml", EASY_REX.replace("Rex", "Cosine").format("lr_scheduler_num_cycles = 2\n",
         "gamma = 1\nmin_lr = 1e-5"), {"schedule":
         [1.0, 0.914058, 0.689058, 0.410942, 0.185942, 1.0, 0.914058, 0.689058, 0.410942, 0.185942]}),
)  # fmt: skip
ONE = {"training_method": "LORA", "base_model_name": "m", "concepts": [{"path": "/d"}]}
XL_512 = sized("512x512 576x448 448x576 704x384 704x384 384x704 896x320 640x448 320x832 640x448")
ONE_512 = sized("512x512 576x456 456x576 728x360 680x384 384x680 888x296 624x416 320x808 624x416")
ONETRAINER = (
    Form("preset.json", json.dumps(ONE), {"rank": 16, "alpha": 1, "rates": (3e-6, 3e-6, 0), "options": ADAMW,
         "buckets": ONE_512, "captions": ["a, b, c"], "flip": False, "weights": FLAT}),
    Form("larger.json", json.dumps(ONE | {"model_type": "STABLE_DIFFUSION_XL_10_BASE"}), {"buckets": XL_512}),
    Form("cosine.json", json.dumps(ONE | {"learning_rate_scheduler": "COSINE", "learning_rate_warmup_steps": 40.0}
         | {"gradient_accumulation_steps": 4, "learning_rate": 1e-4, "learning_rate_scaler": "BOTH", "batch_size": 4}
         | {"text_encoder": {"train": False}}), {"schedule": COSINE_FROM_10, "rates": (4e-4, 0, 0)}),
    Form("waves.json", json.dumps(ONE | {"learning_rate_scheduler": "COSINE_WITH_RESTARTS", "learning_rate_cycles": 2.0}
         | {"learning_rate_warmup_steps": 0.0, "loss_weight_fn": "P2", "loss_weight_strength": 2.0}), {"schedule":
         [1.0, 0.654508, 0.095492, 0.095492, 0.654508, 1.0, 0.654508, 0.095492, 0.095492, 0.654508], "weights":
         [7.22537e-07, 0.00234482, 0.0111887, 0.0606678, 0.16769, 0.33122, 0.523695, 0.841768, 0.971898, 0.990701]}),
    Form("hard.json", json.dumps(ONE | {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "resolution": "1024"}
         | {"learning_rate_cycles": 3.0, "learning_rate_warmup_steps": 0.0, "loss_weight_fn": "MIN_SNR_GAMMA"}
         | {"force_v_prediction": True}), {"schedule": RESTARTS, "weights": MIN_SNR_V, "buckets": sized(
         "1024x1024 1144x912 912x1144 1448x728 1352x776 776x1352 1776x592 1256x840 648x1616 1256x840")}),
    Form("rex.json", json.dumps(ONE | {"learning_rate_scheduler": "REX", "learning_rate_warmup_steps": 0}
         | {"loss_weight_fn": "DEBIASED_ESTIMATION", "optimizer": {"optimizer": "PRODIGY", "d_coef": 0.5}}), {
         "schedule": [1.0, 0.989011, 0.97561, 0.958904, 0.9375, 0.909091, 0.869565, 0.810811, 0.714286, 0.526316],
         "weights": DEBIASED, "options": {"d_coef": 0.5,
         "weight_decay": 0.0, "slice_p": 1, "use_bias_correction": False}}),
    Form("line.json", json.dumps(ONE | {"learning_rate_scheduler": "LINEAR", "learning_rate_min_factor": 0.1}
         | {"learning_rate_warmup_steps": 0, "loss_weight_fn": "P2", "loss_weight_strength": 0.5}
         | {"force_v_prediction": True}), {"schedule": [1.0, 0.91, 0.82, 0.73, 0.64, 0.55, 0.46, 0.37, 0.28, 0.19],
         "weights":
         [0.0291427, 0.214911, 0.309287, 0.444556, 0.539007, 0.60439, 0.647952, 0.691724, 0.704583, 0.706281]}),
    Form("free.json", json.dumps(ONE | {"learning_rate_scheduler": "COSINE", "optimizer": {"optimizer":
         "SCHEDULE_FREE_ADAMW"}}), {"schedule": FLAT, "options": ADAMW}),
    Form("version0.json", json.dumps(ONE | {"optimizer": "ADAM", "optimizer_beta2": 0.99, "train_text_encoder": False}
         | {"unet_learning_rate": 2e-4, "min_snr_gamma": 5.0}), {"rates": (2e-4, 0, 0), "weights": MIN_SNR,
         "options": {"betas": (0.9, 0.99), "weight_decay": 0.0}}),
    Form("flux.json", json.dumps(ONE | {"model_type": "FLUX_DEV_1", "learning_rate": 1e-4, "text_encoder":
         {"train": True, "learning_rate": 1e-5, "stop_training_after": 7, "stop_training_after_unit": "STEP"},
         "text_encoder_2": {"train": True, "stop_training_after_unit": "NEVER"}}),
         {"rates": (1e-4, 1e-5, 1e-4), "left": [], "stops": (0, 7, 0)}),
    Form("flux_alone.json", json.dumps(ONE | {"model_type": "FLUX_DEV_1", "learning_rate": 1e-4, "text_encoder_2":
         {"train": False}}), {"rates": (1e-4, 0, 0), "left": []}),
    Form("sd3.json", json.dumps(ONE | {"model_type": "STABLE_DIFFUSION_35", "learning_rate": 1e-4, "text_encoder":
         {"train": False}, "text_encoder_2": {"train": True}, "text_encoder_3": {"train": True}}),
         {"rates": (1e-4, 0, 1e-4), "left": ["text_encoder_3.train = True"]}),
    Form("concepts.json", json.dumps([{"path": "/d", "text": {"enable_tag_shuffling": True}}]), {"captions": MOVED}),
    Form("dropped.json", json.dumps([{"path": "/d", "text": {"tag_dropout_enable": True, "tag_dropout_mode": "RANDOM",
         "tag_dropout_probability": 0.5}}]), {"captions": LOSING}),
    Form("listed.json", json.dumps([{"path": "/d", "text": {"tag_dropout_enable": True, "tag_dropout_mode": "RANDOM",
         "tag_dropout_probability": 0.5, "tag_dropout_special_tags": "b", "keep_tags_count": 0,
         "tag_dropout_special_tags_mode": "WHITELIST"}}]), {"captions": ["a, b", "a, b, c", "b", "b, c"]}),
    *(
        Form(f"{kind.lower()}.json", json.dumps(ONE | {"timestep_distribution": kind, "noising_weight": weight,
             "noising_bias": bias}), {"levels": levels})
        for kind, weight, bias, levels in (
            ("LOGIT_NORMAL", 0.2, -0.3, [0.093, 0.175, 0.247, 0.318, 0.389, 0.462, 0.54, 0.624, 0.719, 0.842]),
            ("HEAVY_TAIL", 0.8, 0.0, [0.085, 0.226, 0.332, 0.411, 0.472, 0.527, 0.588, 0.667, 0.773, 0.914]),
            ("SIGMOID", 5.0, 0.0, [0.203, 0.39, 0.505, 0.594, 0.67, 0.738, 0.801, 0.861, 0.918, 0.973]),
            ("INVERTED_PARABOLA", 7.7, 0.0, [0.129, 0.24, 0.324, 0.397, 0.467, 0.534, 0.604, 0.677, 0.761, 0.872]),
            ("COS_MAP", 0.0, 0.0, [0.073, 0.194, 0.293, 0.381, 0.461, 0.54, 0.62, 0.708, 0.807, 0.928]),
            ("BETA", 0.5, 1.0, [0.002, 0.022, 0.062, 0.122, 0.202, 0.302, 0.422, 0.562, 0.722, 0.902]),
        )
    ),
)  # fmt: skip


def job(train: str = "", network: str = "type: lora, linear: 16, linear_alpha: 8", dataset: str = "") -> str:
    return f"""
job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      network: {{{network}}}
      datasets: [{{folder_path: /d, {dataset}}}]
      train: {{steps: 100, lr: 1e-4{", " + train if train else ""}}}
      model: {{name_or_path: m, arch: sd1}}
"""


PIPE = 'output_dir = "o"\nmicro_batch_size_per_gpu = 1\n[model]\ntype = "wan"\ndtype = "bfloat16"\n[adapter]\n'
PIPE += 'type = "lora"\nrank = 32\n[optimizer]\ntype = "adamw_optimi"\nlr = 2e-5\n'
OTHERS = (
    Form("job.yaml", job(), {"rank": 16, "alpha": 8, "rates": (1e-4, 0, 0), "schedule": FLAT, "left": [], "options":
         ADAMW | {"eps": 1e-6}, "buckets": sized("512x512 576x448 448x576 768x320 640x384 384x640 896x256 576x448 "
         "320x768 576x448")}),
    Form("names.yml", job("lr_scheduler: cosine, lr_scheduler_params: {eta_min: 1e-5}, min_snr_gamma: 5.0",
         "rank: 8, alpha: 4", "resolution: [1024], bucket_tolerance: 32"), {"rank": 8, "alpha": 4, "schedule":
         TO_A_TENTH, "weights": MIN_SNR, "buckets": sized("512x512 640x480 480x640 1024x512 1344x768 768x1344 1792x576 "
         "672x512 320x800 1248x832")}),
    Form("rate.yaml", job("unet_lr: 5e-4, text_encoder_lr: 1e-5, train_text_encoder: true"),
         {"rates": (1e-4, 1e-4, 0), "left": []}),
    Form("flux.yaml", job("train_text_encoder: true").replace("sd1", "flux"), {"rates": (1e-4, 1e-4, 0), "left": []}),
    Form("sd3.yaml", job("train_text_encoder: true").replace("sd1", "sd3"), {"rates": (1e-4, 1e-4, 1e-4), "left": []}),
    Form("wan.yaml", job("train_text_encoder: true").replace("sd1", "wan21"), {"rates": (1e-4, 0, 0), "left":
         ["train.train_text_encoder = True"]}),
    Form("rises.yaml", job("lr_scheduler: linear, optimizer: prodigy", dataset="shuffle_tokens: true, keep_tokens: 2"),
         {"schedule": [0.333333, 0.4, 0.466667, 0.533333, 0.6, 0.666667, 0.733333, 0.8, 0.866667, 0.933333], "rates":
         (1, 0, 0), "options": {"eps": 1e-6, "weight_decay": 0.0}, "captions": ALL_MOVED}),
    Form("warm.yaml", job("lr_scheduler: constant_with_warmup, lr_scheduler_params: {num_warmup_steps: 20}, "
         "optimizer: adafactor", dataset="token_dropout_rate: 0.5, keep_tokens: 1"), {"schedule": RISEN, "captions":
         LOSING, "options": {"relative_step": False, "scale_parameter": False}}),
    Form("again.json", json.dumps({"config": {"process": [{"type": "ui_trainer", "network": {"type": "lokr"}, "train":
         {"lr_scheduler": "cosine_with_restarts", "optimizer": "lion8bit", "steps": 100}, "model": {}}]}}),
         {"schedule": COSINE, "algorithm": "lokr", "full": True, "rates": (1e-6, 0, 0)}),
    Form("fixed.yaml", job("snr_gamma: 5.0, optimizer_params: {weight_decay: 0.1}, optimizer: adamw8bit",
         dataset="buckets: false, resolution: 640"), {"weights": FLAT, "left": ["train.snr_gamma = 5.0"], "buckets":
         [(640, 640)] * 10, "options": ADAMW | {"eps": 1e-6, "weight_decay": 0.1}}),
    Form("pipe.toml", PIPE + "betas = [0.9, 0.95]\nweight_decay = 0.02\neps = 1e-7\n", {"rank": 32, "alpha": 32,
         "family": "wan", "rates": (2e-5, 0, 0), "options": {"betas": (0.9, 0.95), "weight_decay": 0.02, "eps": 1e-7}}),
    Form("pipe_default.toml", 'epochs = 5\nlr_scheduler = "cosine"\n' + PIPE, {"epochs": 5, "options":
         {"betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-6}, "floor": 0.05}),
    Form("pipe_pictures.toml", PIPE.replace('"wan"', '"minimax_h3"\ntimestep_sample_method = "uniform"\n'
         "shift = 8\nimage_shift = 1"), {"levels": list(SHARES), "weights": FLAT}),
    Form("tuner.json", json.dumps({"model_family": "sdxl", "model_type": "lora", "lora_rank": 8, "snr_gamma": 5}
         | {"max_train_steps": 100}), {"rank": 8, "alpha": 8, "rates": (4e-7, 0, 0), "schedule": FLAT,
         "weights": MIN_SNR, "batch": 4, "clips": (0, 2), "options": ADAMW | {"eps": 1e-6}}),
    Form("sine.json", json.dumps({"model_family": "sdxl", "lr_scheduler": "sine", "lr_warmup_steps": 100}
         | {"learning_rate": "1e-4", "max_train_steps": 100, "grad_clip_method": "norm"}), {"clips": (2, 0), "schedule":
         [0.502, 0.65589, 0.79471, 0.90489, 0.97562, 1.0, 0.97562, 0.90489, 0.79471, 0.65589]}),
    Form("wave.json", json.dumps({"model_family": "sdxl", "lr_scheduler": "cosine", "lr_warmup_steps": 20}
         | {"learning_rate": 1e-4, "max_train_steps": 100}), {"schedule":
         [1.0, 0.502, 0.004, 0.50199, 1.0, 0.502, 0.004, 0.50199, 1.0, 0.502]}),
    Form("power.json", json.dumps({"model_family": "sdxl", "lr_scheduler": "polynomial", "lr_warmup_steps": 10}
         | {"learning_rate": 1e-4, "max_train_steps": 100}), {"schedule":
         [0.0, 1.0, 0.910436, 0.818599, 0.724089, 0.62636, 0.524611, 0.417583, 0.303012, 0.175738]}),
    Form("whole.json", json.dumps({"model_family": "sdxl", "model_type": "full", "learning_rate": 1e-5}
         | {"timestep_bias_strategy": "none"}), {"algorithm": "full", "rates": (1e-5, 0, 0), "left": []}),
    Form("shifts.json", json.dumps({"model_family": "flux", "flow_schedule_auto_shift": True, "max_train_steps": 100}),
         {"levels": [0.3667, 0.5155, 0.6045, 0.6711, 0.7257, 0.7728, 0.8152, 0.8548, 0.8943, 0.9395], "weights": FLAT}),
    Form("backends.json", json.dumps([{"id": "a", "dataset_type": "image", "caption_strategy": "instanceprompt",
         "instance_prompt": "cat", "resolution": 720, "resolution_type": "pixel_area"}]), {"captions": ["cat"],
         "buckets": sized("768x768 832x640 640x832 1024x512 960x512 512x960 1216x384 832x576 448x1088 832x576")}),
    Form("square.json", json.dumps([{"id": "a", "dataset_type": "image", "resolution": 512, "crop": True}]),
         {"buckets": [(512, 512)] * 10}),
    Form("aligned.json", json.dumps({"model_family": "flux2", "resolution": 512}), {"buckets": sized(
         "512x512 592x448 448x592 720x368 688x384 384x688 880x288 608x432 336x784 624x416")}),
    Form("warm.json", json.dumps({"--model_family": "flux", "--lora_rank": 4, "--max_train_steps": 100,
         "--lr_scheduler": "constant_with_warmup", "--lr_warmup_steps": 20}),
         {"family": "flux", "rank": 4, "schedule": RISEN}),
)  # fmt: skip
FORMS = (*SD_SCRIPTS, *FLOWS, *PAGES, *ONETRAINER, *OTHERS)


def brought(folder: Path, form: Form) -> tuple[Imported, RunConfig]:
    for name, text in ((form.name, form.text), form.beside):
        if name:
            (folder / name).write_text(text, encoding="utf-8")
    found = read_foreign(folder / form.name)
    return found, opened(found)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_file_trains_by_the_numbers_of_its_program(tmp_path: Path, form: Form) -> None:
    found, config = brought(tmp_path, form)
    expected = form.expected
    told = {
        "rank": config.lora.rank,
        "alpha": config.lora.alpha,
        "algorithm": config.lora.algorithm,
        "full": config.lora.full_matrix,
        "family": found.family,
        "rates": pytest.approx(config.optimizer.part_rates),
        "stops": config.optimizer.part_stops,
        "steps": config.train.steps,
        "epochs": config.train.epochs,
        "batch": config.train.batch_size,
        "clips": (config.optimizer.max_grad_norm, config.optimizer.max_grad_value),
        "floor": pytest.approx(config.scheduler.min_lr_ratio),
        "guidance": config.base_model.connected.guidance if config.base_model.connected else None,
        "loss_on": config.objective.loss_on,
        "left": found.left,
        "open": found.open,
        "controls": next((each.controls.folders for each in config.dataset.concepts if each.controls), ()),
        "flip": bool(config.dataset.concepts) and config.dataset.concepts[0].flip,
    }
    assert {name: value for name, value in expected.items() if name in told} == {
        name: value for name, value in told.items() if name in expected
    }
    if "options" in expected:
        used = arguments(config.optimizer)
        assert {name: used[name] for name in expected["options"]} == expected["options"]
    if "schedule" in expected:
        assert schedule(config, LENGTH) == pytest.approx(expected["schedule"], abs=1e-5)  # some round their rates
    if "buckets" in expected:
        assert buckets(config) == expected["buckets"]
    if "weights" in expected:
        assert weights(config, found.family) == pytest.approx(expected["weights"], rel=2e-5)
    if "levels" in expected:
        assert shares(config, expected["levels"]) == pytest.approx(SHARES, abs=0.006)
    if "captions" in expected:
        assert captions(config, expected.get("lines", LINES)) == set(expected["captions"])
    if "told" in expected:
        assert any(expected["told"] in each for each in found.open)


def test_forty_files_are_of_every_program() -> None:
    assert len(FORMS) >= 40 and len({form.name for form in FORMS}) == len(FORMS)
    endings = {Path(form.name).suffix for form in FORMS}
    assert endings == {".toml", ".json", ".yaml", ".yml", ".sh", ".bat", ".ps1"}


def test_a_picture_smaller_than_a_step_has_a_shape() -> None:
    config = BucketConfig(shapes="musubi", no_upscale=True)
    assert tuple(shape_of((30, 200), parse_resolution("512"), config, 64).bucket) == (64, 192)
