"""Image to video: a clip is trained and drawn from its first frame, and its last, as by ComfyUI's own nodes."""

from collections import Counter

import comfy.sample
import comfy.sd
import pytest
import torch
from comfy_extras.nodes_cosmos import CosmosPredict2ImageToVideoLatent
from comfy_extras.nodes_hunyuan import HunyuanImageToVideo, HunyuanVideo15ImageToVideo
from comfy_extras.nodes_lt import LTXVImgToVideo
from comfy_extras.nodes_wan import Wan22ImageToVideoLatent, WanFirstLastFrameToVideo, WanImageToVideo
from durable import Cut, cut_at, equal
from PIL import Image
from tiny_vision import tiny_vision
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.test_beside import captioned
from zoo.test_controls import CPU, pixels, recorded, same
from zoo.test_films import concept, of_clips  # noqa: F401 (concept is a fixture)
from zoo.test_train import run, run_measured
from zoo.zoo import BASES, CLIPS, ZOO, build

from lora_atelier.nodes.comfyui.connected.architecture import begins, describe
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import (
    ClipConfig,
    ConceptConfig,
    DatasetConfig,
    Defaults,
    MemoryConfig,
    SampleConfig,
    SavesConfig,
    fill_dataset,
)
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import scan
from lora_atelier.trainer_core.objective import objective

ROWS = [row for row in ("wan21_i2v", "wan22_i2v", "hunyuan_i2v", "skyreels_i2v") if row in ZOO or row in BASES]
IMAGE_TO_VIDEO = [*ROWS, *(row for row in ("hunyuan_video15",) if row in ZOO)]
FRAMES, SIDE = 9, 64
WIDTHS = {"wan21_i2v": 1280, "hunyuan_video15": 24}  # of what these read of CLIP vision
ALWAYS = "cosmos_predict2_video"  # keeps the first frame of every clip
KEEPING = [row for row in ("wan22_5b", "ltxv", "ltxav", ALWAYS) if row in ZOO or row in CLIPS]


def linked_to(row, *, sees=False):
    """Link a model of image to video; HunyuanVideo 1.5 tells it by the name of its file. sees: with a CLIP_VISION."""
    patcher = build(row)[1]
    patcher.cached_patcher_init = (None, ("/models/hunyuanvideo1.5_720p_i2v_fp16.safetensors",))
    return linked(row, patcher, vision=tiny_vision(WIDTHS[row]) if sees else None)


def by_node(row, live, wired, picture, *last):
    """Add a first frame, (1, H, W, 3) in 0..1, and perhaps a last one, to a CONDITIONING by ComfyUI's node."""
    # As the templates of both set CLIP Vision Encode.
    crop = row == "hunyuan_video15"
    seen = [live.vision.encode_image(each, crop=crop) if live.vision else None for each in (picture, *last)]
    if last:
        given = wired, live.vae, SIDE, SIDE, FRAMES, 1, picture, *last, *seen
        return WanFirstLastFrameToVideo.execute(wired, *given).result[0]
    if row in ("hunyuan_i2v", "skyreels_i2v"):
        given = wired, live.vae, SIDE, SIDE, FRAMES, 1, "v1 (concat)", picture
        return HunyuanImageToVideo.execute(*given).result[0]
    node = HunyuanVideo15ImageToVideo if row == "hunyuan_video15" else WanImageToVideo
    given = {"start_image": picture, "clip_vision_output": seen[0]}
    return node.execute(wired, wired, live.vae, SIDE, SIDE, FRAMES, 1, **given).result[0]


FIRST_SEEN = [(row, False) for row in IMAGE_TO_VIDEO[1:]]


