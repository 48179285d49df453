"""Audio: the tower, the log-mel front end and its quantisation, against the reference's answers and numbers by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from modules import filled
from safetensors import safe_open

from inkling_jax.config import AudioConfig
from inkling_jax.layers.audio import AudioTower

CLIPS = ("sweep", "noise", "silence", "one_sample", "exact_hop")
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
