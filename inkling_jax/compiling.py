"""How long jax compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compile_seconds() -> Iterator[list[float]]:
    """A list that grows by the seconds of each compilation inside."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILED:
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
