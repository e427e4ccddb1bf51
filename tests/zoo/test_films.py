"""Clips and pictures in one run of a model of clips: trained, resumed to the last bit, encoded as they are cut."""

import math
import shutil

import comfy.sd
import numpy as np
import pytest
import torch
from comfy.ldm.lightricks.vae import causal_video_autoencoder
from comfy.ldm.models.autoencoder import AutoencodingEngine
from comfy.ldm.wan import vae2_2
from comfy.ldm.wan.vae import WanVAE, count_cache_layers
from durable import Cut, cut_at, equal
from films import film
from PIL import Image
from train_graph import draw_pictures
from zoo.again import again
from zoo.linked import linked, live_of, source_of
from zoo.test_train import configure, run
from zoo.zoo import CLIPS, ZOO

from lora_atelier.nodes.comfyui.connected.vae import encode, encode_plain
from lora_atelier.trainer_core.common.cancel import cancellable
from lora_atelier.trainer_core.config import (
    ClipConfig,
    ConceptConfig,
    DatasetConfig,
    Defaults,
    MaskConfig,
    MemoryConfig,
    fill_dataset,
)
from lora_atelier.trainer_core.data.clips import rounded
from lora_atelier.trainer_core.data.plan import build_plan
from lora_atelier.trainer_core.data.scan import scan
from lora_atelier.trainer_core.memory.gradient_checkpointing import PARTS
from lora_atelier.trainer_core.models.architectures import ARCHITECTURES
from lora_atelier.trainer_core.objective import objective

OF_CLIPS = {row.kind: row for row in ARCHITECTURES if row.frames}


def moving(seed):
    """Draw coloured noise that moves to the right by two pixels a frame."""
    picture = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    return lambda number: np.ascontiguousarray(np.roll(picture, 2 * number, 1))


@pytest.fixture(scope="module")
def concept(tmp_path_factory):
    """Two clips, of 20 and of 12 frames, and a picture, each with a caption."""
    folder = draw_pictures(tmp_path_factory.mktemp("concept") / "mixed", 1)
    for name, frames in (("long", 20), ("short", 12)):
        content = film(frames, rate=16, size=(128, 96), draw=moving(frames), format="matroska", codec="mpeg4")
        (folder / f"{name}.mkv").write_bytes(content)
        (folder / f"{name}.txt").write_text(f"a {name} film", encoding="utf-8")
    return folder


def of_clips(row, folder, **train):
    """Configure a run on parts of nine frames that take turns."""
    config = configure(linked(row), folder, **{"steps": 6, "batch_size": 2, "save_dtype": "float32"} | train)
    clips = ClipConfig(frames=(9,), take="chunk", rate=0.0)
    (one,) = config.dataset.concepts
    return config.replace(dataset=DatasetConfig(concepts=(one.replace(clips=clips),)))


OTHERS = ("wan22_5b", "hunyuan_video", "hunyuan_video15", "ltxv", "ltxav", "mochi", "cosmos_t2v", "kandinsky5_video")


@pytest.mark.parametrize("row", ["wan21_t2v", *again(*(row for row in OTHERS if row in ZOO | CLIPS))])
def test_clips_and_pictures_train_in_one_run_that_resumes_to_the_last_bit(row, concept, tmp_path):
    whole, notes = run(of_clips(row, concept), tmp_path / "whole")
    assert whole.finished and len(whole.losses) == 6 and all(map(math.isfinite, whole.losses))
    assert any(t.any() for name, t in whole.tensors.items() if "lora_up" in name)
    frames = rounded(9, OF_CLIPS[(ZOO | CLIPS)[row].kind].frames)
    assert f"64x64x{frames} " in "".join(notes) and "64x64 " in "".join(notes)
    with pytest.raises(Cut):
        run(of_clips(row, concept), tmp_path / "cut", step=cut_at(3))
    result, _ = run(of_clips(row, concept), tmp_path / "cut")
    assert "Resumed after step 3" in result.origin
    assert equal(whole.tensors, result.tensors) and whole.losses == result.losses


HELD = [MemoryConfig(checkpointing=level, offload_activations="on") for level in ("2", "full", "segments of 4", PARTS)]


@pytest.mark.parametrize(
    "memory",
    [MemoryConfig(checkpointing="segments of 2", offload_activations="on"), *again(*HELD, MemoryConfig())],
    ids=lambda memory: memory.checkpointing,
)
def test_activations_of_clips_in_ram_or_computed_anew_train_the_same_lora(memory, concept, tmp_path):
    def trained(name, settings):
        config = of_clips("wan21_t2v", concept, steps=3).replace(memory=settings)
        return run(config, tmp_path / name)[0]

    plain, held = trained("plain", MemoryConfig(checkpointing="0", offload_activations="off")), trained("held", memory)
    assert held.losses == plain.losses and equal(held.tensors, plain.tensors)


