"""A step that raises has taken the donated state with it: requests are read again, or every later call says what happened."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, Result
from jax._src import dispatch
from text_checkpoint import write_text_checkpoint

from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request, SamplingParams
from inkling_jax.errors import InklingError
from inkling_jax.media import MediaItem

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes"
COUNT, TOKENS = 5, 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local and a global layer, both dense, which compile fast; both towers."""
    layers = {"num_hidden_layers": 2, "local_layer_ids": [0], "dense_mlp_idx": 2}
    return write_text_checkpoint(tmp_path_factory.mktemp("failing") / "model", nvfp4=False, **layers)


@pytest.fixture(autouse=True)
def nothing_is_left_to_wait_for() -> Iterator[None]:
    """A process that ends waits for every callback, and would tell of those that failed."""
    yield
    dispatch.runtime_tokens.clear()


def lot(directory: Path) -> list[Request]:
    """Prompts that begin alike, one with a picture; greedy, and noise of a seed."""
    draw = np.random.default_rng(1)
    beginning, picture = draw.integers(0, 250, 40).tolist(), draw.normal(size=(6, 2, 40, 40, 3)).astype(np.float32)
    noise = SamplingParams(temperature=1.0, seed=5, max_tokens=TOKENS, ignore_eos=True)
    greedy = dataclasses.replace(GREEDY, max_tokens=TOKENS)
    found = [Request((*beginning, 3 + n), noise if n % 2 else greedy) for n in range(COUNT)]
    slot = engines.model(directory).config.image_token_id
    found[2] = dataclasses.replace(
        found[2], prompt_ids=(7, *(slot,) * 6, *beginning[:9]), media=(MediaItem("vision", picture, 1),)
    )
    return found


@pytest.fixture(scope="module")
def undisturbed(directory: Path) -> list[list[int]]:
    """What they lead to where nothing fails."""
    return tokens(run(build(directory), lot(directory)))


def build(directory: Path, **options: Any) -> Engine:
    """An engine with few programs: decode calls of all slots, and one way to sample, which is all that these requests need."""
    engine = engines.engine(directory, **options)
    engine.shapes = dataclasses.replace(engine.shapes, rows=engine.shapes.rows[-1:])
    engine.samplings = [dataclasses.replace(engine.samplings[0], mode="sample", top_logprobs=None)]
    return engine


def run(engine: Engine, requests: list[Request]) -> list[Result]:
    ids, results = [engine.add(request) for request in requests], {}
    engines.finish(engine, results)
    return [results[i] for i in ids]


def tokens(results: list[Result]) -> list[list[int]]:
    assert {result.finish_reason for result in results} == {"length"}
    return [result.tokens for result in results]


class Failing:
    """A program of the engine that fails in some of its calls, which it counts from 1, and takes what was donated with it."""

    def __init__(self, program: Callable[..., Any], calls: set[int], late: bool = False):
        """`late`: the call returns, and who reads its results finds the failure."""
        self.program, self.calls, self.late, self.count = program, calls, late, 0

    def __call__(self, leaves: list[jax.Array], state: Any, inputs: Any, **static: Any) -> Any:
        self.count += 1
        if self.count not in self.calls:
            return self.program(leaves, state, inputs, **static)
        if self.late:
            return jax.tree.map(spoilt, self.program(leaves, state, inputs, **static))
        for array in jax.tree.leaves(state):
            array.delete()
        raise RuntimeError(FULL)


@jax.jit
def spoilt(array: jax.Array) -> jax.Array:
    """An array that cannot be computed."""

    def fail(array: np.ndarray) -> np.ndarray:
        raise RuntimeError(FULL)

    return jax.pure_callback(fail, jax.ShapeDtypeStruct(array.shape, array.dtype), array)


