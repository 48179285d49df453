"""The decode calls of an engine once more, without the engine: how long the device takes when it never waits for the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from inkling_jax.engine.engine import Engine
from inkling_jax.engine.state import EngineState
from inkling_jax.errors import InklingError

REPEATS = 2


@dataclasses.dataclass
class Recorded:
    """Calls of decode in order, and copies of what they moved on that a repetition must put back."""

    calls: list[tuple[Any, dict[str, Any]]] = dataclasses.field(default_factory=list)
    before: tuple[jax.Array, ...] = ()


@contextmanager
def record(engine: Engine) -> Iterator[Recorded]:
    """Note the decode calls that the engine makes inside."""
    recorded, decode = Recorded(before=jax.tree.map(jnp.copy, _progress(engine.state))), engine.programs.decode

    def noted(leaves: list[jax.Array], state: EngineState, inputs: Any, **static: Any) -> Any:
        recorded.calls.append((inputs, static))
        return decode(leaves, state, inputs, **static)

    engine.programs.decode = noted
    try:
        yield recorded
    finally:
        engine.programs.decode = decode


def replay_seconds(engine: Engine, recorded: Recorded) -> float:
    """Seconds a call, dispatched one behind another, in the faster of some repetitions.

    The same rows go on from the same positions to the same ones, and read as many pages. What convolutions remember and local
    pages that were given back hold is of later tokens by now, so tokens may differ; the state is of no use to requests any more.
    Raises InklingError where a repetition does not end where the engine did.
    """
    seconds = []
    end = jax.device_get(_progress(engine.state))
    for _ in range(REPEATS):
        last_token, length, live, generated = jax.tree.map(jnp.copy, recorded.before)
        engine.state = dataclasses.replace(
            engine.state,
            last_token=last_token,
            length=length,
            live=live,
            sampler=dataclasses.replace(engine.state.sampler, generated=generated),
        )
        jax.block_until_ready(engine.state)
        start = time.perf_counter()
        for inputs, static in recorded.calls:
            _, engine.state = engine.programs.decode(engine.leaves, engine.state, inputs, **static)
        jax.block_until_ready(engine.state)
        seconds.append((time.perf_counter() - start) / len(recorded.calls))
        again = jax.device_get(_progress(engine.state))
        if any((a != b).any() for a, b in zip(end[1:], again[1:], strict=True)):
            raise InklingError("the calls did other work when they were repeated, so their time would mean nothing")
    return min(seconds)


def _progress(state: EngineState) -> tuple[jax.Array, ...]:
    """What says how far each slot is."""
    return state.last_token, state.length, state.live, state.sampler.generated
