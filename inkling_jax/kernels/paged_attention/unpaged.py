"""Attention among the tokens of one step alone, without pages: for training, where no gradient should need a scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_within(
    q: Float[Array, "T N H"],
    rel: Float[Array, "T N r"],
    rel_bias: Float[Array, "R r"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    row: Int[Array, " T"],
    *,
    window: int | None,
) -> Float[Array, "T N H"]:
    """softmax(q.k/H + bias) v over the earlier tokens of the same sequence: see `reference.paged_attention`, of whole sequences.

    Sequences lie end to end, `row` says which one a token is of. Scores take 4 T^2 N bytes: meant for some hundred tokens, and
    for many such steps under vmap.
    """
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, width)
    score = jnp.einsum("tKnh,sKh->Knts", grouped, k, preferred_element_type=jnp.float32) / width
    bias = bias_by_pair(rel, rel_bias).reshape(kv_heads, heads // kv_heads, tokens, tokens)
    distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    visible = (distance >= 0) & (row[:, None] == row)
    if window is not None:
        visible &= distance < window
    weight = jax.nn.softmax(jnp.where(visible, score + bias, -jnp.inf), axis=-1)
    out = jnp.einsum("Knts,sKh->tKnh", weight.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(tokens, heads, width).astype(q.dtype)


def bias_by_pair(rel: Float[Array, "T N r"], rel_bias: Float[Array, "R r"]) -> Float[Array, "N T T"]:
    """[n, t, s] = rel[t, n] . rel_bias[t - s] where 0 <= t - s < R, else zero, in float32.

    A row of products by descending distance, then zeros, each row a place shorter than what it is read as: so rows shift against
    each other, and neither the bias nor its gradient is gathered by distance.
    """
    tokens, heads, _ = rel.shape
    near = rel_bias[:tokens][::-1]
    extent = near.shape[0]
    by_distance = jnp.einsum("tnr,dr->ntd", rel, near, preferred_element_type=jnp.float32)
    flat = jnp.pad(by_distance, ((0, 0), (0, 0), (0, tokens))).reshape(heads, -1)
    shifted = flat[:, extent - 1 : extent - 1 + tokens * (extent + tokens - 1)]
    return shifted.reshape(heads, tokens, extent + tokens - 1)[:, :, :tokens]
