"""Videos as moments to be shown as images: which frames, and reading them from files without holding the rest (spec 4.4).

Two conventions are public and none is confirmed. The default, that of the servers, shows single frames as still images. Pairs,
the other, fill the two time slots of a patch with adjacent frames.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import UInt8

from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs.image_reading import check_size, is_array, read_image
from inkling_jax.inputs.media_source import find_media

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# What FFmpeg may take a file for. Playlists and the like, which make it open other files and addresses, are not here.
CONTAINERS = "mov,mp4,matroska,webm,avi,gif,mpegts,mpeg,flv,asf,ogg"
MAX_KEPT_PIXELS = 2**29  # of all frames that are kept, 1.6 GB: 64 frames of 3840 x 2160

Frame = UInt8[np.ndarray, "h w 3"]


@dataclasses.dataclass(frozen=True)
class VideoConfig:
    """Which frames of a video are shown."""

    fps: float = 2.0  # frames a second, unless the video has fewer
    max_frames: int = 32  # in all
    pairs: bool = False  # adjacent frames together, at most max_frames // 2 pairs but never fewer than two

    def __post_init__(self) -> None:
        if isinstance(self.fps, bool) or not isinstance(self.fps, int | float) or not 0 < self.fps < math.inf:
            raise ConfigError(f"fps is {self.fps!r}; a finite number above 0 would be right")
        if isinstance(self.max_frames, bool) or not isinstance(self.max_frames, int) or self.max_frames < 1:
            raise ConfigError(f"max_frames is {self.max_frames!r}; an integer of at least 1 would be right")
        if not isinstance(self.pairs, bool):
            raise ConfigError(f"pairs is {self.pairs!r}; True or False would be right")


class Moment(NamedTuple):
    """A part of a video that is shown as one image: a frame, or the two frames of a pair, as `image_patches` takes them."""

    seconds: float  # after the first frame
    image: Frame | tuple[Frame, Frame]


def read_video(video: Any, config: VideoConfig = VideoConfig(), name: str = "video") -> list[Moment]:
    """The moments of `video` that `config` asks for. Only these frames are held; what lies between is decoded and let go.

    `video` is a path, a file:// or data: URL or the bytes of a file, which PyAV reads (the [media] extra); or a list, tuple or
    array [frames, height, width, 3] of images as `read_image` takes them, which count as `config.fps` a second. Raises InputError
    beginning with `name`.
    """
    if isinstance(video, list | tuple) or is_array(video):
        return _from_frames(video, config, name)
    found = find_media(video, name)
    with found.open("rb") if isinstance(found, Path) else io.BytesIO(found) as file:
        return _from_file(file, config, f"{name}: {found}" if isinstance(found, Path) else name)


def frame_indices(total: int, rate: Fraction, fps: float, max_frames: int) -> list[int]:
    """Which of `total` frames at `rate` a second are shown: evenly spread from first to last, `fps` a second (spec 4.4 a)."""
    count = max(1, min(math.floor(total * Fraction(fps) / rate), max_frames, total))
    return [i * (total - 1) // max(count - 1, 1) for i in range(count)]


def pair_anchors(frames: int, max_pairs: int) -> list[int]:
    """The first of each two adjacent frames that make a pair, evenly spread over `frames`, an even number (spec 4.4 b)."""
    count = max(2, min(max_pairs, frames // 2))
    return [min(round(i * (frames - 2) / (count - 1)), frames - 2) for i in range(count)]


def _plan(total: int, rate: Fraction, config: VideoConfig) -> list[tuple[int, ...]]:
    """The frames of each moment."""
    if not config.pairs:
        return [(index,) for index in frame_indices(total, rate, config.fps, config.max_frames)]
    frames = frame_indices(total, rate, config.fps, total)
    frames += frames[-1:] * (len(frames) % 2)
    return [(frames[i], frames[i + 1]) for i in pair_anchors(len(frames), config.max_frames // 2)]


def _moments(plan: list[tuple[int, ...]], kept: dict[int, tuple[float, Frame]]) -> list[Moment]:
    """The frames that were read, in the plan's order."""
    moments = []
    for indices in plan:
        seconds, first = kept[indices[0]]
        moments.append(Moment(seconds, first if len(indices) == 1 else (first, kept[indices[1]][1])))
    return moments


