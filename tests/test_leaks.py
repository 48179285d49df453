"""Many short requests one after another: what they took is given back, on the device and on the host."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from inkling_jax.benchmarks.shard import open_shard
from inkling_jax.cache.paged import CacheShape
from inkling_jax.engine.calls import EngineCalls
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.shapes import Shapes

SLOTS = 64


@pytest.fixture(scope="module")
def engine(oracle_dir: Callable[..., Path]) -> Engine:
    """One layer, whose steps are fast, and few pages, so that requests wait for each other's."""
    shard = open_shard(str(oracle_dir("tiny")), "tensor=1", 1)
    shape = CacheShape(SLOTS, 16, 40, 40, 64, 128)
    return shard.engine(
        shard.random_leaves(), shape, EngineOptions(chunk=128, tokens_per_call=4), Shapes((128,), (SLOTS,), (64,))
    )


def serve(engine: Engine, count: int, draw: random.Random) -> int:
    """Run so many requests, some of which are given up; how many tokens they made."""
    made, left = 0, count
    with EngineCalls(engine).open() as call:
        while left or len(call):
            while left and len(call) < 2 * SLOTS:
                prompt = tuple(draw.randrange(490) for _ in range(draw.randint(1, 3)))
                call.add(Request(prompt, SamplingParams(seed=left, max_tokens=draw.randint(1, 6))))
                left -= 1
            for request_id, output in call.step():
                made += len(output.token_ids)
                if output.finish_reason is not None or draw.random() < 0.02:
                    assert output.error is None
                    call.drop(request_id)
    return made


def held(engine: Engine) -> tuple[int, int, int, int]:
    """Pages and slots that are taken, arrays of jax, and bytes of the host."""
    gc.collect()
    scheduler = engine.scheduler
    pages = sum(pool.busy for pool in scheduler.pools.values())
    taken = SLOTS - len(scheduler.free_slots) + len(scheduler.running) + len(scheduler.waiting)
    return pages, taken, len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_short_requests_leave_nothing_behind(count: int, engine: Engine) -> None:
    """Some to begin with, then all of them: no page, slot or array more is held, of the host less than an object a request."""
    draw = random.Random(0)
    serve(engine, 100, draw)
    tracemalloc.start()
    try:
        serve(engine, 1_500, draw)  # what is kept a slot or a shape: caches of jax, of the interpreter
        before = held(engine)
        assert serve(engine, count, draw) > count
        while engine.busy:
            engine.step()
        after = held(engine)
    finally:
        tracemalloc.stop()
    assert before[:2] == after[:2] == (0, 0)
    assert after[2] <= before[2]
    assert after[3] - before[3] < max(count, 20_000)
