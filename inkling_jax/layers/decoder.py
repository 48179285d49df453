"""One decoder layer: two sublayers, each normed before and convolved after, on the residual stream (spec 2.2)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.cache.paged import LayerCache
from inkling_jax.cache.ragged import Ragged
from inkling_jax.config import TextConfig
from inkling_jax.kernels.ring import Rows
from inkling_jax.layers.attention import Attention, AttentionStep
from inkling_jax.layers.experts import SparseMLP
from inkling_jax.layers.mlp import DenseMLP
from inkling_jax.layers.norm import RMSNorm
from inkling_jax.layers.short_conv import ShortConv, State


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

        self.kernels = False

    def use_kernels(self, deterministic: bool = False) -> None:
        """Hold weights in the forms of the Hopper kernels from now on, and with it choose them."""
        self.kernels = True
        self.attn.use_kernels(deterministic)
        if isinstance(self.mlp, SparseMLP):
            self.mlp.experts.use_kernels()
            self.mlp.shared.use_kernels()

    def __call__(
        self,
        h: Float[Array, "T D"],
        x: Float[Array, "T D"],
        cache: LayerCache,
        step: AttentionStep,
        ragged: Ragged,
        after: RMSNorm,
        tape: dict[str, Array] | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerCache]:
        """The residual stream after this layer, the same normed by `after` for what comes next, and this layer's cache.

        x: attn_norm(h). A norm belongs to the sublayer before it here, since on Hopper one launch makes both. `tape` receives a
        sparse layer's routing.
        """
        y, cache = self.attn(x, cache, step, ragged)
        h, x, attn_state = self._add(h, y, self.attn_conv, cache.attn_conv, ragged, self.mlp_norm)
        y = self.mlp(x) if isinstance(self.mlp, DenseMLP) else self.mlp(x, ragged.valid, tape)
        h, x, mlp_state = self._add(h, y, self.mlp_conv, cache.mlp_conv, ragged, after)
        return h, x, dataclasses.replace(cache, attn_conv=attn_state, mlp_conv=mlp_state)

    def _add(
        self, h: Float[Array, "T D"], y: Float[Array, "T D"], conv: ShortConv, state: State, ragged: Ragged, norm: RMSNorm
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], State]:
        """h + conv(y), the same normed, and the state of the convolution."""
        if self.kernels and state is not None and ragged.one_each:
            from inkling_jax.kernels.residual import sm90  # Pallas' GPU half takes a while to import, and few need it

            rows = Rows(ragged.slot, ragged.position, ragged.count)
            return sm90.add_conv_norm(h, y, conv.weight[...], norm.weight[...], state, rows, eps=norm.eps)
        y, state = conv(y, state, ragged)
        h = h + y
        return h, norm(h), state
