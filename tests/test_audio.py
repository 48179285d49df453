"""The audio tower, and audio as 16 kHz waves: log-mel and levels, against the reference's answers and numbers by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from modules import filled
from safetensors import safe_open

from inkling_jax.config import AudioConfig, preset
from inkling_jax.errors import ConfigError, InputError
from inkling_jax.inputs import audio
from inkling_jax.inputs.audio import log_mel, mel_filters, num_rows, quantize, to_bins
from inkling_jax.layers.audio import AudioTower

CLIPS = ("sweep", "noise", "silence", "one_sample", "exact_hop")
PUBLISHED = preset("inkling").audio
SMALL = AudioConfig(hidden_size=4, num_mel_bins=3, mel_vocab_size=5, dmel_min=-7.0, dmel_max=2.0, use_norm=True)


@pytest.fixture(scope="module")
def tower_weights(oracle_dir):
    """The tiny checkpoint's tower tensors, in float32."""
    with safe_open(oracle_dir("tiny") / "model-00001-of-00003.safetensors", "numpy") as file:
        names = {"embed": "model.audio.encoder.weight", "norm_weight": "model.audio.final_norm.weight"}
        return {ours: file.get_tensor(theirs).astype(np.float32) for ours, theirs in names.items()}


# The tower


@pytest.mark.parametrize("clip", CLIPS)
def test_features_of_the_reference(clip, expected, tower_weights):
    """Tower rows of every clip of the reference, within 1e-4 of their size."""
    answers = expected("tiny")
    config = dataclasses.replace(SMALL, hidden_size=128, num_mel_bins=80, mel_vocab_size=16)
    tower = filled(AudioTower(config, jnp.float32), **tower_weights)
    want = answers[f"audio.{clip}.features"]
    got = np.asarray(tower(jnp.asarray(answers[f"audio.{clip}.bins"])))
    assert got.shape == want.shape and got.dtype == np.float32
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tower_by_hand(dtype, normed):
    """Row m * levels + bin of each band, summed in float32, normed: written as loops in float64."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(SMALL, use_norm=normed)
    table = rng.standard_normal((15, 4)).astype(dtype)
    weight = (1 + 0.2 * rng.standard_normal(4)).astype(dtype)
    tower = filled(AudioTower(config, dtype), embed=table, **({"norm_weight": weight} if normed else {}))
    bins = np.array([[0, 0, 0], [4, 4, 4], [1, 2, 3]], np.int32)
    got = tower(jnp.asarray(bins))
    assert got.dtype == dtype
    want = np.stack([sum(table[m * 5 + b].astype(np.float64) for m, b in enumerate(row)) for row in bins])
    if normed:
        want = want / np.sqrt((want**2).mean(1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=4 * eps, atol=4 * eps)


def test_the_last_row_is_the_last_band_at_its_last_level():
    """Of 80 bands and 16 levels, band 79 at level 15 is row 1279; a level of 16 must not become the next band's first."""
    config = dataclasses.replace(SMALL, hidden_size=1, num_mel_bins=80, mel_vocab_size=16, use_norm=False)
    tower = filled(AudioTower(config, jnp.float32), embed=np.arange(1280)[:, None] == 1279)
    bins = np.zeros((1, 80), np.int32)
    assert tower(jnp.asarray(bins)).item() == 0
    bins[0, 79] = 15
    assert tower(jnp.asarray(bins)).item() == 1
    embed = np.zeros((1280, 1))
    embed[16] = 1
    bins[0] = 15
    bins[0, 0] = 16
    assert filled(AudioTower(config, jnp.float32), embed=embed)(jnp.asarray(bins)).item() == 0


def test_tower_gathers_no_rows():
    """4096 frames at width 512 in less than 8 times the output's memory: gathered rows would take 80 times."""
    config = dataclasses.replace(SMALL, hidden_size=512, num_mel_bins=80, mel_vocab_size=16, use_norm=False)
    run = jax.jit(lambda table, bins: filled(AudioTower(config, jnp.float32), embed=table)(bins))
    compiled = run.lower(jnp.zeros((1280, 512)), jnp.zeros((4096, 80), jnp.int32)).compile()
    analysis = compiled.memory_analysis()
    assert 0 < analysis.temp_size_in_bytes < 8 * analysis.output_size_in_bytes == 8 * 4096 * 512 * 4


# The log-mel


