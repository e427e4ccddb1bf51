"""What is known of each architecture: how others train it, how it is sampled, and what tells its files from others.

A MODEL finds its row by ComfyUI's own classes, never by names of files. The names of architectures in LoRA files are
those of sd-scripts and musubi-tuner, where they train it; steps and cfg are those of ComfyUI's own templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from ..config import MOST_CONTROLS
from .base import LevelDefaults
from .diffusers_tables import (
    CHROMA,
    COGVIDEOX,
    COSMOS_1,
    FLUX_1,
    HUNYUAN_IMAGE,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    IDEOGRAM_4,
    LONGCAT_IMAGE,
    Conversion,
    NameTable,
    NoLoras,
)

FEW = {"steps": 8, "cfg": 1.0}  # how models that are distilled to a few steps draw
OWN = 0.0  # for the shift of levels: the one that the MODEL is sampled with


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How pictures of an architecture are drawn."""

    steps: int = 20
    cfg: float = 4.0
    sampler: str = "euler"
    scheduler: str = "simple"
    guidance: float | None = None  # distilled guidance; None where the model takes none


class Halves(NamedTuple):
    """A model of two files, its experts: the noisier one predicts from a time on, the other one below it."""

    title: str
    boundary: float  # of the model that draws from text
    from_picture: float  # of the one that draws from a picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """An architecture, and the settings that a run takes for it where the person sets none."""

    kind: str
    title: str
    classes: tuple[str, ...]  # of comfy.supported_models or comfy.model_base; of subclasses it is a guess
    where: Mapping[str, Any] = field(default_factory=dict)  # settings of its network that tell members of a class apart
    modelspec: str = ""  # its architecture in modelspec's metadata
    base_version: str = ""  # in kohya's metadata
    levels: LevelDefaults
    guidance: float | None = None  # distilled guidance in training; None where the model takes none
    guidance_source: str = "OneTrainer"
    sampling: Sampling = field(default_factory=Sampling)
    step: int = 0  # sides of pictures are multiples of it, in pixels; 0 in the table: latent pixels times patches
    pixels: Fraction | None = None  # per latent pixel, where pictures are scaled before the VAE; None: as the VAE does
    frames: int = 0  # of a clip per latent frame after the first; 0: it is trained on single pictures
    rate: int = 0  # frames per second of the clips that it was made for; 0: it draws single pictures
    rank: int = 16
    learning_rate: float = 1e-4
    resolution: int = 1024
    caption_dropout: float = 0.05
    source: str = "rank as OneTrainer, learning rate and caption dropout as ai-toolkit"  # of these
    references: int = 0  # control pictures that it reads at most, as ComfyUI's reference latents
    alone: bool = False  # it also draws from a caption alone, its channels for a control picture empty
    seen: bool = False  # its text encoder reads control pictures, too
    distilled: str = ""  # why it should not be trained, and what to do instead
    train_on: str = "its base"  # instead of one of its models that is distilled to a few steps
    adapter: str = ""  # a LoRA beneath such a model, that keeps its steps from being undone, by its usual name
    few: Mapping[str, Any] = field(default_factory=dict)  # how such a model draws, where unlike `FEW` and `sampling`
    # Patterns of names of distilled files, in lower case, beside those of all; with words for it, "" for what matched.
    few_steps: Mapping[str, str] = field(default_factory=dict)
    halves: Halves | None = None  # where it has models of two files, for much and little noise
    untried: bool = False  # no trainer's values were found
    # What tells its files, and what they are called then. A mark of several architectures stands in one of their rows.
    in_loras: Mapping[str, str] = field(default_factory=dict)  # patterns of layers' names with underscores for dots
    in_files: Mapping[str, str] = field(default_factory=dict)  # starts of names of tensors
    diffusers: NameTable | Conversion | NoLoras | None = None  # None: ComfyUI's own map tells them


def uniform(source: str, shift: float = 1.0) -> LevelDefaults:
    """Draw every time equally often, then shifted."""
    return LevelDefaults(distribution="uniform", shift=shift, source=source)


