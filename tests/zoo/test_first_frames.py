"""Image to video: a clip is trained and drawn from its first frame, which the model sees as by ComfyUI's own nodes."""

import comfy.sample
import comfy.sd
import pytest
import torch
from comfy_extras.nodes_hunyuan import HunyuanImageToVideo, HunyuanVideo15ImageToVideo
from comfy_extras.nodes_wan import WanImageToVideo
from durable import Cut, cut_at, equal
from PIL import Image
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.test_beside import captioned
from zoo.test_controls import CPU, pixels, recorded, same
from zoo.test_films import concept, of_clips  # noqa: F401 (concept is a fixture)
from zoo.test_train import run, run_measured
from zoo.zoo import BASES, ZOO, build

from lora_atelier.nodes.comfyui.connected.architecture import begins, describe
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import MemoryConfig, SampleConfig

ROWS = [row for row in ("wan21_i2v", "wan22_i2v", "hunyuan_i2v", "skyreels_i2v") if row in ZOO or row in BASES]
IMAGE_TO_VIDEO = [*ROWS, *(row for row in ("hunyuan_video15",) if row in ZOO)]
FRAMES, SIDE = 9, 64


def linked_to(row):
    """Link a model of image to video; HunyuanVideo 1.5 tells it by the name of its file."""
    patcher = build(row)[1]
    patcher.cached_patcher_init = (None, ("/models/hunyuanvideo1.5_720p_i2v_fp16.safetensors",))
    return linked(row, patcher)


def by_node(row, live, wired, picture):
    """Add a first frame, (1, H, W, 3) in 0..1, to a CONDITIONING by ComfyUI's node for a base."""
    if row in ("hunyuan_i2v", "skyreels_i2v"):
        given = wired, live.vae, SIDE, SIDE, FRAMES, 1, "v1 (concat)", picture
        return HunyuanImageToVideo.execute(*given).result[0]
    node = HunyuanVideo15ImageToVideo if row == "hunyuan_video15" else WanImageToVideo
    return node.execute(wired, wired, live.vae, SIDE, SIDE, FRAMES, 1, picture).result[0]


@pytest.mark.parametrize("row", ["wan21_i2v", *again(*IMAGE_TO_VIDEO[1:])])
def test_a_first_frame_is_seen_as_by_comfyuis_node(row, monkeypatch):
    config = linked_to(row)
    live, base = live_of(config), source_of(config).outline()
    calls = recorded(live.model, monkeypatch)
    shape = base.latents.channels, *base.latents.axes((SIDE, SIDE, FRAMES))
    shown = pixels(1, SIDE)[..., :SIDE]
    reference = base.controls.encode(base.autoencoder.module, shown, length=FRAMES)
    assert reference.shape == (1, *shape)
    with torch.no_grad():
        whole = [Framing.whole((SIDE, SIDE, FRAMES))]
        batch = base.conditions.batch([base.text.encode("a mossling", CPU)], whole, CPU, None, [[reference[0]]])
        base.denoiser.predict(torch.randn(1, *shape), torch.tensor([500]), batch)
    (seen,) = calls
    wired = by_node(row, live, captioned(live, base, "a mossling"), (shown.movedim(1, -1) + 1) / 2)
    empty = torch.zeros(1, *shape)
    comfy.sample.sample(live.model, empty, 1, 1.0, "euler", "simple", wired, wired, empty, disable_pbar=True, seed=1)
    wanted = calls[1]
    assert seen.keys() == wanted.keys() and "c_concat" in seen
    assert all(same(seen[name], wanted[name]) for name in seen)
    first, rest = seen["c_concat"][:, :, 0], seen["c_concat"][:, :, 1:]
    assert len(first.unique()) > 100 and not torch.equal(first, rest[:, :, 0])


@pytest.fixture(scope="module")
def films(concept, tmp_path_factory):  # noqa: F811
    """Copy the clips of the concept without its picture."""
    folder = tmp_path_factory.mktemp("films")
    for path in concept.iterdir():
        if path.stem in ("long", "short"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("row", ["wan22_i2v", *again(*(each for each in IMAGE_TO_VIDEO if each != "wan22_i2v"))])
def test_clips_train_from_their_first_frames_and_are_drawn_from_one(row, films, tmp_path):
    seen = torch.randint(256, (1, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(2)).byte()
    Image.fromarray(seen[0].numpy()).save(tmp_path / "seen.png")
    prompt = f"a mossling --n dull --ci {tmp_path / 'seen.png'}"
    sample = SampleConfig(prompts=(prompt,), width=SIDE, height=SIDE, steps=2, seed=3, cfg=2.0, frames=FRAMES)
    base = linked_to(row)

    def configured():
        return of_clips(row, films, steps=4, batch_size=1).replace(base_model=base, sample=sample)

    whole, notes = run_measured(configured(), tmp_path / "whole")
    assert whole.finished and not any("could not be drawn" in note or "stay empty" in note for note in notes), notes
    live, model = live_of(base), source_of(base).outline()
    patched, _ = comfy.sd.load_lora_for_models(live.model, None, dict(whole.tensors), 1.0, 0.0)
    wired = [by_node(row, live, captioned(live, model, words), seen / 255) for words in ("a mossling", "dull")]
    if (guidance := model.sampling.guidance) is not None:
        wired = [[[cross, {**extra, "guidance": guidance}]] for ((cross, extra),) in wired]
    empty = torch.zeros(1, model.latents.channels, *model.latents.axes((SIDE, SIDE, FRAMES)))
    noise = comfy.sample.prepare_noise(empty, 3)
    own = model.sampling.sampler, model.sampling.scheduler
    drawn = comfy.sample.sample(patched, noise, 2, 2.0, *own, *wired, empty, disable_pbar=True, seed=3)
    assert (whole.samples - live.vae.decode(drawn)[0]).abs().max() <= 1.5 / 255
    with pytest.raises(Cut):
        run(configured(), tmp_path / "cut", step=cut_at(2))
    resumed, _ = run(configured(), tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and equal(resumed.tensors, whole.tensors)
    lived, _ = run(configured().replace(memory=MemoryConfig(encodings="none")), tmp_path / "live")
    assert lived.losses == whole.losses and torch.equal(lived.samples, whole.samples)


@pytest.mark.parametrize("_", again("both"))
def test_both_experts_of_image_to_video_train_on_clips(_, films, tmp_path):
    base = linked("wan22_i2v", high=build("wan22_i2v", seed=1)[1], switch_every=1)
    config = of_clips("wan22_i2v", films, steps=4, batch_size=1).replace(base_model=base)
    result, _ = run(config, tmp_path)
    said = " ".join(describe(live_of(base).model, base.connected, high=live_of(base).high))
    assert result.finished and "timesteps 0 to 898, and model_high at 899 to 999" in said
    for tensors in (result.tensors, result.high[1]):
        assert any(tensor.any() for name, tensor in tensors.items() if "lora_up" in name)


def test_a_picture_without_a_control_picture_is_refused_beside_clips(concept, tmp_path):  # noqa: F811
    wanted = r"^Wan makes each picture from a control picture, and 1 picture here has none: 0\.png; set folder of"
    with pytest.raises(ValueError, match=wanted):
        run(of_clips("wan22_i2v", concept), tmp_path)


def test_only_a_file_of_that_name_makes_hunyuanvideo_15_begin_with_a_first_frame():
    for row in ("hunyuan_video15", "wan21_fun_control", "wan21_t2v"):
        if row in ZOO or row in BASES:
            assert not begins(build(row)[1])
    assert all(begins(live_of(linked_to(row)).model) for row in IMAGE_TO_VIDEO)
