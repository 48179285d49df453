"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from inkling_jax.layers.param import param


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis; statistics in float32, rounded to the input's dtype before the weight (spec 2)."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight = param((size,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*B size"]) -> Float[Array, "*B size"]:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype) * self.weight[...]
