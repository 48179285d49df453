"""Runs the draft head of a model over whole prompts, teacher forced: what each depth expects, given the true tokens (spec 3)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from inkling_jax.cache.paged import Cache, CacheShape, create_cache
from inkling_jax.config import TextConfig
from inkling_jax.engine.pack import bucket, context_bucket
from inkling_jax.engine.steps import Chunk, Programs, cache_specs
from inkling_jax.layers.mtp import DraftHead
from inkling_jax.model import MediaRows, flat_parameters
from inkling_jax.sharding.rules import partition_spec

Later = Sequence[tuple[Int[Array, " T"] | np.ndarray, MediaRows | None]]  # for each depth k, at t what stands at t + 1 + k


class DraftRunner:
    """A draft head, its parameters and programs. `layers` is `config.draft_layers`, `programs` are those of its decoder."""

    def __init__(self, head: DraftHead, leaves: list[jax.Array], layers: TextConfig, programs: Programs):
        self._graph, abstract = nnx.split(head)
        self._tree = jax.tree.structure(abstract)
        self._specs = [partition_spec(leaf.axes) for leaf in flat_parameters(head).values()]
        self._leaves, self._layers, self._programs = leaves, layers, programs
        self.depths = layers.num_layers
        self._run = jax.jit(self._sharded_states, static_argnames="context", donate_argnums=2)
        self._head = jax.jit(self._sharded_logits)

    def create_cache(self, length: int, page_size: int, chunk: int) -> tuple[Cache, CacheShape]:
        """An empty cache for one prompt of `length` tokens, read up to `chunk` at a time; every page has its place already."""
        context = bucket(-(-length // page_size)) * page_size
        empty = CacheShape(1, page_size, 0, 0, context, chunk)
        widths = {"global": empty.table_width(None), "local": empty.table_width(self._layers.local_attention.window)}
        shape = dataclasses.replace(empty, global_pages=widths["global"], local_pages=widths["local"])

        def create() -> Cache:
            cache = create_cache(self._layers, shape, self._programs.dtype)
            tables = {f"{name}_table": jnp.tile(jnp.arange(width), (2, 1)) for name, width in widths.items()}
            return dataclasses.replace(cache, **tables)

        specs = cache_specs(jax.eval_shape(create))
        return jax.jit(create, out_shardings=jax.tree.map(self._placed, specs))(), shape

    def states(
        self, leaves: list[jax.Array], cache: Cache, shape: CacheShape, end: int, hidden: jax.Array, chunk: Chunk, later: Later
    ) -> tuple[list[Float[Array, "T D"]], Cache]:
        """The state of every depth after each token of a prompt's chunk, which ends at `end`; `cache` is donated.

        leaves: the decoder's. hidden: its states after the final norm.
        """
        context = context_bucket(end, shape)
        return self._run(leaves, self._leaves, cache, (hidden, chunk, list(later)), context=context)

    def logits(self, leaves: list[jax.Array], states: Float[Array, "T D"]) -> Float[Array, "T usable"]:
        """float32 logits of states, by the decoder's head."""
        return self._head(leaves, states)

    def close(self) -> None:
        """Free the head's device memory."""
        for leaf in self._leaves:
            leaf.delete()
        self._leaves = []

    def _placed(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._programs.mesh, spec)

    def _shard_map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(body, mesh=self._programs.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _sharded_states(self, leaves: list[Array], own: list[Array], cache: Cache, inputs: Any, *, context: int) -> Any:
        specs, everywhere = cache_specs(cache), PartitionSpec()
        body = functools.partial(self._states, context=context)
        given = (self._programs.weight_specs, self._specs, specs, everywhere)
        with self._programs.precision():
            return self._shard_map(body, given, (everywhere, specs))(leaves, own, cache, inputs)

    def _states(
        self, leaves: list[Array], own: list[Array], cache: Cache, inputs: tuple[Array, Chunk, Later], *, context: int
    ) -> tuple[list[Float[Array, "T D"]], Cache]:
        hidden, chunk, later = inputs
        model, head = self._programs.model(leaves), nnx.merge(self._graph, jax.tree.unflatten(self._tree, own))
        ragged = dataclasses.replace(chunk.ragged(), slot=jnp.zeros_like(chunk.slot))
        embedded = [model.embeddings(jnp.asarray(ids), media) for ids, media in later]
        states, cache = head(hidden, embedded, cache, ragged, context)
        return states, cache

    def _sharded_logits(self, leaves: list[Array], states: Float[Array, "T D"]) -> Float[Array, "T usable"]:
        def body(leaves: list[Array], states: Array) -> Array:
            return self._programs.model(leaves).logits(states)

        with self._programs.precision():
            return self._shard_map(body, (self._programs.weight_specs, PartitionSpec()), PartitionSpec())(leaves, states)