def test_the_rows_of_models_of_clips_have_the_frames_of_comfyuis_latents():
    found = {name: row for name, row in (ZOO | CLIPS).items() if row.kind in OF_CLIPS}
    assert {row.kind for row in found.values()} == OF_CLIPS.keys()
    for name in found:
        base = source_of(linked(name)).outline()
        form = base.wired.model.model.latent_format
        of_clips = form.temporal_downscale_ratio if form.latent_dimensions > 2 else 0
        assert base.latents.frames == base.defaults.clip_step == base.sampling.time == of_clips, name
        assert bool(of_clips) == (name != "kandinsky5_image")


def test_a_clip_is_encoded_as_the_frames_of_its_part(concept, tmp_path):
    """What the cache holds is what the VAE makes of these frames, cut as the plan says."""
    seen = []
    base = linked("wan21_t2v")
    vae = live_of(base).vae
    own = vae.encode
    vae.encode = lambda pixels: seen.append(pixels) or own(pixels)
    config = of_clips("wan21_t2v", concept, steps=4).replace(base_model=base)
    run(config, tmp_path)
    assert {tuple(pixels.shape) for pixels in seen} == {(1, 64, 64, 3), (9, 64, 64, 3)}
    assert sum(len(pixels) == 9 for pixels in seen) == 3  # the two parts of one clip, and the other clip
    clip = next(pixels for pixels in seen if len(pixels) == 9)
    assert len({frame.numpy().tobytes() for frame in clip}) == 9
    model = live_of(base).model.model
    latents = encode(model, vae, clip.movedim(-1, 0)[None] * 2 - 1)
    assert latents.shape == (1, 16, 3, 8, 8)
    first = encode(model, vae, clip[:1].movedim(-1, 1) * 2 - 1)
    torch.testing.assert_close(latents[:, :, 0], first)


def test_a_mask_covers_its_frames_of_a_clip_in_the_loss(concept, tmp_path, monkeypatch):
    """A still mask is every frame's, and of a clip of masks each latent frame has the mean of its frames."""
    folder, base, seen = tmp_path / "masked", linked("wan21_t2v"), []
    shutil.copytree(concept, folder)
    film_of = {"format": "matroska", "codec": "ffv1", "pixels": "bgr0", "rate": 16, "size": (128, 96)}
    (folder / "long-masklabel.mkv").write_bytes(film(20, draw=white_from_left, **film_of))
    Image.fromarray(white_from_left(3)).save(folder / "short-masklabel.png")
    own = objective.sample_losses
    monkeypatch.setattr(
        objective, "sample_losses", lambda *given: seen.append((given[2], given[0].shape)) or own(*given)
    )
    config = of_clips("wan21_t2v", folder, steps=8, batch_size=1, resolution=64).replace(base_model=base)
    masks = MaskConfig(missing="ones", unmasked_weight=0.0, unmasked_probability=0.0)
    (one,) = config.dataset.concepts
    result, _ = run(config.replace(dataset=DatasetConfig(concepts=(one.replace(masks=masks),))), tmp_path / "run")
    assert result.finished
    widths = []
    for mask, shape in seen:
        if mask is None or shape[2] == 1:
            assert mask is None or bool((mask == 1).all())
            continue
        assert mask.shape == (1, 1, *shape[2:])
        widths.append([float(frame.sum(-1).mean()) for frame in mask[0, 0]])
    # Columns of frame n are white left of 6 n pixels; crops are 96 of 128 pixels wide, made 64.
    parts = [[np.mean([covered(first + n) for n in of]) for of in LATENT] for first in (0, 9)]
    for expected in (*parts, [covered(3)] * 3):
        assert any(np.allclose(width, expected, atol=0.1) for width in widths), expected
    assert all(any(np.allclose(width, each, atol=0.1) for each in (*parts, [covered(3)] * 3)) for width in widths)


LATENT = ((0,), (1, 2, 3, 4), (5, 6, 7, 8))  # frames of each latent one


def white_from_left(number):
    """Draw a mask that is white left of 6 pixels for each frame."""
    levels = np.zeros((96, 128, 3), np.uint8)
    levels[:, : 6 * number] = 255
    return levels


def covered(number):
    """Count the latent columns that such a mask covers, in the middle 96 of its 128 pixels."""
    return min(max(6 * number - 16, 0), 96) / 96 * 8


def tiny_vae():
    """Build a small VAE of Wan with random weights, as ComfyUI loads it."""
    return comfy.sd.VAE(sd=drawn(WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True])).state_dict())


def drawn(network):
    """Give a network random weights."""
    draws = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=draws)
    return network


