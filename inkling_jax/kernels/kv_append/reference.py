"""The append of keys and values in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from inkling_jax.kernels.pages import Pages, write
from inkling_jax.kernels.ring import Rows, convolve


class Kept(NamedTuple):
    """What a layer's attention remembers, and the kernel changes in place."""

    k_pages: Pages  # [pages, K, P, H]
    v_pages: Pages
    k_state: Float[Array, "slots 3 K H"]
    v_state: Float[Array, "slots 3 K H"]


class Weights(NamedTuple):
    """Of a layer's attention, between its projections and its scores."""

    k_taps: Float[Array, "K H 4"]
    v_taps: Float[Array, "K H 4"]
    q_norm: Float[Array, " H"]
    k_norm: Float[Array, " H"]


class Appended(NamedTuple):
    """Queries and their bias coefficients, N of them by key head, and what is remembered afterwards."""

    q: Float[Array, "T N H"]
    rel: Float[Array, "T N r"]
    kept: Kept


def append(
    projected: Float[Array, "T K group"],
    weights: Weights,
    tau: Float[Array, " T"] | None,
    kept: Kept,
    table: Int[Array, "T width"],
    rows: Rows,
    *,
    rank: int,
    eps: float,
) -> Appended:
    """Queries and keys normed, keys and values convolved and written at their rows' positions, one token a row.

    projected: for each key head the queries, of width H, of the n heads that share it, the key, the value, n times `rank` bias
    coefficients.
    tau: what multiplies queries and coefficients, None: nothing. table: pages of the rows, a ring of columns; an entry of no page
    drops the write, and so does an idle row.
    """
    pages, kv_heads, page, width = kept.k_pages.shape
    tokens, _, group = projected.shape
    share = (group - 2 * width) // (width + rank)
    q, k, v, rel = jnp.split(projected, [share * width, (share + 1) * width, (share + 2) * width], axis=-1)
    q, rel = q.reshape(tokens, kv_heads * share, width), rel.reshape(tokens, kv_heads * share, rank)
    k, k_state = convolve(k, weights.k_taps, kept.k_state, rows)
    v, v_state = convolve(v, weights.v_taps, kept.v_state, rows)
    q, k = _norm(q, weights.q_norm, eps), _norm(k, weights.k_norm, eps)
    if tau is not None:
        q, rel = ((a * tau[:, None, None]).astype(a.dtype) for a in (q, rel))
    entry = table[jnp.arange(tokens), rows.position // page % table.shape[1]]
    target = (jnp.where(rows.count > 0, entry, pages), slice(None), rows.position % page)
    k_pages, v_pages = write(kept.k_pages, target, k), write(kept.v_pages, target, v)
    return Appended(q, rel, Kept(k_pages, v_pages, k_state, v_state))


def _norm(x: Float[Array, "T N H"], weight: Float[Array, " H"], eps: float) -> Float[Array, "T N H"]:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight
