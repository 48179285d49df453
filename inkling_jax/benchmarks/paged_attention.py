"""Times of paged attention against what the chip can do: bytes of keys and values over read bandwidth, operations over cuBLAS.

`python -m inkling_jax.benchmarks.paged_attention --check --time WORD ...`. Each variant runs in a process of its own with a time
limit, since a kernel that hangs or faults takes its process with it; ceilings come from a process of the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.benchmarks.ceilings import matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.benchmarks.timing import best_seconds
from inkling_jax.kernels.paged_attention import cases, sm90
from inkling_jax.kernels.paged_attention.bias import prepare_bias
from inkling_jax.kernels.paged_attention.cases import Case
from inkling_jax.kernels.paged_attention.plan import plan_decode

ROTATED_BYTES = 400e6  # read between two calls on the same pages, so that they come from memory and not from the cache
BASE_PAGES = 256  # random pages that a pool repeats
VARIANTS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "plain-launch": {"overlap_merge": False},
    "run1": {"shortest": 1},
    "run4": {"shortest": 4},
    "run8": {"shortest": 8},
}


def variant_call(case: Case, shortest: int = sm90.SHORTEST_RUN, **options: Any) -> tuple[Callable, Callable]:
    """The plan of a step and the attention of a layer that a variant makes of a case."""

    def plan(start: Any, count: Any, length: Any) -> Any:
        return plan_decode(
            start,
            count,
            length,
            tokens=len(case.counts) if case.longest == 1 else sum(case.counts) + 2,
            kv_heads=case.kv_heads,
            window=case.window,
            programs=sm90.processors(),
            shortest=shortest,
        )

    def attend(*arguments: Any) -> Any:
        return sm90.run_decode(*arguments, window=case.window, longest=case.longest, **options)

    return jax.jit(plan), attend


def check(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Relative error against the definition in float64: of all, of the worst token, and over a rerun."""
    given = cases.inputs(case)
    want = cases.expected(case, given)
    plan, attend = variant_call(case, **options)
    rows = (given["start"], given["count"], given["length"])
    given["rel_bias"] = prepare_bias(given["rel_bias"])
    got, again = (np.asarray(attend(*given.values(), plan(*rows))).astype(np.float64) for _ in range(2))
    norms = np.linalg.norm(want, axis=(1, 2))
    worst = np.linalg.norm(got - want, axis=(1, 2))[norms > 0] / norms[norms > 0]
    return {
        "check": case.name,
        "rel_err": round(float(np.linalg.norm(got - want) / np.linalg.norm(want)), 6),
        "worst_token": round(float(worst.max()), 6),
        "idle_max": float(np.abs(got[norms == 0]).max(initial=0)),
        "same_bits": bool((got == again).all()),
    }


