"""The programs compiled at a start: few, told of as they come, and all that traffic needs."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import engines
import jax
import numpy as np
import pytest
from engines import GREEDY

from inkling_jax.benchmarks.shard import open_shard
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.warmup import warm_up
from inkling_jax.errors import InputError

BUILT = "/jax/core/compile/backend_compile_duration"


@contextmanager
def builds() -> Iterator[list[str]]:
    """Names of what the compiler builds inside, an entry each time."""
    found: list[str] = []

    def listen(event: str, seconds: float, **about: object) -> None:
        if event == BUILT:
            found.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def one_layer(directory: Path) -> Engine:
    """An engine over the first layer of a model, with random weights: programs that compile fast."""
    shard = open_shard(str(directory), "tensor=1", 1)
    shape = shard.cache_shape(engines.SLOTS, 256, 32, 16)
    return shard.engine(shard.random_leaves(), shape, EngineOptions(chunk=16, tokens_per_call=7))


@pytest.fixture(scope="module")
def warm(oracle_dir: Callable[..., Path]) -> tuple[Engine, str]:
    """A warmed-up engine, and what was told meanwhile."""
    told, engine = io.StringIO(), one_layer(oracle_dir("tiny"))
    assert warm_up(engine, stream=told) == 6
    return engine, told.getvalue()


def test_traffic_compiles_nothing(warm: tuple[Engine, str]) -> None:
    """Random prompts, lengths, settings, arrivals and cancellations after warm-up: the compiler is not called once."""
    engine, _ = warm
    draw, numbers = random.Random(0), np.random.default_rng(0)
    with builds() as built:
        waiting = 40
        running: list[int] = []
        while waiting or engine.busy:
            if waiting and draw.random() < 0.5:
                params = SamplingParams(
                    temperature=draw.choice([0, 1.0]),
                    top_k=draw.choice([0, 5]),
                    presence_penalty=draw.choice([0, 0.5]),
                    logprobs=draw.choice([None, None, 0, 3, 20]),
                    max_tokens=draw.randint(1, 40),
                    ignore_eos=draw.random() < 0.5,
                )
                prompt = numbers.integers(0, 497, draw.choice([1, 2, 15, 16, 17, 60, 200])).tolist()
                running.append(engine.add(Request(tuple(prompt), params)))
                waiting -= 1
            if running and draw.random() < 0.05:
                engine.cancel(running.pop(draw.randrange(len(running))))
            engine.step()
        assert built == []
        jax.jit(lambda x: x + 1)(np.zeros(3))
        assert len(built) == 1  # that is how one would have shown
    assert engines.all_given_back(engine)


def test_it_changes_nothing(warm: tuple[Engine, str], oracle_dir: Callable[..., Path]) -> None:
    """A prompt has the tokens and the logprobs that it has in an engine which was not warmed up, to the bit."""
    prompt, params = list(range(100, 133)), SamplingParams(seed=5, max_tokens=40, ignore_eos=True, logprobs=3)
    cold = engines.run(one_layer(oracle_dir("tiny")), [prompt], params)
    assert engines.run(warm[0], [prompt], params) == cold and len(cold[0].tokens) == 40


def test_it_tells_how_far_it_is(warm: tuple[Engine, str]) -> None:
    """Plain lines where there is no terminal: how many programs, and at the end how long it took."""
    first, *_, last = warm[1].splitlines()
    assert first == "compiling 6 programs"  # decode of 1 and of 4 rows and a chunk, each with both ways to sample
    assert last.startswith("compiled 6 of 6 programs in ")


def test_it_comes_before_requests(oracle_dir: Callable[..., Path]) -> None:
    """It would overwrite a slot that one has."""
    engine = one_layer(oracle_dir("tiny"))
    engine.add(Request((1, 2), GREEDY))
    with pytest.raises(InputError, match="before it has requests"):
        warm_up(engine, quiet=True)
