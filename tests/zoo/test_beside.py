"""Inpainting, control and I2V bases see masks and pictures as ComfyUI's own nodes give them, or are refused."""

import importlib.util

import comfy.clip_vision
import comfy.conds
import comfy.model_management
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy_extras.nodes_hunyuan import HunyuanImageToVideo
from comfy_extras.nodes_ip2p import InstructPixToPixConditioning
from comfy_extras.nodes_wan import WanFunControlToVideo, WanImageToVideo
from durable import Cut, cut_at, equal
from PIL import Image
from zoo import trial
from zoo.again import again
from zoo.comfy_here import FOLDER
from zoo.linked import linked, live_of
from zoo.test_controls import CPU, paired, pairs, pixels, recorded, same  # noqa: F401 (pairs is a fixture)
from zoo.test_gradients import check, in_float64  # noqa: F401 (a fixture)
from zoo.test_train import configure, run, run_measured
from zoo.trial import Trial, apart
from zoo.zoo import BASES, ZOO, build

from lora_atelier.nodes.comfyui.connected import gradients
from lora_atelier.nodes.comfyui.connected.architecture import architecture_of, describe, remarks
from lora_atelier.nodes.comfyui.connected.beside import Beside, beside_of, empty_inputs
from lora_atelier.nodes.comfyui.connected.check import check_connected
from lora_atelier.nodes.comfyui.connected.model import ConnectedModel
from lora_atelier.trainer_core.common.axes import Framing
from lora_atelier.trainer_core.config import ConceptConfig, DatasetConfig, MaskConfig, MemoryConfig, SampleConfig
from lora_atelier.trainer_core.memory import recompute

PAINTS, PICTURE = Beside(pictures=1, masked=True), Beside(pictures=1)
FIRST_FRAME = Beside(pictures=1, masked=True, video=True)
READS = {
    "sd15_inpaint": PAINTS,
    "sdxl_inpaint": PAINTS,
    "flux_fill": PAINTS,
    "sd15_ip2p": PICTURE,
    "sdxl_ip2p": PICTURE,
    "flux_canny": PICTURE,
    "wan21_i2v": FIRST_FRAME,
    "wan22_i2v": FIRST_FRAME,
    "hunyuan_i2v": FIRST_FRAME,
    "hunyuan_video15": FIRST_FRAME,
    "skyreels_i2v": Beside(pictures=1, video=True),
    "wan21_fun_control": Beside(pictures=2, video=True),
}
READS = {name: found for name, found in READS.items() if name in BASES or name in ZOO}
PAINTING = [name for name, found in READS.items() if found.paints]
CONTROLLED = [name for name, found in READS.items() if found.controls]
SIDES = (96, 64)  # of pictures, width and height


@pytest.mark.parametrize("names", [("flux_dev", "sd15", "wan21_t2v", "wan21_vace", *READS), *again((tuple(ZOO),))])
def test_what_a_model_reads_is_found_by_asking_it(names):
    for name in names:
        assert beside_of(build(name)[0]) == READS.get(name, Beside()), name


def test_bases_have_their_own_names_and_say_what_they_read():
    titles = {name: architecture_of(build(name)[1]).title for name in ("flux_dev", "flux_fill", "flux_canny")}
    assert titles == {
        "flux_dev": "FLUX.1 dev",
        "flux_fill": "FLUX.1 Fill",
        "flux_canny": "FLUX.1 Canny or Depth",
    }
    told = "flux_fill", "flux_canny", "hunyuan_video15", "wan21_i2v"
    said = {name: " ".join(describe(build(name)[1])) for name in told}
    assert "paints the white region of a mask" in said["flux_fill"]
    assert "makes each picture from a control picture" in said["flux_canny"]
    assert "may also start from a control picture" in said["hunyuan_video15"]
    assert [name for name, of_it in said.items() if "draws each clip from its first frame" in of_it] == ["wan21_i2v"]
    warned = {name: "by CLIP vision" in " ".join(remarks(build(name)[1])) for name in ("wan21_i2v", "wan21_t2v")}
    assert warned == {"wan21_i2v": True, "wan21_t2v": False}


@pytest.fixture(scope="module")
def inpaint_node():
    """Give ComfyUI's node for inpainting models; in pytest the name `nodes` is the pack's folder."""
    spec = importlib.util.spec_from_file_location("comfyui_nodes", FOLDER / "nodes.py")
    nodes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nodes)
    return nodes.InpaintModelConditioning()


