"""`bench serve`: one rank of a real shape, random weights, under synthetic traffic through the engine as it serves.

For each number of requests at once two things are measured. *Decode*: all of them decode, and the engine steps; the same calls
are then repeated one behind another with nothing between, which is the time that the device needs; what the engine took beyond
that the device waited for the host. *Traffic*: requests come, wait, are read and answered, and each is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import jax
import numpy as np

from inkling_jax.benchmarks.arrivals import Arrival, Traffic, draw
from inkling_jax.benchmarks.ceilings import ReadCeiling, read_ceiling
from inkling_jax.benchmarks.replay import record, replay_seconds
from inkling_jax.benchmarks.rows import make_row, save_rows
from inkling_jax.benchmarks.shard import Shard, open_shard
from inkling_jax.benchmarks.table import print_table
from inkling_jax.benchmarks.traffic import step_traffic
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.shapes import Shapes
from inkling_jax.engine.warmup import warm_up
from inkling_jax.errors import InklingError, InputError
from inkling_jax.memory import most_positions

CALLS = 12  # of decode that are measured
PERCENTILES = (50, 90, 99)
PREFIX_BYTES = 1 << 30

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Measure at every concurrency, keep its row at once, and print them all."""
    start = time.monotonic()
    device = jax.devices()[0]
    traffic = Traffic(args.prompt, args.answer, args.rate, args.shared, args.prefix, args.seed)
    shard = open_shard(args.model or args.preset, args.rank_of, args.layers, args.kernels, args.page_size, args.kv_dtype)
    shard = dataclasses.replace(shard, deterministic=args.deterministic)
    # where no prompts are to begin alike none shall: a prompt of one measurement may come again in another
    kept = PREFIX_BYTES if traffic.shared else 0
    options = EngineOptions(args.chunk, args.tokens_per_call, deterministic=args.deterministic, prefix_bytes=kept)
    shape = cache_shape(shard, traffic, max(args.concurrency), options, args.page_size)
    shard.check_memory(shard.abstract_state(shape), device)
    ceiling = read_ceiling(device)
    logger.info("reads reach %.0f GB/s (%s)", ceiling.bytes_per_second / 1e9, ceiling.method)
    shapes = Shapes.of(shape, options.chunk, bounded=not shard.kernels, single=True)
    if not args.deterministic:
        shapes = dataclasses.replace(shapes, rows=tuple(sorted(set(args.concurrency))))
    engine = shard.engine(shard.random_leaves(), shape, options, shapes)
    logger.info("%s: weights of %.1f GB after %.1f s", shard.name, shard.weight_bytes / 1e9, time.monotonic() - start)
    programs = warm_up(engine, samplings=engine.samplings[:1], quiet=args.quiet)
    rows = []
    for number, most in enumerate(args.concurrency):
        if time.monotonic() - start > args.time_limit:
            logger.warning("%.0f s are over: not measured at %d and what follows", args.time_limit, most)
            break
        before, first = dataclasses.replace(engine.prefix_statistics), traffic.seed + 2 * number
        fields = measure_decode(shard, engine, dataclasses.replace(traffic, seed=first + 1), most, ceiling)
        arrivals = draw(dataclasses.replace(traffic, seed=first), args.requests or 2 * most, engine.vocab)
        fields |= measure_traffic(engine, arrivals, most, traffic.rate is not None)
        fields["reused_tokens"] = engine.prefix_statistics.reused - before.reused
        fields |= ceiling.fields()
        row = make_row(
            "serve",
            f"{shard.name} concurrency={most} {traffic}{' deterministic' if args.deterministic else ''}",
            "decode",
            device,
            kernels="sm90" if shard.kernels else "reference",
            rank_of=shard.mesh,
            layers=shard.config.num_layers,
            concurrency=most,
            chunk=options.chunk,
            page_size=args.page_size,
            kv="fp8" if shard.fp8 else "bf16",
            programs=programs,
            **fields,
        )
        save_rows(Path(args.output), [row])
        rows.append(row)
        logger.info(
            "%d at once: %.0f us a step, %.0f%% of the bound, %.1f%% waiting for the host; %.0f tokens/s under traffic",
            most, row["time_us"], 100 * row["ratio"], 100 * row["host_share"], row["output_tokens_per_s"],
        )  # fmt: skip
    print_table(
        rows, {"decode_tokens_per_s": "tokens/s", "host_share": "waits", "ttft_p50_ms": "TTFT ms", "tpot_p50_ms": "TPOT ms"}
    )
    return 0 if rows else 1


