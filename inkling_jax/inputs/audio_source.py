"""Audio items as a stream of mono samples: wave arrays, WAV files by themselves, other files through PyAV (the [media] extra)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Float32

from inkling_jax.errors import InputError
from inkling_jax.inputs.media_source import find_media
from inkling_jax.inputs.wav import open_wav

MIN_RATE, MAX_RATE = 2_000, 384_000
MAX_CHANNELS = 64
FULL_SCALE = 100.0  # floats beyond are no samples in units of full scale, which is 1
CHUNK = 1 << 18  # samples that a wave array is taken in at a time
# What FFmpeg may take a file for. Playlists and the like, which make it open other files and addresses, are not here.
CONTAINERS = "aac,ac3,aiff,amr,asf,au,caf,eac3,flac,matroska,webm,mov,mp4,m4a,mp3,ogg,w64,wav,wv"


class Stream(NamedTuple):
    """Samples a second, and the samples of one channel in blocks."""

    rate: int
    blocks: Iterator[Float32[np.ndarray, " n"]]


@contextlib.contextmanager
def open_audio(audio: Any, name: str, max_seconds: float) -> Iterator[Stream]:
    """The samples of (wave, rate), a path, a file:// or data: URL or bytes, full scale being 1, channels averaged.

    A wave is [samples] or [samples, channels], of floats or, as in PCM files, of uint8, int16 or int32. WAV files of whole
    numbers and floats are read here, the rest by PyAV. Errors (InputError beginning with `name`) come while the blocks are read.
    """
    if isinstance(audio, tuple):
        if len(audio) != 2:
            raise InputError(f"{name} is a tuple of {len(audio)}; (wave, rate) would be right")
        wave, rate = audio
        rate = check_rate(rate, name)
        yield Stream(rate, _checked(_wave_blocks(wave, name), rate, name, max_seconds))
        return
    found = find_media(audio, name)
    label = f"{name}: {found}" if isinstance(found, Path) else name
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(found.open("rb") if isinstance(found, Path) else io.BytesIO(found))
        rate, blocks = open_wav(file, label) or _open_any(file, label, opened)
        rate = check_rate(rate, label)
        yield Stream(rate, _checked((mono(block, label) for block in blocks), rate, label, max_seconds))


def check_rate(rate: Any, name: str) -> int:
    """Samples a second as an int, if it is a whole number in bounds."""
    whole = isinstance(rate, int | float | np.integer | np.floating) and not isinstance(rate, bool) and rate == np.floor(rate)
    if not whole or not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(
            f"{name} has a rate of {rate!r:.50}; a whole number from {MIN_RATE} to {MAX_RATE} a second would be right"
        )
    return int(rate)


def mono(samples: np.ndarray, name: str) -> Float32[np.ndarray, " n"]:
    """The mean of the channels of [n] or [n, channels], whole numbers scaled as in PCM: full scale is 1."""
    kind, size = samples.dtype.kind, samples.dtype.itemsize
    if kind != "f" and (kind, size) not in (("u", 1), ("i", 2), ("i", 4)):
        raise InputError(f"{name} has samples of {samples.dtype}; floats, uint8, int16 or int32 would be right")
    with np.errstate(all="ignore"):  # a float64 too large becomes infinite, which is told with its place
        scaled = samples.astype(np.float32)
    if kind == "u":
        scaled = (scaled - 128) / 128
    elif kind == "i":
        scaled /= 256**size // 2
    if scaled.ndim == 1:
        return scaled
    total = scaled[:, 0].copy()
    for channel in scaled.T[1:]:  # numpy's mean over a short last axis takes four times as long
        total += channel
    return total / scaled.shape[1]


def _wave_blocks(wave: Any, name: str) -> Iterator[Float32[np.ndarray, " n"]]:
    """A wave array in blocks."""
    try:
        wave = np.asarray(wave)
    except ValueError as error:
        raise InputError(f"{name} has a wave that is no array: {error}") from None
    if wave.ndim not in (1, 2) or (wave.ndim == 2 and not 1 <= wave.shape[1] <= MAX_CHANNELS):
        right = f"[samples] or [samples, channels] with at most {MAX_CHANNELS} channels would be right"
        raise InputError(f"{name} has a wave of shape {list(wave.shape)}; {right}")
    for start in range(0, len(wave), CHUNK):
        yield mono(wave[start : start + CHUNK], name)


def _checked(
    blocks: Iterable[Float32[np.ndarray, " n"]], rate: int, name: str, max_seconds: float
) -> Iterator[Float32[np.ndarray, " n"]]:
    """The blocks, each known to be samples, of a clip neither empty nor too long."""
    seen = 0
    for block in blocks:
        wrong = ~(np.abs(block) <= FULL_SCALE)
        if wrong.any():
            first = int(wrong.argmax())
            at = f"{name} has the sample {block[first]:g} at {(seen + first) / rate:.3f} s"
            raise InputError(f"{at}; a finite number would be right, where 1 is full scale and {FULL_SCALE:g} the limit")
        seen += len(block)
        if seen > max_seconds * rate:
            raise InputError(f"{name} is longer than {max_seconds:g} seconds, which is the limit")
        yield block
    if not seen:
        raise InputError(f"{name} is empty: it has no samples")


def _open_any(file: BinaryIO, name: str, opened: contextlib.ExitStack) -> tuple[int, Iterator[np.ndarray]]:
    """Rate and samples [n, channels] of a file that FFmpeg knows, which stays open while `opened` is."""
    try:
        import av
        import av.error
    except ModuleNotFoundError:
        how = "other audio is read by PyAV: pip install 'inkling_jax[media]'"
        raise InputError(f"{name} is no WAV file of whole numbers or floats; {how}") from None
    try:
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
        container = opened.enter_context(av.open(file, "r", options=options))
    except av.error.FFmpegError as error:
        raise InputError(f"{name} is no audio file of a kind that can be read: {error.strerror}") from None
    if not container.streams.audio:
        raise InputError(f"{name} has no audio stream")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise InputError(f"{name} is no audio that can be decoded: its codec is not known")

    def blocks() -> Iterator[np.ndarray]:
        try:
            for frame in container.decode(stream):
                if frame.sample_rate != stream.rate:
                    raise InputError(f"{name} changes its rate from {stream.rate} to {frame.sample_rate}")
                samples = frame.to_ndarray()
                yield samples.T if frame.format.is_planar else samples.reshape(frame.samples, -1)
        except av.error.FFmpegError as error:
            raise InputError(f"{name} cannot be decoded: {error.strerror}") from None

    return stream.rate, blocks()