def soft_mask(width, height):
    """Draw a mask, (1, 1, H, W), white in the middle with soft edges."""
    across, down = torch.linspace(-2, 2, width), torch.linspace(-2, 2, height)
    return (1.5 - (down[:, None] ** 2 + across[None] ** 2).sqrt()).clamp(0, 1)[None, None]


def captioned(live, base, words):
    guidance = base.architecture.guidance
    ((cross, extra),) = live.clip.encode_from_tokens_scheduled(live.clip.tokenize(words))
    return [[cross, extra if guidance is None else {**extra, "guidance": guidance}]]


def as_nodes(row, live, wired, picture, other=None):
    """Add a control picture, (1, H, W, 3) in 0..1, to a CONDITIONING by ComfyUI's node for a base."""
    height, width = picture.shape[1:3]
    if row == "hunyuan_i2v":
        return HunyuanImageToVideo.execute(wired, live.vae, width, height, 1, 1, "v1 (concat)", picture).result[0]
    if row == "wan21_fun_control":
        start, control = other, picture
        return WanFunControlToVideo.execute(wired, wired, live.vae, width, height, 1, 1, start, None, control).result[0]
    if row in ("wan21_i2v", "wan22_i2v"):
        return WanImageToVideo.execute(wired, wired, live.vae, width, height, 1, 1, picture).result[0]
    return InstructPixToPixConditioning.execute(wired, wired, picture, live.vae).result[0]


def as_sampled(live, wired, shape, calls):
    """Find what ComfyUI's sampler calls a model with."""
    calls.clear()
    empty = torch.zeros(shape[:2] + ((1,) if live.vae.latent_dim == 3 else ()) + shape[2:])
    comfy.sample.sample(live.model, empty, 1, 1.0, "euler", "simple", wired, wired, empty, disable_pbar=True, seed=1)
    return calls[0]


@pytest.mark.parametrize("row", ["flux_fill", "sd15_inpaint", *again("sdxl_inpaint")])
def test_an_inpainting_base_sees_mask_and_rest_as_by_comfyuis_node(row, inpaint_node, monkeypatch):
    config = linked(row)
    live = live_of(config)
    base, calls = ConnectedModel(config, live), recorded(live.model, monkeypatch)
    picture, mask = pixels(1), soft_mask(*SIDES)
    assert 0 < mask.round().mean() < 1 and len(mask.unique()) > 10
    framings, caption = [Framing.whole(SIDES)], base.text.encode("a mossling", CPU)
    shape = (1, base.latents.channels, *base.latents.axes(SIDES))
    noised, level, held = torch.randn(shape), torch.tensor([500]), base.autoencoder.module

    def predicted(painted):
        with torch.no_grad():
            batch = base.conditions.batch([caption], framings, CPU, painted)
            return base.denoiser.predict(noised, level, batch)

    of_mask = predicted(base.inpainting.encode(held, picture, mask, mask[..., ::8, ::8]))
    trained = calls[0]
    blank = predicted(base.inpainting.blank(held, SIDES))
    whole = calls[1]
    assert (of_mask - blank).abs().max() > 1e-3 * blank.abs().max()
    for seen, image, white in ((trained, picture, mask), (whole, picture, torch.ones_like(mask))):
        wired = captioned(live, base, "a mossling")
        given = ((image + 1) / 2).movedim(1, -1)
        wired = inpaint_node.encode(wired, wired, given, live.vae, white[:, 0], noise_mask=False)[0]
        wanted = as_sampled(live, wired, shape, calls)
        assert seen.keys() == wanted.keys() and "c_concat" in seen
        assert all(same(seen[name], wanted[name]) for name in seen)


# One picture, a first frame, one that may be left out, and two pictures.
SHOWN = [row for row in ("flux_canny", "wan21_i2v", "hunyuan_video15", "wan21_fun_control") if row in READS]


