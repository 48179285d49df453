"""Which rows an expert multiplies: the tokens and choices of a step sorted by expert, and cut into slots of a few rows each."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Groups(NamedTuple):
    """R = T * A rows sorted by expert, then token, then choice; slots of at most so many rows, each of one expert."""

    token: Int32[Array, " R"]  # of each row; rows past those of the experts held here are not set to anything of use
    place: Int32[Array, "T A"]  # row of each token and choice; negative where the expert is not one of those held here
    expert: Int32[Array, " S"]  # of each slot
    first: Int32[Array, " S"]  # row of a slot
    used: Int32[Array, " S"]  # rows of a slot
    count: Int32[Array, " 1"]  # slots that exist; those past it are not set to anything of use
    counters: Int32[Array, " C"]  # zeros, for a kernel to count in; left as zeros


def slots_needed(tokens: int, choices: int, experts: int, rows: int) -> int:
    """The most slots of `rows` rows that so many tokens, choices and experts can need."""
    total = tokens * choices
    return min(total, total // rows + min(experts, total))


def group(chosen: Int[Array, "T A"], experts: int, rows: int, counters: int) -> Groups:
    """Sort and cut; an index outside 0..experts-1 has no row. `counters` is how many zeros to add."""
    tokens, choices = chosen.shape
    total = tokens * choices
    flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32))
    size = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
    first = jnp.cumsum(size) - size
    ends = jnp.cumsum(-(-size // rows))
    slot = jnp.arange(slots_needed(tokens, choices, experts, rows), dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, slot, side="right"), experts - 1).astype(jnp.int32)
    begin = (slot - ends[expert] + -(-size[expert] // rows)) * rows
    return Groups(
        token=order // choices,
        place=jnp.where(flat < experts, place, -1).reshape(tokens, choices),
        expert=expert,
        first=(first[expert] + begin).astype(jnp.int32),
        used=jnp.clip(size[expert] - begin, 0, rows).astype(jnp.int32),
        count=ends[-1:].astype(jnp.int32),
        counters=jnp.zeros(counters, jnp.int32),
    )
