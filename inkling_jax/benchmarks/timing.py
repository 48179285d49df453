"""Time on the device, and what ran there."""

from __future__ import annotations

import glob
import logging
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

BEST_OF = 5
CALLS = 5  # dispatched one behind another before waiting: the host's part hides behind the device's

logger = logging.getLogger(__name__)


def best_seconds(call: Callable[[], Any]) -> float:
    """Seconds a call of the fastest of a few series, after a warm-up: for ceilings, which nothing should exceed."""
    jax.block_until_ready(call())
    return min(series_seconds(call, CALLS, BEST_OF))


def series_seconds(
    call: Callable[[], Any],
    calls: int,
    repeats: int,
    reset: Callable[[], Any] = lambda: None,
    limit_s: float = math.inf,
) -> list[float]:
    """Seconds a call in each of `repeats` series of `calls` dispatched without waiting between.

    `reset` runs before each series, untimed. No series begins after `limit_s` seconds, but one always does. The caller warms up.
    """
    seconds: list[float] = []
    while len(seconds) < repeats and (not seconds or calls * sum(seconds) < limit_s):
        jax.block_until_ready(reset())
        start = time.perf_counter()
        results = [call() for _ in range(calls)]
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - start) / calls)
    return seconds


def device_activity(call: Callable[[], Any], device: Any) -> tuple[int, float] | None:
    """Kernels that a call launches on a GPU and the seconds that they run in all, from a profiler's trace; None elsewhere."""
    if device.platform != "gpu":
        return None
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 0, 0
    try:
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory, profiler_options=options):
                jax.block_until_ready(call())
            files = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
            kernels = [duration for file in files for duration in _kernels(jax.profiler.ProfileData.from_file(file))]
    except Exception as error:  # a profiler that is not allowed or not there must not cost the time that was measured
        logger.warning("launches are not counted, the profiler failed: %s", error)
        return None
    if not kernels:
        logger.warning("launches are not counted, the profiler recorded no kernels")
        return None
    return len(kernels), sum(kernels)


def _kernels(trace: Any) -> list[float]:
    """Seconds of each kernel of a trace: events of the GPU's streams that are no copies or fills."""
    return [
        event.duration_ns / 1e9
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.lower().startswith(("memcpy", "memset"))
    ]