@pytest.mark.parametrize("row", [*SHOWN, *again(*(row for row in CONTROLLED if row not in SHOWN))])
def test_a_control_base_sees_the_picture_as_by_comfyuis_node(row, monkeypatch):
    config = linked(row)
    live = live_of(config)
    base, calls = ConnectedModel(config, live), recorded(live.model, monkeypatch)
    assert base.controls.least == (row != "hunyuan_video15") and base.controls.most == READS[row].pictures
    framings, caption = [Framing.whole(SIDES)], base.text.encode("a mossling", CPU)
    shape = (1, base.latents.channels, *base.latents.axes(SIDES))
    noised, level = torch.randn(shape), torch.tensor([500])
    shown = [pixels(seed) for seed in (1, 2)]
    references = [base.controls.encode(base.autoencoder.module, each)[0] for each in shown]
    kept = [each.clone() for each in references]
    predicted = []
    for given in (references[:1], references[1:], references[: base.controls.most]):
        with torch.no_grad():
            batch = base.conditions.batch([caption], framings, CPU, None, [given])
            predicted.append(base.denoiser.predict(noised, level, batch))
    assert all(map(torch.equal, references, kept))  # some of ComfyUI's code scales pictures in place
    assert (predicted[0] - predicted[1]).abs().max() > 1e-3 * predicted[0].abs().max()
    images, trained = [((each + 1) / 2).movedim(1, -1) for each in shown], calls[:3]
    for seen, given in zip(trained, (images[:1], images[1:], images[: base.controls.most]), strict=True):
        wired = as_nodes(row, live, captioned(live, base, "a mossling"), *given)
        if row == "hunyuan_video15":  # whose node is of a newer kind; what it sets is WanImageToVideo's
            wired = as_nodes("wan21_i2v", live, captioned(live, base, "a mossling"), *given)
        wanted = as_sampled(live, wired, shape, calls)
        assert seen.keys() == wanted.keys() and "c_concat" in seen
        assert all(same(seen[name], wanted[name]) for name in seen)


def test_a_picture_of_another_shape_fills_its_channels():
    """As `fit` whole gives it; beside the control picture of another size, too."""
    for row in ("flux_canny", "wan21_fun_control"):
        config = linked(row)
        base = ConnectedModel(config, live_of(config))
        shown = [base.controls.encode(base.autoencoder.module, pixels(n, 32 * n))[0] for n in (1, 2)]
        caption = base.text.encode("a mossling", CPU)
        given = [shown[: base.controls.most]]
        (sample,) = base.conditions.batch([caption], [Framing.whole(SIDES)], CPU, None, given).samples
        assert sample["c_concat"].cond.shape[-2:] == base.latents.axes(SIDES)
        assert len(sample["c_concat"].cond.unique()) > 100


ALONE = [(name, 0) for name in READS if name != "flux_fill"]
SEEING = [(name, width) for name, width in (("wan21_i2v", 1280), ("hunyuan_video15", 24)) if name in READS]


