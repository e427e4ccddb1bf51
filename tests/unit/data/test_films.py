"""Films are read frame by frame, as they are shown, or refused in a few words."""

import io
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import pytest
from films import SIZE, animated, film, grey, number_of, turned
from PIL import Image

from lora_atelier.trainer_core.common.cancel import cancellable
from lora_atelier.trainer_core.data import films, images
from lora_atelier.trainer_core.data.films import FilmError, examine_film, film_of, has_decoder, read_frames

KINDS = {
    "mp4, H.264": {},
    "mov, MPEG-4": {"format": "mov", "codec": "mpeg4"},
    "mkv, MPEG-4": {"format": "matroska", "codec": "mpeg4"},
    "webm, VP9": {"format": "webm", "codec": "libvpx-vp9"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_film_has_its_frames(kind):
    content = film(10, **KINDS[kind])
    found = examine_film(content)
    assert (found.width, found.height, found.frames, found.rate) == (*SIZE, 10, 24.0)
    assert not found.has_alpha and not found.has_sound and not found.times
    read = dict(read_frames(content, {7, 0, 3}))
    assert list(read) == [0, 3, 7] and [number_of(image) for image in read.values()] == [0, 3, 7]
    assert {(image.size, image.mode) for image in read.values()} == {(SIZE, "RGB")}


@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p"])
def test_frames_are_those_that_comfyuis_way_of_reading_gives(pixels):
    """Its Load Video asks PyAV for gbrpf32le, which smooths colours of half the size; ours are rounded to 8 bits."""
    draws = np.random.default_rng(0)
    content = film(4, pixels=pixels, draw=lambda _: draws.integers(0, 256, (48, 64, 3), dtype=np.uint8))
    with av.open(io.BytesIO(content)) as container:
        expected = [frame.to_ndarray(format="gbrpf32le") for frame in container.decode(video=0)]
    found = [np.asarray(image) / 255 for _, image in read_frames(content, range(4))]
    apart = [np.abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert len(apart) == 4 and max(each.max() for each in apart) < 2.1 / 255, [each.max() * 255 for each in apart]


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_an_animated_picture_has_its_frames(format):
    content = animated(6, format=format)
    found = examine_film(content)
    assert (found.width, found.height, found.frames, found.rate, found.format) == (*SIZE, 6, 10.0, format)
    assert [number_of(image) for _, image in read_frames(content, range(6))] == list(range(6))


def test_uneven_times_are_kept():
    content = film(5, rate=10, times=[0, 1, 5, 6, 9])
    assert examine_film(content).times == (0.0, 0.1, 0.5, 0.6, 0.9)
    assert examine_film(animated(3, duration=[100, 400, 100])).times == (0.0, 0.1, 0.5)


@pytest.mark.parametrize("degrees, corner", [(90, (-1, 0)), (180, (-1, -1)), (270, (0, -1))])
def test_a_film_that_is_turned_is_read_upright(degrees, corner):
    """The upper left corner is bright, and lies elsewhere once the film is turned clockwise."""

    def draw(_):
        shown = np.zeros((48, 64, 3), np.uint8)
        shown[:16, :16] = 255
        return shown

    content = turned(film(2, draw=draw), degrees)
    found = examine_film(content)
    assert (found.width, found.height) == (SIZE if degrees == 180 else SIZE[::-1])
    ((_, image),) = read_frames(content, [0])
    x, y = corner
    pixels = np.asarray(image.convert("L"))
    assert pixels[y * 4, x * 4] > 200 and image.size == (found.width, found.height)
    assert (pixels > 128).mean() == pytest.approx(16 * 16 / 64 / 48, abs=0.02)


def test_transparency_is_laid_on_the_background():
    def draw(_):
        shown = np.full((48, 64, 4), 255, np.uint8)
        shown[:, 32:, 3] = 0
        return shown

    for kind, codec, pixels in (("matroska", "ffv1", "bgra"), ("webm", "libvpx-vp9", "yuva420p")):
        content = film(2, format=kind, codec=codec, pixels=pixels, draw=draw)
        assert examine_film(content).has_alpha
        ((_, image),) = read_frames(content, [1], "black")
        shown = np.asarray(image)
        assert shown[:, :28].min() > 240 and shown[:, 36:].max() < 15, codec
    assert examine_film(animated(format="WEBP", alpha=True)).has_alpha


def test_sound_is_noticed_and_a_film_of_one_frame_is_one():
    assert examine_film(film(3, sound=True)).has_sound
    assert examine_film(film(1)).frames == 1


def test_pixels_that_are_no_squares_are_stretched():
    for shape, width in ((2, 128), (Fraction(1, 2), 32), (9, 64)):
        found = examine_film(film(2, shape=shape))
        assert (found.width, found.height) == (width, 48)
    found = examine_film(turned(film(2, shape=2), 90))
    assert (found.width, found.height) == (48, 128)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "an empty file"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "not a video"),
        (b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", "not a video"),
        (b"\xff\xd8\xff\xe0" + bytes(100), "not a video"),
        (b"RIFF" + bytes(40), "not a picture"),
        (b"\0\0\0\x20ftypisom" + bytes(100), "damaged or truncated"),
        (b"\x1aE\xdf\xa3" + bytes(100), "damaged or truncated"),
        (film(30)[:-900], "no video stream is in it, or it is damaged"),
        (animated()[:200], "damaged or truncated"),
    ],
)
def test_what_is_no_film_is_refused_in_a_few_words(content, why):
    with pytest.raises(FilmError, match=why):
        examine_film(content)


@pytest.mark.parametrize(
    "settings", [{"faststart": True}, {"format": "matroska", "codec": "mpeg4"}], ids=["mp4", "mkv"]
)
def test_a_film_that_ends_early_says_how_much_there_is(settings):
    draws = np.random.default_rng(0)
    whole = film(30, draw=lambda _: draws.integers(0, 256, (48, 64, 3), dtype=np.uint8), **settings)
    with pytest.raises(FilmError, match=r"truncated: \d+ of about (29|30) frames|truncated: 0\.\d of 1\.\d seconds"):
        examine_film(whole[: len(whole) // 2])


def test_too_many_frames_or_pixels_are_refused(monkeypatch):
    monkeypatch.setattr(films, "MOST_FRAMES", 8)
    with pytest.raises(FilmError, match="more than 8 frames; cut it into shorter clips"):
        examine_film(film(10, format="matroska", codec="mpeg4"))
    with pytest.raises(FilmError, match="more than 8 frames"):
        examine_film(animated(10))
    monkeypatch.setattr(films, "MOST_FRAMES", 100)
    monkeypatch.setattr(films, "MOST_PIXELS", 64 * 48 * 9)
    with pytest.raises(FilmError, match="more than 9 frames of 64x48"):
        examine_film(film(10))
    monkeypatch.setattr(films, "LARGEST_FRAME", 64 * 48 - 1)
    with pytest.raises(FilmError, match="too many pixels"):
        examine_film(film(2))


def test_frames_that_are_never_seen_count_as_well(monkeypatch):
    """A packet of VP9 or MPEG-4 may hold nothing but what other frames are made of."""
    monkeypatch.setattr(films._Video, "_choose_decoder", lambda self: NeverSeen())
    monkeypatch.setattr(films, "MOST_PIXELS", 64 * 48 * 5)
    with pytest.raises(FilmError, match="more than 5 frames of 64x48"):
        examine_film(film(30, format="matroska", codec="mpeg4"))


class NeverSeen:
    """A decoder whose packets show nothing."""

    def decode(self, packet):
        return []


def edited(content: bytes, kind: bytes, body: bytes) -> bytes:
    """Put another table in the place of one, in an mp4 whose tables stand at its end."""

    def boxes(data: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(data):
            size, name = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
            inner = data[at + 8 : at + size]
            if name in (b"moov", b"trak", b"edts", b"mdia", b"minf", b"stbl"):
                inner = b"".join(boxes(inner))
            inner = body if name == kind else inner
            yield (len(inner) + 8).to_bytes(4, "big") + name + inner
            at += size

    return b"".join(boxes(content))


@pytest.mark.parametrize(
    "kind, body",
    {
        "cuts": (b"elst", bytes(4) + struct.pack(">I", 300_000) + struct.pack(">IIHH", 8000, 0, 1, 0) * 300_000),
        "samples": (b"stsz", bytes(4) + struct.pack(">II", 1, 9_000_000)),
        # The demuxer reads past the end of the table, also through the frames of a file of gigabytes.
        "times": (b"stts", bytes(4) + struct.pack(">I", 33_000_000)),
        "chunks": (b"stco", bytes(4) + struct.pack(">I", 33_000_000)),
        "keys": (b"stss", bytes(4) + struct.pack(">I", 33_000_000)),
        "kinds": (b"stsc", bytes(4) + struct.pack(">I", 33_000_000)),
    }.values(),
    ids=["cuts", "samples", "times", "chunks", "keys", "kinds"],
)
def test_a_film_that_names_millions_of_frames_or_cuts_is_refused_before_it_is_opened(monkeypatch, kind, body):
    whole = film(30)
    assert edited(whole, b"none", b"") == whole
    monkeypatch.setattr(av, "open", None)
    with pytest.raises(FilmError, match="names more frames, sounds or cuts than can be read; save it anew as shorter"):
        examine_film(edited(whole, kind, body))


def test_a_fragment_that_names_millions_of_frames_is_refused():
    fragment = b"\0\0\0\x20moof\0\0\0\x18traf\0\0\0\x10trun" + bytes(4) + struct.pack(">I", 9_000_000)
    with pytest.raises(FilmError, match="names more frames"):
        examine_film(film(3) + fragment)


def test_minutes_of_plain_sound_of_a_camera_are_a_film(tmp_path):
    """QuickTime names the handler of the data behind that of the sound; each of its samples is one of the table."""
    with av.open(str(tmp_path / "a.mov"), "w", format="mov") as container:
        video = container.add_stream("mpeg4", rate=24)
        video.width, video.height, video.pix_fmt = *SIZE, "yuv420p"
        sound = container.add_stream("pcm_s16le", rate=192_000)
        container.mux(video.encode(av.VideoFrame(*SIZE, "yuv420p")))
        samples = av.AudioFrame("s16", "stereo", 1_000_000)
        samples.sample_rate = 192_000
        for _ in range(9):
            container.mux(sound.encode(samples))
        container.mux(video.encode())
    assert examine_film((tmp_path / "a.mov").read_bytes()).has_sound


def test_a_byte_between_the_frames_of_an_animation_ends_nothing():
    content = animated(3, format="GIF")
    second = content.index(b"!\xf9", content.index(b"!\xf9") + 1)
    with Image.open(io.BytesIO(content[:second] + b"\1" + content[second:])) as image:
        assert images.count_frames(image) == image.n_frames == 3


@pytest.mark.parametrize(
    "between",
    [b"\1" * 2**21, b"!\xfe\0" * 2**21, b"!\xfe" + b"\1x" * 2**21 + b"\0"],
    ids=["garbage", "empty settings", "a long comment"],
)
@pytest.mark.parametrize("read", [images.upright_size, images.examine, examine_film])
def test_an_animation_of_more_between_its_frames_than_any_is_refused(monkeypatch, between, read):
    """Pillow goes through it byte by byte, minutes for two gigabytes, and hears no Cancel."""
    content = animated(2, format="GIF")
    start = content.index(b"!\xf9")
    monkeypatch.setattr(Image, "open", None)
    with pytest.raises((images.ManyBlocks, FilmError)) as refused:
        read(content[:start] + between + content[start:])
    said = str(refused.value) if read is examine_film else images.decoder_error(refused.value)
    assert said == "more blocks than are read of a GIF; save it anew, with fewer frames or comments"


def test_a_frame_of_endless_blocks_is_refused_and_a_cancel_ends_the_count(monkeypatch):
    content = animated(1, format="GIF")
    start = content.index(b",") + 11  # its size of codes is read
    long = content[:start] + b"\1x" * 3000 + content[start:]

    class Stopped(Exception):
        pass

    looked = []

    def stop():
        looked.append(1)
        if len(looked) > 3:
            raise Stopped

    with cancellable(stop), pytest.raises(Stopped):
        images.examine(long)
    monkeypatch.setattr(images, "MOST_BLOCKS", 2000)
    with pytest.raises(images.ManyBlocks):
        images.examine(long)


def test_an_animation_is_counted_no_further_than_it_may_have_frames(monkeypatch):
    content = animated(6, format="GIF")
    start = content.index(b"!\xf9")
    frame = content[start : content.index(b"!\xf9", start + 1)]
    monkeypatch.setattr(images, "MOST_FRAMES", 8)
    long = io.BytesIO(content[:start] + frame * 100_000 + content[start:])
    with Image.open(long) as image:
        assert images.count_frames(image) == 9


def test_a_frame_that_is_gone_is_named():
    with pytest.raises(FilmError, match="no frame 12"):
        list(read_frames(film(10), [2, 12]))


def test_a_cancel_ends_the_reading():
    class Stopped(Exception):
        pass

    def stop():
        raise Stopped

    with cancellable(stop), pytest.raises(Stopped):
        examine_film(film(3))


def test_without_pyav_animated_pictures_are_read_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    assert not has_decoder()
    assert examine_film(animated()).frames == 6


def test_a_title_that_is_no_text_is_no_matter():
    content = film(4, format="matroska", codec="mpeg4")
    written = content.replace(b"Lavf", b"\xff\xfe\x80\x81")  # what the file says wrote it
    assert written != content and examine_film(written).frames == 4


def test_a_pyav_that_lost_an_option_reads_films_all_the_same(monkeypatch):
    content, opened = film(4), av.open
    monkeypatch.setattr(av, "__version__", "19.0.2")
    monkeypatch.setattr(av, "open", lambda file, *, format, options, container_options: opened(file, format=format))
    assert examine_film(content).frames == 4


def test_the_look_is_that_of_the_first_frame():
    content = film(3, codec="mpeg4", draw=lambda n: np.asarray(Image.effect_noise(SIZE, 40 + n).convert("RGB")))
    assert len(examine_film(content).look.hash) == 16
    assert grey(1) - grey(0) == 8


def test_a_film_of_few_frames_and_many_hours_is_refused():
    with pytest.raises(FilmError, match="longer than an hour"):
        examine_film(film(4, format="matroska", times=(0, 1, 2, 24 * 5000)))


def test_a_film_that_leaves_frames_out_is_whole():
    found = examine_film(film(60, format="matroska", rate=30, times=range(0, 180, 3)))
    assert found.frames == 60


def test_a_film_of_frames_holds_them_without_loss_and_is_the_same_each_time():
    frames = np.random.default_rng(0).integers(0, 256, (5, 33, 47, 3), dtype=np.uint8)
    frames[2] = frames[1]
    content = film_of(frames, 24000 / 1001)
    assert content == film_of(iter(frames), 24000 / 1001) != film_of(frames, 24)
    found = examine_film(content)
    assert (found.frames, found.width, found.height, found.rate, found.times) == (5, 47, 33, 23.976, ())
    for number, frame in read_frames(content, None):
        assert np.array_equal(np.asarray(frame), frames[number])


def test_a_page_plays_the_beginning_of_a_film_at_its_speed(tmp_path):
    (tmp_path / "a.mp4").write_bytes(film(60, rate=10, size=(96, 48)))
    with Image.open(io.BytesIO(films.draw_playing(tmp_path / "a.mp4", 48))) as played:
        assert (played.format, played.size, played.n_frames) == ("WEBP", (48, 24), films.PLAYED)
        for number in (0, 7, films.PLAYED - 1):
            played.seek(number)
            played.load()
            assert played.info["duration"] == 100 and number_of(played) == number % 26
    (tmp_path / "b.mp4").write_bytes(b"no film")
    with pytest.raises(FilmError, match="not a video"):
        films.draw_playing(tmp_path / "b.mp4", 48)
