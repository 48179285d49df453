"""`bench expert_matmul`: the routed feed-forward of a layer from cold weights, beside what the chip can do, and other ways to
compute it.

The bound is packed bytes of the experts that are hit over read bandwidth, or operations over XLA's largest product, whichever
takes longer. All token counts of a shape share its weights, and the first tokens of one routing.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from inkling_jax.benchmarks import expert_rivals
from inkling_jax.benchmarks.ceilings import matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.table import print_table
from inkling_jax.benchmarks.timing import series_seconds
from inkling_jax.errors import InputError
from inkling_jax.kernels.expert_matmul import cases, reference, sm90
from inkling_jax.kernels.expert_matmul.cases import Case
from inkling_jax.kernels.expert_matmul.nvfp4 import Nvfp4
from inkling_jax.kernels.expert_matmul.pack import Packed, pack
from inkling_jax.kernels.expert_matmul.sm90 import Regime

COLD_BYTES = 200e6  # read between two calls that may hit the same expert: several times the cache
MOST_CALLS = 24
CHECKED = 64  # tokens whose results are compared with the reference
DECODE = Regime("decode", 8)
# What `--variants` may name beside "sm90", the product's own choice.
VARIANTS: dict[str, Regime | None] = {
    "sm90": None,
    "d8": DECODE,
    "d16": Regime("decode", 16),
    "d8-lag0": DECODE._replace(tuning=(("behind", 0),)),
    "d8-lag2": DECODE._replace(tuning=(("behind", 2),)),
    "d8-thin": DECODE._replace(tuning=(("steps", (1,)), ("behind", 3))),
    "d8-split4": DECODE._replace(tuning=(("splits", (4, 2, 1)),)),
    "d8-split2": DECODE._replace(tuning=(("splits", (2, 1, 4)),)),
    "d8-split1": DECODE._replace(tuning=(("splits", (1, 2, 4)),)),
    "three": DECODE._replace(launches=3),
    "b32": Regime("batch", 32),
    "b64": Regime("batch", 64),
    "b256": Regime("batch", 256),
    "b256-pair": Regime("batch", 256, cluster=2),
}

logger = logging.getLogger(__name__)


class Ceilings(NamedTuple):
    """Of this run."""

    read: float  # bytes a second
    matmul: float  # operations a second
    fields: dict[str, Any]


class Given(NamedTuple):
    """What all token counts of a shape share."""

    x: jax.Array
    experts: jax.Array  # of several calls
    weights: jax.Array
    unpacked: tuple[Nvfp4 | jax.Array, Nvfp4 | jax.Array]
    packed: tuple[Packed, Packed]
    expected: np.ndarray  # of the first tokens and the first call


def run(args: argparse.Namespace) -> int:
    """Measure every case that is asked for, keep its rows at once, and print them."""
    deadline = time.monotonic() + args.time_limit
    device = jax.devices()[0]
    groups = list_cases(args.cases, args.tokens)
    wrong = [name for name in args.variants if name not in VARIANTS]
    if wrong:
        raise InputError(f"--variants {','.join(wrong)}: expected of {', '.join(VARIANTS)}")
    if device.platform != "gpu":
        raise InputError("bench expert_matmul measures the kernels for Hopper GPUs; jax finds none")
    read = read_ceiling(device)
    ceilings = Ceilings(read.bytes_per_second, matmul_ceiling(device), read.fields())
    rows: list[Row] = []
    for group in groups:
        for row in measure_shape(group, args, ceilings, deadline):
            save_rows(Path(args.output), [row])
            print(json.dumps(row), flush=True)
            rows.append(row)
    print_table(rows, {"kernels": "kernels", "kernels_us": "kernels us", "experts_hit": "hit", "rel_err": "error"})
    return 0


def list_cases(words: list[str], tokens: list[int]) -> list[list[Case]]:
    """The cases whose names contain one of `words` (all by default) and have so many tokens (any), by the weights they share."""
    groups: dict[str, list[Case]] = {}
    for case in cases.BENCH:
        if (not words or any(word in case.name for word in words)) and (not tokens or case.tokens in tokens):
            shape = f"{case.width} {case.hidden} {case.held} {case.routed == case.held} {case.packed}"
            groups.setdefault(shape, []).append(case)
    if not groups:
        raise InputError(f"no case is called {' or '.join(words)}: they are {', '.join(c.name for c in cases.BENCH[:3])}, ...")
    return list(groups.values())


def measure_shape(group: list[Case], args: argparse.Namespace, ceilings: Ceilings, deadline: float) -> Iterator[Row]:
    """The rows of cases that share weights: the kernels' first, then the rivals'. None begins after the deadline."""
    start = time.monotonic()
    if start > deadline:
        logger.warning("the time is over before %s", group[0].name)
        return
    given = prepare(max(group, key=lambda case: case.tokens))
    logger.info("%s: weights after %.1f s", group[0].name, time.monotonic() - start)
    measures: list[tuple[Case, str, Callable]] = [(case, name, measure) for case in group for name in args.variants]
    if args.rivals:
        measures += [(case, name, measure_rival) for case in group for name in expert_rivals.NAMES]
    for case, name, take in measures:
        if time.monotonic() > deadline:
            logger.warning("the time is over before %s, %s", case.name, name)
            return
        try:
            yield take(case, name, given, ceilings, args.detail)
        except Exception as error:  # one that fails must not take the others' rows with it
            traceback.print_exc(limit=3)
            print(json.dumps({"case": case.name, "kernels": name, "error": str(error)[:300]}), flush=True)


def prepare(case: Case) -> Given:
    """Weights and routings for so many tokens and fewer."""
    unpacked = cases.weights_of(case, 0)
    packed = tuple(pack(weight, case.name) for weight in unpacked)
    routings = [cases.routing(case, seed) for seed in range(MOST_CALLS)]
    x = jax.random.normal(jax.random.key(1), (case.tokens, case.width), jnp.bfloat16)
    experts, weights = jnp.stack([r[0] for r in routings]), routings[0][1]
    with jax.default_matmul_precision("highest"):
        want = reference.expert_matmul(x[:CHECKED].astype(jnp.float32), experts[0, :CHECKED], weights[:CHECKED], *unpacked)
    return Given(x, experts, weights, unpacked, packed, np.asarray(want))  # pyright: ignore[reportArgumentType]


def hit(case: Case, experts: np.ndarray) -> tuple[float, float, int]:
    """Experts hit a call and rows a call, on average, and the most rows of one expert."""
    lists = [e[e < case.held] for e in experts]
    most = max(int(np.bincount(e, minlength=1).max(initial=0)) for e in lists)
    return float(np.mean([len(np.unique(e)) for e in lists])), float(np.mean([e.size for e in lists])), most


def calls_of(case: Case, hits: float) -> int:
    """How many calls, each with a routing of its own, read more than the cache holds."""
    if case.phase == "prefill":
        return 2
    return int(min(MOST_CALLS, max(4, math.ceil(COLD_BYTES / max(1.0, hits * expert_bytes(case))))))


def expert_bytes(case: Case) -> float:
    """Of the weights of an expert, their block scales included."""
    return 3 * case.width * case.hidden * (9 / 16 if case.packed else 2)


def bound_us(case: Case, hits: float, rows: float, ceilings: Ceilings) -> float:
    """The least time of a call."""
    operations = rows * 6 * case.width * case.hidden
    return max(hits * expert_bytes(case) / ceilings.read, operations / ceilings.matmul) * 1e6


def measure(case: Case, name: str, given: Given, ceilings: Ceilings, detail: bool) -> Row:
    """A variant's row: error and bits of one call, the median time of a call in a chain, and that of its kernels alone."""
    how = VARIANTS[name] or sm90.regime(case.tokens, case.choices, case.routed)
    moe = functools.partial(sm90.run, how=how, processors=sm90.processors())
    x, experts, weights = given.x[: case.tokens], given.experts[:, : case.tokens], given.weights[: case.tokens]
    results = [np.asarray(moe(x, experts[0], weights, *given.packed)) for _ in range(3)]
    want = given.expected[: case.tokens]
    difference = results[0][: len(want)].astype(np.float32) - want
    hits, _, _ = hit(case, np.asarray(experts))
    calls = calls_of(case, hits)
    hits, rows, most = hit(case, np.asarray(experts[:calls]))
    f, arguments = expert_rivals.chain(moe), (x, experts[:calls], weights, *given.packed)
    fields = {
        "tokens": case.tokens,
        "experts": case.held,
        "experts_hit": round(hits, 1),
        "most_rows": most,
        "regime": f"{how.kernel} {how.rows}",
        "calls": calls,
        "rel_err": round(float(np.linalg.norm(difference) / max(float(np.linalg.norm(want)), 1e-30)), 6),
        "same_bits": all((r == results[0]).all() for r in results),
        "kernels_us": round(kernels_us(f, *arguments) / calls, 2),
        **({"parts_us": parts(f, calls, *arguments)} if detail else {}),
        "matmul_tflops": round(ceilings.matmul / 1e12, 1),
    }
    return _row(
        "expert_matmul", case, name, chain_us(f, calls, *arguments), bound_us(case, hits, rows, ceilings), fields, ceilings
    )