def middle(source: str, shift: float = 1.0) -> LevelDefaults:
    """Draw times from sigmoid(z) of Gaussian z, mostly the middle, then shifted."""
    return LevelDefaults(distribution="logit_normal", shift=shift, source=source)


def by_tokens(source: str, token: int, last: float = 1.15, many: int = 4096) -> LevelDefaults:
    """Draw times as `middle`, shifted by the size of the picture as Flux is sampled; last: mu at `many` tokens."""
    return LevelDefaults(distribution="logit_normal", by_tokens=(0.5, last, 256, many), token=token, source=source)


NONE_FOUND = "no trainer's values were found"
OWN_SHIFT = "the shift is the one that the MODEL is sampled with, since no trainer's values were found"
FLUX = by_tokens("sd-scripts' flux_shift, as OneTrainer's dynamic shift", 2)
FLUX2 = by_tokens("musubi-tuner's flux2_shift, as OneTrainer's dynamic shift", 1)
WAN = middle("musubi-tuner, docs/wan.md", 3.0)
MUSUBI = "rank and learning rate as musubi-tuner, caption dropout as ai-toolkit"
COSMOS_2 = Conversion("CosmosTransformer3DModel", ("blocks.0.adaln_modulation_self_attn.1",), "net.")
KLEIN = Sampling(steps=20, cfg=5.0)
KLEIN_IN_FEW = {r"^(?!.*base).*klein": "klein without base"}

