"""What the device knows between steps: the cache, the sampler's slots and where each sequence stands. Donated to every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from inkling_jax.cache.paged import Cache, CacheShape, create_cache
from inkling_jax.config import TextConfig
from inkling_jax.engine.sampler import SamplerState
from inkling_jax.sharding.rules import local_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that a step reads and returns, by slot; the last slot is reserved for padding rows and never live."""

    cache: Cache
    sampler: SamplerState
    last_token: Int[Array, " S"]  # sampled, not yet in the cache
    length: Int[Array, " S"]  # tokens in the cache
    live: Bool[Array, " S"]  # decoding: each decode step extends the sequence by one token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageUpdates:
    """Entries of the page tables to set before a step: (slot, column, page); slots out of range are dropped."""

    global_entries: Int[Array, "G 3"]
    local_entries: Int[Array, "L 3"]

    def apply(self, cache: Cache) -> Cache:
        """The cache with these entries set."""

        def set_entries(table: Array, entries: Array) -> Array:
            return table.at[entries[:, 0], entries[:, 1]].set(entries[:, 2], mode="drop")

        return dataclasses.replace(
            cache,
            global_table=set_entries(cache.global_table, self.global_entries),
            local_table=set_entries(cache.local_table, self.local_entries),
        )


def create_state(config: TextConfig, shape: CacheShape, dtype: jnp.dtype, sizes: Mapping[str, int] | None = None) -> EngineState:
    """An empty state for one rank of a mesh with axis sizes `sizes` (default: one device)."""
    rows = shape.slots + 1
    (vocab,) = local_shape("the sampler's state", (config.vocab_size,), ("vocab",), sizes or {})
    return EngineState(
        cache=create_cache(config, shape, dtype, sizes),
        sampler=SamplerState.create(shape.slots, vocab),
        last_token=jnp.zeros(rows, jnp.int32),
        length=jnp.zeros(rows, jnp.int32),
        live=jnp.zeros(rows, bool),
    )
