"""One decoder layer: two sublayers, each normed before and convolved after, on the residual stream (spec 2.2)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.cache.paged import LayerCache
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.layers.attention import Attention, AttentionStep
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.layers.mlp import DenseMLP
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.short_conv import ShortConv


class DecoderLayer(nnx.Module):
    """h + conv(attention(norm h)), then h + conv(feed-forward(norm h)); each conv has its own inner residual as well."""

    def __init__(self, config: TextConfig, layer: int, packed: frozenset[str], dtype: jnp.dtype):
        size = config.hidden_size
        self.attn_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.attn = Attention(config, layer, dtype)
        self.attn_conv = ShortConv((size,), config.conv_width, dtype, (None,))
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps, dtype)
        self.mlp = DenseMLP(config, dtype) if config.dense_layers[layer] else SparseMLP(config, packed, dtype)
        self.mlp_conv = ShortConv((size,), config.conv_width, dtype, (None,))

    def __call__(
        self,
        h: Float[Array, "T D"],
        cache: LayerCache,
        step: AttentionStep,
        ragged: Ragged,
        tape: dict[str, Array] | None = None,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """The residual stream after this layer and its cache. `tape` receives a sparse layer's routing."""
        y, cache = self.attn(self.attn_norm(h), cache, step, ragged)
        y, attn_state = self.attn_conv(y, cache.attn_conv, ragged)
        h = h + y
        m = self.mlp_norm(h)
        y = self.mlp(m) if isinstance(self.mlp, DenseMLP) else self.mlp(m, ragged.valid, tape)
        y, mlp_state = self.mlp_conv(y, cache.mlp_conv, ragged)
        return h + y, dataclasses.replace(cache, attn_conv=attn_state, mlp_conv=mlp_state)
