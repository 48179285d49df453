"""`bench memory`: what the planner says a model takes of a device, and the most that it did take, at some prefill chunks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from inkling_jax.benchmarks import shard as one_rank
from inkling_jax.benchmarks.ceilings import ReadCeiling, matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.shard import Shard, open_shard
from inkling_jax.benchmarks.table import print_table
from inkling_jax.benchmarks.traffic import step_traffic
from inkling_jax.cache.paged import CacheShape
from inkling_jax.cache.sizing import CacheRequest, fit_cache
from inkling_jax.config import ModelConfig, preset
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.pack import SCORE_CHUNK, pack_chunk
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.shapes import SAMPLINGS, Shapes
from inkling_jax.engine.steps import Sampling, state_specs
from inkling_jax.errors import InputError
from inkling_jax.loading import layout_of, load_model
from inkling_jax.memory import UNLIMITED, Memory, most_positions

SLOTS, PAGE = 4, 64

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model loaded with so many prompt tokens a step, and what the planner says of it."""

    name: str
    folder: str  # with its config.json
    shard: Shard  # all of it
    chunk: int
    shape: CacheShape
    planned: Memory

    @classmethod
    def of(cls, name: str, folder: str, shard: Shard, config: ModelConfig, chunk: int, context: int) -> Case:
        """The case, planned as `load` plans it."""
        options = EngineOptions(chunk=chunk)
        layout = layout_of(config, None, jnp.dtype(one_rank.DTYPE), options)
        request = CacheRequest(SLOTS, PAGE, most_positions(options), context)
        shape = fit_cache(layout.text, request, UNLIMITED, layout.dtype, shard.sizes)
        return cls(f"{name} chunk={chunk}", folder, shard, chunk, shape, layout.memory(shape, shard.sizes))

    @property
    def scored(self) -> int:
        """Tokens to score as well, where the planner takes that for the largest step."""
        return min(self.chunk, SCORE_CHUNK) if self.planned.workspace["score"] == self.planned.step else 0


def run(args: argparse.Namespace) -> int:
    """Plan and measure with each chunk in turn, small ones first, keep the rows, and print them."""
    if max(args.chunks) > args.context:
        raise InputError(f"--chunks {max(args.chunks)}: more than the --context of {args.context}")
    start, device = time.monotonic(), jax.devices()[0]
    config = first_layers(preset(args.preset), args.layers)
    ceiling, flops = read_ceiling(device), matmul_ceiling(device)
    name, rows = f"{args.preset} layers={config.text.num_layers}", []
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict()))
        shard = open_shard(folder, "tensor=1", None, args.kernels, PAGE)
        for chunk in sorted(args.chunks):  # a device tells the highest peak of all
            if time.monotonic() - start > args.time_limit:
                logger.warning("chunk %d is left out: %d s have passed", chunk, args.time_limit)
                continue
            row = measure(Case.of(name, folder, shard, config, chunk, args.context), args.kernels, ceiling, flops)
            logger.info("%s: %.3f GB planned, %.3f GB measured", row["case"], row["planned_bytes"] / 1e9, row["peak_bytes"] / 1e9)
            save_rows(Path(args.output), [row])
            rows.append(row)
    print_table(rows, {"planned_bytes": "planned", "peak_bytes": "at most taken", "error": "error", "peak_by": "taken says"})
    return 0


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """The shape of a decoder's first layers, in NVFP4. Raises InputError for more than there are."""
    text = config.text
    if layers > text.num_layers:
        raise InputError(f"--layers {layers}: the model has {text.num_layers}")
    local, dense = text.local_layers[:layers], text.dense_layers[:layers]
    text = dataclasses.replace(text, num_layers=layers, local_layers=local, dense_layers=dense)
    without = {"vision": None, "audio": None, "mtp": None, "image_token_id": None, "audio_token_id": None}
    return dataclasses.replace(config, text=text, quant_algo="NVFP4", **without)


def measure(case: Case, kernels: str, ceiling: ReadCeiling, flops: float) -> Row:
    """Load the model, and have it read a chunk with the longest bound on lengths; the row."""
    device, shard, chunk = jax.devices()[0], case.shard, case.chunk
    compiled = compiled_bytes(case)  # before there are weights: the compiler tries kernels out in memory of its own
    before = (device.memory_stats() or {}).get("bytes_in_use", 0)
    options: dict[str, Any] = {"kernels": kernels, "dtype": jnp.dtype(one_rank.DTYPE).name, "slots": SLOTS, "page_size": PAGE}
    context = case.shape.max_context
    engine = load_model(case.folder, weights="random", max_context=context, chunk=chunk, quiet=True, **options).engine
    assert engine.shape == case.shape, "the cache that was planned"
    engine.shapes = dataclasses.replace(engine.shapes, contexts=engine.shapes.contexts[-1:])
    _first_token(engine, chunk)  # what is not compiled yet, is
    if case.scored:
        list(engine.evaluate([1] * case.scored))
    seconds = _first_token(engine, chunk)
    stats = device.memory_stats()
    engine.close()
    taken = stats["peak_bytes_in_use"] - before if stats else compiled
    traffic = step_traffic(shard.leaves, shard.config, {}, rows=1, queries=chunk, contexts=range(chunk, chunk + 1))
    return make_row(
        "memory",
        case.name,
        "prefill",
        device,
        kernels="sm90" if shard.kernels else "reference",
        time_us=seconds * 1e6,
        bound_us=max(traffic.bytes / ceiling.bytes_per_second, traffic.flops / flops) * 1e6,
        tokens=chunk,
        context=context,
        slots=SLOTS,
        planned_bytes=case.planned.total,
        planned_step_bytes=case.planned.step,
        peak_bytes=taken,
        peak_by="the allocator" if stats else "the compiler",
        compiled_bytes=compiled,
        error=round(case.planned.total / taken - 1, 4),
        **ceiling.fields(),  # pyright: ignore[reportArgumentType]
    )


def compiled_bytes(case: Case) -> int:
    """What the compiler says of the largest step: its arguments, what it makes beside them, what it takes on the way."""
    shard, shapes = case.shard, Shapes.of(case.shape, case.chunk)
    programs, context = shard.programs, shapes.contexts[-1]

    def placed(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(programs.mesh, spec))

    leaves = list(map(placed, shard.arguments, programs.weight_specs))
    state = shard.abstract_state(case.shape)
    state = jax.tree.map(placed, state, state_specs(state))

    def chunk_of(tokens: int) -> Any:
        places = next(size for size in shapes.chunks if size >= tokens)
        return pack_chunk([(0, (1,) * tokens, 0, True)], {"global": [], "local": []}, case.shape, places)

    sampling = Sampling(*SAMPLINGS[0], banned=())
    lowered = [programs.prefill.lower(leaves, state, chunk_of(case.chunk), context=context, sampling=sampling)]
    if case.scored:
        lowered.append(programs.score.lower(leaves, state, chunk_of(case.scored), context=context, trace=False))
    plans = [program.compile().memory_analysis() for program in lowered]
    return max(
        plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        for plan in plans
    )


def _first_token(engine: Engine, tokens: int) -> float:
    """Seconds from a prompt of so many tokens to its first token."""
    begun = time.perf_counter()
    engine.add(Request((1,) * tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
    for _ in engine.run():
        pass
    return time.perf_counter() - begun
