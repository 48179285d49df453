"""What prefill_device.py does, in operations that the interpreter knows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from inkling_jax.kernels.paged_attention.mosaic import NEVER, ROWS
from inkling_jax.kernels.paged_attention.prefill_shape import GROUP, PrefillShape


def row_tokens(shape: PrefillShape, group: jax.Array | int) -> jax.Array:
    """Token of a tile that a row of a warpgroup belongs to."""
    row = lax.iota(jnp.int32, ROWS)
    return shape.token(group, row // 16, row // GROUP % 2) + row % GROUP // shape.share


def read_rel(shape: PrefillShape) -> Callable:
    def run(ref, group):
        rel = plgpu.load(ref)
        return rel[row_tokens(shape, group), lax.iota(jnp.int32, ROWS) % shape.share]

    return run


def add_bias(shape: PrefillShape) -> Callable:
    def run(scores, rel, table, row):
        halves = plgpu.load(table).reshape(2, shape.table_rows, 8)
        rows = row - row_tokens(shape, 0)[:, None] + lax.iota(jnp.int32, shape.keys)[None]
        weight = jnp.concatenate([halves[0], halves[1]], axis=1)[rows].astype(jnp.float32)
        return scores + jnp.einsum("mr,mkr->mk", rel.astype(jnp.float32), weight)

    return run


def hide(shape: PrefillShape, causal: bool, window: bool) -> Callable:
    def run(scores, distance, group):
        apart = distance + row_tokens(shape, group)[:, None] - lax.iota(jnp.int32, shape.keys)[None]
        seen = (apart >= 0) | (not causal)
        return jnp.where(seen & (apart < shape.window) if window else seen, scores, NEVER)

    return run


def clear_rows(shape: PrefillShape) -> Callable:
    def run(values, first, end):
        row = lax.broadcasted_iota(jnp.int32, (shape.keys, shape.width), 0)
        values[...] = jnp.where((row >= first) & (row < end), plgpu.load(values), jnp.bfloat16(0))

    return run