@pytest.mark.parametrize(
    ("row", "sees"), [("wan21_i2v", True), ("hunyuan_video15", True), *again(("wan21_i2v", False), *FIRST_SEEN)]
)
def test_a_first_frame_is_seen_as_by_comfyuis_node(row, sees, monkeypatch):
    config = linked_to(row, sees=sees)
    live, base = live_of(config), source_of(config).outline()
    calls = recorded(live.model, monkeypatch)
    shape = base.latents.channels, *base.latents.axes((SIDE, SIDE, FRAMES))
    shown = pixels(1, SIDE)[..., :SIDE]
    reference = base.controls.encode(base.autoencoder.module, shown, length=FRAMES)
    assert reference.shape[2:] == shape[1:]
    with torch.no_grad():
        whole, beside = [Framing.whole((SIDE, SIDE, FRAMES))], encoded(base, shown)
        batch = base.conditions.batch([base.text.encode("a mossling", CPU)], whole, CPU, None, [beside])
        base.denoiser.predict(torch.randn(1, *shape), torch.tensor([500]), batch)
    (seen,) = calls
    wired = by_node(row, live, captioned(live, base, "a mossling"), (shown.movedim(1, -1) + 1) / 2)
    empty = torch.zeros(1, *shape)
    comfy.sample.sample(live.model, empty, 1, 1.0, "euler", "simple", wired, wired, empty, disable_pbar=True, seed=1)
    wanted = calls[1]
    assert seen.keys() == wanted.keys() and "c_concat" in seen and ("clip_fea" in seen) == sees
    assert all(same(seen[name], wanted[name]) for name in seen)
    first, rest = seen["c_concat"][:, :, 0], seen["c_concat"][:, :, 1:]
    assert len(first.unique()) > 100 and not torch.equal(first, rest[:, :, 0])


def test_a_last_frame_is_seen_beside_the_first_as_by_comfyuis_node(monkeypatch):
    config = linked_to("wan21_i2v", sees=True)
    live, base = live_of(config), source_of(config).outline()
    calls = recorded(live.model, monkeypatch)
    shape = base.latents.channels, *base.latents.axes((SIDE, SIDE, FRAMES))
    both = torch.stack([pixels(seed, SIDE)[..., :SIDE] for seed in (1, 2)], 2)
    with torch.no_grad():
        whole, beside = [Framing.whole((SIDE, SIDE, FRAMES))], encoded(base, both)
        batch = base.conditions.batch([base.text.encode("a mossling", CPU)], whole, CPU, None, [beside])
        base.denoiser.predict(torch.randn(1, *shape), torch.tensor([500]), batch)
    first, last = ((both + 1) / 2).movedim(1, -1).split(1, 1)
    wired = by_node("wan21_i2v", live, captioned(live, base, "a mossling"), first[0], last[0])
    empty = torch.zeros(1, *shape)
    comfy.sample.sample(live.model, empty, 1, 1.0, "euler", "simple", wired, wired, empty, disable_pbar=True, seed=1)
    assert all(torch.equal(*(call[name] for call in calls)) for name in ("c_concat", "clip_fea"))
    seen = calls[0]["c_concat"]
    assert calls[0]["clip_fea"].shape == (1, 10, 1280)
    assert seen[0, :4, :, 0, 0].tolist() == [[1, 0, 0]] * 3 + [[1, 0, 1]]  # frames 0, and 8 of those in fours


def encoded(base, pixels):
    """Encode the frames that a clip begins and ends with, as a run keeps them."""
    told = base.controls.told(pixels)
    latents = base.controls.encode(base.autoencoder.module, pixels, length=FRAMES)[0]
    return [latents] if told is None else [latents, told]


def kept_by_node(row, live, picture):
    """Write a first frame, (1, H, W, 3) in 0..1, into a LATENT by ComfyUI's node for a base."""
    if row == "wan22_5b":
        return Wan22ImageToVideoLatent.execute(live.vae, SIDE, SIDE, FRAMES, 1, picture).result[0]
    if row == ALWAYS:
        return CosmosPredict2ImageToVideoLatent.execute(live.vae, SIDE, SIDE, FRAMES, 1, picture).result[0]
    return LTXVImgToVideo.execute([], [], picture, live.vae, SIDE, SIDE, FRAMES, 1, 1.0).result[2]


