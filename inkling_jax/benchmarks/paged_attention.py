"""Times of paged attention against what the chip can do: bytes of keys and values over read bandwidth, operations over cuBLAS.

`python -m inkling_jax.benchmarks.paged_attention --check --time WORD ...`. Every variant runs in processes of its own with a time
limit, since a kernel that hangs or faults takes its process with it; checks run side by side, times one after the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inkling_jax.benchmarks.attention_grid import bound_seconds, decode_groups, prefill_groups
from inkling_jax.benchmarks.ceilings import matmul_ceiling, read_ceiling
from inkling_jax.benchmarks.rows import Row, make_row, save_rows
from inkling_jax.kernels.paged_attention import cases, sm90
from inkling_jax.kernels.paged_attention.bias import prepare_bias
from inkling_jax.kernels.paged_attention.cases import Case
from inkling_jax.kernels.paged_attention.plan import plan_decode
from inkling_jax.kernels.pages import Fp8Pages, Pages, quantize

FLUSHED_BYTES = 1 << 28  # written between calls, so that keys come from memory and not from the cache
CALLS = 5  # timed, each on other pages
BASE_PAGES = 256  # random pages that a pool repeats
CHECKS_AT_ONCE = 6  # processes a variant
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "decode": {
        "kernels": {},
        "plain-launch": {"overlap_merge": False},
        "run4": {"shortest": 4},
    },
    "prefill": {
        "kernels": {},
        "overlap": {"overlap": True},
        "keys64": {"keys": 64, "stages": 4},
        "keys64-overlap": {"keys": 64, "stages": 4, "overlap": True},
        "unbiased": {"biased": False},
        "unbiased-overlap": {"biased": False, "overlap": True},
    },
}


def phase_of(case: Case) -> str:
    return "decode" if sm90.is_decode(case.longest) else "prefill"


def variant_call(case: Case, tokens: int, options: dict[str, Any]) -> tuple[Callable, Callable]:
    """The plan of a step and the attention of a layer that a variant makes of a case."""
    programs, options = sm90.processors(), dict(options)
    if phase_of(case) == "decode":
        shortest = options.pop("shortest", sm90.SHORTEST_RUN)
        planned = {"kv_heads": case.kv_heads, "programs": programs, "shortest": shortest}
        plan = functools.partial(plan_decode, tokens=tokens, window=case.window, **planned)
        return jax.jit(plan), functools.partial(sm90.run_decode, window=case.window, longest=case.longest, **options)
    plan = functools.partial(sm90.prefill_plan, tokens=tokens, share=case.heads // case.kv_heads, window=case.window)
    fixed = tuple(options.items())
    return jax.jit(plan), functools.partial(sm90.run_prefill, window=case.window, programs=programs, options=fixed)


def check(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Relative error against the definition in float64: of all, of the worst token, and over a rerun."""
    given = cases.inputs(case)
    if not options.get("biased", True):
        given["rel"] = jnp.zeros_like(given["rel"])
    want = cases.expected(case, given)
    plan, attend = variant_call(case, given["q"].shape[0], options)
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


