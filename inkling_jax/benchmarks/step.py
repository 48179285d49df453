"""`bench step`: decode and prefill steps of one rank of a real shape, random weights, beside the bound of what they must read."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.benchmarks.ceilings import ReadCeiling, matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.shard import Shard, open_shard
from inkling_jax.benchmarks.table import print_table
from inkling_jax.benchmarks.timing import Activity, device_activity, series_seconds
from inkling_jax.benchmarks.traffic import Traffic, step_traffic
from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.pack import pack_updates
from inkling_jax.engine.state import EngineState
from inkling_jax.engine.steps import Chunk, Sampling
from inkling_jax.errors import InklingError, InputError

SERIES_TOKENS = 16  # decoded between two looks at the clock, at least
REPEATS, LIMIT_S = 5, 4.0  # series of a case, unless they take longer
GREEDY = Sampling("greedy", None, ())

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to measure. In a decode case every row has `context` tokens at the end of a series of calls."""

    phase: str  # "decode" or "prefill"
    batch: int
    context: int
    queries: int  # tokens a row and step
    steps: int  # a call
    page_size: int

    @property
    def calls(self) -> int:
        """Calls of a series."""
        return max(2, -(-SERIES_TOKENS // self.steps))

    @property
    def contexts(self) -> range:
        """Lengths that the steps of a series see, their own token included."""
        taken = self.calls * self.steps if self.phase == "decode" else 1
        return range(self.context - taken + 1, self.context + 1)

    def __str__(self) -> str:
        steps = f" steps={self.steps}" if self.phase == "decode" else ""
        return f"{self.phase} batch={self.batch} context={self.context}{steps}"


class Stepper:
    """A compiled step with its arguments: calling it takes the step and keeps the state for the next."""

    def __init__(self, case: Case, program: Any, leaves: list[jax.Array], state: EngineState):
        self.case, self.program, self.leaves, self.state, self.inputs = case, program, leaves, state, _inputs(case)
        self.vocab = state.sampler.prompt_seen.shape[1]

    def __call__(self) -> Any:
        sampled, self.state = self.program(self.leaves, self.state, self.inputs)
        return sampled

    def rewind(self) -> jax.Array:
        """Put every row back to where a series begins, with a token of its own. New arrays: the last ones were donated."""
        rows = self.state.length.shape[0]
        live = np.arange(rows) < rows - 1
        tokens = np.random.default_rng(0).integers(0, self.vocab, rows)
        self.state = dataclasses.replace(
            self.state,
            last_token=jnp.asarray(tokens, jnp.int32),
            length=jnp.asarray(np.where(live, self.case.contexts[0] - 1, 0), jnp.int32),
            live=jnp.asarray(live),
        )
        return self.state.length

    def check(self) -> None:
        """Raise InklingError unless a call gives every row a token from finite logits."""
        self.rewind()
        sampled = self()
        if not bool((sampled.emitted & sampled.result.finite).all()):
            raise InklingError(f"{self.case}: a row made no token or its logits are not finite, so a time would mean nothing")


def run(args: argparse.Namespace) -> int:
    """Measure every case, keep its row at once, and print them all."""
    device = jax.devices()[0]
    shard = open_shard(args.model or args.preset, args.rank_of, args.layers, args.kernels, args.page_size, args.kv_dtype)
    cases = list_cases(args, shard)
    for case in cases:
        shard.check_memory(shard.abstract_state(_shape(shard, case)), device)
    ceiling = read_ceiling(device)
    logger.info("reads reach %.0f GB/s (%s)", ceiling.bytes_per_second / 1e9, ceiling.method)
    flops = matmul_ceiling(device) if args.prefill else None
    start = time.monotonic()
    leaves = shard.random_leaves()
    logger.info("%s: %.1f GB of weights in %.1f s", shard.name, shard.weight_bytes / 1e9, time.monotonic() - start)
    rows = []
    for case, program in zip(cases, compile_cases(shard, cases), strict=True):
        stepper = Stepper(case, program, leaves, shard.random_state(_shape(shard, case)))
        row = measure(shard, stepper, device, ceiling, flops)
        del stepper  # and its state, before the next one is made
        logger.info("%s: %.0f us, %.0f%% of the bound", case, row["time_us"], 100 * row["ratio"])
        save_rows(Path(args.output), [row])
        rows.append(row)
    print_table(rows, {"launches": "kernels", "experts": "experts", "bytes": "bytes"})
    return 0


def list_cases(args: argparse.Namespace, shard: Shard) -> list[Case]:
    """Decode at every batch and context, then prefill; each is a program of its own. Raises InputError for impossible sizes."""
    pages, steps = args.page_size, args.steps_per_call
    if pages & (pages - 1):
        raise InputError(f"--page-size {pages}: not a power of two")
    cases = [Case("decode", batch, context, 1, steps, pages) for context in args.context for batch in args.batch]
    cases += [Case("prefill", 1, tokens, tokens, 1, pages) for tokens in args.prefill]
    for case in cases:
        if case.contexts[0] < 1:
            raise InputError(f"context {case.context}: a series decodes {len(case.contexts)} tokens, so at least that many")
        if case.context > shard.config.max_context:
            raise InputError(f"context {case.context}: the model's is {shard.config.max_context}")
    return cases


def compile_cases(shard: Shard, cases: list[Case]) -> list[Any]:
    """Each case's compiled program. They compile side by side, while this thread lowers the next one."""
    start = time.monotonic()
    logger.info("%d programs to compile", len(cases))
    with concurrent.futures.ThreadPoolExecutor(min(len(cases), os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_lower(shard, case).compile) for case in cases]
        lowered = time.monotonic() - start
        programs = [future.result() for future in futures]
    logger.info("lowered in %.1f s, compiled after %.1f s", lowered, time.monotonic() - start)
    return programs


def measure(shard: Shard, stepper: Stepper, device: Any, ceiling: ReadCeiling, flops: float | None) -> Row:
    """The row of one case: the median time of a step, and the least time that its bytes and operations take.

    `flops` are the operations a second of the device, for prefill.
    """
    case = stepper.case
    stepper.check()  # and warm up
    seconds = series_seconds(stepper, case.calls, REPEATS, stepper.rewind, LIMIT_S)
    stepper.rewind()
    activity = device_activity(stepper, device)
    work = {"rows": case.batch, "queries": case.queries, "contexts": case.contexts}
    traffic = step_traffic(shard.leaves, shard.config, shard.sizes, **work, fp8=shard.fp8)
    bound = traffic.bytes / ceiling.bytes_per_second
    fields: dict[str, Any] = _traffic_fields(traffic) | ceiling.fields()
    if case.phase == "prefill" and flops is not None:
        bound = max(bound, traffic.flops / flops)
        fields |= {"flops": round(traffic.flops), "ceiling_tflops": round(flops / 1e12, 1)}
    return make_row(
        "step",
        f"{shard.name} {case}",
        case.phase,
        device,
        kernels="sm90" if shard.kernels else "reference",
        time_us=statistics.median(seconds) * 1e6 / case.steps,
        bound_us=bound * 1e6,
        batch=case.batch,
        context=case.context,
        tokens=case.batch * case.queries,
        layers=shard.config.num_layers,
        rank_of=shard.mesh,
        steps_per_call=case.steps,
        page_size=case.page_size,
        kv="fp8" if shard.fp8 else "bf16",
        repeats=len(seconds),
        launches=round(activity.launches / case.steps, 1) if activity else None,
        busy_us=round(activity.seconds * 1e6 / case.steps, 1) if activity else None,
        parts_us=_parts(activity, case.steps) if activity else None,
        memory_bytes=_memory(stepper.program),
        **fields,
    )


def _parts(activity: Activity, steps: int) -> dict[str, float]:
    """Microseconds a step of the kernels that take longest, "name xN" for N launches a step."""
    return {f"{name} x{n / steps:g}": round(spent * 1e6 / steps, 1) for name, (n, spent) in activity.longest.items()}


def _traffic_fields(traffic: Traffic) -> dict[str, Any]:
    return {
        "bytes": round(traffic.bytes),
        "weight_bytes": round(traffic.weight_bytes),
        "expert_bytes": round(traffic.expert_bytes),
        "kv_bytes": round(traffic.kv_bytes),
        "conv_bytes": round(traffic.conv_bytes),
        "experts": round(traffic.experts, 1),
    }


def _memory(program: Any) -> int | None:
    """Device memory of a step: what it is given, what it makes beside that, and its temporaries."""
    stats = program.memory_analysis()
    if stats is None:
        return None
    return stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes


def _shape(shard: Shard, case: Case) -> CacheShape:
    return shard.cache_shape(case.batch, case.context, max(case.queries, case.steps), case.page_size)


def _lower(shard: Shard, case: Case) -> Any:
    arguments = (shard.arguments, shard.abstract_state(_shape(shard, case)), _inputs(case))
    if case.phase == "prefill":
        return shard.programs.prefill.lower(*arguments, context=case.context, sampling=GREEDY)
    return shard.programs.decode.lower(*arguments, context=case.context, sampling=GREEDY, steps=case.steps)


def _inputs(case: Case) -> Any:
    """What a step takes besides weights and state. The page tables are complete, so their updates are all padding."""
    nothing = pack_updates({"global": [], "local": []}, case.batch * (case.queries // case.page_size + 2))
    updates = jax.tree.map(jnp.asarray, nothing)
    slots = jnp.arange(case.batch, dtype=jnp.int32)
    if case.phase == "decode":
        return slots, updates
    ids = jnp.arange(case.queries, dtype=jnp.int32) % 256  # different tokens, in any vocabulary
    rows = jnp.full(1, case.queries, jnp.int32)
    return Chunk(ids, slots, rows, rows, jnp.zeros(1, bool), jnp.ones(1, bool), updates)
