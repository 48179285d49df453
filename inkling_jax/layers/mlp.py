"""The dense and the shared feed-forward: SwiGLU, computed in float32 between the products (spec 2.5, 2.6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.config import TextConfig
from inkling_jax.kernels.expert_matmul import Packed
from inkling_jax.kernels.expert_matmul.pack import BF16_LINES, packed_shape
from inkling_jax.layers.linear import linear
from inkling_jax.layers.param import param
from inkling_jax.sharding.collectives import sum_over_model


class DenseMLP(nnx.Module):
    """global_scale * W2(silu(gate x) * up x). w13 is [2, FD, D]: gate, then up."""

    def __init__(self, config: TextConfig, dtype: jnp.dtype):
        self.w13 = param((2, config.dense_width, config.hidden_size), dtype, (None, "ffn", None))
        self.w2 = param((config.hidden_size, config.dense_width), dtype, (None, "ffn"))
        self.global_scale = param((), jnp.float32, ())

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        hidden = gated(x, self.w13[...])
        y = linear(hidden.astype(x.dtype), self.w2[...], jnp.float32)
        return sum_over_model((y * self.global_scale[...]).astype(x.dtype))


class SharedExperts(nnx.Module):
    """The J experts that every token takes, each with its weight a token, as one feed-forward J times as wide.

    w13 is [J, 2, F, D]; w2 is [D, J, F], so that the sum over experts is one contraction of contiguous rows.
    """

    def __init__(self, config: TextConfig, dtype: jnp.dtype):
        self.count, self.width, self.model = config.num_shared_experts, config.expert_width, config.hidden_size
        self.w13 = param((self.count, 2, self.width, self.model), dtype, (None, None, "ffn", None))
        self.w2 = param((self.model, self.count, self.width), dtype, (None, None, "ffn"))

    def use_kernels(self) -> None:
        """Hold both weights in the order of the Hopper kernels from now on; `packed` then gives them."""
        model, width, words = self.model, self.width, (None, None)
        blocks, depth = packed_shape((1, 2, width, model), False)[1:3]
        self.w13 = param((self.count, blocks, depth, BF16_LINES, 128), jnp.int32, (None, "ffn", None, *words))
        blocks, depth = packed_shape((1, model, width), False)[1:3]
        self.w2 = param((blocks, self.count, depth, BF16_LINES, 128), jnp.int32, (None, None, "ffn", *words))

    def packed(self) -> tuple[Packed, Packed]:
        """What the kernels take: this rank's channels of all J experts side by side, as those of one."""
        w13, w2 = self.w13[...], self.w2[...]
        w13 = w13.reshape(1, -1, *w13.shape[2:])
        w2 = w2.reshape(1, w2.shape[0], -1, *w2.shape[3:])
        return Packed(w13, jnp.ones((1, 2), jnp.float32)), Packed(w2, jnp.ones(1, jnp.float32))

    def __call__(self, x: Float[Array, "T D"], weights: Float[Array, "T J"]) -> Float[Array, "T D"]:
        """This rank's part of the float32 sum over shared experts; the caller reduces it together with the routed experts'."""
        w13 = self.w13[...]
        shared, _, width, model = w13.shape
        hidden = linear(x, w13.reshape(shared * 2 * width, model), jnp.float32).reshape(-1, shared, 2, width)
        hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1] * weights[..., None]
        return linear(hidden.reshape(-1, shared * width).astype(x.dtype), self.w2[...].reshape(model, -1), jnp.float32)


def gated(x: Float[Array, "T D"], w13: Float[Array, "2 F D"]) -> Float[Array, "T F"]:
    """silu(gate x) * up x in float32."""
    _, width, model = w13.shape
    hidden = linear(x, w13.reshape(2 * width, model), jnp.float32)
    return jax.nn.silu(hidden[:, :width]) * hidden[:, width:]