def measure_rival(case: Case, name: str, given: Given, ceilings: Ceilings, _detail: bool) -> Row:
    """A rival's row, against the kernels' bound: it computes the same from the weights that it likes best."""
    x, experts, weights = given.x[: case.tokens], given.experts[:, : case.tokens], given.weights[: case.tokens]
    calls = calls_of(case, hit(case, np.asarray(experts))[0])
    hits, rows, most = hit(case, np.asarray(experts[:calls]))
    f, arguments = expert_rivals.prepare(name, case, x, experts[:calls], weights, given.unpacked, round(hits), most)
    fields = {"tokens": case.tokens, "experts": case.held, "experts_hit": round(hits, 1), "calls": calls}
    time_us = chain_us(f, calls, *arguments)
    return _row("expert_matmul_rival", case, name, time_us, bound_us(case, hits, rows, ceilings), fields, ceilings)


def _row(bench: str, case: Case, name: str, time_us: float, bound: float, fields: dict, ceilings: Ceilings) -> Row:
    device = jax.devices()[0]
    return make_row(
        bench, case.name, case.phase, device, kernels=name, time_us=time_us, bound_us=bound, **fields, **ceilings.fields
    )


def chain_us(f: Callable, calls: int, *arguments: Any) -> float:
    """Microseconds a call, the median of a few runs of a chain."""
    call = functools.partial(f, *arguments)
    jax.block_until_ready(call())
    return statistics.median(series_seconds(call, 3, 7, limit_s=2.0)) * 1e6 / calls


def kernels_us(f: Callable, *arguments: Any) -> float:
    """Microseconds of all kernels that a chain launches, the median of a few runs."""
    _, times = profiler.measure(f, iterations=5)(*arguments)
    assert times is not None, "no kernel was launched"
    return statistics.median(times) * 1e3


def parts(f: Callable, calls: int, *arguments: Any) -> dict[str, float]:
    """Microseconds a call of a chain by kernel, the longest first."""
    _, runs = profiler.measure(f, aggregate=False, iterations=3)(*arguments)
    assert runs is not None, "no kernel was launched"
    sums: dict[str, float] = {}
    for kernel, milliseconds in runs[1]:
        sums[kernel] = sums.get(kernel, 0.0) + milliseconds * 1e3 / calls
    return {name[-60:]: round(value, 2) for name, value in sorted(sums.items(), key=lambda item: -item[1])[:8]}
