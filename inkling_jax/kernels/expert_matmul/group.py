"""Which rows an expert multiplies: the tokens and choices of a step sorted by expert, and cut into slots of a few rows each."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from inkling_jax.errors import InputError


class Groups(NamedTuple):
    """R rows sorted by expert, then token, then choice; slots of at most so many rows, each of one expert."""

    token: Int32[Array, " R"]  # of each row; rows that are nobody's are not set to anything of use
    place: Int32[Array, "T A"]  # row of each token and choice; negative where the expert is not one of those held here
    expert: Int32[Array, " S"]  # of each slot
    first: Int32[Array, " S"]  # row of a slot
    used: Int32[Array, " S"]  # rows of a slot
    count: Int32[Array, " 1"]  # slots that exist; those past it are not set to anything of use
    counters: Int32[Array, " C"]  # zeros, for a kernel to count in; left as zeros


class Grouping(NamedTuple):
    """What `group` is asked for besides what was chosen."""

    experts: int
    rows: int  # the most of a slot
    counters: int
    align: int = 1


def slots_needed(tokens: int, choices: int, experts: int, rows: int) -> int:
    """The most slots of `rows` rows that so many tokens, choices and experts can need."""
    total = tokens * choices
    return min(total, total // rows + min(experts, total))


def rows_needed(tokens: int, choices: int, experts: int, align: int) -> int:
    """The most rows there can be, the gaps between experts included."""
    total = tokens * choices
    return total + (align - 1) * min(experts, total)


def group(chosen: Int[Array, "T A"], experts: int, rows: int, counters: int, align: int = 1) -> Groups:
    """Sort and cut; an index outside 0..experts-1 has no row. `counters` is how many zeros to add.

    Each expert's rows start at a multiple of `align`, which `rows` must be a multiple of too.
    """
    tokens, choices = chosen.shape
    total, padded = tokens * choices, rows_needed(tokens, choices, experts, align)
    bits = (total - 1).bit_length()
    if (experts + 1) << bits > 1 << 31:
        raise InputError(f"{tokens} tokens with {choices} of {experts} experts each are too many to sort at once")
    flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1).astype(jnp.int32)
    # One number holds expert and place, so that a plain sort is stable.
    key = jnp.sort(flat << bits | jnp.arange(total, dtype=jnp.int32))
    order, owner = key & ((1 << bits) - 1), key >> bits
    every = jnp.arange(experts, dtype=jnp.int32)
    size = jnp.sum(flat == every[:, None], axis=1, dtype=jnp.int32)
    rank, first, slot = (_before(n) for n in (size, -(-size // align) * align, -(-size // rows)))
    held = jnp.minimum(owner, experts - 1)
    row = first[held] + jnp.arange(total, dtype=jnp.int32) - rank[held]
    nowhere = padded + jnp.arange(total, dtype=jnp.int32)
    place = jnp.zeros(total, jnp.int32).at[order].set(jnp.where(owner < experts, row, -1), unique_indices=True)
    token = jnp.zeros(padded, jnp.int32)
    token = token.at[jnp.where(owner < experts, row, nowhere)].set(order // choices, mode="drop", unique_indices=True)
    s = jnp.arange(slots_needed(tokens, choices, experts, rows), dtype=jnp.int32)
    expert = jnp.sum(slot <= s[:, None], axis=1, dtype=jnp.int32) - 1  # the last to start there: the one with rows
    begin = (s - slot[expert]) * rows
    return Groups(
        token=token,
        place=place.reshape(tokens, choices),
        expert=expert,
        first=first[expert] + begin,
        used=jnp.clip(size[expert] - begin, 0, rows),
        count=jnp.sum(-(-size // rows), dtype=jnp.int32)[None],
        counters=jnp.zeros(counters, jnp.int32),
    )


def _before(numbers: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The sum of all before each, as one reduction."""
    i = jnp.arange(numbers.shape[0])
    return jnp.sum(jnp.where(i < i[:, None], numbers, 0), axis=1, dtype=jnp.int32)
