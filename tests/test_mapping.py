"""A map over slices that takes its memory late."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.kernels.mapping import map_after


def test_values_are_those_of_a_map() -> None:
    """Whatever number the result begins as, all of it is overwritten."""
    items = (jnp.arange(12.0).reshape(4, 3), jnp.arange(4))
    for before in (jnp.full((2, 2), jnp.nan), jnp.ones(1, jnp.int32)):
        found = jax.jit(lambda before, items: map_after(before, lambda item: item[0] * 2 + item[1], items))(before, items)
        assert np.array_equal(found, [[2 * (3 * i + j) + i for j in range(3)] for i in range(4)])
        assert found.dtype == jnp.float32


def test_results_of_two_layers_are_not_there_at_once() -> None:
    """Two maps of 4 MB, the second of what the first leaves: one result at a time. With jax.lax.map it is 8 MB."""

    def layer(before: jax.Array) -> jax.Array:
        return map_after(before, lambda row: jnp.full(1 << 18, row.sum()), before).sum(1, keepdims=True) * jnp.ones((1, 8))

    plan = jax.jit(lambda x: layer(layer(x))).lower(jnp.ones((4, 8))).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 1.5 * (4 << 20)