def direct_log_mel(wave):
    """Spec 5 in float64, from definitions: a sum for each frequency, a triangle for each band."""
    frames = -(-len(wave) // 800)
    padded = np.zeros((frames + 1) * 800)
    padded[800 : 800 + len(wave)] = wave
    window = np.sin(np.pi * np.arange(1600) / 1600) ** 2
    turns = np.exp(-2j * np.pi * (np.arange(1600)[:, None] * np.arange(801) % 1600) / 1600)
    spectrum = np.stack([padded[800 * i : 800 * i + 1600] * window for i in range(frames)]) @ turns
    magnitude = np.sqrt(np.maximum(np.abs(spectrum) ** 2, 1e-10))
    edges = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 82)
    edges = [mel * 200 / 3 if mel < 15 else 1000 * np.exp((mel - 15) * np.log(6.4) / 27) for mel in edges]
    bands = np.zeros((801, 80))
    for m, (left, peak, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        for k in range(801):
            bands[k, m] = np.interp(k * 10, [left, peak, right], [0, 2 / (right - left), 0])
    return np.log10(np.maximum(magnitude @ bands, 1e-10))


@pytest.mark.parametrize("clip", CLIPS)
def test_log_mels_of_the_reference(clip, expected):
    """Within 1e-3 where above -4 (a pure tone is rounding errors elsewhere), and at most 0.2% of the levels differ."""
    answers = expected("tiny")
    got, want = log_mel(answers[f"audio.{clip}.wave"]), answers[f"audio.{clip}.logmel"]
    assert got.dtype == np.float32 and got.shape == want.shape
    loud = want > -4
    assert np.abs(got - want)[loud].max(initial=0) < 1e-3
    assert np.abs(got - want).max() < 0.1
    bins, levels = quantize(got), answers[f"audio.{clip}.bins"]
    assert bins.dtype == np.int32 and (bins != levels).mean() <= 0.002
    assert np.array_equal(quantize(want), levels)


def test_log_mel_by_definition():
    """Noise that crosses two edges of blocks (16 and 1024 frames) and ends in the middle of a frame."""
    rng = np.random.default_rng(1)
    for samples in (16 * 800 + 1, 1024 * 800 + 801):
        wave = (0.1 * rng.standard_normal(samples)).astype(np.float32)
        got = log_mel(wave)
        assert got.shape == (num_rows(samples), 80)
        start = max(len(got) - 40, 1)  # frame i begins with sample 800 (i - 1)
        np.testing.assert_allclose(got[start:], direct_log_mel(wave[800 * (start - 1) :])[1:], atol=1e-5)


def test_silence_tone_impulse_and_constant():
    """Silence is level 2, since the floor is on each magnitude; 440 Hz are in band 11; an impulse has all bands alike."""
    assert (quantize(log_mel(np.zeros(1600))) == 2).all()
    tone = quantize(log_mel(0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)))
    assert tone[5].argmax() == 11 and tone[5, 11] == 13 and np.median(tone[5]) == 2
    impulse = quantize(log_mel(np.eye(1, 1600)[0]))
    assert (impulse[0] == 10).all() and (impulse[1] == 2).all()
    assert quantize(log_mel(np.ones(1600)))[0, :3].tolist() == [13, 13, 12]


def test_mel_bands_have_their_area_and_peaks():
    """Wide bands have an area of one over Hz; peaks lie 200/3 Hz a mel apart up to 1 kHz, and in equal ratios above."""
    filters = mel_filters()
    assert filters.shape == (801, 80) and filters.dtype == np.float32
    np.testing.assert_allclose(filters[:, 40:].sum(axis=0) * 10, 1, atol=0.01)
    assert filters[0].max() == 0 and filters[800].max() < 1e-9
    peaks = filters.argmax(axis=0) * 10
    assert abs(peaks[11] - 440) < 30
    np.testing.assert_allclose(
        np.diff(np.log(peaks[60:])), np.log(6.4) / 27 * (15 + 27 * np.log(8) / np.log(6.4)) / 81, atol=4e-3
    )


def test_number_of_rows():
    """20 a second, a part counting whole: of the input's samples, at any rate."""
    assert [num_rows(n) for n in (0, 1, 800, 801, 16500, 16000 * 3600)] == [0, 1, 1, 2, 21, 72000]
    assert [num_rows(n, 44100) for n in (1, 2205, 2206, 44100 * 60)] == [1, 1, 2, 1200]
    assert num_rows(3 * 441, 8820) == 3
    assert log_mel(np.zeros(0)).shape == (0, 80)


def test_few_compilations_for_all_lengths():
    """Whatever the length, the front end compiles for three sizes of block."""
    audio._log_mel.clear_cache()  # other tests of this process may have called it under another configuration
    for frames in (1, 2, 15, 16, 17, 100, 128, 129, 1000, 1025, 1040):
        assert len(log_mel(np.zeros(frames * 800 - 7, np.float32))) == frames
    assert audio._log_mel._cache_size() <= 3