# The first row with a mark of a file decides. So FLUX comes behind its kin, whose blocks have the same names.
ARCHITECTURES = (
    Architecture(
        kind="sd1",
        title="Stable Diffusion 1",
        classes=("SD15",),
        modelspec="stable-diffusion-v1",
        base_version="sd_v1",
        levels=uniform("sd-scripts"),
        sampling=Sampling(cfg=7.0, scheduler="normal"),
        resolution=512,
    ),
    Architecture(
        kind="sd2",
        title="Stable Diffusion 2",
        classes=("SD20",),
        modelspec="stable-diffusion-v2-512",
        base_version="sd_v2",
        levels=uniform("sd-scripts"),
        sampling=Sampling(cfg=7.0, scheduler="normal"),
        resolution=768,
    ),
    Architecture(
        kind="sdxl",
        title="Stable Diffusion XL",
        classes=("SDXL",),
        modelspec="stable-diffusion-xl-v1-base",
        base_version="sdxl_base_v1-0",
        levels=uniform("sd-scripts"),
        sampling=Sampling(cfg=7.0, scheduler="normal"),
        few={"scheduler": "sgm_uniform"},
    ),
    Architecture(
        kind="flux2",
        title="FLUX.2 dev",
        classes=("Flux2",),
        modelspec="Flux.2-dev",
        base_version="flux_2_dev",
        levels=FLUX2,
        guidance=1.0,
        sampling=Sampling(cfg=1.0, guidance=4.0),
        references=MOST_CONTROLS,
        in_loras={"double_stream_modulation|to_qkv_mlp_proj": "FLUX.2"},
        in_files={"double_stream_modulation_img.": "a FLUX.2 model"},
        diffusers=Conversion("Flux2Transformer2DModel", ("double_stream_modulation_img.lin",)),
    ),
    Architecture(
        kind="flux2_klein",
        title="FLUX.2 Klein 9B",
        classes=("Flux2",),
        where={"guidance_embed": False, "hidden_size": 4096},
        modelspec="Flux.2-klein-9b",
        base_version="flux_2_klein_9b",
        levels=FLUX2,
        sampling=KLEIN,
        few_steps=KLEIN_IN_FEW,
        few={"steps": 4},
        train_on="FLUX.2 Klein base",
        references=MOST_CONTROLS,
    ),
    Architecture(
        kind="flux2_klein",
        title="FLUX.2 Klein",
        classes=("Flux2",),
        where={"guidance_embed": False},
        modelspec="Flux.2-klein-4b",
        base_version="flux_2_klein_4b",
        levels=FLUX2,
        sampling=KLEIN,
        few_steps=KLEIN_IN_FEW,
        few={"steps": 4},
        train_on="FLUX.2 Klein base",
        references=MOST_CONTROLS,
    ),
    Architecture(
        kind="chroma",
        title="Chroma",
        classes=("Chroma",),
        modelspec="chroma",
        base_version="chroma",
        levels=middle("sd-scripts, docs/flux_train_network.md"),
        guidance=0.0,
        guidance_source="sd-scripts",
        sampling=Sampling(steps=26, guidance=0.0, scheduler="beta"),
        in_loras={"distilled_guidance_layer": "Chroma"},
        in_files={"distilled_guidance_layer.": "a Chroma model"},
        diffusers=CHROMA,
    ),
    Architecture(
        kind="hunyuan_video_15",
        title="HunyuanVideo 1.5",
        classes=("HunyuanVideo15",),
        modelspec="hunyuan-video-1.5",
        base_version="hunyuan_video_1_5",
        levels=middle("musubi-tuner, docs/hunyuan_video_1_5.md", 2.0),
        frames=4,
        rate=24,
        sampling=Sampling(cfg=6.0),
        rank=32,
        resolution=768,
        source=MUSUBI,
        alone=True,
        in_loras={"individual_token_refiner": "HunyuanVideo or HunyuanImage"},
        in_files={"txt_in.individual_token_refiner.": "a HunyuanVideo model"},
        diffusers=HUNYUAN_VIDEO_15,
    ),
    Architecture(
        kind="hunyuan_video",
        title="HunyuanVideo",
        classes=("HunyuanVideo",),
        modelspec="hunyuan-video",
        base_version="hunyuan_video",
        levels=middle("musubi-tuner, docs/hunyuan_video.md", 7.0),
        frames=4,
        rate=24,
        guidance=1.0,
        sampling=Sampling(cfg=1.0, guidance=6.0),
        rank=32,
        learning_rate=2e-4,
        resolution=768,
        source=MUSUBI,
        diffusers=HUNYUAN_VIDEO,
    ),
    Architecture(
        kind="hunyuan_image",
        title="HunyuanImage 2.1",
        classes=("HunyuanImage21",),
        modelspec="hunyuan-image-2.1",
        base_version="hunyuan-image-2.1",
        levels=uniform("sd-scripts, docs/hunyuan_image_train_network.md", 5.0),
        sampling=Sampling(cfg=3.5),
        resolution=2048,
        diffusers=HUNYUAN_IMAGE,
    ),
    Architecture(
        kind="hidream",
        title="HiDream I1",
        classes=("HiDream",),
        levels=middle("OneTrainer's preset"),
        sampling=Sampling(steps=50, cfg=5.0, sampler="uni_pc"),
        few_steps={r"(?<![a-z])(dev|fast)(?![a-z])": ""},
        few={"steps": 28, "sampler": "lcm", "scheduler": "normal"},
        in_loras={"double_stream_blocks": "HiDream"},
        in_files={"caption_projection.0.linear.": "a HiDream model"},
    ),
    Architecture(
        kind="kandinsky6",
        title="Kandinsky 6",
        classes=("Kandinsky6",),  # not in ComfyUI yet: node packs make it of Kandinsky5
        levels=middle(OWN_SHIFT, OWN),
        untried=True,
        in_loras={r"visual_blocks_\d+_videoT|video_dec_block": "Kandinsky 6"},
        in_files={"visual_blocks.0.videoT.": "a Kandinsky 6 model"},
    ),
    # Not in ComfyUI yet, as the next two: rows that wait for their classes.
    Architecture(
        kind="flux3_klein",
        title="FLUX.3 klein",
        classes=("Flux3",),
        levels=middle("SimpleTuner's FLOW_SHIFT of this model", 6.93),
        sampling=KLEIN,
        few_steps=KLEIN_IN_FEW,
        adapter="flux-3-klein-image-training-assistant",
    ),
    Architecture(
        kind="moss_image",
        title="MOSS-Image",
        classes=("MossImage",),
        levels=middle("KohakuMoss, which trains this model without a shift"),
    ),
    Architecture(
        kind="fibo2",
        title="Fibo 2",
        classes=("Fibo2",),
        levels=by_tokens("the dynamic shift of this model's scheduler", 1),
    ),
    Architecture(
        kind="kandinsky5",
        title="Kandinsky 5",
        classes=("Kandinsky5", "Kandinsky5Image"),
        modelspec="Kandinsky-5",
        base_version="kandinsky5",
        levels=middle("musubi-tuner, docs/kandinsky5.md", 5.0),
        sampling=Sampling(steps=50, cfg=3.5),
        frames=4,
        rate=24,
        rank=32,
        source=MUSUBI,
        in_loras={"visual_transformer_blocks": "Kandinsky 5"},
        in_files={"visual_transformer_blocks.": "a Kandinsky 5 model"},
    ),
    Architecture(
        kind="flux",
        title="FLUX.1 dev",
        classes=("Flux",),
        modelspec="flux-1-dev",
        base_version="flux1",
        levels=FLUX,
        guidance=1.0,
        guidance_source="sd-scripts and OneTrainer",
        sampling=Sampling(cfg=1.0, guidance=3.5),
        references=MOST_CONTROLS,
        in_loras={r"single_transformer_blocks|single_blocks_\d|double_blocks_\d": "FLUX"},
        in_files={"double_blocks.": "a FLUX-like model", "single_transformer_blocks.": "a FLUX-like model"},
        diffusers=FLUX_1,
    ),
    Architecture(
        kind="flux",
        title="FLUX.1 Canny or Depth",
        classes=("Flux",),
        where={"in_channels": 32},
        modelspec="flux-1-dev",
        base_version="flux1",
        levels=FLUX,
        guidance=1.0,
        guidance_source="as FLUX.1 dev",
        sampling=Sampling(cfg=1.0, guidance=30.0),
    ),
    Architecture(
        kind="flux",
        title="FLUX.1 Fill",
        classes=("FluxInpaint",),
        where={"in_channels": 96},
        modelspec="flux-1-dev",
        base_version="flux1",
        levels=FLUX,
        guidance=1.0,
        guidance_source="OneTrainer",
        sampling=Sampling(cfg=1.0, guidance=30.0, scheduler="normal"),
    ),
    Architecture(
        kind="flux_schnell",
        title="FLUX.1 schnell",
        classes=("FluxSchnell",),
        modelspec="flux-1-schnell",
        base_version="flux1",
        levels=FLUX,
        sampling=Sampling(steps=4, cfg=1.0),
        distilled="This MODEL is FLUX.1 schnell, or another FLUX.1 without guidance. Schnell is distilled to a few "
        "steps, which training undoes; train on FLUX.1 dev, and use the LoRA on schnell.",
        adapter="FLUX.1-schnell-training-adapter",
    ),
    Architecture(
        kind="longcat_image",
        title="LongCat-Image",
        classes=("LongCatImage",),
        levels=middle(OWN_SHIFT, OWN),
        sampling=Sampling(steps=50, cfg=4.5),
        untried=True,
        diffusers=LONGCAT_IMAGE,
    ),
    Architecture(
        kind="auraflow",
        title="AuraFlow",
        classes=("AuraFlow",),
        levels=middle(OWN_SHIFT, OWN),
        sampling=Sampling(cfg=3.5),
        untried=True,
        in_loras={"joint_transformer_blocks|double_layers": "AuraFlow"},
        in_files={"double_layers.0.attn.w1q": "an AuraFlow model"},
    ),
    Architecture(
        kind="sd3",
        title="Stable Diffusion 3",
        classes=("SD3",),
        modelspec="stable-diffusion-3",
        base_version="sd3",
        levels=middle("sd-scripts' training_shift, as OneTrainer"),
        sampling=Sampling(scheduler="sgm_uniform"),
        in_loras={"joint_blocks": "Stable Diffusion 3"},
        in_files={"joint_blocks.": "a Stable Diffusion 3 model"},
    ),
    Architecture(
        kind="qwen_image",
        title="Qwen-Image",
        classes=("QwenImage",),
        modelspec="Qwen-Image",
        base_version="qwen_image",
        levels=middle("musubi-tuner, docs/qwen_image.md", 2.2),
        learning_rate=5e-5,
        source=MUSUBI,
        references=MOST_CONTROLS,
        seen=True,
        in_loras={"(img|txt)_mlp_net": "Qwen-Image"},
        in_files={"txt_norm.": "a Qwen-Image model", "transformer_blocks.0.img_mod.": "a Qwen-Image model"},
    ),
    Architecture(
        kind="qwen_image_21",
        title="Qwen-Image 2.1",
        classes=("QwenImage21",),
        modelspec="Qwen-Image-2.1",
        base_version="qwen_image_21",
        levels=by_tokens("SimpleTuner's shift of this model", 1, 0.9, 8192),
        adapter="Qwen-Image-2.1-training-assistant-v3",
    ),
    Architecture(
        kind="krea2",
        title="Krea 2",
        classes=("Krea2",),
        modelspec="Krea-2",
        base_version="krea2",
        levels=middle("musubi-tuner, docs/krea2.md", 2.5),
        sampling=Sampling(steps=30),
        rank=32,
        source=MUSUBI,
        train_on="Krea 2 RAW",
        in_loras={r"txtfusion|text_fusion|blocks_\d+_attn_w[qkvo]$": "Krea 2"},
    ),
    Architecture(
        kind="z_image",
        title="Z-Image",
        classes=("ZImage",),
        modelspec="Z-Image",
        base_version="z_image",
        levels=middle("musubi-tuner, docs/zimage.md", 2.0),
        sampling=Sampling(steps=25, sampler="res_multistep"),
        train_on="Z-Image",
        adapter="zimage_turbo_training_adapter_v2",
        in_loras={r"(noise|context)_refiner|layers_\d+_attention_(qkv|out|to_)": "Z-Image or Lumina 2"},
        in_files={"cap_pad_token": "a Z-Image model"},
    ),
    Architecture(
        kind="lumina2",
        title="Lumina 2",
        classes=("Lumina2",),
        modelspec="lumina-2",
        base_version="lumina2",
        levels=middle("sd-scripts, docs/lumina_train_network.md", 6.0),
        sampling=Sampling(steps=30, sampler="res_multistep"),
        in_files={"noise_refiner.": "a Lumina or Z-Image model"},
        diffusers=Conversion(
            "Lumina2Transformer2DModel", ("cap_embedder.1", "layers.0.attention.qkv", "layers.0.adaLN_modulation.1")
        ),
    ),
    Architecture(
        kind="cosmos",
        title="Cosmos 1",
        classes=("CosmosT2V", "CosmosI2V", "CosmosVideo"),
        levels=middle(NONE_FOUND),
        sampling=Sampling(cfg=6.5, scheduler="karras", sampler="res_multistep"),
        frames=8,
        rate=24,
        resolution=704,
        untried=True,
        in_files={"blocks.block0.blocks.0.": "a Cosmos model"},
        diffusers=COSMOS_1,
    ),
    Architecture(
        kind="cosmos_predict2",
        title="Cosmos-Predict2",
        classes=("CosmosT2IPredict2", "CosmosPredict2"),
        levels=middle(NONE_FOUND),
        sampling=Sampling(steps=35),
        untried=True,
        in_loras={"adaln_modulation_|cross_attn_output_proj": "Cosmos or Anima"},
        in_files={"blocks.0.mlp.layer1.": "a Cosmos or Anima model"},
        diffusers=COSMOS_2,
    ),
    Architecture(
        kind="cosmos_predict2_video",
        title="Cosmos-Predict2 Video2World",
        classes=("CosmosI2VPredict2",),
        levels=middle(NONE_FOUND),
        frames=4,
        rate=16,
        resolution=640,
        sampling=Sampling(steps=35),
        untried=True,
        diffusers=COSMOS_2,
    ),
    Architecture(
        kind="anima",
        title="Anima",
        classes=("Anima",),
        modelspec="anima-preview",
        base_version="anima",
        levels=middle("sd-scripts, docs/anima_train_network.md"),
        sampling=Sampling(steps=30, sampler="er_sde"),
        rank=8,
        source="rank and learning rate as sd-scripts, caption dropout as ai-toolkit",
    ),
    Architecture(
        kind="wan",
        title="Wan",
        classes=("WAN21_T2V", "WAN21_I2V", "WAN21"),
        modelspec="wan2.1",
        base_version="wan",
        levels=WAN,
        frames=4,
        rate=16,
        sampling=Sampling(cfg=5.0),
        rank=32,
        learning_rate=2e-4,
        resolution=768,
        source=MUSUBI,
        halves=Halves("Wan 2.2", 0.875, 0.9),  # as its authors' configurations, wan_t2v_A14B.py and wan_i2v_A14B.py
        in_loras={r"blocks_\d+_(self|cross)_attn_[qkvo]$": "Wan"},
        diffusers=Conversion("WanTransformer3DModel", ("blocks.0.cross_attn.o",)),
    ),
    Architecture(
        kind="hunyuan_dit",
        title="HunyuanDiT",
        classes=("HunyuanDiT", "HunyuanDiT1"),
        levels=uniform("sd-scripts"),
        sampling=Sampling(steps=30, cfg=6.0, scheduler="normal"),
        in_loras={"attn1_Wqkv|default_modulation": "HunyuanDiT"},
        in_files={"mlp_t5.": "a Hunyuan DiT model"},
        diffusers=NoLoras("HunyuanDiT2DModel", ("blocks.0.attn1.Wqkv",)),
    ),
    Architecture(
        kind="mochi",
        title="Mochi",
        classes=("GenmoMochi",),
        levels=middle(OWN_SHIFT, OWN),
        frames=6,
        rate=30,
        sampling=Sampling(steps=30, cfg=4.5),
        resolution=512,
        untried=True,
        in_loras={"attn_qkv_[xy]$": "Mochi"},
        in_files={"t5_yproj.": "a Mochi video model"},
        diffusers=Conversion("MochiTransformer3DModel", ("blocks.0.attn.qkv_x",)),
    ),
    Architecture(
        kind="cascade_c",
        title="Stable Cascade C",
        classes=("Stable_Cascade_C", "StableCascade_C"),
        levels=uniform("OneTrainer's preset"),
        sampling=Sampling(sampler="euler_ancestral"),
        step=128,
        pixels=Fraction(128, 3),  # 24 latent pixels for 1024, as it was trained
        untried=True,
        in_loras={r"(down|up)_blocks_\d_\d+_(channelwise|attention_attn|mapper)": "Stable Cascade"},
        in_files={
            "clip_txt_mapper.": "a Stable Cascade model",
            "clip_mapper.": "a Stable Cascade model",
            "clf.1.": "a Stable Cascade model",
        },
        diffusers=NoLoras("StableCascadeUNet", ("down_blocks.0.0.channelwise.0",)),
    ),
    Architecture(
        kind="cascade_b",
        title="Stable Cascade B",
        classes=("Stable_Cascade_B", "StableCascade_B"),
        levels=uniform(NONE_FOUND),
        sampling=Sampling(steps=10, cfg=1.1),
        step=128,
        untried=True,
    ),
    Architecture(
        kind="ltxv",
        title="LTX-Video",
        classes=("LTXV",),
        levels=middle(OWN_SHIFT, OWN),
        frames=8,
        rate=25,
        sampling=Sampling(steps=30, cfg=3.0),
        resolution=768,
        untried=True,
        in_loras={"adaln_single|patchify_proj": "PixArt or LTX"},
        in_files={"patchify_proj.": "an LTX video model"},
        diffusers=Conversion("LTXVideoTransformer3DModel", ("patchify_proj",)),
    ),
    Architecture(
        kind="ltx2",
        title="LTX-2",
        classes=("LTXAV",),
        levels=middle("its scheduler at its longest sequence, as Unsloth", 7.768),  # exp(2.05)
        sampling=Sampling(steps=30, cfg=3.0),
        frames=8,
        rate=25,
        resolution=768,
    ),
    Architecture(
        kind="joyimage",
        title="JoyImage",
        classes=("JoyImage",),
        levels=middle("SimpleTuner's shift of this model", 4.0),
    ),
    Architecture(
        kind="sensenova",
        title="SenseNova U1.5",
        classes=("SenseNovaU15",),
        levels=middle("SimpleTuner's shift of this model", 3.0),
    ),
    Architecture(
        kind="pixart",
        title="PixArt",
        classes=("PixArtAlpha", "PixArtSigma", "PixArt"),
        levels=uniform("OneTrainer's preset"),
        sampling=Sampling(cfg=4.5, scheduler="normal"),
        in_files={"adaln_single.": "a PixArt-like model", "t_block.1.": "a PixArt model"},
    ),
    Architecture(
        kind="wan22_5b",
        title="Wan 2.2 5B",
        classes=("WAN22_T2V", "WAN22"),
        modelspec="wan2.2",
        base_version="wan",
        levels=WAN,
        frames=4,
        rate=24,
        sampling=Sampling(cfg=5.0),
        rank=32,
        learning_rate=2e-4,
        resolution=704,
        source=MUSUBI,
        # Here and not at Wan 2.1, as PixArt's blocks have the first name, too.
        in_files={"blocks.0.cross_attn.": "a Wan video model", "head.modulation": "a Wan video model"},
    ),
    Architecture(
        kind="omnigen2",
        title="OmniGen2",
        classes=("Omnigen2",),
        levels=middle(OWN_SHIFT, OWN),
        sampling=Sampling(cfg=5.0),
        untried=True,
        references=MOST_CONTROLS,
        in_files={"time_caption_embed.": "an OmniGen2 model"},
    ),
    Architecture(
        kind="ideogram4",
        title="Ideogram 4",
        classes=("Ideogram4",),
        levels=middle(OWN_SHIFT, OWN),
        step=16,  # its patches lie in the channels of its latents
        untried=True,
        diffusers=IDEOGRAM_4,
    ),
    Architecture(
        kind="lens",
        title="Lens",
        classes=("Lens",),
        levels=middle(OWN_SHIFT, OWN),
        step=16,  # likewise
        untried=True,
    ),
    Architecture(
        kind="ernie_image",
        title="Ernie-Image",
        classes=("ErnieImage",),
        levels=middle(OWN_SHIFT, OWN),
        untried=True,
    ),
)