@pytest.mark.parametrize(
    ("name", "calls", "late"), [("prefill", {1}, False), ("prefill", {2}, True), ("decode", {1}, True), ("decode", {2, 3}, False)]
)
def test_requests_are_read_again(
    name: str,
    calls: set[int],
    late: bool,
    directory: Path,
    undisturbed: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever fails, at once or when it is read: the tokens are those of a run without failure, and prefixes come again."""
    engine = build(directory, prefix_bytes=1 << 20)
    failing = Failing(getattr(engine.programs, name), calls, late)
    monkeypatch.setattr(engine.programs, name, failing)
    with caplog.at_level(logging.WARNING):
        assert tokens(run(engine, lot(directory))) == undisturbed
    assert failing.count > max(calls) and FULL in caplog.text and "reads again" in caplog.text
    assert engines.all_given_back(engine)
    before = engine.prefix_statistics.reused
    assert tokens(run(engine, lot(directory))) == undisturbed
    assert engine.prefix_statistics.reused - before >= 4 * 32
    assert len([record for record in caplog.records if record.name.startswith("inkling_jax")]) <= len(calls)


def test_kept_prefixes_go_with_the_state(directory: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept before is not gone on from after it; nor is a picture's row."""
    engine = build(directory, prefix_bytes=1 << 20)
    requests = lot(directory)
    run(engine, requests)
    monkeypatch.setattr(engine.programs, "prefill", Failing(engine.programs.prefill, {1}))
    before = engine.prefix_statistics.reused
    (found,) = run(engine, requests[:1])
    assert found.tokens == undisturbed[0] and engine.prefix_statistics.reused - before == 32  # asked for, then read in full
    assert len(engine.media._known) == 0
    monkeypatch.undo()
    assert tokens(run(engine, requests)) == undisturbed


def test_a_failure_that_comes_again_is_told(
    directory: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice without a token in between ends the call, not the engine: what is left runs once the cause is gone."""
    engine, requests = build(directory), lot(directory)
    ids = [engine.add(request) for request in requests]
    monkeypatch.setattr(engine.programs, "decode", Failing(engine.programs.decode, set(range(1, 100))))
    results: dict[int, Result] = {}
    with pytest.raises(InklingError, match=f"a step failed: RuntimeError: {FULL}; the cache was made anew"):
        engines.finish(engine, results)
    engine.cancel(ids[4])
    monkeypatch.undo()
    engines.finish(engine, results)
    assert tokens([results[i] for i in ids[:4]]) == undisturbed[:4]
    assert engines.all_given_back(engine)


def test_without_a_new_state_every_call_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is lost: each call names the first failure and what to do; giving up and closing still work."""
    leaves = [jnp.array(leaf, copy=True) for leaf in engines.model(directory).leaves]
    engine, requests = build(directory, leaves=leaves), lot(directory)
    monkeypatch.setattr(engine.media, "close", lambda: None)  # others have the same
    first = engine.add(requests[0])
    monkeypatch.setattr(engine.programs, "prefill", Failing(engine.programs.prefill, {1}))

    def lost() -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine, "_create_state", lost)
    told = f"a step failed: RuntimeError: {FULL}; no new cache could be made \\(the device is lost\\): load the model again"
    for call in (
        engine.step,
        engine.step,
        lambda: engine.add(requests[1]),
        lambda: next(engine.evaluate([1, 2])),
        lambda: next(engine.draft_logits([1, 2])),
    ):
        with pytest.raises(InklingError, match=told):
            call()
    engine.cancel(first)
    assert not engine.busy
    engine.close()
    assert all(leaf.is_deleted() for leaf in leaves)


def test_other_processes_know_nothing_of_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several cannot go on alone."""
    engine = build(directory)
    engine.add(lot(directory)[0])
    monkeypatch.setattr(engine.programs, "prefill", Failing(engine.programs.prefill, {1}))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for _ in range(2):
        with pytest.raises(InklingError, match=f"{FULL}; .*the other processes are a step ahead.*: load the model again"):
            engine.step()


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_that_is_scored(
    late: bool, directory: Path, undisturbed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller is told, as is who has scored half of another; requests beside it do not notice."""
    engine, requests = build(directory), lot(directory)[:2]
    wanted = np.concatenate([logits for logits, _ in engine.evaluate(requests[0].prompt_ids)])
    ids, results = [engine.add(request) for request in requests], {}
    for _ in range(6):
        engines.gather(engine.step(), results)
    half = engine.evaluate(requests[0].prompt_ids)
    np.testing.assert_array_equal(next(half)[0], wanted[:16])
    monkeypatch.setattr(engine.programs, "score", Failing(engine.programs.score, {2}, late))
    scored = engine.evaluate(requests[0].prompt_ids)
    next(scored)
    with pytest.raises(InklingError, match="a step failed: .*RuntimeError: .*; the cache was made anew"):
        next(scored)
    with pytest.raises(InklingError, match="went with a step that failed: ask again"):
        next(half)
    engines.finish(engine, results)
    assert tokens([results[i] for i in ids]) == undisturbed[:2]
    again = np.concatenate([logits for logits, _ in engine.evaluate(requests[0].prompt_ids)])
    np.testing.assert_array_equal(again, wanted)
    assert engines.all_given_back(engine)


def test_a_call_that_fails_before_it_takes_the_state(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as it is, and what runs goes on with what it has."""
    engine = build(directory)
    results: dict[int, Result] = {}
    request = engine.add(lot(directory)[0])
    for _ in range(5):
        engines.gather(engine.step(), results)
    slot = engine.scheduler.running[0].slot

    def unfit(*_: Any, **__: Any) -> Any:
        raise TypeError("unfit")

    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "score", unfit)
        with pytest.raises(TypeError, match="^unfit$"):
            next(engine.evaluate([1, 2]))
    assert engine.scheduler.running[0].slot == slot and not engine.scheduler.preemptions
    engines.finish(engine, results)
    assert len(results[request].tokens) == TOKENS and engines.all_given_back(engine)


def test_deterministic_requests_that_have_begun_end(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens might not be the same when read again; of those that have made none they are, and those are read again."""
    engine, requests = build(directory, deterministic=True), lot(directory)
    wanted = tokens(run(engine, requests))
    monkeypatch.setattr(engine.programs, "prefill", Failing(engine.programs.prefill, {8}))
    results = run(engine, requests)
    begun = [result for result in results if result.finish_reason == "error"]
    assert begun and all(result.error == f"a step failed: RuntimeError: {FULL}" for result in begun)
    assert {result.finish_reason for result in results} == {"error", "length"}
    for result, whole in zip(results, wanted, strict=True):
        assert result.tokens == whole[: len(result.tokens)]
    assert engines.all_given_back(engine)