@pytest.mark.parametrize(
    ("wave", "told"),
    [
        (np.zeros((2, 5)), "float64[2, 5]"),
        (np.zeros(5, np.int16), "int16[5]"),
        (np.array([0, np.nan]), "not finite"),
        (np.array([0, np.inf]), "not finite"),
    ],
)
def test_waves_that_are_none(wave, told):
    """The shape or the fault is named."""
    with pytest.raises(InputError, match=told.replace("[", "\\[")):
        log_mel(wave)


# Levels


def test_levels_are_the_nearest_the_lower_of_two():
    """Clamped to 0..15; at a midpoint that float64 holds exactly the lower level, one unit above the upper."""
    edges = np.array([-8, -np.inf, -7, 2, 3, np.inf])
    assert quantize(edges[None]).tolist() == [[0, 0, 0, 15, 15, 15]]
    centres = np.linspace(-7, 2, 16)
    assert quantize(centres[None]).tolist() == [list(range(16))]
    middles = (centres[1:] + centres[:-1]) / 2
    assert quantize(np.nextafter(middles, -9)[None] - 1e-15).tolist() == [list(range(15))]
    assert quantize(np.nextafter(middles, 9)[None] + 1e-15).tolist() == [list(range(1, 16))]
    # With a step of 1 every centre and midpoint is exact.
    assert quantize(np.array([[0.5, 1.5, np.nextafter(1.5, 2), 2.5]]), 4, 0.0, 3.0).tolist() == [[0, 1, 2, 2]]


@pytest.mark.parametrize(("levels", "low", "high"), [(16, -7.0, 2.0), (16, -1.5, 2.0), (2, 0.0, 1.0), (256, -7.0, 2.0)])
def test_levels_by_definition(levels, low, high):
    """The first index of the least distance in float64, for every float32 near a midpoint and for values at random."""
    centres = np.linspace(low, high, levels)
    middles = ((centres[1:] + centres[:-1]) / 2).astype(np.float32)
    near = [middles + np.spacing(middles) * k for k in range(-3, 4)]
    rng = np.random.default_rng(0)
    values = np.concatenate([*near, rng.uniform(low - 1, high + 1, 1000)]).astype(np.float32)
    want = np.abs(np.clip(values.astype(np.float64), low, high)[:, None] - centres).argmin(axis=1)
    assert quantize(values[None], levels, low, high)[0].tolist() == want.tolist()


def test_not_a_number_has_no_level():
    with pytest.raises(InputError, match="log_mel has NaN"):
        quantize(np.array([[0, np.nan]]))


# Ready bins


def test_ready_bins():
    """Integers of any width and jax arrays are taken as they are."""
    bins = np.random.default_rng(0).integers(0, 16, (7, 80))
    for given in (bins, bins.astype(np.uint8), jnp.asarray(bins)):
        got = to_bins(given, PUBLISHED)
        assert got.dtype == np.int32 and np.array_equal(got, bins)


@pytest.mark.parametrize(
    ("bins", "told"),
    [
        (np.zeros((3, 79), int), r"audio 2 is an array int64\[3, 79\]; ready bins are integers \[T, 80\]"),
        (np.zeros((3, 80)), r"audio 2 is an array float64\[3, 80\]"),
        (np.zeros(1000), r"audio 2 is an array float64\[1000\]; .* a wave comes with its rate, \(wave, rate\)"),
        (np.zeros((0, 80), int), "audio 2 is empty: bins of 0 frames"),
        (np.full((3, 80), 16), "audio 2 has bins from 16 to 16; 0 to 15 would be right"),
        (np.full((3, 80), -1), "audio 2 has bins from -1 to -1"),
        (np.zeros((21, 80), int), "audio 2 has 21 frames of 50 ms; the limit is 1 seconds"),
    ],
)
def test_bins_that_are_none(bins, told):
    """Level 16 of a band would be level 0 of the next one: it is refused, as is every other shape and range."""
    with pytest.raises(InputError, match=told):
        to_bins(bins, PUBLISHED, "audio 2", max_seconds=1)


def test_another_number_of_bands():
    """A model of other bands takes ready bins only."""
    config = dataclasses.replace(PUBLISHED, num_mel_bins=3)
    assert to_bins(np.ones((2, 3), int), config).shape == (2, 3)
    with pytest.raises(ConfigError, match="n_mel_bins is 3"):
        to_bins((np.zeros(800), 16000), config)
