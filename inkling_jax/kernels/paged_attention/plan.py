"""Which processor works on which keys in decode: equal runs of key tiles, whatever the lengths of the rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from inkling_jax.kernels.paged_attention.bias import KEY_TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """All (row, key head, key tile) in this order, cut into runs of equal length, one a program.

    A function of the rows alone, so layers of one kind share it. A pair of row and key head is an item; programs that begin or
    end inside an item leave partial results, which are merged afterwards.
    """

    row: Int[Array, " W"]  # first item of a program: row,
    head: Int[Array, " W"]  # key head,
    skip: Int[Array, " W"]  # and its tiles that earlier programs do
    tiles: Int[Array, " W"]  # length of the run
    followers: Int[Array, " W"]  # c > 0: programs c, c+1, ... that continue the item which program c-1 begins; otherwise 0
    next_row: Int[Array, " B"]  # next row that has work
    idle: Int[Array, " T"]  # 1: no row owns this token


def tile_range(count: Array, length: Array, window: int | None) -> tuple[Array, Array]:
    """First key tile that a row's queries can see, and how many there are up to its length; none where count is 0."""
    oldest = jnp.maximum(length - count - window + 1, 0) if window else jnp.zeros_like(length)
    first = oldest // KEY_TILE
    return first, jnp.where(count > 0, (length + KEY_TILE - 1) // KEY_TILE - first, 0)


FIXED_RUN = 16  # key tiles of a program in a fixed plan, unless rows may be very long
MOST_PARTS = 64  # of an item, in a fixed plan
MOST_BEHIND = KEY_TILE  # query tokens of a row beyond the first, whose windows begin later, and more


def plan_decode(
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    kv_heads: int,
    window: int | None,
    programs: int,
    shortest: int,
) -> DecodePlan:
    """The plan of a step. `shortest` tiles are the least that a program is given: fewer, and merging costs more than it saves."""
    _, tiles = tile_range(count, length, window)
    rows = jnp.arange(count.shape[0])
    # B x B comparisons fuse into one small kernel; a cumulative sum and a sort would be several.
    before = jnp.where(rows[None, :] < rows[:, None], tiles[None, :] * kv_heads, 0).sum(1)
    end = before + tiles * kv_heads
    total = (tiles * kv_heads).sum()
    run = jnp.maximum((total + programs - 1) // programs, shortest)
    begin = jnp.minimum(jnp.arange(programs) * run, total)
    row = jnp.minimum((end[None, :] <= begin[:, None]).sum(1), count.shape[0] - 1)
    of_row = jnp.maximum(tiles[row], 1)
    within = begin - before[row]
    head, skip = within // of_row, within % of_row
    length_of_run = jnp.minimum(run, total - begin)
    item_begin = begin - skip
    previous_begin = begin - run
    continues = (length_of_run > 0) & (skip > 0) & (item_begin >= previous_begin)
    last = (item_begin + of_row - 1) // run
    later = jnp.where((rows[None, :] > rows[:, None]) & (tiles[None, :] > 0), rows[None, :], count.shape[0] - 1)
    return DecodePlan(
        row=row.astype(jnp.int32),
        head=head.astype(jnp.int32),
        skip=skip.astype(jnp.int32),
        tiles=length_of_run.astype(jnp.int32),
        followers=jnp.where(continues, last - jnp.arange(programs) + 1, 0).astype(jnp.int32),
        next_row=later.min(1).astype(jnp.int32),
        idle=_idle(start, count, tokens),
    )


def plan_fixed(
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    length: Int[Array, " B"],
    *,
    tokens: int,
    kv_heads: int,
    window: int | None,
    context: int,
) -> DecodePlan:
    """A plan that cuts each item by its own length alone, so that no row's sums depend on what other rows there are.

    A program does one part of one item, of a number of tiles that follows from `context`, which bounds the lengths; there are as
    many programs as rows of that length would need, and those left over do nothing.
    """
    reach = context if window is None else min(context, window + MOST_BEHIND)
    most = -(-reach // KEY_TILE) + 1  # a window may begin inside a tile
    run = max(FIXED_RUN, -(-most // MOST_PARTS))
    programs = count.shape[0] * kv_heads * -(-most // run)
    _, tiles = tile_range(count, length, window)
    parts = (tiles + run - 1) // run
    rows, program = jnp.arange(count.shape[0]), jnp.arange(programs)
    before = jnp.where(rows[None, :] < rows[:, None], parts[None, :] * kv_heads, 0).sum(1)
    row = jnp.minimum(((before + parts * kv_heads)[None, :] <= program[:, None]).sum(1), count.shape[0] - 1)
    of_row = jnp.maximum(parts[row], 1)
    within = program - before[row]
    head, part = within // of_row, within % of_row
    there = within < parts[row] * kv_heads
    return DecodePlan(
        row=row.astype(jnp.int32),
        head=jnp.where(there, head, 0).astype(jnp.int32),
        skip=jnp.where(there, part * run, 0).astype(jnp.int32),
        tiles=jnp.where(there, jnp.minimum(run, tiles[row] - part * run), 0).astype(jnp.int32),
        followers=jnp.where(there & (part == 1), parts[row] - 1, 0).astype(jnp.int32),
        next_row=rows.astype(jnp.int32),  # no program goes on to another
        idle=_idle(start, count, tokens),
    )


def _idle(start: Int[Array, " B"], count: Int[Array, " B"], tokens: int) -> Int[Array, " T"]:
    token = jnp.arange(tokens)
    owned = (token[:, None] >= start[None, :]) & (token[:, None] < (start + count)[None, :])
    return (~owned.any(1)).astype(jnp.int32)
