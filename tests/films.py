"""Films for tests, written by PyAV and Pillow: each frame is of one grey that tells its number."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

SIZE = (64, 48)


def grey(number: int) -> int:
    """Choose the grey of a frame: 16, 24, 32 … and from the start after 26 frames."""
    return 16 + number % 26 * 8


def number_of(image: Image.Image) -> int:
    """Read the number of a frame from its grey."""
    return round((float(np.asarray(image.convert("L")).mean()) - 16) / 8)


def film(
    frames: int = 10,
    *,
    format: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    rate: int = 24,
    size: tuple[int, int] = SIZE,
    times: Sequence[int] = (),
    sound: bool = False,
    shape: Fraction | int = 1,
    draw: Any = None,
    faststart: bool = False,
) -> bytes:
    """Write a film.

    times: of each frame, in parts of a rate's second. shape: width of a pixel per height. draw: the (H, W, 3 or 4)
    pixels of a frame. faststart: what an mp4 says of its frames stands before them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film"
        options = {"movflags": "faststart"} if faststart else {}
        with av.open(str(path), "w", format=format, options=options) as container:
            _write(container, frames, codec, pixels, rate, size, times, sound, shape, draw)
        return path.read_bytes()


def _write(
    container: Any,
    frames: int,
    codec: str,
    pixels: str,
    rate: int,
    size: tuple[int, int],
    times: Sequence[int],
    sound: bool,
    shape: Fraction | int,
    draw: Any,
) -> None:
    stream: Any = container.add_stream(codec, rate=rate)
    if shape != 1:
        stream.codec_context.sample_aspect_ratio = Fraction(shape)
    stream.width, stream.height = size
    stream.pix_fmt = pixels
    track: Any = container.add_stream("aac", rate=48_000) if sound else None
    for number in range(frames):
        shown = np.full((size[1], size[0], 3), grey(number), np.uint8) if draw is None else draw(number)
        frame = av.VideoFrame.from_ndarray(shown, format="rgba" if shown.shape[-1] == 4 else "rgb24")
        frame.pts, frame.time_base = times[number] if times else number, Fraction(1, rate)
        container.mux(stream.encode(frame))
    if track:
        noise = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        noise.rate, noise.pts = 48_000, 0
        container.mux(track.encode(noise))
        container.mux(track.encode())
    container.mux(stream.encode())


def turned(content: bytes, degrees: int) -> bytes:
    """Write into an mp4 that it is shown turned clockwise, as telephones do."""
    matrix = {90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}[degrees]
    at = content.index(b"tkhd") + 4 + 40
    values = [matrix[0] << 16, matrix[1] << 16, 0, matrix[2] << 16, matrix[3] << 16, 0, 0, 0, 1 << 30]
    written = b"".join(value.to_bytes(4, "big", signed=True) for value in values)
    return content[:at] + written + content[at + 36 :]


def animated(frames: int = 6, *, format: str = "GIF", duration: int | list[int] = 100, alpha: bool = False) -> bytes:
    """Write an animated picture; duration: of each frame in milliseconds."""
    pictures = [Image.new("RGB", SIZE, (grey(number),) * 3) for number in range(frames)]
    if alpha:
        for picture in pictures:
            picture.putalpha(Image.linear_gradient("L").resize(SIZE))
    buffer = io.BytesIO()
    more: dict[str, Any] = {"lossless": True} if format == "WEBP" else {}
    pictures[0].save(buffer, format, save_all=True, append_images=pictures[1:], duration=duration, loop=0, **more)
    return buffer.getvalue()
