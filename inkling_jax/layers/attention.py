"""Hybrid attention: no rotary embedding, a learned bias by distance, log scaling on global layers (spec 2.3)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from inkling_jax.cache.paged import LayerCache, append
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.kernels.paged_attention import paged_attention
from inkling_jax.layers.linear import linear
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.param import param
from inkling_jax.layers.short_conv import ShortConv
from inkling_jax.sharding.collectives import sum_over_model


class Attention(nnx.Module):
    """Attention of one layer over its pages. Query, key, value and bias projections are one product, grouped by key head."""

    def __init__(self, config: TextConfig, layer: int, dtype: jnp.dtype):
        shape = config.attention(layer)
        heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
        share = heads // kv_heads
        group = share * width + 2 * width + share * config.rel_dim
        self.qkvr_proj = param((kv_heads, group, config.hidden_size), dtype, ("kv_heads", None, None))
        self.o_proj = param((config.hidden_size, heads * width), dtype, (None, "heads"))
        self.q_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.rel_bias = param((shape.rel_extent, config.rel_dim), dtype, (None, None))
        self.k_conv = ShortConv((kv_heads, width), config.conv_width, dtype, ("kv_heads", None))
        self.v_conv = ShortConv((kv_heads, width), config.conv_width, dtype, ("kv_heads", None))
        self.head_dim, self.rel_dim, self.window = width, config.rel_dim, shape.window
        is_global = shape.window is None
        self.log_scaling = (
            (config.log_scaling_floor, config.log_scaling_alpha) if is_global and config.log_scaling_floor else None
        )

    def __call__(
        self, x: Float[Array, "T D"], cache: LayerCache, table: Int[Array, "B width"], ragged: Ragged, context: int
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attention output after the output projection, summed over ranks, and the cache with these tokens appended."""
        q, k, v, rel = self._project(x)
        k, k_state = self.k_conv(k, cache.k_conv, ragged)
        v, v_state = self.v_conv(v, cache.v_conv, ragged)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.log_scaling is not None:
            tau = log_scale(ragged.position, *self.log_scaling)[:, None, None, None]
            q, rel = (q * tau).astype(x.dtype), (rel * tau).astype(x.dtype)
        cache = dataclasses.replace(
            cache,
            k_pages=append(cache.k_pages, k, table, ragged),
            v_pages=append(cache.v_pages, v, table, ragged),
            k_conv=k_state,
            v_conv=v_state,
        )
        tokens, kv_heads, share, width = q.shape
        out = paged_attention(
            q.reshape(tokens, kv_heads * share, width),
            rel.reshape(tokens, kv_heads * share, self.rel_dim),
            self.rel_bias[...],
            cache.k_pages,
            cache.v_pages,
            table,
            ragged.start,
            ragged.count,
            ragged.length,
            window=self.window,
            longest=ragged.longest,
            context=context,
        )
        return sum_over_model(linear(out.reshape(tokens, -1), self.o_proj[...])), cache

    def _project(self, x: Float[Array, "T D"]) -> tuple[Array, Array, Array, Array]:
        """q [T, K, n, H], k and v [T, K, H], r [T, K, n, rel_dim] of n query heads for each of K key heads."""
        weight = self.qkvr_proj[...]
        kv_heads, group, _ = weight.shape
        share = (group - 2 * self.head_dim) // (self.head_dim + self.rel_dim)
        y = linear(x, weight.reshape(kv_heads * group, -1)).reshape(-1, kv_heads, group)
        q, k, v, rel = jnp.split(y, [share * self.head_dim, (share + 1) * self.head_dim, (share + 2) * self.head_dim], axis=-1)
        return q.reshape(-1, kv_heads, share, self.head_dim), k, v, rel.reshape(-1, kv_heads, share, self.rel_dim)


def log_scale(position: Int[Array, " T"], floor: int, alpha: float) -> Float[Array, " T"]:
    """tau = 1 + alpha ln(max((position + 1) / floor, 1)) in float32; multiplies the query and its bias on global layers."""
    return 1.0 + alpha * jnp.log(jnp.maximum((position + 1).astype(jnp.float32) / floor, 1.0))