def page_pool(pages: int, case: Case, seed: int) -> jax.Array:
    """Random pages, repeated to the size: contents do not matter for time."""

    def build() -> jax.Array:
        base = jax.random.normal(jax.random.key(seed), (BASE_PAGES, case.kv_heads, case.page, case.width), jnp.bfloat16)
        repeats = -(-pages // BASE_PAGES)
        return jnp.broadcast_to(base[None], (repeats, *base.shape)).reshape(-1, *base.shape[1:])

    return jax.jit(build)()


def timed(case: Case, variants: dict[str, dict[str, Any]], ceilings: dict[str, Any]) -> list[Row]:
    """A row for each variant: CUPTI time of all kernels of a layer, by kernel, and wall time of a chain of layers."""
    calls = int(min(12, max(3, -(-ROTATED_BYTES // case.key_bytes))))
    rng = np.random.default_rng(0)
    pages = sum(-(-seen // case.page) + 1 for seen in case.visible())
    pool = min(pages * calls, max(pages, int(30e9 / (4 * case.kv_heads * case.page * case.width))))
    tables = []
    for _ in range(calls):
        tables.append(jnp.asarray(cases.table_of(case, pool, rng)[0]))
    small = cases.inputs(Case((1,) * len(case.counts), case.counts, case.heads, case.kv_heads, case.window, case.extent))
    bias = prepare_bias(small["rel_bias"])
    k_pages, v_pages = (page_pool(pool, case, seed) for seed in (0, 1))
    row_args = (small["start"], small["count"], jnp.asarray(case.lengths, jnp.int32))
    bound = case.key_bytes / ceilings["read"] * 1e6
    found = []
    for name, options in variants.items():
        plan, attend = variant_call(case, **options)
        planned = plan(*row_args)

        def chain(q: Any, rel: Any, bias: Any, k: Any, v: Any, tables: Any, rows: Any, planned: Any, attend: Any = attend) -> Any:
            return [attend(q, rel, bias, k, v, table, *rows, planned) for table in tables]

        arguments = (small["q"], small["rel"], bias, k_pages, v_pages, tables, row_args, planned)
        try:
            chained = jax.jit(chain).lower(*arguments).compile()
            parts = kernel_parts(chained, arguments, calls)
            row = make_row(
                "paged_attention",
                case.name,
                "decode",
                jax.devices()[0],
                kernels=name,
                time_us=sum(parts.values()),
                bound_us=bound,
                batch=len(case.lengths),
                context=case.context,
                queries=case.longest,
                kv="bf16",
                parts_us=parts,
                plan_us=round(sum(kernel_parts(plan, row_args, 1).values()), 2),
                wall_us=round(best_seconds(lambda c=chained, a=arguments: c(*a)) / calls * 1e6, 2),
                **ceilings["fields"],
            )
            found.append(row)
            print(json.dumps(row), flush=True)
        except Exception as error:  # one case that fails must not take the others with it
            traceback.print_exc(limit=3)
            print(json.dumps({"case": case.name, "kernels": name, "error": str(error)[:400]}), flush=True)
    return found


def kernel_parts(f: Any, arguments: tuple[Any, ...], calls: int) -> dict[str, float]:
    """Microseconds a call by kernel: the median of each kernel's runs, times how often a call runs it."""
    from jax.experimental.mosaic.gpu import profiler

    runs: dict[str, list[float]] = {}
    for _ in range(3):
        kernels: Any = profiler.Cupti(finalize=False).measure(f, aggregate=False)(*arguments)[1]
        assert kernels, "no kernel was launched"
        for kernel, milliseconds in kernels:
            runs.setdefault(kernel[-48:], []).append(milliseconds * 1e3)
    return {name: round(float(np.median(times)) * len(times) / (3 * calls), 2) for name, times in runs.items()}


def decode_bench() -> list[Case]:
    """The decode grid of the bench: batches and contexts, global and window layers, whole heads and one rank of eight."""
    found = []
    for heads, kv_heads, window in (
        (64, 8, None),
        (64, 16, 512),
        (32, 8, None),
        (32, 8, 512),
        (8, 1, None),
        (8, 2, 512),
        (4, 1, None),
    ):
        kind = {"heads": heads, "kv_heads": kv_heads, "window": window, "extent": window or 1024}
        for batch in (1, 16, 64):
            for context in (1024, 8192, 65_536, *((131_072, 1_048_576) if batch == 1 else ())):
                found.append(Case((context,) * batch, (1,) * batch, **kind))
        lengths = tuple(int(x) for x in np.geomspace(100, 65_536, 64))
        found.append(Case(lengths, (1,) * 64, **kind))
    return found


def inner(options: argparse.Namespace) -> None:
    """What one process does: ceilings, checks or times, as JSON lines."""
    device = jax.devices()[0]
    if options.inner == "ceilings":
        read = read_ceiling(device)
        found = {"read": read.bytes_per_second, "fields": read.fields(), "matmul": matmul_ceiling(device)}
        print(json.dumps({"ceilings": found}), flush=True)
        return
    variant = VARIANTS[options.inner]
    if options.check:
        for case in cases.decode_cases():
            try:
                print(json.dumps(check(case, variant)), flush=True)
            except Exception as error:
                traceback.print_exc(limit=3)
                print(json.dumps({"check": case.name, "error": str(error)[:600]}), flush=True)
    for case in decode_bench():
        if case.name in options.time:
            timed(case, {options.inner: variant}, json.loads(options.ceilings))


def run_inner(arguments: list[str], limit_s: float) -> list[dict[str, Any]]:
    """The JSON lines of a process of this module, echoed as they come; what it had printed where the limit ended it."""
    command = [sys.executable, "-u", "-m", "inkling_jax.benchmarks.paged_attention", *arguments]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nended after {limit_s} s"
    print(f"# {' '.join(arguments)[:150]}: exit {process.returncode} after {time.monotonic() - started:.1f} s", flush=True)
    if process.returncode:
        print("\n".join("# " + line[:300] for line in err.splitlines() if "cuda_event" not in line)[-3000:], flush=True)
    found = []
    for line in out.splitlines():
        if line.startswith("{"):
            print(line, flush=True)
            found.append(json.loads(line))
    return found


def main() -> None:
    """Run ceilings, then each variant, and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="errors of the shared cases first")
    parser.add_argument("--time", nargs="*", default=[], metavar="WORD", help="time cases whose names contain a word")
    parser.add_argument("--variants", nargs="+", default=["kernels"], choices=list(VARIANTS))
    parser.add_argument("--limit", type=float, default=120, help="seconds a process may take")
    parser.add_argument("--output", type=Path, help="JSON file of rows")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        inner(options)
        return
    arguments = []
    if options.time:
        chosen = [case.name for case in decode_bench() if any(word in case.name for word in options.time)]
        lines = run_inner(["--inner", "ceilings"], options.limit)
        arguments = ["--ceilings", json.dumps(lines[-1]["ceilings"]), "--time", *chosen]
    rows = []
    for index, variant in enumerate(options.variants):
        checked = ["--check"] if options.check and index == 0 else []
        rows += [r for r in run_inner(["--inner", variant, *checked, *arguments], options.limit) if "ratio" in r]
    if options.output:
        save_rows(options.output, rows)


if __name__ == "__main__":
    main()
