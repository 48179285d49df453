"""Layers by themselves, against numbers that arithmetic gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modules import chunk, filled, on_one_device, single_tokens

from inkling_jax.cache.paged import CacheShape, create_cache, layer_arrays
from inkling_jax.config import preset
from inkling_jax.kernels.router.reference import select
from inkling_jax.layers.attention import log_scale
from inkling_jax.layers.mlp import DenseMLP, SharedExperts
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.router import Router
from inkling_jax.layers.short_conv import ShortConv
from inkling_jax.sharding.collectives import embedding_rows

SMALL = dataclasses.replace(
    preset("inkling").text,
    hidden_size=2,
    dense_width=3,
    expert_width=3,
    num_experts=5,
    num_experts_per_token=2,
    num_shared_experts=2,
)


def silu(x):
    return x / (1 + np.exp(-x))


# Router


def test_bias_selects_and_never_weighs():
    """Logits 2, 0, 1, -1 and 0.5, -0.5 shared, bias 0.6 on expert 1: experts 1 and 0, weights from the logits alone."""
    logits = np.array([[2, 0, 1, -1, 0.5, -0.5]], np.float32)
    experts, weights, shared = select(logits, np.array([0, 0.6, 0, 0], np.float32), 2, 1.0)
    assert experts.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights, [[0.210014, 0.369959]], atol=1e-6)
    np.testing.assert_allclose(shared, [[0.261450, 0.158577]], atol=1e-6)
    unbiased, _, _ = select(logits, np.zeros(4, np.float32), 2, 1.0)
    assert unbiased.tolist() == [[0, 2]]
    _, weights, shared = select(logits, np.array([0, 0.6, 0, 0], np.float32), 2, 8.0)
    np.testing.assert_allclose([*weights[0], *shared[0]], [1.68011, 2.95967, 2.09160, 1.26862], atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_logits_stay_finite(sign):
    """At +-80 sigmoids are 1 or 1e-35: weights are finite and sum to the scale over routed and shared together."""
    logits = np.array([[80, 80, -80, 80, 80, -80], [80] * 6, [-80] * 6], np.float32) * sign
    _, weights, shared = select(logits, np.zeros(4, np.float32), 2, 8.0)
    np.testing.assert_allclose(np.concatenate([weights, shared], axis=1).sum(axis=1), 8, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([weights, shared], axis=1)[1:], 2, rtol=1e-5)


def test_shared_rows_are_never_selected():
    """5 routed and 2 shared experts, all routed logits below the shared ones': only the first five can be chosen."""
    logits = np.array([[-3, -2, -5, -1, -4, 9, 9]], np.float32)
    experts, _, _ = select(logits, np.zeros(5, np.float32), 2, 1.0)
    assert experts.tolist() == [[3, 1]]


def test_router_multiplies_its_scales():
    """route_scale and the layer's global_scale, and nothing else: weights sum to 8 * 0.25."""
    rows = np.array([[1, 0], [0, 1], [1, 1], [-1, 0], [0, -1], [2, 0], [0, 2]])
    router = filled(Router(SMALL, jnp.float32), weight=rows, bias=np.zeros(5), global_scale=0.25)
    experts, weights, shared = router(jnp.array([[1.0, 0.5]]))
    logits = rows @ [1.0, 0.5]
    sigmoid = 1 / (1 + np.exp(-logits))
    assert experts.tolist() == [[2, 0]]
    joint = sigmoid[[2, 0, 5, 6]]
    np.testing.assert_allclose([*weights[0], *shared[0]], joint / joint.sum() * 2, rtol=1e-6)


def test_routing_is_float32_under_bfloat16():
    """Logits that bfloat16 could not tell apart decide which expert is chosen."""
    rows = np.zeros((7, 2))
    rows[:, 0], rows[1, 1] = 1, 2.0**-9
    router = filled(Router(SMALL, jnp.bfloat16), weight=rows, bias=np.zeros(5), global_scale=1)
    experts, weights, _ = router(jnp.ones((1, 2), jnp.bfloat16))
    assert experts[0, 0] == 1 and weights.dtype == jnp.float32


# Feed-forward


