"""Prefixes on a tensor mesh: what goes on from one has the tokens of a cold run on one device, and its state to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import engines
import numpy as np
import pytest
from engines import GREEDY
from text_checkpoint import write_text_checkpoint

import inkling_jax
from inkling_jax import LLM
from inkling_jax.engine.engine import Engine
from inkling_jax.engine.request import Request

SIZES = {"dtype": "float32", "max_context": 256, "slots": 1, "page_size": 16, "chunk": 16, "quiet": True, "tokens_per_call": 4}
SHORT = dataclasses.replace(GREEDY, max_tokens=6)
DRAW = np.random.default_rng(0)
TEXT, OTHER = (DRAW.integers(0, 250, n).tolist() for n in (100, 40))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers: local, global with a dense part, local with experts."""
    return write_text_checkpoint(tmp_path_factory.mktemp("prefix") / "model", nvfp4=False)


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[LLM]:
    """One device that reads every prompt in full."""
    with inkling_jax.load(directory, prefix_memory=0, **SIZES) as llm:
        yield llm


def run(engine: Engine, prompt: list[int]) -> tuple[list[int], np.ndarray, int]:
    """A prompt's tokens; its convolution state once it is read, of all ranks; and where it began to read."""
    request, results, state = engine.add(Request(tuple(prompt), SHORT)), {}, None
    sequence = engine._sequences[request]
    while engine.busy:
        engines.gather(engine.step(), results)
        if state is None and sequence.slot >= 0 and not sequence.reading:
            state = np.asarray(engine.snapshots.take(engine.state.cache, sequence.slot, 1 << 40).array)
    assert state is not None and results[request].finish_reason == "length"
    return results[request].tokens, state, sequence.began


@pytest.mark.slow
def test_hits_are_as_cold_runs(directory: Path, alone: LLM) -> None:
    """On two ranks, of prompts that part after some pages."""
    with inkling_jax.load(directory, mesh="tensor=2", **SIZES) as llm:
        engine = llm.engine
        run(engine, TEXT)
        for length in (17, 40, 64, 90):
            prompt = [*TEXT[:length], *OTHER]
            run(engine, prompt)
            tokens, state, began = run(engine, prompt)
            assert began == (len(prompt) - 1) // 16 * 16
            engine.scheduler.lose_all()
            cold, cold_state, cold_began = run(engine, prompt)
            assert cold_began == 0 and tokens == cold == run(alone.engine, prompt)[0]
            np.testing.assert_array_equal(state.view(np.int32), cold_state.view(np.int32))
        assert engine.prefix_statistics.hits >= 4
