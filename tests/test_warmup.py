"""The programs compiled at a start: few, told of as they come, and all that traffic needs."""

from __future__ import annotations

import dataclasses
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
from text_checkpoint import write_text_checkpoint

from inkling_jax.benchmarks.shard import open_shard
from inkling_jax.engine.engine import Engine, EngineOptions
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.engine.shapes import Shapes
from inkling_jax.engine.warmup import warm_up
from inkling_jax.errors import InputError
from inkling_jax.media import MediaItem

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


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with both towers, of two dense layers."""
    layers = {"num_hidden_layers": 2, "local_layer_ids": [0], "dense_mlp_idx": 2}
    return write_text_checkpoint(tmp_path_factory.mktemp("seeing") / "model", nvfp4=False, **layers)


def one_way(directory: Path) -> Engine:
    """An engine that has few programs, and chunks of two sizes."""
    engine = engines.engine(directory)
    engine.shapes = Shapes((4, 16), (4,), (512,))
    return engine


def show(engine: Engine, directory: Path, what: str, rows: int) -> list[str]:
    """What is built for a prompt with a picture or a sound of so many rows, and text around it."""
    config, draw = engines.model(directory).config, np.random.default_rng(rows)
    pictures, sounds = draw.normal(size=(rows, 2, 40, 40, 3)).astype(np.float32), draw.integers(0, 16, (rows, 80), np.int32)
    slot, values = (config.image_token_id, pictures) if what == "vision" else (config.audio_token_id, sounds)
    assert slot is not None
    params = dataclasses.replace(GREEDY, max_tokens=9)
    with builds() as built:
        request = engine.add(Request((3, *(slot,) * rows, 4, 5), params, media=(MediaItem(what, values, 1),)))
        results: dict[int, engines.Result] = {}
        engines.finish(engine, results)
    assert results[request].finish_reason == "length"
    return built


def test_media_compile_nothing(seeing: Path) -> None:
    """A picture or a sound, of fewer rows than the smallest chunk and of more than a tower takes at once; and not where they
    were not asked for.
    """
    engine = one_way(seeing)
    sampling = engine.samplings[:1]
    assert warm_up(engine, samplings=sampling, media=False, quiet=True) == 3  # two chunks and a decode call
    assert any("prefill" in name or "program" in name for name in show(one_way(seeing), seeing, "vision", 2))
    engines.model(seeing).programs.prefill.clear_cache()
    media = engines.model(seeing).media
    for program in (*media._programs.values(), media._lay):
        program.clear_cache()
    engine = one_way(seeing)
    with builds() as built:
        assert warm_up(engine, samplings=sampling, quiet=True) == 3 + 2 + 1 + 1  # towers, what lays out their rows, a chunk
    # two towers, one to lay out rows, and chunks: of two sizes, and the larger with media; the decode call is still there
    assert [built.count(f"jit({name})") for name in ("_compute", "_lay", "program")] == [2, 1, 3]
    for what in ("vision", "audio"):
        for rows in (2, 30, 300):
            assert show(engine, seeing, what, rows) == []


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
