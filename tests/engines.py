"""Engines over the reference checkpoints. Weights and programs are shared, so that a process compiles each program once.

Programs depend on a cache's shape: it is fixed but for the page size, and prompt chunks of up to 16 tokens are one bucket. Local
page tables are as narrow as may be, so that prompts of 33 tokens and more go round them while they decode.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from inkling_jax.benchmarks.shard import Shard, open_shard
from inkling_jax.cache.paged import CacheShape
from inkling_jax.config import ModelConfig
from inkling_jax.convert.load import load_parameters
from inkling_jax.convert.safetensors_reader import Checkpoint
from inkling_jax.convert.weight_map import WeightPlan
from inkling_jax.engine.engine import Engine, EngineOptions, Output
from inkling_jax.engine.media import MediaRunner
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.state import EngineState, create_state
from inkling_jax.engine.steps import Programs, state_specs
from inkling_jax.model import Inkling, flat_parameters
from inkling_jax.sharding.mesh import make_mesh
from inkling_jax.towers import Towers

SLOTS, CONTEXT = 4, 512
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint on the device in float32, and its programs. `paths` name the leaves; `media` has the towers."""

    config: ModelConfig
    programs: Programs
    leaves: list[jax.Array]
    paths: list[str]
    sharding: NamedSharding
    media: MediaRunner


@functools.cache
def model(directory: Path) -> Model:
    """The model of a checkpoint directory, read once."""
    config = ModelConfig.from_directory(directory)
    plan = WeightPlan.build(config, Checkpoint.open(directory))
    mesh = make_mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    declared = Inkling(config.text, plan.packed, jnp.float32)
    towers = Towers(config.vision, config.audio, jnp.float32)
    paths, tower_paths = list(flat_parameters(declared)), list(flat_parameters(towers))
    arrays = load_parameters(plan, dtype=jnp.float32, device=sharding)
    media = MediaRunner(towers, [arrays[path] for path in tower_paths], mesh, jnp.float32)
    return Model(config, Programs(declared, mesh, jnp.float32), [arrays[path] for path in paths], paths, sharding, media)


def cache_shape(page: int = 16, pages: int | None = None, max_query: int = 24) -> CacheShape:
    """Room for all slots at full context, or for `pages` pages a pool; `max_query` 24 suits 16 tokens a chunk and 7 a call."""
    pages = SLOTS * CONTEXT // page if pages is None else pages
    return CacheShape(SLOTS, page, pages, pages, CONTEXT, max_query)


def engine(
    directory: Path,
    *,
    shape: CacheShape | None = None,
    chunk: int = 16,
    tokens_per_call: int = 7,
    ahead: int = 1,
    leaves: list[jax.Array] | None = None,
    prefix_bytes: int = 0,
    prefix_spacing: int = 64,
    deterministic: bool = False,
) -> Engine:
    """A fresh engine that never samples media slots and stops where the checkpoint says. It keeps no prefixes unless told to."""
    shared = model(directory)
    config, shape = shared.config, shape or cache_shape()
    assert max(chunk, tokens_per_call * (ahead + 2)) <= shape.max_query
    create = functools.partial(create_state, config.text, shape, jnp.float32)
    placed = jax.tree.map(lambda spec: NamedSharding(shared.programs.mesh, spec), state_specs(jax.eval_shape(create)))
    assert isinstance(config.eos_token_id, int)
    return Engine(
        shared.programs,
        leaves or shared.leaves,
        lambda: jax.device_put(create(), placed),
        config.text,
        shape,
        banned=tuple(i for i in (config.image_token_id, config.audio_token_id) if i is not None),
        default_stop_ids=(config.eos_token_id,),
        options=EngineOptions(
            chunk, tokens_per_call, ahead, deterministic, prefix_bytes=prefix_bytes, prefix_spacing=prefix_spacing
        ),
        media=shared.media,
    )


@functools.cache
def two_layers(directory: Path) -> tuple[Shard, list[jax.Array]]:
    """A local layer and a global one with experts, bfloat16, random weights, in the widths of a checkpoint: fast to compile."""
    whole = open_shard(str(directory), "tensor=1", 2)
    config = dataclasses.replace(whole.config, local_layers=(True, False), dense_layers=(True, False))
    shard = dataclasses.replace(whole, config=config)
    return shard, shard.random_leaves()