def _check_kept(width: int, height: int, frames: int, name: str) -> None:
    check_size(width, height, name)
    if width * height * frames > MAX_KEPT_PIXELS:
        asked = f"{frames} frames of {width} x {height} pixels"
        raise InputError(f"{name}: {asked} are more than the {MAX_KEPT_PIXELS} pixels that are held: lower max_frames")


def _from_frames(video: Sequence[Any], config: VideoConfig, name: str) -> list[Moment]:
    if is_array(video) and np.ndim(video) != 4:
        raise InputError(f"{name} is an array of shape {list(np.shape(video))}; [frames, height, width, 3] would be right")
    if not len(video):
        raise InputError(f"{name} has no frames")
    plan = _plan(len(video), Fraction(config.fps), config)
    wanted = {index for indices in plan for index in indices}
    kept = {}
    for index in sorted(wanted):
        label = f"{name}, frame {index}"
        image = read_image(video[index], label)
        _check_kept(image.width, image.height, len(wanted), label)
        kept[index] = (index / config.fps, np.asarray(image))
    return _moments(plan, kept)


def _from_file(file: BinaryIO, config: VideoConfig, name: str) -> list[Moment]:
    try:
        from av.error import FFmpegError
    except ModuleNotFoundError:
        raise InputError(f"{name} is read by PyAV, which is not installed: pip install 'inkling_jax[media]'") from None
    try:
        # A count in the file's head may be absent or wrong, that of the packets seldom is.
        with _opened(file) as container:
            total = sum(packet.size > 0 for packet in container.demux(_stream(container, name)))
        while total:
            with _opened(file) as container:
                stream = _stream(container, name)
                rate = stream.average_rate
                plan = _plan(total, Fraction(rate.numerator, rate.denominator) if rate else Fraction(config.fps), config)
                wanted = {index for indices in plan for index in indices}
                if stream.width:  # known before the first frame in most files
                    _check_kept(stream.width, stream.height, len(wanted), name)
                kept, decoded = _decode(container, stream, wanted, name)
            if kept.keys() == wanted:
                return _moments(plan, kept)
            total = decoded  # some codecs have packets that are no frames
    except FFmpegError as error:
        raise InputError(f"{name} is no video that can be decoded: {error.strerror}") from None
    raise InputError(f"{name} has no frame that can be decoded")


def _opened(file: BinaryIO) -> InputContainer:
    import av

    file.seek(0)
    return av.open(file, "r", options={"format_whitelist": CONTAINERS, "protocol_whitelist": "none"})


def _stream(container: InputContainer, name: str) -> VideoStream:
    """The first video stream; the cover of an audio file is none."""
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:
            if stream.codec_context is None:
                raise InputError(f"{name} is no video that can be decoded: its codec is not known")
            stream.thread_type = "AUTO"
            return stream
    raise InputError(f"{name} has no video stream")


def _decode(
    container: InputContainer, stream: VideoStream, wanted: set[int], name: str
) -> tuple[dict[int, tuple[float, Frame]], int]:
    """The wanted frames that there are, each with its time after the first, and how many were decoded until the last of them."""
    kept: dict[int, tuple[float, Frame]] = {}
    decoded, begin = 0, 0.0
    for frame in container.decode(stream):
        if decoded == 0:
            begin = frame.time or 0.0
        if decoded in wanted:
            _check_kept(frame.width, frame.height, len(wanted), name)
            kept[decoded] = ((frame.time or begin) - begin, _upright(frame))
        decoded += 1
        if len(kept) == len(wanted):
            break
    return kept, decoded


def _upright(frame: VideoFrame) -> Frame:
    """RGB pixels, turned as the file says that it was filmed."""
    rgb = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(rgb, round(frame.rotation / 90))) if frame.rotation else rgb