# Classes of models that no LoRA of pictures and captions can be trained for, and what they are.
OTHER_KINDS = {
    **dict.fromkeys(("LotusD", "Lotus", "DepthAnything3"), "a model that measures depth"),
    **dict.fromkeys(("RT_DETR_v4", "SAM3", "SAM31"), "a model that finds things in pictures"),
    **dict.fromkeys(("SD_X4Upscaler", "SeedVR2", "PiD", "HunyuanVideo15_SR_Distilled"), "an upscaler"),
    "HunyuanImage21Refiner": "a refiner of finished pictures",
    **dict.fromkeys(("SD21UnclipL", "SD21UnclipH", "SD21UNCLIP"), "a model that takes pictures as prompts"),
    **dict.fromkeys(("SVD_img2vid", "Stable_Zero123"), "a model that takes a picture and no caption"),
    "MiniMaxH3": "a model of video with sound",
    "WAN21_FlowRVS": "a model that turns videos into masks",
    **dict.fromkeys(
        ("StableAudio", "StableAudio1", "ACEStep", "ACEStep15", "MiniMaxMusic3", "YuE2"), "a model of sounds"
    ),
    **dict.fromkeys(("Hunyuan3Dv2", "Hunyuan3Dv2_1", "TripoSplat", "Trellis2"), "a model of three-dimensional shapes"),
}

# What diffusers calls the layers of models without a row; looked up before the rows.
UNLISTED = (
    Conversion("LTX2VideoTransformer3DModel", ("audio_patchify_proj",)),  # it has the layers of LTX-Video, too
    COGVIDEOX,
    NoLoras("JoyImageEditTransformer3DModel", ("double_blocks.0.attn.img_attn_qkv", "condition_embedder.time_proj")),
)