def cache_shape(shard: Shard, traffic: Traffic, slots: int, options: EngineOptions, page_size: int) -> Any:
    """A cache in which every slot has room for the longest sequence, or for the calls that are measured."""
    context = max(traffic.longest, traffic.prompt[1] + tokens_decoded(traffic, slots, options))
    if context > shard.config.max_context:
        raise InputError(f"prompts and answers of up to {context} tokens: the model's context is {shard.config.max_context}")
    return shard.cache_shape(slots, context, most_positions(options), page_size)


def tokens_decoded(traffic: Traffic, most: int, options: EngineOptions) -> int:
    """The most that a sequence makes while `most` of them are measured, those during which the others are read included."""
    return options.tokens_per_call * (CALLS + 4 + -(-most * traffic.prompt[1] // options.chunk))


def measure_decode(shard: Shard, engine: Engine, traffic: Traffic, most: int, ceiling: ReadCeiling) -> dict[str, Any]:
    """Fields of a row: `most` sequences decode; the time of a step, its bound, and the share that the device waits in."""
    steps = engine.options.tokens_per_call
    endless = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens_decoded(traffic, most, engine.options))
    arrivals = draw(traffic, most, engine.vocab)
    made = {engine.add(Request(arrival.prompt_ids, endless)): 0 for arrival in arrivals}
    while not all(made.values()):
        _count(engine, made)
    with record(engine) as calls:
        _count(engine, made)  # so that a call runs when the clock starts, as one does when it stops
        before = time.perf_counter()
        for _ in range(CALLS):
            _count(engine, made)
        seconds = (time.perf_counter() - before) / CALLS
    lengths = [len(a.prompt_ids) + tokens for a, tokens in zip(arrivals, made.values(), strict=True)]
    device_seconds = replay_seconds(engine, calls)
    for request_id in made:
        engine.cancel(request_id)
    while engine.busy:
        engine.step()
    least = step_traffic(shard.leaves, shard.config, shard.sizes, rows=most, queries=1, contexts=lengths, fp8=shard.fp8)
    return {
        "time_us": seconds / steps * 1e6,
        "bound_us": least.bytes / ceiling.bytes_per_second * 1e6,
        "device_us": round(device_seconds / steps * 1e6, 3),
        "host_share": round(max(0.0, 1 - device_seconds / seconds), 4),
        "decode_tokens_per_s": round(most * steps / seconds, 1),
        "tokens_per_call": steps,
        "context": round(float(np.mean(lengths))),
        "bytes": round(least.bytes),
    }


def _count(engine: Engine, made: dict[int, int]) -> None:
    for output in engine.step():
        made[output.request_id] += len(output.token_ids)
        if output.finish_reason is not None:
            raise InklingError(f"a sequence ended while it was measured: {output.error or output.finish_reason}")


@dataclasses.dataclass
class _Timed:
    """A request and when it had its tokens, in seconds after the start."""

    arrived: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def measure_traffic(engine: Engine, arrivals: list[Arrival], most: int, timed: bool) -> dict[str, Any]:
    """Fields of a row: at most `most` at once; `timed`: each comes at its time, else when there is room."""
    waiting, running, done = deque(arrivals), dict[int, _Timed](), list[_Timed]()
    start = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - start
        while waiting and len(running) < most and (not timed or waiting[0].at <= now):
            arrival = waiting.popleft()
            params = SamplingParams(temperature=1.0, seed=len(done), ignore_eos=True, max_tokens=arrival.max_tokens)
            running[engine.add(Request(arrival.prompt_ids, params))] = _Timed(arrival.at if timed else now)
        if not running:
            time.sleep(waiting[0].at - now)
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            request = running[output.request_id]
            if output.token_ids:
                request.first, request.last = request.first or now, now
                request.tokens += len(output.token_ids)
            if output.error:
                raise InklingError(f"a request failed: {output.error}")
            if output.finish_reason is not None:
                done.append(running.pop(output.request_id))
    seconds, tokens = time.perf_counter() - start, sum(request.tokens for request in done)
    several = [request for request in done if request.tokens > 1]
    return {
        "requests": len(done),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(done) / seconds, 2),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "total_tokens_per_s": round((tokens + sum(len(arrival.prompt_ids) for arrival in arrivals)) / seconds, 1),
        **_percentiles("ttft", [request.first - request.arrived for request in done]),
        **_percentiles("tpot", [(request.last - request.first) / (request.tokens - 1) for request in several]),
    }


def _percentiles(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Milliseconds by name and percentile; None where there is nothing."""
    return {f"{name}_p{p}_ms": round(float(np.percentile(seconds, p)) * 1e3, 2) if seconds else None for p in PERCENTILES}