@pytest.mark.parametrize("row", KEEPING)
def test_a_kept_first_frame_is_seen_without_noise_as_by_comfyuis_node(row, monkeypatch):
    config = linked(row)
    live, base = live_of(config), source_of(config).outline()
    assert base.sampling.begins and base.sampling.keeps and base.controls.keeps and base.defaults.clip_keeps
    calls, own = [], live.model.model.apply_model

    def apply_model(x, t, **given):
        calls.append({"x": x.clone(), "t": t, **{n: v for n, v in given.items() if n != "transformer_options"}})
        return own(x, t, **given)

    monkeypatch.setattr(live.model.model, "apply_model", apply_model)
    shape = base.latents.channels, *base.latents.axes((SIDE, SIDE, FRAMES))
    picture, noise = pixels(1, SIDE)[..., :SIDE], torch.randn(1, *shape, generator=torch.Generator().manual_seed(4))
    reference = base.controls.encode(base.autoencoder.module, picture, length=FRAMES)
    with torch.no_grad():
        whole = [Framing.whole((SIDE, SIDE, FRAMES))]
        batch = base.conditions.batch([base.text.encode("a mossling", CPU)], whole, CPU, None, [[reference[0]]])
        loud = noise * base.noise.sigma[-1]
        base.denoiser.predict(loud, torch.tensor([len(base.noise.alpha) - 1]), batch)
    wired, latent = captioned(live, base, "a mossling"), kept_by_node(row, live, (picture.movedim(1, -1) + 1) / 2)
    comfy.sample.sample(
        live.model,
        noise,
        1,
        1.0,
        "euler",
        "simple",
        wired,
        wired,
        latent["samples"],
        noise_mask=latent["noise_mask"],
        disable_pbar=True,
        seed=1,
    )
    seen, wanted = calls
    assert seen.keys() == wanted.keys() and "denoise_mask" in seen
    for name in ("x", "t"):  # the highest level of LTX-Video is 1 up to rounding
        torch.testing.assert_close(wanted.pop(name), seen[name], rtol=1e-6, atol=1e-5)
    assert not [name for name in wanted if not same(seen[name], wanted[name])]
    assert len(seen["x"][:, :, 0].unique()) > 10 and not torch.equal(seen["x"][:, :, 0], loud[:, :, 0])
    assert torch.equal(seen["x"][:, :, 1:], loud[:, :, 1:])


def test_a_batch_keeps_each_samples_own_frames():
    base = source_of(linked("wan22_5b")).outline()
    shape = base.latents.channels, *base.latents.axes((SIDE, SIDE, FRAMES))
    encoded = [
        base.controls.encode(base.autoencoder.module, pixels(seed, SIDE)[..., :SIDE], length=FRAMES) for seed in (1, 2)
    ]
    shown, text = [[encoded[0][0]], [], [encoded[1][0]]], base.text.encode("a mossling", CPU)
    noise, levels = torch.randn(3, *shape, generator=torch.Generator().manual_seed(5)), torch.tensor([200, 500, 800])

    def predicted(numbers):
        whole = [Framing.whole((SIDE, SIDE, FRAMES))] * len(numbers)
        references = [shown[number] for number in numbers]
        batch = base.conditions.batch([text] * len(numbers), whole, CPU, None, references)
        return base.denoiser.predict(noise[numbers], levels[numbers], batch)

    with torch.no_grad():
        alone = torch.cat([predicted([number]) for number in range(3)])
        torch.testing.assert_close(predicted([0, 1, 2]), alone, rtol=1e-4, atol=1e-4)
        shown.reverse()
        assert (predicted([0, 1, 2]) - alone).abs().amax((1, 2, 3, 4))[[0, 2]].min() > 1e-2


