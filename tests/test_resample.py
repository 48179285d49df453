"""Resampling to 16 kHz: tones in and out, at rates that share many, few and no factors with 16000."""

from __future__ import annotations

import numpy as np
import pytest

from inkling_jax.inputs import resample as module
from inkling_jax.inputs.resample import resample
from inkling_jax.inputs.sample_blocks import overlapping


def resampled(wave, rate, block=None):
    """A whole wave at once, or in blocks."""
    wave = np.asarray(wave, np.float32)
    blocks = [wave] if block is None else [wave[i : i + block] for i in range(0, len(wave), block)]
    return np.concatenate([np.zeros(0, np.float32), *resample(blocks, rate)])


def tone(frequency, rate, seconds):
    """A cosine that is at no zero and no peak at time 0."""
    return np.cos(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate + 0.3)


@pytest.mark.parametrize("rate", [2000, 8000, 11025, 15999, 17000, 22050, 24000, 44100, 44101, 48000, 192000, 384000])
def test_tones_pass_or_stop(rate):
    """Up to 0.9125 of the lower Nyquist frequency a tone is the same tone at 16 kHz, in place; from there on it is gone: 100 dB.

    What a lower rate would mirror is in the error of the tones that pass.
    """
    nyquist = min(rate, 16000) / 2
    for frequency in np.linspace(0, 0.9125, 7) * nyquist:
        got, want = resampled(tone(frequency, rate, 0.4), rate), tone(frequency, 16000, 0.4)
        inner = slice(len(got) // 4, 3 * len(got) // 4)
        assert np.abs(got[inner] - want[inner]).max() < 1e-5, frequency
    for frequency in np.linspace(nyquist, rate / 2, 15) if rate > 16000 else ():
        got = resampled(tone(frequency, rate, 0.4), rate)
        assert np.abs(got[len(got) // 4 : 3 * len(got) // 4]).max() < 1e-5, frequency


def test_sixteen_kilohertz_is_left_alone():
    wave = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert np.array_equal(resampled(wave, 16000), wave)


@pytest.mark.parametrize("rate", [8000, 44100, 48000, 15999])
def test_length_is_that_of_the_time(rate):
    """ceil(samples * 16000 / rate), none for none, through the edges of blocks of 1, 4 and 16 seconds."""
    counts = [0, 1, 2, 3, rate - 1, rate, rate + 1, 4 * rate + 1, 16 * rate, 16 * rate + 1]
    assert [len(resampled(np.zeros(n), rate)) for n in counts] == [-(-n * 16000 // rate) for n in counts]


@pytest.mark.parametrize("rate", [8000, 44100, 15999])
def test_blocks_do_not_show(rate):
    """17.3 seconds of noise, which are two blocks: the same in pieces of any size, and their end alone the same too."""
    wave = np.random.default_rng(rate).standard_normal(int(17.3 * rate))
    whole = resampled(wave, rate)
    for size in (rate // 7, 3 * rate + 1):
        np.testing.assert_allclose(resampled(wave, rate, size), whole, atol=1e-6)
    later = resampled(wave[15 * rate :], rate)  # the edge at 16 seconds is in the middle of this one's first block
    np.testing.assert_allclose(later[800:], whole[15 * 16000 + 800 :], atol=1e-5)


def test_outside_the_clip_is_silence():
    """A constant begins with the filter's second half and its middle tap, twice the cut-off of 7650 Hz over the rate."""
    got = resampled(np.ones(48000), 48000)
    assert abs(got[0] - (1 + 2 * 7650 / 48000) / 2) < 1e-3 and np.abs(got[200:-200] - 1).max() < 1e-6


def test_few_compilations_for_all_lengths():
    """Whatever the length, a rate compiles for three sizes of block."""
    before = module._apply._cache_size()
    for seconds in (0.01, 0.5, 1, 1.01, 3.9, 4.1, 7, 16, 16.5, 19, 30):
        resampled(np.zeros(int(12000 * seconds)), 12000)
    assert module._apply._cache_size() - before <= 3


def test_a_stream_is_not_held():
    """The first 16 seconds are out when little more than that has been asked for."""
    asked = []

    def stream():
        for second in range(1000):
            asked.append(second)
            yield np.zeros(44100, np.float32)

    assert len(next(resample(stream(), 44100))) == 16 * 16000 and len(asked) == 17


def test_windows_of_a_stream():
    """Windows of before + hop + after, each hop further, zeros around the stream; how many of the hop are the stream's."""

    def windows(samples, size):
        wave = np.arange(1, samples + 1, dtype=np.float32)
        blocks = [wave[i : i + size] for i in range(0, samples, size)]
        return [(window.tolist(), valid) for window, valid in overlapping(blocks, 4, 2, 1)]

    assert windows(0, 1) == []
    want = [([0, 0, 1, 2, 3, 4, 5], 4), ([3, 4, 5, 6, 7, 8, 9], 4), ([7, 8, 9, 0, 0, 0, 0], 1)]
    for size in (1, 2, 3, 5, 9):
        assert windows(9, size) == want
        assert windows(8, size) == [want[0], ([3, 4, 5, 6, 7, 8, 0], 4)]
        assert windows(4, size) == [([0, 0, 1, 2, 3, 4, 0], 4)]
