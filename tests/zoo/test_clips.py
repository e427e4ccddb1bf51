"""Text encoders in few bits, and T5 in Stable Diffusion 3, trained: their files draw what training drew."""

import pytest
import torch
from zoo.again import again
from zoo.clips import clip_of, linked_with, scaled_clip
from zoo.linked import live_of, source_of
from zoo.test_text_encoders import configured, drawn_with, pictures, train  # noqa: F401 (pictures is a fixture)
from zoo.test_train import state_of, unchanged

from lora_atelier.nodes.comfyui.connected.live import LinkedModels

FLOAT8 = torch.float8_e4m3fn
FIRST, SECOND = (1e-3, 0.1, 0.0), (1e-3, 0.0, 0.1)
FORMS = {  # what the CLIP is -> its kind, the CLIP, the rates, and which part is trained
    "float8": ("flux", lambda: clip_of("flux", FLOAT8), FIRST, "te1"),
    "T5 in float8": ("flux", lambda: clip_of("flux", FLOAT8), SECOND, "te3"),
    "T5 in scaled float8": ("flux", scaled_clip, SECOND, "te3"),
    "CLIP-L beside a scaled T5": ("flux", scaled_clip, FIRST, "te1"),
    "Stable Diffusion 3's T5 alone": ("sd3 of T5", lambda: clip_of("sd3 of T5"), FIRST, "te1"),
}


def in_float32(clip):
    """Build a CLIP of the same numbers, as ComfyUI rounds a weight in few bits anew once a LoRA is on it."""
    numbers, plain = clip.cond_stage_model, clip_of("flux")
    for path, module in plain.cond_stage_model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            own = getattr(numbers.get_submodule(path), name)
            parameter.data.copy_(own.dequantize() if hasattr(own, "_qdata") else own.float())
    return plain


@pytest.mark.parametrize("form", ["T5 in scaled float8", *again(*(each for each in FORMS if "T5 in s" not in each))])
def test_a_file_draws_what_training_drew_and_the_clip_stays(form, pictures, tmp_path):  # noqa: F811
    kind, build_clip, rates, part = FORMS[form]
    clip = build_clip()
    base = linked_with(kind, clip)
    drawn_with(live_of(base), {})
    before = state_of(clip.patcher)
    result, notes = train(configured(base, pictures, rates), tmp_path)
    unchanged(before, state_of(clip.patcher))
    assert not any("could not be drawn" in note for note in notes), notes
    assert {name.split("_")[1] for name, t in result.tensors.items() if "up" in name and t.any()} == {"unet", part}
    live = live_of(base)
    live = LinkedModels(live.model, in_float32(clip) if kind == "flux" else clip, live.vae)
    drawn = drawn_with(live, result.tensors)
    alone = {name: tensor for name, tensor in result.tensors.items() if name.startswith("lora_unet")}
    assert (drawn - drawn_with(live, alone)).abs().max() > 1.5 / 255
    assert (result.samples - drawn).abs().max() <= 1.5 / 255


def test_the_t5_of_stable_diffusion_3_has_no_rate_beside_its_clips():
    wired = source_of(linked_with("sd3 with T5", clip_of("sd3 with T5"))).outline().wired
    assert [encoder.prefix for encoder in wired.encoders] == ["lora_te1", "lora_te2", "lora_te3"]
