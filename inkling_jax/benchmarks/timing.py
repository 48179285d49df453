"""Time on the device, and what ran there."""

from __future__ import annotations

import glob
import logging
import math
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

BEST_OF = 5
NAMED = 12  # kernels that a row names
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


class Activity(NamedTuple):
    """Kernels that a call launched, the seconds that they ran in all, and those of the longest by name, launches beside them."""

    launches: int
    seconds: float
    longest: dict[str, tuple[int, float]]

    @classmethod
    def of(cls, kernels: Iterable[tuple[str, float]]) -> Activity:
        """Of names and seconds. Names that differ in a number at the end, as XLA's fusions do, are one."""
        launches, seconds = Counter[str](), defaultdict[str, float](float)
        for name, duration in kernels:
            name = re.sub(r"(_\d+)+$", "", name)
            launches[name] += 1
            seconds[name] += duration
        names = sorted(seconds, key=lambda name: -seconds[name])[:NAMED]
        return cls(launches.total(), sum(seconds.values()), {name: (launches[name], seconds[name]) for name in names})


def device_activity(call: Callable[[], Any], device: Any) -> Activity | None:
    """What a call runs on a GPU, from a profiler's trace; None elsewhere."""
    if device.platform != "gpu":
        return None
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 0, 0
    try:
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory, profiler_options=options):
                jax.block_until_ready(call())
            files = glob.glob(f"{directory}/**/*.xplane.pb", recursive=True)
            kernels = [kernel for file in files for kernel in _kernels(jax.profiler.ProfileData.from_file(file))]
    except Exception as error:  # a profiler that is not allowed or not there must not cost the time that was measured
        logger.warning("launches are not counted, the profiler failed: %s", error)
        return None
    if not kernels:
        logger.warning("launches are not counted, the profiler recorded no kernels")
        return None
    return Activity.of(kernels)


def _kernels(trace: Any) -> list[tuple[str, float]]:
    """Name and seconds of each kernel of a trace: events of the GPU's streams that are no copies or fills."""
    return [
        (event.name, event.duration_ns / 1e9)
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
        if not event.name.lower().startswith(("memcpy", "memset"))
    ]