def small_engine(directory: Path, *, shape: CacheShape | None = None, **options: Any) -> Engine:
    """A fresh engine over `two_layers`, with chunks of 16 tokens and 7 a call."""
    shard, leaves = two_layers(directory)
    shape = shape or CacheShape(SLOTS, 16, 64, 64, 256, 24)
    return shard.engine(leaves, shape, EngineOptions(**{"chunk": 16, "tokens_per_call": 7} | options))


@dataclasses.dataclass
class Result:
    """All that a request led to."""

    tokens: list[int]
    logprobs: list
    finish_reason: str | None = None
    error: str | None = None


def gather(outputs: Iterable[Output], into: dict[int, Result]) -> None:
    """Add outputs to the results of their requests."""
    for output in outputs:
        result = into.setdefault(output.request_id, Result([], []))
        assert result.finish_reason is None, "an output after the end"
        result.tokens += output.token_ids
        result.logprobs += output.logprobs
        result.finish_reason, result.error = output.finish_reason, output.error


def finish(engine: Engine, results: dict[int, Result], between: Callable[[Engine], None] | None = None) -> None:
    """Step until nothing is left, calling `between` before each step."""
    for _ in range(2000):
        if not engine.busy:
            return
        if between:
            between(engine)
        gather(engine.step(), results)
    raise AssertionError("the engine does not come to an end")


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    between: Callable[[Engine], None] | None = None,
) -> list[Result]:
    """Results of prompts that run together, in their order."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add(Request(tuple(map(int, prompt)), p)) for prompt, p in zip(prompts, each, strict=True)]
    results: dict[int, Result] = {}
    finish(engine, results, between)
    return [results[i] for i in ids]


def all_given_back(engine: Engine) -> bool:
    """Whether every slot is free, and every page but for those of kept prefixes."""
    scheduler = engine.scheduler
    assert all(pool.free == pool.pages for pool in scheduler.pools.values()) or scheduler.prefixes
    return all(pool.available == pool.pages for pool in scheduler.pools.values()) and len(scheduler.free_slots) == SLOTS


def poison(engine: Engine, local_layers: tuple[bool, ...]) -> None:
    """NaN wherever nothing may look: pages of no sequence, pages past what is written, states of free slots and of padding."""
    page, kept = engine.shape.page_size, {}
    for name, pages in (("global", engine.shape.global_pages), ("local", engine.shape.local_pages)):
        kept[name] = np.zeros((pages, page), bool)
        for sequence in engine.scheduler.running:
            held, written = sequence.pages[name], sequence.prefilled + max(sequence.dispatched - sequence.resumed - 1, 0)
            for i, mine in held.held().items():
                kept[name][mine] = i * page + np.arange(page) < written
        for prefix in engine.scheduler.prefixes._prefixes.values() if engine.scheduler.prefixes else ():
            kept[name][list(prefix.pages[name][1])] = True
    slots = np.isin(np.arange(engine.shape.slots + 1), [sequence.slot for sequence in engine.scheduler.running])
    engine.state = _poison(engine.state, kept["global"], kept["local"], slots, local_layers)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=4)
def _poison(state: EngineState, in_global, in_local, slots, local_layers) -> EngineState:
    def only(kept, array):
        nan = jnp.nan if array.dtype != jnp.uint8 else jnp.uint8(0x7F)  # of e4m3
        return jnp.where(kept.reshape(kept.shape + (1,) * (array.ndim - kept.ndim)), array, nan)

    def spoil(layer, local):
        kept = (in_local if local else in_global)[:, None, :]
        pages = {name: jax.tree.map(functools.partial(only, kept), getattr(layer, name)) for name in ("k_pages", "v_pages")}
        states = {name: only(slots, getattr(layer, name)) for name in ("k_conv", "v_conv", "attn_conv", "mlp_conv")}
        return dataclasses.replace(layer, **pages, **states)

    layers = tuple(spoil(layer, local) for layer, local in zip(state.cache.layers, local_layers, strict=True))
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))
