"""The short convolution of one token a row whose last inputs lie in a ring (spec 2.4): what the kernels of decode are held to."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Rows(NamedTuple):
    """Where each of T rows is in a step that gives it one token, or none."""

    slot: Int[Array, " T"]  # of the state
    position: Int[Array, " T"]  # of its token in the sequence
    count: Int[Array, " T"]  # 1; 0 for an idle row, whose results mean nothing and whose state stays


def convolve(
    x: Float[Array, "T *C"], taps: Float[Array, "*C 4"], state: Float[Array, "slots 3 *C"], rows: Rows
) -> tuple[Float[Array, "T *C"], Float[Array, "slots 3 *C"]]:
    """x[t] + sum_j taps[j] x[t - 3 + j] in float32, rounded to the dtype of x, and the state with x in it.

    The input at position p lies at p % 3. Before the first position lies another sequence's, which counts as zero.
    """
    kept = state.shape[1]
    weights = taps.astype(jnp.float32)
    y = x.astype(jnp.float32)
    y = y + weights[..., kept] * y
    for back in range(1, kept + 1):
        position = rows.position - back
        there = (position >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        y = y + weights[..., kept - back] * jnp.where(there, state[rows.slot, position % kept], 0).astype(jnp.float32)
    slot = jnp.where(rows.count > 0, rows.slot, state.shape[0])
    return y.astype(x.dtype), state.at[slot, rows.position % kept].set(x.astype(state.dtype), mode="drop")