def pixels_of(frames):
    """Draw the pixels of a clip."""
    return torch.rand(1, 3, frames, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def lengths_of(network, most=math.inf):
    """List how many frames a VAE takes at a time; more than most do not fit."""
    lengths = []
    before = 2 * isinstance(network, AutoencodingEngine)  # frames that are there for the first ones to read

    def look(_, given):
        lengths.append(given[0].shape[2] - before)
        if lengths[-1] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    network.encoder.conv_in.register_forward_pre_hook(look)
    return lengths


def tiny_ltx():
    """Build a small VAE of LTX."""
    blocks = [["res_x", 1], ["compress_all", {}], ["res_x", 1], ["compress_all", {}], ["compress_time", {}]]
    config = {
        "_class_name": "CausalVideoAutoencoder",
        **{"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "encoder_blocks": blocks},
        **{"decoder_blocks": blocks, "norm_layer": "pixel_norm", "patch_size": 2, "latent_log_var": "uniform"},
        **{"encoder_base_channels": 8, "decoder_base_channels": 8, "scaling_factor": 1.0, "use_quant_conv": False},
    }
    network = drawn(causal_video_autoencoder.VideoVAE(config=config))
    for name, value in (("std-of-means", 1.0), ("mean-of-means", 0.0)):
        network.per_channel_statistics.get_buffer(name).fill_(value)
    return network


def tiny_hunyuan15():
    """Build a small VAE of HunyuanVideo 1.5."""
    config = {
        "in_channels": 3,
        "out_channels": 3,
        "z_channels": 4,
        "block_out_channels": [8, 16, 16],
        "num_res_blocks": 1,
    }
    config |= {"ffactor_spatial": 4, "ffactor_temporal": 4}
    return drawn(
        AutoencodingEngine(
            regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
            encoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Encoder", "params": config},
            decoder_config={"target": "comfy.ldm.hunyuan_video.vae_refiner.Decoder", "params": config},
        )
    )


def test_a_causal_vae_encodes_a_clip_in_time_chunks_as_in_one():
    """ComfyUI's VAE of Wan takes two frames at a time, and keeps what the next ones read of them."""
    vae = tiny_vae()
    pixels = torch.rand(1, 3, 13, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latents = encode_plain(vae, pixels)
    inner = vae.first_stage_model.float()
    with torch.no_grad():
        kept = [None] * count_cache_layers(inner.encoder)
        parts = (pixels[:, :, :1], False), (pixels[:, :, 1:], True)
        whole = [inner.encoder(part, feat_cache=kept, feat_idx=[0], final=last) for part, last in parts]
        expected, _ = inner.conv1(torch.cat(whole, 2)).chunk(2, dim=1)
    assert latents.shape == expected.shape == (1, 16, 4, 4, 4)
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    # Frames that follow change nothing before them, so that a part is encoded as the film would be from its start.
    torch.testing.assert_close(encode_plain(vae, pixels[:, :, :9]), latents[:, :, :3], rtol=1e-4, atol=1e-5)
    assert (encode_plain(vae, pixels[:, :, 4:]) - latents[:, :, 1:]).abs().max() > 1e-3


def test_every_part_takes_its_turn_and_pictures_never_share_a_batch_with_clips(concept):
    dataset = DatasetConfig(concepts=(ConceptConfig(folder=str(concept), clips=ClipConfig(frames=(5,), take="chunk")),))
    dataset = fill_dataset(dataset, Defaults(clip_step=4, clip_rate=16.0))
    config = of_clips("wan21_t2v", concept, steps=40)
    plan = build_plan(scan(dataset), dataset, config.train)
    taken = {}
    for step in range(plan.steps):
        for micro_batch in plan.step(step):
            assert {sample.crop.shape for sample in micro_batch.samples} == {micro_batch.bucket}
            for sample in micro_batch.samples:
                taken.setdefault(plan.manifest.pictures[sample.picture].name, []).append(sample.crop.frames)
    parts = {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11, 12, 13, 14), (15, 16, 17, 18, 19)}
    assert set(taken["long.mkv"]) == parts and set(taken["0.png"]) == {()}
    counts = [taken["long.mkv"].count(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert plan.views() == {
        *(sample.view for step in range(plan.steps) for batch in plan.step(step) for sample in batch.samples)
    }
    again = build_plan(scan(dataset), dataset, config.train)
    assert [again.step(k) for k in range(40)] == [plan.step(k) for k in range(40)]


def test_what_a_vae_has_of_memory_decides_its_chunks_of_time_and_not_its_latents(monkeypatch):
    """ComfyUI's VAE of LTX takes as many frames at a time as the device's memory is for."""
    network = tiny_ltx()
    lengths = lengths_of(network)
    pixels = torch.rand(1, 3, 33, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = []
    for frames in (2, 8, 32):
        room = frames * pixels[0, :, 0].nbytes * 8 // 12 // 2  # ComfyUI counts the first layer's 8 channels of 12
        monkeypatch.setattr(causal_video_autoencoder, "get_max_chunk_size", lambda device, room=room: room)
        lengths.clear()
        with torch.no_grad():
            found.append(network.encoder(pixels, device=pixels.device))
        assert lengths == [1] + [frames] * (32 // frames)
    assert found[0].shape[2] == 5
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_a_cancel_ends_the_encoding_of_a_clip_within_it():
    vae, looked = tiny_vae(), []

    def check():
        looked.append(1)
        if len(looked) == 40:
            raise KeyboardInterrupt

    pixels = torch.rand(1, 3, 13, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with cancellable(check), pytest.raises(KeyboardInterrupt):
        encode_plain(vae, pixels)
    assert len(looked) == 40
    assert not any(module._forward_pre_hooks for module in vae.first_stage_model.modules())
    assert encode_plain(vae, pixels).shape == (1, 16, 4, 4, 4)


def test_wan22_and_hunyuan15_encode_a_clip_in_time_chunks_as_in_one():
    wan, hunyuan, pixels = (
        drawn(vae2_2.WanVAE(dim=8, dec_dim=8, z_dim=16, temperal_downsample=[False, True, True])),
        tiny_hunyuan15(),
        pixels_of(13),
    )
    with torch.no_grad():
        kept, part = [None] * vae2_2.count_conv3d(wan.encoder), vae2_2.patchify(pixels, patch_size=2)
        whole = [wan.encoder(each, feat_cache=kept, feat_idx=[0]) for each in (part[:, :, :1], part[:, :, 1:])]
        expected, _ = wan.conv1(torch.cat(whole, 2)).chunk(2, dim=1)
        found = {"wan22": (wan.encode(pixels), expected)}
        chunked = hunyuan.encode(pixels)
        hunyuan.encoder.ffactor_temporal = 12  # all frames behind the first at once
        lengths = lengths_of(hunyuan)
        found["hunyuan15"] = chunked, hunyuan.encode(pixels)
        assert lengths == [1, 12]
    for latents, of_whole in found.values():
        assert latents.shape == of_whole.shape and latents.shape[2] == 4 and latents.std() > 1e-3
        torch.testing.assert_close(latents, of_whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("network", "most", "behind"), [(tiny_ltx, 2, [2] * 8), (tiny_hunyuan15, 4, [4] * 4)])
def test_where_memory_runs_out_a_vae_takes_smaller_chunks_that_give_the_same(network, most, behind):
    vae, pixels = tiny_vae(), pixels_of(17)
    vae.first_stage_model = network()
    expected = encode_plain(vae, pixels)
    lengths = lengths_of(vae.first_stage_model, most)
    latents = encode_plain(vae, pixels)
    assert lengths[0] == 1 and lengths[1] > most and lengths[2:] == [1, *behind]
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-5)
    lengths.clear()
    vae.encode(pixels[0, :, :1].movedim(0, -1))  # ComfyUI itself goes on as before
    assert lengths == [1] and "encode_tiled_3d" not in vars(vae)


@pytest.mark.parametrize("frames", [1, 5])
def test_a_vae_without_room_never_encodes_in_tiles(frames):
    vae, sides = tiny_vae(), []

    def look(_, given):
        sides.append(max(given[0].shape[3:]))
        if sides[-1] > 256:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    vae.first_stage_model.encoder.conv1.register_forward_pre_hook(look)
    pixels = torch.zeros(1, 3, frames, 16, 264)
    with pytest.raises(torch.OutOfMemoryError):
        encode_plain(vae, pixels if frames > 1 else pixels[:, :, 0])
    assert sides == [264, 264]
    vae.encode(pixels[0].movedim(0, -1))  # as ComfyUI does
    assert 256 in sides


@pytest.mark.parametrize(
    ("most", "said"),
    [
        (1, r"encodes long\.mkv at \d+x\d+x9; set resolution of Train LoRA or frames of Clips lower\."),
        (0, r"encodes 0\.png at \d+x\d+; set resolution of Train LoRA lower\."),
    ],
)
def test_a_clip_or_picture_for_which_a_linked_vae_has_no_room_is_named_before_the_first_step(
    most, said, concept, tmp_path, monkeypatch
):
    config, stepped = of_clips("wan21_t2v", concept), []
    vae = live_of(config.base_model).vae
    own = vae.encode

    def encode(images):
        if len(images) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return own(images)

    monkeypatch.setattr(vae, "encode", encode)
    monkeypatch.setattr(objective, "sample_losses", lambda *_: stepped.append(1))
    with pytest.raises(ValueError, match=said):
        run(config, tmp_path)
    assert not stepped