def test_dense_feed_forward():
    """global_scale * W2(silu(gate) * up)."""
    w13 = np.arange(12).reshape(2, 3, 2) / 6 - 1
    w2 = np.arange(6).reshape(2, 3) / 3 - 1
    mlp = filled(DenseMLP(SMALL, jnp.float32), w13=w13, w2=w2, global_scale=1.5)
    x = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    expected = 1.5 * (silu(x @ w13[0].T) * (x @ w13[1].T)) @ w2.T
    np.testing.assert_allclose(on_one_device(mlp)(x), expected, rtol=1e-5)


def test_shared_experts_weigh_each_token():
    """Weights [1, 0] leave only the first expert, [0, 2] twice the second, token by token."""
    rng = np.random.default_rng(0)
    w13, w2 = rng.standard_normal((2, 2, 3, 2)), rng.standard_normal((2, 2, 3))
    shared = filled(SharedExperts(SMALL, jnp.float32), w13=w13, w2=w2.swapaxes(0, 1))
    x = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
    each = [(silu(x @ w13[j, 0].T) * (x @ w13[j, 1].T)) @ w2[j].T for j in range(2)]
    out = shared(x, np.array([[1, 0], [0, 2]], np.float32))
    np.testing.assert_allclose(out, [each[0][0], 2 * each[1][1]], rtol=1e-5)


# Norm, embedding, log scaling


def test_norm_multiplies_the_plain_weight():
    """[3, 4] has mean square 12.5; the weight is not 1 + w."""
    norm = filled(RMSNorm(2, 0.0, jnp.float32), weight=[2, 0.5])
    np.testing.assert_allclose(norm(jnp.array([3.0, 4.0])), np.array([6, 2]) / np.sqrt(12.5), rtol=1e-6)
    norm = filled(RMSNorm(2, 1e-6, jnp.float32), weight=[1, 1])
    np.testing.assert_allclose(norm(jnp.full(2, 1e-3)), 1 / np.sqrt(2), rtol=1e-5)  # eps is as large as the mean square
    assert (norm(jnp.zeros(2)) == 0).all()


