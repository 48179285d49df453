"""Sampling where each device has a part of the vocabulary: every token, probability and candidate is that of one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from test_sampling import SETTINGS, V, filled

from inkling_jax.engine.request import SamplingParams
from inkling_jax.engine.sampler import SampleResult, SamplerState, _gumbel, sample
from inkling_jax.sharding.mesh import make_mesh

ROWS = len(SETTINGS)


@functools.partial(jax.jit, static_argnames=("ranks", "mode", "top_logprobs"))
def draw(logits: jax.Array, state: SamplerState, ranks: int, **static) -> SampleResult:
    """`sample` of all slots with the columns spread over so many devices; rows are V wide but for padding."""
    by_id, rest = PartitionSpec(None, "tensor"), PartitionSpec()
    specs = dataclasses.replace(jax.tree.map(lambda _: rest, state), output_counts=by_id, prompt_seen=by_id)
    body = functools.partial(sample, vocab=V, banned=(8,), **static)
    mesh = make_mesh({"tensor": ranks})
    spread = jax.shard_map(body, mesh=mesh, in_specs=(by_id, specs, rest), out_specs=rest, check_vma=False)
    return spread(logits, state, jnp.arange(logits.shape[0]))


def padded(logits: np.ndarray, state: SamplerState, ranks: int) -> tuple[np.ndarray, SamplerState]:
    """The same with columns that divide over the devices, and on none yet; what fills them up must not matter."""
    width = -(-V // ranks) * ranks - V
    places = ((0, 0), (0, width))
    state = jax.tree.map(np.asarray, state)
    wide = {name: np.pad(getattr(state, name), places, constant_values=1) for name in ("output_counts", "prompt_seen")}
    return np.pad(logits, places, constant_values=99.0), dataclasses.replace(state, **wide)


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("full", 8), *(pytest.param(mode, n, marks=pytest.mark.slow) for mode, n in [("greedy", 4), ("sample", 8), ("full", 4)])],
)
def test_a_vocabulary_in_parts_is_sampled_as_one(mode: str, ranks: int) -> None:
    """Twelve ids over four and eight devices, the last two of eight without any; ties within and across devices, NaN, a ban."""
    state = filled([SamplingParams(**settings) for settings in SETTINGS.values()])
    for case in range(3):
        logits = np.random.default_rng(case).normal(size=(ROWS + 1, V)).astype(np.float32)
        if case == 1:
            logits = np.round(logits)  # ties
        if case == 2:
            logits[0, 5], logits[3, 11], logits[5, 0] = np.nan, np.inf, -np.inf
            logits[4, 8] = 50.0  # banned
        one = draw(jnp.asarray(logits), state, ranks=1, mode=mode, top_logprobs=7)
        many = draw(*padded(logits, state, ranks), ranks=ranks, mode=mode, top_logprobs=7)
        for name in ("tokens", "top_ids", "stopped", "exhausted", "finite"):
            np.testing.assert_array_equal(getattr(one, name), getattr(many, name), err_msg=name)
        for name in ("logprob", "top_logprobs"):
            np.testing.assert_allclose(getattr(one, name), getattr(many, name), atol=1e-6, err_msg=name)
        if case == 1:  # row 6 is greedy
            allowed = np.where(np.arange(V) == 8, -np.inf, logits[6])
            assert many.tokens[6] == np.flatnonzero(allowed == allowed.max())[0]  # of equal ones the lowest id


def test_noise_is_that_of_a_generator_over_the_whole_vocabulary() -> None:
    keys = np.array([[1, 2], [3, 4]], np.uint32)
    bits = [
        jax.random.bits(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), step), (1001,), jnp.uint32)
        for key, step in zip(keys, (0, 7), strict=True)
    ]
    uniform = (np.array(bits, np.uint32).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    wanted = -np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)))
    found = _gumbel(jnp.asarray(keys), jnp.array([0, 7]), jnp.arange(500, 1001))
    np.testing.assert_allclose(found, wanted[:, 500:], rtol=1e-5, atol=1e-6)
