"""Copies of a slot's convolution state in host memory, taken where a prefix ends and put back where another sequence goes on."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Shaped

from inkling_jax.cache.paged import Cache
from inkling_jax.engine.steps import Programs, cache_specs
from inkling_jax.sharding.rules import partition_spec

CONV = ("k_conv", "v_conv", "attn_conv", "mlp_conv")


class Snapshot:
    """What a rank's slot held, end to end: on the device until its copy has arrived, then on the host."""

    def __init__(self, array: jax.Array):
        self.array: jax.Array | None = array
        self.parts: list[tuple[Any, np.ndarray]] = []  # by device, those of this process
        array.copy_to_host_async()

    def settle(self) -> None:
        """Keep the host's copy alone."""
        if self.array is not None:
            self.parts = [(shard.device, np.asarray(shard.data)) for shard in self.array.addressable_shards]
            self.array = None


class Snapshots:
    """The programs that take and restore snapshots of one engine's cache."""

    def __init__(self, programs: Programs, cache: Cache):
        mesh, specs = programs.mesh, cache_specs(cache)
        vector, everywhere = partition_spec(("kv_heads",)), jax.sharding.PartitionSpec()
        mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        self._sharding = NamedSharding(mesh, vector)
        self._take = jax.jit(mapped(_take, in_specs=(specs, everywhere), out_specs=vector))
        self._restore = jax.jit(
            mapped(_restore, in_specs=(specs, everywhere, vector, everywhere, everywhere), out_specs=specs), donate_argnums=0
        )
        made = jax.eval_shape(self._take, cache, np.int32(0))
        self._shape = made.shape
        self.nbytes = made.size * made.dtype.itemsize // jax.process_count()  # of one snapshot, in this process
        self._young: deque[tuple[int, Snapshot]] = deque()

    def take(self, cache: Cache, slot: int, step: int) -> Snapshot:
        """The state of a slot after the steps dispatched so far, the last of which is number `step`."""
        snapshot = Snapshot(self._take(cache, np.int32(slot)))
        self._young.append((step, snapshot))
        return snapshot

    def settle(self, step: int) -> None:
        """Leave the device to others: step number `step` has ended."""
        while self._young and self._young[0][0] <= step:
            self._young.popleft()[1].settle()

    def forget(self) -> None:
        """Wait for no copy any more: the steps whose states they are have failed."""
        self._young.clear()

    def restore(self, cache: Cache, slot: int, snapshot: Snapshot, rows: dict[str, list[int]]) -> Cache:
        """`cache`, which is donated, with the state of a slot as it was, and `rows` in its page tables ("global", "local")."""
        array = snapshot.array
        if array is None:
            parts = [jax.device_put(part, device) for device, part in snapshot.parts]
            array = jax.make_array_from_single_device_arrays(self._shape, self._sharding, parts)
        tables = [np.asarray(rows[name], np.int32) for name in ("global", "local")]
        return self._restore(cache, np.int32(slot), array, *tables)

    def warm_up(self, cache: Cache) -> Cache:
        """`cache`, which is donated, as it was, once both programs are compiled and have run on it."""
        rows = {"global": np.asarray(cache.global_table[0]).tolist(), "local": np.asarray(cache.local_table[0]).tolist()}
        return self.restore(cache, 0, Snapshot(self._take(cache, np.int32(0))), rows)


def _take(cache: Cache, slot: Int[Array, ""]) -> Shaped[Array, " N"]:
    return jnp.concatenate([getattr(layer, name)[slot].ravel() for layer in cache.layers for name in CONV])


def _restore(
    cache: Cache, slot: Int[Array, ""], vector: Shaped[Array, " N"], global_row: Int[Array, " G"], local_row: Int[Array, " L"]
) -> Cache:
    layers, at = [], 0
    for layer in cache.layers:
        restored: dict[str, Any] = {}
        for name in CONV:
            state = getattr(layer, name)
            size = state[0].size
            restored[name] = state.at[slot].set(vector[at : at + size].reshape(state.shape[1:]))
            at += size
        layers.append(dataclasses.replace(layer, **restored))
    return Cache(tuple(layers), cache.global_table.at[slot].set(global_row), cache.local_table.at[slot].set(local_row))