@pytest.mark.parametrize(("row", "width"), [("flux_fill", 0), SEEING[0], *again(*ALONE, *SEEING[1:])])
def test_gradients_beside_pictures_are_central_differences(row, width, in_float64, monkeypatch):  # noqa: F811
    """width: of what the MODEL reads of CLIP vision beside the picture; 0: nothing."""
    plain, (channels, *axes) = trial.conditioning, trial.latents(row).shape[1:]

    def conditioning(name, seed=1, tokens=0):
        draws = torch.Generator().manual_seed(seed)
        ((cross, values),) = plain(name, seed, tokens)
        latents = torch.randn(1, READS[row].pictures * channels, *axes, generator=draws)
        half = torch.ones(1, 1, *axes)
        half[..., : axes[-1] // 2] = 0
        values = values | {"concat_latent_image": latents.double(), "concat_mask": half.double()}
        if width:
            values["clip_vision_output"] = output = comfy.clip_vision.Output()
            states = torch.randn(1, 5, width, generator=draws).double()
            output.penultimate_hidden_states = output.last_hidden_state = states
        return [[cross, values]]

    monkeypatch.setattr(trial, "conditioning", conditioning)
    shown = Trial(row, dtype=torch.float64)
    assert len(shown.samples[0]["c_concat"].cond.unique()) > 100 and ("clip_fea" in shown.samples[0]) == bool(width)
    with gradients.session(shown.patcher), shown.network.attached():
        found = shown.gradients()
        check(shown, found)
        recompute(shown.units, "full", copies=True)
        assert apart(shown.gradients(), found) < 1e-9


def alone(base, pairs, **changes):  # noqa: F811
    """Configure a run without control pictures."""
    concept = ConceptConfig(folder=str(pairs / "after"), **changes)
    return configure(base, pairs / "after").replace(dataset=DatasetConfig(concepts=(concept,)))


@pytest.fixture(scope="module")
def masked(pairs):  # noqa: F811
    """Give each picture a mask: white in the middle."""
    for path in (pairs / "after").glob("[0-9].png"):
        width, height = Image.open(path).size
        white = soft_mask(width, height)[0, 0].mul(255).byte().numpy()
        Image.fromarray(white).save(path.with_name(f"{path.stem}-masklabel.png"))
    return pairs


def drawn_with(live, base, tensors, add, size=(64, 64)):
    """Draw the sample of a run by ComfyUI's loader and sampler; add: adds pictures to a CONDITIONING."""
    model, _ = comfy.sd.load_lora_for_models(live.model, None, dict(tensors), 1.0, 0.0)
    wired = [add(captioned(live, base, words)) for words in ("a mossling", "dull")]
    guidance = base.sampling.guidance
    if guidance is not None:
        wired = [[[cross, {**extra, "guidance": guidance}]] for ((cross, extra),) in wired]
    empty = torch.zeros(1, base.latents.channels, *((1,) * (live.vae.latent_dim - 2)), *base.latents.axes(size))
    noise = comfy.sample.prepare_noise(empty, 3)
    own = base.sampling.sampler, base.sampling.scheduler
    drawn = comfy.sample.sample(model, noise, 2, 2.0, *own, *wired, empty, disable_pbar=True, seed=3)
    return live.vae.decode(drawn).reshape(1, size[1], size[0], 3)


SAMPLE = SampleConfig(prompts=("a mossling --n dull",), width=64, height=64, steps=2, seed=3, cfg=2.0)


@pytest.mark.parametrize("row", ["flux_fill", *again("sd15_inpaint", "sdxl_inpaint")])
def test_an_inpainting_base_trains_on_masks_and_draws_whole_pictures(row, masked, inpaint_node, tmp_path):
    base = linked(row)
    own = live_of(base).vae.encode
    live_of(base).vae.encode = lambda images: own(images) + 0.5  # so that grey is no zero
    config = alone(base, masked, masks=MaskConfig(), flip=True).replace(sample=SAMPLE)
    config = config.replace(train=config.train.replace(validation_share=0.3, validate_every=1))
    result, notes = run_measured(config, tmp_path)
    assert result.finished and result.validation and not any("could not be drawn" in note for note in notes), notes
    assert not any("no picture here has one" in note or "stay empty" in note for note in notes)
    live, model = live_of(base), ConnectedModel(base, live_of(base))
    picture, white = torch.rand(1, 64, 64, 3), torch.ones(1, 64, 64)

    def add(wired):
        return inpaint_node.encode(wired, wired, picture, live.vae, white, noise_mask=False)[0]

    assert (result.samples - drawn_with(live, model, result.tensors, add)).abs().max() <= 1.5 / 255
    other, notes = run(alone(base, masked), tmp_path)
    assert other.losses != result.losses and any("no picture here has one" in note for note in notes)


@pytest.mark.parametrize("row", again("flux_fill", "sd15_inpaint"))
def test_an_inpainting_run_resumes_and_needs_no_cache(row, masked, tmp_path):
    config = alone(linked(row), masked, masks=MaskConfig(), flip=True).replace(sample=SAMPLE)
    whole, _ = run(config, tmp_path / "whole")
    with pytest.raises(Cut):
        run(config, tmp_path / "cut", step=cut_at(2))
    resumed, _ = run(config, tmp_path / "cut")
    assert "Resumed after step 2" in resumed.origin and equal(resumed.tensors, whole.tensors)
    lived, _ = run(config.replace(memory=MemoryConfig(encodings="none")), tmp_path / "live")
    assert lived.losses == whole.losses and torch.equal(lived.samples, whole.samples)


@pytest.mark.parametrize("row", ["flux_canny", *again(*CONTROLLED[:2], "wan21_i2v", "skyreels_i2v")])
def test_a_control_base_trains_on_control_pictures_and_draws_with_them(row, pairs, tmp_path):  # noqa: F811
    base = linked(row)
    seen = torch.randint(256, (1, 64, 64, 3), generator=torch.Generator().manual_seed(2)).byte()
    Image.fromarray(seen[0].numpy()).save(tmp_path / "seen.png")
    sample = SAMPLE.replace(prompts=(f"a mossling --n dull --ci {tmp_path / 'seen.png'}",))
    config = paired(base, pairs, "before", flip=True).replace(sample=sample)
    result, notes = run(config, tmp_path)
    assert result.finished and not any("could not be drawn" in note or "stay empty" in note for note in notes), notes
    live, model = live_of(base), ConnectedModel(base, live_of(base))
    drawn = drawn_with(live, model, result.tensors, lambda wired: as_nodes(row, live, wired, seen / 255))
    assert (result.samples - drawn).abs().max() <= 1.5 / 255
    turned = paired(base, pairs, "pose", flip=True)
    assert run(turned, tmp_path / "other")[0].losses != result.losses


def test_a_control_base_without_control_pictures_is_refused(pairs, tmp_path):  # noqa: F811
    for row, title in (("flux_canny", "FLUX.1 Canny or Depth"), ("wan21_i2v", "Wan")):
        base = linked(row)
        config = paired(base, pairs, "before")
        (concept,) = config.dataset.concepts
        without = ConceptConfig(folder=str(pairs / "pose"), role="regularisation")
        slider = concept.replace(controls=concept.controls.replace(use="slider"))
        start = f"{title} makes each picture from a control picture, and "
        # Of image to video only the scan tells which files are clips, which need none; it wants captions.
        for picture in (pairs / "pose").glob("*.png"):
            picture.with_suffix(".txt").write_text("a pose", encoding="utf-8")
        clips = row == "wan21_i2v"
        after, pose = (r"\d+ pictures here have none: .*",) * 2 if clips else ("after has none", "pose has none")
        for concepts, rest in (
            ((concept.replace(controls=None),), f".*{after}; set folder of Control Pictures"),
            ((concept, without), f".*{pose}; set folder of Control Pictures"),
            ((slider,), r"those of .*after are for a slider; set use of Control Pictures to edit"),
        ):
            with pytest.raises(ValueError, match=start + rest):
                run(config.replace(dataset=DatasetConfig(concepts=concepts)), tmp_path)
        with pytest.raises(ValueError, match=f"{start}prompt 1 has none; set --ci in it"):
            run(config.replace(sample=SAMPLE), tmp_path)
    with pytest.raises(ValueError, match="takes 1 control picture; set folder of Control Pictures to as many"):
        run(paired(linked("flux_canny"), pairs, "before", "pose"), tmp_path)
    with pytest.raises(ValueError, match=r"FLUX.1 Fill takes no control pictures"):
        run(paired(linked("flux_fill"), pairs, "before"), tmp_path)


def test_a_lora_that_adds_channels_is_refused():
    live = live_of(linked("flux_dev"))
    tensors = {"up": torch.ones(64, 4), "down": torch.ones(4, 128)}
    file = {f"lora_unet_img_in.lora_{name}.weight": tensor for name, tensor in tensors.items()}
    file["lora_unet_img_in.reshape_weight"] = torch.tensor([64, 128])
    model, _ = comfy.sd.load_lora_for_models(live.model, None, file, 1.0, 0.0)
    for _ in range(2):  # waiting, and loaded
        with pytest.raises(ValueError, match="gives it channels for another picture"):
            check_connected(model, live.clip, live.vae)
        comfy.model_management.load_models_gpu([model])
    assert beside_of(model.model) == PICTURE


def test_models_that_need_what_no_dataset_gives_are_refused():
    def refused(row, **changes):
        live = live_of(linked(row))
        for name, value in changes.items():
            setattr(live.model.model, name, value)
        with pytest.raises(
            ValueError, match=r"^The MODEL linked to Use Connected Model (draws|continues|edits) .*; link"
        ):
            check_connected(live.model, live.clip, live.vae)
        return live

    refused("wan21_vace")
    refused("cascade_b")
    refused("cosmos_t2v", concat_keys=("mask_inverted",))  # that from pictures is of the same class
    live = live_of(linked("hidream"))
    live.model.cached_patcher_init = (None, ("/models/hidream_e1_full_bf16.safetensors",))
    with pytest.raises(ValueError, match=r"edits a picture that it is shown, .*; link HiDream I1"):
        check_connected(live.model, live.clip, live.vae)


def test_pictures_that_stay_empty_are_named():
    conditions = [("shown", torch.zeros(1, 4, 8, 8)), ("seen", torch.rand(1, 4, 8, 8)), ("number", torch.zeros(1, 4))]
    (note,) = empty_inputs((name, comfy.conds.CONDRegular(value)) for name, value in conditions)
    assert "reads pictures beside its latents (shown), and the run has none" in note
    assert empty_inputs([("seen", comfy.conds.CONDRegular(conditions[1][1]))]) == []


def test_hidream_takes_no_control_pictures(pairs, tmp_path):  # noqa: F811
    with pytest.raises(ValueError, match="HiDream I1 takes no control pictures"):
        run(paired(linked("hidream"), pairs, "before"), tmp_path)