def test_norm_statistics_are_float32():
    """bfloat16 inputs give the exact quotient rounded once; squares or a mean in bfloat16 would show in the last place."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(512), jnp.bfloat16)
    out = filled(RMSNorm(512, 1e-6, jnp.bfloat16), weight=np.ones(512))(x)
    exact = np.asarray(x, np.float64)
    np.testing.assert_array_equal(out, jnp.asarray(exact / np.sqrt((exact**2).mean() + 1e-6), jnp.bfloat16))


def test_embedding_reads_rows():
    """The rows of the ids, in order, repeated where ids are."""
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_array_equal(on_one_device(embedding_rows)(table, np.array([4, 0, 4])), table[[4, 0, 4]])


@pytest.mark.parametrize(
    ("floor", "position", "tau"),
    [
        (128000, 0, 1.0),
        (128000, 127999, 1.0),
        (128000, 255999, 1.0693147),
        (128000, 1048575, 1.2103157),
        (131072, 262143, 1.0693147),
        (131072, 1048575, 1.2079442),
        (24, 256, 1 + 0.1 * np.log(257 / 24)),
    ],
)
def test_log_scale(floor, position, tau):
    """From the absolute position, which counts from 0, and in float32 (257 is no bfloat16)."""
    np.testing.assert_allclose(log_scale(jnp.array([position]), floor, 0.1), tau, rtol=1e-6)


# Short convolution

TAPS = np.array([[0.1, 0.2, 0.3, 0.4]])
CONVOLVED = [1.4, 3.1, 5, 7, 9, 11, 13]  # of 1..7, the inner residual included


def conv(taps=TAPS, dtype=jnp.float32):
    return filled(ShortConv((len(taps),), 4, dtype, (None,)), weight=taps)


@pytest.mark.parametrize("chunks", [[7], [1] * 7, [1, 1, 5], [2, 5], [3, 4], [4, 3]])
@pytest.mark.parametrize("padding", [0, 1])
def test_convolution_in_chunks(chunks, padding):
    """1..7 in any pieces, also shorter than the state; padding tokens behind them are never seen."""
    x, at, out = np.arange(1.0, 8, dtype=np.float32)[:, None], 0, []
    state = jnp.full((2, 3, 1), np.nan)  # what another sequence left behind
    for count in chunks:
        piece = np.concatenate([x[at : at + count], np.full((padding, 1), np.nan, np.float32)])
        y, state = conv()(jnp.asarray(piece), state, chunk([count], [at + count], tokens=count + padding))
        out += y[:count, 0].tolist()
        at += count
        if at == 5:
            assert state[0, :, 0].tolist() == [4, 5, 3]  # a ring: positions 3, 4, 2
    np.testing.assert_allclose(out, CONVOLVED, rtol=1e-6)
    assert np.isnan(state[1]).all()


@pytest.mark.parametrize("padding", [0.0, 1e3, np.nan])
def test_ragged_convolution(padding):
    """Rows of 3 and 1 tokens in slots 2 and 0, then one token each: the same as each alone, whatever the padding holds."""
    a, b = np.array([1, 2, 3, 4.0]), np.array([10, 20.0])
    x = np.array([1, 2, 3, 10, padding, padding], np.float32)[:, None]
    y, state = conv()(jnp.asarray(x), jnp.full((4, 3, 1), np.nan), chunk([3, 1, 0], [3, 1, 0], slots=[2, 0, 3], tokens=6))
    y2, state = conv()(jnp.array([[4.0], [20], [padding]]), state, single_tokens([True, True, False], [4, 2, 0], [2, 0, 3]))
    for row, found in ((a, [*y[:3, 0], y2[0, 0]]), (b, [y[3, 0], y2[1, 0]])):
        past = np.concatenate([np.zeros(3), row])
        np.testing.assert_allclose(found, [past[t + 3] + TAPS[0] @ past[t : t + 4] for t in range(len(row))], rtol=1e-6)
    assert state[2, :, 0].tolist() == [4, 2, 3] and state[0, :2, 0].tolist() == [10, 20]
    assert np.isnan(np.asarray(state)[[1, 3]]).all() and np.isnan(state[0, 2, 0])  # of no position: never looked at


def test_convolution_is_by_channel_and_in_float32():
    """Each channel has its taps; in bfloat16 the sum rounds once, at the end."""
    taps = np.array([[0, 0, 0, 1.0], [1, 0, 0, 0]])
    x = jnp.array([[1, 1], [2, 2], [3, 3], [4, 4.0]])
    y, _ = conv(taps)(x, jnp.zeros((1, 3, 2)), chunk([4], [4]))
    np.testing.assert_array_equal(y, [[2, 1], [4, 2], [6, 3], [8, 5]])
    y, state = conv(np.full((1, 4), 2.0**-9), jnp.bfloat16)(jnp.ones((4, 1), jnp.bfloat16), jnp.zeros((1, 3, 1)), chunk([4], [4]))
    assert y.dtype == jnp.bfloat16 and y[3, 0] == 1 + 2.0**-7  # term by term each 2^-9 would be lost


def test_states_have_the_widths_of_what_they_convolve():
    """Inkling: keys and values of 16 heads on local layers, 8 on global, the residual 6144; each three deep, a spare slot."""
    config = preset("inkling").text
    shape = CacheShape(slots=4, page_size=64, global_pages=1, local_pages=1, max_context=64, max_query=1)
    for layer, heads in ((0, 16), (5, 8)):
        arrays = {name: array.shape for name, array in layer_arrays(config, shape, layer, jnp.dtype(jnp.float32)).items()}
        assert arrays["k_conv"] == arrays["v_conv"] == (5, 3, heads, 128)
        assert arrays["attn_conv"] == arrays["mlp_conv"] == (5, 3, 6144)
    small = dataclasses.replace(config, num_layers=6, hidden_size=8)
    cache = jax.eval_shape(lambda: create_cache(small, shape, jnp.float32, {"tensor": 4}))
    assert cache.layers[0].k_conv.shape == (5, 3, 4, 128) and cache.layers[5].k_conv.shape == (5, 3, 2, 128)
    assert cache.layers[0].attn_conv.shape == (5, 3, 8)