def page_pool(pages: int, case: Case, seed: int) -> Pages:
    """Random pages, repeated to the size: contents do not matter for time."""

    def repeated(base: jax.Array) -> jax.Array:
        repeats = -(-pages // BASE_PAGES)
        return jnp.broadcast_to(base[None], (repeats, *base.shape)).reshape(-1, *base.shape[1:])

    def build() -> Pages:
        base = jax.random.normal(jax.random.key(seed), (BASE_PAGES, case.kv_heads, case.page, case.width), jnp.bfloat16)
        return jax.tree.map(repeated, Fp8Pages(*quantize(base)) if case.fp8 else base)

    return jax.jit(build)()


def kernel_times(calls: list[Callable[[], Any]]) -> list[tuple[str, float]]:
    """Name and microseconds of every kernel that the calls launch, in order."""
    from jax.experimental.mosaic.gpu import profiler

    # The class in front of it takes a single jitted function.
    cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
    cupti._cupti_init()
    try:
        jax.block_until_ready([call() for call in calls])
    finally:
        found = cupti._cupti_get_timings(False)
    assert found, "no kernel was launched"
    return [(name, milliseconds * 1e3) for name, milliseconds in found]


def timed(group: list[Case], variants: dict[str, dict[str, Any]], ceilings: dict[str, Any]) -> Iterator[Row]:
    """Rows of cases with the same shapes but for their lengths: one pool of pages, one program a variant."""
    rng, widest = np.random.default_rng(0), max(group, key=lambda case: sum(case.visible()))
    pool = max(sum(-(-seen // case.page) + 1 for seen in case.visible()) for case in group)
    small = cases.inputs(
        Case((1,) * len(widest.counts), widest.counts, widest.heads, widest.kv_heads, widest.window, widest.extent)
    )
    k_pages, v_pages = (page_pool(pool, widest, seed) for seed in (0, 1))
    pool = k_pages.shape[0]
    width = max(cases.table_of(case, pool, rng)[0].shape[1] for case in group)
    # Nothing is donated: all results are awaited together, and what a later call has taken over cannot be.
    flush = functools.partial(jax.jit(lambda a: a + jnp.int8(1)), jnp.zeros(FLUSHED_BYTES, jnp.int8))
    bias = prepare_bias(small["rel_bias"])
    jax.block_until_ready(flush())
    for name, options in variants.items():
        plan, attend = variant_call(widest, small["q"].shape[0], options)
        for case in group:
            tables = []
            for _ in range(CALLS):
                table = cases.table_of(case, pool, rng)[0]
                fill = np.full((table.shape[0], width - table.shape[1]), pool, np.int32)
                tables.append(jnp.asarray(table if case.window else np.concatenate([table, fill], axis=1)))
            rows = (small["start"], small["count"], jnp.asarray(case.lengths, jnp.int32))
            planned = plan(*rows)
            call = lambda table, attend=attend, rows=rows, planned=planned: attend(  # noqa: E731
                small["q"], small["rel"], bias, k_pages, v_pages, table, *rows, planned
            )
            jax.block_until_ready([call(tables[0]), plan(*rows)])
            both = [f for table in tables for f in (flush, functools.partial(call, table))]
            parts = _parts(kernel_times(both), CALLS)
            fields = {
                "batch": len(case.lengths),
                "context": case.context,
                "queries": case.longest,
                "kv": "fp8" if case.fp8 else "bf16",
            }
            yield make_row(
                "paged_attention",
                case.name,
                phase_of(case),
                jax.devices()[0],
                kernels=name,
                time_us=sum(parts.values()),
                bound_us=bound_seconds(case, ceilings["read"], ceilings["matmul"]) * 1e6,
                parts_us=parts,
                plan_us=round(sum(us for _, us in kernel_times([functools.partial(plan, *rows)])), 2),
                **fields,
                **ceilings["fields"],
            )


def _parts(launches: list[tuple[str, float]], calls: int) -> dict[str, float]:
    """Microseconds a call by kernel, the flush left out: the median of each kernel's runs, times how often a call runs it."""
    runs: dict[str, list[float]] = {}
    first = launches[0][0]
    for kernel, us in launches:
        if kernel != first:
            runs.setdefault(kernel[-48:], []).append(us)
    return {name: round(float(np.median(times)) * len(times) / calls, 2) for name, times in runs.items()}


def chosen(groups: Iterator[list[Case]], words: list[str]) -> Iterator[list[Case]]:
    """The groups' cases whose names contain a word."""
    for group in groups:
        if picked := [case for case in group if any(word in case.name for word in words)]:
            yield picked


def inner(options: argparse.Namespace) -> None:
    """What one process does: ceilings, checks or times, as JSON lines."""
    device = jax.devices()[0]
    if options.inner == "ceilings":
        read = read_ceiling(device)
        found = {"read": read.bytes_per_second, "fields": read.fields(), "matmul": matmul_ceiling(device)}
        print(json.dumps({"ceilings": found}), flush=True)
        return
    variants = VARIANTS[options.phase]
    if options.part is not None:
        every = cases.decode_cases() if options.phase == "decode" else cases.prefill_cases()
        every = [case for case in every if not options.only or any(word in case.name for word in options.only)]
        for case in every[options.part :: CHECKS_AT_ONCE]:
            guarded(case.name, lambda case=case: print(json.dumps(check(case, variants[options.inner])), flush=True))
        return
    names = options.inner.split(",")
    for group in chosen(decode_groups() if options.phase == "decode" else prefill_groups(), options.time):

        def run(group: list[Case] = group) -> None:
            for row in timed(group, {name: variants[name] for name in names}, json.loads(options.ceilings)):
                print(json.dumps(row), flush=True)

        guarded(group[0].name, run)


def guarded(name: str, run: Callable[[], None]) -> None:
    """Run, or say what went wrong: one case that fails must not take the others with it."""
    try:
        run()
    except Exception as error:
        traceback.print_exc(limit=3)
        print(json.dumps({"case": name, "error": str(error)[:600]}), flush=True)


class Process:
    """This module in a process of its own, to be ended at a time limit."""

    def __init__(self, arguments: list[str], limit_s: float):
        self.arguments, self.end, self.started = arguments, time.monotonic() + limit_s, time.monotonic()
        command = [sys.executable, "-u", "-m", "inkling_jax.benchmarks.paged_attention", *arguments]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def lines(self) -> list[dict[str, Any]]:
        """Its JSON lines, echoed; what it had printed where the limit ended it."""
        try:
            out, err = self.process.communicate(timeout=max(1.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            err += "\nended at its time limit"
        what = f"# {' '.join(self.arguments)[:120]}: exit {self.process.returncode} after {time.monotonic() - self.started:.1f} s"
        print(what, flush=True)
        if self.process.returncode or "Traceback" in err:
            print("\n".join("# " + line[:300] for line in err.splitlines() if "cuda_event" not in line)[-2500:], flush=True)
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for line in found:
            print(json.dumps(line), flush=True)
        return found


def main() -> None:
    """Run checks, ceilings and times, and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", default="decode", choices=list(VARIANTS))
    parser.add_argument("--check", action="store_true", help="errors of the shared cases first")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="check cases whose names contain a word")
    parser.add_argument("--time", nargs="*", default=[], metavar="WORD", help="time cases whose names contain a word")
    parser.add_argument("--variants", nargs="+", default=["kernels"])
    parser.add_argument("--limit", type=float, default=120, help="seconds a process may take")
    parser.add_argument("--output", type=Path, help="JSON file of rows")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        inner(options)
        return
    if unknown := set(options.variants) - set(VARIANTS[options.phase]):
        parser.error(f"--variants {' '.join(unknown)}: of {options.phase} there are {', '.join(VARIANTS[options.phase])}")
    common = ["--phase", options.phase, "--only", *options.only]
    if options.check:
        parts = [(name, part) for name in options.variants for part in range(CHECKS_AT_ONCE)]
        running = [Process(["--inner", name, "--part", str(part), *common], options.limit) for name, part in parts]
        for process in running:
            process.lines()
    if not options.time:
        return
    found = Process(["--inner", "ceilings"], options.limit).lines()[-1]["ceilings"]
    arguments = ["--ceilings", json.dumps(found), *common, "--time", *options.time]
    for name in options.variants:
        rows = [row for row in Process(["--inner", name, *arguments], options.limit).lines() if "ratio" in row]
        if options.output:
            save_rows(options.output, rows)


if __name__ == "__main__":
    main()
