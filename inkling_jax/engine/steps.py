"""The jitted programs: a ragged chunk of prompts beside decoding rows, N decode steps, and the forward that scores or traces.

Each is one shard_map over the mesh around one forward. The model is split once; programs take its flat leaves and merge while
tracing (design 1). Shapes are bucketed by the caller; what is static is named in each signature.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from inkling_jax.cache.paged import Cache, LayerCache
from inkling_jax.cache.ragged import Ragged
from inkling_jax.engine.sampler import Mode, SampleResult, advance, sample
from inkling_jax.engine.state import EngineState, PageUpdates
from inkling_jax.model import Inkling, MediaRows, flat_parameters
from inkling_jax.sharding.rules import partition_spec

# XLA would merge products that share an input (router and shared experts) by joining their weights anew in every step.
COMPILER_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of B rows laid end to end in T places, in row order: parts of prompts, and rows that decode, a place each.

    The device knows the token and the position of a row that decodes, and whether it is still live; where not, its place is idle.
    Rows not used have count 0 and slot `slots`.
    """

    token_ids: Int[Array, " T"]
    slot: Int[Array, " B"]
    count: Int[Array, " B"]
    length: Int[Array, " B"]  # of the sequence, this chunk included; of a row that decodes anything
    decode: Bool[Array, " B"]
    last: Bool[Array, " B"]  # the prompt ends in this chunk: sample its first token
    updates: PageUpdates
    media: MediaRows | None = None  # None where no token stands for one: such chunks have programs of their own

    def ragged(self, state: EngineState | None = None) -> Ragged:
        """The same rows with each token's place worked out; `state` is needed where rows decode."""
        tokens = self.token_ids.shape[0]
        ends, count, length = jnp.cumsum(self.count), self.count, self.length
        start = ends - count
        if state is not None:
            live = state.live[self.slot]
            count = jnp.where(self.decode, live.astype(jnp.int32), count)
            length = jnp.where(self.decode, jnp.where(live, state.length[self.slot] + 1, 0), length)
        token = jnp.arange(tokens)
        row = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), self.count.shape[0] - 1)
        offset = token - start[row]
        valid = offset < count[row]
        position = jnp.where(valid, (length - count)[row] + offset, 0)
        return Ragged(self.slot, start, count, length, row, jnp.where(valid, offset, 0), position, valid, longest=tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One token for each of B rows; rows that are not `emitted` were idle and the rest of their fields is meaningless."""

    emitted: Bool[Array, " B"]
    result: SampleResult


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Static choices of a step's sampler."""

    mode: Mode
    top_logprobs: int | None  # None: no logprobs at all
    banned: tuple[int, ...]


class Programs:
    """The compiled programs of one model on one mesh."""

    def __init__(self, model: Inkling, mesh: Mesh, dtype: jnp.dtype):
        self.graph, abstract = nnx.split(model)
        self.tree = jax.tree.structure(abstract)
        self.mesh, self.dtype = mesh, dtype
        declared = flat_parameters(model)
        self.paths = list(declared)  # of the leaves
        self.weight_specs = [partition_spec(leaf.axes) for leaf in declared.values()]
        by_row, by_step_and_row = PartitionSpec("data"), PartitionSpec(None, "data")
        self.prefill = self._compile(self._prefill, ("context", "sampling"), by_step_and_row)
        self.decode = self._compile(self._decode, ("context", "sampling", "steps"), by_step_and_row)
        self.score = self._compile(self._score, ("context", "trace"), by_row)
        self.hidden = self._compile(self._hidden, ("context",), by_row)

    def _compile(self, step: Callable[..., Any], static: tuple[str, ...], made: PartitionSpec) -> Callable[..., Any]:
        """jit of shard_map of `step(leaves, state, inputs, **static)`; the state is donated.

        Every replica has its part of the inputs, along their first axis, and of what the step makes, as `made` says.
        """

        @functools.partial(jax.jit, static_argnames=static, donate_argnums=1, compiler_options=COMPILER_OPTIONS)
        def program(leaves: list[Array], state: EngineState, inputs: Any, **options: Any) -> Any:
            specs = state_specs(state)
            body = jax.shard_map(
                functools.partial(step, **options),
                mesh=self.mesh,
                in_specs=(self.weight_specs, specs, PartitionSpec("data")),
                out_specs=(made, specs),
                check_vma=False,  # kernels inside cannot state how they vary over the mesh
            )
            with self.precision():
                result, state = body(leaves, state, inputs)
            if self.mesh.is_multi_process:  # every process reads what all replicas have made
                result = jax.lax.with_sharding_constraint(result, NamedSharding(self.mesh, PartitionSpec()))
            return result, state

        return program

    @contextmanager
    def precision(self) -> Iterator[None]:
        """float32 means float32: on the GPU a product would otherwise round its inputs to TF32."""
        with jax.default_matmul_precision("highest" if self.dtype == jnp.float32 else "default"):
            yield

    def model(self, leaves: list[Array]) -> Inkling:
        """The model of these leaves, inside a program."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))

    def _prefill(
        self, leaves: list[Array], state: EngineState, chunk: Chunk, *, context: int, sampling: Sampling
    ) -> tuple[Sampled, EngineState]:
        """Append a chunk; rows that decode or whose prompt ends sample a token, [1, B], and, unless that ends them, are live.

        Where there is no such row the head runs for nothing: a small part of a chunk, and without it there were a program more.
        """
        model, ragged = self.model(leaves), chunk.ragged(state)
        token_ids = jnp.where(chunk.decode[ragged.row], state.last_token[ragged.slot[ragged.row]], chunk.token_ids)
        z, cache = model(token_ids, chunk.updates.apply(state.cache), ragged, context, media=chunk.media)
        state = dataclasses.replace(state, cache=cache)
        last_token = jnp.clip(ragged.start + ragged.count - 1, 0, z.shape[0] - 1)
        wanted = (chunk.last | chunk.decode) & (ragged.count > 0)
        sampled, state = _sample(model, z[last_token], state, ragged, wanted, sampling)
        return jax.tree.map(lambda a: a[None], sampled), state

    def _decode(
        self,
        leaves: list[Array],
        state: EngineState,
        inputs: tuple[Int[Array, " B"], PageUpdates],
        *,
        context: int,
        sampling: Sampling,
        steps: int,
    ) -> tuple[Sampled, EngineState]:
        """`steps` tokens for each row's slot, [steps, B]; a row that ends on the way idles through the rest."""
        model, (slots, updates) = self.model(leaves), inputs
        state = dataclasses.replace(state, cache=updates.apply(state.cache))

        def step(state: EngineState, _: None) -> tuple[EngineState, Sampled]:
            ragged = _one_token_each(state, slots)
            z, cache = model(state.last_token[slots], state.cache, ragged, context)
            state = dataclasses.replace(state, cache=cache)
            sampled, state = _sample(model, z, state, ragged, ragged.valid, sampling)
            return state, sampled

        if steps == 1:
            state, sampled = step(state, None)
            return jax.tree.map(lambda a: a[None], sampled), state
        state, sampled = jax.lax.scan(step, state, None, length=steps)
        return sampled, state

    def _score(
        self, leaves: list[Array], state: EngineState, chunk: Chunk, *, context: int, trace: bool
    ) -> tuple[tuple[Float[Array, "T usable"], dict[str, Array]], EngineState]:
        """Append a chunk; logits after each of its tokens and, with `trace`, hidden states and routing."""
        model, tape = self.model(leaves), {}
        taped, appended = tape if trace else None, chunk.updates.apply(state.cache)
        z, cache = model(chunk.token_ids, appended, chunk.ragged(), context, taped, chunk.media)
        return (model.logits(z), tape), dataclasses.replace(state, cache=cache)

    def _hidden(
        self, leaves: list[Array], state: EngineState, chunk: Chunk, *, context: int
    ) -> tuple[Float[Array, "T D"], EngineState]:
        """Append a chunk; the states after the final norm at each of its tokens, from which a draft head goes on."""
        model, appended = self.model(leaves), chunk.updates.apply(state.cache)
        z, cache = model(chunk.token_ids, appended, chunk.ragged(), context, media=chunk.media)
        return z, dataclasses.replace(state, cache=cache)


def state_specs(state: EngineState) -> EngineState:
    """PartitionSpecs of a state: those of its cache, what the sampler knows of ids as the logits, the rest by slot alone."""
    rest = jax.tree.map(lambda _: partition_spec(("slots",)), state)
    by_id = partition_spec(("slots", "vocab"))
    sampler = dataclasses.replace(rest.sampler, output_counts=by_id, prompt_seen=by_id)
    return dataclasses.replace(rest, cache=cache_specs(state.cache), sampler=sampler)


def cache_specs(cache: Cache) -> Cache:
    """PartitionSpecs of a cache: pages and slots with their replica, in it key heads over the model axes, the rest whole."""
    pages, conv = partition_spec(("pages", "kv_heads")), partition_spec(("slots", None, "kv_heads"))
    rest = jax.tree.map(lambda _: partition_spec(("slots",)), cache)
    by_heads = {"k_pages": pages, "v_pages": pages, "k_conv": conv, "v_conv": conv}

    def specs(layer: LayerCache) -> LayerCache:
        held = {name: jax.tree.map(lambda _, spec=spec: spec, getattr(layer, name)) for name, spec in by_heads.items()}
        return dataclasses.replace(layer, **held)

    return dataclasses.replace(rest, layers=tuple(map(specs, rest.layers)))


def _one_token_each(state: EngineState, slots: Int[Array, " B"]) -> Ragged:
    rows = jnp.arange(slots.shape[0])
    live = state.live[slots]
    position = jnp.where(live, state.length[slots], 0)
    count = live.astype(jnp.int32)
    return Ragged(slots, rows, count, position + count, rows, jnp.zeros_like(rows), position, live, longest=1)


def _sample(
    model: Inkling,
    z: Float[Array, "B D"],
    state: EngineState,
    ragged: Ragged,
    wanted: Bool[Array, " B"],
    sampling: Sampling,
) -> tuple[Sampled, EngineState]:
    """Sample for the wanted rows from their normed states and book the step: lengths, last tokens, who goes on."""
    result = sample(
        model.local_logits(z),
        state.sampler,
        ragged.slot,
        vocab=model.usable_vocab_size,
        banned=sampling.banned,
        mode=sampling.mode,
        top_logprobs=sampling.top_logprobs or 0,
    )
    if sampling.top_logprobs is None:
        result = dataclasses.replace(result, logprob=jnp.zeros_like(result.logprob))
    going = wanted & result.finite & ~result.stopped & ~result.exhausted
    slot = jnp.where(ragged.count > 0, ragged.slot, state.length.shape[0])  # idle rows drop their writes
    state = dataclasses.replace(
        state,
        sampler=advance(state.sampler, ragged.slot, result.tokens, wanted & result.finite),
        last_token=state.last_token.at[slot].set(result.tokens, mode="drop"),
        length=state.length.at[slot].set(ragged.length, mode="drop"),
        live=state.live.at[slot].set(going, mode="drop"),
    )
    return Sampled(wanted, result), state
