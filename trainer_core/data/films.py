"""Decode the frames of films: video files by PyAV, animated pictures by Pillow; bounded in time and memory.

A film's bytes are handed to one demuxer that its first bytes choose, so no file name, address or playlist is followed
and no other program runs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFile

from ..common.axes import Size
from ..common.cancel import look
from ..common.files import open_file
from .film_boxes import holds_too_much
from .images import (
    DECODER_ERRORS,
    LARGEST,
    MOST_FRAMES,
    count_frames,
    decoder_error,
    flatten,
    load_picture,
    opened_picture,
    picture_extensions,
)
from .looks import Look, look_at

if TYPE_CHECKING:
    from av.container import InputContainer

FILM_EXTENSIONS = frozenset((".mp4", ".m4v", ".mov", ".mkv", ".webm"))
ANIMATED = ("GIF", "WEBP")  # formats of pictures that move, as Pillow names them
PACKAGE = "av"  # that decodes films
PLAYED, SHORTEST = 49, 20  # frames of a film that a page plays, and milliseconds of one at least, as browsers have it
LOSSLESS = "ffv1"  # the codec of films that are written
FINEST_RATE = 1001  # a rate's divisor at most: 24000/1001 is that of cinema on television
LARGEST_FRAME = 2**25  # pixels of a film's frame, as of 8K: a decoder keeps up to 17 of them
MOST_PIXELS = 2**36  # of all its frames together: 8000 frames of 4K
MOST_SECONDS = 3600.0  # of a film, as its frames are counted anew at another rate
MOST_PACKETS_OF_A_FRAME = 4  # of the video stream: one may come in several, or hold only what others are made of
MOST_STRETCHED = 4.0  # pixels that are wider or narrower than this are taken for squares
EVEN = 0.5  # of a frame: how far the times of an even film lie from those of its rate
USUAL_TIME = 0.1  # seconds: a frame of a GIF that states no time, as browsers show it
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}
# Flags of FFmpeg's scaler, bilinear with whole colours and exact rounding: most films keep colours at half the size,
# and its default repeats them in squares of four pixels.
_SMOOTH = 0x2 | 0x2000 | 0x4000 | 0x40000
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # codecs whose usual decoder leaves alpha out -> one that reads it
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


class FilmError(ValueError):
    """A film cannot be used; the text is a few words that say why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilmFile:
    """Properties of a film's file."""

    width: int  # pixels, upright, with square pixels
    height: int
    frames: int
    rate: float  # frames per second, on average
    has_alpha: bool
    has_sound: bool
    format: str
    times: tuple[float, ...] = ()  # seconds, of each frame; () where they are even
    look: Look = field(default_factory=Look)  # of the first frame


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame as it is decoded: its time in seconds, and its picture once it is asked for."""

    time: float
    of: Any  # an av.VideoFrame, or a picture
    shape: float = 1.0  # width of a pixel per height

    def picture(self, background: str | None) -> Image.Image:
        """Draw it upright as RGB, with square pixels; as it is, with its alpha, without a background."""
        image = self.of
        if not isinstance(image, Image.Image):
            form = "rgba" if _has_alpha(self.of) else "rgb24"
            image = Image.fromarray(self.of.to_ndarray(format=form, interpolation=_SMOOTH))
        if background is not None:
            image = flatten(image, background)
        if isinstance(self.of, Image.Image):
            return image
        if self.shape != 1:
            image = image.resize((max(1, round(image.width * self.shape)), image.height), Image.Resampling.LANCZOS)
        turn = _TURNS.get(round(self.of.rotation))
        return image if turn is None else image.transpose(turn)


def trainable_extensions() -> frozenset[str]:
    """List the lower-case extensions of all files that can be trained: of pictures and of clips."""
    return picture_extensions() | FILM_EXTENSIONS


def is_film(path: Path) -> bool:
    """Tell by its ending whether a file is a film."""
    return path.suffix.lower() in FILM_EXTENSIONS


def has_decoder() -> bool:
    """Tell whether PyAV is installed."""
    try:
        import av  # noqa: F401
    except ImportError:
        return False
    return True


def examine_film(data: bytes | IO[bytes], background: str = "white") -> FilmFile:
    """Decode a film as completely as training may, and return its properties; raises FilmError."""
    times: list[float] = []
    first: Image.Image | None = None
    with _opened(data) as film:
        for frame in film.frames():
            times.append(frame.time)
            if first is None:
                first = frame.picture(background)
        if first is None:
            raise FilmError("no frame in it can be decoded")
        film.check_whole(times)
        rate = film.rate or _rate_of(times)
        if max(times[-1] - times[0], len(times) / rate) > MOST_SECONDS:
            raise FilmError("longer than an hour; cut it into shorter clips")
        return FilmFile(
            width=first.width,
            height=first.height,
            frames=len(times),
            rate=round(rate, 4),
            has_alpha=film.has_alpha,
            has_sound=film.has_sound,
            format=film.format,
            times=() if _are_even(times, rate) else tuple(round(time - times[0], 4) for time in times),
            look=look_at(first),
        )


def read_frames(
    data: bytes | IO[bytes], wanted: Collection[int] | None, background: str | None = "white"
) -> Iterator[tuple[int, Image.Image]]:
    """Yield each wanted frame of a film with its number, in the order of the film; raises FilmError.

    wanted: None for all. background: None leaves the frames' alpha in them.
    """
    left = set(wanted or ())
    with _opened(data) as film:
        for number, frame in enumerate(film.frames()):
            if wanted is None or number in left:
                left.discard(number)
                yield number, frame.picture(background)
            if wanted is not None and not left:
                return
    if wanted is None:
        return
    raise FilmError(f"it has no frame {min(left)} any more")


def load_shown(path: Path, frames: Sequence[int], most: int = 1, background: str = "white") -> list[Image.Image]:
    """Read a picture, or at most so many of a clip's frames, evenly spread, the middle one for one.

    frames: those that are trained; () for a picture, and for the first frame of a file whose ending is a film's. Raises
    OSError, DECODER_ERRORS and FilmError.
    """
    if not frames and not is_film(path):
        return [load_picture(path, background)]
    wanted = spread_evenly(frames or (0,), most)
    with open_file(path) as file:  # not read as a whole, which would take its size in memory
        found = dict(read_frames(file, wanted, background))
    return [found[number] for number in wanted]


def draw_playing(path: Path, side: int) -> bytes:
    """Draw a film's first PLAYED frames as animated WebP at its own speed, at `side` pixels at most.

    Raises OSError and FilmError.
    """
    shown: list[Image.Image] = []
    times: list[float] = []
    with open_file(path) as file, _opened(file) as film:
        for frame in islice(film.frames(), PLAYED):
            image = frame.picture("white")
            image.thumbnail((side, side))
            shown.append(image)
            times.append(frame.time)
    if not shown:
        raise FilmError("no frame in it can be decoded")
    lengths = [max(SHORTEST, round(1000 * (end - start))) for start, end in pairwise(times)]
    lengths.append(lengths[-1] if lengths else SHORTEST)  # the last one is seen as long as the one before
    data = io.BytesIO()
    shown[0].save(data, "WEBP", save_all=True, append_images=shown[1:], duration=lengths, loop=0, quality=80, method=0)
    return data.getvalue()


def film_of(frames: Iterable[np.ndarray[Any, Any]], rate: float) -> bytes:
    """Write (H, W, 3) bytes of frames as a film without loss, at so many a second; the same frames give the same bytes.

    Raises FilmError where this PyAV has no encoder for it.
    """
    import av

    if LOSSLESS not in av.codecs_available:
        raise FilmError(f"this PyAV has no {LOSSLESS}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska", options={"fflags": "+bitexact"}) as film:
        stream: Any = film.add_stream(LOSSLESS, rate=Fraction(rate).limit_denominator(FINEST_RATE))
        stream.pix_fmt = "bgr0"
        for number, pixels in enumerate(frames):
            if not number:
                stream.height, stream.width = pixels.shape[:2]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = number
            film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return buffer.getvalue()


def spread_evenly(frames: Sequence[int], most: int) -> list[int]:
    """Choose at most so many of the frames, evenly spread, the middle one for one."""
    count = min(most, len(frames))
    return [frames[(len(frames) - 1) * k // (count - 1) if count > 1 else len(frames) // 2] for k in range(count)]


# --- kinds of films -------------------------------------------------------------------------------------------


def _demuxer(data: bytes) -> str:
    """Choose what reads a film by its first bytes."""
    if not data:
        raise FilmError("an empty file")
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] in (b"GIF8", b"RIFF"):
        return "picture"
    raise FilmError("not a video of mp4, mov, mkv or webm")


@contextmanager
def _opened(data: bytes | IO[bytes]) -> Iterator[_Video | _Animated]:
    """Open a film; errors of the decoders become FilmError."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    kind, _ = _demuxer(file.read(12)), file.seek(0)
    if kind == "picture":
        with _pillow_errors(), opened_picture(file, ANIMATED) as image:
            yield _Animated(image)
        return
    if kind == "mov" and holds_too_much(file):
        raise FilmError("it names more frames, sounds or cuts than can be read; save it anew as shorter clips")
    file.seek(0)
    import av
    from av.error import FFmpegError

    # Before 19 it stops at titles that are no UTF-8; since then it reads them, and does not know the option.
    older: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        with av.open(
            file,
            format=kind,
            options={"max_pixels": str(LARGEST_FRAME)},  # of the streams: the first frames are decoded at once
            container_options={"enable_drefs": "0"},
            **older,
        ) as container:
            yield _Video(container)
    except (FFmpegError, EOFError, OverflowError) as error:
        raise FilmError("damaged or truncated") from error
    except MemoryError as error:
        raise FilmError("too little memory to decode it") from error


