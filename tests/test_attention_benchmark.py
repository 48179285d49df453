"""The attention benchmark without a GPU: what it profiles, and the row that it makes of the profiler's times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from inkling_jax.benchmarks import paged_attention as bench
from inkling_jax.kernels.paged_attention.cases import Case


@pytest.mark.parametrize("counts", [pytest.param((1, 1), id="decode"), pytest.param((20,), id="prefill", marks=pytest.mark.slow)])
def test_a_row_of_times(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is profiled behind a flush and awaited, on pages of its own; the flush is no part of the time."""
    launched: list[tuple[str, float]] = []
    tables: list[Any] = []

    def attend(q: jax.Array, *arguments: Any) -> jax.Array:
        tables.append(np.asarray(arguments[4]))
        launched.extend([("flush", 0.3), ("attention", 0.002 * len(tables)), ("merge", 0.001)])  # milliseconds
        return q + jnp.bfloat16(1)

    def plan(*rows: jax.Array) -> jax.Array:
        launched.append(("plan", 0.003))
        return rows[0] + 1

    cupti = SimpleNamespace(_cupti_init=launched.clear, _cupti_get_timings=lambda finalize: list(launched))
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", SimpleNamespace(_mosaic_gpu_ext=cupti))
    monkeypatch.setattr(bench, "variant_call", lambda case, tokens, options: (plan, attend))
    monkeypatch.setattr(bench, "FLUSHED_BYTES", 1 << 10)
    monkeypatch.setattr(bench, "BASE_PAGES", 4)
    case = Case((1024,) * len(counts), counts, heads=4, kv_heads=1)
    ceilings = {"read": 1e12, "matmul": 1e12, "fields": {"ceiling": "TMA read"}}
    (row,) = bench.timed([case], {"kernels": {}}, ceilings)
    # A call that warms up, and then those that are timed: medians of 4, 6, 8, 10, 12 and of 1 microseconds.
    assert row["parts_us"] == {"attention": 8.0, "merge": 1.0} and row["time_us"] == 9.0 and row["plan_us"] == 3.0
    assert len({table.tobytes() for table in tables[1:]}) == bench.CALLS
    # Keys and values of a head of 128 in bfloat16; 4 heads, two products of a multiplication and an addition a pair.
    pairs = 2 * 1024 if len(counts) == 2 else 1024 * 20 - 20 * 19 // 2
    read, products = len(counts) * 1024 * 2 * 128 * 2 / 1e6, pairs * 4 * 2 * 2 * 128 / 1e6
    assert row["bound_us"] == pytest.approx(max(read, products), abs=1e-3)
    assert (row["phase"], row["ratio"]) == ("decode" if len(counts) == 2 else "prefill", round(row["bound_us"] / 9, 4))