@pytest.fixture(scope="module")
def films(concept, tmp_path_factory):  # noqa: F811
    """Copy the clips of the concept without its picture."""
    folder = tmp_path_factory.mktemp("films")
    for path in concept.iterdir():
        if path.stem in ("long", "short"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def with_clips(config, **changes):
    """Change how the clips of a run are trained."""
    (one,) = config.dataset.concepts
    return config.replace(dataset=DatasetConfig(concepts=(one.replace(clips=one.clips.replace(**changes)),)))


FIRST_ALONE = [(row, 1, False) for row in IMAGE_TO_VIDEO if row != "wan22_i2v"]
SEEN = ("wan21_i2v", 1, True), ("hunyuan_video15", 1, True)


@pytest.mark.parametrize(
    ("row", "pictures", "sees"),
    [
        ("wan21_i2v", 2, True),
        *again(("wan22_i2v", 2, False), ("wan22_i2v", 1, False), ("wan21_i2v", 2, False), *FIRST_ALONE, *SEEN),
    ],
)
def test_clips_train_from_their_first_frames_and_are_drawn_from_one(row, pictures, sees, films, tmp_path, monkeypatch):
    seen = torch.randint(256, (2, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(2)).byte()
    for number in range(2):
        Image.fromarray(seen[number].numpy()).save(tmp_path / f"{number}.png")
    named = " ".join(f"--ci {tmp_path / f'{number}.png'}" for number in range(pictures))
    sample = SampleConfig(
        prompts=(f"a mossling --n dull {named}",), width=SIDE, height=SIDE, steps=2, seed=3, cfg=2.0, frames=FRAMES
    )
    base, looked = linked_to(row, sees=sees), []
    if sees:
        vision = live_of(base).vision
        encode = vision.encode_image
        monkeypatch.setattr(
            vision, "encode_image", lambda image, crop: looked.append(image) or encode(image, crop=crop)
        )

    def configured():
        config = with_clips(of_clips(row, films, steps=4, batch_size=1), last_frame=0.5 * (pictures > 1))
        return config.replace(base_model=base, sample=sample, saves=SavesConfig(save_every=2, save_unit="steps"))

    whole, notes = run_measured(configured(), tmp_path / "whole")
    assert whole.finished and not any("could not be drawn" in note or "stay empty" in note for note in notes), notes
    assert any("k_img.lora_up" in name and each.any() for name, each in whole.tensors.items()) == (
        sees and row == "wan21_i2v"
    )
    live, model = live_of(base), source_of(base).outline()
    patched, _ = comfy.sd.load_lora_for_models(live.model, None, dict(whole.tensors), 1.0, 0.0)
    given = (seen[:1] / 255, seen[1:] / 255) if pictures > 1 else (seen[:1] / 255,)
    wired = [by_node(row, live, captioned(live, model, words), *given) for words in ("a mossling", "dull")]
    if (guidance := model.sampling.guidance) is not None:
        wired = [[[cross, {**extra, "guidance": guidance}]] for ((cross, extra),) in wired]
    empty = torch.zeros(1, model.latents.channels, *model.latents.axes((SIDE, SIDE, FRAMES)))
    noise = comfy.sample.prepare_noise(empty, 3)
    own = model.sampling.sampler, model.sampling.scheduler
    drawn = comfy.sample.sample(patched, noise, 2, 2.0, *own, *wired, empty, disable_pbar=True, seed=3)
    assert (whole.samples - live.vae.decode(drawn)[0]).abs().max() <= 1.5 / 255
    with pytest.raises(Cut):
        run(configured(), tmp_path / "cut", step=cut_at(2))
    looked.clear()
    resumed, _ = run(configured(), tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and equal(resumed.tensors, whole.tensors)
    assert all((image == 0.5).all() for image in looked)  # what CLIP vision says of all others is kept
    lived, _ = run(configured().replace(memory=MemoryConfig(encodings="none")), tmp_path / "live")
    assert lived.losses == whole.losses and torch.equal(lived.samples, whole.samples)


@pytest.mark.parametrize("row", ["wan22_5b", *again(*KEEPING[1:])])
def test_clips_train_with_their_first_frames_kept_at_a_share_of_the_visits(row, films, tmp_path, monkeypatch):
    seen = torch.randint(256, (1, SIDE, SIDE, 3), generator=torch.Generator().manual_seed(2)).byte()
    Image.fromarray(seen[0].numpy()).save(tmp_path / "seen.png")
    prompt, base, masks = f"a mossling --n dull --ci {tmp_path / 'seen.png'}", linked(row), []
    sample = SampleConfig(prompts=(prompt,), width=SIDE, height=SIDE, steps=2, seed=3, cfg=2.0, frames=FRAMES)
    own = objective.sample_losses

    def losses(prediction, target, mask, normalize, *rest):
        masks.append(mask)
        if mask is not None:  # what is predicted of a kept frame decides nothing
            wild = prediction.clone()
            wild[:, :, 0] += 100
            found = [own(each, target, mask, normalize, *rest) for each in (prediction, wild)]
            torch.testing.assert_close(*found, rtol=0, atol=0)
            plain = own(prediction[:, :, 1:], target[:, :, 1:], None, None, *rest)
            torch.testing.assert_close(found[0], plain)
        return own(prediction, target, mask, normalize, *rest)

    monkeypatch.setattr(objective, "sample_losses", losses)

    def configured(share=0.5):
        config = with_clips(of_clips(row, films, steps=6, batch_size=1), first_frame=share)
        return config.replace(base_model=base, sample=sample, saves=SavesConfig(save_every=3, save_unit="steps"))

    whole, notes = run(configured(), tmp_path / "whole")
    assert whole.finished and not any("could not be drawn" in note or "stay empty" in note for note in notes), notes
    assert {mask is None for mask in masks} == ({False} if row == ALWAYS else {True, False})
    live, model = live_of(base), source_of(base).outline()
    patched, _ = comfy.sd.load_lora_for_models(live.model, None, dict(whole.tensors), 1.0, 0.0)
    wired, latent = (
        [captioned(live, model, words) for words in ("a mossling", "dull")],
        kept_by_node(row, live, seen / 255),
    )
    noise = comfy.sample.prepare_noise(latent["samples"], 3)
    given = model.sampling.sampler, model.sampling.scheduler, *wired, latent["samples"]
    more = {"noise_mask": latent["noise_mask"], "disable_pbar": True, "seed": 3}
    drawn = comfy.sample.sample(patched, noise, 2, 2.0, *given, **more)
    assert (whole.samples - live.vae.decode(drawn)[0]).abs().max() <= 1.5 / 255
    with pytest.raises(Cut):
        run(configured(), tmp_path / "cut", step=cut_at(3))
    resumed, _ = run(configured(), tmp_path / "cut")
    assert "Resumed after step 3" in resumed.origin and equal(resumed.tensors, whole.tensors)
    lived, _ = run(configured().replace(memory=MemoryConfig(encodings="none")), tmp_path / "live")
    assert lived.losses == whole.losses and torch.equal(lived.samples, whole.samples)
    never, _ = run(configured(0.0), tmp_path / "never")
    assert (never.losses == whole.losses) == (row == ALWAYS)


@pytest.mark.parametrize(("own", "share", "wanted"), [("clip_keeps", 0.25, {0, 1}), ("clip_begins", 0.75, {1, 2})])
def test_frames_are_seen_at_their_share_of_the_visits(own, share, wanted, films):
    clips = ClipConfig(frames=(9,), **{"first_frame" if own == "clip_keeps" else "last_frame": share})
    concepts = (ConceptConfig(folder=str(films), clips=clips, role=role) for role in ("train", "validation"))
    dataset = DatasetConfig(concepts=tuple(concepts))
    dataset = fill_dataset(dataset, Defaults(clip_step=4, clip_rate=16.0, **{own: True}))
    config = of_clips("wan21_t2v", films, steps=400, batch_size=1)
    plan = build_plan(scan(dataset), dataset, config.train)
    samples = [sample for step in range(400) for batch in plan.step(step) for sample in batch.samples]
    counts = Counter(sample.seen for sample in samples)
    assert counts.keys() == wanted and abs(counts[max(wanted)] / 400 - share) < 0.06
    assert {sample.seen for sample in plan.validation} <= wanted and len(plan.validation) == 2
    assert plan.all_references() == {each for sample in samples for each in plan.shown(sample)}
    assert {sample.picture for sample in samples if sample.seen == max(wanted)} == {0, 1}
    ends = {(each.crop.frames, each.last and each.last[1].frames) for each in plan.all_references() if each.last}
    assert ends == ({((0,), (8,))} if own == "clip_begins" else set())


def test_another_clip_vision_is_another_run_and_one_that_is_not_read_is_refused():
    bases = [source_of(linked_to("wan21_i2v", sees=sees)).outline() for sees in (True, True, False)]
    one, same, none = ((base.controls.identity, base.wired.digests.get("clip vision")) for base in bases)
    assert one == same and one[0] == one[1] and none == ("", None)
    other = tiny_vision(1280)
    with torch.no_grad():
        next(other.model.parameters()).mul_(2)
    changed = source_of(linked("wan21_i2v", build("wan21_i2v")[1], vision=other))
    assert changed.identities()["clip vision"] != one[1]
    assert not any("CLIP vision" in remark for remark in changed.remarks())
    for row, vision, wanted in (
        ("wan22_i2v", other, "^The MODEL linked to Use Connected Model sees no first frame by CLIP vision; unlink"),
        ("wan21_t2v", other, "sees no first frame by CLIP vision; unlink clip_vision"),
        ("wan21_i2v", tiny_vision(), "is 32 numbers wide and the MODEL reads 1280; link the CLIP vision that belongs"),
        ("wan21_i2v", build("wan21_t2v")[1].model.diffusion_model, "is no CLIP vision model; link Load CLIP Vision"),
    ):
        with pytest.raises(ValueError, match=wanted):
            source_of(linked(row, vision=vision)).check()


def test_frames_that_a_model_does_not_see_are_refused(films, tmp_path):
    for row, changes, wanted in (
        ("wan21_t2v", {"last_frame": 0.5}, "^Wan sees no last frame of a clip; set last_frame of Clips to 0"),
        ("wan22_5b", {"last_frame": 0.5}, "^Wan 2.2 5B sees no last frame of a clip; set last_frame of Clips to 0"),
    ):
        with pytest.raises(ValueError, match=wanted):
            run(with_clips(of_clips(row, films), **changes), tmp_path / row)
    one = SampleConfig(prompts=(f"a mossling --ci {films / 'seen.png'}",), width=SIDE, height=SIDE, frames=1)
    with pytest.raises(ValueError, match="begins clips with a control picture; set --f in it to 5 or more, or remove"):
        run(of_clips("wan22_5b", films).replace(sample=one), tmp_path / "one")


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
    wanted = r"draws each clip from its first frame, and 1 file here is a single picture: 0\.png; set leave_out of"
    with pytest.raises(ValueError, match=wanted):
        run(of_clips(ALWAYS, concept), tmp_path)


def test_only_a_file_of_that_name_makes_hunyuanvideo_15_begin_with_a_first_frame():
    for row in ("hunyuan_video15", "wan21_fun_control", "wan21_t2v"):
        if row in ZOO or row in BASES:
            assert not begins(build(row)[1])
    assert all(begins(live_of(linked_to(row)).model) for row in IMAGE_TO_VIDEO)
