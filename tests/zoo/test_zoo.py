"""The zoo knows every model class of ComfyUI: as a row, as a variant of a row, or with the reason why it is none."""

import comfy.supported_models
import torch
from zoo.zoo import ROWS, build, conditioning

VARIANTS = {  # classes that build the network of a row, with other sizes or further inputs
    "sd15": "SD20 SD21UnclipL SD21UnclipH SD15_instructpix2pix",
    "sdxl": "SDXLRefiner SSD1B KOALA_1B Segmind_Vega SDXL_instructpix2pix",
    "flux_dev": "FluxInpaint",
    "hunyuan_dit": "HunyuanDiT1",
    "hunyuan_video": "HunyuanVideoI2V HunyuanVideoSkyreelsI2V",
    "hunyuan_video15": "HunyuanVideo15_SR_Distilled",
    "wan21_t2v": "WAN21_FunControl2V WAN21_Camera WAN22_Camera WAN21_FlowRVS WAN21_CausalAR_T2V",
    "cosmos_t2v": "CosmosI2V",
    "cosmos_predict2": "CosmosI2VPredict2",
    "kandinsky5_image": "Kandinsky5",
    "cogvideox": "CogVideoX_I2V CogVideoX_Inpaint",
}
NO_ROW = {
    "an upscaler or refiner, which starts from a picture": "SD_X4Upscaler HunyuanImage21Refiner SeedVR2 PiD",
    "a view or video from one picture, without captions": "Stable_Zero123 SVD_img2vid SV3D_u SV3D_p",
    "it predicts from pictures, not from noise": "LotusD RT_DETR_v4 SAM3 SAM31 DepthAnything3",
    "sound": "StableAudio StableAudio3 ACEStep ACEStep15 MiniMaxMusic3 YuE2",
    "video with sound, or driven by it": "MiniMaxH3 WAN22_S2V WAN21_HuMo",
    "video driven by another video": "WAN22_Animate WAN_Animate2 WAN21_SCAIL WAN21_SCAIL2 WAN22_WanDancer",
    "3-D": "Hunyuan3Dv2 Hunyuan3Dv2_1 Hunyuan3Dv2mini TripoSplat Trellis2",
}


def test_every_class_of_comfyui_is_known():
    known = {row.cls for row in ROWS.values()}
    for classes in (*VARIANTS.values(), *NO_ROW.values()):
        known |= set(classes.split())
    listed = (
        kind for kind in comfy.supported_models.models if kind.__module__.startswith("comfy.")
    )  # not our tiny one
    found = {kind.__name__ for kind in listed}
    assert not found - known, "give these classes a row in zoo.py, or a reason here"


def test_variants_are_of_rows():
    assert set(VARIANTS) <= set(ROWS)


def test_a_model_is_a_function_of_its_seed(name):
    first, second, other = (build(name, seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(value.isfinite().all() for value in first.values())
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_captions_differ_by_seed_and_length(name):
    captions = [conditioning(name, seed, tokens)[0][0] for seed, tokens in ((1, 0), (1, 0), (2, 0), (1, 5))]
    assert torch.equal(captions[0], captions[1])
    assert not torch.equal(captions[0], captions[2])
    assert captions[3].shape == (1, 5, captions[0].shape[2])
