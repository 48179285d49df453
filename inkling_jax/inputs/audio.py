"""Audio as the model hears it: 80 log-mel bands every 50 ms, each in one of 16 levels (dMel, spec 5)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from inkling_jax.config import AudioConfig
from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs.audio_source import open_audio
from inkling_jax.inputs.resample import RATE, resample
from inkling_jax.inputs.sample_blocks import bucket, overlapping

HOP = 800  # samples from a frame to the next: 50 ms
WINDOW = 1600  # samples of a frame, and of its Fourier transform
BANDS = 80
FLOOR = 1e-10  # of the squared magnitude, and again of a band before its logarithm
FRAMES = (16, 128, 1024)  # sizes of block, one compilation each
MAX_SECONDS = 4 * 3600


def num_rows(samples: int, rate: int = RATE) -> int:
    """How many rows of the model `samples` of one channel at `rate` become: 20 a second, a part of 50 ms counting whole."""
    return -(-samples * (RATE // HOP) // rate)


def to_bins(audio: Any, config: AudioConfig, name: str = "audio", max_seconds: float = MAX_SECONDS) -> Int32[np.ndarray, "T M"]:
    """The levels of an item, one row for each row of the model.

    `audio` is (wave, rate), a path, a file:// or data: URL, bytes of a file (audio_source.py says which), or an integer array
    [T, M] of ready levels. The file is read, resampled to 16 kHz mono, transformed and quantised block by block.

    Raises InputError, beginning with `name`, for what cannot be decoded, has no samples, is longer than `max_seconds` or has
    a sample or level that is none; ConfigError where the model wants another number of bands than 80.
    """
    if isinstance(audio, np.ndarray | jax.Array):
        return _check_bins(np.asarray(audio), config, name, max_seconds)
    if config.num_mel_bins != BANDS:
        raise ConfigError(f"audio_config.n_mel_bins is {config.num_mel_bins}: waves become {BANDS} bands; give ready bins")
    with open_audio(audio, name, max_seconds) as stream:
        levels = (config.mel_vocab_size, config.dmel_min, config.dmel_max)
        bins = [quantize(block, *levels) for block in _log_mel_blocks(resample(stream.blocks, stream.rate))]
    return np.concatenate(bins)


def log_mel(wave: Float[np.ndarray, " n"]) -> Float32[np.ndarray, "T 80"]:
    """log10 of 80 mel bands' magnitudes of a 16 kHz mono wave, for each frame of 100 ms every 50 ms; T is ceil(n / 800).

    Frame i sees samples 800(i-1) to 800(i+1), zeros outside the wave. Float32. Raises InputError for another shape or no number.
    """
    wave = np.asarray(wave)
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise InputError(f"wave is {wave.dtype}{list(wave.shape)}; one channel of floats, [n], would be right")
    if not np.isfinite(wave).all():
        raise InputError("wave has samples that are not finite (NaN or infinite)")
    return np.concatenate([np.zeros((0, BANDS), np.float32), *_log_mel_blocks([wave])])


def quantize(
    log_mel: Float[np.ndarray, "T M"], levels: int = 16, low: float = -7.0, high: float = 2.0
) -> Int32[np.ndarray, "T M"]:
    """The index of the nearest of `levels` values evenly spaced from `low` to `high`, the lower of two as near.

    Compared in float64, where float32 values lie on a midpoint only where they are one. Raises InputError for NaN.
    """
    values = np.asarray(log_mel, np.float64)
    if np.isnan(values).any():
        raise InputError("log_mel has NaN; every band's logarithm must be a number")
    values = np.clip(values, low, high)
    centres = np.linspace(low, high, levels)
    below = np.clip(((values - low) * ((levels - 1) / (high - low))).astype(np.int32), 0, levels - 2)
    return below + (np.abs(values - centres[below + 1]) < np.abs(values - centres[below]))


def _log_mel_blocks(blocks: Iterable[Float32[np.ndarray, " n"]]) -> Iterator[Float32[np.ndarray, "T 80"]]:
    """The log-mel of a 16 kHz stream, in blocks of at most 1024 frames."""
    for window, valid in overlapping(blocks, FRAMES[-1] * HOP, before=HOP, after=0):
        frames = -(-valid // HOP)
        padded = bucket(frames, FRAMES)
        yield np.asarray(_log_mel(window[: (padded + 1) * HOP], mel_filters()))[:frames]


@jax.jit
def _log_mel(samples: Float[Array, " n"], filters: Float[Array, "801 80"]) -> Float[Array, "T 80"]:
    """Log-mel of whole hops, of which the first is the one before frame 0."""
    hops = samples.reshape(-1, HOP)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)  # periodic Hann
    spectrum = jnp.fft.rfft(jnp.concatenate([hops[:-1], hops[1:]], axis=1) * window.astype(np.float32))
    magnitude = jnp.sqrt(jnp.maximum(spectrum.real**2 + spectrum.imag**2, FLOOR))
    mel = jnp.matmul(magnitude, filters, precision="highest")
    return jnp.log10(jnp.maximum(mel, FLOOR))


@functools.cache
def mel_filters() -> Float32[np.ndarray, "801 80"]:
    """80 triangles evenly spaced on Slaney's mel scale from 0 to 8 kHz, each with an area of one over its frequencies in Hz."""

    def to_hz(mel: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """200/3 Hz a mel up to 1 kHz, 27 mels for each factor of 6.4 above."""
        return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))

    highest = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    left, peak, right = (to_hz(np.linspace(0, highest, BANDS + 2))[i : i + BANDS] for i in range(3))
    frequency = np.arange(WINDOW // 2 + 1)[:, None] * (RATE / WINDOW)
    triangle = np.minimum((frequency - left) / (peak - left), (right - frequency) / (right - peak))
    return (np.maximum(triangle, 0) * 2 / (right - left)).astype(np.float32)


def _check_bins(bins: np.ndarray, config: AudioConfig, name: str, max_seconds: float) -> Int32[np.ndarray, "T M"]:
    """Ready levels, if they are that."""
    bands, levels = config.num_mel_bins, config.mel_vocab_size
    if bins.ndim != 2 or bins.shape[1] != bands or not np.issubdtype(bins.dtype, np.integer):
        wanted = f"ready bins are integers [T, {bands}], and a wave comes with its rate, (wave, rate)"
        raise InputError(f"{name} is an array {bins.dtype}{list(bins.shape)}; {wanted}")
    if not len(bins):
        raise InputError(f"{name} is empty: bins of 0 frames")
    if len(bins) > max_seconds * (RATE // HOP):
        raise InputError(f"{name} has {len(bins)} frames of 50 ms; the limit is {max_seconds:g} seconds")
    if bins.min() < 0 or bins.max() >= levels:
        raise InputError(f"{name} has bins from {bins.min()} to {bins.max()}; 0 to {levels - 1} would be right")
    return bins.astype(np.int32)
