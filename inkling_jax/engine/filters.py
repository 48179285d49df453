"""The sampling filters top-k, top-p and min-p over a batch of rows, each row with its own settings, exact among ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

TINY = float(np.finfo(np.float32).tiny)


def keep_best(
    scores: Float[Array, "B V"],
    temperature: Float[Array, "B 1"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """-inf for what top-k, then top-p over what is left, then min-p drop; among equal scores the lower ids are kept.

    A nucleus is the smallest set of the best ids with at least a share top_p of the probability. No sort: thresholds are found
    bit by bit, each by a few sums over the row, which at this vocabulary and batch moves far fewer bytes.
    """
    vocab = scores.shape[1]
    best = scores.max(axis=-1, keepdims=True)
    best = jnp.where(best > -jnp.inf, best, 0.0)  # all banned: no inf - inf
    weight = jnp.exp((scores - best) / jnp.where(temperature > 0, temperature, 1.0))  # probability, the best id's being 1
    order = _ordered(scores)

    count = jnp.where((top_k == 0) | (top_k > vocab), vocab, top_k)
    cut_k = _largest_cut(order, jnp.ones_like(order, jnp.int32), count, 32)
    above, ties = order > cut_k[:, None], order == cut_k[:, None]
    keep_k = count - above.sum(axis=-1)  # of those that tie at the cut
    # those that tie weigh the same, so which of them stay does not matter yet: each has its share of what they keep
    share = jnp.where(above, 1.0, jnp.where(ties, (keep_k / ties.sum(axis=-1))[:, None], 0.0))
    mass = weight * share

    target = jnp.maximum(top_p * mass.sum(axis=-1), TINY)
    cut_p = jnp.maximum(_largest_cut(order, mass, target, 32), cut_k)  # the sum may miss a target near 1 by its rounding
    cut = jnp.where(top_p < 1, cut_p, cut_k)
    above, ties = order > cut[:, None], order == cut[:, None]
    most = jnp.where(cut == cut_k, keep_k, ties.sum(axis=-1))
    tie_weight = jnp.maximum(jnp.where(ties, weight, 0.0).max(axis=-1), TINY)
    missing = (target - jnp.where(above, mass, 0.0).sum(axis=-1)) / tie_weight
    keep_p = jnp.clip(jnp.ceil(missing), 1, most.astype(jnp.float32)).astype(jnp.int32)
    keep = jnp.where(top_p < 1, keep_p, most)

    low_first = jnp.broadcast_to(vocab - 1 - jnp.arange(vocab, dtype=jnp.uint32), scores.shape)
    cut_id = _largest_cut(low_first, ties.astype(jnp.int32), keep, max(vocab - 1, 1).bit_length())
    kept = above | (ties & (low_first >= cut_id[:, None]))
    return jnp.where(kept & (weight >= min_p[:, None]), scores, -jnp.inf)


def _ordered(scores: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Unsigned integers in the order of the scores, equal where they are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)  # -0 becomes 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_cut(order: UInt32[Array, "B V"], weight: Array, target: Array, bits: int) -> UInt32[Array, " B"]:
    """The largest cut of `bits` bits such that the weights [B, V] of order >= cut sum to at least the target [B]; 0 if none."""
    rounds = -(-bits // 2)

    def narrow(i: Array, cut: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        shift = (2 * (rounds - 1 - i)).astype(jnp.uint32)
        digit = jnp.zeros_like(cut)
        for d in range(1, 4):  # two bits a pass over the row: the three sums read it once
            trial = cut | (jnp.uint32(d) << shift)
            digit += jnp.where(order >= trial[:, None], weight, 0).sum(axis=-1) >= target
        return cut | (digit << shift)

    return jax.lax.fori_loop(0, rounds, narrow, jnp.zeros(order.shape[0], jnp.uint32))
