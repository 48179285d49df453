"""A map whose result takes no memory before it is worked out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def map_after(before: Array, work: Callable[[Any], Array], items: Any) -> Array:
    """`jax.lax.map(work, items)`, for whose result memory is taken when `before` has been computed.

    jax.lax.map begins with zeros, and those of all layers are the same to XLA, which makes them together when the first layer
    wants its own: of a chunk of 8,192 tokens that is 0.7 GB a layer. Here the result begins as some number of `before`.
    """
    first = jax.tree.map(lambda a: a[0], items)
    made = jax.eval_shape(work, first)
    count = jax.tree.leaves(items)[0].shape[0]
    anything = before[(0,) * before.ndim].astype(made.dtype)

    def step(i: Array, found: Array) -> Array:
        item = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), items)
        return jax.lax.dynamic_update_index_in_dim(found, work(item), i, 0)

    return jax.lax.fori_loop(0, count, step, jnp.full((count, *made.shape), anything))