@contextmanager
def _pillow_errors() -> Iterator[None]:
    try:
        yield
    except FilmError:
        raise
    except DECODER_ERRORS as error:
        raise FilmError(decoder_error(error)) from error


class _Animated:
    """A picture that moves."""

    has_sound = False

    def __init__(self, image: ImageFile.ImageFile) -> None:
        self._image = image
        self.format, self.has_alpha = image.format or "", False
        self.rate = 0.0
        self._count = count_frames(image)
        _check_size(image.size, self._count)

    def frames(self) -> Iterator[_Frame]:
        """Yield its frames, each laid on those before it."""
        time = 0.0
        for number in range(self._count):
            look()
            self._image.seek(number)
            self._image.load()
            shown = self._image.copy()
            self.has_alpha = self.has_alpha or shown.has_transparency_data
            yield _Frame(time, shown)
            time += (self._image.info.get("duration") or 0) / 1000 or USUAL_TIME

    def check_whole(self, times: Sequence[float]) -> None:
        """Pass: Pillow refuses what ends early."""


class _Video:
    """The first video stream of a file."""

    def __init__(self, container: InputContainer) -> None:
        if not container.streams.video:
            raise FilmError("no video stream is in it, or it is damaged")
        self._container = container
        self._stream = stream = container.streams.video[0]
        if not stream.codec_context:
            raise FilmError("its codec is unknown")
        self.format, self.has_sound = container.format.name, bool(container.streams.audio)
        self.rate = float(stream.average_rate or 0)
        self._told = stream.codec_context.width, stream.codec_context.height
        _check_size(self._told, stream.frames, LARGEST_FRAME)
        self._decoder = self._choose_decoder()
        self.has_alpha = False
        self._size: Size | None = None

    def _choose_decoder(self) -> Any:
        """Choose a decoder that reads alpha, where the file says that there is some."""
        import av

        own = self._stream.codec_context
        name = _WITH_ALPHA.get(own.codec.name, "")
        if self._stream.metadata.get("alpha_mode") == "1" and name in av.codecs_available:
            own = av.CodecContext.create(name, "r")
        own.options = {"max_pixels": str(LARGEST_FRAME)}
        own.thread_type = "AUTO"
        return own

    def frames(self) -> Iterator[_Frame]:
        """Yield its frames in the order in which they are seen."""
        found, shape = 0, float(self._stream.sample_aspect_ratio or 1)
        shape = shape if 1 / MOST_STRETCHED <= shape <= MOST_STRETCHED else 1.0
        for packets, packet in enumerate(self._container.demux(self._stream)):
            look()
            # Frames that are never seen take as much time as others.
            _check_size(self._size or self._told, packets // MOST_PACKETS_OF_A_FRAME, LARGEST_FRAME)
            for frame in self._decoder.decode(packet if packet.size else None):
                found += 1
                if self._size is None:
                    self._size = frame.width, frame.height
                    self.has_alpha = _has_alpha(frame)
                if (frame.width, frame.height) != self._size:
                    raise FilmError("its frames change their size")
                _check_size(self._size, found, LARGEST_FRAME)
                if frame.pts is None or not self._stream.time_base:
                    time = (found - 1) / self.rate if self.rate else float(found - 1)
                else:
                    time = float(frame.pts * self._stream.time_base)
                yield _Frame(time, frame, shape)

    def check_whole(self, times: Sequence[float]) -> None:
        """Raise FilmError where the file says that it has clearly more than the frames at these seconds."""
        frames, promised = len(times), self._stream.frames
        if frames < 0.9 * promised - 1:
            raise FilmError(f"truncated: {frames} of about {promised} frames can be decoded")
        lasts, seconds = times[-1] - times[0], _seconds(self._stream.metadata.get("DURATION", ""))
        # One that is cut short still tells its rate, by which its last frame ends.
        if not promised and self.rate and lasts < 0.9 * seconds - 2 / self.rate:
            raise FilmError(f"truncated: {lasts:.1f} of {seconds:.1f} seconds can be decoded")


def _has_alpha(frame: Any) -> bool:
    """Tell whether a frame of PyAV has an alpha channel."""
    return any(component.is_alpha for component in frame.format.components)


def _seconds(clock: str) -> float:
    """Read 00:01:02.5, 0 from anything else."""
    match = _CLOCK.match(clock)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else 0.0


def _check_size(size: Size, frames: int, largest: int = LARGEST) -> None:
    """Raise FilmError for more pixels or frames than are read; largest: pixels of a frame."""
    pixels = size[0] * size[1]
    if pixels > largest:
        raise FilmError("too many pixels")
    if frames > MOST_FRAMES:
        raise FilmError(f"more than {MOST_FRAMES} frames; cut it into shorter clips")
    if pixels * frames > MOST_PIXELS:
        raise FilmError(f"more than {MOST_PIXELS // pixels} frames of {size[0]}x{size[1]}; cut it into shorter clips")


def _rate_of(times: list[float]) -> float:
    """Compute the average rate from the times of frames."""
    seconds = times[-1] - times[0]
    return (len(times) - 1) / seconds if seconds > 0 else 1.0


def _are_even(times: list[float], rate: float) -> bool:
    """Tell whether frames come as evenly as their rate says."""
    return all(abs((time - times[0]) * rate - number) < EVEN for number, time in enumerate(times))
