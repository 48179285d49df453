"""Which tiles of queries a prefill kernel works on, and in which order: the longest first, so that processors end together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

IDLE_BLOCK = 32  # tokens that are looked at together for some that no row owns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Tiles of queries of one row each, aligned by position. A function of the rows alone, so layers of one kind share it."""

    row: Int[Array, " I"]
    first: Int[Array, " I"]  # position of a tile's first token, a multiple of its tokens; it may lie before the row's queries
    live: Int[Array, "1"]  # tiles that hold queries; they come first
    idle: Int[Array, " T"]  # 1: no row owns this token
    idle_block: Int[Array, " Z"]  # 1: there is such a token among these


def most_tiles(tokens: int, rows: int, tile: int) -> int:
    """Bound on tiles: a row that begins anywhere touches one more than its tokens fill, and every tile holds a query."""
    return max(1, min(tokens, tokens // tile + 2 * rows))


def plan_prefill(
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    tile: int,
    window: int | None,
) -> PrefillPlan:
    """The plan of a step of `tokens` tokens, in tiles of `tile`."""
    rows = count.shape[0]
    begin = (length - count) // tile
    tiles = jnp.where(count > 0, (length + tile - 1) // tile - begin, 0)
    end = jnp.cumsum(tiles)
    index = jnp.arange(most_tiles(tokens, rows, tile))
    row = jnp.minimum((end[None, :] <= index[:, None]).sum(1), rows - 1)
    first = (begin[row] + index - (end - tiles)[row]) * tile
    keys = first if window is None else jnp.minimum(first, window)
    order = jnp.argsort(jnp.where(index < end[-1], -keys - 1, 0))
    token = jnp.arange(-(-tokens // IDLE_BLOCK) * IDLE_BLOCK)
    owned = ((token[:, None] >= start[None, :]) & (token[:, None] < (start + count)[None, :])).any(1)
    idle = ~owned & (token < tokens)
    return PrefillPlan(
        row=row[order].astype(jnp.int32),
        first=first[order].astype(jnp.int32),
        live=end[-1:].astype(jnp.int32),
        idle=idle.astype(jnp.int32),
        idle_block=idle.reshape(-1, IDLE_BLOCK).any(1).astype(jnp.int32),
    )
