"""Times of the routed feed-forward against what the chip can do: packed bytes over read bandwidth, operations over cuBLAS.

Run as `python -m inkling_jax.benchmarks.expert_matmul --cases SUBSTRING ...`. Ceilings are measured in the same process.
"""

from __future__ import annotations

import argparse
import functools
import json
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from inkling_jax.benchmarks.ceilings import matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row
from inkling_jax.benchmarks.timing import best_seconds
from inkling_jax.kernels.expert_matmul import cases, reference, sm90
from inkling_jax.kernels.expert_matmul.cases import Case
from inkling_jax.kernels.expert_matmul.pack import Packed, pack

CALLS = 8  # in one program, each with a routing of its own, so that weights come from memory and not from the cache
DECODE = {"kernel": "decode", "rows": 8}
VARIANTS: dict[str, dict] = {
    "auto": {},
    "d8": DECODE,
    "d16": DECODE | {"rows": 16},
    "d8-lag0": DECODE | {"tuning": (("behind", 0),)},
    "d8-lag2": DECODE | {"tuning": (("behind", 2),)},
    "d8-thin": DECODE | {"tuning": (("steps", (1,)), ("behind", 3))},
    "d8-split4": DECODE | {"tuning": (("splits", (4, 2, 1)),)},
    "d8-split1": DECODE | {"tuning": (("splits", (1, 2, 4)),)},
    "three": DECODE | {"launches": 3},
    "b32": {"kernel": "batch", "rows": 32},
    "b64": {"kernel": "batch", "rows": 64},
    "b256": {"kernel": "batch", "rows": 256},
    "b256-pair": {"kernel": "batch", "rows": 256, "cluster": 2},
}


def kernel_times(f: Callable, *args: Any, iterations: int = 10) -> list[float]:
    """Microseconds of the kernels that each of some runs launches, summed."""
    _, times = profiler.measure(f, iterations=iterations)(*args)
    assert times is not None, "no kernel was launched"
    return [t * 1e3 for t in times]


def chain(moe: Callable) -> Callable:
    """CALLS calls, each after the one before: its routing is a sum with something that is always zero of the last result."""

    def f(x: Any, experts: Any, weights: Any, w13: Packed, w2: Packed) -> Any:
        zero = jnp.zeros((), jnp.int32)
        for i in range(CALLS):
            y = moe(x, experts[i] + zero, weights, w13, w2)
            zero = (y[0, 0] > 1e30).astype(jnp.int32)
        return y

    return jax.jit(f)


def hit(case: Case, experts: Any) -> tuple[float, int]:
    """Experts hit a call, on average, and the most rows of one expert."""
    lists = [np.asarray(e)[np.asarray(e) < case.held] for e in experts]
    return float(np.mean([len(np.unique(e)) for e in lists])), max(int(np.bincount(e, minlength=1).max(initial=0)) for e in lists)


def measure(case: Case, variants: dict[str, dict], ceilings: dict[str, Any], detail: bool) -> list[Row]:
    """A row for each variant: error of one call, time of kernels and of the whole a call of a chain, and the bound."""
    given = cases.inputs(case)
    packed = [pack(w, case.name) for w in (given["w13"], given["w2"])]
    routings = jnp.stack([cases.routing(case, seed)[0] for seed in range(CALLS)])
    with jax.default_matmul_precision("highest"):
        x, *rest = given.values()
        want = np.asarray(reference.expert_matmul(x.astype(jnp.float32), *rest))
    hits, rows = hit(case, routings)
    expert_bytes = 3 * case.width * case.hidden * (9 / 16 if case.packed else 2)
    total = float(np.mean([(np.asarray(e) < case.held).sum() for e in routings]))
    read_us = hits * expert_bytes / ceilings["read"] * 1e6
    bound = max(read_us, total * 6 * case.width * case.hidden / ceilings["matmul"] * 1e6)
    found = []
    for name, options in variants.items():
        chosen = options or sm90.regime(case.tokens * case.choices / case.routed)

        def moe(*args: Any, options: dict = chosen) -> Any:
            return sm90.run(*args, processors=sm90.processors(), **options)

        try:
            args = (given["x"], given["experts"], given["weights"], *packed)
            got, again = (np.asarray(moe(*args)).astype(np.float32) for _ in range(2))
            f, args = chain(moe), (given["x"], routings, given["weights"], *packed)
            fields: dict[str, Any] = {
                "tokens": case.tokens,
                "kernel": f"{chosen['kernel']} {chosen['rows']}",
                "experts": case.held,
                "experts_hit": round(hits, 1),
                "most_rows": rows,
                "rel_err": round(float(np.linalg.norm(got - want) / np.linalg.norm(want)), 6),
                "same_bits": bool((got == again).all()),
                "kernels_us": round(float(np.median(kernel_times(f, *args))) / CALLS, 2),
                "matmul_tflops": round(ceilings["matmul"] / 1e12, 1),
                **ceilings["fields"],
            }
            if detail:
                fields["parts_us"] = parts(f, *args)
            time_us = best_seconds(functools.partial(f, *args)) * 1e6 / CALLS
            row = make_row(
                "expert_matmul",
                case.name,
                case.phase,
                jax.devices()[0],
                kernels=name,
                time_us=time_us,
                bound_us=bound,
                **fields,
            )
            found.append(row)
            print(json.dumps(row), flush=True)
        except Exception as error:  # one variant that fails must not take the others' rows with it
            traceback.print_exc(limit=3)
            print(json.dumps({"case": case.name, "kernels": name, "error": str(error)[:400]}), flush=True)
    return found


def parts(f: Callable, *args: Any) -> dict[str, float]:
    """Microseconds a call of the chain by kernel, the longest first."""
    _, runs = profiler.measure(f, aggregate=False, iterations=3)(*args)
    assert runs is not None, "no kernel was launched"
    sums: dict[str, float] = {}
    for kernel, milliseconds in runs[1]:
        sums[kernel] = sums.get(kernel, 0.0) + milliseconds * 1e3 / CALLS
    return {name[-60:]: round(value, 2) for name, value in sorted(sums.items(), key=lambda item: -item[1])[:8]}


def main() -> None:
    """Measure the cases whose names contain any of the given words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", required=True, help="parts of case names, e.g. D4096-F2048-E32of256-T8-")
    parser.add_argument("--variants", nargs="+", default=["auto"], choices=list(VARIANTS))
    parser.add_argument("--detail", action="store_true", help="also the time of each kernel")
    options = parser.parse_args()
    device = jax.devices()[0]
    read = read_ceiling(device)
    ceilings = {"read": read.bytes_per_second, "fields": read.fields(), "matmul": matmul_ceiling(device)}
    for case in (*cases.BENCH, *cases.SMALL):
        if any(word in case.name for word in options.cases):
            measure(case, {name: VARIANTS[name] for name in options.variants}, ceilings, options.detail)


if __name__ == "__main__":
    main()
