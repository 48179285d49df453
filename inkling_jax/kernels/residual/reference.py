"""The residual stream's update in plain JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from inkling_jax.kernels.ring import Rows, convolve


class Stream(NamedTuple):
    """The residual stream after a sublayer, the same normed for the next one, and the convolution's state."""

    h: Float[Array, "T D"]
    normed: Float[Array, "T D"]
    state: Float[Array, "slots 3 D"]


def add_conv_norm(
    h: Float[Array, "T D"],
    y: Float[Array, "T D"],
    taps: Float[Array, "D 4"],
    weight: Float[Array, " D"],
    state: Float[Array, "slots 3 D"],
    rows: Rows,
    *,
    eps: float,
) -> Stream:
    """h + conv(y) and its norm times `weight`. y is a sublayer's output, whose last inputs `state` keeps; one token a row.

    Rounded to the dtype of h after the convolution, the sum and the norm, before the weight (spec 2).
    """
    convolved, state = convolve(y, taps, state, rows)
    h = h + convolved
    wide = h.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return Stream(h, (wide * scale).astype(h.dtype) * weight, state)
